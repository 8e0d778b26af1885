package pgsplit

import (
	"context"
	"slices"
	"sync"
	"time"
)

// Session is the mutable holder of one caller's floors, for the length of a request or a job. Statements under
// WithSession raise them when they write and keep them when they read under ReadOnly: the caller sees its own writes,
// and never less than it has already seen. It is safe for concurrent use.
//
// Its Token carries the floors to the caller's next request, on whichever process that runs.
type Session struct {
	began time.Time // whatever it was told happened before

	mu       sync.Mutex
	trails   []*trail  // one a cluster that was met; guarded by mu
	start    Token     // what it began with, for clusters that were not met yet; guarded by mu
	bare     LSN       // SessionAt's floor, until the first cluster is met; guarded by mu
	marked   bool      // MarkWritten before any cluster was met; guarded by mu
	pinned   time.Time // reads of all clusters go to the primary until then; guarded by mu
	distrust bool      // it began with a token that proved nothing; guarded by mu
	changed  bool      // its token says more than what it began with; guarded by mu
	carry    bool      // its token carries what reads saw as well; guarded by mu
}

// trail is what a session knows of one cluster. The session's mu guards it.
type trail struct {
	connector *Connector // where its position can be asked for
	system    uint64     // system_identifier

	write   floor     // covers all writes but those of marks
	trusted bool      // write was read from this cluster, not only claimed by a token
	pinned  time.Time // from a token
	marks   []*mark   // writes whose positions are not known yet

	seen    floor    // covers what reads showed, but for those of readers
	readers []reader // the instances read since
	last    *server  // where the session read last
}

// reader is one instance that the session reads, or read since its seen floor.
type reader struct {
	instance uint32    // its hash; 0 is none that could be told apart
	running  int       // reads that go on
	ended    time.Time // when the last one ended
}

// floor is a position on a timeline, which is 0 where it is not known.
type floor struct {
	timeline uint32
	lsn      LSN
}

// join is the higher one.
func (f floor) join(o floor) floor {
	if o.timeline > f.timeline || o.timeline == f.timeline && o.lsn > f.lsn {
		return o
	}
	return f
}

// mark is one write, or several on one connection, whose position is not known yet.
type mark struct {
	state   markState
	writer  life
	started int64 // when the writer's server started: a later one of the same timeline is its successor
	line    uint32
	pid     uint32
	pooled  bool
	expires time.Time // a pooled connection's pid says nothing: until then
}

type markState uint8

const (
	markOpen    markState = iota // it may not have committed: rows are open, or its reply is awaited
	markClosed                   // it has committed or not, and a position read from now on covers it
	markUnknown                  // its connection was lost: it may yet commit (F2)
	markInTx                     // it waits for its transaction's commit, and no other connection can see it before
)

// pooledDoubt is how long a write is in doubt whose connection was lost behind a pooler.
const pooledDoubt = 30 * time.Second

// NewSession returns a session of a caller without history.
func NewSession() *Session { return &Session{began: time.Now()} }

// SessionAt returns a session whose reads see at least what had been committed at lsn, in the cluster that it is used
// with first.
func SessionAt(lsn LSN) *Session { return &Session{began: time.Now(), bare: lsn} }

// SessionFromToken returns a session that goes on where the token's left off.
func SessionFromToken(t Token) *Session { return &Session{began: time.Now(), start: t.canonical()} }

// SessionWithoutTrust returns the session of a caller whose token could not be opened: it may have seen anything, so
// its reads use the primary, and its token takes the place of the lost one.
func SessionWithoutTrust() *Session {
	return &Session{began: time.Now(), distrust: true, marked: true, changed: true}
}

// scope is the sessions around a context, the innermost first.
type scope struct {
	session *Session
	outer   *scope
}

// WithSession returns a context whose statements raise the session's floors when they write, and keep them when they
// read under ReadOnly. Sessions nest: a write raises those around it as well, and a read keeps the floors of all.
func WithSession(ctx context.Context, s *Session) context.Context {
	return withHint(ctx, func(h *Hint) {
		for around := h.scope; around != nil; around = around.outer {
			if around.session == s {
				return
			}
		}
		if s != nil {
			h.scope = &scope{session: s, outer: h.scope}
		}
	})
}

// SessionFrom returns the innermost session of ctx.
func SessionFrom(ctx context.Context) (*Session, bool) {
	if h := hintOf(ctx); h.scope != nil {
		return h.scope.session, true
	}
	return nil, false
}

// Pin sends the session's reads to the primary for d from now. A longer pin stays.
func (s *Session) Pin(d time.Duration) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if until := time.Now().Add(d); until.After(s.pinned) {
		s.pinned, s.changed = until, true
	}
}

// MarkWritten tells the session of a write that it could not see, such as one on a connection of another pool. It must
// have committed.
func (s *Session) MarkWritten() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.changed = true
	if len(s.trails) == 0 {
		s.marked = true
		return
	}
	for _, t := range s.trails {
		t.marks = append(t.marks, &mark{state: markClosed})
	}
}

// Advance has the session go on from what another part of the caller's work, whose token this is, has written and seen:
// the answer to a call, say. Floors only rise.
func (s *Session) Advance(t Token) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.start, s.changed = s.start.Merge(t), true
	all, _ := t.of(anyCluster)
	for _, known := range s.trails {
		f, ok := t.Floor(known.system)
		if !ok {
			f = TokenFloor{}
		}
		known.pinned = later(later(known.pinned, f.PinnedUntil), all.PinnedUntil)
		if f.Resolve || all.Resolve || f.Instance != 0 {
			known.marks = append(known.marks, &mark{state: markClosed})
		}
		known.claim(floor{f.Timeline, f.LSN})
	}
}

// Changed tells whether the session's Token says more than the one that it began with. Where it carries reads that is so
// whenever it has read, even on the instance that the token names already: it showed more than before.
func (s *Session) Changed() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.changed
}

// trail is what the session knows of the connector's cluster, made at the first meeting. mu is held.
func (s *Session) trail(c *Connector, system uint64) *trail {
	for _, t := range s.trails {
		if t.system == system {
			return t
		}
	}
	t := &trail{connector: c, system: system}
	if f, ok := s.start.Floor(system); ok {
		t.write, t.pinned = floor{f.Timeline, f.LSN}, f.PinnedUntil
		if f.Instance != 0 {
			t.readers = []reader{{instance: f.Instance, ended: s.began}}
		}
		if f.Resolve {
			t.marks = append(t.marks, &mark{state: markClosed})
		}
	}
	all, general := s.start.of(anyCluster)
	t.pinned = later(t.pinned, all.PinnedUntil)
	if all.Resolve || s.marked || s.distrust {
		t.marks = append(t.marks, &mark{state: markClosed})
	}
	if s.bare != 0 && system != 0 {
		t.claim(floor{lsn: s.bare})
		s.bare = 0
	}
	if _, knows := s.start.Floor(system); len(s.start.Floors) > 0 && !knows && !general {
		c.foreignTokens.Add(1)
	}
	t.trusted = t.write.lsn == 0
	s.trails = append(s.trails, t)
	return t
}

// claim joins a floor that somebody else tells of. Of two positions only one of which has a timeline nobody can tell which
// is the higher one: the primary is asked.
func (t *trail) claim(f floor) {
	if f.lsn == 0 {
		return
	}
	if t.write.lsn != 0 && (t.write.timeline == 0) != (f.timeline == 0) {
		t.marks = append(t.marks, &mark{state: markClosed})
	}
	if at := t.write.join(f); at != t.write {
		t.write, t.trusted = at, false
	}
}

// readIn notes that something was read on p that is over now.
func (s *Session) readIn(p *physical) {
	c, system, instance := p.server.connector, p.id.system, p.hash()
	s.beginRead(c, system, instance, p.server)
	s.endRead(c, system, instance)
}

// open notes that a statement is about to be sent on p that may write, or that a transaction goes on there.
func (s *Session) open(p *physical, state markState) *mark {
	m := &mark{state: state, writer: p.id.life, started: p.id.life.started, line: p.id.timeline, pid: p.conn().PID(), pooled: p.id.pooled}
	s.mu.Lock()
	defer s.mu.Unlock()
	t := s.trail(p.server.connector, p.id.system)
	t.marks = append(t.marks, m)
	s.changed = s.changed || state == markOpen
	return m
}

// committing notes that the commit of a mark's transaction is about to be sent.
func (s *Session) committing(m *mark) {
	s.mu.Lock()
	defer s.mu.Unlock()
	m.state = markOpen
}

// settle notes how the connection of a mark was left: idle, or lost with the outcome unknown. Of a transaction that was
// not committed nothing is left.
func (s *Session) settle(m *mark, lost bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	switch {
	case m.state == markInTx:
		s.remove(m)
	case lost:
		m.state, s.changed = markUnknown, true
		m.expires = time.Now().Add(pooledDoubt)
	default:
		m.state, s.changed = markClosed, true
	}
}

// drop forgets a mark whose transaction wrote nothing or did not commit.
func (s *Session) drop(m *mark) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.remove(m)
}

// remove takes the mark off its trail. mu is held.
func (s *Session) remove(m *mark) {
	for _, t := range s.trails {
		t.marks = slices.DeleteFunc(t.marks, func(o *mark) bool { return o == m })
	}
}

// CarryReads makes the session's Token carry what its reads saw, too, so that the caller's next request does not see
// less. Without it a token carries writes alone, and reading changes no token.
func (s *Session) CarryReads() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.carry = true
}

// free tells whether a read on the instance needs no seen floor: all that the session has read since the last one was
// read there. Otherwise it tells until when the other reads may have shown something. The
// seen floor comes with it: another goroutine may have raised it, and forgotten the reads that it covers, just now.
func (s *Session) free(c *Connector, system uint64, instance uint32) (free bool, ended time.Time, seen floor) {
	s.mu.Lock()
	defer s.mu.Unlock()
	t := s.trail(c, system)
	free = true
	for _, r := range t.readers {
		if r.instance != instance || instance == 0 {
			free = false
			if r.running > 0 {
				ended = time.Now() // it may have shown something by now
			} else {
				ended = later(ended, r.ended)
			}
		}
	}
	return free, ended, t.seen
}

// beginRead notes a read on the instance.
func (s *Session) beginRead(c *Connector, system uint64, instance uint32, on *server) {
	s.mu.Lock()
	defer s.mu.Unlock()
	t := s.trail(c, system)
	t.last = on
	s.changed = s.changed || s.carry
	for i := range t.readers {
		if t.readers[i].instance == instance {
			t.readers[i].running++
			return
		}
	}
	t.readers = append(t.readers, reader{instance: instance, running: 1})
}

// endRead notes its end.
func (s *Session) endRead(c *Connector, system uint64, instance uint32) {
	s.mu.Lock()
	defer s.mu.Unlock()
	t := s.trail(c, system)
	for i := range t.readers {
		if r := &t.readers[i]; r.instance == instance {
			r.running--
			r.ended = time.Now()
			return
		}
	}
}

// saw raises the seen floor to where the primary was at some time, and forgets the instances whose reads had all ended
// by then.
func (s *Session) saw(c *Connector, system uint64, at floor, when time.Time) {
	s.mu.Lock()
	defer s.mu.Unlock()
	t := s.trail(c, system)
	t.seen = t.seen.join(at)
	t.readers = slices.DeleteFunc(t.readers, func(r reader) bool { return r.running == 0 && !r.ended.After(when) })
}

// need is what one read under a session asks for.
type need struct {
	floor   floor
	primary bool // only the primary will do
	unasked bool // there are writes whose position has to be asked for first
	claimed bool // floor is only what a token says
}

// reads tells what a read needs now.
func (s *Session) reads(c *Connector, system uint64, now time.Time) need {
	s.mu.Lock()
	defer s.mu.Unlock()
	t := s.trail(c, system)
	n := need{floor: t.write.join(t.seen), claimed: !t.trusted}
	n.primary = s.distrust || now.Before(s.pinned) || now.Before(t.pinned)
	for _, m := range t.marks {
		switch {
		case m.state == markOpen && mutant != floorWithRowsOpen:
			n.primary = true
		case m.state != markInTx:
			n.unasked = true
		}
	}
	return n
}

// pending are the marks that a position read from now on can settle, and the pids of those that it only can once they
// are gone.
func (s *Session) pending(c *Connector, system uint64) (marks []*mark, pids []uint32) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, m := range s.trail(c, system).marks {
		if m.state == markClosed || m.state == markUnknown || m.state == markOpen && mutant == floorWithRowsOpen {
			marks = append(marks, m)
		}
		if m.state == markUnknown && !m.pooled {
			pids = append(pids, m.pid)
		}
	}
	return marks, pids
}

// covered raises the floor to a position that was read on a server after the marks were pending, and forgets those that
// it settles: the writer's own, unless its server is another one now, and unless its backend may still commit.
func (s *Session) covered(c *Connector, id *identity, at floor, marks []*mark, alive []uint32) {
	s.mu.Lock()
	defer s.mu.Unlock()
	t := s.trail(c, id.system)
	now := time.Now()
	settled := func(m *mark) bool {
		if !slices.Contains(marks, m) || !m.from(id) {
			return false
		}
		if m.state != markUnknown || mutant == unpinEarly {
			return true
		}
		if m.pooled {
			return now.After(m.expires)
		}
		return !slices.Contains(alive, m.pid)
	}
	before := len(t.marks)
	t.marks = slices.DeleteFunc(t.marks, settled)
	if len(t.marks) < before {
		s.raise(t, at)
	}
}

// from tells whether a position of the server counts for the mark: it is the writer's, or one that came after it.
func (m *mark) from(id *identity) bool {
	switch {
	case m.writer == (life{}), m.writer == id.life:
		return true
	case id.timeline != m.line:
		return id.timeline > m.line
	}
	return id.life.started >= m.started
}

// raise raises the floor of writes. mu is held.
func (s *Session) raise(t *trail, at floor) {
	t.write, t.trusted, s.changed = t.write.join(at), true, true
}

// committed notes where a transaction's commit ended.
func (s *Session) committed(c *Connector, system uint64, at floor) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.raise(s.trail(c, system), at)
}

// judge compares a token's claim with where the primary is. A position that the primary never had, or one of a timeline
// that ended, is lost or forged: the caller goes on from where the primary is now. It tells whether the claim stood.
func (s *Session) judge(c *Connector, system uint64, primary floor) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	t := s.trail(c, system)
	claim := t.write
	switch {
	case claim.timeline > primary.timeline:
		return true // it is the primary that is behind
	case claim.timeline != 0 && claim.timeline < primary.timeline, !t.trusted && claim.lsn > primary.lsn:
		t.write, t.trusted, s.changed = primary, true, true
		return false
	}
	t.trusted = true
	return true
}

// timeline is the highest one that the session knows of.
func (s *Session) timeline(c *Connector, system uint64) uint32 {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.trail(c, system).write.timeline
}

// anyCluster is the System of a floor that says something about every cluster. No cluster has it.
const anyCluster = 0

// of is the token's own floor for the system.
func (t Token) of(system uint64) (TokenFloor, bool) {
	for _, f := range t.Floors {
		if f.System == system {
			return f, true
		}
	}
	return TokenFloor{System: system}, false
}

// tokenTimeout bounds what Token asks of servers.
const tokenTimeout = 2 * time.Second

// distrustFor is how long a caller is pinned whose writes could not be covered.
const distrustFor = time.Minute

// Token returns the session's floors in a form that travels. For writes since the last time it asks the primary where
// they ended, one round trip, for at most 2 seconds. If that cannot be told the error says why, and the token sends its
// reader to the primary for a while: it is as good as any other.
//
// Inside a transaction that is still open the token tells its reader to ask the primary, once, for what it can only
// know when that has committed.
func (s *Session) Token(ctx context.Context) (Token, error) {
	ctx, cancel := context.WithTimeout(ctx, tokenTimeout)
	defer cancel()
	s.mu.Lock()
	trails, carry := slices.Clone(s.trails), s.carry
	s.mu.Unlock()
	var failed error
	for _, t := range trails {
		var err error
		if s.reads(t.connector, t.system, time.Now()).unasked {
			err = t.connector.capture(ctx, s, t.system)
		}
		if err == nil && carry && s.scattered(t) {
			_, err = t.connector.seen(ctx, &scope{session: s}, t.system, time.Now())
		}
		if failed == nil {
			failed = err
		}
	}
	return s.TokenNow(), failed
}

// TokenNow is Token without asking anybody: writes that it would ask for pin its reader instead.
func (s *Session) TokenNow() Token {
	now := time.Now()
	s.mu.Lock()
	defer s.mu.Unlock()
	token := s.start
	if s.distrust {
		token = Token{}
	}
	for _, t := range s.trails {
		at := t.write
		f := TokenFloor{System: t.system, PinnedUntil: t.pinned}
		if s.carry {
			at = at.join(t.seen)
			if len(t.readers) == 1 {
				f.Instance = t.readers[0].instance
			}
		}
		f.Timeline, f.LSN = at.timeline, at.lsn
		for _, m := range t.marks {
			if m.state == markInTx || m.state == markOpen {
				f.Resolve = true
			} else {
				f.PinnedUntil = later(f.PinnedUntil, now.Add(distrustFor))
			}
		}
		if s.carry && len(t.readers) > 1 {
			f.PinnedUntil = later(f.PinnedUntil, now.Add(distrustFor))
		}
		token.Floors = slices.DeleteFunc(slices.Clone(token.Floors), func(o TokenFloor) bool { return o.System == t.system })
		token.Floors = append(token.Floors, f)
	}
	// What is not about one cluster goes with a floor for any.
	all, _ := token.of(anyCluster)
	all.PinnedUntil = later(all.PinnedUntil, s.pinned)
	all.Resolve = (all.Resolve || s.marked || s.bare != 0) && len(s.trails) == 0 // each trail has taken it over
	if s.distrust && len(s.trails) == 0 {
		all.PinnedUntil = later(all.PinnedUntil, now.Add(distrustFor))
	}
	if all.Resolve || all.PinnedUntil.After(now) {
		token.Floors = append(token.Floors, all)
	}
	token.Issued = now
	return token.canonical()
}

// scattered tells whether more than one instance was read since the seen floor: a token can name only one.
func (s *Session) scattered(t *trail) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(t.readers) > 1 || len(t.readers) == 1 && t.readers[0].instance == 0
}

func later(a, b time.Time) time.Time {
	if b.After(a) {
		return b
	}
	return a
}

// lastRead is where the innermost session of the request read last.
func (c *Connector) lastRead(r *request) *server {
	if r.system == 0 {
		return nil
	}
	s := r.scope.session
	s.mu.Lock()
	defer s.mu.Unlock()
	t := s.trail(c, r.system)
	if t.last == nil && len(t.readers) == 1 {
		for _, server := range c.replicas {
			if server.instance.Load() == t.readers[0].instance {
				return server
			}
		}
	}
	return t.last
}
