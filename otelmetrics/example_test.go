package otelmetrics_test

import (
	"database/sql"
	"log"

	_ "github.com/pgsplit/pgsplit"
	"github.com/pgsplit/pgsplit/otelmetrics"
)

func ExampleRegister() {
	db, err := sql.Open("pgsplit", "postgres://app@db1/shop postgres://app@db2/shop")
	if err != nil {
		log.Fatal(err)
	}
	registration, err := otelmetrics.Register(db, otelmetrics.WithDB("shop"))
	if err != nil {
		log.Fatal(err)
	}
	defer func() {
		if err := registration.Unregister(); err != nil {
			log.Print(err)
		}
	}()
	// Output:
}
