package pgsplit

import (
	"context"
	"errors"
	"fmt"
	"io"
	"testing"

	"github.com/jackc/pgx/v5/pgconn"
)

func TestErrorsHaveTheClassThatSomebodyWouldActOn(t *testing.T) {
	coded := func(code string) error { return fmt.Errorf("wrapped: %w", &pgconn.PgError{Code: code}) }
	live := context.Background()
	over, cancel := context.WithCancel(live)
	cancel()
	for _, c := range []struct {
		ctx            context.Context
		err            error
		timedOut, lost bool
		want           errorClass
	}{
		{live, coded("53300"), false, true, errorTooMany},
		{live, coded("57P01"), false, true, errorShutdown},
		{live, coded("57P02"), false, true, errorShutdown},
		{live, coded("57P03"), false, true, errorShutdown},
		{live, coded("40001"), false, false, errorConflict},
		{live, coded("40P01"), false, false, errorConflict},
		{live, coded("25006"), false, false, errorReadOnly},
		{live, coded("42P01"), false, false, errorSQL},
		{live, coded("57014"), false, false, errorSQL},
		{live, io.EOF, false, true, errorLost},
		{live, io.EOF, true, true, errorTimeout},
		{live, errors.New("cannot encode"), false, false, errorClient},
		{over, coded("57014"), false, false, errorCanceled},
		{over, io.EOF, true, true, errorCanceled},
	} {
		if got := classify(c.ctx, c.err, c.timedOut, c.lost); got != c.want {
			t.Errorf("%v (ended %v, timed out %v, lost %v) is %s, want %s", c.err, c.ctx.Err(), c.timedOut, c.lost, got, c.want)
		}
	}
	for err, want := range map[error]errorClass{
		coded("53300"): errorTooMany, coded("57P03"): errorShutdown, coded("28P01"): errorConnect,
		io.EOF: errorConnect, context.DeadlineExceeded: errorConnect, hookError{io.EOF}: errorConnect,
	} {
		if got := errorOfConnect(err); got != want {
			t.Errorf("%v is %s, want %s", err, got, want)
		}
	}
	seen := map[string]bool{}
	for class := range errorClassCount {
		if name := class.String(); name == "" || seen[name] {
			t.Errorf("class %d is called %q", class, name)
		}
		seen[class.String()] = true
	}
}
