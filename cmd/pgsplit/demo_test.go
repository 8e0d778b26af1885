package main

import (
	"bytes"
	"context"
	"io"
	"net"
	"regexp"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/pgsplit/pgsplit/pgsplittest"
)

// address finds what the demo says about its servers.
var address = regexp.MustCompile(`127\.0\.0\.1:\d+`)

// allEnded fails unless nothing listens any more at the addresses that the demo named. That its folder is gone with its
// servers is tested where clusters are.
func allEnded(t *testing.T, out string) {
	t.Helper()
	found := address.FindAllString(out, -1)
	if len(found) != 4 {
		t.Errorf("the demo names three servers and its pages at %q", found)
	}
	for _, a := range found {
		if conn, err := net.Dial("tcp", a); err == nil {
			_ = conn.Close()
			t.Errorf("%s still answers", a)
		}
	}
}

func TestTheDemoShowsReadYourWritesWhileReplicasLag(t *testing.T) {
	pgsplittest.NeedServer(t)
	defer goleak.VerifyNone(t)
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Minute)
	defer cancel()
	var out, errs bytes.Buffer
	if code := run(ctx, []string{"demo", "-once", "-pause", "1ms"}, &out, &errs); code != 0 {
		t.Fatalf("exit status %d: %s", code, errs.String())
	}
	text := out.String()
	for _, want := range []string{"unhinted", "floor_", "replicas_behind", ": stale", "replica1", "replica2", "primary"} {
		if !strings.Contains(text, want) {
			t.Errorf("no %q in\n%s", want, text)
		}
	}
	for _, line := range strings.Split(text, "\n") {
		if strings.HasPrefix(strings.TrimSpace(line), "read ") && strings.Contains(line, "stale") {
			t.Errorf("a read with a floor was stale: %s", line)
		}
	}
	allEnded(t, text)
}

// interrupter ends the demo, as Ctrl-C does, once it has shown something.
type interrupter struct {
	bytes.Buffer
	cancel context.CancelFunc
}

func (w *interrupter) Write(p []byte) (int, error) {
	if bytes.Contains(p, []byte("read ")) {
		w.cancel()
	}
	return w.Buffer.Write(p)
}

func TestTheDemoEndsCleanOnCtrlC(t *testing.T) {
	pgsplittest.NeedServer(t)
	defer goleak.VerifyNone(t)
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Minute)
	defer cancel()
	out := interrupter{cancel: cancel}
	if code := run(ctx, []string{"demo", "-pause", "10ms"}, &out, io.Discard); code != 0 {
		t.Errorf("exit status %d", code)
	}
	allEnded(t, out.String())
}

func TestAWrongCommandLineShowsTheUsageAndWhatIsWrong(t *testing.T) {
	for _, c := range []struct {
		args []string
		why  string
	}{
		{nil, "takes a command"},
		{[]string{"dmo"}, "no such command"},
		{[]string{"demo", "-twice"}, "demo has no such flag"},
		{[]string{"demo", "now"}, "demo takes flags and nothing else"},
		{[]string{"demo", "-pause", "soon"}, "takes another value"},
		{[]string{"check", "-timeout", "0s"}, "check's -timeout"},
		{[]string{"watch", "-interval", "0s"}, "watch's -interval"},
	} {
		var errs bytes.Buffer
		code := run(context.Background(), c.args, io.Discard, &errs)
		text := strings.TrimSpace(errs.String())
		last := text[strings.LastIndex(text, "\n")+1:]
		if code != 2 || !strings.HasPrefix(text, "usage: pgsplit") || !strings.HasPrefix(last, "pgsplit: ") || !strings.Contains(last, c.why) {
			t.Errorf("%q: exit status %d, %s", c.args, code, errs.String())
		}
	}
}
