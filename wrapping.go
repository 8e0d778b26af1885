package pgsplit

import (
	"context"
	"database/sql/driver"
	"errors"
	"fmt"

	"github.com/jackc/pgx/v5"
)

// wrapping is the wrapper's side of a physical connection under Config.WrapConnector. Shells send their calls to conn,
// which passes them on to an inner, which runs them. What became of a call, whether anything was sent, and what sessions
// have to note is told by what the inner did, and not by what the wrapper says.
type wrapping struct {
	p    *physical
	conn driver.Conn // the wrapper's
	own  bool        // the wrapper may use the connection without a call: it opens, resets or closes it
	call wrappedCall
}

// wrappedCall is the call of a shell that is under way, and how the last one went.
type wrappedCall struct {
	shell    *Conn // nil: none is under way
	ctx      context.Context
	opts     driver.TxOptions
	readOnly bool // it must not write
	guarded  bool // it is to run in a READ ONLY transaction of our own

	ran      bool     // the inner was reached
	effect   bool     // something was sent and may have had an effect
	raw      error    // of the inner's last statement
	tx       *innerTx // that it began
	prepared string   // text that it prepared last
}

func (w *wrapping) enter(ctx context.Context, c *Conn, readOnly bool) {
	w.call = wrappedCall{shell: c, ctx: ctx, readOnly: readOnly, guarded: c.lease.wrapped}
}

// leave ends the call. A connection that the wrapper left in a state in which nobody can use it is closed.
func (w *wrapping) leave(err error, rows bool) error {
	call := &w.call
	call.shell, call.ctx = nil, nil
	badConn := errors.Is(err, driver.ErrBadConn)
	if busy := w.p.conn().IsBusy(); busy && (err != nil || !rows) || badConn {
		w.close()
	}
	switch {
	case badConn && call.effect, errors.Is(err, driver.ErrSkip):
		// sql.DB would run it again.
		return fmt.Errorf("pgsplit: %s: WrapConnector's connection says %q of a call that it has to pass on once", w.p.server, err)
	case err == nil && (!call.ran || errors.Is(call.raw, driver.ErrBadConn)):
		return hookError{fmt.Errorf("pgsplit: %s: WrapConnector's connection answered without the one that it wraps", w.p.server)}
	}
	return err
}

// close ends a connection that is of no more use.
func (w *wrapping) close() {
	if !w.p.closed() {
		_ = w.p.std.Close()
	}
}

// cause is what the last call failed of: the server's own error where there is one, whatever the wrapper made of it.
func (w *wrapping) cause(err error) error {
	if err == nil || w.call.raw != nil {
		return w.call.raw
	}
	return hookError{err}
}

// check has the wrapper check the arguments, if it wants to. Values that it does not know are pgx's affair.
func (w *wrapping) check(args []driver.NamedValue) ([]driver.NamedValue, error) {
	checker, ok := w.conn.(driver.NamedValueChecker)
	if !ok {
		return args, nil
	}
	checked := make([]driver.NamedValue, 0, len(args))
	for _, arg := range args {
		arg.Ordinal = len(checked) + 1
		switch err := checker.CheckNamedValue(&arg); {
		case err == nil, errors.Is(err, driver.ErrSkip):
			checked = append(checked, arg)
		case !errors.Is(err, driver.ErrRemoveArgument):
			return nil, err
		}
	}
	return checked, nil
}

func (w *wrapping) exec(
	ctx context.Context, c *Conn, readOnly bool, query string, args []driver.NamedValue,
) (driver.Result, error) {
	w.enter(ctx, c, readOnly)
	result, err := w.execOrPrepare(ctx, query, args)
	if err = w.leave(err, false); err != nil {
		return nil, err
	}
	if result == nil {
		return nil, hookError{fmt.Errorf("pgsplit: %s: WrapConnector's connection returned no result", w.p.server)}
	}
	return result, nil
}

// execOrPrepare does as sql.DB does where the wrapper hides ExecContext or skips it.
func (w *wrapping) execOrPrepare(ctx context.Context, query string, args []driver.NamedValue) (driver.Result, error) {
	args, err := w.check(args)
	if err != nil {
		return nil, err
	}
	if conn, ok := w.conn.(driver.ExecerContext); ok {
		if result, err := conn.ExecContext(ctx, query, args); !w.skips(err) {
			return result, err
		}
	}
	stmt, err := w.prepareStmt(ctx, query)
	if err != nil {
		return nil, err
	}
	defer stmt.Close()
	if stmt, ok := stmt.(driver.StmtExecContext); ok {
		return stmt.ExecContext(ctx, args)
	}
	//lint:ignore SA1019 what there is where the wrapper hides the one with a context
	return stmt.Exec(unnamed(args))
}

func (w *wrapping) query(
	ctx context.Context, c *Conn, readOnly bool, query string, args []driver.NamedValue,
) (driver.Rows, error) {
	w.enter(ctx, c, readOnly)
	rows, err := w.queryOrPrepare(ctx, query, args)
	if err = w.leave(err, true); err != nil {
		return nil, err
	}
	if rows == nil {
		w.close()
		return nil, hookError{fmt.Errorf("pgsplit: %s: WrapConnector's connection returned no rows", w.p.server)}
	}
	return rows, nil
}

// queryOrPrepare does as sql.DB does where the wrapper hides QueryContext or skips it. The statement is closed while its
// rows are open: closing an inner's only takes note.
func (w *wrapping) queryOrPrepare(ctx context.Context, query string, args []driver.NamedValue) (driver.Rows, error) {
	args, err := w.check(args)
	if err != nil {
		return nil, err
	}
	if conn, ok := w.conn.(driver.QueryerContext); ok {
		if rows, err := conn.QueryContext(ctx, query, args); !w.skips(err) {
			return rows, err
		}
	}
	stmt, err := w.prepareStmt(ctx, query)
	if err != nil {
		return nil, err
	}
	defer stmt.Close()
	if stmt, ok := stmt.(driver.StmtQueryContext); ok {
		return stmt.QueryContext(ctx, args)
	}
	//lint:ignore SA1019 what there is where the wrapper hides the one with a context
	return stmt.Query(unnamed(args))
}

// skips tells whether the wrapper would have the statement prepared. One that it has run already is not run twice.
func (w *wrapping) skips(err error) bool { return errors.Is(err, driver.ErrSkip) && !w.call.effect }

func unnamed(args []driver.NamedValue) []driver.Value {
	values := make([]driver.Value, len(args))
	for i, arg := range args {
		values[i] = arg.Value
	}
	return values
}

func (w *wrapping) prepareStmt(ctx context.Context, query string) (stmt driver.Stmt, err error) {
	if conn, ok := w.conn.(driver.ConnPrepareContext); ok {
		stmt, err = conn.PrepareContext(ctx, query)
	} else {
		stmt, err = w.conn.Prepare(query)
	}
	if err == nil && stmt == nil {
		err = hookError{fmt.Errorf("pgsplit: %s: WrapConnector's connection returned no statement", w.p.server)}
	}
	return stmt, err
}

// prepare has the server parse the text and returns the number of its parameters, and whether the server keeps it. The
// wrapper's statement is closed at once: it keeps the context that it was made with, and sql.DB would close it while it
// holds its own lock and others use the connection (F21). Executions are statements of the connection.
func (w *wrapping) prepare(ctx context.Context, c *Conn, readOnly bool, query string) (params int, kept bool, err error) {
	w.enter(ctx, c, readOnly)
	stmt, err := w.prepareStmt(ctx, query)
	if err == nil {
		params = stmt.NumInput()
		if kept = w.call.prepared == query && !w.p.id.pooled; kept {
			w.p.statements.use(query)
		}
		_ = stmt.Close() // it only takes note
	}
	return params, kept, w.leave(err, false)
}

func (w *wrapping) ping(ctx context.Context, c *Conn, readOnly bool) error {
	w.enter(ctx, c, readOnly)
	pinger, ok := w.conn.(driver.Pinger)
	if !ok {
		pinger = &inner{w}
	}
	err := pinger.Ping(ctx)
	w.call.ran = true // one that answers by itself says nothing about data
	return w.leave(err, false)
}

func (w *wrapping) begin(ctx context.Context, c *Conn, readOnly bool, opts driver.TxOptions) (driver.Tx, error) {
	w.enter(ctx, c, readOnly)
	w.call.opts = opts
	inTx := w.p.inTx()
	var outer driver.Tx
	var err error
	if conn, ok := w.conn.(driver.ConnBeginTx); ok {
		outer, err = conn.BeginTx(ctx, opts)
	} else {
		//lint:ignore SA1019 what there is where the wrapper hides the one with options, which the inner knows
		outer, err = w.conn.Begin()
	}
	began := w.call.tx
	err = w.leave(err, false)
	if err == nil && (outer == nil || began == nil || began.ended || !w.p.inTx()) {
		err = hookError{fmt.Errorf("pgsplit: %s: WrapConnector's connection began no transaction", w.p.server)}
	}
	w.call.tx = nil
	if err != nil {
		if w.p.inTx() && (began != nil || !inTx) {
			c.lease.endTx()
			w.close() // nobody would end it
		}
		return nil, err
	}
	return &wrappedTx{wrapping: w, shell: c, ctx: ctx, readOnly: readOnly, outer: outer, inner: began}, nil
}

// wrappedTx is a transaction that the wrapper sees the end of.
type wrappedTx struct {
	wrapping *wrapping
	shell    *Conn
	ctx      context.Context
	readOnly bool
	outer    driver.Tx
	inner    *innerTx
}

// Commit implements driver.Tx. It has succeeded where the server says so, whatever the wrapper says.
func (t *wrappedTx) Commit() (err error) {
	defer t.shell.contain(&err)
	err = t.end(driver.Tx.Commit)
	if err == nil && !t.inner.committing {
		return pgx.ErrTxCommitRollback
	}
	return err
}

// Rollback implements driver.Tx.
func (t *wrappedTx) Rollback() (err error) {
	defer t.shell.contain(&err)
	err = t.end(driver.Tx.Rollback)
	if err == nil && t.inner.committing {
		return fmt.Errorf("pgsplit: %s: WrapConnector's transaction committed what was to be rolled back", t.wrapping.p.server)
	}
	return err
}

func (t *wrappedTx) end(end func(driver.Tx) error) error {
	w := t.wrapping
	if t.shell.lease.p != w.p {
		return driver.ErrBadConn
	}
	w.enter(t.ctx, t.shell, t.readOnly)
	defer func() {
		if !t.inner.ended {
			t.shell.lease.endTx()
			w.close() // nobody would end it
		}
	}()
	err := end(t.outer)
	w.call.ran = true // the transaction itself tells
	err = w.leave(err, false)
	switch {
	case err != nil:
		return err
	case !t.inner.ended:
		return fmt.Errorf("pgsplit: %s: WrapConnector's transaction did not end the one that it wraps", w.p.server)
	}
	return t.inner.err
}

// valid tells whether the wrapper would have the connection used again.
func (w *wrapping) valid() bool {
	validator, ok := w.conn.(driver.Validator)
	if !ok {
		return true
	}
	valid := false
	_ = w.alone("IsValid", func() error { // where it panics, there is nobody to tell: the lease has ended
		valid = validator.IsValid()
		return nil
	})
	return valid && w.p.atRest()
}

// reset has the wrapper reset the session before the connection is used again, as sql.DB does. It tells whether the
// connection may be used.
func (w *wrapping) reset(ctx context.Context) bool {
	resetter, ok := w.conn.(driver.SessionResetter)
	if !ok {
		return true
	}
	var err error
	panicked := w.alone("ResetSession", func() error {
		err = resetter.ResetSession(ctx)
		return nil
	})
	return panicked == nil && !errors.Is(err, driver.ErrBadConn) && w.p.atRest()
}

// end has the wrapper close the connection.
func (w *wrapping) end() {
	if w.conn != nil {
		_ = w.alone("Close", w.conn.Close) // the connection is closed anyway
	}
}

// alone runs a method of the wrapper's connection that belongs to no call of a shell.
func (w *wrapping) alone(what string, f func() error) error {
	w.own = true
	defer func() { w.own = false }()
	return contained("WrapConnector's "+what, f)
}
