package pgsplit_test

import (
	"context"
	"database/sql"
	"math"
	"runtime"
	"slices"
	"testing"
	"time"

	_ "github.com/jackc/pgx/v5/stdlib"

	"github.com/pgsplit/pgsplit"
	"github.com/pgsplit/pgsplit/pgsplittest"
)

// What a statement may allocate over what it allocates with raw pgx.
const (
	allowedAllocations = 2
	allowedBytes       = 200
)

// duel is the same statement by raw pgx and by pgsplit, on the same server over its unix socket, so that as little as
// possible of the time is anything else.
type duel struct {
	name         string
	raw, pgsplit func() error
	reconnect    func() // has both connect anew for their next statement
}

// duels starts a cluster and warms everything up.
func duels(t testing.TB) []duel {
	t.Helper()
	cluster := pgsplittest.Start(t)
	// Benchmarks run for minutes; that it could be cancelled costs pgx something, as in any program.
	ctx, cancel := context.WithCancel(context.Background())
	t.Cleanup(cancel)
	primary, replica := cluster.Primary.SocketURI(), cluster.Replicas[0].SocketURI()
	rawPrimary, rawReplica, db := openRaw(t, primary), openRaw(t, replica), open(t, primary+" "+replica)
	floor := pgsplit.WithLSN(ctx, commitLSN(t, ctx, db))
	if err := cluster.CatchUp(ctx); err != nil {
		t.Fatal(err)
	}
	one := func(ctx context.Context, db *sql.DB) func() error {
		var n int
		return func() error { return db.QueryRowContext(ctx, "select 1").Scan(&n) }
	}
	reconnect := func() {
		for _, db := range []*sql.DB{rawPrimary, rawReplica, db} {
			db.SetMaxIdleConns(-1)
			db.SetMaxIdleConns(2)
		}
	}
	return []duel{
		{"unhinted", one(ctx, rawPrimary), one(ctx, db), reconnect},
		{"read-only", one(ctx, rawReplica), one(pgsplit.ReadOnly(ctx), db), reconnect},
		{"floor-known", one(ctx, rawReplica), one(pgsplit.ReadOnly(floor, pgsplit.ReplicaOnly()), db), reconnect},
	}
}

// allocations is what one run of the statement allocates: the least of several rounds, since others allocate as well.
func allocations(t testing.TB, statement func() error) (count, bytes float64) {
	t.Helper()
	const runs = 200
	round := func() (count, bytes float64) {
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		for range runs {
			if err := statement(); err != nil {
				t.Fatal(err)
			}
		}
		runtime.ReadMemStats(&after)
		return float64(after.Mallocs-before.Mallocs) / runs, float64(after.TotalAlloc-before.TotalAlloc) / runs
	}
	round() // connections, caches, pools
	count, bytes = round()
	for range 4 {
		c, b := round()
		count, bytes = min(count, c), min(bytes, b)
	}
	return count, bytes
}

func TestAStatementAllocatesHardlyMoreThanRawPgx(t *testing.T) {
	for _, d := range duels(t) {
		count, bytes := allocations(t, d.raw)
		c, b := allocations(t, d.pgsplit)
		t.Logf("%s: %.1f allocations and %.0f bytes over raw pgx's %.1f and %.0f", d.name, c-count, b-bytes, count, bytes)
		// Half an allocation is what the rounds may differ by.
		if c > count+allowedAllocations+0.5 || b > bytes+allowedBytes {
			t.Errorf("%s: %.1f allocations and %.0f bytes a statement, raw pgx has %.1f and %.0f", d.name, c, b, count, bytes)
		}
	}
}

// timed is how long one run takes.
func timed(b *testing.B, statement func() error) time.Duration {
	b.Helper()
	start := time.Now()
	if err := statement(); err != nil {
		b.Fatal(err)
	}
	return time.Since(start)
}

// median is what a run takes when nothing comes in between.
func median(took []time.Duration) float64 {
	slices.Sort(took)
	return float64(took[len(took)/2])
}

// BenchmarkStatement times a statement by both drivers in turn, one run of each, so that whatever else the machine does
// hits both alike. Each sub-benchmark reports the runs of one of them; its ns/op is their median.
//
//	make bench BENCH=Statement BENCH_COUNT=10 >new.txt; benchstat -col /impl new.txt
func BenchmarkStatement(b *testing.B) {
	for _, d := range duels(b) {
		for _, impl := range []string{"raw", "pgsplit"} {
			b.Run("case="+d.name+"/impl="+impl, func(b *testing.B) {
				mine, other := d.raw, d.pgsplit
				if impl == "pgsplit" {
					mine, other = other, mine
				}
				var took []time.Duration
				for b.Loop() {
					timed(b, other)
					took = append(took, timed(b, mine))
				}
				count, bytes := allocations(b, mine)
				b.ReportMetric(median(took), "ns/op")
				b.ReportMetric(count, "allocs/op")
				b.ReportMetric(bytes, "B/op")
			})
		}
	}
}

// allowedRatio is how much longer than raw pgx a statement may take, as far as so many rounds can tell.
const (
	allowedRatio  = 1.05
	tellingRounds = 20
)

// BenchmarkPair times both in one loop, each as often first as second, and reports how much longer pgsplit takes, as
// the ratio of the medians. Two connections of one driver differ by some per cent for as long as they live, so both connect
// anew for each round: what is reported is the median of the rounds, and the bounds of its 95 % interval. It
// fails if all of that is too high.
//
//	make bench BENCH=Pair BENCH_TIME=120x
func BenchmarkPair(b *testing.B) {
	const warmUp, statements = 50, 400
	for _, d := range duels(b) {
		b.Run("case="+d.name, func(b *testing.B) {
			var ratios []float64
			for b.Loop() {
				d.reconnect()
				first, second := d.raw, d.pgsplit
				if len(ratios)%2 == 1 {
					first, second = second, first
				}
				for range warmUp {
					timed(b, first)
					timed(b, second)
				}
				var raw, split []time.Duration
				for range statements {
					raw = append(raw, timed(b, d.raw))
					split = append(split, timed(b, d.pgsplit), timed(b, d.pgsplit))
					raw = append(raw, timed(b, d.raw))
				}
				ratios = append(ratios, median(split)/median(raw))
			}
			low, middle, high := medianWithin(ratios)
			b.ReportMetric(low, "pgsplit/raw-low")
			b.ReportMetric(middle, "pgsplit/raw")
			b.ReportMetric(high, "pgsplit/raw-high")
			if len(ratios) >= tellingRounds && low > allowedRatio {
				b.Errorf("pgsplit takes %.3f times as long as raw pgx (%.3f to %.3f), above %.2f", middle, low, high, allowedRatio)
			}
		})
	}
}

// medianWithin is the median of the values, and the bounds of its 95 % interval, by their ranks. There are at least one.
func medianWithin(values []float64) (low, middle, high float64) {
	slices.Sort(values)
	n := len(values)
	off := int(math.Ceil(0.98 * math.Sqrt(float64(n))))
	return values[max((n-1)/2-off, 0)], values[n/2], values[min(n/2+off, n-1)]
}

func TestTheIntervalOfAMedianIsItsRanks(t *testing.T) {
	for _, n := range []int{1, 2, 9, 100, 101} {
		var values []float64
		for i := range n {
			values = append(values, float64((i*37)%n)) // 0 to n-1 in some order: they have no factor in common
		}
		low, middle, high := medianWithin(values)
		want := map[int][3]float64{1: {0, 0, 0}, 2: {0, 1, 1}, 9: {1, 4, 7}, 100: {39, 50, 60}, 101: {40, 50, 60}}[n]
		if got := [3]float64{low, middle, high}; got != want {
			t.Errorf("of %d values: %v, want %v", n, got, want)
		}
	}
}
