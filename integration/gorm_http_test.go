package integration

import (
	"bufio"
	"bytes"
	"context"
	"database/sql"
	"fmt"
	"io"
	"net/http"
	"net/http/cookiejar"
	"net/http/httptest"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"

	"gorm.io/gorm"

	"github.com/pgsplit/pgsplit"
	"github.com/pgsplit/pgsplit/httpsession"
)

// readerDSN is set in a process that is only to serve pages.
const readerDSN = "PGSPLIT_INTEGRATION_READER_DSN"

type post struct {
	ID    int
	Title string
}

// gormPages answers GET /?title= with the number of posts of that title and who told, and POST with a redirect to that
// page at other.
func gormPages(db *gorm.DB, other string) http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("POST /", func(w http.ResponseWriter, r *http.Request) {
		title := r.FormValue("title")
		if err := db.WithContext(r.Context()).Create(&post{Title: title}).Error; err != nil {
			panic(err)
		}
		http.Redirect(w, r, other+"/?title="+title, http.StatusSeeOther)
	})
	mux.HandleFunc("GET /", func(w http.ResponseWriter, r *http.Request) {
		var page struct {
			Posts   int
			Replica bool
		}
		err := db.WithContext(r.Context()).Model(&post{}).Where("title = ?", r.FormValue("title")).
			Select("count(*) as posts, pg_is_in_recovery() as replica").Scan(&page).Error
		if err != nil {
			panic(err)
		}
		fmt.Fprintf(w, "%d %t", page.Posts, page.Replica)
	})
	return mux
}

// serveGORM serves them; close ends it.
func serveGORM(dsn, other string, config gorm.Config) (url string, closeAll func(), err error) {
	db, err := sql.Open("pgsplit", dsn)
	if err != nil {
		return "", nil, err
	}
	g, err := openGORM(db, config)
	if err != nil {
		db.Close()
		return "", nil, err
	}
	keyring, err := pgsplit.NewKeyring(bytes.Repeat([]byte{1}, 32)) // the same in every process
	if err != nil {
		db.Close()
		return "", nil, err
	}
	server := httptest.NewServer(httpsession.Middleware(keyring, httpsession.ReadOnlyMethods())(gormPages(g, other)))
	return server.URL, func() { server.Close(); db.Close() }, nil
}

// serveUntilInputEnds is what a process does that only serves.
func serveUntilInputEnds(dsn string) {
	url, closeAll, err := serveGORM(dsn, "", gorm.Config{})
	if err != nil {
		panic(err)
	}
	defer closeAll()
	fmt.Println(url)
	_, _ = io.Copy(io.Discard, os.Stdin)
}

// readerProcess serves the pages in a process of its own.
func readerProcess(t *testing.T, dsn string) string {
	t.Helper()
	self, err := os.Executable()
	must(t, err)
	command := exec.Command(self)
	command.Env = append(os.Environ(), readerDSN+"="+dsn)
	command.Stderr = os.Stderr
	input, err := command.StdinPipe()
	must(t, err)
	output, err := command.StdoutPipe()
	must(t, err)
	must(t, command.Start())
	t.Cleanup(func() {
		input.Close()
		if err := command.Wait(); err != nil {
			t.Error(err)
		}
	})
	url, err := bufio.NewReader(output).ReadString('\n')
	must(t, err)
	return strings.TrimSpace(url)
}

// However GORM writes, the page of another process shows the row: the primary's while replicas are paused, a replica's
// while they run.
func TestWhatGORMWroteIsSeenAfterARedirectToAnotherProcess(t *testing.T) {
	const rounds, tries = 100, 5
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Minute)
	defer cancel()
	c := startCluster(t, 2)
	must(t, execSQL(ctx, c.PrimaryURI(), "create table posts (id int generated always as identity primary key, title text)"))
	for i := range 2 {
		must(t, c.CatchUp(ctx, i))
	}
	dsn := strings.Replace(c.DSN(), "?", "?replica_max_wait=20ms&replica_timeout=20s&", 1)
	reader := readerProcess(t, dsn)
	title := 0
	for name, config := range map[string]gorm.Config{
		"in its transaction":       {},
		"autocommit":               {SkipDefaultTransaction: true},
		"with prepared statements": {PrepareStmt: true},
	} {
		t.Run(name, func(t *testing.T) {
			writer, closeAll, err := serveGORM(dsn, reader, config)
			must(t, err)
			defer closeAll()
			jar, err := cookiejar.New(nil)
			must(t, err)
			client := &http.Client{Jar: jar, Timeout: time.Minute}
			pages := func(rounds int) (onReplica int) {
				for range rounds {
					title++
					response, err := client.PostForm(writer+"/", map[string][]string{"title": {fmt.Sprint(title)}})
					must(t, err)
					page, err := io.ReadAll(response.Body)
					response.Body.Close()
					must(t, err)
					switch string(page) {
					case "1 true":
						onReplica++
					case "1 false":
					default:
						t.Fatalf("the page says %q", page)
					}
				}
				return onReplica
			}
			// A machine that stands still for a moment costs a batch its share, not every batch.
			for try := 1; pages(rounds) < rounds*99/100; try++ {
				if try == tries {
					t.Errorf("in none of %d batches did replicas answer 99 %% of the time", tries)
					break
				}
			}
			for i := range 2 {
				must(t, c.PauseReplay(ctx, i))
			}
			if n := pages(10); n != 0 {
				t.Errorf("%d pages of a paused replica", n)
			}
			for i := range 2 {
				must(t, c.ResumeReplay(ctx, i))
			}
		})
	}
}
