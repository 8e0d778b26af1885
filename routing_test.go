package pgsplit

import (
	"fmt"
	"testing"
)

func TestEveryReasonHasANameOfItsOwn(t *testing.T) {
	seen := map[string]Reason{}
	for r := range reasonCount {
		name := r.String()
		if name == "" || name == "unknown" {
			t.Errorf("reason %d has no name", r)
		}
		if other, ok := seen[name]; ok {
			t.Errorf("reasons %d and %d are both %q", other, r, name)
		}
		seen[name] = r
	}
	if reasonCount.String() != "unknown" {
		t.Error("a reason that does not exist has a name")
	}
}

func TestTheNextServer(t *testing.T) {
	read := request{readOnly: true}
	with := func(change func(*request)) request {
		r := read
		change(&r)
		return r
	}
	two := []view{{weight: 1}, {weight: 1}}
	tests := map[string]struct {
		request  request
		replicas []view
		progress progress
		want     step
	}{
		"nothing said":           {request{}, two, progress{}, step{target: toPrimary, reason: ReasonUnhinted}},
		"a floor does not route": {request{floor: 9}, two, progress{}, step{target: toPrimary, reason: ReasonUnhinted}},
		"primary said":           {request{primary: true}, two, progress{}, step{target: toPrimary, reason: ReasonPrimary}},
		"no replicas":            {read, nil, progress{}, step{target: toPrimary, reason: ReasonNoReplicas}},
		"no replicas, replica only": {with(func(r *request) { r.replicaOnly = true }), nil, progress{},
			step{target: toNowhere, reason: ReasonNoReplica}},
		"serializable": {with(func(r *request) { r.isolation = true }), two, progress{},
			step{target: toPrimary, reason: ReasonIsolation}},
		"serializable, replica only": {with(func(r *request) { r.isolation, r.replicaOnly = true, true }), two, progress{},
			step{target: toNowhere, reason: ReasonNoReplica}},
		"the less busy one":   {read, []view{{weight: 1, inUse: 2}, {weight: 1, inUse: 1}}, progress{}, step{target: 1}},
		"busy for its weight": {read, []view{{weight: 3, inUse: 2}, {weight: 1, inUse: 1}}, progress{}, step{target: 0}},
		"one is down":         {read, []view{{weight: 1, state: down}, {weight: 1, inUse: 9}}, progress{}, step{target: 1}},
		"one was tried":       {read, two, progress{tried: 1}, step{target: 1}},
		"all are down": {read, []view{{weight: 1, state: down}, {weight: 1, state: down}}, progress{},
			step{target: toPrimary, reason: ReasonReplicasDown}},
		"a suspect is left alone": {read, []view{{weight: 1, state: suspect}, {weight: 1, inUse: 9}}, progress{}, step{target: 1}},
		"all are suspect": {read, []view{{weight: 1, state: suspect}, {weight: 1, state: down}}, progress{},
			step{target: toPrimary, reason: ReasonReplicasDown}},
		"a suspect is better than none": {with(func(r *request) { r.replicaOnly = true }),
			[]view{{weight: 1, state: suspect}, {weight: 1, state: down}}, progress{}, step{target: 0}},
		"a suspect while there is no primary": {read, []view{{weight: 1, state: suspect}, {weight: 1, state: down}},
			progress{noPrimary: true}, step{target: 0}},
		"down while there is no primary": {read, []view{{weight: 1, state: down}}, progress{noPrimary: true},
			step{target: toNowhere, reason: ReasonNoPrimary}},
		"behind while there is no primary": {with(func(r *request) { r.floor = 9 }), two,
			progress{tried: 3, behind: 1, noPrimary: true}, step{target: toNowhere, reason: ReasonNoFreshReplica}},
		"pinned while there is no primary": {with(func(r *request) { r.pinned = true }), two, progress{noPrimary: true},
			step{target: toNowhere, reason: ReasonNoFreshReplica}},
		"a replica stands in": {request{standIn: true}, two, progress{noPrimary: true}, step{target: 0}},
		"no replica can stand in": {request{standIn: true}, two, progress{tried: 3, noPrimary: true},
			step{target: toNowhere, reason: ReasonNoPrimary}},
		"one that refuses may have a connection at hand": {read, []view{{weight: 1, state: refusing}}, progress{}, step{target: 0}},
		"moves on to the next":                           {read, two, progress{tried: 2, failed: 2}, step{target: 0}},
		"moves on to the primary":                        {read, two, progress{tried: 3, failed: 2}, step{target: toPrimary, reason: ReasonMovedOn}},
		"all failed":                                     {read, two, progress{tried: 3}, step{target: toPrimary, reason: ReasonReplicasDown}},
		"all failed, replica only": {with(func(r *request) { r.replicaOnly = true }), two, progress{tried: 3},
			step{target: toNowhere, reason: ReasonNoReplica}},
		"one behind, one down": {with(func(r *request) { r.floor = 9 }), []view{{weight: 1}, {weight: 1, state: down}},
			progress{tried: 1, behind: 1}, step{target: toPrimary, reason: ReasonReplicasBehind}},
		"behind, error asked for": {with(func(r *request) { r.floor, r.failStale = 9, true }), two,
			progress{tried: 3, behind: 2}, step{target: toNowhere, reason: ReasonNoFreshReplica}},
		"behind, replica only": {with(func(r *request) { r.floor, r.replicaOnly = 9, true }), two,
			progress{tried: 3, behind: 3}, step{target: toNowhere, reason: ReasonNoFreshReplica}},
		"down is no reason for the error about staleness": {with(func(r *request) { r.failStale = true }), two,
			progress{tried: 3}, step{target: toPrimary, reason: ReasonReplicasDown}},
		"waits where most was replayed": {with(func(r *request) { r.floor, r.mayWait = 9, true }),
			[]view{{weight: 1, position: 3}, {weight: 1, position: 7}}, progress{tried: 3, behind: 3},
			step{target: 1, wait: true}},
		"does not wait where it failed": {with(func(r *request) { r.floor, r.mayWait = 9, true }),
			[]view{{weight: 1, position: 3}, {weight: 1, position: 7}}, progress{tried: 3, behind: 1},
			step{target: 0, wait: true}},
		"waits once": {with(func(r *request) { r.floor, r.mayWait = 9, true }), two,
			progress{tried: 3, behind: 3, waited: true}, step{target: toPrimary, reason: ReasonReplicasBehind}},
		"at the floor before busier": {with(func(r *request) { r.floor = 9 }),
			[]view{{weight: 1, position: 8}, {weight: 1, position: 9, inUse: 5}}, progress{}, step{target: 1}},
		"beyond the floor is not better": {with(func(r *request) { r.floor = 9 }),
			[]view{{weight: 1, position: 99, inUse: 1}, {weight: 1, position: 9}}, progress{}, step{target: 1}},
		"the less busy one of one at the floor and one not asked lately": {with(func(r *request) { r.floor = 9 }),
			[]view{{weight: 1, position: 9, inUse: 1}, {weight: 1, position: 2, unasked: true}}, progress{}, step{target: 1}},
		"the furthest of those behind": {with(func(r *request) { r.floor = 9 }),
			[]view{{weight: 1, position: 2}, {weight: 1, position: 5, inUse: 5}}, progress{}, step{target: 1}},
		"the label before the position": {with(func(r *request) { r.floor, r.prefer = 9, "near" }),
			[]view{{weight: 1, position: 9}, {weight: 1, label: "near"}}, progress{}, step{target: 1}},
		"another one if the label is down": {with(func(r *request) { r.prefer = "near" }),
			[]view{{weight: 1}, {weight: 1, label: "near", state: down}}, progress{}, step{target: 0}},
		"round robin does not look at who is busy": {with(func(r *request) { r.roundRobin, r.turn = true, 0 }),
			[]view{{weight: 1, inUse: 5}, {weight: 1}}, progress{}, step{target: 0}},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			if got := next(&test.request, test.replicas, test.progress); got != test.want {
				t.Errorf("got %+v, want %+v", got, test.want)
			}
		})
	}
}

func TestEqualsTakeTurnsByTheirWeight(t *testing.T) {
	replicas := []view{{weight: 2}, {weight: 1}, {weight: 1, state: down}}
	count := make([]int, len(replicas))
	for turn := range uint64(30) {
		r := request{readOnly: true, turn: turn}
		count[next(&r, replicas, progress{}).target]++
	}
	if fmt.Sprint(count) != "[20 10 0]" {
		t.Errorf("turns by server: %v", count)
	}
}

// Over the whole input space: whatever happened to a read so far, its pass over the servers ends, visits no server
// twice except to wait, and stays within what was allowed.
func TestAPassOverTheServersEnds(t *testing.T) {
	states := []state{healthy, refusing, suspect, down}
	labels := []string{"", "near"}
	positions := []LSN{0, 5, 9}
	outcomes := []string{"behind", "failed", "moved on"}
	var views [][]view
	for n := range 3 {
		views = append(views, combinations(n, labels, positions, states)...)
	}
	passes := 0
	for _, replicas := range views {
		for bits := range 256 {
			if bits&1 != 0 && bits&64 != 0 || bits&1 == 0 && bits&128 != 0 {
				continue // replicas stand in only for what is no read, and only a read has the primary to fall back to
			}
			r := request{readOnly: bits&1 != 0, primary: bits&1 == 0 && bits&2 != 0, replicaOnly: bits&4 != 0,
				isolation: bits&8 != 0, mayWait: bits&16 != 0, failStale: bits&32 != 0, standIn: bits&(1|2|64) == 64}
			for _, floor := range []LSN{0, 9} {
				for _, prefer := range labels {
					for _, outcome := range outcomes {
						if outcome == "behind" && floor == 0 {
							continue // nobody is behind then
						}
						r.floor, r.prefer, r.roundRobin = floor, prefer, bits&2 != 0
						walk(t, r, replicas, outcome, bits&128 != 0)
						passes++
					}
				}
			}
		}
	}
	t.Logf("%d passes", passes)
}

func combinations(n int, labels []string, positions []LSN, states []state) [][]view {
	if n == 0 {
		return [][]view{nil}
	}
	var all [][]view
	for _, rest := range combinations(n-1, labels, positions, states) {
		for _, label := range labels {
			for _, position := range positions {
				for _, state := range states {
					v := view{label: label, position: position, state: state, weight: n, inUse: n % 2}
					all = append(all, append(append([]view(nil), rest...), v))
				}
			}
		}
	}
	return all
}

// walk follows one read; the primary lets nobody in if noPrimary says so.
func walk(t *testing.T, r request, replicas []view, outcome string, noPrimary bool) {
	t.Helper()
	p := progress{noPrimary: r.standIn}
	for steps := 0; ; steps++ {
		if steps > len(replicas)+2 {
			t.Fatalf("no end: %+v %+v", r, replicas)
		}
		s := next(&r, replicas, p)
		switch {
		case s.target == toPrimary:
			if r.readOnly && r.replicaOnly {
				t.Fatalf("the primary was forbidden: %+v", r)
			}
			if r.readOnly && s.reason == ReasonReplicasBehind && (r.failStale || p.behind == 0) {
				t.Fatalf("wrong reason %s: %+v %+v", s.reason, r, p)
			}
			if p.noPrimary {
				t.Fatalf("the primary was asked twice: %+v %+v", r, p)
			}
			if noPrimary && r.readOnly {
				p.noPrimary = true
				continue
			}
			return
		case s.target == toNowhere:
			if !r.readOnly && !r.standIn || !r.replicaOnly && !p.noPrimary && (!r.failStale || p.behind == 0) {
				t.Fatalf("nowhere without a cause: %+v %+v", r, p)
			}
			if p.noPrimary && !r.replicaOnly {
				for i, v := range replicas {
					if v.state <= suspect && !p.tried.has(i) && !r.isolation {
						t.Fatalf("replica %d was not asked: %+v %+v", i, r, p)
					}
				}
			}
			return
		case !r.readOnly && !r.standIn || r.isolation:
			t.Fatalf("a replica for %+v", r)
		case replicas[s.target].state == down:
			t.Fatalf("a server that is down: %+v", replicas)
		case replicas[s.target].state == suspect && !p.noPrimary && !r.replicaOnly:
			t.Fatalf("a suspect though there is a primary: %+v", replicas)
		case s.wait && (p.waited || !r.mayWait || !p.behind.has(s.target)):
			t.Fatalf("a wait that makes no sense: %+v %+v", r, p)
		case !s.wait && p.tried.has(s.target):
			t.Fatalf("tried twice: %+v %+v", r, p)
		}
		if s.wait {
			p.waited = true
		}
		p.tried = p.tried.with(s.target)
		if outcome == "behind" && r.floor != 0 {
			p.behind = p.behind.with(s.target)
		}
		if outcome == "moved on" {
			p.failed = p.failed.with(s.target)
		}
	}
}
