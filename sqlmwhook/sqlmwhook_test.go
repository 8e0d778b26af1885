package sqlmwhook_test

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"flag"
	"fmt"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/ngrok/sqlmw"

	"github.com/pgsplit/pgsplit"
	"github.com/pgsplit/pgsplit/pgsplittest"
	"github.com/pgsplit/pgsplit/sqlmwhook"
)

// Under -short the example, which cannot skip itself, is left out: it starts a cluster.
func TestMain(m *testing.M) {
	flag.Parse()
	if testing.Short() {
		if err := flag.Set("test.skip", "^Example"); err != nil {
			panic(err)
		}
	}
	os.Exit(m.Run())
}

// witness writes down whatever an interceptor is called for, but for results and each row.
type witness struct {
	sqlmw.NullInterceptor
	server pgsplit.Server
	seen   *seen
}

type seen struct {
	mu    sync.Mutex
	lines []string // guarded by mu
}

// take returns what was seen since the last time.
func (s *seen) take() []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	lines := s.lines
	s.lines = nil
	return lines
}

func (w witness) note(format string, args ...any) {
	w.seen.mu.Lock()
	defer w.seen.mu.Unlock()
	w.seen.lines = append(w.seen.lines, w.server.Role+" "+w.server.Name+": "+fmt.Sprintf(format, args...))
}

func (w witness) ConnBeginTx(
	ctx context.Context, c driver.ConnBeginTx, opts driver.TxOptions,
) (context.Context, driver.Tx, error) {
	w.note("begin")
	tx, err := c.BeginTx(ctx, opts)
	return ctx, tx, err
}

func (w witness) ConnPrepareContext(
	ctx context.Context, c driver.ConnPrepareContext, query string,
) (context.Context, driver.Stmt, error) {
	w.note("prepare %s", query)
	stmt, err := c.PrepareContext(ctx, query)
	return ctx, stmt, err
}

func (w witness) ConnPing(ctx context.Context, c driver.Pinger) error {
	w.note("ping")
	return c.Ping(ctx)
}

func (w witness) ConnExecContext(
	ctx context.Context, c driver.ExecerContext, query string, args []driver.NamedValue,
) (driver.Result, error) {
	w.note("exec %s", query)
	return c.ExecContext(ctx, query, args)
}

func (w witness) ConnQueryContext(
	ctx context.Context, c driver.QueryerContext, query string, args []driver.NamedValue,
) (context.Context, driver.Rows, error) {
	w.note("query %s", query)
	rows, err := c.QueryContext(ctx, query, args)
	return ctx, rows, err
}

func (w witness) StmtExecContext(
	ctx context.Context, s driver.StmtExecContext, query string, args []driver.NamedValue,
) (driver.Result, error) {
	w.note("statement's exec %s", query)
	return s.ExecContext(ctx, args)
}

func (w witness) StmtQueryContext(
	ctx context.Context, s driver.StmtQueryContext, query string, args []driver.NamedValue,
) (context.Context, driver.Rows, error) {
	w.note("statement's query %s", query)
	rows, err := s.QueryContext(ctx, args)
	return ctx, rows, err
}

func (w witness) ConnectorConnect(ctx context.Context, c driver.Connector) (driver.Conn, error) {
	w.note("connect")
	return c.Connect(ctx)
}

func (w witness) TxCommit(_ context.Context, tx driver.Tx) error {
	err := tx.Commit()
	w.note("commit %v", err)
	return err
}

func (w witness) TxRollback(_ context.Context, tx driver.Tx) error {
	w.note("rollback")
	return tx.Rollback()
}

func open(t testing.TB, dsn string, interceptor func(pgsplit.Server) sqlmw.Interceptor) *sql.DB {
	t.Helper()
	config, err := pgsplit.ParseDSN(dsn)
	if err != nil {
		t.Fatal(err)
	}
	config.ReplicaTimeout = 20 * time.Second // a slow machine is not a replica in trouble
	config.WrapConnector = sqlmwhook.Wrap(interceptor)
	db, err := pgsplit.OpenDB(config)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = db.Close() })
	return db
}

func TestAnInterceptorSeesExactlyWhatRanOnItsServer(t *testing.T) {
	cluster := pgsplittest.Start(t)
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	primary, replica := cluster.Primary, cluster.Replicas[0]
	dsn := primary.URI() + " " + replica.URI() + "&name=near&label=here"
	var all seen
	var servers []pgsplit.Server
	db := open(t, dsn, func(s pgsplit.Server) sqlmw.Interceptor {
		servers = append(servers, s)
		return witness{server: s, seen: &all}
	})
	p := fmt.Sprintf("127.0.0.1:%d", primary.Port())
	expected := []pgsplit.Server{
		{Name: p, Role: "primary", Address: p},
		{Name: "near", Role: "replica", Label: "here", Address: fmt.Sprintf("127.0.0.1:%d", replica.Port())},
	}
	if !slices.Equal(servers, expected) {
		t.Errorf("%+v, want %+v", servers, expected)
	}
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	sees := func(lines ...string) {
		t.Helper()
		for i, line := range lines {
			role, rest, _ := strings.Cut(line, " ")
			lines[i] = map[string]string{"primary": "primary " + p, "replica": "replica near"}[role] + ": " + rest
		}
		if got := all.take(); !slices.Equal(got, lines) {
			t.Errorf("seen\n  %s\nwant\n  %s", strings.Join(got, "\n  "), strings.Join(lines, "\n  "))
		}
	}
	in := pgsplit.WithSession(ctx, pgsplit.NewSession())
	read := pgsplit.ReadOnly(in, pgsplit.ReplicaOnly(), pgsplit.MaxWait(time.Minute))
	var n int

	_, err := db.ExecContext(in, "create table seen (n int)")
	must(err)
	sees("primary connect", "primary exec create table seen (n int)")
	must(db.QueryRowContext(in, "select 1").Scan(&n))
	must(db.PingContext(in))
	sees("primary query select 1", "primary ping")

	tx, err := db.BeginTx(in, nil)
	must(err)
	_, err = tx.ExecContext(in, "insert into seen values ($1)", 7)
	must(err)
	must(tx.Commit())
	tx, err = db.BeginTx(in, nil)
	must(err)
	must(tx.Rollback())
	sees("primary begin", "primary exec insert into seen values ($1)", "primary commit <nil>", "primary begin", "primary rollback")

	// The replica is asked for its position, the primary for the session's: neither is seen.
	must(db.QueryRowContext(read, "select n from seen").Scan(&n))
	if n != 7 {
		t.Errorf("read %d, want 7", n)
	}
	sees("replica connect", "replica query select n from seen")

	stmt, err := db.PrepareContext(read, "select n + $1 from seen")
	must(err)
	must(stmt.QueryRowContext(read, 1).Scan(&n))
	must(stmt.QueryRowContext(in, 2).Scan(&n))
	must(stmt.Close())
	if n != 9 {
		t.Errorf("read %d, want 9", n)
	}
	sees("replica prepare select n + $1 from seen", "replica query select n + $1 from seen", "primary query select n + $1 from seen")

	tx, err = db.BeginTx(read, nil)
	must(err)
	must(tx.QueryRowContext(in, "select count(*) from seen").Scan(&n))
	must(tx.Commit())
	sees("replica begin", "replica query select count(*) from seen", "replica commit <nil>")
}

func TestAServerWithoutAnInterceptorIsNotWrapped(t *testing.T) {
	cluster := pgsplittest.Start(t)
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	var all seen
	db := open(t, cluster.DSN(), func(s pgsplit.Server) sqlmw.Interceptor {
		if s.Role == "primary" {
			return nil
		}
		return witness{server: s, seen: &all}
	})
	for _, ctx := range []context.Context{ctx, pgsplit.ReadOnly(ctx)} {
		if err := db.PingContext(ctx); err != nil {
			t.Error(err)
		}
	}
	if got := all.take(); len(got) != 2 || !strings.HasPrefix(got[0], "replica ") || !strings.HasSuffix(got[1], "ping") {
		t.Errorf("seen %q", got)
	}
}
