package pgsplit_test

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"io"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/DATA-DOG/go-sqlmock"
	"github.com/jackc/pgx/v5/stdlib"

	"github.com/pgsplit/pgsplit"
)

// driverConn hands out what a sql.DB holds.
func driverConn(t *testing.T, ctx context.Context, db *sql.DB, use func(c driver.Conn)) {
	t.Helper()
	if err := hold(t, ctx, db).Raw(func(c any) error {
		use(c.(driver.Conn))
		return nil
	}); err != nil {
		t.Fatal(err)
	}
}

// methods maps the names of a value's exported methods to their types without the receiver.
func methods(v any) map[string]string {
	found := map[string]string{}
	typ := reflect.TypeOf(v)
	for i := range typ.NumMethod() {
		found[typ.Method(i).Name] = reflect.ValueOf(v).Method(i).Type().String()
	}
	return found
}

// implementsAll checks that got has every method that pgx's own value has: so no interface that database/sql looks for,
// today's or a later Go's, is lost.
func implementsAll(t *testing.T, what string, got, pgx any, except ...string) {
	t.Helper()
	have := methods(got)
	for name, signature := range methods(pgx) {
		if !slices.Contains(except, name) && have[name] != signature {
			t.Errorf("%s: pgx has %s%s, pgsplit has %q", what, name, strings.TrimPrefix(signature, "func"), have[name])
		}
	}
}

func TestEverythingImplementsWhatPgxImplements(t *testing.T) {
	cluster := shareCluster(t, 1)
	ctx := patient(t)
	raw := openRaw(t, cluster.Primary.URI())
	for name, hinted := range map[string]context.Context{"unhinted": ctx, "ReadOnly": pgsplit.ReadOnly(ctx)} {
		t.Run(name, func(t *testing.T) {
			db := open(t, cluster.DSN())
			driverConn(t, ctx, raw, func(theirs driver.Conn) {
				driverConn(t, ctx, db, func(ours driver.Conn) {
					// Conn returns the *pgx.Conn: that is what Raw is for.
					implementsAll(t, "the connection", ours, theirs, "Conn")
					sameParts(t, ctx, hinted, ours.(pgxConn), theirs.(pgxConn))
				})
			})
		})
	}
	theirs, err := raw.Driver().(driver.DriverContext).OpenConnector(cluster.Primary.URI())
	if err != nil {
		t.Fatal(err)
	}
	ours, err := new(pgsplit.Driver).OpenConnector(cluster.DSN())
	if err != nil {
		t.Fatal(err)
	}
	implementsAll(t, "the connector", ours, theirs)
	implementsAll(t, "the driver", ours.Driver(), theirs.Driver())
	implementsAll(t, "the registered driver", &pgsplit.Driver{}, raw.Driver())
	if _, ok := ours.(io.Closer); !ok {
		t.Error("sql.DB.Close cannot close the connector")
	}
}

// pgxConn is what pgx's connection is for database/sql.
type pgxConn interface {
	driver.Conn
	driver.Pinger
	driver.ExecerContext
	driver.QueryerContext
	driver.ConnPrepareContext
	driver.ConnBeginTx
	driver.SessionResetter
	driver.NamedValueChecker
}

// sameParts compares what the two connections make. ctx is for pgx's.
func sameParts(t *testing.T, ctx, hinted context.Context, ours, theirs pgxConn) {
	t.Helper()
	const query = "select 1, 'a'::varchar(3), 1.5::numeric(5, 2)"
	checkRows := func(what string, rows driver.Rows, err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
		if _, ok := rows.(*stdlib.Rows); !ok {
			t.Errorf("%s gives rows of type %T, not pgx's own", what, rows)
		}
		if err := rows.Close(); err != nil {
			t.Error(err)
		}
	}
	rows, err := ours.QueryContext(hinted, query, nil)
	checkRows("the connection", rows, err)

	stmt, err := ours.PrepareContext(hinted, query)
	if err != nil {
		t.Fatal(err)
	}
	theirStmt, err := theirs.PrepareContext(ctx, query)
	if err != nil {
		t.Fatal(err)
	}
	implementsAll(t, "a statement", stmt, theirStmt)
	rows, err = stmt.(driver.StmtQueryContext).QueryContext(hinted, nil)
	checkRows("a statement", rows, err)
	result, err := stmt.(driver.StmtExecContext).ExecContext(hinted, nil)
	if err != nil {
		t.Fatal(err)
	}
	theirResult, err := theirStmt.(driver.StmtExecContext).ExecContext(ctx, nil)
	if err != nil {
		t.Fatal(err)
	}
	if reflect.TypeOf(result) != reflect.TypeOf(theirResult) {
		t.Errorf("a result is a %T, pgx's a %T", result, theirResult)
	}

	tx, err := ours.BeginTx(hinted, driver.TxOptions{})
	if err != nil {
		t.Fatal(err)
	}
	theirTx, err := theirs.BeginTx(ctx, driver.TxOptions{})
	if err != nil {
		t.Fatal(err)
	}
	implementsAll(t, "a transaction", tx, theirTx)
	rows, err = ours.QueryContext(hinted, query, nil)
	checkRows("a transaction", rows, err)
	if err := tx.Rollback(); err != nil {
		t.Error(err)
	}
	if err := theirTx.Rollback(); err != nil {
		t.Error(err)
	}
}

// TestColumnTypesAreThoseOfPgx reads every kind of description that database/sql passes on.
func TestColumnTypesAreThoseOfPgx(t *testing.T) {
	cluster := shareCluster(t, 1)
	ctx := patient(t)
	const query = "select 1::int4, 'a'::varchar(3), 1.5::numeric(5, 2), now(), null::text, array[1, 2], '{}'::jsonb"
	describe := func(ctx context.Context, db *sql.DB) (described []any) {
		rows, err := db.QueryContext(ctx, query)
		if err != nil {
			t.Fatal(err)
		}
		defer rows.Close()
		types, err := rows.ColumnTypes()
		if err != nil {
			t.Fatal(err)
		}
		for _, c := range types {
			length, hasLength := c.Length()
			precision, scale, decimal := c.DecimalSize()
			nullable, known := c.Nullable()
			described = append(described, c.Name(), c.DatabaseTypeName(), c.ScanType(), length, hasLength, precision, scale,
				decimal, nullable, known)
		}
		return described
	}
	want := describe(ctx, openRaw(t, cluster.Primary.URI()))
	db := open(t, cluster.DSN())
	for _, ctx := range []context.Context{ctx, pgsplit.ReadOnly(ctx)} {
		if got := describe(ctx, db); !reflect.DeepEqual(got, want) {
			t.Errorf("%v, pgx: %v", got, want)
		}
	}
}

// shop is code under test as a user of the driver has it.
type shop struct{ db *sql.DB }

func (s shop) add(ctx context.Context, name string) error {
	tx, err := s.db.BeginTx(ctx, nil)
	if err != nil {
		return err
	}
	defer tx.Rollback()
	if _, err := tx.ExecContext(ctx, "insert into article values ($1)", name); err != nil {
		return err
	}
	return tx.Commit()
}

func (s shop) list(ctx context.Context, seen pgsplit.LSN) (names []string, err error) {
	ctx = pgsplit.ReadOnly(pgsplit.WithLSN(ctx, seen), pgsplit.Prefer("near"))
	rows, err := s.db.QueryContext(ctx, "select name from article")
	if err != nil {
		return nil, err
	}
	defer rows.Close()
	for rows.Next() {
		var name string
		if err := rows.Scan(&name); err != nil {
			return nil, err
		}
		names = append(names, name)
	}
	return names, rows.Err()
}

func TestCodeWithHintsIsTestedWithAMockAsBefore(t *testing.T) {
	db, mock, err := sqlmock.New()
	if err != nil {
		t.Fatal(err)
	}
	defer db.Close()
	mock.ExpectBegin()
	mock.ExpectExec("insert into article").WithArgs("tea").WillReturnResult(sqlmock.NewResult(0, 1))
	mock.ExpectCommit()
	mock.ExpectQuery("select name").WillReturnRows(sqlmock.NewRows([]string{"name"}).AddRow("tea"))
	ctx := patient(t)
	s := shop{db}
	if err := s.add(pgsplit.Primary(ctx), "tea"); err != nil {
		t.Error(err)
	}
	if names, err := s.list(ctx, 42); err != nil || len(names) != 1 {
		t.Errorf("%v %v", names, err)
	}
	if err := mock.ExpectationsWereMet(); err != nil {
		t.Error(err)
	}
}

func TestTheHintOfAContextCanBeReadInTests(t *testing.T) {
	ctx := pgsplit.ReadOnly(pgsplit.WithLSN(unhinted, 42), pgsplit.Prefer("near"))
	if h, ok := pgsplit.HintFrom(ctx); !ok || !h.ReadOnly || h.Floor != 42 || h.Prefer != "near" {
		t.Errorf("%+v %t", h, ok)
	}
	if h, ok := pgsplit.HintFrom(unhinted); ok || h != (pgsplit.Hint{}) {
		t.Errorf("%+v %t", h, ok)
	}
}

func TestADatabaseOfAnotherDriverGivesAClearError(t *testing.T) {
	cluster := shareCluster(t, 0)
	ctx := patient(t)
	mock, _, err := sqlmock.New()
	if err != nil {
		t.Fatal(err)
	}
	defer mock.Close()
	watched, _, err := sqlmock.New(sqlmock.MonitorPingsOption(true))
	if err != nil {
		t.Fatal(err)
	}
	defer watched.Close()
	for name, db := range map[string]*sql.DB{
		"sqlmock":            mock,
		"sqlmock with pings": watched,
		"raw pgx":            openRaw(t, cluster.Primary.URI()),
		"raw pgx, nobody up": openRaw(t, "postgres://127.0.0.1:1/none?sslmode=disable&connect_timeout=2"),
	} {
		returns(t, name, func() {
			c, err := pgsplit.FromDB(db)
			if err == nil || c != nil || !strings.Contains(err.Error(), "pgsplit: no connector found behind *") {
				t.Errorf("%s: FromDB: %v %v", name, c, err)
			}
			if lsn, err := pgsplit.CommitLSN(ctx, db); err == nil || lsn != 0 {
				t.Errorf("%s: CommitLSN: %s %v", name, lsn, err)
			}
		})
	}
	for name, db := range map[string]*sql.DB{"sqlmock": mock, "raw pgx": openRaw(t, cluster.Primary.URI())} {
		if _, err := pgsplit.CommitLSN(ctx, db); err == nil || !strings.Contains(err.Error(), "not a connection of this driver") {
			t.Errorf("%s: CommitLSN: %v", name, err)
		}
	}
}
