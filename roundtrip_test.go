package pgsplit_test

import (
	"context"
	"database/sql"
	"fmt"
	"strconv"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/pgsplit/pgsplit"
	"github.com/pgsplit/pgsplit/pgsplittest"
)

// roundTrips counts what work costs at all of the cluster's proxies together: the least of a few runs, since a
// connection that was idle for a second is pinged first.
func roundTrips(t testing.TB, cluster *pgsplittest.Cluster, work func() error) int64 {
	t.Helper()
	return roundTripsDownTo(t, cluster, 0, work)
}

// roundTripsDownTo is roundTrips for who asks only whether they are so few: no more runs than show that.
func roundTripsDownTo(t testing.TB, cluster *pgsplittest.Cluster, enough int64, work func() error) int64 {
	t.Helper()
	least := int64(-1)
	for run := 0; run < 4 && (run == 0 || least > enough); run++ {
		before := spoken(cluster)
		if err := work(); err != nil {
			t.Fatal(err)
		}
		if n := spoken(cluster) - before; least < 0 || n < least {
			least = n
		}
	}
	return least
}

func spoken(cluster *pgsplittest.Cluster) (n int64) {
	for _, s := range cluster.Servers() {
		n += s.Proxy().RoundTrips()
	}
	return n
}

// openRaw opens pgx's own driver.
func openRaw(t testing.TB, uri string) *sql.DB {
	t.Helper()
	db, err := sql.Open("pgx", uri)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = db.Close() })
	return db
}

// call is something that a program does with a sql.DB.
type call struct {
	name string
	do   func(ctx context.Context, db *sql.DB) error
}

// texts makes statements that no connection has seen.
var texts int

func newText() string {
	texts++
	return fmt.Sprintf("select $1::int + %d", texts)
}

// reads are calls that write nothing.
var reads = []call{
	{"Exec", func(ctx context.Context, db *sql.DB) error {
		_, err := db.ExecContext(ctx, "select $1::int", 1)
		return err
	}},
	{"Query", func(ctx context.Context, db *sql.DB) error {
		return scanOne(db.QueryContext(ctx, "select n from generate_series(1, $1::int) n", 3))
	}},
	{"Query of a new text", func(ctx context.Context, db *sql.DB) error {
		return scanOne(db.QueryContext(ctx, newText(), 3))
	}},
	{"simple protocol", func(ctx context.Context, db *sql.DB) error {
		return scanOne(db.QueryContext(ctx, "select 1", pgx.QueryExecModeSimpleProtocol))
	}},
	{"exec mode", func(ctx context.Context, db *sql.DB) error {
		return scanOne(db.QueryContext(ctx, "select $1::text", pgx.QueryExecModeExec, "a"))
	}},
	{"Prepare, Exec, Query, Close", func(ctx context.Context, db *sql.DB) error {
		stmt, err := db.PrepareContext(ctx, newText())
		if err != nil {
			return err
		}
		if _, err := stmt.ExecContext(ctx, 1); err != nil {
			return err
		}
		if err := scanOne(stmt.QueryContext(ctx, 2)); err != nil {
			return err
		}
		return stmt.Close()
	}},
	{"a transaction", func(ctx context.Context, db *sql.DB) error {
		return inTx(ctx, db, nil, "select 1")
	}},
	{"a transaction that is rolled back", func(ctx context.Context, db *sql.DB) error {
		tx, err := db.BeginTx(ctx, nil)
		if err != nil {
			return err
		}
		if _, err := tx.ExecContext(ctx, "select 1"); err != nil {
			return err
		}
		return tx.Rollback()
	}},
	{"a read-only repeatable read transaction", func(ctx context.Context, db *sql.DB) error {
		return inTx(ctx, db, &sql.TxOptions{Isolation: sql.LevelRepeatableRead, ReadOnly: true}, "select 1")
	}},
	{"Ping", func(ctx context.Context, db *sql.DB) error { return db.PingContext(ctx) }},
	{"two statements on a held connection", func(ctx context.Context, db *sql.DB) error {
		conn, err := db.Conn(ctx)
		if err != nil {
			return err
		}
		defer conn.Close()
		if _, err := conn.ExecContext(ctx, "select 1"); err != nil {
			return err
		}
		return scanOne(conn.QueryContext(ctx, "select 1"))
	}},
}

// ledgerWrites are calls that write, as the primary allows.
var ledgerWrites = []call{
	{"insert", func(ctx context.Context, db *sql.DB) error {
		_, err := db.ExecContext(ctx, "insert into ledger values (2) on conflict do nothing")
		return err
	}},
	{"insert returning", func(ctx context.Context, db *sql.DB) error {
		return scanOne(db.QueryContext(ctx, "insert into ledger values ($1) on conflict (id) do update set amount = 1 returning id", 2))
	}},
	{"a transaction with a write", func(ctx context.Context, db *sql.DB) error {
		return inTx(ctx, db, nil, "update ledger set amount = amount + 1")
	}},
}

// compare measures each call by raw pgx on the primary and by db, whose connections are warm, and checks that db takes
// at most extra round trips more.
func compare(t *testing.T, cluster *pgsplittest.Cluster, calls []call, db *sql.DB, hinted func() context.Context, extra int64) {
	t.Helper()
	raw := openRaw(t, cluster.Primary.ProxyURI())
	raw.SetMaxOpenConns(1)
	for _, c := range calls {
		t.Run(c.name, func(t *testing.T) {
			plain := patient(t)
			base := roundTrips(t, cluster, func() error { return c.do(plain, raw) })
			got := roundTripsDownTo(t, cluster, base+extra, func() error { return c.do(hinted(), db) })
			if got > base+extra {
				t.Errorf("%d round trips, raw pgx takes %d", got, base)
			}
		})
	}
}

func TestUnhintedCallsTakeNoMoreRoundTripsThanRawPgx(t *testing.T) {
	for _, replicas := range []int{0, 1} {
		t.Run(strconv.Itoa(replicas)+" replicas", func(t *testing.T) {
			cluster := shareCluster(t, replicas)
			ctx := patient(t)
			runSQL(t, ctx, cluster, ledger)
			db := open(t, cluster.ProxyDSN())
			db.SetMaxOpenConns(1)
			compare(t, cluster, append(reads, ledgerWrites...), db, func() context.Context { return ctx }, 0)
		})
	}
}

func TestReadOnlyCallsWithoutAFloorTakeNoMoreRoundTripsThanRawPgx(t *testing.T) {
	for _, replicas := range []int{0, 1} {
		t.Run(strconv.Itoa(replicas)+" replicas", func(t *testing.T) {
			cluster := shareCluster(t, replicas)
			ctx := pgsplit.ReadOnly(patient(t))
			db := open(t, cluster.ProxyDSN())
			db.SetMaxOpenConns(1)
			compare(t, cluster, reads, db, func() context.Context { return ctx }, 0)
		})
	}
}

func TestReadOnlyCallsWithAKnownFloorTakeNoMoreRoundTripsThanRawPgx(t *testing.T) {
	cluster := shareCluster(t, 1)
	ctx := patient(t)
	runSQL(t, ctx, cluster, ledger)
	db := open(t, cluster.ProxyDSN())
	db.SetMaxOpenConns(1)
	read := pgsplit.ReadOnly(pgsplit.WithLSN(ctx, commitLSN(t, ctx, db)), pgsplit.ReplicaOnly())
	if err := cluster.CatchUp(ctx); err != nil {
		t.Fatal(err)
	}
	if err := db.PingContext(read); err != nil { // it proves the floor
		t.Fatal(err)
	}
	compare(t, cluster, reads, db, func() context.Context { return read }, 0)
}

// newFloor commits something and waits until the replicas that can have it have it, without the driver's knowledge.
func newFloor(t testing.TB, ctx context.Context, cluster *pgsplittest.Cluster) pgsplit.LSN {
	t.Helper()
	runSQL(t, ctx, cluster, "select pg_logical_emit_message(true, 'test', 'a commit')")
	lsn, err := pgsplit.ParseLSN(onServer(t, ctx, cluster.Primary, "select pg_current_wal_flush_lsn()::text"))
	if err != nil {
		t.Fatal(err)
	}
	if err := cluster.CatchUp(ctx); err != nil {
		t.Fatal(err)
	}
	return lsn
}

func TestReadOnlyCallsWithAnUnknownFloorTakeOneRoundTripMoreAtMost(t *testing.T) {
	cluster := shareCluster(t, 1)
	ctx := patient(t)
	db := open(t, cluster.ProxyDSN())
	db.SetMaxOpenConns(1)
	compare(t, cluster, reads, db, func() context.Context {
		return pgsplit.ReadOnly(pgsplit.WithLSN(ctx, newFloor(t, ctx, cluster)), pgsplit.ReplicaOnly())
	}, 1)
}

func TestTheFallbackToThePrimaryTakesOneRoundTripMoreForEachReplicaThatIsBehind(t *testing.T) {
	const replicas = 2
	cluster := pgsplittest.Start(t, pgsplittest.Replicas(replicas))
	ctx := patient(t)
	db := open(t, cluster.ProxyDSN())
	db.SetMaxOpenConns(1)
	read := pgsplit.ReadOnly(pgsplit.WithLSN(ctx, staleFloor(t, ctx, cluster, db)))
	for _, c := range reads {
		if c.name == "Prepare, Exec, Query, Close" || c.name == "two statements on a held connection" {
			continue // several statements: each asks again
		}
		compare(t, cluster, []call{c}, db, func() context.Context { return read }, replicas)
	}
	if got := text(t, read, db, inRecovery); got != "false" {
		t.Errorf("in recovery %s: this test is about the primary", got)
	}
}

func TestTheFallbackToThePrimaryTakesNoRoundTripForAReplicaKnownToBeDown(t *testing.T) {
	cluster := pgsplittest.Start(t)
	ctx := patient(t)
	db := open(t, cluster.ProxyDSN())
	db.SetMaxOpenConns(1)
	cluster.Replicas[0].Proxy().Cut()
	compare(t, cluster, reads, db, func() context.Context { return pgsplit.ReadOnly(ctx) }, 0)
}

func TestANewConnectionTakesOneRoundTripMoreThanRawPgx(t *testing.T) {
	cluster := shareCluster(t, 1)
	ctx := patient(t)
	first := func(open func() *sql.DB, ctx context.Context) func() error {
		return func() error {
			db := open()
			defer db.Close()
			return scanOne(db.QueryContext(ctx, "select 1"))
		}
	}
	base := roundTrips(t, cluster, first(func() *sql.DB { return openRaw(t, cluster.Primary.ProxyURI()) }, ctx))
	for name, ctx := range map[string]context.Context{"unhinted": ctx, "ReadOnly": pgsplit.ReadOnly(ctx)} {
		got := roundTrips(t, cluster, first(func() *sql.DB { return open(t, cluster.ProxyDSN()) }, ctx))
		if got != base+1 {
			t.Errorf("%s: %d round trips, raw pgx takes %d", name, got, base)
		}
	}
}

// pgx lists a host twice where TLS is optional, as it is by default. That is one host, and no other one has to be looked for.
func TestTheNextConnectionToOneHostTakesNoMoreRoundTripsThanTheFirst(t *testing.T) {
	cluster := shareCluster(t, 1)
	ctx := patient(t)
	db := open(t, strings.Replace(cluster.Primary.ProxyURI(), "sslmode=disable", "sslmode=prefer", 1))
	connect := func() error {
		_, err := hold(t, ctx, db).ExecContext(ctx, "select 1")
		return err
	}
	first := roundTrips(t, cluster, connect)
	if next := roundTrips(t, cluster, connect); next != first {
		t.Errorf("%d round trips, and %d the first time", next, first)
	}
}

func TestCommitLSNTakesOneRoundTripOrTwo(t *testing.T) {
	cluster := shareCluster(t, 1)
	ctx := patient(t)
	runSQL(t, ctx, cluster, ledger)
	db := open(t, cluster.ProxyDSN())
	db.SetMaxOpenConns(1)
	ask := func() error {
		_, err := pgsplit.CommitLSN(ctx, db)
		return err
	}
	if got := roundTrips(t, cluster, ask); got != 1 {
		t.Errorf("%d round trips where everything is flushed", got)
	}
	write := func() error {
		_, err := db.ExecContext(ctx, "set synchronous_commit = off; update ledger set amount = amount + 1",
			pgx.QueryExecModeSimpleProtocol)
		return err
	}
	if got := roundTrips(t, cluster, func() error {
		if err := write(); err != nil {
			return err
		}
		return ask()
	}); got > 3 {
		t.Errorf("an asynchronous commit and CommitLSN take %d round trips", got)
	}
}

func TestReadingAndWritingInTurnOnOneShellTakesOneRoundTripMoreAndNoNewConnection(t *testing.T) {
	cluster := shareCluster(t, 0)
	ctx := patient(t)
	db := open(t, cluster.ProxyDSN())
	db.SetMaxOpenConns(1)
	read := pgsplit.ReadOnly(ctx)
	both := func() error {
		if _, err := db.ExecContext(read, "select 1"); err != nil {
			return err
		}
		_, err := db.ExecContext(ctx, "select 1")
		return err
	}
	// The first connection may be one that is good for reading only.
	for range 2 {
		if err := both(); err != nil {
			t.Fatal(err)
		}
	}
	before := cluster.Primary.Proxy().Accepted()
	if got := roundTrips(t, cluster, both); got > 4 {
		t.Errorf("%d round trips for a read and a write", got)
	}
	if n := cluster.Primary.Proxy().Accepted() - before; n != 0 {
		t.Errorf("%d new connections", n)
	}
}
