package debugpage

import (
	"context"
	"slices"
	"sync"
	"time"

	"github.com/pgsplit/pgsplit"
)

const (
	// kept is how long a sample is kept.
	kept = 10 * time.Minute
	// fresh is how long one look at the servers does for all who look.
	fresh = time.Second
)

// sample is what one look saw.
type sample struct {
	at      time.Time
	reasons map[string]uint64
	health  pgsplit.Health
}

// history is the samples of the last minutes. It is filled by those who look, and nothing runs in between.
type history struct {
	mu      sync.Mutex
	samples []sample // oldest first; guarded by mu
}

// look asks the servers how they are, unless that was done a moment ago.
func (h *history) look(ctx context.Context, c *pgsplit.Connector) pgsplit.Health {
	h.mu.Lock()
	if n := len(h.samples); n > 0 && time.Since(h.samples[n-1].at) < fresh {
		defer h.mu.Unlock()
		return h.samples[n-1].health
	}
	h.mu.Unlock()
	bounded, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	s := sample{health: c.Health(bounded), reasons: c.Stats().Reasons, at: time.Now()}
	// One that was given up, or had a shorter deadline than ours, tells nothing about the servers.
	if ctx.Err() == nil {
		h.add(s)
	}
	return s.health
}

// add keeps the sample, if it is not one of several looks at the same time.
func (h *history) add(s sample) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if n := len(h.samples); n > 0 && s.at.Sub(h.samples[n-1].at) < fresh/2 {
		return
	}
	h.samples = append(slices.DeleteFunc(h.samples, func(old sample) bool { return s.at.Sub(old.at) > kept }), s)
}

// since returns the samples that are not older than kept, oldest first.
func (h *history) since(now time.Time) []sample {
	h.mu.Lock()
	defer h.mu.Unlock()
	return slices.DeleteFunc(slices.Clone(h.samples), func(s sample) bool { return now.Sub(s.at) > kept })
}

// lastMinute is the oldest sample that a rate over the last minute can begin with. It is a little more than a minute, so
// that a page which is loaded every few seconds finds one.
func lastMinute(samples []sample, now time.Time) (sample, bool) {
	for _, s := range samples {
		if age := now.Sub(s.at); age >= fresh && age <= 65*time.Second {
			return s, true
		}
	}
	return sample{}, false
}
