package main

import (
	"context"
	"fmt"
	"io"
	"os"
	"sync"
	"time"

	"github.com/pgsplit/pgsplit"
)

const (
	defaultInterval     = time.Second
	defaultWatchTimeout = time.Second // a server that does not answer delays the whole screen

	// watchWait is how long a look lasts for the sake of a replica that is behind.
	watchWait = 200 * time.Millisecond
	// newConnectionsAfter is the number of looks after which names are resolved again, and balancers asked for others.
	newConnectionsAfter = 30
)

// watcher is a running watch.
type watcher struct {
	out      io.Writer
	terminal bool
	page     string // the debug page, or ""
	timeout  time.Duration
	survey   *survey

	history map[string][]sample
	wrote   []written // the last hour's at most, in order, of one primary
	decided decisions
}

// written is what the primary had written at a look.
type written struct {
	at       time.Time
	id       string
	position pgsplit.LSN
}

// mostWritten bounds how far back a lag's age is known.
const mostWritten = 3600

// watch shows the servers until ctx ends, or once.
func watch(ctx context.Context, w *watcher, interval time.Duration, once bool) {
	w.history = map[string][]sample{}
	defer func() { w.survey.close() }()
	if w.terminal && !once {
		fmt.Fprint(w.out, screenBegin)
		defer fmt.Fprint(w.out, screenEnd)
	}
	ticker := time.NewTicker(interval)
	defer ticker.Stop()
	for looks := 1; ; looks++ {
		p := w.look(ctx)
		if ctx.Err() != nil {
			return // what it found out is that it was told to end
		}
		switch {
		case once:
			for _, line := range p.lines(terminalWidth()) {
				fmt.Fprintln(w.out, line)
			}
			return
		case w.terminal:
			fmt.Fprint(w.out, redraw(p.lines(terminalWidth())))
		default:
			fmt.Fprint(w.out, p.appended())
		}
		if looks%newConnectionsAfter == 0 {
			w.survey.close()
		}
		select {
		case <-ticker.C:
		case <-ctx.Done():
			return
		}
	}
}

// look asks all servers and the debug page.
func (w *watcher) look(ctx context.Context) *picture {
	var now decisions
	var pageErr error
	var wg sync.WaitGroup
	if w.page != "" {
		wg.Go(func() {
			ctx, cancel := context.WithTimeout(ctx, w.timeout)
			defer cancel()
			now, pageErr = readDecisions(ctx, w.page)
		})
	}
	servers := w.survey.look(ctx)
	wg.Wait()
	p := &picture{at: time.Now(), servers: servers, history: w.history}
	w.remember(p)
	p.written = w.write(p)
	w.age(p)
	p.findings = diagnose(servers)
	switch {
	case w.page == "":
	case pageErr != nil:
		p.decisions = "debug page: " + pageErr.Error()
		w.decided = decisions{}
	case w.decided.counts == nil:
		p.decisions = decisionLine("decisions so far", now.counts, "%.0f")
		w.decided = now
	default:
		p.decisions = decisionLine("decisions per second", now.since(w.decided), "%.1f")
		w.decided = now
	}
	return p
}

// remember adds to the graphs, and drops what has left them.
func (w *watcher) remember(p *picture) {
	add := func(key string, l *lag) {
		s := sample{at: p.at, known: l != nil}
		if l != nil {
			s.bytes = l.Bytes
		}
		w.history[key] = append(w.history[key], s)
	}
	for n := range p.servers {
		s := &p.servers[n]
		for _, h := range s.Hosts {
			if len(h.Instances) == 0 {
				add(s.key(h, nil), nil)
			}
			for _, i := range h.Instances {
				add(s.key(h, i), i.Lag)
			}
		}
	}
	for key, samples := range w.history {
		for len(samples) > 0 && p.at.Sub(samples[0].at) >= graphPeriod {
			samples = samples[1:]
		}
		if w.history[key] = samples; len(samples) == 0 {
			delete(w.history, key)
		}
	}
}

// write notes what the primary has written, and returns the bytes per second since the last look, negative if that is
// not known.
func (w *watcher) write(p *picture) float64 {
	rate := -1.0
	for _, i := range p.servers[0].used() {
		if i.standby() {
			continue
		}
		now := written{p.at, i.id, i.position}
		if n := len(w.wrote); n > 0 && w.wrote[n-1].id == now.id && w.wrote[n-1].position <= now.position {
			last := w.wrote[n-1]
			rate = float64(now.position-last.position) / now.at.Sub(last.at).Seconds()
		} else {
			w.wrote = nil
		}
		w.wrote = append(w.wrote, now)
		w.wrote = w.wrote[max(0, len(w.wrote)-mostWritten):]
	}
	return rate
}

// age makes a lag as old as earlier looks prove it to be: a replica lacks what the primary had written by then.
func (w *watcher) age(p *picture) {
	for n := range p.servers {
		for _, h := range p.servers[n].Hosts {
			for _, i := range h.Instances {
				if i.Lag == nil || i.Lag.Proven {
					continue
				}
				for _, then := range w.wrote {
					if then.position > i.position {
						i.Lag.Millis = max(i.Lag.Millis, p.at.Sub(then.at).Milliseconds())
						break
					}
				}
			}
		}
	}
}

// isTerminal tells whether what is written there can be drawn in place.
func isTerminal(out io.Writer) bool {
	file, ok := out.(*os.File)
	if !ok || os.Getenv("TERM") == "dumb" {
		return false
	}
	info, err := file.Stat()
	return err == nil && info.Mode()&os.ModeCharDevice != 0
}
