package soak

import (
	"os/exec"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/pgsplit/pgsplit/pgsplittest"
)

// mutantRun is a run that brings one broken promise to light.
type mutantRun struct {
	rules   []Rule // one of which it has to break
	options Options
}

// lagging makes every commit late on the replicas.
func lagging(delay string) []pgsplittest.Option {
	return []pgsplittest.Option{pgsplittest.ReplicaSetting("recovery_min_apply_delay", delay)}
}

// brief is trouble that comes and goes quickly.
func brief(names ...string) Trouble {
	return Trouble{Faults: names, Hold: Span{20 * time.Millisecond, 100 * time.Millisecond}, Quiet: Span{20 * time.Millisecond, 60 * time.Millisecond}}
}

func doing(names ...string) Workload {
	w := Workload{Mix: map[string]int{}, Pace: 2 * time.Millisecond}
	for _, name := range names {
		w.Mix[name] = 1
	}
	return w
}

// mutantRuns has the runs by the names of the mutants in package pgsplit.
func mutantRuns() map[string]mutantRun {
	asynchronous := doing("session", "fork")
	asynchronous.Commit = []string{"off"}
	setbacks := brief("setback")
	setbacks.Backlog = 60
	promises := doing("floor", "promise")
	promises.Mix["promise"] = 8
	open := doing("open")
	open.Callers = 3
	// Long enough for the primary to be asked while the writes still wait.
	doubts := Trouble{Faults: []string{"doubt"}, Hold: Span{600 * time.Millisecond, 900 * time.Millisecond}}
	// Rare enough for the connections to be opened again in between.
	resets := Trouble{Faults: []string{"late-reset"}, Quiet: Span{300 * time.Millisecond, 500 * time.Millisecond}}
	return map[string]mutantRun{
		"position-per-address": {rules: []Rule{Floor}, options: Options{RoundRobin: true, Workload: doing("floor"), Trouble: brief("pause")}},
		"check-in-snapshot": {rules: []Rule{Floor, ReadYourWrites}, options: Options{Workload: doing("snapshot"), Trouble: brief("pause"),
			Settings: lagging("10ms")}},
		"flush-after-async":    {rules: []Rule{ReadYourWrites, MonotonicReads}, options: Options{Workload: asynchronous, Trouble: brief("pause")}},
		"last-writer-merge":    {rules: []Rule{ReadYourWrites}, options: Options{Workload: doing("fork"), Trouble: brief("pause"), Settings: lagging("10ms")}},
		"retry-sent-write":     {rules: []Rule{DoubleWrite}, options: Options{Workload: doing("write"), Trouble: resets}},
		"keep-after-restart":   {rules: []Rule{Floor}, options: Options{Workload: promises, Trouble: setbacks, Parameters: atOnce}},
		"null-caught-up":       {rules: []Rule{Floor}, options: Options{Workload: doing("floor"), Trouble: brief("promote")}},
		"floor-with-rows-open": {rules: []Rule{ReadYourWrites}, options: Options{Workload: open, Trouble: brief("pause"), Settings: lagging("30ms")}},
		"unpin-early":          {rules: []Rule{ReadYourWrites}, options: Options{Workload: doing("session"), Trouble: doubts, Settings: lagging("50ms")}},
	}
}

// atOnce has a replica that was lost read again at once, while it is still far behind.
const atOnce = "&replica_retry_min=1ms&replica_retry_max=5ms"

// TestEveryMutantIsCaught shows that the checker finds what it looks for.
func TestEveryMutantIsCaught(t *testing.T) {
	pgsplittest.NeedServer(t)
	worker := filepath.Join(t.TempDir(), "worker")
	build := exec.CommandContext(t.Context(), "go", "build", "-tags", "pgsplit_mutants", "-o", worker, "./worker")
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("%v: %v\n%s", build, err, out)
	}
	for name, m := range mutantRuns() {
		t.Run(name, func(t *testing.T) {
			t.Parallel() // a run mostly waits for its trouble, and is judged by no time
			o := m.options
			o.Seed, o.Duration, o.Early, o.Folder = 1, 5*time.Minute, true, t.TempDir()
			o.Command, o.Environment = []string{worker}, []string{"PGSPLIT_MUTANT=" + name}
			began := time.Now()
			verdict, err := Run(t.Context(), o)
			if err != nil {
				t.Fatal(err)
			}
			if len(verdict.Violations) == 0 {
				t.Fatalf("no violation in %v\n%s", o.Duration, verdict.Summary)
			}
			for _, v := range verdict.Violations {
				if !slices.Contains(m.rules, v.Rule) {
					t.Errorf("want a violation of %v only: %s", m.rules, v)
				}
			}
			t.Logf("%d violations after %v, one of them:\n%s", len(verdict.Violations), time.Since(began), verdict.Violations[0])
		})
	}
}
