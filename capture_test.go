package pgsplit_test

import (
	"context"
	"database/sql"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/pgsplit/pgsplit"
	"github.com/pgsplit/pgsplit/pgsplittest"
)

// insertOnly begins a transaction and inserts a row, so that nothing is left but its commit.
func insertOnly(t testing.TB, begin context.Context, db *sql.DB, setting string) *sql.Tx {
	t.Helper()
	tx, err := db.BeginTx(begin, nil)
	if err != nil {
		t.Fatal(err)
	}
	if setting != "" {
		exec(t, begin, tx, "set local synchronous_commit = "+setting)
	}
	exec(t, begin, tx, insertNext)
	return tx
}

const insertNext = "insert into ledger values (nextval('ledger_ids'))"

const ledgerWithIDs = ledger + "; create sequence ledger_ids start 10"

// F14: the position comes back with the commit.
func TestACommitInASessionTakesOneRoundTripHoweverItCommits(t *testing.T) {
	cluster := pgsplittest.Start(t, pgsplittest.PrimarySetting("synchronous_standby_names", "replica1"))
	ctx := patient(t)
	runSQL(t, ctx, cluster, ledgerWithIDs)
	db := open(t, cluster.ProxyDSN())
	for _, setting := range []string{"on", "off", "local", "remote_write", "remote_apply"} {
		commits := func(begin context.Context) (most int64) {
			for range 3 {
				tx := insertOnly(t, begin, db, setting)
				before := spoken(cluster)
				if err := tx.Commit(); err != nil {
					t.Fatal(err)
				}
				most = max(most, spoken(cluster)-before)
			}
			return most
		}
		session := pgsplit.NewSession()
		plain, captured := commits(ctx), commits(pgsplit.WithSession(ctx, session))
		if plain != 1 || captured != 1 {
			t.Errorf("%s: a commit takes %d round trips in a session, %d without", setting, captured, plain)
		}
		before := spoken(cluster)
		if token := tokenOf(t, ctx, session); len(token.Floors) != 1 || token.Floors[0].LSN == 0 || spoken(cluster) != before {
			t.Errorf("%s: the commit did not tell where it ended: %+v", setting, token)
		}
	}
}

// What the commit asks with is gone: it stands, its floor is asked for once, and the next commits tell theirs again.
func TestACommitOutlivesThePreparedStatementsOfItsConnection(t *testing.T) {
	cluster := shareCluster(t, 0)
	ctx := patient(t)
	runSQL(t, ctx, cluster, ledgerWithIDs)
	for _, reset := range []string{"deallocate all", "discard all", "deallocate pgsplit_where"} {
		db := open(t, with(cluster.ProxyDSN(), "default_query_exec_mode=simple_protocol"))
		db.SetMaxOpenConns(1)
		// commit tells how many round trips the commit took, and how many its position took afterwards.
		commit := func() (commit, afterwards int64) {
			session := pgsplit.NewSession()
			tx := insertOnly(t, pgsplit.WithSession(ctx, session), db, "")
			before := spoken(cluster)
			if err := tx.Commit(); err != nil {
				t.Fatalf("after %s: %v", reset, err)
			}
			between := spoken(cluster)
			floors := tokenOf(t, ctx, session).Floors
			if len(floors) != 1 || floors[0].LSN == 0 {
				t.Errorf("after %s: floors %v", reset, floors)
			}
			return between - before, spoken(cluster) - between
		}
		for i, want := range []int64{0, 0, 1, 0, 0} {
			if i == 2 {
				exec(t, ctx, db, reset)
			}
			if took, afterwards := commit(); took != 1 || afterwards != want {
				t.Errorf("%s, commit %d: %d round trips, and %d to know its position; want %d", reset, i+1, took, afterwards, want)
			}
		}
		if err := db.Close(); err != nil {
			t.Error(err)
		}
	}
}

// However a transaction wrote, its commit tells where it ended; one that wrote nothing raises no floor, whatever the one before
// it on the same connection did. Where the tag of a statement told that rows were written, the commit asks no more than it has to.
func TestACommitTellsWhetherItsTransactionWrote(t *testing.T) {
	cluster := shareCluster(t, 0)
	ctx := patient(t)
	runSQL(t, ctx, cluster, ledgerWithIDs)
	db := open(t, cluster.ProxyDSN())
	merge := "merge into ledger using (values (1002)) v (id) on ledger.id = v.id when matched then update set id = 1001"
	if cluster.Version() < 15 {
		merge = "update ledger set id = 1001 where id = 1002"
	}
	for _, c := range []struct {
		run   func(ctx context.Context, tx *sql.Tx)
		wrote bool
		told  bool // by a tag
	}{
		{func(ctx context.Context, tx *sql.Tx) { exec(t, ctx, tx, "insert into ledger values (1001)") }, true, true},
		{func(ctx context.Context, tx *sql.Tx) {}, false, false},
		{func(ctx context.Context, tx *sql.Tx) { exec(t, ctx, tx, "update ledger set id = 1002 where id = 1001") }, true, true},
		{func(ctx context.Context, tx *sql.Tx) { exec(t, ctx, tx, "update ledger set id = 3 where id = 1001") }, false, false},
		{func(ctx context.Context, tx *sql.Tx) { exec(t, ctx, tx, merge) }, true, true},
		{func(ctx context.Context, tx *sql.Tx) { exec(t, ctx, tx, "select * from ledger") }, false, false},
		{func(ctx context.Context, tx *sql.Tx) { exec(t, ctx, tx, "delete from ledger") }, true, true},
		{func(ctx context.Context, tx *sql.Tx) { exec(t, ctx, tx, "delete from ledger") }, false, false},
		{func(ctx context.Context, tx *sql.Tx) {
			text(t, ctx, tx, "insert into ledger values (1004) returning id::text")
		}, true, true},
		{func(ctx context.Context, tx *sql.Tx) {
			text(t, ctx, tx, "with w as (insert into ledger values (1005) returning id) select id::text from w")
		}, true, false},
		{func(ctx context.Context, tx *sql.Tx) { text(t, ctx, tx, "select id::text from ledger") }, false, false},
		{func(ctx context.Context, tx *sql.Tx) { exec(t, ctx, tx, "create table other (id int)") }, true, false},
		{func(ctx context.Context, tx *sql.Tx) { exec(t, ctx, tx, "set local work_mem = '1MB'") }, false, false},
	} {
		session := pgsplit.NewSession()
		inSession := pgsplit.WithSession(ctx, session)
		tx, err := db.BeginTx(inSession, nil)
		if err != nil {
			t.Fatal(err)
		}
		c.run(inSession, tx)
		if err := tx.Commit(); err != nil {
			t.Fatal(err)
		}
		before := spoken(cluster)
		floors := tokenOf(t, ctx, session).Floors
		wrote := len(floors) == 1 && floors[0].LSN != 0
		if wrote != c.wrote || spoken(cluster) != before {
			t.Errorf("floors %v, and %d round trips to know; it wrote: %t", floors, spoken(cluster)-before, c.wrote)
		}
		message := onServer(t, ctx, cluster.Primary, "select query from pg_stat_activity where query like '%; commit; %' and query not like 'select query %'")
		if told := strings.HasPrefix(message, "show "); told != c.told {
			t.Errorf("it committed with %q; a tag had told that it wrote: %t", message, c.told)
		}
	}
}

// BenchmarkCommit times commits with and without capture at 1 ms of added delay, in turn, each kind as often first as
// second. The ratio of the medians may be 1.10, whether the row was written by Exec or, as GORM does it, by a query.
func BenchmarkCommit(b *testing.B) {
	cluster := pgsplittest.Start(b, pgsplittest.Replicas(0))
	ctx, cancel := context.WithCancel(context.Background())
	b.Cleanup(cancel)
	runSQL(b, ctx, cluster, ledgerWithIDs)
	db := open(b, cluster.ProxyDSN())
	for name, insert := range map[string]func(tx *sql.Tx){
		"exec":      func(tx *sql.Tx) { exec(b, ctx, tx, insertNext) },
		"returning": func(tx *sql.Tx) { text(b, ctx, tx, insertNext+" returning id::text") },
	} {
		b.Run("insert="+name, func(b *testing.B) {
			cluster.Primary.Proxy().SetDelay(0)
			benchmarkCommit(b, func(begin context.Context) time.Duration {
				tx, err := db.BeginTx(begin, nil)
				if err != nil {
					b.Fatal(err)
				}
				insert(tx)
				return timed(b, tx.Commit)
			}, func() { cluster.Primary.Proxy().SetDelay(time.Millisecond) })
		})
	}
}

func benchmarkCommit(b *testing.B, commit func(begin context.Context) time.Duration, slow func()) {
	const allowed = 1.10
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	plain := func() time.Duration { return commit(ctx) }
	capture := func() time.Duration { return commit(pgsplit.WithSession(ctx, pgsplit.NewSession())) }
	for range 20 { // connections, caches
		plain()
		capture()
	}
	slow()
	var without, with []time.Duration
	for b.Loop() {
		without = append(without, plain())
		with = append(with, capture(), capture())
		without = append(without, plain())
	}
	ratio := median(with) / median(without)
	b.ReportMetric(ratio, "capture/plain")
	b.Logf("a commit takes %.0f us with capture and %.0f us without, medians of %d", median(with)/1e3, median(without)/1e3, len(with))
	if len(with) >= 100 && ratio > allowed {
		b.Errorf("a commit with capture takes %.3f of one without, %.2f is allowed", ratio, allowed)
	}
}

// F2: whatever others have written and not flushed, a synchronous commit is covered by the flush position, which replicas
// have soon. The insert position would be one that no replica can reach.
func TestTheFloorOfASynchronousCommitIsNotAboveTheFlushPosition(t *testing.T) {
	// Without the WAL writer nothing but commits moves the flush position.
	cluster := pgsplittest.Start(t, pgsplittest.Replicas(2), pgsplittest.PrimarySetting("wal_writer_delay", "10s"),
		pgsplittest.PrimarySetting("synchronous_standby_names", "replica1"))
	ctx := patient(t)
	runSQL(t, ctx, cluster, ledgerWithIDs+"; create table neighbour (n int)")
	db := open(t, cluster.DSN())
	synchronous := cluster.Replicas[0]
	for _, asynchronous := range []string{
		"set synchronous_commit = off; insert into neighbour values (1)",
		"set synchronous_commit = off; begin; insert into neighbour select generate_series(1, 100)",
	} {
		neighbour, err := cluster.Primary.Conn(ctx)
		if err != nil {
			t.Fatal(err)
		}
		defer neighbour.Close(ctx)
		session := pgsplit.NewSession()
		tx := insertOnly(t, pgsplit.WithSession(ctx, session), db, "on")
		// The commit is flushed and waits for its standby: what the neighbour writes now lies above it.
		if err := synchronous.Freeze(); err != nil {
			t.Fatal(err)
		}
		committed := make(chan error, 1)
		go func() { committed <- tx.Commit() }()
		eventually(t, "the commit waits for its standby", func() bool {
			return onServer(t, ctx, cluster.Primary, "select count(*)::text from pg_stat_activity where wait_event = 'SyncRep'") == "1"
		})
		if _, err := neighbour.Exec(ctx, asynchronous); err != nil {
			t.Fatal(err)
		}
		const ahead = "select (pg_current_wal_insert_lsn() > pg_current_wal_flush_lsn())::text"
		if got := onServer(t, ctx, cluster.Primary, ahead); got != "true" {
			t.Error("what the neighbour wrote is flushed: this shows nothing")
		}
		if err := synchronous.Thaw(); err != nil {
			t.Fatal(err)
		}
		if err := <-committed; err != nil {
			t.Fatal(err)
		}
		floor := tokenOf(t, ctx, session).Floors[0].LSN
		flush, err := pgsplit.ParseLSN(onServer(t, ctx, cluster.Primary, "select pg_current_wal_flush_lsn()::text"))
		if err != nil {
			t.Fatal(err)
		}
		if floor == 0 || floor > flush {
			t.Errorf("the floor %s is above the flush position %s", floor, flush)
		}
		// A replica has it although nobody flushes anything.
		last := onServer(t, ctx, cluster.Primary, "select max(id)::text from ledger")
		read := pgsplit.ReadOnly(pgsplit.WithSession(ctx, session), pgsplit.MaxWait(30*time.Second), pgsplit.ReplicaOnly())
		if got := text(t, read, db, "select max(id)::text from ledger"); got != last {
			t.Errorf("a replica shows rows up to %s, %s is committed", got, last)
		}
	}
}

// While others write and do not commit, the floors of a session's commits are reached by replicas, and show the rows.
func TestTheFloorOfACommitIsReachedWhoeverElseIsWriting(t *testing.T) {
	cluster := pgsplittest.Start(t, pgsplittest.PrimarySetting("wal_writer_delay", "10s"))
	ctx := patient(t)
	runSQL(t, ctx, cluster, ledger+"; create table neighbour (n int)")
	watcher, err := cluster.Primary.Conn(ctx)
	if err != nil {
		t.Fatal(err)
	}
	defer watcher.Close(ctx)
	id := 1
	for _, setting := range []string{"on", "local"} {
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
					for range 30 {
						id++
						session := pgsplit.NewSession()
						inSession := pgsplit.WithSession(ctx, session)
						if err := commits["transaction"](inSession, db, setting, id); err != nil {
							t.Fatal(err)
						}
						floor := tokenOf(t, ctx, session).Floors[0].LSN
						var flushed bool
						if err := watcher.QueryRow(ctx, "select pg_current_wal_flush_lsn() >= $1::text::pg_lsn", floor.String()).Scan(&flushed); err != nil {
							t.Fatal(err)
						}
						if !flushed {
							t.Fatalf("%s is above the flush position", floor)
						}
						read := pgsplit.ReadOnly(inSession, pgsplit.MaxWait(30*time.Second), pgsplit.ReplicaOnly())
						if got := text(t, read, db, "select max(id)::text from ledger"); got != strconv.Itoa(id) {
							t.Fatalf("a replica at %s shows rows up to %s, %d is committed", floor, got, id)
						}
					}
				})
			})
		}
	}
}

// BenchmarkWaitAfterCommit times how long a read on a replica takes right after a synchronous commit: of a session, and of
// a floor that is the primary's flush position. A round trip to the primary lies between in both. The medians may differ
// by a factor of 2.
func BenchmarkWaitAfterCommit(b *testing.B) {
	const allowed = 2
	for _, who := range []string{"nobody else", "an idle transaction that wrote", "a busy transaction"} {
		b.Run("neighbour="+who, func(b *testing.B) {
			cluster := pgsplittest.Start(b)
			ctx, cancel := context.WithCancel(context.Background())
			b.Cleanup(cancel)
			runSQL(b, ctx, cluster, ledgerWithIDs+"; create table neighbour (n int)")
			db := open(b, cluster.DSN())
			other, err := cluster.Primary.Conn(ctx)
			if err != nil {
				b.Fatal(err)
			}
			b.Cleanup(func() { _ = other.Close(context.Background()) })
			watcher, err := cluster.Primary.Conn(ctx)
			if err != nil {
				b.Fatal(err)
			}
			b.Cleanup(func() { _ = watcher.Close(context.Background()) })
			neighbours[who](b, ctx, other)
			read := func(ctx context.Context) time.Duration {
				read := pgsplit.ReadOnly(ctx, pgsplit.MaxWait(20*time.Second), pgsplit.ReplicaOnly())
				return timed(b, func() error {
					var n int
					return db.QueryRowContext(read, "select 1").Scan(&n)
				})
			}
			flushPosition := func() (flush pgsplit.LSN) {
				if err := watcher.QueryRow(ctx, "select pg_current_wal_flush_lsn()::text").Scan(&flush); err != nil {
					b.Fatal(err)
				}
				return flush
			}
			bySession := func() time.Duration {
				in := pgsplit.WithSession(ctx, pgsplit.NewSession())
				if err := insertOnly(b, in, db, "").Commit(); err != nil {
					b.Fatal(err)
				}
				flushPosition()
				return read(in)
			}
			byFlush := func() time.Duration {
				if err := insertOnly(b, ctx, db, "").Commit(); err != nil {
					b.Fatal(err)
				}
				return read(pgsplit.WithLSN(ctx, flushPosition()))
			}
			for range 20 {
				bySession()
				byFlush()
			}
			var session, flush []time.Duration
			for b.Loop() {
				session = append(session, bySession())
				flush = append(flush, byFlush(), byFlush())
				session = append(session, bySession())
			}
			ratio := median(session) / median(flush)
			b.ReportMetric(ratio, "session/flush")
			b.Logf("a read after a commit takes %.0f us in a session and %.0f us at the flush position, medians of %d",
				median(session)/1e3, median(flush)/1e3, len(flush))
			if len(flush) >= 100 && ratio > allowed {
				b.Errorf("a read after a commit takes %.2f of one at the flush position, %d is allowed", ratio, allowed)
			}
		})
	}
}
