package pgsplittest

import (
	"bytes"
	"context"
	"errors"
	"io"
	"net"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"go.uber.org/goleak"
)

// peer accepts TCP connections for a test.
type peer struct {
	net.Listener
	conns chan net.Conn
	echos sync.WaitGroup
}

func newPeer(t *testing.T) *peer {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	must(t, err)
	p := &peer{Listener: l, conns: make(chan net.Conn, 1000)}
	var wg sync.WaitGroup
	wg.Go(func() {
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			p.conns <- conn
		}
	})
	t.Cleanup(func() {
		l.Close()
		wg.Wait()
		close(p.conns)
		for conn := range p.conns {
			conn.Close()
		}
		p.echos.Wait()
	})
	return p
}

// echo answers every byte with itself.
func (p *peer) echo() {
	p.echos.Go(func() {
		for conn := range p.conns {
			p.echos.Go(func() {
				io.Copy(conn, conn)
				conn.Close()
			})
		}
	})
}

func startProxy(t *testing.T, targets ...string) *Proxy {
	t.Helper()
	p, err := newProxy(targets...)
	must(t, err)
	t.Cleanup(p.Close)
	return p
}

func dial(t *testing.T, p *Proxy) net.Conn {
	t.Helper()
	conn, err := net.Dial("tcp", p.Addr())
	must(t, err)
	t.Cleanup(func() { conn.Close() })
	must(t, conn.SetDeadline(time.Now().Add(time.Minute)))
	return conn
}

func exchange(t *testing.T, conn net.Conn, text string) {
	t.Helper()
	_, err := io.WriteString(conn, text)
	must(t, err)
	answer := make([]byte, len(text))
	_, err = io.ReadFull(conn, answer)
	must(t, err)
	if string(answer) != text {
		t.Fatalf("answer %q, want %q", answer, text)
	}
}

// silent fails the test when something arrives within 100 ms.
func silent(t *testing.T, conn net.Conn) {
	t.Helper()
	must(t, conn.SetReadDeadline(time.Now().Add(100*time.Millisecond)))
	defer func() { must(t, conn.SetReadDeadline(time.Now().Add(time.Minute))) }()
	n, err := conn.Read(make([]byte, 1))
	var timeout net.Error
	if n != 0 || !errors.As(err, &timeout) || !timeout.Timeout() {
		t.Fatalf("read %d bytes, %v, want silence", n, err)
	}
}

func TestAProxyPassesEverythingInOrder(t *testing.T) {
	server := newPeer(t)
	server.echo()
	conn := dial(t, startProxy(t, server.Addr().String()))
	sent := make([]byte, 8<<20)
	for i := range sent {
		sent[i] = byte(i * i >> 8)
	}
	var wg sync.WaitGroup
	wg.Go(func() {
		conn.Write(sent)
		conn.(*net.TCPConn).CloseWrite()
	})
	received, err := io.ReadAll(conn)
	wg.Wait()
	must(t, err)
	if !bytes.Equal(received, sent) {
		t.Errorf("sent %d bytes, received %d, or others", len(sent), len(received))
	}
}

func TestDelayIsAddedToARoundTripOnce(t *testing.T) {
	server := newPeer(t)
	server.echo()
	p := startProxy(t, server.Addr().String())
	conn := dial(t, p)
	exchange(t, conn, "open")
	const delay = 500 * time.Millisecond
	timed := func(f func()) time.Duration {
		begin := time.Now()
		f()
		return time.Since(begin)
	}
	// The best of a few counts where time is not to be lost: the machine may be busy.
	inOneOf := func(tries int, most time.Duration, f func()) {
		t.Helper()
		best := timed(f)
		for try := 1; try < tries && best > most; try++ {
			best = min(best, timed(f))
		}
		if best > most {
			t.Errorf("it took %v, want %v at most", best, most)
		}
	}
	p.SetDelay(delay)
	inOneOf(10, 2*delay-1, func() {
		if took := timed(func() { exchange(t, conn, "delayed") }); took < delay {
			t.Errorf("a round trip took %v with %v added", took, delay)
		}
	})
	// What is sent at once travels at once.
	inOneOf(10, 4*delay, func() {
		for range 10 {
			_, err := io.WriteString(conn, "burst")
			must(t, err)
		}
		_, err := io.ReadFull(conn, make([]byte, 10*len("burst")))
		must(t, err)
	})
	p.SetDelay(0)
	inOneOf(10, delay-1, func() { exchange(t, conn, "quick") })
}

func TestRoundTripsCountWhatAClientWaitsFor(t *testing.T) {
	server := newPeer(t)
	p := startProxy(t, server.Addr().String())
	send := func(from, to net.Conn, text string) {
		t.Helper()
		_, err := io.WriteString(from, text)
		must(t, err)
		_, err = io.ReadFull(to, make([]byte, len(text)))
		must(t, err)
	}
	counted := func(when string, want int64) {
		t.Helper()
		if n := p.RoundTrips(); n != want {
			t.Errorf("%s: %d round trips, want %d", when, n, want)
		}
	}
	connection := func() (client, behind net.Conn) {
		client = dial(t, p)
		_, err := io.WriteString(client, "first")
		must(t, err)
		behind = <-server.conns
		t.Cleanup(func() { behind.Close() })
		_, err = io.ReadFull(behind, make([]byte, len("first")))
		must(t, err)
		return client, behind
	}
	client, behind := connection()
	counted("first word", 1)
	send(client, behind, "second burst")
	counted("without an answer", 1)
	send(behind, client, "answer")
	counted("answered", 1)
	send(client, behind, "next")
	send(client, behind, "still the same")
	counted("after an answer", 2)
	connection()
	counted("another connection", 3)
	send(behind, client, "answer")
	send(client, behind, terminate)
	counted("terminate", 3)
}

func TestRoundTripsOfStatements(t *testing.T) {
	c := Start(t, Replicas(0))
	p := c.Primary.Proxy()
	spent := func(what string, want int64, do func()) {
		t.Helper()
		before := p.RoundTrips()
		do()
		if n := p.RoundTrips() - before; n != want {
			t.Errorf("%s: %d round trips, want %d", what, n, want)
		}
	}
	var conn *pgx.Conn
	spent("connect", 1, func() { conn = connect(t, c.Primary.ProxyURI()) })
	var n int
	one := func() { must(t, conn.QueryRow(t.Context(), "select $1::int", 1).Scan(&n)) }
	spent("prepare and execute", 2, one)
	spent("execute", 1, one)
	spent("simple protocol", 1, func() {
		_, err := conn.Exec(t.Context(), "begin; select 1; commit")
		must(t, err)
	})
	spent("a large result", 1, func() {
		_, err := conn.Exec(t.Context(), "select repeat('x', 1000) from generate_series(1, 10000)")
		must(t, err)
	})
	spent("close", 0, func() {
		must(t, conn.Close(t.Context()))
		eventually(t, "the connection is closed", func() bool { return p.Connections() == 0 })
	})
}

func TestCutResetsAndRefusesUntilRestored(t *testing.T) {
	server := newPeer(t)
	p := startProxy(t, server.Addr().String())
	client := dial(t, p)
	io.WriteString(client, "x")
	behind := <-server.conns
	defer behind.Close()
	_, err := io.ReadFull(behind, make([]byte, 1))
	must(t, err)

	p.Cut()
	for side, conn := range map[string]net.Conn{"client": client, "server": behind} {
		if _, err := conn.Read(make([]byte, 1)); !errors.Is(err, syscall.ECONNRESET) {
			t.Errorf("the %s reads %v, want a reset", side, err)
		}
	}
	if n := p.Connections(); n != 0 {
		t.Errorf("%d connections after a cut", n)
	}
	refused, err := net.Dial("tcp", p.Addr())
	if err == nil {
		defer refused.Close()
		if _, err = refused.Read(make([]byte, 1)); err == nil || errors.Is(err, io.EOF) {
			t.Errorf("a new connection reads %v, want a reset", err)
		}
	}
	if n := p.Accepted(); n != 1 {
		t.Errorf("accepted %d connections, want 1", n)
	}
	p.Restore()
	server.echo()
	exchange(t, dial(t, p), "restored")
}

func TestCutConnectionsLetsNewOnesIn(t *testing.T) {
	server := newPeer(t)
	server.echo()
	p := startProxy(t, server.Addr().String())
	conn := dial(t, p)
	exchange(t, conn, "before")
	p.CutConnections()
	if _, err := conn.Read(make([]byte, 1)); !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("read: %v, want a reset", err)
	}
	exchange(t, dial(t, p), "after")
	if p.Accepted() != 2 || p.Connections() != 1 {
		t.Errorf("accepted %d, open %d, want 2 and 1", p.Accepted(), p.Connections())
	}
}

func TestConcurrentClientsOfARoundRobinPassOverTheDead(t *testing.T) {
	dead, err := net.Listen("tcp", "127.0.0.1:0")
	must(t, err)
	must(t, dead.Close())
	server := newPeer(t)
	server.echo()
	p := startProxy(t, dead.Addr().String(), server.Addr().String())
	var all sync.WaitGroup
	for range 200 {
		conn := dial(t, p)
		all.Go(func() {
			if _, err := conn.Write([]byte("x")); err != nil {
				t.Error(err)
			}
			if _, err := conn.Read(make([]byte, 1)); err != nil {
				t.Error(err)
			}
		})
	}
	all.Wait()
}

func TestABlackHoleIsSilentAndDeliversAfterwards(t *testing.T) {
	server := newPeer(t)
	server.echo()
	p := startProxy(t, server.Addr().String())
	old := dial(t, p)
	exchange(t, old, "before")
	p.BlackHole()
	fresh := dial(t, p)
	for _, conn := range []net.Conn{old, fresh} {
		_, err := io.WriteString(conn, "meanwhile")
		must(t, err)
		silent(t, conn)
	}
	p.Restore()
	for _, conn := range []net.Conn{old, fresh} {
		answer := make([]byte, len("meanwhile"))
		_, err := io.ReadFull(conn, answer)
		must(t, err)
		exchange(t, conn, "afterwards")
	}
}

func TestABlackHoleHidesTheEndOfTheOtherSide(t *testing.T) {
	server := newPeer(t)
	p := startProxy(t, server.Addr().String())
	leaving, staying := dial(t, p), dial(t, p)
	var behind []net.Conn
	for _, conn := range []net.Conn{leaving, staying} {
		io.WriteString(conn, "x")
		b := <-server.conns
		defer b.Close()
		must(t, b.SetDeadline(time.Now().Add(time.Minute)))
		_, err := io.ReadFull(b, make([]byte, 1))
		must(t, err)
		behind = append(behind, b)
	}
	p.BlackHole()
	leaving.Close()
	behind[1].Close()
	eventually(t, "one connection is left", func() bool { return p.Connections() == 1 })
	silent(t, behind[0])
	silent(t, staying)
	p.Restore()
	for _, conn := range []net.Conn{behind[0], staying} {
		if _, err := conn.Read(make([]byte, 1)); !errors.Is(err, io.EOF) {
			t.Errorf("after the black hole: %v, want EOF", err)
		}
	}
}

func TestOneWayBlackHoles(t *testing.T) {
	c := Start(t, Replicas(0))
	must(t, c.Primary.Exec(t.Context(), "create table t (x int)"))
	p := c.Primary.Proxy()
	conn := connect(t, c.Primary.ProxyURI())
	count := func() int { return query[int](t, c.Primary, "select count(*) from t") }
	insert := func() <-chan error {
		done := make(chan error, 1)
		go func() {
			_, err := conn.Exec(t.Context(), "insert into t values (1)")
			done <- err
		}()
		return done
	}

	p.BlackHoleToClient()
	done := insert()
	eventually(t, "the insert runs", func() bool { return count() == 1 })
	select {
	case err := <-done:
		t.Fatalf("its answer came through: %v", err)
	default:
	}
	p.Restore()
	must(t, <-done)

	p.BlackHoleToServer()
	sent := p.RoundTrips()
	done = insert()
	eventually(t, "the insert is sent", func() bool { return p.RoundTrips() > sent })
	if n := count(); n != 1 {
		t.Errorf("%d rows, want 1: the insert reached the server", n)
	}
	p.Restore()
	must(t, <-done)
	if n := count(); n != 2 {
		t.Errorf("%d rows, want 2", n)
	}
}

// A server that ends a connection has the last word, as without a proxy.
func TestTheServersLastWordArrives(t *testing.T) {
	c := Start(t, Replicas(0))
	conn := connect(t, c.Primary.ProxyURI())
	must(t, c.Primary.Exec(t.Context(), "select pg_terminate_backend($1)", conn.PgConn().PID()))
	eventually(t, "the backend is gone", func() bool {
		return query[int](t, c.Primary, "select count(*) from pg_stat_activity where application_name = '' and backend_type = 'client backend'") == 0
	})
	_, err := conn.Exec(t.Context(), "select 1")
	if err == nil || !bytes.Contains([]byte(err.Error()), []byte("57P01")) {
		t.Errorf("a statement on a terminated connection: %v", err)
	}
}

func TestAServerThatIsDownResets(t *testing.T) {
	c := Start(t, Replicas(0))
	must(t, c.Primary.Stop(t.Context(), Immediate))
	_, err := pgx.Connect(t.Context(), c.Primary.ProxyURI())
	if !errors.Is(err, syscall.ECONNRESET) && !errors.Is(err, syscall.EPIPE) {
		t.Errorf("connect through the proxy of a stopped server: %v, want a reset", err)
	}
}

func TestRoundRobinDealsInTurnAndPassesOverTheDead(t *testing.T) {
	c := Start(t, Replicas(3))
	deal := func(n int) map[string]int {
		seen := map[string]int{}
		for range n {
			var name string
			must(t, connect(t, c.RoundRobin().URI()).QueryRow(t.Context(), "show cluster_name").Scan(&name))
			seen[name]++
		}
		return seen
	}
	for name, n := range deal(6) {
		if n != 2 || name == "primary" {
			t.Errorf("%s got %d of 6 connections", name, n)
		}
	}
	must(t, c.Replicas[1].Stop(t.Context(), Fast))
	seen := deal(6)
	if seen["replica2"] != 0 || seen["replica1"] == 0 || seen["replica3"] == 0 {
		t.Errorf("with replica2 down: %v", seen)
	}
}

func TestConnectionsAndAcceptedAreCounted(t *testing.T) {
	server := newPeer(t)
	server.echo()
	p := startProxy(t, server.Addr().String())
	var conns []net.Conn
	for range 3 {
		conn := dial(t, p)
		exchange(t, conn, "x")
		conns = append(conns, conn)
	}
	if p.Accepted() != 3 || p.Connections() != 3 {
		t.Errorf("accepted %d, open %d, want 3 and 3", p.Accepted(), p.Connections())
	}
	conns[0].Close()
	eventually(t, "two connections are left", func() bool { return p.Connections() == 2 })
	if p.Accepted() != 3 {
		t.Errorf("accepted %d, want 3", p.Accepted())
	}
}

func TestCloseEndsTheProxyWhateverItsState(t *testing.T) {
	server := newPeer(t)
	before := goleak.IgnoreCurrent()
	for name, trouble := range map[string]func(*Proxy){
		"none":       func(*Proxy) {},
		"delay":      func(p *Proxy) { p.SetDelay(time.Hour) },
		"black hole": (*Proxy).BlackHole,
		"cut":        (*Proxy).Cut,
		"pooler":     func(p *Proxy) { p.EmulatePooler(PoolerDropsParameter) },
	} {
		p, err := newProxy(server.Addr().String())
		must(t, err)
		idle, talking := dial(t, p), dial(t, p)
		trouble(p)
		io.WriteString(talking, "hello")
		p.Close()
		p.Close()
		for _, conn := range []net.Conn{idle, talking} {
			if _, err := conn.Read(make([]byte, 1)); err == nil || errors.Is(err, context.DeadlineExceeded) {
				t.Errorf("%s: a connection reads %v after Close", name, err)
			}
		}
		if n := p.Connections(); n != 0 {
			t.Errorf("%s: %d connections after Close", name, n)
		}
		if err := goleak.Find(before); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// Meant for the race detector.
func TestTroubleMayComeAtAnyTime(t *testing.T) {
	server := newPeer(t)
	server.echo()
	p := startProxy(t, server.Addr().String())
	ctx, cancel := context.WithTimeout(t.Context(), 500*time.Millisecond)
	defer cancel()
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			for ctx.Err() == nil {
				conn, err := net.Dial("tcp", p.Addr())
				if err != nil {
					continue
				}
				conn.SetDeadline(time.Now().Add(10 * time.Millisecond))
				for err == nil {
					conn.Write([]byte("x"))
					_, err = conn.Read(make([]byte, 1))
				}
				conn.Close()
			}
		})
	}
	troubles := []func(){p.Cut, p.Restore, p.CutConnections, p.BlackHole, p.Restore, p.BlackHoleToClient, p.BlackHoleToServer,
		func() { p.SetDelay(time.Millisecond) }, p.Restore, func() { p.SetDelay(0) }}
	for i := 0; ctx.Err() == nil; i++ {
		troubles[i%len(troubles)]()
		p.Connections()
	}
	wg.Wait()
	p.Restore()
	p.SetDelay(0)
	exchange(t, dial(t, p), "all is well")
	if p.Accepted() == 0 {
		t.Error("no connection was accepted")
	}
}
