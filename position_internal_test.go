package pgsplit

import (
	"testing"
	"time"
)

// Answers that overtake each other are of one life: nothing went back.
func TestAPositionIsASetbackOnlyIfAnotherLifeTellsIt(t *testing.T) {
	s := &server{}
	one := &physical{server: s, inst: &instance{hash: 1}}
	other := &physical{server: s, inst: &instance{hash: 2}}
	for i, seen := range []struct {
		by       *physical
		lsn      LSN
		setbacks uint64
	}{
		{one, 10, 0}, {one, 5, 0}, {one, 20, 0}, {other, 30, 0}, {other, 20, 0}, {one, 10, 1}, {one, 9, 1}, {other, 8, 2},
	} {
		seen.by.saw(seen.lsn)
		if n := s.stats.setbacks.Load(); n != seen.setbacks {
			t.Errorf("after %d: %d setbacks, want %d", i, n, seen.setbacks)
		}
	}
}

// However often the primary is asked, each age has a sample that is not much younger, and the newest one is there: with 64 that
// lie evenly over five orders of magnitude the next one is never as far as two fifths of the age.
func TestSamplesReachBackHoweverManyThereAre(t *testing.T) {
	start := time.Now()
	for _, every := range []time.Duration{10 * time.Millisecond, 300 * time.Millisecond} {
		var s samples
		now := start
		for lsn := LSN(1); now.Sub(start) < 20*time.Minute; lsn++ {
			now = now.Add(every)
			s.add(sample{at: now, floor: floor{1, lsn}})
		}
		if s.newest().at != now || len(s.kept) > keptSamples {
			t.Errorf("every %v: %d are kept, and the newest is %v old", every, len(s.kept), now.Sub(s.newest().at))
		}
		for age := 10 * every; age < 20*time.Minute; age += age / 7 {
			if v, newest := s.within(now, age); newest != 0 || v.lsn == 0 || now.Sub(v.at) > age || now.Sub(v.at) < age*3/5 {
				t.Errorf("every %v: within %v there is one that is %v old", every, age, now.Sub(v.at))
			}
		}
	}
}

// Of two who ask at the same time the one who asked later may be told before.
func TestSamplesAreInTheOrderInWhichTheyWereAskedFor(t *testing.T) {
	var s samples
	now := time.Now()
	for _, ago := range []time.Duration{9, 5, 7, 1, 3} {
		s.add(sample{at: now.Add(-ago * time.Second), floor: floor{1, LSN(10 - ago)}})
	}
	for age, want := range map[time.Duration]LSN{10: 1, 8: 3, 6: 5, 4: 7, 2: 9} {
		if v, newest := s.within(now, age*time.Second); v.lsn != want || newest != time.Second {
			t.Errorf("within %d s: %v, want %v; the newest is %v old", age, v.lsn, want, newest)
		}
	}
}
