package pgsplit

import (
	"testing"
	"time"
)

func TestAServerThatIsDownIsTriedByOneCallerAtATime(t *testing.T) {
	now := time.Unix(1000, 0)
	clock := func() time.Time { return now }
	var h health
	if h.shuns(clock) || !h.enter(clock) {
		t.Fatal("a new server is shunned")
	}
	pause := firstRetry
	for range 6 {
		h.failed(now)
		if !h.shuns(clock) || h.enter(clock) {
			t.Fatalf("tried again at once")
		}
		now = now.Add(pause - 1)
		if !h.shuns(clock) || h.enter(clock) {
			t.Fatalf("tried again before %s", pause)
		}
		now = now.Add(1)
		if h.shuns(clock) || !h.enter(clock) {
			t.Fatalf("not tried again after %s", pause)
		}
		if !h.shuns(clock) || h.enter(clock) {
			t.Fatal("tried by two at once")
		}
		pause = min(2*pause, lastRetry)
	}
	h.abandoned()
	if h.shuns(clock) || !h.enter(clock) {
		t.Fatal("nobody tries after a try that proved nothing")
	}
	h.succeeded()
	if h.shuns(clock) || !h.enter(clock) || !h.enter(clock) {
		t.Fatal("not readmitted at once")
	}
	h.failed(now)
	now = now.Add(firstRetry)
	if h.shuns(clock) {
		t.Fatal("the pause did not start anew")
	}
}
