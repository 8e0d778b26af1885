package pgsplit

import (
	"context"
	"database/sql"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgsplit/pgsplit/pgsplittest"
)

// synchronousCommits are the values of synchronous_commit, and waysToSetIt those to set one, of which each caller of a run
// has one: caller/len(synchronousCommits) is the way.
var (
	synchronousCommits = []string{"on", "off", "local", "remote_apply"}
	waysToSetIt        = []string{"by role, autocommit", "by role, in a transaction", "by SET on the connection", "by SET LOCAL"}
)

// settingOf is what the caller has set, and how.
func settingOf(caller int) (setting, way string) {
	return synchronousCommits[caller%len(synchronousCommits)], waysToSetIt[caller/len(synchronousCommits)]
}

// asRoles opens the cluster once for each setting, as a role that has it.
func (s *sessionRun) asRoles(t *testing.T, ctx context.Context) (dbs []*sql.DB) {
	t.Helper()
	for _, setting := range synchronousCommits {
		role := "commits_" + setting
		err := s.cluster.Primary.Exec(ctx, fmt.Sprintf(
			"create role %[1]s login; alter role %[1]s set synchronous_commit = %[2]s; grant all on counters to %[1]s", role, setting))
		if err != nil {
			t.Fatal(err)
		}
		db, err := sql.Open("pgsplit", strings.ReplaceAll(direct(s.cluster), "user=postgres", "user="+role))
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = db.Close() })
		db.SetMaxIdleConns(callers)
		var inForce string
		if err := db.QueryRowContext(ctx, "show synchronous_commit").Scan(&inForce); err != nil || inForce != setting {
			t.Fatalf("%s commits with %q: %v", role, inForce, err)
		}
		dbs = append(dbs, db)
	}
	if err := s.cluster.CatchUp(ctx); err != nil {
		t.Fatal(err)
	}
	return dbs
}

// writeWithItsSetting has the caller write as settingOf says.
func (s *sessionRun) writeWithItsSetting(ctx context.Context, caller int) error {
	raise := func(tx *sql.Tx) error {
		_, err := tx.ExecContext(ctx, raiseCounter, caller)
		return err
	}
	db := s.dbOf(caller)
	switch setting, way := settingOf(caller); way {
	case "by role, autocommit":
		_, err := db.ExecContext(ctx, raiseCounter, caller)
		return err
	case "by role, in a transaction":
		return transact(ctx, db, raise)
	case "by SET LOCAL":
		return transact(ctx, db, func(tx *sql.Tx) error {
			if _, err := tx.ExecContext(ctx, "set local synchronous_commit = "+setting); err != nil {
				return err
			}
			return raise(tx)
		})
	default:
		return onConnectionWith(ctx, db, setting, caller)
	}
}

// neighbours keeps two transactions of others open for the time of the test: one is idle, and one goes on writing. Now and
// then they end and others begin, so that the server can clean up behind the callers' updates.
func (s *sessionRun) neighbours(t *testing.T) {
	t.Helper()
	const write = "select pg_logical_emit_message(true, 'pgsplit test', repeat('x', 500))"
	connect := func() *pgx.Conn {
		ctx := context.Background()
		conn, err := s.cluster.Primary.Conn(ctx)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = conn.Close(ctx) })
		return conn
	}
	idle, busy := connect(), connect()
	ctx, stop := context.WithCancel(context.Background())
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		for n := 0; ctx.Err() == nil; n++ {
			var err error
			if n%250 == 0 {
				_, err = idle.Exec(ctx, "rollback; begin; "+write)
				if err == nil {
					_, err = busy.Exec(ctx, "rollback; begin")
				}
			}
			if err == nil {
				_, err = busy.Exec(ctx, write)
			}
			if err != nil && ctx.Err() == nil {
				t.Errorf("a neighbour: %v", err)
				return
			}
			pass(ctx, time.Millisecond)
		}
	}()
	t.Cleanup(func() {
		stop()
		<-ended
	})
}

// Each setting gets a fifth of the reads of a full run, set in every way, while others' transactions are open.
func TestSessionsSeeTheirOwnWritesHoweverSynchronousCommitIsSet(t *testing.T) {
	// A commit that waits for a standby waits for one of two: the session may read on the other one.
	s, c := newSessionRun(t, pgsplittest.PrimarySetting("synchronous_standby_names", "ANY 1 (replica1, replica2)"))
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	roles := s.asRoles(t, ctx)
	for caller := range callers {
		db := s.db
		if _, way := settingOf(caller); strings.HasPrefix(way, "by role") {
			db = roles[caller%len(synchronousCommits)]
		}
		s.dbs = append(s.dbs, db)
	}
	s.write = s.writeWithItsSetting
	s.neighbours(t)
	n := readsOfARun(t) / 5 * int64(len(synchronousCommits)) / 2
	s.ownWrites(t, n)
	for caller := range callers {
		if stale := s.staleOf[caller].Load(); stale != 0 {
			setting, way := settingOf(caller)
			t.Errorf("%d stale reads with synchronous_commit = %s %s", stale, setting, way)
		}
	}
	if s.replica.Load() < n/5 {
		t.Errorf("only %d reads on replicas", s.replica.Load())
	}
	t.Logf("%d captures, reasons %v", c.Stats().Captures, c.Stats().Reasons)
}
