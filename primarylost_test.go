package pgsplit_test

import (
	"context"
	"database/sql"
	"errors"
	"io"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgsplit/pgsplit"
	"github.com/pgsplit/pgsplit/pgsplittest"
)

// What becomes of reads under way on the primary when their connection is lost.

// asleepOnPrimary is a read that takes long on a primary alone.
const asleepOnPrimary = `select case when pg_is_in_recovery() then 'replica' else (select 'primary' from pg_sleep(30)) end`

// longest is replica_max_lag where the replica lags more.
const longest = 300 * time.Millisecond

// behindABound is a cluster whose reads run on the primary, because its replica lags more than they may.
func behindABound(t *testing.T) (ctx context.Context, cluster *pgsplittest.Cluster, db *sql.DB, onPrimary *observer) {
	t.Helper()
	cluster = pgsplittest.Start(t, pgsplittest.Replicas(1))
	ctx = patient(t)
	db = open(t, with(patiently(cluster), "replica_max_lag="+longest.String(), "application_name=lost"))
	lagging(t, ctx, db, cluster, longest, cluster.Replicas...)
	return ctx, cluster, db, observe(t, cluster.Primary, "lost")
}

// found is what a read has found, and where.
type found struct {
	where string
	err   error
}

// beginRead begins a read that tells where it ran.
func beginRead(ctx context.Context, db *sql.DB, query string) <-chan found {
	done := make(chan found, 1)
	go func() {
		var f found
		f.err = db.QueryRowContext(ctx, query).Scan(&f.where)
		done <- f
	}()
	return done
}

func TestAReadThatIsUnderWayWhenThePrimaryDiesRunsOnAReplicaThatMayServeItThen(t *testing.T) {
	ctx, cluster, db, watch := behindABound(t)
	lsn := commitLSN(t, ctx, db)
	plain := beginRead(pgsplit.ReadOnly(ctx), db, asleepOnPrimary)
	floor := beginRead(pgsplit.ReadOnly(ctx, pgsplit.AfterLSN(lsn)), db, asleepOnPrimary)
	unhinted := beginRead(ctx, db, asleepOnPrimary)
	eventually(t, "they run", func() bool { return watch.count("wait_event = 'PgSleep'") == 3 })
	end := time.Now().Add(longest) // then nobody knows where the primary was that long ago
	within(longest, func() bool { return time.Now().After(end) })
	stop(t, cluster.Primary)
	if r := <-plain; r.err != nil || r.where != "replica" {
		t.Errorf("a read that asked for nothing: %q %v", r.where, r.err)
	}
	for name, done := range map[string]<-chan found{"a read behind whose floor the replica is": floor, "what may write": unhinted} {
		var pgErr *pgconn.PgError
		if r := <-done; !errors.As(r.err, &pgErr) && !errors.Is(r.err, io.ErrUnexpectedEOF) {
			t.Errorf("%s: %q %v, want what the primary said last", name, r.where, r.err)
		}
	}
	if s := connectorOf(t, db).Stats().Servers[0]; s.MovedOn != 2 {
		t.Errorf("%d reads moved on, want those under ReadOnly", s.MovedOn)
	}
}

func TestAReadThatIsLostTwiceOnADyingPrimaryRunsOnAReplica(t *testing.T) {
	ctx, cluster, db, watch := behindABound(t)
	read := beginRead(pgsplit.ReadOnly(ctx), db, asleepOnPrimary)
	asleep := func() bool { return watch.count("wait_event = 'PgSleep'") == 1 }
	eventually(t, "it runs", asleep)
	if err := losses["pg_terminate_backend"](ctx, cluster.Primary); err != nil {
		t.Fatal(err)
	}
	eventually(t, "it runs again", func() bool { return connectorOf(t, db).Stats().Servers[0].MovedOn == 1 && asleep() })
	stop(t, cluster.Primary)
	if r := <-read; r.err != nil || r.where != "replica" {
		t.Errorf("%q %v", r.where, r.err)
	}
}

// The end of one connection is not the end of the primary: while it answers, the bound on lag holds.
func TestAReadWhoseBackendIsEndedByAPrimaryThatAnswersIsServedByNoReplicaBeyondItsLag(t *testing.T) {
	ctx, cluster, db, watch := behindABound(t)
	lock, err := cluster.Primary.Conn(ctx)
	if err != nil {
		t.Fatal(err)
	}
	defer lock.Close(ctx)
	if _, err := lock.Exec(ctx, "select pg_advisory_lock(1)"); err != nil {
		t.Fatal(err)
	}
	read := beginRead(pgsplit.ReadOnly(ctx), db, `select case when pg_is_in_recovery() then 'replica'
		else (select 'primary' from pg_advisory_xact_lock_shared(1)) end`)
	eventually(t, "it waits", func() bool { return watch.count("wait_event_type = 'Lock'") == 1 })
	const end = "select pg_terminate_backend(pid) from pg_stat_activity where application_name = 'lost' and wait_event_type = 'Lock'"
	if _, err := lock.Exec(ctx, end); err != nil {
		t.Fatal(err)
	}
	if _, err := lock.Exec(ctx, "select pg_advisory_unlock(1)"); err != nil {
		t.Fatal(err)
	}
	if r := <-read; r.err != nil || r.where != "primary" {
		t.Errorf("%q %v", r.where, r.err)
	}
}

// impatient is a tracer that gives a statement less time than its caller does.
type impatient struct{ query string }

func (i impatient) TraceQueryStart(ctx context.Context, _ *pgx.Conn, data pgx.TraceQueryStartData) context.Context {
	if data.SQL == i.query {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, 100*time.Millisecond)
		context.AfterFunc(ctx, cancel)
	}
	return ctx
}

func (impatient) TraceQueryEnd(context.Context, *pgx.Conn, pgx.TraceQueryEndData) {}

func TestAReadThatATracerEndsOnThePrimaryRunsOnce(t *testing.T) {
	cluster := pgsplittest.Start(t, pgsplittest.Replicas(1))
	ctx := patient(t)
	db := openWith(t, patiently(cluster), func(_ string, pool *pgxpool.Config) { pool.ConnConfig.Tracer = impatient{asleepOnPrimary} })
	lagging(t, ctx, db, cluster, 0, cluster.Replicas...)
	_, err := db.ExecContext(pgsplit.ReadOnly(ctx, pgsplit.AfterLSN(commitLSN(t, ctx, db))), asleepOnPrimary)
	if s := connectorOf(t, db).Stats().Servers[0]; !errors.Is(err, context.DeadlineExceeded) || s.MovedOn != 0 {
		t.Errorf("%v, %d reads moved on", err, s.MovedOn)
	}
}
