package httpsession_test

import (
	"context"
	"crypto/rand"
	"database/sql"
	"encoding/json"
	"fmt"
	"net/http"
	"time"

	"github.com/pgsplit/pgsplit"
	"github.com/pgsplit/pgsplit/httpsession"
)

// Every handler of a program, a page that is loaded after its form was sent among them, sees what its caller has done.
func ExampleMiddleware() {
	key := make([]byte, 32) // from the program's secrets: the same in every process
	_, _ = rand.Read(key)
	keyring, err := pgsplit.NewKeyring(key)
	if err != nil {
		fmt.Println(err)
		return
	}
	db, err := sql.Open("pgsplit", "postgres://app@db1/shop postgres://app@db2/shop")
	if err != nil {
		fmt.Println(err)
		return
	}
	defer db.Close()

	mux := http.NewServeMux()
	mux.HandleFunc("POST /notes", func(w http.ResponseWriter, r *http.Request) {
		if _, err := db.ExecContext(r.Context(), "insert into notes (body) values ($1)", r.FormValue("body")); err != nil {
			http.Error(w, "not saved", http.StatusInternalServerError)
			return
		}
		http.Redirect(w, r, "/notes", http.StatusSeeOther)
	})
	mux.HandleFunc("GET /notes", func(w http.ResponseWriter, r *http.Request) {
		var count int // from a replica that has the note, or else from the primary
		if err := db.QueryRowContext(r.Context(), "select count(*) from notes").Scan(&count); err != nil {
			http.Error(w, "no notes", http.StatusInternalServerError)
			return
		}
		fmt.Fprintln(w, count)
	})
	var stats httpsession.Stats
	server := &http.Server{
		Addr:              ":8080",
		ReadHeaderTimeout: 10 * time.Second,
		Handler: httpsession.Middleware(keyring,
			httpsession.ReadOnlyMethods(),
			httpsession.ForcePrimaryHeader("X-Force-Primary"),
			httpsession.CountIn(&stats),
		)(mux),
	}
	_ = server // server.ListenAndServe()
}

// A job sees what the request that queued it had written. Its payload stays within the program, so that the token needs
// no seal.
func Example_job() {
	type job struct {
		Note  int
		Token pgsplit.Token
	}
	enqueue := func(ctx context.Context, note int) ([]byte, error) {
		j := job{Note: note}
		if session, ok := pgsplit.SessionFrom(ctx); ok {
			j.Token, _ = session.Token(ctx) // which is good even if there is an error
		}
		return json.Marshal(j)
	}
	work := func(ctx context.Context, db *sql.DB, payload []byte) error {
		var j job
		if err := json.Unmarshal(payload, &j); err != nil {
			return err
		}
		session := pgsplit.SessionFromToken(j.Token)
		ctx = pgsplit.WithSession(ctx, session)
		_, err := db.QueryContext(pgsplit.ReadOnly(ctx), "select body from notes where id = $1", j.Note)
		return err
	}
	// A job whose queue carries no token reads on the primary from the start, and its writes are still followed.
	sticky := func(ctx context.Context) context.Context {
		session := pgsplit.NewSession()
		session.Pin(time.Hour)
		return pgsplit.WithSession(ctx, session)
	}
	_, _ = work, sticky

	payload, err := enqueue(pgsplit.WithSession(context.Background(), pgsplit.NewSession()), 7)
	var j job
	fmt.Println(err, json.Unmarshal(payload, &j), j.Note, j.Token.IsZero())
	// Output: <nil> <nil> 7 true
}
