package pgsplit_test

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/pgsplit/pgsplit"
	"github.com/pgsplit/pgsplit/pgsplittest"
)

// promptly fails the test if f hangs.
func promptly(t testing.TB, what string, f func()) {
	t.Helper()
	done := make(chan struct{})
	go func() {
		defer close(done)
		f()
	}()
	select {
	case <-done:
	case <-time.After(time.Minute):
		t.Fatalf("hangs: %s", what)
	}
}

// endOfContext tells whether an error is what a caller who went away may see.
func endOfContext(err error) bool {
	return errors.Is(err, context.Canceled) || errors.Is(err, context.DeadlineExceeded)
}

func TestTenThousandCancelledQueriesLeaveNothingBehind(t *testing.T) {
	cluster := pgsplittest.Start(t, pgsplittest.Replicas(2))
	patience, end := context.WithTimeout(context.Background(), 5*time.Minute)
	defer end()
	observers := observeAll(t, cluster, "cancelled")
	before := goleak.IgnoreCurrent()
	db := open(t, with(cluster.DSN(), "application_name=cancelled", "replica_timeout=30s"))
	const goroutines, rounds = 40, 250
	db.SetMaxOpenConns(goroutines - 8)
	db.SetMaxIdleConns(goroutines - 8)
	exec(t, patience, db, "create table t (id int)")
	floor, err := pgsplit.CommitLSN(patience, db)
	if err != nil {
		t.Fatal(err)
	}
	c := connectorOf(t, db)

	read := func(ctx context.Context, q queryer) error {
		var n int
		return q.QueryRowContext(ctx, "select 1 from pg_sleep(0.0005)").Scan(&n)
	}
	inTx := func(ctx context.Context) error {
		tx, err := db.BeginTx(ctx, nil)
		if err != nil {
			return err
		}
		defer tx.Rollback()
		for range 2 {
			if err = read(ctx, tx); err != nil {
				break
			}
		}
		if err == nil {
			err = tx.Commit()
		}
		if errors.Is(err, sql.ErrTxDone) && ctx.Err() != nil {
			return ctx.Err() // how database/sql says that the context ended the transaction
		}
		return err
	}
	readOnly := func(ctx context.Context) context.Context { return pgsplit.ReadOnly(ctx) }
	fresh := func(ctx context.Context) context.Context {
		return pgsplit.ReadOnly(pgsplit.WithLSN(ctx, floor), pgsplit.MaxWait(time.Second))
	}
	kinds := []func(context.Context) error{
		func(ctx context.Context) error { return read(ctx, db) },
		func(ctx context.Context) error { return read(readOnly(ctx), db) },
		func(ctx context.Context) error { return read(fresh(ctx), db) },
		func(ctx context.Context) error {
			_, err := db.ExecContext(ctx, "insert into t values (1)")
			return err
		},
		func(ctx context.Context) error { return inTx(ctx) },
		func(ctx context.Context) error { return inTx(readOnly(ctx)) },
		func(ctx context.Context) error { return inTx(fresh(ctx)) },
		func(ctx context.Context) error {
			conn, err := db.Conn(ctx)
			if err != nil {
				return err
			}
			defer conn.Close()
			for _, ctx := range []context.Context{readOnly(ctx), ctx, readOnly(ctx), fresh(ctx)} {
				if err := read(ctx, conn); err != nil {
					return err
				}
			}
			return nil
		},
		func(ctx context.Context) error {
			rows, err := db.QueryContext(readOnly(ctx), "select generate_series(1, 500)")
			if err != nil {
				return err
			}
			defer rows.Close()
			for rows.Next() {
			}
			return rows.Err()
		},
		func(ctx context.Context) error {
			stmt, err := db.PrepareContext(readOnly(ctx), "select $1::int")
			if err != nil {
				return err
			}
			defer stmt.Close()
			var n int
			return stmt.QueryRowContext(ctx, 1).Scan(&n)
		},
	}
	var cancelled, finished [goroutines]int
	var wg sync.WaitGroup
	for g := range goroutines {
		wg.Go(func() {
			// Of all moments about one in five is too early to finish, however fast the machine is.
			usual := 50 * time.Millisecond
			for range rounds {
				ctx, cancel := context.WithCancel(patience)
				moment := time.Duration(rand.ExpFloat64() * float64(usual))
				kind, timer := rand.IntN(len(kinds)), time.AfterFunc(moment, cancel)
				err := kinds[kind](ctx)
				switch {
				case err == nil:
					finished[g]++
					usual -= usual / 32
				case !endOfContext(err), errors.Is(err, driver.ErrBadConn):
					t.Errorf("kind %d: %v", kind, err)
				default:
					cancelled[g]++
					usual += usual / 8
				}
				timer.Stop()
				cancel()
			}
		})
	}
	wg.Wait()
	total := [2]int{}
	for g := range goroutines {
		total[0], total[1] = total[0]+finished[g], total[1]+cancelled[g]
	}
	t.Logf("%d finished, %d were cancelled", total[0], total[1])
	if total[0] < 500 || total[1] < 500 {
		t.Errorf("%d finished and %d were cancelled: not random enough", total[0], total[1])
	}
	eventually(t, "all leases are back", func() bool { return inUse(c) == 0 })
	for _, s := range c.Stats().Servers {
		if s.State != "healthy" || s.Failures != 0 {
			t.Errorf("a caller's cancel was held against %s: %+v", s.Name, s)
		}
	}
	// Everything still works.
	if got := text(t, patience, db, inRecovery); got != "false" {
		t.Errorf("unhinted: in recovery %s", got)
	}
	if got := text(t, fresh(patience), db, inRecovery); got != "true" {
		t.Errorf("ReadOnly: in recovery %s", got)
	}
	if err := db.Close(); err != nil {
		t.Error(err)
	}
	if n := openConnections(c); n != 0 {
		t.Errorf("%d connections are counted as open", n)
	}
	for i, o := range observers {
		eventually(t, fmt.Sprintf("server %d has no connection", i), func() bool { return len(o.pids()) == 0 })
	}
	noneLeft(t, before)
}

func TestCloseWithRowsOpenReturnsAtOnceAndTheLeaseEndsWithTheRows(t *testing.T) {
	cluster := shareCluster(t, 1)
	ctx := patient(t)
	for name, ctx := range map[string]context.Context{"unhinted": ctx, "ReadOnly": pgsplit.ReadOnly(ctx)} {
		t.Run(name, func(t *testing.T) {
			db := open(t, with(patiently(cluster), "application_name=closing"))
			c := connectorOf(t, db)
			observers := observeAll(t, cluster, "closing")
			promptly(t, "Close with rows open", func() {
				rows, err := db.QueryContext(ctx, "select generate_series(1, 100000)")
				if err != nil || !rows.Next() {
					t.Error("no rows", err)
					return
				}
				if err := db.Close(); err != nil {
					t.Error(err)
				}
				if inUse(c) != 1 {
					t.Errorf("%d leases are out while the rows are open", inUse(c))
				}
				if _, err := db.ExecContext(ctx, "select 1"); err == nil {
					t.Error("a statement ran after Close")
				}
				_ = rows.Close() // the context of the rows ended with the sql.DB
			})
			eventually(t, "the late lease is closed", func() bool { return inUse(c) == 0 && openConnections(c) == 0 })
			for i, o := range observers {
				eventually(t, fmt.Sprintf("server %d has no connection", i), func() bool { return len(o.pids()) == 0 })
			}
		})
	}
}

func TestCloseWithATransactionAndAHeldConnectionOpenReturnsAtOnce(t *testing.T) {
	cluster := shareCluster(t, 1)
	ctx := patient(t)
	db := open(t, cluster.DSN())
	c := connectorOf(t, db)
	promptly(t, "Close", func() {
		tx, err := db.BeginTx(ctx, nil)
		if err != nil {
			t.Error(err)
			return
		}
		conn, err := db.Conn(ctx)
		if err != nil {
			t.Error(err)
			return
		}
		exec(t, ctx, tx, "select 1")
		exec(t, pgsplit.ReadOnly(ctx), conn, "select 1")
		if err := db.Close(); err != nil {
			t.Error(err)
		}
		_ = tx.Rollback()
		_ = conn.Close()
	})
	eventually(t, "the late leases are closed", func() bool { return inUse(c) == 0 && openConnections(c) == 0 })
}

// warm opens a connection to every server.
func warm(t testing.TB, ctx context.Context, db *sql.DB) {
	t.Helper()
	c := connectorOf(t, db)
	exec(t, ctx, db, "select 1")
	eventually(t, "every server has been used", func() bool {
		exec(t, pgsplit.ReadOnly(ctx), db, "select 1")
		for _, s := range c.Stats().Servers {
			if s.Opened == 0 {
				return false
			}
		}
		return true
	})
}

func TestAFloorIsWaitedForUntilHalfOfTheDeadlineAndThenThePrimaryAnswers(t *testing.T) {
	t.Parallel() // it mostly waits
	cluster := pgsplittest.Start(t, pgsplittest.Replicas(2))
	ctx := patient(t)
	db := open(t, patiently(cluster))
	warm(t, ctx, db)
	for _, s := range cluster.Replicas {
		if err := s.PauseReplay(ctx); err != nil {
			t.Fatal(err)
		}
	}
	exec(t, ctx, db, "create table t (id int)")
	floor, err := pgsplit.CommitLSN(ctx, db)
	if err != nil {
		t.Fatal(err)
	}
	read := func(deadline time.Duration) (string, error) {
		ctx, cancel := context.WithTimeout(ctx, deadline)
		defer cancel()
		var server string
		err := db.QueryRowContext(pgsplit.ReadOnly(pgsplit.WithLSN(ctx, floor), pgsplit.MaxWait(30*time.Second)), whichServer).Scan(&server)
		return server, err
	}
	// Half of the deadline is left for the primary.
	inLongerAndLonger(t, 400*time.Millisecond, func(deadline time.Duration) error {
		start := time.Now()
		server, err := read(deadline)
		if waited := time.Since(start); waited < deadline/4 {
			t.Errorf("the read did not wait for the replica: %v", waited)
		}
		if err != nil || server != "primary" {
			return fmt.Errorf("%q, %w", server, err)
		}
		return nil
	})
	reads := 0
	eventually(t, "the primary has time to answer within 50 ms", func() bool {
		reads++
		start := time.Now()
		server, err := read(50 * time.Millisecond)
		if took := time.Since(start); took > 20*time.Second {
			t.Fatalf("a deadline of 50 ms was kept after %v", took)
		}
		if err == nil && server != "primary" || err != nil && !endOfContext(err) {
			t.Errorf("%q, %v", server, err)
		}
		return err == nil && reads >= 10
	})
}

func TestACancelledTransactionCostsOnlyItsOwnConnection(t *testing.T) {
	cluster := shareCluster(t, 1)
	patience := patient(t)
	for name, hint := range map[string]func(context.Context) context.Context{
		"unhinted": func(ctx context.Context) context.Context { return ctx },
		"ReadOnly": func(ctx context.Context) context.Context { return pgsplit.ReadOnly(ctx) },
	} {
		t.Run(name, func(t *testing.T) {
			db := open(t, patiently(cluster))
			c := connectorOf(t, db)
			other, err := db.Conn(patience)
			if err != nil {
				t.Fatal(err)
			}
			defer other.Close()
			const pid = "select pg_backend_pid()::text"
			others := text(t, hint(patience), other, pid)

			ctx, cancel := context.WithCancel(hint(patience))
			tx, err := db.BeginTx(ctx, nil)
			if err != nil {
				t.Fatal(err)
			}
			lost := text(t, ctx, tx, pid)
			shells := db.Stats().OpenConnections
			opened := func() (n uint64) {
				for _, s := range c.Stats().Servers {
					n += s.Opened
				}
				return n
			}
			before := opened()
			cancel()
			eventually(t, "the lease is back", func() bool { return inUse(c) == 1 })
			if err := tx.Commit(); !endOfContext(err) && !errors.Is(err, sql.ErrTxDone) {
				t.Errorf("commit: %v", err)
			}
			if got := text(t, hint(patience), other, pid); got != others {
				t.Errorf("another connection was exchanged: %s for %s", got, others)
			}
			if got := text(t, hint(patience), db, pid); got == lost {
				t.Error("the connection of the cancelled transaction was used again")
			}
			if got := db.Stats().OpenConnections; got != shells {
				t.Errorf("%d shells of %d live", got, shells)
			}
			if n := opened() - before; n != 1 {
				t.Errorf("%d connections were opened for one that was lost", n)
			}
		})
	}
}

// pgx closes the connection of a statement that was cancelled while it ran; the next statement must not meet it.
func TestAStatementAfterACancelledOneRunsOnAnotherConnection(t *testing.T) {
	cluster := shareCluster(t, 1)
	patience := patient(t)
	db := open(t, patiently(cluster))
	db.SetMaxOpenConns(1)
	for _, hint := range []func(context.Context) context.Context{
		func(ctx context.Context) context.Context { return ctx },
		func(ctx context.Context) context.Context { return pgsplit.ReadOnly(ctx) },
	} {
		ctx, cancel := context.WithTimeout(patience, 50*time.Millisecond)
		_, err := db.ExecContext(hint(ctx), "select pg_sleep(30)")
		cancel()
		if !endOfContext(err) {
			t.Errorf("cancelled: %v", err)
		}
		exec(t, hint(patience), db, "select 1")
	}
}

func TestACancelIsNotHeldAgainstAServerThatIsSlowToLetIn(t *testing.T) {
	cluster := pgsplittest.Start(t, pgsplittest.Replicas(1))
	patience := patient(t)
	for _, s := range cluster.Servers() {
		s.Proxy().BlackHole()
	}
	db := open(t, with(cluster.ProxyDSN(), "replica_timeout=30s"))
	for _, hint := range []func(context.Context) context.Context{
		func(ctx context.Context) context.Context { return ctx },
		func(ctx context.Context) context.Context { return pgsplit.ReadOnly(ctx) },
		func(ctx context.Context) context.Context {
			return pgsplit.ReadOnly(ctx, pgsplit.MaxStaleness(time.Second))
		},
	} {
		ctx, cancel := context.WithTimeout(patience, 50*time.Millisecond)
		_, err := db.ExecContext(hint(ctx), "select 1")
		cancel()
		if !endOfContext(err) {
			t.Errorf("%v", err)
		}
	}
	for _, s := range connectorOf(t, db).Stats().Servers {
		if s.State != "healthy" || s.Failures != 0 {
			t.Errorf("%+v", s)
		}
	}
}
