package pgsplit_test

import (
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"
	"log"
	"net/http"
	"net/http/httptest"
	"os"

	"github.com/jackc/pgx/v5"

	"github.com/pgsplit/pgsplit"
)

func Example() {
	startExamples()
	db, err := sql.Open("pgsplit", os.Getenv("DATABASE_URL")+" "+os.Getenv("DATABASE_RO_URL"))
	if err != nil {
		log.Fatal(err)
	}
	defer db.Close()

	ctx := pgsplit.WithSession(context.Background(), pgsplit.NewSession()) // one for each request or job
	if _, err := db.ExecContext(ctx, "create table if not exists greetings (body text)"); err != nil {
		log.Fatal(err)
	}
	if _, err := db.ExecContext(ctx, "insert into greetings values ('hello')"); err != nil { // the primary: nothing was said
		log.Fatal(err)
	}
	var body string
	row := db.QueryRowContext(pgsplit.ReadOnly(ctx), "select body from greetings") // a replica that has it, else the primary
	if err := row.Scan(&body); err != nil {
		log.Fatal(err)
	}
	fmt.Println(body)
	// Output: hello
}

// A read may be served by a replica, and cannot write, wherever it runs.
func ExampleReadOnly() {
	ctx, db := startExamples()
	read := pgsplit.ReadOnly(ctx)

	var standby bool
	err := db.QueryRowContext(read, "select pg_is_in_recovery()").Scan(&standby)
	fmt.Println("on a replica:", standby, err)

	_, err = db.ExecContext(read, "insert into notes values ('a slip')")
	fmt.Println("refused:", errors.Is(err, pgsplit.ErrReadOnly))
	// Output:
	// on a replica: true <nil>
	// refused: true
}

// A transaction is read only, and stays on one server, if the context of its BeginTx says so.
func ExampleReadOnly_transaction() {
	ctx, db := startExamples()

	tx, err := db.BeginTx(pgsplit.ReadOnly(ctx), &sql.TxOptions{Isolation: sql.LevelRepeatableRead})
	if err != nil {
		log.Fatal(err)
	}
	defer tx.Rollback()
	var standby bool
	err = tx.QueryRowContext(ctx, "select pg_is_in_recovery()").Scan(&standby) // the hint of BeginTx counts
	fmt.Println("on a replica:", standby, err)
	// Output: on a replica: true <nil>
}

// The last hint wins: code that must read on the primary says so, whatever its caller said.
func ExamplePrimary() {
	ctx, db := startExamples()
	ctx = pgsplit.ReadOnly(ctx)

	var standby bool
	err := db.QueryRowContext(pgsplit.Primary(ctx), "select pg_is_in_recovery()").Scan(&standby)
	fmt.Println("on a replica:", standby, err)
	// Output: on a replica: false <nil>
}

// A position covers every commit that returned before it was asked for; a read that carries it sees them.
func ExampleCommitLSN() {
	ctx, db := startExamples()

	if _, err := db.ExecContext(ctx, "insert into notes values ('by position')"); err != nil {
		log.Fatal(err)
	}
	lsn, err := pgsplit.CommitLSN(ctx, db)
	if err != nil {
		log.Fatal(err)
	}
	read := pgsplit.ReadOnly(pgsplit.WithLSN(ctx, lsn)) // a replica that has replayed lsn, else the primary
	var n int
	err = db.QueryRowContext(read, "select count(*) from notes where body = 'by position'").Scan(&n)
	fmt.Println(n, err)
	// Output: 1 <nil>
}

// WithLSN chooses no server. It says what every ReadOnly read below must see; a higher position stays.
func ExampleWithLSN() {
	ctx, db := startExamples()
	ctx = pgsplit.WithLSN(ctx, 0x16B3748)

	var standby bool
	err := db.QueryRowContext(ctx, "select pg_is_in_recovery()").Scan(&standby)
	fmt.Println("on a replica:", standby, err)

	hint, _ := pgsplit.HintFrom(pgsplit.ReadOnly(ctx, pgsplit.AfterLSN(0x100)))
	fmt.Println("floor:", hint.Floor)
	// Output:
	// on a replica: false <nil>
	// floor: 0/16B3748
}

// A session sees what it has written, here and, by its token, in the caller's next request to any process.
func ExampleWithSession() {
	ctx, db := startExamples()

	s := pgsplit.NewSession() // one for each request or job
	request := pgsplit.WithSession(ctx, s)
	if _, err := db.ExecContext(request, "insert into notes values ('in a session')"); err != nil { // raises the floor
		log.Fatal(err)
	}
	token, err := s.Token(request)
	if err != nil {
		log.Fatal(err)
	}

	next := pgsplit.WithSession(ctx, pgsplit.SessionFromToken(token)) // the caller's next request, anywhere
	var n int
	err = db.QueryRowContext(pgsplit.ReadOnly(next), "select count(*) from notes where body = 'in a session'").Scan(&n)
	fmt.Println(n, err)
	// Output: 1 <nil>
}

// A hint is only a value in a context, so code that sets it can be tested without any server.
func ExampleHintFrom() {
	hint, ok := pgsplit.HintFrom(pgsplit.ReadOnly(context.Background(), pgsplit.Prefer("eu-west")))
	fmt.Println(ok, hint.ReadOnly, hint.Prefer)

	_, ok = pgsplit.HintFrom(context.Background())
	fmt.Println(ok)
	// Output:
	// true true eu-west
	// false
}

// COPY needs pgx's own connection.
func ExampleRaw() {
	ctx, db := startExamples()

	conn, err := db.Conn(ctx)
	if err != nil {
		log.Fatal(err)
	}
	defer conn.Close()
	err = pgsplit.Raw(ctx, conn, func(c *pgx.Conn) error { // the primary's: nothing was said
		rows := pgx.CopyFromRows([][]any{{"copied"}, {"copied as well"}})
		n, err := c.CopyFrom(ctx, pgx.Identifier{"notes"}, []string{"body"}, rows)
		fmt.Println(n, "rows")
		return err
	})
	fmt.Println(err)
	// Output:
	// 2 rows
	// <nil>
}

// The Connector behind a sql.DB tells what it has done.
func ExampleFromDB() {
	ctx, db := startExamples()

	connector, err := pgsplit.FromDB(db)
	if err != nil {
		log.Fatal(err)
	}
	before := connector.Stats()
	if _, err := db.ExecContext(ctx, "insert into notes values ('counted')"); err != nil {
		log.Fatal(err)
	}
	after := connector.Stats()
	fmt.Println(after.Reasons["unhinted"] - before.Reasons["unhinted"])
	fmt.Println(after.Servers[0].Role, after.Servers[0].State)
	// Output:
	// 1
	// primary healthy
}

// A health endpoint for people: all servers, asked at once.
func ExampleConnector_Health() {
	_, db := startExamples()

	connector, err := pgsplit.FromDB(db)
	if err != nil {
		log.Fatal(err)
	}
	handler := func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		_ = json.NewEncoder(w).Encode(connector.Health(r.Context()))
	}

	response := httptest.NewRecorder()
	handler(response, httptest.NewRequest(http.MethodGet, "/health", nil))
	var health pgsplit.Health
	err = json.Unmarshal(response.Body.Bytes(), &health)
	fmt.Println(health.Status, len(health.Servers), err)
	// Output: ok 2 <nil>
}

// OnDecision is called for each statement, before it runs, with the statement's context.
func ExampleConfig_OnDecision() {
	ctx, _ := startExamples()

	config, err := pgsplit.ConfigFromEnv("") // DATABASE_URL and DATABASE_RO_URL
	if err != nil {
		log.Fatal(err)
	}
	config.OnDecision = func(ctx context.Context, d pgsplit.Decision) {
		fmt.Println(d.Role, d.Reason) // or a log line with the request's id from ctx
	}
	db, err := pgsplit.OpenDB(config)
	if err != nil {
		log.Fatal(err)
	}
	defer db.Close()

	var one int
	for _, ctx := range []context.Context{ctx, pgsplit.ReadOnly(ctx), pgsplit.Primary(ctx)} {
		if err := db.QueryRowContext(ctx, "select 1").Scan(&one); err != nil {
			log.Fatal(err)
		}
	}
	// Output:
	// primary unhinted
	// replica replica
	// primary primary_hint
}
