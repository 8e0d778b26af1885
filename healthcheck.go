package pgsplit

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"time"
)

// Health is how the servers are, as each of them answers now. Its JSON has stable names, durations in seconds, and no
// password.
type Health struct {
	// Status is "ok" if the primary takes writes and every replica serves reads, however far behind, "down" if no server
	// does either, else "degraded".
	Status string `json:"status"`
	// Readable: ReadOnly reads without a floor are served.
	Readable bool `json:"readable"`
	// Writable: the primary takes writes.
	Writable bool `json:"writable"`
	// Servers has the primary first, then the replicas in the order of the configuration.
	Servers []ServerHealth `json:"servers"`
}

// The values of Health.Status.
const (
	statusOK       = "ok"
	statusDegraded = "degraded"
	statusDown     = "down"
)

// ServerHealth is how one server is.
type ServerHealth struct {
	Name  string `json:"name"`
	Role  string `json:"role"` // "primary" or "replica", as configured
	Label string `json:"label,omitempty"`

	// State, Since and Cause are what the driver makes of it, as in ServerStats: it may be "healthy" until a request meets
	// with what this look has met.
	State string    `json:"state"`
	Since time.Time `json:"since,omitzero"`
	Cause string    `json:"cause,omitempty"`

	// Reachable: a new connection was let in just now and answered. If not, Error says why.
	Reachable bool   `json:"reachable"`
	Error     string `json:"error,omitempty"`

	// Seen is what answered: "primary", or "replica" if it is in recovery; empty if nothing did.
	Seen string `json:"seen,omitempty"`
	// Timeline is the one that it writes or follows; 0: not told.
	Timeline uint32 `json:"timeline,omitempty"`
	// Position is how far a replica has replayed, or what a primary has flushed; zero: not told.
	Position LSN `json:"position,omitempty"`
	// LagBytes is what a replica has not replayed of what the primary had flushed a moment before. -1: not known.
	LagBytes int64 `json:"lag_bytes"`
	// Staleness is how much a replica lags at most, as far as is proven; zero on a primary. Below zero, -1 in JSON: nothing
	// is proven.
	Staleness time.Duration `json:"-"`

	Open  int `json:"open"`   // connections of this program, open or being opened, idle ones included
	InUse int `json:"in_use"` // connections leased now
	Idle  int `json:"idle"`   // connections at rest

	// RoundTrip is how long one question took on a connection at hand; zero if none was answered.
	RoundTrip time.Duration `json:"-"`
}

// MarshalJSON implements json.Marshaler: durations are seconds.
func (s ServerHealth) MarshalJSON() ([]byte, error) {
	type plain ServerHealth
	staleness := s.Staleness.Seconds()
	if s.Staleness < 0 {
		staleness = -1
	}
	return json.Marshal(struct {
		plain
		Staleness float64 `json:"staleness_seconds"`
		RoundTrip float64 `json:"round_trip_seconds"`
	}{plain(s), staleness, s.RoundTrip.Seconds()})
}

// Health asks every server at the same time how it is, each over a new connection of the kind that probes use
// (application_name "pgsplit probe"), and returns when all have answered, after replica_timeout, or when ctx ends,
// whichever comes first; who has not answered by then is not reachable. Calls at the same time share one look at each server.
//
// A look tells the driver what a probe would: a server that lets it in is readmitted, one that refuses it or is gone gets no
// requests. One that does not answer in time is probed. That ctx ends is held against nobody. Nothing is written.
// Each server has to have room for one connection more than the program's own: one without room is "refusing", and usable as
// long as the program has connections to it.
func (c *Connector) Health(ctx context.Context) Health {
	primary := c.primary.look(nil)
	looks := []*look{primary}
	for _, s := range c.replicas {
		looks = append(looks, s.look(primary))
	}
	answers := make([]answer, len(looks))
	i := 0
	for s := range c.servers {
		answers[i] = s.result(ctx, looks[i])
		i++
	}
	return c.diagnose(answers)
}

// look is one look at a server, for all who want one at the same time. It ends after replica_timeout, with the connector,
// and with the last shell unless somebody waits for it.
type look struct {
	cancel  context.CancelFunc
	over    <-chan struct{} // closed when its time is over
	done    chan struct{}   // closed once the answer is there
	waiting int             // guarded by server.mu
	answer  answer
}

// answer is what a look has met.
type answer struct {
	err       error
	pooled    bool
	inTouch   bool // it said who it is
	standby   bool
	timeline  uint32
	position  LSN
	roundTrip time.Duration
}

// look joins the look at the server that is under way, or begins one. A replica is asked where it is after the primary was,
// if that answers soon: one that has all that there is is seen to have it.
func (s *server) look(primary *look) *look {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.looking != nil {
		s.looking.waiting++
		return s.looking
	}
	l := &look{done: make(chan struct{}), waiting: 1}
	if s.closed {
		l.cancel, l.answer.err = func() {}, errClosed
		close(l.done)
		return l
	}
	limit := s.connector.config.ReplicaTimeout
	var ctx context.Context
	ctx, l.cancel = context.WithTimeout(context.Background(), limit)
	l.over = ctx.Done()
	s.looking = l
	go func() {
		l.answer.err = errHookLeft
		defer func() {
			l.cancel()
			s.mu.Lock()
			if s.looking == l {
				s.looking = nil
			}
			s.mu.Unlock()
			close(l.done)
		}()
		l.answer = s.ask(ctx, primary, limit/2)
	}()
	return l
}

// result waits for the look, as long as ctx says.
func (s *server) result(ctx context.Context, l *look) answer {
	defer func() {
		s.mu.Lock()
		l.waiting--
		s.mu.Unlock()
	}()
	select {
	case <-l.done:
		return l.answer
	default:
	}
	select {
	case <-l.done:
		return l.answer
	case <-l.over:
	case <-ctx.Done():
		return answer{err: fmt.Errorf("pgsplit: %s: no answer yet: %w", s, ctx.Err())}
	}
	// It says why in a moment, unless a hook or a dialer does not care that the time is over.
	soon, cancel := context.WithTimeout(ctx, lookGrace)
	defer cancel()
	select {
	case <-l.done:
		return l.answer
	case <-soon.Done():
		return answer{err: fmt.Errorf("pgsplit: %s: %w", s, errNoReply)}
	}
}

// lookGrace is what a look whose time is over gets to say so.
const lookGrace = 250 * time.Millisecond

// endLook ends the look that is under way, unless somebody waits and the server stays open. mu is held.
func (s *server) endLook() {
	if l := s.looking; l != nil && (s.closed || l.waiting == 0) {
		l.cancel()
		s.looking = nil
	}
}

// ask connects, and asks where the server is.
func (s *server) ask(ctx context.Context, primary *look, patience time.Duration) (a answer) {
	p, err := s.open(ctx, s.usualAccess(), true)
	s.looked(ctx, err)
	if err != nil {
		a.err = err
		return a
	}
	defer p.close()
	a.inTouch, a.pooled, a.standby, a.timeline = p.id.version != 0, p.id.pooled, p.id.inRecovery, p.id.timeline
	if primary != nil {
		soon, cancel := context.WithTimeout(ctx, patience)
		defer cancel()
		select {
		case <-primary.done:
		case <-soon.Done():
		}
	}
	began := time.Now()
	a.err = contained("a question", func() error { // it calls functions of the configuration, such as OnNotice
		if p.id.inRecovery {
			a.position, err = p.askSimply(ctx)
			if err == nil {
				p.saw(a.position)
			}
			return err
		}
		a.position, err = p.report(ctx)
		return err
	})
	a.roundTrip = time.Since(began)
	if a.err != nil {
		a.err = fmt.Errorf("pgsplit: %s: %w", s, a.err)
		a.roundTrip = 0
		if p.closed() && !errors.Is(ctx.Err(), context.Canceled) {
			s.happened(mute, a.err)
		}
	}
	return a
}

// looked tells the server's health how a look went. What ended it for no fault of the server's tells nothing, and that no
// answer came in time is for a probe to judge.
func (s *server) looked(ctx context.Context, err error) {
	switch {
	case errors.Is(ctx.Err(), context.Canceled):
	case err != nil && ctx.Err() != nil:
		s.happened(mute, err)
	default:
		s.connected(err)
	}
}

// report reads where a primary is, for reports alone: it writes nothing, so a replica may not get to the position soon.
func (p *physical) report(ctx context.Context) (LSN, error) {
	v := sample{at: time.Now(), id: &p.id}
	at, err := p.askEnds(ctx)
	if err != nil {
		return 0, err
	}
	if !p.server.replica() {
		v.floor = floor{p.id.timeline, at.inserted}
		p.server.connector.reported.add(v)
	}
	return p.id.wal.replayable(at.flushed), nil
}

// diagnose makes the report of what each server answered, the primary first.
func (c *Connector) diagnose(answers []answer) Health {
	now := time.Now()
	h := Health{Status: statusOK}
	all := true
	i := 0
	for s := range c.servers {
		a, stats := answers[i], s.report(now)
		r := ServerHealth{
			Name: stats.Name, Role: stats.Role, Label: stats.Label,
			State: stats.State, Since: stats.Since, Cause: textOf(stats.Cause),
			Reachable: a.err == nil, Error: textOf(s.withoutPassword(a.err)),
			Timeline: a.timeline, Position: a.position, LagBytes: -1, Staleness: unknownStaleness,
			Open: stats.Open, InUse: stats.InUse, Idle: stats.Idle, RoundTrip: a.roundTrip,
		}
		r.Seen = a.seen()
		c.measure(&r, a, answers[0], now)
		// One that only refuses new connections goes on with those at hand.
		usable := a.err == nil || stats.State == refusing.String() && stats.Open > 0
		h.Readable = h.Readable || usable
		if s.replica() {
			all = all && a.err == nil && a.standby
		} else {
			h.Writable = usable && !a.standby
			all = all && a.err == nil && !a.standby
		}
		h.Servers = append(h.Servers, r)
		i++
	}
	switch {
	case !h.Readable:
		h.Status = statusDown
	case !all:
		h.Status = statusDegraded
	}
	return h
}

// seen is the role of what answered.
func (a *answer) seen() string {
	switch {
	case !a.inTouch:
		return ""
	case a.standby:
		return roleReplica.String()
	}
	return rolePrimary.String()
}

// measure says how far behind the primary a server is.
func (c *Connector) measure(r *ServerHealth, a, primary answer, now time.Time) {
	switch {
	case a.err != nil || !a.inTouch:
	case !a.standby:
		r.LagBytes, r.Staleness = 0, 0
	default:
		r.Staleness = c.behind(now, floor{a.timeline, a.position})
		if primary.err == nil && primary.position != 0 && a.position != 0 && a.timeline == primary.timeline {
			r.LagBytes = max(int64(primary.position)-int64(a.position), 0)
		}
	}
}
