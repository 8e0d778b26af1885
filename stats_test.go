package pgsplit

import (
	"context"
	"database/sql"
	"fmt"
	"math/rand/v2"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgsplit/pgsplit/pgsplittest"
)

// serverCount counts, below the driver, what pgx sends to one server.
type serverCount struct {
	name      string
	reasons   [reasonCount]atomic.Int64 // statements and BEGINs by what DecisionFrom says
	begins    atomic.Int64
	inTx      atomic.Int64 // statements inside transactions
	unmatched atomic.Int64 // without a decision, or with one for another server
}

func (s *serverCount) TraceQueryStart(ctx context.Context, _ *pgx.Conn, data pgx.TraceQueryStartData) context.Context {
	d, ok := DecisionFrom(ctx)
	switch {
	case !ok || d.Server != s.name:
		s.unmatched.Add(1)
	case data.SQL == "commit" || data.SQL == "rollback":
	default:
		s.reasons[d.Reason].Add(1)
		if strings.HasPrefix(data.SQL, "begin") {
			s.begins.Add(1)
		}
		if d.Reason == ReasonInTx {
			s.inTx.Add(1)
		}
	}
	return ctx
}

func (s *serverCount) TraceQueryEnd(context.Context, *pgx.Conn, pgx.TraceQueryEndData) {}

func (s *serverCount) sum() (n int64) {
	for i := range s.reasons {
		n += s.reasons[i].Load()
	}
	return n
}

// mixture makes calls of every kind and counts them.
type mixture struct {
	db     *sql.DB
	calls  atomic.Int64 // statements and transactions
	asked  atomic.Int64 // CommitLSN
	failed atomic.Pointer[error]
}

// one makes some calls under contexts that are made from ctx.
func (m *mixture) one(ctx context.Context, r *rand.Rand) (err error) {
	var n int
	id := r.IntN(counters)
	write := func(ctx context.Context, q interface {
		ExecContext(context.Context, string, ...any) (sql.Result, error)
	}) error {
		m.calls.Add(1)
		_, err := q.ExecContext(ctx, "update counters set value = value + 1 where id = $1", id)
		return err
	}
	read := func(ctx context.Context, q interface {
		QueryRowContext(context.Context, string, ...any) *sql.Row
	}) error {
		m.calls.Add(1)
		return q.QueryRowContext(ctx, "select value from counters where id = $1", id).Scan(&n)
	}
	within := func(ctx context.Context, opts *sql.TxOptions, end func(*sql.Tx) error, do ...func(*sql.Tx) error) error {
		m.calls.Add(1)
		tx, err := m.db.BeginTx(ctx, opts)
		if err != nil {
			return err
		}
		for _, f := range do {
			if err := f(tx); err != nil {
				return err
			}
		}
		return end(tx)
	}
	inRead := func(tx *sql.Tx) error { return read(ctx, tx) }
	inWrite := func(tx *sql.Tx) error { return write(ctx, tx) }
	switch r.IntN(9) {
	case 0:
		return write(ctx, m.db)
	case 1:
		return read(ctx, m.db)
	case 2:
		return read(Primary(ctx), m.db)
	case 3, 4:
		return read(ReadOnly(ctx), m.db)
	case 5:
		m.asked.Add(1)
		lsn, err := CommitLSN(ctx, m.db)
		if err != nil {
			return err
		}
		if err := read(ReadOnly(WithLSN(ctx, lsn)), m.db); err != nil {
			return err
		}
		return read(ReadOnly(WithLSN(ctx, lsn), MaxWait(time.Minute)), m.db)
	case 6:
		session := WithSession(ctx, NewSession())
		if err := write(session, m.db); err != nil {
			return err
		}
		return read(ReadOnly(session), m.db)
	case 7:
		return within(ctx, nil, (*sql.Tx).Commit, inWrite, inRead)
	}
	if r.IntN(2) == 0 {
		return within(ctx, nil, (*sql.Tx).Rollback, inWrite)
	}
	return within(ReadOnly(ctx), nil, (*sql.Tx).Commit, inRead, inRead)
}

// transactionsAt is what the server itself counted in the database of the test, asked from another one.
func transactionsAt(t *testing.T, ctx context.Context, s *pgsplittest.Server) (n int64) {
	t.Helper()
	conn, err := pgx.Connect(ctx, strings.Replace(s.URI(), "/postgres?", "/template1?", 1))
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = conn.Close(ctx) }()
	const asked = "select xact_commit + xact_rollback from pg_stat_database where datname = 'postgres'"
	if err := conn.QueryRow(ctx, asked).Scan(&n); err != nil {
		t.Fatal(err)
	}
	return n
}

func TestTheCountersAddUp(t *testing.T) {
	cluster := pgsplittest.Start(t, pgsplittest.Replicas(2))
	ctx, cancel := context.WithTimeout(context.Background(), 4*time.Minute)
	defer cancel()
	config, err := ParseDSN(cluster.DSN())
	if err != nil {
		t.Fatal(err)
	}
	config.ReplicaTimeout = time.Minute // a slow machine is no replica in trouble
	var told [reasonCount]atomic.Int64
	config.OnDecision = func(_ context.Context, d Decision) { told[d.Reason].Add(1) }
	counts := []*serverCount{}
	for _, pool := range []*pgxpool.Config{config.Primary, config.Replicas[0].Pool, config.Replicas[1].Pool} {
		count := &serverCount{name: fmt.Sprintf("%s:%d", pool.ConnConfig.Host, pool.ConnConfig.Port)}
		counts = append(counts, count)
		pool.ConnConfig.Tracer = count
		// One message a statement, and no pings: each is a transaction for the server's own count.
		pool.ConnConfig.DefaultQueryExecMode = pgx.QueryExecModeExec
		pool.ShouldPing = func(context.Context, pgxpool.ShouldPingParams) bool { return false }
	}
	c, err := NewConnector(config)
	if err != nil {
		t.Fatal(err)
	}
	m := &mixture{db: sql.OpenDB(c)}
	defer func() { _ = m.db.Close() }()
	setup, err := sql.Open("pgsplit", cluster.DSN())
	if err != nil {
		t.Fatal(err)
	}
	prepareCounters(t, ctx, cluster, setup)
	if err := setup.Close(); err != nil {
		t.Fatal(err)
	}
	servers := cluster.Servers()
	before := make([]int64, len(servers))
	for i, s := range servers {
		settled := int64(-1)
		eventually(ctx, t, "its count is complete", func() bool {
			was := settled
			settled = transactionsAt(t, ctx, s)
			return settled == was && others(t, ctx, s) == 0
		})
		before[i] = settled
	}

	goal := readsOfARun(t) / 2
	var wg sync.WaitGroup
	for range 16 {
		wg.Go(func() {
			r := rand.New(rand.NewPCG(rand.Uint64(), rand.Uint64()))
			for m.calls.Load() < goal && m.failed.Load() == nil {
				if err := m.one(ctx, r); err != nil {
					m.failed.CompareAndSwap(nil, &err)
				}
			}
		})
	}
	wg.Wait()
	if err := m.failed.Load(); err != nil {
		t.Fatal(*err)
	}
	if err := m.db.Close(); err != nil {
		t.Fatal(err)
	}
	stats := c.Stats()
	calls, asked := m.calls.Load(), m.asked.Load()

	var byReason, byServer, moved int64
	for r := range reasonCount {
		n := int64(stats.Reasons[r.String()])
		byReason += n
		if told[r].Load() != n {
			t.Errorf("%s: %d, and OnDecision was told of %d", r, n, told[r].Load())
		}
		var seen int64
		for _, count := range counts {
			seen += count.reasons[r].Load()
		}
		if r == ReasonPrimary {
			seen += asked // CommitLSN is nothing that a tracer sees
		}
		if seen != n {
			t.Errorf("%s: %d, and %d came to the servers", r, n, seen)
		}
	}
	for i, s := range stats.Servers {
		byServer += int64(s.Statements)
		moved += int64(s.MovedOn)
		came := counts[i].sum()
		if i == 0 {
			came += asked
		}
		if int64(s.Statements) != came || counts[i].unmatched.Load() != 0 {
			t.Errorf("%s: %d statements, %d came, %d without their decision", s.Name, s.Statements, came, counts[i].unmatched.Load())
		}
		for class, n := range s.Errors {
			if n != 0 {
				t.Errorf("%s: %d errors of class %s", s.Name, n, class)
			}
		}
		if s.InUse != 0 || s.Open != 0 || s.Idle != 0 {
			t.Errorf("%s: %d in use, %d open, %d idle after Close", s.Name, s.InUse, s.Open, s.Idle)
		}
	}
	if byReason != calls+asked+moved || byServer != byReason {
		t.Errorf("%d calls, %d positions, %d moved on: %d by reason, %d by server", calls, asked, moved, byReason, byServer)
	}
	t.Logf("%d calls: %v; waits %d and %d", calls, stats.Reasons, stats.Servers[1].Waits, stats.Servers[2].Waits)

	// What the servers counted: of a transaction only its BEGIN, and the driver's own questions. Since 15 nothing of it is
	// lost on the way.
	if cluster.Version() < 15 {
		return
	}
	for i, s := range stats.Servers {
		want := int64(s.Statements) - counts[i].inTx.Load()
		if i > 0 {
			want += int64(s.Checks + 2*s.Opened) // a new connection is one by itself, and is asked who it is
			if cluster.Version() >= 19 {
				want += int64(s.Waits) // by one WAIT FOR LSN each, before that by checks
			}
			var n int64
			eventually(ctx, t, fmt.Sprintf("%s has counted %d transactions", s.Name, want), func() bool {
				n = transactionsAt(t, ctx, servers[i]) - before[i]
				return n >= want
			})
			if n != want {
				t.Errorf("%s counted %d transactions, want %d: %d statements, %d in transactions, %d checks, %d connections",
					s.Name, n, want, s.Statements, counts[i].inTx.Load(), s.Checks, s.Opened)
			}
			continue
		}
		// The primary was asked for positions as well, in one message or two.
		eventually(ctx, t, fmt.Sprintf("the primary has counted at least %d transactions", want), func() bool {
			return transactionsAt(t, ctx, servers[i])-before[i] >= want+int64(s.Opened+stats.Captures)
		})
	}
}

// others is how many are connected to the database of the test.
func others(t *testing.T, ctx context.Context, s *pgsplittest.Server) (n int) {
	t.Helper()
	conn, err := pgx.Connect(ctx, strings.Replace(s.URI(), "/postgres?", "/template1?", 1))
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = conn.Close(ctx) }()
	const asked = "select count(*) from pg_stat_activity where datname = 'postgres'"
	if err := conn.QueryRow(ctx, asked).Scan(&n); err != nil {
		t.Fatal(err)
	}
	return n
}

// eventually waits for something that must come true.
func eventually(ctx context.Context, t *testing.T, what string, condition func() bool) {
	t.Helper()
	ticker := time.NewTicker(20 * time.Millisecond)
	defer ticker.Stop()
	for !condition() {
		select {
		case <-ticker.C:
		case <-ctx.Done():
			t.Fatalf("never: %s", what)
		}
	}
}
