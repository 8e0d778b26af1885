package pgsplit

import (
	"context"
	"database/sql/driver"
	"errors"
	"sync/atomic"
	"time"
)

// serverStats are the counters of one server. They only grow.
type serverStats struct {
	statements atomic.Uint64
	checks     atomic.Uint64
	refusals   atomic.Uint64
	setbacks   atomic.Uint64
	opened     atomic.Uint64
	failures   atomic.Uint64
	probes     atomic.Uint64
	moved      atomic.Uint64
	waits      atomic.Uint64
	waited     atomic.Int64 // nanoseconds
	errors     [errorClassCount]atomic.Uint64
}

// erred counts what went wrong with a statement on p. timedOut tells that the driver gave up on it.
func (p *physical) erred(ctx context.Context, err error, timedOut bool) {
	lost := p.closed() || errors.Is(err, driver.ErrBadConn)
	p.server.stats.errors[classify(ctx, err, timedOut, lost)].Add(1)
}

// Stats is what a Connector has done so far. All counters only grow.
//
// Each decision has a reason, and one that leads to a server counts there as a statement, so the sum of Reasons is the sum
// of all Statements and of the reasons that lead nowhere (no_primary, no_replica, no_fresh_replica).
type Stats struct {
	// Reasons counts the decisions, by Reason.String.
	Reasons map[string]uint64
	// Captures counts how often the primary was asked where the writes of a session ended.
	Captures uint64
	// CaptureErrors counts how often it did not say: the session's reads go to the primary meanwhile.
	CaptureErrors uint64
	// LostTokens counts tokens with a position that the primary never had, or lost in a failover.
	LostTokens uint64
	// ForeignTokens counts tokens that say nothing about this cluster.
	ForeignTokens uint64
	// Servers has the primary first, then the replicas in the order of the configuration.
	Servers []ServerStats
}

// ServerStats is what happened at one server.
//
// Statements counts calls of database/sql that reached the server: each Exec, Query and Prepare on whatever handle, each run
// of a prepared statement, each transaction once as it begins (COMMIT and ROLLBACK do not count, the statements inside do),
// each Ping that needs a connection, Raw, CommitLSN. A read that moved on counts at each server that began it, and one
// that was sent again, because the connection at hand turned out to be dead, once for each connection. What the driver
// itself asks (who a server is, positions, probes, the READ ONLY transactions around statements behind a pooler) is not
// in it, nor are those of an errand that only looks for the connector (FromDB).
type ServerStats struct {
	Name       string // the configured name, or the first address
	Address    string // "host:port", or all that are listed, with commas in between
	Role       string // "primary" or "replica", as configured
	Label      string // as configured
	Statements uint64 // what was led there, see above
	Checks     uint64 // times the replay position was asked for
	Refusals   uint64 // times a read went on because the floor was not proven there
	Setbacks   uint64 // times a position was below the one seen before: a restart, or another instance at the address
	Opened     uint64 // connections opened
	Failures   uint64 // leases that the server did not let in
	MovedOn    uint64 // reads that began there and moved on to another server before their first row
	Probes     uint64 // times it was probed because it was not healthy, or had not replied

	Waits    uint64        // times a read waited there for its floor, whether that came or not
	WaitTime time.Duration // how long they waited in all

	// Errors counts what went wrong, by class. All classes are there:
	//
	//	connect    no connection could be made, probes and looks of Health included, for a reason that is none of the others
	//	lost       the connection was lost under a statement
	//	timeout    no connection, proof of a floor or reply within replica_timeout
	//	busy       all of pool_max_conns stayed in use for as long as the caller could wait
	//	too_many   53300, too many connections
	//	shutdown   57P01, 57P02, 57P03: the server ends, was ended, or starts
	//	conflict   40001 and 40P01: on a replica with recovery, on the primary with other transactions
	//	read_only  25006, a write under ReadOnly or on a server in recovery
	//	sql        any other SQLSTATE
	//	canceled   the caller's context ended
	//	client     pgx did not send it, because of a value that it cannot encode, for instance
	//
	// Reads that moved on count where they failed. Errors after the first row of a result, and those of Raw's function, are
	// not seen by the driver: ReportError is for them.
	Errors map[string]uint64

	Position   LSN       // replay position last seen there; zero on the primary
	PositionAt time.Time // when it was seen; zero: never

	// Staleness is how much a replica lags at most, as far as is proven: the age of the newest position of the primary that
	// each instance with an open connection is known to have replayed. It grows until a position is read again, which reads
	// with a floor and Health do. Below zero: nothing is proven, as long as neither sessions, bounds on staleness nor Health
	// have asked the primary where it is. Zero on the primary.
	Staleness time.Duration

	Open  int // connections open or being opened, idle ones included
	InUse int // connections leased now
	Idle  int // connections at rest

	// State is "healthy", "refusing" (it lets no new connection in, those at hand go on), "suspect" (something went wrong
	// on a connection, and reads go elsewhere until a probe has told) or "down" (no connection can be made and none at hand
	// answers: it gets nothing until a probe gets in).
	State string
	Since time.Time // when it came into its state; zero: it has been healthy from the start
	Cause error     // what made it so, without the configured password; nil if it is healthy
}

// Stats tells what happened so far. It is cheap and never waits for a server.
func (c *Connector) Stats() Stats {
	stats := Stats{
		Reasons:       make(map[string]uint64, reasonCount),
		Captures:      c.captures.Load(),
		CaptureErrors: c.captureErrors.Load(),
		LostTokens:    c.lostTokens.Load(),
		ForeignTokens: c.foreignTokens.Load(),
	}
	for r := range reasonCount {
		stats.Reasons[r.String()] = c.reasons[r].Load()
	}
	now := time.Now()
	for s := range c.servers {
		stats.Servers = append(stats.Servers, s.report(now))
	}
	return stats
}

func (s *server) report(now time.Time) ServerStats {
	state := s.health.state()
	since, cause := s.health.why()
	r := ServerStats{
		Name:       s.name,
		Address:    s.address,
		Role:       s.role.String(),
		Label:      s.label,
		Statements: s.stats.statements.Load(),
		Checks:     s.stats.checks.Load(),
		Refusals:   s.stats.refusals.Load(),
		Setbacks:   s.stats.setbacks.Load(),
		Opened:     s.stats.opened.Load(),
		Failures:   s.stats.failures.Load(),
		MovedOn:    s.stats.moved.Load(),
		Probes:     s.stats.probes.Load(),
		Waits:      s.stats.waits.Load(),
		WaitTime:   time.Duration(s.stats.waited.Load()),
		Errors:     make(map[string]uint64, errorClassCount),
		Position:   LSN(s.position.Load()),
		Staleness:  s.staleness(now),
		InUse:      int(s.inUse.Load()),
		State:      state.String(),
		Since:      since,
		Cause:      cause,
	}
	for class := range errorClassCount {
		r.Errors[class.String()] = s.stats.errors[class].Load()
	}
	if at := s.positionAt.Load(); at != 0 {
		r.PositionAt = time.Unix(0, at)
	}
	s.mu.Lock()
	r.Open, r.Idle = s.total, len(s.idle[readWrite])+len(s.idle[readOnly])
	s.mu.Unlock()
	return r
}

// unknownStaleness is the Staleness of a server of which nothing is proven.
const unknownStaleness time.Duration = -1

// staleness is how much the server lags at most, by what all instances that its connections lead to have replayed.
func (s *server) staleness(now time.Time) time.Duration {
	if !s.replica() {
		return 0
	}
	lag := unknownStaleness
	for _, p := range s.connections() {
		if !p.remembers() {
			return unknownStaleness
		}
		behind := s.connector.behind(now, floor{p.inst.timeline.Load(), LSN(p.inst.position.Load())})
		if behind == unknownStaleness {
			return unknownStaleness
		}
		lag = max(lag, behind)
	}
	return lag
}

// behind is how old the newest position of the primary is that a position covers. On another timeline it covers none.
func (c *Connector) behind(now time.Time, at floor) time.Duration {
	current := c.samples.current()
	if current != 0 && at.timeline != current {
		return unknownStaleness
	}
	newest := later(c.samples.covered(current, at.lsn), c.reported.covered(current, at.lsn))
	if newest.IsZero() {
		return unknownStaleness
	}
	return max(now.Sub(newest), 0)
}
