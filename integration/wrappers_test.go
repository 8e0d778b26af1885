package integration

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"errors"
	"fmt"
	"sync"
	"testing"
	"time"

	xsam "github.com/XSAM/otelsql"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/stdlib"
	"github.com/ngrok/sqlmw"
	uptrace "github.com/uptrace/opentelemetry-go-extra/otelsql"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	"go.uber.org/goleak"

	"github.com/pgsplit/pgsplit"
)

// wrapper is a way to put a library between database/sql and a driver, as its documentation says.
type wrapper struct {
	name string
	open func(driverName, dsn string) (*sql.DB, error)

	// otherwise opens what another wrapper of the list opens as well: once it is open there is little left to see.
	otherwise bool
}

var wrappers = []wrapper{
	{name: "BehindNothing", open: sql.Open},
	{name: "BehindNothingByConnector", otherwise: true, open: func(driverName, dsn string) (*sql.DB, error) {
		return byConnector(driverName, dsn, func(c driver.Connector) *sql.DB { return sql.OpenDB(c) })
	}},
	{name: "BehindXSAMOtelsqlOpen", open: func(driverName, dsn string) (*sql.DB, error) {
		return xsam.Open(driverName, dsn, xsam.WithTracerProvider(tracing))
	}},
	{name: "BehindXSAMOtelsqlRegister", otherwise: true, open: func(driverName, dsn string) (*sql.DB, error) {
		name, err := xsamRegistered(driverName)
		if err != nil {
			return nil, err
		}
		return sql.Open(name, dsn)
	}},
	{name: "BehindXSAMOtelsqlOpenDB", otherwise: true, open: func(driverName, dsn string) (*sql.DB, error) {
		return byConnector(driverName, dsn, func(c driver.Connector) *sql.DB {
			return xsam.OpenDB(c, xsam.WithTracerProvider(tracing), xsam.WithSpanOptions(xsam.SpanOptions{Ping: true, RowsNext: true}))
		})
	}},
	{name: "BehindUptraceOtelsqlOpen", open: func(driverName, dsn string) (*sql.DB, error) {
		return uptrace.Open(driverName, dsn, uptrace.WithTracerProvider(tracing))
	}},
	{name: "BehindUptraceOtelsqlOpenDB", otherwise: true, open: func(driverName, dsn string) (*sql.DB, error) {
		return byConnector(driverName, dsn, func(c driver.Connector) *sql.DB {
			return uptrace.OpenDB(c, uptrace.WithTracerProvider(tracing))
		})
	}},
	{name: "BehindSqlmw", open: func(driverName, dsn string) (*sql.DB, error) {
		return sql.Open(sqlmwRegistered(driverName), dsn)
	}},
	{name: "BehindSqlmwByConnector", otherwise: true, open: func(driverName, dsn string) (*sql.DB, error) {
		c, err := sqlmw.Driver(driverOf(driverName), sqlmw.NullInterceptor{}).(driver.DriverContext).OpenConnector(dsn)
		if err != nil {
			return nil, err
		}
		return sql.OpenDB(c), nil
	}},
	{name: "WithSqlmwAroundEachServer", open: func(driverName, dsn string) (*sql.DB, error) {
		return aroundServers(driverName, dsn, func(_ pgsplit.Server, d driver.Driver) driver.Driver {
			return sqlmw.Driver(d, sqlmw.NullInterceptor{})
		})
	}},
	{name: "WithXSAMOtelsqlAroundEachServer", otherwise: true, open: func(driverName, dsn string) (*sql.DB, error) {
		return aroundServers(driverName, dsn, func(_ pgsplit.Server, d driver.Driver) driver.Driver {
			return xsam.WrapDriver(d, xsam.WithTracerProvider(tracing))
		})
	}},
}

// aroundServers has wrap wrap the physical connections of each server; pgx's own driver has no others.
func aroundServers(driverName, dsn string, wrap func(pgsplit.Server, driver.Driver) driver.Driver) (*sql.DB, error) {
	if driverName == "pgx" {
		c, err := wrap(pgsplit.Server{}, stdlib.GetDefaultDriver()).(driver.DriverContext).OpenConnector(dsn)
		if err != nil {
			return nil, err
		}
		return sql.OpenDB(c), nil
	}
	config, err := pgsplit.ParseDSN(dsn)
	if err != nil {
		return nil, err
	}
	config.WrapConnector = func(s pgsplit.Server, inner driver.Connector) driver.Connector {
		c, err := wrap(s, inner.Driver()).(driver.DriverContext).OpenConnector("")
		if err != nil {
			return nil
		}
		return c
	}
	return pgsplit.OpenDB(config)
}

// tracing records every span, so that the wrappers do all that they can do, and keeps none.
var tracing = sdktrace.NewTracerProvider(sdktrace.WithSampler(sdktrace.AlwaysSample()))

func byConnector(driverName, dsn string, open func(driver.Connector) *sql.DB) (*sql.DB, error) {
	if driverName == "pgx" {
		config, err := pgx.ParseConfig(dsn)
		if err != nil {
			return nil, err
		}
		return open(stdlib.GetConnector(*config)), nil
	}
	config, err := pgsplit.ParseDSN(dsn)
	if err != nil {
		return nil, err
	}
	c, err := pgsplit.NewConnector(config)
	if err != nil {
		return nil, err
	}
	return open(c), nil
}

func driverOf(driverName string) driver.Driver {
	if driverName == "pgx" {
		return stdlib.GetDefaultDriver()
	}
	return &pgsplit.Driver{}
}

// A name can be registered once in a process.
var (
	registering sync.Mutex
	registered  = map[string]string{} // guarded by registering
)

func xsamRegistered(driverName string) (string, error) {
	registering.Lock()
	defer registering.Unlock()
	if name, ok := registered["xsam "+driverName]; ok {
		return name, nil
	}
	name, err := xsam.Register(driverName, xsam.WithTracerProvider(tracing))
	if err == nil {
		registered["xsam "+driverName] = name
	}
	return name, err
}

func sqlmwRegistered(driverName string) string {
	registering.Lock()
	defer registering.Unlock()
	name := driverName + "-sqlmw"
	if _, ok := registered[name]; !ok {
		sql.Register(name, sqlmw.Driver(driverOf(driverName), sqlmw.NullInterceptor{}))
		registered[name] = name
	}
	return name
}

// overEachWrapper runs a test on pgsplit with two replicas behind each wrapper.
func overEachWrapper(t *testing.T, do func(t *testing.T, c cluster, open func() *sql.DB)) {
	c := startCluster(t, 2)
	for _, w := range wrappers {
		t.Run(w.name, func(t *testing.T) {
			do(t, c, func() *sql.DB {
				t.Helper()
				db, err := w.open("pgsplit", c.DSN())
				must(t, err)
				t.Cleanup(func() { _ = db.Close() })
				return db
			})
		})
	}
}

// limited is a context that ends when a test has hung.
func limited(t *testing.T) context.Context {
	ctx, cancel := context.WithTimeout(t.Context(), caseLimit)
	t.Cleanup(cancel)
	return ctx
}

func wantRecovery(t *testing.T, ctx context.Context, what string, q queryer, want bool) {
	t.Helper()
	var got bool
	if err := q.QueryRowContext(ctx, "select pg_is_in_recovery()").Scan(&got); err != nil {
		t.Fatalf("%s: %v", what, err)
	}
	if got != want {
		t.Errorf("%s: in recovery %v, want %v", what, got, want)
	}
}

func TestHintsRouteThroughEveryWrapper(t *testing.T) {
	overEachWrapper(t, func(t *testing.T, c cluster, open func() *sql.DB) {
		ctx := limited(t)
		db := open()
		read := pgsplit.ReadOnly(ctx)
		wantRecovery(t, ctx, "unhinted", db, false)
		wantRecovery(t, read, "ReadOnly", db, true)
		wantRecovery(t, pgsplit.Primary(read), "Primary within ReadOnly", db, false)

		stmt, err := db.PrepareContext(ctx, "select pg_is_in_recovery() = $1::bool")
		must(t, err)
		defer stmt.Close()
		for ctx, replica := range map[context.Context]bool{ctx: false, read: true} {
			var right bool
			must(t, stmt.QueryRowContext(ctx, replica).Scan(&right))
			if !right {
				t.Errorf("a statement runs elsewhere, want a replica: %v", replica)
			}
		}

		tx, err := db.BeginTx(read, nil)
		must(t, err)
		wantRecovery(t, ctx, "a ReadOnly transaction", tx, true)
		wantRecovery(t, pgsplit.Primary(ctx), "its statement with another hint", tx, true)
		must(t, tx.Commit())
		tx, err = db.BeginTx(ctx, &sql.TxOptions{Isolation: sql.LevelRepeatableRead})
		must(t, err)
		wantRecovery(t, read, "a ReadOnly statement of an unhinted transaction", tx, false)
		must(t, tx.Rollback())

		_, err = db.ExecContext(read, "create table unwanted ()")
		if !errors.Is(err, pgsplit.ErrReadOnly) {
			t.Errorf("a write under ReadOnly: %v", err)
		}
		conn, err := db.Conn(ctx)
		must(t, err)
		wantRecovery(t, read, "a held connection before it wrote", conn, true)
		_, err = conn.ExecContext(ctx, "set work_mem = '5MB'")
		must(t, err)
		wantRecovery(t, read, "a held connection with a session of its own", conn, false)
		must(t, conn.Close())
		wantRecovery(t, read, "ReadOnly afterwards", db, true)
	})
}

func TestFromDBAndCommitLSNWorkThroughEveryWrapper(t *testing.T) {
	overEachWrapper(t, func(t *testing.T, c cluster, open func() *sql.DB) {
		ctx := limited(t)
		db := open()
		connector, err := pgsplit.FromDB(db)
		must(t, err)
		if opened := connector.Stats().Servers[0].Opened; opened != 0 {
			t.Errorf("FromDB opened %d connections", opened)
		}
		_, err = db.ExecContext(ctx, "drop table if exists notes; create table notes (n int); insert into notes values (1)")
		must(t, err)
		lsn, err := pgsplit.CommitLSN(ctx, db)
		must(t, err)
		if lsn == 0 {
			t.Error("no position")
		}
		var n int
		var replica bool
		read := pgsplit.ReadOnly(pgsplit.WithLSN(ctx, lsn), pgsplit.MaxWait(30*time.Second))
		must(t, db.QueryRowContext(read, "select pg_is_in_recovery(), count(*) from notes").Scan(&replica, &n))
		if !replica || n != 1 {
			t.Errorf("on a replica %v: %d rows, want 1", replica, n)
		}
		stats := connector.Stats()
		if stats.Servers[0].Statements == 0 || stats.Servers[1].Statements+stats.Servers[2].Statements != 1 {
			t.Errorf("the connector found is not the one that ran the statements: %+v", stats)
		}
		if h := connector.Health(ctx); h.Status != "ok" || len(h.Servers) != 3 {
			t.Errorf("health: %+v", h)
		}
		// With a position that nobody has the primary answers.
		read = pgsplit.ReadOnly(pgsplit.WithLSN(ctx, ^pgsplit.LSN(0)-1))
		wantRecovery(t, read, "a floor that no replica has", db, false)
	})
}

func TestFromDBTellsAnotherDriversDB(t *testing.T) {
	c := startCluster(t, 0)
	for _, w := range wrappers {
		t.Run(w.name, func(t *testing.T) {
			db, err := w.open("pgx", c.PrimaryURI())
			must(t, err)
			defer db.Close()
			if connector, err := pgsplit.FromDB(db); err == nil || connector != nil {
				t.Errorf("FromDB of pgx's: %v, %v", connector, err)
			}
			if lsn, err := pgsplit.CommitLSN(limited(t), db); err == nil {
				t.Errorf("CommitLSN of pgx's: %v", lsn)
			}
		})
	}
}

func TestRawGivesPgxsConnectionThroughEveryWrapper(t *testing.T) {
	overEachWrapper(t, func(t *testing.T, c cluster, open func() *sql.DB) {
		ctx := limited(t)
		db := open()
		conn, err := db.Conn(ctx)
		must(t, err)
		defer conn.Close()
		wantRecovery(t, ctx, "unhinted", conn, false)
		must(t, pgsplit.Raw(ctx, conn, func(pg *pgx.Conn) error {
			if _, err := pg.Exec(ctx, "drop table if exists copied; create table copied (n int)"); err != nil {
				return err
			}
			n, err := pg.CopyFrom(ctx, pgx.Identifier{"copied"}, []string{"n"}, pgx.CopyFromRows([][]any{{1}, {2}, {3}}))
			if n != 3 {
				t.Errorf("copied %d rows, want 3", n)
			}
			return err
		}))
		var n int
		must(t, conn.QueryRowContext(ctx, "select count(*) from copied").Scan(&n))
		if n != 3 {
			t.Errorf("%d rows, want 3", n)
		}
		mine := errors.New("of the function")
		if err := pgsplit.Raw(ctx, conn, func(*pgx.Conn) error { return mine }); !errors.Is(err, mine) {
			t.Errorf("the function's error comes back as %v", err)
		}
		must(t, conn.PingContext(ctx))

		other, err := db.Conn(ctx)
		must(t, err)
		defer other.Close()
		must(t, pgsplit.Raw(pgsplit.ReadOnly(ctx), other, func(pg *pgx.Conn) error {
			var replica bool
			err := pg.QueryRow(ctx, "select pg_is_in_recovery()").Scan(&replica)
			if !replica {
				t.Error("Raw under ReadOnly is not on a replica")
			}
			return err
		}))
	})
}

func TestAPanicThroughRawReachesTheCallerThroughEveryWrapper(t *testing.T) {
	overEachWrapper(t, func(t *testing.T, c cluster, open func() *sql.DB) {
		ctx := limited(t)
		db := open()
		conn, err := db.Conn(ctx)
		must(t, err)
		func() {
			defer func() {
				if cause := recover(); cause != "of the function" {
					t.Errorf("recovered %v", cause)
				}
			}()
			_ = pgsplit.Raw(ctx, conn, func(*pgx.Conn) error { panic("of the function") })
			t.Error("no panic")
		}()
		must(t, conn.Close())
		must(t, db.PingContext(ctx))
		if inUse := db.Stats().InUse; inUse != 0 {
			t.Errorf("%d connections in use, want 0", inUse)
		}
	})
}

func TestNothingRunsOnAfterCloseBehindAnyWrapper(t *testing.T) {
	overEachWrapper(t, func(t *testing.T, c cluster, open func() *sql.DB) {
		before := goleak.IgnoreCurrent()
		ctx := limited(t)
		db := open()
		read := pgsplit.ReadOnly(ctx)
		var wg sync.WaitGroup
		for i := range 8 {
			wg.Go(func() {
				for j := range 5 {
					ctx := ctx
					if (i+j)%2 == 0 {
						ctx = read
					}
					var n int
					if err := db.QueryRowContext(ctx, "select 1").Scan(&n); err != nil {
						t.Error(err)
					}
				}
			})
		}
		wg.Wait()
		connector, err := pgsplit.FromDB(db)
		must(t, err)
		cancelled, cancel := context.WithCancel(ctx)
		_, err = db.BeginTx(cancelled, nil)
		must(t, err)
		cancel()
		if h := connector.Health(ctx); h.Status != "ok" {
			t.Errorf("health: %+v", h)
		}
		must(t, db.Close())
		goleak.VerifyNone(t, before)
		for _, s := range connector.Stats().Servers {
			if s.Open != 0 || s.InUse != 0 {
				t.Errorf("after Close: %+v", s)
			}
		}
	})
}

func TestOpeningADBBehindAWrapperStartsAndConnectsNothing(t *testing.T) {
	for _, w := range wrappers {
		t.Run(w.name, func(t *testing.T) {
			before := goleak.IgnoreCurrent()
			db, err := w.open("pgsplit", "postgres://u@192.0.2.1:1/d postgres://u@192.0.2.2:1/d")
			must(t, err)
			connector, err := pgsplit.FromDB(db)
			must(t, err)
			for _, s := range connector.Stats().Servers {
				if s.Opened != 0 || s.Failures != 0 {
					t.Errorf("%+v", s)
				}
			}
			must(t, db.Close())
			goleak.VerifyNone(t, before)
		})
	}
}

// shouting is what a middleware of sqlmw's is for: it sees each statement and its context.
type shouting struct {
	sqlmw.NullInterceptor
	mu    sync.Mutex
	heard []string // guarded by mu
}

func (s *shouting) ConnQueryContext(
	ctx context.Context, conn driver.QueryerContext, query string, args []driver.NamedValue,
) (context.Context, driver.Rows, error) {
	hint, hinted := pgsplit.HintFrom(ctx)
	s.mu.Lock()
	s.heard = append(s.heard, fmt.Sprintf("%s %v %v", query, hinted, hint.ReadOnly))
	s.mu.Unlock()
	rows, err := conn.QueryContext(ctx, query, args)
	return ctx, rows, err
}

func TestAMiddlewareSeesTheHintsThatItsStatementsCarry(t *testing.T) {
	c := startCluster(t, 1)
	ctx := limited(t)
	s := &shouting{}
	connector, err := sqlmw.Driver(&pgsplit.Driver{}, s).(driver.DriverContext).OpenConnector(c.DSN())
	must(t, err)
	db := sql.OpenDB(connector)
	defer db.Close()
	wantRecovery(t, ctx, "unhinted", db, false)
	wantRecovery(t, pgsplit.ReadOnly(ctx), "ReadOnly", db, true)
	want := "[select pg_is_in_recovery() false false select pg_is_in_recovery() true true]"
	if got := fmt.Sprint(s.heard); got != want {
		t.Errorf("heard %s, want %s", got, want)
	}
}
