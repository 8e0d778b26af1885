package debugpage_test

import (
	"context"
	"encoding/json"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/pgsplit/pgsplit"
	"github.com/pgsplit/pgsplit/debugpage"
	"github.com/pgsplit/pgsplit/pgsplittest"
)

// until waits for what servers do in their own time.
func until(t *testing.T, what string, done func() bool) {
	t.Helper()
	deadline := time.After(time.Minute)
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for !done() {
		select {
		case <-tick.C:
		case <-deadline:
			t.Fatalf("not after a minute: %s", what)
		}
	}
}

// health is what the page's JSON says of one server.
func health(t *testing.T, h http.Handler, server int) pgsplit.ServerHealth {
	t.Helper()
	var report struct {
		Health struct {
			Servers []pgsplit.ServerHealth `json:"servers"`
		} `json:"health"`
	}
	body := get(h, "/?format=json&health=1").Body.Bytes()
	if err := json.Unmarshal(body, &report); err != nil || len(report.Health.Servers) <= server {
		t.Fatalf("%v: %s", err, body)
	}
	return report.Health.Servers[server]
}

func TestThePageTellsWhichReplicaLagsAndWhichIsDown(t *testing.T) {
	cluster := pgsplittest.Start(t, pgsplittest.Replicas(2))
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
	defer cancel()
	config, err := pgsplit.ParseDSN(cluster.DSN())
	if err != nil {
		t.Fatal(err)
	}
	config.Replicas[0].Name, config.Replicas[1].Name = "slow", "gone"
	config.ReplicaTimeout = 20 * time.Second
	db := openDB(t, config)
	h := debugpage.Handler(db)
	run := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	run(cluster.CatchUp(ctx))
	until(t, "nobody lags", func() bool { return health(t, h, 1).LagBytes == 0 && health(t, h, 2).LagBytes == 0 })
	if _, text := elements(t, get(h, "/").Body.Bytes()); !strings.Contains(text, "up to date") || !strings.Contains(text, "pgsplit ok") {
		t.Errorf("while all is well the page says %s", text)
	}

	run(cluster.Replicas[0].PauseReplay(ctx))
	_, err = db.ExecContext(ctx, "create table t as select generate_series(1, 1000)")
	run(err)
	until(t, "the paused one lags", func() bool { return health(t, h, 1).LagBytes > 0 })
	run(cluster.Replicas[1].Stop(ctx, pgsplittest.Fast))
	until(t, "the stopped one is down", func() bool { return health(t, h, 2).State == "down" })

	page := get(h, "/").Body.Bytes()
	names, text := elements(t, page)
	for _, want := range []string{"pgsplit degraded", "kB behind", "connection refused", "down for ", "Behind the primary", "unhinted"} {
		if !strings.Contains(text, want) {
			t.Errorf("the page does not say %q: %s", want, text)
		}
	}
	if names["svg"] < 4 || names["rect"] == 0 {
		t.Errorf("graphs and bars: %v", names)
	}
	// A sample before it was stopped, and one after it.
	var report struct {
		Samples []struct {
			Servers []struct {
				Reachable bool
				LagBytes  *int64 `json:"lag_bytes"`
			}
		}
	}
	run(json.Unmarshal(get(h, "/?format=json").Body.Bytes(), &report))
	first, last := report.Samples[0].Servers, report.Samples[len(report.Samples)-1].Servers
	if !first[2].Reachable || last[2].Reachable || last[2].LagBytes != nil || last[1].LagBytes == nil || *last[1].LagBytes <= 0 {
		t.Errorf("samples %+v", report.Samples)
	}
	run(db.Close())
	// TestMain sees that nothing is left running.
}
