package pgsplit_test

import (
	"context"
	"database/sql"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/pgsplit/pgsplit"
	"github.com/pgsplit/pgsplit/pgsplittest"
)

// patient is a context that ends when a test has hung.
func patient(t testing.TB) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Minute)
	t.Cleanup(cancel)
	return ctx
}

// open opens a DSN. A replica of one that does not say how long it may take is given enough time on a slow machine.
func open(t testing.TB, dsn string) *sql.DB {
	t.Helper()
	if strings.Contains(dsn, "?") && !strings.Contains(dsn, "replica_timeout=") {
		dsn = with(dsn, "replica_timeout=20s")
	}
	db, err := sql.Open("pgsplit", dsn)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = db.Close() })
	return db
}

// queryer is a sql.DB, sql.Conn, sql.Tx or sql.Stmt's owner.
type queryer interface {
	QueryRowContext(context.Context, string, ...any) *sql.Row
	ExecContext(context.Context, string, ...any) (sql.Result, error)
}

// text runs a query that answers one text.
func text(t testing.TB, ctx context.Context, q queryer, query string, args ...any) string {
	t.Helper()
	var s string
	if err := q.QueryRowContext(ctx, query, args...).Scan(&s); err != nil {
		t.Fatalf("%s: %v", query, err)
	}
	return s
}

// exec runs a statement that must succeed.
func exec(t testing.TB, ctx context.Context, q queryer, query string, args ...any) {
	t.Helper()
	if _, err := q.ExecContext(ctx, query, args...); err != nil {
		t.Fatalf("%s: %v", query, err)
	}
}

const (
	whichPort  = `select inet_server_port()::text`
	inRecovery = `select pg_is_in_recovery()::text`
)

func TestUnhintedStatementsRunOnThePrimaryAndReadOnlyOnesOnReplicas(t *testing.T) {
	cluster := pgsplittest.Start(t, pgsplittest.Replicas(2))
	ctx := patient(t)
	db := open(t, cluster.DSN())
	exec(t, ctx, db, "create table t (id int primary key)")
	if got := text(t, ctx, db, "insert into t values (1) returning id::text"); got != "1" {
		t.Fatal(got)
	}
	lsn, err := pgsplit.CommitLSN(ctx, db)
	if err != nil {
		t.Fatal(err)
	}
	if got := text(t, ctx, db, inRecovery); got != "false" {
		t.Errorf("unhinted: in recovery %s", got)
	}
	read := pgsplit.ReadOnly(pgsplit.WithLSN(ctx, lsn), pgsplit.MaxWait(30*time.Second))
	if got := text(t, read, db, "select pg_is_in_recovery()::text || ' ' || count(*) from t"); got != "true 1" {
		t.Errorf("ReadOnly: %s", got)
	}
	ports := map[string]bool{}
	for range 10 {
		ports[text(t, pgsplit.ReadOnly(ctx), db, whichPort)] = true
	}
	if len(ports) != 2 {
		t.Errorf("ten reads used %d replicas", len(ports))
	}
	if _, err := db.ExecContext(pgsplit.ReadOnly(ctx), "insert into t values (2)"); !errors.Is(err, pgsplit.ErrReadOnly) {
		t.Errorf("a write under ReadOnly: %v", err)
	}
	c, err := pgsplit.FromDB(db)
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("%+v", c.Stats())
}
