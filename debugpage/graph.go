package debugpage

import (
	"fmt"
	"math"
	"strings"
	"time"

	"github.com/pgsplit/pgsplit"
)

// The graph's own units; the page stretches them to whatever is there.
const (
	graphWidth  = 600
	graphHeight = 100
	// apart is how far two samples may be apart for a line between them: nothing is known of what was in between.
	apart = 30 * time.Second
)

// graph is one value of one server over the last minutes.
type graph struct {
	Title   string
	Now     string // as text; what the newest sample says
	Highest string // of the samples shown
	Top     string // what the upper edge means
	Line    string // SVG path data; a single sample is a dot
	Area    string // what is under the line
	Gaps    []span // when the server was not reachable
	Begins  string // how long ago the left edge is
}

type span struct{ X, Width float64 }

// point is a value at a time; not known if below zero.
type point struct {
	at    time.Time
	value float64
	down  bool
}

// series picks one value out of the samples.
func series(samples []sample, server int, value func(pgsplit.ServerHealth) float64) []point {
	var points []point
	for _, s := range samples {
		if server < len(s.health.Servers) {
			h := s.health.Servers[server]
			points = append(points, point{at: s.at, value: value(h), down: !h.Reachable})
		}
	}
	return points
}

// window is how much time a graph shows: as little as holds all samples.
func window(samples []sample, now time.Time) time.Duration {
	for _, w := range []time.Duration{time.Minute, 5 * time.Minute} {
		if len(samples) == 0 || now.Sub(samples[0].at) <= w {
			return w
		}
	}
	return kept
}

// draw makes the graph of the points in the last window, oldest first. least is the lowest upper edge, so that noise looks
// like noise.
func draw(title string, points []point, now time.Time, window time.Duration, least float64, format func(float64) string) graph {
	g := graph{Title: title, Now: "not known", Highest: "not known", Begins: brief(window) + " ago"}
	highest := -1.0
	for _, p := range points {
		highest = max(highest, p.value)
	}
	top := niceTop(max(highest, least))
	g.Top = format(top)
	if highest >= 0 {
		g.Highest = format(highest)
	}
	x := func(at time.Time) float64 {
		return tenth(graphWidth * (1 - float64(now.Sub(at))/float64(window)))
	}
	y := func(value float64) float64 { return tenth(graphHeight * (1 - value/top)) }

	var line, area strings.Builder
	var run []point // since the last gap
	flush := func() {
		for i, p := range run {
			command := 'L'
			if i == 0 {
				command = 'M'
			}
			fmt.Fprintf(&line, "%c%v %v", command, x(p.at), y(p.value))
		}
		switch {
		case len(run) == 1:
			line.WriteString("h0")
		case len(run) > 1:
			fmt.Fprintf(&area, "M%v %v", x(run[0].at), graphHeight)
			for _, p := range run {
				fmt.Fprintf(&area, "L%v %v", x(p.at), y(p.value))
			}
			fmt.Fprintf(&area, "L%v %vZ", x(run[len(run)-1].at), graphHeight)
		}
		run = run[:0]
	}
	for i, p := range points {
		if n := len(run); n > 0 && p.at.Sub(run[n-1].at) > apart || p.value < 0 {
			flush()
		}
		if p.value >= 0 {
			run = append(run, p)
		}
		if p.down {
			until := now
			if i+1 < len(points) {
				until = points[i+1].at
			}
			if until.Sub(p.at) > apart {
				until = p.at
			}
			g.Gaps = append(g.Gaps, span{X: x(p.at), Width: max(tenth(x(until)-x(p.at)), 3)})
		}
	}
	flush()
	g.Line, g.Area = line.String(), area.String()
	if n := len(points); n > 0 && points[n-1].value >= 0 {
		g.Now = format(points[n-1].value)
	}
	return g
}

func tenth(v float64) float64 { return math.Round(v*10) / 10 }

// niceTop is the next power of two that v fits under with some room.
func niceTop(v float64) float64 { return math.Exp2(math.Ceil(math.Log2(v * 1.05))) }

// bytesText is as pg_size_pretty counts: a kB has 1024 bytes.
func bytesText(v float64) string {
	units := []string{"B", "kB", "MB", "GB", "TB"}
	i := 0
	for v >= 1024 && i < len(units)-1 {
		v /= 1024
		i++
	}
	if v >= 100 || v == math.Trunc(v) {
		return fmt.Sprintf("%.0f %s", v, units[i])
	}
	return fmt.Sprintf("%.1f %s", v, units[i])
}

func secondsText(v float64) string { return brief(time.Duration(v * float64(time.Second))) }

// brief is a duration with one unit, or two where one would say too little.
func brief(d time.Duration) string {
	switch {
	case d < 0:
		return "not known"
	case d == 0:
		return "0 s"
	case d < time.Millisecond:
		return fmt.Sprintf("%d µs", d.Microseconds())
	case d < time.Second:
		return fmt.Sprintf("%d ms", d.Milliseconds())
	case d < 10*time.Second:
		return strings.TrimSuffix(fmt.Sprintf("%.1f", d.Seconds()), ".0") + " s"
	case d < 2*time.Minute && d != time.Minute:
		return fmt.Sprintf("%d s", int(d.Seconds()))
	case d < 2*time.Hour:
		return fmt.Sprintf("%d min", int(d.Minutes()))
	case d < 48*time.Hour:
		return fmt.Sprintf("%d h", int(d.Hours()))
	}
	return fmt.Sprintf("%d days", int(d.Hours()/24))
}
