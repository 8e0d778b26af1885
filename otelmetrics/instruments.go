package otelmetrics

import (
	"errors"

	"go.opentelemetry.io/otel/metric"
)

// instruments are all metrics there are.
type instruments struct {
	all []metric.Observable

	decisions, captures, captureErrors, lostTokens, foreignTokens metric.Int64Observable

	statements, checks, refusals, setbacks, opened, failures metric.Int64Observable
	movedOn, probes, waits, errors, position                 metric.Int64Observable
	state, open, connections                                 metric.Int64Observable
	waitTime, positionAt, staleness, since                   metric.Float64Observable
}

func newInstruments(meter metric.Meter) (*instruments, error) {
	i := new(instruments)
	var failed []error
	keep := func(o metric.Observable, err error) {
		i.all = append(i.all, o)
		failed = append(failed, err)
	}
	count := func(name, unit, help string) metric.Int64Observable {
		o, err := meter.Int64ObservableCounter(name, metric.WithUnit(unit), metric.WithDescription(help))
		keep(o, err)
		return o
	}
	// What can be added up over servers and processes.
	sum := func(name, unit, help string) metric.Int64Observable {
		o, err := meter.Int64ObservableUpDownCounter(name, metric.WithUnit(unit), metric.WithDescription(help))
		keep(o, err)
		return o
	}
	seconds := func(name, help string) metric.Float64Observable {
		o, err := meter.Float64ObservableGauge(name, metric.WithUnit("s"), metric.WithDescription(help))
		keep(o, err)
		return o
	}

	i.decisions = count("pgsplit.decisions", "{decision}", "Decisions where a statement goes, by their reason.")
	i.captures = count("pgsplit.captures", "{capture}", "Times the primary was asked where the writes of a session ended.")
	i.captureErrors = count("pgsplit.capture_errors", "{capture}", "Times the primary did not say where the writes of a session ended.")
	i.lostTokens = count("pgsplit.lost_tokens", "{token}", "Tokens with a position that the primary never had, or lost in a failover.")
	i.foreignTokens = count("pgsplit.foreign_tokens", "{token}", "Tokens that say nothing about this cluster.")

	i.statements = count("pgsplit.statements", "{statement}", "Statements that were led to the server.")
	i.checks = count("pgsplit.checks", "{check}", "Times the server was asked for its replay position.")
	i.refusals = count("pgsplit.refusals", "{read}", "Reads that went on because their floor was not proven there.")
	i.setbacks = count("pgsplit.setbacks", "{setback}", "Times a position was below the one seen before.")
	i.opened = count("pgsplit.connections_opened", "{connection}", "Connections opened.")
	i.failures = count("pgsplit.lease_failures", "{lease}", "Leases that the server did not let in.")
	i.movedOn = count("pgsplit.moved_on", "{read}", "Reads that began there and moved on to another server before their first row.")
	i.probes = count("pgsplit.probes", "{probe}", "Probes of the server because it was not healthy.")
	i.waits = count("pgsplit.waits", "{read}", "Reads that waited there for their floor.")
	i.errors = count("pgsplit.errors", "{error}", "What went wrong with statements and connections, by class.")
	i.state = sum("pgsplit.server.state", "1", "1 for the state that the server is in, 0 for the others.")
	i.open = sum("pgsplit.connections", "{connection}", "Connections that are open, in use or being opened.")
	i.connections = sum("db.client.connection.count", "{connection}", "Connections by what they are doing: used or idle.")

	waitTime, err := meter.Float64ObservableCounter("pgsplit.wait", metric.WithUnit("s"),
		metric.WithDescription("Time that reads waited there for their floor."))
	keep(waitTime, err)
	i.waitTime = waitTime
	position, err := meter.Int64ObservableGauge("pgsplit.position", metric.WithUnit("By"),
		metric.WithDescription("Replay position last seen there, in bytes since the start of the log."))
	keep(position, err)
	i.position = position
	i.positionAt = seconds("pgsplit.position_timestamp", "When the replay position was last seen.")
	i.staleness = seconds("pgsplit.replica.staleness", "How far the replica is proven to be behind at most; absent: nothing is proven.")
	i.since = seconds("pgsplit.server.state_timestamp", "When the server came into its state; absent: it has been healthy from the start.")
	return i, errors.Join(failed...)
}
