package main

import (
	"context"
	"errors"
	"net"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"unicode"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/pgsplit/pgsplit"
)

// The roles that a server is configured for and an instance is found in.
const (
	rolePrimary = "primary"
	roleReplica = "replica"
	roleStandby = "standby"
)

// server is what was learnt of one configured server.
type server struct {
	Name  string  `json:"name"`
	Role  string  `json:"role"`
	Attrs string  `json:"target_session_attrs"`
	Hosts []*host `json:"addresses"`
}

// host is one address of a server. It can hide several instances.
type host struct {
	Address   string      `json:"address"`
	Attempts  int         `json:"attempts"`
	Failed    int         `json:"failed"`
	Cause     string      `json:"cause"` // of the last attempt that failed
	Code      string      `json:"sqlstate"`
	Detail    string      `json:"detail"`
	Instances []*instance `json:"instances"`
}

// instance is one running PostgreSQL, as it answered at one address.
type instance struct {
	Found    string `json:"found"`
	Version  string `json:"version"`
	System   string `json:"system_identifier"`
	Timeline uint32 `json:"timeline"`
	Position string `json:"position"`
	Lag      *lag   `json:"lag"`
	ReadOnly string `json:"read_only"`
	Pooled   bool   `json:"pooler"`
	Listen   string `json:"server_address"` // as the server itself says; empty over a Unix socket
	// What the role may not do, as far as the driver or this command would like to.
	Missing     []string `json:"missing_privileges"`
	SeesOthers  bool     `json:"sees_other_sessions"` // pg_stat_replication, pg_stat_activity, pg_stat_wal_receiver in full
	Receiving   bool     `json:"receiving"`
	Paused      bool     `json:"replay_paused"`
	Slot        string   `json:"primary_slot_name"`
	HasArchive  bool     `json:"restore_command"`
	Feedback    bool     `json:"hot_standby_feedback"`
	CancelAfter int64    `json:"max_standby_streaming_delay_ms"` // -1: never
	FromArchive int64    `json:"max_standby_archive_delay_ms"`   // the same while it replays from restore_command

	Slots        []string `json:"slots"` // of a primary
	KeepMB       int64    `json:"wal_keep_size_mb"`
	WithoutSlot  int64    `json:"senders_without_slot"`
	RefusesWrite bool     `json:"default_transaction_read_only"` // of a session that did not ask for it

	num      int    // server_version_num
	id       string // the same however the instance is reached, another for each of its lives
	position pgsplit.LSN
	block    uint64
	segment  uint64
}

// lag is how far an instance is behind the position that the primary had reached just before.
type lag struct {
	Bytes uint64 `json:"bytes"` // when it was asked first
	// Proven tells that it got there while this command looked; then it was no staler than Millis at that moment. Else it
	// is staler than that.
	Proven bool   `json:"proven"`
	Millis int64  `json:"ms"`
	Left   uint64 `json:"bytes_left"` // when it was asked last
}

// What became of the startup parameter that makes a session read only (F8, F23).
const (
	readOnlyHolds   = "parameter"
	readOnlyDropped = "dropped"
	readOnlyRefused = "refused"
)

const readOnlyParameter = "default_transaction_read_only"

func (i *instance) standby() bool { return i.Found == roleStandby }

func (i *instance) major() int { return i.num / 10000 }

// sessionAttrs are the words for what pgx makes of target_session_attrs.
var sessionAttrs = map[uintptr]string{
	pointer(pgconn.ValidateConnectTargetSessionAttrsPrimary):       "primary",
	pointer(pgconn.ValidateConnectTargetSessionAttrsReadWrite):     "read-write",
	pointer(pgconn.ValidateConnectTargetSessionAttrsStandby):       "standby",
	pointer(pgconn.ValidateConnectTargetSessionAttrsReadOnly):      "read-only",
	pointer(pgconn.ValidateConnectTargetSessionAttrsPreferStandby): "prefer-standby",
}

func pointer(f pgconn.ValidateConnectFunc) uintptr { return reflect.ValueOf(f).Pointer() }

func attrsOf(f pgconn.ValidateConnectFunc) string {
	if f == nil {
		return "any"
	}
	return sessionAttrs[pointer(f)]
}

// basicsQuery is what every role may ask on every version since 13. The functions of the first line are those that the
// driver calls.
const basicsQuery = `select pg_catalog.pg_is_in_recovery()::text,
 pg_catalog.current_setting('default_transaction_read_only'),
 pg_catalog.current_setting('server_version_num'),
 pg_catalog.current_setting('server_version'),
 pg_catalog.pg_backend_pid()::text,
 pg_catalog.current_setting('port'),
 coalesce(pg_catalog.host(pg_catalog.inet_server_addr()) || ' ' || pg_catalog.inet_server_port(), ''),
 coalesce((select string_agg(distinct proname::text, ' ') from pg_catalog.pg_proc
  where pronamespace = 'pg_catalog'::regnamespace and not has_function_privilege(oid, 'execute')
  and proname in ('pg_control_system', 'pg_control_checkpoint', 'pg_control_recovery', 'pg_postmaster_start_time',
   'pg_last_wal_replay_lsn', 'pg_current_wal_insert_lsn', 'pg_current_wal_flush_lsn', 'pg_walfile_name',
   'pg_logical_emit_message')), ''),
 coalesce((select string_agg(v, ' ') from unnest(array['pg_stat_replication', 'pg_stat_activity', 'pg_stat_wal_receiver',
  'pg_stat_bgwriter', 'pg_replication_slots']) v where not has_table_privilege('pg_catalog.' || v, 'select')), ''),
 pg_has_role('pg_read_all_stats', 'usage')::text,
 pg_catalog.current_setting('primary_slot_name'),
 (pg_catalog.current_setting('restore_command') <> '')::text,
 pg_catalog.current_setting('hot_standby_feedback'),
 (select setting from pg_catalog.pg_settings where name = 'max_standby_streaming_delay'),
 (select setting from pg_catalog.pg_settings where name = 'max_standby_archive_delay'),
 (select setting from pg_catalog.pg_settings where name = 'wal_keep_size'),
 pg_catalog.pg_size_bytes(pg_catalog.current_setting('wal_block_size'))::text,
 pg_catalog.pg_size_bytes(pg_catalog.current_setting('wal_segment_size'))::text`

// The rest may be forbidden, each by itself: then its answer stays unknown.
const (
	systemQuery  = `select system_identifier::text from pg_catalog.pg_control_system()`
	startedQuery = `select (extract(epoch from pg_catalog.pg_postmaster_start_time()) * 1000000)::bigint::text`
	// F10: what the control file says lags until the next restartpoint.
	standbyTimelineQuery = `select greatest(c.timeline_id, r.min_recovery_end_timeline, w.received_tli)::text
 from pg_catalog.pg_control_checkpoint() c, pg_catalog.pg_control_recovery() r
 left join pg_catalog.pg_stat_wal_receiver w on true`
	primaryTimelineQuery = `select ('x' || left(pg_catalog.pg_walfile_name(pg_catalog.pg_current_wal_lsn()), 8))::bit(32)::bigint::text`
	flushQuery           = `select pg_catalog.pg_current_wal_flush_lsn()::text`
	replayQuery          = `select pg_catalog.pg_last_wal_replay_lsn()::text`
	// A role without pg_read_all_stats sees that there is a receiver, and no more.
	standbyQuery = `select pg_catalog.pg_is_wal_replay_paused()::text,
 (select count(*) from pg_catalog.pg_stat_wal_receiver)::text`
	primaryQuery = `select coalesce((select string_agg(slot_name::text, ' ') from pg_catalog.pg_replication_slots), ''),
 (select count(*) from pg_catalog.pg_stat_replication r where not exists
  (select from pg_catalog.pg_replication_slots s where s.active_pid = r.pid))::text`
	readOnlyQuery = `select pg_catalog.current_setting('default_transaction_read_only')`
)

// learn asks an instance for everything. asked is what became of the read-only parameter when the connection was opened.
//
// It does so inside one transaction, during which a pooler stays with one server.
func learn(ctx context.Context, conn *pgx.Conn, asked string) (*instance, error) {
	if err := execute(ctx, conn, "begin read only"); err != nil {
		return nil, err
	}
	row, err := ask(ctx, conn, basicsQuery)
	if err != nil {
		return nil, err
	}
	i := &instance{Found: rolePrimary, Missing: []string{}, Slots: []string{}}
	if row.text() == "true" {
		i.Found = roleStandby
	}
	held := row.text() == "on"
	i.num = int(row.number())
	i.Version, _, _ = strings.Cut(row.text(), " ")
	i.Pooled = uint32(row.number()) != conn.PgConn().PID()
	port := row.text()
	if address, port, ok := strings.Cut(row.text(), " "); ok {
		i.Listen = net.JoinHostPort(address, port)
	}
	i.Missing = append(append(i.Missing, strings.Fields(row.text())...), strings.Fields(row.text())...)
	i.SeesOthers = row.text() == "true"
	i.Slot = row.text()
	i.HasArchive = row.text() == "true"
	i.Feedback = row.text() == "on"
	i.CancelAfter = row.number()
	i.FromArchive = row.number()
	i.KeepMB = row.number()
	i.block, i.segment = uint64(row.number()), uint64(row.number())

	i.System = askOne(ctx, conn, systemQuery)
	started := askOne(ctx, conn, startedQuery)
	if i.id = i.System + " " + port + " " + started; started == "" {
		i.id += conn.PgConn().Conn().RemoteAddr().String()
	}
	timeline, position := primaryTimelineQuery, flushQuery
	if i.standby() {
		timeline, position = standbyTimelineQuery, replayQuery
		if row, err := ask(ctx, conn, standbyQuery); err == nil {
			i.Paused = row.text() == "true"
			i.Receiving = row.text() != "0"
		}
	} else if row, err := ask(ctx, conn, primaryQuery); err == nil {
		i.Slots = strings.Fields(row.text())
		i.WithoutSlot = row.number()
	}
	n, _ := strconv.ParseUint(askOne(ctx, conn, timeline), 10, 32)
	i.Timeline = uint32(n)
	i.setPosition(askOne(ctx, conn, position))

	if err := execute(ctx, conn, "commit"); err != nil {
		return nil, err
	}
	// As the driver does it: the parameter arrived, and the session says so since 14. Asked twice, because a pooler can
	// have put the transaction elsewhere.
	held = held && askOne(ctx, conn, readOnlyQuery) == "on"
	if i.num >= 140000 {
		held = held && conn.PgConn().ParameterStatus(readOnlyParameter) == "on"
	}
	if i.ReadOnly = asked; asked == readOnlyHolds && !held {
		i.ReadOnly = readOnlyDropped
	}
	return i, ctx.Err()
}

func (i *instance) setPosition(text string) {
	if lsn, err := pgsplit.ParseLSN(text); err == nil {
		i.position, i.Position = lsn, lsn.String()
	}
}

// replayable is the position that a standby reaches once it has all that lies before the primary's: not the one just
// behind a page header where nothing was written yet (F3).
func (i *instance) replayable() pgsplit.LSN {
	const pageHeader, segmentHeader = 24, 40
	switch l := i.position; {
	case i.segment != 0 && uint64(l)%i.segment == segmentHeader:
		return l - segmentHeader
	case i.block != 0 && uint64(l)%i.block == pageHeader:
		return l - pageHeader
	default:
		return l
	}
}

// ask runs a query of one row as a simple one, which every pooler takes. One that fails leaves the transaction around it
// usable.
func ask(ctx context.Context, conn *pgx.Conn, sql string) (*fields, error) {
	inTx := conn.PgConn().TxStatus() != 'I'
	if inTx {
		sql = "savepoint pgsplit; " + sql
	}
	results, err := conn.PgConn().Exec(ctx, sql).ReadAll()
	if err != nil {
		if inTx {
			_ = execute(ctx, conn, "rollback to savepoint pgsplit") // the first error tells more
		}
		return nil, err
	}
	if len(results) == 0 || len(results[len(results)-1].Rows) != 1 {
		return nil, errors.New("the server's answer is not one row")
	}
	return &fields{results[len(results)-1].Rows[0]}, nil
}

func execute(ctx context.Context, conn *pgx.Conn, sql string) error {
	_, err := conn.PgConn().Exec(ctx, sql).ReadAll()
	return err
}

// askOne returns one value, "" where there is none or it is forbidden.
func askOne(ctx context.Context, conn *pgx.Conn, sql string) string {
	row, err := ask(ctx, conn, sql)
	if err != nil {
		return ""
	}
	return row.text()
}

// fields reads a row of text values one after the other.
type fields struct{ values [][]byte }

func (f *fields) text() string {
	if len(f.values) == 0 {
		return ""
	}
	v := printable(string(f.values[0]))
	f.values = f.values[1:]
	return v
}

func (f *fields) number() int64 {
	n, _ := strconv.ParseInt(f.text(), 10, 64)
	return n
}

// printable is a text of a server's as one line, without what a terminal would obey.
func printable(s string) string {
	return strings.Map(func(r rune) rune {
		switch {
		case unicode.IsSpace(r):
			return ' '
		case !unicode.IsPrint(r):
			return unicode.ReplacementChar
		}
		return r
	}, s)
}

// cause says in a few words why a connection failed.
func cause(err error) (text, code, detail string) {
	text, code, detail = causeOf(err)
	return printable(text), printable(code), printable(detail)
}

// causeOf goes past pgx's own error, which names user and database, and every address twice.
func causeOf(err error) (text, code, detail string) {
	var pgErr *pgconn.PgError
	var dial interface{ Timeout() bool }
	var lookup *net.DNSError
	switch {
	case errors.As(err, &pgErr):
		return pgErr.Message, pgErr.Code, pgErr.Detail
	case errors.Is(err, context.DeadlineExceeded), errors.As(err, &dial) && dial.Timeout():
		return "no answer in time", "", ""
	case errors.As(err, &lookup):
		return lookup.Err, "", "" // without the name, which the report has already
	}
	for {
		switch wrapped := err.(type) {
		case interface{ Unwrap() error }:
			if wrapped.Unwrap() == nil {
				return err.Error(), "", ""
			}
			err = wrapped.Unwrap()
		case interface{ Unwrap() []error }:
			all := wrapped.Unwrap()
			if len(all) == 0 {
				return err.Error(), "", ""
			}
			err = all[len(all)-1]
		default:
			return err.Error(), "", ""
		}
	}
}

// label names an instance, or an address if it is nil: by its server, and by what tells it from the server's others.
func (s *server) label(h *host, i *instance) string {
	label := s.Name
	if len(s.Hosts) > 1 && h.Address != s.Name {
		label += " (" + h.Address + ")"
	}
	if i != nil && len(h.Instances) > 1 {
		label += " #" + strconv.Itoa(1+slices.Index(h.Instances, i))
	}
	return label
}

// used returns the instances that the driver would use: those of the first address where one is accepted.
func (s *server) used() []*instance {
	h := s.usedHost()
	if h == nil {
		return nil
	}
	return slices.DeleteFunc(slices.Clone(h.Instances), func(i *instance) bool { return !s.accepts(i) })
}

func (s *server) usedHost() *host {
	preferStandby := s.Attrs == "prefer-standby"
	for _, h := range s.Hosts {
		for _, i := range h.Instances {
			if s.accepts(i) && (!preferStandby || i.standby()) {
				return h
			}
		}
	}
	if preferStandby {
		for _, h := range s.Hosts {
			if len(h.Instances) > 0 {
				return h
			}
		}
	}
	return nil
}

// accepts tells whether target_session_attrs lets the driver use the instance. Its sessions on replicas are read only by
// themselves, so read-only refuses none.
//
// Of several hosts of the primary that take writes the driver uses the one on the highest timeline.
func (s *server) accepts(i *instance) bool {
	if s.Role == rolePrimary && !i.standby() && i.Timeline < s.highestTimeline() {
		return false
	}
	switch s.Attrs {
	case "primary", "read-write":
		return !i.standby()
	case "standby":
		return i.standby()
	}
	return true
}

// highestTimeline is the highest one that an instance of the server writes.
func (s *server) highestTimeline() (highest uint32) {
	for _, h := range s.Hosts {
		for _, i := range h.Instances {
			if !i.standby() {
				highest = max(highest, i.Timeline)
			}
		}
	}
	return highest
}
