package pgsplit

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
)

// This file asks the primary where the writes of sessions ended.

// writer is a session on whose behalf a lease may write, and its mark.
type writer struct {
	session *Session
	mark    *mark
	inTx    bool // only in the transaction that is open
}

// noteWrite has the sessions around a statement note, before it is sent on the held lease, that it may write. The
// primary must not be one that a failover, which the caller has seen, has put aside.
func (c *Conn) noteWrite(sc *scope) error {
	l := &c.lease
	for ; sc != nil; sc = sc.outer {
		if slices.ContainsFunc(l.writers, func(w writer) bool { return w.session == sc.session }) {
			continue
		}
		if l.p.id.timeline != 0 && sc.session.timeline(c.connector, l.p.id.system) > l.p.id.timeline {
			return fmt.Errorf("%w: %s: %w", ErrNoPrimary, l.p.server, errPutAside)
		}
		state := markOpen
		if l.inTx {
			state = markInTx
		}
		l.writers = append(l.writers, writer{sc.session, sc.session.open(l.p, state), l.inTx})
	}
	return nil
}

var errPutAside = errors.New("the caller has seen a later timeline than this server's")

// endTx forgets what the sessions noted for a transaction that does not commit; what they read in it stays seen. One that
// the caller has ended by text may have committed.
func (l *lease) endTx() {
	l.inTx = false
	ended := l.p.overheard.ended || !l.p.closed() && !l.p.inTx()
	l.writers = slices.DeleteFunc(l.writers, func(w writer) bool {
		switch {
		case !w.inTx:
			return false
		case ended:
			w.session.committing(w.mark)
			w.session.settle(w.mark, false)
		default:
			w.session.drop(w.mark)
			w.session.readIn(l.p)
		}
		return true
	})
}

// settleWrites tells the sessions how the lease's connection was left.
func (l *lease) settleWrites() {
	for _, w := range l.writers {
		w.session.settle(w.mark, l.p.closed() || l.p.conn().IsBusy())
	}
	l.writers = nil
}

// askPrimary runs one question on a connection to the primary of its own, for no longer than a replica may take to let a
// read in. One is asked at a time: whoever waited looks first whether the answer to another one will do.
func (c *Connector) askPrimary(ctx context.Context, known func() bool, ask func(context.Context, *physical) error) error {
	if err := c.primary.closedToReads(); err != nil {
		return noPrimary(err)
	}
	patience, _ := c.patience(ctx)
	waiting, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	select {
	case c.asking <- struct{}{}:
		defer func() { <-c.asking }()
	case <-waiting.Done():
		return fmt.Errorf("%w: others still wait for its answer: %w", ErrNoPrimary, waiting.Err())
	}
	if known() {
		return nil
	}
	patience, whole := c.patience(ctx)
	p, err := c.primary.lease(ctx, readWrite, patience)
	if err != nil {
		return noPrimary(err)
	}
	defer c.primary.giveBack(p)
	asking, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	err = ask(asking, p)
	if err != nil && p.closed() && ctx.Err() == nil && (whole || asking.Err() == nil) {
		c.primary.doubt(err)
	}
	return err
}

// cluster is the system identifier of the connector's cluster, zero if no server could be asked for it.
func (c *Connector) cluster(ctx context.Context) uint64 {
	if known := c.system.Load(); known != 0 {
		return known
	}
	met := func() bool { return c.system.Load() != 0 }
	if err := c.askPrimary(ctx, met, func(context.Context, *physical) error { return nil }); err != nil {
		for _, s := range c.replicas {
			patience, whole := c.patience(ctx)
			if s.closedToReads() != nil {
				continue
			}
			p, err := s.lease(ctx, readOnly, patience)
			if err == nil {
				defer s.giveBack(p)
				return p.id.system
			}
			s.notLetIn(ctx, err, whole)
		}
	}
	return c.system.Load()
}

// capture raises the session's floor to a position that covers its writes, all in one round trip; two if some were
// asynchronous, or if the outcome of one is unknown. Writes that may still commit stay pending.
func (c *Connector) capture(ctx context.Context, s *Session, system uint64) error {
	marks, pids := s.pending(c, system)
	began := time.Now()
	known := func() bool {
		v := c.samples.newest()
		if len(pids) > 0 || !v.at.After(began) || v.id.system != system {
			return false
		}
		s.covered(c, v.id, v.floor, marks, nil)
		return true
	}
	err := c.askPrimary(ctx, known, func(ctx context.Context, p *physical) error {
		if p.id.system != system {
			return fmt.Errorf("%w: %s belongs to another cluster than before", ErrNoPrimary, p.server)
		}
		alive, err := p.alive(ctx, pids)
		if err != nil {
			return err
		}
		v, err := p.sample(ctx)
		if err != nil {
			return err
		}
		c.captures.Add(1)
		s.covered(c, v.id, v.floor, marks, alive)
		return nil
	})
	if err != nil {
		c.captureErrors.Add(1)
	}
	return err
}

// alive tells which of the backends still run: what they were doing when their connection was lost may yet commit (F2).
func (p *physical) alive(ctx context.Context, pids []uint32) ([]uint32, error) {
	if len(pids) == 0 {
		return nil, nil
	}
	texts := make([]string, len(pids))
	for i, pid := range pids {
		texts[i] = strconv.FormatUint(uint64(pid), 10)
	}
	values, err := p.simpleRow(ctx, "select coalesce(string_agg(pid::text, ','), '') from pg_catalog.pg_stat_activity"+
		" where pid in ("+strings.Join(texts, ",")+")")
	if err != nil {
		return nil, err
	}
	var alive []uint32
	for _, text := range strings.Split(values[0], ",") {
		if pid, err := strconv.ParseUint(text, 10, 32); err == nil {
			alive = append(alive, uint32(pid))
		}
	}
	return alive, nil
}

// walRate is more log than any server writes in a second. A claim of more than could have been written since the primary was
// last asked is not worth a question.
const walRate = 64 << 30

// whereIs is where the primary is: the newest sample if it suffices for the claim, or a fresh one.
func (c *Connector) whereIs(ctx context.Context, claim floor) (floor, error) {
	newest := c.samples.newest()
	if newest.lsn >= claim.lsn && (claim.timeline == 0 || claim.timeline == newest.timeline) {
		return newest.floor, nil
	}
	if newest.lsn != 0 && claim.lsn > newest.lsn && claim.timeline <= newest.timeline &&
		float64(claim.lsn-newest.lsn) > walRate*(1+time.Since(newest.at).Seconds()) {
		return newest.floor, nil
	}
	v, err := c.samplePrimary(ctx, time.Now())
	return v.floor, err
}

// keep adds to the request what the sessions around it have written and seen. It may ask the primary.
func (c *Connector) keep(ctx context.Context, r *request, sc *scope) {
	if sc == nil {
		return
	}
	r.scope = sc
	if r.system = c.cluster(ctx); r.system == 0 {
		r.join(floor{lsn: unproven})
		return
	}
	for ; sc != nil; sc = sc.outer {
		s := sc.session
		n := s.reads(c, r.system, time.Now())
		if n.unasked && !n.primary {
			if c.capture(ctx, s, r.system) == nil {
				n = s.reads(c, r.system, time.Now())
			}
			if n.unasked {
				n.primary = true // some may still commit, or nobody could be asked
			}
		}
		if n.floor.timeline != 0 && n.floor.timeline < c.samples.current() {
			n.claimed = true // its timeline has ended since
		}
		if n.claimed && !n.primary {
			if primary, err := c.whereIs(ctx, n.floor); err == nil {
				if !s.judge(c, r.system, primary) {
					c.lostTokens.Add(1)
					n.primary = true
				}
				n.floor = s.reads(c, r.system, time.Now()).floor
				if n.floor.timeline > primary.timeline {
					r.replicaOnly, r.failStale = true, true // this primary is behind a failover that the caller has seen
				}
			}
		}
		r.pinned = r.pinned || n.primary
		r.join(n.floor)
	}
}

// join raises what the request has to see, whether a primary answers or not.
func (r *request) join(f floor) {
	r.hardTimeline = max(r.hardTimeline, f.timeline)
	r.hard = max(r.hard, f.lsn)
	r.soften(f)
}

// soften raises what it has to see while a primary answers.
func (r *request) soften(f floor) {
	r.timeline = max(r.timeline, f.timeline)
	r.floor = max(r.floor, f.lsn)
}

// floorOn is the floor of the request on p. It is unproven if p is no instance that can prove it, and higher if the
// sessions have read elsewhere: then it has to have what the primary had after those reads ended.
func (c *Connector) floorOn(ctx context.Context, r *request, p *physical) (LSN, error) {
	if r.floor == unproven {
		return r.floor, nil
	}
	if r.scope != nil && !p.id.pooled && p.id.system != r.system {
		return unproven, nil
	}
	if r.timeline != 0 && p.remembers() {
		follows, err := p.onTimeline(ctx, r.timeline)
		if err != nil || !follows {
			return unproven, err
		}
	}
	var last time.Time
	stays := true
	for sc := r.scope; sc != nil; sc = sc.outer {
		free, ended, seen := sc.session.free(c, r.system, p.hash())
		stays = stays && free
		last = later(last, ended)
		r.join(seen)
	}
	if stays {
		return r.floor, nil
	}
	seen, err := c.seen(ctx, r.scope, r.system, last)
	if err != nil {
		return unproven, ctx.Err() // it cannot be told without the primary
	}
	return max(r.floor, seen.lsn), nil
}

// onTimeline tells whether the instance behind p follows the timeline. What an instance was not known to follow is asked
// anew: a standby goes over to a new timeline under its connections.
func (p *physical) onTimeline(ctx context.Context, timeline uint32) (bool, error) {
	if p.remembers() && p.inst.timeline.Load() >= timeline {
		return p.inst.timeline.Load() == timeline, nil
	}
	values, err := p.simpleRow(ctx, "select "+timelineExpression)
	if err != nil {
		return false, err
	}
	now, err := strconv.ParseUint(values[0], 10, 32)
	if err != nil {
		return false, nil
	}
	if p.remembers() {
		p.inst.follows(uint32(now))
	}
	return uint32(now) == timeline, nil
}

// seen raises the seen floors of the sessions to where the primary was after the given time.
func (c *Connector) seen(ctx context.Context, sc *scope, system uint64, after time.Time) (floor, error) {
	v := c.samples.newest()
	if !v.at.After(after) {
		var err error
		if v, err = c.samplePrimary(ctx, after); err != nil {
			return floor{}, err
		}
	}
	for ; sc != nil; sc = sc.outer {
		sc.session.saw(c, system, v.floor, v.at)
	}
	return v.floor, nil
}

// hash tells the instance behind p from others, for sessions; zero if it cannot be told.
func (p *physical) hash() uint32 {
	if !p.remembers() {
		return 0
	}
	return p.inst.hash
}

// noteRead has the sessions around a read note that it begins on the lease.
func (c *Conn) noteRead(r *request) {
	l := &c.lease
	if r.scope == nil || l.p.id.system == 0 {
		return
	}
	l.system = l.p.id.system
	for sc := r.scope; sc != nil; sc = sc.outer {
		if !slices.Contains(l.readers, sc.session) {
			l.readers = append(l.readers, sc.session)
			sc.session.beginRead(c.connector, l.system, l.p.hash(), l.p.server)
		}
	}
}

// endReads has them note its end. Where the primary served it, its position is taken right away: what the read saw is
// then something that a replica can prove.
func (c *Conn) endReads() {
	l := &c.lease
	if l.readers == nil {
		return
	}
	for _, s := range l.readers {
		s.endRead(c.connector, l.system, l.p.hash())
	}
	if !l.p.server.replica() && !l.p.closed() && !l.p.inTx() && !l.p.conn().IsBusy() && !l.p.id.inRecovery {
		ctx, cancel := context.WithTimeout(context.Background(), c.connector.config.ReplicaTimeout)
		defer cancel()
		if v, err := l.p.sample(ctx); err == nil {
			for _, s := range l.readers {
				s.saw(c.connector, l.system, v.floor, v.at)
			}
		}
	}
	l.readers = nil
}

// What commits and tells, in one message: whether anything was written, and with which synchronous_commit, while that can
// still be told; then the positions, as a statement after the commit (F1). What needs no plan takes the server half the time:
// SHOW is enough where the tag of a statement has told already that the transaction wrote, and the positions are a prepared
// statement. That one is lost to a DEALLOCATE or DISCARD of the caller's costs a question later, since the commit stands
// by then; nothing is prepared on such a connection again.
const (
	askWhether = "select pg_catalog.current_setting('synchronous_commit'), pg_catalog.pg_current_xact_id_if_assigned() is not null; "
	askHow     = "show synchronous_commit; "
)

// whereState is how a connection is asked askWhere after a commit.
type whereState uint8

const (
	whereUnprepared whereState = iota
	wherePrepared
	whereText // behind a pooler, and where the prepared statement was lost
	whereStates
)

// commitTexts are the messages, by whether it is known that the transaction wrote, and how askWhere is asked.
var commitTexts = func() (texts [2][whereStates]string) {
	for i, ask := range []string{askWhether, askHow} {
		texts[i] = [whereStates]string{
			whereUnprepared: ask + "commit; prepare pgsplit_where as " + askWhere + "; execute pgsplit_where",
			wherePrepared:   ask + "commit; execute pgsplit_where",
			whereText:       ask + "commit; " + askWhere,
		}
	}
	return texts
}()

// commitOutcome is what is known after the commit.
type commitOutcome struct {
	committed  bool // the COMMIT tag has arrived
	rolledBack bool // the ROLLBACK tag has
	wrote      bool
	at         LSN // zero: not told
}

// commit commits the transaction of BeginTx. The outcome holds whatever the error is.
func (p *physical) commit(ctx context.Context) (commitOutcome, error) {
	var o commitOutcome
	var async bool
	known := 0
	if p.overheard.wrote {
		known = 1
	}
	if p.id.pooled {
		p.where = whereText
	}
	results := p.conn().Exec(ctx, commitTexts[known][p.where])
	for results.NextResult() {
		result := results.ResultReader().Read()
		switch tag := result.CommandTag.String(); {
		case result.Err != nil:
		case tag == "COMMIT":
			o.committed = true
		case tag == "ROLLBACK":
			o.rolledBack = true
		case tag == "PREPARE":
			p.where = wherePrepared
		case o.committed:
			o.at = p.commitPosition(result, async)
		case len(result.Rows) == 1:
			async = string(result.Rows[0][0]) == "off"
			o.wrote = p.overheard.wrote || string(result.Rows[0][1]) == "t"
		}
	}
	err := results.Close()
	if o.committed && err != nil {
		p.where = whereText
	}
	if p.overheard.ended {
		o.at = 0 // what ended before may be asynchronous
	}
	return o, err
}

// overheard is what the server says beside its answers. It is a tracer of pgx's, and so sees the tag of each statement,
// whatever method ran it.
type overheard struct {
	begun bool // a transaction was begun inside another one
	wrote bool // rows were written, in the transaction of BeginTx
	ended bool // that one was ended by text, and what is open is another one
}

var _ pgx.QueryTracer = (*overheard)(nil)

// TraceQueryStart implements pgx.QueryTracer.
func (*overheard) TraceQueryStart(ctx context.Context, _ *pgx.Conn, _ pgx.TraceQueryStartData) context.Context {
	return ctx
}

// TraceQueryEnd implements pgx.QueryTracer.
func (o *overheard) TraceQueryEnd(_ context.Context, _ *pgx.Conn, data pgx.TraceQueryEndData) {
	tag := data.CommandTag
	if data.Err != nil || tag.Select() {
		return
	}
	switch tag.String() {
	case "COMMIT", "PREPARE TRANSACTION", "BEGIN", "START TRANSACTION":
		o.ended = true
	}
	if o.wrote {
		return
	}
	writes := tag.Insert() || tag.Update() || tag.Delete() || strings.HasPrefix(tag.String(), "MERGE")
	o.wrote = writes && tag.RowsAffected() > 0
}

// commitPosition is the flush position after a synchronous commit, and the insert position after an asynchronous one,
// which the flush position does not cover (F2).
func (p *physical) commitPosition(result *pgconn.Result, async bool) LSN {
	if len(result.Rows) != 1 {
		return 0
	}
	at, err := p.ends(string(result.Rows[0][0]), string(result.Rows[0][1]))
	switch {
	case err != nil:
		return 0
	case async && mutant != flushAfterAsync:
		return at.inserted
	}
	return at.flushed
}

// commitFor commits the transaction on the lease and tells the sessions where it ended.
func (c *Conn) commitFor(ctx context.Context) error {
	l := &c.lease
	p := l.p
	for _, w := range l.writers {
		w.session.committing(w.mark)
	}
	o, err := p.commit(ctx)
	l.inTx = false
	failed := o.rolledBack || err != nil && !p.closed()
	l.writers = slices.DeleteFunc(l.writers, func(w writer) bool {
		switch {
		case o.committed && o.at != 0 && o.wrote:
			w.session.committed(c.connector, p.id.system, floor{p.id.timeline, o.at})
		case !w.inTx, o.committed && o.at == 0, !o.committed && !failed, p.overheard.ended:
			// Earlier statements on this connection, a position that was not told, an outcome that is unknown: to be asked
			// for later.
			return false
		default:
			w.session.readIn(p)
		}
		w.session.drop(w.mark)
		return true
	})
	for i := range l.writers {
		l.writers[i].inTx = false // what is left does not end with another transaction
	}
	if o.committed {
		return nil
	}
	if p.inTx() && !p.closed() {
		_ = p.pg.Close(ctx) // as pgx does; the first error tells more
	}
	if err == nil && o.rolledBack {
		return pgx.ErrTxCommitRollback
	}
	return err
}
