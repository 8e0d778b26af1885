package soak

import (
	"context"
	"maps"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgsplit/pgsplit/pgsplittest"
)

// newNemesis starts a cluster like a soak's, with its tables.
func newNemesis(t *testing.T) (*nemesis, *[]Fault) {
	t.Helper()
	cluster := pgsplittest.Start(t, append(soakSettings(), pgsplittest.Replicas(2))...)
	r := &run{Options: Options{Workload: Workload{Keys: 2}}, cluster: cluster}
	if err := r.prepare(t.Context()); err != nil {
		t.Fatal(err)
	}
	var mu sync.Mutex
	var done []Fault
	return &nemesis{
		cluster: cluster, clock: newClock(), rand: rand.New(rand.NewPCG(1, 2)),
		announce: func(string) {},
		record: func(f Fault) {
			mu.Lock()
			defer mu.Unlock()
			done = append(done, f)
		},
	}, &done
}

// wantWell checks that all servers answer by way of their proxies, and that the replicas follow.
func wantWell(t *testing.T, n *nemesis) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	for _, s := range n.cluster.Servers() {
		conn, err := pgx.Connect(ctx, s.ProxyURI())
		if err != nil {
			t.Fatalf("%s: %v", s.Name(), err)
		}
		var paused bool
		err = conn.QueryRow(ctx, "select case when pg_is_in_recovery() then pg_is_wal_replay_paused() else false end").Scan(&paused)
		if err != nil || paused {
			t.Errorf("%s: replay is paused: %v, %v", s.Name(), paused, err)
		}
		if err := conn.Close(ctx); err != nil {
			t.Errorf("%s: %v", s.Name(), err)
		}
	}
	if err := n.cluster.CatchUp(ctx); err != nil {
		t.Error(err)
	}
}

func TestEveryFaultLeavesAllServersWell(t *testing.T) {
	n, done := newNemesis(t)
	for _, name := range slices.Sorted(maps.Keys(faults)) {
		if name == "promote" {
			continue // which cannot be undone
		}
		t.Run(name, func(t *testing.T) {
			n.commit(t.Context(), name, n.choose(faults[name].on, nil), 50*time.Millisecond)
			last := (*done)[len(*done)-1]
			if last.Kind != name || last.Error != "" || last.End <= last.Start || len(last.Servers) == 0 {
				t.Errorf("recorded as %+v", last)
			}
			wantWell(t, n)
		})
	}
}

// TestARunThatEndsUndoesItsFault stops the nemesis in the middle of a fault.
func TestARunThatEndsUndoesItsFault(t *testing.T) {
	n, done := newNemesis(t)
	n.plan = Trouble{Faults: []string{"kill", "cut", "pause"}, Hold: Span{time.Minute, time.Minute}, Overlap: true}
	ctx, cancel := context.WithTimeout(t.Context(), 500*time.Millisecond)
	defer cancel()
	n.run(ctx)
	if len(*done) == 0 {
		t.Error("no fault was recorded")
	}
	wantWell(t, n)
}

func TestASeedRepeatsASchedule(t *testing.T) {
	n, _ := newNemesis(t)
	schedule := func() []string {
		n.rand = rand.New(rand.NewPCG(7, 0))
		var names []string
		for range 50 {
			for _, s := range n.choose(anyone, nil).servers {
				names = append(names, s.Name())
			}
		}
		return names
	}
	if first, second := schedule(), schedule(); !slices.Equal(first, second) {
		t.Errorf("one seed, two schedules:\n%v\n%v", first, second)
	}
}
