package pgsplit

import (
	"context"
	"errors"
	"sync"
	"time"
)

// This file watches for reads that a replica does not answer.

// reply is a statement that waits for the first of its reply.
type reply struct {
	mu       sync.Mutex
	due      moment        // when it is late; zero: no statement waits; guarded by mu
	patience time.Duration // how long after that a probe may take to prove that the server lives; guarded by mu
	whole    bool          // patience is all of replica_timeout, and not shortened by the caller's deadline; guarded by mu
	movable  bool          // the statement may run elsewhere instead; guarded by mu
	aborted  bool          // it was ended for that; guarded by mu
	probed   moment        // when it was late; zero: it is not yet; guarded by mu
}

var errNoReply = errors.New("pgsplit: no reply in time")

// awaitReply begins to watch for the reply to a read that is sent now. at is what the clock says, if it was just read, or zero.
func (p *physical) awaitReply(ctx context.Context, movable bool, at moment) {
	s := p.server
	if at == 0 {
		at = present()
	}
	patience, whole := s.connector.patience(ctx)
	due := at.after(patience)
	r := &p.reply
	r.mu.Lock()
	r.due, r.patience, r.whole, r.movable = due, patience, whole, movable
	r.mu.Unlock()
	if due < s.watchAt.load() {
		s.watchReplies(due)
	}
}

// replied ends the watch. It tells whether the read was ended because the server gave no sign of life.
func (p *physical) replied(err error) (aborted bool) {
	r := &p.reply
	r.mu.Lock()
	aborted = r.aborted
	r.due, r.probed, r.aborted = 0, 0, false
	r.mu.Unlock()
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

// mayReply tells whether a statement waits for its reply, and that is not late.
func (p *physical) mayReply() bool {
	r := &p.reply
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.due != 0 && r.probed == 0 && !r.aborted
}

// abort ends the wait for the reply, if the statement may move on. mu is held.
func (r *reply) abort(p *physical) {
	if r.due == 0 || !r.movable || r.aborted {
		return
	}
	r.aborted = true
	_ = p.conn().Conn().SetDeadline(time.Unix(1, 0)) // what waits fails at once
}

// watchReplies has overdue looked for at the given time, or before.
func (s *server) watchReplies(at moment) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if at >= s.watchAt.load() || !s.active() {
		return
	}
	s.watchAt.store(at)
	if s.watcher == nil {
		s.watcher = time.AfterFunc(at.since(present()), s.lookForReplies)
	} else {
		s.watcher.Reset(at.since(present()))
	}
}

// provedAt is when the server behind the connection was last known to live.
func (p *physical) provedAt() moment {
	proved := p.server.provedAt.load()
	if p.remembers() {
		proved = max(proved, p.inst.answered.load())
	}
	return proved
}

// leastBetween is the least time between two probes that are due because of replies.
const leastBetween = 100 * time.Millisecond

// lookForReplies looks at the statements whose replies are late: first the server is probed, and if that proves nothing in
// time they move on.
func (s *server) lookForReplies() {
	s.watchAt.store(never)
	now := present()
	next := never
	var late, probe bool
	for _, p := range s.connections() {
		r := &p.reply
		r.mu.Lock()
		proved := p.provedAt()
		switch again := proved.after(max(r.patience, leastBetween)); {
		case r.due == 0 || r.aborted || now < r.due:
		case r.probed == 0 && now < again:
			r.due = again // it has let somebody in since
		case r.probed == 0:
			left := r.patience
			if !r.whole {
				left /= 2 // it was half of the time until the deadline: the next server needs some of the rest
			}
			r.probed, r.due = now, now.after(left)
			late, probe = late || r.whole, true
		case proved > r.probed:
			r.due = 0 // it lives: the statement takes its time
		case !r.movable:
			r.due = 0 // it waits as long as its caller does
		default:
			r.abort(p)
		}
		if r.due != 0 && !r.aborted {
			next = min(next, r.due)
		}
		r.mu.Unlock()
	}
	switch {
	case late:
		s.doubt(errNoReply)
	case probe:
		s.happened(mute, errNoReply)
	}
	if next != never {
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
