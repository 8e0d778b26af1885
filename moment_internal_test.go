package pgsplit

import (
	"testing"
	"time"
)

func TestAMomentIsATimeOfTheMonotonicClock(t *testing.T) {
	before := time.Now()
	m := present()
	if m <= 0 || m >= never {
		t.Fatalf("the present is %d", m)
	}
	if later := m.after(time.Hour); later.since(m) != time.Hour || m.since(later) != -time.Hour {
		t.Errorf("an hour after %d is %d", m, later)
	}
	hourAgo := m.after(-time.Hour).onWallClock()
	if off := before.Add(-time.Hour).Sub(hourAgo).Abs(); off > time.Minute {
		t.Errorf("an hour ago was at %s, %s off", hourAgo, off)
	}
	if next := present(); next < m {
		t.Errorf("it was %d, and is %d", m, next)
	}
	var shared sharedMoment
	if shared.store(m); shared.load() != m {
		t.Errorf("stored %d, loaded %d", m, shared.load())
	}
}
