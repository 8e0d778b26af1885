// Package otelmetrics has OpenTelemetry collect what a database opened with pgsplit has done, and how its servers are.
//
//	registration, err := otelmetrics.Register(db)
//
// Each collection reads the counters of pgsplit.Connector.Stats: it starts nothing and asks no server. The table of metrics
// is in pgsplit's README. db.client.connection.count and the attributes that do not begin with pgsplit follow OpenTelemetry's
// conventions for databases, as of version 1.30.
package otelmetrics

import (
	"context"
	"database/sql"
	"net"
	"strconv"
	"time"

	"go.opentelemetry.io/otel"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/metric"

	"github.com/pgsplit/pgsplit"
)

// scope is what the metrics say they come from.
const scope = "github.com/pgsplit/pgsplit/otelmetrics"

type options struct {
	provider metric.MeterProvider
	db       string
}

// Option is an option of Register.
type Option func(*options)

// WithMeterProvider says where the metrics go. Default: otel.GetMeterProvider.
func WithMeterProvider(provider metric.MeterProvider) Option {
	return func(o *options) { o.provider = provider }
}

// WithDB gives all metrics the attribute db.namespace, and has the names of pools end in "/" and the name, so that several
// databases in one program are told apart. Default: neither.
func WithDB(name string) Option {
	return func(o *options) { o.db = name }
}

// Register has a sql.DB collected that was opened with pgsplit, wrapped by other drivers or not; for another one it fails.
// The registration's Unregister ends that.
func Register(db *sql.DB, opts ...Option) (metric.Registration, error) {
	connector, err := pgsplit.FromDB(db)
	if err != nil {
		return nil, err
	}
	return register(connector, opts...)
}

// source is a pgsplit.Connector, or a test's.
type source interface{ Stats() pgsplit.Stats }

func register(s source, opts ...Option) (metric.Registration, error) {
	o := options{provider: otel.GetMeterProvider()}
	for _, opt := range opts {
		opt(&o)
	}
	meter := o.provider.Meter(scope)
	i, err := newInstruments(meter)
	if err != nil {
		return nil, err
	}
	return meter.RegisterCallback(func(_ context.Context, to metric.Observer) error {
		i.observe(to, s.Stats(), o.db)
		return nil
	}, i.all...)
}

// states are those of ServerStats.State: each has a value, 1 or 0.
var states = []string{"healthy", "refusing", "suspect", "down"}

func (i *instruments) observe(to metric.Observer, stats pgsplit.Stats, db string) {
	var common []attribute.KeyValue
	if db != "" {
		common = append(common, attribute.String("db.namespace", db))
	}
	cluster := set(common)
	for reason, n := range stats.Reasons {
		to.ObserveInt64(i.decisions, int64(n), set(common, attribute.String("pgsplit.reason", reason)))
	}
	to.ObserveInt64(i.captures, int64(stats.Captures), cluster)
	to.ObserveInt64(i.captureErrors, int64(stats.CaptureErrors), cluster)
	to.ObserveInt64(i.lostTokens, int64(stats.LostTokens), cluster)
	to.ObserveInt64(i.foreignTokens, int64(stats.ForeignTokens), cluster)
	for _, s := range stats.Servers {
		i.observeServer(to, s, append(common[:len(common):len(common)], attributesOf(s, db)...))
	}
}

func (i *instruments) observeServer(to metric.Observer, s pgsplit.ServerStats, common []attribute.KeyValue) {
	server := set(common)
	to.ObserveInt64(i.statements, int64(s.Statements), server)
	to.ObserveInt64(i.checks, int64(s.Checks), server)
	to.ObserveInt64(i.refusals, int64(s.Refusals), server)
	to.ObserveInt64(i.setbacks, int64(s.Setbacks), server)
	to.ObserveInt64(i.opened, int64(s.Opened), server)
	to.ObserveInt64(i.failures, int64(s.Failures), server)
	to.ObserveInt64(i.movedOn, int64(s.MovedOn), server)
	to.ObserveInt64(i.probes, int64(s.Probes), server)
	to.ObserveInt64(i.waits, int64(s.Waits), server)
	to.ObserveFloat64(i.waitTime, s.WaitTime.Seconds(), server)
	for class, n := range s.Errors {
		to.ObserveInt64(i.errors, int64(n), set(common, attribute.String("error.type", class)))
	}

	// What is not known has no value: zero would be a good one.
	if s.Position != 0 {
		to.ObserveInt64(i.position, int64(s.Position), server)
	}
	if !s.PositionAt.IsZero() {
		to.ObserveFloat64(i.positionAt, timestamp(s.PositionAt), server)
	}
	if s.Role == "replica" && s.Staleness >= 0 {
		to.ObserveFloat64(i.staleness, s.Staleness.Seconds(), server)
	}
	if !s.Since.IsZero() {
		to.ObserveFloat64(i.since, timestamp(s.Since), server)
	}

	known := false
	for _, state := range states {
		var is int64
		if state == s.State {
			is, known = 1, true
		}
		to.ObserveInt64(i.state, is, set(common, attribute.String("pgsplit.server.state", state)))
	}
	if !known {
		to.ObserveInt64(i.state, 1, set(common, attribute.String("pgsplit.server.state", s.State)))
	}

	to.ObserveInt64(i.open, int64(s.Open), server)
	to.ObserveInt64(i.connections, int64(s.InUse), set(common, attribute.String("db.client.connection.state", "used")))
	to.ObserveInt64(i.connections, int64(s.Idle), set(common, attribute.String("db.client.connection.state", "idle")))
}

// attributesOf say which server it is. Of several addresses they do not say in which one the connections are.
func attributesOf(s pgsplit.ServerStats, db string) []attribute.KeyValue {
	pool := s.Name
	if db != "" {
		pool += "/" + db
	}
	attributes := []attribute.KeyValue{
		attribute.String("db.system.name", "postgresql"),
		attribute.String("db.client.connection.pool.name", pool),
		attribute.String("pgsplit.server.role", s.Role),
	}
	if s.Label != "" {
		attributes = append(attributes, attribute.String("pgsplit.server.label", s.Label))
	}
	if host, port, err := net.SplitHostPort(s.Address); err == nil {
		if n, err := strconv.Atoi(port); err == nil {
			attributes = append(attributes, attribute.String("server.address", host), attribute.Int("server.port", n))
		}
	}
	return attributes
}

func set(common []attribute.KeyValue, more ...attribute.KeyValue) metric.ObserveOption {
	return metric.WithAttributes(append(common[:len(common):len(common)], more...)...)
}

// timestamp is t in seconds since 1970.
func timestamp(t time.Time) float64 { return float64(t.UnixMicro()) / 1e6 }
