package pgsplit

import (
	"context"
	"errors"
	"fmt"
	"hash/fnv"
	"strconv"
	"sync"
	"sync/atomic"

	"github.com/jackc/pgx/v5/pgconn"
)

// life tells one life of one running PostgreSQL from every other (F7): the address and port of clones differ, the start
// time of restarts, and the time of the last statistics reset of the lives before and after a crash recovery.
type life struct {
	system     string // system_identifier
	address    string // the server's own address and port; over a unix socket the path
	started    int64  // pg_postmaster_start_time(), microseconds
	statsReset int64  // pg_stat_bgwriter.stats_reset, microseconds
}

// instance is what is remembered of one life: positions are kept here and nowhere else, so that a restarted or
// exchanged server starts with nothing known.
type instance struct {
	position atomic.Uint64 // highest replay position read under this life
	timeline atomic.Uint32 // highest timeline that it is known to follow
	answered sharedMoment  // when a connection that was idle answered a ping last
	hash     uint32        // of life, never 0: for sessions and their tokens
	life     life
	refs     int // connections to it; guarded by instances.mu
}

// reached remembers that a connection of this life read the position.
func (i *instance) reached(lsn LSN) {
	for {
		known := i.position.Load()
		if uint64(lsn) <= known || i.position.CompareAndSwap(known, uint64(lsn)) {
			return
		}
	}
}

// follows remembers a timeline that a connection of this life learnt of.
func (i *instance) follows(timeline uint32) {
	for {
		known := i.timeline.Load()
		if timeline <= known || i.timeline.CompareAndSwap(known, timeline) {
			return
		}
	}
}

// has tells whether a position read under this life covers the floor.
func (i *instance) has(floor LSN) bool { return LSN(i.position.Load()) >= floor }

func (l life) hash() uint32 {
	h := fnv.New32a()
	fmt.Fprintf(h, "%q %q %d %d", l.system, l.address, l.started, l.statsReset)
	return max(h.Sum32(), 1)
}

// instances are the lives that a connector has connections to.
type instances struct {
	mu    sync.Mutex
	known map[life]*instance // guarded by mu
}

// join is the instance of the life, and whether it is one that no connection led to until now.
func (s *instances) join(l life) (i *instance, fresh bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	i = s.known[l]
	if fresh = i == nil; fresh {
		if s.known == nil {
			s.known = make(map[life]*instance)
		}
		i = &instance{life: l, hash: l.hash()}
		s.known[l] = i
	}
	i.refs++
	return i, fresh
}

func (s *instances) leave(i *instance) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if i.refs--; i.refs == 0 && mutant != keepAfterRestart {
		delete(s.known, i.life)
	}
}

// identity is what a physical connection learns once, right after it was opened.
type identity struct {
	system     uint64 // system_identifier, zero if it was not told
	version    int    // server_version_num
	timeline   uint32 // on a standby as far as the role may see it (F10)
	inRecovery bool
	pooled     bool // somebody stands in between: nothing here holds beyond one transaction (F23)
	position   LSN  // replay position, zero on a primary
	wal        walGeometry
	life       life
}

// identityQuery is open to every role, on every version since 13. It is sent as a simple query, which every pooler
// takes. The names are qualified because the session's search_path is the caller's.
const identityQuery = `select pg_catalog.pg_is_in_recovery()::text,
 pg_catalog.current_setting('server_version_num'),
 pg_catalog.pg_backend_pid()::text,
 (select system_identifier::text from pg_catalog.pg_control_system()),
 coalesce(pg_catalog.host(pg_catalog.inet_server_addr()) || ' ' || pg_catalog.inet_server_port(), ''),
 (extract(epoch from pg_catalog.pg_postmaster_start_time()) * 1000000)::bigint::text,
 coalesce((select (extract(epoch from stats_reset) * 1000000)::bigint from pg_catalog.pg_stat_bgwriter), 0)::text,
 ` + timelineExpression + `,
 pg_catalog.pg_size_bytes(pg_catalog.current_setting('wal_block_size'))::text,
 pg_catalog.pg_size_bytes(pg_catalog.current_setting('wal_segment_size'))::text,
 case when pg_catalog.pg_is_in_recovery() then pg_catalog.pg_last_wal_replay_lsn()::text end`

// timelineExpression is the timeline that a primary writes, or that a standby follows as far as the role may see it: what
// the control file says lags until the next restartpoint (F10).
const timelineExpression = `case when pg_catalog.pg_is_in_recovery() then
  (select greatest(c.timeline_id, r.min_recovery_end_timeline, w.received_tli)::text
   from pg_catalog.pg_control_checkpoint() c, pg_catalog.pg_control_recovery() r
   left join pg_catalog.pg_stat_wal_receiver w on true)
 else ('x' || left(pg_catalog.pg_walfile_name(pg_catalog.pg_current_wal_lsn()), 8))::bit(32)::bigint::text end`

// identify asks the server behind a new connection who it is: one round trip.
func identify(ctx context.Context, conn *pgconn.PgConn) (identity, error) {
	results, err := conn.Exec(ctx, identityQuery).ReadAll()
	if err != nil {
		return identity{}, err
	}
	if len(results) != 1 || len(results[0].Rows) != 1 {
		return identity{}, errors.New("the server did not say who it is")
	}
	row := fields{values: results[0].Rows[0]}
	var id identity
	id.inRecovery = row.text() == "true"
	id.version = int(row.number())
	id.pooled = uint32(row.number()) != conn.PID()
	id.life.system = row.text()
	id.system, _ = strconv.ParseUint(id.life.system, 10, 64)
	id.life.address = row.text()
	id.life.started = row.number()
	id.life.statsReset = row.number()
	id.timeline = uint32(row.number())
	id.wal = walGeometry{block: uint64(row.number()), segment: uint64(row.number())}
	if text := row.text(); text != "" {
		var err error
		if id.position, err = ParseLSN(text); err != nil {
			return identity{}, err
		}
	}
	if id.life.address == "" {
		// A server does not know its own address over a unix socket.
		id.life.address = conn.Conn().RemoteAddr().String()
	}
	if mutant == positionPerAddress {
		id.life = life{system: id.life.system, address: conn.Conn().RemoteAddr().String()}
	}
	if mutant == keepAfterRestart {
		id.life.started, id.life.statsReset = 0, 0
	}
	return id, row.err
}

// fields reads a row of text values one after the other.
type fields struct {
	values [][]byte
	err    error
}

func (f *fields) text() string {
	if len(f.values) == 0 {
		f.err = errors.New("the server's answer about itself is too short")
		return ""
	}
	v := string(f.values[0])
	f.values = f.values[1:]
	return v
}

func (f *fields) number() int64 {
	text := f.text()
	n, err := strconv.ParseInt(text, 10, 64)
	if err != nil && f.err == nil {
		f.err = fmt.Errorf("the server's answer about itself is not a number: %.20q", text)
	}
	return n
}
