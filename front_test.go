package pgsplit_test

import (
	"encoding/binary"
	"io"
	"net"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/jackc/pgx/v5/pgproto3"

	"github.com/pgsplit/pgsplit/pgsplittest"
)

// condition is what a front makes of those who come.
type condition int32

const (
	up       condition = iota // they reach the server
	dead                      // they are reset, as where nobody listens
	starting                  // 57P03
	full                      // 53300
	silent                    // they are not answered
)

var conditions = [...]string{up: "up", dead: "down", starting: "starting", full: "full", silent: "silent"}

func (c condition) String() string { return conditions[c] }

// front stands before a server and decides who is let in. It knows who comes, because they say so when they come.
type front struct {
	listener  net.Listener
	target    string                 // the first server's address
	leads     atomic.Pointer[string] // the address of the server behind
	condition atomic.Int32
	shared    atomic.Bool   // every other one who comes finds it up
	turn      atomic.Uint32 // counts those who come while it is shared

	mu        sync.Mutex
	came      map[string]int      // by application_name; guarded by mu
	now, most map[string]int      // who is there at once, and was; guarded by mu
	conns     map[net.Conn]string // by what they said that they are
	wg        sync.WaitGroup
}

func newFront(t testing.TB, s *pgsplittest.Server, c condition) *front {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	f := &front{listener: listener, target: addressOf(s), came: map[string]int{}, now: map[string]int{}, most: map[string]int{},
		conns: map[net.Conn]string{}}
	f.is(c)
	f.leadsTo(s)
	f.wg.Go(f.accept)
	t.Cleanup(func() {
		_ = listener.Close()
		f.mu.Lock()
		for conn := range f.conns {
			_ = conn.Close()
		}
		f.mu.Unlock()
		f.wg.Wait()
	})
	return f
}

// frontsOf puts a front before each server and returns the DSN through them.
func frontsOf(t testing.TB, cluster *pgsplittest.Cluster, conditions ...condition) (dsn string, fronts []*front) {
	t.Helper()
	var uris []string
	for i, s := range cluster.Servers() {
		c := up
		if i < len(conditions) {
			c = conditions[i]
		}
		f := newFront(t, s, c)
		fronts = append(fronts, f)
		uris = append(uris, strings.Replace(s.URI(), f.target, f.listener.Addr().String(), 1))
	}
	return strings.Join(uris, " "), fronts
}

func addressOf(s *pgsplittest.Server) string {
	return net.JoinHostPort(s.Host(), strconv.Itoa(s.Port()))
}

// leadsTo has those who come from now on reach another server.
func (f *front) leadsTo(s *pgsplittest.Server) {
	address := addressOf(s)
	f.leads.Store(&address)
}

func (f *front) is(c condition) { f.condition.Store(int32(c)) }

// met is what the next one who comes meets with.
func (f *front) met() condition {
	if f.shared.Load() && f.turn.Add(1)%2 == 0 {
		return up
	}
	return condition(f.condition.Load())
}

// visitors tells how many came that said this name, and how many were there at once.
func (f *front) visitors(name string) (came, most int) {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.came[name], f.most[name]
}

// there is how many are there that said this name.
func (f *front) there(name string) int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.now[name]
}

// drop resets those who are there that said one of the names, or all.
func (f *front) drop(names ...string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for conn, name := range f.conns {
		if len(names) == 0 || slices.Contains(names, name) {
			_ = conn.(*net.TCPConn).SetLinger(0)
			_ = conn.Close()
		}
	}
}

func (f *front) accept() {
	for {
		conn, err := f.listener.Accept()
		if err != nil {
			return
		}
		f.mu.Lock()
		f.conns[conn] = ""
		f.mu.Unlock()
		f.wg.Go(func() {
			f.welcome(conn)
			_ = conn.(*net.TCPConn).SetLinger(0)
			_ = conn.Close()
			f.mu.Lock()
			delete(f.conns, conn)
			f.mu.Unlock()
		})
	}
}

func (f *front) welcome(conn net.Conn) {
	head := make([]byte, 4)
	if _, err := io.ReadFull(conn, head); err != nil {
		return
	}
	body := make([]byte, binary.BigEndian.Uint32(head)-4)
	if _, err := io.ReadFull(conn, body); err != nil {
		return
	}
	var startup pgproto3.StartupMessage
	if startup.Decode(body) == nil {
		name := startup.Parameters["application_name"]
		f.mu.Lock()
		f.conns[conn] = name
		f.came[name]++
		f.now[name]++
		f.most[name] = max(f.most[name], f.now[name])
		f.mu.Unlock()
		defer func() {
			f.mu.Lock()
			f.now[name]--
			f.mu.Unlock()
		}()
	}
	code := ""
	switch f.met() {
	case dead:
		return
	case starting:
		code = "57P03"
	case full:
		code = "53300"
	case silent:
		_, _ = io.Copy(io.Discard, conn)
		return
	}
	if code != "" {
		refusal, _ := (&pgproto3.ErrorResponse{Severity: "FATAL", Code: code, Message: "not now"}).Encode(nil)
		_, _ = conn.Write(refusal)
		_ = conn.(*net.TCPConn).CloseWrite()
		_, _ = io.Copy(io.Discard, conn) // a reset could overtake what was written
		return
	}
	server, err := net.Dial("tcp", *f.leads.Load())
	if err != nil {
		return
	}
	defer server.Close()
	if _, err := server.Write(append(head, body...)); err != nil {
		return
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		_, _ = io.Copy(conn, server)
		_ = conn.Close()
	}()
	_, _ = io.Copy(server, conn)
	_ = server.Close()
	<-done
}

// probes is the application_name of those that only want to see whether the server lets them in.
const probes = "pgsplit probe"
