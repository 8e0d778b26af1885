package pgsplit

import (
	"cmp"
	"math/bits"
)

// This file decides. It opens nothing, reads no clock and holds no state: values in, the next step out.

// Reason says why a statement went where it went. It is the same in Stats, hooks, logs and tests.
type Reason uint8

const (
	// ReasonUnhinted: the context said nothing, so the primary.
	ReasonUnhinted Reason = iota
	// ReasonPrimary: the context said Primary.
	ReasonPrimary
	// ReasonInTx: the connection is inside a transaction, or its rows are still being read.
	ReasonInTx
	// ReasonHeld: an unhinted statement ran on the held connection before, so its state is there.
	ReasonHeld
	// ReasonSession: the primary, because a write of the session may not be visible on any replica yet, or because it is
	// pinned.
	ReasonSession
	// ReasonReplica: a replica, and no floor was asked for.
	ReasonReplica
	// ReasonFloorKnown: a replica whose remembered position covers the floor.
	ReasonFloorKnown
	// ReasonFloorChecked: a replica that was asked and covers the floor.
	ReasonFloorChecked
	// ReasonFloorWaited: a replica that reached the floor while the read waited.
	ReasonFloorWaited
	// ReasonIsolation: the primary, because no standby can give the isolation asked for.
	ReasonIsolation
	// ReasonNoReplicas: the primary, because no replica is configured.
	ReasonNoReplicas
	// ReasonReplicasBehind: the primary, because no replica is proven to have reached the floor.
	ReasonReplicasBehind
	// ReasonReplicasDown: the primary, because no replica let the read in.
	ReasonReplicasDown
	// ReasonMovedOn: the primary, because the replicas that began to serve the read could not.
	ReasonMovedOn
	// ReasonPrimaryDown: a replica, though the context said nothing, because no primary accepts (PrimaryDownRead).
	ReasonPrimaryDown
	// ReasonNoPrimary: nowhere, the primary did not let the statement in (ErrNoPrimary).
	ReasonNoPrimary
	// ReasonNoReplica: nowhere, ReplicaOnly and no replica let the read in (ErrNoReplica).
	ReasonNoReplica
	// ReasonNoFreshReplica: nowhere, no allowed server is proven to have the floor (ErrNoFreshReplica).
	ReasonNoFreshReplica

	reasonCount
)

var reasonNames = [reasonCount]string{
	ReasonUnhinted:       "unhinted",
	ReasonPrimary:        "primary_hint",
	ReasonInTx:           "in_tx",
	ReasonHeld:           "held",
	ReasonSession:        "session",
	ReasonReplica:        "replica",
	ReasonFloorKnown:     "floor_known",
	ReasonFloorChecked:   "floor_checked",
	ReasonFloorWaited:    "floor_waited",
	ReasonIsolation:      "isolation",
	ReasonNoReplicas:     "no_replicas",
	ReasonReplicasBehind: "replicas_behind",
	ReasonReplicasDown:   "replicas_down",
	ReasonMovedOn:        "moved_on",
	ReasonPrimaryDown:    "primary_down",
	ReasonNoPrimary:      "no_primary",
	ReasonNoReplica:      "no_replica",
	ReasonNoFreshReplica: "no_fresh_replica",
}

// String is the reason's name in metrics and logs, such as "floor_checked".
func (r Reason) String() string {
	if r >= reasonCount {
		return "unknown"
	}
	return reasonNames[r]
}

// Decision is where one statement or transaction goes.
type Decision struct {
	Server   string // its configured name, or its address; empty if it goes nowhere
	Role     string // "primary" or "replica", as configured; empty if it goes nowhere
	Reason   Reason
	Floor    LSN // the least position it had to see; zero: none
	Position LSN // what is known to be replayed by the instance that serves it; zero on a primary
}

// serverSet is a set of replicas by their index, which is below maxReplicas.
type serverSet uint64

func (s serverSet) has(i int) bool       { return s&(1<<i) != 0 }
func (s serverSet) with(i int) serverSet { return s | 1<<i }
func (s serverSet) count() int           { return bits.OnesCount64(uint64(s)) }

// request is what one statement asks of the routing.
type request struct {
	readOnly     bool   // ReadOnly was said last
	primary      bool   // Primary was said last
	replicaOnly  bool   // no fallback to the primary
	standIn      bool   // nothing was said, but a replica will do while no primary accepts
	isolation    bool   // an isolation that no standby gives (F12)
	floor        LSN    // the least position the read must see; 0: none
	hard         LSN    // the part of it that holds even while no primary answers
	pinned       bool   // only the primary will do for the session
	timeline     uint32 // the timeline of the floor; 0: any
	hardTimeline uint32 // that of hard
	scope        *scope // the sessions around the read
	system       uint64 // their cluster
	prefer       string // label of the replicas to try first
	mayWait      bool   // there is time to wait for a replica
	failStale    bool   // replica_on_stale=error
	roundRobin   bool   // replica_balance=round_robin
	turn         uint64 // counts reads: whose turn it is among equals
}

// view is what the routing sees of one replica.
type view struct {
	label    string
	weight   int
	inUse    int  // leases out
	position LSN  // last one seen, of whichever instance: a guess for the order, never a proof (F9)
	stays    bool // the session read there last
	unasked  bool // not asked lately: it may be further by now
	state    state
}

// progress is how far one statement has come in its single pass over the servers.
type progress struct {
	tried     serverSet // replicas that were leased or failed
	behind    serverSet // those of them that are not proven to have the floor
	failed    serverSet // those of them that began to serve it and could not
	waited    bool
	noPrimary bool // the primary did not let it in
}

// target is a replica's index, or one of these.
const (
	toPrimary = -1
	toNowhere = -2
)

// step is where a statement goes next.
type step struct {
	target int
	wait   bool   // wait there for the floor
	reason Reason // why, unless the target is a replica: there the proof of the floor gives the reason
}

// next is the next server to try, given what was tried. It visits a replica once, and once more to wait.
func next(r *request, replicas []view, p progress) step {
	switch {
	case !r.readOnly && r.primary:
		return step{target: toPrimary, reason: ReasonPrimary}
	case !r.readOnly && !r.standIn:
		return step{target: toPrimary, reason: ReasonUnhinted}
	case r.isolation:
		return fallback(r, p, ReasonIsolation, ReasonNoReplica)
	case len(replicas) == 0:
		return fallback(r, p, ReasonNoReplicas, ReasonNoReplica)
	case r.pinned:
		return fallback(r, p, ReasonSession, ReasonNoFreshReplica)
	}
	if i := choose(r, replicas, p.tried, refusing); i >= 0 {
		return step{target: i}
	}
	if r.replicaOnly || p.noPrimary {
		// What is suspect may well be good, and there is nobody else.
		if i := choose(r, replicas, p.tried, suspect); i >= 0 {
			return step{target: i}
		}
	}
	switch {
	case p.behind != 0 && r.mayWait && !p.waited:
		return step{target: furthest(replicas, p.behind), wait: true}
	case p.behind != 0 && r.failStale:
		return step{target: toNowhere, reason: ReasonNoFreshReplica}
	case p.behind != 0:
		return fallback(r, p, ReasonReplicasBehind, ReasonNoFreshReplica)
	case p.failed != 0:
		return fallback(r, p, ReasonMovedOn, ReasonNoReplica)
	}
	return fallback(r, p, ReasonReplicasDown, ReasonNoReplica)
}

// fallback is the primary, if the read may go there and it was not tried.
func fallback(r *request, p progress, primary, nowhere Reason) step {
	switch {
	case r.replicaOnly, p.noPrimary && nowhere == ReasonNoFreshReplica:
		return step{target: toNowhere, reason: nowhere}
	case p.noPrimary:
		return step{target: toNowhere, reason: ReasonNoPrimary}
	}
	return step{target: toPrimary, reason: primary}
}

// choose is the best replica that is in no worse state and was not tried, or -1.
func choose(r *request, replicas []view, tried serverSet, worst state) int {
	best, equals, weights := -1, serverSet(0), 0
	for i := range replicas {
		if replicas[i].state > worst || tried.has(i) {
			continue
		}
		order := 1
		if best >= 0 {
			order = compare(r, &replicas[i], &replicas[best])
		}
		switch {
		case order > 0:
			best, equals, weights = i, serverSet(0).with(i), replicas[i].weight
		case order == 0:
			equals, weights = equals.with(i), weights+replicas[i].weight
		}
	}
	if equals.count() < 2 {
		return best
	}
	// Among equals each has as many turns as its weight.
	turn := int(r.turn % uint64(weights))
	for i := range replicas {
		if !equals.has(i) {
			continue
		}
		if turn -= replicas[i].weight; turn < 0 {
			return i
		}
	}
	return best
}

// compare is above 0 if a is to be tried before b: the preferred label first, then one that was last seen at the floor,
// or may be there by now, then the one that came further, then the one that the session
// read last, then the one with the fewer leases for its weight.
func compare(r *request, a, b *view) int {
	if r.prefer != "" {
		if order := cmp.Compare(truth(a.label == r.prefer), truth(b.label == r.prefer)); order != 0 {
			return order
		}
	}
	if r.floor != 0 {
		if order := cmp.Compare(a.reach(r.floor), b.reach(r.floor)); order != 0 {
			return order
		}
	}
	if order := cmp.Compare(truth(a.stays), truth(b.stays)); order != 0 {
		return order
	}
	if r.roundRobin {
		return 0
	}
	return cmp.Compare(b.inUse*a.weight, a.inUse*b.weight)
}

// reach is how far the replica may be, up to the floor. One that was not asked lately gets the benefit of the doubt: it
// would never be asked again otherwise, while another one is known to be there.
func (v *view) reach(floor LSN) LSN {
	if v.unasked {
		return floor
	}
	return min(v.position, floor)
}

func truth(b bool) int {
	if b {
		return 1
	}
	return 0
}

// furthest is the replica of the set that was last seen at the highest position.
func furthest(replicas []view, set serverSet) int {
	best := -1
	for i := range replicas {
		if set.has(i) && (best < 0 || replicas[i].position > replicas[best].position) {
			best = i
		}
	}
	return best
}
