package pgsplit_test

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgsplit/pgsplit"
	"github.com/pgsplit/pgsplit/pgsplittest"
)

// A neighbour is somebody else's transaction that stays uncommitted while the test runs.
type neighbour func(t testing.TB, ctx context.Context, c *pgx.Conn)

var neighbours = map[string]neighbour{
	"nobody else": func(testing.TB, context.Context, *pgx.Conn) {},
	// F2: what it wrote lies above the flush position, and nobody moves that.
	"an idle transaction that wrote": func(t testing.TB, ctx context.Context, c *pgx.Conn) {
		if _, err := c.Exec(ctx, "begin; insert into neighbour select generate_series(1, 100)"); err != nil {
			t.Fatal(err)
		}
	},
	"a busy transaction": func(t testing.TB, ctx context.Context, c *pgx.Conn) {
		if _, err := c.Exec(ctx, "begin"); err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithCancel(ctx)
		var working sync.WaitGroup
		working.Go(func() {
			for ctx.Err() == nil {
				_, _ = c.Exec(ctx, "insert into neighbour select generate_series(1, 20)")
			}
		})
		t.Cleanup(func() {
			cancel()
			working.Wait()
		})
	},
}

// commits are ways to commit a row whose commit returned.
var commits = map[string]func(ctx context.Context, db *sql.DB, setting string, id int) error{
	"autocommit": func(ctx context.Context, db *sql.DB, setting string, id int) error {
		_, err := db.ExecContext(ctx, fmt.Sprintf("set synchronous_commit = %s; insert into ledger values (%d)", setting, id),
			pgx.QueryExecModeSimpleProtocol)
		return err
	},
	"transaction": func(ctx context.Context, db *sql.DB, setting string, id int) error {
		tx, err := db.BeginTx(ctx, nil)
		if err != nil {
			return err
		}
		defer tx.Rollback()
		if _, err := tx.ExecContext(ctx, "insert into ledger values ($1)", id); err != nil {
			return err
		}
		if _, err := tx.ExecContext(ctx, "set local synchronous_commit = "+setting); err != nil {
			return err
		}
		return tx.Commit()
	},
}

func TestCommitLSNCoversEveryCommitThatReturnedAndIsFlushed(t *testing.T) {
	// Without the WAL writer nothing but commits moves the flush position.
	cluster := pgsplittest.Start(t, pgsplittest.PrimarySetting("wal_writer_delay", "10s"))
	ctx := patient(t)
	runSQL(t, ctx, cluster, ledger+"; create table neighbour (n int)")
	watcher, err := cluster.Primary.Conn(ctx)
	if err != nil {
		t.Fatal(err)
	}
	defer watcher.Close(ctx)
	id := 1
	for _, setting := range []string{"on", "off", "local"} {
		for who, start := range neighbours {
			t.Run(setting+", "+who, func(t *testing.T) {
				other, err := cluster.Primary.Conn(ctx)
				if err != nil {
					t.Fatal(err)
				}
				defer other.Close(ctx)
				db := open(t, cluster.DSN())
				t.Run("", func(t *testing.T) { // whose clean-up ends the neighbour before its connection
					start(t, ctx, other)
					for n := range 20 {
						id++
						for _, name := range []string{"autocommit", "transaction"}[n%2 : n%2+1] {
							if err := commits[name](ctx, db, setting, id); err != nil {
								t.Fatal(err)
							}
						}
						lsn := commitLSN(t, ctx, db)
						var flushed bool
						if err := watcher.QueryRow(ctx, "select pg_current_wal_flush_lsn() >= $1::text::pg_lsn", lsn.String()).Scan(&flushed); err != nil {
							t.Fatal(err)
						}
						if !flushed {
							t.Fatalf("%s is above the flush position", lsn)
						}
						read := pgsplit.ReadOnly(pgsplit.WithLSN(ctx, lsn), pgsplit.MaxWait(30*time.Second), pgsplit.ReplicaOnly())
						if got := text(t, read, db, "select max(id)::text from ledger"); got != strconv.Itoa(id) {
							t.Fatalf("a replica at %s shows rows up to %s, %d is committed", lsn, got, id)
						}
					}
				})
			})
		}
	}
}

func TestCommitLSNCoversTheCommitsOfOthers(t *testing.T) {
	cluster := pgsplittest.Start(t, pgsplittest.PrimarySetting("wal_writer_delay", "10s"))
	ctx := patient(t)
	runSQL(t, ctx, cluster, ledger)
	db := open(t, cluster.DSN())
	for id := 2; id < 12; id++ {
		if err := cluster.Primary.Exec(ctx, fmt.Sprintf("set synchronous_commit = off; insert into ledger values (%d)", id)); err != nil {
			t.Fatal(err)
		}
		lsn := commitLSN(t, ctx, db)
		if got := onServer(t, ctx, cluster.Primary, "select (pg_current_wal_flush_lsn() >= $1::text::pg_lsn)::text", lsn.String()); got != "true" {
			t.Errorf("%s is above the flush position", lsn)
		}
		read := pgsplit.ReadOnly(pgsplit.WithLSN(ctx, lsn), pgsplit.MaxWait(30*time.Second), pgsplit.ReplicaOnly())
		if got := text(t, read, db, "select max(id)::text from ledger"); got != strconv.Itoa(id) {
			t.Errorf("a replica shows rows up to %s, %d is committed", got, id)
		}
	}
}

// walWriter is a connection for the position of a primary's log, which it does not move by asking.
type walWriter struct {
	t    *testing.T
	ctx  context.Context
	conn *pgx.Conn
}

func (w walWriter) insertPosition() uint64 {
	w.t.Helper()
	var lsn pgsplit.LSN
	if err := w.conn.QueryRow(w.ctx, "select pg_current_wal_insert_lsn()::text").Scan(&lsn); err != nil {
		w.t.Fatal(err)
	}
	return uint64(lsn)
}

// commit commits a transaction that writes length bytes and what belongs to them, and returns how much that was.
func (w walWriter) commit(length uint64) uint64 {
	w.t.Helper()
	before := w.insertPosition()
	if _, err := w.conn.Exec(w.ctx, "select pg_logical_emit_message(true, 'test', repeat('x', $1))", int(length)); err != nil {
		w.t.Fatal(err)
	}
	return w.insertPosition() - before
}

const (
	page       = 8192
	pageHeader = 24
)

// commitToTheEndOfAPage commits so that the last record ends where its page ends (F3).
func (w walWriter) commitToTheEndOfAPage() {
	w.t.Helper()
	const length = 304 // long enough that the records' headers are those of longer ones
	for range 1000 {
		start := w.insertPosition()
		size := w.commit(length)
		at := start + size
		left := page - at%page
		if start/page != at/page || left < size {
			continue
		}
		w.commit(length + left - size)
		if w.insertPosition()%page == pageHeader {
			return
		}
	}
	w.t.Fatal("no commit ended at the end of a page")
}

func newWALWriter(t *testing.T, ctx context.Context, cluster *pgsplittest.Cluster) walWriter {
	t.Helper()
	conn, err := cluster.Primary.Conn(ctx)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close(context.Background()) })
	return walWriter{t, ctx, conn}
}

// idleReplicaServes checks that the replica gets to lsn although nobody writes.
func idleReplicaServes(t *testing.T, ctx context.Context, db *sql.DB, lsn pgsplit.LSN) {
	t.Helper()
	// Sooner than an idle primary writes something by itself, which is every 15 s.
	read := pgsplit.ReadOnly(pgsplit.WithLSN(ctx, lsn), pgsplit.MaxWait(10*time.Second), pgsplit.ReplicaOnly())
	if err := scanOne(db.QueryContext(read, "select 1")); err != nil {
		t.Errorf("the idle replica at %s: %v", lsn, err)
	}
}

func TestCommitLSNAtTheEndOfAPageIsReachedByAnIdleReplica(t *testing.T) {
	cluster := shareCluster(t, 1)
	ctx := patient(t)
	db := open(t, cluster.DSN())
	db.SetMaxOpenConns(1)
	commitLSN(t, ctx, db) // connects
	w := newWALWriter(t, ctx, cluster)
	quiet := 0
	for n := 0; n < 30 || quiet == 0 && n < 1000; n++ {
		w.commitToTheEndOfAPage()
		before := w.insertPosition()
		lsn := commitLSN(t, ctx, db)
		idleReplicaServes(t, ctx, db, lsn)
		if after := w.insertPosition(); after == before && before%page == pageHeader {
			// Nobody wrote in between, neither the server nor the driver.
			if uint64(lsn) != before-pageHeader {
				t.Errorf("CommitLSN is %s, the commit ended at %s", lsn, pgsplit.LSN(before-pageHeader))
			}
			quiet++
		}
	}
	if quiet == 0 {
		t.Error("somebody always wrote: CommitLSN itself?")
	}
}

func TestCommitLSNAtTheStartOfASegmentIsReachedByAnIdleReplica(t *testing.T) {
	cluster := shareCluster(t, 1)
	ctx := patient(t)
	db := open(t, cluster.DSN())
	db.SetMaxOpenConns(1)
	commitLSN(t, ctx, db)
	w := newWALWriter(t, ctx, cluster)
	var segment uint64
	if err := w.conn.QueryRow(ctx, "select pg_size_bytes(current_setting('wal_segment_size'))").Scan(&segment); err != nil {
		t.Fatal(err)
	}
	quiet := 0
	for n := 0; n < 4 || quiet == 0 && n < 50; n++ {
		w.commit(100)
		if _, err := w.conn.Exec(ctx, "select pg_switch_wal()"); err != nil {
			t.Fatal(err)
		}
		before := w.insertPosition()
		lsn := commitLSN(t, ctx, db)
		idleReplicaServes(t, ctx, db, lsn)
		if after := w.insertPosition(); after == before && before%segment == 40 {
			if uint64(lsn)%segment != 0 {
				t.Errorf("CommitLSN is %s, the segment starts at %s", lsn, pgsplit.LSN(before-40))
			}
			quiet++
		}
	}
	if quiet == 0 {
		t.Error("somebody always wrote: CommitLSN itself?")
	}
}

func TestCommitLSNWithoutAPrimaryIsErrNoPrimary(t *testing.T) {
	cluster := pgsplittest.Start(t)
	ctx := patient(t)
	db := open(t, cluster.DSN())
	commitLSN(t, ctx, db)
	if err := cluster.Primary.Stop(ctx, pgsplittest.Immediate); err != nil {
		t.Fatal(err)
	}
	// The connection that ended meanwhile may show that only now.
	until(t, "CommitLSN fails with ErrNoPrimary", func() bool {
		lsn, err := pgsplit.CommitLSN(ctx, db)
		if err == nil || lsn != 0 {
			t.Fatalf("without a primary CommitLSN is %s %v", lsn, err)
		}
		return errors.Is(err, pgsplit.ErrNoPrimary)
	})
	if _, err := pgsplit.CommitLSN(pgsplit.ReadOnly(ctx), db); !errors.Is(err, pgsplit.ErrNoPrimary) {
		t.Errorf("under ReadOnly it asked somebody else: %v", err)
	}
}

func TestCommitLSNOfAStandbyAloneIsErrNoPrimary(t *testing.T) {
	cluster := shareCluster(t, 1)
	ctx := patient(t)
	db := open(t, cluster.Replicas[0].URI())
	lsn, err := pgsplit.CommitLSN(ctx, db)
	if lsn != 0 || !errors.Is(err, pgsplit.ErrNoPrimary) || !strings.Contains(err.Error(), "in recovery") {
		t.Errorf("%s %v", lsn, err)
	}
	if got := text(t, ctx, db, inRecovery); got != "true" {
		t.Errorf("the connection after it: %s", got)
	}
}

func TestCommitLSNWorksWhereTransactionsAreReadOnlyByDefault(t *testing.T) {
	cluster := pgsplittest.Start(t, pgsplittest.PrimarySetting("wal_writer_delay", "10s"))
	ctx := patient(t)
	runSQL(t, ctx, cluster, ledger+`; create role reader login;
alter role reader set default_transaction_read_only = on;
alter role reader set default_transaction_isolation = 'serializable'`)
	db := open(t, strings.ReplaceAll(cluster.DSN(), "postgres@", "reader@"))
	if err := cluster.Primary.Exec(ctx, "set synchronous_commit = off; insert into ledger values (2)"); err != nil {
		t.Fatal(err)
	}
	lsn := commitLSN(t, ctx, db)
	if got := onServer(t, ctx, cluster.Primary, "select (pg_current_wal_flush_lsn() >= $1::text::pg_lsn)::text", lsn.String()); got != "true" {
		t.Errorf("%s is above the flush position", lsn)
	}
}
