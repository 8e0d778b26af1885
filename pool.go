package pgsplit

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
)

// leaseReady leases the idle connection that was used last, if that takes no waiting and no look at the connection: it is what
// most statements get, in few steps. Otherwise it is nil, and lease does what is needed. at is when it looked.
func (s *server) leaseReady(a access) (p *physical, at moment) {
	if !s.asItIs || !s.trySlot() {
		return nil, 0
	}
	at = present()
	s.mu.Lock()
	defer s.mu.Unlock()
	if n := len(s.idle[a]); n > 0 {
		p = s.idle[a][n-1]
		if !p.doubted() && at.since(p.idleSince) <= pingAfter && p.fit(at) {
			s.leased(p)
			return s.popNewest(a), at
		}
	}
	s.freeSlot()
	return nil, 0
}

// lease takes an idle connection, or opens one; wait bounds how long it takes in all, 0 leaves that to ctx.
func (s *server) lease(ctx context.Context, a access, wait time.Duration) (*physical, error) {
	if p, _ := s.leaseReady(a); p != nil {
		return p, nil
	}
	if !s.trySlot() {
		bounded, cancel := within(ctx, wait)
		defer cancel()
		select {
		case s.slots <- struct{}{}:
		case <-bounded.Done():
			s.stats.errors[errorBusy].Add(1)
			return nil, fmt.Errorf("pgsplit: %s: all %d connections of pool_max_conns are busy: %w", s,
				cap(s.slots), errBusy{bounded.Err()})
		}
	}
	p, err := s.takeOrOpen(ctx, a, wait)
	if err != nil {
		s.freeSlot()
		return nil, err
	}
	s.leased(p)
	return p, nil
}

// leased counts a lease.
func (s *server) leased(p *physical) {
	s.inUse.Add(1)
	p.leases++
}

// errBusy is a wait for one of our own connections that ended: it says nothing about the server.
type errBusy struct{ error }

func (e errBusy) Unwrap() error { return e.error }

// hookError is an error of one of the program's own hooks: the server may be well.
type hookError struct{ error }

func (e hookError) Unwrap() error { return e.error }

func isBusy(err error) bool {
	var busy errBusy
	return errors.As(err, &busy)
}

func within(ctx context.Context, wait time.Duration) (context.Context, context.CancelFunc) {
	if wait <= 0 {
		return ctx, func() {}
	}
	return context.WithTimeout(ctx, wait)
}

func (s *server) freeSlot() {
	if s.slots != nil {
		<-s.slots
	}
}

// takeOrOpen has one time limit for all that it waits for; the context for it is made when the first wait comes. How it
// goes with new connections is told to the server's health by whoever opens them.
func (s *server) takeOrOpen(ctx context.Context, a access, wait time.Duration) (*physical, error) {
	var cancel context.CancelFunc
	defer func() {
		if cancel != nil {
			cancel()
		}
	}()
	for refused := 0; ; {
		p, retire, o, err := s.take(ctx, a)
		if retire != nil {
			retire.close()
		}
		if err != nil {
			return nil, err
		}
		opening, ping := o != nil, false
		if !opening {
			ping, err = p.wantsPing(ctx)
		}
		if cancel == nil && (opening || ping || p.access != a) {
			ctx, cancel = within(ctx, wait)
		}
		if opening {
			if p, err = s.await(ctx, o); err != nil {
				return nil, err
			}
		}
		usable := err == nil && (opening || p.awake(ctx, ping))
		if usable && p.access != a {
			usable, err = p.turn(ctx, a)
		}
		if usable && err == nil && p.wrapping != nil && p.leases > 0 {
			usable = p.wrapping.reset(ctx)
		}
		if usable && err == nil {
			usable, err = p.prepareForLease(ctx)
		}
		switch {
		case usable && err == nil:
			return p, nil
		case usable:
			s.keep(p, present())
		default:
			s.discard(p)
		}
		if err == nil {
			err = ctx.Err()
		}
		if opening {
			refused++
		}
		if err == nil && refused == refusedNew {
			err = fmt.Errorf("pgsplit: %s: PrepareConn or BeforeAcquire refuses new connections too", s)
		}
		if err != nil {
			return nil, err
		}
	}
}

// refusedNew is how many new connections the hooks may refuse for one lease: those that refuse all would go on for ever.
const refusedNew = 5

// take pops the idle connection that was used last, or gives one that is on its way. A server keeps no more connections
// than there are shells, so one that has the other access may have to be turned, by the caller, or retired.
func (s *server) take(ctx context.Context, a access) (p, retire *physical, o *opening, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return nil, nil, nil, errClosed
	}
	if p := s.popNewest(a); p != nil {
		return p, nil, nil, nil
	}
	if o := s.joinOpening(a); o != nil {
		return nil, nil, o, nil
	}
	full := s.total >= s.bound()
	if full {
		other := readWrite
		if a == readWrite {
			other = readOnly
		}
		if n := len(s.idle[other]); n > 0 && s.idle[other][n-1].turns() {
			return s.popNewest(other), nil, nil, nil
		}
	}
	if err := s.closedToNew(); err != nil {
		return nil, nil, nil, err
	}
	if full {
		if retire = s.popOldest(); retire == nil {
			s.dropOrphan()
		}
	}
	return nil, retire, s.startOpening(ctx, a), nil
}

// closedToNew is why no new connection is tried: the last try failed, and the next one is the probe's. A primary that
// only refuses a connection tells each caller itself, as without this driver.
func (s *server) closedToNew() error {
	if state := s.health.state(); state != down && (state != refusing || !s.replica()) {
		return nil
	}
	if _, cause := s.health.why(); cause != nil {
		return errShut{cause}
	}
	return nil // it has just been let in
}

// closedToReads is why the server gets no requests that others can serve or that can do without: it is down.
func (s *server) closedToReads() error {
	if s.health.state() == down {
		return s.closedToNew()
	}
	return nil
}

// errShut is a server to which no connection was tried.
type errShut struct{ error }

func (e errShut) Unwrap() error { return e.error }

// dropOrphan ends a connection on its way that nobody waits for: its place is needed. mu is held.
func (s *server) dropOrphan() {
	for _, o := range s.openings {
		if !o.claimed && !o.dropped {
			o.dropped = true // it may be there nevertheless before it notices
			o.cancel()
			return
		}
	}
}

// popNewest takes the connection that was used last out of the pool; nil if none is idle. mu is held.
func (s *server) popNewest(a access) *physical {
	n := len(s.idle[a])
	if n == 0 {
		return nil
	}
	p := s.idle[a][n-1]
	s.idle[a][n-1] = nil
	s.idle[a] = s.idle[a][:n-1]
	return p
}

// bound is how many connections may be open. mu is held.
func (s *server) bound() int {
	bound := int(s.connector.shells.Load())
	if bound > 0 {
		bound = max(bound, s.minimum)
	}
	if s.slots != nil {
		bound = min(bound, cap(s.slots))
	}
	return bound
}

// popOldest takes the connection that has been idle for longest out of the pool; nil if none is idle. mu is held.
func (s *server) popOldest() *physical {
	oldest := -1
	for a := range s.idle {
		if len(s.idle[a]) > 0 && (oldest < 0 || s.idle[a][0].idleSince < s.idle[oldest][0].idleSince) {
			oldest = a
		}
	}
	if oldest < 0 {
		return nil
	}
	p := s.idle[oldest][0]
	s.idle[oldest] = append(s.idle[oldest][:0], s.idle[oldest][1:]...)
	s.total--
	return p
}

// giveBack ends a lease. Whatever cannot be used by the next caller is closed.
func (s *server) giveBack(p *physical) {
	s.inUse.Add(-1)
	if now := present(); s.reusable(p, now) {
		s.keep(p, now)
	} else {
		s.discard(p)
	}
	s.freeSlot()
}

// reusable tells whether the next caller gets the connection as it was opened: not closed, not in the middle of
// something, and accepted by AfterRelease.
func (s *server) reusable(p *physical, now moment) bool {
	if p.unfit || p.superseded() || p.closed() || p.conn().IsBusy() || p.inTx() || p.expired(now) || p.promoted() ||
		p.wrapping != nil && !p.wrapping.valid() {
		return false
	}
	if s.afterRelease == nil {
		return true
	}
	keep := false // where it panics, there is nobody to tell: the lease has ended
	_ = contained("AfterRelease", func() error {
		keep = s.afterRelease(p.pg)
		return nil
	})
	return keep
}

// superseded tells whether a primary has been put aside, by a failover or for another cluster, since the connection was opened.
func (p *physical) superseded() bool {
	return !p.server.replica() && !p.id.inRecovery &&
		(p.id.timeline != 0 && p.id.timeline < p.server.connector.samples.current() || !p.server.ofCluster(p.id.system))
}

// promoted tells whether the primary's server was a standby when the connection learnt who it is, and says now that it is
// none any more: what the connection knows of it is no longer so.
func (p *physical) promoted() bool {
	return p.id.inRecovery && !p.server.replica() && p.conn().ParameterStatus("in_hot_standby") != "on"
}

// keep puts a connection back among the idle ones, unless there are more than shells.
func (s *server) keep(p *physical, now moment) {
	s.mu.Lock()
	keep := !s.closed && s.total <= s.bound()
	if keep {
		p.idleSince = now
		s.idle[p.access] = append(s.idle[p.access], p)
		s.scheduleSweep()
	} else {
		s.total--
	}
	s.mu.Unlock()
	if !keep {
		p.close()
	}
}

// discard closes a connection that was taken out.
func (s *server) discard(p *physical) {
	p.close()
	s.forget()
}

// forget gives back the right to a connection.
func (s *server) forget() {
	s.mu.Lock()
	s.total--
	s.mu.Unlock()
}

// trim closes the oldest idle connections over the bound: a shell was closed.
func (s *server) trim() {
	for {
		s.mu.Lock()
		var p *physical
		if s.closed || s.total > s.bound() {
			p = s.popOldest()
		}
		if s.closed || s.connector.shells.Load() == 0 {
			s.stopBackground()
		}
		s.mu.Unlock()
		if p == nil {
			return
		}
		p.close()
	}
}

// closeIdle closes what is idle.
func (s *server) closeIdle() {
	s.mu.Lock()
	var idle []*physical
	for p := s.popOldest(); p != nil; p = s.popOldest() {
		idle = append(idle, p)
	}
	s.mu.Unlock()
	for _, p := range idle {
		p.close()
	}
}

// connections are those that are open now.
func (s *server) connections() []*physical {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Collect(maps.Keys(s.conns))
}

// close makes the server accept no more leases and closes what is idle. Leases that are out are closed on return.
func (s *server) close() {
	s.mu.Lock()
	s.closed = true
	s.mu.Unlock()
	s.trim()
}

// stopBackground ends what goes on without a caller. mu is held.
func (s *server) stopBackground() {
	if s.janitor != nil {
		s.janitor.Stop()
		s.janitor = nil
	}
	if s.filling != nil {
		s.filling.cancel()
		s.filling = nil
	}
	for _, o := range s.openings {
		if !o.claimed {
			o.cancel()
		}
	}
	if s.probing != nil {
		// The one that is under way may take its time to end, in a hook. It is not waited for.
		s.probing.Stop()
		s.probing = nil
		s.health.end()
		s.era++
	}
	if s.endProbe != nil {
		s.endProbe()
	}
	s.endLook()
	if s.watcher != nil {
		s.watcher.Stop()
		s.watcher = nil
		s.watchAt.store(never)
	}
}

// scheduleSweep arranges that idle connections expire without anybody asking, if the pool's configuration says they do. mu is
// held.
func (s *server) scheduleSweep() {
	if s.janitor != nil || s.closed || s.config.MaxConnLifetime <= 0 && s.config.MaxConnIdleTime <= 0 {
		return
	}
	s.janitor = time.AfterFunc(s.sweepPeriod(), s.sweep)
}

func (s *server) sweepPeriod() time.Duration {
	period := s.config.HealthCheckPeriod
	for _, limit := range []time.Duration{s.config.MaxConnLifetime, s.config.MaxConnIdleTime} {
		if limit > 0 && (period <= 0 || limit < period) {
			period = limit
		}
	}
	return period
}

// sweep closes idle connections that are too old or, as long as the minimum is left, idle for too long.
func (s *server) sweep() {
	now := present()
	var expired []*physical
	s.mu.Lock()
	for a := range s.idle {
		kept := s.idle[a][:0]
		for _, p := range s.idle[a] {
			idle := s.config.MaxConnIdleTime > 0 && now.since(p.idleSince) >= s.config.MaxConnIdleTime
			if p.expired(now) || idle && s.total-len(expired) > s.minimum {
				expired = append(expired, p)
				continue
			}
			kept = append(kept, p)
		}
		clear(s.idle[a][len(kept):])
		s.idle[a] = kept
	}
	s.total -= len(expired)
	s.janitor = nil
	if len(s.idle[readWrite])+len(s.idle[readOnly]) > 0 {
		s.scheduleSweep()
	}
	s.mu.Unlock()
	for _, p := range expired {
		p.close()
	}
	s.fill()
}

// fill opens connections in the background until the configured minimum is there, while any shell is open.
func (s *server) fill() {
	if s.minimum == 0 {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.filling != nil || !s.wanting() {
		return
	}
	ctx, cancel := context.WithTimeout(context.Background(), fillTimeout)
	s.filling = &filling{cancel}
	go s.openMinimum(ctx, s.filling)
}

// filling is one background attempt to reach the minimum.
type filling struct{ cancel context.CancelFunc }

// wanting tells whether the minimum is not there. mu is held.
func (s *server) wanting() bool {
	return s.active() && s.health.state() == healthy && s.total < min(s.minimum, s.bound())
}

func (s *server) openMinimum(ctx context.Context, f *filling) {
	defer func() {
		f.cancel()
		s.mu.Lock()
		defer s.mu.Unlock()
		if s.filling == f {
			s.filling = nil
		}
	}()
	for {
		s.mu.Lock()
		// pool_max_conns bounds these as well; where all of it is leased the minimum is there.
		if !s.wanting() || ctx.Err() != nil || !s.trySlot() {
			if s.filling == f {
				s.filling = nil // under the same lock, so that whoever wants more begins anew
			}
			s.mu.Unlock()
			return
		}
		s.total++
		s.mu.Unlock()
		s.openSpare(ctx, f)
	}
}

// openSpare opens one connection, for which total and a slot are reserved. A hook may end the goroutine.
func (s *server) openSpare(ctx context.Context, f *filling) {
	var p *physical
	err := error(errHookLeft)
	defer func() {
		defer s.freeSlot()
		if err != nil {
			s.forget()
			f.cancel() // the next shell or sweep tries again
		} else {
			s.keep(p, present())
		}
		if !errors.Is(err, context.Canceled) {
			s.connected(err)
		}
	}()
	p, err = s.open(ctx, s.usualAccess(), false)
}

// trySlot takes a slot if one is free.
func (s *server) trySlot() bool {
	if s.slots == nil {
		return true
	}
	select {
	case s.slots <- struct{}{}:
		return true
	default:
		return false
	}
}

// fillTimeout bounds one background attempt to reach the minimum.
const fillTimeout = time.Minute

// expired tells whether the connection is older than the pool's configuration allows.
func (p *physical) expired(now moment) bool {
	return p.lifetime > 0 && now.since(p.born) >= p.lifetime
}

// fit tells whether the connection may be leased, if it lives.
func (p *physical) fit(now moment) bool { return !p.closed() && !p.expired(now) && !p.superseded() }

// pingAfter is how long a connection may have been idle before it is pinged, as pgx does for database/sql.
const pingAfter = time.Second

// doubted tells whether something has gone wrong at the server since an idle connection was used.
func (p *physical) doubted() bool {
	return p.server.health.state() != healthy || p.idleSince <= p.server.lostAt.load()
}

// wantsPing tells whether an idle connection is pinged before it is leased.
func (p *physical) wantsPing(ctx context.Context) (wants bool, err error) {
	if p.doubted() {
		return true, nil
	}
	idle := present().since(p.idleSince)
	should := p.server.config.ShouldPing
	if should == nil {
		return idle > pingAfter, nil
	}
	err = contained("ShouldPing", func() error {
		wants = should(ctx, pgxpool.ShouldPingParams{Conn: p.pg, IdleDuration: idle})
		return nil
	})
	return wants, err
}

// awake tells whether an idle connection still lives.
func (p *physical) awake(ctx context.Context, ping bool) bool {
	if !p.fit(present()) {
		return false
	}
	if !ping {
		return true
	}
	limit := p.server.config.PingTimeout
	if limit == 0 && p.server.health.state() != healthy {
		limit = p.server.connector.config.ReplicaTimeout
	}
	ctx, cancel := within(ctx, limit)
	defer cancel()
	if p.conn().Ping(ctx) != nil {
		p.server.heardAt.store(0) // others may be as dead
		return false
	}
	p.heard()
	return true
}

// heard takes note that a connection at hand gave a sign of life.
func (p *physical) heard() {
	now := present()
	p.server.heardAt.store(now)
	if p.remembers() {
		p.inst.answered.store(now)
	}
}

// prepareForLease runs the pool's PrepareConn, or the BeforeAcquire that it replaced.
func (p *physical) prepareForLease(ctx context.Context) (bool, error) {
	config := p.server.config
	//lint:ignore SA1019 honoured as pgxpool honours it
	if config.PrepareConn == nil && config.BeforeAcquire == nil {
		return true, nil
	}
	usable := false
	err := contained("PrepareConn", func() (err error) {
		if config.PrepareConn != nil {
			usable, err = config.PrepareConn(ctx, p.pg)
		} else {
			//lint:ignore SA1019 honoured as pgxpool honours it
			usable = config.BeforeAcquire(ctx, p.pg)
		}
		return err
	})
	return usable && !p.closed(), err
}
