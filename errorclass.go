package pgsplit

import (
	"context"
	"errors"

	"github.com/jackc/pgx/v5/pgconn"
)

// errorClass is what somebody who watches a server would do something about. This is the list of all.
type errorClass uint8

const (
	errorConnect  errorClass = iota // no connection could be made, for a reason that is none of the others
	errorLost                       // the connection was lost
	errorTimeout                    // no connection, proof or reply within replica_timeout
	errorBusy                       // all of pool_max_conns stayed in use for as long as the caller could wait
	errorTooMany                    // 53300
	errorShutdown                   // 57P01, 57P02, 57P03: it ends, was ended or starts
	errorConflict                   // 40001, 40P01: with recovery on a replica, with other transactions on the primary
	errorReadOnly                   // 25006
	errorSQL                        // any other SQLSTATE
	errorCanceled                   // the caller's context ended
	errorClient                     // pgx did not send it: a value that it cannot encode, for instance

	errorClassCount
)

var errorClassNames = [errorClassCount]string{
	errorConnect:  "connect",
	errorLost:     "lost",
	errorTimeout:  "timeout",
	errorBusy:     "busy",
	errorTooMany:  "too_many",
	errorShutdown: "shutdown",
	errorConflict: "conflict",
	errorReadOnly: "read_only",
	errorSQL:      "sql",
	errorCanceled: "canceled",
	errorClient:   "client",
}

// String is the class's name in metrics.
func (e errorClass) String() string { return errorClassNames[e] }

// classOfCode is the class of what a server answered.
func classOfCode(code string) errorClass {
	switch code {
	case codeTooMany:
		return errorTooMany
	case codeAdminShutdown, codeCrashShutdown, codeCannotConnectNow:
		return errorShutdown
	case codeSerialization, codeDeadlock:
		return errorConflict
	case codeReadOnly:
		return errorReadOnly
	}
	return errorSQL
}

// errorOfConnect is the class of an attempt to connect that failed.
func errorOfConnect(err error) errorClass {
	var pgErr *pgconn.PgError
	if errors.As(err, &pgErr) {
		if class := classOfCode(pgErr.Code); class != errorSQL {
			return class
		}
	}
	return errorConnect
}

// classify is the class of an error of a statement under ctx. timedOut tells that the driver gave up on it, lost that its
// connection is.
func classify(ctx context.Context, err error, timedOut, lost bool) errorClass {
	var pgErr *pgconn.PgError
	switch {
	case ctx.Err() != nil:
		return errorCanceled
	case timedOut:
		return errorTimeout
	case errors.As(err, &pgErr):
		return classOfCode(pgErr.Code)
	case lost:
		return errorLost
	}
	return errorClient
}
