package pgsplit_test

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"maps"
	"slices"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/pgsplit/pgsplit"
	"github.com/pgsplit/pgsplit/pgsplittest"
)

// ledger is the schema of the tests about writes: one row, a sequence, and functions that write without looking like it.
const ledger = `create table ledger (id int primary key, amount int not null default 0);
insert into ledger values (1);
create sequence counter;
create function book(n int) returns int language sql as 'insert into ledger values (n) returning id';
create procedure book_and_commit(n int) language plpgsql as $$ begin insert into ledger values (n); commit; end $$;
create view shown as select * from ledger`

// writes are the ways in which a program writes. Each must be told from a read by the server alone. None of them may
// change anything, so the order does not matter.
var writes = map[string]func(ctx context.Context, db *sql.DB) error{
	"Exec": func(ctx context.Context, db *sql.DB) error {
		_, err := db.ExecContext(ctx, "insert into ledger values (2)")
		return err
	},
	"Query": func(ctx context.Context, db *sql.DB) error {
		return scanOne(db.QueryContext(ctx, "insert into ledger values ($1) returning id", 2))
	},
	"QueryRow": func(ctx context.Context, db *sql.DB) error {
		var id int
		return db.QueryRowContext(ctx, "insert into ledger values ($1) returning id", 2).Scan(&id)
	},
	"a CTE that looks like a select": func(ctx context.Context, db *sql.DB) error {
		return scanOne(db.QueryContext(ctx, "with w as (delete from ledger returning id) select id from w"))
	},
	"a function": func(ctx context.Context, db *sql.DB) error {
		return scanOne(db.QueryContext(ctx, "select book(2)"))
	},
	"a procedure that commits": func(ctx context.Context, db *sql.DB) error {
		_, err := db.ExecContext(ctx, "call book_and_commit(2)")
		return err
	},
	"a DO block": func(ctx context.Context, db *sql.DB) error {
		_, err := db.ExecContext(ctx, "do $$ begin update ledger set amount = 1; end $$")
		return err
	},
	"a sequence": func(ctx context.Context, db *sql.DB) error {
		return scanOne(db.QueryContext(ctx, "select nextval('counter')"))
	},
	"a row lock": func(ctx context.Context, db *sql.DB) error {
		return scanOne(db.QueryContext(ctx, "select id from ledger for update"))
	},
	"a view": func(ctx context.Context, db *sql.DB) error {
		_, err := db.ExecContext(ctx, " /* select */ update shown set amount = 1")
		return err
	},
	"DDL": func(ctx context.Context, db *sql.DB) error {
		_, err := db.ExecContext(ctx, "create table another (id int)")
		return err
	},
	"a temporary table": func(ctx context.Context, db *sql.DB) error {
		_, err := db.ExecContext(ctx, "create temp table another (id int)")
		return err
	},
	"truncate": func(ctx context.Context, db *sql.DB) error {
		_, err := db.ExecContext(ctx, "truncate ledger")
		return err
	},
	"several statements in one message": func(ctx context.Context, db *sql.DB) error {
		_, err := db.ExecContext(ctx, "select 1; insert into ledger values (2); select 2", pgx.QueryExecModeSimpleProtocol)
		return err
	},
	"a statement prepared with the hint": func(ctx context.Context, db *sql.DB) error {
		return prepareAndInsert(ctx, ctx, db)
	},
	"a statement prepared without the hint": func(ctx context.Context, db *sql.DB) error {
		return prepareAndInsert(unhinted, ctx, db)
	},
	"a transaction": func(ctx context.Context, db *sql.DB) error {
		return inTx(ctx, db, nil, "insert into ledger values (2)")
	},
	"a transaction whose statements carry no hint": func(ctx context.Context, db *sql.DB) error {
		tx, err := db.BeginTx(ctx, nil)
		if err != nil {
			return err
		}
		defer tx.Rollback()
		_, err = tx.ExecContext(unhinted, "insert into ledger values (2)")
		return err
	},
	"a serializable transaction": func(ctx context.Context, db *sql.DB) error {
		return inTx(ctx, db, &sql.TxOptions{Isolation: sql.LevelSerializable}, "insert into ledger values (2)")
	},
	"a statement prepared in a transaction": func(ctx context.Context, db *sql.DB) error {
		tx, err := db.BeginTx(ctx, nil)
		if err != nil {
			return err
		}
		defer tx.Rollback()
		stmt, err := tx.PrepareContext(ctx, "insert into ledger values ($1)")
		if err != nil {
			return err
		}
		_, err = stmt.ExecContext(ctx, 2)
		return err
	},
	"a held connection": func(ctx context.Context, db *sql.DB) error {
		conn, err := db.Conn(ctx)
		if err != nil {
			return err
		}
		defer conn.Close()
		_, err = conn.ExecContext(ctx, "insert into ledger values (2)")
		return err
	},
	"COPY": func(ctx context.Context, db *sql.DB) error {
		conn, err := db.Conn(ctx)
		if err != nil {
			return err
		}
		defer conn.Close()
		return pgsplit.Raw(ctx, conn, func(c *pgx.Conn) error {
			_, err := c.CopyFrom(ctx, pgx.Identifier{"ledger"}, []string{"id"}, pgx.CopyFromRows([][]any{{2}, {3}}))
			return err
		})
	},
}

// unhinted is what a context says that nobody has told anything.
var unhinted = context.Background()

func scanOne(rows *sql.Rows, err error) error {
	if err != nil {
		return err
	}
	defer rows.Close()
	for rows.Next() {
		var v any
		if err := rows.Scan(&v); err != nil {
			return err
		}
	}
	return rows.Err()
}

func inTx(ctx context.Context, db *sql.DB, opts *sql.TxOptions, query string) error {
	tx, err := db.BeginTx(ctx, opts)
	if err != nil {
		return err
	}
	defer tx.Rollback()
	if _, err = tx.ExecContext(ctx, query); err != nil {
		return err
	}
	return tx.Commit()
}

func prepareAndInsert(prepare, run context.Context, db *sql.DB) error {
	stmt, err := db.PrepareContext(prepare, "insert into ledger values ($1)")
	if err != nil {
		return err
	}
	defer stmt.Close()
	_, err = stmt.ExecContext(run, 2)
	return err
}

// refusedWrite checks that err is what every write under ReadOnly fails with.
func refusedWrite(t *testing.T, err error) {
	t.Helper()
	if !errors.Is(err, pgsplit.ErrReadOnly) {
		t.Errorf("not ErrReadOnly: %v", err)
	}
	var pgErr *pgconn.PgError
	if !errors.As(err, &pgErr) || pgErr.Code != "25006" {
		t.Errorf("no PgError 25006 in it: %v", err)
	}
}

// nothingWritten checks a server's ledger by a connection of its own.
func nothingWritten(t *testing.T, ctx context.Context, s *pgsplittest.Server) {
	t.Helper()
	const state = `select (select string_agg(id::text || ':' || amount::text, ' ') from ledger) || ' ' ||
 (select is_called::text from counter) || ' ' || coalesce(to_regclass('another')::text, 'none')`
	if got := onServer(t, ctx, s, state); got != "1:0 false none" {
		t.Errorf("%s: the ledger is now %q", s.Name(), got)
	}
}

// onServer runs a query that answers one text on a connection of its own.
func onServer(t testing.TB, ctx context.Context, s *pgsplittest.Server, query string, args ...any) (value string) {
	t.Helper()
	conn, err := s.Conn(ctx)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close(ctx)
	if err := conn.QueryRow(ctx, query, args...).Scan(&value); err != nil {
		t.Fatalf("%s: %s: %v", s.Name(), query, err)
	}
	return value
}

// runSQL runs statements on a connection of their own, and waits for the replicas.
func runSQL(t testing.TB, ctx context.Context, cluster *pgsplittest.Cluster, query string) {
	t.Helper()
	if err := cluster.Primary.Exec(ctx, query); err != nil {
		t.Fatal(err)
	}
	if err := cluster.CatchUp(ctx); err != nil {
		t.Fatal(err)
	}
}

// refuseAll runs every write and checks that none gets through. where is what the reads around them must say about
// their server.
func refuseAll(t *testing.T, read context.Context, db *sql.DB, where string) {
	t.Helper()
	const whose = "select current_setting('cluster_name') || case when pg_is_in_recovery() then ' in recovery' else '' end"
	for _, name := range slices.Sorted(maps.Keys(writes)) {
		t.Run(name, func(t *testing.T) {
			refusedWrite(t, writes[name](read, db))
		})
		if got := text(t, read, db, whose); got != where {
			t.Fatalf("reads run on %q, this test is about %q", got, where)
		}
	}
}

func TestAWriteUnderReadOnlyFailsWithoutReplicas(t *testing.T) {
	cluster := shareCluster(t, 0)
	ctx := patient(t)
	runSQL(t, ctx, cluster, ledger)
	db := open(t, cluster.Primary.URI())
	refuseAll(t, pgsplit.ReadOnly(ctx), db, "primary")
	nothingWritten(t, ctx, cluster.Primary)
}

func TestAWriteUnderReadOnlyFailsOnAReplica(t *testing.T) {
	cluster := shareCluster(t, 1)
	ctx := patient(t)
	runSQL(t, ctx, cluster, ledger)
	db := open(t, cluster.DSN())
	refuseAll(t, pgsplit.ReadOnly(ctx), db, "replica1 in recovery")
	nothingWritten(t, ctx, cluster.Primary)
}

func TestAWriteUnderReadOnlyFailsOnThePrimaryThatAnswersForAReplicaThatIsDown(t *testing.T) {
	cluster := pgsplittest.Start(t)
	ctx := patient(t)
	runSQL(t, ctx, cluster, ledger)
	db := open(t, cluster.DSN())
	if err := cluster.Replicas[0].Stop(ctx, pgsplittest.Fast); err != nil {
		t.Fatal(err)
	}
	refuseAll(t, pgsplit.ReadOnly(ctx), db, "primary")
	nothingWritten(t, ctx, cluster.Primary)
}

func TestAWriteUnderReadOnlyFailsOnThePrimaryThatAnswersForAReplicaThatIsBehind(t *testing.T) {
	cluster := pgsplittest.Start(t)
	ctx := patient(t)
	runSQL(t, ctx, cluster, ledger)
	db := open(t, cluster.DSN())
	floor := staleFloor(t, ctx, cluster, db)
	refuseAll(t, pgsplit.ReadOnly(pgsplit.WithLSN(ctx, floor)), db, "primary")
	nothingWritten(t, ctx, cluster.Primary)
}

// staleFloor pauses all replicas and returns a floor that none of them has.
func staleFloor(t testing.TB, ctx context.Context, cluster *pgsplittest.Cluster, db *sql.DB) pgsplit.LSN {
	t.Helper()
	for _, r := range cluster.Replicas {
		if err := r.PauseReplay(ctx); err != nil {
			t.Fatal(err)
		}
	}
	if err := cluster.Primary.Exec(ctx, "select pg_logical_emit_message(true, 'test', 'a commit')"); err != nil {
		t.Fatal(err)
	}
	return commitLSN(t, ctx, db)
}

func commitLSN(t testing.TB, ctx context.Context, db *sql.DB) pgsplit.LSN {
	t.Helper()
	lsn, err := pgsplit.CommitLSN(ctx, db)
	if err != nil {
		t.Fatal(err)
	}
	return lsn
}

func TestAWriteUnderReadOnlyFailsOnAReplicaThatWasPromotedUnderThePool(t *testing.T) {
	cluster := pgsplittest.Start(t)
	ctx := patient(t)
	runSQL(t, ctx, cluster, ledger)
	db := open(t, cluster.DSN())
	db.SetMaxOpenConns(1)
	read := pgsplit.ReadOnly(ctx)
	before := text(t, read, db, "select pg_backend_pid()::text")
	replica := cluster.Replicas[0]
	if err := replica.Promote(ctx); err != nil {
		t.Fatal(err)
	}
	// F8: the first statement of all after the promotion must be refused as well.
	_, err := db.ExecContext(read, "insert into ledger values (2)")
	refusedWrite(t, err)
	if after := text(t, read, db, "select pg_backend_pid()::text"); after != before {
		t.Errorf("the pooled connection %s did not survive the promotion, so this proves nothing: now %s", before, after)
	}
	refuseAll(t, read, db, "replica1")
	nothingWritten(t, ctx, replica)
	nothingWritten(t, ctx, cluster.Primary)
}

func TestAWriteUnderReadOnlyFailsOnAHeldConnectionThatWroteBefore(t *testing.T) {
	cluster := shareCluster(t, 1)
	ctx := patient(t)
	runSQL(t, ctx, cluster, ledger)
	db := open(t, cluster.DSN())
	conn, err := db.Conn(ctx)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	read := pgsplit.ReadOnly(ctx)
	for n := 2; n < 5; n++ {
		exec(t, ctx, conn, "insert into ledger values ($1)", n)
		_, err := conn.ExecContext(read, "delete from ledger")
		refusedWrite(t, err)
		if got := text(t, read, conn, "select count(*)::text from ledger"); got != fmt.Sprint(n) {
			t.Errorf("the held connection sees %s rows, it wrote %d", got, n)
		}
	}
}

func TestAWriteThatComesWithALaterRowIsRefusedAndStillToldByItsCode(t *testing.T) {
	cluster := shareCluster(t, 1)
	ctx := patient(t)
	runSQL(t, ctx, cluster, ledger)
	db := open(t, cluster.DSN())
	// The rows are pgx's own, so what fails after the first of them comes as the server sent it.
	err := scanOne(db.QueryContext(pgsplit.ReadOnly(ctx), "select case when n > 1 then book(n) end from generate_series(1, 3) n"))
	var pgErr *pgconn.PgError
	if !errors.As(err, &pgErr) || pgErr.Code != "25006" {
		t.Errorf("%v", err)
	}
	nothingWritten(t, ctx, cluster.Primary)
}

func TestAReadOnlyLeaseOfAPrimaryWithTargetSessionAttrsReadWriteConnects(t *testing.T) {
	cluster := shareCluster(t, 0)
	ctx := patient(t)
	runSQL(t, ctx, cluster, ledger)
	db := open(t, cluster.Primary.URI()+"&target_session_attrs=read-write")
	read := pgsplit.ReadOnly(ctx)
	for n := 2; n < 5; n++ {
		if got := text(t, read, db, "select current_setting('transaction_read_only')"); got != "on" {
			t.Errorf("a ReadOnly statement with transaction_read_only %s", got)
		}
		exec(t, ctx, db, "insert into ledger values ($1)", n)
		_, err := db.ExecContext(read, "delete from ledger")
		refusedWrite(t, err)
	}
}

func TestUnhintedWritesWorkRightAfterReadOnlyReadsOnOneConnection(t *testing.T) {
	for _, replicas := range []int{0, 1} {
		t.Run(fmt.Sprintf("%d replicas", replicas), func(t *testing.T) {
			cluster := pgsplittest.Start(t, pgsplittest.Replicas(replicas))
			ctx := patient(t)
			runSQL(t, ctx, cluster, ledger)
			db := open(t, cluster.DSN())
			db.SetMaxOpenConns(1)
			read := pgsplit.ReadOnly(ctx)
			for n := 2; n < 12; n++ {
				// What the session itself says, and whether the statement could write.
				if got := text(t, read, db, "select current_setting('transaction_read_only')"); got != "on" {
					t.Fatalf("a ReadOnly read with transaction_read_only %s", got)
				}
				exec(t, ctx, db, "insert into ledger values ($1)", n)
				_, err := db.ExecContext(read, "delete from ledger")
				refusedWrite(t, err)
				if err := inTx(ctx, db, nil, "update ledger set amount = 1"); err != nil {
					t.Fatal(err)
				}
			}
			if got := text(t, ctx, db, "select count(*)::text from ledger"); got != "11" {
				t.Errorf("%s rows", got)
			}
		})
	}
}

// allowed is what PostgreSQL lets a read-only session do, or not: the list in the README. The outcomes are SQLSTATEs; an
// empty one is success.
var allowed = []struct {
	what      string
	statement string
	replica   string
	primary   string
	tx        bool // only inside a transaction
}{
	{what: "NOTIFY", statement: "notify news", replica: "25006"},
	{what: "pg_notify()", statement: "select pg_notify('news', '')", replica: "25006"},
	{what: "LISTEN", statement: "listen news", replica: "25006"},
	{what: "UNLISTEN", statement: "unlisten news"},
	{what: "session advisory locks", statement: "select pg_advisory_lock(1), pg_advisory_unlock(1)"},
	{what: "transaction advisory locks", statement: "select pg_advisory_xact_lock(1)"},
	{what: "SET", statement: "set work_mem = '5MB'"},
	{what: "set_config()", statement: "select set_config('work_mem', '5MB', false)"},
	{what: "SET ROLE", statement: "set role none"},
	{what: "RESET ALL", statement: "reset all"},
	{what: "DISCARD TEMP", statement: "discard temp"},
	{what: "PREPARE and DEALLOCATE", statement: "prepare readers as select 1"},
	{what: "weak table locks", statement: "lock table ledger in row exclusive mode", tx: true},
	{what: "strong table locks", statement: "lock table ledger in exclusive mode", replica: "25006", tx: true},
	{what: "row locks", statement: "select * from ledger for share", replica: "25006", primary: "25006"},
	{what: "nextval()", statement: "select nextval('counter')", replica: "25006", primary: "25006"},
	{what: "creating temporary tables", statement: "create temp table mine (id int)", replica: "25006", primary: "25006"},
	{what: "a transaction id", statement: "select pg_current_xact_id()", replica: "25006"},
	{what: "VACUUM", statement: "vacuum ledger", replica: "25006"},
	{what: "ANALYZE", statement: "analyze ledger", replica: "25006"},
	{what: "REINDEX", statement: "reindex table ledger", replica: "25006"},
	{what: "CLUSTER", statement: "cluster ledger using ledger_pkey", replica: "25006"},
	{what: "CHECKPOINT", statement: "checkpoint"},
	{what: "ALTER SYSTEM", statement: "alter system set log_min_duration_statement = '1h'"},
	{what: "ALTER ROLE", statement: "alter role postgres set work_mem = '5MB'", replica: "25006", primary: "25006"},
	{what: "pg_reload_conf()", statement: "select pg_reload_conf()"},
	{what: "pg_switch_wal()", statement: "select pg_switch_wal()", replica: "55000"},
	{what: "a message into the log", statement: "select pg_logical_emit_message(false, 'p', 'm')", replica: "XX000"},
	{what: "replication slots", statement: "select pg_create_physical_replication_slot('reader')"},
	{what: "COPY to the server's programs and files", statement: "copy (select 1) to program 'cat >/dev/null'"},
	{what: "COPY from them", statement: "copy ledger from program 'true'", replica: "25006", primary: "25006"},
	{what: "large objects", statement: "select lo_create(0)", replica: "25006", primary: "25006"},
	{what: "BEGIN READ WRITE", statement: "begin read write", replica: "0A000"},
}

func TestWhatPostgreSQLLetsAReadOnlySessionDo(t *testing.T) {
	cluster := shareCluster(t, 1)
	ctx := patient(t)
	runSQL(t, ctx, cluster, ledger)
	replica := open(t, cluster.DSN())
	primary := open(t, cluster.Primary.URI())
	outcome := func(db *sql.DB, statement string, tx bool) string {
		read := pgsplit.ReadOnly(ctx)
		var err error
		if tx {
			err = inTx(read, db, nil, statement)
		} else {
			_, err = db.ExecContext(read, statement)
		}
		var pgErr *pgconn.PgError
		switch {
		case err == nil:
			return ""
		case errors.As(err, &pgErr):
			return pgErr.Code
		}
		return err.Error()
	}
	for _, c := range allowed {
		t.Run(c.what, func(t *testing.T) {
			onReplica, onPrimary := c.replica, c.primary
			switch {
			case c.what == "large objects" && cluster.Version() < 16:
				// Before 16 nothing but the lack of transaction ids stood against it.
				onReplica, onPrimary = "XX000", ""
			}
			if got := outcome(replica, c.statement, c.tx); got != onReplica {
				t.Errorf("on a replica: %q, want %q", got, onReplica)
			}
			if got := outcome(primary, c.statement, c.tx); got != onPrimary {
				t.Errorf("on a read-only primary: %q, want %q", got, onPrimary)
			}
		})
	}
	nothingWritten(t, ctx, cluster.Primary)
}

func TestATemporaryTableOfAHeldConnectionCanBeWrittenUnderReadOnly(t *testing.T) {
	cluster := shareCluster(t, 1)
	ctx := patient(t)
	db := open(t, cluster.DSN())
	conn, err := db.Conn(ctx)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	exec(t, ctx, conn, "create temp table mine (id int)")
	exec(t, pgsplit.ReadOnly(ctx), conn, "insert into mine values (1)")
	if got := text(t, pgsplit.ReadOnly(ctx), conn, "select count(*)::text from mine"); got != "1" {
		t.Errorf("%s rows in the temporary table", got)
	}
}

func TestTextThatSwitchesToReadWriteIsOutsideTheGuaranteeOnThePrimaryOnly(t *testing.T) {
	cluster := shareCluster(t, 1)
	ctx := patient(t)
	runSQL(t, ctx, cluster, ledger)
	read := pgsplit.ReadOnly(ctx)
	run := func(dsn string) error {
		db := open(t, dsn)
		conn, err := db.Conn(ctx)
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		for _, statement := range []string{"begin read write", "insert into ledger values (2)", "commit"} {
			if _, err := conn.ExecContext(read, statement); err != nil {
				return err
			}
		}
		return nil
	}
	if err := run(cluster.Primary.URI()); err != nil {
		t.Errorf("on the primary: %v", err)
	}
	if err := run(cluster.DSN()); err == nil {
		t.Error("a replica let BEGIN READ WRITE in")
	}
}

// switches are the texts that leave a session which no longer refuses writes.
var switches = map[string]string{
	"SET":                         "set default_transaction_read_only = off",
	"SET SESSION CHARACTERISTICS": "set session characteristics as transaction read write",
	"set_config()":                "select set_config('default_transaction_read_only', 'off', false)",
}

func TestASessionThatItsCallerSwitchedToReadWriteRefusesTheNextCallersWrites(t *testing.T) {
	cluster := shareCluster(t, 1)
	ctx := patient(t)
	runSQL(t, ctx, cluster, ledger)
	read := pgsplit.ReadOnly(ctx)
	for name, statement := range switches {
		t.Run(name, func(t *testing.T) {
			db := open(t, cluster.Primary.URI())
			db.SetMaxOpenConns(1)
			for _, leave := range []func() error{
				func() error { _, err := db.ExecContext(read, statement); return err },
				func() error { return inTx(read, db, nil, statement) },
				func() error {
					_, err := db.ExecContext(read, statement+"; insert into ledger values (2); delete from ledger where id = 2",
						pgx.QueryExecModeSimpleProtocol)
					if errors.Is(err, pgsplit.ErrReadOnly) {
						return nil // in one message the setting comes too late for its own transaction
					}
					return err
				},
			} {
				if err := leave(); err != nil {
					t.Fatal(err)
				}
				if got := text(t, read, db, "select current_setting('transaction_read_only')"); got != "on" {
					t.Errorf("the next read has transaction_read_only %s", got)
				}
				for _, name := range []string{"Exec", "Query", "a transaction", "a statement prepared with the hint", "COPY"} {
					refusedWrite(t, writes[name](read, db))
				}
			}
		})
	}
	nothingWritten(t, ctx, cluster.Primary)
}

func TestASessionSwitchedToReadWriteOnAReplicaRefusesWritesAfterItsPromotion(t *testing.T) {
	cluster := pgsplittest.Start(t)
	ctx := patient(t)
	runSQL(t, ctx, cluster, ledger)
	read := pgsplit.ReadOnly(ctx)
	db := open(t, cluster.DSN())
	db.SetMaxOpenConns(1)
	exec(t, read, db, switches["SET"])
	if err := cluster.Replicas[0].Promote(ctx); err != nil {
		t.Fatal(err)
	}
	_, err := db.ExecContext(read, "insert into ledger values (2)")
	refusedWrite(t, err)
	nothingWritten(t, ctx, cluster.Replicas[0])
}

func TestASessionThatReadsAndWritesInTurnKeepsNothingOfTheOther(t *testing.T) {
	cluster := shareCluster(t, 0)
	ctx := patient(t)
	runSQL(t, ctx, cluster, ledger)
	read := pgsplit.ReadOnly(ctx)
	db := open(t, cluster.Primary.URI()+"&default_query_exec_mode=simple_protocol") // DISCARD ALL takes prepared statements away
	db.SetMaxOpenConns(1)
	const pid = "select pg_backend_pid()::text"
	backend := text(t, ctx, db, pid)
	for n, leave := range []string{"select 1", "discard all", "reset all", switches["SET"], "set default_transaction_read_only = on"} {
		exec(t, read, db, leave)
		_, err := db.ExecContext(read, "delete from ledger")
		refusedWrite(t, err)
		refusedWrite(t, inTx(read, db, nil, "delete from ledger"))
		exec(t, ctx, db, "insert into ledger values ($1)", 2+n)
		if n < 3 {
			exec(t, ctx, db, leave)
		}
		exec(t, ctx, db, "update ledger set amount = 1")
		if now := text(t, read, db, pid); now != backend && cluster.Version() >= 14 { // an older one cannot be switched
			t.Errorf("after %q: another connection", leave)
			backend = now
		}
	}
}

func TestARoleThatWritesByDefaultIsReadOnlyUnderReadOnly(t *testing.T) {
	cluster := shareCluster(t, 0)
	ctx := patient(t)
	runSQL(t, ctx, cluster, ledger+`;
alter role postgres set default_transaction_read_only = off;
alter database postgres set default_transaction_read_only = off`)
	db := open(t, cluster.Primary.URI())
	_, err := db.ExecContext(pgsplit.ReadOnly(ctx), "insert into ledger values (2)")
	refusedWrite(t, err)
	exec(t, ctx, db, "insert into ledger values (2)")
}

func TestAHintedPoolAndAnUnhintedOneWorkAtTheSameTime(t *testing.T) {
	cluster := shareCluster(t, 0)
	ctx := patient(t)
	runSQL(t, ctx, cluster, ledger)
	db := open(t, cluster.Primary.URI())
	db.SetMaxOpenConns(3)
	db.SetMaxIdleConns(3)
	read := pgsplit.ReadOnly(ctx)
	failures := make(chan error)
	const workers, rounds = 4, 50
	for w := range workers {
		go func() {
			for n := range rounds {
				if w%2 == 0 {
					_, err := db.ExecContext(ctx, "insert into ledger values ($1)", 10+w*rounds+n)
					failures <- err
					continue
				}
				_, err := db.ExecContext(read, "delete from ledger")
				if errors.Is(err, pgsplit.ErrReadOnly) {
					err = nil
				} else {
					err = fmt.Errorf("a write under ReadOnly: %w", orWritten(err))
				}
				failures <- err
			}
		}()
	}
	for range workers * rounds {
		if err := <-failures; err != nil {
			t.Error(err)
		}
	}
	if got := text(t, ctx, db, "select count(*)::text from ledger"); got != fmt.Sprint(1+workers/2*rounds) {
		t.Errorf("%s rows", got)
	}
}

var errWritten = errors.New("it was done")

func orWritten(err error) error {
	if err == nil {
		return errWritten
	}
	return err
}

// until polls a condition that must come true.
func until(t testing.TB, what string, condition func() bool) {
	t.Helper()
	ticker := time.NewTicker(2 * time.Millisecond)
	defer ticker.Stop()
	deadline := time.NewTimer(time.Minute)
	defer deadline.Stop()
	for !condition() {
		select {
		case <-ticker.C:
		case <-deadline.C:
			t.Fatalf("not in a minute: %s", what)
		}
	}
}
