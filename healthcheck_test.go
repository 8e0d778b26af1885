package pgsplit_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/pgsplit/pgsplit"
	"github.com/pgsplit/pgsplit/pgsplittest"
)

// status checks what Health says of the whole, and returns it.
func status(t testing.TB, h pgsplit.Health, want string) pgsplit.Health {
	t.Helper()
	if got := fmt.Sprintf("%s %v %v", h.Status, h.Readable, h.Writable); got != want {
		text, _ := json.MarshalIndent(h, "", "  ")
		t.Errorf("%s, want %s: %s", got, want, text)
	}
	return h
}

func TestHealthTellsHowEachServerIs(t *testing.T) {
	cluster := pgsplittest.Start(t, pgsplittest.Replicas(2))
	ctx := patient(t)
	dsn := strings.ReplaceAll(cluster.DSN(), "//postgres@", "//postgres:t0p-secret@") + "&label=far"
	if !strings.Contains(dsn, "t0p-secret") {
		t.Fatalf("no password in %s", dsn)
	}
	db := open(t, with(dsn, "replica_timeout=20s", "replica_retry_max=250ms"))
	c := connectorOf(t, db)

	// Before anything else was asked, and without a connection of the program's.
	h := status(t, c.Health(ctx), "ok true true")
	for i, s := range h.Servers {
		role := "replica"
		if i == 0 {
			role = "primary"
		}
		if s.Role != role || s.Seen != role || !s.Reachable || s.State != "healthy" || s.Error != "" || s.Cause != "" ||
			s.Timeline != 1 || s.Position == 0 || s.RoundTrip <= 0 || s.Open != 0 || s.Staleness < 0 && i == 0 {
			t.Errorf("%+v", s)
		}
	}
	if h.Servers[2].Label != "far" {
		t.Errorf("label %q", h.Servers[2].Label)
	}

	t.Run("Lag", func(t *testing.T) {
		warm(t, ctx, db)
		eventually(t, "nobody lags", func() bool {
			h := status(t, c.Health(ctx), "ok true true")
			return h.Servers[1].LagBytes == 0 && h.Servers[1].Staleness >= 0 && h.Servers[2].Staleness >= 0
		})
		if err := cluster.Replicas[0].PauseReplay(ctx); err != nil {
			t.Fatal(err)
		}
		before := c.Health(ctx).Servers[1]
		runSQL(t, ctx, cluster, "create table t as select generate_series(1, 1000)")
		h := status(t, c.Health(ctx), "ok true true")
		after := h.Servers[1]
		if after.LagBytes <= 0 || after.Staleness <= 0 || after.Position != before.Position || h.Servers[0].LagBytes != 0 {
			t.Errorf("%+v after %+v", after, before)
		}
		if s := c.Stats().Servers[1]; s.Position != after.Position || s.PositionAt.IsZero() || s.Label != "" || s.Idle != s.Open {
			t.Errorf("%+v", s)
		}
		if err := cluster.Replicas[0].ResumeReplay(ctx); err != nil {
			t.Fatal(err)
		}
		eventually(t, "it has caught up", func() bool { return c.Health(ctx).Servers[1].LagBytes == 0 })
	})

	t.Run("JSON", func(t *testing.T) {
		text, err := json.Marshal(c.Health(ctx))
		if err != nil {
			t.Fatal(err)
		}
		var report struct {
			Status   string
			Servers  []map[string]any
			Readable bool
		}
		if err := json.Unmarshal(text, &report); err != nil {
			t.Fatal(err)
		}
		for _, name := range []string{"name", "role", "state", "reachable", "seen", "timeline", "position", "lag_bytes",
			"staleness_seconds", "round_trip_seconds", "open", "in_use", "idle"} {
			if _, ok := report.Servers[1][name]; !ok {
				t.Errorf("no %s in %s", name, text)
			}
		}
		for name := range report.Servers[1] {
			if strings.ToLower(name) != name {
				t.Errorf("%s in %s", name, text)
			}
		}
	})

	t.Run("AReplicaDown", func(t *testing.T) {
		if err := cluster.Replicas[0].Stop(ctx, pgsplittest.Fast); err != nil {
			t.Fatal(err)
		}
		h := status(t, c.Health(ctx), "degraded true true")
		if s := h.Servers[1]; s.Reachable || s.Seen != "" || s.Error == "" || s.State != "down" || s.Cause == "" || s.Since.IsZero() ||
			s.LagBytes != -1 || s.Staleness >= 0 {
			t.Errorf("%+v", s)
		}
		text, err := json.Marshal(h)
		if err != nil || strings.Contains(string(text), "t0p-secret") {
			t.Errorf("%v %s", err, text)
		}
		if err := cluster.Replicas[0].Start(ctx); err != nil {
			t.Fatal(err)
		}
		// The look itself readmits it.
		if s := status(t, c.Health(ctx), "ok true true").Servers[1]; s.State != "healthy" {
			t.Errorf("%+v", s)
		}
	})

	t.Run("AReplicaThatIsNoneAnyMore", func(t *testing.T) {
		if err := cluster.Replicas[1].Promote(ctx); err != nil {
			t.Fatal(err)
		}
		if s := status(t, c.Health(ctx), "degraded true true").Servers[2]; s.Seen != "primary" || s.Timeline != 2 {
			t.Errorf("%+v", s)
		}
	})

	t.Run("ThePrimaryDown", func(t *testing.T) {
		if err := cluster.Primary.Stop(ctx, pgsplittest.Immediate); err != nil {
			t.Fatal(err)
		}
		if s := status(t, c.Health(ctx), "degraded true false").Servers[1]; !s.Reachable || s.LagBytes != -1 {
			t.Errorf("%+v", s)
		}
		for _, r := range cluster.Replicas {
			if err := r.Stop(ctx, pgsplittest.Immediate); err != nil {
				t.Fatal(err)
			}
		}
		status(t, c.Health(ctx), "down false false")
	})
}

func TestHealthOfASilentServerEndsWithItsContextAndHoldsNothingAgainstAnybody(t *testing.T) {
	cluster := pgsplittest.Start(t, pgsplittest.Replicas(1))
	ctx := patient(t)
	before := goleak.IgnoreCurrent()
	db := open(t, with(cluster.ProxyDSN(), "replica_timeout=20s"))
	c := connectorOf(t, db)
	warm(t, ctx, db)
	status(t, c.Health(ctx), "ok true true")
	front := cluster.Replicas[0].Proxy()
	accepted := front.Accepted()
	front.BlackHole()
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			short, cancel := context.WithTimeout(ctx, 300*time.Millisecond)
			defer cancel()
			s := status(t, c.Health(short), "degraded true true").Servers[1]
			if s.Reachable || s.State != "healthy" || !strings.Contains(s.Error, context.DeadlineExceeded.Error()) {
				t.Errorf("%+v", s)
			}
		})
	}
	wg.Wait()
	if n := front.Accepted() - accepted; n != 1 {
		t.Errorf("%d connections for one look", n)
	}
	over, cancel := context.WithCancel(ctx)
	cancel()
	if h := c.Health(over); h.Servers[1].Reachable || !strings.Contains(h.Servers[1].Error, context.Canceled.Error()) {
		t.Errorf("%+v", h)
	}
	if s := c.Stats().Servers[1]; s.State != "healthy" || s.Cause != nil || s.Probes != 0 || s.Errors["connect"] != 0 {
		t.Errorf("%+v", s)
	}
	if err := db.Close(); err != nil {
		t.Fatal(err)
	}
	h := status(t, c.Health(ctx), "down false false")
	for _, s := range h.Servers {
		if s.Reachable || s.Error == "" {
			t.Errorf("after Close: %+v", s)
		}
	}
	front.Restore()
	goleak.VerifyNone(t, before)
}

func TestHealthDoesNotWaitForADialerThatDoesNotEnd(t *testing.T) {
	config, err := pgsplit.ParseDSN("postgres://u@127.0.0.1:1/x?replica_timeout=50ms")
	if err != nil {
		t.Fatal(err)
	}
	release := make(chan struct{})
	config.Primary.ConnConfig.DialFunc = func(context.Context, string, string) (net.Conn, error) {
		<-release
		return nil, errors.New("released")
	}
	c, err := pgsplit.NewConnector(config)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	told := make(chan pgsplit.Health, 1)
	go func() { told <- c.Health(context.Background()) }()
	select {
	case h := <-told:
		if s := status(t, h, "down false false").Servers[0]; s.Reachable || s.Error == "" {
			t.Errorf("%+v", s)
		}
	case <-time.After(time.Minute):
		t.Error("it waits")
	}
	close(release)
	eventually(t, "the look has ended", func() bool { return strings.Contains(c.Health(t.Context()).Servers[0].Error, "released") })
}

func TestALookThatGetsNoAnswerHasTheServerProbed(t *testing.T) {
	cluster := pgsplittest.Start(t, pgsplittest.Replicas(1))
	ctx := patient(t)
	db := open(t, with(cluster.ProxyDSN(), "replica_timeout=200ms"))
	c := connectorOf(t, db)
	conn := hold(t, ctx, db) // so that probes go on
	exec(t, ctx, conn, "select 1")
	cluster.Replicas[0].Proxy().BlackHole()
	eventually(t, "the replica alone does not answer", func() bool {
		h := c.Health(ctx)
		return h.Status == "degraded" && h.Servers[0].Reachable && !h.Servers[1].Reachable && h.Servers[1].Error != ""
	})
	eventually(t, "the probe has told", func() bool { return c.Stats().Servers[1].State == "down" })
	cluster.Replicas[0].Proxy().Restore()
	eventually(t, "it is well again", func() bool { return c.Health(ctx).Status == "ok" })
}

func TestAServerThatOnlyRefusesNewConnectionsGoesOnWithThoseAtHand(t *testing.T) {
	cluster := pgsplittest.Start(t, pgsplittest.Replicas(1))
	ctx := patient(t)
	limit := func(sql string) {
		runSQL(t, ctx, cluster, sql)
		if err := cluster.CatchUp(ctx); err != nil {
			t.Fatal(err)
		}
	}
	limit("create role app login connection limit 1")
	db := open(t, with(pgsplittestUser(cluster.Primary.URI(), "app"), "replica_timeout=20s")+
		pgsplittestUser(cluster.Replicas[0].URI(), "app"))
	c := connectorOf(t, db)
	warm(t, ctx, db)
	for _, s := range status(t, c.Health(ctx), "degraded true true").Servers {
		if s.Reachable || s.State != "refusing" || s.Open != 1 || !strings.Contains(s.Error, "53300") {
			t.Errorf("%+v", s)
		}
	}
	for _, s := range c.Stats().Servers {
		if s.Errors["too_many"] == 0 || s.Errors["connect"] != 0 {
			t.Errorf("%s: %v", s.Name, s.Errors)
		}
	}
	want(t, ctx, db, inRecovery, "false")
	want(t, pgsplit.ReadOnly(ctx), db, inRecovery, "true")
	limit("alter role app connection limit 10")
	eventually(t, "there is room", func() bool { return c.Health(ctx).Status == "ok" })
}
