// Package debugpage is a web page about a pgsplit driver in a running program: the servers and how each of them is, how far
// the replicas lag and have lagged over the last minutes, where statements went and why, connections, errors, waits.
//
//	mux.Handle("/debug/pgsplit/", debugpage.Handler(db))
//
// The page is one document without scripts and without anything from elsewhere. The same as JSON comes with ?format=json, or
// to a request that accepts application/json; ?refresh=5 has the browser load the page again every five seconds.
//
// # Security
//
// Mount it where only those get that operate the program, as on an internal port next to net/http/pprof. It shows names,
// addresses, labels and texts of errors, and whoever loads it has every server asked once; it shows no password, and nobody
// can change anything with it.
//
// # What looking costs
//
// Nothing runs while nobody looks. A page, or JSON with ?health=1, calls [pgsplit.Connector.Health]: one new connection to
// each server, at most once a second however many look, for replica_timeout or three seconds at most. Each such look is kept
// as one sample, for ten minutes, and the graphs are made of these: they show nothing of the time when nobody looked. JSON
// without health asks no server and keeps nothing.
//
// # JSON
//
// Names are stable, durations are seconds, what is not known is left out:
//
//	time      when
//	stats     pgsplit.Stats with lower-case names: reasons by name, captures, lost_tokens, .., servers in their order
//	database  sql.DBStats of Handler's db
//	health    pgsplit.Health, with the causes of states; with ?health=1 alone
//	samples   the looks of the last ten minutes, oldest first: state, lag_bytes and staleness_seconds of each server
package debugpage

import (
	"bytes"
	"database/sql"
	"encoding/json"
	"mime"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/pgsplit/pgsplit"
)

// Handler returns the page about the driver behind db, wrapped or not. It looks for it when the first request comes, and
// answers that with 503 if it finds none.
//
// The page is at the path that it is mounted at, and nothing below it.
func Handler(db *sql.DB) http.Handler {
	return &handler{db: db, find: func() (*pgsplit.Connector, error) { return pgsplit.FromDB(db) }}
}

// New is Handler for a program that has the Connector at hand. What database/sql counts is not on its page.
func New(c *pgsplit.Connector) http.Handler {
	return &handler{find: func() (*pgsplit.Connector, error) { return c, nil }}
}

type handler struct {
	db      *sql.DB // nil: not told
	find    func() (*pgsplit.Connector, error)
	history history

	mu    sync.Mutex
	found *pgsplit.Connector // guarded by mu
}

// patience bounds what one request waits for servers, in case replica_timeout is longer.
const patience = 3 * time.Second

// connector looks for the connector until it is found. Behind a wrapper that takes one of the sql.DB's connections, and the
// page is for the time when all are in use, too.
func (h *handler) connector() (*pgsplit.Connector, error) {
	h.mu.Lock()
	found := h.found
	h.mu.Unlock()
	if found != nil {
		return found, nil
	}
	found, err := h.find()
	if err != nil {
		return nil, err
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	h.found = found
	return found, nil
}

func (h *handler) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	switch {
	case !atMount(r):
		http.NotFound(w, r)
		return
	case r.Method != http.MethodGet && r.Method != http.MethodHead:
		w.Header().Set("Allow", "GET, HEAD")
		http.Error(w, "GET or HEAD", http.StatusMethodNotAllowed)
		return
	}
	c, err := h.connector()
	if err != nil {
		http.Error(w, err.Error(), http.StatusServiceUnavailable)
		return
	}
	ctx := r.Context()
	var body bytes.Buffer
	contentType := "text/html; charset=utf-8"
	if wantsJSON(r) {
		contentType = "application/json"
		encoder := json.NewEncoder(&body)
		encoder.SetIndent("", "  ")
		err = encoder.Encode(h.report(ctx, c, parameter(r, "health") == "1"))
	} else {
		err = page.Execute(&body, h.view(ctx, c, refresh(r)))
	}
	if err != nil {
		http.Error(w, err.Error(), http.StatusInternalServerError)
		return
	}
	header := w.Header()
	header.Set("Content-Type", contentType)
	header.Set("Content-Security-Policy", policy)
	header.Set("X-Content-Type-Options", "nosniff")
	header.Set("Referrer-Policy", "no-referrer")
	header.Set("Cache-Control", "no-store")
	header.Set("Vary", "Accept")
	_, _ = w.Write(body.Bytes()) // whoever asked may have gone
}

// atMount tells whether the request is for the page and not for something below it. Only a pattern of http.ServeMux says
// where the page is; what another router sends here is taken to be meant.
func atMount(r *http.Request) bool {
	_, path, found := strings.Cut(r.Pattern, "/")
	if !found || strings.ContainsAny(path, "{*:") {
		return true
	}
	stripped := r.URL.Path == "" || r.URL.Path == "/" // http.StripPrefix leaves that
	return stripped || r.URL.Path == "/"+path
}

// parameter is one of the address. FormValue would read a body as well, even that of a GET, onto the disk if it is long.
func parameter(r *http.Request, name string) string { return r.URL.Query().Get(name) }

// wantsJSON tells whether JSON was asked for by name, or is what the request would rather have.
func wantsJSON(r *http.Request) bool {
	if format := parameter(r, "format"); format != "" {
		return format == "json"
	}
	for _, accepted := range strings.Split(r.Header.Get("Accept"), ",") {
		switch kind, _, _ := mime.ParseMediaType(accepted); kind {
		case "application/json":
			return true
		case "text/html", "*/*":
			return false
		}
	}
	return false
}

// refresh is after how many seconds the page is to be loaded again; 0: not by itself.
func refresh(r *http.Request) int {
	seconds, err := strconv.Atoi(parameter(r, "refresh"))
	if err != nil || seconds < 1 || seconds > 3600 {
		return 0
	}
	return seconds
}
