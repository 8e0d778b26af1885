package soak

import (
	"context"
	"database/sql"
	"errors"
	"math/rand/v2"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/pgsplit/pgsplit"
)

// caller is one client: what it does is one operation after the other, each of which it records.
type caller struct {
	*worker
	number int
	rand   *rand.Rand
}

// fork is a caller that does something beside c.
func (c *caller) fork() *caller {
	return &caller{worker: c.worker, number: c.number, rand: rand.New(rand.NewPCG(c.rand.Uint64(), c.rand.Uint64()))}
}

// client is a session of pgsplit, and the operation that began it. Its zero value is no session.
type client struct {
	session *pgsplit.Session
	id      uint64
	carry   bool
}

func (s client) in(ctx context.Context) context.Context {
	if s.session == nil {
		return ctx
	}
	return pgsplit.WithSession(ctx, s.session)
}

func (c *caller) key() int { return c.rand.IntN(c.Keys) }

// one chance in n.
func (c *caller) one(n int) bool { return c.rand.IntN(n) == 0 }

// pause lets time pass.
func pause(ctx context.Context, d time.Duration) {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-ctx.Done():
	}
}

type opKey struct{}

// decided is Config.OnDecision.
func decided(ctx context.Context, d pgsplit.Decision) {
	op, ok := ctx.Value(opKey{}).(*Op)
	if !ok {
		return
	}
	op.Server, op.Role, op.Reason, op.Floor = d.Server, d.Role, d.Reason.String(), ""
	if d.Floor != 0 {
		op.Floor = d.Floor.String()
	}
}

// invoke begins an operation.
func (c *caller) invoke(kind Kind, s client) *Op {
	return &Op{
		ID: uint64(c.Process)<<processBits | c.ids.Add(1), Caller: c.number, Kind: kind, Session: s.id, Start: c.clock.now(),
	}
}

// during is the context of an operation, and how long it may take.
func (op *Op) during(s client, budget time.Duration) (context.Context, context.CancelFunc) {
	op.Budget = int64(budget)
	ctx := context.WithValue(s.in(context.Background()), opKey{}, op)
	return context.WithTimeout(ctx, budget)
}

// complete ends it and records it. certain tells that one that failed has not happened and will not.
func (c *caller) complete(op *Op, err error, certain bool) *Op {
	op.End = c.clock.now()
	op.Outcome = OK
	if err != nil {
		op.Outcome, op.Error = Unknown, err.Error()
		var pgErr *pgconn.PgError
		if errors.As(err, &pgErr) {
			op.State = pgErr.Code
			certain = certain || aborts(pgErr)
		}
		if certain || errors.Is(err, pgx.ErrTxCommitRollback) {
			op.Outcome = Fail
		}
	}
	c.history.record(op)
	if err != nil {
		pause(context.Background(), 5*time.Millisecond)
	}
	return op
}

// aborts tells whether the server's error proves that the statement, or the commit, did not happen: not those that end
// the session, which can come after the commit, nor a cancel.
func aborts(err *pgconn.PgError) bool {
	ends := err.Severity != "ERROR" || err.Code[:2] == "57" || err.Code[:2] == "08" || err.Code == "40003"
	return !ends
}

const (
	writeSQL = `with w as (update register set version = version + 1, op = $2 where key = $1 returning version)
insert into ledger (op, key, version) select $2, $1, version from w`
	// The rows of bulkySQL do not fit into the buffers between the server and the client: it commits when they are read.
	bulkySQL = `with w as (update register set version = version + 1, op = $2 where key = $1 returning version),
l as (insert into ledger (op, key, version) select $2, $1, version from w)
select version, repeat('x', 1000000) from w, generate_series(1, 24)`
	whoSQL  = ` pg_is_in_recovery(), coalesce(inet_server_port(), 0)`
	readSQL = `select version, op,` + whoSQL + ` from register where key = $1`
	slowSQL = `select version, op,` + whoSQL + ` from register, pg_sleep(0.03) where key = $1`
	pageSQL = `select r.version, r.op,` + whoSQL + `, coalesce(l.version, 0), coalesce(l.op, 0)
from register r left join (select version, op from ledger where key = $1 and version > $2 order by version limit 5) l on true
where r.key = $1`
)

// write raises the version of keys, in one of many ways, and pursues the outcome if it is not known.
func (c *caller) write(s client, keys ...int) *Op {
	op := c.invoke(KindWrite, s)
	slices.Sort(keys) // or two callers wait for each other
	for _, key := range keys {
		op.Writes = append(op.Writes, Value{Key: key})
	}
	ctx, cancel := op.during(s, c.Budget)
	defer cancel()
	var err error
	certain := false
	way := c.rand.IntN(5)
	if len(keys) > 1 {
		way = 2 + c.rand.IntN(2)
	}
	switch way {
	case 0:
		op.Way = "exec"
		_, err = c.db.ExecContext(ctx, writeSQL, keys[0], op.ID)
	case 1:
		op.Way = "returning"
		var version int64
		err = c.db.QueryRowContext(ctx, writeSQL+" returning version", keys[0], op.ID).Scan(&version)
	case 2:
		op.Way = "tx"
		certain, err = c.writeInTx(ctx, ctx, op, nil)
	case 3:
		op.Way = "tx whose begin knows no session"
		bare, cancel := op.during(client{}, c.Budget)
		defer cancel()
		certain, err = c.writeInTx(bare, ctx, op, nil)
	default:
		op.Way = "conn"
		certain, err = c.writeOnConn(ctx, op)
	}
	c.complete(op, err, certain)
	if op.Outcome == Unknown && s.session != nil {
		c.pursue(s, keys[0])
	}
	return op
}

// setting is a synchronous_commit to write with, or "".
func (c *caller) setting() string {
	if len(c.Commit) == 0 {
		return ""
	}
	return c.Commit[c.rand.IntN(len(c.Commit))]
}

// writeInTx writes all keys of the operation in one transaction. inside, if there is one, runs before the commit. Until
// that is sent, failure is certain.
func (c *caller) writeInTx(begin, ctx context.Context, op *Op, inside func(context.Context)) (certain bool, err error) {
	tx, err := c.db.BeginTx(begin, nil)
	if err != nil {
		return true, err
	}
	if setting := c.setting(); setting != "" {
		_, err = tx.ExecContext(ctx, "set local synchronous_commit = "+setting)
	}
	for _, w := range op.Writes {
		if err == nil {
			_, err = tx.ExecContext(ctx, writeSQL, w.Key, op.ID)
		}
	}
	if err != nil || c.one(20) {
		if err == nil {
			err = errors.New("the caller changed its mind")
		}
		_ = tx.Rollback()
		return true, err
	}
	if inside != nil {
		inside(ctx)
	}
	return false, tx.Commit()
}

// writeOnConn writes on a held connection.
func (c *caller) writeOnConn(ctx context.Context, op *Op) (certain bool, err error) {
	conn, err := c.db.Conn(ctx)
	if err != nil {
		return true, err
	}
	defer conn.Close()
	setting := c.setting()
	if setting != "" {
		if _, err := conn.ExecContext(ctx, "set synchronous_commit = "+setting); err != nil {
			return true, err
		}
	}
	_, err = conn.ExecContext(ctx, writeSQL, op.Writes[0].Key, op.ID)
	if err == nil && setting != "" {
		_, _ = conn.ExecContext(ctx, "reset synchronous_commit") // or the connection is gone
	}
	return false, err
}

// pursue watches, for a while, what becomes of a write of unknown outcome: somebody else on the primary, and the session.
func (c *caller) pursue(s client, key int) {
	for range 20 {
		c.read(client{}, key, reading{access: Unhinted})
		for range 3 {
			c.read(s, key, reading{access: ReadOnly, wait: c.MaxWait})
		}
		pause(context.Background(), 20*time.Millisecond)
	}
}

// reading is how a read is done.
type reading struct {
	access Access
	floor  *Op
	lsn    pgsplit.LSN // floor's
	stale  time.Duration
	wait   time.Duration
	query  string // readSQL unless set
	budget time.Duration
}

// hint is ctx with what the reading asks for, noted in the operation.
func (r reading) hint(ctx context.Context, op *Op) context.Context {
	op.Access = r.access
	if r.access != ReadOnly {
		return ctx
	}
	var opts []pgsplit.ReadOption
	if r.wait > 0 {
		opts = append(opts, pgsplit.MaxWait(r.wait))
	}
	if r.stale > 0 {
		op.Staleness = int64(r.stale)
		opts = append(opts, pgsplit.MaxStaleness(r.stale))
	}
	if r.floor != nil {
		op.FloorOf = r.floor.ID
		opts = append(opts, pgsplit.AfterLSN(r.lsn))
	}
	return pgsplit.ReadOnly(ctx, opts...)
}

// read reads the version of a key.
func (c *caller) read(s client, key int, r reading) *Op {
	op := c.invoke(KindRead, s)
	if r.budget == 0 {
		r.budget = c.Budget
	}
	ctx, cancel := op.during(s, r.budget)
	defer cancel()
	query := r.query
	if query == "" {
		query = readSQL
	}
	rows, err := c.db.QueryContext(r.hint(ctx, op), query, key)
	if err == nil {
		v := Value{Key: key}
		if rows.Next() {
			err = rows.Scan(&v.Version, &v.Op, &op.Standby, &op.Port)
			op.Partial = err == nil
		}
		err = errors.Join(err, rows.Err(), rows.Close())
		if op.Partial {
			op.Reads = []Value{v}
		} else if err == nil {
			err = sql.ErrNoRows
		}
		op.Partial = op.Partial && err != nil
	}
	return c.complete(op, err, true)
}

func (c *caller) scan(op *Op, key int, row *sql.Row) error {
	v := Value{Key: key}
	err := row.Scan(&v.Version, &v.Op, &op.Standby, &op.Port)
	if err == nil {
		op.Reads = []Value{v}
	}
	return err
}

// session begins a session, from tokens if there are any.
func (c *caller) session(carry bool, tokens ...taken) client {
	op := c.invoke(KindSession, client{})
	op.Carry = carry
	s := client{session: pgsplit.NewSession(), id: op.ID, carry: carry}
	var all pgsplit.Token
	for i, t := range tokens {
		op.Tokens = append(op.Tokens, t.op)
		op.After = append(op.After, t.after...)
		if i == 0 {
			all = t.token
		} else {
			all = all.Merge(t.token)
		}
	}
	if len(tokens) > 0 {
		s.session = pgsplit.SessionFromToken(all)
	}
	if carry {
		s.session.CarryReads()
	}
	c.complete(op, nil, true)
	return s
}

// taken is a token and the operation that took it.
type taken struct {
	token pgsplit.Token
	op    uint64
	after []uint64
}

// token takes the session's token. An error makes it no less good.
func (c *caller) token(s client) taken {
	op := c.invoke(KindToken, s)
	ctx, cancel := op.during(client{}, c.Budget)
	defer cancel()
	token, err := s.session.Token(ctx)
	c.complete(op, err, true)
	return taken{token: token, op: op.ID}
}

// advance has the session go on from another token as well.
func (c *caller) advance(s client, t taken) {
	op := c.invoke(KindAdvance, s)
	op.Tokens, op.After = []uint64{t.op}, t.after
	s.session.Advance(t.token)
	c.complete(op, nil, true)
}

// send hands the token to another caller.
func (c *caller) send(s client, t taken, keys ...int) {
	h := handover{Token: t.op, Form: textForm, Carry: s.carry, After: t.after, Keys: keys}
	if c.one(2) {
		h.Form, h.Text = sealedForm, c.keyring.Seal(t.token)
	} else {
		text, err := t.token.MarshalText()
		if err != nil {
			panic(err) // it says that it never fails
		}
		h.Text = string(text)
	}
	c.offer(h)
}

// receive takes a token that another caller has sent, if there is one.
func (c *caller) receive() (h handover, t taken, ok bool) {
	select {
	case h = <-c.inbox:
	default:
		return h, t, false
	}
	t.op, t.after = h.Token, h.After
	var err error
	if h.Form == sealedForm {
		t.token, err = c.keyring.Open(h.Text)
	} else {
		err = t.token.UnmarshalText([]byte(h.Text))
	}
	if err != nil {
		panic(err) // a token that a worker wrote is one that a worker can read
	}
	return h, t, true
}
