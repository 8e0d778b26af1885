package main

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/pgsplit/pgsplit"
)

// The exit statuses of check.
const (
	statusFine     = 0
	statusWarnings = 1
	statusErrors   = 2 // bad usage and an unusable DSN too
)

// lagWait is how long check watches a replica that is behind.
const lagWait = 2 * time.Second

// report is what check prints.
type report struct {
	Status   string    `json:"status"` // "fine", "warnings" or "errors"
	Servers  []server  `json:"servers"`
	Findings []finding `json:"findings"`
}

// check asks every server once and returns the exit status.
func check(ctx context.Context, out io.Writer, dsn []string, asJSON bool, timeout time.Duration) int {
	r := report{Servers: []server{}}
	if config, err := configOf(dsn); err != nil {
		r.Findings = []finding{unusable(err)}
	} else {
		s := newSurvey(config, timeout, min(lagWait, timeout))
		r.Servers = s.look(ctx)
		s.close()
		r.Findings = diagnose(r.Servers)
	}
	status := exitStatus(r.Findings)
	r.Status = []string{"fine", "warnings", "errors"}[status]
	if asJSON {
		encoder := json.NewEncoder(out)
		encoder.SetIndent("", "  ")
		encoder.SetEscapeHTML(false)
		_ = encoder.Encode(r) // what cannot be printed cannot be reported either
		return status
	}
	_, _ = io.WriteString(out, r.text(terminalWidth()))
	return status
}

// unusable is the finding of a DSN that means nothing. The error quotes nothing of it.
func unusable(err error) finding {
	message := strings.TrimPrefix(err.Error(), pgsplit.ErrConfig.Error()+": ")
	if !strings.HasSuffix(message, "?") { // as in "did you mean .."
		message += "."
	}
	f := finding{Name: "unusable-dsn", Severity: severityError, Message: message,
		Remedy: "The DSN is described at ParseDSN, the environment at ConfigFromEnv."}
	if strings.Contains(f.Message, "target_session_attrs") {
		f.Name = "target-session-attrs-inherited"
		f.Remedy = "Leave target_session_attrs out of the DSN and the environment; the driver asks for what it needs."
	}
	return f
}

func exitStatus(findings []finding) int {
	status := statusFine
	for _, f := range findings {
		status = max(status, statusErrors-f.Severity.rank())
	}
	return status
}

// terminalWidth is what the shell says, or 100.
func terminalWidth() int {
	if n, err := strconv.Atoi(os.Getenv("COLUMNS")); err == nil && n >= 40 {
		return n
	}
	return 100
}

// text is the report for people, within width columns as far as names let it.
func (r *report) text(width int) string {
	var b strings.Builder
	if rows := r.rows(); len(rows) > 0 {
		if table := drawTable(rows); tableWidth(rows) <= width {
			b.WriteString(table)
		} else {
			b.WriteString(drawBlocks(rows))
		}
		if systems := r.systems(); len(systems) == 1 {
			fmt.Fprintf(&b, "system identifier of all that answered: %s\n", systems[0])
		}
		b.WriteString(wrap(r.legend(), "", width))
		b.WriteString("\n")
	}
	for _, f := range grouped(r.Findings) {
		head := string(f.Severity) + "  " + f.Name
		if f.Server != "" {
			head += ": " + f.Server
		}
		fmt.Fprintf(&b, "%s\n", head)
		b.WriteString(wrap(f.Message, "  ", width))
		if f.Remedy != "" {
			b.WriteString(wrap(f.Remedy, "  -> ", width))
		}
	}
	if len(r.Findings) > 0 {
		b.WriteString("\n")
	}
	b.WriteString(r.summary() + "\n")
	return b.String()
}

// grouped says once what holds for several servers.
func grouped(findings []finding) []finding {
	var groups []finding
	for _, f := range findings {
		i := slices.IndexFunc(groups, func(g finding) bool {
			return g.Name == f.Name && g.Severity == f.Severity && g.Message == f.Message && g.Remedy == f.Remedy
		})
		if i < 0 {
			groups = append(groups, f)
		} else {
			groups[i].Server += ", " + f.Server
		}
	}
	return groups
}

func (r *report) summary() string {
	count := map[severity]int{}
	for _, f := range r.Findings {
		count[f.Severity]++
	}
	var parts []string
	for _, s := range []severity{severityError, severityWarning, severityNote} {
		switch n := count[s]; n {
		case 0:
		case 1:
			parts = append(parts, "1 "+string(s))
		default:
			parts = append(parts, fmt.Sprintf("%d %ss", n, s))
		}
	}
	if len(parts) == 0 {
		return "Nothing found."
	}
	return strings.Join(parts, ", ") + "."
}

// columns head the table.
var columns = []string{"server", "role", "version", "system identifier", "timeline", "position", "behind", "read only",
	"pooler", "rights"}

// rows has one row for each instance, and for each address without one. Where all share a system identifier it is not
// repeated, which is what makes the table fit.
func (r *report) rows() [][]string {
	if len(r.Servers) == 0 {
		return nil
	}
	rows := [][]string{columns}
	for n := range r.Servers {
		s := &r.Servers[n]
		for _, h := range s.Hosts {
			if len(h.Instances) == 0 {
				rows = append(rows, []string{s.label(h, nil), s.Role + ", no answer", "-", "-", "-", "-", "-", "-", "-", "-"})
			}
			for _, i := range h.Instances {
				rows = append(rows, append([]string{s.label(h, i), s.foundAs(i)}, i.cells()...))
			}
		}
	}
	if len(r.systems()) <= 1 {
		at := slices.Index(columns, "system identifier")
		for n, row := range rows {
			rows[n] = slices.Delete(slices.Clone(row), at, at+1)
		}
	}
	return rows
}

// legend says which addresses stand behind names that do not tell.
func (r *report) legend() string {
	var parts []string
	for n := range r.Servers {
		s := &r.Servers[n]
		for _, h := range s.Hosts {
			if label := s.label(h, nil); label == s.Name && label != h.Address {
				parts = append(parts, label+" is "+h.Address)
			}
			for _, i := range h.Instances {
				if len(h.Instances) > 1 && i.Listen != "" {
					parts = append(parts, s.label(h, i)+" is "+i.Listen)
				}
			}
		}
	}
	return strings.Join(parts, ", ")
}

// systems are the system identifiers that were told.
func (r *report) systems() []string {
	var systems []string
	for n := range r.Servers {
		for _, h := range r.Servers[n].Hosts {
			for _, i := range h.Instances {
				if i.System != "" && !slices.Contains(systems, i.System) {
					systems = append(systems, i.System)
				}
			}
		}
	}
	return systems
}

// foundAs is what a server is configured as, and what the instance is if that is something else.
func (s *server) foundAs(i *instance) string {
	if (s.Role == rolePrimary) == i.standby() {
		return s.Role + ", is " + i.Found
	}
	return s.Role
}

func (i *instance) cells() []string {
	readOnly, pooler, privileges := "enforced", "no", "all"
	if i.ReadOnly != readOnlyHolds {
		readOnly = i.ReadOnly
	}
	if i.Pooled {
		pooler = "yes"
	}
	if !i.SeesOthers {
		privileges = "basic"
	}
	if len(i.Missing) > 0 {
		privileges = fmt.Sprintf("%d less", len(i.Missing))
	}
	return []string{i.Version, orDash(i.System), dashOr(i.Timeline),
		orDash(i.Position), i.Lag.String(), readOnly, pooler, privileges}
}

// String tells how far behind in bytes, and in time as far as that is proven.
func (l *lag) String() string {
	if l == nil {
		return "-"
	}
	if l.Proven {
		return fmt.Sprintf("%s, ≤%s", bytesText(l.Bytes), shortTime(max(l.Millis, 1)))
	}
	if l.Millis == 0 {
		return bytesText(l.Left)
	}
	return fmt.Sprintf("%s, >%s", bytesText(l.Left), shortTime(l.Millis))
}

func shortTime(millis int64) string {
	if millis < 10_000 {
		return fmt.Sprintf("%d ms", millis)
	}
	return fmt.Sprintf("%d s", millis/1000)
}

func dashOr(n uint32) string {
	if n == 0 {
		return "-"
	}
	return strconv.Itoa(int(n))
}

func orDash(s string) string {
	if s == "" {
		return "-"
	}
	return s
}

const columnGap = 2

func columnWidths(rows [][]string) []int {
	widths := make([]int, len(rows[0]))
	for _, row := range rows {
		for c, cell := range row {
			widths[c] = max(widths[c], utf8.RuneCountInString(cell))
		}
	}
	return widths
}

func tableWidth(rows [][]string) int {
	width := -columnGap
	for _, w := range columnWidths(rows) {
		width += w + columnGap
	}
	return width
}

func drawTable(rows [][]string) string {
	var b strings.Builder
	widths := columnWidths(rows)
	for _, row := range rows {
		var line strings.Builder
		for c, cell := range row {
			line.WriteString(pad(cell, widths[c]+columnGap))
		}
		b.WriteString(strings.TrimRight(line.String(), " ") + "\n")
	}
	return b.String()
}

// drawBlocks shows the same with a line for each value, for names that make the table too wide.
func drawBlocks(rows [][]string) string {
	var b strings.Builder
	widest := 0
	for _, name := range rows[0] {
		widest = max(widest, len(name))
	}
	for _, row := range rows[1:] {
		fmt.Fprintf(&b, "%s\n", row[0])
		for c, cell := range row[1:] {
			if cell != "-" {
				fmt.Fprintf(&b, "  %s%s\n", pad(rows[0][c+1], widest+columnGap), cell)
			}
		}
	}
	return b.String()
}

func pad(s string, width int) string {
	return s + strings.Repeat(" ", max(0, width-utf8.RuneCountInString(s)))
}

// wrap breaks a text at blanks, its first line behind the head and the others below it.
func wrap(text, head string, width int) string {
	var b strings.Builder
	indent := strings.Repeat(" ", utf8.RuneCountInString(head))
	line := head
	empty := true
	for _, word := range strings.Fields(text) {
		if !empty && utf8.RuneCountInString(line)+1+utf8.RuneCountInString(word) > width {
			b.WriteString(line + "\n")
			line, empty = indent, true
		}
		if !empty {
			line += " "
		}
		line += word
		empty = false
	}
	if line == "" {
		return b.String()
	}
	return b.String() + line + "\n"
}
