package pgsplit

import (
	"errors"
	"testing"
	"time"
)

func TestAServersStateFollowsWhatHappensThere(t *testing.T) {
	want := map[state][6]state{
		//        letIn    refused   unreachable barred doubted mute
		healthy:  {healthy, refusing, down, suspect, suspect, healthy},
		refusing: {healthy, refusing, down, refusing, suspect, refusing},
		suspect:  {healthy, refusing, down, suspect, suspect, suspect},
		down:     {healthy, refusing, down, down, down, down},
	}
	for from, row := range want {
		for e, to := range row {
			if got := from.becomes(event(e)); got != to {
				t.Errorf("%s becomes %s by event %d, want %s", from, got, e, to)
			}
		}
	}
}

var (
	someRetry = retry{first: 250 * time.Millisecond, last: 2 * time.Second, jitter: func() float64 { return 0 }}
	errCause  = errors.New("the cause")
)

// happens tells the health what happened, and fails unless it asks for a probe after that pause; -1 is for none.
func happens(t *testing.T, h *health, e event, want time.Duration) {
	t.Helper()
	_, probe, pause := h.on(e, time.Unix(1000, 0), errCause, someRetry)
	if !probe {
		pause = -1
	}
	if pause != want {
		t.Fatalf("event %d in state %s: a probe in %v, want %v", e, h.state(), pause, want)
	}
}

func TestADownServerIsProbedWithDoublingPausesAndOneProbeAtATime(t *testing.T) {
	var h health
	happens(t, &h, letIn, -1)
	want := someRetry.first
	for range 6 {
		happens(t, &h, unreachable, want)
		happens(t, &h, unreachable, -1)
		happens(t, &h, doubted, -1)
		happens(t, &h, mute, -1)
		if !h.begin() {
			t.Fatal("the probe may not begin")
		}
		happens(t, &h, unreachable, -1) // others fail meanwhile
		h.end()
		want = min(2*want, someRetry.last)
	}
	happens(t, &h, unreachable, someRetry.last)
	happens(t, &h, letIn, -1)
	if h.state() != healthy || h.begin() {
		t.Fatalf("%s, and a healthy server is probed", h.state())
	}
	happens(t, &h, unreachable, someRetry.first)
}

func TestASuspectIsProbedAtOnce(t *testing.T) {
	var h health
	happens(t, &h, doubted, 0)
	if _, cause := h.why(); h.state() != suspect || cause != errCause || !h.begin() {
		t.Fatalf("%s because of %v", h.state(), cause)
	}
	h.end()
	happens(t, &h, unreachable, someRetry.first)
	if h.state() != down {
		t.Fatalf("%s", h.state())
	}
}

func TestASuspectWhoseConnectionsAtHandMayBeGoodIsProbedWithDoublingPauses(t *testing.T) {
	var h health
	happens(t, &h, barred, 0)
	for want := someRetry.first; want < someRetry.last; want *= 2 {
		if h.state() != suspect || !h.begin() {
			t.Fatalf("%s", h.state())
		}
		h.end()
		happens(t, &h, barred, want)
		happens(t, &h, barred, -1)
	}
	if !h.begin() {
		t.Fatal("the probe may not begin")
	}
	h.end()
	happens(t, &h, doubted, 0)
}

func TestADeadlineOfTheCallersHasAHealthyServerProbedAndNotSuspected(t *testing.T) {
	var h health
	happens(t, &h, mute, 0)
	if h.state() != healthy || !h.begin() {
		t.Fatalf("%s, or no probe", h.state())
	}
	happens(t, &h, mute, -1)
	h.end()
	happens(t, &h, letIn, -1)
	if h.begin() {
		t.Fatal("probed once more")
	}
}

func TestAServerTellsSinceWhenAndWhyItIsNotHealthy(t *testing.T) {
	var h health
	at := time.Unix(1000, 0)
	other := errors.New("another cause")
	h.on(unreachable, at, errCause, someRetry)
	h.on(doubted, at.Add(time.Second), other, someRetry)
	if since, cause := h.why(); !since.Equal(at) || cause != errCause {
		t.Errorf("since %v because of %v", since, cause)
	}
	changed, _, _ := h.on(refused, at.Add(2*time.Second), other, someRetry)
	if since, cause := h.why(); !changed.any() || !since.Equal(at.Add(2*time.Second)) || cause != other {
		t.Errorf("since %v because of %v", since, cause)
	}
	changed, _, _ = h.on(letIn, at.Add(3*time.Second), nil, someRetry)
	if since, cause := h.why(); !changed.any() || !since.Equal(at.Add(3*time.Second)) || cause != nil {
		t.Errorf("since %v because of %v", since, cause)
	}
}

func TestProbesThatEndedWithTheLastShellGoOnWithTheNext(t *testing.T) {
	var h health
	if h.resume() {
		t.Fatal("a healthy server is probed")
	}
	happens(t, &h, unreachable, someRetry.first)
	if h.resume() {
		t.Fatal("a second probe")
	}
	h.end()
	if !h.resume() || h.resume() {
		t.Fatal("not resumed once")
	}
}

func TestThePauseBetweenProbesIsCutByTheJitterAlone(t *testing.T) {
	for failures := range 100 {
		for _, cut := range []float64{0, 0.5, 0.999} {
			r := someRetry
			r.jitter = func() float64 { return cut }
			pause, whole := r.pause(failures), min(r.first<<min(failures, 10), r.last)
			if pause > whole || pause < whole*3/4 {
				t.Errorf("after %d failures %v of %v", failures, pause, whole)
			}
		}
	}
}

// Between a look at the state and one at its cause a probe can get in.
func TestAServerWithoutACauseIsNotClosed(t *testing.T) {
	s := &server{role: roleReplica}
	for _, state := range []state{healthy, refusing, suspect, down} {
		s.health.now.Store(uint32(state))
		if err := s.closedToNew(); err != nil {
			t.Errorf("%s: %v", state, err)
		}
	}
}
