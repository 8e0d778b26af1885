//go:build linux

package integration

import (
	"encoding/json"
	"errors"
	"fmt"
	"os/exec"
	"path/filepath"
	"testing"
)

// checkReport is what the test needs of the document that pgsplit check prints.
type checkReport struct {
	Servers []struct {
		Name      string
		Addresses []struct {
			Instances []struct {
				Pooler   bool
				ReadOnly string `json:"read_only"`
			}
		}
	}
	Findings []struct{ Name, Severity, Server string }
}

func TestCheckSeesPgBouncerAndWhatItDoesWithTheReadOnlyParameter(t *testing.T) {
	binary := findPgBouncer(t)
	if binary == "" {
		return
	}
	command := filepath.Join(t.TempDir(), "pgsplit")
	out, err := exec.CommandContext(t.Context(), "go", "build", "-o", command, "github.com/pgsplit/pgsplit/cmd/pgsplit").CombinedOutput()
	if err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	c := startCluster(t, 2)
	for name, settings := range bouncerSettings {
		t.Run(name, func(t *testing.T) {
			primary := pgBouncer(t, binary, settings, c.PrimaryURI())
			replicas := pgBouncer(t, binary, settings, c.ReplicaURI(0), c.ReplicaURI(1))
			out, err := exec.CommandContext(t.Context(), command, "check", "-json", "-timeout", "30s", primary, replicas+"&name=ro").Output()
			var exit *exec.ExitError
			if err != nil && (!errors.As(err, &exit) || exit.ExitCode() != 1) {
				t.Fatalf("%v\n%s", err, out)
			}
			var report checkReport
			must(t, json.Unmarshal(out, &report))
			found := map[string]string{}
			for _, f := range report.Findings {
				found[f.Name+" "+f.Server] = f.Severity
			}
			for _, s := range report.Servers {
				instances := s.Addresses[0].Instances
				if len(instances) != 1 {
					// Which of the replicas PgBouncer chose for a transaction may change, or not.
					t.Logf("%d instances behind %s", len(instances), s.Name)
				}
				for n, i := range instances {
					label := s.Name
					if len(instances) > 1 {
						label = fmt.Sprintf("%s #%d", s.Name, n+1)
					}
					// A PgBouncer that knows the parameter passes it on.
					want := "pooler-drops-read-only " + label
					if i.ReadOnly == "parameter" {
						want = "pooler " + label
					}
					if !i.Pooler || found[want] == "" {
						t.Errorf("%s: a pooler: %v, read only: %s, findings %v", label, i.Pooler, i.ReadOnly, found)
					}
				}
				if len(instances) == 0 {
					t.Errorf("nobody at %s", s.Name)
				}
			}
		})
	}
}
