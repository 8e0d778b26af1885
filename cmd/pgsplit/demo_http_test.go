package main

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"net/http"
	"net/http/cookiejar"
	"net/url"
	"regexp"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/pgsplit/pgsplit/pgsplittest"
)

// screenText is what the demo prints while a test waits for it.
type screenText struct {
	mu   sync.Mutex
	text bytes.Buffer
}

func (s *screenText) Write(p []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.text.Write(p)
}

func (s *screenText) String() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.text.String()
}

// visitor is a browser with cookies of its own.
type visitor struct {
	t    *testing.T
	home string
	http.Client
}

func newVisitor(t *testing.T, home string) *visitor {
	t.Helper()
	jar, err := cookiejar.New(nil)
	if err != nil {
		t.Fatal(err)
	}
	return &visitor{t: t, home: home, Client: http.Client{Jar: jar, Transport: &http.Transport{DisableKeepAlives: true}}}
}

// send sends a form, or asks for a page where there is none, follows redirects and returns the last answer.
func (v *visitor) send(path string, form url.Values, header ...string) (status int, page string) {
	v.t.Helper()
	method := http.MethodGet
	if form != nil {
		method = http.MethodPost
	}
	r, err := http.NewRequest(method, v.home+path, strings.NewReader(form.Encode()))
	if err != nil {
		v.t.Fatal(err)
	}
	r.Header.Set("Content-Type", "application/x-www-form-urlencoded")
	for i := 0; i < len(header); i += 2 {
		r.Header.Set(header[i], header[i+1])
	}
	response, err := v.Do(r)
	if err != nil {
		v.t.Fatal(err)
	}
	defer response.Body.Close()
	body, err := io.ReadAll(response.Body)
	if err != nil {
		v.t.Fatal(err)
	}
	return response.StatusCode, string(body)
}

// answered finds who answered, why, and how many of all notes are shown.
var answered = regexp.MustCompile(`(?s)class="server">(\w+)</span> answered: <code>(\w+)</code>.*?<p>(\d+ of \d+) notes`)

func (v *visitor) sees(path string, form url.Values) (server, reason, notes, page string) {
	v.t.Helper()
	status, page := v.send(path, form)
	found := answered.FindStringSubmatch(page)
	if status != http.StatusOK || found == nil {
		v.t.Fatalf("%s: %d %s", path, status, page)
	}
	return found[1], found[2], found[3], page
}

func TestOnTheDemosPagesOneSeesOnesOwnNotesWhileAStrangerDoesNot(t *testing.T) {
	pgsplittest.NeedServer(t)
	defer goleak.VerifyNone(t)
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
	defer cancel()
	var out, errs screenText
	status := make(chan int)
	// The show waits before its second row, until the page takes over.
	go func() { status <- run(ctx, []string{"demo", "-pause", "1h"}, &out, &errs) }()
	defer func() {
		cancel()
		if code := <-status; code != 0 {
			t.Errorf("exit status %d: %s", code, errs.String())
		}
		allEnded(t, out.String())
	}()
	until := func(what string, done func() bool) {
		t.Helper()
		tick := time.NewTicker(10 * time.Millisecond)
		defer tick.Stop()
		for !done() {
			select {
			case <-tick.C:
			case <-ctx.Done():
				t.Fatalf("never: %s: %s%s", what, out.String(), errs.String())
			}
		}
	}
	var home string
	until("it tells where its pages are", func() bool {
		_, rest, found := strings.Cut(out.String(), "Take part at ")
		home, _, _ = strings.Cut(rest, "\n")
		return found && strings.HasSuffix(home, "/")
	})
	home = strings.TrimSuffix(home, "/")
	me, other := newVisitor(t, home), newVisitor(t, home)

	for i := range 2 {
		_, _, _, page := me.sees(fmt.Sprintf("/replicas/%d", i+1), url.Values{"do": {"pause"}})
		if n := strings.Count(page, "paused: it gets stale"); n != i+1 {
			t.Errorf("%d replicas are paused, want %d: %s", n, i+1, page)
		}
	}
	until("the show is over", func() bool { return strings.Contains(out.String(), "The page has the replicas now") })

	server, reason, notes, page := me.sees("/notes", url.Values{"note": {"<b>mine</b>"}})
	if server != "primary" || reason != "replicas_behind" || notes != "1 of 1" || !strings.Contains(page, "<bdi>&lt;b&gt;mine&lt;/b&gt;</bdi>") {
		t.Errorf("after my note: %s, %s, %s: %s", server, reason, notes, page)
	}
	for who, v := range map[string]*visitor{"/stranger": me, "/": other} {
		server, reason, notes, page := v.sees(who, nil)
		if !strings.HasPrefix(server, "replica") || reason != "replica" || notes != "0 of 1" || strings.Contains(page, "mine") {
			t.Errorf("a stranger at %s: %s, %s, %s: %s", who, server, reason, notes, page)
		}
	}

	for name, header := range map[string][]string{"site": {"Sec-Fetch-Site", "cross-site"}, "origin": {"Origin", "http://elsewhere.example"}} {
		if code, _ := me.send("/notes", url.Values{"note": {"theirs"}}, header...); code != http.StatusForbidden {
			t.Errorf("a form of another %s: %d", name, code)
		}
	}
	for path, want := range map[string]int{"/replicas/3?do=pause": 404, "/replicas/0?do=pause": 404, "/replicas/x": 404, "/replicas/1": 400} {
		if code, _ := me.send(path, url.Values{"do": {"stop"}}); code != want {
			t.Errorf("%s: %d, want %d", path, code, want)
		}
	}
	if _, _, notes, _ := me.sees("/", nil); notes != "1 of 1" {
		t.Errorf("after what was refused: %s", notes)
	}

	for i := range 2 {
		me.sees(fmt.Sprintf("/replicas/%d", i+1), url.Values{"do": {"resume"}, "back": {"/stranger"}})
	}
	until("a replica shows me my note", func() bool {
		server, reason, notes, page := me.sees("/", nil)
		if notes != "1 of 1" {
			t.Fatalf("I do not see my note: %s, %s: %s", server, reason, page)
		}
		return strings.HasPrefix(server, "replica") && strings.HasPrefix(reason, "floor_")
	})

	if code, page := me.send("/debug/pgsplit/", nil); code != http.StatusOK || !strings.Contains(page, "replica1") {
		t.Errorf("the debug page: %d %s", code, page)
	}
	// As pgsplit watch -debug-url reads it.
	decided, err := readDecisions(ctx, home+"/debug/pgsplit/")
	if err != nil || decided.counts["replicas_behind"] < 1 || decided.counts["replica"] < 2 {
		t.Errorf("%v: %v", err, decided.counts)
	}
}

func TestTheDemoServesNothingIfToldSo(t *testing.T) {
	pgsplittest.NeedServer(t)
	defer goleak.VerifyNone(t)
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	var out, errs bytes.Buffer
	if code := run(ctx, []string{"demo", "-http", "", "-once", "-pause", "1ms"}, &out, &errs); code != 0 || strings.Contains(out.String(), "http://") {
		t.Errorf("exit status %d: %s%s", code, errs.String(), out.String())
	}
}

func TestTheDemoFailsWhereItCannotListen(t *testing.T) {
	defer goleak.VerifyNone(t)
	var out, errs bytes.Buffer
	if code := run(t.Context(), []string{"demo", "-http", "127.0.0.1:nowhere", "-once"}, &out, &errs); code != 1 || errs.Len() == 0 || out.Len() > 0 {
		t.Errorf("exit status %d: %s", code, errs.String()+out.String())
	}
}
