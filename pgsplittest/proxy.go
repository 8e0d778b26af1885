package pgsplittest

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"slices"
	"sync"
	"sync/atomic"
	"time"
)

// A Proxy stands between clients and a server, and does to their connections what networks and poolers do. It knows
// nothing of the server's health: a server that is down shows as a connection that is accepted and reset at its first
// message. It is safe for concurrent use.
type Proxy struct {
	listener net.Listener
	targets  []string
	next     atomic.Uint64 // counts the connections dealt out to targets

	delay      atomic.Int64 // a time.Duration
	pooler     atomic.Int32 // a PoolerMode
	roundTrips atomic.Int64
	accepted   atomic.Int64

	mu        sync.Mutex // guards the fields below
	closed    bool
	refusing  bool
	gates     [2]chan struct{} // per direction: nil while open, else closed when it opens again
	links     map[*link]struct{}
	connected int // links whose client has not closed its side

	wg sync.WaitGroup // all goroutines
}

// direction is one of the two ways through a proxy.
type direction int

const (
	toServer direction = iota
	toClient
)

// newProxy returns a proxy that deals its connections to the targets in turn.
func newProxy(targets ...string) (*Proxy, error) {
	listener, err := net.Listen("tcp", net.JoinHostPort(serverHost, "0"))
	if err != nil {
		return nil, fmt.Errorf("pgsplittest: proxy: %w", err)
	}
	p := &Proxy{listener: listener, targets: targets, links: map[*link]struct{}{}}
	p.wg.Go(p.accept)
	return p, nil
}

// Addr returns the proxy's address, as "127.0.0.1:40001".
func (p *Proxy) Addr() string { return p.listener.Addr().String() }

// URI returns the connection URI of the proxy.
func (p *Proxy) URI() string { return uri(p.Addr()) }

// SetDelay sets the time added to every round trip, on connections that are open as well. Default 0. It holds back
// what the client sends, without limiting how much is on its way at a time; what the server sends passes at once. The
// first message on a new connection is delayed like any other, but the TCP handshake is not.
func (p *Proxy) SetDelay(d time.Duration) { p.delay.Store(int64(d)) }

// Cut resets all connections (RST, to both sides) and from then on every new one, until [Proxy.Restore].
func (p *Proxy) Cut() {
	p.mu.Lock()
	p.refusing = true
	p.mu.Unlock()
	p.CutConnections()
}

// CutConnections resets the connections that are open (RST, to both sides). New ones are welcome.
func (p *Proxy) CutConnections() {
	p.mu.Lock()
	links := slices.Collect(maps.Keys(p.links))
	p.mu.Unlock()
	for _, l := range links {
		l.reset()
	}
}

// BlackHole makes the proxy swallow everything, as a network does whose cable is pulled: connections stay open, new
// ones are accepted, and nothing arrives in either direction, not even that the other side has gone. What was sent
// meanwhile arrives after [Proxy.Restore], as TCP would send it again.
func (p *Proxy) BlackHole() {
	p.shut(toServer, toClient)
}

// BlackHoleToServer is [Proxy.BlackHole] for what clients send: the server waits for the next statement.
func (p *Proxy) BlackHoleToServer() { p.shut(toServer) }

// BlackHoleToClient is [Proxy.BlackHole] for what the server sends: statements run, and their answers do not arrive.
func (p *Proxy) BlackHoleToClient() { p.shut(toClient) }

func (p *Proxy) shut(directions ...direction) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, d := range directions {
		if p.gates[d] == nil {
			p.gates[d] = make(chan struct{})
		}
	}
}

// Restore ends Cut and every BlackHole. Delay and pooler stay as they are.
func (p *Proxy) Restore() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.refusing = false
	for d, gate := range p.gates {
		if gate != nil {
			close(gate)
			p.gates[d] = nil
		}
	}
}

// RoundTrips returns how many times clients have spoken since the proxy was made: first on a connection, or after
// something from the server had reached the client. So a statement counts once per flush that the client waits for, a
// connection without TLS and password once, a cancel request (on a connection of its own) once, and the message that
// ends a connection not at all. A client that sends on while answers are coming in (a pipeline of several flushes, a
// COPY that the server comments on) may be counted more than once for it.
func (p *Proxy) RoundTrips() int64 { return p.roundTrips.Load() }

// Connections returns how many connections clients hold open at this moment.
func (p *Proxy) Connections() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.connected
}

// Accepted returns how many connections were accepted since the proxy was made, without those refused by [Proxy.Cut].
func (p *Proxy) Accepted() int64 { return p.accepted.Load() }

// Close resets all connections, stops listening, and waits for the end of all the proxy's goroutines.
func (p *Proxy) Close() {
	p.mu.Lock()
	p.closed = true
	p.mu.Unlock()
	p.listener.Close()
	p.CutConnections()
	p.wg.Wait()
}

func (p *Proxy) accept() {
	for {
		conn, err := p.listener.Accept()
		if errors.Is(err, net.ErrClosed) {
			return
		}
		if err != nil {
			continue // the client left before it was accepted
		}
		p.welcome(conn.(*net.TCPConn))
	}
}

// welcome begins to forward a connection.
func (p *Proxy) welcome(client *net.TCPConn) {
	client.SetNoDelay(true)
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed || p.refusing {
		client.SetLinger(0)
		client.Close()
		return
	}
	p.accepted.Add(1)
	l := &link{proxy: p, client: client, pooler: PoolerMode(p.pooler.Load())}
	l.ctx, l.cancel = context.WithCancel(context.Background())
	for d := range l.queues {
		l.queues[d] = make(chan packet, 64)
	}
	l.answered.Store(true)
	p.links[l] = struct{}{}
	p.connected++
	p.wg.Go(l.run)
}

// pass returns when the way is open, or false when ctx has ended.
func (p *Proxy) pass(ctx context.Context, d direction) bool {
	for {
		p.mu.Lock()
		gate := p.gates[d]
		p.mu.Unlock()
		if gate == nil {
			return ctx.Err() == nil
		}
		select {
		case <-gate:
		case <-ctx.Done():
			return false
		}
	}
}

// link is one connection through a proxy. In each direction one goroutine reads into a queue, and one forwards out of it.
type link struct {
	proxy  *Proxy
	pooler PoolerMode
	ctx    context.Context // ends with the link
	cancel context.CancelFunc
	queues [2]chan packet // by direction
	halves sync.WaitGroup // the readers and forwarders

	answered atomic.Bool // something went to the client since it last spoke; true at first

	client *net.TCPConn

	mu     sync.Mutex   // guards the fields below
	server *net.TCPConn // nil until there is something to send to it
	left   bool         // the client has closed its side, or was reset
	ended  bool
}

// packet is what was read at once, or the end of a stream.
type packet struct {
	data []byte
	due  time.Time // not to be forwarded before
	end  error     // io.EOF: the sender has closed its side; another error: the connection broke
}

func (l *link) run() {
	l.halves.Go(l.readClient)
	l.halves.Go(func() { l.forward(toServer) })
	l.halves.Go(func() { l.forward(toClient) })
	l.halves.Wait()
	l.close(false)
	l.proxy.mu.Lock()
	delete(l.proxy.links, l)
	l.proxy.mu.Unlock()
}

// readClient queues what the client sends.
func (l *link) readClient() {
	defer l.clientLeft()
	var err error
	if l.pooler != PoolerOff {
		err = l.greetClient()
	}
	buf := make([]byte, 32<<10)
	for err == nil {
		var n int
		n, err = l.client.Read(buf)
		l.enqueueFromClient(buf[:n])
	}
	l.enqueue(toServer, packet{end: err, due: l.due()})
}

// terminate is the message with which a client ends its connection.
const terminate = "X\x00\x00\x00\x04"

func (l *link) enqueueFromClient(data []byte) {
	if len(data) == 0 {
		return
	}
	if string(data) != terminate && l.answered.Swap(false) {
		l.proxy.roundTrips.Add(1)
	}
	l.enqueue(toServer, packet{data: slices.Clone(data), due: l.due()})
}

func (l *link) due() time.Time {
	return time.Now().Add(time.Duration(l.proxy.delay.Load()))
}

// readServer queues what the server sends.
func (l *link) readServer() {
	var err error
	if l.pooler != PoolerOff {
		err = l.greetServer()
	}
	buf := make([]byte, 32<<10)
	for err == nil {
		var n int
		n, err = l.server.Read(buf)
		if n > 0 {
			l.enqueue(toClient, packet{data: slices.Clone(buf[:n])})
		}
	}
	l.enqueue(toClient, packet{end: err})
}

func (l *link) enqueue(d direction, pk packet) {
	select {
	case l.queues[d] <- pk:
	case <-l.ctx.Done():
	}
}

// forward writes out of a queue until its stream or the link ends.
func (l *link) forward(d direction) {
	broken := false
	for {
		var pk packet
		select {
		case pk = <-l.queues[d]:
		case <-l.ctx.Done():
			return
		}
		if !l.wait(pk.due) || !l.proxy.pass(l.ctx, d) {
			return
		}
		if pk.end != nil {
			l.endStream(d, pk.end)
			return
		}
		if broken {
			continue
		}
		to, err := l.destination(d)
		if err != nil {
			l.reset()
			return
		}
		if d == toClient {
			l.answered.Store(true)
		}
		// When it cannot be written, the receiver has gone, and the reader on that side learns what it said last and how
		// it went. Until then the rest goes nowhere.
		_, err = to.Write(pk.data)
		broken = err != nil
	}
}

// wait returns when the time has come, or false when the link has ended.
func (l *link) wait(due time.Time) bool {
	left := time.Until(due)
	if due.IsZero() || left <= 0 {
		return true
	}
	timer := time.NewTimer(left)
	defer timer.Stop()
	select {
	case <-timer.C:
		return true
	case <-l.ctx.Done():
		return false
	}
}

// endStream passes the end of one direction's stream on.
func (l *link) endStream(d direction, end error) {
	to := l.client
	if d == toServer {
		l.mu.Lock()
		to = l.server
		l.mu.Unlock()
	}
	// Without a server the client has left before it said anything, or after a refusal.
	if to == nil || !errors.Is(end, io.EOF) {
		l.reset()
		return
	}
	to.CloseWrite()
}

// destination returns where a direction leads. It connects to a server when it is first asked for it.
func (l *link) destination(d direction) (*net.TCPConn, error) {
	if d == toClient {
		return l.client, nil
	}
	l.mu.Lock()
	server := l.server
	l.mu.Unlock()
	if server != nil {
		return server, nil
	}
	server, err := l.proxy.dial(l.ctx)
	if err != nil {
		return nil, err
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.ended {
		server.Close()
		return nil, net.ErrClosed
	}
	l.server = server
	l.halves.Go(l.readServer)
	return server, nil
}

// dial connects to the target whose turn it is, or to the next one that accepts.
func (p *Proxy) dial(ctx context.Context) (*net.TCPConn, error) {
	err := errors.New("no target")
	turn := p.next.Add(1) - 1
	for i := range uint64(len(p.targets)) {
		target := p.targets[(turn+i)%uint64(len(p.targets))]
		var conn net.Conn
		conn, err = new(net.Dialer).DialContext(ctx, "tcp", target)
		if err == nil {
			tcp := conn.(*net.TCPConn)
			tcp.SetNoDelay(true)
			return tcp, nil
		}
	}
	return nil, err
}

// reset breaks the link off on both sides.
func (l *link) reset() { l.close(true) }

func (l *link) close(reset bool) {
	l.cancel()
	l.mu.Lock()
	l.ended = true
	server := l.server
	l.mu.Unlock()
	for _, conn := range []*net.TCPConn{l.client, server} {
		if conn == nil {
			continue
		}
		if reset {
			conn.SetLinger(0)
		}
		conn.Close()
	}
	l.clientLeft()
}

// clientLeft takes the link out of the count of connections, once.
func (l *link) clientLeft() {
	l.mu.Lock()
	left := l.left
	l.left = true
	l.mu.Unlock()
	if !left {
		l.proxy.mu.Lock()
		l.proxy.connected--
		l.proxy.mu.Unlock()
	}
}
