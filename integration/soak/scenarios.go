package soak

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/pgsplit/pgsplit"
)

// scenarios are what a caller does in one go, by the names that Workload.Mix weighs.
var scenarios = map[string]func(*caller){
	"session":   (*caller).request,  // a request of somebody who may have been here before
	"bare":      (*caller).bareRead, // a read without anything
	"floor":     (*caller).floorReads,
	"promise":   (*caller).oldPromise,
	"stale":     (*caller).boundedRead,
	"fork":      (*caller).forkAndMerge,
	"job":       (*caller).queueJob,
	"pages":     (*caller).pages,
	"forbidden": (*caller).forbidden,
	"open":      (*caller).readWithRowsOpen,
	"snapshot":  (*caller).snapshotReads,
	"write":     func(c *caller) { c.write(client{}, c.key()) },
	"slow":      func(c *caller) { c.read(client{}, c.key(), reading{access: ReadOnly, query: slowSQL}) },
	"column":    (*caller).newColumn,
	"hurry":     func(c *caller) { c.read(client{}, c.key(), reading{access: ReadOnly, budget: 300 * time.Millisecond}) },
}

// everything is the mix of a soak.
var everything = map[string]int{
	"session": 30, "bare": 20, "floor": 8, "promise": 6, "stale": 4, "fork": 4, "job": 4, "pages": 4, "forbidden": 4, "open": 1, "snapshot": 4,
	"write": 6, "slow": 6, "column": 3, "hurry": 4,
}

// run does one scenario after the other until ctx ends. An operation that has begun goes on until its own time is over.
func (c *caller) run(ctx context.Context) {
	var deck []func(*caller)
	for _, name := range slices.Sorted(maps.Keys(c.Mix)) {
		for range c.Mix[name] {
			deck = append(deck, scenarios[name])
		}
	}
	for ctx.Err() == nil {
		deck[c.rand.IntN(len(deck))](c)
		pause(ctx, c.Pace)
	}
}

// wait is the MaxWait of a read, often none.
func (c *caller) wait() time.Duration {
	if c.MaxWait == 0 || c.one(2) {
		return 0
	}
	return time.Duration(c.rand.Int64N(int64(c.MaxWait)))
}

// own is a ReadOnly read in the session.
func (c *caller) own(s client, key int) { c.read(s, key, reading{access: ReadOnly, wait: c.wait()}) }

// visitor is a session that goes on from a token that another caller has sent, or a new one, and keys that matter to it.
func (c *caller) visitor() (client, []int) {
	if !c.one(5) {
		if h, t, ok := c.receive(); ok {
			return c.session(h.Carry, t), h.Keys
		}
	}
	return c.session(c.one(2)), []int{c.key()}
}

// request reads what its session has written before, wherever that was, writes, and reads again. Some of it happens at the
// same time. At the end the token goes to another caller.
func (c *caller) request() {
	s, keys := c.visitor()
	for _, key := range keys {
		c.own(s, key)
	}
	for range 1 + c.rand.IntN(5) {
		key := keys[c.rand.IntN(len(keys))]
		switch c.rand.IntN(8) {
		case 0, 1, 2:
			c.write(s, key)
			c.own(s, key)
		case 3:
			other := c.key()
			if other != key {
				c.write(s, key, other)
				keys = append(keys, other)
			}
		case 4:
			c.read(s, key, reading{access: Unhinted})
		case 5:
			c.together(s, key)
		case 6:
			if _, t, ok := c.receive(); ok && s.session != nil {
				c.advance(s, t)
			}
		}
		c.own(s, key)
	}
	if c.one(2) {
		c.send(s, c.token(s), keys[:min(len(keys), 4)]...)
	}
}

// together uses one session from several goroutines.
func (c *caller) together(s client, key int) {
	var all sync.WaitGroup
	for i := range 3 {
		other := c.fork()
		all.Go(func() {
			for range 3 {
				if i == 0 && other.one(2) {
					other.write(s, key)
				}
				other.own(s, key)
			}
		})
	}
	all.Wait()
}

func (c *caller) bareRead() {
	c.read(client{}, c.key(), reading{access: ReadOnly})
}

// boundedRead is a read under MaxStaleness.
func (c *caller) boundedRead() {
	c.read(client{}, c.key(), reading{access: ReadOnly, stale: time.Duration(10+c.rand.IntN(500)) * time.Millisecond})
}

// floor asks for a position that covers all commits so far.
func (c *caller) floor() (*Op, pgsplit.LSN) {
	op := c.invoke(KindFloor, client{})
	ctx, cancel := op.during(client{}, c.Budget)
	defer cancel()
	lsn, err := pgsplit.CommitLSN(ctx, c.db)
	return c.complete(op, err, true), lsn
}

// floorReads writes and reads with an explicit position.
func (c *caller) floorReads() {
	key := c.key()
	c.write(client{}, key)
	floor, lsn := c.floor()
	if floor.Outcome != OK {
		return
	}
	c.promises[c.promised.Add(1)%uint64(len(c.promises))].Store(&promise{floor, lsn})
	for range 1 + c.rand.IntN(4) {
		c.read(client{}, key, reading{access: ReadOnly, floor: floor, lsn: lsn, wait: c.wait()})
	}
}

// oldPromise reads with a position that was asked for a while ago: every replica was there before.
func (c *caller) oldPromise() {
	if p := c.promises[c.rand.IntN(len(c.promises))].Load(); p != nil {
		c.read(client{}, c.key(), reading{access: ReadOnly, floor: p.floor, lsn: p.lsn})
	}
}

// forkAndMerge has two parts of a caller's work go on from one token, and a third from what both say in the end.
func (c *caller) forkAndMerge() {
	root := c.token(c.session(true))
	key, other := c.key(), c.key()
	first, second := c.session(true, root), c.session(true, root)
	c.write(first, key)
	one := c.token(first)
	c.write(second, other)
	two := c.token(second)
	if c.one(2) {
		one, two = two, one
	}
	var last client
	if c.one(3) {
		last = c.session(true, one)
		c.advance(last, two)
	} else {
		last = c.session(true, one, two)
	}
	c.own(last, key)
	c.own(last, other)
	c.send(last, c.token(last), key, other)
}

// queueJob takes a job's token inside of the transaction that queues it.
func (c *caller) queueJob() {
	s := c.session(false)
	key := c.key()
	op := c.invoke(KindWrite, s)
	op.Way = "tx with a job"
	op.Writes = []Value{{Key: key}}
	ctx, cancel := op.during(s, c.Budget)
	defer cancel()
	var job taken
	certain, err := c.writeInTx(ctx, ctx, op, func(context.Context) { job = c.token(s) })
	if c.complete(op, err, certain); op.Outcome != OK {
		return
	}
	job.after = []uint64{op.ID}
	if c.one(2) {
		c.send(s, job, key)
		return
	}
	worker := c.session(false, job)
	c.own(worker, key)
}

// pages turns the pages of a key's ledger in one session.
func (c *caller) pages() {
	s, keys := c.visitor()
	key := keys[0]
	newest := c.page(s, key, 1<<40)
	if newest < 0 {
		return
	}
	for from := max(newest-20, 0); from < newest; from += 5 {
		if c.page(s, key, from) < 0 {
			return
		}
	}
}

// page reads the rows of a key's ledger after a version, and returns the key's version; below 0 if that failed.
func (c *caller) page(s client, key int, after int64) int64 {
	op := c.invoke(KindRead, s)
	op.Way = "page"
	ctx, cancel := op.during(s, c.Budget)
	defer cancel()
	rows, err := c.db.QueryContext(reading{access: ReadOnly, wait: c.wait()}.hint(ctx, op), pageSQL, key, after)
	now := Value{Key: key, Version: -1}
	if err == nil {
		for rows.Next() {
			row := Value{Key: key}
			if err = rows.Scan(&now.Version, &now.Op, &op.Standby, &op.Port, &row.Version, &row.Op); err != nil {
				break
			}
			op.Partial = true
			if row.Version != 0 {
				op.Rows = append(op.Rows, row)
			}
		}
		err = errors.Join(err, rows.Err(), rows.Close())
		op.Partial = op.Partial && err != nil
		op.Reads = []Value{now}
	}
	if c.complete(op, err, true); op.Outcome != OK {
		return -1
	}
	return now.Version
}

// forbidden tries to write under ReadOnly.
func (c *caller) forbidden() {
	op := c.invoke(KindForbidden, client{})
	op.Access = ReadOnly
	key := c.key()
	op.Writes = []Value{{Key: key}}
	plain, cancel := op.during(client{}, c.Budget)
	defer cancel()
	ctx := pgsplit.ReadOnly(plain)
	var err error
	switch c.rand.IntN(4) {
	case 0:
		op.Way = "exec"
		_, err = c.db.ExecContext(ctx, writeSQL, key, op.ID)
	case 1:
		op.Way = "returning"
		var version int64
		err = c.db.QueryRowContext(ctx, writeSQL+" returning version", key, op.ID).Scan(&version)
	case 2:
		op.Way = "tx"
		var tx *sql.Tx
		if tx, err = c.db.BeginTx(ctx, nil); err == nil {
			if _, err = tx.ExecContext(plain, writeSQL, key, op.ID); err == nil {
				err = tx.Commit()
			} else {
				_ = tx.Rollback()
			}
		}
	default:
		op.Way = "conn on which an unhinted statement ran"
		err = c.forbiddenOnConn(ctx, key, op.ID)
	}
	c.complete(op, err, false)
}

func (c *caller) forbiddenOnConn(ctx context.Context, key int, id uint64) error {
	conn, err := c.db.Conn(ctx)
	if err != nil {
		return err
	}
	defer conn.Close()
	if _, err := conn.ExecContext(pgsplit.Primary(ctx), "select 1"); err != nil {
		return err
	}
	_, err = conn.ExecContext(ctx, writeSQL, key, id)
	return err
}

// readWithRowsOpen reads, in its session, while a write of the session has not been read to its end.
func (c *caller) readWithRowsOpen() {
	s := c.session(c.one(2))
	key := c.key()
	op := c.invoke(KindWrite, s)
	op.Way = "rows open"
	op.Writes = []Value{{Key: key}}
	ctx, cancel := op.during(s, c.Budget)
	defer cancel()
	rows, err := c.db.QueryContext(ctx, bulkySQL, key, op.ID)
	if err == nil {
		if rows.Next() {
			c.own(s, key)
			c.own(s, key)
		}
		for rows.Next() {
			continue
		}
		err = errors.Join(rows.Err(), rows.Close())
	}
	if c.complete(op, err, false); op.Outcome == OK {
		for range 3 {
			c.read(s, key, reading{access: ReadOnly, wait: c.MaxWait})
		}
	}
}

// snapshotReads reads in a ReadOnly transaction, with a floor or in a session.
func (c *caller) snapshotReads() {
	var s client
	var r reading
	key := c.key()
	if c.one(2) {
		s = c.session(c.one(2))
		c.write(s, key)
	} else {
		c.write(client{}, key)
		if r.floor, r.lsn = c.floor(); r.floor.Outcome != OK {
			return
		}
	}
	r.access, r.wait = ReadOnly, c.MaxWait
	isolation := []sql.IsolationLevel{sql.LevelDefault, sql.LevelReadCommitted, sql.LevelRepeatableRead}[c.rand.IntN(3)]
	begin := c.invoke(KindBegin, s)
	begin.Way = isolation.String()
	ctx, cancel := begin.during(s, c.Budget)
	defer cancel()
	hinted := r.hint(ctx, begin)
	tx, err := c.db.BeginTx(hinted, &sql.TxOptions{Isolation: isolation})
	if c.complete(begin, err, true); err != nil {
		return
	}
	defer tx.Rollback()
	for range 1 + c.rand.IntN(2) {
		op := c.invoke(KindRead, s)
		op.Tx, op.Way, op.Access, op.FloorOf = begin.ID, begin.Way, begin.Access, begin.FloorOf
		op.Budget, op.Since = begin.Budget, begin.Start
		op.Server, op.Role, op.Reason, op.Floor = begin.Server, begin.Role, begin.Reason, begin.Floor
		c.complete(op, c.scan(op, key, tx.QueryRowContext(hinted, readSQL, key)), true)
	}
	_ = tx.Commit() // it has written nothing
}

// newColumn reads a column that register has had since not long ago.
func (c *caller) newColumn() {
	name := c.column.Load()
	if name == nil {
		return
	}
	query := fmt.Sprintf("select version, op,%s from register where key = $1 and %s is null", whoSQL, *name)
	c.read(client{}, c.key(), reading{access: ReadOnly, query: query})
}
