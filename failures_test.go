package pgsplit_test

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"io"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"go.uber.org/goleak"

	"github.com/pgsplit/pgsplit"
	"github.com/pgsplit/pgsplit/pgsplittest"
)

// reading is many readers at once, each with a pause between its reads.
type reading struct {
	stop   chan struct{}
	wg     sync.WaitGroup
	failed atomic.Int64

	mu      sync.Mutex
	servers []string // who answered, in order; guarded by mu
}

// readAll has goroutines read, rate times a second all together, until end.
func readAll(t testing.TB, ctx context.Context, db *sql.DB, goroutines, rate int) *reading {
	r := &reading{stop: make(chan struct{})}
	for range goroutines {
		r.wg.Go(func() {
			ticker := time.NewTicker(time.Second * time.Duration(goroutines) / time.Duration(rate))
			defer ticker.Stop()
			for {
				select {
				case <-r.stop:
					return
				case <-ticker.C:
				}
				var server string
				if err := db.QueryRowContext(ctx, whichServer).Scan(&server); err != nil {
					if r.failed.Add(1) < 10 {
						t.Errorf("a read failed: %v", err)
					}
					continue
				}
				r.mu.Lock()
				r.servers = append(r.servers, server)
				r.mu.Unlock()
			}
		})
	}
	return r
}

func (r *reading) end() {
	close(r.stop)
	r.wg.Wait()
}

func (r *reading) count() int {
	r.mu.Lock()
	defer r.mu.Unlock()
	return len(r.servers)
}

// share is how many of the last n reads a server answered.
func (r *reading) share(server string, n int) float64 {
	r.mu.Lock()
	defer r.mu.Unlock()
	if len(r.servers) < n {
		return 0
	}
	count := 0
	for _, s := range r.servers[len(r.servers)-n:] {
		if s == server {
			count++
		}
	}
	return float64(count) / float64(n)
}

// probesIn is how many probes there may be in a time with default pauses, each cut by its jitter: one at once, and one
// each time a server comes to be suspected or down.
func probesIn(took, longest time.Duration) uint64 { return 6 + uint64(took/(longest*3/4)) }

func TestAReplicaKilledUnder500ReadsASecondCostsNoReadAndGetsItsShareBack(t *testing.T) {
	cluster := pgsplittest.Start(t, pgsplittest.Replicas(2))
	ctx := patient(t)
	db := open(t, cluster.DSN())
	db.SetMaxIdleConns(20)
	c := connectorOf(t, db)
	victim := cluster.Replicas[0]
	r := readAll(t, pgsplit.ReadOnly(ctx), db, 20, 500)
	defer r.wg.Wait()
	enough := func(n int) func() bool { return func() bool { return r.count() >= n } }
	eventually(t, "the readers read", enough(500))
	var down, back time.Duration
	inOneOf(t, 5, func() error {
		killed, probed := time.Now(), c.Stats().Servers[1].Probes
		if err := victim.Kill(ctx); err != nil {
			t.Fatal(err)
		}
		eventually(t, "the replica is down", func() bool { return c.Stats().Servers[1].State == "down" })
		before := c.Stats().Servers[1].Statements
		eventually(t, "the others go on", enough(r.count()+1000))
		if n := c.Stats().Servers[1].Statements - before; n > 20 {
			t.Errorf("%d reads began at a server that is down", n)
		}
		start(t, victim)
		accepting := time.Now()
		down = time.Since(killed)
		if n := c.Stats().Servers[1].Probes - probed; n < 1 || n > probesIn(down, 2*time.Second) {
			t.Errorf("%d probes in %v", n, down)
		}
		if !within(time.Minute, func() bool { return r.share(victim.Name(), 100) >= 0.3 }) {
			t.Fatalf("%v after it was back the replica serves %.2f of the reads", time.Since(accepting), r.share(victim.Name(), 100))
		}
		if back = time.Since(accepting); back > 3*time.Second {
			return fmt.Errorf("its share was back after %v", back)
		}
		return nil
	})
	probed := c.Stats().Servers[1].Probes
	eventually(t, "the readers go on", enough(r.count()+500))
	r.end()
	s := c.Stats().Servers[1]
	if s.Probes != probed || s.State != "healthy" {
		t.Errorf("%d probes of a server that is well, %s", s.Probes-probed, s.State)
	}
	t.Logf("%d reads, %d failed, %d moved on; down for %v with %d probes, its share was back after %v",
		r.count(), r.failed.Load(), s.MovedOn, down, s.Probes, back)
}

func TestADownServerIsProbedByOneConnectionAtATimeAndByNobodyElse(t *testing.T) {
	cluster := shareCluster(t, 2)
	ctx := patient(t)
	for _, c := range []condition{dead, silent} {
		t.Run(c.String(), func(t *testing.T) {
			dsn, fronts := frontsOf(t, cluster, up, c)
			db := open(t, with(dsn, "application_name=callers", "replica_timeout=300ms"))
			db.SetMaxIdleConns(20)
			connector := connectorOf(t, db)
			victim := func() pgsplit.ServerStats { return connector.Stats().Servers[1] }
			r := readAll(t, pgsplit.ReadOnly(ctx), db, 20, 500)
			begun := time.Now()
			eventually(t, "the replica is down", func() bool { return victim().State == "down" })
			eventually(t, "what was on its way has ended", func() bool {
				fronts[1].drop("callers") // a silent server would take its time
				return victim().Open == 0
			})
			dialled, _ := fronts[1].visitors("callers")
			eventually(t, "it was probed", func() bool { n, _ := fronts[1].visitors(probes); return n >= 1 })
			read := r.count()
			eventually(t, "the readers go on", func() bool { return r.count() >= read+250 })
			fronts[1].drop(probes) // a silent server would take its time
			eventually(t, "it was probed again", func() bool { n, _ := fronts[1].visitors(probes); return n >= 2 })
			took := time.Since(begun)
			before := victim().Probes
			came, most := fronts[1].visitors(probes)
			counted := victim().Probes // before they come
			if most > 1 {
				t.Errorf("%d probes at once", most)
			}
			if uint64(came) > probesIn(took, 2*time.Second) {
				t.Errorf("%d probes in %v", came, took)
			}
			if uint64(came)+1 < before || uint64(came) > counted {
				t.Errorf("%d to %d probes counted, %d came", before, counted, came)
			}
			if n, _ := fronts[1].visitors("callers"); n != dialled {
				t.Errorf("%d callers came to a server that is down", n-dialled)
			}
			fronts[1].is(up)
			fronts[1].drop(probes)
			eventually(t, "it is used again", func() bool { return victim().State == "healthy" && r.share("replica1", 50) > 0 })
			r.end()
		})
	}
}

// idleAt has n connections to the only replica, and as many to the primary, idle.
func idleAt(t testing.TB, ctx context.Context, db *sql.DB, n int) {
	t.Helper()
	db.SetMaxIdleConns(4 * n)
	var shells []*sql.Conn
	for range n {
		conn := hold(t, ctx, db)
		eventually(t, "the replica lets one more in in time", func() bool {
			_, err := conn.ExecContext(pgsplit.ReadOnly(ctx, pgsplit.ReplicaOnly()), "select 1")
			return err == nil
		})
		unhinted := hold(t, ctx, db)
		exec(t, ctx, unhinted, "select 1")
		shells = append(shells, conn, unhinted)
	}
	closeAll(t, shells)
}

func TestReadsInFlightWhenAReplicaGoesSilentFinishElsewhereAndLaterOnesDoNotTouchIt(t *testing.T) {
	const timeout, readers = time.Second, 10
	cluster := pgsplittest.Start(t, pgsplittest.Replicas(1))
	ctx := patient(t)
	proxy := cluster.Replicas[0].Proxy()
	var db *sql.DB
	try := 0
	inOneOf(t, 5, func() error {
		if db != nil {
			_ = db.Close()
		}
		proxy.Restore()
		try++
		name := "callers" + strconv.Itoa(try) // what an earlier one left asleep is not counted
		db = open(t, with(cluster.ProxyDSN(), "replica_timeout="+timeout.String(), "application_name="+name))
		idleAt(t, ctx, db, readers)
		if n := replicaStats(t, db).Open; n < readers {
			t.Fatalf("%d connections are at hand", n)
		}
		watch := observe(t, cluster.Replicas[0], name)
		var wg sync.WaitGroup
		var cut, longest atomic.Int64
		for range readers {
			wg.Go(func() {
				var where string
				err := db.QueryRowContext(pgsplit.ReadOnly(ctx), asleepOnReplica).Scan(&where)
				took := time.Now().UnixNano() - cut.Load()
				if err != nil || where != "primary" {
					t.Errorf("%q %v", where, err)
				}
				for known := longest.Load(); took > known && !longest.CompareAndSwap(known, took); known = longest.Load() {
				}
			})
		}
		eventually(t, "all are in flight", func() bool { return watch.count("wait_event = 'PgSleep'") == readers })
		cut.Store(time.Now().UnixNano())
		proxy.BlackHole()
		wg.Wait()
		took := time.Duration(longest.Load())
		t.Logf("the longest took %v", took)
		if took > 2*timeout+timeout/4 { // and the read elsewhere
			return fmt.Errorf("a read took %v after the replica had gone silent", took)
		}
		return nil
	})
	eventually(t, "the replica is down", func() bool { return replicaStats(t, db).State == "down" })
	before, probed, dialled := replicaStats(t, db), replicaStats(t, db).Probes, proxy.Accepted()
	r := readAll(t, pgsplit.ReadOnly(ctx), db, 10, 500)
	eventually(t, "later reads", func() bool { return r.count() > 500 })
	r.end()
	after := replicaStats(t, db)
	if after.Statements != before.Statements || after.MovedOn != before.MovedOn || after.Failures != before.Failures {
		t.Errorf("later reads began there: %+v, before %+v", after, before)
	}
	if n := proxy.Accepted() - dialled; n > int64(after.Probes-probed)+1 {
		t.Errorf("%d dials and %d probes", n, after.Probes-probed)
	}
	proxy.Restore()
	eventually(t, "the replica is used again", func() bool { return text(t, pgsplit.ReadOnly(ctx), db, inRecovery) == "true" })
}

// asleepOnReplica answers at once on a primary, and takes its time on a replica.
const asleepOnReplica = `select case when pg_is_in_recovery() then (select 'replica' from pg_sleep(30)) else 'primary' end`

// A replica with as many connections as it takes goes on serving those that are open.
func TestAFullReplicaServesOnTheConnectionsAtHandAndIsNotDialledButByTheProbe(t *testing.T) {
	cluster := shareCluster(t, 1)
	ctx := patient(t)
	runSQL(t, ctx, cluster, "create role app login connection limit 2")
	if err := cluster.CatchUp(ctx); err != nil {
		t.Fatal(err)
	}
	proxy := cluster.Replicas[0].Proxy()
	replica := pgsplittestUser(cluster.Replicas[0].ProxyURI(), "app")
	db := open(t, with(cluster.Primary.URI(), "replica_timeout=20s")+replica)
	stillServes(t, ctx, db, proxy, 2, func() {
		runSQL(t, ctx, cluster, "alter role app connection limit 10")
		if err := cluster.CatchUp(ctx); err != nil {
			t.Fatal(err)
		}
	})
}

func TestAReplicaThatRefusesItsPasswordOrAHookServesOnTheConnectionsAtHand(t *testing.T) {
	cluster := pgsplittest.Start(t)
	ctx := patient(t)
	runSQL(t, ctx, cluster, "create role app login password 'right'")
	if err := cluster.CatchUp(ctx); err != nil {
		t.Fatal(err)
	}
	requirePassword(t, cluster.Replicas[0], "app")
	for name, refuse := range map[string]func(c *pgx.ConnConfig) error{
		"password": func(c *pgx.ConnConfig) error { c.Password = "wrong"; return nil },
		"hook":     func(*pgx.ConnConfig) error { return errors.New("no secret") },
	} {
		t.Run(name, func(t *testing.T) {
			var broken atomic.Bool
			dsn := cluster.Primary.URI() + " " + pgsplittestUser(cluster.Replicas[0].ProxyURI(), "app:right")
			var opened atomic.Int32
			db := openWith(t, dsn, func(name string, pool *pgxpool.Config) {
				if name != "replica1" {
					return
				}
				pool.BeforeConnect = func(_ context.Context, c *pgx.ConnConfig) error {
					if broken.Load() {
						return refuse(c)
					}
					if opened.Add(1) == 2 {
						broken.Store(true) // after this one
					}
					return nil
				}
			})
			stillServes(t, ctx, db, cluster.Replicas[0].Proxy(), 2, func() { broken.Store(false) })
		})
	}
}

func pgsplittestUser(uri, user string) string {
	return uri[:len("postgres://")] + user + uri[len("postgres://postgres"):]
}

// stillServes checks a replica that lets n connections in and no more, until there is room.
func stillServes(t *testing.T, ctx context.Context, db *sql.DB, proxy *pgsplittest.Proxy, n int, room func()) {
	t.Helper()
	db.SetMaxIdleConns(10)
	only := pgsplit.ReadOnly(ctx, pgsplit.ReplicaOnly())
	var holders []*sql.Conn
	for range n {
		conn := hold(t, ctx, db)
		want(t, only, conn, inRecovery, "true")
		holders = append(holders, conn)
	}
	before, dialled := replicaStats(t, db).Probes, proxy.Accepted()
	for range 20 { // all connections at hand are busy, and no more are to be had
		want(t, pgsplit.ReadOnly(ctx), db, inRecovery, "false")
		failsWith(t, only, db, pgsplit.ErrNoReplica)
	}
	s := replicaStats(t, db)
	if s.State != "refusing" || s.Cause == nil || s.InUse != n {
		t.Errorf("%+v", s)
	}
	if tried, probed := proxy.Accepted()-dialled, int64(replicaStats(t, db).Probes-before); tried > probed+1 {
		t.Errorf("%d dials, %d of them probes", tried, probed)
	}
	if probed := replicaStats(t, db).Probes - before; probed > probesIn(time.Since(s.Since), 2*time.Second) {
		t.Errorf("%d probes", probed)
	}
	for _, conn := range holders { // they are not touched
		want(t, only, conn, inRecovery, "true")
	}
	closeAll(t, holders[1:])
	for range 20 {
		want(t, pgsplit.ReadOnly(ctx), db, inRecovery, "true")
	}
	if s := replicaStats(t, db); s.State != "refusing" {
		t.Errorf("while it serves what it has let in it is %s", s.State)
	}
	room()
	eventually(t, "there is room", func() bool { return replicaStats(t, db).State == "healthy" })
	opened := replicaStats(t, db).Opened
	conns := []*sql.Conn{hold(t, ctx, db), hold(t, ctx, db)}
	for _, conn := range conns {
		want(t, only, conn, inRecovery, "true")
	}
	if s := replicaStats(t, db); s.Opened == opened {
		t.Errorf("no new connection: %+v", s)
	}
}

func TestWhatCallersDoIsNotHeldAgainstAServer(t *testing.T) {
	cluster := pgsplittest.Start(t, pgsplittest.Replicas(1))
	patience := patient(t)
	db := open(t, with(cluster.DSN(), "replica_timeout=20s", "pool_max_conns=2"))
	warm(t, patience, db)
	db.SetMaxIdleConns(10)
	failure := func(query string) func(ctx context.Context) error {
		return func(ctx context.Context) error { _, err := db.ExecContext(ctx, query); return err }
	}
	for _, hint := range []func(context.Context) context.Context{
		func(ctx context.Context) context.Context { return ctx },
		func(ctx context.Context) context.Context { return pgsplit.ReadOnly(ctx, pgsplit.ReplicaOnly()) },
	} {
		for _, caller := range []struct {
			what   string
			do     func(ctx context.Context) error
			probes uint64 // a server that does not answer before half of a deadline is asked whether it lives
		}{
			{"a cancel", func(ctx context.Context) error {
				ctx, cancel := context.WithCancel(ctx)
				defer time.AfterFunc(30*time.Millisecond, cancel).Stop()
				return failure("select pg_sleep(10)")(ctx)
			}, 0},
			{"a syntax error", failure("selec 1"), 0},
			{"a division", failure("select 1/0"), 0},
			{"an unknown table", failure("select from nowhere"), 0},
			{"a statement timeout", func(ctx context.Context) error {
				return inTx(ctx, db, nil, "set local statement_timeout = '10ms'; select pg_sleep(10)")
			}, 0},
			{"the pool's limit", func(ctx context.Context) error {
				for range 2 {
					conn := hold(t, ctx, db)
					defer conn.Close()
					exec(t, ctx, conn, "select 1")
				}
				ctx, cancel := context.WithTimeout(ctx, 50*time.Millisecond)
				defer cancel()
				return failure("select 1")(ctx)
			}, 0},
			{"a deadline", func(ctx context.Context) error {
				ctx, cancel := context.WithTimeout(ctx, 100*time.Millisecond)
				defer cancel()
				return failure("select pg_sleep(10)")(ctx)
			}, 1},
		} {
			if err := caller.do(hint(patience)); err == nil {
				t.Errorf("%s: no error", caller.what)
			}
			for _, s := range connectorOf(t, db).Stats().Servers {
				if s.State != "healthy" || s.Failures != 0 || s.Cause != nil || s.Probes > caller.probes {
					t.Fatalf("%s: %+v", caller.what, s)
				}
			}
		}
	}
}

// Where no caller has the time that it takes to connect, connections come to be all the same.
func TestAConnectionThatTakesLongerThanAnyDeadlineComesToBeForLaterCallers(t *testing.T) {
	cluster := pgsplittest.Start(t, pgsplittest.Replicas(1))
	ctx := patient(t)
	proxy := cluster.Replicas[0].Proxy()
	proxy.SetDelay(200 * time.Millisecond)
	db := open(t, with(cluster.Primary.URI(), "application_name=detached")+cluster.Replicas[0].ProxyURI())
	const bound = 5
	db.SetMaxOpenConns(bound)
	db.SetMaxIdleConns(bound)
	watch := observe(t, cluster.Replicas[0], "detached")
	exec(t, ctx, db, "select 1")
	opened := func() uint64 { return replicaStats(t, db).Opened }
	most := 0
	var wg sync.WaitGroup
	eventually(t, "a connection is opened", func() bool {
		for range 20 {
			wg.Go(func() {
				ctx, cancel := context.WithTimeout(pgsplit.ReadOnly(ctx), 100*time.Millisecond)
				defer cancel()
				_, _ = db.ExecContext(ctx, "select 1")
			})
		}
		wg.Wait()
		most = max(most, len(watch.pids()))
		return opened() > 0
	})
	eventually(t, "those on their way come", func() bool { return replicaStats(t, db).Open == int(opened()) })
	n := proxy.Accepted()
	if probed := replicaStats(t, db).Probes; n > bound+int64(probed) || most > bound {
		t.Errorf("%d connections were begun, %d of them probes, %d were there at once", n, probed, most)
	}
	proxy.SetDelay(0)
	eventually(t, "the replica is well", func() bool { return replicaStats(t, db).State == "healthy" })
	began, late := replicaStats(t, db), int64(0)
	dialled := proxy.Accepted()
	eventually(t, "a caller with 100 ms is served there", func() bool {
		ctx, cancel := context.WithTimeout(pgsplit.ReadOnly(ctx, pgsplit.ReplicaOnly()), 100*time.Millisecond)
		defer cancel()
		var where string
		err := db.QueryRowContext(ctx, inRecovery).Scan(&where)
		if err != nil {
			late++ // and its connection may be lost
		}
		return err == nil && where == "true"
	})
	if n := proxy.Accepted() - dialled; n > int64(replicaStats(t, db).Probes-began.Probes)+late {
		t.Errorf("%d more connections were begun, and %d callers were late", n, late)
	}
	if s := replicaStats(t, db); s.Failures != 0 {
		t.Errorf("%+v", s)
	}
	t.Logf("%d begun, %d opened, at most %d there at once", proxy.Accepted(), opened(), most)
}

// What goes on in the background ends with the last shell, whether the sql.DB is closed or only keeps none.
func TestProbesOpeningsAndWatchesEndWithTheLastShell(t *testing.T) {
	cluster := pgsplittest.Start(t, pgsplittest.Replicas(2))
	ctx := patient(t)
	for name, end := range map[string]func(*sql.DB){
		"Close": func(db *sql.DB) { _ = db.Close() },
		"no idle shells": func(db *sql.DB) {
			db.SetMaxIdleConns(0)
		},
	} {
		for _, c := range []condition{dead, silent, starting} {
			t.Run(fmt.Sprintf("%s, %s", name, c), func(t *testing.T) {
				dsn, fronts := frontsOf(t, cluster, up, c, c)
				before := goleak.IgnoreCurrent()
				db := open(t, with(dsn, "replica_timeout=300ms", "replica_retry_min=20ms"))
				connector := connectorOf(t, db)
				for range 5 {
					short, cancel := context.WithTimeout(pgsplit.ReadOnly(ctx), time.Second)
					_, _ = db.ExecContext(short, "select 1")
					cancel()
				}
				if c == silent {
					eventually(t, "a probe is under way that would last", func() bool {
						return connector.Stats().Servers[1].State == "down" && fronts[1].there(probes) > 0
					})
				}
				connector.ReportError(connector.Stats().Servers[0].Name, io.ErrUnexpectedEOF) // probed at once
				end(db)
				eventually(t, "no connection is open", func() bool { return openConnections(connector) == 0 })
				noneLeft(t, before, goleak.IgnoreTopFunction("database/sql.(*DB).connectionOpener"),
					goleak.IgnoreAnyFunction("github.com/pgsplit/pgsplit_test.(*front).welcome"))
			})
		}
	}
}

func TestProbesGoOnWithTheNextShell(t *testing.T) {
	cluster := shareCluster(t, 1)
	ctx := patient(t)
	dsn, fronts := frontsOf(t, cluster, up, dead)
	db := open(t, with(dsn, "replica_timeout=20s", "replica_retry_min=1h", "replica_retry_max=1h"))
	want(t, pgsplit.ReadOnly(ctx), db, inRecovery, "false")
	eventually(t, "it is down", func() bool { return replicaStats(t, db).State == "down" })
	db.SetMaxIdleConns(0)
	fronts[1].is(up)
	exec(t, ctx, hold(t, ctx, db), "select 1")
	eventually(t, "it was probed", func() bool { return replicaStats(t, db).State == "healthy" })
}

func TestReportErrorHasTheServerProbedIfTheErrorSaysSomethingAboutIt(t *testing.T) {
	cluster := shareCluster(t, 2)
	ctx := patient(t)
	dsn, fronts := frontsOf(t, cluster)
	db := open(t, with(dsn, "replica_timeout=20s"))
	warm(t, ctx, db)
	c := connectorOf(t, db)
	names := []string{}
	for _, s := range c.Stats().Servers {
		names = append(names, s.Name)
	}
	for _, name := range append(names, "", "nowhere:5432", "replica1") {
		for _, err := range []error{
			&pgconn.PgError{Code: "42601"}, &pgconn.PgError{Code: "40001"}, &pgconn.PgError{Code: "25006"},
			context.Canceled, context.DeadlineExceeded, fmt.Errorf("read: %w", context.Canceled), sql.ErrNoRows, errors.New("odd"), nil,
		} {
			c.ReportError(name, err)
		}
	}
	c.ReportError("nowhere:5432", io.ErrUnexpectedEOF)
	for _, s := range c.Stats().Servers {
		if s.State != "healthy" || s.Probes != 0 || s.Cause != nil {
			t.Errorf("%+v", s)
		}
	}
	for _, err := range []error{io.EOF, fmt.Errorf("reading rows: %w", io.ErrUnexpectedEOF), &pgconn.PgError{Code: "57P01"}} {
		fronts[1].is(silent)
		before, _ := fronts[1].visitors(probes)
		c.ReportError(names[1], err)
		if s := c.Stats().Servers[1]; s.State != "suspect" || !errors.Is(s.Cause, err) {
			t.Errorf("after %v it is %s because of %v", err, s.State, s.Cause)
		}
		for range 5 {
			want(t, pgsplit.ReadOnly(ctx), db, whichServer, "replica2")
		}
		eventually(t, "the probe has come", func() bool { n, _ := fronts[1].visitors(probes); return n > before })
		fronts[1].drop()
		fronts[1].is(up)
		eventually(t, "it is used again", func() bool {
			return c.Stats().Servers[1].State == "healthy" && text(t, pgsplit.ReadOnly(ctx), db, whichServer) == "replica1"
		})
	}
	if n := c.Stats().Servers[1].Probes; n < 3 {
		t.Errorf("%d probes", n)
	}
}

// A probe that hangs in the program's own hook outlives the last shell; the server is probed again all the same.
func TestAServerIsProbedAgainThoughAProbeOfFormerShellsIsStillOnItsWay(t *testing.T) {
	cluster := shareCluster(t, 1)
	ctx := patient(t)
	hanging, release := make(chan struct{}, 10), make(chan struct{})
	var hang, down atomic.Bool
	down.Store(true)
	db := openWith(t, with(cluster.DSN(), "replica_retry_min=20ms", "replica_retry_max=100ms"), func(name string, pool *pgxpool.Config) {
		if name != "replica1" {
			return
		}
		pool.BeforeConnect = func(_ context.Context, c *pgx.ConnConfig) error {
			if hang.Load() && c.RuntimeParams["application_name"] == probes {
				hanging <- struct{}{}
				<-release
			}
			if down.Load() {
				return errors.New("not yet")
			}
			return nil
		}
	})
	hang.Store(true)
	want(t, pgsplit.ReadOnly(ctx), db, inRecovery, "false")
	<-hanging
	db.SetMaxIdleConns(0) // the last shell is closed
	db.SetMaxIdleConns(2)
	conn := hold(t, ctx, db) // and one that stays is opened
	exec(t, ctx, conn, "select 1")
	hang.Store(false)
	down.Store(false)
	close(release)
	eventually(t, "the replica is used again", func() bool { return replicaStats(t, db).State == "healthy" })
}
