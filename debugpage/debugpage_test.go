package debugpage_test

import (
	"bytes"
	"context"
	"database/sql"
	"database/sql/driver"
	"encoding/json"
	"encoding/xml"
	"errors"
	"io"
	"maps"
	"net"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"testing"

	"go.uber.org/goleak"

	"github.com/pgsplit/pgsplit"
	"github.com/pgsplit/pgsplit/debugpage"
)

// All tests of the package together leave no goroutine behind.
func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const hostile = `"><script>alert('x')</script>&amp;{{.}}`

// unreachable is a config of servers that nobody reaches, each with a name, label and error meant to break a page.
func unreachable(t *testing.T) *pgsplit.Config {
	t.Helper()
	config, err := pgsplit.ParseDSN("postgres://app:t0p-secret@db1/shop postgres://app:t0p-secret@db2/shop postgres://app:t0p-secret@db3/shop")
	if err != nil {
		t.Fatal(err)
	}
	dial := func(context.Context, string, string) (net.Conn, error) {
		return nil, errors.New("no way to <b>there</b> with t0p-secret: " + hostile)
	}
	lookup := func(_ context.Context, host string) ([]string, error) { return []string{"127.0.0.1"}, nil }
	config.Primary.ConnConfig.DialFunc, config.Primary.ConnConfig.LookupFunc = dial, lookup
	for i := range config.Replicas {
		r := &config.Replicas[i]
		r.Pool.ConnConfig.DialFunc, r.Pool.ConnConfig.LookupFunc = dial, lookup
		r.Name, r.Label = "replica"+hostile+string(rune('0'+i)), "label"+hostile
	}
	return config
}

func openDB(t *testing.T, config *pgsplit.Config) *sql.DB {
	t.Helper()
	db, err := pgsplit.OpenDB(config)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := db.Close(); err != nil {
			t.Error(err)
		}
	})
	return db
}

func get(h http.Handler, target string, header ...string) *httptest.ResponseRecorder {
	r := httptest.NewRequest(http.MethodGet, target, nil)
	for i := 0; i < len(header); i += 2 {
		r.Header.Set(header[i], header[i+1])
	}
	w := httptest.NewRecorder()
	h.ServeHTTP(w, r)
	return w
}

// elements parses the page strictly, which finds tags that are left open and text that was not escaped, and returns the
// names of all elements and attributes and the page's text.
func elements(t *testing.T, page []byte) (names map[string]int, text string) {
	t.Helper()
	names = map[string]int{}
	var all strings.Builder
	d := xml.NewDecoder(bytes.NewReader(page))
	d.Entity = xml.HTMLEntity
	for {
		token, err := d.Token()
		if errors.Is(err, io.EOF) {
			return names, all.String()
		}
		if err != nil {
			t.Fatalf("%v in\n%s", err, page)
		}
		switch token := token.(type) {
		case xml.StartElement:
			names[token.Name.Local]++
			for _, a := range token.Attr {
				names["@"+a.Name.Local]++
			}
		case xml.CharData:
			all.Write(token)
		}
	}
}

func TestWhatServersAreCalledAndSayIsTextOnThePageAndNoPasswordIs(t *testing.T) {
	w := get(debugpage.Handler(openDB(t, unreachable(t))), "/")
	names, text := elements(t, w.Body.Bytes())
	for name := range names {
		if name == "script" || name == "b" || name == "@style" || strings.HasPrefix(name, "@on") || name == "@src" {
			t.Errorf("the page has %s", name)
		}
	}
	for _, want := range []string{"replica" + hostile + "0", "replica" + hostile + "1", "label" + hostile, "no way to <b>there</b> with xxxxx: " + hostile,
		"db1:5432", "down", "no_primary"} {
		if !strings.Contains(text, want) {
			t.Errorf("the page does not say %q", want)
		}
	}
	all := w.Body.String() + get(debugpage.Handler(openDB(t, unreachable(t))), "/?format=json&health=1").Body.String()
	if strings.Contains(all, "t0p-secret") {
		t.Error("a password is shown")
	}
}

func TestThePageAllowsItsStyleSheetAndNothingElse(t *testing.T) {
	header := get(debugpage.Handler(openDB(t, unreachable(t))), "/").Header()
	policy := header.Get("Content-Security-Policy")
	if !strings.HasPrefix(policy, "default-src 'none'; style-src 'sha256-") || strings.Contains(policy, "unsafe") ||
		!strings.Contains(policy, "frame-ancestors 'none'") {
		t.Errorf("policy %s", policy)
	}
	for name, want := range map[string]string{"Content-Type": "text/html; charset=utf-8", "Cache-Control": "no-store",
		"X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer"} {
		if got := header.Get(name); got != want {
			t.Errorf("%s is %q", name, got)
		}
	}
}

func TestJSONHasStableNames(t *testing.T) {
	db := openDB(t, unreachable(t))
	if err := db.PingContext(t.Context()); err == nil {
		t.Fatal("the primary is reached")
	}
	h := debugpage.Handler(db)
	read := func(target string, header ...string) map[string]any {
		t.Helper()
		w := get(h, target, header...)
		var report map[string]any
		if err := json.Unmarshal(w.Body.Bytes(), &report); err != nil || w.Header().Get("Content-Type") != "application/json" {
			t.Fatalf("%v: %s", err, w.Body)
		}
		return report
	}
	report := read("/", "Accept", "application/json")
	if got := slices.Sorted(maps.Keys(report)); !slices.Equal(got, []string{"database", "samples", "stats", "time"}) {
		t.Errorf("top level: %q", got)
	}
	if samples := report["samples"].([]any); len(samples) != 0 {
		t.Errorf("who asked for no health had servers asked: %v", samples)
	}
	stats := report["stats"].(map[string]any)
	if got := slices.Sorted(maps.Keys(stats)); !slices.Equal(got,
		[]string{"capture_errors", "captures", "foreign_tokens", "lost_tokens", "reasons", "servers"}) {
		t.Errorf("stats: %q", got)
	}
	if n := stats["reasons"].(map[string]any)["no_primary"]; n != 1.0 {
		t.Errorf("no_primary is %v in %v", n, stats["reasons"])
	}
	servers := stats["servers"].([]any)
	if got := slices.Sorted(maps.Keys(servers[0].(map[string]any))); len(servers) != 3 || !slices.Equal(got, []string{"address", "checks", "errors",
		"failures", "idle", "in_use", "moved_on", "name", "open", "opened", "probes", "refusals", "role", "setbacks", "since",
		"staleness_seconds", "state", "statements", "wait_seconds", "waits"}) {
		t.Errorf("%d servers, the first with %q", len(servers), got)
	}
	report = read("/?health=1&format=json")
	if health := report["health"].(map[string]any); health["status"] != "down" || len(report["samples"].([]any)) != 1 {
		t.Errorf("health %v, samples %v", health, report["samples"])
	}
	sample := report["samples"].([]any)[0].(map[string]any)["servers"].([]any)[1].(map[string]any)
	if sample["reachable"] != false || sample["state"] != "down" || sample["lag_bytes"] != nil {
		t.Errorf("sample %v", sample)
	}
}

func TestABrowserGetsThePageAndAProgramJSON(t *testing.T) {
	h := debugpage.Handler(openDB(t, unreachable(t)))
	for _, test := range []struct {
		target, accept string
		json           bool
	}{
		{"/", "", false},
		{"/", "*/*", false},
		{"/", "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8", false},
		{"/", "text/html, application/json", false},
		{"/", "application/json", true},
		{"/", "application/json; charset=utf-8, */*;q=0.1", true},
		{"/?format=json", "text/html", true},
		{"/?format=html", "application/json", false},
	} {
		w := get(h, test.target, "Accept", test.accept)
		if got := w.Header().Get("Content-Type") == "application/json"; got != test.json {
			t.Errorf("%s, Accept: %s: %s", test.target, test.accept, w.Header().Get("Content-Type"))
		}
	}
}

func TestThePageReloadsOnlyIfAskedTo(t *testing.T) {
	h := debugpage.Handler(openDB(t, unreachable(t)))
	for query, want := range map[string]bool{"": false, "?refresh=5": true, "?refresh=0": false, "?refresh=-1": false,
		"?refresh=5;url=//elsewhere": false, "?refresh=99999": false, "?refresh=x": false} {
		body := get(h, "/"+query).Body.String()
		if got := strings.Contains(body, `http-equiv="refresh" content="5"`); got != want || strings.Contains(body, "elsewhere") {
			t.Errorf("%q reloads: %v", query, got)
		}
	}
}

func TestThePageIsWhereItIsMountedAndNotBelow(t *testing.T) {
	h := debugpage.Handler(openDB(t, unreachable(t)))
	mux := http.NewServeMux()
	mux.Handle("/debug/pgsplit/", h)
	mux.Handle("GET internal.example/one", h)
	mux.Handle("/stripped/", http.StripPrefix("/stripped", h))
	mux.Handle("/any/{name}/", h)
	for target, want := range map[string]int{
		"/debug/pgsplit/": 200, "/debug/pgsplit/x": 404, "/debug/pgsplit/x/": 404, "/debug/pgsplit": 307,
		"http://internal.example/one": 200, "/stripped/": 200, "/stripped/x": 404, "/any/x/": 200,
	} {
		if got := get(mux, target).Code; got != want {
			t.Errorf("%s: %d, want %d", target, got, want)
		}
	}
	if got := get(h, "/behind/another/router").Code; got != 200 {
		t.Errorf("without a pattern: %d", got)
	}
}

func TestOnlyGetAndHead(t *testing.T) {
	h := debugpage.Handler(openDB(t, unreachable(t)))
	for method, want := range map[string]int{"GET": 200, "HEAD": 200, "POST": 405, "PUT": 405, "DELETE": 405, "OPTIONS": 405} {
		w := httptest.NewRecorder()
		h.ServeHTTP(w, httptest.NewRequest(method, "/", nil))
		if w.Code != want || want == 405 && w.Header().Get("Allow") != "GET, HEAD" {
			t.Errorf("%s: %d, Allow: %s", method, w.Code, w.Header().Get("Allow"))
		}
	}
}

// unread is a body that nobody may wait for, or store.
type unread struct{ t *testing.T }

func (u unread) Read([]byte) (int, error) {
	u.t.Error("the body of a GET is read")
	return 0, io.EOF
}

func TestTheBodyOfARequestIsNotRead(t *testing.T) {
	r := httptest.NewRequest(http.MethodGet, "/?format=json", unread{t})
	r.Header.Set("Content-Type", "multipart/form-data; boundary=x")
	w := httptest.NewRecorder()
	debugpage.Handler(openDB(t, unreachable(t))).ServeHTTP(w, r)
	if got := w.Header().Get("Content-Type"); w.Code != http.StatusOK || got != "application/json" {
		t.Errorf("%d %s", w.Code, got)
	}
}

// around is the connector of a library that goes around this driver.
type around struct{ driver.Connector }

func (around) Driver() driver.Driver { return nil }

func TestThePageIsThereWhenAllConnectionsOfAWrappedDatabaseAreInUse(t *testing.T) {
	c, err := pgsplit.NewConnector(unreachable(t))
	if err != nil {
		t.Fatal(err)
	}
	db := sql.OpenDB(around{c})
	defer db.Close()
	defer c.Close()
	db.SetMaxOpenConns(1)
	h := debugpage.Handler(db)
	if w := get(h, "/"); w.Code != http.StatusOK {
		t.Fatalf("%d %s", w.Code, w.Body)
	}
	conn, err := db.Conn(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	if w := get(h, "/"); w.Code != http.StatusOK {
		t.Errorf("%d %s", w.Code, w.Body)
	}
}

type otherConnector struct{}

func (otherConnector) Connect(context.Context) (driver.Conn, error) { return nil, errors.New("no") }
func (otherConnector) Driver() driver.Driver                        { return nil }

func TestADatabaseOfAnotherDriverIsAnErrorOfTheRequest(t *testing.T) {
	db := sql.OpenDB(otherConnector{})
	defer db.Close()
	w := get(debugpage.Handler(db), "/")
	if w.Code != http.StatusServiceUnavailable || !strings.Contains(w.Body.String(), "no connector found") {
		t.Errorf("%d %s", w.Code, w.Body)
	}
}

func TestAConnectorIsEnough(t *testing.T) {
	c, err := pgsplit.NewConnector(unreachable(t))
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	w := get(debugpage.New(c), "/")
	if _, text := elements(t, w.Body.Bytes()); w.Code != 200 || !strings.Contains(text, "db1:5432") || strings.Contains(text, "Waits for sql.DB") {
		t.Errorf("%d %s", w.Code, w.Body)
	}
}
