package otelmetrics

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"maps"
	"os"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/DATA-DOG/go-sqlmock"
	"go.opentelemetry.io/otel/metric"
	sdk "go.opentelemetry.io/otel/sdk/metric"
	"go.opentelemetry.io/otel/sdk/metric/metricdata"

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

// reading is a provider and what reads it.
type reading struct {
	reader   *sdk.ManualReader
	provider metric.MeterProvider
}

func newReading(t *testing.T) reading {
	t.Helper()
	reader := sdk.NewManualReader()
	provider := sdk.NewMeterProvider(sdk.WithReader(reader))
	t.Cleanup(func() {
		if err := provider.Shutdown(context.Background()); err != nil {
			t.Error(err)
		}
	})
	return reading{reader, provider}
}

// lines are the values that are collected, each with its attributes and unit, in order.
func (r reading) lines(t *testing.T) (lines []string) {
	t.Helper()
	var all metricdata.ResourceMetrics
	if err := r.reader.Collect(t.Context(), &all); err != nil {
		t.Fatal(err)
	}
	for _, scope := range all.ScopeMetrics {
		for _, m := range scope.Metrics {
			switch data := m.Data.(type) {
			case metricdata.Sum[int64]:
				lines = append(lines, linesOf(m, sumKind(data.IsMonotonic), data.DataPoints)...)
			case metricdata.Sum[float64]:
				lines = append(lines, linesOf(m, sumKind(data.IsMonotonic), data.DataPoints)...)
			case metricdata.Gauge[int64]:
				lines = append(lines, linesOf(m, "gauge", data.DataPoints)...)
			case metricdata.Gauge[float64]:
				lines = append(lines, linesOf(m, "gauge", data.DataPoints)...)
			default:
				t.Errorf("%s is %T", m.Name, m.Data)
			}
		}
	}
	slices.Sort(lines)
	return lines
}

func sumKind(monotonic bool) string {
	if monotonic {
		return "counter"
	}
	return "sum"
}

func linesOf[N int64 | float64](m metricdata.Metrics, kind string, points []metricdata.DataPoint[N]) (lines []string) {
	for _, p := range points {
		var attributes []string
		for _, kv := range p.Attributes.ToSlice() {
			attributes = append(attributes, string(kv.Key)+"="+kv.Value.String())
		}
		lines = append(lines, fmt.Sprintf("%s %s[%s] %s %.1f", kind, m.Name, strings.Join(attributes, " "), m.Unit, float64(p.Value)))
	}
	return lines
}

// collect is what one collection of the stats gives.
func collect(t *testing.T, stats pgsplit.Stats, opts ...Option) []string {
	t.Helper()
	r := newReading(t)
	if _, err := register(&fake{stats}, append(opts, WithMeterProvider(r.provider))...); err != nil {
		t.Fatal(err)
	}
	return r.lines(t)
}

func want(t *testing.T, got []string, lines ...string) {
	t.Helper()
	for _, line := range lines {
		if !slices.Contains(got, line) {
			t.Errorf("no %s", line)
		}
	}
	if t.Failed() {
		t.Log(strings.Join(got, "\n"))
	}
}

func TestEachMetricSaysWhatHappened(t *testing.T) {
	const pool = "db.client.connection.pool.name=near"
	const near = pool + " db.system.name=postgresql"
	const eu = "pgsplit.server.label=eu pgsplit.server.role=replica"
	const db2 = " server.address=db2 server.port=5433"
	want(t, collect(t, some()),
		"counter pgsplit.decisions[pgsplit.reason=replica] {decision} 4.0",
		"counter pgsplit.captures[] {capture} 5.0",
		"counter pgsplit.capture_errors[] {capture} 6.0",
		"counter pgsplit.lost_tokens[] {token} 7.0",
		"counter pgsplit.foreign_tokens[] {token} 8.0",
		"counter pgsplit.errors[db.client.connection.pool.name=db1:5432 db.system.name=postgresql error.type=sql "+
			"pgsplit.server.role=primary server.address=db1 server.port=5432] {error} 9.0",
		"counter pgsplit.statements["+near+" "+eu+db2+"] {statement} 10.0",
		"counter pgsplit.checks["+near+" "+eu+db2+"] {check} 11.0",
		"counter pgsplit.refusals["+near+" "+eu+db2+"] {read} 12.0",
		"counter pgsplit.setbacks["+near+" "+eu+db2+"] {setback} 13.0",
		"counter pgsplit.connections_opened["+near+" "+eu+db2+"] {connection} 14.0",
		"counter pgsplit.lease_failures["+near+" "+eu+db2+"] {lease} 15.0",
		"counter pgsplit.moved_on["+near+" "+eu+db2+"] {read} 16.0",
		"counter pgsplit.probes["+near+" "+eu+db2+"] {probe} 17.0",
		"counter pgsplit.waits["+near+" "+eu+db2+"] {read} 18.0",
		"counter pgsplit.wait["+near+" "+eu+db2+"] s 1.5",
		"counter pgsplit.errors["+near+" error.type=lost "+eu+db2+"] {error} 19.0",
		"gauge pgsplit.position["+near+" "+eu+db2+"] By 4096.0",
		"gauge pgsplit.position_timestamp["+near+" "+eu+db2+"] s 1700000000.5",
		"gauge pgsplit.replica.staleness["+near+" "+eu+db2+"] s 0.2",
		"gauge pgsplit.server.state_timestamp["+near+" "+eu+db2+"] s 1700000000.5",
		"sum pgsplit.server.state["+near+" "+eu+" pgsplit.server.state=down"+db2+"] 1 1.0",
		"sum pgsplit.server.state["+near+" "+eu+" pgsplit.server.state=healthy"+db2+"] 1 0.0",
		"sum pgsplit.connections["+near+" "+eu+db2+"] {connection} 3.0",
		"sum db.client.connection.count["+pool+" db.client.connection.state=used db.system.name=postgresql "+
			eu+db2+"] {connection} 2.0",
	)
}

func TestOfSeveralAddressesNoneIsNamed(t *testing.T) {
	stats := some()
	stats.Servers[0].Address = "db1:5432,db3:5432"
	want(t, collect(t, stats), "sum pgsplit.connections[db.client.connection.pool.name=db1:5432 db.system.name=postgresql "+
		"pgsplit.server.role=primary] {connection} 1.0")
}

func TestWhatIsNotKnownHasNoValue(t *testing.T) {
	stats := some()
	s := &stats.Servers[1]
	s.Position, s.PositionAt, s.Since, s.Staleness = 0, time.Time{}, time.Time{}, -1
	for _, line := range collect(t, stats) {
		if strings.HasPrefix(line, "gauge ") {
			t.Errorf("there is %s", line)
		}
	}
}

func TestAStateThatIsNewHasAValue(t *testing.T) {
	stats := some()
	stats.Servers[1].State = "asleep"
	want(t, collect(t, stats), "sum pgsplit.server.state[db.client.connection.pool.name=near db.system.name=postgresql "+
		"pgsplit.server.label=eu pgsplit.server.role=replica pgsplit.server.state=asleep server.address=db2 server.port=5433] 1 1.0")
}

// textOnly are fields that no metric shows.
var textOnly = map[string]string{
	"Cause": "an error's text would be an attribute of endless values; pgsplit.server.state tells that there is one",
}

func TestEveryFieldOfStatsHasAMetric(t *testing.T) {
	before := collect(t, some())
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
			if slices.Equal(before, collect(t, stats)) {
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

func TestAnUnregisteredDatabaseIsNotCollected(t *testing.T) {
	r := newReading(t)
	registration, err := register(&fake{some()}, WithMeterProvider(r.provider))
	if err != nil {
		t.Fatal(err)
	}
	if len(r.lines(t)) == 0 {
		t.Fatal("nothing is collected before")
	}
	if err := registration.Unregister(); err != nil {
		t.Fatal(err)
	}
	if lines := r.lines(t); len(lines) > 0 {
		t.Errorf("still collected: %s", strings.Join(lines, "\n"))
	}
}

const dsn = "postgres://app@db1.invalid/shop postgres://app@db2.invalid/shop?name=near&label=eu"

func TestDatabasesThatNeverConnectedAreCollected(t *testing.T) {
	r := newReading(t)
	for _, name := range []string{"shop", "users"} {
		db, err := sql.Open("pgsplit", dsn)
		if err != nil {
			t.Fatal(err)
		}
		defer db.Close()
		if _, err := Register(db, WithMeterProvider(r.provider), WithDB(name)); err != nil {
			t.Fatal(err)
		}
	}
	got := r.lines(t)
	for _, name := range []string{"shop", "users"} {
		want(t, got, "counter pgsplit.captures[db.namespace="+name+"] {capture} 0.0",
			"counter pgsplit.probes[db.client.connection.pool.name=near/"+name+" db.namespace="+name+" db.system.name=postgresql "+
				"pgsplit.server.label=eu pgsplit.server.role=replica server.address=db2.invalid server.port=5432] {probe} 0.0")
	}
}

func TestRegisterRefusesADatabaseOfAnotherDriver(t *testing.T) {
	db, _, err := sqlmock.New()
	if err != nil {
		t.Fatal(err)
	}
	defer db.Close()
	if _, err := Register(db); err == nil || !strings.Contains(err.Error(), "pgsplit: no connector") {
		t.Errorf("Register returned %v", err)
	}
}

func TestTheREADMEHasEveryMetric(t *testing.T) {
	readme, err := os.ReadFile("../README.md")
	if err != nil {
		t.Fatal(err)
	}
	for _, line := range collect(t, some()) {
		name, _, _ := strings.Cut(strings.Fields(line)[1], "[")
		if !strings.Contains(string(readme), "`"+name+"`") {
			t.Errorf("README.md does not name %s", name)
		}
	}
}
