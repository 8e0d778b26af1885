package pgsplit_test

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/pgsplit/pgsplit"
)

// middleware is a WrapConnector with an interceptor for whatever a test is about: each gets what runs next, and the
// connection that it runs on. What is nil passes on.
type middleware struct {
	server pgsplit.Server
	inner  driver.Connector

	connect  func(ctx context.Context, inner driver.Connector) (driver.Conn, error)
	exec     func(ctx context.Context, c rawConn, query string, next func() (driver.Result, error)) (driver.Result, error)
	query    func(ctx context.Context, c rawConn, query string, next func() (driver.Rows, error)) (driver.Rows, error)
	begin    func(ctx context.Context, c rawConn, next func() (driver.Tx, error)) (driver.Tx, error)
	commit   func(c rawConn, tx driver.Tx) error
	rollback func(c rawConn, tx driver.Tx) error
	ping     func(ctx context.Context, c rawConn) error
	reset    func(ctx context.Context, c rawConn) error
	valid    func(c rawConn) bool
	close    func(c rawConn) error
}

// rawConn is what a wrapper gets to wrap.
type rawConn interface {
	driver.Conn
	driver.Pinger
	driver.ExecerContext
	driver.QueryerContext
	driver.ConnPrepareContext
	driver.ConnBeginTx
	driver.SessionResetter
	driver.NamedValueChecker
	driver.Validator
}

func (m *middleware) Connect(ctx context.Context) (driver.Conn, error) {
	if m.connect != nil {
		return m.connect(ctx, m.inner)
	}
	return m.dial(ctx)
}

func (m *middleware) dial(ctx context.Context) (driver.Conn, error) {
	conn, err := m.inner.Connect(ctx)
	if err != nil {
		return nil, err
	}
	return &intercepted{conn.(rawConn), m}, nil
}

func (m *middleware) Driver() driver.Driver { return m.inner.Driver() }

type intercepted struct {
	rawConn
	m *middleware
}

func (c *intercepted) ExecContext(ctx context.Context, query string, args []driver.NamedValue) (driver.Result, error) {
	next := func() (driver.Result, error) { return c.rawConn.ExecContext(ctx, query, args) }
	if c.m.exec == nil {
		return next()
	}
	return c.m.exec(ctx, c.rawConn, query, next)
}

func (c *intercepted) QueryContext(ctx context.Context, query string, args []driver.NamedValue) (driver.Rows, error) {
	next := func() (driver.Rows, error) { return c.rawConn.QueryContext(ctx, query, args) }
	if c.m.query == nil {
		return next()
	}
	return c.m.query(ctx, c.rawConn, query, next)
}

func (c *intercepted) BeginTx(ctx context.Context, opts driver.TxOptions) (driver.Tx, error) {
	next := func() (driver.Tx, error) {
		tx, err := c.rawConn.BeginTx(ctx, opts)
		return interceptedTx{tx, c}, err
	}
	if c.m.begin == nil {
		return next()
	}
	return c.m.begin(ctx, c.rawConn, next)
}

func (c *intercepted) Ping(ctx context.Context) error {
	if c.m.ping == nil {
		return c.rawConn.Ping(ctx)
	}
	return c.m.ping(ctx, c.rawConn)
}

func (c *intercepted) ResetSession(ctx context.Context) error {
	if c.m.reset == nil {
		return c.rawConn.ResetSession(ctx)
	}
	return c.m.reset(ctx, c.rawConn)
}

func (c *intercepted) IsValid() bool {
	if c.m.valid == nil {
		return c.rawConn.IsValid()
	}
	return c.m.valid(c.rawConn)
}

func (c *intercepted) Close() error {
	if c.m.close == nil {
		return c.rawConn.Close()
	}
	return c.m.close(c.rawConn)
}

type interceptedTx struct {
	driver.Tx
	c *intercepted
}

func (t interceptedTx) Commit() error {
	if t.c.m.commit == nil {
		return t.Tx.Commit()
	}
	return t.c.m.commit(t.c.rawConn, t.Tx)
}

func (t interceptedTx) Rollback() error {
	if t.c.m.rollback == nil {
		return t.Tx.Rollback()
	}
	return t.c.m.rollback(t.c.rawConn, t.Tx)
}

// wrapped opens the cluster with a middleware on each server that set has set up.
func wrapped(t testing.TB, dsn string, set func(m *middleware)) *sql.DB {
	t.Helper()
	return wrappedBy(t, dsn, func(s pgsplit.Server, inner driver.Connector) driver.Connector {
		m := &middleware{server: s, inner: inner}
		set(m)
		return m
	})
}

func wrappedBy(t testing.TB, dsn string, wrap func(pgsplit.Server, driver.Connector) driver.Connector) *sql.DB {
	t.Helper()
	config, err := pgsplit.ParseDSN(dsn)
	if err != nil {
		t.Fatal(err)
	}
	config.WrapConnector = wrap
	db, err := pgsplit.OpenDB(config)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = db.Close() })
	return db
}

// run has the connection that a wrapper wraps execute SQL of the wrapper's own.
func (j *journal) run(t testing.TB, c rawConn, sql string) {
	if _, err := c.ExecContext(context.Background(), sql, nil); err != nil {
		j.add(err.Error())
		t.Errorf("the wrapper's own %q: %v", sql, err)
	}
}

func TestAWrapConnectorSeesWhatRunsOnEachServerAndNothingElse(t *testing.T) {
	cluster := shareCluster(t, 1)
	ctx := patient(t)
	var seen journal
	db := wrapped(t, patiently(cluster), func(m *middleware) {
		note := func(what string) { seen.add(m.server.Role + " " + what) }
		if !strings.HasSuffix(m.server.Address, m.server.Name) {
			t.Errorf("%+v", m.server)
		}
		m.exec = func(_ context.Context, _ rawConn, query string, next func() (driver.Result, error)) (driver.Result, error) {
			note(query)
			return next()
		}
		m.query = func(ctx context.Context, _ rawConn, query string, next func() (driver.Rows, error)) (driver.Rows, error) {
			note(query)
			if d, ok := pgsplit.DecisionFrom(ctx); !ok || d.Server != m.server.Name {
				t.Errorf("%s: the decision is %+v %v", query, d, ok)
			}
			return next()
		}
		m.begin = func(_ context.Context, _ rawConn, next func() (driver.Tx, error)) (driver.Tx, error) {
			note("begin")
			return next()
		}
		m.commit = func(_ rawConn, tx driver.Tx) error {
			err := tx.Commit()
			note(fmt.Sprint("commit ", err))
			return err
		}
		m.rollback = func(_ rawConn, tx driver.Tx) error {
			note("rollback")
			return tx.Rollback()
		}
	})
	session := pgsplit.NewSession()
	mine := pgsplit.WithSession(ctx, session)
	exec(t, mine, db, "create table seen (n int)")
	if err := inTx(mine, db, nil, "insert into seen values (1)"); err != nil {
		t.Fatal(err)
	}
	if err := cluster.CatchUp(ctx); err != nil {
		t.Fatal(err)
	}
	replica := pgsplit.ReadOnly(mine, pgsplit.ReplicaOnly())
	want(t, replica, db, "select count(*)::text from seen", "1")
	floor := pgsplit.WithLSN(pgsplit.ReadOnly(ctx, pgsplit.ReplicaOnly()), commitLSN(t, ctx, db))
	if err := cluster.CatchUp(ctx); err != nil {
		t.Fatal(err)
	}
	want(t, floor, db, "select 'floor'", "floor")
	if err := inTx(replica, db, nil, "select 2"); err != nil {
		t.Fatal(err)
	}
	stmt, err := db.PrepareContext(ctx, "select $1::text")
	if err != nil {
		t.Fatal(err)
	}
	defer stmt.Close()
	var text string
	if err := stmt.QueryRowContext(floor, "prepared").Scan(&text); err != nil || text != "prepared" {
		t.Errorf("%q, %v", text, err)
	}
	if _, err := db.ExecContext(replica, "insert into seen values (2)"); !errors.Is(err, pgsplit.ErrReadOnly) {
		t.Errorf("a write under ReadOnly: %v", err)
	}
	expected := []string{
		"primary create table seen (n int)",
		"primary begin", "primary insert into seen values (1)", "primary commit <nil>",
		"replica select count(*)::text from seen",
		"replica select 'floor'",
		"replica begin", "replica select 2", "replica commit <nil>",
		"replica select $1::text",
		"replica insert into seen values (2)",
	}
	if got := seen.all(); !slices.Equal(got, expected) {
		t.Errorf("seen\n%s\nwant\n%s", strings.Join(got, "\n"), strings.Join(expected, "\n"))
	}
	backToRest(t, db)
}

// bareConn is a wrapper's connection with nothing but what driver.Conn asks for.
type bareConn struct{ driver.Conn }

// skipping is one that has the optional interfaces and uses none.
type skipping struct{ rawConn }

func (skipping) ExecContext(context.Context, string, []driver.NamedValue) (driver.Result, error) {
	return nil, driver.ErrSkip
}

func (skipping) QueryContext(context.Context, string, []driver.NamedValue) (driver.Rows, error) {
	return nil, driver.ErrSkip
}

func (skipping) CheckNamedValue(*driver.NamedValue) error { return driver.ErrSkip }

func TestAWrapperThatHidesOptionalInterfacesWorks(t *testing.T) {
	cluster := shareCluster(t, 1)
	ctx := patient(t)
	exec(t, ctx, open(t, cluster.DSN()), "create table hidden (n int)")
	if err := cluster.CatchUp(ctx); err != nil {
		t.Fatal(err)
	}
	for name, hide := range map[string]func(driver.Conn) driver.Conn{
		"all":     func(c driver.Conn) driver.Conn { return bareConn{c} },
		"by skip": func(c driver.Conn) driver.Conn { return skipping{c.(rawConn)} },
	} {
		t.Run(name, func(t *testing.T) {
			db := wrapped(t, patiently(cluster), func(m *middleware) {
				m.connect = func(ctx context.Context, inner driver.Connector) (driver.Conn, error) {
					conn, err := inner.Connect(ctx)
					if err != nil {
						return nil, err
					}
					return hide(conn), nil
				}
			})
			exec(t, ctx, db, "truncate hidden")
			for range 3 {
				exec(t, ctx, db, "insert into hidden select unnest($1::int[])", []int32{1, 2})
			}
			var n int
			if err := db.QueryRowContext(ctx, "select count(*) from hidden").Scan(&n); err != nil || n != 6 {
				t.Errorf("%d rows, %v", n, err)
			}
			if err := db.PingContext(ctx); err != nil {
				t.Error(err)
			}
			read := pgsplit.ReadOnly(ctx)
			if err := inTx(read, db, nil, "insert into hidden values (7)"); !errors.Is(err, pgsplit.ErrReadOnly) {
				t.Errorf("a write in a ReadOnly transaction: %v", err)
			}
			tx, err := db.BeginTx(ctx, &sql.TxOptions{Isolation: sql.LevelRepeatableRead})
			if err != nil {
				t.Fatal(err)
			}
			want(t, ctx, tx, "select current_setting('transaction_isolation')", "repeatable read")
			if err := tx.Commit(); err != nil {
				t.Error(err)
			}
			backToRest(t, db)
		})
	}
}

func TestAWrapConnectorThatDoesNotConnectIsAClearErrorAndLeaksNothing(t *testing.T) {
	cluster := shareCluster(t, 1)
	ctx := patient(t)
	var mu sync.Mutex
	var first driver.Conn
	for text, connect := range map[string]func(ctx context.Context, inner driver.Connector) (driver.Conn, error){
		"has not called the Connect": func(context.Context, driver.Connector) (driver.Conn, error) {
			return bareConn{}, nil
		},
		"returned no connection": func(ctx context.Context, inner driver.Connector) (driver.Conn, error) {
			_, err := inner.Connect(ctx)
			return nil, err
		},
		"a broken wrapper": func(ctx context.Context, inner driver.Connector) (driver.Conn, error) {
			_, _ = inner.Connect(ctx)
			panic("a broken wrapper")
		},
		"pass on its own context": func(_ context.Context, inner driver.Connector) (driver.Conn, error) {
			return inner.Connect(context.Background())
		},
		"one connection for each": func(ctx context.Context, inner driver.Connector) (driver.Conn, error) {
			_, _ = inner.Connect(ctx)
			return inner.Connect(ctx)
		},
		"a transaction or rows open": func(ctx context.Context, inner driver.Connector) (driver.Conn, error) {
			conn, err := inner.Connect(ctx)
			if err == nil {
				_, err = conn.(rawConn).ExecContext(ctx, "begin", nil)
			}
			return conn, err
		},
		"mine": func(ctx context.Context, inner driver.Connector) (driver.Conn, error) {
			conn, _ := inner.Connect(ctx)
			return conn, errors.New("mine")
		},
		// Only the first may be used, which another shell does.
		"outside of a call": func(ctx context.Context, inner driver.Connector) (driver.Conn, error) {
			conn, err := inner.Connect(ctx)
			mu.Lock()
			defer mu.Unlock()
			if first == nil {
				first = conn
			}
			return first, err
		},
	} {
		t.Run(text, func(t *testing.T) {
			db := wrapped(t, cluster.Primary.URI(), func(m *middleware) { m.connect = connect })
			var held *sql.Conn
			if strings.HasPrefix(text, "outside") {
				var err error
				if held, err = db.Conn(ctx); err != nil {
					t.Fatal(err)
				}
				exec(t, ctx, held, "select 1")
			}
			_, err := db.ExecContext(ctx, "select 1")
			if err == nil || !strings.Contains(err.Error(), text) || !strings.Contains(err.Error(), "pgsplit") {
				t.Errorf("error: %v", err)
			}
			if held != nil {
				_ = held.Close()
			}
			backToRest(t, db)
		})
	}

	t.Run("one that gives up while it connects", func(t *testing.T) {
		plain := open(t, cluster.Primary.URI())
		var db *sql.DB
		connected := make(chan error, 1)
		db = wrapped(t, cluster.Primary.URI(), func(m *middleware) {
			m.connect = func(ctx context.Context, inner driver.Connector) (driver.Conn, error) {
				go func() {
					_, err := inner.Connect(ctx)
					connected <- err
				}()
				eventually(t, "the server let it in", func() bool { return connectorOf(t, db).Stats().Servers[0].Opened > 0 })
				for range 50 { // until it is about there, or is
					text(t, ctx, plain, pid)
				}
				return nil, errors.New("gave up")
			}
		})
		if _, err := db.ExecContext(ctx, "select 1"); err == nil || !strings.Contains(err.Error(), "gave up") {
			t.Errorf("error: %v", err)
		}
		<-connected
		backToRest(t, db)
	})
}

func TestAWrapConnectorAndStatsCallServersTheSame(t *testing.T) {
	config, err := pgsplit.ParseDSN("postgres://app@db1,db2:5433/shop postgres://app@db3/shop?name=near&label=eu postgres://app@[::1]/shop")
	if err != nil {
		t.Fatal(err)
	}
	var told []pgsplit.Server
	config.WrapConnector = func(s pgsplit.Server, inner driver.Connector) driver.Connector {
		told = append(told, s)
		return inner
	}
	c, err := pgsplit.NewConnector(config)
	if err != nil {
		t.Fatal(err)
	}
	want := []pgsplit.Server{
		{Name: "db1:5432", Role: "primary", Address: "db1:5432,db2:5433"},
		{Name: "near", Role: "replica", Label: "eu", Address: "db3:5432"},
		{Name: "[::1]:5432", Role: "replica", Address: "[::1]:5432"},
	}
	var counted []pgsplit.Server
	for _, s := range c.Stats().Servers {
		counted = append(counted, pgsplit.Server{Name: s.Name, Role: s.Role, Label: s.Label, Address: s.Address})
	}
	if !slices.Equal(told, want) || !slices.Equal(counted, want) {
		t.Errorf("it is told %+v and Stats %+v, want %+v", told, counted, want)
	}
}

func TestAWrapConnectorThatGivesNothingIsAnInvalidConfig(t *testing.T) {
	for name, wrap := range map[string]func(pgsplit.Server, driver.Connector) driver.Connector{
		"nil":   func(pgsplit.Server, driver.Connector) driver.Connector { return nil },
		"panic": func(pgsplit.Server, driver.Connector) driver.Connector { panic("broken") },
	} {
		config, err := pgsplit.ParseDSN("postgres://u@192.0.2.1/d")
		if err != nil {
			t.Fatal(err)
		}
		config.WrapConnector = wrap
		if _, err := pgsplit.NewConnector(config); !errors.Is(err, pgsplit.ErrConfig) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// closing is a wrapper with something to close.
type closing struct {
	driver.Connector
	closed *journal
}

func (c closing) Close() error {
	c.closed.add("closed")
	return nil
}

func TestCloseClosesTheWrapperOfEachServerOnce(t *testing.T) {
	var closed journal
	db := wrappedBy(t, "postgres://u@192.0.2.1/d?replica=192.0.2.2",
		func(_ pgsplit.Server, inner driver.Connector) driver.Connector { return closing{inner, &closed} })
	if err := db.Close(); err != nil {
		t.Error(err)
	}
	if n := closed.count("closed"); n != 2 {
		t.Errorf("closed %d times, want 2", n)
	}
}

func TestAWrapperIsClosedWhereThoseOfOtherServersFail(t *testing.T) {
	config, err := pgsplit.ParseDSN("postgres://u@192.0.2.1/d?replica=192.0.2.2")
	if err != nil {
		t.Fatal(err)
	}
	var closed journal
	config.WrapConnector = func(s pgsplit.Server, inner driver.Connector) driver.Connector {
		if s.Role == "replica" {
			return nil
		}
		return closing{inner, &closed}
	}
	if _, err := pgsplit.NewConnector(config); !errors.Is(err, pgsplit.ErrConfig) {
		t.Errorf("error: %v", err)
	}
	if n := closed.count("closed"); n != 1 {
		t.Errorf("the primary's was closed %d times, want 1", n)
	}
}

func TestAServerThatRefusesIsJudgedByItsOwnErrorWhateverTheWrapperSays(t *testing.T) {
	ctx := patient(t)
	db := wrapped(t, "postgres://u@127.0.0.1:1/d", func(m *middleware) {
		m.connect = func(ctx context.Context, inner driver.Connector) (driver.Conn, error) {
			if _, err := inner.Connect(ctx); err == nil {
				t.Error("connected")
			}
			return nil, errors.New("no luck")
		}
	})
	if err := db.PingContext(ctx); !errors.Is(err, pgsplit.ErrNoPrimary) {
		t.Errorf("error: %v", err)
	}
}

func TestRawPassesTheWrapperBy(t *testing.T) {
	cluster := shareCluster(t, 1)
	ctx := patient(t)
	var seen journal
	db := wrapped(t, cluster.Primary.URI(), func(m *middleware) {
		m.ping = func(ctx context.Context, c rawConn) error {
			seen.add("ping")
			return c.Ping(ctx)
		}
		m.exec = func(_ context.Context, _ rawConn, query string, next func() (driver.Result, error)) (driver.Result, error) {
			seen.add(query)
			return next()
		}
	})
	conn, err := db.Conn(ctx)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	exec(t, ctx, conn, "select 1")
	err = pgsplit.Raw(ctx, conn, func(pg *pgx.Conn) error {
		_, err := pg.Exec(ctx, "select 2")
		return err
	})
	if got := seen.all(); err != nil || !slices.Equal(got, []string{"select 1"}) {
		t.Errorf("seen %q, %v", got, err)
	}
}
