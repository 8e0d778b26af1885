package httpsession_test

import (
	"database/sql"
	"net/http"
	"strconv"
	"strings"
	"testing"

	"github.com/pgsplit/pgsplit/pgsplittest"
)

// redirecting is the app, whose writes answer with a redirect to the page of another process that shows the note.
func redirecting(other string) func(*sql.DB) http.Handler {
	return func(db *sql.DB) http.Handler {
		mux := http.NewServeMux()
		mux.HandleFunc("POST /write", func(w http.ResponseWriter, r *http.Request) {
			if err := writes[r.FormValue("write")](r.Context(), db, r.FormValue("id")); err != nil {
				panic(err)
			}
			http.Redirect(w, r, other+"/seen?id="+r.FormValue("id"), http.StatusSeeOther)
		})
		mux.Handle("/", app(db))
		return mux
	}
}

// A replica that is running has the row a moment later. Here that is 3 ms, so that a page that did not wait for it would
// miss it.
func TestAfterARedirectAReplicaOfARunningClusterShowsTheRowAtAnotherProcess(t *testing.T) {
	const rounds, tries = 300, 5
	cluster := start(t, pgsplittest.Replicas(2), pgsplittest.ReplicaSetting("recovery_min_apply_delay", "3ms"))
	dsn := strings.Replace(patiently(cluster), "?", "?replica_max_wait=20ms&", 1)
	poster := serving(t, dsn, redirecting(secondProcess(t, dsn)))
	client := caller(t)
	id := 0
	for how := range writes {
		// A machine that stands still for a moment costs a batch its share, not every batch.
		for try := 1; ; try++ {
			answers := map[string]int{}
			for range rounds {
				id++
				body, _ := fetch(t, client, http.MethodPost, poster+"/write?write="+how+"&id="+strconv.Itoa(id))
				answers[body]++
			}
			t.Logf("%s: %v", how, answers)
			if seen := answers["1 replica"] + answers["1 primary"]; seen != rounds {
				t.Fatalf("%s: %d of %d pages show the row: %v", how, seen, rounds, answers)
			}
			if answers["1 replica"] >= rounds*99/100 {
				break
			}
			if try == tries {
				t.Fatalf("%s: replicas answered %d of %d times, want 99 %%", how, answers["1 replica"], rounds)
			}
		}
	}
}
