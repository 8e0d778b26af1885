package prommetrics

import "github.com/prometheus/client_golang/prometheus"

// descs are all metrics there are.
type descs struct {
	all []*prometheus.Desc

	decisions, captures, captureErrors, lostTokens, foreignTokens *prometheus.Desc

	statements, checks, refusals, setbacks, opened, failures *prometheus.Desc
	movedOn, probes, waits, waitTime, errors                 *prometheus.Desc
	position, positionAt, staleness, state, since            *prometheus.Desc
	open, connections                                        *prometheus.Desc
}

func newDescs(constant prometheus.Labels) (d descs) {
	add := func(constant prometheus.Labels, name, help string, labels ...string) *prometheus.Desc {
		desc := prometheus.NewDesc(name, help, labels, constant)
		d.all = append(d.all, desc)
		return desc
	}
	cluster := func(name, help string, labels ...string) *prometheus.Desc {
		return add(constant, "pgsplit_"+name, help, labels...)
	}
	server := func(name, help string, labels ...string) *prometheus.Desc {
		return cluster(name, help, append([]string{"server", "role", "label"}, labels...)...)
	}

	d.decisions = cluster("decisions_total", "Decisions where a statement goes, by their reason.", "reason")
	d.captures = cluster("captures_total", "Times the primary was asked where the writes of a session ended.")
	d.captureErrors = cluster("capture_errors_total", "Times the primary did not say where the writes of a session ended.")
	d.lostTokens = cluster("lost_tokens_total", "Tokens with a position that the primary never had, or lost in a failover.")
	d.foreignTokens = cluster("foreign_tokens_total", "Tokens that say nothing about this cluster.")

	d.statements = server("statements_total", "Statements that were led to the server.")
	d.checks = server("checks_total", "Times the server was asked for its replay position.")
	d.refusals = server("refusals_total", "Reads that went on because their floor was not proven there.")
	d.setbacks = server("setbacks_total", "Times a position was below the one seen before.")
	d.opened = server("connections_opened_total", "Connections opened.")
	d.failures = server("lease_failures_total", "Leases that the server did not let in.")
	d.movedOn = server("moved_on_total", "Reads that began there and moved on to another server before their first row.")
	d.probes = server("probes_total", "Probes of the server because it was not healthy.")
	d.waits = server("waits_total", "Reads that waited there for their floor.")
	d.waitTime = server("wait_seconds_total", "Time that reads waited there for their floor.")
	d.errors = server("errors_total", "What went wrong with statements and connections, by class.", "class")
	d.position = server("position_bytes", "Replay position last seen there, in bytes since the start of the log.")
	d.positionAt = server("position_timestamp_seconds", "When the replay position was last seen.")
	d.staleness = server("replica_staleness_seconds", "How far the replica is proven to be behind at most; absent: nothing is proven.")
	d.state = server("server_state", "1 for the state that the server is in, 0 for the others.", "state")
	d.since = server("server_state_timestamp_seconds", "When the server came into its state; absent: it has been healthy from the start.")
	d.open = server("connections", "Connections that are open, in use or being opened.")

	// The name, and all labels but the first three, are OpenTelemetry's for databases in Prometheus' spelling.
	pool := prometheus.Labels{"db_system_name": "postgresql"}
	for name, value := range constant {
		pool[name] = value
	}
	d.connections = add(pool, "db_client_connection_count", "Connections by what they are doing: used or idle.",
		"server", "role", "label", "db_client_connection_pool_name", "db_client_connection_state", "server_address", "server_port")
	return d
}
