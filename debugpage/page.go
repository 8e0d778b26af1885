package debugpage

import (
	"cmp"
	"context"
	"crypto/sha256"
	"database/sql"
	_ "embed" // for the page's text
	"encoding/base64"
	"fmt"
	"html/template"
	"slices"
	"strings"
	"time"

	"github.com/pgsplit/pgsplit"
)

//go:embed page.html
var pageText string

//go:embed style.css
var style string

var page = template.Must(template.New("page").Parse(pageText))

// policy allows the page its own style sheet, which is inside it, and nothing else.
var policy = func() string {
	hash := sha256.Sum256([]byte(style))
	return "default-src 'none'; style-src 'sha256-" + base64.StdEncoding.EncodeToString(hash[:]) +
		"'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
}()

// because says in few words what each reason means.
var because = map[string]string{
	"unhinted":         "primary: nothing was said",
	"primary_hint":     "primary: Primary was said",
	"in_tx":            "inside a transaction, or rows are still open",
	"held":             "primary: the held connection was used unhinted before",
	"session":          "primary: the session's writes may not be elsewhere yet",
	"replica":          "a replica: no floor was asked for",
	"floor_known":      "a replica that was known to have the floor",
	"floor_checked":    "a replica that was asked and had the floor",
	"floor_waited":     "a replica that reached the floor in time",
	"isolation":        "primary: no standby gives that isolation",
	"no_replicas":      "primary: no replica is configured",
	"replicas_behind":  "primary: no replica was proven to have the floor",
	"replicas_down":    "primary: no replica let the read in",
	"moved_on":         "primary: replicas began the read and could not",
	"primary_down":     "a replica: no primary accepts",
	"no_primary":       "nowhere: no primary accepted",
	"no_replica":       "nowhere: no replica let the read in",
	"no_fresh_replica": "nowhere: no server had the floor",
}

// view is what the page shows.
type view struct {
	Style    template.CSS
	Now      time.Time
	Refresh  int
	Status   string
	Readable bool
	Writable bool
	Primary  serverView
	Replicas []serverView
	Servers  []serverView
	Total    uint64
	Rate     string // of all decisions
	Over     string // the time that rates are over; empty: there is none yet
	Reasons  []reasonView
	Unused   []string
	Stats    pgsplit.Stats
	Database *sql.DBStats
	Waited   string // of Database
}

type reasonView struct {
	Name, Because string
	Count         uint64
	Rate          string
	Share         float64 // of all decisions, in percent
}

type serverView struct {
	pgsplit.ServerStats
	ID        string
	Health    pgsplit.ServerHealth
	Tone      string // good, warn or bad
	Told      string // the state, or that it does not answer though nothing has come of that yet
	Since     time.Time
	Ago       string
	Cause     string
	Error     string // unless it says what Cause says
	Warning   string
	Lag       string // of a replica
	Staleness string
	RoundTrip string
	WaitTime  string // on average
	Errors    []count
	Graphs    []graph
}

type count struct {
	Name  string
	Count uint64
}

func (h *handler) view(ctx context.Context, c *pgsplit.Connector, refresh int) view {
	health := h.history.look(ctx, c)
	stats, now := c.Stats(), time.Now()
	samples := h.history.since(now)
	v := view{Style: template.CSS(style), Now: now.UTC(), Refresh: refresh, Stats: stats,
		Status: health.Status, Readable: health.Readable, Writable: health.Writable}
	for i, s := range stats.Servers {
		v.Servers = append(v.Servers, viewServer(i, s, health.Servers[i], samples, now))
	}
	v.Primary, v.Replicas = v.Servers[0], v.Servers[1:]
	v.countReasons(stats.Reasons, samples, now)
	if h.db != nil {
		database := h.db.Stats()
		v.Database, v.Waited = &database, brief(database.WaitDuration)
	}
	return v
}

func (v *view) countReasons(reasons map[string]uint64, samples []sample, now time.Time) {
	v.Total = sum(reasons)
	base, known := lastMinute(samples, now)
	elapsed := now.Sub(base.at)
	rate := func(n, before uint64) string {
		if !known {
			return "–"
		}
		return fmt.Sprintf("%.1f", float64(n-before)/elapsed.Seconds())
	}
	if known {
		v.Over = brief(elapsed)
	}
	v.Rate = rate(v.Total, sum(base.reasons))
	for name, n := range reasons {
		if n == 0 {
			v.Unused = append(v.Unused, name)
			continue
		}
		v.Reasons = append(v.Reasons, reasonView{Name: name, Because: because[name], Count: n,
			Rate: rate(n, base.reasons[name]), Share: tenth(100 * float64(n) / float64(v.Total))})
	}
	slices.Sort(v.Unused)
	slices.SortFunc(v.Reasons, func(a, b reasonView) int {
		return cmp.Or(cmp.Compare(b.Count, a.Count), strings.Compare(a.Name, b.Name))
	})
}

func viewServer(i int, stats pgsplit.ServerStats, health pgsplit.ServerHealth, samples []sample, now time.Time) serverView {
	v := serverView{ServerStats: stats, ID: fmt.Sprintf("server%d", i), Health: health, Told: health.State, Cause: short(health.Cause),
		Lag: "not known", Staleness: brief(health.Staleness), RoundTrip: "–", WaitTime: "–"}
	v.Tone = map[string]string{"healthy": "good", "down": "bad"}[health.State]
	if v.Tone == "" {
		v.Tone = "warn"
	}
	if !health.Reachable && health.State == "healthy" {
		v.Told, v.Tone = "no answer", "warn"
	}
	if health.Error != health.Cause {
		v.Error = short(health.Error)
	}
	if health.Seen != "" && health.Seen != health.Role {
		v.Warning = fmt.Sprintf("configured as %s, but a %s answers", health.Role, health.Seen)
		v.Tone = "bad"
	}
	if !health.Since.IsZero() {
		v.Since, v.Ago = health.Since.UTC(), brief(max(now.Sub(health.Since), 0))
	}
	if health.RoundTrip > 0 {
		v.RoundTrip = brief(health.RoundTrip)
	}
	if stats.Waits > 0 {
		v.WaitTime = brief(stats.WaitTime / time.Duration(stats.Waits))
	}
	for name, n := range stats.Errors {
		if n > 0 {
			v.Errors = append(v.Errors, count{name, n})
		}
	}
	slices.SortFunc(v.Errors, func(a, b count) int {
		return cmp.Or(cmp.Compare(b.Count, a.Count), strings.Compare(a.Name, b.Name))
	})
	if stats.Role != "replica" {
		return v
	}
	if health.LagBytes >= 0 {
		v.Lag = bytesText(float64(health.LagBytes))
	}
	w := window(samples, now)
	v.Graphs = []graph{
		draw("Behind the primary", series(samples, i, func(h pgsplit.ServerHealth) float64 { return float64(h.LagBytes) }),
			now, w, 1024, bytesText),
		draw("Staleness at most", series(samples, i, func(h pgsplit.ServerHealth) float64 { return h.Staleness.Seconds() }),
			now, w, 1, secondsText),
	}
	return v
}

// short keeps texts of errors, which may quote whatever a server said, from filling the page.
func short(s string) string {
	const most = 400
	if runes := []rune(s); len(runes) > most {
		return string(runes[:most]) + " …"
	}
	return s
}
