package pgsplit

import (
	"sync"
	"sync/atomic"
	"time"
)

// state is what a server is good for.
type state uint32

const (
	// healthy: it takes requests.
	healthy state = iota
	// refusing: it lets no new connection in; those at hand go on.
	refusing
	// suspect: something went wrong on a connection to it. Reads go elsewhere while anybody else can serve them, until a
	// probe has told.
	suspect
	// down: it gets no requests until a probe gets in.
	down
)

var stateNames = [...]string{healthy: "healthy", refusing: "refusing", suspect: "suspect", down: "down"}

func (s state) String() string { return stateNames[s] }

// event is what happened at a server.
type event uint8

const (
	letIn       event = iota // a new connection was let in
	refused                  // it answered, but lets no new connection in
	unreachable              // no connection can be made to it, and none at hand answers
	barred                   // no connection can be made to it, and those at hand may be good
	doubted                  // a connection was lost, or no reply came in time
	mute                     // no reply came, but it is the caller's own deadline that calls that late
)

// becomes is the state after the event.
func (s state) becomes(e event) state {
	switch {
	case e == letIn:
		return healthy
	case e == refused:
		return refusing
	case e == unreachable, s == down:
		return down
	case e == mute, e == barred && s == refusing:
		return s
	}
	return suspect
}

// health is the state of one server. It starts nothing and reads no clock: what happens is told to it with the time, and
// it answers when the server has to be probed. At most one probe is due or under way at a time.
type health struct {
	now atomic.Uint32 // the state, for the hot path

	mu       sync.Mutex
	since    time.Time // when it came into its state; guarded by mu
	cause    error     // of a state that is not healthy; guarded by mu
	failures int       // probes that were due since it was healthy; guarded by mu
	pending  bool      // a probe is due or under way; guarded by mu
	mute     bool      // it is due because of a mute, so that a healthy server is probed, too; guarded by mu
}

func (h *health) state() state { return state(h.now.Load()) }

// retry is between which bounds the pauses between two probes double.
type retry struct {
	first, last time.Duration
	jitter      func() float64 // below 1: how much of a quarter of the pause is left out
}

func (r retry) pause(failures int) time.Duration {
	pause := r.last
	if failures < 20 {
		pause = min(r.first<<failures, r.last)
	}
	return pause - time.Duration(r.jitter()*float64(pause/4))
}

// change is from which state to which; often they are the same.
type change struct{ from, to state }

func (c change) any() bool { return c.from != c.to }

// on takes in what happened, and tells how the state has changed, and whether a probe is due and after which pause.
func (h *health) on(e event, at time.Time, cause error, r retry) (changed change, probe bool, pause time.Duration) {
	if e == letIn && h.state() == healthy {
		return change{healthy, healthy}, false, 0
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	was := h.state()
	is := was.becomes(e)
	changed = change{was, is}
	if e != mute && (e != doubted || was != down) {
		h.cause = cause
	}
	if changed.any() {
		h.since = at
		h.now.Store(uint32(is))
	}
	if e == letIn {
		h.failures = 0
		return changed, false, 0
	}
	if h.pending {
		return changed, false, 0
	}
	h.pending, h.mute = true, e == mute
	if e == mute || is == suspect && (e == doubted || changed.any()) {
		return changed, true, 0
	}
	pause = r.pause(h.failures)
	h.failures++
	return changed, true, pause
}

// begin claims the probe that is due. A server that has become healthy meanwhile is not probed.
func (h *health) begin() bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.state() == healthy && !h.mute {
		h.pending = false
	}
	h.mute = false
	return h.pending
}

// end tells that the probe is over, or will not take place.
func (h *health) end() {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.pending = false
}

// resume tells whether a probe is due that nobody has arranged: those of before ended with the last shell.
func (h *health) resume() bool {
	if h.state() == healthy {
		return false
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.pending {
		return false
	}
	h.pending = true
	return true
}

// why is what made the server what it is.
func (h *health) why() (since time.Time, cause error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.since, h.cause
}
