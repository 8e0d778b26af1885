package pgsplit

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"encoding/binary"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/stdlib"
)

// access is what a physical connection was opened for.
type access uint8

const (
	readWrite access = iota
	readOnly
	accessCount
)

// physical is one physical connection of a server: idle in the server's pool, or leased by one shell, which alone may
// use it then.
type physical struct {
	std    *stdlib.Conn
	pg     *pgx.Conn
	server *server
	inst   *instance // nil if the server would not say who it is

	overheard *overheard
	lifetime  time.Duration // after which it is closed; 0: never
	idleSince moment        // when it last became idle; guarded by server.mu
	wrapping  *wrapping     // nil without Config.WrapConnector
	leases    int           // how often it was leased
	access    access        // what it is good for now
	opened    access        // what it was opened for
	where     whereState

	checkPrepared bool // the server holds checkStatement
	unfit         bool // not for the next lease: it wrote, and could not
	reply         reply
	statements    statements
	id            identity
	born          moment
	unturned      string // what turn found the session's read-only setting to be
}

func (p *physical) conn() *pgconn.PgConn { return p.pg.PgConn() }

func (p *physical) closed() bool { return p.pg.IsClosed() }

// inTx tells whether the server's last word was that a transaction is open or failed.
func (p *physical) inTx() bool { return p.conn().TxStatus() != 'I' }

// enforced tells whether the session itself refuses writes, at no cost: the startup parameter arrived and still holds. A
// server says that since 14: on an older one, as behind a pooler, nobody would notice that a caller has switched it off (F8, F23).
func (p *physical) enforced() bool {
	if p.access != readOnly || p.id.pooled || p.id.version < 140000 {
		return false
	}
	return p.conn().ParameterStatus(readOnlyParameter) == "on"
}

// turns tells whether turn may give the session the other access. One that was opened read only is never turned: a
// DISCARD ALL of its caller would take the writes from it again.
func (p *physical) turns() bool {
	return p.opened == readWrite && !p.id.pooled && p.id.version >= 140000
}

// turn makes a session that was opened for writes refuse them, or take them again: one round trip, where another
// connection would take several. It tells whether the server says so.
func (p *physical) turn(ctx context.Context, a access) (bool, error) {
	value := p.unturned
	if a == readOnly {
		p.unturned, value = p.conn().ParameterStatus(readOnlyParameter), "on"
	}
	if err := p.command(ctx, "set "+readOnlyParameter+" = "+value); err != nil {
		return false, ctx.Err()
	}
	p.access = a
	return p.conn().ParameterStatus(readOnlyParameter) == value, nil
}

// remembers tells whether positions read on this connection hold for its instance.
func (p *physical) remembers() bool { return p.inst != nil && !p.id.pooled }

// knows tells whether a position read from its instance covers the floor.
func (p *physical) knows(floor LSN) bool { return p.remembers() && p.inst.has(floor) }

// checkSQL asks how far a standby has replayed. It answers NULL on a primary, promoted ones included, whose
// pg_last_wal_replay_lsn() may be left over from a recovery (F7).
const (
	checkSQL       = `select case when pg_catalog.pg_is_in_recovery() then pg_catalog.pg_last_wal_replay_lsn() end`
	checkStatement = "pgsplit_check"
)

// replayed reads the replay position, zero if unproven, as a statement of its own: what is read on this connection
// afterwards sees at least that (F4). One round trip.
//
// Inside a transaction, and behind a pooler, it goes as a simple query: a failed named statement would abort the one,
// and stay on somebody else's connection at the other.
func (p *physical) replayed(ctx context.Context) (LSN, error) {
	lsn, err := p.askReplayed(ctx)
	if err != nil {
		return 0, err
	}
	p.server.stats.checks.Add(1)
	p.saw(lsn)
	return lsn, nil
}

// saw notes a replay position, for the order of the next reads and, under the life that it was read in, as a proof.
func (p *physical) saw(lsn LSN) {
	s := p.server
	s.asked.store(present())
	s.positionAt.Store(time.Now().UnixNano())
	// Answers of one life may overtake each other.
	if who := p.hash(); lsn < LSN(s.position.Swap(uint64(lsn))) && who != s.answered.Load() {
		s.stats.setbacks.Add(1)
	}
	s.answered.Store(p.hash())
	if lsn != 0 && p.remembers() {
		p.inst.reached(lsn)
	}
}

func (p *physical) askReplayed(ctx context.Context) (LSN, error) {
	if mutant == checkInsideSnapshot && !p.inTx() {
		_ = p.command(ctx, "begin isolation level repeatable read read only")
	}
	if p.id.pooled || p.inTx() {
		return p.askSimply(ctx)
	}
	if p.checkPrepared {
		result := p.conn().ExecPrepared(ctx, checkStatement, nil, nil, []int16{pgx.BinaryFormatCode}).Read()
		var pgErr *pgconn.PgError
		if !errors.As(result.Err, &pgErr) || pgErr.Code != "26000" {
			return binaryLSN(result)
		}
		// The session's owner ran DISCARD ALL or DEALLOCATE ALL.
	}
	pipeline := p.conn().StartPipeline(ctx)
	pipeline.SendPrepare(checkStatement, checkSQL, nil)
	pipeline.SendQueryPrepared(checkStatement, nil, nil, []int16{pgx.BinaryFormatCode})
	err := pipeline.Sync()
	var result *pgconn.Result
	for err == nil {
		var next any
		if next, err = pipeline.GetResults(); err != nil {
			break
		}
		switch next := next.(type) {
		case *pgconn.ResultReader:
			result = next.Read()
			err = result.Err
		case *pgconn.PipelineSync:
			err = pipeline.Close()
			if err == nil && result == nil {
				err = errors.New("the check came back without a result")
			}
			if err != nil {
				return 0, err
			}
			p.checkPrepared = true
			return binaryLSN(result)
		}
	}
	_ = pipeline.Close() // the first error tells more
	return 0, err
}

func (p *physical) askSimply(ctx context.Context) (LSN, error) {
	results, err := p.conn().Exec(ctx, checkSQL).ReadAll()
	if err != nil {
		return 0, err
	}
	if len(results) != 1 || len(results[0].Rows) != 1 || results[0].Rows[0][0] == nil {
		if mutant == nullCaughtUp {
			return unproven - 1, nil
		}
		return 0, nil
	}
	return ParseLSN(string(results[0].Rows[0][0]))
}

func binaryLSN(result *pgconn.Result) (LSN, error) {
	if result.Err != nil {
		return 0, result.Err
	}
	if len(result.Rows) != 1 || len(result.Rows[0]) != 1 || len(result.Rows[0][0]) != 8 {
		if mutant == nullCaughtUp {
			return unproven - 1, nil
		}
		return 0, nil // NULL: not a standby, or one that has replayed nothing yet
	}
	return LSN(binary.BigEndian.Uint64(result.Rows[0][0])), nil
}

// Between two looks at a replica that is behind: short at first, because most are behind by less than a millisecond.
const (
	firstPoll = 500 * time.Microsecond
	lastPoll  = 20 * time.Millisecond
)

// reaches waits until the floor is replayed, for the budget at most. It tells how it went; an error is the
// connection's or the context's.
func (p *physical) reaches(ctx context.Context, floor LSN, budget time.Duration) (bool, error) {
	if p.id.version >= 190000 && !p.id.pooled && p.id.inRecovery && mutant != checkInsideSnapshot {
		return p.waitFor(ctx, floor, budget)
	}
	deadline := time.Now().Add(budget)
	timer := time.NewTimer(firstPoll)
	defer timer.Stop()
	for pause := firstPoll; ; pause = min(2*pause, lastPoll) {
		lsn, err := p.replayed(ctx)
		if err != nil || lsn >= floor {
			return err == nil, err
		}
		left := time.Until(deadline)
		if left <= 0 {
			return false, nil
		}
		timer.Reset(min(pause, left))
		select {
		case <-timer.C:
		case <-ctx.Done():
			return false, ctx.Err()
		}
	}
}

// waitFor lets the server wait. A timeout that rounds to 0 would wait for ever, and without NO_THROW one would look
// like a cancel (F15).
func (p *physical) waitFor(ctx context.Context, floor LSN, budget time.Duration) (bool, error) {
	timeout := max(budget.Milliseconds(), 1)
	results, err := p.conn().Exec(ctx, "wait for lsn '"+floor.String()+"' with (mode 'standby_replay', timeout '"+
		strconv.FormatInt(timeout, 10)+"ms', no_throw)").ReadAll()
	if err != nil {
		return false, err
	}
	if len(results) != 1 || len(results[0].Rows) != 1 || string(results[0].Rows[0][0]) != "success" {
		return false, nil
	}
	p.saw(floor)
	return true, nil
}

// ends are where a primary's log ends: what is flushed, and what is inserted, as far as a standby can replay that (F3).
type ends struct{ flushed, inserted LSN }

// askWhere asks for them. What is flushed comes last: it may be past what was inserted a moment before, and is enough then.
const askWhere = "select pg_catalog.pg_current_wal_insert_lsn(), pg_catalog.pg_current_wal_flush_lsn()"

func (p *physical) askEnds(ctx context.Context) (ends, error) {
	row, err := p.simpleRow(ctx, askWhere)
	if err != nil {
		return ends{}, err
	}
	return p.ends(row[0], row[1])
}

// ends reads the answer to askWhere.
func (p *physical) ends(inserted, flushed string) (at ends, err error) {
	if at.inserted, err = ParseLSN(inserted); err != nil {
		return at, err
	}
	at.inserted = p.id.wal.replayable(at.inserted)
	at.flushed, err = ParseLSN(flushed)
	return at, err
}

// covering reads, on a primary, a position that covers every commit that returned before the call, whatever their
// synchronous_commit, and that the primary has flushed, so that a standby can reach it. One round trip, two if
// something was not flushed yet.
//
// Only the insert position covers asynchronous commits; where it is above the flush position a small commit of our own
// moves flush past it (F2). The commit is a local one: it waits for no standby.
func (p *physical) covering(ctx context.Context) (LSN, error) {
	at, err := p.askEnds(ctx)
	var pgErr *pgconn.PgError
	if errors.As(err, &pgErr) && pgErr.Code == codeInRecovery {
		err = fmt.Errorf("%w: %s is in recovery: %w", ErrNoPrimary, p.server, err)
	}
	if err != nil {
		return 0, err
	}
	if mutant == flushAfterAsync {
		return at.flushed, nil
	}
	if at.inserted <= at.flushed {
		return at.inserted, nil
	}
	_, err = p.conn().Exec(ctx, `begin isolation level read committed read write; set local synchronous_commit = local;
select pg_catalog.pg_logical_emit_message(true, 'pgsplit', ''); commit`).ReadAll()
	if err != nil && p.inTx() {
		// A failed multi-statement message leaves its transaction open.
		_ = p.pg.Close(ctx)
	}
	return at.inserted, err
}

// simpleRow runs a simple query that answers one row and returns its values.
func (p *physical) simpleRow(ctx context.Context, sql string) ([]string, error) {
	results, err := p.conn().Exec(ctx, sql).ReadAll()
	if err != nil {
		return nil, err
	}
	if len(results) != 1 || len(results[0].Rows) != 1 {
		return nil, fmt.Errorf("%q answered no row", sql)
	}
	values := make([]string, len(results[0].Rows[0]))
	for i, v := range results[0].Rows[0] {
		values[i] = string(v)
	}
	return values, nil
}

// command runs a utility statement without parameters.
func (p *physical) command(ctx context.Context, sql string) error {
	_, err := p.conn().Exec(ctx, sql).ReadAll()
	return err
}

// statements counts who still uses the server's copies of prepared statements. Closing one only takes note, because
// database/sql closes statements while it holds its own lock (F21); the server's copy goes when its text is used again,
// or when there are many.
type statements struct {
	dead atomic.Int64   // texts at 0; changed under mu
	mu   sync.Mutex     // never held across I/O
	refs map[string]int // users by text; 0: closed by all, still on the server; guarded by mu
}

// keepDead is how many closed statements may stay on the server until they go together.
const keepDead = 64

func (s *statements) use(text string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.refs == nil {
		s.refs = make(map[string]int)
	}
	s.refs[text]++
}

func (s *statements) release(text string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.refs[text]--; s.refs[text] == 0 {
		s.dead.Add(1)
	}
}

// stale takes the texts to remove from the server before text is used: its own closed copy, whose plan may be older than
// the table it names, and all closed ones once they are many.
func (s *statements) stale(text string) []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	var stale []string
	if s.dead.Load() > keepDead {
		for known, users := range s.refs {
			if users == 0 {
				stale = append(stale, known)
			}
		}
	} else if users, known := s.refs[text]; known && users == 0 {
		stale = append(stale, text)
	}
	for _, text := range stale {
		delete(s.refs, text)
	}
	s.dead.Add(-int64(len(stale)))
	return stale
}

// forget makes sure that text does not run as a statement that was closed, which pgx would go on using for it.
func (p *physical) forget(ctx context.Context, text string) error {
	if p.statements.dead.Load() == 0 {
		return nil
	}
	return p.forgetDead(ctx, text)
}

func (p *physical) forgetDead(ctx context.Context, text string) error {
	for _, closed := range p.statements.stale(text) {
		if err := p.pg.Deallocate(ctx, closed); err != nil {
			return unsent(err)
		}
	}
	return nil
}

// prepare has the server parse the text and returns the number of its parameters. Behind a pooler the server keeps
// nothing: the statement might run on another one.
func (p *physical) prepare(ctx context.Context, text string) (int, error) {
	if p.id.pooled {
		description, err := p.conn().Prepare(ctx, "", text, nil)
		if err != nil {
			return 0, unsent(err)
		}
		return len(description.ParamOIDs), nil
	}
	if err := p.forget(ctx, text); err != nil {
		return 0, err
	}
	description, err := p.pg.Prepare(ctx, text, text)
	if err != nil {
		return 0, unsent(err)
	}
	p.statements.use(text)
	return len(description.ParamOIDs), nil
}

// unsent tells database/sql, as pgx does for statements, when it may try another connection.
func unsent(err error) error {
	if pgconn.SafeToRetry(err) {
		return driver.ErrBadConn
	}
	return err
}

// close ends the connection. It does not wait for the server.
func (p *physical) close() {
	if hook := p.server.config.BeforeClose; hook != nil {
		_ = contained("BeforeClose", func() error { // there is nobody to tell
			hook(p.pg)
			return nil
		})
	}
	if p.wrapping != nil {
		p.wrapping.end()
	}
	ctx, cancel := context.WithTimeout(context.Background(), closeTimeout)
	defer cancel()
	_ = p.pg.Close(ctx) // it is gone either way
	if p.inst != nil {
		p.server.connector.instances.leave(p.inst)
	}
	p.server.mu.Lock()
	delete(p.server.conns, p)
	p.server.mu.Unlock()
}

const closeTimeout = 5 * time.Second

// unsupportedParameter tells whether a pooler refused the startup because of the read-only parameter (F8).
func unsupportedParameter(err error) bool {
	var pgErr *pgconn.PgError
	return errors.As(err, &pgErr) && pgErr.Code == "08P01" && strings.Contains(pgErr.Message, readOnlyParameter)
}

// reachesOrHas asks once whether the floor is replayed, and again until the time to wait is over.
func (p *physical) reachesOrHas(ctx context.Context, floor LSN, wait time.Duration) (bool, Reason, error) {
	lsn, err := p.replayed(ctx)
	if err != nil || lsn >= floor {
		return err == nil, ReasonFloorChecked, err
	}
	if wait <= 0 {
		return false, ReasonReplicasBehind, nil
	}
	began := time.Now()
	reached, err := p.reaches(ctx, floor, wait)
	p.server.stats.waits.Add(1)
	p.server.stats.waited.Add(int64(time.Since(began)))
	return reached, ReasonFloorWaited, err
}

// readCommitted tells whether each statement of the open transaction takes a snapshot of its own. Where the caller named
// the isolation there is nothing to ask.
func (p *physical) readCommitted(ctx context.Context, w work) (bool, error) {
	if !w.begin || w.isolation != sql.LevelDefault {
		return true, nil
	}
	values, err := p.simpleRow(ctx, "show transaction_isolation")
	if err != nil {
		return false, err
	}
	return values[0] == "read committed" || values[0] == "read uncommitted", nil
}
