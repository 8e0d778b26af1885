package pgsplit

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"errors"
	"fmt"
	"runtime/debug"
)

// Conn is the shell: the driver.Conn that sql.DB holds. It connects to nothing until a statement needs a server; from
// then on, until sql.DB takes the shell back, it holds at most one lease, a physical connection that it alone uses.
// sql.DB lets one goroutine at a time use a shell.
type Conn struct {
	connector *Connector
	lease     lease
	views     []view   // scratch of the routing
	decision  Decision // the last one, where somebody is told
	closed    bool
}

// The optional interfaces of pgx's own connection, and Validator, by which sql.DB says that it takes the shell back.
var (
	_ driver.Pinger             = (*Conn)(nil)
	_ driver.ExecerContext      = (*Conn)(nil)
	_ driver.QueryerContext     = (*Conn)(nil)
	_ driver.ConnPrepareContext = (*Conn)(nil)
	_ driver.ConnBeginTx        = (*Conn)(nil)
	_ driver.SessionResetter    = (*Conn)(nil)
	_ driver.NamedValueChecker  = (*Conn)(nil)
	_ driver.Validator          = (*Conn)(nil)
)

// ExecContext implements driver.ExecerContext on the server that ctx asks for.
func (c *Conn) ExecContext(ctx context.Context, query string, args []driver.NamedValue) (result driver.Result, err error) {
	defer c.contain(&err)
	err = c.run(ctx, work{}, func(ctx context.Context, p *physical, readOnly bool) (err error) {
		if p.wrapping != nil {
			result, err = p.wrapping.exec(ctx, c, readOnly, query, args)
			return err
		}
		if err := p.forget(ctx, query); err != nil {
			return err
		}
		result, err = p.std.ExecContext(ctx, query, args)
		return err
	})
	return result, err
}

// QueryContext implements driver.QueryerContext on the server that ctx asks for. The rows are pgx's own,
// or what Config.WrapConnector made of them.
func (c *Conn) QueryContext(ctx context.Context, query string, args []driver.NamedValue) (rows driver.Rows, err error) {
	defer c.contain(&err)
	err = c.run(ctx, work{}, func(ctx context.Context, p *physical, readOnly bool) (err error) {
		if p.wrapping != nil {
			rows, err = p.wrapping.query(ctx, c, readOnly, query, args)
			return err
		}
		if err := p.forget(ctx, query); err != nil {
			return err
		}
		rows, err = p.std.QueryContext(ctx, query, args)
		return err
	})
	return rows, err
}

// Prepare implements driver.Conn.
func (c *Conn) Prepare(query string) (driver.Stmt, error) {
	return c.PrepareContext(context.Background(), query)
}

// PrepareContext implements driver.ConnPrepareContext: the server that ctx asks for parses the statement.
func (c *Conn) PrepareContext(ctx context.Context, query string) (s driver.Stmt, err error) {
	defer c.contain(&err)
	err = c.run(ctx, work{harmless: true}, func(ctx context.Context, p *physical, readOnly bool) error {
		var params int
		err, kept := driver.ErrBadConn, !p.id.pooled
		switch {
		case p.wrapping != nil:
			params, kept, err = p.wrapping.prepare(ctx, c, readOnly, query)
		case !p.closed():
			params, err = p.prepare(ctx, query)
		}
		if err != nil {
			return err
		}
		stmt := &Stmt{conn: c, query: query, params: params}
		if kept {
			stmt.parsedOn = p
		}
		s = stmt
		return nil
	})
	return s, err
}

// Begin implements driver.Conn.
func (c *Conn) Begin() (driver.Tx, error) {
	return c.BeginTx(context.Background(), driver.TxOptions{})
}

// BeginTx implements driver.ConnBeginTx: ctx and opts decide for the whole transaction.
func (c *Conn) BeginTx(ctx context.Context, opts driver.TxOptions) (t driver.Tx, err error) {
	defer c.contain(&err)
	w := work{begin: true, isolation: sql.IsolationLevel(opts.Isolation), readOnly: opts.ReadOnly}
	err = c.run(ctx, w, func(ctx context.Context, p *physical, readOnly bool) (err error) {
		if p.wrapping != nil {
			t, err = p.wrapping.begin(ctx, c, readOnly, opts)
		} else {
			t, err = c.begin(ctx, p, opts, readOnly, hintOf(ctx).scope)
		}
		return err
	})
	return t, err
}

// begin begins the caller's transaction on p. Its writes are those of the sessions of sc.
func (c *Conn) begin(ctx context.Context, p *physical, opts driver.TxOptions, readOnly bool, sc *scope) (t driver.Tx, err error) {
	if c.lease.wrapped {
		// The floor was checked inside this transaction, so it is the one that the caller gets.
		c.lease.wrapped = false
		return &openTx{conn: c, ctx: ctx, p: p}, nil
	}
	opts.ReadOnly = opts.ReadOnly || readOnly
	t, err = p.std.BeginTx(ctx, opts)
	if err == nil && !readOnly && !c.lease.standIn {
		c.lease.inTx, p.overheard.wrote, p.overheard.ended = true, false, false
		t = &tx{Tx: t, conn: c, ctx: ctx}
		err = c.noteWrite(sc)
	}
	return t, err
}

// Ping implements driver.Pinger: it asks the server that ctx leads to for a sign of life. Under ReadOnly any server
// that may serve the read will do.
func (c *Conn) Ping(ctx context.Context) (err error) {
	defer c.contain(&err)
	if e := errandOf(ctx); e != nil {
		return e.do(ctx, c)
	}
	return c.run(ctx, work{harmless: true, ping: true}, func(ctx context.Context, p *physical, readOnly bool) error {
		if p.wrapping != nil {
			return p.wrapping.ping(ctx, c, readOnly)
		}
		return p.std.Ping(ctx)
	})
}

// CheckNamedValue implements driver.NamedValueChecker: pgx takes every value, and its own kinds of first argument.
func (c *Conn) CheckNamedValue(*driver.NamedValue) error { return nil }

// IsValid implements driver.Validator. sql.DB calls it when it takes the shell back: that ends the lease. The shell
// stays good whatever became of the physical connection.
func (c *Conn) IsValid() bool {
	c.release()
	return !c.closed
}

// ResetSession implements driver.SessionResetter. The lease has ended by then, unless a wrapper hides IsValid.
func (c *Conn) ResetSession(context.Context) error {
	c.release()
	if c.closed {
		return driver.ErrBadConn
	}
	return nil
}

// Close implements driver.Conn.
func (c *Conn) Close() error {
	if c.closed {
		return nil
	}
	c.closed = true
	c.release()
	c.connector.shellClosed()
	return nil
}

// contain turns a panic into an error: one that escaped from here would leak sql.DB's connection for ever (F21). What
// state it left the physical connection in nobody knows, so it is closed.
func (c *Conn) contain(err *error) {
	if cause := recover(); cause != nil {
		if c.lease.p != nil {
			_ = c.lease.p.std.Close() // it is of no more use
		}
		*err = fmt.Errorf("pgsplit: panic: %v\n%s", cause, debug.Stack())
	}
}

// work is what a call of database/sql asks of its server besides the context.
type work struct {
	begin     bool
	isolation sql.IsolationLevel
	readOnly  bool // TxOptions.ReadOnly
	harmless  bool // it cannot write, whatever the context says
	ping      bool
	foreign   bool // what runs is not ours, and takes as long as it likes
}

// run leads one call to its server. Where pgx says that nothing was sent because the connection was dead, and nothing
// depended on this very connection, the call goes to another one. A read that a replica could not serve moves on (G6).
func (c *Conn) run(ctx context.Context, w work, call func(ctx context.Context, p *physical, readOnly bool) error) error {
	var way course
	for {
		if err := ctx.Err(); err != nil {
			return err
		}
		h := hintOf(ctx)
		readOnly, err := c.take(ctx, h, w, &way)
		if err == nil && h.scope != nil && !readOnly && !c.lease.standIn && !w.begin && !w.harmless {
			err = c.noteWrite(h.scope)
		}
		if err != nil {
			return err
		}
		p := c.lease.p
		again := !c.lease.used && p.leases > 1 // nothing depends on this connection, and it was not opened just now
		movable := readOnly && !c.lease.held && !c.lease.inCallersTx()
		c.lease.used = true
		p.overheard.begun = false
		watched := p.server.replica() && !w.foreign
		at := c.lease.at
		c.lease.at = 0 // the next call comes later
		if watched {
			p.awaitReply(ctx, movable, at)
		}
		err = call(c.telling(ctx), p, readOnly)
		if c.lease.wrapped && p.overheard.begun {
			// The caller's BEGIN found our own transaction open: it is the caller's from now on, read only as the hint said.
			c.lease.wrapped, c.lease.hinted = false, true
		}
		aborted := watched && p.replied(err)
		if err == nil {
			return nil
		}
		cause := err
		if w := p.wrapping; w != nil {
			cause, again = w.cause(err), again && !w.call.effect
		}
		p.erred(ctx, cause, aborted)
		if ctx.Err() != nil {
			if errors.Is(err, driver.ErrBadConn) {
				return ctx.Err()
			}
			return c.explain(err, readOnly)
		}
		if p.closed() && lost(cause) {
			p.server.doubt(cause)
		}
		switch {
		case errors.Is(cause, driver.ErrBadConn) && again && !aborted:
			c.leave(ctx)
		case movable && watched && (aborted || p.elsewhere(cause)):
			way.failed(p.server, err)
			c.leave(ctx)
		case movable && !w.foreign && p.lostWithPrimary(cause):
			way.lostPrimary(p.server, c.explain(err, readOnly))
			c.leave(ctx)
		case !readOnly && p.misplaced(cause):
			p.unfit = true // another connection may find the primary
			if !again || c.lease.inCallersTx() {
				return c.explain(err, readOnly)
			}
			c.leave(ctx)
		case errors.Is(err, driver.ErrBadConn):
			return err
		default:
			return c.explain(err, readOnly)
		}
	}
}
