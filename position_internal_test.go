package pgsplit

import "testing"

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
