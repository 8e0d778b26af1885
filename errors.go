package pgsplit

import (
	"context"
	"database/sql/driver"
	"errors"
	"fmt"
	"strings"

	"github.com/jackc/pgx/v5/pgconn"
)

// The errors that callers tell apart with errors.Is. Each is returned wrapped in what failed and on which server; a
// *pgconn.PgError below stays reachable with errors.As.
var (
	// ErrConfig is wrapped by every error about a DSN, a Config or the environment.
	ErrConfig = errors.New("pgsplit: invalid configuration")

	// ErrNoPrimary means that a statement needed the primary and no configured address of it accepted.
	ErrNoPrimary = errors.New("pgsplit: no primary")

	// ErrNoReplica means that a read under ReplicaOnly found no replica that let it in.
	ErrNoReplica = errors.New("pgsplit: no replica")

	// ErrNoFreshReplica means that a read with a floor found no server that is proven to have it, and that the primary
	// could not or was not allowed to answer.
	ErrNoFreshReplica = errors.New("pgsplit: no fresh replica")

	// ErrReadOnly is a write under a ReadOnly context. It wraps the server's 25006.
	ErrReadOnly = errors.New("pgsplit: write under a ReadOnly context")

	// ErrInvalidToken means a token that is torn, forged, or sealed with an unknown key.
	ErrInvalidToken = errors.New("pgsplit: invalid token")

	// ErrForeignToken means a token with a floor of a cluster that no open connector knows. Nothing returns it in this
	// version: such floors are kept, not obeyed, and counted in Stats.ForeignTokens.
	ErrForeignToken = errors.New("pgsplit: token of an unknown cluster")
)

// SQLSTATEs that decide something here.
const (
	codeActiveTx   = "25001" // active_sql_transaction
	codeReadOnly   = "25006" // read_only_sql_transaction
	codeInRecovery = "55000" // object_not_in_prerequisite_state: what pg_current_wal_* say on a standby (F12)
)

// explain adds what only the driver knows to an error of the server. Everything else goes to the caller as it came.
func (c *Conn) explain(err error, readOnly bool) error {
	p := c.lease.p
	if mutant == retrySentWrite && p.closed() {
		return driver.ErrBadConn
	}
	var pgErr *pgconn.PgError
	if !errors.As(err, &pgErr) || pgErr.Code != codeReadOnly {
		return err
	}
	switch {
	case readOnly:
		return fmt.Errorf("%w (on %s): %w", ErrReadOnly, p.server, err)
	case p.id.inRecovery:
		return fmt.Errorf("%w: %s is in recovery: %w", ErrNoPrimary, p.server, err)
	}
	return err
}

// noPrimary tells a primary that does not accept from one that does not accept these credentials, this database, or one
// more connection.
func noPrimary(err error) error {
	var hook hookError
	var pgErr *pgconn.PgError
	switch {
	case errors.Is(err, errClosed), isBusy(err), errors.As(err, &hook), errors.Is(err, driver.ErrBadConn):
		return err
	case errors.As(err, &pgErr) && pgErr.Code != "57P03" && !strings.HasPrefix(pgErr.Code, "08"):
		return err
	}
	return fmt.Errorf("%w: %w", ErrNoPrimary, err)
}

// nowhere is the error of a read that no server may serve.
func nowhere(r Reason, failures error) error {
	err := ErrNoReplica
	if r == ReasonNoFreshReplica {
		err = ErrNoFreshReplica
	}
	if failures == nil {
		return err
	}
	return fmt.Errorf("%w: %w", err, failures)
}

// contextError makes sure that what failed because the caller's context ended says so.
func contextError(ctx context.Context, err error) error {
	if cause := ctx.Err(); !errors.Is(err, cause) {
		return fmt.Errorf("%w: %w", cause, err)
	}
	return err
}
