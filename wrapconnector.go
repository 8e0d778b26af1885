package pgsplit

import (
	"context"
	"database/sql/driver"
	"errors"
	"fmt"
	"io"
	"sync"
)

// This file opens physical connections by way of Config.WrapConnector. What runs on them afterwards is in wrapping.go, as
// the shells see it, and in inner.go, as the wrapper does.

// Server tells a WrapConnector whose connections it wraps.
type Server struct {
	Name    string // the configured name, or the first address: as in Stats and Decision
	Role    string // "primary" or "replica", as configured
	Label   string // the replica's
	Address string // "host:port", or all that are listed, with commas in between
}

// wrap has the configuration's WrapConnector wrap the server's connections. The error wraps ErrConfig.
func (s *server) wrap(wrapper func(Server, driver.Connector) driver.Connector) error {
	of := Server{Name: s.name, Role: s.role.String(), Label: s.label, Address: s.address}
	err := contained("WrapConnector", func() error {
		s.wrapper, s.traced = wrapper(of, innerConnector{s}), true
		return nil
	})
	switch {
	case err != nil:
		return fmt.Errorf("%w: %s: %w", ErrConfig, s, err)
	case s.wrapper == nil:
		return configErrorf(s.String(), "WrapConnector returned nil")
	}
	return nil
}

// closeWrapper closes the wrapper's connector where it has something to close, as sql.DB does.
func (s *server) closeWrapper() {
	if closer, ok := s.wrapper.(io.Closer); ok {
		_ = contained("Close", closer.Close) // there is nobody to tell
	}
}

// innerConnector is what a WrapConnector wraps: it opens the connections of one server, for the attempt that its context
// belongs to.
type innerConnector struct{ server *server }

// Connect implements driver.Connector.
func (c innerConnector) Connect(ctx context.Context) (driver.Conn, error) {
	a, _ := ctx.Value(attemptKey{}).(*attempt)
	if a == nil || a.server != c.server {
		return nil, errors.New("pgsplit: " + c.server.String() + ": a WrapConnector's Connect has to pass on its own context")
	}
	return a.connect(ctx)
}

// Driver implements driver.Connector. Libraries that wrap drivers, and no connectors, wrap this one.
func (c innerConnector) Driver() driver.Driver { return innerDriver{c} }

// innerDriver is the driver of one server: its only connector is the server's, whatever the name.
type innerDriver struct{ connector innerConnector }

// Open implements driver.Driver.
func (d innerDriver) Open(string) (driver.Conn, error) {
	return d.connector.Connect(context.Background())
}

// OpenConnector implements driver.DriverContext.
func (d innerDriver) OpenConnector(string) (driver.Connector, error) { return d.connector, nil }

// attempt is one opening of a connection by way of the wrapper.
type attempt struct {
	server *server
	access access
	probe  bool

	mu   sync.Mutex
	busy bool      // the server's connection is being opened; guarded by mu
	over bool      // the wrapper has returned; guarded by mu
	p    *physical // what was opened; guarded by mu
	err  error     // why it was not; guarded by mu
}

type attemptKey struct{}

var (
	errSecondConnect = errors.New("pgsplit: a WrapConnector may open one connection for each that it is asked for")
	errLateConnect   = errors.New("pgsplit: a WrapConnector opened a connection when its own Connect had returned")
)

// connect opens the server's connection for the wrapper, which may try again where that failed.
func (a *attempt) connect(ctx context.Context) (driver.Conn, error) {
	a.mu.Lock()
	over, second := a.over, a.busy || a.p != nil
	a.busy = true
	a.mu.Unlock()
	switch {
	case over:
		return nil, errLateConnect
	case second:
		return nil, errSecondConnect
	}
	p, err := a.server.openRaw(ctx, a.access, a.probe)
	a.mu.Lock()
	a.busy = false
	over = a.over
	if err == nil {
		p.wrapping = &wrapping{p: p, own: true} // before open sees it: the wrapper's Connect may return meanwhile
	}
	if !over {
		a.p, a.err = p, err
	}
	a.mu.Unlock()
	if err != nil {
		return nil, err
	}
	if over {
		p.close()
		return nil, errLateConnect
	}
	return &inner{p.wrapping}, nil
}

// end takes what was opened. Whatever is opened later is closed.
func (a *attempt) end() (*physical, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.over = true
	return a.p, a.err
}

// open connects, by way of the wrapper if there is one.
func (s *server) open(ctx context.Context, a access, probe bool) (*physical, error) {
	if s.wrapper == nil {
		return s.openRaw(ctx, a, probe)
	}
	try := &attempt{server: s, access: a, probe: probe}
	returned := false
	defer func() {
		if p, _ := try.end(); !returned && p != nil {
			p.close() // the wrapper has ended its goroutine
		}
	}()
	var conn driver.Conn
	err := contained("WrapConnector", func() (err error) {
		conn, err = s.wrapper.Connect(context.WithValue(ctx, attemptKey{}, try))
		return err
	})
	returned = true
	p, raw := try.end()
	switch {
	case raw != nil:
		return nil, raw // whatever the wrapper made of it
	case err == nil && p == nil:
		err = errors.New("WrapConnector: its Connect has not called the Connect that it was given")
	case err == nil && conn == nil:
		err = errors.New("WrapConnector: its Connect returned no connection")
	case err == nil && !p.atRest():
		err = errors.New("WrapConnector: its Connect left a transaction or rows open, or closed the connection")
	}
	if err != nil {
		if p != nil {
			p.close()
		}
		return nil, hookError{fmt.Errorf("pgsplit: %s: %w", s, err)}
	}
	p.wrapping.conn, p.wrapping.own = conn, false
	return p, nil
}

// atRest tells whether nothing is under way on the connection.
func (p *physical) atRest() bool { return !p.closed() && !p.conn().IsBusy() && !p.inTx() }
