package integration

import (
	"database/sql"
	"database/sql/driver"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"math/big"
	"net/netip"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype"
)

var valueCases = []conformanceCase{
	{"ValuesOfEveryTypeScanAlike", func(r *run) { scanValues(r) }},
	{"ValuesOfEveryTypeScanAlikeOverTheSimpleProtocol", func(r *run) { scanValues(r, pgx.QueryExecModeSimpleProtocol) }},
	{"ArgumentsOfEveryTypeArriveAlike", valuesIn},
	{"ColumnsOfATableHaveTheSameTypes", columnTypesOfATable},
	{"CustomValuersAndScannersAreCalledAlike", valuersAndScanners},
	{"NamedArgumentsAreTakenByPosition", namedArguments},
	{"SpecialFirstArgumentsOfPgxWork", specialArguments},
	{"StatementsTakeTheSameArguments", statementArguments},
}

// values is one of every type that PostgreSQL has on board, and what is at the edge of some.
var values = []string{
	"true::bool", "null::bool",
	"1::int2", "-32768::int2", "2::int4", "3::int8", "9223372036854775807::int8", "null::int4",
	"1.5::float4", "2.5::float8", "'NaN'::float8", "'-Infinity'::float8", "0.1::float4",
	"12345.6789::numeric(12,4)", "1e30::numeric", "'NaN'::numeric", "0.000000000000000000001::numeric", "null::numeric",
	"'12.34'::money",
	"'text'::text", "''::text", "null::text", "'six'::varchar(6)", "'any'::varchar", "'abc'::char(5)", "'name'::name", `'c'::"char"`,
	`'\xdeadbeef00'::bytea`, "''::bytea", "null::bytea",
	"'2024-02-29'::date", "'infinity'::date", "'0044-03-15 BC'::date",
	"'12:34:56.789'::time", "'12:34:56.789'::time(2)", "'12:34:56+02'::timetz",
	"'2024-02-29 12:34:56.123456'::timestamp", "'2024-02-29 12:34:56.123456'::timestamp(3)", "'-infinity'::timestamp",
	"'2024-02-29 12:34:56.123456+03'::timestamptz", "'2024-02-29 12:34:56.123456+03'::timestamptz(0)", "'infinity'::timestamptz",
	"null::timestamptz",
	"'1 year 2 days 03:04:05.678'::interval", "'1.234 seconds'::interval second(2)",
	"'a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11'::uuid",
	`'{"a": [1, null, "x"]}'::json`, `'{"a": [1, null, "x"]}'::jsonb`, "'null'::jsonb", "null::jsonb",
	"'{1,2,null}'::int4[]", "'{}'::int8[]", `'{a,"b c",null}'::text[]`, "'{{1,2},{3,4}}'::int4[]", "'{2024-01-01}'::date[]",
	"'192.168.0.1/24'::inet", "'10.0.0.0/8'::cidr", "'08:00:2b:01:02:03'::macaddr",
	"'(1,2)'::point", "'101'::bit(3)", "'10101'::varbit(7)", "'1'::varbit",
	"'[1,5)'::int4range", "'a fat cat'::tsvector", "'16/B374D848'::pg_lsn", "'pg_class'::regclass", "4294967295::oid", "'7'::xid",
	"5::positive", "'ok'::mood", "'{sad,happy}'::mood[]", "row(1, 'a')", "null", "pg_sleep(0)",
}

// scanValues scans every value into every kind of destination.
func scanValues(r *run, first ...any) {
	r.exec(r.db, "select set_config('timezone', 'Asia/Tokyo', false)")
	for _, value := range values {
		rows, err := r.db.QueryContext(r.ctx, "select "+value+" as v, "+value, first...)
		if err != nil {
			r.note(value, err)
			continue
		}
		columns, err := rows.Columns()
		r.note(value+" columns", columns, err)
		noteColumnTypes(r, rows)
		for rows.Next() {
			noteScans(r, value, rows)
		}
		r.note(value+" ends", rows.Err(), rows.Close())
	}
}

func noteScans(r *run, value string, rows *sql.Rows) {
	var raw sql.RawBytes
	var skip any
	for _, dest := range []any{
		new(any), new(string), new([]byte), new(int64), new(int8), new(uint32), new(float64), new(bool), new(time.Time),
		new(*string), new(*int64), new(*time.Time), new(sql.NullString), new(sql.NullInt32), new(sql.NullTime), new(sql.Null[float64]),
		new(json.RawMessage), new(loud),
	} {
		err := rows.Scan(dest, &skip)
		if err != nil {
			r.note(fmt.Sprintf("%s into %T", value, dest), err)
			continue
		}
		r.note(fmt.Sprintf("%s into %T", value, dest), dest)
	}
	err := rows.Scan(&raw, &skip)
	r.note(value+" into RawBytes", []byte(raw), raw == nil, err)
}

func noteColumnTypes(r *run, rows *sql.Rows) {
	types, err := rows.ColumnTypes()
	r.must(err)
	for _, c := range types {
		length, hasLength := c.Length()
		precision, scale, isDecimal := c.DecimalSize()
		nullable, knowsNullable := c.Nullable()
		r.note("column", c.Name(), c.DatabaseTypeName(), c.ScanType(), length, hasLength, precision, scale, isDecimal, nullable, knowsNullable)
	}
}

func columnTypesOfATable(r *run) {
	for _, query := range []string{
		"select * from parent", "select * from child", "select * from child where false",
		"insert into child values (9, 9, 'nine') returning *", "insert into child values (9, 1, 'nine') returning *",
		"update child set label = 'new' where id = 9 returning label", "delete from child where id = 9",
		"create table unseen ()", "drop table unseen", "explain select 1", "show timezone", "values (1, 'a')",
	} {
		rows, err := r.db.QueryContext(r.ctx, query)
		if err != nil {
			r.note(query, err)
			continue
		}
		noteColumnTypes(r, rows)
		n := 0
		for rows.Next() {
			n++
		}
		r.note(query, n, rows.Err(), rows.NextResultSet(), rows.Close())
	}
}

// loud is a Valuer and a Scanner that shouts.
type loud string

func (l loud) Value() (driver.Value, error) {
	if l == "" {
		return nil, errors.New("nothing to shout")
	}
	return string(l) + "!", nil
}

func (l *loud) Scan(src any) error {
	switch src := src.(type) {
	case nil:
		return errors.New("nothing to hear")
	default:
		*l = loud(fmt.Sprintf("%T %v", src, src))
	}
	return nil
}

// pointed is a Valuer by its pointer alone.
type pointed struct{ n int64 }

func (p *pointed) Value() (driver.Value, error) {
	if p == nil {
		return int64(-1), nil
	}
	return p.n, nil
}

func valuersAndScanners(r *run) {
	for _, value := range []any{loud("hey"), loud(""), new(loud), (*loud)(nil), &pointed{7}, (*pointed)(nil)} {
		var heard loud
		err := r.db.QueryRowContext(r.ctx, "select $1::text", value).Scan(&heard)
		r.note(fmt.Sprintf("%T as text", value), string(heard), err)
		var number sql.Null[int64]
		err = r.db.QueryRowContext(r.ctx, "select $1::int8", value).Scan(&number)
		r.note(fmt.Sprintf("%T as int8", value), number, err)
	}
	var heard loud
	r.note("NULL into a Scanner", r.db.QueryRowContext(r.ctx, "select null::text").Scan(&heard))
	m := pgtype.NewMap()
	var numbers []int64
	err := r.db.QueryRowContext(r.ctx, "select '{1,2,3}'::int8[]").Scan(m.SQLScanner(&numbers))
	r.note("pgtype's SQLScanner", numbers, err)
	var span pgtype.Range[pgtype.Int4]
	err = r.db.QueryRowContext(r.ctx, "select int4range(1, 5)").Scan(m.SQLScanner(&span))
	r.note("a range", span, err)
	var numeric pgtype.Numeric
	err = r.db.QueryRowContext(r.ctx, "select 1.25::numeric").Scan(&numeric)
	r.note("pgtype.Numeric", numeric.Int.String(), numeric.Exp, err)
}

type labelled struct {
	Label string `json:"label"`
}

type kind string

// valuesIn passes every kind of Go value as every type that somebody might mean.
func valuesIn(r *run) {
	seven, word := 7, "word"
	moment := time.Date(2024, 2, 29, 12, 34, 56, 123456789, time.FixedZone("", 3*3600))
	arguments := []any{
		nil, true, int(1), int8(-2), int16(3), int32(4), int64(5), uint(6), uint8(7), uint16(8), uint32(9), uint64(math.MaxUint64),
		float32(1.5), 2.5, math.NaN(), "text", "12", "not a number", "", []byte("bytes"), []byte{}, []byte(nil), kind("a kind"), 'r',
		moment, moment.UTC(), &seven, (*int)(nil), &word, (*string)(nil), time.Minute,
		sql.NullString{String: "valid", Valid: true}, sql.NullString{}, sql.NullInt64{Int64: 8, Valid: true}, sql.NullTime{},
		sql.Null[bool]{V: true, Valid: true}, sql.Out{Dest: &seven},
		[]string{"a", "b c", `"`}, []string{}, []string(nil), []int{1, 2}, []int64{3}, [][]int32{{1, 2}, {3, 4}}, []*string{&word, nil},
		[]time.Time{moment}, []bool{true}, []any{1, "mixed"}, [2]int{5, 6},
		map[string]any{"a": 1}, labelled{"l"}, []labelled{{"l"}}, json.RawMessage(`{"raw": true}`),
		[16]byte{0xa0, 0xee}, netip.MustParseAddr("10.1.2.3"), netip.MustParsePrefix("10.0.0.0/8"), big.NewInt(12),
		pgtype.Numeric{Int: big.NewInt(15), Exp: -1, Valid: true}, pgtype.Range[pgtype.Int4]{}, pgtype.UUID{},
		make(chan int), func() {}, struct{}{}, complex(1, 2),
	}
	for _, cast := range []string{
		"text", "int4", "int8", "float8", "numeric", "bool", "bytea", "date", "timestamptz", "uuid", "jsonb", "text[]", "int8[]", "inet",
		"interval", "mood", "positive",
	} {
		for i, argument := range arguments {
			if _, ok := argument.(sql.Out); ok && cast != "text" {
				continue
			}
			var got any
			err := r.db.QueryRowContext(r.ctx, "select $1::"+cast+"::text", argument).Scan(&got)
			r.note(fmt.Sprintf("argument %d, %T, as %s", i, argument, cast), got, err)
		}
	}
}

func namedArguments(r *run) {
	var a, b string
	err := r.db.QueryRowContext(r.ctx, "select $1::text, $2::text", sql.Named("second", "one"), sql.Named("first", "two")).Scan(&a, &b)
	r.note("named", a, b, err)
	err = r.db.QueryRowContext(r.ctx, "select $1::text", sql.Named("", "x")).Scan(&a)
	r.note("without a name", err)
	err = r.db.QueryRowContext(r.ctx, "select $1::text", sql.Named("1st", "x")).Scan(&a)
	r.note("a bad name", err)
}

func specialArguments(r *run) {
	modes := []pgx.QueryExecMode{
		pgx.QueryExecModeCacheStatement, pgx.QueryExecModeCacheDescribe, pgx.QueryExecModeDescribeExec, pgx.QueryExecModeExec,
		pgx.QueryExecModeSimpleProtocol,
	}
	for _, mode := range modes {
		for range 2 {
			var v any
			err := r.db.QueryRowContext(r.ctx, "select $1::int4 + 1", mode, 41).Scan(&v)
			r.note(mode.String(), v, err)
			result, err := r.db.ExecContext(r.ctx, "update parent set id = id where id <= $1", mode, 2)
			noteResult(r, mode.String()+" exec", result, err)
		}
	}
	for _, formats := range []any{
		pgx.QueryResultFormats{pgx.BinaryFormatCode}, pgx.QueryResultFormats{pgx.TextFormatCode},
		pgx.QueryResultFormatsByOID{pgtype.Int4OID: pgx.TextFormatCode},
	} {
		var v any
		err := r.db.QueryRowContext(r.ctx, "select $1::int4", formats, 42).Scan(&v)
		r.note(fmt.Sprintf("%T", formats), v, err)
	}
	var v any
	err := r.db.QueryRowContext(r.ctx, "select @n::int4 + @m::int4", pgx.NamedArgs{"n": 40, "m": 2}).Scan(&v)
	r.note("pgx.NamedArgs", v, err)
	err = r.db.QueryRowContext(r.ctx, "select @n::int4 + @m::int4", pgx.StrictNamedArgs{"n": 40}).Scan(&v)
	r.note("pgx.StrictNamedArgs", v, err)
	result, err := r.db.ExecContext(r.ctx, "update parent set id = id where id = any(@ids)", pgx.NamedArgs{"ids": []int32{1, 3}})
	noteResult(r, "pgx.NamedArgs exec", result, err)
	tx, err := r.db.BeginTx(r.ctx, nil)
	r.must(err)
	err = tx.QueryRowContext(r.ctx, "select $1::text", pgx.QueryExecModeSimpleProtocol, "in a transaction").Scan(&v)
	r.note("simple protocol", v, err, tx.Commit())

	result, err = r.db.ExecContext(r.ctx, "create table two (n int); insert into two values (1), (2); update two set n = n")
	noteResult(r, "several statements", result, err)
	result, err = r.db.ExecContext(r.ctx, "insert into two values (3); select 1/0; insert into two values (4)")
	noteResult(r, "several statements of which one fails", result, err)
	result, err = r.db.ExecContext(r.ctx, "insert into two values ($1); select 1", 5)
	noteResult(r, "several statements with arguments", result, err)
	rows, err := r.db.QueryContext(r.ctx, "select 1 as a; select 2 as b, 3 as c", pgx.QueryExecModeSimpleProtocol)
	r.note("several queries", err)
	if err == nil {
		for {
			columns, err := rows.Columns()
			r.note("result set", columns, err)
			for rows.Next() {
				r.note("row")
			}
			if !rows.NextResultSet() {
				break
			}
		}
		r.note("after all", rows.Err(), rows.Close())
	}
	r.note("rows left", r.text(r.db, "select count(*)::text from two"))
}

func noteResult(r *run, what string, result sql.Result, err error) {
	if err != nil {
		r.note(what, err)
		return
	}
	n, err := result.RowsAffected()
	r.note(what+" rows affected", n, err)
	id, err := result.LastInsertId()
	r.note(what+" last insert id", id, err)
}

func statementArguments(r *run) {
	stmt, err := r.db.PrepareContext(r.ctx, "select $1::text, $2::int4")
	r.must(err)
	defer stmt.Close()
	for _, args := range [][]any{
		{"a", 1}, {nil, nil}, {loud("hey"), &pointed{3}}, {sql.Named("x", "a"), sql.Named("y", 2)}, {"too few"}, {"too", 2, "many"}, {},
		{1, "wrong"}, {pgx.QueryExecModeSimpleProtocol, "a", 1}, {pgx.QueryExecModeExec, "a"}, {[]string{"a"}, 1}, {make(chan int), 1},
	} {
		var a, b any
		err := stmt.QueryRowContext(r.ctx, args...).Scan(&a, &b)
		r.note(fmt.Sprintf("%d arguments", len(args)), a, b, err)
		result, err := stmt.ExecContext(r.ctx, args...)
		noteResult(r, "exec", result, err)
	}
}
