package pgsplit_test

import (
	"context"
	"database/sql"
	"fmt"
	"io"
	"strings"
	"testing"

	"github.com/pgsplit/pgsplit"
	"github.com/pgsplit/pgsplit/pgsplittest"
)

// One address can lead to several replicas (F9), and a new connection to another one than those at hand.

// openRows begins a read on a connection of its own, which stays in use until the rows are closed.
func openRows(t testing.TB, ctx context.Context, db *sql.DB) (rows *sql.Rows, server string) {
	t.Helper()
	rows, err := db.QueryContext(ctx, whichServer+" from generate_series(1, 100000)")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = rows.Close() })
	if !rows.Next() {
		t.Fatal(rows.Err())
	}
	if err := rows.Scan(&server); err != nil {
		t.Fatal(err)
	}
	return rows, server
}

func readToTheEnd(t testing.TB, rows *sql.Rows) {
	t.Helper()
	for rows.Next() {
	}
	if err := rows.Err(); err != nil {
		t.Error(err)
	}
	if err := rows.Close(); err != nil {
		t.Error(err)
	}
}

func whoAnswers(t testing.TB, ctx context.Context, db *sql.DB) (server string) {
	t.Helper()
	if err := db.QueryRowContext(ctx, whichServer).Scan(&server); err != nil {
		t.Error(err)
	}
	return server
}

func TestWhenNoNewConnectionIsLetInThoseAtHandServeAsLongAsTheyAnswer(t *testing.T) {
	cluster := pgsplittest.Start(t, pgsplittest.Replicas(1))
	ctx := patient(t)
	read := pgsplit.ReadOnly(ctx)
	for _, c := range []condition{dead, starting} {
		t.Run(c.String(), func(t *testing.T) {
			dsn, fronts := frontsOf(t, cluster)
			db := open(t, with(dsn, "replica_timeout=20s", "replica_retry_max=250ms"))
			replica := func() pgsplit.ServerStats { return connectorOf(t, db).Stats().Servers[1] }
			idleAt(t, ctx, db, 2)
			rows, _ := openRows(t, read, db)
			waiting, leave := context.WithCancel(read)
			defer leave()
			left := make(chan struct{})
			go func() {
				defer close(left)
				_, _ = db.ExecContext(waiting, asleepOnReplica) // until it is cancelled
			}()
			eventually(t, "both connections are in use", func() bool { return replica().InUse == 2 })
			fronts[1].is(c)
			if _, server := openRows(t, read, db); server != "primary" {
				t.Errorf("a third read is served by %s", server)
			}
			eventually(t, "the replica was probed", func() bool { return replica().Probes > 1 })
			if state := replica().State; state != "suspect" {
				t.Errorf("with a read in flight the replica is %s", state)
			}
			leave()
			<-left
			readToTheEnd(t, rows)
			eventually(t, "the connection at hand was asked", func() bool { return replica().State == "refusing" })
			for range 5 {
				if server := whoAnswers(t, read, db); server != "replica1" {
					t.Errorf("a read is served by %s", server)
				}
			}
			fronts[1].is(up)
			eventually(t, "it lets in again", func() bool { return replica().State == "healthy" })
			fronts[1].is(c)
			fronts[1].drop()
			eventually(t, "it is down when those at hand are gone, too", func() bool {
				whoAnswers(t, read, db)
				return replica().State == "down"
			})
		})
	}
}

func TestWhenNewConnectionsAreNotAnsweredThoseAtHandServe(t *testing.T) {
	cluster := pgsplittest.Start(t, pgsplittest.Replicas(1))
	ctx := patient(t)
	read := pgsplit.ReadOnly(ctx)
	inOneOf(t, 3, func() error {
		dsn, fronts := frontsOf(t, cluster)
		db := open(t, with(dsn, "replica_timeout=1s"))
		idleAt(t, ctx, db, 1)
		rows, _ := openRows(t, read, db)
		fronts[1].is(silent)
		if _, server := openRows(t, read, db); server != "primary" {
			return fmt.Errorf("a second read is served by %s", server)
		}
		readToTheEnd(t, rows)
		eventually(t, "the connection at hand was asked", func() bool { return connectorOf(t, db).Stats().Servers[1].State == "refusing" })
		if server := whoAnswers(t, read, db); server != "replica1" {
			return fmt.Errorf("a read is served by %s", server)
		}
		return nil
	})
}

func TestADeadServerBehindASharedAddressFailsNoNewConnection(t *testing.T) {
	cluster := pgsplittest.Start(t, pgsplittest.Replicas(1))
	read := pgsplit.ReadOnly(patient(t))
	for _, c := range []condition{dead, starting} {
		t.Run(c.String(), func(t *testing.T) {
			dsn, fronts := frontsOf(t, cluster, dead)
			db := open(t, with(dsn, "replica_timeout=20s"))
			openRows(t, read, db)
			fronts[1].shared.Store(true)
			fronts[1].is(c)
			for range 6 {
				openRows(t, read, db)
			}
			if s := connectorOf(t, db).Stats().Servers[1]; s.State != "healthy" || s.Probes != 0 {
				t.Errorf("the replica is %s after %d probes", s.State, s.Probes)
			}
		})
	}
}

// The connections at hand may lead to several servers, and the one used last to one that has gone silent.
func TestAConnectionAtHandThatIsSilentDoesNotHideOneThatAnswers(t *testing.T) {
	cluster := pgsplittest.Start(t, pgsplittest.Replicas(2))
	ctx := patient(t)
	only := pgsplit.ReadOnly(ctx, pgsplit.ReplicaOnly())
	silenced := cluster.Replicas[0].Proxy()
	inOneOf(t, 3, func() error {
		silenced.Restore()
		shared := newFront(t, cluster.Replicas[1], up)
		uri := strings.Replace(cluster.Replicas[1].URI(), shared.target, shared.listener.Addr().String(), 1)
		db := open(t, with(cluster.Primary.URI()+" "+uri, "replica_timeout=2s", "replica_retry_min=1h", "replica_retry_max=1h"))
		defer db.Close()
		good := hold(t, ctx, db)
		want(t, only, good, whichServer, "replica2")
		address := silenced.Addr()
		shared.leads.Store(&address)
		last := hold(t, ctx, db)
		want(t, only, last, whichServer, "replica1")
		closeAll(t, []*sql.Conn{good, last})
		silenced.BlackHole()
		defer silenced.Restore()
		shared.is(dead)
		replica := func() pgsplit.ServerStats { return replicaStats(t, db) }
		connectorOf(t, db).ReportError(replica().Name, io.ErrUnexpectedEOF)
		eventually(t, "those at hand were asked", func() bool { return replica().State != "suspect" })
		if s := replica(); s.State != "refusing" || s.Idle != 1 {
			return fmt.Errorf("the replica is %s, with %d connections idle", s.State, s.Idle)
		}
		want(t, only, db, whichServer, "replica2")
		return nil
	})
}

// A probe takes no connection from those who use it, and closes none that was in use when it looked.
func TestTheOnlyConnectionAtHandServesUnderProbesThatAreNotLetIn(t *testing.T) {
	cluster := pgsplittest.Start(t, pgsplittest.Replicas(1))
	ctx := patient(t)
	dsn, fronts := frontsOf(t, cluster)
	db := open(t, with(dsn, "replica_timeout=20s", "replica_retry_min=1ms", "replica_retry_max=1ms"))
	db.SetMaxOpenConns(1)
	only := pgsplit.ReadOnly(ctx, pgsplit.ReplicaOnly())
	want(t, only, db, whichServer, "replica1")
	fronts[1].is(dead)
	connectorOf(t, db).ReportError(replicaStats(t, db).Name, io.ErrUnexpectedEOF)
	eventually(t, "it was asked", func() bool { return replicaStats(t, db).State == "refusing" })
	for probed := replicaStats(t, db).Probes; replicaStats(t, db).Probes < probed+100 && !t.Failed(); {
		if server := whoAnswers(t, only, db); server != "replica1" {
			t.Errorf("a read is served by %q, the replica is %s", server, replicaStats(t, db).State)
		}
	}
}
