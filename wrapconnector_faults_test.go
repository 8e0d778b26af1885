package pgsplit_test

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"errors"
	"fmt"
	"net"
	"runtime"
	"slices"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/pgsplit/pgsplit"
	"github.com/pgsplit/pgsplit/pgsplittest"
)

// faulty is a cluster of one replica behind a middleware that a test sets up for its worst call, on both servers.
type faulty struct {
	*pgsplittest.Cluster
	ctx context.Context
	db  *sql.DB
}

// open opens the cluster anew with one shell at most, so that each call gets the connection of the last one.
func (f *faulty) open(t *testing.T, set func(m *middleware)) *sql.DB {
	t.Helper()
	exec(t, f.ctx, f.db, "truncate notes")
	if err := f.CatchUp(f.ctx); err != nil {
		t.Fatal(err)
	}
	db := wrapped(t, patiently(f.Cluster), set)
	db.SetMaxOpenConns(1)
	t.Cleanup(func() { backToRest(t, db) })
	return db
}

func (f *faulty) notes(t *testing.T) string {
	t.Helper()
	return text(t, f.ctx, f.db, "select count(*)::text from notes")
}

// whileBehind runs f while the replica does not replay.
func (f *faulty) whileBehind(t *testing.T, do func()) {
	t.Helper()
	pauseAll(t, f.ctx, f.Cluster)
	defer func() {
		for _, r := range f.Replicas {
			if err := r.ResumeReplay(f.ctx); err != nil {
				t.Error(err)
			}
		}
	}()
	do()
}

// unsending is a connection that fails once before it has sent anything.
type unsending struct {
	net.Conn
	breaks *atomic.Bool
}

func (c unsending) Write(b []byte) (int, error) {
	if c.breaks.CompareAndSwap(true, false) {
		return 0, errors.New("broken")
	}
	return c.Conn.Write(b)
}

// openUnsending opens the primary behind a middleware that does something of its own before each Exec, and swallows what becomes
// of the first one, which is not sent.
func (f *faulty) openUnsending(t *testing.T, first func(ctx context.Context, c rawConn)) (db *sql.DB, swallowed *atomic.Bool) {
	t.Helper()
	exec(t, f.ctx, f.db, "truncate notes")
	var breaks atomic.Bool
	swallowed = new(atomic.Bool)
	db = openConfigured(t, f.Primary.URI(), func(config *pgsplit.Config) {
		config.Primary.ConnConfig.DialFunc = func(ctx context.Context, network, address string) (net.Conn, error) {
			conn, err := new(net.Dialer).DialContext(ctx, network, address)
			return unsending{conn, &breaks}, err
		}
		config.WrapConnector = func(s pgsplit.Server, inner driver.Connector) driver.Connector {
			return &middleware{server: s, inner: inner, exec: func(ctx context.Context, c rawConn, _ string, next execNext) (driver.Result, error) {
				first(ctx, c)
				breaks.Store(swallowed.CompareAndSwap(false, true))
				result, _ := next()
				return result, nil
			}}
		}
	})
	db.SetMaxOpenConns(1)
	return db, swallowed
}

type (
	execNext  = func() (driver.Result, error)
	queryNext = func() (driver.Rows, error)
)

const pid = "select pg_backend_pid()::text"

func TestAWrapperMayDoItsWorstAndNothingIsLostOrWrittenTwice(t *testing.T) {
	cluster, plain, ctx := sessionCluster(t, 1)
	exec(t, ctx, plain, "create table audit (n int); create table checked (n int unique deferrable initially deferred)")
	f := &faulty{cluster, ctx, plain}
	own := errors.New("the wrapper's own")

	t.Run("a dead connection whose error it swallows or hides is not used again", func(t *testing.T) {
		for _, says := range []error{nil, own} {
			kill := false
			db := f.open(t, func(m *middleware) {
				m.query = func(_ context.Context, c rawConn, _ string, next queryNext) (driver.Rows, error) {
					if !kill {
						return next()
					}
					kill = false
					_ = c.Close()
					rows, err := next()
					if !errors.Is(err, driver.ErrBadConn) {
						t.Errorf("a dead connection says %v", err)
					}
					return rows, says
				}
			})
			before := text(t, ctx, db, pid)
			kill = true
			// Nothing was sent, so the call goes on elsewhere.
			if after := text(t, ctx, db, pid); after == before {
				t.Errorf("%v: the dead connection was used again", says)
			}
		}
	})

	t.Run("a write that was not sent is none of its successes", func(t *testing.T) {
		db, swallowed := f.openUnsending(t, func(context.Context, rawConn) {})
		want(t, ctx, db, "select 'warm'", "warm")
		exec(t, ctx, db, "insert into notes values (1)")
		if got := f.notes(t); got != "1" || !swallowed.Load() {
			t.Errorf("%s rows, want 1", got)
		}
	})

	t.Run("a write that was not sent is none of its successes, though SQL of its own was sent before", func(t *testing.T) {
		db, swallowed := f.openUnsending(t, func(ctx context.Context, c rawConn) {
			if _, err := c.ExecContext(ctx, "select 'its own'", nil); err != nil {
				t.Error(err)
			}
		})
		want(t, ctx, db, "select 'warm'", "warm")
		_, err := db.ExecContext(ctx, "insert into notes values (1)")
		if got := f.notes(t); err == nil || got != "0" || !swallowed.Load() {
			t.Errorf("%s rows, and %v", got, err)
		}
		exec(t, ctx, db, "insert into notes values (1)")
	})

	t.Run("a write whose outcome it hides keeps its session on the primary", func(t *testing.T) {
		db := f.open(t, func(m *middleware) {
			m.exec = func(_ context.Context, c rawConn, _ string, next execNext) (driver.Result, error) {
				result, err := next()
				_ = c.Close()
				return result, err
			}
		})
		in := pgsplit.WithSession(ctx, pgsplit.NewSession())
		f.whileBehind(t, func() {
			exec(t, in, db, "insert into notes values (1)")
			want(t, pgsplit.ReadOnly(in), db, whatAndWhere, "1 false")
		})
	})

	t.Run("a write is not repeated because it calls the connection bad afterwards", func(t *testing.T) {
		db := f.open(t, func(m *middleware) {
			m.exec = func(_ context.Context, _ rawConn, _ string, next execNext) (driver.Result, error) {
				_, err := next()
				return nil, errors.Join(err, driver.ErrBadConn)
			}
		})
		want(t, ctx, db, "select 'warm'", "warm")
		_, err := db.ExecContext(ctx, "insert into notes values (1)")
		if err == nil || errors.Is(err, driver.ErrBadConn) {
			t.Errorf("error: %v", err)
		}
		if got := f.notes(t); got != "1" {
			t.Errorf("written %s times", got)
		}
	})

	t.Run("a write is not repeated because it would skip it afterwards", func(t *testing.T) {
		db := f.open(t, func(m *middleware) {
			m.exec = func(_ context.Context, _ rawConn, _ string, next execNext) (driver.Result, error) {
				_, err := next()
				return nil, errors.Join(err, driver.ErrSkip)
			}
			m.query = func(_ context.Context, _ rawConn, _ string, next queryNext) (driver.Rows, error) {
				if rows, err := next(); err == nil {
					_ = rows.Close()
				}
				return nil, driver.ErrSkip
			}
		})
		if _, err := db.ExecContext(ctx, "insert into notes select count(*) from notes"); err == nil {
			t.Error("exec: no error")
		}
		if err := scanOne(db.QueryContext(ctx, "insert into notes select count(*) from notes returning id")); err == nil {
			t.Error("query: no error")
		}
		if got := f.notes(t); got != "2" {
			t.Errorf("%s rows, want 2", got)
		}
	})

	t.Run("its own bad connection is replaced before anything was sent", func(t *testing.T) {
		bad := false
		db := f.open(t, func(m *middleware) {
			m.query = func(_ context.Context, _ rawConn, _ string, next queryNext) (driver.Rows, error) {
				if bad {
					bad = false
					return nil, driver.ErrBadConn
				}
				return next()
			}
		})
		before := text(t, ctx, db, pid)
		since := connectorOf(t, db).Stats().Servers[0].Since
		bad = true
		if after := text(t, ctx, db, pid); after == before {
			t.Error("the bad connection was used again")
		}
		if s := connectorOf(t, db).Stats().Servers[0]; s.State != "healthy" || !s.Since.Equal(since) {
			t.Errorf("the primary was held to be in trouble for what the wrapper said: %s since %s", s.State, s.Since)
		}
	})

	t.Run("its own statements before a read leave the floor as it is", func(t *testing.T) {
		db := f.open(t, func(m *middleware) {
			m.query = func(ctx context.Context, c rawConn, _ string, next queryNext) (driver.Rows, error) {
				if _, err := c.ExecContext(ctx, "set application_name = 'audited'", nil); err != nil {
					return nil, err
				}
				return next()
			}
		})
		f.whileBehind(t, func() {
			want(t, pgsplit.ReadOnly(ctx), db, whatAndWhere, "0 true")
			exec(t, ctx, db, "insert into notes values (1)")
			floor := pgsplit.WithLSN(ctx, commitLSN(t, ctx, db))
			want(t, pgsplit.ReadOnly(floor), db, whatAndWhere, "1 false")
			failsWith(t, pgsplit.ReadOnly(floor, pgsplit.ReplicaOnly()), db, pgsplit.ErrNoFreshReplica)
		})
	})

	t.Run("a snapshot that it left open shows nobody less than the floor", func(t *testing.T) {
		snapshot := true
		db := f.open(t, func(m *middleware) {
			m.query = func(_ context.Context, c rawConn, _ string, next queryNext) (driver.Rows, error) {
				if snapshot && m.server.Role == "replica" {
					snapshot = false
					new(journal).run(t, c, "begin isolation level repeatable read")
				}
				return next()
			}
		})
		conn, err := db.Conn(ctx)
		if err != nil {
			t.Fatal(err)
		}
		want(t, pgsplit.ReadOnly(ctx), conn, whatAndWhere, "0 true")
		exec(t, ctx, plain, "insert into notes values (1)")
		floor := pgsplit.WithLSN(ctx, commitLSN(t, ctx, plain))
		if err := cluster.CatchUp(ctx); err != nil {
			t.Fatal(err)
		}
		failsWith(t, pgsplit.ReadOnly(floor), conn, pgsplit.ErrNoFreshReplica)
		if err := conn.Close(); err != nil {
			t.Error(err)
		}
		want(t, pgsplit.ReadOnly(floor), db, whatAndWhere, "1 true")
	})

	t.Run("rows that it left open cost a connection and no call", func(t *testing.T) {
		db := f.open(t, func(m *middleware) {
			m.exec = func(ctx context.Context, c rawConn, _ string, next execNext) (driver.Result, error) {
				result, err := next()
				if _, err := c.QueryContext(ctx, "select generate_series(1, 3)", nil); err != nil {
					t.Error(err)
				}
				return result, err
			}
		})
		for range 3 {
			exec(t, ctx, db, "insert into notes values ((select count(*) from notes))")
		}
		if got := f.notes(t); got != "3" {
			t.Errorf("%s rows, want 3", got)
		}
		// On a held connection nobody else would close them.
		conn, err := db.Conn(ctx)
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		exec(t, ctx, conn, "insert into notes values (4)")
		if _, err := conn.ExecContext(ctx, "insert into notes values (5)"); !errors.Is(err, driver.ErrBadConn) {
			t.Errorf("a held connection whose rows nobody can close: %v", err)
		}
	})

	t.Run("its own writes count as the session's", func(t *testing.T) {
		var audits atomic.Int32
		db := f.open(t, func(m *middleware) {
			audit := func(c rawConn) {
				audits.Add(1)
				new(journal).run(t, c, fmt.Sprintf("insert into notes values (%d)", 100+audits.Load()))
			}
			m.ping = func(ctx context.Context, c rawConn) error {
				audit(c)
				return c.Ping(ctx)
			}
			m.begin = func(_ context.Context, c rawConn, next func() (driver.Tx, error)) (driver.Tx, error) {
				audit(c)
				return next()
			}
			m.commit = func(c rawConn, tx driver.Tx) error {
				err := tx.Commit()
				audit(c)
				return err
			}
		})
		for what, do := range map[string]func(in context.Context) error{
			"at a ping":                  db.PingContext,
			"around a commit":            func(in context.Context) error { return inTx(in, db, nil, "select 1") },
			"before one that rolls back": func(in context.Context) error { return rolledBack(in, db) },
		} {
			if err := cluster.CatchUp(ctx); err != nil {
				t.Fatal(err)
			}
			in := pgsplit.WithSession(ctx, pgsplit.NewSession())
			f.whileBehind(t, func() {
				if err := do(in); err != nil {
					t.Errorf("%s: %v", what, err)
				}
				want(t, pgsplit.ReadOnly(in), db, whatAndWhere, fmt.Sprint(audits.Load(), " false"))
			})
		}
	})

	t.Run("a commit that failed or never came is an error whatever it says", func(t *testing.T) {
		for what, commit := range map[string]func(c rawConn, tx driver.Tx) error{
			"an error that it swallows": func(_ rawConn, tx driver.Tx) error {
				if err := tx.Commit(); err == nil {
					t.Error("committed")
				}
				return nil
			},
			"none at all":                      func(rawConn, driver.Tx) error { return nil },
			"a rollback":                       func(_ rawConn, tx driver.Tx) error { return tx.Rollback() },
			"its own error in place of an end": func(rawConn, driver.Tx) error { return own },
		} {
			db := f.open(t, func(m *middleware) { m.commit = commit })
			in := pgsplit.WithSession(ctx, pgsplit.NewSession())
			if err := inTx(in, db, nil, "insert into checked values (1), (1)"); err == nil {
				t.Errorf("%s: no error", what)
			}
			conn, err := db.Conn(ctx)
			if err != nil {
				t.Fatal(err)
			}
			tx, err := conn.BeginTx(in, nil)
			if err != nil {
				t.Fatal(err)
			}
			exec(t, in, tx, "insert into checked values (1), (1)")
			if err := tx.Commit(); err == nil {
				t.Errorf("%s: no error on a held connection", what)
			}
			var open bool
			if err := conn.QueryRowContext(ctx, "select pg_current_xact_id_if_assigned() is not null").Scan(&open); err == nil && open {
				t.Errorf("%s: the transaction is still open", what)
			}
			_ = conn.Close()
			want(t, ctx, plain, "select count(*)::text from checked", "0")
		}
	})

	t.Run("a commit that it reports as failed counts for its session", func(t *testing.T) {
		commits := 0
		db := f.open(t, func(m *middleware) {
			m.commit = func(_ rawConn, tx driver.Tx) error {
				commits++
				if err := tx.Commit(); err != nil {
					t.Error(err)
				}
				if err := tx.Commit(); err == nil {
					t.Error("committed twice")
				}
				return own
			}
		})
		in := pgsplit.WithSession(ctx, pgsplit.NewSession())
		captures := connectorOf(t, db).Stats().Captures
		f.whileBehind(t, func() {
			if err := inTx(in, db, nil, "insert into notes values (1)"); !errors.Is(err, own) {
				t.Errorf("error: %v", err)
			}
			want(t, pgsplit.ReadOnly(in), db, whatAndWhere, "1 false")
		})
		if n := connectorOf(t, db).Stats().Captures; n != captures || commits != 1 {
			t.Errorf("%d captures, %d commits", n-captures, commits)
		}
	})

	t.Run("a transaction that it fails to begin is not left open", func(t *testing.T) {
		db := f.open(t, func(m *middleware) {
			m.begin = func(_ context.Context, _ rawConn, next func() (driver.Tx, error)) (driver.Tx, error) {
				if _, err := next(); err != nil {
					t.Error(err)
				}
				return nil, own
			}
		})
		conn, err := db.Conn(ctx)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := conn.BeginTx(ctx, nil); !errors.Is(err, own) {
			t.Errorf("error: %v", err)
		}
		if _, err := conn.ExecContext(ctx, "insert into notes values (1)"); err == nil && f.notes(t) != "1" {
			t.Error("a write that succeeded is in a transaction that nobody ends")
		}
		_ = conn.Close()
	})

	t.Run("an answer without the server is an error", func(t *testing.T) {
		db := f.open(t, func(m *middleware) {
			m.exec = func(context.Context, rawConn, string, execNext) (driver.Result, error) {
				return driver.RowsAffected(1), nil
			}
		})
		_, err := db.ExecContext(ctx, "insert into notes values (1)")
		if err == nil || !strings.Contains(err.Error(), "answered without") {
			t.Errorf("error: %v", err)
		}
	})

	t.Run("it cannot use the connection when it is not asked to", func(t *testing.T) {
		var kept rawConn
		db := f.open(t, func(m *middleware) {
			m.query = func(_ context.Context, c rawConn, _ string, next queryNext) (driver.Rows, error) {
				kept = c
				return next()
			}
		})
		want(t, ctx, db, "select 'kept'", "kept")
		if _, err := kept.ExecContext(ctx, "insert into notes values (1)", nil); err == nil || f.notes(t) != "0" {
			t.Errorf("it wrote outside of a call: %v", err)
		}
		if err := kept.Close(); err == nil {
			t.Error("it closed a connection that is in the pool")
		}
		if _, err := kept.BeginTx(ctx, driver.TxOptions{}); err == nil {
			t.Error("it began a transaction outside of a call")
		}
		want(t, ctx, db, "select 'kept'", "kept")
	})

	t.Run("it says which connections are used again, and resets them", func(t *testing.T) {
		var resets, refusals atomic.Int32
		invalid := false
		db := f.open(t, func(m *middleware) {
			m.reset = func(ctx context.Context, c rawConn) error {
				resets.Add(1)
				if refusals.Add(-1) >= 0 {
					return driver.ErrBadConn
				}
				new(journal).run(t, c, "set work_mem = '7MB'")
				return nil
			}
			m.valid = func(c rawConn) bool { return !invalid && c.IsValid() }
		})
		first := text(t, ctx, db, pid)
		if n := resets.Load(); n != 0 {
			t.Errorf("a new connection was reset %d times", n)
		}
		if second := text(t, ctx, db, pid); second != first || resets.Load() != 1 {
			t.Errorf("%s after %s, and %d resets", second, first, resets.Load())
		}
		want(t, ctx, db, "show work_mem", "7MB")
		refusals.Store(1)
		second := text(t, ctx, db, pid)
		if second == first {
			t.Error("a connection whose reset failed was used")
		}
		invalid = true
		want(t, ctx, db, "select 'last'", "last")
		if third := text(t, ctx, db, pid); third == second {
			t.Error("a connection that is not valid was used again")
		}
	})
}

func rolledBack(ctx context.Context, db *sql.DB) error {
	tx, err := db.BeginTx(ctx, nil)
	if err != nil {
		return err
	}
	return tx.Rollback()
}

func TestAPanicOfAWrapperBecomesAnErrorAndLeaksNothing(t *testing.T) {
	cluster := pgsplittest.Start(t)
	ctx := patient(t)
	for what, set := range map[string]func(m *middleware){
		"exec": func(m *middleware) {
			m.exec = func(context.Context, rawConn, string, execNext) (driver.Result, error) { panic("exec") }
		},
		"query": func(m *middleware) {
			m.query = func(context.Context, rawConn, string, queryNext) (driver.Rows, error) { panic("query") }
		},
		"ping":     func(m *middleware) { m.ping = func(context.Context, rawConn) error { panic("ping") } },
		"commit":   func(m *middleware) { m.commit = func(rawConn, driver.Tx) error { panic("commit") } },
		"rollback": func(m *middleware) { m.rollback = func(rawConn, driver.Tx) error { panic("rollback") } },
		"begin": func(m *middleware) {
			m.begin = func(_ context.Context, _ rawConn, next func() (driver.Tx, error)) (driver.Tx, error) {
				_, _ = next()
				panic("begin")
			}
		},
		"": func(m *middleware) {
			m.reset = func(context.Context, rawConn) error { panic("reset") }
			m.valid = func(rawConn) bool { panic("valid") }
			m.close = func(rawConn) error { panic("close") }
		},
	} {
		t.Run("in "+what, func(t *testing.T) {
			db := wrapped(t, cluster.Primary.URI(), set)
			db.SetMaxOpenConns(1)
			for range 2 {
				_, errExec := db.ExecContext(ctx, "select 1")
				errQuery := scanOne(db.QueryContext(ctx, "select 1"))
				errPing := db.PingContext(ctx)
				errs := []error{errExec, errQuery, errPing, inTx(ctx, db, nil, "select 2"), rolledBack(ctx, db)}
				if what != "" && !slices.ContainsFunc(errs, func(err error) bool {
					return err != nil && strings.Contains(err.Error(), "panic: "+what)
				}) {
					t.Errorf("errors: %v", errs)
				}
				if what == "" && errors.Join(errs...) != nil {
					t.Error(errors.Join(errs...))
				}
			}
			backToRest(t, db)
		})
	}
}

// keeping is a connection whose statements keep the context that they were prepared with, as those of some libraries do.
type keeping struct{ rawConn }

type keepingStmt struct {
	driver.Stmt
	ctx context.Context
}

func (c keeping) PrepareContext(ctx context.Context, query string) (driver.Stmt, error) {
	stmt, err := c.rawConn.PrepareContext(ctx, query)
	return keepingStmt{stmt, ctx}, err
}

func TestAPreparedStatementDoesNotKeepItsContextAliveThroughAWrapper(t *testing.T) {
	cluster := pgsplittest.Start(t)
	ctx := patient(t)
	db := wrapped(t, cluster.DSN(), func(m *middleware) {
		m.connect = func(ctx context.Context, inner driver.Connector) (driver.Conn, error) {
			conn, err := inner.Connect(ctx)
			if err != nil {
				return nil, err
			}
			return keeping{conn.(rawConn)}, nil
		}
	})
	text(t, ctx, db, pid)
	var gone atomic.Bool
	type request struct{}
	stmt := func() *sql.Stmt {
		r := &journal{}
		runtime.AddCleanup(r, func(gone *atomic.Bool) { gone.Store(true) }, &gone)
		stmt, err := db.PrepareContext(context.WithValue(ctx, request{}, r), "select $1::text")
		if err != nil {
			t.Fatal(err)
		}
		return stmt
	}()
	defer stmt.Close()
	eventually(t, "the request's context is gone", func() bool {
		runtime.GC()
		return gone.Load()
	})
	var got string
	for _, ctx := range []context.Context{ctx, pgsplit.ReadOnly(ctx)} {
		if err := stmt.QueryRowContext(ctx, "runs").Scan(&got); err != nil || got != "runs" {
			t.Errorf("%q, %v", got, err)
		}
	}
	if got := text(t, ctx, db, "select count(*)::text from pg_prepared_statements where statement = 'select $1::text'"); got != "1" {
		t.Errorf("the server keeps %s copies of the statement, want 1", got)
	}
}

func TestBehindAPoolerAWrapperThatEndsTheTransactionOfAFloorGetsNoRead(t *testing.T) {
	cluster := pgsplittest.Start(t)
	ctx := patient(t)
	for _, s := range cluster.Servers() {
		s.Proxy().EmulatePooler(pgsplittest.PoolerDropsParameter)
	}
	ends := false
	db := wrapped(t, cluster.ProxyDSN(), func(m *middleware) {
		m.query = func(ctx context.Context, c rawConn, _ string, next queryNext) (driver.Rows, error) {
			if ends {
				new(journal).run(t, c, "commit")
			}
			return next()
		}
	})
	read := pgsplit.ReadOnly(pgsplit.WithLSN(ctx, commitLSN(t, ctx, db)), pgsplit.ReplicaOnly())
	if err := cluster.CatchUp(ctx); err != nil {
		t.Fatal(err)
	}
	want(t, read, db, inRecovery, "true")
	ends = true
	if _, err := db.QueryContext(read, inRecovery); err == nil || !strings.Contains(err.Error(), "ended the transaction") {
		t.Errorf("error: %v", err)
	}
	backToRest(t, db)
}

func TestAWrapperCostsNoRoundTrip(t *testing.T) {
	cluster := pgsplittest.Start(t)
	ctx := patient(t)
	plain := open(t, cluster.ProxyDSN())
	exec(t, ctx, plain, "create table notes (id int)")
	db := wrapped(t, cluster.ProxyDSN(), func(*middleware) {})
	in := pgsplit.WithSession(ctx, pgsplit.NewSession())
	for _, c := range append(slices.Clone(reads), call{"a write in a session", func(_ context.Context, db *sql.DB) error {
		return inTx(in, db, nil, "insert into notes values (1)")
	}}) {
		for _, ctx := range []context.Context{ctx, pgsplit.ReadOnly(ctx)} {
			without := roundTrips(t, cluster, func() error { return c.do(ctx, plain) })
			with := roundTrips(t, cluster, func() error { return c.do(ctx, db) })
			if with != without {
				t.Errorf("%s: %d round trips with a wrapper, %d without", c.name, with, without)
			}
		}
	}
}
