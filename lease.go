package pgsplit

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"errors"
	"fmt"
	"time"
)

// lease is the physical connection that a shell holds from its first need until sql.DB takes the shell back.
type lease struct {
	p       *physical
	held    bool   // for statements that may write: the session's state is the caller's, and stays with the shell
	wrapped bool   // inside a READ ONLY transaction of our own, which the driver ends
	hinted  bool   // the caller's transaction is read only because its context said so
	used    bool   // a call ran on it before
	inTx    bool   // inside a transaction of BeginTx that may write
	standIn bool   // a replica serves what asked for the primary
	at      moment // when it began; zero once a call ran on it, or something that may have taken its time
	floor   LSN    // proven when the statement or the transaction began

	writers []writer   // sessions on whose behalf it may have written
	readers []*Session // sessions on whose behalf it reads
	system  uint64     // their cluster
}

// inCallersTx tells whether a transaction that is not our own is open on the lease.
func (l *lease) inCallersTx() bool { return l.p.inTx() && !l.wrapped }

// kept is why a statement runs on the lease whatever its context says.
func (l *lease) kept() Reason {
	if l.inCallersTx() {
		return ReasonInTx
	}
	return ReasonHeld
}

// take makes the lease the one that the call is to run on, and tells whether it must not write.
func (c *Conn) take(ctx context.Context, h *Hint, w work, way *course) (readOnly bool, err error) {
	if c.closed {
		return false, driver.ErrBadConn
	}
	r := c.connector.request(h, w)
	l := &c.lease
	if l.p == nil {
		readOnly = r.readOnly
		return readOnly, c.acquire(ctx, &r, h, w, way)
	}
	switch {
	case l.p.closed():
		if l.held || l.inCallersTx() {
			c.decided(ctx, l.kept(), l.floor)
			return false, driver.ErrBadConn // what the caller built up in the session is gone
		}
	case w.ping && !l.p.conn().IsBusy():
		return !l.held, nil // any sign of life of what the connection has will do
	case l.p.conn().IsBusy():
		c.decided(ctx, ReasonInTx, l.floor)
		return false, errRowsOpen
	case l.inCallersTx():
		c.decided(ctx, ReasonInTx, l.floor)
		readOnly := !l.held && !l.standIn || l.hinted
		err := c.recheck(ctx, h)
		if err == nil && readOnly && h.scope != nil {
			r.scope = h.scope
			c.noteRead(&r)
		}
		return readOnly, err
	case l.held:
		if r.readOnly {
			c.decided(ctx, ReasonHeld, h.Floor)
		} else {
			c.decided(ctx, next(&r, nil, progress{}).reason, 0)
		}
		if err := c.unwrap(ctx); err != nil {
			return false, err
		}
		l.hinted = w.begin && r.readOnly
		if !r.readOnly {
			return false, nil
		}
		if l.p.id.inRecovery || h.scope != nil {
			c.endReads()
			c.connector.floors(ctx, &r, h)
			if proven, err := c.provePrimary(ctx, l.p, &r, w); err != nil || proven {
				return true, err
			}
			c.noteRead(&r)
		}
		if w.begin {
			return true, nil
		}
		return true, c.wrap(ctx, l.p, "begin read only")
	case r.readOnly && !r.isolation && l.p.server.replica():
		// One after the other on a held connection stay together while the replica can serve them.
		c.endReads()
		c.connector.floors(ctx, &r, h)
		if r.pinned {
			break
		}
		reason := ReasonReplicasBehind
		late, err := c.ask(ctx, l.p, 0, func(asking context.Context) (err error) {
			if err = c.unwrap(asking); err == nil {
				reason, err = c.prove(asking, l.p, &r, w, 0)
			}
			return err
		})
		if err == nil && reason != ReasonReplicasBehind {
			l.standIn = false
			c.decided(ctx, reason, r.floor)
			c.noteRead(&r)
			return true, nil
		}
		if ctx.Err() != nil {
			return true, contextError(ctx, err)
		}
		if late {
			way.tried = way.tried.with(l.p.server.index)
			way.failures = errors.Join(way.failures, err)
		}
		r = c.connector.request(h, w) // elsewhere
	}
	c.leave(ctx)
	readOnly = r.readOnly
	return readOnly, c.acquire(ctx, &r, h, w, way)
}

// request is what the hint and the call ask of the routing; floors adds what the read must see.
func (c *Connector) request(h *Hint, w work) request {
	return request{
		readOnly:    h.ReadOnly || w.readOnly && c.config.Tx == TxReadOnly && !h.Primary,
		primary:     h.Primary,
		replicaOnly: h.ReplicaOnly,
		isolation:   w.isolation == sql.LevelSerializable,
		prefer:      h.Prefer,
		failStale:   c.config.OnStale == StaleError,
		roundRobin:  c.config.Balance == RoundRobin,
	}
}

// course is one call's way over the servers: it tries each once.
type course struct {
	progress
	failures error // of the servers that did not let it in, or could not serve it
	answer   error // what a server answered that another one might answer otherwise
	lost     error // how the primary's connection ended under the read
	lowered  bool  // those that were behind have had their second chance
}

// withoutPrimary lets replicas lag more while no primary answers, but never behind what the caller has seen. Those that were
// behind are asked once more. Where the primary was lost under the read they may have been behind a bound that nobody can tell now.
func (w *course) withoutPrimary(r *request) {
	lower := r.floor > r.hard
	if lower {
		r.floor, r.timeline = r.hard, r.hardTimeline
	}
	if (lower || w.lost != nil) && !w.lowered {
		w.lowered = true
		w.tried, w.behind, w.waited = w.tried&^w.behind, 0, true
	}
}

// acquire leases a connection for the call, replica after replica and then the primary, as next says. On an error the
// shell holds none.
func (c *Conn) acquire(ctx context.Context, r *request, h *Hint, w work, p *course) error {
	co := c.connector
	if r.readOnly {
		c.lookAround(ctx, r, h)
	}
	budget := co.waitBudget(ctx, h)
	r.mayWait = budget > 0
	if p.noPrimary {
		p.withoutPrimary(r)
	}
	for {
		s := next(r, c.views, p.progress)
		switch {
		case s.target == toNowhere:
			c.decided(ctx, s.reason, r.floor)
			switch {
			case p.lost != nil:
				return p.lost
			case p.answer != nil && !p.noPrimary:
				return p.answer
			}
			return nowhere(s.reason, p.failures)
		case s.target == toPrimary:
			wait := time.Duration(0)
			if p.lost != nil {
				wait, _ = co.patience(ctx) // it may not come back, and a replica may serve the read
			}
			err := c.acquirePrimary(ctx, r, w, wait)
			if err == nil {
				c.decided(ctx, s.reason, r.floor)
				c.noteRead(r)
				return nil
			}
			p.failures = errors.Join(p.failures, err)
			if ctx.Err() != nil {
				return p.failures // nothing is decided for a caller who left
			}
			if !errors.Is(err, ErrNoPrimary) || !r.readOnly && !co.mayStandIn(r) {
				c.decided(ctx, ReasonNoPrimary, r.floor)
				if p.lost != nil {
					return p.lost
				}
				return p.failures
			}
			p.noPrimary = true
			if !r.readOnly {
				r.standIn = true
				c.lookAround(ctx, r, h)
			}
			p.withoutPrimary(r)
			continue
		}
		wait := time.Duration(0)
		if s.wait {
			p.waited, wait = true, budget
		} else {
			p.tried = p.tried.with(s.target)
		}
		reason, err := c.acquireReplica(ctx, co.replicas[s.target], r, w, wait)
		switch {
		case err == nil && reason != ReasonReplicasBehind:
			if c.lease.standIn = r.standIn; r.standIn {
				reason = ReasonPrimaryDown
			}
			c.decided(ctx, reason, r.floor)
			c.noteRead(r)
			return nil
		case err == nil:
			p.behind = p.behind.with(s.target)
			c.views[s.target].position = LSN(co.replicas[s.target].position.Load())
		case ctx.Err() != nil:
			return contextError(ctx, err)
		default:
			p.failures = errors.Join(p.failures, err)
		}
	}
}

// lookAround sees what the read has to see, and how the replicas are.
func (c *Conn) lookAround(ctx context.Context, r *request, h *Hint) {
	r.turn = c.connector.turn.Add(1)
	c.connector.floors(ctx, r, h)
	c.views = c.connector.look(c.views, r)
}

// mayStandIn tells whether a replica may serve the call, which asked for the primary by saying nothing.
func (c *Connector) mayStandIn(r *request) bool {
	return c.config.OnPrimaryDown == PrimaryDownRead && !r.primary && !r.isolation && len(c.replicas) > 0
}

// acquirePrimary leases a connection to the primary. A server in recovery at the primary's address has to prove a floor
// like any replica. wait bounds how long the lease may take, 0 leaves that to ctx.
func (c *Conn) acquirePrimary(ctx context.Context, r *request, w work, wait time.Duration) error {
	s, a := c.connector.primary, readWrite
	if r.readOnly {
		a = readOnly
		if err := s.closedToReads(); err != nil {
			return noPrimary(err)
		}
	}
	p, err := s.lease(ctx, a, wait)
	if err != nil {
		if ctx.Err() != nil {
			return contextError(ctx, err) // a caller who left says nothing about the server
		}
		s.stats.failures.Add(1)
		return noPrimary(err)
	}
	c.lease.p, c.lease.held, c.lease.floor = p, !r.readOnly && !w.harmless, r.floor
	if !r.readOnly {
		return nil
	}
	if proven, err := c.provePrimary(ctx, p, r, w); err != nil || proven {
		return c.orRelease(err)
	}
	return c.orRelease(c.enforce(ctx, p, w))
}

// provePrimary sees to it that what answers at the primary's address may answer the read. A server in recovery there has
// to prove the floor, and then it has; one whose timeline ended in a failover that the caller has seen may not.
func (c *Conn) provePrimary(ctx context.Context, p *physical, r *request, w work) (proven bool, err error) {
	switch {
	case p.id.inRecovery && (r.floor != 0 || r.scope != nil):
		reason, err := c.prove(ctx, p, r, w, 0)
		if err == nil && reason == ReasonReplicasBehind {
			err = fmt.Errorf("%w: %s is in recovery and not proven to have replayed %s", ErrNoFreshReplica, p.server, r.floor)
		}
		return true, err
	case p.id.timeline != 0 && r.timeline > p.id.timeline:
		return false, fmt.Errorf("%w: %w: %s: %w", ErrNoFreshReplica, ErrNoPrimary, p.server, errPutAside)
	}
	return false, nil
}

// acquireReplica leases a connection to the replica and proves the floor on it, waiting for the floor if wait says so.
// ReasonReplicasBehind means that it is not proven. The shell holds no lease then, nor after an error.
func (c *Conn) acquireReplica(ctx context.Context, s *server, r *request, w work, wait time.Duration) (Reason, error) {
	p, at := s.leaseReady(readOnly)
	if p == nil {
		patience, whole := c.connector.patience(ctx)
		var err error
		if p, err = s.lease(ctx, readOnly, patience); err != nil {
			s.notLetIn(ctx, err, whole)
			return 0, err
		}
	}
	c.lease.p, c.lease.floor = p, r.floor
	if reason, proven := p.serves(r); proven {
		c.lease.at = at
		return reason, nil
	}
	// It has to answer first, and a connection that is still good says nothing about who is behind it.
	var reason Reason
	_, err := c.ask(ctx, p, wait, func(asking context.Context) (err error) {
		reason, err = c.prove(asking, p, r, w, wait)
		return err
	})
	if err != nil || reason == ReasonReplicasBehind {
		if err == nil {
			s.stats.refusals.Add(1)
		}
		c.leave(ctx)
	}
	return reason, err
}

// ask gives f the time that a replica has to answer on p, and that for which it may wait. late tells that it took longer.
func (c *Conn) ask(ctx context.Context, p *physical, wait time.Duration, f func(context.Context) error) (late bool, err error) {
	patience, whole := c.connector.patience(ctx)
	asking, cancel := within(ctx, patience+wait)
	defer cancel()
	if err = f(asking); err == nil {
		return false, nil
	}
	late = asking.Err() != nil
	p.erred(ctx, err, late)
	if ctx.Err() == nil && (late && whole || !late && p.closed()) {
		p.server.stats.failures.Add(1)
		p.server.doubt(err)
	}
	return late, err
}

// serves tells whether what is read on p next sees the floor, and cannot write, as far as that is known without asking.
func (p *physical) serves(r *request) (Reason, bool) {
	switch {
	case r.scope != nil, r.timeline != 0, !p.enforced():
		return 0, false
	case r.floor == 0:
		return ReasonReplica, true
	}
	return ReasonFloorKnown, p.knows(r.floor)
}

// notLetIn takes note that a lease failed; whole tells that it had all of replica_timeout. What the caller's deadline or
// our own bound on connections ended says nothing about the server.
func (s *server) notLetIn(ctx context.Context, err error, whole bool) {
	var shut errShut
	late := errors.Is(err, context.DeadlineExceeded)
	if ctx.Err() != nil || isBusy(err) || errors.As(err, &shut) || late && !whole {
		return
	}
	s.stats.failures.Add(1)
	if late {
		s.stats.errors[errorTimeout].Add(1)
		s.happened(s.afterConnect(err), err)
	}
}

// errRowsOpen stands for pgx's own error, which says that nothing was sent and so would become driver.ErrBadConn: sql.DB
// would close a connection that is fine.
var errRowsOpen = errors.New("pgsplit: conn busy: the rows of an earlier query are still open")

// patience is how long a replica may take to let the read in, and whether that is all of replica_timeout.
func (c *Connector) patience(ctx context.Context) (time.Duration, bool) {
	if deadline, ok := ctx.Deadline(); ok {
		if half := time.Until(deadline) / 2; half < c.config.ReplicaTimeout {
			return max(half, 1), false
		}
	}
	return c.config.ReplicaTimeout, true
}

// waitBudget is how long the read may wait for its floor in total.
func (c *Connector) waitBudget(ctx context.Context, h *Hint) time.Duration {
	budget := c.config.MaxWait
	if h.HasMaxWait {
		budget = h.MaxWait
	}
	if budget == 0 {
		return 0
	}
	if deadline, ok := ctx.Deadline(); ok {
		budget = min(budget, time.Until(deadline)/2)
	}
	return max(budget, 0)
}

// prove makes sure that what is read on p next sees the floor, and cannot write. It gives the reason to use p, or
// ReasonReplicasBehind.
func (c *Conn) prove(ctx context.Context, p *physical, r *request, w work, wait time.Duration) (Reason, error) {
	floor, err := c.connector.floorOn(ctx, r, p)
	if err != nil {
		return 0, err
	}
	c.lease.floor = floor
	switch {
	case floor == 0:
		return ReasonReplica, c.enforce(ctx, p, w)
	case floor == unproven:
		return ReasonReplicasBehind, nil
	case !p.remembers():
		return c.proveInTx(ctx, p, r, w, wait)
	}
	if p.knows(floor) {
		return ReasonFloorKnown, c.enforce(ctx, p, w)
	}
	reached, reason, err := p.reachesOrHas(ctx, floor, wait)
	if err != nil {
		return 0, err
	}
	if !reached {
		return ReasonReplicasBehind, nil
	}
	return reason, c.enforce(ctx, p, w)
}

// proveInTx checks and reads in one READ COMMITTED transaction: behind a pooler two statements in a row may reach two
// servers (F9). A transaction that takes one snapshot for all its statements cannot be proven this way (F4).
func (c *Conn) proveInTx(ctx context.Context, p *physical, r *request, w work, wait time.Duration) (Reason, error) {
	begin := "begin isolation level read committed read only"
	if w.begin {
		switch w.isolation {
		case sql.LevelDefault:
			begin = "begin read only"
		case sql.LevelReadUncommitted, sql.LevelReadCommitted:
		default:
			return ReasonReplicasBehind, nil
		}
	}
	if err := c.wrap(ctx, p, begin); err != nil {
		return 0, err
	}
	reached, reason, err := p.reachesOrHas(ctx, c.lease.floor, wait)
	if err == nil && reached {
		reached, err = p.readCommitted(ctx, w)
	}
	if err == nil && reached && r.timeline != 0 {
		reached, err = p.onTimeline(ctx, r.timeline)
	}
	if err != nil {
		return 0, err
	}
	if !reached {
		return ReasonReplicasBehind, c.unwrap(ctx)
	}
	return reason, nil
}

// enforce makes sure that an autocommit statement on p cannot write. A transaction that begins sees to that itself.
func (c *Conn) enforce(ctx context.Context, p *physical, w work) error {
	if w.begin || p.enforced() {
		return nil
	}
	return c.wrap(ctx, p, "begin read only")
}

// wrap begins a READ ONLY transaction around the next statement.
func (c *Conn) wrap(ctx context.Context, p *physical, begin string) error {
	if err := p.command(ctx, begin); err != nil {
		return err
	}
	c.lease.wrapped = true
	return nil
}

// unwrap ends it. Where it was lost meanwhile it does not become the caller's.
func (c *Conn) unwrap(ctx context.Context) error {
	if !c.lease.wrapped {
		return nil
	}
	err := c.lease.p.command(ctx, "commit")
	c.lease.wrapped = c.lease.p.inTx()
	return err
}

// recheck proves a floor that is above the one proven when the caller's transaction began. Only under READ COMMITTED
// will the next statement take a new snapshot (F4).
func (c *Conn) recheck(ctx context.Context, h *Hint) error {
	p := c.lease.p
	if c.lease.held || !p.server.replica() || p.conn().TxStatus() != 'T' {
		return nil
	}
	r := request{readOnly: true}
	r.join(floor{lsn: h.Floor})
	c.connector.keep(ctx, &r, h.scope)
	need, err := c.connector.floorOn(ctx, &r, p)
	if err != nil {
		return err
	}
	if r.pinned {
		need = unproven
	}
	if need <= c.lease.floor {
		return nil
	}
	reached := false
	if need != unproven {
		reached, _, err = p.reachesOrHas(ctx, need, 0)
	}
	if err == nil && reached {
		reached, err = p.readCommitted(ctx, work{begin: true})
	}
	if err != nil {
		return err
	}
	if !reached {
		return fmt.Errorf("%w: the transaction on %s is not proven to see %s", ErrNoFreshReplica, p.server, need)
	}
	c.lease.floor = need
	return nil
}

// release ends the lease, if there is one.
func (c *Conn) release() { c.leave(context.Background()) }

// leave is release on behalf of a caller who goes elsewhere.
func (c *Conn) leave(ctx context.Context) {
	p := c.lease.p
	if p == nil {
		return
	}
	if c.lease.wrapped && !p.closed() && !p.conn().IsBusy() { // a transaction that stays open closes the connection
		if p.server.replica() {
			_, _ = c.ask(ctx, p, 0, c.unwrap)
		} else {
			ending, cancel := context.WithTimeout(ctx, closeTimeout)
			_ = c.unwrap(ending)
			cancel()
		}
	}
	if c.lease.readers != nil || c.lease.writers != nil {
		c.endReads()
		c.lease.settleWrites()
	}
	c.lease = lease{}
	p.server.giveBack(p)
}

func (c *Conn) orRelease(err error) error {
	if err != nil {
		c.release()
	}
	return err
}
