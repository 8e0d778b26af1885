package debugpage

import (
	"context"
	"database/sql"
	"time"

	"github.com/pgsplit/pgsplit"
)

// report is the JSON. Its names are documented with the package and stay.
type report struct {
	Time     time.Time       `json:"time"`
	Stats    statsReport     `json:"stats"`
	Database *databaseReport `json:"database,omitempty"`
	Health   *pgsplit.Health `json:"health,omitempty"`
	Samples  []sampleReport  `json:"samples"`
}

type statsReport struct {
	Reasons       map[string]uint64 `json:"reasons"`
	Captures      uint64            `json:"captures"`
	CaptureErrors uint64            `json:"capture_errors"`
	LostTokens    uint64            `json:"lost_tokens"`
	ForeignTokens uint64            `json:"foreign_tokens"`
	Servers       []serverReport    `json:"servers"`
}

// serverReport is pgsplit.ServerStats without the cause of its state, which Health has.
type serverReport struct {
	Name       string            `json:"name"`
	Address    string            `json:"address"`
	Role       string            `json:"role"`
	Label      string            `json:"label,omitempty"`
	State      string            `json:"state"`
	Since      time.Time         `json:"since,omitzero"`
	Statements uint64            `json:"statements"`
	Checks     uint64            `json:"checks"`
	Refusals   uint64            `json:"refusals"`
	Setbacks   uint64            `json:"setbacks"`
	Opened     uint64            `json:"opened"`
	Failures   uint64            `json:"failures"`
	MovedOn    uint64            `json:"moved_on"`
	Probes     uint64            `json:"probes"`
	Waits      uint64            `json:"waits"`
	WaitTime   float64           `json:"wait_seconds"`
	Errors     map[string]uint64 `json:"errors"`
	Position   pgsplit.LSN       `json:"position,omitempty"`
	PositionAt time.Time         `json:"position_at,omitzero"`
	Staleness  *float64          `json:"staleness_seconds,omitempty"`
	Open       int               `json:"open"`
	InUse      int               `json:"in_use"`
	Idle       int               `json:"idle"`
}

type databaseReport struct {
	MaxOpen  int     `json:"max_open"` // 0: no limit
	Open     int     `json:"open"`
	InUse    int     `json:"in_use"`
	Idle     int     `json:"idle"`
	Waits    int64   `json:"waits"`
	WaitTime float64 `json:"wait_seconds"`
}

type sampleReport struct {
	Time      time.Time            `json:"time"`
	Status    string               `json:"status"`
	Decisions uint64               `json:"decisions"`
	Servers   []serverSampleReport `json:"servers"`
}

type serverSampleReport struct {
	Name      string      `json:"name"`
	State     string      `json:"state"`
	Reachable bool        `json:"reachable"`
	Position  pgsplit.LSN `json:"position,omitempty"`
	LagBytes  *int64      `json:"lag_bytes,omitempty"`
	Staleness *float64    `json:"staleness_seconds,omitempty"`
}

func (h *handler) report(ctx context.Context, c *pgsplit.Connector, withHealth bool) report {
	var r report
	if withHealth {
		health := h.history.look(ctx, c)
		r.Health = &health
	}
	r.Time = time.Now()
	r.Stats = reportStats(c.Stats())
	if h.db != nil {
		r.Database = reportDatabase(h.db.Stats())
	}
	r.Samples = []sampleReport{}
	for _, s := range h.history.since(r.Time) {
		r.Samples = append(r.Samples, reportSample(s))
	}
	return r
}

func reportStats(stats pgsplit.Stats) statsReport {
	r := statsReport{Reasons: stats.Reasons, Captures: stats.Captures, CaptureErrors: stats.CaptureErrors,
		LostTokens: stats.LostTokens, ForeignTokens: stats.ForeignTokens}
	for _, s := range stats.Servers {
		r.Servers = append(r.Servers, serverReport{
			Name: s.Name, Address: s.Address, Role: s.Role, Label: s.Label, State: s.State, Since: s.Since,
			Statements: s.Statements, Checks: s.Checks, Refusals: s.Refusals, Setbacks: s.Setbacks, Opened: s.Opened,
			Failures: s.Failures, MovedOn: s.MovedOn, Probes: s.Probes, Waits: s.Waits, WaitTime: s.WaitTime.Seconds(),
			Errors: s.Errors, Position: s.Position, PositionAt: s.PositionAt, Staleness: seconds(s.Staleness),
			Open: s.Open, InUse: s.InUse, Idle: s.Idle,
		})
	}
	return r
}

func reportDatabase(s sql.DBStats) *databaseReport {
	return &databaseReport{MaxOpen: s.MaxOpenConnections, Open: s.OpenConnections, InUse: s.InUse, Idle: s.Idle,
		Waits: s.WaitCount, WaitTime: s.WaitDuration.Seconds()}
}

func reportSample(s sample) sampleReport {
	r := sampleReport{Time: s.at, Status: s.health.Status, Decisions: sum(s.reasons)}
	for _, server := range s.health.Servers {
		one := serverSampleReport{Name: server.Name, State: server.State, Reachable: server.Reachable,
			Position: server.Position, Staleness: seconds(server.Staleness)}
		if server.LagBytes >= 0 {
			one.LagBytes = &server.LagBytes
		}
		r.Servers = append(r.Servers, one)
	}
	return r
}

// seconds is nil for what is not known.
func seconds(d time.Duration) *float64 {
	if d < 0 {
		return nil
	}
	s := d.Seconds()
	return &s
}

func sum(counts map[string]uint64) (all uint64) {
	for _, n := range counts {
		all += n
	}
	return all
}
