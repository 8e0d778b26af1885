package integration

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"errors"
	"net/url"
	"sync"
	"time"
)

var errorCases = []conformanceCase{
	{"ErrorsOfTheServerArriveWhole", serverErrors},
	{"ADeferredConstraintFailsTheCommit", deferredConstraint},
	{"RowsBeforeAnErrorArrive", rowsBeforeAnError},
	{"TimeoutsOfTheServerAreItsErrors", serverTimeouts},
	{"AContextThatHasEndedSendsNothing", endedContext},
	{"ACancelledContextEndsWhatRuns", cancelledContext},
	{"ADeadlineEndsWhatRuns", expiredContext},
	{"AWrongNumberOfArgumentsIsAnError", wrongNumberOfArguments},
	{"ResultsCountRows", resultsCountRows},
}

func serverErrors(r *run) {
	for _, query := range []string{
		"selec 1", "", ";", "-- nothing", "select * from nowhere", "select nothing from parent", "select no_function()", "select 1/0",
		"insert into parent values (1)", "insert into parent values (null)", "insert into child values (7, 7, 'seven')",
		"insert into child values (8, 1, null)", "insert into child values (8, 1, 'eight', -1)",
		"insert into child values (8, 1, 'a label of more than twenty characters')", "select 6::positive + (-7)::positive", "select 'sadder'::mood",
		"select 'x'::int", "select 99999999999::int4", "drop table parent", "create table parent ()",
		"do $$ begin raise exception 'a %', 'message' using detail = 'a detail', hint = 'a hint', errcode = 'PX001', schema = 's', table = 't'; end $$",
		"commit", "savepoint s", "vacuum (nonsense)", "listen l", "select pg_notify('l', '')",
	} {
		_, err := r.db.ExecContext(r.ctx, query)
		r.note("exec "+query, err)
		var v any
		r.note("query row "+query, r.db.QueryRowContext(r.ctx, query).Scan(&v))
		rows, err := r.db.QueryContext(r.ctx, query)
		r.note("query "+query, rows == nil, err)
		if err == nil {
			r.note("close "+query, rows.Close())
		}
		stmt, err := r.db.PrepareContext(r.ctx, query)
		r.note("prepare "+query, stmt == nil, err)
		if err == nil {
			_, err := stmt.ExecContext(r.ctx)
			r.note("exec prepared "+query, err)
			r.note("close prepared "+query, stmt.Close())
		}
	}
	r.note("at the end", r.text(r.db, "select count(*)::text from child"))
}

func deferredConstraint(r *run) {
	r.exec(r.db, "insert into once values (1)")
	_, err := r.db.ExecContext(r.ctx, "insert into once values (1)")
	r.note("alone", err)
	var v any
	err = r.db.QueryRowContext(r.ctx, "insert into once values (1) returning id").Scan(&v)
	r.note("alone, with a row", v, err)
	rows, err := r.db.QueryContext(r.ctx, "insert into once values (1) returning id")
	r.note("alone, with rows", err)
	if err == nil {
		n := 0
		for rows.Next() {
			n++
		}
		r.note("rows", n, rows.Err(), rows.Close())
	}
	tx, err := r.db.BeginTx(r.ctx, nil)
	r.must(err)
	_, err = tx.ExecContext(r.ctx, "insert into once values (1)")
	r.note("in a transaction", err)
	r.note("its commit", tx.Commit())
	r.note("again", tx.Commit())
	r.note("rollback", tx.Rollback())
	r.note("rows left", r.text(r.db, "select count(*)::text from once"))
	r.note("connections", r.db.Stats().OpenConnections, r.db.Stats().InUse)
}

func rowsBeforeAnError(r *run) {
	for _, query := range []string{
		"select 12 / (5 - i) from generate_series(1, 10) i", "select 12 / (1 - i) from generate_series(1, 10) i",
		"select lpad((12 / (800 - i))::text, 1000, '0') from generate_series(1, 1000) i",
	} {
		rows, err := r.db.QueryContext(r.ctx, query)
		if err != nil {
			r.note(query, err)
			continue
		}
		n, sum := 0, 0
		for rows.Next() {
			var v int
			r.must(rows.Scan(&v))
			n, sum = n+1, sum+v
		}
		var v any
		r.note(query, n, sum, rows.Err(), rows.Next(), rows.Scan(&v), rows.Close(), rows.Err())
	}
	r.note("the connection lives", r.db.PingContext(r.ctx), r.backends(anyState))
}

func serverTimeouts(r *run) {
	tx, err := r.db.BeginTx(r.ctx, nil)
	r.must(err)
	r.exec(tx, "set local statement_timeout = '10ms'")
	_, err = tx.ExecContext(r.ctx, "select pg_sleep(30)")
	r.note("statement_timeout", err)
	_, err = tx.ExecContext(r.ctx, "select 1")
	r.note("after it", err)
	r.note("commit", tx.Commit())

	holder, err := r.db.BeginTx(r.ctx, nil)
	r.must(err)
	r.exec(holder, "lock table parent")
	_, err = r.db.ExecContext(r.ctx, "set lock_timeout = '10ms'; select * from parent")
	r.note("lock_timeout", err)
	r.note("rollback", holder.Rollback())
	_, err = r.db.ExecContext(r.ctx, "select * from parent")
	r.note("after it", err)
}

// endedContext leaves sql.Conn out: raw pgx answers driver.ErrBadConn there.
func endedContext(r *run) {
	ctx, cancel := context.WithCancel(r.ctx)
	cancel()
	late, cancelLate := context.WithDeadline(r.ctx, time.Now().Add(-time.Second))
	defer cancelLate()
	stmt, err := r.db.PrepareContext(r.ctx, "insert into parent values (50)")
	r.must(err)
	defer stmt.Close()
	tx, err := r.db.BeginTx(r.ctx, nil)
	r.must(err)
	for _, ctx := range []context.Context{ctx, late} {
		_, err = tx.ExecContext(ctx, "insert into parent values (55)")
		r.note("tx.Exec", err)
		_, err = tx.QueryContext(ctx, "select 1")
		r.note("tx.Query", err)
		_, err = tx.PrepareContext(ctx, "select 1")
		r.note("tx.Prepare", err)
		_, err = tx.ExecContext(r.ctx, "select 1")
		r.note("tx.Exec afterwards", err)
		_, err := r.db.ExecContext(ctx, "insert into parent values (51)")
		r.note("db.Exec", err)
		_, err = r.db.QueryContext(ctx, "insert into parent values (52) returning id")
		r.note("db.Query", err)
		_, err = r.db.PrepareContext(ctx, "select 1")
		r.note("db.Prepare", err)
		_, err = r.db.BeginTx(ctx, nil)
		r.note("db.Begin", err)
		r.note("db.Ping", r.db.PingContext(ctx))
		_, err = r.db.Conn(ctx)
		r.note("db.Conn", err)
		_, err = stmt.ExecContext(ctx)
		r.note("stmt.Exec", err)
	}
	r.note("commit", tx.Commit())
	r.note("connections left", r.backends(anyState) > 0)
	r.note("rows written", r.text(r.db, "select count(*)::text from parent where id > 49"))
}

// whileAsleep runs do, cancels its context when the server is in the pg_sleep that do sent, and waits for do to return.
func (r *run) whileAsleep(do func(context.Context)) {
	ctx, cancel := context.WithCancel(r.ctx)
	defer cancel()
	r.endAsleep(ctx, cancel, do)
}

func (r *run) endAsleep(ctx context.Context, end func(), do func(context.Context)) {
	done := make(chan struct{})
	go func() {
		defer close(done)
		do(ctx)
	}()
	r.untilBackends(1, sleeping)
	end()
	select {
	case <-done:
	case <-time.After(patience):
		r.fail("the call does not return after its context has ended")
	}
	r.untilBackends(0, sleeping)
}

// expiring is a context whose deadline comes when the test says so.
type expiring struct {
	context.Context
	done chan struct{}
	once sync.Once
}

func (e *expiring) expire()               { e.once.Do(func() { close(e.done) }) }
func (e *expiring) Done() <-chan struct{} { return e.done }

func (e *expiring) Err() error {
	select {
	case <-e.done:
		return context.DeadlineExceeded
	default:
		return nil
	}
}

func cancelledContext(r *run) {
	r.whileAsleep(func(ctx context.Context) {
		_, err := r.db.ExecContext(ctx, "insert into parent select 60 from pg_sleep(30)")
		r.note("db.Exec", err)
	})
	r.note("the next statement", r.text(r.db, "select 'works'"))
	r.whileAsleep(func(ctx context.Context) {
		_, err := r.db.QueryContext(ctx, "select pg_sleep(30)")
		r.note("db.Query", err)
	})
	r.whileAsleep(func(ctx context.Context) {
		// The first rows arrive, and more than fits between the two.
		rows, err := r.db.QueryContext(ctx, `select repeat('x', 100000) from generate_series(1, 100)
			union all select 'y' from pg_sleep(30)`)
		r.must(err)
		n := 0
		for rows.Next() {
			n++
		}
		r.note("rows", n > 0, rows.Err())
		_ = rows.Close() // database/sql closes them as well, and whoever is first hears of it
	})
	conn, err := r.db.Conn(r.ctx)
	r.must(err)
	r.whileAsleep(func(ctx context.Context) {
		_, err := conn.ExecContext(ctx, "select pg_sleep(30)")
		r.note("conn.Exec", err)
	})
	_, err = conn.ExecContext(r.ctx, "select 1")
	r.note("conn.Exec afterwards", err)
	_, err = conn.ExecContext(r.ctx, "select 1")
	r.note("conn.Exec once more", err)
	r.note("conn.Close", conn.Close())
	tx, err := r.db.BeginTx(r.ctx, nil)
	r.must(err)
	r.exec(tx, "insert into parent values (61)")
	r.whileAsleep(func(ctx context.Context) {
		_, err := tx.ExecContext(ctx, "select pg_sleep(30)")
		r.note("tx.Exec", err)
	})
	_, err = tx.ExecContext(r.ctx, "select 1")
	r.note("tx.Exec afterwards", err)
	r.note("tx.Commit", tx.Commit())
	stmt, err := r.db.PrepareContext(r.ctx, "select pg_sleep($1)")
	r.must(err)
	r.whileAsleep(func(ctx context.Context) {
		_, err := stmt.ExecContext(ctx, 30)
		r.note("stmt.Exec", err)
	})
	_, err = stmt.ExecContext(r.ctx, 0)
	r.note("stmt.Exec afterwards", err)
	r.note("stmt.Close", stmt.Close())
	r.note("rows written", r.text(r.db, "select count(*)::text from parent where id > 59"))
	r.note("in use", r.db.Stats().InUse)
}

func expiredContext(r *run) {
	expire := func(do func(context.Context)) {
		ctx := &expiring{Context: r.ctx, done: make(chan struct{})}
		r.endAsleep(ctx, ctx.expire, do)
	}
	expire(func(ctx context.Context) {
		_, err := r.db.ExecContext(ctx, "insert into parent select 70 from pg_sleep(30)")
		r.note("exec", err)
	})
	expire(func(ctx context.Context) {
		var v any
		r.note("query row", r.db.QueryRowContext(ctx, "select pg_sleep(30)").Scan(&v))
	})
	tx, err := r.db.BeginTx(r.ctx, nil)
	r.must(err)
	expire(func(ctx context.Context) {
		_, err := tx.ExecContext(ctx, "insert into parent select 71 from pg_sleep(30)")
		r.note("in a transaction", err)
	})
	r.note("commit", tx.Commit())
	ctx, cancel := context.WithTimeout(r.ctx, 50*time.Millisecond)
	defer cancel()
	// It writes nothing: the server ignores a cancel that arrives before it has begun.
	_, err = r.db.ExecContext(ctx, "select pg_sleep(5)")
	r.note("by the clock", errors.Is(err, context.DeadlineExceeded), errors.Is(err, driver.ErrBadConn))
	r.untilBackends(0, sleeping)
	r.note("rows written", r.text(r.db, "select count(*)::text from parent where id in (70, 71)"))
	r.note("in use", r.db.Stats().InUse)
}

func wrongNumberOfArguments(r *run) {
	for _, args := range [][]any{{}, {1}, {1, 2, 3}} {
		_, err := r.db.ExecContext(r.ctx, "select $1::int, $2::int", args...)
		r.note("exec", err)
		_, err = r.db.QueryContext(r.ctx, "select $1::int, $2::int", args...)
		r.note("query", err)
	}
	_, err := r.db.ExecContext(r.ctx, "select 1", 1)
	r.note("none wanted", err)
	var a, b int
	r.note("too few to scan", r.db.QueryRowContext(r.ctx, "select 1").Scan(&a, &b))
	r.note("too many to scan", r.db.QueryRowContext(r.ctx, "select 1, 2, 3").Scan(&a, &b))
	r.note("no rows", r.db.QueryRowContext(r.ctx, "select 1 where false").Scan(&a))
	r.note("in use", r.db.Stats().InUse)
}

func resultsCountRows(r *run) {
	for _, query := range []string{
		"insert into parent select generate_series(80, 84)", "update parent set id = id where id >= 82", "delete from parent where id >= 80",
		"delete from parent where id >= 80", "select * from parent", "create table counted (n int)", "truncate counted",
		"with w as (insert into counted values (1), (2) returning n) select * from w",
		"insert into counted values (3) on conflict do nothing", "set timezone = 'UTC'", "show timezone",
	} {
		result, err := r.db.ExecContext(r.ctx, query)
		noteResult(r, query, result, err)
	}
}

var connectCases = []conformanceCase{
	{"AConnectionThatIsRefusedSaysWhy", refusedConnections},
	{"AConnectionTooManyIsAnErrorUntilThereIsRoom", tooManyConnections},
}

// refusedConnections leaves db.Conn and db.Stats out: raw pgx connects there already, pgsplit with the first statement.
func refusedConnections(r *run) {
	for _, refused := range []struct {
		why  string
		edit func(*url.URL)
	}{
		{"a wrong password", func(u *url.URL) { u.User = url.UserPassword("guarded", "wrong") }},
		{"no such user", func(u *url.URL) { u.User = url.User("nobody_here") }},
		{"no such database", func(u *url.URL) { u.Path = "/nowhere" }},
		{"nobody listens", func(u *url.URL) { u.Host = "127.0.0.1:1" }},
		{"no such socket", func(u *url.URL) { u.Host = ""; setParameter(u, "host", "/nonexistent") }},
		{"an unknown setting", func(u *url.URL) { setParameter(u, "no_such_setting", "1") }},
		{"a bad value", func(u *url.URL) { setParameter(u, "statement_timeout", "soon") }},
	} {
		db := r.open(refused.edit)
		r.note(refused.why+": ping", db.PingContext(r.ctx))
		_, err := db.ExecContext(r.ctx, "select 1")
		r.note(refused.why+": exec", err)
		_, err = db.QueryContext(r.ctx, "select 1")
		r.note(refused.why+": query", err)
		_, err = db.BeginTx(r.ctx, nil)
		r.note(refused.why+": begin", err)
		_, err = db.PrepareContext(r.ctx, "select 1")
		r.note(refused.why+": prepare", err)
		r.note(refused.why+": in use", db.Stats().InUse)
		r.note(refused.why+": close", db.Close())
	}
	db := r.open(func(u *url.URL) { u.User = url.UserPassword("guarded", "right") })
	r.note("the right password", r.text(db, "select current_user::text"))
}

func tooManyConnections(r *run) {
	db := r.open(func(u *url.URL) { u.User = url.User(r.database) })
	tx, err := db.BeginTx(r.ctx, nil)
	r.must(err)
	_, err = db.ExecContext(r.ctx, "select 1")
	r.note("one too many", err)
	r.note("a transaction too many", func() error {
		_, err := db.BeginTx(r.ctx, &sql.TxOptions{ReadOnly: true})
		return err
	}())
	r.must(tx.Commit())
	_, err = db.ExecContext(r.ctx, "select 1")
	r.note("with room again", err)
}
