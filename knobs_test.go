package pgsplit_test

import (
	"context"
	"database/sql"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgsplit/pgsplit"
	"github.com/pgsplit/pgsplit/pgsplittest"
)

// whichServer answers the name that pgsplittest gave the server.
const whichServer = `select current_setting('cluster_name')`

// eventually waits for something that must come true; the time only shows that it hung.
func eventually(t testing.TB, what string, condition func() bool) {
	t.Helper()
	if !within(time.Minute, condition) {
		t.Fatalf("never: %s", what)
	}
}

// within polls a condition and tells whether it came true in time.
func within(d time.Duration, condition func() bool) bool {
	ticker := time.NewTicker(2 * time.Millisecond)
	defer ticker.Stop()
	for end := time.Now().Add(d); !condition(); <-ticker.C {
		if time.Now().After(end) {
			return false
		}
	}
	return true
}

// inOneOf runs a check that a machine which stops for a moment can make fail though nothing is wrong: it has a few tries, and
// the first that succeeds counts.
func inOneOf(t testing.TB, tries int, check func() error) {
	t.Helper()
	for try := 1; ; try++ {
		err := check()
		switch {
		case err == nil:
			return
		case try == tries:
			t.Errorf("in none of %d tries: %v", tries, err)
			return
		}
		t.Logf("try %d: %v", try, err)
	}
}

// inLongerAndLonger is inOneOf for a check that is about times and their ratios, not their lengths: each try has twice the time of
// the one before, so that a slow machine gets as much as it needs, and a fast one does not wait for that.
func inLongerAndLonger(t testing.TB, unit time.Duration, check func(unit time.Duration) error) {
	t.Helper()
	try := unit / 2
	inOneOf(t, 5, func() error {
		try *= 2
		return check(try)
	})
}

// with adds parameters to the primary's URI, from where the replicas inherit what concerns connections.
func with(dsn string, parameters ...string) string {
	primary, replicas, _ := strings.Cut(dsn, " ")
	return primary + "&" + strings.Join(parameters, "&") + " " + replicas
}

// patiently is the cluster's DSN for tests that want the replicas to serve on a slow machine as well.
func patiently(cluster *pgsplittest.Cluster) string {
	return with(cluster.DSN(), "replica_timeout=20s")
}

func connectorOf(t testing.TB, db *sql.DB) *pgsplit.Connector {
	t.Helper()
	c, err := pgsplit.FromDB(db)
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// openConnections is how many connections to all servers the connector has.
func openConnections(c *pgsplit.Connector) (n int) {
	for _, s := range c.Stats().Servers {
		n += s.Open
	}
	return n
}

// inUse is how many leases are out at all servers.
func inUse(c *pgsplit.Connector) (n int) {
	for _, s := range c.Stats().Servers {
		n += s.InUse
	}
	return n
}

// observer looks at a server's pg_stat_activity from a connection of its own.
type observer struct {
	t    testing.TB
	conn *pgx.Conn
	app  string
}

// observe looks at the connections of an application_name.
func observe(t testing.TB, s *pgsplittest.Server, app string) *observer {
	t.Helper()
	conn, err := s.Conn(patient(t))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close(context.Background()) })
	return &observer{t, conn, app}
}

func observeAll(t testing.TB, cluster *pgsplittest.Cluster, app string) (all []*observer) {
	t.Helper()
	for _, s := range cluster.Servers() {
		all = append(all, observe(t, s, app))
	}
	return all
}

// pids are the backends of the application, the oldest first.
func (o *observer) pids() []int32 {
	o.t.Helper()
	rows, _ := o.conn.Query(context.Background(), `select pid from pg_stat_activity
		where backend_type = 'client backend' and application_name = $1 order by backend_start`, o.app)
	pids, err := pgx.CollectRows(rows, pgx.RowTo[int32])
	if err != nil {
		o.t.Fatal(err)
	}
	return pids
}

// working is how many of the backends have something to do, and how many there are: one that was told to end is
// idle until it is gone.
func (o *observer) working() (busy, all int, err error) {
	err = o.conn.QueryRow(context.Background(), `select count(*) filter (where state <> 'idle'), count(*)
		from pg_stat_activity where backend_type = 'client backend' and application_name = $1`, o.app).Scan(&busy, &all)
	return busy, all, err
}

// sampling watches servers while something else happens.
type sampling struct {
	t    testing.TB
	stop chan struct{}
	wg   sync.WaitGroup

	mu   sync.Mutex
	busy []int // most connections at work, by server; guarded by mu
	open []int // most connections in Stats, by server; guarded by mu
	n    int   // samples; guarded by mu
}

func sample(t testing.TB, c *pgsplit.Connector, servers []*observer) *sampling {
	s := &sampling{t: t, stop: make(chan struct{}), busy: make([]int, len(servers)), open: make([]int, len(servers))}
	look := func(look func() error) {
		ticker := time.NewTicker(time.Millisecond)
		defer ticker.Stop()
		for {
			if err := look(); err != nil {
				t.Error(err)
				return
			}
			select {
			case <-s.stop:
				return
			case <-ticker.C:
			}
		}
	}
	for i, server := range servers {
		s.wg.Go(func() {
			look(func() error {
				busy, _, err := server.working()
				s.mu.Lock()
				defer s.mu.Unlock()
				s.busy[i], s.n = max(s.busy[i], busy), s.n+1
				return err
			})
		})
	}
	s.wg.Go(func() {
		look(func() error {
			stats := c.Stats()
			s.mu.Lock()
			defer s.mu.Unlock()
			for i := range servers {
				s.open[i] = max(s.open[i], stats.Servers[i].Open)
			}
			return nil
		})
	})
	return s
}

// during repeats a storm until every server was seen at work, one of them up to the bound, and checks that none was above
// it.
func (s *sampling) during(bound int, storm func()) {
	s.t.Helper()
	storms := 0
	enough := within(time.Minute, func() bool {
		storm()
		storms++
		s.mu.Lock()
		defer s.mu.Unlock()
		return s.t.Failed() || slices.Min(s.busy) > 0 && slices.Max(s.busy) >= bound && s.n >= 10*len(s.busy)
	})
	close(s.stop)
	s.wg.Wait()
	if !enough {
		s.t.Errorf("in %d samples the servers had at most %v connections at work, want %d at one of them", s.n, s.busy, bound)
	}
	for i := range s.busy {
		if s.busy[i] > bound {
			s.t.Errorf("server %d had %d connections at work, want at most %d", i, s.busy[i], bound)
		}
		if s.open[i] > bound {
			s.t.Errorf("server %d had %d connections open, want at most %d", i, s.open[i], bound)
		}
	}
	s.t.Logf("%d samples of %d storms", s.n, storms)
}

// storm runs statements with every kind of hint from many goroutines: rounds each, a few milliseconds long.
func storm(t testing.TB, ctx context.Context, db *sql.DB, goroutines, rounds int) {
	t.Helper()
	floor, err := pgsplit.CommitLSN(ctx, db)
	if err != nil {
		t.Fatal(err)
	}
	read := pgsplit.ReadOnly(ctx)
	behind := pgsplit.ReadOnly(pgsplit.WithLSN(ctx, floor), pgsplit.MaxWait(30*time.Second))
	const work = `select pg_sleep(0.003)`
	run := func(ctx context.Context, q queryer) error {
		_, err := q.ExecContext(ctx, work)
		return err
	}
	inTx := func(ctx context.Context) error {
		tx, err := db.BeginTx(ctx, nil)
		if err != nil {
			return err
		}
		defer tx.Rollback()
		if err := run(ctx, tx); err != nil {
			return err
		}
		return tx.Commit()
	}
	kinds := []func() error{
		func() error { return run(ctx, db) },
		func() error { return run(read, db) },
		func() error { return run(behind, db) },
		func() error { return inTx(ctx) },
		func() error { return inTx(read) },
		func() error {
			conn, err := db.Conn(ctx)
			if err != nil {
				return err
			}
			defer conn.Close()
			for _, ctx := range []context.Context{read, ctx, read, behind} {
				if err := run(ctx, conn); err != nil {
					return err
				}
			}
			return nil
		},
	}
	var wg sync.WaitGroup
	for range goroutines {
		wg.Go(func() {
			for range rounds {
				kind := rand.IntN(len(kinds))
				if err := kinds[kind](); err != nil {
					t.Errorf("kind %d: %v", kind, err)
					return
				}
			}
		})
	}
	wg.Wait()
}

func TestMaxOpenConnsBoundsTheConnectionsAtWorkOnEveryServer(t *testing.T) {
	cluster := shareCluster(t, 2)
	db := open(t, with(patiently(cluster), "application_name=storm"))
	const bound = 4
	db.SetMaxOpenConns(bound)
	db.SetMaxIdleConns(bound)
	servers := observeAll(t, cluster, "storm")
	s := sample(t, connectorOf(t, db), servers)
	s.during(bound, func() { storm(t, patient(t), db, 32, 8) })
	for i, o := range servers {
		eventually(t, fmt.Sprintf("server %d has %d connections at most", i, bound), func() bool { return len(o.pids()) <= bound })
	}
}

func TestReadOnlyAndReadWriteConnectionsToThePrimaryShareTheBound(t *testing.T) {
	cluster := shareCluster(t, 0)
	db := open(t, with(patiently(cluster), "application_name=storm"))
	const bound = 3
	db.SetMaxOpenConns(bound)
	db.SetMaxIdleConns(bound)
	servers := observeAll(t, cluster, "storm")
	s := sample(t, connectorOf(t, db), servers)
	s.during(bound, func() { storm(t, patient(t), db, 32, 4) })
	eventually(t, "no more than the bound is left", func() bool { return len(servers[0].pids()) <= bound })
}

func TestPoolMaxConnsIsKeptByManyGoroutinesWithoutDeadlockOrError(t *testing.T) {
	for _, replicas := range []int{0, 2} {
		t.Run(fmt.Sprintf("%d replicas", replicas), func(t *testing.T) {
			cluster := shareCluster(t, replicas)
			db := open(t, with(cluster.DSN(), "application_name=storm", "pool_max_conns=2", "replica_timeout=10s"))
			servers := observeAll(t, cluster, "storm")
			s := sample(t, connectorOf(t, db), servers)
			s.during(2, func() { storm(t, patient(t), db, 200, 1+replicas/2) })
		})
	}
}

// The connections that pool_min_conns has opened in the background count as well.
func TestPoolMinConnsStaysWithinPoolMaxConns(t *testing.T) {
	cluster := pgsplittest.Start(t, pgsplittest.Replicas(1))
	for _, s := range cluster.Servers() {
		s.Proxy().SetDelay(20 * time.Millisecond) // so that openings overlap
	}
	ctx := patient(t)
	db := open(t, with(cluster.ProxyDSN(), "pool_max_conns=2", "pool_min_conns=2"))
	c, stop := connectorOf(t, db), make(chan struct{})
	var wg sync.WaitGroup
	most := 0
	wg.Go(func() {
		ticker := time.NewTicker(time.Millisecond)
		defer ticker.Stop()
		for {
			for _, s := range c.Stats().Servers {
				most = max(most, s.Open)
			}
			select {
			case <-stop:
				return
			case <-ticker.C:
			}
		}
	})
	var work sync.WaitGroup
	for i := range 8 {
		work.Go(func() {
			ctx := ctx
			if i%2 == 0 {
				ctx = pgsplit.ReadOnly(ctx)
			}
			if _, err := db.ExecContext(ctx, "select 1"); err != nil {
				t.Error(err)
			}
		})
	}
	work.Wait()
	eventually(t, "each server has the minimum", func() bool {
		for _, s := range c.Stats().Servers {
			if s.Open != 2 {
				return false
			}
		}
		return true
	})
	close(stop)
	wg.Wait()
	if most > 2 {
		t.Errorf("%d connections to one server, want 2", most)
	}
}

// spread makes n shells, and n connections to each server: those to the primary are leased by the shells, the others are
// idle.
func spread(t testing.TB, ctx context.Context, db *sql.DB, n int, labels []string) (shells []*sql.Conn) {
	t.Helper()
	use := func(ctx context.Context) {
		shells = nil
		for range n {
			conn, err := db.Conn(ctx)
			if err != nil {
				t.Fatal(err)
			}
			exec(t, ctx, conn, "select 1")
			shells = append(shells, conn)
		}
	}
	for _, label := range labels {
		use(pgsplit.ReadOnly(ctx, pgsplit.Prefer(label), pgsplit.ReplicaOnly()))
		closeAll(t, shells)
	}
	use(ctx)
	return shells
}

// labelled is the cluster's DSN with each replica's name as its label.
func labelled(cluster *pgsplittest.Cluster, parameters ...string) (dsn string, labels []string) {
	dsn = with(cluster.Primary.URI(), append(parameters, "replica_timeout=20s")...)
	for _, s := range cluster.Replicas {
		dsn += " " + s.URI() + "&label=" + s.Name()
		labels = append(labels, s.Name())
	}
	return dsn, labels
}

func closeAll(t testing.TB, shells []*sql.Conn) {
	t.Helper()
	for _, conn := range shells {
		if err := conn.Close(); err != nil {
			t.Error(err)
		}
	}
}

func TestMaxIdleConnsClosesConnectionsOnEveryServer(t *testing.T) {
	for _, idle := range []int{0, 2} {
		t.Run(fmt.Sprint(idle), func(t *testing.T) {
			cluster := shareCluster(t, 2)
			dsn, labels := labelled(cluster, "application_name=idle")
			db := open(t, dsn)
			db.SetMaxIdleConns(6)
			servers := observeAll(t, cluster, "idle")
			shells := spread(t, patient(t), db, 6, labels)
			for i, o := range servers {
				if n := len(o.pids()); n != 6 {
					t.Fatalf("server %d has %d connections, want 6 before the test", i, n)
				}
			}
			db.SetMaxIdleConns(idle)
			closeAll(t, shells)
			for i, o := range servers {
				eventually(t, fmt.Sprintf("server %d has %d connections", i, idle), func() bool { return len(o.pids()) == idle })
			}
			c := connectorOf(t, db)
			eventually(t, "no more are counted as open", func() bool { return openConnections(c) <= len(servers)*idle })
		})
	}
}

func TestAShellThatClosesRetiresTheConnectionThatWasIdleForLongest(t *testing.T) {
	cluster := shareCluster(t, 0)
	ctx := patient(t)
	db := open(t, with(cluster.DSN(), "application_name=idle"))
	db.SetMaxIdleConns(2)
	var shells []*sql.Conn
	var pids []int32
	for range 3 {
		conn, err := db.Conn(ctx)
		if err != nil {
			t.Fatal(err)
		}
		var pid int32
		if err := conn.QueryRowContext(ctx, "select pg_backend_pid()").Scan(&pid); err != nil {
			t.Fatal(err)
		}
		shells, pids = append(shells, conn), append(pids, pid)
	}
	// The one that was opened second becomes idle first.
	closeAll(t, []*sql.Conn{shells[1], shells[0], shells[2]})
	o := observe(t, cluster.Primary, "idle")
	eventually(t, "two connections are left", func() bool { return len(o.pids()) == 2 })
	if left := o.pids(); left[0] != pids[0] || left[1] != pids[2] {
		t.Errorf("%v are left of %v", left, pids)
	}
}

// agesOut checks that all connections of six shells are closed by themselves.
func agesOut(t *testing.T, set func(*sql.DB), parameters ...string) {
	t.Helper()
	t.Parallel() // it mostly waits
	cluster := pgsplittest.Start(t, pgsplittest.Replicas(2))
	dsn, labels := labelled(cluster, append(parameters, "application_name=aging")...)
	db := open(t, dsn)
	db.SetMaxIdleConns(6)
	closeAll(t, spread(t, patient(t), db, 6, labels))
	set(db)
	for i, o := range observeAll(t, cluster, "aging") {
		eventually(t, fmt.Sprintf("server %d has no connection", i), func() bool { return len(o.pids()) == 0 })
	}
	c := connectorOf(t, db)
	eventually(t, "none is counted as open", func() bool { return openConnections(c) == 0 })
}

func TestConnMaxLifetimeClosesConnectionsOnEveryServer(t *testing.T) {
	agesOut(t, func(db *sql.DB) { db.SetConnMaxLifetime(100 * time.Millisecond) })
}

func TestConnMaxIdleTimeClosesConnectionsOnEveryServer(t *testing.T) {
	agesOut(t, func(db *sql.DB) { db.SetConnMaxIdleTime(100 * time.Millisecond) })
}

func TestPoolMaxConnIdleTimeInTheDSNClosesConnectionsOnEveryServer(t *testing.T) {
	agesOut(t, func(*sql.DB) {}, "pool_max_conn_idle_time=200ms")
}

func TestPoolMaxConnLifetimeInTheDSNClosesConnectionsOnEveryServer(t *testing.T) {
	agesOut(t, func(*sql.DB) {}, "pool_max_conn_lifetime=200ms")
}

// A connection that is in use for longer than its lifetime is closed when it comes back, not under its user.
func TestPoolMaxConnLifetimeLetsALeaseFinish(t *testing.T) {
	cluster := shareCluster(t, 0)
	ctx := patient(t)
	db := open(t, with(cluster.DSN(), "pool_max_conn_lifetime=20ms"))
	conn, err := db.Conn(ctx)
	if err != nil {
		t.Fatal(err)
	}
	pid := text(t, ctx, conn, "select pg_backend_pid()::text from pg_sleep(0.1)")
	if again := text(t, ctx, conn, "select pg_backend_pid()::text"); again != pid {
		t.Error("the held connection was exchanged")
	}
	conn.Close()
	if again := text(t, ctx, db, "select pg_backend_pid()::text"); again == pid {
		t.Error("a connection past its lifetime was leased")
	}
}

func TestPoolMinConnsAreOpenWhileAShellIsOpen(t *testing.T) {
	cluster := shareCluster(t, 2)
	ctx := patient(t)
	db := open(t, with(cluster.DSN(), "application_name=minimum", "pool_min_conns=3", "pool_max_conn_idle_time=1h"))
	servers := observeAll(t, cluster, "minimum")
	for i, o := range servers {
		if n := len(o.pids()); n != 0 {
			t.Fatalf("server %d has %d connections before the first use", i, n)
		}
	}
	exec(t, ctx, db, "select 1")
	for i, o := range servers {
		eventually(t, fmt.Sprintf("server %d has the minimum", i), func() bool { return len(o.pids()) == 3 })
	}
	// One that is lost comes back with the next shell.
	for _, o := range servers {
		var ended bool
		if err := o.conn.QueryRow(ctx, "select pg_terminate_backend($1)", o.pids()[0]).Scan(&ended); err != nil || !ended {
			t.Fatal(ended, err)
		}
	}
	db.SetMaxIdleConns(0) // closes the only shell
	for i, o := range servers {
		eventually(t, fmt.Sprintf("server %d has none after the last shell", i), func() bool { return len(o.pids()) == 0 })
	}
	if n := openConnections(connectorOf(t, db)); n != 0 {
		t.Errorf("%d connections are counted as open", n)
	}
}

func TestPoolMinConnsSurviveTheIdleTime(t *testing.T) {
	cluster := shareCluster(t, 0)
	ctx := patient(t)
	db := open(t, with(cluster.DSN(), "application_name=minimum", "pool_min_conns=2", "pool_max_conn_idle_time=25ms"))
	exec(t, ctx, db, "select 1")
	o := observe(t, cluster.Primary, "minimum")
	eventually(t, "the minimum is there", func() bool { return len(o.pids()) == 2 })
	pids := fmt.Sprint(o.pids())
	// Twenty idle times later the same two are there.
	if within(time.Second/2, func() bool { return fmt.Sprint(o.pids()) != pids }) {
		t.Errorf("the minimum was exchanged: %s became %v", pids, o.pids())
	}
}

func TestNothingIsLeftOpenWhenTheLastShellCloses(t *testing.T) {
	cluster := shareCluster(t, 2)
	db := open(t, with(cluster.DSN(), "application_name=storm", "pool_min_conns=1", "pool_max_conn_lifetime=1h"))
	storm(t, patient(t), db, 8, 5)
	db.SetMaxIdleConns(0)
	c := connectorOf(t, db)
	eventually(t, "all shells are closed", func() bool { return db.Stats().OpenConnections == 0 })
	eventually(t, "no connection is counted as open", func() bool { return openConnections(c) == 0 && inUse(c) == 0 })
	for i, o := range observeAll(t, cluster, "storm") {
		eventually(t, fmt.Sprintf("server %d has no connection", i), func() bool { return len(o.pids()) == 0 })
	}
}
