package pgsplit

import (
	"sync/atomic"
	"time"
)

// role is what a server was configured as.
type role string

const (
	rolePrimary role = "primary"
	roleReplica role = "replica"
)

// serverStats are the counters of one server. They only grow.
type serverStats struct {
	role       role
	statements atomic.Uint64
	checks     atomic.Uint64
	refusals   atomic.Uint64
	setbacks   atomic.Uint64
	opened     atomic.Uint64
	failures   atomic.Uint64
	probes     atomic.Uint64
	moved      atomic.Uint64
}

// Stats is what a Connector has done so far. All counters only grow.
type Stats struct {
	// Reasons counts the decisions, by Reason.String.
	Reasons map[string]uint64
	// Captures counts how often the primary was asked where the writes of a session ended.
	Captures uint64
	// LostTokens counts tokens with a position that the primary never had, or lost in a failover.
	LostTokens uint64
	// ForeignTokens counts tokens that say nothing about this cluster.
	ForeignTokens uint64
	// Servers has the primary first, then the replicas in the order of the configuration.
	Servers []ServerStats
}

// ServerStats is what happened at one server.
type ServerStats struct {
	Name       string // the configured name, or the address
	Role       string // "primary" or "replica", as configured
	Statements uint64 // statements and transactions that ran there
	Checks     uint64 // times the replay position was asked for
	Refusals   uint64 // times a read went on because the floor was not proven there
	Setbacks   uint64 // times a position was below the one seen before: a restart, or another instance at the address
	Opened     uint64 // connections opened
	Failures   uint64 // leases that the server did not let in
	MovedOn    uint64 // reads that began there and moved on to another server before their first row
	Probes     uint64 // times it was probed because it was not healthy
	Position   LSN    // replay position last seen there; zero on the primary
	Open       int    // connections open now, idle ones included
	InUse      int    // connections leased now

	// State is "healthy", "refusing" (it lets no new connection in, those at hand go on), "suspect" (something went wrong
	// on a connection, and reads go elsewhere until a probe has told) or "down" (it gets nothing until a probe gets in).
	State string
	Since time.Time // when it came into its state; zero: it has been healthy from the start
	Cause error     // what made it so; nil if it is healthy
}

// Stats tells what happened so far. It is cheap and never waits for a server.
func (c *Connector) Stats() Stats {
	stats := Stats{
		Reasons:       make(map[string]uint64, reasonCount),
		Captures:      c.captures.Load(),
		LostTokens:    c.lostTokens.Load(),
		ForeignTokens: c.foreignTokens.Load(),
	}
	for r := range reasonCount {
		stats.Reasons[r.String()] = c.reasons[r].Load()
	}
	for s := range c.servers {
		stats.Servers = append(stats.Servers, s.report())
	}
	return stats
}

func (s *server) report() ServerStats {
	s.mu.Lock()
	open := s.total
	s.mu.Unlock()
	state := s.health.state()
	since, cause := s.health.why()
	return ServerStats{
		Name:       s.name,
		Role:       string(s.stats.role),
		Statements: s.stats.statements.Load(),
		Checks:     s.stats.checks.Load(),
		Refusals:   s.stats.refusals.Load(),
		Setbacks:   s.stats.setbacks.Load(),
		Opened:     s.stats.opened.Load(),
		Failures:   s.stats.failures.Load(),
		MovedOn:    s.stats.moved.Load(),
		Probes:     s.stats.probes.Load(),
		Position:   LSN(s.position.Load()),
		Open:       open,
		InUse:      int(s.inUse.Load()),
		State:      state.String(),
		Since:      since,
		Cause:      cause,
	}
}
