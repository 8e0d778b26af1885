package pgsplit

import (
	"context"
	"fmt"
	"math"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/pgsplit/pgsplit/pgsplittest"
)

// monotonicRun has parallel reads in shared sessions look at a counter that only grows, written by somebody without a
// session, while a nemesis makes the replicas lag, restart or change places. A read that begins after another one of its
// session ended must not show less. One on the primary may: a commit can be visible on a replica for a moment before it is
// on the primary itself (F6).
type monotonicRun struct {
	*floorRun
	inSession func(context.Context, *Session) context.Context
	forget    func(*Session) // what a variant of the session forgets after each read
	labels    []string       // of the replicas: each fourth read asks for one of them, so that sessions move
	fallBack  bool           // each fourth read falls back to the primary
	least     least          // the run does not end before that

	acts, back, ahead, onPrimary atomic.Int64
}

// least is what a run has to see before it proves anything, however fast or slow the machine is.
type least struct{ acts, onReplicas, onPrimary int64 }

func (l least) seenBy(m *monotonicRun) bool {
	return m.acts.Load() >= l.acts && m.replica.Load() >= l.onReplicas && m.onPrimary.Load() >= l.onPrimary
}

const (
	sessionsOfARun   = 8
	readersOfSession = 3
)

func newMonotonicRun(t *testing.T, dsn func(*pgsplittest.Cluster) string, change func(*Connector), opts ...pgsplittest.Option) (*monotonicRun, *Connector) {
	t.Helper()
	f, c := newFloorRun(t, dsn, change, opts...)
	m := &monotonicRun{floorRun: f, inSession: WithSession, forget: func(*Session) {}}
	for _, s := range c.replicas {
		if s.label != "" {
			m.labels = append(m.labels, s.label)
		}
	}
	return m, c
}

// labelled gives each replica its name as its label.
func labelled(c *pgsplittest.Cluster) string {
	dsn := c.Primary.SocketURI()
	for _, replica := range c.Replicas {
		dsn += " " + replica.SocketURI() + "&label=" + replica.Name()
	}
	return dsn
}

// run makes n reads, or more.
func (m *monotonicRun) run(t *testing.T, n int64) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 4*time.Minute)
	defer cancel()
	background, stop := context.WithCancel(ctx)
	var others, all sync.WaitGroup
	others.Go(func() {
		r := rand.New(rand.NewPCG(5, 6))
		for background.Err() == nil {
			if err := m.nemesis(background, r); err != nil && background.Err() == nil {
				t.Errorf("nemesis: %v", err)
				stop()
				return
			}
			m.acts.Add(1)
		}
	})
	others.Go(func() {
		if err := m.keepRaising(background); err != nil {
			t.Errorf("writer: %v", err)
		}
	})
	for range sessionsOfARun {
		session := NewSession()
		var seen atomic.Int64
		for range readersOfSession {
			all.Go(func() {
				for background.Err() == nil && !(m.untilStale && m.back.Load() > 0) &&
					(m.reads.Add(1) <= n || !m.least.seenBy(m)) {
					m.look(ctx, session, &seen)
				}
			})
		}
	}
	all.Wait()
	stop()
	others.Wait()
	for _, replica := range m.cluster.Replicas {
		_ = replica.ResumeReplay(ctx) // it may be the one that was stopped
	}
	if ctx.Err() != nil {
		t.Error("the run did not end in time")
	}
	t.Logf("%d reads, %d on replicas, %d went back, %d on the primary, of which %d were behind a replica, %d failed, %d acts",
		m.reads.Load(), m.replica.Load(), m.back.Load(), m.onPrimary.Load(), m.ahead.Load(), m.failed.Load(), m.acts.Load())
}

// raising raises the first counter, with a commit of its own each time, 1,000 times a second, as far as the primary can. It
// does so inside the server, where the readers take least from it.
const raising = `do $$ declare began timestamptz := clock_timestamp(); begin
	for n in 1 .. 1000000 loop
		update counters set value = value + 1 where id = 0;
		commit;
		perform pg_sleep(extract(epoch from began + n * interval '1 ms' - clock_timestamp()));
	end loop;
end $$`

// keepRaising raises the first counter until ctx ends.
func (m *monotonicRun) keepRaising(ctx context.Context) error {
	conn, err := m.cluster.Primary.Conn(ctx)
	if err != nil {
		return err
	}
	defer conn.Close(context.Background())
	if _, err := conn.PgConn().Exec(ctx, raising).ReadAll(); ctx.Err() == nil {
		return fmt.Errorf("it ended: %w", err)
	}
	return nil
}

// look makes one read. seen is the highest value that the session was shown.
func (m *monotonicRun) look(ctx context.Context, session *Session, seen *atomic.Int64) {
	read := ReadOnly(m.inSession(ctx, session))
	switch {
	case rand.IntN(4) != 0:
	case m.fallBack:
		read = ReadOnly(read, AfterLSN(1<<62))
	case len(m.labels) > 0:
		read = ReadOnly(read, Prefer(m.labels[rand.IntN(len(m.labels))]))
	}
	m.rest.RLock()
	defer m.rest.RUnlock()
	before := seen.Load()
	var value int64
	var onReplica bool
	err := m.db.QueryRowContext(read, readCounter, 0).Scan(&value, &onReplica)
	m.forget(session)
	if err != nil {
		m.failed.Add(1)
		if !brokeOff(err) {
			m.firstFailure.CompareAndSwap(nil, &err)
		}
		return
	}
	if onReplica {
		m.replica.Add(1)
	} else {
		m.onPrimary.Add(1)
	}
	switch {
	case value >= before:
	case onReplica:
		m.back.Add(1)
	default:
		m.ahead.Add(1)
	}
	for known := seen.Load(); value > known && !seen.CompareAndSwap(known, value); known = seen.Load() {
	}
}

// mustHold fails unless no session went back in time and the run saw what it had to.
func (m *monotonicRun) mustHold(t *testing.T, c *Connector) {
	t.Helper()
	if back := m.back.Load(); back != 0 {
		t.Errorf("%d reads showed less than an earlier one of their session", back)
	}
	if err := m.firstFailure.Load(); err != nil {
		t.Errorf("%d failed, one with: %v", m.failed.Load(), *err)
	}
	if !m.least.seenBy(m) {
		t.Errorf("the run proves nothing before %+v", m.least)
	}
	t.Logf("reasons %v", c.Stats().Reasons)
}

// mustBeCaught runs until a session goes back, and fails if none does.
func (m *monotonicRun) mustBeCaught(t *testing.T) {
	t.Helper()
	m.untilStale = true
	m.run(t, math.MaxInt64)
	if m.back.Load() == 0 {
		t.Error("no session went back: this test proves nothing about the driver")
	}
}

// swaps has the one address lead elsewhere: its connections are dealt out anew while one of the replicas lags, or it leads
// to the one that lags alone while the other one restarts (F7, F9).
func (f *floorRun) swaps(ctx context.Context, r *rand.Rand) error {
	i := r.IntN(2)
	lagging, other := f.cluster.Replicas[i], f.cluster.Replicas[1-i]
	if err := lagging.PauseReplay(ctx); err != nil {
		return err
	}
	pass(ctx, time.Duration(5+r.IntN(20))*time.Millisecond)
	restarted := r.IntN(4) == 0
	if restarted {
		if err := other.Stop(ctx, pgsplittest.Immediate); err != nil {
			return err
		}
	} else {
		f.cluster.RoundRobin().CutConnections()
	}
	pass(ctx, time.Duration(5+r.IntN(20))*time.Millisecond)
	if err := lagging.ResumeReplay(ctx); err != nil {
		return err
	}
	if restarted {
		if err := other.Start(ctx); err != nil {
			return err
		}
	}
	pass(ctx, time.Duration(100+r.IntN(100))*time.Millisecond) // connections are made meanwhile
	return nil
}

func TestASessionNeverGoesBackInTimeWhileReplicasArePaused(t *testing.T) {
	for name, dsn := range map[string]func(*pgsplittest.Cluster) string{"two addresses": labelled, "one address": roundRobin} {
		t.Run(name, func(t *testing.T) {
			m, c := newMonotonicRun(t, dsn, nil)
			n := readsOfARun(t) / 12
			m.least = least{acts: 3, onReplicas: n / 4}
			m.run(t, n)
			m.mustHold(t, c)
		})
	}
}

// F7: a restarted replica lets readers in before it is where it was.
func TestASessionNeverGoesBackInTimeWhileReplicasRestart(t *testing.T) {
	m, c := newMonotonicRun(t, labelled, nil)
	n := readsOfARun(t) / 6
	m.nemesis, m.least = m.restarts, least{acts: 3, onReplicas: n / 4}
	m.run(t, n)
	m.mustHold(t, c)
}

func TestASessionNeverGoesBackInTimeWhileItsReplicasChangePlacesBehindOneAddress(t *testing.T) {
	m, c := newMonotonicRun(t, roundRobin, nil)
	n := readsOfARun(t) / 6
	// The one address is down, for all that the driver knows, after each swap.
	m.nemesis, m.least = m.swaps, least{acts: 5, onReplicas: n / 20}
	m.run(t, n)
	m.mustHold(t, c)
}

// What the primary shows of an asynchronous commit may not be flushed yet, so that no replica can have it (F2).
func TestASessionNeverGoesBackInTimeFromThePrimaryToAReplicaUnderOthersAsynchronousCommits(t *testing.T) {
	m, c := newMonotonicRun(t, direct, nil, pgsplittest.PrimarySetting("synchronous_commit", "off"))
	n := readsOfARun(t) / 5
	m.fallBack, m.least = true, least{acts: 3, onReplicas: n / 4, onPrimary: n / 5}
	m.run(t, n)
	m.mustHold(t, c)
}

func TestWithoutASessionReadsGoBackInTime(t *testing.T) {
	m, _ := newMonotonicRun(t, labelled, nil)
	m.inSession = func(ctx context.Context, _ *Session) context.Context { return ctx }
	m.mustBeCaught(t)
}

// keepReaders has a session forget all instances that it read since its seen floor, but for those that keep picks.
func keepReaders(s *Session, keep func([]reader) []reader) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, t := range s.trails {
		t.readers = keep(t.readers)
	}
}

// The rule of the set is that a read is free only if the instance that it would use is the only one that the session read
// since its seen floor. Each variant knows less than that.
func TestASessionThatDoesNotKnowAllTheInstancesThatItReadIsCaught(t *testing.T) {
	for variant, forget := range map[string]func([]reader) []reader{
		"it knows none": func([]reader) []reader { return nil },
		"it knows the one that it read last": func(all []reader) []reader {
			var last []reader
			for _, r := range all {
				if len(last) == 0 || r.ended.After(last[0].ended) {
					last = []reader{r}
				}
			}
			return last
		},
	} {
		t.Run(variant, func(t *testing.T) {
			m, _ := newMonotonicRun(t, labelled, nil)
			m.forget = func(s *Session) { keepReaders(s, forget) }
			m.mustBeCaught(t)
		})
	}
}

// F9. (Restarts catch it only now and then, since reads go elsewhere while a server that lost its connections is looked at.)
func TestASessionThatTellsInstancesByTheirAddressIsCaught(t *testing.T) {
	m, _ := newMonotonicRun(t, roundRobin, byAddress)
	m.nemesis = m.swaps
	m.mustBeCaught(t)
}
