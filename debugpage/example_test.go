package debugpage_test

import (
	"database/sql"
	"fmt"
	"net/http"
	"time"

	"github.com/pgsplit/pgsplit/debugpage"
)

// The page next to what else only those see who operate the program.
func ExampleHandler() {
	db, err := sql.Open("pgsplit", "postgres://app@db1/shop postgres://app@db2/shop")
	if err != nil {
		fmt.Println(err)
		return
	}
	defer db.Close()

	mux := http.NewServeMux()
	mux.Handle("/debug/pgsplit/", debugpage.Handler(db))
	internal := &http.Server{Addr: "127.0.0.1:6060", Handler: mux, ReadHeaderTimeout: 10 * time.Second}
	_ = internal // go internal.ListenAndServe()
}
