package pgsplit

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/jackc/pgx/v5/pgconn"
)

// opening is a new connection on its way. It goes on when whoever asked for it leaves, for the next one who needs it: where
// all callers' deadlines are shorter than it takes to connect, none would ever get a connection.
type opening struct {
	access access
	cancel context.CancelFunc
	done   chan struct{} // closed once p and err are there

	claimed bool // somebody waits; guarded by server.mu
	ended   bool // guarded by server.mu

	p   *physical
	err error
}

// startOpening reserves a connection and opens it in the background, with the values of the context alone. mu is held.
func (s *server) startOpening(ctx context.Context, a access) *opening {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), s.openLimit())
	o := &opening{access: a, cancel: cancel, done: make(chan struct{}), claimed: true}
	s.total++
	s.openings = append(s.openings, o)
	go s.finish(ctx, o)
	return o
}

// errHookLeft stands for a hook that ended the goroutine it ran on, as a test's FailNow does.
var errHookLeft = errors.New("pgsplit: a hook called runtime.Goexit")

func (s *server) finish(ctx context.Context, o *opening) {
	o.err = errHookLeft
	defer func() {
		o.cancel()
		s.mu.Lock()
		o.ended = true
		s.openings = slices.DeleteFunc(s.openings, func(other *opening) bool { return other == o })
		if o.err != nil {
			s.total--
		}
		orphan := !o.claimed
		s.mu.Unlock()
		if !errors.Is(o.err, context.Canceled) { // which only comes from ourselves
			s.connected(o.err)
		}
		if orphan && o.err == nil {
			s.keep(o.p)
		}
		close(o.done)
	}()
	o.p, o.err = s.open(ctx, o.access, false)
}

// joinOpening takes over a connection on its way that nobody waits for any more. mu is held.
func (s *server) joinOpening(a access) *opening {
	for _, o := range s.openings {
		if o.access == a && !o.claimed {
			o.claimed = true
			return o
		}
	}
	return nil
}

// await waits for the connection, as long as ctx says.
func (s *server) await(ctx context.Context, o *opening) (*physical, error) {
	select {
	case <-o.done:
		return o.p, o.err
	case <-ctx.Done():
	}
	s.mu.Lock()
	ended := o.ended
	o.claimed = ended
	s.mu.Unlock()
	if ended {
		<-o.done
		return o.p, o.err
	}
	return nil, fmt.Errorf("pgsplit: %s: no connection yet: %w", s, ctx.Err())
}

// How long opening a connection may take, and a probe, when the configuration's connect_timeout does not ask for more.
const (
	primaryOpenLimit = 30 * time.Second
	replicaOpenLimit = 5 * time.Second
	probeLimit       = 5 * time.Second
)

func (s *server) openLimit() time.Duration {
	if s.replica() {
		return max(replicaOpenLimit, 2*s.connector.config.ReplicaTimeout, s.connectTimeout())
	}
	return max(primaryOpenLimit, s.connectTimeout())
}

// probeLimit is how long a probe may take. A replica is to prove soon that it lives: reads wait for that.
func (s *server) probeLimit() time.Duration {
	if state := s.health.state(); s.replica() && (state == suspect || state == healthy) {
		return s.connector.config.ReplicaTimeout
	}
	return max(probeLimit, s.connectTimeout())
}

// connectTimeout is what the configuration allows for all of the server's hosts.
func (s *server) connectTimeout() time.Duration {
	config := s.config.ConnConfig
	return config.ConnectTimeout * time.Duration(1+len(config.Fallbacks))
}

// connected takes note of how an attempt to connect ended.
func (s *server) connected(err error) {
	var hook hookError
	var pgErr *pgconn.PgError
	switch {
	case err == nil:
		s.provedAt.Store(time.Now().UnixNano())
		s.happened(letIn, nil)
	case errors.As(err, &hook), errors.As(err, &pgErr) && !unavailable(pgErr.Code):
		if pgErr != nil {
			s.provedAt.Store(time.Now().UnixNano()) // it lives
		}
		s.happened(refused, err)
	default:
		s.happened(unreachable, err)
	}
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
	s.lostAt.Store(time.Now().UnixNano())
	s.happened(doubted, cause)
}

// happened has the server's state follow what happened.
func (s *server) happened(e event, cause error) {
	changed, probe, pause := s.health.on(e, time.Now(), cause, s.retry)
	state := s.health.state()
	switch {
	case probe:
		s.probeIn(pause)
	case changed && state == healthy:
		s.needless()
	case (e == doubted || e == mute) && state != down:
		s.hurry()
	}
	if changed && state == down {
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

// probe connects to the server once, on a connection of its own, to see whether it lets anybody in.
func (s *server) probe() {
	s.mu.Lock()
	if !s.active() || !s.health.begin() {
		s.health.end()
		s.mu.Unlock()
		return
	}
	ctx, cancel := context.WithTimeout(context.Background(), s.probeLimit())
	defer cancel()
	s.endProbe = cancel
	era := s.era
	s.mu.Unlock()
	s.stats.probes.Add(1)
	p, err := s.open(ctx, s.usualAccess(), true)
	if err == nil {
		p.close()
	}
	s.mu.Lock()
	if s.era == era {
		s.health.end()
	}
	s.mu.Unlock()
	if !errors.Is(err, context.Canceled) {
		s.connected(err)
	}
}
