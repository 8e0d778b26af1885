package soak

import (
	"fmt"
	"math/rand/v2"
	"os"
	"strconv"
	"testing"
	"time"

	"github.com/pgsplit/pgsplit/pgsplittest"
)

// TestMain makes this program a worker as well: the processes of a soak run the same code, under the race detector if the
// test does.
func TestMain(m *testing.M) {
	if IsWorker() {
		if err := Work(os.Stdin, os.Stdout); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	os.Exit(m.Run())
}

// fromEnvironment is a number that a variable holds, or otherwise.
func fromEnvironment(t *testing.T, name string, otherwise uint64) uint64 {
	t.Helper()
	text := os.Getenv(name)
	if text == "" {
		return otherwise
	}
	n, err := strconv.ParseUint(text, 10, 64)
	if err != nil {
		t.Fatalf("%s: %v", name, err)
	}
	return n
}

// soakSettings are those of a soak's cluster: a replica's reads get no time when they conflict with replay.
func soakSettings() []pgsplittest.Option {
	return []pgsplittest.Option{
		pgsplittest.Setting("max_connections", "100"),
		pgsplittest.ReplicaSetting("max_standby_streaming_delay", "0"),
	}
}

// TestSoak runs everything against everything for PGSPLIT_SOAK_SECONDS, half of it with an address for each replica and half
// with one for both. PGSPLIT_SOAK_SEED repeats a schedule.
func TestSoak(t *testing.T) {
	pgsplittest.NeedServer(t)
	seconds := fromEnvironment(t, "PGSPLIT_SOAK_SECONDS", 12)
	seed := fromEnvironment(t, "PGSPLIT_SOAK_SEED", rand.Uint64N(1_000_000))
	for _, variant := range []struct {
		name       string
		roundRobin bool
	}{{"two addresses", false}, {"one address", true}} {
		t.Run(variant.name, func(t *testing.T) {
			o := Options{
				Seed: seed, Duration: time.Duration(seconds) * time.Second / 2, RoundRobin: variant.roundRobin,
				Workload: Workload{Commit: []string{"on", "off", "local"}},
				Trouble:  Trouble{Overlap: true, Calm: Span{4 * time.Second, 5 * time.Second}},
				Settings: soakSettings(),
				Rules:    soakRules(variant.roundRobin),
			}
			soak(t, o)
		})
	}
}

// soakRules are what a soak is judged by.
func soakRules(roundRobin bool) Rules {
	rules := Rules{Liveness: true, Recovery: 3 * time.Second, Served: 3 * time.Second, ReplicaShare: 0.9, EachShare: 0.25, ShareOf: 200}
	if roundRobin {
		rules.EachShare = 0 // it is not pgsplit that deals the connections out
	}
	return rules
}

// soak runs and reports. The history of a run with violations stays.
func soak(t *testing.T, o Options) {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	o.Command = []string{self}
	if o.Folder, err = os.MkdirTemp("", "pgsplit-soak-"); err != nil {
		t.Fatal(err)
	}
	t.Logf("seed %d for %v: PGSPLIT_SOAK_SEED=%d repeats the schedule", o.Seed, o.Duration, o.Seed)
	verdict, err := Run(t.Context(), o)
	if err != nil {
		t.Fatalf("the run failed (histories in %s): %v", o.Folder, err)
	}
	t.Logf("seed %d, %d violations\n%s", o.Seed, len(verdict.Violations), verdict.Summary)
	if len(verdict.Violations) == 0 {
		if err := os.RemoveAll(o.Folder); err != nil {
			t.Error(err)
		}
		return
	}
	for _, v := range verdict.Violations[:min(3, len(verdict.Violations))] {
		t.Errorf("%s", v)
	}
	t.Errorf("%d violations; the history is in %s", len(verdict.Violations), o.Folder)
}
