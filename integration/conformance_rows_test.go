package integration

import (
	"context"
	"database/sql"
	"fmt"
	"net/url"
	"sync"
	"sync/atomic"
	"time"
)

var rowsCases = []conformanceCase{
	{"RowsClosedEarlyLeaveTheConnectionUsable", rowsClosedEarly},
	{"RowsAtAndAfterTheirEnd", rowsAtTheirEnd},
	{"OpenRowsLeaveTheOtherConnectionsFree", openRowsBusy},
	{"RowsOutliveTheClosedDB", rowsOutliveDB},
}

// manyRows are more than a driver reads at once, and few enough for the race detector, which counts rows and not bytes.
const manyRows = "select repeat('x', 1000) from generate_series(1, 1000)"

func rowsClosedEarly(r *run) {
	r.db.SetMaxOpenConns(1)
	pid := r.text(r.db, "select pg_backend_pid()::text")
	for _, n := range []int{0, 1, 1000} {
		rows, err := r.db.QueryContext(r.ctx, "select repeat('x', 1000) from generate_series(1, $1::int)", n)
		r.must(err)
		r.note("in use", r.db.Stats().InUse)
		r.note("next", rows.Next())
		r.note("close", rows.Close(), rows.Err(), rows.Close())
		r.note("in use", r.db.Stats().InUse, pid == r.text(r.db, "select pg_backend_pid()::text"))
	}
	var v string
	r.note("one of many", r.db.QueryRowContext(r.ctx, manyRows).Scan(&v), len(v))
	r.note("kept", pid == r.text(r.db, "select pg_backend_pid()::text"))
}

func rowsAtTheirEnd(r *run) {
	rows, err := r.db.QueryContext(r.ctx, "select 1 as one, 'two'::text as two")
	r.must(err)
	var a, b any
	r.note("scan before next", rows.Scan(&a, &b))
	r.note("next", rows.Next())
	r.note("scan too few", rows.Scan(&a))
	r.note("scan into the wrong type", rows.Scan(&a, new(int)))
	r.note("scan into a value", rows.Scan(&a, 1))
	r.note("scan into nil", rows.Scan(&a, (*int)(nil)))
	r.note("scan", rows.Scan(&a, &b), &a, &b)
	r.note("scan again", rows.Scan(&a, &b), &a, &b)
	r.note("next", rows.Next(), rows.Err())
	r.note("scan after the end", rows.Scan(&a, &b))
	r.note("next result set", rows.NextResultSet(), rows.Err())
	columns, err := rows.Columns()
	r.note("columns", columns, err)
	types, err := rows.ColumnTypes()
	r.note("types", len(types), err)
	r.note("close", rows.Close(), rows.Next(), rows.Err())
	var raw sql.RawBytes
	r.note("RawBytes of a row", r.db.QueryRowContext(r.ctx, "select 'x'::text").Scan(&raw))
	r.note("in use", r.db.Stats().InUse)
}

// openRowsBusy uses other connections meanwhile: on the same one raw pgx answers driver.ErrBadConn.
func openRowsBusy(r *run) {
	rows, err := r.db.QueryContext(r.ctx, manyRows)
	r.must(err)
	r.note("next", rows.Next())
	r.note("beside", r.text(r.db, "select 'works'"), r.db.Stats().InUse, r.db.Stats().OpenConnections)
	tx, err := r.db.BeginTx(r.ctx, nil)
	r.must(err)
	inTx, err := tx.QueryContext(r.ctx, manyRows)
	r.must(err)
	r.note("next in a transaction", inTx.Next())
	r.note("beside", r.text(r.db, "select 'works'"), r.db.Stats().InUse, r.db.Stats().OpenConnections)
	n := 0
	for rows.Next() {
		n++
	}
	r.note("rows", n, rows.Err(), rows.Close())
	r.note("close in the transaction", inTx.Close())
	r.note("query afterwards", r.text(tx, "select 'works'"), tx.Commit(), r.db.Stats().InUse)
}

func rowsOutliveDB(r *run) {
	rows, err := r.db.QueryContext(r.ctx, manyRows)
	r.must(err)
	r.note("next", rows.Next())
	r.note("close the db", r.db.Close())
	n := 1
	for rows.Next() {
		n++
	}
	r.note("rows", n, rows.Err(), rows.Close())
	_, err = r.db.ExecContext(r.ctx, "select 1")
	r.note("exec", err)
	r.note("ping", r.db.PingContext(r.ctx))
	r.note("close again", r.db.Close())
	r.untilBackends(0, anyState)
	db := r.open(func(*url.URL) {})
	tx, err := db.BeginTx(r.ctx, nil)
	r.must(err)
	conn, err := db.Conn(r.ctx)
	r.must(err)
	r.exec(conn, "select 1")
	r.note("close with a transaction open", db.Close())
	_, err = tx.ExecContext(r.ctx, "insert into parent values (300)")
	r.note("its statement", err)
	r.note("its commit", tx.Commit())
	_, err = conn.ExecContext(r.ctx, "select 1")
	r.note("a held connection's statement", err)
	r.note("its close", conn.Close())
	r.untilBackends(0, anyState)
}

var poolCases = []conformanceCase{
	{"PingReachesTheServer", pings},
	{"TheKnobsOfThePoolBoundTheServersConnections", poolBounds},
	{"ConnectionsGrowOldAndAreClosed", poolAges},
	{"WaitingForAConnectionIsCountedAndEndsWithTheContext", poolWaits},
}

func pings(r *run) {
	r.note("before", r.backends(anyState))
	for range 3 {
		r.note("ping", r.db.PingContext(r.ctx), r.backends(anyState), r.db.Stats().OpenConnections)
	}
	conn, err := r.db.Conn(r.ctx)
	r.must(err)
	r.note("of a connection", conn.PingContext(r.ctx), conn.PingContext(r.ctx), conn.Close())
	r.note("after it", r.db.PingContext(r.ctx), r.db.Stats().InUse)
}

// hold takes n connections of the pool at the same time.
func hold(r *run, n int) (release func()) {
	var held []*sql.Tx
	for range n {
		tx, err := r.db.BeginTx(r.ctx, nil)
		r.must(err)
		held = append(held, tx)
	}
	return func() {
		for _, tx := range held {
			r.must(tx.Rollback())
		}
	}
}

func noteStats(r *run, what string) {
	s := r.db.Stats()
	s.WaitDuration = 0
	r.note(what, s)
}

func poolBounds(r *run) {
	noteStats(r, "before")
	for _, knobs := range []struct{ open, idle, use int }{{0, 2, 6}, {0, 4, 6}, {4, 4, 4}, {4, 1, 4}, {2, 5, 2}, {0, 0, 3}, {1, 1, 1}} {
		r.db.SetMaxOpenConns(knobs.open)
		r.db.SetMaxIdleConns(knobs.idle)
		release := hold(r, knobs.use)
		r.untilBackends(knobs.use, anyState)
		noteStats(r, fmt.Sprintf("%+v held", knobs))
		release()
		left := r.db.Stats().OpenConnections
		r.untilBackends(left, anyState)
		noteStats(r, fmt.Sprintf("%+v released", knobs))
	}
	r.db.SetMaxOpenConns(3)
	var failed atomic.Int64
	var wg sync.WaitGroup
	for range 30 {
		wg.Go(func() {
			if _, err := r.db.ExecContext(r.ctx, "select pg_sleep(0.001)"); err != nil {
				failed.Add(1)
			}
		})
	}
	wg.Wait()
	r.note("failed", failed.Load())
	r.note("bound kept", r.db.Stats().OpenConnections <= 3, r.backends(anyState) <= 3)
	r.note("close", r.db.Close())
	r.untilBackends(0, anyState)
}

func poolAges(r *run) {
	r.db.SetMaxIdleConns(5)
	hold(r, 3)()
	r.untilBackends(3, anyState)
	r.db.SetConnMaxIdleTime(time.Millisecond)
	r.untilBackends(0, anyState)
	r.until(func() bool { return r.db.Stats().OpenConnections == 0 }, func() string { return "connections stay open" })
	noteStats(r, "idle for too long")
	r.db.SetConnMaxIdleTime(0)
	pid := r.text(r.db, "select pg_backend_pid()::text")
	r.db.SetConnMaxLifetime(time.Nanosecond)
	r.note("too old", pid == r.text(r.db, "select pg_backend_pid()::text"))
	r.untilBackends(0, anyState)
	r.db.SetConnMaxLifetime(0)
	r.db.SetMaxIdleConns(0)
	r.note("none idle", r.text(r.db, "select 'works'"))
	r.untilBackends(0, anyState)
}

func poolWaits(r *run) {
	r.db.SetMaxOpenConns(1)
	release := hold(r, 1)
	r.whileWaiting(func() { release() })
	noteStats(r, "waited")
}

// whileWaiting lets three callers wait for the one connection, of whom one gives up.
func (r *run) whileWaiting(release func()) {
	done := make(chan error, 3)
	for i := range 2 {
		go func() {
			_, err := r.db.ExecContext(r.ctx, "insert into parent values ($1)", 400+i)
			done <- err
		}()
	}
	r.until(func() bool { return r.db.Stats().WaitCount == 2 }, func() string { return "nobody waits" })
	ctx, cancel := context.WithCancel(r.ctx)
	go func() {
		_, err := r.db.ExecContext(ctx, "insert into parent values (402)")
		done <- err
	}()
	r.until(func() bool { return r.db.Stats().WaitCount == 3 }, func() string { return "nobody waits" })
	cancel()
	r.note("gave up", <-done)
	release()
	r.note("waited", <-done, <-done)
	r.note("written", r.text(r.db, "select count(*)::text from parent where id >= 400"))
}
