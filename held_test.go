package pgsplit_test

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgsplit/pgsplit"
	"github.com/pgsplit/pgsplit/pgsplittest"
)

// hold takes a sql.Conn for the time of the test.
func hold(t testing.TB, ctx context.Context, db *sql.DB) *sql.Conn {
	t.Helper()
	conn, err := db.Conn(ctx)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close() })
	return conn
}

// refused checks that a statement fails as a write under ReadOnly.
func refused(t testing.TB, ctx context.Context, q queryer, query string) {
	t.Helper()
	if _, err := q.ExecContext(ctx, query); !errors.Is(err, pgsplit.ErrReadOnly) {
		t.Errorf("%s: %v, want ErrReadOnly", query, err)
	}
}

// want checks the one text that a query answers.
func want(t testing.TB, ctx context.Context, q queryer, query, expected string) {
	t.Helper()
	if got := text(t, ctx, q, query); got != expected {
		t.Errorf("%s: %q, want %q", query, got, expected)
	}
}

// current is a ReadOnly context whose reads see all that was committed before, on a replica.
func current(t testing.TB, ctx context.Context, db *sql.DB) context.Context {
	t.Helper()
	lsn, err := pgsplit.CommitLSN(ctx, db)
	if err != nil {
		t.Fatal(err)
	}
	return pgsplit.ReadOnly(pgsplit.WithLSN(ctx, lsn), pgsplit.MaxWait(20*time.Second), pgsplit.ReplicaOnly())
}

const backend = `select pg_backend_pid()::text`

func TestSettingsOfAHeldConnectionHoldForItsReadOnlyStatements(t *testing.T) {
	cluster := shareCluster(t, 2)
	ctx := patient(t)
	db := open(t, patiently(cluster))
	exec(t, ctx, db, "create schema a")
	exec(t, ctx, db, "create table a.t (id int)")
	read := current(t, ctx, db)

	conn := hold(t, ctx, db)
	exec(t, ctx, conn, "set search_path = a")
	pid := text(t, ctx, conn, backend)
	for range 3 {
		want(t, read, conn, "select current_schema()", "a")
		want(t, read, conn, "select count(*)::text from t", "0")
		want(t, read, conn, backend, pid)
		refused(t, read, conn, "insert into t values (1)")
	}
	want(t, ctx, conn, "select count(*)::text from t", "0")
	exec(t, ctx, conn, "insert into t values (1)")
	want(t, read, conn, "select count(*)::text from t", "1")
	want(t, ctx, conn, "select current_schema()", "a")
	if n := connectorOf(t, db).Stats().Reasons["held"]; n < 9 {
		t.Errorf("%d statements were counted as held", n)
	}
}

func TestRowSecurityOfAHeldConnectionHoldsForItsReadOnlyStatements(t *testing.T) {
	cluster := shareCluster(t, 2)
	ctx := patient(t)
	db := open(t, patiently(cluster))
	for _, query := range []string{
		"create role app",
		"create table t (tenant text, id int)",
		"insert into t values ('a', 1), ('b', 2), ('b', 3)",
		"alter table t enable row level security",
		"create policy own on t using (tenant = current_setting('app.tenant'))",
		"grant select, insert on t to app",
	} {
		exec(t, ctx, db, query)
	}
	read := current(t, ctx, db)
	conn := hold(t, ctx, db)
	exec(t, ctx, conn, "set role app")
	exec(t, ctx, conn, "select set_config('app.tenant', 'a', false)")
	const seen = "select current_user || ' ' || string_agg(id::text, ',' order by id) from t"
	want(t, read, conn, seen, "app 1")
	refused(t, read, conn, "insert into t values ('a', 4)")
	exec(t, ctx, conn, "insert into t values ('a', 5)")
	want(t, read, conn, seen, "app 1,5")
	// A replica would have shown the tenants of whoever logged in.
	want(t, current(t, ctx, db), db, "select count(*)::text from t", "4")
}

func TestTemporaryTablesOfAHeldConnectionAreSeenByItsReadOnlyStatements(t *testing.T) {
	cluster := shareCluster(t, 1)
	ctx := patient(t)
	db := open(t, patiently(cluster))
	conn := hold(t, ctx, db)
	exec(t, ctx, conn, "create temporary table mine as select 7 as id")
	want(t, pgsplit.ReadOnly(ctx), conn, "select id::text from mine", "7")
	want(t, pgsplit.ReadOnly(ctx, pgsplit.ReplicaOnly()), conn, "select id::text from mine", "7")
	want(t, ctx, conn, "select id::text from mine", "7")
}

func TestAStatementOfALostHeldConnectionNeverRunsElsewhere(t *testing.T) {
	cluster := shareCluster(t, 1)
	ctx := patient(t)
	for name, ctx := range map[string]context.Context{
		"unhinted": ctx, "ReadOnly": pgsplit.ReadOnly(ctx), "Primary": pgsplit.Primary(ctx),
	} {
		for _, way := range []string{"statement", "transaction", "prepare", "ping", "statement over a socket"} {
			t.Run(name+" "+way, func(t *testing.T) {
				dsn := patiently(cluster)
				if way == "statement over a socket" { // where the loss shows as a broken pipe: F13
					dsn = cluster.Primary.SocketURI() + " " + cluster.Replicas[0].SocketURI()
				}
				db := open(t, dsn)
				for range 2 { // both a new and a used connection
					exec(t, patient(t), db, "select 1")
				}
				conn := hold(t, ctx, db)
				exec(t, patient(t), conn, "select pg_advisory_lock(42)")
				pid := text(t, patient(t), conn, backend)
				kill(t, cluster.Primary, pid)
				use := func() (err error) {
					switch way {
					case "statement", "statement over a socket":
						_, err = conn.ExecContext(ctx, "select 1")
					case "transaction":
						_, err = conn.BeginTx(ctx, nil)
					case "prepare":
						_, err = conn.PrepareContext(ctx, "select 1")
					case "ping":
						err = conn.PingContext(ctx)
					}
					return err
				}
				for i := range 3 {
					if err := use(); err == nil {
						t.Errorf("%s %d after the loss ran without the lock", way, i+1)
					}
				}
				// The sql.DB itself is well.
				exec(t, ctx, db, "select 1")
			})
		}
	}
}

// kill ends a backend and waits until it is gone.
func kill(t testing.TB, s *pgsplittest.Server, pid string) {
	t.Helper()
	ctx := patient(t)
	if err := s.Exec(ctx, "select pg_terminate_backend("+pid+")"); err != nil {
		t.Fatal(err)
	}
	conn, err := s.Conn(ctx)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close(ctx)
	eventually(t, "the backend ends", func() bool {
		var n int
		if err := conn.QueryRow(ctx, "select count(*) from pg_stat_activity where pid = "+pid).Scan(&n); err != nil {
			t.Fatal(err)
		}
		return n == 0
	})
}

func TestATransactionBegunByHandKeepsEveryStatementOfItsConnection(t *testing.T) {
	cluster := shareCluster(t, 2)
	ctx := patient(t)
	db := open(t, patiently(cluster))
	exec(t, ctx, db, "create table t (id int)")
	c := connectorOf(t, db)
	conn := hold(t, ctx, db)
	exec(t, ctx, conn, "begin")
	exec(t, ctx, conn, "insert into t values (1)")
	pid := text(t, ctx, conn, backend)
	before := c.Stats().Reasons["in_tx"]
	want(t, pgsplit.ReadOnly(ctx), conn, "select count(*)::text from t", "1")
	want(t, pgsplit.ReadOnly(ctx, pgsplit.ReplicaOnly()), conn, backend, pid)
	exec(t, pgsplit.ReadOnly(ctx), conn, "insert into t values (2)")
	want(t, pgsplit.Primary(ctx), conn, "select count(*)::text from t", "2")
	if n := c.Stats().Reasons["in_tx"] - before; n != 4 {
		t.Errorf("%d statements were counted as in_tx, want 4", n)
	}
	exec(t, pgsplit.ReadOnly(ctx), conn, "commit")
	want(t, ctx, db, "select count(*)::text from t", "2")
	refused(t, pgsplit.ReadOnly(ctx), conn, "insert into t values (3)")
}

func TestAFailedTransactionBegunByHandKeepsItsConnection(t *testing.T) {
	cluster := shareCluster(t, 1)
	ctx := patient(t)
	db := open(t, patiently(cluster))
	conn := hold(t, ctx, db)
	exec(t, ctx, conn, "begin")
	if _, err := conn.ExecContext(ctx, "select 1/0"); err == nil {
		t.Fatal("no error")
	}
	if _, err := conn.ExecContext(pgsplit.ReadOnly(ctx), "select 1"); err == nil || !strings.Contains(err.Error(), "25P02") {
		t.Errorf("a read in the failed transaction: %v", err)
	}
	exec(t, ctx, conn, "rollback")
	want(t, ctx, conn, inRecovery, "false")
}

func TestHintsInsideAnUnhintedTransactionChooseNothing(t *testing.T) {
	cluster := shareCluster(t, 2)
	ctx := patient(t)
	db := open(t, patiently(cluster))
	exec(t, ctx, db, "create table t (id int)")
	c := connectorOf(t, db)
	tx, err := db.BeginTx(ctx, nil)
	if err != nil {
		t.Fatal(err)
	}
	defer tx.Rollback()
	exec(t, ctx, tx, "insert into t values (1)")
	pid := text(t, ctx, tx, backend)
	before := c.Stats().Reasons["in_tx"]
	want(t, pgsplit.ReadOnly(ctx), tx, "select count(*)::text from t", "1")
	want(t, pgsplit.ReadOnly(ctx), tx, backend, pid)
	exec(t, pgsplit.ReadOnly(ctx), tx, "insert into t values (2)")
	if n := c.Stats().Reasons["in_tx"] - before; n != 3 {
		t.Errorf("%d statements were counted as in_tx, want 3", n)
	}
	if err := tx.Commit(); err != nil {
		t.Fatal(err)
	}
	want(t, ctx, db, "select count(*)::text from t", "2")
}

func TestUnhintedStatementsInsideAReadOnlyTransactionStayOnTheReplica(t *testing.T) {
	cluster := shareCluster(t, 2)
	ctx := patient(t)
	db := open(t, patiently(cluster))
	exec(t, ctx, db, "create table t (id int)")
	for name, begin := range map[string]context.Context{
		"on a replica": current(t, ctx, db),
		// A serializable one goes to the primary: F12.
		"on the primary": pgsplit.ReadOnly(ctx),
	} {
		t.Run(name, func(t *testing.T) {
			opts, recovery := &sql.TxOptions{}, "true"
			if name == "on the primary" {
				opts.Isolation, recovery = sql.LevelSerializable, "false"
			}
			for _, hint := range []context.Context{ctx, pgsplit.Primary(ctx), pgsplit.ReadOnly(ctx)} {
				tx, err := db.BeginTx(begin, opts)
				if err != nil {
					t.Fatal(err)
				}
				pid := text(t, hint, tx, backend)
				want(t, hint, tx, inRecovery, recovery)
				want(t, hint, tx, backend, pid)
				want(t, hint, tx, "show transaction_read_only", "on")
				refused(t, hint, tx, "insert into t values (1)")
				if err := tx.Rollback(); err != nil {
					t.Error(err)
				}
			}
		})
	}
	want(t, ctx, db, "select count(*)::text from t", "0")
}

func TestAReadOnlyTransactionOnAHeldPrimaryConnectionIsReadOnly(t *testing.T) {
	cluster := shareCluster(t, 1)
	ctx := patient(t)
	db := open(t, patiently(cluster))
	exec(t, ctx, db, "create table t (id int)")
	conn := hold(t, ctx, db)
	exec(t, ctx, conn, "create temporary table mine as select 7 as id")
	tx, err := conn.BeginTx(pgsplit.ReadOnly(ctx), nil)
	if err != nil {
		t.Fatal(err)
	}
	want(t, ctx, tx, "select id::text from mine", "7")
	refused(t, ctx, tx, "insert into t values (1)")
	if err := tx.Rollback(); err != nil {
		t.Fatal(err)
	}
	// The next one is not.
	tx, err = conn.BeginTx(ctx, nil)
	if err != nil {
		t.Fatal(err)
	}
	exec(t, ctx, tx, "insert into t values (2)")
	if err := tx.Commit(); err != nil {
		t.Fatal(err)
	}
	want(t, ctx, db, "select string_agg(id::text, ',') from t", "2")
}

func TestAHeldConnectionGivesTheReplicasLeaseBackForAnUnhintedStatement(t *testing.T) {
	cluster := shareCluster(t, 2)
	ctx := patient(t)
	db := open(t, patiently(cluster))
	c := connectorOf(t, db)
	leases := func() string {
		var primary, replicas int
		for _, s := range c.Stats().Servers {
			if s.Role == "primary" {
				primary += s.InUse
			} else {
				replicas += s.InUse
			}
		}
		return fmt.Sprint(primary, replicas)
	}
	conn := hold(t, ctx, db)
	check := func(expected string) {
		t.Helper()
		if got := leases(); got != expected {
			t.Errorf("leases on primary and replicas: %s, want %s", got, expected)
		}
	}
	check("0 0")
	want(t, pgsplit.ReadOnly(ctx), conn, inRecovery, "true")
	check("0 1")
	want(t, pgsplit.ReadOnly(ctx), conn, inRecovery, "true")
	check("0 1")
	want(t, ctx, conn, inRecovery, "false")
	check("1 0")
	want(t, pgsplit.ReadOnly(ctx), conn, inRecovery, "false")
	check("1 0")
	if err := conn.Close(); err != nil {
		t.Fatal(err)
	}
	check("0 0")
}

// What one user of a connection set must not reach the next one's statements as a read-only session.
func TestAConnectionComesBackAsItWasOpened(t *testing.T) {
	cluster := shareCluster(t, 0)
	ctx := patient(t)
	db := open(t, patiently(cluster))
	db.SetMaxOpenConns(1)
	exec(t, ctx, db, "create table t (id int)")
	for i := range 5 {
		refused(t, pgsplit.ReadOnly(ctx), db, "insert into t values (0)")
		exec(t, ctx, db, "insert into t values ($1)", i)
		want(t, pgsplit.ReadOnly(ctx), db, "select count(*)::text from t", fmt.Sprint(i+1))
	}
}

func TestAFloorAboveTheOneOfTheTransactionIsCheckedAgainInReadCommitted(t *testing.T) {
	cluster := pgsplittest.Start(t, pgsplittest.Replicas(1))
	ctx := patient(t)
	db := open(t, patiently(cluster))
	exec(t, ctx, db, "create table t (id int)")
	tx, err := db.BeginTx(current(t, ctx, db), nil)
	if err != nil {
		t.Fatal(err)
	}
	defer tx.Rollback()
	const count = "select count(*)::text from t"
	want(t, ctx, tx, count, "0")
	replica := cluster.Replicas[0]
	if err := replica.PauseReplay(ctx); err != nil {
		t.Fatal(err)
	}
	exec(t, ctx, db, "insert into t values (1)")
	lsn, err := pgsplit.CommitLSN(ctx, db)
	if err != nil {
		t.Fatal(err)
	}
	floor := pgsplit.WithLSN(ctx, lsn)
	var seen string
	if err := tx.QueryRowContext(floor, count).Scan(&seen); !errors.Is(err, pgsplit.ErrNoFreshReplica) {
		t.Errorf("while the replica is paused: %q, %v", seen, err)
	}
	// The transaction has not failed.
	want(t, ctx, tx, count, "0")
	if err := replica.ResumeReplay(ctx); err != nil {
		t.Fatal(err)
	}
	if err := cluster.CatchUp(ctx); err != nil {
		t.Fatal(err)
	}
	want(t, floor, tx, count, "1")
	if err := tx.Commit(); err != nil {
		t.Error(err)
	}
}

func TestAFloorAboveTheOneOfTheTransactionIsRefusedInRepeatableRead(t *testing.T) {
	for _, how := range []string{"by option", "by default"} {
		t.Run(how, func(t *testing.T) {
			cluster := shareCluster(t, 1)
			ctx := patient(t)
			opts := &sql.TxOptions{Isolation: sql.LevelRepeatableRead}
			dsn := patiently(cluster)
			if how == "by default" {
				opts, dsn = nil, with(dsn, "default_transaction_isolation=repeatable%20read")
			}
			db := open(t, dsn)
			exec(t, ctx, db, "create table t (id int)")
			tx, err := db.BeginTx(current(t, ctx, db), opts)
			if err != nil {
				t.Fatal(err)
			}
			defer tx.Rollback()
			const count = "select count(*)::text from t"
			want(t, ctx, tx, count, "0")
			exec(t, ctx, db, "insert into t values (1)")
			lsn, err := pgsplit.CommitLSN(ctx, db)
			if err != nil {
				t.Fatal(err)
			}
			if err := cluster.CatchUp(ctx); err != nil {
				t.Fatal(err)
			}
			var seen string
			if err := tx.QueryRowContext(pgsplit.WithLSN(ctx, lsn), count).Scan(&seen); !errors.Is(err, pgsplit.ErrNoFreshReplica) {
				t.Errorf("%q, %v", seen, err)
			}
		})
	}
}

func TestSerializableReadOnlyTransactionsGoToThePrimary(t *testing.T) {
	cluster := shareCluster(t, 1)
	ctx := patient(t)
	db := open(t, patiently(cluster))
	c := connectorOf(t, db)
	tx, err := db.BeginTx(pgsplit.ReadOnly(ctx), &sql.TxOptions{Isolation: sql.LevelSerializable})
	if err != nil {
		t.Fatal(err)
	}
	defer tx.Rollback()
	want(t, ctx, tx, inRecovery, "false")
	want(t, ctx, tx, "show transaction_isolation", "serializable")
	want(t, ctx, tx, "show transaction_read_only", "on")
	if n := c.Stats().Reasons["isolation"]; n != 1 {
		t.Errorf("%d transactions were counted as isolation", n)
	}
	_, err = db.BeginTx(pgsplit.ReadOnly(ctx, pgsplit.ReplicaOnly()), &sql.TxOptions{Isolation: sql.LevelSerializable})
	if !errors.Is(err, pgsplit.ErrNoReplica) {
		t.Errorf("ReplicaOnly: %v", err)
	}
}

func TestReadOnlyTxOptionsAreAHintOnlyWhereReplicaTxSaysSo(t *testing.T) {
	cluster := shareCluster(t, 1)
	ctx := patient(t)
	for parameter, recovery := range map[string]string{
		"replica_tx=hint": "false", "replica_tx=readonly": "true", "application_name=none": "false",
	} {
		t.Run(parameter, func(t *testing.T) {
			db := open(t, with(patiently(cluster), parameter))
			where := func(ctx context.Context, opts *sql.TxOptions, expected, mode string) {
				t.Helper()
				tx, err := db.BeginTx(ctx, opts)
				if err != nil {
					t.Fatal(err)
				}
				defer tx.Rollback()
				want(t, ctx, tx, inRecovery, expected)
				want(t, ctx, tx, "show transaction_read_only", mode)
			}
			where(ctx, &sql.TxOptions{ReadOnly: true}, recovery, "on")
			where(pgsplit.Primary(ctx), &sql.TxOptions{ReadOnly: true}, "false", "on")
			where(pgsplit.ReadOnly(ctx), nil, "true", "on")
			where(ctx, nil, "false", "off")
		})
	}
}

func TestTheLastHintWinsAndFloorsOnlyRise(t *testing.T) {
	cluster := pgsplittest.Start(t, pgsplittest.Replicas(1))
	ctx := patient(t)
	db := open(t, patiently(cluster))
	want(t, pgsplit.Primary(pgsplit.ReadOnly(ctx)), db, inRecovery, "false")
	want(t, pgsplit.ReadOnly(pgsplit.Primary(ctx)), db, inRecovery, "true")
	want(t, pgsplit.ReadOnly(pgsplit.Primary(pgsplit.ReadOnly(ctx))), db, inRecovery, "true")
	want(t, pgsplit.WithLSN(ctx, 1), db, inRecovery, "false") // a floor routes nothing

	if err := cluster.Replicas[0].PauseReplay(ctx); err != nil {
		t.Fatal(err)
	}
	exec(t, ctx, db, "create table t (id int)")
	lsn, err := pgsplit.CommitLSN(ctx, db)
	if err != nil {
		t.Fatal(err)
	}
	// The replica has the lower floor and not the higher one, whatever their order and whatever hint comes between.
	want(t, pgsplit.ReadOnly(ctx, pgsplit.AfterLSN(1)), db, inRecovery, "true")
	for name, ctx := range map[string]context.Context{
		"higher last": pgsplit.ReadOnly(pgsplit.WithLSN(pgsplit.WithLSN(ctx, 1), lsn)),
		"lower last":  pgsplit.ReadOnly(pgsplit.WithLSN(pgsplit.WithLSN(ctx, lsn), 1)),
		"option":      pgsplit.ReadOnly(pgsplit.ReadOnly(ctx, pgsplit.AfterLSN(lsn)), pgsplit.AfterLSN(1)),
		"between":     pgsplit.ReadOnly(pgsplit.Primary(pgsplit.ReadOnly(ctx, pgsplit.AfterLSN(lsn)))),
	} {
		if got := text(t, ctx, db, inRecovery); got != "false" {
			t.Errorf("%s: the stale replica served the read", name)
		}
	}
	// An option of the inner ReadOnly replaces that of the outer one.
	h, ok := pgsplit.HintFrom(pgsplit.ReadOnly(
		pgsplit.ReadOnly(ctx, pgsplit.Prefer("far"), pgsplit.MaxWait(time.Second), pgsplit.MaxStaleness(time.Minute)),
		pgsplit.Prefer("near"), pgsplit.MaxWait(0), pgsplit.MaxStaleness(time.Second)))
	if !ok || h.Prefer != "near" || h.MaxWait != 0 || !h.HasMaxWait || h.MaxStaleness != time.Second {
		t.Errorf("%+v", h)
	}
}

func TestAStatementWhileRowsAreOpenIsRefusedAndHarmsNothing(t *testing.T) {
	cluster := shareCluster(t, 1)
	ctx := patient(t)
	for name, hint := range map[string]context.Context{"unhinted": ctx, "ReadOnly": pgsplit.ReadOnly(ctx)} {
		t.Run(name, func(t *testing.T) {
			db := open(t, patiently(cluster))
			conn := hold(t, ctx, db)
			pid := text(t, hint, conn, backend)
			rows, err := conn.QueryContext(hint, "select generate_series(1, 10000)")
			if err != nil {
				t.Fatal(err)
			}
			defer rows.Close()
			if !rows.Next() {
				t.Fatal(rows.Err())
			}
			for _, ctx := range []context.Context{ctx, pgsplit.ReadOnly(ctx), pgsplit.Primary(ctx)} {
				if _, err := conn.ExecContext(ctx, "select 1"); err == nil || !strings.Contains(err.Error(), "conn busy") {
					t.Errorf("a statement: %v", err)
				}
				if _, err := conn.BeginTx(ctx, nil); err == nil || !strings.Contains(err.Error(), "conn busy") {
					t.Errorf("a transaction: %v", err)
				}
				if err := conn.PingContext(ctx); err == nil || !strings.Contains(err.Error(), "conn busy") {
					t.Errorf("a ping: %v", err)
				}
			}
			n := 1
			for rows.Next() {
				n++
			}
			if err := rows.Err(); err != nil || n != 10000 {
				t.Errorf("%d rows, %v", n, err)
			}
			rows.Close()
			want(t, hint, conn, backend, pid)
		})
	}
}

// On a held connection to the primary a ReadOnly statement runs in a transaction of the driver's own; a BEGIN by hand
// there makes it the caller's.
func TestATransactionBegunByHandUnderReadOnlyOnAHeldConnectionIsTheCallers(t *testing.T) {
	cluster := shareCluster(t, 1)
	ctx := patient(t)
	db := open(t, cluster.DSN())
	conn, err := db.Conn(ctx)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	exec(t, ctx, conn, "create table t (id int)")
	read := pgsplit.ReadOnly(ctx)
	exec(t, read, conn, "begin")
	began := text(t, read, conn, "select now()::text")
	if again := text(t, ctx, conn, "select now()::text"); again != began {
		t.Errorf("two transactions, of %s and %s", began, again)
	}
	if _, err := conn.ExecContext(ctx, "insert into t values (1)"); !errors.Is(err, pgsplit.ErrReadOnly) {
		t.Errorf("a write inside: %v", err)
	}
	exec(t, read, conn, "rollback")
	exec(t, ctx, conn, "insert into t values (2)")
	if got := text(t, ctx, conn, "select string_agg(id::text, ',') from t"); got != "2" {
		t.Error(got)
	}
}

// A call tries a server once, be it on the connection that it has or on another one.
func TestAReadOnAHeldConnectionWaitsForASilentReplicaOnce(t *testing.T) {
	cluster := pgsplittest.Start(t)
	ctx := patient(t)
	config, err := pgsplit.ParseDSN(with(cluster.ProxyDSN(), "replica_timeout=300ms"))
	if err != nil {
		t.Fatal(err)
	}
	var dialled atomic.Int64
	config.Replicas[0].Pool.BeforeConnect = func(_ context.Context, c *pgx.ConnConfig) error {
		if !strings.Contains(c.RuntimeParams["application_name"], "probe") {
			dialled.Add(1)
		}
		return nil
	}
	db, err := pgsplit.OpenDB(config)
	if err != nil {
		t.Fatal(err)
	}
	defer db.Close()
	conn := hold(t, ctx, db)
	eventually(t, "the replica serves", func() bool { return text(t, pgsplit.ReadOnly(ctx), conn, inRecovery) == "true" })
	floor := newFloor(t, ctx, cluster)
	cluster.Replicas[0].Proxy().BlackHole()
	before := dialled.Load()
	if got := text(t, pgsplit.ReadOnly(ctx, pgsplit.AfterLSN(floor)), conn, inRecovery); got != "false" {
		t.Errorf("in recovery: %s", got)
	}
	if got := dialled.Load(); got != before {
		t.Errorf("%d more connections were tried", got-before)
	}
}

func TestAReadThatOnlyASilentReplicaMayServeTellsWhy(t *testing.T) {
	cluster := pgsplittest.Start(t)
	ctx := patient(t)
	conn := hold(t, ctx, open(t, with(cluster.ProxyDSN(), "replica_timeout=300ms")))
	read := pgsplit.ReadOnly(ctx, pgsplit.ReplicaOnly())
	eventually(t, "the replica serves", func() bool {
		_, err := conn.ExecContext(read, "select 1")
		return err == nil
	})
	floor := newFloor(t, ctx, cluster)
	cluster.Replicas[0].Proxy().BlackHole()
	_, err := conn.ExecContext(pgsplit.ReadOnly(read, pgsplit.AfterLSN(floor)), "select 1")
	if !errors.Is(err, pgsplit.ErrNoReplica) || !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("no replica in time, and the error is: %v", err)
	}
}
