package pgsplit

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/pgsplit/pgsplit/pgsplittest"
)

// callers is how many sessions write and read at the same time; each has a counter of its own.
const callers = counters

// sessionRun lets callers read their own writes while a nemesis makes the replicas lag.
type sessionRun struct {
	*floorRun
	write func(ctx context.Context, caller int) error // raises the caller's counter by one
	dbs   []*sql.DB                                   // by caller; empty: all have the run's

	acts    atomic.Int64          // of the nemesis
	staleOf [callers]atomic.Int64 // stale reads by caller
}

// dbOf is what the caller reads with.
func (s *sessionRun) dbOf(caller int) *sql.DB {
	if len(s.dbs) > 0 {
		return s.dbs[caller]
	}
	return s.db
}

// leastSessionActs is how often the nemesis has to act in a run of sessions.
const leastSessionActs = 3

// ownWrites makes n rounds of a write and two reads of it, or more, as many for each caller, and counts the reads that did
// not show it. It goes on until the nemesis has acted and replicas have served a tenth of the reads of n rounds, or until
// the first stale read if that is all that it has to show.
func (s *sessionRun) ownWrites(t *testing.T, n int64) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 4*time.Minute)
	defer cancel()
	background, stop := context.WithCancel(ctx)
	var others, all sync.WaitGroup
	if s.nemesis != nil {
		others.Go(func() {
			r := rand.New(rand.NewPCG(3, 4))
			for background.Err() == nil {
				if err := s.nemesis(background, r); err != nil && background.Err() == nil {
					t.Errorf("nemesis: %v", err)
					stop()
					return
				}
				s.acts.Add(1)
			}
		})
	}
	goesOn := func(value int64) bool {
		if background.Err() != nil || s.untilStale && s.stale.Load() > 0 {
			return false
		}
		return s.untilStale || value <= n/callers || s.replica.Load() < n/5 || s.nemesis != nil && s.acts.Load() < leastSessionActs
	}
	var rounds atomic.Int64
	for caller := range callers {
		all.Go(func() {
			session := NewSession()
			for value := int64(1); goesOn(value); value++ {
				rounds.Add(1)
				if err := s.write(WithSession(ctx, session), caller); err != nil {
					s.fail(fmt.Errorf("write: %w", err))
					return
				}
				for range 2 {
					var seen int64
					var onReplica bool
					err := s.dbOf(caller).QueryRowContext(ReadOnly(WithSession(ctx, session), MaxWait(10*time.Millisecond)), readCounter, caller).
						Scan(&seen, &onReplica)
					switch {
					case err != nil:
						s.fail(fmt.Errorf("read: %w", err))
						return
					case seen != value:
						s.stale.Add(1)
						s.staleOf[caller].Add(1)
					case onReplica:
						s.replica.Add(1)
					}
				}
				if value%5 != 0 {
					continue
				}
				// The caller's next request comes, at another process.
				token, err := session.Token(ctx)
				if err != nil {
					s.fail(fmt.Errorf("token: %w", err))
					return
				}
				session = SessionFromToken(token)
			}
		})
	}
	all.Wait()
	stop()
	others.Wait()
	for _, replica := range s.cluster.Replicas {
		_ = replica.ResumeReplay(ctx)
	}
	if ctx.Err() != nil {
		t.Error("the run did not end in time")
	}
	if err := s.firstFailure.Load(); err != nil {
		t.Errorf("%d failed, the first with: %v", s.failed.Load(), *err)
	}
	t.Logf("%d rounds, %d reads on replicas, %d stale, %d acts", rounds.Load(), s.replica.Load(), s.stale.Load(), s.acts.Load())
}

func (s *sessionRun) fail(err error) {
	s.failed.Add(1)
	s.firstFailure.CompareAndSwap(nil, &err)
}

const raiseCounter = "update counters set value = value + 1 where id = $1"

// writeSomehow uses each way to write in turn, with each synchronous_commit.
func (s *sessionRun) writeSomehow(ctx context.Context, caller int) error {
	settings := []string{"on", "off", "local", "remote_apply"}
	setting := settings[rand.IntN(len(settings))]
	switch rand.IntN(5) {
	case 0:
		_, err := s.db.ExecContext(ctx, raiseCounter, caller)
		return err
	case 1:
		var value int64
		return s.db.QueryRowContext(ctx, raiseCounter+" returning value", caller).Scan(&value)
	case 2: // for this transaction alone
		return transact(ctx, s.db, func(tx *sql.Tx) error {
			_, err := tx.ExecContext(ctx, "set local synchronous_commit = "+setting)
			if err == nil {
				_, err = tx.ExecContext(ctx, raiseCounter, caller)
			}
			return err
		})
	case 3: // a transaction whose BEGIN knows nothing of the session
		return transact(context.Background(), s.db, func(tx *sql.Tx) error {
			_, err := tx.ExecContext(ctx, raiseCounter, caller)
			return err
		})
	}
	return onConnectionWith(ctx, s.db, setting, caller)
}

// onConnectionWith sets it on the connection, which is not the one that the position is read on.
func onConnectionWith(ctx context.Context, db *sql.DB, setting string, caller int) error {
	conn, err := db.Conn(ctx)
	if err != nil {
		return err
	}
	defer conn.Close()
	_, err = conn.ExecContext(ctx, "set synchronous_commit = "+setting)
	if err == nil {
		_, err = conn.ExecContext(ctx, raiseCounter, caller)
	}
	if err == nil {
		_, err = conn.ExecContext(ctx, "reset synchronous_commit")
	}
	return err
}

func transact(ctx context.Context, db *sql.DB, do func(*sql.Tx) error) error {
	tx, err := db.BeginTx(ctx, nil)
	if err != nil {
		return err
	}
	if err := do(tx); err != nil {
		return errors.Join(err, tx.Rollback())
	}
	return tx.Commit()
}

func newSessionRun(t *testing.T, opts ...pgsplittest.Option) (*sessionRun, *Connector) {
	t.Helper()
	f, c := newFloorRun(t, direct, nil, opts...)
	s := &sessionRun{floorRun: f}
	s.write = s.writeSomehow
	return s, c
}

func TestSessionsSeeTheirOwnWritesHoweverTheyCommit(t *testing.T) {
	for _, setting := range []string{"on", "off"} {
		t.Run("synchronous_commit "+setting, func(t *testing.T) {
			s, c := newSessionRun(t, pgsplittest.PrimarySetting("synchronous_commit", setting))
			n := readsOfARun(t) / 10
			s.ownWrites(t, n)
			if s.stale.Load() != 0 {
				t.Errorf("%d stale reads", s.stale.Load())
			}
			if s.replica.Load() < n/5 {
				t.Errorf("only %d reads on replicas", s.replica.Load())
			}
			t.Logf("%d captures, reasons %v", c.Stats().Captures, c.Stats().Reasons)
		})
	}
}

// With the sessions left out the same run shows stale reads.
func TestWithoutSessionsOwnWritesAreMissed(t *testing.T) {
	s, _ := newSessionRun(t)
	write := s.write
	s.write = func(ctx context.Context, caller int) error {
		return write(context.WithoutCancel(context.Background()), caller)
	}
	s.untilStale = true
	s.ownWrites(t, 0)
	if s.stale.Load() == 0 {
		t.Error("no stale read: the nemesis proves nothing")
	}
}
