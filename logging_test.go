package pgsplit_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/pgsplit/pgsplit"
	"github.com/pgsplit/pgsplit/pgsplittest"
)

// lines is what a Logger wrote.
type lines struct {
	mu   sync.Mutex
	text bytes.Buffer // guarded by mu
}

func (l *lines) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.Write(p)
}

func (l *lines) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.String()
}

func (l *lines) logger() *slog.Logger { return slog.New(slog.NewJSONHandler(l, nil)) }

// line is one of them.
type line struct {
	Level, Msg, Server, Role, Cause string
	From, To                        any
	Probes                          int
}

// about are the lines with the message.
func (l *lines) about(t testing.TB, message string) (found []line) {
	t.Helper()
	decoder := json.NewDecoder(strings.NewReader(l.String()))
	for decoder.More() {
		var one line
		if err := decoder.Decode(&one); err != nil {
			t.Fatal(err)
		}
		if strings.Contains(one.Msg, message) {
			found = append(found, one)
		}
	}
	return found
}

func TestEachChangeOfAServersStateIsOneLineAndNoRequestIs(t *testing.T) {
	cluster := pgsplittest.Start(t, pgsplittest.Replicas(1))
	ctx := patient(t)
	l := &lines{}
	dsn := strings.ReplaceAll(cluster.DSN(), "//postgres@", "//postgres:t0p-secret@")
	if !strings.Contains(dsn, "t0p-secret") {
		t.Fatalf("no password in %s", dsn)
	}
	db := openConfigured(t, dsn, func(c *pgsplit.Config) { c.Logger = l.logger() })
	c := connectorOf(t, db)
	read := pgsplit.ReadOnly(ctx)
	warm(t, ctx, db)
	for range 50 {
		exec(t, ctx, db, "select 1")
		exec(t, read, db, "select 1")
		_, _ = db.ExecContext(read, "select nothing")
	}
	if text := l.String(); text != "" {
		t.Errorf("lines about requests: %s", text)
	}
	if err := cluster.Replicas[0].Stop(ctx, pgsplittest.Fast); err != nil {
		t.Fatal(err)
	}
	eventually(t, "it is down", func() bool {
		exec(t, read, db, "select 1")
		return c.Stats().Servers[1].State == "down"
	})
	if err := cluster.Replicas[0].Start(ctx); err != nil {
		t.Fatal(err)
	}
	eventually(t, "it is well again", func() bool {
		found := l.about(t, "state")
		return len(found) > 0 && found[len(found)-1].To == "healthy"
	})
	var last any = "healthy"
	name := c.Stats().Servers[1].Name
	for _, one := range l.about(t, "state") {
		if one.Server != name || one.Role != "replica" || one.From != last || one.To == last ||
			(one.To == "healthy") != (one.Cause == "") || (one.To == "healthy") != (one.Level == "INFO") {
			t.Errorf("after %s: %+v", last, one)
		}
		last = one.To
	}
	if found := l.about(t, "instance"); len(found) != 1 || found[0].Server != name || found[0].From == found[0].To {
		t.Errorf("about the restart: %+v", found)
	}
	if text := l.String(); strings.Contains(text, "secret") {
		t.Errorf("a password: %s", text)
	}
}

func TestWhatIsToldOfAnErrorThatQuotesThePasswordDoesNot(t *testing.T) {
	errNoLuck := errors.New("no luck")
	cluster := pgsplittest.Start(t, pgsplittest.Replicas(1))
	ctx := patient(t)
	l := &lines{}
	dsn := strings.ReplaceAll(cluster.DSN(), "//postgres@", "//postgres:t0p%2Fs%40cret@")
	db := openConfigured(t, dsn, func(c *pgsplit.Config) {
		c.Logger = l.logger()
		c.Replicas[0].Pool.BeforeConnect = func(_ context.Context, config *pgx.ConnConfig) error {
			return fmt.Errorf("%w with %s and %s", errNoLuck, config.ConnString(), config.Password)
		}
	})
	c := connectorOf(t, db)
	exec(t, pgsplit.ReadOnly(ctx), db, "select 1")
	text, err := json.Marshal(c.Health(ctx))
	if err != nil {
		t.Fatal(err)
	}
	cause := c.Stats().Servers[1].Cause
	for what, text := range map[string]string{
		"the log": l.String(), "Health": string(text), "Stats": fmt.Sprintf("%v %#v", cause, cause),
	} {
		if !strings.Contains(text, "no luck with") || strings.Contains(text, "cret") {
			t.Errorf("%s: %s", what, text)
		}
	}
	if !errors.Is(cause, errNoLuck) {
		t.Errorf("%v is another error", cause)
	}
}

func TestAFailoverBehindOneAddressIsLogged(t *testing.T) {
	cluster := pgsplittest.Start(t, pgsplittest.Replicas(1))
	ctx := patient(t)
	f := newFront(t, cluster.Primary, up)
	l := &lines{}
	db := openConfigured(t, strings.Replace(cluster.Primary.URI(), f.target, f.listener.Addr().String(), 1), func(c *pgsplit.Config) {
		c.Logger = l.logger()
	})
	reach := func() {
		eventually(t, "it is reached", func() bool { _, err := db.ExecContext(ctx, "select 1"); return err == nil })
	}
	reach()
	promoted(t, ctx, cluster)
	f.leadsTo(cluster.Replicas[0])
	reach()
	if found := l.about(t, "timeline"); len(found) != 1 || found[0].Role != "primary" || found[0].From != 1.0 || found[0].To != 2.0 {
		t.Errorf("about the timeline: %+v in %s", found, l)
	}
	if found := l.about(t, "another instance"); len(found) != 1 {
		t.Errorf("about the instance: %+v", found)
	}
	if found := l.about(t, "another cluster"); len(found) != 0 {
		t.Errorf("about another cluster: %+v", found)
	}
}
