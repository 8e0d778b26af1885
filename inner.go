package pgsplit

import (
	"context"
	"database/sql/driver"
	"errors"

	"github.com/jackc/pgx/v5"
)

// inner is the connection that a WrapConnector wraps. What runs here has come through the wrapper, or is the wrapper's
// own.
type inner struct{ w *wrapping }

// The optional interfaces of pgx's own connection, and Validator.
var (
	_ driver.Pinger             = (*inner)(nil)
	_ driver.ExecerContext      = (*inner)(nil)
	_ driver.QueryerContext     = (*inner)(nil)
	_ driver.ConnPrepareContext = (*inner)(nil)
	_ driver.ConnBeginTx        = (*inner)(nil)
	_ driver.SessionResetter    = (*inner)(nil)
	_ driver.NamedValueChecker  = (*inner)(nil)
	_ driver.Validator          = (*inner)(nil)
)

var (
	errOutside = errors.New("pgsplit: a WrapConnector's connection used the one that it wraps outside of a call")
	errEnded   = errors.New("pgsplit: a WrapConnector's connection ended the transaction in which the statement is read only")
)

// check comes before whatever runs. Sessions note what may write before it is sent, like all that shells send: it need not
// be what the shell asked for.
func (i *inner) check(writes bool) error {
	call, p := &i.w.call, i.w.p
	call.raw = nil
	c := call.shell
	switch {
	case p.closed():
		call.raw = driver.ErrBadConn
		return driver.ErrBadConn
	case c == nil && !i.w.own:
		return errOutside
	case p.conn().IsBusy():
		return errRowsOpen
	case c == nil:
		return nil
	case call.guarded && !p.inTx():
		return errEnded
	}
	call.ran = true
	if !writes || call.readOnly || c.lease.standIn {
		return nil
	}
	c.lease.held = true
	return c.noteWrite(hintOf(call.ctx).scope)
}

// done takes note of how it went.
func (i *inner) done(err error) {
	i.w.call.raw = err
	if err == nil || !errors.Is(err, driver.ErrBadConn) && !i.w.p.misplaced(err) {
		i.w.call.effect = true
	}
}

// context is the one of the call under way, for the methods that have none.
func (i *inner) context() context.Context {
	if ctx := i.w.call.ctx; ctx != nil {
		return ctx
	}
	return context.Background()
}

// ExecContext implements driver.ExecerContext. The result is never nil: a wrapper may look at it and not at the error.
func (i *inner) ExecContext(ctx context.Context, query string, args []driver.NamedValue) (result driver.Result, err error) {
	if err := i.check(true); err != nil {
		return driver.RowsAffected(0), err
	}
	if err = i.w.p.forget(ctx, query); err == nil {
		result, err = i.w.p.std.ExecContext(ctx, query, args)
	}
	i.done(err)
	if result == nil {
		result = driver.RowsAffected(0)
	}
	return result, err
}

// QueryContext implements driver.QueryerContext. The rows are pgx's own. Those of an error tell it once more, to a wrapper
// that goes on without looking.
func (i *inner) QueryContext(ctx context.Context, query string, args []driver.NamedValue) (rows driver.Rows, err error) {
	if err := i.check(true); err != nil {
		return failedRows{err}, err
	}
	if err = i.w.p.forget(ctx, query); err == nil {
		rows, err = i.w.p.std.QueryContext(ctx, query, args)
	}
	i.done(err)
	if err != nil {
		return failedRows{err}, err
	}
	return rows, nil
}

// failedRows are the rows of a query that failed.
type failedRows struct{ err error }

func (failedRows) Columns() []string           { return nil }
func (failedRows) Close() error                { return nil }
func (r failedRows) Next([]driver.Value) error { return r.err }

// Prepare implements driver.Conn.
func (i *inner) Prepare(query string) (driver.Stmt, error) {
	return i.PrepareContext(i.context(), query)
}

// PrepareContext implements driver.ConnPrepareContext.
func (i *inner) PrepareContext(ctx context.Context, query string) (driver.Stmt, error) {
	if err := i.check(false); err != nil {
		return nil, err
	}
	params, err := i.w.p.prepare(ctx, query)
	i.done(err)
	if err != nil {
		return nil, err
	}
	i.w.call.prepared = query
	return &innerStmt{inner: i, query: query, params: params, kept: !i.w.p.id.pooled}, nil
}

// Begin implements driver.Conn. The options are those of the call, which it cannot be given.
func (i *inner) Begin() (driver.Tx, error) { return i.BeginTx(i.context(), i.w.call.opts) }

// BeginTx implements driver.ConnBeginTx. The transaction's Commit is the one that tells sessions where it ended.
func (i *inner) BeginTx(ctx context.Context, opts driver.TxOptions) (driver.Tx, error) {
	if err := i.check(false); err != nil {
		return nil, err
	}
	call, c := &i.w.call, i.w.call.shell
	if c == nil || call.tx != nil && !call.tx.ended {
		return nil, errOutside
	}
	tx, err := c.begin(ctx, i.w.p, opts, call.readOnly, hintOf(call.ctx).scope)
	i.done(err)
	if err != nil {
		return nil, err
	}
	call.tx = &innerTx{Tx: tx, inner: i}
	return call.tx, nil
}

// Ping implements driver.Pinger.
func (i *inner) Ping(ctx context.Context) error {
	if err := i.check(false); err != nil {
		return err
	}
	err := i.w.p.std.Ping(ctx)
	i.done(err)
	return err
}

// CheckNamedValue implements driver.NamedValueChecker: pgx takes every value, and its own kinds of first argument.
func (i *inner) CheckNamedValue(*driver.NamedValue) error { return nil }

// ResetSession implements driver.SessionResetter. The pool has looked after the connection.
func (i *inner) ResetSession(context.Context) error {
	if i.w.p.closed() {
		return driver.ErrBadConn
	}
	return nil
}

// IsValid implements driver.Validator.
func (i *inner) IsValid() bool { return !i.w.p.closed() }

// Close implements driver.Conn.
func (i *inner) Close() error {
	if i.w.call.shell == nil && !i.w.own {
		return errOutside
	}
	return i.w.p.std.Close()
}

// innerStmt is a statement that the server has parsed. Closing it only takes note.
type innerStmt struct {
	inner  *inner
	query  string
	params int
	kept   bool // the server keeps a copy, which is ours
}

var (
	_ driver.StmtExecContext   = (*innerStmt)(nil)
	_ driver.StmtQueryContext  = (*innerStmt)(nil)
	_ driver.NamedValueChecker = (*innerStmt)(nil)
)

func (s *innerStmt) Close() error {
	if s.kept {
		s.inner.w.p.statements.release(s.query)
		s.kept = false
	}
	return nil
}

func (s *innerStmt) NumInput() int { return s.params }

func (s *innerStmt) CheckNamedValue(*driver.NamedValue) error { return nil }

func (s *innerStmt) ExecContext(ctx context.Context, args []driver.NamedValue) (driver.Result, error) {
	return s.inner.ExecContext(ctx, s.query, args)
}

func (s *innerStmt) QueryContext(ctx context.Context, args []driver.NamedValue) (driver.Rows, error) {
	return s.inner.QueryContext(ctx, s.query, args)
}

func (s *innerStmt) Exec(args []driver.Value) (driver.Result, error) {
	return s.ExecContext(s.inner.context(), named(args))
}

func (s *innerStmt) Query(args []driver.Value) (driver.Rows, error) {
	return s.QueryContext(s.inner.context(), named(args))
}

// innerTx is a transaction as the wrapper gets it.
type innerTx struct {
	driver.Tx
	inner      *inner
	ended      bool
	committing bool  // by Commit
	err        error // of its end
}

// Commit implements driver.Tx.
func (t *innerTx) Commit() error {
	t.committing = !t.ended
	return t.end(t.Tx.Commit)
}

// Rollback implements driver.Tx.
func (t *innerTx) Rollback() error { return t.end(t.Tx.Rollback) }

func (t *innerTx) end(end func() error) error {
	switch {
	case t.ended:
		return pgx.ErrTxClosed
	case t.inner.w.call.shell == nil:
		return errOutside
	}
	t.ended = true
	t.err = end()
	t.inner.done(t.err)
	return t.err
}
