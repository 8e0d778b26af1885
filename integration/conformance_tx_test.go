package integration

import (
	"context"
	"database/sql"
	"fmt"
	"net/url"
)

var txCases = []conformanceCase{
	{"TransactionsHaveTheIsolationAskedFor", isolations},
	{"TransactionsEndOnce", transactionsEndOnce},
	{"ACommitAfterAnErrorSaysThatItRolledBack", commitAfterAnError},
	{"SavepointsAndNestedBeginsAreTheServers", nestedTransactions},
	{"ATransactionEndsWithItsContext", transactionEndsWithItsContext},
	{"ATransactionLeftOpenByTextReachesNobodyElse", transactionByText},
	{"TransactionsOnAHeldConnection", transactionsOnAConnection},
	{"RowsOpenAtTheEndOfATransaction", rowsOpenAtCommit},
	{"SerializationFailuresBelongToTheCaller", serializationFailure},
}

const settings = "select current_setting('transaction_isolation') || ' ' || current_setting('transaction_read_only')"

func isolations(r *run) {
	for level := sql.LevelDefault; level <= sql.LevelLinearizable+1; level++ {
		for _, readOnly := range []bool{false, true} {
			what := fmt.Sprintf("%s, read only %v", level, readOnly)
			tx, err := r.db.BeginTx(r.ctx, &sql.TxOptions{Isolation: level, ReadOnly: readOnly})
			if err != nil {
				r.note(what, tx == nil, err, r.db.Stats().InUse)
				continue
			}
			r.note(what, r.text(tx, settings))
			_, err = tx.ExecContext(r.ctx, "insert into parent values ($1)", 100)
			r.note(what+": write", err)
			_, err = tx.ExecContext(r.ctx, "set transaction read write")
			r.note(what+": after it", err)
			r.note(what+": rollback", tx.Rollback())
		}
	}
	r.exec(r.db, "alter role current_user in database "+r.database+" set default_transaction_isolation = 'repeatable read'")
	r.exec(r.db, "alter role current_user in database "+r.database+" set default_transaction_read_only = on")
	db := r.open(func(*url.URL) {})
	tx, err := db.BeginTx(r.ctx, nil)
	r.must(err)
	r.note("the user's default", r.text(tx, settings))
	_, err = tx.ExecContext(r.ctx, "insert into parent values (101)")
	r.note("write", err)
	r.note("commit", tx.Commit())
	_, err = db.ExecContext(r.ctx, "insert into parent values (101)")
	r.note("write alone", err)
	_, err = db.ExecContext(r.ctx, "begin read write; alter role current_user in database "+r.database+" reset all; commit")
	r.note("reset", err)
}

func transactionsEndOnce(r *run) {
	for _, end := range []struct {
		how string
		do  func(*sql.Tx) error
	}{{"commit", (*sql.Tx).Commit}, {"rollback", (*sql.Tx).Rollback}} {
		tx, err := r.db.BeginTx(r.ctx, nil)
		r.must(err)
		stmt, err := tx.PrepareContext(r.ctx, "select 1")
		r.must(err)
		result, err := tx.ExecContext(r.ctx, "insert into parent values (110)")
		noteResult(r, end.how, result, err)
		r.note("seen outside", r.text(r.db, "select count(*)::text from parent where id = 110"))
		r.note(end.how, end.do(tx))
		r.note(end.how+" then commit", tx.Commit())
		r.note(end.how+" then rollback", tx.Rollback())
		_, err = tx.ExecContext(r.ctx, "select 1")
		r.note(end.how+" then exec", err)
		_, err = tx.QueryContext(r.ctx, "select 1")
		r.note(end.how+" then query", err)
		_, err = tx.PrepareContext(r.ctx, "select 1")
		r.note(end.how+" then prepare", err)
		_, err = stmt.ExecContext(r.ctx)
		r.note(end.how+" then a statement of it", err)
		r.note(end.how+" then close", stmt.Close())
		r.note("seen outside", r.text(r.db, "select count(*)::text from parent where id = 110"))
		r.exec(r.db, "delete from parent where id = 110")
	}
	r.note("connections", r.db.Stats().OpenConnections, r.db.Stats().InUse, r.backends(anyState))
}

func commitAfterAnError(r *run) {
	tx, err := r.db.BeginTx(r.ctx, nil)
	r.must(err)
	r.exec(tx, "insert into parent values (120)")
	_, err = tx.ExecContext(r.ctx, "select 1/0")
	r.note("the error", err)
	_, err = tx.ExecContext(r.ctx, "select 1")
	r.note("after it", err)
	_, err = tx.PrepareContext(r.ctx, "select 2")
	r.note("prepare after it", err)
	r.note("commit", tx.Commit())
	r.note("rows", r.text(r.db, "select count(*)::text from parent where id = 120"))
	tx, err = r.db.BeginTx(r.ctx, nil)
	r.must(err)
	_, err = tx.ExecContext(r.ctx, "select 1/0")
	r.note("the error", err)
	r.note("rollback", tx.Rollback())
	r.note("connections", r.db.Stats().OpenConnections, r.db.Stats().InUse, r.backends(anyState))
}

func nestedTransactions(r *run) {
	tx, err := r.db.BeginTx(r.ctx, nil)
	r.must(err)
	r.exec(tx, "insert into parent values (130)")
	r.exec(tx, "savepoint one")
	_, err = tx.ExecContext(r.ctx, "insert into parent values (130)")
	r.note("in a savepoint", err)
	r.exec(tx, "rollback to savepoint one")
	_, err = tx.ExecContext(r.ctx, "begin")
	r.note("begin again", err)
	r.exec(tx, "insert into parent values (131)")
	r.note("commit", tx.Commit())
	tx, err = r.db.BeginTx(r.ctx, nil)
	r.must(err)
	r.exec(tx, "insert into parent values (132)")
	_, err = tx.ExecContext(r.ctx, "commit")
	r.note("commit by text", err)
	r.exec(tx, "insert into parent values (133)")
	r.note("commit", tx.Commit())
	tx, err = r.db.BeginTx(r.ctx, nil)
	r.must(err)
	_, err = tx.ExecContext(r.ctx, "rollback")
	r.note("rollback by text", err)
	r.note("rollback", tx.Rollback())
	r.note("rows", r.text(r.db, "select array_agg(id order by id)::text from parent where id >= 130"))
	r.note("in use", r.db.Stats().InUse)
}

func transactionEndsWithItsContext(r *run) {
	ctx, cancel := context.WithCancel(r.ctx)
	tx, err := r.db.BeginTx(ctx, nil)
	r.must(err)
	r.exec(tx, "insert into parent values (140)")
	rows, err := tx.QueryContext(r.ctx, manyRows)
	r.must(err)
	rows.Next()
	cancel()
	// The connection goes with it (F22).
	r.untilBackends(0, anyState)
	r.note("commit", tx.Commit())
	r.note("rollback", tx.Rollback())
	_, err = tx.ExecContext(r.ctx, "insert into parent values (141)")
	r.note("exec", err)
	for rows.Next() {
	}
	r.note("rows", rows.Err(), rows.Close())
	r.note("rows written", r.text(r.db, "select count(*)::text from parent where id >= 140"))
	r.note("in use", r.db.Stats().InUse)

	ctx, cancel = context.WithCancel(r.ctx)
	tx, err = r.db.BeginTx(ctx, nil)
	r.must(err)
	r.exec(tx, "insert into parent values (142)")
	r.note("commit in time", tx.Commit())
	cancel()
	r.note("rows written", r.text(r.db, "select count(*)::text from parent where id >= 140"))
	r.note("connections", r.backends(anyState))
}

func transactionByText(r *run) {
	r.db.SetMaxOpenConns(1)
	pid := r.text(r.db, "select pg_backend_pid()::text")
	r.note("kept between statements", pid == r.text(r.db, "select pg_backend_pid()::text"))
	_, err := r.db.ExecContext(r.ctx, "begin; insert into parent values (150)")
	r.note("begin", err)
	r.note("seen by the next statement", r.text(r.db, "select count(*)::text from parent where id = 150"))
	r.note("kept", pid == r.text(r.db, "select pg_backend_pid()::text"))
	_, err = r.db.ExecContext(r.ctx, "begin; select 1/0")
	r.note("fail", err)
	r.note("the next statement", r.text(r.db, "select 'works'"))
	r.untilBackends(1, anyState)
	r.note("connections", r.db.Stats().OpenConnections)
}

func transactionsOnAConnection(r *run) {
	conn, err := r.db.Conn(r.ctx)
	r.must(err)
	tx, err := conn.BeginTx(r.ctx, &sql.TxOptions{Isolation: sql.LevelRepeatableRead})
	r.must(err)
	r.note("settings", r.text(tx, settings))
	r.note("commit", tx.Commit())
	r.exec(conn, "begin")
	r.exec(conn, "insert into parent values (160)")
	r.note("its own", r.text(conn, "select count(*)::text from parent where id = 160"))
	tx, err = conn.BeginTx(r.ctx, nil)
	r.must(err) // the server warns
	r.exec(tx, "insert into parent values (162)")
	r.note("commit of a begin in a transaction by text", tx.Commit())
	r.note("its own", r.text(conn, "select count(*)::text from parent where id >= 160"))
	r.note("close", conn.Close())
	r.note("rows", r.text(r.db, "select count(*)::text from parent where id >= 160"))
	conn, err = r.db.Conn(r.ctx)
	r.must(err)
	r.exec(conn, "begin")
	r.exec(conn, "insert into parent values (161)")
	r.note("close", conn.Close())
	r.note("left open", r.text(r.db, "select count(*)::text from parent where id = 161"))
	r.untilBackends(0, "state like 'idle in transaction%'")
	r.note("in use", r.db.Stats().InUse)
}

func rowsOpenAtCommit(r *run) {
	for _, n := range []int{1, 1000} {
		tx, err := r.db.BeginTx(r.ctx, nil)
		r.must(err)
		r.exec(tx, "insert into parent values ($1)", 170+n)
		rows, err := tx.QueryContext(r.ctx, "select repeat('x', 1000) from generate_series(1, $1::int)", n)
		r.must(err)
		rows.Next()
		if n == 1 {
			r.note("close", rows.Close())
		}
		r.note("rollback", tx.Rollback())
		r.note("close", rows.Close(), rows.Next())
	}
	r.note("rows written", r.text(r.db, "select count(*)::text from parent where id >= 170"))
	r.note("in use", r.db.Stats().InUse)
}

func serializationFailure(r *run) {
	r.exec(r.db, "insert into parent values (180)")
	serializable := &sql.TxOptions{Isolation: sql.LevelSerializable}
	a, err := r.db.BeginTx(r.ctx, serializable)
	r.must(err)
	b, err := r.db.BeginTx(r.ctx, serializable)
	r.must(err)
	r.note("a reads", r.text(a, "select count(*)::text from child"))
	r.note("b reads", r.text(b, "select count(*)::text from child"))
	r.exec(a, "insert into child values (180, 180, 'a')")
	r.exec(b, "insert into child values (181, 180, 'b')")
	r.note("a commits", a.Commit())
	r.note("b commits", b.Commit())
	r.note("rows", r.text(r.db, "select count(*)::text from child"))
}
