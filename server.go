package pgsplit

import (
	"context"
	"database/sql/driver"
	"fmt"
	"math/rand/v2"
	"runtime/debug"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/multitracer"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/jackc/pgx/v5/stdlib"
)

// readOnlyParameter makes a session read only from its start (F8).
const readOnlyParameter = "default_transaction_read_only"

// role is what a server was configured as.
type role uint8

const (
	rolePrimary role = iota
	roleReplica
)

var roleNames = [...]string{rolePrimary: "primary", roleReplica: "replica"}

func (r role) String() string { return roleNames[r] }

// server is one configured address with its pool of physical connections.
//
// What every statement touches comes first, so that it lies together: between two statements the caches have gone to others.
type server struct {
	mu           sync.Mutex
	idle         [accessCount][]*physical // oldest first; guarded by mu
	connector    *Connector
	config       *pgxpool.Config
	role         role
	asItIs       bool                 // idle connections are leased as they are: no hook has a say in that
	afterRelease func(*pgx.Conn) bool // of the configuration
	traced       bool                 // something below the driver sees the contexts of statements
	inUse        atomic.Int32         // leases out
	slots        chan struct{}        // one per lease, if pool_max_conns bounds them
	lostAt       sharedMoment         // when a connection was lost last: idle ones may be dead since
	watchAt      sharedMoment         // when overdue replies are looked for next
	position     atomic.Uint64        // replay position last seen, of whichever instance: for the order only (F9)
	health       health
	total        int         // connections idle, leased and being opened; guarded by mu
	minimum      int         // of connections that are kept open
	closed       bool        // guarded by mu
	janitor      *time.Timer // set while idle connections can expire; guarded by mu
	weight       int
	label        string
	stats        serverStats

	name       string           // the configured name, or its address
	address    string           // "host:port", or all that its configuration lists, with commas in between
	wrapper    driver.Connector // what Config.WrapConnector made of the server's; nil: none
	index      int              // among the replicas
	hosts      int              // that its configuration lists
	survey     survey
	retry      retry
	provedAt   sharedMoment  // when a new connection was let in last
	heardAt    sharedMoment  // when an idle connection answered a ping last; zero: the last one asked did not
	asked      sharedMoment  // when the position was seen; zero: never
	positionAt atomic.Int64  // the same on the wall clock, in nanoseconds since 1970
	answered   atomic.Uint32 // hash of the instance that it was seen of
	instance   atomic.Uint32 // hash of the instance met last; 0: none that could be told apart

	refused  bool                   // a pooler refuses the read-only parameter; guarded by mu
	filling  *filling               // the background opening under way; guarded by mu
	conns    map[*physical]struct{} // open; guarded by mu
	openings []*opening             // under way; guarded by mu
	probing  *time.Timer            // for the probe that is due; guarded by mu
	endProbe context.CancelFunc     // ends the probe under way; guarded by mu
	looking  *look                  // the look of Health under way; guarded by mu
	era      int                    // counts how often everything in the background was ended; guarded by mu
	watcher  *time.Timer            // for replies that do not come; guarded by mu
}

func newServer(c *Connector, role role, name string, r Replica) *server {
	addresses := addressesOf(r.Pool)
	s := &server{role: role, name: name, address: listed(addresses), label: r.Label, weight: max(r.Weight, 1), config: r.Pool,
		hosts: len(addresses), minimum: int(max(r.Pool.MinConns, r.Pool.MinIdleConns)), afterRelease: r.Pool.AfterRelease,
		traced: r.Pool.ConnConfig.Tracer != nil, connector: c, conns: map[*physical]struct{}{}}
	//lint:ignore SA1019 honoured as pgxpool honours it
	s.asItIs = r.Pool.ShouldPing == nil && r.Pool.PrepareConn == nil && r.Pool.BeforeAcquire == nil && c.config.WrapConnector == nil
	s.watchAt.store(never)
	s.retry = retry{first: c.config.RetryMin, last: c.config.RetryMax, jitter: rand.Float64}
	if role == rolePrimary {
		s.retry.last = min(s.retry.last, primaryRetryMax)
	}
	s.retry.first = min(s.retry.first, s.retry.last)
	if config := r.Pool; config.MaxConns > 0 {
		s.slots = make(chan struct{}, config.MaxConns)
	}
	return s
}

// String names the server in errors and logs: "replica db2:5432".
func (s *server) String() string { return s.role.String() + " " + s.name }

// usualAccess is what most leases of this server ask for.
func (s *server) usualAccess() access {
	if s.replica() {
		return readOnly
	}
	return readWrite
}

func (s *server) replica() bool { return s.role == roleReplica }

// primaryRetryMax bounds the pause between two probes of the primary: writes wait for it.
const primaryRetryMax = time.Second

// openRaw connects, learns who answers, and runs AfterConnect.
func (s *server) openRaw(ctx context.Context, a access, probe bool) (*physical, error) {
	s.mu.Lock()
	parameter := a == readOnly && !s.refused
	s.mu.Unlock()
	heard := new(overheard)
	conn, err := s.connect(ctx, a, parameter, probe, heard)
	if err != nil && parameter && unsupportedParameter(err) {
		s.mu.Lock()
		s.refused = true
		s.mu.Unlock()
		conn, err = s.connect(ctx, a, false, probe, heard)
	}
	if err != nil {
		return nil, fmt.Errorf("pgsplit: %s: %w", s, err)
	}
	if !probe {
		s.stats.opened.Add(1)
	}
	p := &physical{std: conn, pg: conn.Conn(), server: s, access: a, opened: a, born: present(), overheard: heard}
	if p.lifetime = s.config.MaxConnLifetime; p.lifetime > 0 {
		p.lifetime += time.Duration(rand.Float64() * float64(s.config.MaxConnLifetimeJitter))
	}
	// It calls functions of the configuration, such as OnNotice.
	if err := contained("the first statement", func() error { return p.introduce(ctx) }); err != nil {
		p.close()
		return nil, fmt.Errorf("pgsplit: %s: %w", s, err)
	}
	if !probe {
		s.mu.Lock()
		s.conns[p] = struct{}{}
		s.mu.Unlock()
	}
	return p, nil
}

// introduce asks the server who it is and lets AfterConnect set up the session.
func (p *physical) introduce(ctx context.Context) error {
	id, err := identify(ctx, p.conn())
	if err != nil && (p.server.replica() || p.closed()) {
		return err
	}
	// A primary that does not answer the question still serves what asks for no floor.
	if err == nil {
		p.id = id
		if p.superseded() && p.server.ofCluster(id.system) {
			return fmt.Errorf("it follows timeline %d: %w", id.timeline, errPutAside)
		}
		if !id.inRecovery && !p.server.replica() && id.system != 0 {
			p.server.logCluster(p.server.connector.system.Swap(id.system), id.system)
			p.server.logTimeline(p.server.connector.samples.follow(id.system, id.timeline), id.timeline)
		}
		var fresh bool
		p.inst, fresh = p.server.connector.instances.join(p.server.connector.lifeOf(p.server, id))
		p.inst.follows(id.timeline)
		if before := p.server.instance.Swap(p.hash()); fresh {
			p.server.logInstance(before, p.hash())
		}
		if id.inRecovery {
			p.saw(id.position)
		}
	}
	if hook := p.server.config.AfterConnect; hook != nil {
		if err := contained("AfterConnect", func() error { return hook(ctx, p.pg) }); err != nil {
			return hookError{fmt.Errorf("AfterConnect: %w", err)}
		}
	}
	return nil
}

// connect opens one connection of the server as pgx does for database/sql. What the server says beside its answers goes to heard.
func (s *server) connect(ctx context.Context, a access, parameter, probe bool, heard *overheard) (*stdlib.Conn, error) {
	config := s.config.ConnConfig.Copy()
	onNotice := config.OnNotice
	config.OnNotice = func(conn *pgconn.PgConn, notice *pgconn.Notice) {
		heard.begun = heard.begun || notice.Code == codeActiveTx
		if onNotice != nil {
			onNotice(conn, notice)
		}
	}
	if probe {
		config.RuntimeParams["application_name"] = probeName
	}
	if parameter {
		config.RuntimeParams[readOnlyParameter] = "on"
		if sameCheck(config.ValidateConnect, pgconn.ValidateConnectTargetSessionAttrsReadWrite) {
			// F24: pgx would refuse the read-only session that we ask for.
			config.ValidateConnect = pgconn.ValidateConnectTargetSessionAttrsPrimary
		}
	}
	if hook := s.config.BeforeConnect; hook != nil {
		if err := contained("BeforeConnect", func() error { return hook(ctx, config) }); err != nil {
			return nil, hookError{fmt.Errorf("BeforeConnect: %w", err)}
		}
	}
	switch {
	case a == readOnly:
	case config.Tracer == nil:
		config.Tracer = heard
	default:
		config.Tracer = multitracer.New(config.Tracer, heard)
	}
	if !s.replica() && s.hosts > 1 {
		config.ValidateConnect = s.isPrimary(s.highest(ctx, config), config.ValidateConnect)
	}
	var conn driver.Conn
	err := contained("connect", func() (err error) { // it calls the config's functions and tracers
		conn, err = stdlib.GetConnector(*config).Connect(ctx)
		return err
	})
	if err != nil {
		if config.Password != s.config.ConnConfig.Password { // nobody else knows the one that BeforeConnect set
			err = without(config.Password, err)
		}
		return nil, err
	}
	return conn.(*stdlib.Conn), nil
}

// probeName is the application_name of probes in pg_stat_activity.
const probeName = "pgsplit probe"

// contained runs what is the program's own. A panic becomes an error: one that went on from here would leave a
// connection counted for ever, or end the program from a goroutine that no caller can guard.
func contained(what string, f func() error) (err error) {
	defer func() {
		if cause := recover(); cause != nil {
			err = fmt.Errorf("pgsplit: panic in %s: %v\n%s", what, cause, debug.Stack())
		}
	}()
	return f()
}
