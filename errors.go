package pgsplit

import (
	"context"
	"database/sql/driver"
	"errors"
	"fmt"
	"regexp"
	"slices"
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
	codeActiveTx         = "25001" // active_sql_transaction
	codeReadOnly         = "25006" // read_only_sql_transaction
	codeInRecovery       = "55000" // object_not_in_prerequisite_state: what pg_current_wal_* say on a standby (F12)
	codeSerialization    = "40001" // serialization_failure: on a standby a conflict with recovery
	codeDeadlock         = "40P01" // deadlock_detected: on a standby a deadlock with recovery
	codeTooMany          = "53300" // too_many_connections
	codeAdminShutdown    = "57P01" // admin_shutdown
	codeCrashShutdown    = "57P02" // crash_shutdown
	codeCannotConnectNow = "57P03" // cannot_connect_now
	codeDatabaseDropped  = "57P04" // database_dropped
	codeUndefinedTable   = "42P01" // undefined_table
	codeUndefinedColumn  = "42703" // undefined_column
	codeUndefinedObject  = "42704" // undefined_object
	codeUndefinedFunc    = "42883" // undefined_function
)

// standbyCodes are those by which a standby refuses what a primary may do (F12).
var standbyCodes = []string{codeReadOnly, codeInRecovery, "0A000", "XX000"}

// explain adds what only the driver knows to an error of the server. Everything else goes to the caller as it came.
func (c *Conn) explain(err error, readOnly bool) error {
	p := c.lease.p
	if mutant == retrySentWrite && p.closed() {
		return driver.ErrBadConn
	}
	var pgErr *pgconn.PgError
	if !errors.As(err, &pgErr) {
		return err
	}
	if c.lease.standIn && !readOnly && slices.Contains(standbyCodes, pgErr.Code) {
		return fmt.Errorf("%w: %s stands in for it: %w", ErrNoPrimary, p.server, err)
	}
	if pgErr.Code != codeReadOnly {
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
	case errors.As(err, &pgErr) && !unavailable(pgErr.Code) && !strings.HasPrefix(pgErr.Code, "08"):
		return err
	}
	return fmt.Errorf("%w: %w", ErrNoPrimary, err)
}

// IsNoPrimary tells whether a statement failed because there is no primary that accepts it: none could be reached, or
// what answered refused the write because it is in recovery.
func IsNoPrimary(err error) bool { return errors.Is(err, ErrNoPrimary) }

// nowhere is the error of a read that no server may serve.
func nowhere(r Reason, failures error) error {
	err := ErrNoReplica
	switch r {
	case ReasonNoPrimary:
		return failures
	case ReasonNoFreshReplica:
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

// withoutPassword is an error whose text does not have the server's configured password, in case a hook or a dialer quotes
// it. pgx's own errors do not.
func (s *server) withoutPassword(err error) error {
	return without(s.config.ConnConfig.Password, err)
}

// without is an error whose text does not have the password.
func without(password string, err error) error {
	if err == nil || password == "" {
		return err
	}
	text := err.Error()
	clean := inAnyForm(password).ReplaceAllLiteralString(strings.ReplaceAll(text, password, redacted), redacted)
	if clean == text {
		return err
	}
	return &redactedError{clean, err}
}

// inAnyForm finds a password as it may stand in a URI, whichever of its characters are escaped, and in a quoted text.
func inAnyForm(password string) *regexp.Regexp {
	var b strings.Builder
	for _, r := range password {
		b.WriteString(`(?:\\?` + regexp.QuoteMeta(string(r)) + "|")
		for _, octet := range []byte(string(r)) {
			fmt.Fprintf(&b, "%%(?i:%02x)", octet)
		}
		if r == ' ' {
			b.WriteString(`|\+`)
		}
		b.WriteString(")")
	}
	return regexp.MustCompile(b.String())
}

const redacted = "xxxxx"

// redactedError is an error of which the text alone has changed.
type redactedError struct {
	text string
	err  error
}

func (e *redactedError) Error() string { return e.text }

func (e *redactedError) Unwrap() error { return e.err }

// textOf is the error's text, empty where there is none.
func textOf(err error) string {
	if err == nil {
		return ""
	}
	return err.Error()
}
