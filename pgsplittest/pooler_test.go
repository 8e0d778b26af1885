package pgsplittest

import (
	"errors"
	"io"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
)

func TestAPoolerThatDropsTheParameter(t *testing.T) {
	c := Start(t, Replicas(0))
	p := c.Primary.Proxy()
	readOnly := p.URI() + "&default_transaction_read_only=on&application_name=kept"
	for _, test := range []struct {
		mode     PoolerMode
		setting  string
		samePIDs bool
	}{
		{PoolerOff, "on", true},
		{PoolerDropsParameter, "off", false},
	} {
		p.EmulatePooler(test.mode)
		conn := connect(t, readOnly)
		var setting, name string
		var pid uint32
		must(t, conn.QueryRow(t.Context(), "select current_setting('default_transaction_read_only'), current_setting('application_name'), pg_backend_pid()").
			Scan(&setting, &name, &pid))
		if setting != test.setting || name != "kept" {
			t.Errorf("mode %d: read-only %s, want %s; application_name %q", test.mode, setting, test.setting, name)
		}
		if same := conn.PgConn().PID() == pid; same != test.samePIDs {
			t.Errorf("mode %d: the client was told pid %d, the server is %d", test.mode, conn.PgConn().PID(), pid)
		}
	}
}

func TestAPoolerThatRefusesTheParameter(t *testing.T) {
	c := Start(t, Replicas(0))
	p := c.Primary.Proxy()
	p.EmulatePooler(PoolerRefusesParameter)
	_, err := pgx.Connect(t.Context(), p.URI()+"&default_transaction_read_only=on")
	var refusal *pgconn.PgError
	if !errors.As(err, &refusal) || refusal.Code != "08P01" || refusal.Severity != "FATAL" ||
		refusal.Message != "unsupported startup parameter: default_transaction_read_only" {
		t.Errorf("connect with the parameter: %v", err)
	}
	conn := connect(t, p.URI())
	must(t, conn.Ping(t.Context()))
}

func TestACancelRequestFindsItsBackendThroughAPooler(t *testing.T) {
	c := Start(t, Replicas(0))
	p := c.Primary.Proxy()
	p.EmulatePooler(PoolerDropsParameter)
	conn := connect(t, p.URI())
	done := make(chan error, 1)
	go func() {
		_, err := conn.Exec(t.Context(), "select pg_sleep(60)")
		done <- err
	}()
	eventually(t, "the statement runs", func() bool {
		return query[int](t, c.Primary, "select count(*) from pg_stat_activity where query = 'select pg_sleep(60)'") == 1
	})
	must(t, conn.PgConn().CancelRequest(t.Context()))
	var canceled *pgconn.PgError
	if err := <-done; !errors.As(err, &canceled) || canceled.Code != "57014" {
		t.Errorf("the cancelled statement: %v", err)
	}
}

func TestAPoolerDeclinesTLS(t *testing.T) {
	c := Start(t, Replicas(0))
	p := c.Primary.Proxy()
	p.EmulatePooler(PoolerDropsParameter)
	connect(t, strings.Replace(p.URI(), "disable", "prefer", 1))
	if conn, err := pgx.Connect(t.Context(), strings.Replace(p.URI(), "disable", "require", 1)); err == nil {
		closeConn(conn)
		t.Error("connected with TLS")
	}
}

func TestWhatIsNoStartupMessageEndsThePoolersConnection(t *testing.T) {
	server := newPeer(t)
	p := startProxy(t, server.Addr().String())
	p.EmulatePooler(PoolerDropsParameter)
	conn := dial(t, p)
	_, err := io.WriteString(conn, "GET / HTTP/1.1\r\n\r\n")
	must(t, err)
	if _, err := conn.Read(make([]byte, 1)); err == nil || strings.Contains(err.Error(), "timeout") {
		t.Errorf("read: %v, want an end", err)
	}
	if len(server.conns) != 0 {
		t.Error("it reached the server")
	}
}
