package soak

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"
)

// checkLiveness looks at the ReadOnly autocommit reads that a server could have served.
func (c *checker) checkLiveness() {
	for i := range c.h.Ops {
		op := &c.h.Ops[i]
		if op.Kind != KindRead || op.Access != ReadOnly || op.Tx != 0 || !c.servable(op) {
			continue
		}
		took := time.Duration(op.End - op.Start)
		switch {
		case op.Outcome == OK && took > c.rules.Served:
			c.violate(Liveness, []*Op{op}, "a ReadOnly read took %v", took)
		case op.Outcome != OK && !op.Partial && time.Duration(op.Budget) >= c.rules.Served:
			c.violate(Liveness, []*Op{op}, "a ReadOnly read failed that a server could have served")
		}
	}
}

// servable tells whether a server lived and was reachable during the whole of the read that may serve it: any one, or the
// primary if it has to see something, because then no other may be able to prove it, if it names a column that a replica
// did not have yet, or if it conflicted with what a replica replays.
func (c *checker) servable(op *Op) bool {
	down := map[string]bool{}
	for i := range c.h.Faults {
		f := &c.h.Faults[i]
		for _, s := range f.Servers {
			if f.Down && c.during(op, f) {
				down[s] = true
			}
		}
	}
	if op.Session != 0 || op.FloorOf != 0 || op.Staleness != 0 || op.State == undefinedColumn || op.State == conflict {
		return !down["primary"]
	}
	return len(down) < c.rules.Servers
}

// undefinedColumn is the SQLSTATE of a read that names a column which the server does not have.
const undefinedColumn = "42703"

// conflict is the SQLSTATE of a read on a replica that was ended because it stood in the way of replay.
const conflict = "40001"

// during tells whether the operation overlaps with the fault or with the time after it that is excused.
func (c *checker) during(op *Op, f *Fault) bool {
	return op.End >= f.Start && op.Start <= f.End+int64(c.rules.Recovery)
}

// bare tells whether the operation is a read that any replica may serve at any time.
func bare(op *Op) bool {
	return op.Kind == KindRead && op.Outcome == OK && op.Access == ReadOnly && op.Tx == 0 &&
		op.Session == 0 && op.FloorOf == 0 && op.Staleness == 0
}

// calmReads counts the bare reads in good times: all, those on replicas, and those on each replica by its port.
func (c *checker) calmReads() (all, replicas int, served map[int]int) {
	served = map[int]int{}
	for i := range c.h.Ops {
		op := &c.h.Ops[i]
		if !bare(op) || slices.ContainsFunc(c.h.Faults, func(f Fault) bool { return c.during(op, &f) }) {
			continue
		}
		all++
		if op.Standby {
			replicas++
			served[op.Port]++
		}
	}
	return all, replicas, served
}

// checkShares looks at who served the bare reads in good times.
func (c *checker) checkShares() {
	all, replicas, served := c.calmReads()
	if all == 0 || all < c.rules.ShareOf {
		return
	}
	if share := float64(replicas) / float64(all); share < c.rules.ReplicaShare {
		c.violate(FairShare, nil, "replicas served %d of %d session-less ReadOnly reads without trouble", replicas, all)
	}
	for _, port := range c.rules.Replicas {
		if share := float64(served[port]) / float64(all); share < c.rules.EachShare {
			c.violate(FairShare, nil, "the replica at port %d served %d of %d session-less ReadOnly reads without trouble", port, served[port], all)
		}
	}
}

// Summary counts what a history holds.
type Summary struct {
	Ops      map[string]int // "kind outcome"
	Errors   map[string]int // by kind, access and SQLSTATE or text
	Faults   map[string]int // by kind
	Nemesis  []string       // what went wrong with faults
	Reasons  map[string]int // decisions about ReadOnly reads that were served
	Reads    int            // ReadOnly reads that were served
	Replicas int            // those that replicas served
	Bare     int            // those of Reads without session, floor and transaction
	BareAway int            // those of Bare that replicas served
	Calm     int            // those of Bare in good times
	CalmAway int            // those of Calm that replicas served
	Unknown  int            // writes of unknown outcome
	Late     int            // those of Unknown that are in the ledger
	Longest  time.Duration  // the longest ReadOnly autocommit read that was served
}

func (c *checker) summary() Summary {
	s := Summary{Ops: map[string]int{}, Errors: map[string]int{}, Faults: map[string]int{}, Reasons: map[string]int{}}
	s.Calm, s.CalmAway, _ = c.calmReads()
	for i := range c.h.Faults {
		f := &c.h.Faults[i]
		s.Faults[f.Kind]++
		if f.Error != "" {
			s.Nemesis = append(s.Nemesis, f.Kind+": "+f.Error)
		}
	}
	for i := range c.h.Ops {
		op := &c.h.Ops[i]
		s.Ops[string(op.Kind)+" "+string(op.Outcome)]++
		if op.Outcome != OK && op.Kind != KindForbidden {
			s.Errors[strings.TrimSpace(string(op.Kind)+" "+string(op.Access)+" "+op.errorClass())]++
		}
		if op.Kind == KindWrite && op.Outcome == Unknown {
			s.Unknown++
			if len(c.versions[op.ID]) > 0 {
				s.Late++
			}
		}
		if op.Kind != KindRead || op.Outcome != OK || op.Access != ReadOnly {
			continue
		}
		s.Reads++
		s.Reasons[op.Reason]++
		if op.Standby {
			s.Replicas++
		}
		if bare(op) {
			s.Bare++
			if op.Standby {
				s.BareAway++
			}
		}
		if op.Tx == 0 {
			s.Longest = max(s.Longest, time.Duration(op.End-op.Start))
		}
	}
	return s
}

// errorClass is what errors are counted by.
func (o *Op) errorClass() string {
	if o.State != "" {
		return o.State
	}
	for _, known := range []string{
		"deadline exceeded", "canceled", "no fresh replica", "no primary", "no replica", "connection refused", "reset by peer",
		"unexpected EOF", "broken pipe", "conn closed", "bad connection",
	} {
		if strings.Contains(o.Error, known) {
			return known
		}
	}
	return o.Error
}

// String is a few lines for a log.
func (s Summary) String() string {
	var b strings.Builder
	for _, part := range []struct {
		name   string
		counts map[string]int
	}{{"operations", s.Ops}, {"faults", s.Faults}, {"errors", s.Errors}, {"reasons", s.Reasons}} {
		fmt.Fprintf(&b, "%s:", part.name)
		for _, key := range slices.Sorted(maps.Keys(part.counts)) {
			fmt.Fprintf(&b, " %s %d,", key, part.counts[key])
		}
		b.WriteString("\n")
	}
	for _, failure := range s.Nemesis {
		fmt.Fprintf(&b, "nemesis: %s\n", failure)
	}
	fmt.Fprintf(&b, "ReadOnly reads: %d, %.1f %% on replicas; without session, floor and transaction %d, %.1f %% on replicas; of those in good times %d, %.1f %% on replicas; longest %v\n",
		s.Reads, percent(s.Replicas, s.Reads), s.Bare, percent(s.BareAway, s.Bare),
		s.Calm, percent(s.CalmAway, s.Calm), s.Longest)
	fmt.Fprintf(&b, "writes of unknown outcome: %d, of which %d happened\n", s.Unknown, s.Late)
	return b.String()
}

func percent(part, whole int) float64 {
	if whole == 0 {
		return 0
	}
	return 100 * float64(part) / float64(whole)
}
