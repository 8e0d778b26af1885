package main

import (
	"context"
	"crypto/rand"
	"crypto/sha256"
	_ "embed" // for the page's text
	"encoding/base64"
	"encoding/hex"
	"html/template"
	"io"
	"log"
	"net"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/pgsplit/pgsplit"
	"github.com/pgsplit/pgsplit/debugpage"
	"github.com/pgsplit/pgsplit/httpsession"
	"github.com/pgsplit/pgsplit/pgsplittest"
)

// defaultHTTP is any free port, for this machine alone.
const defaultHTTP = "127.0.0.1:0"

//go:embed demo_page.html
var demoPageText string

//go:embed demo_style.css
var demoStyle string

var demoPage = template.Must(template.New("demo").Parse(demoPageText))

// demoPolicy allows the page its own style sheet and forms, and nothing else.
var demoPolicy = func() string {
	hash := sha256.Sum256([]byte(demoStyle))
	return "default-src 'none'; style-src 'sha256-" + base64.StdEncoding.EncodeToString(hash[:]) +
		"'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
}()

// control pauses and resumes the replicas: for the show, until somebody does it on the page.
type control struct {
	replicas []*pgsplittest.Server
	byHand   chan struct{} // closed once the page has them

	mu     sync.Mutex
	paused []bool // guarded by mu, which is held while a server changes
}

func newControl(replicas []*pgsplittest.Server) *control {
	return &control{replicas: replicas, byHand: make(chan struct{}), paused: make([]bool, len(replicas))}
}

func (c *control) handedOver() bool {
	select {
	case <-c.byHand:
		return true
	default:
		return false
	}
}

// show pauses or resumes a replica unless the page has them.
func (c *control) show(ctx context.Context, i int, pause bool) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.handedOver() {
		return nil
	}
	return c.set(ctx, i, pause)
}

// page pauses or resumes a replica, and the show is over.
func (c *control) page(ctx context.Context, i int, pause bool) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if !c.handedOver() {
		close(c.byHand)
	}
	return c.set(ctx, i, pause)
}

// set changes the replica; mu is held.
func (c *control) set(ctx context.Context, i int, pause bool) (err error) {
	if pause {
		err = c.replicas[i].PauseReplay(ctx)
	} else {
		err = c.replicas[i].ResumeReplay(ctx)
	}
	if err == nil {
		c.paused[i] = pause
	}
	return err
}

// pages is the demo's web site.
type pages struct {
	*show
	mu      sync.Mutex
	written int // notes; guarded by mu
}

// handler is all that the demo serves.
func (s *show) handler() http.Handler {
	p := &pages{show: s}
	key := make([]byte, 36)
	_, _ = rand.Read(key) // it never fails
	keyring, err := pgsplit.NewKeyring(key[:32])
	if err != nil {
		panic(err)
	}
	// A name of its own: cookies know no ports, and an earlier demo's have another key.
	session := httpsession.Middleware(keyring, httpsession.ReadOnlyMethods(), httpsession.Cookie(func(c *http.Cookie) {
		c.Name = "pgsplit_demo_" + hex.EncodeToString(key[32:]) + "_"
		c.MaxAge = 60 * 60
	}))
	mux := http.NewServeMux()
	mux.Handle("GET /{$}", session(http.HandlerFunc(p.notes)))
	mux.Handle("POST /notes", session(http.HandlerFunc(p.write)))
	// Outside the middleware, nobody looks at the cookie.
	mux.HandleFunc("GET /stranger", p.notes)
	mux.HandleFunc("POST /replicas/{number}", p.replica)
	mux.Handle("/debug/pgsplit/", debugpage.Handler(s.db))
	return http.NewCrossOriginProtection().Handler(mux)
}

// serve serves the pages until stop is called.
func (s *show) serve(ctx context.Context, listener net.Listener) (stop func()) {
	ctx, cancel := context.WithCancel(ctx)
	server := &http.Server{Handler: s.handler(), ReadHeaderTimeout: 10 * time.Second, ErrorLog: log.New(io.Discard, "", 0),
		BaseContext: func(net.Listener) context.Context { return ctx }}
	served := make(chan struct{})
	go func() {
		defer close(served)
		_ = server.Serve(listener)
	}()
	return func() {
		cancel()
		// A browser may have connected without a request yet.
		soon, done := context.WithTimeout(context.Background(), 2*time.Second)
		defer done()
		if server.Shutdown(soon) != nil {
			_ = server.Close()
		}
		<-served
	}
}

type replicaView struct {
	Number int
	Name   string
	Paused bool
}

// notesView is what the page of notes shows.
type notesView struct {
	Style    template.CSS
	Path     string // of the page itself
	Stranger bool
	Replicas []replicaView
	Server   string
	Reason   string
	Because  string
	Floor    string   // empty: none
	Position string   // that a replica has replayed
	Notes    []string // the newest first
	Count    int
	Written  int
}

// because is for readers of the page, who have just written or are strangers.
var because = map[pgsplit.Reason]string{
	pgsplit.ReasonReplica:        "nothing that must be seen was said, so any replica will do",
	pgsplit.ReasonFloorKnown:     "this replica is known to have replayed what the cookie asks for",
	pgsplit.ReasonFloorChecked:   "this replica was asked, and has replayed what the cookie asks for",
	pgsplit.ReasonFloorWaited:    "this replica has replayed what the cookie asks for after a short wait",
	pgsplit.ReasonReplicasBehind: "no replica has replayed what the cookie asks for",
	pgsplit.ReasonSession:        "a write of this session may not be on any replica yet",
	pgsplit.ReasonReplicasDown:   "no replica answers",
}

// notes lists the notes, read from whichever server may answer.
func (p *pages) notes(w http.ResponseWriter, r *http.Request) {
	p.mu.Lock()
	v := notesView{Style: template.CSS(demoStyle), Path: r.URL.Path, Stranger: r.URL.Path == "/stranger", Written: p.written}
	p.mu.Unlock()
	p.control.mu.Lock()
	for i, paused := range p.control.paused {
		v.Replicas = append(v.Replicas, replicaView{i + 1, replicaName(i), paused})
	}
	p.control.mu.Unlock()
	var d pgsplit.Decision
	rows, err := p.db.QueryContext(pgsplit.ReadOnly(noting(r.Context(), &d)),
		"select body, count(*) over () from notes order by id desc limit 20")
	if err != nil {
		http.Error(w, err.Error(), http.StatusInternalServerError)
		return
	}
	defer rows.Close()
	for rows.Next() {
		var note string
		if err = rows.Scan(&note, &v.Count); err != nil {
			break
		}
		v.Notes = append(v.Notes, note)
	}
	if err == nil {
		err = rows.Err()
	}
	if err != nil {
		http.Error(w, err.Error(), http.StatusInternalServerError)
		return
	}
	v.Server, v.Reason, v.Because = serverName(d), d.Reason.String(), because[d.Reason]
	if d.Floor != 0 {
		v.Floor = d.Floor.String()
	}
	if d.Position != 0 {
		v.Position = d.Position.String()
	}
	v.Written = max(v.Written, v.Count)
	header := w.Header()
	header.Set("Content-Type", "text/html; charset=utf-8")
	header.Set("Content-Security-Policy", demoPolicy)
	header.Set("X-Content-Type-Options", "nosniff")
	header.Set("Cache-Control", "no-store")
	_ = demoPage.Execute(w, v) // whoever asked may have gone
}

// longestNote is in characters.
const longestNote = 200

// write adds a note; the list that it leads to shows it.
func (p *pages) write(w http.ResponseWriter, r *http.Request) {
	r.Body = http.MaxBytesReader(w, r.Body, 64<<10)
	note := strings.TrimSpace(strings.ReplaceAll(strings.ToValidUTF8(r.PostFormValue("note"), ""), "\x00", ""))
	if runes := []rune(note); len(runes) > longestNote {
		note = string(runes[:longestNote])
	}
	if note != "" {
		if _, err := p.db.ExecContext(r.Context(), "insert into notes (body) values ($1)", note); err != nil {
			http.Error(w, err.Error(), http.StatusInternalServerError)
			return
		}
		p.mu.Lock()
		p.written++
		p.mu.Unlock()
	}
	http.Redirect(w, r, "/", http.StatusSeeOther)
}

// replica pauses or resumes one, and goes back to the list.
func (p *pages) replica(w http.ResponseWriter, r *http.Request) {
	r.Body = http.MaxBytesReader(w, r.Body, 64<<10)
	number, err := strconv.Atoi(r.PathValue("number"))
	if err != nil || number < 1 || number > len(p.control.replicas) {
		http.NotFound(w, r)
		return
	}
	do := r.PostFormValue("do")
	if do != "pause" && do != "resume" {
		http.Error(w, "do is pause or resume", http.StatusBadRequest)
		return
	}
	if err := p.control.page(r.Context(), number-1, do == "pause"); err != nil {
		http.Error(w, err.Error(), http.StatusInternalServerError)
		return
	}
	back := "/"
	if r.PostFormValue("back") == "/stranger" {
		back = "/stranger"
	}
	http.Redirect(w, r, back, http.StatusSeeOther)
}
