package pgsplit

import (
	"context"
	"database/sql/driver"
	"errors"
	"io"
	"net"

	"github.com/jackc/pgx/v5/pgconn"
)

// This file says which trouble of a replica is not the caller's (G6), and which tells that a server is in trouble.

// elsewhere tells whether a read that failed with err on p may succeed on another server. Before the first row nobody
// has seen anything of it, and it cannot have written.
func (p *physical) elsewhere(err error) bool {
	var pgErr *pgconn.PgError
	var hook hookError
	if errors.As(err, &hook) && !errors.Is(err, driver.ErrBadConn) {
		return false // another server would not help
	}
	if !errors.As(err, &pgErr) {
		return p.closed() || errors.Is(err, driver.ErrBadConn)
	}
	switch pgErr.Code {
	case codeSerialization, codeDeadlock:
		return p.id.inRecovery // on a primary they are between the caller and others
	case codeAdminShutdown, codeCrashShutdown, codeCannotConnectNow, codeDatabaseDropped, codeTooMany:
		return true
	case codeUndefinedTable, codeUndefinedColumn, codeUndefinedObject, codeUndefinedFunc:
		return true // a schema that is not replayed yet
	}
	return false
}

// lostWithPrimary tells whether a read failed because the primary, or the way there, has gone, where replicas may be left that
// can serve it: those that may lag more while no primary answers, or that were suspect. A deadline that the program's tracer or
// wrapper has set is no such loss.
func (p *physical) lostWithPrimary(err error) bool {
	if errors.Is(err, context.DeadlineExceeded) || errors.Is(err, context.Canceled) {
		return false
	}
	return !p.server.replica() && len(p.server.connector.replicas) > 0 && p.closed() && lost(err)
}

// misplaced tells whether a write was refused because the server at the primary's address is in recovery. Then nothing of
// it was done (F25), and the connection is of no use for writes.
func (p *physical) misplaced(err error) bool {
	var pgErr *pgconn.PgError
	return errors.As(err, &pgErr) && pgErr.Code == codeReadOnly && p.id.inRecovery && !p.server.replica()
}

// blames tells whether an error says that the server, or the way there, is in trouble.
func blames(err error) bool {
	var pgErr *pgconn.PgError
	if errors.As(err, &pgErr) {
		return unavailable(pgErr.Code)
	}
	if errors.Is(err, context.Canceled) || errors.Is(err, context.DeadlineExceeded) {
		return false
	}
	var network net.Error
	return errors.As(err, &network) || errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) ||
		errors.Is(err, driver.ErrBadConn)
}

// lost tells whether an error came with the loss of a connection that the server, or the way there, has to answer for: not
// one that the server closed for what was done on it, or a wrapper.
func lost(err error) bool {
	var pgErr *pgconn.PgError
	var hook hookError
	return !errors.As(err, &hook) && (!errors.As(err, &pgErr) || unavailable(pgErr.Code))
}

// failed takes note that the server could not serve a read that it had begun.
func (w *course) failed(s *server, err error) {
	s.stats.moved.Add(1)
	w.progress.failed = w.progress.failed.with(s.index)
	w.tried = w.tried.with(s.index)
	w.failures = errors.Join(w.failures, err)
	var pgErr *pgconn.PgError
	w.answer = nil
	if errors.As(err, &pgErr) && !unavailable(pgErr.Code) {
		w.answer = err
	}
}

// lostPrimary takes note that a connection to the primary was lost under the read. If nobody can serve it, that is its error. It
// may have been that connection alone: the primary is gone if it lets no other one in, or if that one is lost as well.
func (w *course) lostPrimary(s *server, err error) {
	s.stats.moved.Add(1)
	w.noPrimary, w.lost = w.lost != nil, err
}
