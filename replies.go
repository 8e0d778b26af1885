package pgsplit

import (
	"context"
	"errors"
	"math"
	"sync"
	"time"
)

// This file watches for reads that a replica does not answer.

// reply is a statement that waits for the first of its reply.
type reply struct {
	mu       sync.Mutex
	due      time.Time     // when it is late; zero: no statement waits; guarded by mu
	patience time.Duration // how long after that a probe may take to prove that the server lives; guarded by mu
	whole    bool          // patience is all of replica_timeout, and not shortened by the caller's deadline; guarded by mu
	movable  bool          // the statement may run elsewhere instead; guarded by mu
	aborted  bool          // it was ended for that; guarded by mu
	probed   time.Time     // when it was late; guarded by mu
}

var errNoReply = errors.New("pgsplit: no reply in time")

// never is when a watch that has nothing to wait for comes.
const never = math.MaxInt64

// awaitReply begins to watch for the reply to a read that is sent now.
func (p *physical) awaitReply(ctx context.Context, movable bool) {
	s := p.server
	patience, whole := s.connector.patience(ctx)
	due := time.Now().Add(patience)
	r := &p.reply
	r.mu.Lock()
	r.due, r.patience, r.whole, r.movable = due, patience, whole, movable
	r.mu.Unlock()
	if at := due.UnixNano(); at < s.watchAt.Load() {
		s.watchReplies(due)
	}
}

// replied ends the watch. It tells whether the read was ended because the server gave no sign of life.
func (p *physical) replied(err error) (aborted bool) {
	r := &p.reply
	r.mu.Lock()
	defer r.mu.Unlock()
	aborted = r.aborted
	r.due, r.probed, r.aborted = time.Time{}, time.Time{}, false
	if !aborted {
		return false
	}
	if err == nil {
		// The reply came all the same.
		return p.conn().Conn().SetDeadline(time.Time{}) != nil
	}
	_ = p.std.Close() // of no more use
	return true
}

// abort ends the wait for the reply, if the statement may move on. mu is held.
func (r *reply) abort(p *physical) {
	if r.due.IsZero() || !r.movable || r.aborted {
		return
	}
	r.aborted = true
	_ = p.conn().Conn().SetDeadline(time.Unix(1, 0)) // what waits fails at once
}

// watchReplies has overdue looked for at the given time, or before.
func (s *server) watchReplies(at time.Time) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if at.UnixNano() >= s.watchAt.Load() || !s.active() {
		return
	}
	s.watchAt.Store(at.UnixNano())
	if s.watcher == nil {
		s.watcher = time.AfterFunc(time.Until(at), s.lookForReplies)
	} else {
		s.watcher.Reset(time.Until(at))
	}
}

// leastBetween is the least time between two probes that are due because of replies.
const leastBetween = 100 * time.Millisecond

// lookForReplies looks at the statements whose replies are late: first the server is probed, and if that proves nothing in
// time they move on.
func (s *server) lookForReplies() {
	s.watchAt.Store(never)
	now := time.Now()
	var next time.Time
	var late, probe bool
	for _, p := range s.connections() {
		r := &p.reply
		r.mu.Lock()
		proved := time.Unix(0, s.provedAt.Load())
		switch again := proved.Add(max(r.patience, leastBetween)); {
		case r.due.IsZero() || r.aborted || now.Before(r.due):
		case r.probed.IsZero() && now.Before(again):
			r.due = again // it has let somebody in since
		case r.probed.IsZero():
			left := r.patience
			if !r.whole {
				left /= 2 // it was half of the time until the deadline: the next server needs some of the rest
			}
			r.probed, r.due = now, now.Add(left)
			late, probe = late || r.whole, true
		case proved.After(r.probed):
			r.due = time.Time{} // it lives: the statement takes its time
		default:
			r.abort(p)
		}
		if !r.due.IsZero() && !r.aborted && (next.IsZero() || r.due.Before(next)) {
			next = r.due
		}
		r.mu.Unlock()
	}
	switch {
	case late:
		s.doubt(errNoReply)
	case probe:
		s.happened(mute, errNoReply)
	}
	if !next.IsZero() {
		s.watchReplies(next)
	}
}

// abortReads ends the wait of the reads that can move on: the server is down.
func (s *server) abortReads() {
	for _, p := range s.connections() {
		p.reply.mu.Lock()
		p.reply.abort(p)
		p.reply.mu.Unlock()
	}
}
