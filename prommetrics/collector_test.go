package prommetrics

import (
	"database/sql"
	"errors"
	"maps"
	"os"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/DATA-DOG/go-sqlmock"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/prometheus/common/expfmt"

	"github.com/pgsplit/pgsplit"
)

// fake is a source that has done what it says.
type fake struct{ stats pgsplit.Stats }

func (f *fake) Stats() pgsplit.Stats { return f.stats }

// some is what a connector with a primary and a replica may have done.
func some() pgsplit.Stats {
	at := time.Unix(1700000000, 500e6)
	return pgsplit.Stats{
		Reasons:  map[string]uint64{"unhinted": 3, "replica": 4},
		Captures: 5, CaptureErrors: 6, LostTokens: 7, ForeignTokens: 8,
		Servers: []pgsplit.ServerStats{
			{Name: "db1:5432", Address: "db1:5432", Role: "primary", State: "healthy", Errors: map[string]uint64{"sql": 9}, Open: 1, Idle: 1},
			{
				Name: "near", Address: "db2:5433", Role: "replica", Label: "eu",
				Statements: 10, Checks: 11, Refusals: 12, Setbacks: 13, Opened: 14, Failures: 15, MovedOn: 16, Probes: 17, Waits: 18, WaitTime: 1500 * time.Millisecond,
				Errors: map[string]uint64{"lost": 19}, Position: 4096, PositionAt: at, Staleness: 250 * time.Millisecond,
				Open: 3, InUse: 2, Idle: 1, State: "down", Since: at, Cause: errors.New("refused"),
			},
		},
	}
}

// scrape is what a Prometheus reads: each series with its value, in order.
func scrape(t *testing.T, collectors ...prometheus.Collector) []string {
	t.Helper()
	text, err := testutil.CollectAndFormat(together(collectors), expfmt.TypeTextPlain, exported()...)
	if err != nil {
		t.Fatal(err)
	}
	return strings.Split(strings.TrimSpace(string(text)), "\n")
}

// together collects from several collectors.
type together []prometheus.Collector

func (all together) Describe(descs chan<- *prometheus.Desc) {
	for _, c := range all {
		c.Describe(descs)
	}
}

func (all together) Collect(metrics chan<- prometheus.Metric) {
	for _, c := range all {
		c.Collect(metrics)
	}
}

func TestEachSeriesSaysWhatHappened(t *testing.T) {
	got := scrape(t, newCollector(&fake{some()}))
	for _, want := range []string{
		`pgsplit_decisions_total{reason="replica"} 4`,
		`pgsplit_captures_total 5`,
		`pgsplit_capture_errors_total 6`,
		`pgsplit_lost_tokens_total 7`,
		`pgsplit_foreign_tokens_total 8`,
		`pgsplit_errors_total{class="sql",label="",role="primary",server="db1:5432"} 9`,
		`pgsplit_statements_total{label="eu",role="replica",server="near"} 10`,
		`pgsplit_checks_total{label="eu",role="replica",server="near"} 11`,
		`pgsplit_refusals_total{label="eu",role="replica",server="near"} 12`,
		`pgsplit_setbacks_total{label="eu",role="replica",server="near"} 13`,
		`pgsplit_connections_opened_total{label="eu",role="replica",server="near"} 14`,
		`pgsplit_lease_failures_total{label="eu",role="replica",server="near"} 15`,
		`pgsplit_moved_on_total{label="eu",role="replica",server="near"} 16`,
		`pgsplit_probes_total{label="eu",role="replica",server="near"} 17`,
		`pgsplit_waits_total{label="eu",role="replica",server="near"} 18`,
		`pgsplit_wait_seconds_total{label="eu",role="replica",server="near"} 1.5`,
		`pgsplit_errors_total{class="lost",label="eu",role="replica",server="near"} 19`,
		`pgsplit_position_bytes{label="eu",role="replica",server="near"} 4096`,
		`pgsplit_position_timestamp_seconds{label="eu",role="replica",server="near"} 1.7000000005e+09`,
		`pgsplit_replica_staleness_seconds{label="eu",role="replica",server="near"} 0.25`,
		`pgsplit_server_state{label="eu",role="replica",server="near",state="down"} 1`,
		`pgsplit_server_state{label="eu",role="replica",server="near",state="healthy"} 0`,
		`pgsplit_server_state_timestamp_seconds{label="eu",role="replica",server="near"} 1.7000000005e+09`,
		`pgsplit_connections{label="eu",role="replica",server="near"} 3`,
		`db_client_connection_count{db_client_connection_pool_name="near",db_client_connection_state="used",` +
			`db_system_name="postgresql",label="eu",role="replica",server="near",server_address="db2",server_port="5433"} 2`,
		`db_client_connection_count{db_client_connection_pool_name="db1:5432",db_client_connection_state="idle",` +
			`db_system_name="postgresql",label="",role="primary",server="db1:5432",server_address="db1",server_port="5432"} 1`,
	} {
		if !slices.Contains(got, want) {
			t.Errorf("no %s", want)
		}
	}
	if t.Failed() {
		t.Log(strings.Join(got, "\n"))
	}
}

func TestWhatIsNotKnownHasNoSeries(t *testing.T) {
	stats := some()
	s := &stats.Servers[1]
	s.Position, s.PositionAt, s.Since, s.Staleness = 0, time.Time{}, time.Time{}, -1
	for _, line := range scrape(t, newCollector(&fake{stats})) {
		for _, name := range []string{"pgsplit_position_bytes", "pgsplit_position_timestamp_seconds",
			"pgsplit_replica_staleness_seconds", "pgsplit_server_state_timestamp_seconds"} {
			if strings.HasPrefix(line, name+"{") {
				t.Errorf("there is %s", line)
			}
		}
	}
}

func TestOfSeveralAddressesNoneIsNamed(t *testing.T) {
	stats := some()
	stats.Servers[0].Address = "db1:5432,db3:5432"
	want := `db_client_connection_count{db_client_connection_pool_name="db1:5432",db_client_connection_state="idle",` +
		`db_system_name="postgresql",label="",role="primary",server="db1:5432",server_address="",server_port=""} 1`
	if got := scrape(t, newCollector(&fake{stats})); !slices.Contains(got, want) {
		t.Errorf("no %s in %q", want, got)
	}
}

func TestAStateThatIsNewHasASeries(t *testing.T) {
	stats := some()
	stats.Servers[1].State = "asleep"
	want := `pgsplit_server_state{label="eu",role="replica",server="near",state="asleep"} 1`
	if got := scrape(t, newCollector(&fake{stats})); !slices.Contains(got, want) {
		t.Errorf("no %s", want)
	}
}

// textOnly are fields that no metric shows.
var textOnly = map[string]string{
	"Cause": "an error's text would be a label of endless values; pgsplit_server_state tells that there is one",
}

func TestEveryFieldOfStatsHasAMetric(t *testing.T) {
	before := scrape(t, newCollector(&fake{some()}))
	check := func(of string, pick func(*pgsplit.Stats) reflect.Value) {
		base := some()
		kind := pick(&base).Type()
		for i := range kind.NumField() {
			field := kind.Field(i)
			if field.Type == reflect.TypeFor[[]pgsplit.ServerStats]() || textOnly[field.Name] != "" {
				continue
			}
			stats := some()
			if !alter(pick(&stats).Field(i)) {
				t.Errorf("this test cannot alter %s.%s", of, field.Name)
				continue
			}
			if slices.Equal(before, scrape(t, newCollector(&fake{stats}))) {
				t.Errorf("no metric shows %s.%s", of, field.Name)
			}
		}
	}
	check("Stats", func(s *pgsplit.Stats) reflect.Value { return reflect.ValueOf(s).Elem() })
	check("ServerStats", func(s *pgsplit.Stats) reflect.Value { return reflect.ValueOf(&s.Servers[1]).Elem() })
}

// alter gives a field another value.
func alter(v reflect.Value) bool {
	switch x := v.Addr().Interface().(type) {
	case *time.Time:
		*x = x.Add(time.Hour)
		return true
	case *map[string]uint64:
		*x = maps.Clone(*x)
		for key := range *x {
			(*x)[key]++
			return true
		}
		return false
	}
	switch v.Kind() {
	case reflect.String:
		v.SetString(v.String() + "2")
	case reflect.Int, reflect.Int64:
		v.SetInt(v.Int() + int64(time.Second))
	case reflect.Uint64, reflect.Uint32:
		v.SetUint(v.Uint() + 1)
	case reflect.Bool:
		v.SetBool(!v.Bool())
	case reflect.Float64:
		v.SetFloat(v.Float() + 1)
	default:
		return false
	}
	return true
}

// The one name that the linter minds is OpenTelemetry's: there is no histogram of that name for it to be mistaken for.
func TestNamesFollowTheConventions(t *testing.T) {
	problems, err := testutil.CollectAndLint(newCollector(&fake{some()}))
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range problems {
		if p.Metric != "db_client_connection_count" || !strings.Contains(p.Text, `"_count" suffix`) {
			t.Errorf("%s: %s", p.Metric, p.Text)
		}
	}
}

var nameOf = regexp.MustCompile(`fqName: "([a-z0-9_]+)"`)

// exported are the names of all metrics.
func exported() (names []string) {
	for _, desc := range newDescs(nil).all {
		names = append(names, nameOf.FindStringSubmatch(desc.String())[1])
	}
	return names
}

func TestTheREADMEHasEveryMetric(t *testing.T) {
	readme, err := os.ReadFile("../README.md")
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range exported() {
		if !strings.Contains(string(readme), "`"+name+"`") {
			t.Errorf("README.md does not name %s", name)
		}
	}
}

const dsn = "postgres://app@db1.invalid/shop postgres://app@db2.invalid/shop?name=near&label=eu"

func TestADatabaseThatNeverConnectedIsCollected(t *testing.T) {
	shop, err := sql.Open("pgsplit", dsn)
	if err != nil {
		t.Fatal(err)
	}
	defer shop.Close()
	users, err := sql.Open("pgsplit", dsn)
	if err != nil {
		t.Fatal(err)
	}
	defer users.Close()
	got := scrape(t, NewCollector(shop, WithDB("shop")), NewCollector(users, WithDB("users")))
	for _, want := range []string{
		`pgsplit_statements_total{db="shop",label="eu",role="replica",server="near"} 0`,
		`pgsplit_statements_total{db="users",label="eu",role="replica",server="near"} 0`,
		`pgsplit_server_state{db="shop",label="",role="primary",server="db1.invalid:5432",state="healthy"} 1`,
	} {
		if !slices.Contains(got, want) {
			t.Errorf("no %s", want)
		}
	}
}

func TestRegisterRefusesADatabaseOfAnotherDriver(t *testing.T) {
	db, _, err := sqlmock.New()
	if err != nil {
		t.Fatal(err)
	}
	defer db.Close()
	c := NewCollector(db)
	if err := prometheus.NewRegistry().Register(c); err == nil || !strings.Contains(err.Error(), "pgsplit: no connector") {
		t.Errorf("Register returned %v", err)
	}
}
