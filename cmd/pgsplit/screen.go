package main

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"
)

// This file draws what watch shows. It asks nobody.

const (
	graphWidth  = 30
	graphPeriod = time.Minute
	// A graph's full height is at least this much, so that a few records do not look like trouble.
	graphFloor = 64 << 10
)

var graphBlocks = []rune("▁▂▃▄▅▆▇█")

// What a cell of a graph is without a lag.
const (
	cellUnknown  = ' ' // nobody looked
	cellNoAnswer = '·' // the lag is not known: no answer, or no primary to compare with
)

// sample is the lag of a replica at a moment; unknown if there was no answer.
type sample struct {
	at    time.Time
	bytes uint64
	known bool
}

// graph draws the last minute before now, the highest lag of each cell, and says the highest of all.
func graph(samples []sample, now time.Time) string {
	cells := [graphWidth]struct{ seen, known, bytes uint64 }{}
	top, highest := uint64(graphFloor), uint64(0)
	for _, s := range samples {
		age := now.Sub(s.at)
		if age < 0 || age >= graphPeriod {
			continue
		}
		c := &cells[graphWidth-1-int(age*graphWidth/graphPeriod)]
		c.seen++
		if s.known {
			c.known++
			c.bytes = max(c.bytes, s.bytes)
			top, highest = max(top, s.bytes), max(highest, s.bytes)
		}
	}
	var b strings.Builder
	for _, c := range cells {
		switch {
		case c.seen == 0:
			b.WriteRune(cellUnknown)
		case c.known == 0:
			b.WriteRune(cellNoAnswer)
		default:
			b.WriteRune(graphBlocks[uint64(float64(c.bytes)/float64(top)*float64(len(graphBlocks)-1))])
		}
	}
	if highest > 0 {
		b.WriteString(" " + bytesText(highest))
	}
	return b.String()
}

// picture is everything that a screen shows.
type picture struct {
	at        time.Time
	servers   []server
	findings  []finding
	history   map[string][]sample // by key
	written   float64             // bytes of WAL per second; negative if not known yet
	decisions string              // "" without a debug page
}

// key names what a row's history is kept under: the same before and after a restart.
func (s *server) key(h *host, i *instance) string {
	key := s.Name + " " + h.Address
	if i != nil && len(h.Instances) > 1 {
		key += " " + cmp.Or(i.Listen, i.id)
	}
	return key
}

// lines draws the screen. Its graphs need about 30 columns.
func (p *picture) lines(width int) []string {
	rows := [][]string{{"server", "role", "state", "position", "behind", "last minute"}}
	for n := range p.servers {
		s := &p.servers[n]
		for _, h := range s.Hosts {
			if len(h.Instances) == 0 {
				rows = append(rows, []string{s.label(h, nil), s.Role, h.state(), "-", "-", p.graph(s, h, nil)})
			}
			for _, i := range h.Instances {
				rows = append(rows, []string{s.label(h, i), s.foundAs(i), i.state(), orDash(i.Position), p.behind(i), p.graph(s, h, i)})
			}
		}
	}
	title := "pgsplit watch  " + p.at.Format(time.TimeOnly)
	text := title + "\n\n" + drawTable(rows) + "\n" + wrap(oneLine(p.findings), "", width)
	if p.decisions != "" {
		text += wrap(p.decisions, "", width)
	}
	return strings.Split(strings.TrimSuffix(text, "\n"), "\n")
}

// graph is empty for the primary, which is behind nobody.
func (p *picture) graph(s *server, h *host, i *instance) string {
	if s.Role == rolePrimary {
		return ""
	}
	return graph(p.history[s.key(h, i)], p.at)
}

func (p *picture) behind(i *instance) string {
	if !i.standby() && p.written >= 0 {
		return "+" + bytesText(uint64(p.written)) + "/s"
	}
	return i.Lag.String()
}

// state says in two or three words how an instance is.
func (i *instance) state() string {
	switch {
	case i.standby() && i.Paused:
		return "paused"
	case i.standby() && !i.Receiving && !i.HasArchive:
		return "receives nothing"
	case i.standby():
		return "follows"
	}
	return "writes"
}

// state says why an address has no instance.
func (h *host) state() string {
	switch {
	case h.Code == "57P03" && hotStandbyOff(h):
		return "hot standby off"
	case h.Code == "57P03":
		return "starting or ending"
	case h.Code != "":
		return "refuses"
	}
	return "no answer"
}

// oneLine names the findings, and counts the notes.
func oneLine(findings []finding) string {
	var parts []string
	notes := 0
	for _, f := range findings {
		if f.Severity == severityNote {
			notes++
			continue
		}
		parts = append(parts, strings.TrimSpace(fmt.Sprintf("%s %s %s", f.Severity, f.Name, f.Server)))
	}
	switch {
	case notes == 1:
		parts = append(parts, "1 note")
	case notes > 1:
		parts = append(parts, fmt.Sprintf("%d notes", notes))
	case len(parts) == 0:
		return "nothing found"
	}
	return strings.Join(parts, " | ")
}

// decisionLine shows numbers by reason, the highest first.
func decisionLine(head string, numbers map[string]float64, format string) string {
	reasons := slices.SortedFunc(maps.Keys(numbers), func(a, b string) int {
		return cmp.Or(cmp.Compare(numbers[b], numbers[a]), cmp.Compare(a, b))
	})
	var parts []string
	for _, reason := range reasons {
		if numbers[reason] > 0 {
			parts = append(parts, fmt.Sprintf("%s "+format, printable(reason), numbers[reason]))
		}
	}
	if len(parts) == 0 {
		parts = []string{"none"}
	}
	return head + ": " + strings.Join(parts, ", ")
}

// The escape sequences of a screen that is drawn in place. Long lines are cut off and not wrapped, and each line is put
// into its row, so that nothing scrolls on a terminal that is too small.
const (
	screenBegin = "\x1b[2J\x1b[?7l\x1b[?25l"
	screenEnd   = "\x1b[?25h\x1b[?7h\n"
)

// redraw puts the lines over those of the last time.
func redraw(lines []string) string {
	var b strings.Builder
	for n, line := range lines {
		fmt.Fprintf(&b, "\x1b[%d;1H%s\x1b[K", n+1, line)
	}
	b.WriteString("\x1b[J")
	return b.String()
}

// appended is the picture where lines can only follow each other.
func (p *picture) appended() string {
	var b strings.Builder
	stamp := p.at.Format(time.TimeOnly)
	line := func(text string) { fmt.Fprintf(&b, "%s  %s\n", stamp, text) }
	for n := range p.servers {
		s := &p.servers[n]
		for _, h := range s.Hosts {
			if len(h.Instances) == 0 {
				line(s.label(h, nil) + "  " + s.Role + "  " + h.state())
			}
			for _, i := range h.Instances {
				line(strings.Join([]string{s.label(h, i), s.foundAs(i), i.state(), orDash(i.Position), p.behind(i)}, "  "))
			}
		}
	}
	line(oneLine(p.findings))
	if p.decisions != "" {
		line(p.decisions)
	}
	return b.String()
}
