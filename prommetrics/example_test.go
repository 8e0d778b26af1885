package prommetrics_test

import (
	"database/sql"
	"log"

	"github.com/prometheus/client_golang/prometheus"

	_ "github.com/pgsplit/pgsplit"
	"github.com/pgsplit/pgsplit/prommetrics"
)

func ExampleNewCollector() {
	db, err := sql.Open("pgsplit", "postgres://app@db1/shop postgres://app@db2/shop")
	if err != nil {
		log.Fatal(err)
	}
	prometheus.MustRegister(prommetrics.NewCollector(db, prommetrics.WithDB("shop")))
	// Serve promhttp.Handler() at /metrics.
	// Output:
}
