package integration

import (
	"context"
	"database/sql"
	"testing"

	"github.com/DATA-DOG/go-txdb"

	"github.com/pgsplit/pgsplit"
)

// What docs/testing.md says of tests that run in one transaction.
func TestATestThatRunsInOneTransaction(t *testing.T) {
	c, ctx := startCluster(t, 1), limited(t)
	mustExec(t, ctx, c.PrimaryURI(), "create table note (id int primary key)")
	must(t, c.CatchUp(ctx, 0))
	txdb.Register("tx", "pgsplit", c.DSN())
	show := func(ctx context.Context, db *sql.DB, want int) {
		t.Helper()
		var rows int
		var standby bool
		must(t, db.QueryRowContext(ctx, "select count(*), pg_is_in_recovery() from note").Scan(&rows, &standby))
		if rows != want || standby {
			t.Errorf("%d rows, want %d; on a standby: %t", rows, want, standby)
		}
	}
	for range 2 { // nothing is left for the second one
		db, err := sql.Open("tx", t.Name())
		must(t, err)
		insert := func(ctx context.Context, db interface {
			ExecContext(context.Context, string, ...any) (sql.Result, error)
		}, id int) {
			t.Helper()
			_, err := db.ExecContext(ctx, "insert into note values ($1)", id)
			must(t, err)
		}
		insert(ctx, db, 1)
		show(pgsplit.ReadOnly(ctx), db, 1)
		insert(pgsplit.ReadOnly(ctx), db, 2)
		tx, err := db.BeginTx(ctx, nil)
		must(t, err)
		insert(ctx, tx, 3)
		must(t, tx.Rollback())
		show(ctx, db, 2)
		must(t, db.Close())
		wantNotes(t, ctx, "the primary", c.PrimaryURI(), 0)
	}
}
