package pgsplit

import (
	"context"
	"database/sql"
	"errors"
	"runtime"

	"github.com/jackc/pgx/v5"
)

// Raw runs f with the pgx connection that ctx allows: for COPY, LISTEN, batches and large objects. Without a hint it is
// the primary's, and conn stays with it; under ReadOnly it is one that refuses writes. f must not keep the connection,
// and a transaction that it leaves open belongs to conn.
//
// A panic of f goes on to Raw's caller; the connection is closed then.
func Raw(ctx context.Context, conn *sql.Conn, f func(*pgx.Conn) error) error {
	var call rawCall
	e := &errand{do: func(ctx context.Context, c *Conn) error {
		return c.run(ctx, work{foreign: true}, func(ctx context.Context, p *physical, readOnly bool) error {
			call.run(f, p.pg)
			if !call.returned {
				_ = p.pg.Close(ctx) // of no more use
			}
			call.err = c.explain(call.err, readOnly)
			return nil
		})
	}}
	err := e.send(ctx, conn.PingContext)
	switch {
	case call.panicked != nil:
		panic(call.panicked)
	case call.started && !call.returned:
		runtime.Goexit()
	}
	if err != nil {
		return errors.Join(call.err, err)
	}
	return call.err
}

// rawCall is how one call of Raw's f ended.
type rawCall struct {
	started, returned bool
	panicked          any
	err               error
}

// run calls f on a goroutine of its own: database/sql holds locks meanwhile that a panic, or the runtime.Goexit of a
// test that fails, would never give back.
func (r *rawCall) run(f func(*pgx.Conn) error, conn *pgx.Conn) {
	r.started = true
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		defer func() { r.panicked = recover() }()
		r.err = f(conn)
		r.returned = true
	}()
	<-ended
}
