package pgsplit

import (
	"context"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/pgsplit/pgsplit/pgsplittest"
)

// A session that had to read on the primary goes back to replicas once they have what it has seen, though others go on
// writing 1,000 times a second: of the reads that begin within a second after the replicas have caught up nine in ten are
// answered by replicas. What else the machine does can only make that worse, so the best of many rounds counts.
//
// The replicas are always 10 ms behind, and each reader reads every 20 ms: where the primary was when it answered the last
// read they have at the next one, where it is at the next one they do not.
func TestSessionsReadOnReplicasAgainOnceTheyHaveCaughtUp(t *testing.T) {
	for who, readers := range map[string]returning{
		"many sessions": {sessions: sessionsOfARun, readers: readersOfSession},
		"one reader":    {sessions: 1, readers: 1},
	} {
		t.Run(who, func(t *testing.T) {
			readers.monotonicRun, _ = newMonotonicRun(t, direct, nil, pgsplittest.ReplicaSetting("recovery_min_apply_delay", "10ms"))
			readers.run(t)
		})
	}
}

// returning are sessions that are driven to the primary and find their way back.
type returning struct {
	*monotonicRun
	sessions, readers int
}

func (r *returning) run(t *testing.T) {
	t.Helper()
	const wanted = 0.9
	ctx, cancel := context.WithTimeout(context.Background(), 4*time.Minute)
	defer cancel()
	background, stop := context.WithCancel(ctx)
	var all sync.WaitGroup
	defer all.Wait()
	defer stop()
	all.Go(func() {
		if err := r.keepRaising(background); err != nil {
			t.Errorf("writer: %v", err)
		}
	})
	sessions := make([]*Session, r.sessions)
	for i := range sessions {
		sessions[i] = NewSession()
		var seen atomic.Int64
		for range r.readers {
			all.Go(func() {
				for background.Err() == nil {
					r.look(background, sessions[i], &seen)
					pass(background, 20*time.Millisecond)
				}
			})
		}
	}
	best := 0.0
	for end := time.Now().Add(90 * time.Second); best < wanted && time.Now().Before(end); {
		share, rate := r.shareAfterAPause(t, ctx, sessions)
		t.Logf("after the pause %.1f %% of the reads are on replicas, at %.0f writes a second", 100*share, rate)
		best = max(best, share)
	}
	if best < wanted {
		t.Errorf("only %.1f %% of the reads are on replicas in the second after these have caught up", 100*best)
	}
	if err := r.firstFailure.Load(); err != nil { // before the readers are interrupted
		t.Errorf("%d failed, one with: %v", r.failed.Load(), *err)
	}
	if r.back.Load() != 0 {
		t.Errorf("%d reads showed less than an earlier one of their session", r.back.Load())
	}
}

// shareAfterAPause drives the sessions to the primary, lets the replicas catch up, and tells which share of the reads of
// the next second is on replicas, and how many writes a second there were.
func (r *returning) shareAfterAPause(t *testing.T, ctx context.Context, sessions []*Session) (share, writes float64) {
	t.Helper()
	for _, replica := range r.cluster.Replicas {
		if err := replica.PauseReplay(ctx); err != nil {
			t.Fatal(err)
		}
	}
	for i, s := range sessions {
		if _, err := r.db.ExecContext(WithSession(ctx, s), raiseCounter, 1+i); err != nil {
			t.Fatal(err)
		}
	}
	// Those that are under way may still end on a replica.
	onPrimary, replica := r.onPrimary.Load(), r.replica.Load()
	for r.onPrimary.Load() < onPrimary+int64(10*r.sessions*r.readers) {
		if pass(ctx, time.Millisecond); ctx.Err() != nil {
			t.Fatal("the sessions do not read on the primary")
		}
	}
	if n := r.replica.Load() - replica; n > int64(2*r.sessions*r.readers) {
		t.Errorf("%d reads on replicas that lag behind the session's writes", n)
	}
	for _, replica := range r.cluster.Replicas {
		if err := replica.ResumeReplay(ctx); err != nil {
			t.Fatal(err)
		}
	}
	if err := r.cluster.CatchUp(ctx); err != nil {
		t.Fatal(err)
	}
	const window = time.Second
	value := func() (n float64) {
		if err := r.db.QueryRowContext(ctx, "select value from counters where id = 0").Scan(&n); err != nil {
			t.Fatal(err)
		}
		return n
	}
	onPrimary, replica, written := r.onPrimary.Load(), r.replica.Load(), value()
	pass(ctx, window)
	onPrimary, replica = r.onPrimary.Load()-onPrimary, r.replica.Load()-replica
	return float64(replica) / float64(onPrimary+replica), (value() - written) / window.Seconds()
}
