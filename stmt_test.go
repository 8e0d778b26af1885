package pgsplit_test

import (
	"context"
	"database/sql"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/pgsplit/pgsplit"
	"github.com/pgsplit/pgsplit/pgsplittest"
)

func prepare(t testing.TB, ctx context.Context, db interface {
	PrepareContext(context.Context, string) (*sql.Stmt, error)
}, query string) *sql.Stmt {
	t.Helper()
	stmt, err := db.PrepareContext(ctx, query)
	if err != nil {
		t.Fatalf("%s: %v", query, err)
	}
	t.Cleanup(func() { _ = stmt.Close() })
	return stmt
}

// answer runs a statement that answers one text.
func answer(ctx context.Context, stmt *sql.Stmt, args ...any) (s string, err error) {
	err = stmt.QueryRowContext(ctx, args...).Scan(&s)
	return s, err
}

const clusterName = "select current_setting('cluster_name')"

func TestAStatementRunsWhereEachCallsContextLeads(t *testing.T) {
	cluster := shareCluster(t, 1)
	ctx := patient(t)
	runSQL(t, ctx, cluster, ledger)
	db := open(t, cluster.DSN())
	read := pgsplit.ReadOnly(ctx)
	for name, prepared := range map[string]context.Context{"unhinted": ctx, "ReadOnly": read} {
		stmt := prepare(t, prepared, db, clusterName)
		for range 2 {
			if got, err := answer(read, stmt); got != "replica1" {
				t.Errorf("prepared %s, a ReadOnly call ran on %s %v", name, got, err)
			}
			if got, err := answer(ctx, stmt); got != "primary" {
				t.Errorf("prepared %s, an unhinted call ran on %s %v", name, got, err)
			}
		}
	}
	insert := prepare(t, read, db, "insert into ledger values ($1)")
	if _, err := insert.ExecContext(ctx, 2); err != nil {
		t.Errorf("prepared ReadOnly, an unhinted write: %v", err)
	}
	_, err := insert.ExecContext(read, 3)
	refusedWrite(t, err)
}

func TestAStatementOutlivesTheServerThatParsedIt(t *testing.T) {
	cluster := pgsplittest.Start(t)
	ctx := patient(t)
	db := open(t, cluster.DSN())
	read := pgsplit.ReadOnly(ctx)
	onReplica, onPrimary := prepare(t, read, db, clusterName), prepare(t, ctx, db, clusterName)
	works := func(stmt *sql.Stmt, ctx context.Context, server string) {
		t.Helper()
		var last string
		// A connection that ended meanwhile may show that only when it is used, as with any driver.
		until(t, "the statement runs on "+server, func() bool {
			got, err := answer(ctx, stmt)
			last = fmt.Sprintf("%s %v", got, err)
			return got == server
		})
		if last != server+" <nil>" {
			t.Error(last)
		}
	}
	works(onReplica, read, "replica1")
	if err := cluster.Replicas[0].Stop(ctx, pgsplittest.Fast); err != nil {
		t.Fatal(err)
	}
	works(onReplica, read, "primary")
	works(onReplica, ctx, "primary")
	if err := cluster.Replicas[0].Start(ctx); err != nil {
		t.Fatal(err)
	}
	works(onReplica, read, "replica1")

	works(onPrimary, ctx, "primary")
	if err := cluster.Primary.Restart(ctx, pgsplittest.Immediate); err != nil {
		t.Fatal(err)
	}
	works(onPrimary, ctx, "primary")
	works(onReplica, ctx, "primary")
}

// returns runs f and fails if it does not come back.
func returns(t testing.TB, what string, f func()) {
	t.Helper()
	done := make(chan struct{})
	go func() {
		defer close(done)
		f()
	}()
	select {
	case <-done:
	case <-time.After(time.Minute):
		t.Fatalf("%s hangs", what)
	}
}

func TestClosingAStatementAsksNoServer(t *testing.T) {
	cluster := pgsplittest.Start(t)
	ctx := patient(t)
	db := open(t, cluster.ProxyDSN())
	db.SetMaxIdleConns(4)
	var stmts []*sql.Stmt
	for n := range 100 {
		stmt := prepare(t, ctx, db, fmt.Sprintf("select %d", n))
		if _, err := stmt.ExecContext(pgsplit.ReadOnly(ctx)); err != nil {
			t.Fatal(err)
		}
		stmts = append(stmts, stmt)
	}
	before := spoken(cluster)
	for _, s := range cluster.Servers() {
		s.Proxy().BlackHole()
		defer s.Proxy().Restore()
	}
	returns(t, "closing statements", func() {
		for _, stmt := range stmts {
			if err := stmt.Close(); err != nil {
				t.Error(err)
			}
		}
	})
	returns(t, "sql.DB", func() { _ = db.Stats() })
	if n := spoken(cluster) - before; n != 0 {
		t.Errorf("%d round trips", n)
	}
}

func TestStatementsCloseWhileOthersRun(t *testing.T) {
	cluster := shareCluster(t, 1)
	ctx := patient(t)
	db := open(t, cluster.DSN())
	db.SetMaxOpenConns(3)
	db.SetMaxIdleConns(3)
	read := pgsplit.ReadOnly(ctx)
	shared := prepare(t, ctx, db, "select $1::text")
	var all sync.WaitGroup
	for w := range 6 {
		all.Go(func() {
			for n := range 50 {
				ctx := []context.Context{ctx, read}[(w+n)%2]
				// Half of the texts are everybody's, so that copies are closed under the others' hands.
				stmt, err := db.PrepareContext(ctx, fmt.Sprintf("select %d + $1::int", n%2*(w*100+n)))
				if err != nil {
					t.Error(err)
					return
				}
				if got, err := answer(ctx, stmt, 1); err != nil || got != fmt.Sprint(1+n%2*(w*100+n)) {
					t.Errorf("%s %v", got, err)
				}
				if got, err := answer(ctx, shared, "x"); err != nil || got != "x" {
					t.Errorf("%s %v", got, err)
				}
				if err := stmt.Close(); err != nil {
					t.Error(err)
				}
			}
		})
	}
	all.Wait()
}

func TestAStatementPinsNoContext(t *testing.T) {
	cluster := shareCluster(t, 1)
	ctx := patient(t)
	runSQL(t, ctx, cluster, ledger)
	db := open(t, cluster.DSN())
	request, cancel := context.WithCancel(pgsplit.ReadOnly(pgsplit.WithLSN(ctx, commitLSN(t, ctx, db))))
	query := prepare(t, request, db, clusterName)
	insert := prepare(t, request, db, "insert into ledger values ($1)")
	if _, err := answer(request, query); err != nil {
		t.Fatal(err)
	}
	cancel()
	for n := range 3 {
		if got, err := answer(ctx, query); got != "primary" {
			t.Errorf("ran on %s %v", got, err)
		}
		if _, err := insert.ExecContext(ctx, 2+n); err != nil {
			t.Error(err)
		}
	}
}

// serverStatements is how many statements the connection's server keeps for it under the name that pgx gives to
// database/sql's statements; its own cache has other names.
const serverStatements = "select count(*)::text from pg_prepared_statements where name like 'stmt\\_%'"

func TestClosingOneCopyOfAStatementLeavesTheOthers(t *testing.T) {
	cluster := shareCluster(t, 0)
	ctx := patient(t)
	db := open(t, cluster.DSN())
	db.SetMaxOpenConns(1)
	first, second := prepare(t, ctx, db, clusterName), prepare(t, ctx, db, clusterName)
	if err := first.Close(); err != nil {
		t.Fatal(err)
	}
	// More closed statements than stay on the server for a while.
	for range 200 {
		if err := prepare(t, ctx, db, newText()).Close(); err != nil {
			t.Fatal(err)
		}
	}
	for range 2 {
		if got, err := answer(ctx, second); got != "primary" {
			t.Errorf("%s %v", got, err)
		}
	}
	const mine = serverStatements + " and statement = 'select current_setting(''cluster_name'')'"
	if got := text(t, ctx, db, mine); got != "1" {
		t.Errorf("the server has %s copies of the open statement", got)
	}
}

func TestClosedStatementsLeaveTheServer(t *testing.T) {
	cluster := shareCluster(t, 0)
	ctx := patient(t)
	db := open(t, cluster.DSN())
	db.SetMaxOpenConns(1)
	for n := range 1000 {
		stmt := prepare(t, ctx, db, newText())
		if _, err := stmt.ExecContext(ctx, n); err != nil {
			t.Fatal(err)
		}
		if err := stmt.Close(); err != nil {
			t.Fatal(err)
		}
	}
	var n int
	if err := db.QueryRowContext(ctx, strings.Replace(serverStatements, "::text", "", 1)).Scan(&n); err != nil {
		t.Fatal(err)
	}
	if n > 70 {
		t.Errorf("the server keeps %d closed statements", n)
	}
}

func TestAStatementThatIsPreparedAgainAfterAlterTableHasTheNewTypes(t *testing.T) {
	cluster := shareCluster(t, 0)
	ctx := patient(t)
	db := open(t, cluster.DSN())
	db.SetMaxOpenConns(1)
	exec(t, ctx, db, "create table shape (v int)")
	const insert, list = "insert into shape values ($1)", "select * from shape"
	for _, query := range []string{insert, list} {
		if err := prepare(t, ctx, db, query).Close(); err != nil {
			t.Fatal(err)
		}
	}
	exec(t, ctx, db, "alter table shape alter column v type text using v::text, add column w text default 'new'")
	if _, err := prepare(t, ctx, db, insert).ExecContext(ctx, "text now"); err != nil {
		t.Error(err)
	}
	rows, err := prepare(t, ctx, db, list).QueryContext(ctx)
	if err != nil {
		t.Fatal(err)
	}
	defer rows.Close()
	types, err := rows.ColumnTypes()
	if err != nil {
		t.Fatal(err)
	}
	if len(types) != 2 || types[0].DatabaseTypeName() != "TEXT" {
		t.Errorf("%d columns, the first of type %s", len(types), types[0].DatabaseTypeName())
	}
}

func TestAClosedStatementsTextRunsAsIfItHadNeverBeenPrepared(t *testing.T) {
	cluster := shareCluster(t, 0)
	ctx := patient(t)
	db := open(t, cluster.DSN())
	db.SetMaxOpenConns(1)
	exec(t, ctx, db, "create table shape (v int)")
	exec(t, ctx, db, "insert into shape values (1)")
	const list = "select * from shape"
	stmt := prepare(t, ctx, db, list)
	if err := scanOne(stmt.QueryContext(ctx)); err != nil {
		t.Fatal(err)
	}
	if err := stmt.Close(); err != nil {
		t.Fatal(err)
	}
	exec(t, ctx, db, "alter table shape add column w text default 'new'")
	// The closed copy would say that its plan must not change its result type, for as long as the connection lives.
	rows, err := db.QueryContext(ctx, list)
	if err != nil {
		t.Fatal(err)
	}
	defer rows.Close()
	if columns, err := rows.Columns(); err != nil || len(columns) != 2 {
		t.Errorf("columns %v %v", columns, err)
	}
}

func TestAStatementCountsItsArgumentsAsRawPgxDoes(t *testing.T) {
	cluster := shareCluster(t, 1)
	ctx := patient(t)
	db, raw := open(t, cluster.DSN()), openRaw(t, cluster.Primary.URI())
	const query = "select $1::int + $2::int"
	for _, args := range [][]any{{}, {1}, {1, 2}, {1, 2, 3}} {
		_, want := prepare(t, ctx, raw, query).ExecContext(ctx, args...)
		_, got := prepare(t, pgsplit.ReadOnly(ctx), db, query).ExecContext(ctx, args...)
		if fmt.Sprint(got) != fmt.Sprint(want) {
			t.Errorf("%d arguments: %v, raw pgx: %v", len(args), got, want)
		}
	}
	_, want := raw.PrepareContext(ctx, "select from where")
	_, got := db.PrepareContext(pgsplit.ReadOnly(ctx), "select from where")
	if got == nil || got.Error() != want.Error() {
		t.Errorf("%v, raw pgx: %v", got, want)
	}
}

func TestAStatementOfThePoolWorksInATransaction(t *testing.T) {
	cluster := shareCluster(t, 1)
	ctx := patient(t)
	runSQL(t, ctx, cluster, ledger)
	db := open(t, cluster.DSN())
	insert, where := prepare(t, ctx, db, "insert into ledger values ($1)"), prepare(t, pgsplit.ReadOnly(ctx), db, clusterName)
	tx, err := db.BeginTx(ctx, nil)
	if err != nil {
		t.Fatal(err)
	}
	defer tx.Rollback()
	if _, err := tx.StmtContext(ctx, insert).ExecContext(ctx, 2); err != nil {
		t.Fatal(err)
	}
	if got, err := answer(pgsplit.ReadOnly(ctx), tx.StmtContext(ctx, where)); got != "primary" {
		t.Errorf("inside a transaction of the primary it ran on %s %v", got, err)
	}
	if err := tx.Commit(); err != nil {
		t.Fatal(err)
	}
	if got, err := answer(pgsplit.ReadOnly(ctx), where); got != "replica1" {
		t.Errorf("outside it ran on %s %v", got, err)
	}
}
