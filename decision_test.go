package pgsplit_test

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgsplit/pgsplit"
	"github.com/pgsplit/pgsplit/pgsplittest"
)

// openConfigured opens a DSN with the Config changed. A slow machine is no replica in trouble.
func openConfigured(t testing.TB, dsn string, change func(*pgsplit.Config)) *sql.DB {
	t.Helper()
	config, err := pgsplit.ParseDSN(dsn)
	if err != nil {
		t.Fatal(err)
	}
	config.ReplicaTimeout = 20 * time.Second
	change(config)
	db, err := pgsplit.OpenDB(config)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = db.Close() })
	return db
}

// told is what OnDecision and a tracer of each server were told, in order.
type told struct {
	mu        sync.Mutex
	decisions []pgsplit.Decision // guarded by mu
	traced    []string           // statements with the decision below the driver; guarded by mu
}

func (l *told) decided(_ context.Context, d pgsplit.Decision) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.decisions = append(l.decisions, d)
}

// reasons takes what was told since the last call.
func (l *told) reasons() (reasons, traced []string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, d := range l.decisions {
		reasons = append(reasons, d.Reason.String())
	}
	traced = l.traced
	l.decisions, l.traced = nil, nil
	return reasons, traced
}

// below is a pgx tracer of one server.
type below struct {
	l    *told
	name string
}

func (b below) TraceQueryStart(ctx context.Context, _ *pgx.Conn, data pgx.TraceQueryStartData) context.Context {
	b.l.mu.Lock()
	defer b.l.mu.Unlock()
	d, ok := pgsplit.DecisionFrom(ctx)
	if !ok || d.Server != b.name {
		d.Server = "unknown"
	}
	b.l.traced = append(b.l.traced, strings.Fields(data.SQL)[0]+" "+d.Role+" "+d.Reason.String())
	return ctx
}

func (b below) TraceQueryEnd(context.Context, *pgx.Conn, pgx.TraceQueryEndData) {}

// addsUp checks that the counters of all servers and reasons are those of so many decisions.
func addsUp(t testing.TB, c *pgsplit.Connector, decisions int) {
	t.Helper()
	stats := c.Stats()
	var byReason, byServer uint64
	for _, n := range stats.Reasons {
		byReason += n
	}
	for _, s := range stats.Servers {
		byServer += s.Statements
	}
	nowhere := stats.Reasons["no_primary"] + stats.Reasons["no_replica"] + stats.Reasons["no_fresh_replica"]
	if byReason != uint64(decisions) || byServer+nowhere != byReason {
		t.Errorf("%d decisions: %d by reason, %d by server and %d nowhere", decisions, byReason, byServer, nowhere)
	}
}

func TestEachStatementIsDecidedOnceForEachServerThatItGetsTo(t *testing.T) {
	cluster := pgsplittest.Start(t, pgsplittest.Replicas(2))
	ctx := patient(t)
	l := &told{}
	db := openConfigured(t, cluster.DSN(), func(c *pgsplit.Config) {
		c.OnDecision = l.decided
		for i := range c.Replicas {
			c.Replicas[i].Name = cluster.Replicas[i].Name()
			c.Replicas[i].Pool.ConnConfig.Tracer = below{l, c.Replicas[i].Name}
		}
		// The primary is called by its address.
		c.Primary.ConnConfig.Tracer = below{l, fmt.Sprintf("%s:%d", c.Primary.ConnConfig.Host, c.Primary.ConnConfig.Port)}
	})
	c := connectorOf(t, db)
	read := pgsplit.ReadOnly(ctx)
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Error(err)
		}
	}
	query := func(ctx context.Context, q interface {
		QueryContext(context.Context, string, ...any) (*sql.Rows, error)
	}, text string) {
		rows, err := q.QueryContext(ctx, text)
		must(err)
		for rows.Next() {
		}
		must(rows.Err())
	}
	total := 0
	step := func(name string, do func(), reasons string, traced ...string) {
		t.Helper()
		do()
		got, seen := l.reasons()
		total += len(got)
		if strings.Join(got, " ") != reasons {
			t.Errorf("%s: decided %q, want %q", name, got, reasons)
		}
		if !slices.Equal(seen, traced) {
			t.Errorf("%s: below the driver %q, want %q", name, seen, traced)
		}
		addsUp(t, c, total)
	}
	step("unhinted", func() { exec(t, ctx, db, "create table here (n int)") }, "unhinted", "create primary unhinted")
	step("Primary", func() { exec(t, pgsplit.Primary(read), db, "select 1") }, "primary_hint", "select primary primary_hint")
	step("rows", func() { query(read, db, "select generate_series(1, 1000)") }, "replica", "select replica replica")
	step("an error of SQL", func() {
		_, err := db.ExecContext(ctx, "insert into nowhere values (1)")
		isUnchanged(t, err, "42P01")
	}, "unhinted", "insert primary unhinted")
	step("a write under ReadOnly", func() {
		if _, err := db.ExecContext(read, "create table t ()"); !errors.Is(err, pgsplit.ErrReadOnly) {
			t.Error(err)
		}
	}, "replica", "create replica replica")
	step("a prepared statement", func() {
		stmt, err := db.PrepareContext(ctx, "select 1")
		must(err)
		query(read, stmtQueryer{stmt}, "")
		query(ctx, stmtQueryer{stmt}, "")
		must(stmt.Close())
	}, "unhinted replica unhinted", "select replica replica", "select primary unhinted")
	step("a transaction", func() {
		tx, err := db.BeginTx(ctx, nil)
		must(err)
		exec(t, read, tx, "insert into here values (1)")
		query(ctx, tx, "select 1")
		must(tx.Commit())
	}, "unhinted in_tx in_tx", "begin primary unhinted", "insert primary in_tx", "select primary in_tx", "commit primary unhinted")
	step("a ReadOnly transaction", func() {
		tx, err := db.BeginTx(read, nil)
		must(err)
		query(ctx, tx, "select 1")
		must(tx.Rollback())
	}, "replica in_tx", "begin replica replica", "select replica in_tx", "rollback replica replica")
	step("a held connection", func() {
		conn := hold(t, ctx, db)
		exec(t, ctx, conn, "select 1")
		exec(t, read, conn, "select 2")
		must(conn.PingContext(ctx))
		must(conn.Close())
	}, "unhinted held", "select primary unhinted", "select primary held")
	step("rows that are still open", func() {
		conn := hold(t, ctx, db)
		rows, err := conn.QueryContext(read, "select generate_series(1, 10)")
		must(err)
		if _, err := conn.ExecContext(read, "select 1"); err == nil {
			t.Error("no error")
		}
		must(rows.Close())
		must(conn.Close())
	}, "replica in_tx", "select replica replica")
	step("Ping", func() { must(db.PingContext(ctx)) }, "unhinted")
	step("CommitLSN", func() { commitLSN(t, ctx, db) }, "primary_hint")
	step("Raw", func() {
		must(pgsplit.Raw(read, hold(t, ctx, db), func(*pgx.Conn) error { return nil }))
	}, "replica")
	step("an isolation that no replica gives", func() {
		serializable := &sql.TxOptions{Isolation: sql.LevelSerializable}
		if _, err := db.BeginTx(pgsplit.ReadOnly(ctx, pgsplit.ReplicaOnly()), serializable); !errors.Is(err, pgsplit.ErrNoReplica) {
			t.Error(err)
		}
	}, "no_replica")
	step("a floor that nobody has", func() {
		far := pgsplit.ReadOnly(ctx, pgsplit.ReplicaOnly(), pgsplit.AfterLSN(^pgsplit.LSN(0)-1))
		if _, err := db.ExecContext(far, "select 1"); !errors.Is(err, pgsplit.ErrNoFreshReplica) {
			t.Error(err)
		}
	}, "no_fresh_replica")
	if s := c.Stats().Servers; s[1].Refusals != 1 || s[2].Refusals != 1 {
		t.Errorf("%d and %d refusals", s[1].Refusals, s[2].Refusals)
	}
	must(cluster.CatchUp(ctx))
	for _, r := range cluster.Replicas {
		must(r.PauseReplay(ctx))
	}
	runSQL(t, ctx, cluster, "create table late ()")
	step("a read that moves on", func() { exec(t, read, db, "select from late") }, "replica replica moved_on",
		"select replica replica", "select replica replica", "select primary moved_on")
	for _, r := range cluster.Replicas {
		must(r.ResumeReplay(ctx))
	}
	stats := c.Stats()
	for i, class := range []string{"sql", "sql", "sql"} {
		if n := stats.Servers[i].Errors[class]; n != 1 {
			t.Errorf("server %d: %d errors of class %s: %v", i, n, class, stats.Servers[i].Errors)
		}
	}
	if n := stats.Servers[1].Errors["read_only"] + stats.Servers[2].Errors["read_only"]; n != 1 {
		t.Errorf("%d errors of class read_only", n)
	}

	must(cluster.Primary.Kill(ctx))
	eventually(t, "the primary is down", func() bool {
		_, err := db.ExecContext(ctx, "select 1")
		return errors.Is(err, pgsplit.ErrNoPrimary) && c.Stats().Servers[0].State == "down"
	})
	until, _ := l.reasons()
	total += len(until)
	step("no primary", func() {
		if _, err := db.ExecContext(ctx, "select 1"); !errors.Is(err, pgsplit.ErrNoPrimary) {
			t.Error(err)
		}
	}, "no_primary")
	if e := c.Stats().Servers[0].Errors; e["connect"]+e["shutdown"] == 0 {
		t.Errorf("the primary's errors: %v", e)
	}
	over, cancel := context.WithCancel(ctx)
	cancel()
	step("a caller who has left", func() { _, _ = db.ExecContext(over, "select 1") }, "")
}

// stmtQueryer runs a prepared statement where a queryer is asked for.
type stmtQueryer struct{ *sql.Stmt }

func (s stmtQueryer) QueryContext(ctx context.Context, _ string, args ...any) (*sql.Rows, error) {
	return s.Stmt.QueryContext(ctx, args...)
}

func TestTheContextOfAServerWithoutATracerIsTheCallersOwn(t *testing.T) {
	if _, ok := pgsplit.DecisionFrom(context.Background()); ok {
		t.Error("a decision from nowhere")
	}
	cluster := shareCluster(t, 1)
	ctx := patient(t)
	l := &told{}
	db := openWith(t, cluster.DSN(), func(name string, pool *pgxpool.Config) {
		if name == "primary" {
			pool.ConnConfig.Tracer = below{l, fmt.Sprintf("%s:%d", pool.ConnConfig.Host, pool.ConnConfig.Port)}
		}
	})
	exec(t, ctx, db, "select 1")
	exec(t, pgsplit.ReadOnly(ctx), db, "select 1")
	if _, traced := l.reasons(); !slices.Equal(traced, []string{"select primary unhinted"}) {
		t.Errorf("%q", traced)
	}
}
