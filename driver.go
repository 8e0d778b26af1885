// Package pgsplit is a database/sql driver that splits reads and writes over a PostgreSQL primary and its streaming
// replicas, and never shows a caller less than it has already seen.
//
//	db, err := sql.Open("pgsplit", "postgres://app@db1/shop postgres://app@db2/shop postgres://app@db3/shop")
//
// The first URI is the primary, each further one a replica. From then on the context of each call decides:
//
//	db.ExecContext(ctx, insert)                                         // the primary: nothing was said
//	db.QueryContext(pgsplit.ReadOnly(ctx), list)                        // a replica
//	db.QueryContext(pgsplit.ReadOnly(pgsplit.WithLSN(ctx, lsn)), list)  // one that has replayed lsn, else the primary
//
// No SQL text is ever inspected. A statement without a hint runs on the primary, whatever it is. A statement under
// ReadOnly is read only wherever it runs, and fails with ErrReadOnly if it writes.
//
// # Words
//
// A server is one configured address: the primary, or a replica. The servers of one database system are a cluster. An
// instance is one life of one running PostgreSQL: one address can hide several, and a server that restarts begins a new one.
//
// A hint is what a context says, ReadOnly or Primary; the last one wins, and HintFrom tells it. Unless an option says
// otherwise, only a hint sends a statement to a replica.
//
// A floor is the least position in the write-ahead log, an LSN, that a read must see. CommitLSN gives one that covers every
// commit that returned before, and WithLSN puts it into a context. A read with a floor runs on a server that is proven to
// have replayed it: on the very connection that reads, or by a position read earlier from the same instance. Otherwise
// another replica is tried, then the primary answers. What is unknown counts as behind.
//
// A session holds the floors of one caller, during a request or a job: under WithSession writes raise them and ReadOnly
// reads keep them, so a caller sees its own writes and never goes back in time. A token is what travels of it to the
// caller's next request; a Keyring seals tokens that leave the program. Package httpsession does all of it for HTTP.
//
//	ctx = pgsplit.WithSession(ctx, pgsplit.NewSession()) // one for each request or job
//	db.ExecContext(ctx, insert)                          // the session knows that it wrote
//	db.QueryContext(pgsplit.ReadOnly(ctx), list)         // a replica that has the row, else the primary
//
// Each decision has a Reason, the same in Stats, Config.OnDecision and tests.
//
// # Connections
//
// What sql.DB holds is a shell that connects to nothing by itself. It leases a physical connection of the server that
// the context asks for when a statement comes, and gives it back when sql.DB takes the shell back: after the statement, or
// when the transaction or the sql.Conn ends. So SetMaxOpenConns(n) means that no server ever has more than n connections
// with work of the program, and a transaction or a held sql.Conn keeps its server. Rows, results and column types are
// pgx's own, and Raw gives the *pgx.Conn for COPY, LISTEN and batches. FromDB gives the Connector, with Stats and Health.
package pgsplit

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"slices"
)

// driverName is the name for sql.Open.
const driverName = "pgsplit"

func init() {
	if !slices.Contains(sql.Drivers(), driverName) {
		sql.Register(driverName, &Driver{})
	}
}

// Driver is the driver.Driver registered as "pgsplit".
type Driver struct {
	connector *Connector // the one it belongs to; nil for the registered driver
}

// Open implements driver.Driver. sql.DB uses OpenConnector instead; a connection opened here has a connector of its
// own, which ends with it.
func (d *Driver) Open(dsn string) (driver.Conn, error) {
	c, err := d.OpenConnector(dsn)
	if err != nil {
		return nil, err
	}
	return c.Connect(context.Background())
}

// OpenConnector implements driver.DriverContext: it parses the DSN, and opens and starts nothing. Errors wrap
// ErrConfig.
func (d *Driver) OpenConnector(dsn string) (driver.Connector, error) {
	config, err := ParseDSN(dsn)
	if err != nil {
		return nil, err
	}
	return NewConnector(config)
}
