package soak

import (
	"cmp"
	"encoding/json"
	"fmt"
	"slices"
	"sort"
	"strings"
	"time"
)

// Rule is a promise that a history can break.
type Rule string

const (
	// ReadYourWrites: a ReadOnly read shows the writes of its session that were acknowledged before it began, and those of
	// unknown outcome that the primary has shown to anybody before it began; with tokens, wherever the session goes on.
	ReadYourWrites Rule = "read-your-writes"
	// MonotonicReads: a read of a session shows no less than one that had completed before it began; across tokens if they
	// carry reads.
	MonotonicReads Rule = "monotonic-reads"
	// Floor: a read with a position as its floor shows all that was acknowledged before the position was asked for.
	Floor Rule = "floor"
	// Staleness: a read under MaxStaleness(d) shows all that was acknowledged d before it began.
	Staleness Rule = "staleness"
	// Phantom: what a read shows was written, and was committed.
	Phantom Rule = "phantom"
	// DoubleWrite: no write happened twice.
	DoubleWrite Rule = "double-write"
	// LostWrite: an acknowledged write is there.
	LostWrite Rule = "lost-write"
	// AbortedWrite: a write that certainly failed is not there.
	AbortedWrite Rule = "aborted-write"
	// ReadOnlyWrite: an attempt to write under ReadOnly fails and changes nothing.
	ReadOnlyWrite Rule = "read-only-write"
	// Liveness: a ReadOnly autocommit read that a server could serve is served, in time.
	Liveness Rule = "liveness"
	// FairShare: in good times replicas serve the session-less ReadOnly reads, each its share.
	FairShare Rule = "fair-share"
)

// Rules are the parameters of Check.
type Rules struct {
	// Skew is how far the clocks of two processes may be apart. It counts where times of two processes are compared.
	Skew time.Duration

	// Liveness turns that rule on.
	Liveness bool
	// Served is how long a ReadOnly autocommit read may take, whatever happens.
	Served time.Duration
	// Servers is how many there are.
	Servers int
	// Recovery is how long after a fault its effects are excused.
	Recovery time.Duration

	// ReplicaShare is the least part of session-less ReadOnly reads without trouble that replicas serve; 0: not checked.
	ReplicaShare float64
	// EachShare is the least part of those that each replica of Replicas serves; 0: not checked.
	EachShare float64
	// Replicas are the replicas' ports.
	Replicas []int
	// ShareOf is how many such reads there must be for their shares to mean anything.
	ShareOf int
}

// Violation is a broken rule and the operations that show it.
type Violation struct {
	Rule Rule
	Text string
	Ops  []Op
}

// String is the shortest explanation: what is wrong, and the operations involved in the order in which they began.
func (v Violation) String() string {
	var b strings.Builder
	fmt.Fprintf(&b, "%s: %s", v.Rule, v.Text)
	ops := slices.Clone(v.Ops)
	slices.SortFunc(ops, func(a, b Op) int { return cmp.Compare(a.Start, b.Start) })
	for i := range ops {
		line, err := json.Marshal(ops[i])
		if err != nil {
			line = []byte(err.Error())
		}
		fmt.Fprintf(&b, "\n\t%s", line)
	}
	return b.String()
}

// Verdict is what Check finds.
type Verdict struct {
	Violations []Violation
	Summary    Summary
}

// maxViolations bounds a verdict: one that is found a thousand times is found.
const maxViolations = 100

// Check judges a history. It is a function of its arguments alone.
func Check(h *History, rules Rules) Verdict {
	c := newChecker(h, rules)
	c.checkWrites()
	c.checkReads()
	if rules.Liveness {
		c.checkLiveness()
	}
	c.checkShares()
	return Verdict{Violations: c.found, Summary: c.summary()}
}

// checker is a history, indexed.
type checker struct {
	h     *History
	rules Rules
	found []Violation

	ops      map[uint64]*Op
	ledger   map[int]map[int64][]uint64  // key, version: the writes that made it
	versions map[uint64]map[int][]int64  // write, key: the versions that it made
	acked    map[int]*risingMaximum      // key: acknowledged versions by their time
	visible  map[int][]int64             // key, version: when the primary was known to show that version or a later one
	sessions map[uint64]*session         // by the operation that began it
	tokens   map[uint64]map[int]evidence // knowledge that an operation of KindToken carries
}

// evidence is what a read of a key must not fall below.
type evidence struct {
	written, read proof
	doubts        []proof // writes of unknown outcome
}

// proof is a version and the operation that showed it.
type proof struct {
	version int64
	op      *Op
}

func (p proof) join(o proof) proof {
	if o.version > p.version {
		return o
	}
	return p
}

func (e evidence) join(o evidence) evidence {
	return evidence{e.written.join(o.written), e.read.join(o.read), slices.Concat(e.doubts, o.doubts)}
}

// session is what is known of one.
type session struct {
	began   *Op
	joined  []*Op                  // operations that gave it tokens, its beginning among them, by their end
	written map[int]*risingMaximum // by key
	read    map[int]*risingMaximum
	doubts  map[int][]proof
}

// risingMaximum tells the highest version that was known before a time.
type risingMaximum struct {
	entries []entry // sorted by time once all are in; then max is that of all up to it
	sorted  bool
}

type entry struct {
	at  int64
	max proof
}

func (r *risingMaximum) add(at int64, p proof) {
	r.entries = append(r.entries, entry{at, p})
	r.sorted = false
}

// before is the highest one of those added with a time before at.
func (r *risingMaximum) before(at int64) proof {
	if r == nil {
		return proof{}
	}
	if !r.sorted {
		slices.SortStableFunc(r.entries, func(a, b entry) int { return cmp.Compare(a.at, b.at) })
		for i := 1; i < len(r.entries); i++ {
			r.entries[i].max = r.entries[i-1].max.join(r.entries[i].max)
		}
		r.sorted = true
	}
	n := sort.Search(len(r.entries), func(i int) bool { return r.entries[i].at >= at })
	if n == 0 {
		return proof{}
	}
	return r.entries[n-1].max
}

func rising(m map[int]*risingMaximum, key int) *risingMaximum {
	if m[key] == nil {
		m[key] = new(risingMaximum)
	}
	return m[key]
}

const never = int64(1)<<62 - 1

func newChecker(h *History, rules Rules) *checker {
	c := &checker{
		h: h, rules: rules,
		ops:      make(map[uint64]*Op, len(h.Ops)),
		ledger:   map[int]map[int64][]uint64{},
		versions: map[uint64]map[int][]int64{},
		acked:    map[int]*risingMaximum{},
		visible:  map[int][]int64{},
		sessions: map[uint64]*session{},
		tokens:   map[uint64]map[int]evidence{},
	}
	for _, row := range h.Ledger {
		if c.ledger[row.Key] == nil {
			c.ledger[row.Key] = map[int64][]uint64{}
		}
		c.ledger[row.Key][row.Version] = append(c.ledger[row.Key][row.Version], row.Op)
		if c.versions[row.Op] == nil {
			c.versions[row.Op] = map[int][]int64{}
		}
		c.versions[row.Op][row.Key] = append(c.versions[row.Op][row.Key], row.Version)
	}
	for i := range h.Ops {
		op := &h.Ops[i]
		c.ops[op.ID] = op
		if op.Kind == KindSession {
			c.sessions[op.ID] = &session{began: op, written: map[int]*risingMaximum{}, read: map[int]*risingMaximum{}, doubts: map[int][]proof{}}
		}
	}
	for i := range h.Ops {
		c.note(&h.Ops[i])
	}
	for _, s := range c.sessions {
		slices.SortFunc(s.joined, func(a, b *Op) int { return cmp.Compare(a.End, b.End) })
	}
	for _, times := range c.visible {
		for v := len(times) - 2; v >= 0; v-- {
			times[v] = min(times[v], times[v+1])
		}
	}
	return c
}

// note enters an operation into the indexes.
func (c *checker) note(op *Op) {
	s := c.sessions[op.Session]
	switch op.Kind {
	case KindSession:
		s = c.sessions[op.ID]
		s.joined = append(s.joined, op)
	case KindAdvance:
		if s != nil {
			s.joined = append(s.joined, op)
		}
	case KindWrite:
		for _, w := range op.Writes {
			for _, v := range c.versions[op.ID][w.Key] {
				c.noteWrite(s, op, w.Key, v)
			}
		}
	case KindRead:
		if op.Outcome != OK {
			return
		}
		for _, r := range op.Reads {
			if !op.Standby {
				c.shown(r.Key, r.Version, op.End)
			}
			if s != nil {
				rising(s.read, r.Key).add(op.End, proof{r.Version, op})
			}
		}
	}
}

func (c *checker) noteWrite(s *session, op *Op, key int, version int64) {
	switch op.Outcome {
	case OK:
		rising(c.acked, key).add(op.End, proof{version, op})
		c.shown(key, version, op.End)
		if s != nil {
			rising(s.written, key).add(op.End, proof{version, op})
		}
	case Unknown:
		if s != nil {
			s.doubts[key] = append(s.doubts[key], proof{version, op})
		}
	}
}

// shown notes that the primary shows a version from a time on.
func (c *checker) shown(key int, version, at int64) {
	times := c.visible[key]
	for int64(len(times)) <= version+1 {
		times = append(times, never)
	}
	times[version] = min(times[version], at)
	c.visible[key] = times
}

// shownBy tells when the primary was first known to show the version or a later one.
func (c *checker) shownBy(key int, version int64) int64 {
	if times := c.visible[key]; version < int64(len(times)) {
		return times[version]
	}
	return never
}

// knows is what a session knew of a key at a time: its own operations that had completed, and what its tokens told it.
func (c *checker) knows(s *session, key int, at int64) evidence {
	e := evidence{written: s.written[key].before(at), read: s.read[key].before(at)}
	for _, d := range s.doubts[key] {
		if d.op.End < at {
			e.doubts = append(e.doubts, d)
		}
	}
	for _, j := range s.joined {
		if j.End > at && j != s.began {
			break
		}
		for _, t := range j.Tokens {
			e = e.join(c.carried(t)[key])
		}
		for _, id := range j.After {
			after := c.ops[id]
			if after == nil || after.Outcome != OK || after.End > j.Start {
				continue
			}
			for _, v := range c.versions[id][key] {
				e.written = e.written.join(proof{v, after})
			}
		}
	}
	return e
}

// carried is what a token tells of each key.
func (c *checker) carried(token uint64) map[int]evidence {
	if known, ok := c.tokens[token]; ok {
		return known
	}
	told := map[int]evidence{}
	c.tokens[token] = told
	op := c.ops[token]
	if op == nil || c.sessions[op.Session] == nil {
		return told
	}
	s := c.sessions[op.Session]
	keys := map[int]bool{}
	for key := range s.written {
		keys[key] = true
	}
	for key := range s.read {
		keys[key] = true
	}
	for key := range s.doubts {
		keys[key] = true
	}
	for _, j := range s.joined {
		for _, t := range j.Tokens {
			for key := range c.carried(t) {
				keys[key] = true
			}
		}
		for _, id := range j.After {
			for key := range c.versions[id] {
				keys[key] = true
			}
		}
	}
	for key := range keys {
		e := c.knows(s, key, op.Start)
		if !s.began.Carry {
			e.read = proof{}
		}
		told[key] = e
	}
	return told
}

func (c *checker) violate(rule Rule, ops []*Op, format string, args ...any) {
	if len(c.found) >= maxViolations {
		return
	}
	v := Violation{Rule: rule, Text: fmt.Sprintf(format, args...)}
	for _, op := range ops {
		if op != nil && !slices.ContainsFunc(v.Ops, func(o Op) bool { return o.ID == op.ID }) {
			v.Ops = append(v.Ops, *op)
		}
	}
	c.found = append(c.found, v)
}

// checkWrites compares the outcomes of writes with the ledger.
func (c *checker) checkWrites() {
	for i := range c.h.Ops {
		op := &c.h.Ops[i]
		switch op.Kind {
		case KindWrite:
			for _, w := range op.Writes {
				c.checkWrite(op, w.Key)
			}
		case KindForbidden:
			if op.Outcome == OK {
				c.violate(ReadOnlyWrite, []*Op{op}, "a write under ReadOnly succeeded")
			}
			if made := c.versions[op.ID]; len(made) > 0 {
				c.violate(ReadOnlyWrite, []*Op{op}, "a write under ReadOnly is in the ledger: %v", made)
			}
		}
	}
	for key, versions := range c.ledger {
		for version, ops := range versions {
			if len(ops) > 1 {
				c.violate(DoubleWrite, []*Op{c.ops[ops[0]], c.ops[ops[1]]}, "key %d has version %d %d times", key, version, len(ops))
			}
		}
	}
}

func (c *checker) checkWrite(op *Op, key int) {
	made := c.versions[op.ID][key]
	switch {
	case len(made) > 1:
		c.violate(DoubleWrite, []*Op{op}, "one write of key %d made versions %v", key, made)
	case op.Outcome == OK && len(made) == 0:
		c.violate(LostWrite, []*Op{op}, "an acknowledged write of key %d is not there", key)
	case op.Outcome == Fail && len(made) > 0:
		c.violate(AbortedWrite, []*Op{op}, "a failed write of key %d made version %d", key, made[0])
	}
}

// checkReads compares what reads showed with what they had to show.
func (c *checker) checkReads() {
	for i := range c.h.Ops {
		op := &c.h.Ops[i]
		if op.Kind != KindRead || op.Outcome != OK {
			continue
		}
		for _, r := range slices.Concat(op.Reads, op.Rows) {
			c.checkPhantom(op, r)
		}
		if op.Access != ReadOnly {
			continue
		}
		for _, r := range op.Reads {
			c.checkRead(op, r)
		}
	}
}

func (c *checker) checkPhantom(op *Op, r Value) {
	if r.Version == 0 && r.Op == 0 {
		return // as it was made
	}
	if !slices.Contains(c.ledger[r.Key][r.Version], r.Op) {
		c.violate(Phantom, []*Op{op, c.ops[r.Op]}, "version %d of key %d by operation %d was read, and never committed", r.Version, r.Key, r.Op)
	}
}

// checkRead judges one value that a ReadOnly read showed.
func (c *checker) checkRead(op *Op, r Value) {
	at := op.since()
	if s := c.sessions[op.Session]; s != nil {
		e := c.knows(s, r.Key, at)
		if w := e.written; w.version > r.Version {
			c.violate(ReadYourWrites, []*Op{w.op, op, s.began}, "key %d was written up to version %d, and shown at %d", r.Key, w.version, r.Version)
		} else if seen := e.read; seen.version > r.Version && (op.Standby || c.shownBy(r.Key, r.Version+1) < at-c.skew()) {
			// F6: a replica can show a commit a moment before the primary does, so a read on the primary may be behind one on
			// a replica until somebody knows that the primary shows it.
			c.violate(MonotonicReads, []*Op{seen.op, op, s.began}, "key %d was shown at version %d, and then at %d", r.Key, seen.version, r.Version)
		}
		for _, d := range e.doubts {
			if d.version > r.Version && c.shownBy(r.Key, d.version) < at-c.skew() {
				c.violate(ReadYourWrites, []*Op{d.op, op, s.began},
					"key %d has version %d by a write of unknown outcome that the primary has shown already, and was shown at %d", r.Key, d.version, r.Version)
				break
			}
		}
	}
	if floor := c.ops[op.FloorOf]; floor != nil {
		if need := c.ackedBefore(r.Key, floor.Start); need.version > r.Version {
			c.violate(Floor, []*Op{need.op, floor, op}, "key %d was at version %d when the floor was asked for, and shown at %d", r.Key, need.version, r.Version)
		}
	}
	if op.Staleness > 0 {
		if need := c.ackedBefore(r.Key, at-op.Staleness); need.version > r.Version {
			c.violate(Staleness, []*Op{need.op, op}, "key %d was at version %d longer ago than the bound, and shown at %d", r.Key, need.version, r.Version)
		}
	}
}

func (c *checker) skew() int64 { return int64(c.rules.Skew) }

// ackedBefore is the highest version of a key that was acknowledged, in any process, before a time of another process.
func (c *checker) ackedBefore(key int, at int64) proof { return c.acked[key].before(at - c.skew()) }
