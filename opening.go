package pgsplit

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"
)

// opening is a new connection on its way. It goes on when whoever asked for it leaves, for the next one who needs it: where
// all callers' deadlines are shorter than it takes to connect, none would ever get a connection.
type opening struct {
	access access
	cancel context.CancelFunc
	done   chan struct{} // closed once p and err are there

	claimed bool // somebody waits; guarded by server.mu
	dropped bool // nobody may join it: its place was needed; guarded by server.mu
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
var errHookLeft = hookError{errors.New("pgsplit: a hook called runtime.Goexit")}

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
		defer func() { // a Logger may end the goroutine as well
			if orphan && o.err == nil {
				s.keep(o.p, present())
			}
			close(o.done)
		}()
		if !errors.Is(o.err, context.Canceled) { // which only comes from ourselves
			s.connected(o.err)
		}
	}()
	o.p, o.err = s.open(ctx, o.access, false)
	if eventOf(o.err) == unreachable && ctx.Err() == nil && s.othersAtHand() {
		o.p, o.err = s.open(ctx, o.access, false) // the next one behind the address
	}
}

// joinOpening takes over a connection on its way that nobody waits for any more. mu is held.
func (s *server) joinOpening(a access) *opening {
	for _, o := range s.openings {
		if o.access == a && !o.claimed && !o.dropped {
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

// How long opening a connection may take when the configuration's connect_timeout does not ask for more.
const (
	primaryOpenLimit = 30 * time.Second
	replicaOpenLimit = 5 * time.Second
)

func (s *server) openLimit() time.Duration {
	if s.replica() {
		return max(replicaOpenLimit, 2*s.connector.config.ReplicaTimeout, s.connectTimeout())
	}
	return max(primaryOpenLimit, s.connectTimeout())
}

// connectTimeout is what the configuration allows for all of the server's hosts.
func (s *server) connectTimeout() time.Duration {
	config := s.config.ConnConfig
	return config.ConnectTimeout * time.Duration(1+len(config.Fallbacks))
}
