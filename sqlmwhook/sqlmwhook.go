// Package sqlmwhook lets the interceptors of github.com/ngrok/sqlmw see what runs on each server of a pgsplit cluster.
//
//	config.WrapConnector = sqlmwhook.Wrap(func(s pgsplit.Server) sqlmw.Interceptor {
//		return &logger{server: s.Name, role: s.Role}
//	})
//
// An interceptor around the whole driver, by sqlmw.Driver(&pgsplit.Driver{}, interceptor), sees the calls of the program
// and not where they run. Here there is one for each server. It sees each statement and each end of a transaction once, on
// the server that ran it, and nothing of what pgsplit asks by itself.
//
// What config.WrapConnector says of wrappers holds for interceptors: StmtExecContext and StmtQueryContext are not called,
// because executions of a prepared statement are statements of the connection; StmtClose comes right after
// ConnPrepareContext; an interceptor that answers without calling what it was given makes its call fail.
package sqlmwhook

import (
	"database/sql/driver"

	"github.com/ngrok/sqlmw"

	"github.com/pgsplit/pgsplit"
)

// Wrap returns a WrapConnector that puts an interceptor between pgsplit and each server. interceptor is called once for
// each server, when the connector is made. Where it returns nil, that server has none.
func Wrap(interceptor func(pgsplit.Server) sqlmw.Interceptor) func(pgsplit.Server, driver.Connector) driver.Connector {
	return func(s pgsplit.Server, inner driver.Connector) driver.Connector {
		i := interceptor(s)
		if i == nil {
			return inner
		}
		d, ok := sqlmw.Driver(inner.Driver(), i).(driver.DriverContext)
		if !ok {
			return nil
		}
		// The driver of a server has no other connector, whatever the name.
		outer, err := d.OpenConnector("")
		if err != nil {
			return nil
		}
		return outer
	}
}
