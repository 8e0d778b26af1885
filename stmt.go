package pgsplit

import (
	"context"
	"database/sql/driver"
)

// Stmt is a prepared statement: its text, and the number of its parameters as the server that parsed it said. It runs
// wherever the context of each call leads, parsed there at first need, so it outlives the server that parsed it first.
type Stmt struct {
	conn     *Conn
	query    string
	params   int
	parsedOn *physical // whose server keeps a copy; nil if none does
}

var (
	_ driver.StmtExecContext  = (*Stmt)(nil)
	_ driver.StmtQueryContext = (*Stmt)(nil)
)

// Close implements driver.Stmt. sql.DB may hold its own lock meanwhile, so this only takes note (F21).
func (s *Stmt) Close() error {
	if s.parsedOn != nil {
		s.parsedOn.statements.release(s.query)
		s.parsedOn = nil
	}
	return nil
}

// NumInput implements driver.Stmt.
func (s *Stmt) NumInput() int { return s.params }

// ExecContext implements driver.StmtExecContext.
func (s *Stmt) ExecContext(ctx context.Context, args []driver.NamedValue) (driver.Result, error) {
	return s.conn.ExecContext(ctx, s.query, args)
}

// QueryContext implements driver.StmtQueryContext.
func (s *Stmt) QueryContext(ctx context.Context, args []driver.NamedValue) (driver.Rows, error) {
	return s.conn.QueryContext(ctx, s.query, args)
}

// Exec implements driver.Stmt.
func (s *Stmt) Exec(args []driver.Value) (driver.Result, error) {
	return s.ExecContext(context.Background(), named(args))
}

// Query implements driver.Stmt.
func (s *Stmt) Query(args []driver.Value) (driver.Rows, error) {
	return s.QueryContext(context.Background(), named(args))
}

func named(args []driver.Value) []driver.NamedValue {
	values := make([]driver.NamedValue, len(args))
	for i, v := range args {
		values[i] = driver.NamedValue{Ordinal: i + 1, Value: v}
	}
	return values
}
