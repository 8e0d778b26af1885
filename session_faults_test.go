package pgsplit_test

import (
	"context"
	"database/sql"
	"errors"
	"strconv"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgsplit/pgsplit"
	"github.com/pgsplit/pgsplit/pgsplittest"
)

// twoLabels is a cluster whose replicas are labelled a and b, of which b lags behind by one row, and the position of
// that row.
func twoLabels(t *testing.T) (*sql.DB, context.Context, pgsplit.LSN) {
	t.Helper()
	cluster := pgsplittest.Start(t, pgsplittest.Replicas(2))
	ctx := patient(t)
	a, b := cluster.Replicas[0], cluster.Replicas[1]
	db := open(t, cluster.Primary.URI()+" "+a.URI()+"&label=a "+b.URI()+"&label=b")
	exec(t, ctx, db, "create table notes (id int primary key, body text)")
	if err := cluster.CatchUp(ctx); err != nil {
		t.Fatal(err)
	}
	pause(t, b)
	// Somebody asked the primary where it is before the row came.
	text(t, pgsplit.ReadOnly(ctx, pgsplit.MaxStaleness(time.Hour)), db, whatAndWhere)
	exec(t, ctx, db, "insert into notes values (1)")
	return db, ctx, commitLSN(t, ctx, db)
}

func TestWhatAnOpenTransactionHasShownCountsAsSeen(t *testing.T) {
	db, ctx, lsn := twoLabels(t)
	in := pgsplit.WithSession(ctx, pgsplit.NewSession())
	tx, err := db.BeginTx(pgsplit.ReadOnly(in, pgsplit.Prefer("a"), pgsplit.AfterLSN(lsn), pgsplit.MaxWait(30*time.Second)), nil)
	if err != nil {
		t.Fatal(err)
	}
	defer tx.Rollback()
	if got := text(t, in, tx, whatAndWhere); got[:1] != "1" {
		t.Fatal(got)
	}
	if got := text(t, pgsplit.ReadOnly(in, pgsplit.Prefer("b")), db, whatAndWhere); got[:1] != "1" {
		t.Errorf("went back to %s", got)
	}
}

func TestWhatASessionReadsInATransactionThatBeganWithoutItCountsAsSeen(t *testing.T) {
	db, ctx, lsn := twoLabels(t)
	in := pgsplit.WithSession(ctx, pgsplit.NewSession())
	tx, err := db.BeginTx(pgsplit.ReadOnly(ctx, pgsplit.Prefer("a"), pgsplit.AfterLSN(lsn), pgsplit.MaxWait(30*time.Second)), nil)
	if err != nil {
		t.Fatal(err)
	}
	if got := text(t, in, tx, whatAndWhere); got[:1] != "1" {
		t.Fatal(got)
	}
	if err := tx.Commit(); err != nil {
		t.Fatal(err)
	}
	if got := text(t, pgsplit.ReadOnly(in, pgsplit.Prefer("b")), db, whatAndWhere); got[:1] != "1" {
		t.Errorf("went back to %s", got)
	}
}

// A write on another connection raises the floor of a transaction that is open on a replica: it is proven again, or the
// statement fails.
func TestTheSessionsFloorHoldsInsideAReadOnlyTransaction(t *testing.T) {
	cluster, db, ctx := sessionCluster(t, 1)
	in := pgsplit.WithSession(ctx, pgsplit.NewSession())
	tx, err := db.BeginTx(pgsplit.ReadOnly(in), nil)
	if err != nil {
		t.Fatal(err)
	}
	defer tx.Rollback()
	text(t, in, tx, whatAndWhere)
	pauseAll(t, ctx, cluster)
	exec(t, in, db, "insert into notes values (1)")
	failsWith(t, in, tx, pgsplit.ErrNoFreshReplica)
	if err := cluster.Replicas[0].ResumeReplay(ctx); err != nil {
		t.Fatal(err)
	}
	if err := cluster.CatchUp(ctx); err != nil {
		t.Fatal(err)
	}
	if got := text(t, in, tx, whatAndWhere); got != "1 true" {
		t.Error(got)
	}
}

// Two primaries are alive, and the caller has seen the one that a failover made.
func TestAPrimaryThatWasPutAsideDoesNotAnswerASession(t *testing.T) {
	cluster := pgsplittest.Start(t, pgsplittest.Replicas(1))
	ctx := patient(t)
	old, heir := cluster.Primary, cluster.Replicas[0]
	before := open(t, old.URI())
	exec(t, ctx, before, "create table notes (id int primary key, body text)")
	if err := cluster.CatchUp(ctx); err != nil {
		t.Fatal(err)
	}
	if err := heir.Promote(ctx); err != nil {
		t.Fatal(err)
	}
	after := open(t, heir.URI())
	in := pgsplit.WithSession(ctx, pgsplit.NewSession())
	exec(t, in, after, "insert into notes values (1)")
	if got := text(t, pgsplit.ReadOnly(in), after, whatAndWhere); got != "1 false" {
		t.Error(got)
	}
	failsWith(t, pgsplit.ReadOnly(in), before, pgsplit.ErrNoPrimary)
	if _, err := before.ExecContext(in, "insert into notes values (9)"); !errors.Is(err, pgsplit.ErrNoPrimary) {
		t.Errorf("a write on the primary that was put aside: %v", err)
	}
}

// A connection that is given back while a statement still runs there has an unknown outcome.
func TestAWriteThatIsStillRunningWhenItsConnectionIsGivenBackStaysPending(t *testing.T) {
	cluster, db, ctx := sessionCluster(t, 1)
	exec(t, ctx, db, "insert into notes values (1)")
	if err := cluster.CatchUp(ctx); err != nil {
		t.Fatal(err)
	}
	locker, err := cluster.Primary.Conn(ctx)
	if err != nil {
		t.Fatal(err)
	}
	defer locker.Close(ctx)
	if _, err := locker.Exec(ctx, "begin; lock table notes in share mode"); err != nil {
		t.Fatal(err)
	}
	in := pgsplit.WithSession(ctx, pgsplit.NewSession())
	conn := hold(t, ctx, db)
	err = pgsplit.Raw(in, conn, func(c *pgx.Conn) error {
		_ = c.PgConn().Exec(ctx, "insert into notes values (2)") // left open
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	if err := conn.Close(); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the insert waits", func() bool {
		return onServer(t, ctx, cluster.Primary, "select count(*)::text from pg_stat_activity where wait_event_type = 'Lock'") == "1"
	})
	text(t, pgsplit.ReadOnly(in), db, whatAndWhere) // takes a position, which does not cover the insert
	pauseAll(t, ctx, cluster)
	if _, err := locker.Exec(ctx, "commit"); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the insert has landed", func() bool {
		return onServer(t, ctx, cluster.Primary, "select count(*)::text from notes") == "2"
	})
	if got := text(t, pgsplit.ReadOnly(in), db, whatAndWhere); got != "2 false" {
		t.Errorf("stale: %s", got)
	}
}

func TestATransactionThatTheCallerEndsByTextStillCounts(t *testing.T) {
	cluster, db, ctx := sessionCluster(t, 1)
	pauseAll(t, ctx, cluster)
	in := pgsplit.WithSession(ctx, pgsplit.NewSession())
	tx, err := db.BeginTx(in, nil)
	if err != nil {
		t.Fatal(err)
	}
	exec(t, in, tx, "insert into notes values (1)")
	exec(t, in, tx, "commit")
	exec(t, in, tx, "insert into notes values (2)")
	_ = tx.Commit() // the server has no transaction to commit
	if got := text(t, pgsplit.ReadOnly(in), db, whatAndWhere); got != "2 false" {
		t.Errorf("stale: %s", got)
	}
}

func TestAPositionWithoutATimelineIsNotLost(t *testing.T) {
	t.Run("in a token before any statement", func(t *testing.T) {
		cluster, db, ctx := sessionCluster(t, 1)
		pauseAll(t, ctx, cluster)
		exec(t, ctx, db, "insert into notes values (1)")
		token := tokenOf(t, ctx, pgsplit.SessionAt(commitLSN(t, ctx, db)))
		if got := text(t, pgsplit.ReadOnly(pgsplit.WithSession(ctx, pgsplit.SessionFromToken(token))), db, whatAndWhere); got != "1 false" {
			t.Errorf("stale: %s", got)
		}
	})
	t.Run("beside one with a timeline", func(t *testing.T) {
		cluster, db, ctx := sessionCluster(t, 1)
		s := pgsplit.NewSession()
		in := pgsplit.WithSession(ctx, s)
		exec(t, in, db, "insert into notes values (1)")
		text(t, pgsplit.ReadOnly(in), db, whatAndWhere)
		if err := cluster.CatchUp(ctx); err != nil {
			t.Fatal(err)
		}
		pauseAll(t, ctx, cluster)
		exec(t, ctx, db, "insert into notes values (2)")
		system := tokenOf(t, ctx, s).Floors[0].System
		s.Advance(pgsplit.Token{Floors: []pgsplit.TokenFloor{{System: system, LSN: commitLSN(t, ctx, db)}}})
		if got := text(t, pgsplit.ReadOnly(in), db, whatAndWhere); got != "2 false" {
			t.Errorf("stale: %s", got)
		}
	})
}

// After a lossy failover a replica of the old primary has more log than the new one, and none of its rows.
func TestABoundOnStalenessKnowsTheTimeline(t *testing.T) {
	cluster := pgsplittest.Start(t, pgsplittest.Replicas(2))
	ctx := patient(t)
	old, heir, other := cluster.Primary, cluster.Replicas[0], cluster.Replicas[1]
	db := open(t, "host=127.0.0.1,127.0.0.1 port="+strconv.Itoa(old.Port())+","+strconv.Itoa(heir.Port())+
		" user=postgres dbname=postgres sslmode=disable replica=127.0.0.1:"+strconv.Itoa(other.Port()))
	exec(t, ctx, db, "create table notes (id int primary key, body text)")
	if err := cluster.CatchUp(ctx); err != nil {
		t.Fatal(err)
	}
	stop(t, heir)
	exec(t, ctx, db, "insert into notes select i from generate_series(1, 100000) i")
	if err := cluster.CatchUp(ctx); err != nil {
		t.Fatal(err)
	}
	text(t, pgsplit.ReadOnly(ctx), db, whatAndWhere) // the replica's position is known
	failOver(t, ctx, cluster, db, heir, 500000)
	committed := time.Now()
	const bound = 200 * time.Millisecond
	eventually(t, "the row is older than the bound", func() bool { return time.Since(committed) > 2*bound })
	read := pgsplit.ReadOnly(ctx, pgsplit.MaxStaleness(bound))
	for range 3 {
		if got := text(t, read, db, "select count(*)::text from notes where id = 500000"); got != "1" {
			t.Error("a replica that follows the old timeline answered")
		}
	}
}

// A program that writes much asks the primary often where it is. That does not make a bound on staleness any narrower.
func TestABoundOnStalenessIsAsWideHoweverMuchIsWritten(t *testing.T) {
	cluster, db, ctx := sessionCluster(t, 1)
	bounded := pgsplit.ReadOnly(ctx, pgsplit.MaxStaleness(10*time.Minute))
	text(t, bounded, db, whatAndWhere)
	if err := cluster.CatchUp(ctx); err != nil {
		t.Fatal(err)
	}
	pauseAll(t, ctx, cluster)
	in := pgsplit.WithSession(ctx, pgsplit.NewSession())
	for i := range 150 {
		exec(t, in, db, "insert into notes values ($1)", i)
		text(t, pgsplit.ReadOnly(in), db, whatAndWhere) // it has to know where the write ended
	}
	if got := text(t, bounded, db, whatAndWhere); got != "0 true" {
		t.Errorf("a read that may be ten minutes old was answered with %q", got)
	}
}

func TestAHeldConnectionToAStandbyAtThePrimarysAddressProvesTheFloor(t *testing.T) {
	cluster, primary, ctx := sessionCluster(t, 1)
	pauseAll(t, ctx, cluster)
	exec(t, ctx, primary, "insert into notes values (1)")
	read := pgsplit.ReadOnly(pgsplit.WithLSN(ctx, commitLSN(t, ctx, primary)))
	db := open(t, cluster.Replicas[0].URI())
	failsWith(t, read, db, pgsplit.ErrNoFreshReplica)
	conn := hold(t, ctx, db)
	text(t, ctx, conn, "select 'x'")
	failsWith(t, read, conn, pgsplit.ErrNoFreshReplica)
}

// A standby at the primary's address is promoted under its connections.
func TestAPrimaryThatWasAStandbyWhenItWasMetAnswersReadsWithAFloor(t *testing.T) {
	cluster, _, ctx := sessionCluster(t, 1)
	heir := cluster.Replicas[0]
	db := open(t, heir.URI())
	text(t, ctx, db, whatAndWhere)
	text(t, pgsplit.ReadOnly(ctx), db, whatAndWhere)
	stop(t, cluster.Primary)
	if err := heir.Promote(ctx); err != nil {
		t.Fatal(err)
	}
	exec(t, ctx, db, "insert into notes values (1)")
	if got := text(t, pgsplit.ReadOnly(pgsplit.WithLSN(ctx, commitLSN(t, ctx, db))), db, whatAndWhere); got != "1 false" {
		t.Error(got)
	}
	in := pgsplit.WithSession(ctx, pgsplit.NewSession())
	exec(t, in, db, "insert into notes values (2)")
	if got := text(t, pgsplit.ReadOnly(in), db, whatAndWhere); got != "2 false" {
		t.Error(got)
	}
}

func TestASerializableTransactionOnAHeldReplicaConnectionGoesToThePrimary(t *testing.T) {
	_, db, ctx := sessionCluster(t, 1)
	conn := hold(t, ctx, db)
	text(t, pgsplit.ReadOnly(ctx), conn, whatAndWhere)
	tx, err := conn.BeginTx(pgsplit.ReadOnly(ctx), &sql.TxOptions{Isolation: sql.LevelSerializable})
	if err != nil {
		t.Fatal(err)
	}
	defer tx.Rollback()
	if got := text(t, ctx, tx, whatAndWhere); got != "0 false" {
		t.Error(got)
	}
}

func TestAReplicaThatDiesUnderAHeldConnectionIsNotTheCallersTrouble(t *testing.T) {
	cluster, db, ctx := sessionCluster(t, 1)
	conn := hold(t, ctx, db)
	text(t, pgsplit.ReadOnly(ctx), conn, whatAndWhere)
	exec(t, ctx, db, "insert into notes values (1)")
	lsn := commitLSN(t, ctx, db)
	stop(t, cluster.Replicas[0])
	if got := text(t, pgsplit.ReadOnly(ctx, pgsplit.AfterLSN(lsn)), conn, whatAndWhere); got != "1 false" {
		t.Error(got)
	}
}

func TestAPingLeavesAHeldConnectionWhereItIs(t *testing.T) {
	_, db, ctx := sessionCluster(t, 1)
	conn := hold(t, ctx, db)
	for range 2 {
		if got := text(t, pgsplit.ReadOnly(ctx), conn, inRecovery); got != "true" {
			t.Error("a ping took the replica away")
		}
		if err := conn.PingContext(ctx); err != nil {
			t.Fatal(err)
		}
	}
}

// commitPanics is a tracer with a bug.
type commitPanics struct{}

func (commitPanics) TraceQueryStart(ctx context.Context, _ *pgx.Conn, data pgx.TraceQueryStartData) context.Context {
	if data.SQL == "commit" || data.SQL == "rollback" {
		panic("the tracer's own")
	}
	return ctx
}

func (commitPanics) TraceQueryEnd(context.Context, *pgx.Conn, pgx.TraceQueryEndData) {}

func TestAPanicOfATracerAtTheEndOfATransactionLeaksNothing(t *testing.T) {
	cluster := pgsplittest.Start(t, pgsplittest.Replicas(0))
	ctx := patient(t)
	db := openWith(t, cluster.DSN(), func(_ string, p *pgxpool.Config) { p.ConnConfig.Tracer = commitPanics{} })
	db.SetMaxOpenConns(1)
	for _, end := range []func(*sql.Tx) error{(*sql.Tx).Commit, (*sql.Tx).Rollback} {
		tx, err := db.BeginTx(ctx, nil)
		if err != nil {
			t.Fatal(err)
		}
		if err := end(tx); err == nil {
			t.Error("the panic is no error")
		}
	}
	exec(t, ctx, db, "select 1")
}
