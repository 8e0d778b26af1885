package pgsplit

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"math"
	"slices"
	"sync"
	"sync/atomic"
	"time"
)

// unproven is a floor that no server has: what had to be proven could not be asked.
const unproven = ^LSN(0)

// CommitLSN returns a position that covers every commit that returned before the call, on whichever connection and with
// whatever synchronous_commit. Reads with it as their floor (WithLSN) see those commits. It asks the primary: one round
// trip, two if something was not flushed yet.
//
// db may be any sql.DB over this driver, behind wrappers too.
func CommitLSN(ctx context.Context, db *sql.DB) (LSN, error) {
	var lsn LSN
	e := &errand{do: func(ctx context.Context, c *Conn) error {
		return c.run(ctx, work{harmless: true}, func(ctx context.Context, p *physical, _ bool) (err error) {
			lsn, err = p.covering(ctx)
			return err
		})
	}}
	if err := e.send(Primary(ctx), db.PingContext); err != nil {
		return 0, err
	}
	return lsn, nil
}

// floors adds to the request what the read has to see: what the caller has seen, and what the bounds on staleness ask.
func (c *Connector) floors(ctx context.Context, r *request, h *Hint) {
	r.join(floor{lsn: h.Floor})
	c.keep(ctx, r, h.scope)
	if h.MaxStaleness > 0 {
		r.join(c.positionBefore(ctx, h.MaxStaleness))
	}
	if len(c.replicas) == 0 {
		return
	}
	if c.config.MaxLag > 0 {
		if at := c.positionBefore(ctx, c.config.MaxLag); at.lsn != unproven {
			r.soften(at)
		}
	}
	if bytes := LSN(c.config.MaxLagBytes); bytes > 0 {
		if at := c.positionBefore(ctx, lagBytesSample); at.lsn != unproven && at.lsn > bytes {
			r.soften(floor{at.timeline, at.lsn - bytes})
		}
	}
}

// lagBytesSample is how old the primary's position may be that replica_max_lag_bytes counts from.
const lagBytesSample = time.Second

// samples remembers where the primary was when. An instance that has replayed the position of a sample lags no more
// than the sample's age, by this process's clock alone (F11).
type samples struct {
	timeline atomic.Uint32 // that of the primary, the highest one seen; written under mu

	mu     sync.Mutex
	system uint64   // whose timeline it is; guarded by mu
	kept   []sample // oldest first; guarded by mu
}

// keptSamples is how many are kept, however often the primary is asked: the older they are the further apart.
const keptSamples = 64

// current is the highest timeline of a primary that was met.
func (s *samples) current() uint32 { return s.timeline.Load() }

// follow forgets the samples of timelines that have ended: a failover has put their primary aside. Those of another cluster
// say nothing of this one: a program may outlive an upgrade that moves its address to a new cluster. It tells which timeline was
// the highest before.
func (s *samples) follow(system uint64, timeline uint32) (before uint32) {
	s.mu.Lock()
	defer s.mu.Unlock()
	before = s.timeline.Load()
	if timeline > before || s.system != 0 && system != s.system {
		s.timeline.Store(timeline)
		s.kept = nil
	}
	s.system = system
	return before
}

type sample struct {
	at time.Time // before the primary was asked
	floor
	id *identity // who was asked
}

// newest is the latest sample, or the zero one.
func (s *samples) newest() sample {
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.kept) == 0 {
		return sample{}
	}
	return s.kept[len(s.kept)-1]
}

func (s *samples) add(v sample) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if v.timeline < s.timeline.Load() {
		return
	}
	i := len(s.kept)
	for i > 0 && s.kept[i-1].at.After(v.at) { // who asked later may be told before
		i--
	}
	s.kept = slices.Insert(s.kept, i, v)
	if len(s.kept) > keptSamples {
		s.thin()
	}
}

// thin forgets the sample that is missed least: its neighbours are closest together, for their age. What is left lies evenly
// over the orders of magnitude, so that any age has a sample that is not much younger. mu is held.
func (s *samples) thin() {
	missed, least := 1, math.Inf(1)
	newest := s.kept[len(s.kept)-1].at
	for i := 1; i < len(s.kept)-1; i++ {
		before, after := s.kept[i-1].at, s.kept[i+1].at
		if gap := float64(after.Sub(before)) / float64(newest.Sub(before)+1); gap < least {
			missed, least = i, gap
		}
	}
	s.kept = slices.Delete(s.kept, missed, missed+1)
}

// covered is when the newest sample of the timeline was taken that a position covers; zero: none is covered.
func (s *samples) covered(timeline uint32, lsn LSN) (at time.Time) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, v := range s.kept {
		if v.lsn != 0 && v.lsn <= lsn && v.timeline == timeline {
			at = later(at, v.at)
		}
	}
	return at
}

// within finds the oldest sample that is no older than age, and how old the newest one is.
func (s *samples) within(now time.Time, age time.Duration) (oldest sample, newest time.Duration) {
	s.mu.Lock()
	defer s.mu.Unlock()
	newest = math.MaxInt64
	for i, v := range slices.Backward(s.kept) {
		if i == len(s.kept)-1 {
			newest = now.Sub(v.at)
		}
		if v.lsn == 0 || now.Sub(v.at) > age {
			break
		}
		oldest = v
	}
	return oldest, newest
}

// positionBefore is a position that whoever has replayed it lags age at most. It asks the primary only when the newest
// sample is older than a quarter of age, one caller at a time, so that replicas get time to reach a sample before it is
// needed. It is unproven if the primary does not answer.
func (c *Connector) positionBefore(ctx context.Context, age time.Duration) floor {
	now := time.Now()
	oldest, newest := c.samples.within(now, age)
	switch {
	case oldest.lsn == 0:
		asked, err := c.samplePrimary(ctx, now.Add(-age))
		if err != nil {
			return floor{lsn: unproven}
		}
		return asked.floor
	case newest > age/4 && len(c.asking) == 0:
		_, _ = c.samplePrimary(ctx, now.Add(-age/4)) // for later reads; this one has its proof
	}
	return oldest.floor
}

// samplePrimary asks the primary where it is, unless another one has been told after the given time.
func (c *Connector) samplePrimary(ctx context.Context, after time.Time) (sample, error) {
	var v sample
	known := func() bool {
		v = c.samples.newest()
		return v.at.After(after)
	}
	err := c.askPrimary(ctx, known, func(ctx context.Context, p *physical) (err error) {
		v, err = p.sample(ctx)
		return err
	})
	return v, err
}

// sample notes where the primary is now.
func (p *physical) sample(ctx context.Context) (sample, error) {
	v := sample{at: time.Now()}
	lsn, err := p.covering(ctx)
	if err != nil {
		return v, err
	}
	v.floor, v.id = floor{p.id.timeline, lsn}, &p.id
	p.server.connector.samples.add(v)
	return v, nil
}

// errand is something that the driver does with a shell of its own: sql.DB's Ping carries it there through every
// wrapper that passes the context on.
type errand struct {
	do  func(context.Context, *Conn) error
	ran bool
}

type errandKey struct{}

func errandOf(ctx context.Context) *errand {
	e, _ := ctx.Value(errandKey{}).(*errand)
	return e
}

var errNotOurs = errors.New("pgsplit: this is not a connection of this driver, or a wrapper hides its Pinger")

func (e *errand) send(ctx context.Context, ping func(context.Context) error) error {
	do := e.do
	e.do = func(ctx context.Context, c *Conn) error {
		e.ran = true
		return do(ctx, c)
	}
	if err := ping(context.WithValue(ctx, errandKey{}, e)); err != nil {
		return err
	}
	if !e.ran {
		return errNotOurs
	}
	return nil
}

// FromDB returns the Connector behind a sql.DB that was opened with this driver, wrapped or not.
func FromDB(db *sql.DB) (*Connector, error) {
	if d, ok := db.Driver().(*Driver); ok && d.connector != nil {
		return d.connector, nil
	}
	var found *Connector
	e := &errand{do: func(_ context.Context, c *Conn) error {
		found = c.connector
		return nil
	}}
	ctx, cancel := context.WithTimeout(context.Background(), findTimeout)
	defer cancel()
	if err := e.send(ctx, db.PingContext); err != nil {
		return nil, fmt.Errorf("pgsplit: no connector found behind %T: %w", db.Driver(), err)
	}
	return found, nil
}

// findTimeout bounds how long FromDB waits for one of the sql.DB's connections when all are in use.
const findTimeout = 5 * time.Second
