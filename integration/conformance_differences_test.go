package integration

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"errors"
	"fmt"
	"net/url"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/stdlib"
	"go.uber.org/goleak"

	"github.com/pgsplit/pgsplit"
	"github.com/pgsplit/pgsplit/pgsplittest"
)

// Where pgsplit means to differ from raw pgx, and by how much.
var differences = []conformanceCase{
	{"AHeldConnectionOutlivesAStatementWhoseContextHadEnded", endedContextOnAHeldConnection},
	{"OpenRowsMakeAHeldConnectionBusyWithoutLosingIt", openRowsOnAHeldConnection},
	{"APingFindsALivingServerWhateverDiedInThePool", pingOfADeadConnection},
	{"AnUnreachableServerShowsWithTheFirstStatement", unreachableServer},
	{"ACancelledTransactionCostsThePoolNoConnection", cancelledTransaction},
	{"RawOfDatabaseSQLGivesPgsplitsOwnConnection", rawOfDatabaseSQL},
}

func TestPgsplitDiffersFromRawPgxWhereItMeansTo(t *testing.T) {
	g := newGround(t)
	for _, b := range bases {
		s := g.subject(t, b, wrappers[0])
		for _, d := range differences {
			t.Run(d.name+"/"+b.slug(), func(t *testing.T) { s.perform(t, d.do) })
		}
	}
}

// slug is the base in a test's name.
func (b base) slug() string { return strings.ReplaceAll(b.name, " ", "_") }

// perform runs do over the subject alone.
func (s *subject) perform(t *testing.T, do func(*run)) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), caseLimit)
	defer cancel()
	r := s.newRun(ctx)
	r.perform(do)
	if r.failure != "" {
		t.Error(r.failure)
	}
}

func (r *run) overPgsplit() bool { return r.base.driver == "pgsplit" }

// want fails the case unless what it saw is what both drivers, or this one, are known for.
func (r *run) want(what string, got, want any) {
	if got != want {
		r.fail("%s: %v, want %v", what, got, want)
	}
}

// raw pgx takes a statement that it did not send for a bad connection. A pool tries another one, but a held connection is the
// only one: the caller sees driver.ErrBadConn, and the connection is closed.
func endedContextOnAHeldConnection(r *run) {
	conn, err := r.db.Conn(r.ctx)
	r.must(err)
	r.exec(conn, "set work_mem = '5MB'")
	ended, cancel := context.WithCancel(r.ctx)
	cancel()
	_, err = conn.ExecContext(ended, "select 1")
	r.want("is ErrBadConn", errors.Is(err, driver.ErrBadConn), !r.overPgsplit())
	r.want("is Canceled", errors.Is(err, context.Canceled), r.overPgsplit())
	_, err = conn.ExecContext(r.ctx, "select 1")
	r.want("the connection is gone", errors.Is(err, sql.ErrConnDone), !r.overPgsplit())
	if r.overPgsplit() {
		r.must(err)
		r.want("its session", r.text(conn, "show work_mem"), "5MB")
		_, err = conn.QueryContext(ended, "select 1")
		r.want("query is Canceled", errors.Is(err, context.Canceled), true)
		_, err = conn.PrepareContext(ended, "select 1")
		r.want("prepare is Canceled", errors.Is(err, context.Canceled), true)
		_, err = conn.BeginTx(ended, nil)
		r.want("begin is Canceled", errors.Is(err, context.Canceled), true)
		r.want("its session", r.text(conn, "show work_mem"), "5MB")
		r.must(conn.Close())
	}
}

// raw pgx answers driver.ErrBadConn while rows are open, and the held connection with them is closed.
func openRowsOnAHeldConnection(r *run) {
	tx, err := r.db.BeginTx(r.ctx, nil)
	r.must(err)
	rows, err := tx.QueryContext(r.ctx, manyRows)
	r.must(err)
	rows.Next()
	_, err = tx.ExecContext(r.ctx, "select 1")
	r.want("an error", err != nil, true)
	r.want("is ErrBadConn in a transaction", errors.Is(err, driver.ErrBadConn), !r.overPgsplit())
	r.must(rows.Close())
	r.exec(tx, "select 1")
	r.must(tx.Commit())
	if !r.overPgsplit() {
		return
	}
	conn, err := r.db.Conn(r.ctx)
	r.must(err)
	r.exec(conn, "set work_mem = '5MB'")
	rows, err = conn.QueryContext(r.ctx, manyRows)
	r.must(err)
	rows.Next()
	_, execErr := conn.ExecContext(r.ctx, "select 1")
	_, queryErr := conn.QueryContext(pgsplit.ReadOnly(r.ctx), "select 1")
	_, prepareErr := conn.PrepareContext(r.ctx, "select 2")
	_, beginErr := conn.BeginTx(r.ctx, nil)
	for _, err := range []error{execErr, queryErr, prepareErr, beginErr, conn.PingContext(r.ctx)} {
		if err == nil || !strings.Contains(err.Error(), "busy") || errors.Is(err, driver.ErrBadConn) {
			r.fail("while rows are open: %v", err)
		}
	}
	n := 1
	for rows.Next() {
		n++
	}
	r.must(rows.Err())
	r.want("rows", n, 1000)
	r.want("its session", r.text(conn, "show work_mem"), "5MB")
	r.must(conn.Close())
}

// database/sql does not try a Ping again, so raw pgx shows driver.ErrBadConn for a connection that died in the pool.
func pingOfADeadConnection(r *run) {
	r.exec(r.db, "select 1")
	r.exec(r.db, "select 1")
	r.kill(anyState)
	err := r.db.PingContext(r.ctx)
	r.want("is ErrBadConn", errors.Is(err, driver.ErrBadConn), !r.overPgsplit())
	if r.overPgsplit() {
		r.must(err)
	}
	r.must(r.db.PingContext(r.ctx))
}

// A connection of pgsplit's does not connect until a statement says where to.
func unreachableServer(r *run) {
	db := r.open(func(u *url.URL) { u.Host = "127.0.0.1:1" })
	conn, err := db.Conn(r.ctx)
	r.want("db.Conn fails", err != nil, !r.overPgsplit())
	if err == nil {
		_, err = conn.ExecContext(r.ctx, "select 1")
		r.want("its first statement fails without a primary", errors.Is(err, pgsplit.ErrNoPrimary), true)
		_, err = conn.ExecContext(r.ctx, "select 1")
		r.want("so does the next", errors.Is(err, pgsplit.ErrNoPrimary), true)
		r.must(conn.Close())
	}
	r.want("open connections", db.Stats().OpenConnections, map[bool]int{true: 1, false: 0}[r.overPgsplit()])

	_, err = r.wrapper.open(r.base.driver, "postgres://localhost/db?sslmode=sometimes")
	r.want("a bad DSN fails at once", errors.Is(err, pgsplit.ErrConfig), r.overPgsplit())

	conn, err = r.db.Conn(r.ctx)
	r.must(err)
	r.want("connections of a held one that did nothing", r.backends(anyState), map[bool]int{true: 0, false: 1}[r.overPgsplit()])
	r.must(conn.Close())
}

// database/sql keeps a connection of pgsplit's after a cancelled transaction, since only the physical one is closed.
func cancelledTransaction(r *run) {
	ctx, cancel := context.WithCancel(r.ctx)
	_, err := r.db.BeginTx(ctx, nil)
	r.must(err)
	cancel()
	r.untilBackends(0, anyState)
	want := map[bool]int{true: 1, false: 0}[r.overPgsplit()]
	r.until(func() bool { return r.db.Stats().OpenConnections == want && r.db.Stats().InUse == 0 },
		func() string { return fmt.Sprintf("%+v, want %d open connections", r.db.Stats(), want) })
	r.exec(r.db, "select 1")
	r.want("connections", r.backends(anyState), 1)
}

// The connection of sql.Conn.Raw is pgsplit's. pgsplit.Raw gives pgx's.
func rawOfDatabaseSQL(r *run) {
	conn, err := r.db.Conn(r.ctx)
	r.must(err)
	r.must(conn.Raw(func(c any) error {
		_, pgxs := c.(*stdlib.Conn)
		_, ours := c.(*pgsplit.Conn)
		r.want("pgx's", pgxs, !r.overPgsplit())
		r.want("pgsplit's", ours, r.overPgsplit())
		return nil
	}))
	r.must(conn.Close())
}

// explosive is a Valuer with a bug.
type explosive struct{}

func (explosive) Value() (driver.Value, error) { panic("of a Valuer") }

// A panic in a Valuer goes through raw pgx to the caller, and the connection of sql.DB is in use for ever (F21).
func TestAPanickingValuerIsAnErrorAndLeaksNothing(t *testing.T) {
	g := newGround(t)
	for _, b := range bases {
		s := g.subject(t, b, wrappers[0])
		for _, w := range wrappers {
			t.Run(w.name+"/"+b.slug(), func(t *testing.T) { s.behind(w).perform(t, panickingValuer) })
		}
	}
}

func panickingValuer(r *run) {
	r.db.SetMaxOpenConns(1)
	if !r.overPgsplit() {
		func() {
			defer func() { r.want("recovered", recover(), "of a Valuer") }()
			_, _ = r.db.QueryContext(r.ctx, "select $1::text", explosive{})
		}()
		r.want("in use for ever", r.db.Stats().InUse, 1)
		return
	}
	stmt, err := r.db.PrepareContext(r.ctx, "select $1::text")
	r.must(err)
	for range 3 {
		var v any
		_, execErr := r.db.ExecContext(r.ctx, "select $1::text", explosive{})
		for _, err := range []error{
			execErr, r.db.QueryRowContext(r.ctx, "select $1::text", explosive{}).Scan(&v), stmt.QueryRowContext(r.ctx, explosive{}).Scan(&v),
		} {
			if err == nil || !strings.Contains(err.Error(), "of a Valuer") {
				r.fail("the panic shows as %v", err)
			}
		}
	}
	tx, err := r.db.BeginTx(r.ctx, nil)
	r.must(err)
	_, err = tx.ExecContext(r.ctx, "select $1::text", explosive{})
	r.want("an error in a transaction", err != nil, true)
	_ = tx.Rollback() // its connection is closed
	r.want("in use", r.db.Stats().InUse, 0)
	r.want("the next statement", r.text(r.db, "select 'works'"), "works")
	r.untilBackends(1, anyState)
}

// raw pgx asks the server while sql.DB holds its lock (F21).
func TestClosingAStatementWaitsForNoServer(t *testing.T) {
	cluster := pgsplittest.Start(t, pgsplittest.Replicas(0))
	ctx := limited(t)
	db, err := sql.Open("pgsplit", cluster.DSN())
	must(t, err)
	defer db.Close()
	stmt, err := db.PrepareContext(ctx, "select 1")
	must(t, err)
	_, err = stmt.ExecContext(ctx)
	must(t, err)
	must(t, cluster.Primary.Freeze())
	closed := make(chan error, 1)
	go func() {
		closed <- stmt.Close()
		_ = db.Stats() // takes sql.DB's lock
	}()
	select {
	case err := <-closed:
		must(t, err)
	case <-time.After(30 * time.Second):
		t.Error("Stmt.Close waits for a server that does not answer")
	}
	must(t, cluster.Primary.Thaw())
	_, err = db.ExecContext(ctx, "select 1")
	must(t, err)
}

// restart is one sql.DB over a server that is restarted.
type restart struct {
	*testing.T
	db     *sql.DB
	server *pgsplittest.Server

	mu       sync.Mutex
	returned map[int]bool // inserts that were called, and whether they succeeded; guarded by mu
}

func (r *restart) insert(ctx context.Context, id int) {
	_, err := r.db.ExecContext(ctx, "insert into written values ($1)", id)
	if errors.Is(err, driver.ErrBadConn) {
		r.Errorf("insert %d: %v", id, err)
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.returned[id] = err == nil
}

// check finds no insert twice, and each that succeeded.
func (r *restart) check(ctx context.Context) (failed int) {
	rows, err := r.db.QueryContext(ctx, "select id, count(*) from written group by id")
	must(r.T, err)
	defer rows.Close()
	written := map[int]int{}
	for rows.Next() {
		var id, n int
		must(r.T, rows.Scan(&id, &n))
		written[id] = n
	}
	must(r.T, rows.Err())
	for id, succeeded := range r.returned {
		if n := written[id]; n > 1 || succeeded && n != 1 {
			r.Errorf("insert %d: succeeded %v, written %d times", id, succeeded, n)
		}
		if !succeeded {
			failed++
		}
	}
	return failed
}

// idle leaves n idle connections in the pool.
func (r *restart) idle(ctx context.Context, n int) {
	var open []*sql.Tx
	for range n {
		tx, err := r.db.BeginTx(ctx, nil)
		must(r.T, err)
		open = append(open, tx)
	}
	for _, tx := range open {
		must(r.T, tx.Rollback())
	}
}

func TestARestartOfTheServerCostsNoMoreThanTheConnectionsThatDied(t *testing.T) {
	for _, b := range bases {
		t.Run(b.slug(), func(t *testing.T) {
			cluster := pgsplittest.Start(t, pgsplittest.Replicas(b.replicas))
			dsn := cluster.Primary.URI()
			if b.replicas > 0 {
				dsn = cluster.DSN()
			}
			for _, c := range []struct {
				name string
				do   func(context.Context, *restart)
			}{
				{"AfterItNoMoreStatementsFailThanConnectionsDied", afterARestart},
				{"AfterAPauseNoStatementFails", longAfterARestart},
				{"UnderLoadItAppliesNoWriteTwice", restartUnderLoad},
			} {
				t.Run(c.name, func(t *testing.T) {
					ctx := limited(t)
					db, err := sql.Open(b.driver, dsn)
					must(t, err)
					defer db.Close()
					db.SetMaxIdleConns(10)
					_, err = db.ExecContext(ctx, "drop table if exists written; create table written (id int)")
					must(t, err)
					c.do(ctx, &restart{T: t, db: db, server: cluster.Primary, returned: map[int]bool{}})
				})
			}
		})
	}
}

func (r *restart) restart(ctx context.Context) {
	must(r.T, r.server.Restart(ctx, pgsplittest.Fast))
}

func afterARestart(ctx context.Context, r *restart) {
	r.idle(ctx, 10)
	r.restart(ctx)
	for id := range 30 {
		r.insert(ctx, id)
	}
	if failed := r.check(ctx); failed > 10 {
		r.Errorf("%d of 30 inserts failed over 10 dead connections", failed)
	}
	for id := 20; id < 30; id++ {
		if !r.returned[id] {
			r.Errorf("insert %d failed, after every dead connection was tried", id)
		}
	}
}

// pingAfter is how long a connection has to be idle for pgx and pgsplit to look whether it lives.
const pingAfter = time.Second

func longAfterARestart(ctx context.Context, r *restart) {
	r.idle(ctx, 10)
	idle := time.After(pingAfter + 100*time.Millisecond)
	r.restart(ctx)
	<-idle
	for id := range 30 {
		r.insert(ctx, id)
	}
	if failed := r.check(ctx); failed > 0 {
		r.Errorf("%d inserts failed", failed)
	}
}

func restartUnderLoad(ctx context.Context, r *restart) {
	const workers = 10
	r.db.SetMaxOpenConns(workers)
	stop := make(chan struct{})
	started := make(chan struct{}, workers)
	var wg sync.WaitGroup
	for worker := range workers {
		wg.Go(func() {
			for i := 0; ; i++ {
				r.insert(ctx, 1_000_000*worker+i)
				if i == 0 {
					started <- struct{}{}
				}
				select {
				case <-stop:
					return
				default:
				}
			}
		})
	}
	for range workers {
		<-started
	}
	r.restart(ctx)
	close(stop)
	wg.Wait()
	// pgsplit goes back to a server that was down when a probe gets in.
	deadline := time.After(time.Minute)
	for err := r.db.PingContext(ctx); err != nil; err = r.db.PingContext(ctx) {
		select {
		case <-deadline:
			r.Fatal(err)
		case <-time.After(10 * time.Millisecond):
		}
	}
	if failed := r.check(ctx); failed == len(r.returned) {
		r.Errorf("all %d inserts failed", failed)
	}
	if inUse := r.db.Stats().InUse; inUse != 0 {
		r.Errorf("%d connections in use", inUse)
	}
}

func TestCancelledRequestsLeaveNothing(t *testing.T) {
	g := newGround(t)
	s := g.subject(t, bases[2], wrappers[0])
	for i, w := range wrappers {
		requests := 2000
		if i > 0 {
			requests = 200 // to see whether the wrapper hides something that matters
		}
		t.Run(w.name, func(t *testing.T) {
			before := goleak.IgnoreCurrent()
			s.behind(w).perform(t, func(r *run) {
				r.db.SetMaxOpenConns(4)
				stmt, err := r.db.PrepareContext(r.ctx, "select $1::int")
				r.must(err)
				var wg sync.WaitGroup
				for worker := range 4 {
					wg.Go(func() {
						for i := range requests / 4 {
							cancelledRequest(r, stmt, worker+i)
						}
					})
				}
				wg.Wait()
				r.until(func() bool { return r.db.Stats().InUse == 0 }, func() string { return fmt.Sprintf("%+v", r.db.Stats()) })
				r.must(stmt.Close())
				r.want("works", r.text(r.db, "select 'works'"), "works")
				open := r.db.Stats().OpenConnections
				r.until(func() bool { return r.backends(anyState) <= open }, func() string {
					return fmt.Sprintf("%d connections to the primary, of %d open", r.backends(anyState), open)
				})
				connector, err := pgsplit.FromDB(r.db)
				r.must(err)
				r.must(r.db.Close())
				r.untilBackends(0, anyState)
				for _, s := range connector.Stats().Servers {
					r.want(s.Name+" open", s.Open, 0)
					r.want(s.Name+" in use", s.InUse, 0)
				}
			})
			goleak.VerifyNone(t, before)
		})
	}
}

// cancelledRequest does a bit of everything, and is cancelled before, between or after.
func cancelledRequest(r *run, stmt *sql.Stmt, i int) {
	ctx, cancel := context.WithCancel(r.ctx)
	defer cancel()
	if i%2 == 0 {
		ctx = pgsplit.ReadOnly(ctx)
	}
	switch i % 5 {
	case 0:
		cancel()
		_, _ = r.db.ExecContext(ctx, "select 1")
	case 1:
		rows, err := r.db.QueryContext(ctx, "select generate_series(1, 1000)")
		cancel()
		if err == nil {
			rows.Close()
		}
	case 2:
		tx, err := r.db.BeginTx(ctx, nil)
		if err == nil {
			_, _ = tx.ExecContext(ctx, "select 1")
			if i%3 == 0 {
				cancel()
			}
			_ = tx.Rollback()
		}
	case 3:
		var v int
		_ = stmt.QueryRowContext(ctx, i).Scan(&v)
	case 4:
		conn, err := r.db.Conn(ctx)
		if err == nil {
			_, _ = conn.ExecContext(ctx, "select 1")
			cancel()
			_, _ = conn.ExecContext(ctx, "select 1")
			_ = conn.Close()
		}
	}
}
