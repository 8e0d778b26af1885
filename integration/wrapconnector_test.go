package integration

import (
	"database/sql"
	"database/sql/driver"
	"slices"
	"strings"
	"testing"
	"time"

	xsam "github.com/XSAM/otelsql"
	"go.opentelemetry.io/otel/attribute"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/sdk/trace/tracetest"

	"github.com/pgsplit/pgsplit"
)

// With otelsql around each server a span tells where its statement ran, and there is one for each statement.
func TestSpansTellTheServerThatRanTheStatement(t *testing.T) {
	c := startCluster(t, 1)
	ctx := limited(t)
	spans := tracetest.NewSpanRecorder()
	provider := sdktrace.NewTracerProvider(sdktrace.WithSpanProcessor(spans))
	db, err := aroundServers("pgsplit", c.DSN(), func(s pgsplit.Server, d driver.Driver) driver.Driver {
		return xsam.WrapDriver(d, xsam.WithTracerProvider(provider), xsam.WithAttributes(attribute.String("server", s.Role)),
			xsam.WithSpanOptions(xsam.SpanOptions{OmitConnectorConnect: true, OmitConnResetSession: true, OmitRows: true}))
	})
	must(t, err)
	defer db.Close()

	in := pgsplit.WithSession(ctx, pgsplit.NewSession())
	_, err = db.ExecContext(in, "create table spans (n int)")
	must(t, err)
	tx, err := db.BeginTx(in, nil)
	must(t, err)
	_, err = tx.ExecContext(in, "insert into spans values (1)")
	must(t, err)
	must(t, tx.Commit())
	read := pgsplit.ReadOnly(in, pgsplit.ReplicaOnly(), pgsplit.MaxWait(30*time.Second))
	var n int
	must(t, db.QueryRowContext(read, "select n from spans").Scan(&n))
	tx, err = db.BeginTx(read, &sql.TxOptions{ReadOnly: true})
	must(t, err)
	must(t, tx.QueryRowContext(in, "select count(*) from spans").Scan(&n))
	must(t, tx.Rollback())

	var got []string
	for _, span := range spans.Ended() {
		line := span.Name()
		for _, a := range span.Attributes() {
			switch a.Key {
			case "server":
				line = a.Value.AsString() + " " + line
			case "db.statement", "db.query.text":
				line += " " + a.Value.AsString()
			}
		}
		got = append(got, line)
	}
	want := []string{
		"primary sql.conn.exec create table spans (n int)",
		"primary sql.conn.begin_tx", "primary sql.conn.exec insert into spans values (1)", "primary sql.tx.commit",
		"replica sql.conn.query select n from spans",
		"replica sql.conn.begin_tx", "replica sql.conn.query select count(*) from spans", "replica sql.tx.rollback",
	}
	if !slices.Equal(got, want) {
		t.Errorf("spans\n  %s\nwant\n  %s", strings.Join(got, "\n  "), strings.Join(want, "\n  "))
	}
}
