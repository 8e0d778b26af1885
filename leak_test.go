package pgsplit_test

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"fmt"
	"os"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/pgsplit/pgsplit"
	"github.com/pgsplit/pgsplit/pgsplittest"
)

// All tests of the package together leave no goroutine behind.
func TestMain(m *testing.M) { goleak.VerifyTestMain(patientMain{m}) }

// patientMain gives the goroutines of the last tests time to end: goleak itself waits for a second or two.
type patientMain struct{ *testing.M }

func (m patientMain) Run() int {
	skipExamplesUnderShort()
	code := m.M.Run()
	stopExamples()
	if err := stopSharedClusters(); err != nil {
		fmt.Fprintln(os.Stderr, err)
		code = max(code, 1)
	}
	if code == 0 {
		within(time.Minute, func() bool { return goleak.Find() == nil })
	}
	return code
}

// noneLeft waits until all goroutines have ended but those of the options.
func noneLeft(t testing.TB, options ...goleak.Option) {
	t.Helper()
	var err error
	if !within(time.Minute, func() bool { err = goleak.Find(options...); return err == nil }) {
		t.Error(err)
	}
}

// plainConnector is a wrapper that passes on what driver.Connector asks for and nothing else: no io.Closer.
type plainConnector struct{ driver.Connector }

// plainConn is a wrapper that hides every optional interface but Pinger, Validator above all.
type plainConn struct{ driver.Conn }

func (c plainConn) Ping(ctx context.Context) error { return c.Conn.(driver.Pinger).Ping(ctx) }

func (c plainConn) BeginTx(ctx context.Context, opts driver.TxOptions) (driver.Tx, error) {
	return c.Conn.(driver.ConnBeginTx).BeginTx(ctx, opts)
}

func (c plainConn) QueryContext(ctx context.Context, query string, args []driver.NamedValue) (driver.Rows, error) {
	return c.Conn.(driver.QueryerContext).QueryContext(ctx, query, args)
}

func (c plainConn) ExecContext(ctx context.Context, query string, args []driver.NamedValue) (driver.Result, error) {
	return c.Conn.(driver.ExecerContext).ExecContext(ctx, query, args)
}

// hidingConnector hides the Connector's Close and the connections' optional interfaces.
type hidingConnector struct{ inner driver.Connector }

func (c hidingConnector) Connect(ctx context.Context) (driver.Conn, error) {
	conn, err := c.inner.Connect(ctx)
	return plainConn{conn}, err
}

func (c hidingConnector) Driver() driver.Driver { return c.inner.Driver() }

func connector(t testing.TB, dsn string) *pgsplit.Connector {
	t.Helper()
	config, err := pgsplit.ParseDSN(dsn)
	if err != nil {
		t.Fatal(err)
	}
	c, err := pgsplit.NewConnector(config)
	if err != nil {
		t.Fatal(err)
	}
	return c
}

func TestNothingKeepsRunningAfterTheLastShellEvenIfAWrapperHidesClose(t *testing.T) {
	cluster := pgsplittest.Start(t, pgsplittest.Replicas(2))
	ctx := patient(t)
	dsn := with(cluster.DSN(), "application_name=wrapped", "pool_min_conns=2", "pool_max_conn_idle_time=1h",
		"pool_max_conn_lifetime=1h", "pool_health_check_period=50ms", "replica_max_lag=1s")
	observers := observeAll(t, cluster, "wrapped")
	for name, wrap := range map[string]func(driver.Connector) driver.Connector{
		"its Close":                func(c driver.Connector) driver.Connector { return plainConnector{c} },
		"every optional interface": func(c driver.Connector) driver.Connector { return hidingConnector{c} },
	} {
		t.Run(name, func(t *testing.T) {
			before := goleak.IgnoreCurrent()
			c := connector(t, dsn)
			db := sql.OpenDB(wrap(c))
			storm(t, ctx, db, 8, 4)
			for i, o := range observers {
				eventually(t, fmt.Sprintf("server %d has connections", i), func() bool { return len(o.pids()) > 0 })
			}
			if err := db.Close(); err != nil {
				t.Error(err)
			}
			eventually(t, "no connection is counted as open", func() bool { return openConnections(c) == 0 && inUse(c) == 0 })
			noneLeft(t, before)
			for i, o := range observers {
				eventually(t, fmt.Sprintf("server %d has no connection", i), func() bool { return len(o.pids()) == 0 })
			}
		})
	}
}

// The background opening of pool_min_conns must not outlive the last shell, even while a server does not answer.
func TestTheLastShellEndsABackgroundOpeningThatHangs(t *testing.T) {
	cluster := pgsplittest.Start(t, pgsplittest.Replicas(1))
	ctx := patient(t)
	replica := cluster.Replicas[0].Proxy()
	replica.BlackHole()
	for name, wrap := range map[string]func(driver.Connector) driver.Connector{
		"with Close":    func(c driver.Connector) driver.Connector { return c },
		"without Close": func(c driver.Connector) driver.Connector { return plainConnector{c} },
	} {
		t.Run(name, func(t *testing.T) {
			accepted := replica.Accepted()
			c := connector(t, with(cluster.ProxyDSN(), "pool_min_conns=1"))
			db := sql.OpenDB(wrap(c))
			exec(t, ctx, db, "select 1")
			eventually(t, "the opening has begun", func() bool { return replica.Accepted() > accepted })
			if err := db.Close(); err != nil {
				t.Error(err)
			}
			eventually(t, "the opening has ended", func() bool { return openConnections(c) == 0 && replica.Connections() == 0 })
		})
	}
}

// A sql.DB that is dropped and opened again many times leaves nothing: sqlx and tests do that.
func TestOpeningUsingAndClosingManyTimesLeavesNothing(t *testing.T) {
	cluster := pgsplittest.Start(t, pgsplittest.Replicas(1))
	ctx := patient(t)
	observers := observeAll(t, cluster, "many")
	before := goleak.IgnoreCurrent()
	for range 20 {
		db := open(t, with(cluster.DSN(), "application_name=many", "pool_min_conns=1", "pool_max_conn_idle_time=1h"))
		exec(t, ctx, db, "select 1")
		exec(t, pgsplit.ReadOnly(ctx, pgsplit.MaxStaleness(time.Minute)), db, "select 1")
		if err := db.Close(); err != nil {
			t.Error(err)
		}
	}
	noneLeft(t, before)
	for i, o := range observers {
		eventually(t, fmt.Sprintf("server %d has no connection", i), func() bool { return len(o.pids()) == 0 })
	}
}

func TestStatementsThatAreClosedLeaveNothingOnAConnection(t *testing.T) {
	cluster := pgsplittest.Start(t, pgsplittest.Replicas(0))
	ctx := patient(t)
	db := open(t, cluster.DSN())
	db.SetMaxOpenConns(1)
	for i := range 1000 {
		stmt, err := db.PrepareContext(ctx, fmt.Sprintf("select %d", i))
		if err != nil {
			t.Fatal(err)
		}
		exec(t, ctx, db, "select 1")
		if err := stmt.Close(); err != nil {
			t.Fatal(err)
		}
	}
	var left int
	if err := db.QueryRowContext(ctx, "select count(*) from pg_prepared_statements").Scan(&left); err != nil {
		t.Fatal(err)
	}
	if left > 700 { // pgx's own cache of 512 and the closed ones that go together
		t.Errorf("%d prepared statements are left on the server", left)
	}
}
