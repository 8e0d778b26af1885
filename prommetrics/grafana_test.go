package prommetrics

import (
	"encoding/json"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"
)

// dashboard is what matters here of a Grafana dashboard.
type dashboard struct {
	UID        string
	Templating struct {
		List []struct{ Name, Type, Definition string }
	}
	Panels []struct {
		ID         int
		Title      string
		Datasource struct{ UID string }
		GridPos    place
		Targets    []struct{ Expr, RefID string }

		FieldConfig struct{ Defaults struct{ NoValue string } }
	}
}

// place is where a panel is, in a grid of 24 columns.
type place struct{ X, Y, W, H int }

func (p place) overlaps(q place) bool {
	return p.X < q.X+q.W && q.X < p.X+p.W && p.Y < q.Y+q.H && q.Y < p.Y+p.H
}

func readDashboard(t *testing.T) (d dashboard) {
	t.Helper()
	text, err := os.ReadFile("grafana.json")
	if err != nil {
		t.Fatal(err)
	}
	if err := json.Unmarshal(text, &d); err != nil {
		t.Fatal(err)
	}
	return d
}

var (
	metricName   = regexp.MustCompile(`\b(?:pgsplit|db_client)_[a-z0-9_]+\b`)
	grouping     = regexp.MustCompile(`\b(?:by|without|on|ignoring)\s*\([^)]*\)`)
	selectors    = regexp.MustCompile(`\{[^}]*\}`)
	variableName = regexp.MustCompile(`\$\{?([a-z]+)\b`)
)

// namesIn are the metrics that an expression reads: what is left of it without labels.
func namesIn(expression string) []string {
	return metricName.FindAllString(selectors.ReplaceAllString(grouping.ReplaceAllString(expression, ""), ""), -1)
}

func TestTheDashboardReadsMetricsThatThereAre(t *testing.T) {
	there := exported()
	d := readDashboard(t)
	variables := []string{}
	for _, v := range d.Templating.List {
		variables = append(variables, v.Name)
		for _, name := range namesIn(v.Definition) {
			if !slices.Contains(there, name) {
				t.Errorf("variable %s reads %s", v.Name, name)
			}
		}
	}
	for _, name := range []string{"datasource", "db"} {
		if !slices.Contains(variables, name) {
			t.Errorf("there is no variable %s", name)
		}
	}
	for _, p := range d.Panels {
		if p.Datasource.UID != "${datasource}" {
			t.Errorf("%s: the data source is %q", p.Title, p.Datasource.UID)
		}
		if len(p.Targets) == 0 {
			t.Errorf("%s: no expression", p.Title)
		}
		for _, target := range p.Targets {
			names := namesIn(target.Expr)
			if len(names) == 0 {
				t.Errorf("%s: no metric in %s", p.Title, target.Expr)
			}
			for _, name := range names {
				if !slices.Contains(there, name) {
					t.Errorf("%s: there is no metric %s", p.Title, name)
				}
			}
			for _, m := range variableName.FindAllStringSubmatch(target.Expr, -1) {
				if !slices.Contains(variables, m[1]) {
					t.Errorf("%s: there is no variable %s", p.Title, m[1])
				}
			}
		}
	}
}

func TestEachPanelOfTheDashboardHasItsPlace(t *testing.T) {
	d := readDashboard(t)
	for i, p := range d.Panels {
		if g := p.GridPos; p.ID <= 0 || g.X < 0 || g.Y < 0 || g.W <= 0 || g.H <= 0 || g.X+g.W > 24 {
			t.Errorf("%s: id %d at %+v", p.Title, p.ID, g)
		}
		for _, q := range d.Panels[:i] {
			if p.ID == q.ID {
				t.Errorf("%s and %s have the id %d", q.Title, p.Title, p.ID)
			}
			if p.GridPos.overlaps(q.GridPos) {
				t.Errorf("%s and %s overlap", q.Title, p.Title)
			}
		}
	}
}

// "No data" is what Grafana says where metrics are missing, too.
func TestAPanelThatIsEmptyWhenAllIsWellSaysSo(t *testing.T) {
	for _, p := range readDashboard(t).Panels {
		empty := true
		for _, target := range p.Targets {
			empty = empty && strings.Contains(target.Expr, "> 0")
		}
		if empty && p.FieldConfig.Defaults.NoValue == "" {
			t.Errorf("%s: nothing is above zero, and the panel has no word for it", p.Title)
		}
	}
}
