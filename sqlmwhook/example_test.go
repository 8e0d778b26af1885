package sqlmwhook_test

import (
	"context"
	"database/sql/driver"
	"fmt"
	"log"

	"github.com/ngrok/sqlmw"

	"github.com/pgsplit/pgsplit"
	"github.com/pgsplit/pgsplit/pgsplittest"
	"github.com/pgsplit/pgsplit/sqlmwhook"
)

// printer prints the role of the server that runs each query. Whatever else there is to intercept passes through.
type printer struct {
	sqlmw.NullInterceptor
	role string
}

func (p printer) ConnQueryContext(
	ctx context.Context, c driver.QueryerContext, query string, args []driver.NamedValue,
) (context.Context, driver.Rows, error) {
	fmt.Println(p.role+":", query)
	rows, err := c.QueryContext(ctx, query, args)
	return ctx, rows, err
}

func ExampleWrap() {
	ctx := context.Background()
	cluster, err := pgsplittest.StartCluster(ctx) // a primary and a replica
	if err != nil {
		log.Fatal(err)
	}
	defer cluster.Close()

	config, err := pgsplit.ParseDSN(cluster.DSN())
	if err != nil {
		log.Fatal(err)
	}
	config.WrapConnector = sqlmwhook.Wrap(func(s pgsplit.Server) sqlmw.Interceptor {
		return printer{role: s.Role}
	})
	db, err := pgsplit.OpenDB(config)
	if err != nil {
		log.Fatal(err)
	}
	defer db.Close()

	var n int
	for _, ctx := range []context.Context{ctx, pgsplit.ReadOnly(ctx)} {
		if err := db.QueryRowContext(ctx, "select 1").Scan(&n); err != nil {
			fmt.Println(err)
		}
	}
	// Output:
	// primary: select 1
	// replica: select 1
}
