package main

import (
	"bytes"
	"context"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/pgsplit/pgsplit"
	"github.com/pgsplit/pgsplit/pgsplittest"
)

func TestAGraphShowsTheHighestLagOfEachMoment(t *testing.T) {
	now := time.Unix(1_000_000, 0)
	ago := func(seconds int, bytes uint64, known bool) sample {
		return sample{now.Add(-time.Duration(seconds) * time.Second), bytes, known}
	}
	blank := func(n int) string { return strings.Repeat(" ", n) }
	for _, c := range []struct {
		name    string
		samples []sample
		want    string
	}{
		{"nothing yet", nil, blank(30)},
		{"at once", []sample{ago(0, 0, true)}, blank(29) + "▁"},
		{"little stays low", []sample{ago(0, 1000, true)}, blank(29) + "▁ 1000 B"},
		{"the highest of a cell", []sample{ago(3, 0, true), ago(2, 8<<20, true), ago(1, 4<<20, true), ago(0, 1<<20, true)}, blank(28) + "█▄ 8192 kB"},
		{"no answer", []sample{ago(5, 0, true), ago(3, 0, false), ago(1, 0, true)}, blank(27) + "▁·▁"},
		{"one answer of two", []sample{ago(1, 0, false), ago(0, 0, true)}, blank(29) + "▁"},
		{"the oldest", []sample{ago(61, 9, true), ago(60, 9, true), ago(59, 0, true)}, "▁" + blank(29)},
		{"the future", []sample{ago(-1, 9, true)}, blank(30)},
	} {
		if got := graph(c.samples, now); got != c.want {
			t.Errorf("%s: %q, want %q", c.name, got, c.want)
		}
	}
}

func TestFindingsAndDecisionsAreOneLineEach(t *testing.T) {
	note := finding{Severity: severityNote, Name: "pooler", Server: "b"}
	failure := finding{Severity: severityError, Name: "unreachable", Server: "b"}
	for want, findings := range map[string][]finding{
		"nothing found":                 nil,
		"1 note":                        {note},
		"error unreachable b":           {failure},
		"error unreachable b | 2 notes": {failure, note, note},
		"error unusable-dsn":            {{Severity: severityError, Name: "unusable-dsn"}},
		"warning lagging b, c | 1 note": {{Severity: severityWarning, Name: "lagging", Server: "b, c"}, note},
	} {
		if got := oneLine(findings); got != want {
			t.Errorf("%q, want %q", got, want)
		}
	}
	numbers := map[string]float64{"unhinted": 2, "replica": 10.25, "session": 0, "held": 2}
	if got, want := decisionLine("decisions", numbers, "%.1f"), "decisions: replica 10.2, held 2.0, unhinted 2.0"; got != want {
		t.Errorf("%q, want %q", got, want)
	}
	if got := decisionLine("decisions", nil, "%.1f"); got != "decisions: none" {
		t.Errorf("%q", got)
	}
}

func TestAScreenIsRedrawnRowByRow(t *testing.T) {
	if got, want := redraw([]string{"a", "b"}), "\x1b[1;1Ha\x1b[K\x1b[2;1Hb\x1b[K\x1b[J"; got != want {
		t.Errorf("%q, want %q", got, want)
	}
}

func TestAPictureHasARowForEachInstanceAndEachAddressWithoutOne(t *testing.T) {
	servers := healthy()
	servers[1].Hosts[0].Instances[0].Paused = true
	servers[1].Hosts[0].Instances[0].Lag = &lag{Bytes: 70, Left: 70, Millis: 12_345}
	servers[2].Hosts[0] = &host{Address: "c:5432", Attempts: 3, Failed: 3, Cause: "connection refused"}
	p := &picture{at: time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC), servers: servers, findings: diagnose(servers), written: 2048, decisions: "decisions: none"}
	want := `pgsplit watch  03:04:05

server   role     state      position  behind       last minute
primary  primary  writes     -         +2048 B/s
b:5432   replica  paused     -         70 B, >12 s
c:5432   replica  no answer  -         -

error unreachable c:5432 | warning lagging b:5432
decisions: none`
	if got := strings.Join(p.lines(100), "\n"); got != want {
		t.Errorf("%s\nwant\n%s", got, want)
	}
	want = `03:04:05  primary  primary  writes  -  +2048 B/s
03:04:05  b:5432  replica  paused  -  70 B, >12 s
03:04:05  c:5432  replica  no answer
03:04:05  error unreachable c:5432 | warning lagging b:5432
03:04:05  decisions: none
`
	if got := p.appended(); got != want {
		t.Errorf("%s\nwant\n%s", got, want)
	}
	for code, want := range map[string]string{"57P03": "starting or ending", "28P01": "refuses", "": "no answer"} {
		if got := (&host{Code: code, Cause: "the database system is starting up"}).state(); got != want {
			t.Errorf("%q: %s, want %s", code, got, want)
		}
	}
}

func TestALagIsAsOldAsEarlierLooksProve(t *testing.T) {
	start := time.Unix(1_000_000, 0)
	w := &watcher{history: map[string][]sample{}}
	look := func(second int, primary, replica pgsplit.LSN, id string) (rate float64, millis int64) {
		servers := healthy()
		a, b := servers[0].Hosts[0].Instances[0], servers[1].Hosts[0].Instances[0]
		a.position, a.id = primary, id
		b.position, b.Lag = replica, &lag{Proven: replica >= primary, Left: uint64(primary - min(primary, replica))}
		p := &picture{at: start.Add(time.Duration(second) * time.Second), servers: servers}
		w.remember(p)
		rate = w.write(p)
		w.age(p)
		return rate, b.Lag.Millis
	}
	for _, c := range []struct {
		second           int
		primary, replica pgsplit.LSN
		id               string
		rate             float64
		millis           int64
	}{
		{0, 100, 100, "a", -1, 0},
		{2, 300, 100, "a", 100, 0},
		{5, 300, 100, "a", 0, 3000},
		{8, 600, 300, "a", 100, 0},
		{9, 600, 600, "a", 0, 0},
		{10, 900, 600, "restarted", -1, 0}, // another life proves nothing about this one
		{12, 900, 600, "restarted", 0, 2000},
		{90, 900, 900, "restarted", 0, 0},
	} {
		rate, millis := look(c.second, c.primary, c.replica, c.id)
		if rate != c.rate || millis != c.millis {
			t.Errorf("second %d: %v bytes per second, %d ms, want %v and %d", c.second, rate, millis, c.rate, c.millis)
		}
	}
	if got := w.history["b:5432 b:5432"]; len(got) != 1 {
		t.Errorf("%d samples after a minute without a look", len(got))
	}
}

func TestDecisionsAreReadFromADebugPage(t *testing.T) {
	for name, c := range map[string]struct {
		status   int
		body     string
		want     float64
		complain string
	}{
		"as it is":       {200, `{"stats": {"reasons": {"unhinted": 7}}}`, 7, ""},
		"Go's names":     {200, `{"Stats": {"Reasons": {"unhinted": 7}, "Servers": [{"Cause": {}}]}, "Other": 1}`, 7, ""},
		"no stats":       {200, `{"servers": []}`, 0, "no stats.reasons"},
		"HTML":           {200, `<html>`, 0, "no stats.reasons"},
		"somewhere else": {404, `not found`, 0, "it answers 404"},
	} {
		server := httptest.NewServer(http.HandlerFunc(func(out http.ResponseWriter, in *http.Request) {
			if in.Header.Get("Accept") != "application/json" || in.URL.Query().Get("format") != "json" || in.URL.Query().Get("q") != "1" {
				t.Errorf("it is asked for %s as %s", in.URL, in.Header.Get("Accept"))
			}
			out.WriteHeader(c.status)
			_, _ = io.WriteString(out, c.body)
		}))
		got, err := readDecisions(t.Context(), server.URL+"/debug/pgsplit?q=1")
		server.Close()
		if got.counts["unhinted"] != c.want || c.complain == "" && err != nil || c.complain != "" && (err == nil || !strings.Contains(err.Error(), c.complain)) {
			t.Errorf("%s: %v, %v", name, got.counts, err)
		}
	}
	for _, page := range []string{"http://u:" + secret + "@127.0.0.1:1/", "u:" + secret, "http://u:" + secret + "@[", "ftp://u:" + secret + "@h/"} {
		_, err := readDecisions(t.Context(), page)
		if err == nil {
			t.Fatal("no error")
		}
		noSecret(t, err.Error())
	}
}

func TestDecisionsPerSecondSurviveARestartOfTheProgram(t *testing.T) {
	start := time.Unix(1_000_000, 0)
	earlier := decisions{start, map[string]float64{"unhinted": 10, "replica": 100}}
	now := decisions{start.Add(2 * time.Second), map[string]float64{"unhinted": 30, "replica": 4, "held": 2}}
	rates := now.since(earlier)
	for reason, want := range map[string]float64{"unhinted": 10, "replica": 2, "held": 1} {
		if rates[reason] != want {
			t.Errorf("%s: %v, want %v", reason, rates[reason], want)
		}
	}
	if got := earlier.since(earlier); len(got) != 0 {
		t.Errorf("in no time: %v", got)
	}
}

// counter ends a watch, as Ctrl-C does, after some looks.
type counter struct {
	bytes.Buffer
	looks  int
	cancel context.CancelFunc
}

func (c *counter) Write(p []byte) (int, error) {
	if bytes.Contains(p, []byte("replica")) {
		if c.looks--; c.looks == 0 {
			c.cancel()
		}
	}
	return c.Buffer.Write(p)
}

func TestWatchFollowsACluster(t *testing.T) {
	cluster := pgsplittest.Start(t)
	ctx := t.Context()
	dsn, _ := pair(cluster, "")
	dsn = withSecret(dsn, "postgres")
	page := httptest.NewServer(http.HandlerFunc(func(out http.ResponseWriter, _ *http.Request) {
		_, _ = io.WriteString(out, `{"stats": {"reasons": {"floor_checked": 5}}}`)
	}))
	defer http.DefaultClient.CloseIdleConnections()
	defer page.Close()

	t.Run("once", func(t *testing.T) {
		var out, errs bytes.Buffer
		args := []string{"watch", "--once", "-timeout", "30s", "--debug-url", page.URL, dsn}
		if status := run(ctx, args, &out, &errs); status != 0 {
			t.Fatalf("exit status %d: %s", status, errs.String())
		}
		text := out.String()
		for _, want := range []string{"\nserver ", "\nprimary  primary  writes ", "\nr1       replica  follows ", "0 B, ≤", "▁", " notes", "floor_checked 5"} {
			if !strings.Contains(text, want) {
				t.Errorf("no %q in\n%s", want, text)
			}
		}
		if strings.Contains(text, "\x1b") {
			t.Errorf("escape sequences in\n%q", text)
		}
		noSecret(t, text+errs.String())
	})
	t.Run("until Ctrl-C", func(t *testing.T) {
		defer goleak.VerifyNone(t, goleak.IgnoreCurrent())
		ctx, cancel := context.WithCancel(ctx)
		defer cancel()
		out := &counter{looks: 3, cancel: cancel}
		if status := run(ctx, []string{"watch", "-interval", "1ms", dsn}, out, io.Discard); status != 0 {
			t.Errorf("exit status %d", status)
		}
		if text := out.String(); strings.Count(text, "  r1  replica  ") != 3 || strings.Contains(text, "\x1b") {
			t.Errorf("three looks are\n%q", text)
		}
	})
	config, err := configOf([]string{dsn})
	must(t, err)
	t.Run("on a terminal", func(t *testing.T) {
		defer goleak.VerifyNone(t, goleak.IgnoreCurrent())
		ctx, cancel := context.WithCancel(ctx)
		defer cancel()
		out := &counter{looks: newConnectionsAfter + 2, cancel: cancel}
		w := &watcher{out: out, terminal: true, timeout: time.Minute, survey: newSurvey(config, time.Minute, 0)}
		watch(ctx, w, time.Millisecond, false)
		text := out.String()
		if !strings.HasPrefix(text, screenBegin+"\x1b[1;1H") || !strings.HasSuffix(text, screenEnd) {
			t.Errorf("the screen is not set up or left as it was: %q", text)
		}
	})
	t.Run("a replica that pauses, goes and comes back", func(t *testing.T) {
		replica := cluster.Replicas[0]
		w := &watcher{timeout: time.Minute, survey: newSurvey(config, time.Minute, 0), history: map[string][]sample{}}
		defer func() { w.survey.close() }()
		reaches := func(state string) *picture {
			t.Helper()
			for deadline := time.Now().Add(30 * time.Second); ; {
				p := w.look(ctx)
				if strings.Contains(p.lines(100)[4], "  "+state+"  ") {
					return p
				}
				if time.Now().After(deadline) {
					t.Fatalf("the replica is not in state %q:\n%s", state, p.appended())
				}
			}
		}
		reaches("follows")
		must(t, replica.PauseReplay(ctx))
		must(t, cluster.Primary.Exec(ctx, "create table news ()"))
		first := reaches("paused")
		second := reaches("paused")
		lag := second.servers[1].Hosts[0].Instances[0].Lag
		if between := second.at.Sub(first.at).Milliseconds(); lag.Proven || lag.Bytes == 0 || lag.Millis < between {
			t.Errorf("behind %s, for %d ms at least", lag, between)
		}
		must(t, replica.Stop(ctx, pgsplittest.Fast))
		reaches("no answer")
		must(t, replica.Start(ctx))
		reaches("follows")
	})
}

func TestWatchDoesNotStartWithAnUnusableDSN(t *testing.T) {
	for _, args := range [][]string{
		{"watch", "-interval", "0s", "postgres://127.0.0.1:1/x"},
		{"watch", "postgres://u:" + secret + "@127.0.0.1:none/x"},
	} {
		var errs bytes.Buffer
		if status := run(t.Context(), args, io.Discard, &errs); status != statusErrors || errs.Len() == 0 {
			t.Errorf("%q: exit status %d, %q", args, status, errs.String())
		}
		noSecret(t, errs.String())
	}
}
