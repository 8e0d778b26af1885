package pgsplit

import (
	"context"
	"runtime"
	"testing"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgsplit/pgsplit/pgsplittest"
)

// decisions are the requests that programs make most.
var decisions = map[string]request{
	"unhinted":    {},
	"read-only":   {readOnly: true},
	"floor":       {readOnly: true, floor: 1000},
	"stale":       {readOnly: true, floor: 5000},
	"round-robin": {readOnly: true, roundRobin: true},
	"preferred":   {readOnly: true, prefer: "far"},
}

var fourReplicas = []view{
	{label: "near", weight: 1, position: 2000, inUse: 3},
	{label: "near", weight: 2, position: 900, inUse: 1},
	{label: "far", weight: 1, position: 2000},
	{label: "far", weight: 1, position: 2000, state: down},
}

func TestTheDecisionAllocatesNothing(t *testing.T) {
	for name, r := range decisions {
		if n := testing.AllocsPerRun(1000, func() { r.turn++; next(&r, fourReplicas, progress{}) }); n != 0 {
			t.Errorf("%s: %v allocations", name, n)
		}
	}
}

// leasing returns a function that leases a warm connection for ctx and gives it back, and one that only gives it back.
func leasing(t testing.TB, c *Connector, ctx context.Context) (once, giveBack func()) {
	t.Helper()
	shell, err := c.Connect(ctx)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = shell.Close() })
	conn := shell.(*Conn)
	var way course
	take := func() {
		way = course{} // that of a new statement
		if _, err := conn.take(ctx, hintOf(ctx), work{}, &way); err != nil {
			panic(err)
		}
	}
	take()
	once = func() {
		take()
		conn.release()
	}
	return once, conn.release
}

// leasings are the contexts under which a warm lease costs nothing but the decision. shouldPing is a hook of the pools, or nil:
// where hooks have a say, leases go another way.
func leasings(t testing.TB, shouldPing func(context.Context, pgxpool.ShouldPingParams) bool) (*Connector, map[string]context.Context) {
	t.Helper()
	cluster := pgsplittest.Start(t)
	config, err := ParseDSN(cluster.DSN())
	if err != nil {
		t.Fatal(err)
	}
	config.Primary.ShouldPing, config.Replicas[0].Pool.ShouldPing = shouldPing, shouldPing
	c, err := NewConnector(config)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close() })
	ctx := context.Background()
	return c, map[string]context.Context{
		"unhinted":    ctx,
		"read-only":   ReadOnly(ctx),
		"floor-known": ReadOnly(WithLSN(ctx, 1)),
	}
}

// neverPing is a ShouldPing: connections that are at rest for a second while others are leased would be pinged.
func neverPing(context.Context, pgxpool.ShouldPingParams) bool { return false }

func TestLeasingAWarmConnectionAllocatesNothing(t *testing.T) {
	for hook, shouldPing := range map[string]func(context.Context, pgxpool.ShouldPingParams) bool{"no hook": nil, "a hook": neverPing} {
		c, contexts := leasings(t, shouldPing)
		for name, ctx := range contexts {
			once, giveBack := leasing(t, c, ctx)
			giveBack()
			if n := testing.AllocsPerRun(1000, once); n != 0 {
				t.Errorf("%s, %s: %v allocations", name, hook, n)
			}
		}
	}
}

// atOnce is how many goroutines decide at the same time.
const atOnce = 64

// inParallel runs each function on a goroutine of its own, and fails if they allocate.
func inParallel(b *testing.B, runs []func()) {
	b.Helper()
	ready := make(chan func(), len(runs))
	for _, run := range runs {
		ready <- run
	}
	var before, after runtime.MemStats
	b.SetParallelism(max(len(runs)/runtime.GOMAXPROCS(0), 1))
	b.ReportAllocs()
	b.ResetTimer()
	runtime.ReadMemStats(&before)
	b.RunParallel(func(pb *testing.PB) {
		select {
		case run := <-ready:
			for pb.Next() {
				run()
			}
		default: // more processors than functions
		}
	})
	runtime.ReadMemStats(&after)
	// The goroutines themselves allocate a little, which does not count once there are many runs.
	if n := after.Mallocs - before.Mallocs; b.N > 200*len(runs) && n > uint64(b.N)/20 {
		b.Errorf("%d allocations in %d runs", n, b.N)
	}
}

func BenchmarkDecision(b *testing.B) {
	for name, r := range decisions {
		b.Run("case="+name, func(b *testing.B) {
			var runs []func()
			for range atOnce {
				r := r
				runs = append(runs, func() { r.turn++; next(&r, fourReplicas, progress{}) })
			}
			inParallel(b, runs)
		})
	}
}

func BenchmarkLease(b *testing.B) {
	c, contexts := leasings(b, nil)
	for name, ctx := range contexts {
		b.Run("case="+name, func(b *testing.B) {
			var runs, giveBack []func()
			for range atOnce {
				once, back := leasing(b, c, ctx)
				runs, giveBack = append(runs, once), append(giveBack, back)
			}
			// Only now, so that there are as many connections as can be needed at once.
			for _, back := range giveBack {
				back()
			}
			inParallel(b, runs)
		})
	}
}

// What is told, to whoever wants to know, costs nothing where nobody is told, and a hook costs what the hook does.
func TestADecisionIsToldWithoutAnAllocation(t *testing.T) {
	c, contexts := leasings(t, nil)
	var heard int
	for name, ctx := range contexts {
		for _, hook := range []func(context.Context, Decision){nil, func(context.Context, Decision) { heard++ }} {
			c.config.OnDecision = hook
			shell, err := c.Connect(ctx)
			if err != nil {
				t.Fatal(err)
			}
			conn := shell.(*Conn)
			tell := func() {
				var way course
				if _, err := conn.take(ctx, hintOf(ctx), work{}, &way); err != nil {
					panic(err)
				}
				if conn.telling(ctx) != ctx {
					panic("the context is another one")
				}
				conn.release()
			}
			if tell(); testing.AllocsPerRun(1000, tell) != 0 {
				t.Errorf("%s, with a hook %v: allocations", name, hook != nil)
			}
			if err := shell.Close(); err != nil {
				t.Fatal(err)
			}
		}
	}
	if heard != 3*1002 {
		t.Errorf("%d decisions were told", heard)
	}
}
