package httpsession_test

import (
	"bufio"
	"context"
	"database/sql"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/pgsplit/pgsplit"
	"github.com/pgsplit/pgsplit/httpsession"
	"github.com/pgsplit/pgsplit/pgsplittest"
)

// childDSN is set in a process that is only to serve.
const childDSN = "PGSPLIT_HTTPSESSION_TEST_DSN"

func TestMain(m *testing.M) {
	if dsn := os.Getenv(childDSN); dsn != "" {
		serveUntilInputEnds(dsn)
		return
	}
	os.Exit(m.Run())
}

// start starts a cluster with a table.
func start(t *testing.T, options ...pgsplittest.Option) *pgsplittest.Cluster {
	t.Helper()
	cluster := pgsplittest.Start(t, options...)
	ctx := patient(t)
	db, err := open(patiently(cluster))
	if err != nil {
		t.Fatal(err)
	}
	defer db.Close()
	if _, err := db.ExecContext(ctx, "create table notes (id int primary key)"); err != nil {
		t.Fatal(err)
	}
	if err := cluster.CatchUp(ctx); err != nil {
		t.Fatal(err)
	}
	return cluster
}

// patiently is the cluster's DSN for a slow machine: nobody gives up on a replica in these tests.
func patiently(cluster *pgsplittest.Cluster) string {
	return strings.Replace(cluster.DSN(), "?", "?replica_timeout=20s&", 1)
}

func open(dsn string) (*sql.DB, error) { return sql.Open("pgsplit", dsn) }

func pause(t *testing.T, servers ...*pgsplittest.Server) {
	t.Helper()
	for _, s := range servers {
		if err := s.PauseReplay(patient(t)); err != nil {
			t.Fatal(err)
		}
	}
}

// writes are the ways in which handlers write.
var writes = map[string]func(ctx context.Context, db *sql.DB, id string) error{
	"autocommit": func(ctx context.Context, db *sql.DB, id string) error {
		_, err := db.ExecContext(ctx, "insert into notes values ($1)", id)
		return err
	},
	"returning": func(ctx context.Context, db *sql.DB, id string) error {
		return db.QueryRowContext(ctx, "insert into notes values ($1) returning id::text", id).Scan(&id)
	},
	"transaction": func(ctx context.Context, db *sql.DB, id string) error {
		tx, err := db.BeginTx(ctx, nil)
		if err != nil {
			return err
		}
		defer tx.Rollback()
		if _, err := tx.ExecContext(ctx, "insert into notes values ($1)", id); err != nil {
			return err
		}
		return tx.Commit()
	},
}

// app is a program: POST /write inserts the note id in the way that write= says and ends as ending= does; any other
// request is answered with the number of the notes with that id, and who told.
func app(db *sql.DB) http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("POST /write", func(w http.ResponseWriter, r *http.Request) {
		if err := writes[r.FormValue("write")](r.Context(), db, r.FormValue("id")); err != nil {
			panic(err)
		}
		endings[r.FormValue("ending")](w, r)
	})
	mux.HandleFunc("/", func(w http.ResponseWriter, r *http.Request) {
		var count, where string
		err := db.QueryRowContext(r.Context(), "select count(*), case when pg_is_in_recovery() then 'replica' else 'primary' end"+
			" from notes where $1 in ('', id::text)", r.FormValue("id")).Scan(&count, &where)
		if err != nil {
			http.Error(w, err.Error(), http.StatusInternalServerError)
			return
		}
		fmt.Fprintf(w, "%s %s", count, where)
	})
	return mux
}

// process serves an app as a process of its own would: with a database handle of its own.
func process(t *testing.T, dsn string, options ...httpsession.Option) string {
	t.Helper()
	return serving(t, dsn, app, options...)
}

// serving serves what program makes of a database handle.
func serving(t *testing.T, dsn string, program func(*sql.DB) http.Handler, options ...httpsession.Option) string {
	t.Helper()
	db, err := open(dsn)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { db.Close() })
	handler := httpsession.Middleware(keyring(t, 1), append([]httpsession.Option{httpsession.ReadOnlyMethods()}, options...)...)
	server := httptest.NewServer(recovering(handler(program(db))))
	t.Cleanup(server.Close)
	return server.URL
}

func serveUntilInputEnds(dsn string) {
	db, err := open(dsn)
	if err != nil {
		panic(err)
	}
	k, err := pgsplit.NewKeyring([]byte(strings.Repeat("\x01", 32)))
	if err != nil {
		panic(err)
	}
	server := httptest.NewServer(httpsession.Middleware(k, httpsession.ReadOnlyMethods())(app(db)))
	fmt.Println(server.URL)
	_, _ = io.Copy(io.Discard, os.Stdin)
	server.Close()
	_ = db.Close()
}

// secondProcess runs the app in a process of its own.
func secondProcess(t *testing.T, dsn string) string {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	command := exec.Command(self)
	command.Env = append(os.Environ(), childDSN+"="+dsn)
	command.Stderr = os.Stderr
	input, err := command.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	output, err := command.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := command.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		input.Close()
		if err := command.Wait(); err != nil {
			t.Error(err)
		}
	})
	url, err := bufio.NewReader(output).ReadString('\n')
	if err != nil {
		t.Fatal(err)
	}
	return strings.TrimSpace(url)
}

func TestAfterAPostTheNextPageShowsTheRowOnAnyProcess(t *testing.T) {
	cluster := start(t, pgsplittest.Replicas(2))
	one, two := process(t, patiently(cluster)), process(t, patiently(cluster))
	third := secondProcess(t, patiently(cluster))
	pause(t, cluster.Replicas...)
	id := 0
	for how := range writes {
		for ending := range endings {
			t.Run(how+", "+ending, func(t *testing.T) {
				id++
				client := caller(t)
				client.CheckRedirect = func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }
				note := "id=" + strconv.Itoa(id)
				fetch(t, client, http.MethodPost, one+"/write?"+note+"&write="+how+"&ending="+strings.ReplaceAll(ending, " ", "+"))
				for _, process := range []string{one, two, third} {
					if got, h := fetch(t, client, http.MethodGet, process+"/seen?"+note); got != "1 primary" || len(h["Set-Cookie"]) > 0 {
						t.Errorf("%s: %s, %v", process, got, h["Set-Cookie"])
					}
					if got, _ := fetch(t, caller(t), http.MethodGet, process+"/seen?"+note); got != "0 replica" {
						t.Errorf("somebody else at %s: %s", process, got)
					}
				}
			})
		}
	}
	// And by the browser's own way: it follows the redirect.
	if got, _ := fetch(t, caller(t), http.MethodPost, two+"/write?id=-1&write=transaction&ending=redirect"); !strings.HasSuffix(got, "primary") {
		t.Error(got)
	}
}

func TestATransactionThatIsRolledBackSetsNoCookie(t *testing.T) {
	cluster := start(t)
	at := serving(t, patiently(cluster), func(db *sql.DB) http.Handler {
		return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			tx, err := db.BeginTx(r.Context(), nil)
			if err != nil {
				panic(err)
			}
			_, err = tx.ExecContext(r.Context(), "insert into notes values (1)")
			if err := errors.Join(err, tx.Rollback()); err != nil {
				panic(err)
			}
		})
	})
	if _, h := fetch(t, caller(t), http.MethodPost, at); len(h["Set-Cookie"]) > 0 || h.Get("Cache-Control") != "" {
		t.Error(h)
	}
}

func TestATokenThatSaysNothingNewSetsNoCookie(t *testing.T) {
	cluster := start(t)
	at := serving(t, patiently(cluster), func(db *sql.DB) http.Handler {
		return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			var one int // by a statement that may write, for all that the driver knows
			if err := db.QueryRowContext(r.Context(), "select 1").Scan(&one); err != nil {
				panic(err)
			}
		})
	})
	client := caller(t)
	for range 20 { // the servers write something of their own now and then
		if _, h := fetch(t, client, http.MethodPost, at); len(h["Set-Cookie"]) == 0 {
			return
		}
	}
	t.Error("each response set a cookie")
}

// reordering holds responses back and lets them go in an order of its own.
type reordering struct {
	http.RoundTripper
	turn chan struct{}
}

func (r reordering) RoundTrip(request *http.Request) (*http.Response, error) {
	response, err := r.RoundTripper.RoundTrip(request)
	for range rand.IntN(4) {
		// Each waits for some others, while there are others.
		select {
		case r.turn <- struct{}{}:
		case <-r.turn:
		case <-time.After(time.Duration(rand.IntN(3)) * time.Millisecond):
		}
	}
	return response, err
}

func TestTheFloorOfACallerWithManyParallelRequestsNeverFalls(t *testing.T) {
	const parallel, rounds = 64, 2
	cluster := start(t, pgsplittest.Replicas(2), pgsplittest.Setting("max_connections", "400"))
	k := keyring(t, 1)
	var arrived sync.WaitGroup
	together := func(db *sql.DB) http.Handler {
		return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			if r.FormValue("together") != "" {
				arrived.Done()
				arrived.Wait()
			}
			app(db).ServeHTTP(w, r)
		})
	}
	processes := []string{serving(t, patiently(cluster), together), serving(t, patiently(cluster), together)}
	pause(t, cluster.Replicas...)
	client := caller(t)
	client.Transport = reordering{client.Transport, make(chan struct{})}
	most, floor := 0, pgsplit.LSN(0)
	var mu sync.Mutex
	check := func() {
		mu.Lock()
		defer mu.Unlock()
		token, n := presented(t, k, client.Jar, processes[0])
		of, _ := token.Floor(only(token))
		if of.LSN < floor {
			t.Errorf("the floor falls from %s to %s", floor, of.LSN)
		}
		floor, most = of.LSN, max(most, n)
	}
	var id atomic.Int64
	round := func(n int, how string) {
		var callers sync.WaitGroup
		for range parallel {
			callers.Go(func() {
				for range n {
					note := strconv.FormatInt(id.Add(1), 10)
					fetch(t, client, http.MethodPost, processes[rand.IntN(2)]+"/write?write=transaction&ending=WriteHeader&id="+note+how)
					check()
					if how != "" {
						continue
					}
					if got, _ := fetch(t, client, http.MethodGet, processes[rand.IntN(2)]+"/seen?id="+note); got != "1 primary" {
						t.Errorf("note %s: %s", note, got)
					}
					check()
				}
			})
		}
		callers.Wait()
	}
	arrived.Add(parallel)
	round(1, "&together=1") // none knows of any other's token
	if most != parallel {
		t.Errorf("%d cookies, want one for each of %d requests", most, parallel)
	}
	round(rounds, "")
	// A token for each of those on their way, and those that they did not know of.
	if most > 2*parallel+4 {
		t.Errorf("%d cookies", most)
	}
	left := most
	for range 16 {
		fetch(t, client, http.MethodGet, processes[0]+"/seen")
		check()
		_, left = presented(t, k, client.Jar, processes[0])
	}
	if left > 4 {
		t.Errorf("%d cookies are left", left)
	}
	t.Logf("at most %d cookies, at the end %d", most, left)
}

// only is the cluster of a token of one.
func only(t pgsplit.Token) uint64 {
	for _, f := range t.Floors {
		return f.System
	}
	return 0
}

func TestACallerWhoseTokenProvesNothingReadsOnThePrimaryAndGetsAnotherOne(t *testing.T) {
	cluster := start(t)
	var stats httpsession.Stats
	at := process(t, patiently(cluster), httpsession.CountIn(&stats), quiet())
	pause(t, cluster.Replicas...)
	old := keyring(t, 9) // nobody has this key any more
	client := caller(t)
	fetch(t, client, http.MethodPost, at+"/write?id=1&write=autocommit&ending=nothing")
	forgetful, _ := presented(t, keyring(t, 1), client.Jar, at)
	got, h := fetch(t, caller(t), http.MethodGet, at+"/seen?id=1", "Cookie", name(1)+"="+old.Seal(forgetful))
	if got != "1 primary" || stats.Invalid.Load() != 1 {
		t.Error(got, stats.Invalid.Load())
	}
	tokens, removed := sent(t, keyring(t, 1), h)
	if len(tokens) != 1 || tokens[0].Floors[0].LSN < forgetful.Floors[0].LSN || len(removed) != 1 {
		t.Fatal(tokens, removed)
	}
	got, h = fetch(t, caller(t), http.MethodGet, at+"/seen?id=1", "Cookie", name(1)+"="+keyring(t, 1).Seal(tokens[0]))
	if got != "1 primary" || len(h["Set-Cookie"]) > 0 {
		t.Error(got, h)
	}
}

func TestATokenOfAClusterThatNobodyKnowsTravelsOn(t *testing.T) {
	cluster := start(t)
	process := process(t, patiently(cluster))
	k := keyring(t, 1)
	got, h := fetch(t, caller(t), http.MethodGet, process+"/seen", "Cookie", cookies(k, 1))
	if got != "0 replica" || len(h["Set-Cookie"]) > 0 {
		t.Error(got, h)
	}
	_, h = fetch(t, caller(t), http.MethodPost, process+"/write?id=1&write=autocommit&ending=nothing", "Cookie", cookies(k, 1))
	tokens, removed := sent(t, k, h)
	if len(tokens) != 1 || len(removed) != 1 {
		t.Fatal(tokens, removed)
	}
	if f, ok := tokens[0].Floor(system); !ok || f.LSN != 1 || len(tokens[0].Floors) != 2 {
		t.Error(tokens)
	}
}

func TestATokenThatClaimsTheFutureIsReplaced(t *testing.T) {
	cluster := start(t)
	process := process(t, patiently(cluster))
	k := keyring(t, 1)
	client := caller(t)
	fetch(t, client, http.MethodPost, process+"/write?id=1&write=autocommit&ending=nothing")
	token, _ := presented(t, k, client.Jar, process)
	real := token.Floors[0].LSN
	token.Floors[0].LSN += 1 << 40
	got, h := fetch(t, caller(t), http.MethodGet, process+"/seen?id=1", "Cookie", name(1)+"="+k.Seal(token))
	tokens, removed := sent(t, k, h)
	if got != "1 primary" || len(tokens) != 1 || len(removed) != 1 {
		t.Fatal(got, tokens, removed)
	}
	if lsn := tokens[0].Floors[0].LSN; lsn < real || lsn >= real+1<<40 {
		t.Error(lsn)
	}
}

func TestACommitThatNobodyCanLocateSendsItsCallerToThePrimaryAndIsNoError(t *testing.T) {
	cluster := start(t)
	k := keyring(t, 1)
	var stats httpsession.Stats
	process := serving(t, patiently(cluster), func(db *sql.DB) http.Handler {
		return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			if err := writes["autocommit"](r.Context(), db, "1"); err != nil {
				t.Error(err)
			}
			if err := cluster.Primary.Kill(r.Context()); err != nil {
				t.Error(err)
			}
			w.WriteHeader(http.StatusCreated)
			_, _ = io.WriteString(w, "done")
		})
	}, httpsession.CountIn(&stats), quiet())
	client := caller(t)
	body, _ := fetch(t, client, http.MethodPost, process)
	if body != "done" || stats.Unsure.Load() != 1 || stats.Late.Load() != 0 {
		t.Errorf("%q, %d unsure, %d late", body, stats.Unsure.Load(), stats.Late.Load())
	}
	if token, _ := presented(t, k, client.Jar, process); token.IsZero() || !token.Floors[0].PinnedUntil.After(time.Now()) {
		t.Errorf("%+v", token)
	}
}

func TestARequestThatIsCancelledStillTellsWhereItsCommitIs(t *testing.T) {
	cluster := start(t)
	k := keyring(t, 1)
	db, err := open(patiently(cluster))
	if err != nil {
		t.Fatal(err)
	}
	defer db.Close()
	ctx, cancel := context.WithCancel(patient(t))
	h := serve(func(_ http.ResponseWriter, r *http.Request) {
		if err := writes["autocommit"](r.Context(), db, "1"); err != nil {
			t.Error(err)
		}
		cancel()
	}, httptest.NewRequestWithContext(ctx, http.MethodPost, "/", nil), k)
	if tokens, _ := sent(t, k, h); len(tokens) != 1 || tokens[0].Floors[0].LSN == 0 || !tokens[0].Floors[0].PinnedUntil.IsZero() {
		t.Errorf("%+v", tokens)
	}
}

func TestWhatIsCommittedAfterAnInformationalHeaderIsInTheToken(t *testing.T) {
	cluster := start(t)
	var stats httpsession.Stats
	process := serving(t, patiently(cluster), func(db *sql.DB) http.Handler {
		return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			w.WriteHeader(http.StatusEarlyHints)
			if err := writes["autocommit"](r.Context(), db, "1"); err != nil {
				t.Error(err)
			}
			_, _ = io.WriteString(w, "done")
		})
	}, httpsession.CountIn(&stats))
	_, h := fetch(t, caller(t), http.MethodPost, process)
	if tokens, _ := sent(t, keyring(t, 1), h); len(tokens) != 1 || stats.Late.Load() != 0 {
		t.Error(h, stats.Late.Load())
	}
}

// streaming answers first and commits then.
func streaming(db *sql.DB) http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("POST /stream", func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.WriteString(w, "working\n")
		_ = http.NewResponseController(w).Flush()
		if err := writes[r.FormValue("write")](r.Context(), db, r.FormValue("id")); err != nil {
			panic(err)
		}
		_, _ = io.WriteString(w, "done\n")
	})
	mux.Handle("/", app(db))
	return mux
}

func TestACommitAfterTheFirstByteIsCountedAndLogged(t *testing.T) {
	cluster := start(t)
	for how := range writes {
		var stats httpsession.Stats
		var mu sync.Mutex
		var logged strings.Builder
		logger := slog.New(slog.NewTextHandler(locked{&mu, &logged}, nil))
		process := serving(t, patiently(cluster), streaming, httpsession.CountIn(&stats), httpsession.Logger(logger))
		if got, h := fetch(t, caller(t), http.MethodPost, process+"/stream?write="+how+"&id="+strconv.Itoa(len(how))); got != "working\ndone\n" || len(h["Set-Cookie"]) > 0 {
			t.Error(got, h)
		}
		mu.Lock()
		if stats.Late.Load() != 1 || !strings.Contains(logged.String(), `token_late" method=POST pattern="POST /stream"`) {
			t.Errorf("%s: %d late, logged %s", how, stats.Late.Load(), &logged)
		}
		mu.Unlock()
	}
}

// locked is a writer for several goroutines.
type locked struct {
	mu *sync.Mutex
	w  io.Writer
}

func (l locked) Write(b []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.w.Write(b)
}

func TestAPinOnStartCoversWhatIsCommittedWhileTheResponseStreams(t *testing.T) {
	cluster := start(t)
	var stats httpsession.Stats
	process := serving(t, patiently(cluster), streaming, httpsession.PinOnStart(time.Minute), httpsession.CountIn(&stats))
	pause(t, cluster.Replicas...)
	client := caller(t)
	fetch(t, client, http.MethodPost, process+"/stream?write=transaction&id=1")
	if got, _ := fetch(t, client, http.MethodGet, process+"/seen?id=1"); got != "1 primary" {
		t.Error(got)
	}
	if stats.Late.Load() != 0 || stats.Sent.Load() != 1 {
		t.Error(stats.Late.Load(), stats.Sent.Load())
	}
	for ending, pinned := range map[string]bool{"WriteHeader": true, "redirect": false, "error": false, "nothing": false} {
		client := caller(t)
		client.CheckRedirect = func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }
		fetch(t, client, http.MethodPost, process+"/write?write=returning&id="+strconv.Itoa(9000+len(ending))+"&ending="+ending)
		token, _ := presented(t, keyring(t, 1), client.Jar, process)
		if got := token.Floors[0].PinnedUntil.After(time.Now()); got != pinned {
			t.Errorf("%s: %+v", ending, token)
		}
	}
	if _, h := fetch(t, caller(t), http.MethodGet, process+"/seen"); len(h["Set-Cookie"]) > 0 {
		t.Error(h)
	}
}

func TestForcePrimaryCannotBeUndoneAndEndsWithTheRequest(t *testing.T) {
	cluster := start(t)
	process := serving(t, patiently(cluster), func(db *sql.DB) http.Handler {
		return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			app(db).ServeHTTP(w, r.WithContext(pgsplit.ReadOnly(pgsplit.WithSession(r.Context(), pgsplit.NewSession()))))
		})
	}, httpsession.ForcePrimaryHeader("X-Force-Primary"))
	client := caller(t)
	for value, want := range map[string]string{"true": "primary", "1": "primary", "yes": "primary", "false": "replica", "0": "replica", "": "replica"} {
		got, h := fetch(t, client, http.MethodGet, process+"/seen", "X-Force-Primary", value)
		if got != "0 "+want || len(h["Set-Cookie"]) > 0 {
			t.Errorf("%q: %s, %v", value, got, h)
		}
	}
	if got, _ := fetch(t, client, http.MethodGet, process+"/seen"); got != "0 replica" {
		t.Errorf("without: %s", got)
	}
}

func TestMonotonicCallersNeverSeeLessThanBefore(t *testing.T) {
	cluster := start(t, pgsplittest.Replicas(2))
	ctx := patient(t)
	db, err := open(patiently(cluster))
	if err != nil {
		t.Fatal(err)
	}
	defer db.Close()
	pause(t, cluster.Replicas[1])
	if err := writes["autocommit"](ctx, db, "1"); err != nil {
		t.Fatal(err)
	}
	if err := cluster.CatchUp(ctx); err != nil {
		t.Fatal(err)
	}
	dsn := strings.Replace(patiently(cluster), "?", "?replica_balance=round_robin&", 1)
	falls := func(options ...httpsession.Option) (fell bool) {
		processes := []string{process(t, dsn, options...), process(t, dsn, options...)}
		for range 4 {
			client, before := caller(t), ""
			for range 6 {
				got, _ := fetch(t, client, http.MethodGet, processes[rand.IntN(2)]+"/seen")
				got = got[:1]
				fell = fell || got < before
				before = max(got, before)
			}
		}
		return fell
	}
	if !falls() {
		t.Error("the replicas do not take turns, so this test shows nothing")
	}
	if falls(httpsession.Monotonic()) {
		t.Error("a caller saw less than before")
	}
}

// A response that moves its caller to another replica removes the cookie that a parallel request came with. What that one has
// shown since, where the cookie says, is not lost.
func TestAParallelRequestKeepsWhatTheOtherOneHasSeen(t *testing.T) {
	cluster := start(t, pgsplittest.Replicas(2))
	ctx := patient(t)
	db, err := open(patiently(cluster))
	if err != nil {
		t.Fatal(err)
	}
	defer db.Close()
	begun, goOn := make(chan struct{}), make(chan struct{})
	only := func(replica int, program func(*sql.DB) http.Handler) string {
		return serving(t, strings.Fields(patiently(cluster))[0]+" "+cluster.Replicas[replica].URI(), program, httpsession.Monotonic())
	}
	ahead := only(0, app)
	behind := only(1, func(db *sql.DB) http.Handler {
		return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			answer := httptest.NewRecorder()
			app(db).ServeHTTP(answer, r)
			if r.URL.Path == "/slow" {
				begun <- struct{}{}
				<-goOn
			}
			_, _ = w.Write(answer.Body.Bytes())
		})
	})
	client := caller(t)
	seen := func(process, want string) {
		t.Helper()
		if got, _ := fetch(t, client, http.MethodGet, process); got != want {
			t.Errorf("%q instead of %q", got, want)
		}
	}
	seen(ahead+"/seen", "0 replica")
	// What is read where the cookie says is more than before, so it is said again: others may remove the cookie twice meanwhile.
	if _, header := fetch(t, client, http.MethodGet, ahead+"/seen"); len(header.Values("Set-Cookie")) == 0 {
		t.Error("a response that read where its cookie says relies on that cookie")
	}
	var slow sync.WaitGroup
	slow.Go(func() { seen(behind+"/slow", "0 replica") })
	<-begun
	pause(t, cluster.Replicas[1])
	if err := writes["autocommit"](ctx, db, "1"); err != nil {
		t.Fatal(err)
	}
	if err := cluster.CatchUp(ctx); err != nil {
		t.Fatal(err)
	}
	seen(ahead+"/seen", "1 replica")
	goOn <- struct{}{}
	slow.Wait()
	seen(behind+"/seen", "1 primary")
}
