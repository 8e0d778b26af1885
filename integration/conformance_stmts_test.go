package integration

import (
	"context"
	"database/sql"
	"fmt"
	"sync"
	"sync/atomic"

	"github.com/jackc/pgx/v5"
)

var stmtCases = []conformanceCase{
	{"StatementsRunOnADBAConnAndATx", statementsRunEverywhere},
	{"AStatementIsParsedWhenItIsPrepared", prepareErrors},
	{"AStatementServesManyCallersAtOnce", statementsConcurrently},
	{"ClosingOneStatementLeavesItsCopies", closingCopies},
	{"AClosedStatementIsClosed", closedStatements},
	{"AStatementSurvivesAChangeOfItsTable", changedTable},
	{"AStatementPreparedAgainSeesTheChangedTable", preparedAgain},
	{"AStatementSurvivesItsConnection", statementSurvivesConnection},
	{"DiscardAllTakesTheStatementsOfAConnection", discardAll},
	{"ManyStatementsComeAndGo", manyStatements},
}

func statementsRunEverywhere(r *run) {
	const query = "select $1::text || current_setting('transaction_isolation')"
	conn, err := r.db.Conn(r.ctx)
	r.must(err)
	defer conn.Close()
	tx, err := r.db.BeginTx(r.ctx, &sql.TxOptions{Isolation: sql.LevelRepeatableRead})
	r.must(err)
	onDB, err := r.db.PrepareContext(r.ctx, query)
	r.must(err)
	onConn, err := conn.PrepareContext(r.ctx, query)
	r.must(err)
	onTx, err := tx.PrepareContext(r.ctx, query)
	r.must(err)
	for _, s := range []struct {
		of   string
		stmt *sql.Stmt
	}{
		{"db", onDB}, {"conn", onConn}, {"tx", onTx}, {"tx of db", tx.StmtContext(r.ctx, onDB)}, {"tx of conn", tx.StmtContext(r.ctx, onConn)},
		{"tx of tx", tx.Stmt(onTx)},
	} {
		for range 2 {
			var v any
			err := s.stmt.QueryRowContext(r.ctx, "x").Scan(&v)
			r.note(s.of+" query row", v, err)
			result, err := s.stmt.ExecContext(r.ctx, "x")
			noteResult(r, s.of+" exec", result, err)
			rows, err := s.stmt.QueryContext(r.ctx, "x")
			r.must(err)
			noteColumnTypes(r, rows)
			r.note(s.of+" close", rows.Close())
		}
	}
	// Raw pgx gives the same answer for QueryRow and Exec without a context.
	var v any
	r.note("without a context", onDB.QueryRow("x").Scan(&v), &v)
	r.note("commit", tx.Commit())
	r.note("of db afterwards", onDB.QueryRowContext(r.ctx, "x").Scan(&v), &v)
	r.note("of tx afterwards", onTx.QueryRowContext(r.ctx, "x").Scan(&v))
	r.note("close", onDB.Close(), onConn.Close(), onTx.Close())
	r.note("in use", r.db.Stats().InUse)
}

func prepareErrors(r *run) {
	for _, query := range []string{
		"selec 1", "select * from nowhere", "select $1", "select $1::int + $1::text", "select $2::int", "begin; select 1", "create table $1 ()", "",
	} {
		stmt, err := r.db.PrepareContext(r.ctx, query)
		r.note(query, stmt == nil, err)
		if err != nil {
			continue
		}
		var v any
		r.note(query+" without arguments", stmt.QueryRowContext(r.ctx).Scan(&v))
		r.note(query+" with one", stmt.QueryRowContext(r.ctx, "1").Scan(&v), &v)
		r.note(query+" close", stmt.Close())
	}
	tx, err := r.db.BeginTx(r.ctx, nil)
	r.must(err)
	_, err = tx.PrepareContext(r.ctx, "selec 1")
	r.note("in a transaction", err)
	_, err = tx.ExecContext(r.ctx, "select 1")
	r.note("which then", err)
	r.note("rollback", tx.Rollback())
}

func statementsConcurrently(r *run) {
	r.db.SetMaxOpenConns(4)
	stmt, err := r.db.PrepareContext(r.ctx, "insert into parent values ($1) returning id")
	r.must(err)
	var sum atomic.Int64
	var failed sync.Map
	var wg sync.WaitGroup
	for i := range 8 {
		wg.Go(func() {
			for j := range 25 {
				var id int64
				if err := stmt.QueryRowContext(r.ctx, 1000+100*i+j).Scan(&id); err != nil {
					failed.Store(err.Error(), true)
				}
				sum.Add(id)
			}
		})
	}
	wg.Wait()
	failed.Range(func(err, _ any) bool {
		r.note("failed", err)
		return true
	})
	r.note("sum", sum.Load(), r.text(r.db, "select sum(id)::text from parent where id >= 1000"))
	r.note("close", stmt.Close())
	r.note("bound kept", r.db.Stats().OpenConnections <= 4, r.backends(anyState) <= 4)
}

func closingCopies(r *run) {
	const query = "select $1::int + 1"
	r.db.SetMaxOpenConns(1)
	a, err := r.db.PrepareContext(r.ctx, query)
	r.must(err)
	b, err := r.db.PrepareContext(r.ctx, query)
	r.must(err)
	var v any
	r.note("both", a.QueryRowContext(r.ctx, 1).Scan(&v), b.QueryRowContext(r.ctx, 1).Scan(&v), &v)
	r.note("close one", a.Close())
	r.note("the other", b.QueryRowContext(r.ctx, 2).Scan(&v), &v)
	r.note("the text alone", r.db.QueryRowContext(r.ctx, query, 3).Scan(&v), &v)
	c, err := r.db.PrepareContext(r.ctx, query)
	r.must(err)
	r.note("close the other", b.Close())
	r.note("a third", c.QueryRowContext(r.ctx, 4).Scan(&v), &v)
	r.note("close it", c.Close(), c.Close())
	r.note("the text alone", r.db.QueryRowContext(r.ctx, query, 5).Scan(&v), &v)
	tx, err := r.db.BeginTx(r.ctx, nil)
	r.must(err)
	d, err := tx.PrepareContext(r.ctx, query)
	r.must(err)
	e, err := tx.PrepareContext(r.ctx, query)
	r.must(err)
	r.note("close in a transaction", d.Close())
	r.note("the other", e.QueryRowContext(r.ctx, 6).Scan(&v), &v)
	r.note("commit", tx.Commit())
}

func closedStatements(r *run) {
	stmt, err := r.db.PrepareContext(r.ctx, "select 1")
	r.must(err)
	rows, err := stmt.QueryContext(r.ctx)
	r.must(err)
	r.note("close with rows open", stmt.Close())
	r.note("the rows", rows.Next(), rows.Err(), rows.Close())
	_, err = stmt.ExecContext(r.ctx)
	r.note("exec", err)
	_, err = stmt.QueryContext(r.ctx)
	r.note("query", err)
	tx, err := r.db.BeginTx(r.ctx, nil)
	r.must(err)
	_, err = tx.StmtContext(r.ctx, stmt).ExecContext(r.ctx)
	r.note("in a transaction", err)
	r.note("rollback", tx.Rollback())
	stmt, err = r.db.PrepareContext(r.ctx, "select 1")
	r.must(err)
	r.note("close the db", r.db.Close())
	_, err = stmt.ExecContext(r.ctx)
	r.note("exec", err)
	r.note("close", stmt.Close())
	_, err = r.db.PrepareContext(r.ctx, "select 1")
	r.note("prepare", err)
}

func changedTable(r *run) {
	r.db.SetMaxOpenConns(1)
	r.exec(r.db, "create table changing (a int); insert into changing values (1)")
	stmt, err := r.db.PrepareContext(r.ctx, "select * from changing")
	r.must(err)
	try := func(what string) {
		var a, b any
		rows, err := stmt.QueryContext(r.ctx)
		if err != nil {
			r.note(what, err)
			return
		}
		columns, err := rows.Columns()
		r.note(what, columns, err)
		for rows.Next() {
			if len(columns) == 1 {
				err = rows.Scan(&a)
			} else {
				err = rows.Scan(&a, &b)
			}
			r.note("row", a, b, err)
		}
		r.note("end", rows.Err(), rows.Close())
	}
	try("before")
	r.exec(r.db, "alter table changing add b text default 'new'")
	try("after a column came")
	try("again")
	try("and again")
	r.exec(r.db, "alter table changing drop b")
	try("after it went")
	r.exec(r.db, "drop table changing")
	try("after the table went")
	r.exec(r.db, "create table changing (a text); insert into changing values ('new')")
	try("after another came")
	r.note("close", stmt.Close())
	for range 2 {
		var v any
		r.note("text alone", r.db.QueryRowContext(r.ctx, "select * from changing").Scan(&v), &v)
	}
	r.exec(r.db, "alter table changing alter a type int using 7")
	for range 2 {
		var v any
		r.note("text alone after a change", r.db.QueryRowContext(r.ctx, "select * from changing").Scan(&v), &v)
	}
}

func preparedAgain(r *run) {
	r.db.SetMaxOpenConns(1)
	r.exec(r.db, "create table again (a int)")
	stmt, err := r.db.PrepareContext(r.ctx, "select * from again")
	r.must(err)
	r.exec(r.db, "insert into again values (1)")
	r.note("close", stmt.Close())
	r.exec(r.db, "alter table again alter a type text using 'one'")
	stmt, err = r.db.PrepareContext(r.ctx, "select * from again")
	r.must(err)
	for range 2 {
		var v any
		r.note("prepared again", stmt.QueryRowContext(r.ctx).Scan(&v), &v)
	}
	r.note("close", stmt.Close())
}

func statementSurvivesConnection(r *run) {
	stmt, err := r.db.PrepareContext(r.ctx, "select $1::int")
	r.must(err)
	var v any
	r.note("before", stmt.QueryRowContext(r.ctx, 1).Scan(&v), &v)
	r.kill(anyState)
	// The first call may find its connection dead.
	r.until(func() bool { return stmt.QueryRowContext(r.ctx, 2).Scan(&v) == nil }, func() string { return "it never works again" })
	r.note("after", v)
	r.note("close", stmt.Close())
}

func discardAll(r *run) {
	conn, err := r.db.Conn(r.ctx)
	r.must(err)
	defer conn.Close()
	stmt, err := conn.PrepareContext(r.ctx, "select 1")
	r.must(err)
	r.exec(conn, "discard all")
	_, err = stmt.ExecContext(r.ctx)
	r.note("a statement", err)
	_, err = stmt.ExecContext(r.ctx)
	r.note("again", err)
	_, err = conn.ExecContext(r.ctx, "select 2")
	r.note("the connection", err)
	r.note("close", stmt.Close())
	_, err = conn.PrepareContext(r.ctx, "select 1")
	r.note("prepare again", err)
	r.exec(conn, "deallocate all")
	var v any
	r.note("text", conn.QueryRowContext(r.ctx, "select $1::int", 3).Scan(&v), &v)
}

func manyStatements(r *run) {
	r.db.SetMaxOpenConns(1)
	for i := range 300 {
		stmt, err := r.db.PrepareContext(r.ctx, fmt.Sprintf("select %d + $1::int", i))
		r.must(err)
		var v int
		r.must(stmt.QueryRowContext(r.ctx, 1).Scan(&v))
		if v != i+1 {
			r.fail("statement %d gives %d", i, v)
		}
		r.must(stmt.Close())
	}
	var left int
	const count = "select count(*) from pg_prepared_statements"
	r.must(r.db.QueryRowContext(r.ctx, count, pgx.QueryExecModeSimpleProtocol).Scan(&left))
	// Raw pgx removes each at once; pgsplit removes them together (F21).
	r.note("few are left", left <= 100)
}

var connCases = []conformanceCase{
	{"AHeldConnectionKeepsItsSession", heldSession},
	{"SessionSettingsStayOnThePoolsConnection", sessionSettingsStay},
	{"AClosedConnectionIsClosed", closedConnection},
	{"RawGivesTheDriversConnectionAndTakesItsErrors", rawConnection},
	{"AConnectionThatDiedIsReplaced", deadConnection},
	{"AHeldConnectionThatDiedIsGone", deadHeldConnection},
	{"ATransactionWhoseConnectionDiedFails", deadTransaction},
	{"AConnectionThatDiesWhileItWorks", dyingConnection},
}

func heldSession(r *run) {
	conn, err := r.db.Conn(r.ctx)
	r.must(err)
	other, err := r.db.Conn(r.ctx)
	r.must(err)
	r.exec(conn, "create temp table mine (n int)")
	r.exec(conn, "set search_path = pg_temp, public")
	r.exec(conn, "set application_name = 'renamed'")
	r.exec(conn, "insert into mine values (1), (2)")
	_, err = conn.ExecContext(r.ctx, "select pg_advisory_lock(1)")
	r.must(err)
	pid := r.text(conn, "select pg_backend_pid()::text")
	for range 3 {
		r.note("its own", r.text(conn, "select count(*)::text || current_setting('application_name') from mine"))
		r.note("one session", pid == r.text(conn, "select pg_backend_pid()::text"))
		_, err := other.ExecContext(r.ctx, "select * from mine")
		r.note("another's", err)
		r.note("another's lock", r.text(other, "select pg_try_advisory_lock(1)::text"))
		tx, err := conn.BeginTx(r.ctx, nil)
		r.must(err)
		r.note("in a transaction", r.text(tx, "select count(*)::text from mine"))
		r.note("rollback", tx.Rollback())
		r.note("ping", conn.PingContext(r.ctx))
	}
	r.exec(conn, "reset application_name; select pg_advisory_unlock_all()")
	r.note("close", conn.Close(), other.Close())
	r.note("stats", r.db.Stats().OpenConnections, r.db.Stats().InUse, r.backends(anyState))
}

func sessionSettingsStay(r *run) {
	r.db.SetMaxOpenConns(1)
	r.exec(r.db, "set work_mem = '5MB'")
	r.note("kept", r.text(r.db, "show work_mem"))
	conn, err := r.db.Conn(r.ctx)
	r.must(err)
	r.note("by a held connection", r.text(conn, "show work_mem"))
	r.note("close", conn.Close())
	tx, err := r.db.BeginTx(r.ctx, nil)
	r.must(err)
	r.note("by a transaction", r.text(tx, "show work_mem"))
	r.exec(tx, "set work_mem = '6MB'")
	r.note("rollback", tx.Rollback())
	r.note("as before", r.text(r.db, "show work_mem"))
}

func closedConnection(r *run) {
	conn, err := r.db.Conn(r.ctx)
	r.must(err)
	r.exec(conn, "select 1")
	r.note("close", conn.Close(), conn.Close())
	_, err = conn.ExecContext(r.ctx, "select 1")
	r.note("exec", err)
	_, err = conn.QueryContext(r.ctx, "select 1")
	r.note("query", err)
	_, err = conn.PrepareContext(r.ctx, "select 1")
	r.note("prepare", err)
	_, err = conn.BeginTx(r.ctx, nil)
	r.note("begin", err)
	r.note("ping", conn.PingContext(r.ctx))
	r.note("raw", conn.Raw(func(any) error { return nil }))
}

func rawConnection(r *run) {
	conn, err := r.db.Conn(r.ctx)
	r.must(err)
	called := false
	r.note("raw", conn.Raw(func(c any) error {
		called = c != nil
		return sql.ErrNoRows
	}), &called)
	r.note("afterwards", r.text(conn, "select 'works'"))
	func() {
		defer func() { r.note("panic", recover()) }()
		_ = conn.Raw(func(any) error { panic("of the caller") })
	}()
	_, err = conn.ExecContext(r.ctx, "select 1")
	r.note("after a panic", err)
	r.untilBackends(0, anyState)
	r.note("close", conn.Close())
	r.note("in use", r.db.Stats().InUse)
}

func deadConnection(r *run) {
	r.exec(r.db, "create table hits (n int)")
	r.exec(r.db, "select 1") // from here on pgx does not ping
	for i := range 3 {
		r.kill(anyState)
		_, err := r.db.ExecContext(r.ctx, "insert into hits values ($1)", i)
		r.note("the first statement", err)
		_, err = r.db.ExecContext(r.ctx, "insert into hits values ($1)", 10+i)
		r.note("the second", err)
		r.exec(r.db, "select 1")
	}
	r.note("written", r.text(r.db, "select array_agg(n order by n)::text from hits"))
	r.note("stats", r.db.Stats().InUse, r.backends(anyState))
}

func deadHeldConnection(r *run) {
	conn, err := r.db.Conn(r.ctx)
	r.must(err)
	r.exec(conn, "set work_mem = '5MB'")
	r.kill(anyState)
	for range 4 {
		_, err := conn.ExecContext(r.ctx, "insert into parent values (1) on conflict do nothing")
		r.note("exec", err)
	}
	_, err = conn.BeginTx(r.ctx, nil)
	r.note("begin", err)
	r.note("close", conn.Close())
	conn, err = r.db.Conn(r.ctx)
	r.must(err)
	r.exec(conn, "select 1")
	r.kill(anyState)
	r.note("ping", conn.PingContext(r.ctx))
	r.note("ping again", conn.PingContext(r.ctx))
	r.note("close", conn.Close())
	r.note("a new one", r.text(r.db, "select 'works'"), r.db.Stats().InUse)
}

func deadTransaction(r *run) {
	tx, err := r.db.BeginTx(r.ctx, nil)
	r.must(err)
	r.exec(tx, "insert into parent values (200)")
	r.kill(anyState)
	for range 3 {
		_, err := tx.ExecContext(r.ctx, "insert into parent values (201)")
		r.note("exec", err)
	}
	r.note("commit", tx.Commit())
	tx, err = r.db.BeginTx(r.ctx, nil)
	r.must(err)
	r.exec(tx, "insert into parent values (202)")
	r.kill(anyState)
	r.note("commit", tx.Commit())
	tx, err = r.db.BeginTx(r.ctx, nil)
	r.must(err)
	r.exec(tx, "insert into parent values (203)")
	r.kill(anyState)
	r.note("rollback", tx.Rollback())
	r.note("written", r.text(r.db, "select count(*)::text from parent where id >= 200"), r.db.Stats().InUse)
}

func dyingConnection(r *run) {
	sleep := func(what string, do func(context.Context) error) {
		done := make(chan error, 1)
		go func() { done <- do(r.ctx) }()
		r.untilBackends(1, sleeping)
		r.kill(sleeping)
		r.note(what, <-done)
	}
	sleep("exec", func(ctx context.Context) error {
		_, err := r.db.ExecContext(ctx, "insert into parent select 210 from pg_sleep(30)")
		return err
	})
	sleep("query", func(ctx context.Context) error {
		rows, err := r.db.QueryContext(ctx, "select pg_sleep(30)")
		if err == nil {
			rows.Close()
		}
		return err
	})
	r.note("written", r.text(r.db, "select count(*)::text from parent where id = 210"), r.db.Stats().InUse)
}
