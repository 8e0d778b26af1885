// Package prommetrics has Prometheus collect what a database opened with pgsplit has done, and how its servers are.
//
//	prometheus.MustRegister(prommetrics.NewCollector(db))
//
// Each scrape reads the counters of pgsplit.Connector.Stats: it starts nothing and asks no server. The table of metrics is
// in pgsplit's README, and grafana.json next to this file is a dashboard for them.
package prommetrics

import (
	"database/sql"
	"net"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/pgsplit/pgsplit"
)

// Option is an option of NewCollector.
type Option func(prometheus.Labels)

// WithDB gives all metrics the label db, so that several databases can be in one registry. Default: no such label.
func WithDB(name string) Option {
	return func(labels prometheus.Labels) { labels["db"] = name }
}

// NewCollector returns a Collector for a sql.DB that was opened with pgsplit, wrapped by other drivers or not. If it was
// not, Register tells so.
func NewCollector(db *sql.DB, opts ...Option) prometheus.Collector {
	connector, err := pgsplit.FromDB(db)
	if err != nil {
		return invalid{prometheus.NewInvalidDesc(err)}
	}
	return newCollector(connector, opts...)
}

// source is a pgsplit.Connector, or a test's.
type source interface{ Stats() pgsplit.Stats }

type collector struct {
	source source
	descs  descs
}

func newCollector(s source, opts ...Option) *collector {
	constant := prometheus.Labels{}
	for _, opt := range opts {
		opt(constant)
	}
	return &collector{s, newDescs(constant)}
}

// invalid has Register fail with the error that it describes.
type invalid struct{ desc *prometheus.Desc }

func (i invalid) Describe(descs chan<- *prometheus.Desc) { descs <- i.desc }

func (i invalid) Collect(metrics chan<- prometheus.Metric) {
	metrics <- prometheus.NewInvalidMetric(i.desc, nil)
}

// states are those of ServerStats.State: each is a series that is 1 or 0.
var states = []string{"healthy", "refusing", "suspect", "down"}

// Describe implements prometheus.Collector.
func (c *collector) Describe(descs chan<- *prometheus.Desc) {
	for _, desc := range c.descs.all {
		descs <- desc
	}
}

// Collect implements prometheus.Collector.
func (c *collector) Collect(metrics chan<- prometheus.Metric) {
	stats, d := c.source.Stats(), &c.descs
	count := func(desc *prometheus.Desc, n uint64, labels ...string) {
		metrics <- prometheus.MustNewConstMetric(desc, prometheus.CounterValue, float64(n), labels...)
	}
	for reason, n := range stats.Reasons {
		count(d.decisions, n, reason)
	}
	count(d.captures, stats.Captures)
	count(d.captureErrors, stats.CaptureErrors)
	count(d.lostTokens, stats.LostTokens)
	count(d.foreignTokens, stats.ForeignTokens)
	for _, s := range stats.Servers {
		c.collectServer(s, metrics)
	}
}

func (c *collector) collectServer(s pgsplit.ServerStats, metrics chan<- prometheus.Metric) {
	d := &c.descs
	send := func(desc *prometheus.Desc, kind prometheus.ValueType, value float64, more ...string) {
		labels := append([]string{s.Name, s.Role, s.Label}, more...)
		metrics <- prometheus.MustNewConstMetric(desc, kind, value, labels...)
	}
	count := func(desc *prometheus.Desc, n uint64, more ...string) {
		send(desc, prometheus.CounterValue, float64(n), more...)
	}
	gauge := func(desc *prometheus.Desc, value float64, more ...string) {
		send(desc, prometheus.GaugeValue, value, more...)
	}
	count(d.statements, s.Statements)
	count(d.checks, s.Checks)
	count(d.refusals, s.Refusals)
	count(d.setbacks, s.Setbacks)
	count(d.opened, s.Opened)
	count(d.failures, s.Failures)
	count(d.movedOn, s.MovedOn)
	count(d.probes, s.Probes)
	count(d.waits, s.Waits)
	send(d.waitTime, prometheus.CounterValue, s.WaitTime.Seconds())
	for class, n := range s.Errors {
		count(d.errors, n, class)
	}

	// What is not known has no series: zero would be a good value.
	if s.Position != 0 {
		gauge(d.position, float64(s.Position))
	}
	if !s.PositionAt.IsZero() {
		gauge(d.positionAt, timestamp(s.PositionAt))
	}
	if s.Role == "replica" && s.Staleness >= 0 {
		gauge(d.staleness, s.Staleness.Seconds())
	}
	if !s.Since.IsZero() {
		gauge(d.since, timestamp(s.Since))
	}

	known := false
	for _, state := range states {
		is := 0.0
		if state == s.State {
			is, known = 1, true
		}
		gauge(d.state, is, state)
	}
	if !known {
		gauge(d.state, 1, s.State)
	}

	gauge(d.open, float64(s.Open))
	host, port := hostAndPort(s.Address)
	gauge(d.connections, float64(s.InUse), s.Name, "used", host, port)
	gauge(d.connections, float64(s.Idle), s.Name, "idle", host, port)
}

// hostAndPort takes an address apart. Of several it does not say in which one the connections are.
func hostAndPort(address string) (host, port string) {
	host, port, err := net.SplitHostPort(address)
	if err != nil {
		return "", ""
	}
	return host, port
}

// timestamp is t as Prometheus has it: seconds since 1970.
func timestamp(t time.Time) float64 { return float64(t.UnixMicro()) / 1e6 }
