package pgsplit_test

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgsplit/pgsplit"
	"github.com/pgsplit/pgsplit/pgsplittest"
)

// Replicas that take their time, and callers that have little.

// served is how many callers with a deadline of 300 ms get an answer, at once or one after the other.
func served(ctx context.Context, db *sql.DB, callers int, atOnce bool) int {
	var n atomic.Int64
	var wg sync.WaitGroup
	for range callers {
		call := func() {
			ctx, cancel := context.WithTimeout(pgsplit.ReadOnly(ctx), 300*time.Millisecond)
			defer cancel()
			var s string
			if db.QueryRowContext(ctx, inRecovery).Scan(&s) == nil {
				n.Add(1)
			}
		}
		if atOnce {
			wg.Go(call)
		} else {
			call()
		}
	}
	wg.Wait()
	return int(n.Load())
}

// All of these callers come before the first time limit of the driver's own has ended. On a slow machine many may fail.
func TestCallersWith300msAreServedThoughAReplicaIsSilentThatHasNoConnectionYet(t *testing.T) {
	t.Parallel() // it mostly waits
	cluster := pgsplittest.Start(t, pgsplittest.Replicas(1))
	ctx := patient(t)
	db := open(t, with(cluster.ProxyDSN(), "replica_timeout=1h"))
	exec(t, ctx, db, "select 1")
	exec(t, pgsplit.ReadOnly(ctx), open(t, cluster.Primary.URI()), "select 1")
	cluster.Replicas[0].Proxy().BlackHole()
	eventually(t, "a caller with 300 ms is served", func() bool { return served(ctx, db, 5, false) > 0 })
	s := replicaStats(t, db)
	if s.Failures != 0 {
		t.Errorf("what the callers' own deadlines ended was held against the server: %+v", s)
	}
	if n := cluster.Replicas[0].Proxy().Accepted(); n > 3 {
		t.Errorf("%d connections were begun for callers one after the other", n)
	}
}

// inRecoverySlowly answers after so many seconds.
const inRecoverySlowly = `select pg_is_in_recovery()::text from pg_sleep($1)`

func TestASlowServerThatLivesIsWaitedFor(t *testing.T) {
	t.Parallel() // it mostly waits
	cluster := pgsplittest.Start(t, pgsplittest.Replicas(1))
	for name, limits := range map[string]func(unit time.Duration) (timeout, deadline time.Duration){
		"callers who wait":               func(unit time.Duration) (timeout, deadline time.Duration) { return unit, time.Minute },
		"a deadline that is long enough": func(unit time.Duration) (timeout, deadline time.Duration) { return time.Minute, 9 * unit },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			inLongerAndLonger(t, 100*time.Millisecond, func(unit time.Duration) error {
				timeout, deadline := limits(unit)
				db := open(t, with(cluster.DSN(), "replica_timeout="+timeout.String()))
				defer db.Close()
				warm(t, patient(t), db)
				before := replicaStats(t, db)
				ctx, cancel := context.WithTimeout(context.Background(), deadline)
				defer cancel()
				var where string
				err := db.QueryRowContext(pgsplit.ReadOnly(ctx), inRecoverySlowly, (5 * unit).Seconds()).Scan(&where)
				s := replicaStats(t, db)
				eventually(t, "it is healthy", func() bool { return replicaStats(t, db).State == "healthy" })
				if probes := s.Probes - before.Probes; err != nil || where != "true" || s.MovedOn != before.MovedOn ||
					s.Failures != before.Failures || s.Statements != before.Statements+1 || probes < 1 || probes > 3 {
					return fmt.Errorf("in recovery %q, %v: %+v, before %+v", where, err, s, before)
				}
				return nil
			})
		})
	}
}

// Connections that were good a moment ago do not cost their callers all of the deadline.
func TestCallersWith300msAreServedThoughAReplicaHasGoneSilentThatHasConnections(t *testing.T) {
	cluster := pgsplittest.Start(t, pgsplittest.Replicas(1))
	ctx := patient(t)
	const callers = 10
	inOneOf(t, 5, func() error {
		db := open(t, cluster.ProxyDSN())
		defer db.Close()
		defer cluster.Replicas[0].Proxy().Restore()
		idleAt(t, ctx, db, callers)
		cluster.Replicas[0].Proxy().BlackHole()
		n := served(ctx, db, callers, true)
		s := replicaStats(t, db)
		t.Logf("%d of %d were served; %d began on the replica", n, callers, s.Statements)
		if n == 0 {
			return errors.New("no caller with 300 ms was served")
		}
		return nil
	})
}

// A server that answers that it is full lives, and so does one that lets nobody in and answers on a connection at hand: what it
// is at work on takes its time.
func TestASlowReadIsWaitedForWhereNoNewConnectionIsLetIn(t *testing.T) {
	t.Parallel() // it mostly waits
	cluster := pgsplittest.Start(t, pgsplittest.Replicas(1))
	ctx := patient(t)
	dsn, fronts := frontsOf(t, cluster)
	for _, c := range []condition{full, dead} {
		t.Run(c.String(), func(t *testing.T) {
			inLongerAndLonger(t, 100*time.Millisecond, func(unit time.Duration) error {
				fronts[1].is(up)
				db := open(t, with(dsn, "replica_timeout="+unit.String()))
				defer db.Close()
				idleAt(t, ctx, db, 2)
				before := replicaStats(t, db)
				fronts[1].is(c)
				where := text(t, pgsplit.ReadOnly(ctx), db, inRecoverySlowly, (5 * unit).Seconds())
				if s := replicaStats(t, db); where != "true" || s.MovedOn != before.MovedOn || s.State != "refusing" {
					return fmt.Errorf("in recovery %s: %+v", where, s)
				}
				return nil
			})
		})
	}
}

// What Raw does takes as long as it likes: the read after it is watched from when it is sent.
func TestAReadAfterALongRawIsNotLate(t *testing.T) {
	t.Parallel() // it mostly waits
	cluster := pgsplittest.Start(t, pgsplittest.Replicas(1))
	ctx := patient(t)
	read := pgsplit.ReadOnly(ctx)
	inLongerAndLonger(t, 200*time.Millisecond, func(unit time.Duration) error {
		db := open(t, with(cluster.DSN(), "replica_timeout="+unit.String()))
		defer db.Close()
		warm(t, ctx, db)
		conn, err := db.Conn(ctx)
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		before := replicaStats(t, db)
		err = pgsplit.Raw(read, conn, func(c *pgx.Conn) error {
			_, err := c.Exec(ctx, "select pg_sleep($1)", (2 * unit).Seconds())
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
		var where string
		err = conn.QueryRowContext(read, inRecoverySlowly, (unit / 4).Seconds()).Scan(&where)
		if s := replicaStats(t, db); err != nil || where != "true" || s.Probes != before.Probes || s.Statements != before.Statements+2 {
			return fmt.Errorf("in recovery %q, %v: %+v, before %+v", where, err, s, before)
		}
		return nil
	})
}

// A server is let in to while its next probe is still far away. Doubted then, it is probed at once.
func TestASlowReadIsWaitedForThoughAProbeOfFormerTroubleIsStillDue(t *testing.T) {
	t.Parallel() // it mostly waits
	cluster := pgsplittest.Start(t, pgsplittest.Replicas(1))
	ctx := patient(t)
	proxy := cluster.Replicas[0].Proxy()
	inLongerAndLonger(t, 100*time.Millisecond, func(unit time.Duration) error {
		db := open(t, with(cluster.ProxyDSN(), "replica_timeout="+unit.String(), "replica_retry_min=30s", "replica_retry_max=30s"))
		defer db.Close()
		exec(t, ctx, db, "select 1")
		proxy.SetDelay(8 * unit / 5)
		if where := text(t, pgsplit.ReadOnly(ctx), db, inRecovery); where != "false" { // it takes too long to let the read in
			return fmt.Errorf("it let the read in: %s", where)
		}
		proxy.SetDelay(0)
		eventually(t, "the connection has come", func() bool { return replicaStats(t, db).State == "healthy" })
		where := text(t, pgsplit.ReadOnly(ctx), db, inRecoverySlowly, (5 * unit).Seconds())
		if s := replicaStats(t, db); where != "true" || s.MovedOn != 0 || s.State != "healthy" {
			return fmt.Errorf("in recovery %s: %+v", where, s)
		}
		return nil
	})
}
