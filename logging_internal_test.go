package pgsplit

import (
	"bytes"
	"context"
	"database/sql"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"runtime"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgsplit/pgsplit/pgsplittest"
)

// Clusters of pgsplittest share their system identifier, so the one met before is made up.
func TestAnotherClusterAtThePrimarysAddressIsLogged(t *testing.T) {
	cluster := pgsplittest.Start(t, pgsplittest.Replicas(0))
	config, err := ParseDSN(cluster.DSN())
	if err != nil {
		t.Fatal(err)
	}
	var text bytes.Buffer
	config.Logger = slog.New(slog.NewTextHandler(&text, nil))
	c, err := NewConnector(config)
	if err != nil {
		t.Fatal(err)
	}
	c.system.Store(42)
	db := sql.OpenDB(c)
	if _, err := db.ExecContext(context.Background(), "select 1"); err != nil {
		t.Fatal(err)
	}
	if err := db.Close(); err != nil {
		t.Fatal(err)
	}
	if want := fmt.Sprintf("from=42 to=%d", c.system.Load()); strings.Count(text.String(), want) != 1 {
		t.Errorf("no line with %s: %s", want, &text)
	}
}

func TestNoFormOfAPasswordIsTold(t *testing.T) {
	const password = `a b@c/"d'\e`
	for _, quoted := range []string{
		password,
		"postgres://u:a%20b%40c%2F%22d%27%5Ce@h/d", // as net/url writes it
		"postgres://u:a%20b%40c%2f%22d'%5ce@h/d",
		"postgres://h/d?password=a+b%40c%2F%22d%27%5Ce",
		`"a b@c/\"d'\\e"`,
		`password='a b@c/"d\'\\e'`,
	} {
		config, err := ParseDSN("host=192.0.2.1 user=u dbname=d password='a b@c/\"d\\'\\\\e'")
		if err != nil {
			t.Fatal(err)
		}
		c, err := NewConnector(config)
		if err != nil {
			t.Fatal(err)
		}
		if got := textOf(c.primary.withoutPassword(fmt.Errorf("no luck with %s", quoted))); strings.Contains(got, "d'") || strings.Contains(got, "b@") ||
			strings.Contains(got, "b%40") || !strings.Contains(got, "xxxxx") {
			t.Errorf("%s is told as %s", quoted, got)
		}
	}
}

func TestThePasswordThatBeforeConnectSetsIsNotTold(t *testing.T) {
	config, err := ParseDSN("postgres://u:before@192.0.2.1/d")
	if err != nil {
		t.Fatal(err)
	}
	var text bytes.Buffer
	config.Logger = slog.New(slog.NewTextHandler(&text, nil))
	config.Primary.BeforeConnect = func(_ context.Context, c *pgx.ConnConfig) error {
		c.Password = "of-today"
		c.DialFunc = func(context.Context, string, string) (net.Conn, error) {
			return nil, fmt.Errorf("no luck with %s", c.Password)
		}
		return nil
	}
	c, err := NewConnector(config)
	if err != nil {
		t.Fatal(err)
	}
	_, err = c.primary.open(t.Context(), readWrite, false)
	c.primary.connected(err)
	for where, told := range map[string]string{"error": textOf(err), "log": text.String(), "stats": textOf(c.Stats().Servers[0].Cause)} {
		if !strings.Contains(told, "no luck with xxxxx") {
			t.Errorf("%s: %s", where, told)
		}
	}
	if err := c.Close(); err != nil {
		t.Error(err)
	}
}

func TestALoggerThatPanicsEndsNothing(t *testing.T) {
	config, err := ParseDSN("postgres://u@192.0.2.1/d")
	if err != nil {
		t.Fatal(err)
	}
	config.Logger = slog.New(panics{})
	c, err := NewConnector(config)
	if err != nil {
		t.Fatal(err)
	}
	c.primary.connected(context.DeadlineExceeded)
	if state := c.primary.health.state(); state != down {
		t.Errorf("it is %s", state)
	}
}

func TestALoggerOrHookThatEndsItsGoroutineLeavesNothingCountedAndNobodyWaiting(t *testing.T) {
	config, err := ParseDSN("postgres://u@192.0.2.1/d?pool_min_conns=1&pool_max_conns=1")
	if err != nil {
		t.Fatal(err)
	}
	var calls atomic.Int32
	config.Logger = slog.New(leaves{})
	config.Primary.BeforeConnect = func(context.Context, *pgx.ConnConfig) error {
		if calls.Add(1) == 1 {
			runtime.Goexit()
		}
		return errors.New("not now")
	}
	c, err := NewConnector(config)
	if err != nil {
		t.Fatal(err)
	}
	db := sql.OpenDB(c)
	defer db.Close()
	shell, err := c.Connect(t.Context()) // it fills the pool in the background
	if err != nil {
		t.Fatal(err)
	}
	s := c.primary
	rest := func() bool {
		s.mu.Lock()
		defer s.mu.Unlock()
		return s.total == 0 && s.filling == nil && len(s.slots) == 0
	}
	deadline := time.Now().Add(time.Minute)
	for calls.Load() == 0 || !rest() {
		if time.Now().After(deadline) {
			t.Fatalf("%d connections are counted, %d slots taken", s.total, len(s.slots))
		}
		runtime.Gosched()
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	s.happened(letIn, nil)
	if _, err := shell.(*Conn).ExecContext(ctx, "select 1", nil); err == nil || ctx.Err() != nil {
		t.Errorf("error: %v", err)
	}
	_ = shell.Close()
}

// leaves is a slog.Handler that fails the test which it belongs to, when a server is worse than before.
type leaves struct{ slog.Handler }

func (leaves) Enabled(context.Context, slog.Level) bool { return true }

func (leaves) Handle(_ context.Context, r slog.Record) error {
	if r.Level > slog.LevelInfo {
		runtime.Goexit()
	}
	return nil
}

// panics is a slog.Handler of the worst kind.
type panics struct{ slog.Handler }
