package pgsplit

import (
	"sync"
	"sync/atomic"
	"time"
)

// How long a server that did not let a connection in is left alone: doubling from the first to the last.
const (
	firstRetry = 250 * time.Millisecond
	lastRetry  = 2 * time.Second
)

// health remembers whether a server lets connections in. While it does not, one caller at a time may try again, and
// only once the pause is over; all others pass it by.
type health struct {
	down atomic.Bool // the hot path's copy of failures > 0

	mu       sync.Mutex
	failures int       // since the last success; guarded by mu
	retryAt  time.Time // guarded by mu
	trying   bool      // somebody is trying now; guarded by mu
}

// shuns tells whether the server is to be passed by.
func (h *health) shuns(now func() time.Time) bool {
	if !h.down.Load() {
		return false
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.trying || now().Before(h.retryAt)
}

// enter claims the right to try a server. It always succeeds for one that is up.
func (h *health) enter(now func() time.Time) bool {
	if !h.down.Load() {
		return true
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.failures > 0 && (h.trying || now().Before(h.retryAt)) {
		return false
	}
	h.trying = h.failures > 0
	return true
}

// succeeded readmits the server at once.
func (h *health) succeeded() {
	if !h.down.Load() {
		return
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	h.failures, h.trying = 0, false
	h.down.Store(false)
}

// failed counts a try that the server did not let in.
func (h *health) failed(now time.Time) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.retryAt = now.Add(min(firstRetry<<min(h.failures, 10), lastRetry))
	h.failures++
	h.trying = false
	h.down.Store(true)
}

// abandoned ends a try that proved nothing: the caller went away.
func (h *health) abandoned() {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.trying = false
}
