package integration

import (
	"context"
	"crypto/rand"
	"database/sql"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/http/cookiejar"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/gin-gonic/gin"
	"github.com/go-chi/chi/v5"
	"github.com/labstack/echo/v4"

	"github.com/pgsplit/pgsplit"
	"github.com/pgsplit/pgsplit/httpsession"
)

// Example_netHTTP has one Middleware around everything.
func Example_netHTTP() {
	var db *sql.DB // as sql.Open("pgsplit", ..) returned it
	handler, err := netHTTPNotes(db, []byte("the secret of all processes: 32 bytes"))
	if err != nil {
		panic(err)
	}
	_ = http.Server{Addr: ":8080", Handler: handler}
}

func netHTTPNotes(db *sql.DB, key []byte) (http.Handler, error) {
	mux := http.NewServeMux()
	mux.HandleFunc("POST /notes", func(w http.ResponseWriter, r *http.Request) {
		if err := addNote(r.Context(), db); err != nil {
			http.Error(w, "not saved", http.StatusInternalServerError)
			return
		}
		http.Redirect(w, r, "/notes", http.StatusSeeOther)
	})
	mux.HandleFunc("GET /notes", func(w http.ResponseWriter, r *http.Request) {
		fmt.Fprint(w, countNotes(r.Context(), db))
	})
	keyring, err := pgsplit.NewKeyring(key) // at least 32 random bytes, the same in every process
	if err != nil {
		return nil, err
	}
	handler := httpsession.Middleware(keyring, httpsession.ReadOnlyMethods())(mux)
	return handler, nil
}

// Example_chi has it as one of chi's own middlewares; another one inside changes the rules of one group of routes.
func Example_chi() {
	var db *sql.DB
	_ = http.Server{Addr: ":8080", Handler: chiNotes(db, exampleKeyring())}
}

func chiNotes(db *sql.DB, keyring *pgsplit.Keyring) http.Handler {
	router := chi.NewRouter()
	router.Use(httpsession.Middleware(keyring))
	router.Post("/notes", func(w http.ResponseWriter, r *http.Request) {
		if err := addNote(r.Context(), db); err != nil {
			http.Error(w, "not saved", http.StatusInternalServerError)
			return
		}
		http.Redirect(w, r, "/notes", http.StatusSeeOther)
	})
	router.Group(func(router chi.Router) {
		router.Use(httpsession.Middleware(keyring, httpsession.ReadOnlyMethods()))
		router.Get("/notes", func(w http.ResponseWriter, r *http.Request) {
			fmt.Fprint(w, countNotes(r.Context(), db))
		})
	})
	return router
}

// Example_gin has it around gin's engine. Statements take the request's context, not gin's own.
func Example_gin() {
	var db *sql.DB
	_ = http.Server{Addr: ":8080", Handler: ginNotes(db, exampleKeyring())}
}

func ginNotes(db *sql.DB, keyring *pgsplit.Keyring) http.Handler {
	gin.SetMode(gin.ReleaseMode)
	engine := gin.New()
	engine.POST("/notes", func(c *gin.Context) {
		if err := addNote(c.Request.Context(), db); err != nil {
			c.String(http.StatusInternalServerError, "not saved")
			return
		}
		c.Redirect(http.StatusSeeOther, "/notes")
	})
	engine.GET("/notes", func(c *gin.Context) {
		count := countNotes(c.Request.Context(), db)
		c.Stream(func(w io.Writer) bool {
			fmt.Fprint(w, count)
			return false
		})
	})
	return httpsession.Middleware(keyring, httpsession.ReadOnlyMethods())(engine)
}

// Example_echo has it as one of echo's middlewares.
func Example_echo() {
	var db *sql.DB
	_ = http.Server{Addr: ":8080", Handler: echoNotes(db, exampleKeyring())}
}

func echoNotes(db *sql.DB, keyring *pgsplit.Keyring) http.Handler {
	e := echo.New()
	e.Use(echo.WrapMiddleware(httpsession.Middleware(keyring, httpsession.ReadOnlyMethods())))
	e.POST("/notes", func(c echo.Context) error {
		if err := addNote(c.Request().Context(), db); err != nil {
			return err
		}
		return c.Redirect(http.StatusSeeOther, "/notes")
	})
	e.POST("/broken", func(c echo.Context) error {
		if err := addNote(c.Request().Context(), db); err != nil {
			return err
		}
		return echo.NewHTTPError(http.StatusConflict, "saved, but")
	})
	e.GET("/notes", func(c echo.Context) error {
		return c.String(http.StatusOK, fmt.Sprint(countNotes(c.Request().Context(), db)))
	})
	return e
}

// exampleKeyring would be made of a secret that all processes of a program have.
func exampleKeyring() *pgsplit.Keyring {
	key := make([]byte, 32)
	_, _ = rand.Read(key)
	keyring, err := pgsplit.NewKeyring(key)
	if err != nil {
		panic(err)
	}
	return keyring
}

func addNote(ctx context.Context, db *sql.DB) error {
	tx, err := db.BeginTx(ctx, nil)
	if err != nil {
		return err
	}
	defer tx.Rollback()
	if _, err := tx.ExecContext(ctx, "insert into http_notes default values"); err != nil {
		return err
	}
	return tx.Commit()
}

// countNotes is -1 if they could not be counted.
func countNotes(ctx context.Context, db *sql.DB) int {
	var count int
	if err := db.QueryRowContext(ctx, "select count(*) from http_notes").Scan(&count); err != nil {
		slog.WarnContext(ctx, "notes are not counted", "error", err)
		return -1
	}
	return count
}

// notesDB is a database with an empty table, and a replica that will not hear of any note.
func notesDB(t *testing.T) (context.Context, *sql.DB) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
	t.Cleanup(cancel)
	c := startCluster(t, 1)
	db, err := sql.Open("pgsplit", c.DSN())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { db.Close() })
	if _, err := db.ExecContext(ctx, "create table http_notes (id int generated always as identity)"); err != nil {
		t.Fatal(err)
	}
	if err := c.CatchUp(ctx, 0); err != nil {
		t.Fatal(err)
	}
	if err := c.PauseReplay(ctx, 0); err != nil {
		t.Fatal(err)
	}
	return ctx, db
}

func TestAPostIsSeenAfterItsRedirectInEachFramework(t *testing.T) {
	_, db := notesDB(t)
	netHTTP, err := netHTTPNotes(db, make([]byte, 32))
	must(t, err)
	notes := 0
	for name, handler := range map[string]http.Handler{
		"net/http": netHTTP,
		"chi":      chiNotes(db, exampleKeyring()),
		"gin":      ginNotes(db, exampleKeyring()),
		"echo":     echoNotes(db, exampleKeyring()),
	} {
		t.Run(name, func(t *testing.T) {
			server := httptest.NewServer(handler)
			defer server.Close()
			jar, err := cookiejar.New(nil)
			if err != nil {
				t.Fatal(err)
			}
			client := &http.Client{Jar: jar, Timeout: time.Minute}
			paths := []string{"/notes"}
			if name == "echo" {
				paths = append(paths, "/broken") // the answer comes from echo's error handler, outside of the middleware
			}
			for _, path := range paths {
				notes++
				response, err := client.Post(server.URL+path, "", nil)
				if err != nil {
					t.Fatal(err)
				}
				response.Body.Close()
				if got, want := body(t, client, server.URL+"/notes"), fmt.Sprint(notes); got != want {
					t.Errorf("after %s: %s notes, want %s", path, got, want)
				}
				stranger := &http.Client{Timeout: time.Minute}
				if got := body(t, stranger, server.URL+"/notes"); got != "0" {
					t.Errorf("a stranger sees %s notes, so no replica answered", got)
				}
			}
		})
	}
}

func body(t *testing.T, client *http.Client, url string) string {
	t.Helper()
	response, err := client.Get(url)
	if err != nil {
		t.Fatal(err)
	}
	defer response.Body.Close()
	var b strings.Builder
	if _, err := io.Copy(&b, response.Body); err != nil {
		t.Fatal(err)
	}
	return b.String()
}
