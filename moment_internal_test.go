package pgsplit

import (
	"math"
	"testing"
	"time"
)

func TestAMomentIsATimeOfTheMonotonicClock(t *testing.T) {
	m := present()
	if m <= 0 || m >= never {
		t.Fatalf("the present is %d", m)
	}
	if later := m.after(time.Hour); later.since(m) != time.Hour || m.since(later) != -time.Hour {
		t.Errorf("an hour after %d is %d", m, later)
	}
	if end := m.after(math.MaxInt64); end != never {
		t.Errorf("longer than anything lasts after %d is %d", m, end)
	}
	if next := present(); next < m {
		t.Errorf("it was %d, and is %d", m, next)
	}
	var shared sharedMoment
	if shared.store(m); shared.load() != m {
		t.Errorf("stored %d, loaded %d", m, shared.load())
	}
}
