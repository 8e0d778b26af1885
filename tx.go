package pgsplit

import (
	"context"
	"database/sql/driver"
	"errors"

	"github.com/jackc/pgx/v5"
)

// openTx is a transaction that the driver began itself, because it had to check a floor inside it. All others are
// pgx's own. Like pgx's, it ends under the context that it began with, and an end that fails closes the connection.
type openTx struct {
	conn   *Conn
	ctx    context.Context
	p      *physical
	closed bool
}

// Commit implements driver.Tx.
func (t *openTx) Commit() error {
	tag, err := t.end("commit")
	if err == nil && tag == "ROLLBACK" {
		return pgx.ErrTxCommitRollback
	}
	return err
}

// Rollback implements driver.Tx.
func (t *openTx) Rollback() error {
	_, err := t.end("rollback")
	return err
}

func (t *openTx) end(command string) (tag string, err error) {
	defer t.conn.contain(&err)
	if t.closed {
		return "", pgx.ErrTxClosed
	}
	t.closed = true
	commandTag, err := t.p.pg.Exec(t.ctx, command, pgx.QueryExecModeSimpleProtocol)
	if err != nil && t.p.inTx() {
		_ = t.p.pg.Close(t.ctx) // the first error tells more
	}
	return commandTag.String(), t.p.ended(t.ctx, err)
}

// tx is a transaction that may write. Where sessions are around it, its commit tells where it ended.
type tx struct {
	driver.Tx
	conn *Conn
	ctx  context.Context
}

// Commit implements driver.Tx.
func (t *tx) Commit() (err error) {
	defer t.conn.contain(&err)
	l := &t.conn.lease
	if len(l.writers) > 0 && l.p != nil && !l.p.closed() && l.p.conn().TxStatus() == 'T' {
		return l.p.ended(t.ctx, t.conn.commitFor(t.ctx))
	}
	p := l.p
	l.endTx()
	return p.ended(t.ctx, t.Tx.Commit())
}

// ended counts what went wrong at the end of a transaction. That one had failed before was counted then.
func (p *physical) ended(ctx context.Context, err error) error {
	if err != nil && p != nil && !errors.Is(err, pgx.ErrTxCommitRollback) && !errors.Is(err, pgx.ErrTxClosed) {
		p.erred(ctx, err, false)
	}
	return err
}

// Rollback implements driver.Tx: the sessions have nothing to see of it.
func (t *tx) Rollback() (err error) {
	defer t.conn.contain(&err)
	t.conn.lease.endTx()
	return t.Tx.Rollback()
}
