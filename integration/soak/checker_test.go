package soak

import (
	"slices"
	"strings"
	"testing"
	"time"
)

// ms is a time of a hand-made history.
func ms(n int64) int64 { return n * int64(time.Millisecond) }

// at makes an operation that goes on from one millisecond to another, on process 1 unless its ID says otherwise.
func at(id uint64, start, end int64, op Op) Op {
	op.ID, op.Start, op.End = id, ms(start), ms(end)
	if op.Outcome == "" {
		op.Outcome = OK
	}
	return op
}

// wrote is a write of key 1.
func wrote(session uint64, outcome Outcome) Op {
	return Op{Kind: KindWrite, Session: session, Writes: []Value{{Key: 1}}, Outcome: outcome}
}

// saw is a ReadOnly read of key 1 on a replica, which showed a version and the write that made it.
func saw(session uint64, version int64, by uint64) Op {
	return Op{Kind: KindRead, Access: ReadOnly, Session: session, Standby: true, Reads: []Value{{Key: 1, Version: version, Op: by}}}
}

// onPrimary is the same, served by the primary.
func onPrimary(op Op) Op {
	op.Standby = false
	return op
}

func withFloor(op Op, floor uint64) Op {
	op.FloorOf = floor
	return op
}

func began(carry bool, tokens ...uint64) Op {
	return Op{Kind: KindSession, Carry: carry, Tokens: tokens}
}

func took(session uint64) Op { return Op{Kind: KindToken, Session: session} }

// made are rows of the ledger for key 1: version by version, the write.
func made(ops ...uint64) []Value {
	var rows []Value
	for i, op := range ops {
		rows = append(rows, Value{Key: 1, Version: int64(i + 1), Op: op})
	}
	return rows
}

// foreign is an operation ID of another process.
const foreign = 2 << processBits

// TestCheckJudgesHistories has the smallest histories that break each rule, and their like that do not.
func TestCheckJudgesHistories(t *testing.T) {
	for _, test := range []struct {
		name   string
		ops    []Op
		ledger []Value
		want   Rule // "": nothing is wrong
	}{
		{"a session reads its write", []Op{
			at(1, 0, 0, began(false)), at(2, 1, 2, wrote(1, OK)), at(3, 3, 4, saw(1, 1, 2)),
		}, made(2), ""},
		{"a session misses its write", []Op{
			at(1, 0, 0, began(false)), at(2, 1, 2, wrote(1, OK)), at(3, 3, 4, saw(1, 0, 0)),
		}, made(2), ReadYourWrites},
		{"a read that began before the write was acknowledged may miss it", []Op{
			at(1, 0, 0, began(false)), at(2, 1, 5, wrote(1, OK)), at(3, 3, 6, saw(1, 0, 0)),
		}, made(2), ""},
		{"a read without the session may miss it", []Op{
			at(1, 0, 0, began(false)), at(2, 1, 2, wrote(1, OK)), at(3, 3, 4, saw(0, 0, 0)),
		}, made(2), ""},
		{"a transaction misses a write from before its begin", []Op{
			at(1, 0, 0, began(false)), at(2, 1, 2, wrote(1, OK)),
			at(3, 5, 6, Op{Kind: KindRead, Access: ReadOnly, Session: 1, Tx: 9, Since: ms(3), Standby: true, Reads: []Value{{Key: 1}}}),
		}, made(2), ReadYourWrites},
		{"a transaction may miss one from after its begin", []Op{
			at(1, 0, 0, began(false)), at(2, 1, 4, wrote(1, OK)),
			at(3, 5, 6, Op{Kind: KindRead, Access: ReadOnly, Session: 1, Tx: 9, Since: ms(3), Standby: true, Reads: []Value{{Key: 1}}}),
		}, made(2), ""},
		{"a write of unknown outcome may be missed", []Op{
			at(1, 0, 0, began(false)), at(2, 1, 2, wrote(1, Unknown)), at(3, 13, 14, saw(1, 0, 0)),
		}, made(2), ""},
		{"until the primary has shown it", []Op{
			at(1, 0, 0, began(false)), at(2, 1, 2, wrote(1, Unknown)),
			at(foreign, 5, 6, onPrimary(saw(0, 1, 2))), at(3, 13, 14, saw(1, 0, 0)),
		}, made(2), ReadYourWrites},
		{"a write of unknown outcome that never happened cannot be missed", []Op{
			at(1, 0, 0, began(false)), at(2, 1, 2, wrote(1, Unknown)), at(3, 3, 4, saw(1, 0, 0)),
		}, nil, ""},

		{"a token carries writes", []Op{
			at(1, 0, 0, began(false)), at(2, 1, 2, wrote(1, OK)), at(3, 3, 4, took(1)),
			at(foreign, 5, 5, began(false, 3)), at(foreign+1, 6, 7, saw(foreign, 0, 0)),
		}, made(2), ReadYourWrites},
		{"a token carries those of its own token", []Op{
			at(1, 0, 0, began(false)), at(2, 1, 2, wrote(1, OK)), at(3, 3, 4, took(1)),
			at(foreign, 5, 5, began(false, 3)), at(foreign+1, 6, 7, took(foreign)),
			at(4, 8, 8, began(false, foreign+1)), at(5, 9, 9, saw(4, 0, 0)),
		}, made(2), ReadYourWrites},
		{"not those that came later", []Op{
			at(1, 0, 0, began(false)), at(3, 1, 2, took(1)), at(2, 3, 4, wrote(1, OK)),
			at(foreign, 5, 5, began(false, 3)), at(foreign+1, 6, 7, saw(foreign, 0, 0)),
		}, made(2), ""},
		{"of two tokens that are merged both count", []Op{
			at(1, 0, 0, began(false)), at(2, 1, 2, wrote(1, OK)), at(3, 3, 4, took(1)),
			at(4, 0, 0, began(false)), at(5, 3, 4, took(4)), at(6, 5, 5, began(false, 3, 5)), at(7, 6, 7, saw(6, 0, 0)),
		}, made(2), ReadYourWrites},
		{"a token that a session goes on from later", []Op{
			at(1, 0, 0, began(false)), at(2, 1, 2, wrote(1, OK)), at(3, 3, 4, took(1)),
			at(4, 0, 0, began(false)), at(5, 5, 6, Op{Kind: KindAdvance, Session: 4, Tokens: []uint64{3}}), at(6, 7, 8, saw(4, 0, 0)),
		}, made(2), ReadYourWrites},
		{"counts from then on", []Op{
			at(1, 0, 0, began(false)), at(2, 1, 2, wrote(1, OK)), at(3, 3, 4, took(1)),
			at(4, 0, 0, began(false)), at(5, 5, 8, Op{Kind: KindAdvance, Session: 4, Tokens: []uint64{3}}), at(6, 7, 8, saw(4, 0, 0)),
		}, made(2), ""},
		{"a job misses the transaction that queued it", []Op{
			at(1, 0, 0, began(false)), at(3, 2, 3, took(1)), at(2, 1, 4, wrote(1, OK)),
			at(4, 5, 5, Op{Kind: KindSession, Tokens: []uint64{3}, After: []uint64{2}}), at(5, 6, 7, saw(4, 0, 0)),
		}, made(2), ReadYourWrites},
		{"a token without the transaction promises nothing of it", []Op{
			at(1, 0, 0, began(false)), at(3, 2, 3, took(1)), at(2, 1, 6, wrote(1, OK)),
			at(4, 5, 5, Op{Kind: KindSession, Tokens: []uint64{3}, After: []uint64{2}}), at(5, 6, 7, saw(4, 0, 0)),
		}, made(2), ""},

		{"a session goes back", []Op{
			at(1, 0, 0, began(false)), at(2, 1, 2, wrote(0, OK)), at(3, 3, 4, saw(1, 1, 2)), at(4, 5, 6, saw(1, 0, 0)),
		}, made(2), MonotonicReads},
		{"reads at the same time are in no order", []Op{
			at(1, 0, 0, began(false)), at(2, 1, 2, wrote(0, OK)), at(3, 3, 6, saw(1, 1, 2)), at(4, 5, 6, saw(1, 0, 0)),
		}, made(2), ""},
		{"another session may go back", []Op{
			at(1, 0, 0, began(false)), at(5, 0, 0, began(false)), at(2, 1, 2, wrote(0, OK)), at(3, 3, 4, saw(1, 1, 2)), at(4, 5, 6, saw(5, 0, 0)),
		}, made(2), ""},
		{"an unhinted read counts", []Op{
			at(1, 0, 0, began(false)), at(2, 1, 2, wrote(0, OK)),
			at(3, 3, 4, Op{Kind: KindRead, Session: 1, Reads: []Value{{Key: 1, Version: 1, Op: 2}}}), at(4, 5, 6, saw(1, 0, 0)),
		}, made(2), MonotonicReads},
		{"F6: the primary may be behind a replica while the commit is not acknowledged", []Op{
			at(1, 0, 0, began(false)), at(2, 1, 9, wrote(0, OK)), at(3, 3, 4, saw(1, 1, 2)), at(4, 5, 6, onPrimary(saw(1, 0, 0))),
		}, made(2), ""},
		{"not longer", []Op{
			at(1, 0, 0, began(false)), at(2, 1, 5, wrote(0, OK)), at(3, 3, 4, saw(1, 1, 2)), at(4, 15, 16, onPrimary(saw(1, 0, 0))),
		}, made(2), MonotonicReads},
		{"a token that carries reads", []Op{
			at(1, 0, 0, began(true)), at(2, 1, 2, wrote(0, OK)), at(3, 3, 4, saw(1, 1, 2)), at(4, 5, 6, took(1)),
			at(5, 7, 7, began(true, 4)), at(6, 8, 9, saw(5, 0, 0)),
		}, made(2), MonotonicReads},
		{"a token that does not", []Op{
			at(1, 0, 0, began(false)), at(2, 1, 2, wrote(0, OK)), at(3, 3, 4, saw(1, 1, 2)), at(4, 5, 6, took(1)),
			at(5, 7, 7, began(true, 4)), at(6, 8, 9, saw(5, 0, 0)),
		}, made(2), ""},

		{"a floor covers what was acknowledged anywhere", []Op{
			at(foreign, 1, 2, wrote(0, OK)), at(1, 13, 14, Op{Kind: KindFloor}), at(2, 15, 16, withFloor(saw(0, 0, 0), 1)),
		}, made(foreign), Floor},
		{"not what came later", []Op{
			at(foreign, 1, 14, wrote(0, OK)), at(1, 13, 14, Op{Kind: KindFloor}), at(2, 15, 16, withFloor(saw(0, 0, 0), 1)),
		}, made(foreign), ""},
		{"nor what another clock may have had later", []Op{
			at(foreign, 1, 12, wrote(0, OK)), at(1, 13, 14, Op{Kind: KindFloor}), at(2, 15, 16, withFloor(saw(0, 0, 0), 1)),
		}, made(foreign), ""},
		{"a read is too stale", []Op{
			at(1, 1, 2, wrote(0, OK)),
			at(2, 60, 61, Op{Kind: KindRead, Access: ReadOnly, Staleness: ms(50), Standby: true, Reads: []Value{{Key: 1}}}),
		}, made(1), Staleness},
		{"a read is stale within its bound", []Op{
			at(1, 1, 2, wrote(0, OK)),
			at(2, 60, 61, Op{Kind: KindRead, Access: ReadOnly, Staleness: ms(59), Standby: true, Reads: []Value{{Key: 1}}}),
		}, made(1), ""},

		{"what nobody wrote is read", []Op{at(1, 1, 2, saw(0, 1, 7))}, nil, Phantom},
		{"what was rolled back is read", []Op{at(1, 1, 2, wrote(0, Fail)), at(2, 3, 4, saw(0, 1, 1))}, nil, Phantom},
		{"a version that another write made is read", []Op{
			at(1, 1, 2, wrote(0, OK)), at(2, 1, 2, wrote(0, OK)), at(3, 3, 4, saw(0, 1, 2)),
		}, made(1, 2), Phantom},
		{"a page shows a row that nobody wrote", []Op{
			at(1, 1, 2, Op{Kind: KindRead, Rows: []Value{{Key: 1, Version: 1, Op: 9}}}),
		}, nil, Phantom},

		{"a write happens twice", []Op{at(1, 1, 2, wrote(0, OK))}, made(1, 1), DoubleWrite},
		{"a write of unknown outcome happens twice", []Op{at(1, 1, 2, wrote(0, Unknown))}, made(1, 1), DoubleWrite},
		{"two writes make one version", []Op{at(1, 1, 2, wrote(0, OK)), at(2, 1, 2, wrote(0, OK))},
			[]Value{{Key: 1, Version: 1, Op: 1}, {Key: 1, Version: 1, Op: 2}}, DoubleWrite},
		{"a write of unknown outcome happens", []Op{at(1, 1, 2, wrote(0, Unknown))}, made(1), ""},
		{"a write of unknown outcome does not happen", []Op{at(1, 1, 2, wrote(0, Unknown))}, nil, ""},
		{"an acknowledged write is lost", []Op{at(1, 1, 2, wrote(0, OK))}, nil, LostWrite},
		{"half of a transaction is lost", []Op{
			at(1, 1, 2, Op{Kind: KindWrite, Writes: []Value{{Key: 1}, {Key: 2}}}),
		}, made(1), LostWrite},
		{"a failed write is there", []Op{at(1, 1, 2, wrote(0, Fail))}, made(1), AbortedWrite},
		{"a write under ReadOnly fails", []Op{
			at(1, 1, 2, Op{Kind: KindForbidden, Access: ReadOnly, Outcome: Fail, Writes: []Value{{Key: 1}}}),
		}, nil, ""},
		{"a write under ReadOnly is acknowledged", []Op{
			at(1, 1, 2, Op{Kind: KindForbidden, Access: ReadOnly, Writes: []Value{{Key: 1}}}),
		}, nil, ReadOnlyWrite},
		{"a write under ReadOnly fails and is there", []Op{
			at(1, 1, 2, Op{Kind: KindForbidden, Access: ReadOnly, Outcome: Unknown, Writes: []Value{{Key: 1}}}),
		}, made(1), ReadOnlyWrite},
	} {
		t.Run(test.name, func(t *testing.T) {
			v := Check(&History{Ops: test.ops, Ledger: test.ledger}, Rules{Skew: 2 * time.Millisecond, Liveness: true, Served: time.Second, Servers: 3})
			wantRule(t, v, test.want)
		})
	}
}

// wantRule checks that the verdict has violations of one rule, or none.
func wantRule(t *testing.T, v Verdict, want Rule) {
	t.Helper()
	if want != "" && len(v.Violations) == 0 {
		t.Errorf("no violation, want one of %s", want)
	}
	for _, found := range v.Violations {
		if found.Rule != want {
			t.Errorf("want %q, found %s", want, found)
		}
	}
}

// read is a ReadOnly read without anything, at a time in milliseconds, on a replica with a port.
func read(id uint64, start, end int64, port int, outcome Outcome) Op {
	return at(id, start, end, Op{
		Kind: KindRead, Access: ReadOnly, Standby: port != 0, Port: port, Outcome: outcome, Budget: ms(5000),
	})
}

func trouble(kind string, down bool, start, end int64, servers ...string) Fault {
	return Fault{Kind: kind, Down: down, Start: ms(start), End: ms(end), Servers: servers}
}

// TestCheckJudgesWhoIsServed is about liveness.
func TestCheckJudgesWhoIsServed(t *testing.T) {
	everybody := trouble("cut", true, 1000, 2000, "primary", "replica1", "replica2")
	inSession := read(2, 1500, 1600, 0, Fail)
	inSession.Session = 1
	hasty := read(1, 1500, 1600, 0, Fail)
	hasty.Budget = ms(100)
	early := read(1, 1500, 1600, 0, Fail)
	early.State = undefinedColumn
	conflicting := read(1, 1500, 1600, 0, Fail)
	conflicting.State = conflict
	halfway := read(1, 0, 10, 1, Fail)
	halfway.Partial = true
	for _, test := range []struct {
		name   string
		ops    []Op
		faults []Fault
		want   Rule
	}{
		{"a read is served", []Op{read(1, 0, 900, 1, OK)}, nil, ""},
		{"a read fails and all is well", []Op{read(1, 0, 10, 0, Fail)}, nil, Liveness},
		{"a read takes too long", []Op{read(1, 0, 1100, 1, OK)}, nil, Liveness},
		{"a read fails while one replica is down", []Op{read(1, 1500, 1600, 0, Fail)},
			[]Fault{trouble("kill", true, 1000, 2000, "replica1")}, Liveness},
		{"a read fails while all replicas are down", []Op{read(1, 1500, 1600, 0, Fail)},
			[]Fault{trouble("kill", true, 1000, 2000, "replica1"), trouble("cut", true, 1000, 2000, "replica2")}, Liveness},
		{"a read fails while everybody is down", []Op{read(1, 1500, 1600, 0, Fail)}, []Fault{everybody}, ""},
		{"a read fails just after everybody was down", []Op{read(1, 2500, 2600, 0, Fail)}, []Fault{everybody}, ""},
		{"a read fails long after everybody was down", []Op{read(1, 4500, 4600, 0, Fail)}, []Fault{everybody}, Liveness},
		{"a read fails while replay is paused everywhere", []Op{read(1, 1500, 1600, 0, Fail)},
			[]Fault{trouble("pause", false, 1000, 2000, "primary", "replica1", "replica2")}, Liveness},
		{"a read that has to see something fails while the primary is down", []Op{at(1, 0, 0, began(false)), inSession},
			[]Fault{trouble("kill", true, 1000, 2000, "primary")}, ""},
		{"a read that has to see something fails while a replica is down", []Op{at(1, 0, 0, began(false)), inSession},
			[]Fault{trouble("kill", true, 1000, 2000, "replica1")}, Liveness},
		{"a read names a new column while the primary is down", []Op{early}, []Fault{trouble("cut", true, 1000, 2000, "primary")}, ""},
		{"a read names a new column while a replica is down", []Op{early}, []Fault{trouble("kill", true, 1000, 2000, "replica1")}, Liveness},
		{"a read conflicts with replay while the primary is down", []Op{conflicting}, []Fault{trouble("cut", true, 1000, 2000, "primary")}, ""},
		{"a read conflicts with replay while a replica is down", []Op{conflicting}, []Fault{trouble("kill", true, 1000, 2000, "replica1")}, Liveness},
		{"a read fails after its first row", []Op{halfway}, nil, ""},
		{"a caller that gave it too little time fails", []Op{hasty}, nil, ""},
	} {
		t.Run(test.name, func(t *testing.T) {
			rules := Rules{Liveness: true, Served: time.Second, Recovery: time.Second, Servers: 3}
			wantRule(t, Check(&History{Ops: test.ops, Faults: test.faults}, rules), test.want)
			rules.Liveness = false
			wantRule(t, Check(&History{Ops: test.ops, Faults: test.faults}, rules), "")
		})
	}
}

// TestCheckJudgesTheReplicasShare is about who serves bare reads in good times.
func TestCheckJudgesTheReplicasShare(t *testing.T) {
	// reads deals 100 reads out to ports in turn, from a time on; port 0 is the primary.
	reads := func(from int64, ports ...int) []Op {
		var ops []Op
		for i := range int64(100) {
			ops = append(ops, read(uint64(from+i), from+i, from+i+1, ports[i%int64(len(ports))], OK))
		}
		return ops
	}
	for _, test := range []struct {
		name   string
		ops    []Op
		faults []Fault
		want   Rule
	}{
		{"replicas serve all", reads(0, 1, 2), nil, ""},
		{"the primary serves half", reads(0, 1, 0, 2, 0), nil, FairShare},
		{"one replica serves nearly all", reads(0, 1, 1, 1, 1, 1, 1, 1, 1, 1, 2), nil, FairShare},
		{"the primary serves half during a fault", reads(0, 1, 0, 2, 0), []Fault{trouble("pause", false, 0, 50, "replica1")}, ""},
		{"too few to tell", reads(0, 0)[:10], nil, ""},
		{"in good times all is well", slices.Concat(reads(0, 0), reads(5000, 1, 2)), []Fault{trouble("kill", true, 0, 100, "replica1")}, ""},
	} {
		t.Run(test.name, func(t *testing.T) {
			rules := Rules{Recovery: time.Second, ReplicaShare: 0.9, EachShare: 0.25, Replicas: []int{1, 2}, ShareOf: 50}
			wantRule(t, Check(&History{Ops: test.ops, Faults: test.faults}, rules), test.want)
		})
	}
}

func TestAViolationShowsTheOperationsInTheirOrder(t *testing.T) {
	v := Check(&History{
		Ops:    []Op{at(3, 3, 4, saw(1, 0, 0)), at(2, 1, 2, wrote(1, OK)), at(1, 0, 0, began(false))},
		Ledger: made(2),
	}, Rules{})
	if len(v.Violations) != 1 {
		t.Fatalf("violations %v, want one", v.Violations)
	}
	text := v.Violations[0].String()
	last := -1
	for _, part := range []string{"read-your-writes: key 1", `"id":1,`, `"id":2,`, `"id":3,`} {
		found := strings.Index(text, part)
		if found <= last {
			t.Errorf("%q is missing or out of order in\n%s", part, text)
		}
		last = found
	}
}

func TestASummaryCountsUnknownWritesThatHappened(t *testing.T) {
	v := Check(&History{
		Ops:    []Op{at(1, 0, 1, wrote(0, Unknown)), at(2, 0, 1, wrote(0, Unknown)), at(3, 0, 1, wrote(0, OK))},
		Ledger: made(1, 3),
	}, Rules{})
	if v.Summary.Unknown != 2 || v.Summary.Late != 1 {
		t.Errorf("%d unknown, of which %d happened, want 2 and 1", v.Summary.Unknown, v.Summary.Late)
	}
}
