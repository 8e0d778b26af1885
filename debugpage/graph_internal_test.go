package debugpage

import (
	"context"
	"testing"
	"time"

	"github.com/pgsplit/pgsplit"
)

func TestAGraphShowsNothingOfTheTimeWhenNobodyLooked(t *testing.T) {
	now := time.Now()
	at := func(ago time.Duration, value float64) point { return point{at: now.Add(-ago), value: value} }
	down := at(30*time.Second, -1)
	down.down = true
	for name, test := range map[string]struct {
		points             []point
		line, now, highest string
		gaps               int
	}{
		"nothing":        {nil, "", "not known", "not known", 0},
		"one is a dot":   {[]point{at(30*time.Second, 512)}, "M300 75h0", "512 B", "512 B", 0},
		"two are a line": {[]point{at(30*time.Second, 0), at(15*time.Second, 2048)}, "M300 100L450 50", "2 kB", "2 kB", 0},
		"far apart":      {[]point{at(60*time.Second, 1024), at(15*time.Second, 0)}, "M0 50h0M450 100h0", "0 B", "1 kB", 0},
		"not known between": {[]point{at(45*time.Second, 1024), at(30*time.Second, -1), at(15*time.Second, 1024)},
			"M150 50h0M450 50h0", "1 kB", "1 kB", 0},
		"down at last": {[]point{at(45*time.Second, 1024), down}, "M150 50h0", "not known", "1 kB", 1},
	} {
		g := draw("lag", test.points, now, time.Minute, 1024, bytesText)
		if g.Line != test.line || g.Now != test.now || g.Highest != test.highest || len(g.Gaps) != test.gaps {
			t.Errorf("%s: %+v", name, g)
		}
	}
}

func TestAGraphIsAsWideAsItsSamplesAreOld(t *testing.T) {
	now := time.Now()
	for ago, want := range map[time.Duration]time.Duration{0: time.Minute, 59 * time.Second: time.Minute,
		2 * time.Minute: 5 * time.Minute, 9 * time.Minute: 10 * time.Minute} {
		if got := window([]sample{{at: now.Add(-ago)}}, now); got != want {
			t.Errorf("%v ago: %v", ago, got)
		}
	}
}

func TestTextsOfDurationsAndSizes(t *testing.T) {
	for d, want := range map[time.Duration]string{-1: "not known", 0: "0 s", 250 * time.Microsecond: "250 µs", 40 * time.Millisecond: "40 ms",
		1500 * time.Millisecond: "1.5 s", 5 * time.Second: "5 s", 90 * time.Second: "90 s", time.Minute: "1 min", 5 * time.Minute: "5 min",
		3 * time.Hour: "3 h", 100 * time.Hour: "4 days"} {
		if got := brief(d); got != want {
			t.Errorf("%v: %q, want %q", d, got, want)
		}
	}
	for v, want := range map[float64]string{0: "0 B", 1023: "1023 B", 1536: "1.5 kB", 5 << 30: "5 GB", 250.5 * 1024: "250 kB"} {
		if got := bytesText(v); got != want {
			t.Errorf("%v: %q, want %q", v, got, want)
		}
	}
}

func TestEachReasonIsExplained(t *testing.T) {
	config, err := pgsplit.ParseDSN("postgres://db1/shop")
	if err != nil {
		t.Fatal(err)
	}
	c, err := pgsplit.NewConnector(config)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	reasons := c.Stats().Reasons
	for name := range reasons {
		if because[name] == "" {
			t.Errorf("%s is not explained", name)
		}
	}
	if len(because) != len(reasons) {
		t.Errorf("%d explanations of %d reasons", len(because), len(reasons))
	}
}

func TestSamplesEndAfterTenMinutesAndRatesAreOverOne(t *testing.T) {
	now := time.Now()
	var h history
	for _, ago := range []time.Duration{11 * time.Minute, 9 * time.Minute, 50 * time.Second, 49900 * time.Millisecond, 20 * time.Second, 0} {
		h.add(sample{at: now.Add(-ago)})
	}
	samples := h.since(now)
	if len(samples) != 4 || now.Sub(samples[0].at) != 9*time.Minute {
		t.Errorf("%+v", samples)
	}
	if s, ok := lastMinute(samples, now); !ok || now.Sub(s.at) != 50*time.Second {
		t.Errorf("%v %+v", ok, s)
	}
	if _, ok := lastMinute(samples[:1], now); ok {
		t.Error("a rate over the last minute begins nine minutes ago")
	}
}

func TestALookThatWasGivenUpIsNoSample(t *testing.T) {
	config, err := pgsplit.ParseDSN("postgres://db1/shop")
	if err != nil {
		t.Fatal(err)
	}
	c, err := pgsplit.NewConnector(config)
	if err != nil {
		t.Fatal(err)
	}
	c.Close()
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	late, cancel := context.WithDeadline(t.Context(), time.Now()) // as http.TimeoutHandler sets one
	defer cancel()
	var h history
	h.look(ctx, c)
	h.look(late, c)
	if n := len(h.since(time.Now())); n != 0 {
		t.Errorf("%d samples", n)
	}
	h.look(t.Context(), c)
	if n := len(h.since(time.Now())); n != 1 {
		t.Errorf("%d samples", n)
	}
	// One that is fresh does for the next who looks, too.
	h.add(sample{at: time.Now().Add(time.Hour), health: pgsplit.Health{Status: "as before"}})
	if got := h.look(t.Context(), c).Status; got != "as before" {
		t.Errorf("servers were asked again: %s", got)
	}
}
