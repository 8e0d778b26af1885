package pgsplit

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"os"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgsplit/pgsplit/pgsplittest"
)

// A promise is what a writer was told: at lsn the counter was at least at value.
type promise struct {
	key   int
	value int64
	lsn   LSN
}

// floorRun lets readers check promises while writers make new ones and a nemesis makes the replicas lag.
type floorRun struct {
	cluster *pgsplittest.Cluster
	db      *sql.DB
	read    func(context.Context, promise) (value int64, onReplica bool, err error)
	nemesis func(context.Context, *rand.Rand) error // one act, and its undoing

	newest     bool        // readers ask for the latest promise, else for a late one
	untilStale bool        // the run ends with the first stale read: it only has to show that there is one
	enough     func() bool // the run goes on until the nemesis has done enough for its reads to mean something; nil: it has

	rest sync.RWMutex // held by reads and writes, and for the time for which there are to be none

	promises [128]atomic.Pointer[promise] // the latest ones
	made     atomic.Int64

	begun, reads, stale, replica, failed atomic.Int64
	firstFailure                         atomic.Pointer[error]
}

const (
	counters    = 16
	readerCount = 32
)

// prepareCounters makes the table that the promises are about and waits until every replica has it.
func prepareCounters(t *testing.T, ctx context.Context, cluster *pgsplittest.Cluster, db *sql.DB) {
	t.Helper()
	if _, err := db.ExecContext(ctx, "create table counters (id int primary key, value bigint not null)"); err != nil {
		t.Fatal(err)
	}
	if _, err := db.ExecContext(ctx, "insert into counters select i, 0 from generate_series(0, $1) i", counters-1); err != nil {
		t.Fatal(err)
	}
	// Where commits are asynchronous nobody else has flushed it yet.
	if _, err := CommitLSN(ctx, db); err != nil {
		t.Fatal(err)
	}
	if err := cluster.CatchUp(ctx); err != nil {
		t.Fatal(err)
	}
}

// run makes n reads, and more until there were enough of what they are to withstand.
func (f *floorRun) run(t *testing.T, n int64) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 4*time.Minute)
	defer cancel()
	background, stop := context.WithCancel(ctx)
	var others, readers sync.WaitGroup
	start := make(chan struct{})
	for w := range 2 {
		others.Go(func() { f.write(background, t, w, start) })
	}
	select {
	case <-start:
	case <-ctx.Done():
		t.Fatal("no promise was made")
	}
	if f.nemesis != nil {
		others.Go(func() {
			r := rand.New(rand.NewPCG(1, 2))
			for background.Err() == nil {
				if err := f.nemesis(background, r); err != nil && background.Err() == nil {
					t.Errorf("nemesis: %v", err)
					return
				}
			}
		})
	}
	for range readerCount {
		readers.Go(func() {
			for (f.begun.Add(1) <= n || f.enough != nil && !f.enough()) && ctx.Err() == nil && !(f.untilStale && f.stale.Load() > 0) {
				f.check(ctx)
			}
		})
	}
	readers.Wait()
	stop()
	others.Wait()
	for _, replica := range f.cluster.Replicas {
		_ = replica.ResumeReplay(ctx) // it may be the one that was stopped
	}
	if ctx.Err() != nil {
		t.Error("the run did not end in time")
	}
	t.Logf("%d reads, %d on replicas, %d stale, %d failed, %d promises", f.reads.Load(), f.replica.Load(), f.stale.Load(),
		f.failed.Load(), f.made.Load())
}

// write makes promises about the counters of one writer, about 500 a second.
func (f *floorRun) write(ctx context.Context, t *testing.T, writer int, start chan struct{}) {
	tick := time.NewTicker(4 * time.Millisecond)
	defer tick.Stop()
	for ctx.Err() == nil {
		p := promise{key: writer + 2*rand.IntN(counters/2)}
		f.rest.RLock()
		err := f.db.QueryRowContext(ctx, "update counters set value = value + 1 where id = $1 returning value", p.key).
			Scan(&p.value)
		if err == nil {
			p.lsn, err = CommitLSN(ctx, f.db)
		}
		f.rest.RUnlock()
		if err != nil {
			if ctx.Err() == nil {
				t.Errorf("writer: %v", err)
			}
			return
		}
		n := f.made.Add(1)
		f.promises[n%int64(len(f.promises))].Store(&p)
		if n == int64(len(f.promises)) {
			close(start)
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
		}
	}
}

// check reads what one of the latest promises is about.
func (f *floorRun) check(ctx context.Context) {
	i := rand.Int64N(int64(len(f.promises)))
	if f.newest {
		i = f.made.Load() % int64(len(f.promises))
	}
	f.rest.RLock()
	defer f.rest.RUnlock()
	p := f.promises[i].Load()
	value, onReplica, err := f.read(ctx, *p)
	f.reads.Add(1)
	switch {
	case err != nil:
		f.failed.Add(1)
		f.firstFailure.CompareAndSwap(nil, &err)
	case value < p.value:
		f.stale.Add(1)
	}
	if onReplica {
		f.replica.Add(1)
	}
}

const readCounter = "select value, pg_is_in_recovery() from counters where id = $1"

// readWithFloor is the driver's way.
func (f *floorRun) readWithFloor(ctx context.Context, p promise) (value int64, onReplica bool, err error) {
	err = f.db.QueryRowContext(ReadOnly(ctx, AfterLSN(p.lsn)), readCounter, p.key).Scan(&value, &onReplica)
	return value, onReplica, err
}

// readWithoutFloor is what every other splitter does.
func (f *floorRun) readWithoutFloor(ctx context.Context, p promise) (value int64, onReplica bool, err error) {
	err = f.db.QueryRowContext(ReadOnly(ctx), readCounter, p.key).Scan(&value, &onReplica)
	return value, onReplica, err
}

// pauses stops the replay of one replica for a moment, or of both.
func (f *floorRun) pauses(ctx context.Context, r *rand.Rand) error {
	paused := f.cluster.Replicas
	if r.IntN(4) != 0 {
		i := r.IntN(len(paused))
		paused = paused[i : i+1]
	}
	for _, replica := range paused {
		if err := replica.PauseReplay(ctx); err != nil {
			return err
		}
	}
	pass(ctx, time.Duration(10+r.IntN(40))*time.Millisecond)
	for _, replica := range paused {
		if err := replica.ResumeReplay(ctx); err != nil {
			return err
		}
	}
	pass(ctx, time.Duration(r.IntN(30))*time.Millisecond)
	return nil
}

// pass lets the time go by for which a nemesis leaves things as they are.
func pass(ctx context.Context, d time.Duration) {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-ctx.Done():
	}
}

// newFloorRun starts a cluster and opens the DSN that dsn makes of it.
func newFloorRun(t *testing.T, dsn func(*pgsplittest.Cluster) string, change func(*Connector), opts ...pgsplittest.Option) (*floorRun, *Connector) {
	t.Helper()
	cluster := pgsplittest.Start(t, append(opts, pgsplittest.Replicas(2))...)
	config, err := ParseDSN(dsn(cluster))
	if err != nil {
		t.Fatal(err)
	}
	// A replica that was lost is read again at once, while it is still far behind.
	config.RetryMin, config.RetryMax = time.Millisecond, 5*time.Millisecond
	connector, err := NewConnector(config)
	if err != nil {
		t.Fatal(err)
	}
	if change != nil {
		change(connector)
	}
	db := sql.OpenDB(connector)
	t.Cleanup(func() { _ = db.Close() })
	db.SetMaxOpenConns(readerCount + 4)
	db.SetMaxIdleConns(readerCount + 4)
	f := &floorRun{cluster: cluster, db: db}
	f.read, f.nemesis = f.readWithFloor, f.pauses
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	prepareCounters(t, ctx, cluster, db)
	return f, connector
}

// mustHold makes n reads and more until one in a hundred of n was refused by a replica that was behind, since an idle nemesis
// proves nothing, and the replicas did their share: a short run may be over before the first of the nemesis's pauses is. It
// fails unless every promise was kept.
func (f *floorRun) mustHold(t *testing.T, c *Connector, n int64) {
	t.Helper()
	share := func() float64 { return float64(f.replica.Load()) / float64(f.reads.Load()) }
	const least = 0.4
	f.enough = func() bool { return refusals(c) >= uint64(n)/100 && share() >= least }
	f.run(t, n)
	if err := f.firstFailure.Load(); err != nil {
		t.Errorf("%d reads failed, the first with: %v", f.failed.Load(), *err)
	}
	if f.stale.Load() != 0 {
		t.Errorf("%d stale reads", f.stale.Load())
	}
	if share() < least {
		t.Errorf("only %.0f %% of the reads were served by replicas", 100*share())
	}
	t.Logf("%d refusals, reasons %v", refusals(c), c.Stats().Reasons)
}

// refusals is how often a replica was passed by because it was not proven to have the floor.
func refusals(c *Connector) (n uint64) {
	for _, s := range c.Stats().Servers {
		n += s.Refusals
	}
	return n
}

// mustBeCaught runs until a stale read shows, and fails if none does in all the time that a run has: the same run could not
// fail for the driver then.
func (f *floorRun) mustBeCaught(t *testing.T) {
	t.Helper()
	f.untilStale = true
	f.run(t, math.MaxInt64)
	if f.stale.Load() == 0 {
		t.Error("no stale read: this test proves nothing about the driver")
	}
}

// readsOfARun is 100,000, or PGSPLIT_TEST_READS.
func readsOfARun(t *testing.T) int64 {
	t.Helper()
	text := os.Getenv("PGSPLIT_TEST_READS")
	if text == "" {
		return 100_000
	}
	n, err := strconv.ParseInt(text, 10, 64)
	if err != nil || n < 1000 {
		t.Fatalf("PGSPLIT_TEST_READS: %q is no number of at least 1000", text)
	}
	return n
}

// direct is the DSN of all servers over their unix sockets, which take less of the machine than TCP does.
func direct(c *pgsplittest.Cluster) string {
	var uris []string
	for _, s := range c.Servers() {
		uris = append(uris, s.SocketURI())
	}
	return strings.Join(uris, " ")
}

func TestAFloorIsKeptWhileReplicasArePausedAndResumed(t *testing.T) {
	f, c := newFloorRun(t, direct, nil)
	f.mustHold(t, c, readsOfARun(t))
}

func TestReadsWithoutAFloorAreStaleUnderTheSameNemesis(t *testing.T) {
	f, _ := newFloorRun(t, direct, nil)
	f.read = f.readWithoutFloor
	f.mustBeCaught(t)
}

func TestAFloorIsKeptUnderAsynchronousCommit(t *testing.T) {
	f, c := newFloorRun(t, direct, nil, pgsplittest.PrimarySetting("synchronous_commit", "off"))
	f.mustHold(t, c, readsOfARun(t))
}

// F4: with one snapshot a transaction, a check inside it would be too new.
func TestAFloorIsKeptUnderRepeatableReadAsTheDefault(t *testing.T) {
	f, c := newFloorRun(t, direct, nil, pgsplittest.Setting("default_transaction_isolation", "repeatable read"))
	f.read, f.newest = f.readInTx, true
	f.mustHold(t, c, readsOfARun(t))
}

// naiveWait is how long a read waits for its floor where the check could share the read's snapshot.
const naiveWait = 5 * time.Millisecond

// readInTx reads in a transaction, where a check between its BEGIN and its first read would share the snapshot.
func (f *floorRun) readInTx(ctx context.Context, p promise) (value int64, onReplica bool, err error) {
	tx, err := f.db.BeginTx(ReadOnly(ctx, AfterLSN(p.lsn), MaxWait(naiveWait)), nil)
	if err != nil {
		return 0, false, err
	}
	err = tx.QueryRowContext(ctx, readCounter, p.key).Scan(&value, &onReplica)
	return value, onReplica, errors.Join(err, tx.Commit())
}

func TestACheckInsideTheSnapshotIsCaught(t *testing.T) {
	f, _ := newFloorRun(t, direct, nil, pgsplittest.Setting("default_transaction_isolation", "repeatable read"))
	ctx := context.Background()
	pools := make([]chan *pgx.Conn, len(f.cluster.Replicas))
	for i, replica := range f.cluster.Replicas {
		pools[i] = make(chan *pgx.Conn, readerCount)
		for range readerCount {
			conn, err := replica.Conn(ctx)
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { _ = conn.Close(ctx) })
			pools[i] <- conn
		}
	}
	f.read = func(ctx context.Context, p promise) (value int64, onReplica bool, err error) {
		pool := pools[rand.IntN(len(pools))]
		conn := <-pool
		defer func() { pool <- conn }()
		tx, err := conn.Begin(ctx)
		if err != nil {
			return 0, false, err
		}
		defer func() { _ = tx.Rollback(ctx) }()
		var position LSN
		for began := time.Now(); position < p.lsn; {
			if time.Since(began) > naiveWait {
				return p.value, false, nil // the primary would answer
			}
			if err := tx.QueryRow(ctx, "select pg_last_wal_replay_lsn()::text").Scan(&position); err != nil {
				return 0, false, err
			}
		}
		err = tx.QueryRow(ctx, readCounter, p.key).Scan(&value, &onReplica)
		return value, onReplica, err
	}
	f.newest = true
	f.mustBeCaught(t)
}

// roundRobin hides both replicas behind one address, as a load balancer does (F9).
func roundRobin(c *pgsplittest.Cluster) string {
	return c.Primary.SocketURI() + " " + c.RoundRobin().URI()
}

func TestAFloorIsKeptThroughAnAddressThatHidesTwoInstances(t *testing.T) {
	f, c := newFloorRun(t, roundRobin, nil)
	f.mustHold(t, c, readsOfARun(t))
}

// byAddress remembers positions by what was configured instead of by who answered.
func byAddress(c *Connector) {
	c.lifeOf = func(s *server, _ identity) life { return life{address: s.name} }
	for _, s := range c.replicas {
		c.instances.join(life{address: s.name}) // and keeps them when all connections are gone
	}
}

func TestAPositionRememberedByAddressIsCaught(t *testing.T) {
	f, _ := newFloorRun(t, roundRobin, byAddress)
	f.mustBeCaught(t)
}

// F7: a restarted standby replays from its last restartpoint and lets readers in before it is where it was.
func TestAFloorIsKeptAcrossRestartsOfAReplica(t *testing.T) {
	f, c := newFloorRun(t, (*pgsplittest.Cluster).DSN, nil) // over TCP, where a server knows its address
	f.nemesis = f.restarts
	setbacks := func() (n uint64) {
		for _, s := range c.Stats().Servers {
			n += s.Setbacks
		}
		return n
	}
	// A read has to meet a position below the one remembered, else the restarts prove nothing.
	f.enough = func() bool { return setbacks() > 0 }
	f.run(t, readsOfARun(t))
	if f.stale.Load() != 0 {
		t.Errorf("%d stale reads", f.stale.Load())
	}
	t.Logf("%d setbacks, reasons %v", setbacks(), c.Stats().Reasons)
	if err := f.firstFailure.Load(); err != nil && !brokeOff(*err) {
		t.Errorf("%d reads failed, one with: %v", f.failed.Load(), *err)
	}
}

func TestAPositionKeptAcrossRestartsIsCaught(t *testing.T) {
	f, _ := newFloorRun(t, (*pgsplittest.Cluster).DSN, byAddress)
	f.nemesis = f.restarts
	f.mustBeCaught(t)
}

// brokeOff tells whether a read lost its connection while it ran: its replica was being killed.
func brokeOff(err error) bool {
	return strings.Contains(err.Error(), "57P01") || strings.Contains(err.Error(), "57P02") ||
		strings.Contains(err.Error(), "EOF") || strings.Contains(err.Error(), "reset by peer") ||
		strings.Contains(err.Error(), "broken pipe")
}

// restarts has a replica lose its children or stop at once, far ahead of its last restartpoint, and come back there. It stays
// behind for a while, for reads to meet it. Most of the time nothing goes on until it does: nobody learns that it was away.
func (f *floorRun) restarts(ctx context.Context, r *rand.Rand) error {
	if err := f.letLogPile(ctx); err != nil {
		return err
	}
	replica := f.cluster.Replicas[r.IntN(2)]
	quiet := r.IntN(4) != 0
	if quiet {
		f.rest.Lock()
	}
	err := f.restart(ctx, r, replica)
	if err == nil {
		err = replica.PauseReplay(ctx)
	}
	if quiet {
		f.rest.Unlock()
	}
	if err != nil {
		return err
	}
	pass(ctx, 200*time.Millisecond)
	if err := replica.ResumeReplay(ctx); err != nil {
		return err
	}
	pass(ctx, 200*time.Millisecond)
	return nil
}

// letLogPile makes log that a restarted replica has to replay again, after a restartpoint. It changes no page, so nothing but
// replay itself brings the replica forward, and by its amount no checkpoint comes in between.
func (f *floorRun) letLogPile(ctx context.Context) error {
	if err := f.cluster.Primary.Exec(ctx, "checkpoint"); err != nil {
		return err
	}
	if err := f.cluster.CatchUp(ctx); err != nil {
		return err
	}
	for _, replica := range f.cluster.Replicas {
		if err := replica.Exec(ctx, "checkpoint"); err != nil {
			return err
		}
	}
	err := f.cluster.Primary.Exec(ctx,
		"select count(pg_logical_emit_message(false, 'pgsplit test', repeat('x', 1000000))) from generate_series(1, 60)")
	if err != nil {
		return err
	}
	if err := f.cluster.CatchUp(ctx); err != nil {
		return err
	}
	pass(ctx, 100*time.Millisecond)
	return nil
}

// restart returns when the replica lets readers in again.
func (f *floorRun) restart(ctx context.Context, r *rand.Rand, replica *pgsplittest.Server) error {
	if r.IntN(2) == 0 {
		if err := replica.KillBackend(ctx); err != nil {
			return fmt.Errorf("kill a backend: %w", err)
		}
	} else if err := replica.Restart(ctx, pgsplittest.Immediate); err != nil {
		return fmt.Errorf("restart: %w", err)
	}
	return nil
}
