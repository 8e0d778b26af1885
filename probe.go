package pgsplit

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5/pgconn"
)

// This file tells a server's health what happened there, and probes the server when that asks for it.

// leastProbeLimit is how long a probe may take when the configuration's connect_timeout does not ask for more.
const leastProbeLimit = 5 * time.Second

// probeLimit is how long a probe may take. A replica is to prove soon that it lives: reads wait for that.
func (s *server) probeLimit() time.Duration {
	if state := s.health.state(); s.replica() && (state == suspect || state == healthy) {
		return s.connector.config.ReplicaTimeout
	}
	return max(leastProbeLimit, s.connectTimeout())
}

// connected takes note of how an attempt to connect ended.
func (s *server) connected(err error) { s.tried(s.afterConnect(err), err) }

// afterConnect is what the end of an attempt to connect says about the server. The address of a replica may hide several
// servers, and the connections at hand may lead to others than the one that cannot be reached: a probe asks them.
func (s *server) afterConnect(err error) event {
	e := eventOf(err)
	if e == unreachable && s.othersAtHand() {
		e = barred
	}
	return e
}

func (s *server) othersAtHand() bool { return s.replica() && len(s.connections()) > 0 }

// eventOf is what it says about the one server that was met.
func eventOf(err error) event {
	var hook hookError
	var pgErr *pgconn.PgError
	switch {
	case err == nil:
		return letIn
	case errors.As(err, &hook), errors.As(err, &pgErr) && !unavailable(pgErr.Code):
		return refused
	}
	return unreachable
}

// tried takes note of an attempt to connect, and of what it says about the server.
func (s *server) tried(e event, err error) {
	var pgErr *pgconn.PgError
	if err != nil {
		s.stats.errors[errorOfConnect(err)].Add(1)
	}
	if e == letIn || eventOf(err) == refused && errors.As(err, &pgErr) {
		s.provedAt.store(present()) // it lives
	}
	s.happened(e, err)
}

// unavailable tells whether a server says by this SQLSTATE that nobody can use it now.
func unavailable(code string) bool {
	switch code {
	case codeAdminShutdown, codeCrashShutdown, codeCannotConnectNow:
		return true
	}
	return false
}

// doubt takes note that something went wrong on a connection to the server that may have come from the server.
func (s *server) doubt(cause error) {
	s.lostAt.store(present())
	s.happened(doubted, cause)
}

// happened has the server's state follow what happened.
func (s *server) happened(e event, cause error) {
	cause = s.withoutPassword(cause) // Stats, Health and the Logger tell it
	changed, probe, pause := s.health.on(e, time.Now(), cause, s.retry)
	switch {
	case probe:
		s.probeIn(pause)
	case changed.any() && changed.to == healthy:
		s.needless()
	case (e == doubted || e == mute) && changed.to != down:
		s.hurry()
	}
	if changed.any() {
		s.logChange(changed, cause)
	}
	if changed.any() && changed.to != healthy {
		s.survey.due()
	}
	if changed.any() && changed.to == down {
		s.wentDown(cause)
	}
}

// wentDown gives up on what was going on with a server that is down. The connections at hand to a primary that only takes
// too long to let new ones in may be good.
func (s *server) wentDown(cause error) {
	if s.replica() {
		s.abortReads()
	}
	if s.replica() || !errors.Is(cause, context.DeadlineExceeded) {
		s.closeIdle()
	}
}

// probeIn arranges for the probe that is due.
func (s *server) probeIn(pause time.Duration) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.active() {
		s.health.end()
		return
	}
	s.probing = time.AfterFunc(pause, s.probe)
}

// hurry has the probe that is due take place at once, if it is not under way.
func (s *server) hurry() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.probing != nil && s.probing.Stop() {
		s.probing.Reset(0)
	}
}

// needless calls off the probe that is due: the server is healthy. mu is not held.
func (s *server) needless() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.probing != nil && s.probing.Stop() {
		s.health.end()
	}
}

// active tells whether anything may go on in the background. mu is held.
func (s *server) active() bool { return !s.closed && s.connector.shells.Load() > 0 }

// wake arranges anew for the probe of a server that was not healthy when the last shell was closed.
func (s *server) wake() {
	if s.health.resume() {
		s.probeIn(0)
	}
}

// probe connects to the server once, on a connection of its own, to see whether it lets anybody in. If it does not, the
// connections at hand are asked whether anybody is there.
func (s *server) probe() {
	s.mu.Lock()
	if !s.active() || !s.health.begin() {
		s.health.end()
		s.mu.Unlock()
		return
	}
	ctx, cancel := context.WithCancel(context.Background())
	s.endProbe = cancel
	era := s.era
	s.mu.Unlock()
	s.stats.probes.Add(1)
	e, err := refused, error(errHookLeft)
	defer func() {
		cancel()
		s.mu.Lock()
		if s.era == era {
			s.health.end()
		}
		s.mu.Unlock()
		if !errors.Is(err, context.Canceled) {
			s.tried(e, err)
		}
	}()
	err = s.tryOnce(ctx)
	if e = eventOf(err); e == unreachable && s.replica() {
		e = s.askAtHand(ctx)
		if ctx.Err() != nil {
			err = ctx.Err() // it was not asked to the end
		}
	}
}

// tryOnce opens a connection and closes it.
func (s *server) tryOnce(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, s.probeLimit())
	defer cancel()
	p, err := s.open(ctx, s.usualAccess(), true)
	if err == nil {
		p.close()
	}
	return err
}

// askAtHand asks the idle connections to a replica that lets no new one in whether anybody is there: one is enough. Nobody is
// asked where one has answered a ping lately: all may be in use then, and one that is asked is missed by the next read. The one
// used last gets half of the time by itself, so that reads find the others; if it is silent, those may lead to other servers. A
// read that still waits for its reply in time may get it.
func (s *server) askAtHand(ctx context.Context) event {
	timeout := s.connector.config.ReplicaTimeout
	if heard := s.heardAt.load(); heard > s.lostAt.load() && present().since(heard) < timeout && s.othersAtHand() {
		return refused
	}
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	first, end := context.WithTimeout(ctx, timeout/2)
	defer end()
	s.mu.Lock()
	newest := s.popAny()
	s.mu.Unlock()
	if newest != nil && s.answers(first, newest) {
		return refused
	}
	var others []*physical
	s.mu.Lock()
	for p := s.popAny(); p != nil; p = s.popAny() {
		others = append(others, p)
	}
	s.mu.Unlock()
	var alive atomic.Bool
	var asked sync.WaitGroup
	for _, p := range others {
		asked.Go(func() {
			if s.answers(ctx, p) {
				alive.Store(true)
			}
		})
	}
	asked.Wait()
	if alive.Load() {
		return refused
	}
	for _, p := range s.connections() {
		if ctx.Err() == nil && p.mayReply() {
			return barred
		}
	}
	return unreachable
}

// popAny takes the connection that was used last out of the pool, of those that are good for reads first. mu is held.
func (s *server) popAny() *physical {
	if p := s.popNewest(readOnly); p != nil {
		return p
	}
	return s.popNewest(readWrite)
}

// answers asks a connection that was taken out of the pool for a sign of life. One that gives none is closed.
func (s *server) answers(ctx context.Context, p *physical) (alive bool) {
	defer func() {
		if alive {
			s.keep(p, present())
		} else {
			s.discard(p)
		}
	}()
	_ = contained("a ping", func() error { // it calls functions of the configuration, such as OnNotice
		alive = p.awake(ctx, true)
		return nil
	})
	return alive
}
