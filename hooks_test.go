package pgsplit_test

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"errors"
	"fmt"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgsplit/pgsplit"
	"github.com/pgsplit/pgsplit/pgsplittest"
)

// openWith opens the cluster after every server's pool config was changed; name is as pgsplittest's.
func openWith(t testing.TB, dsn string, change func(name string, pool *pgxpool.Config)) *sql.DB {
	t.Helper()
	config, err := pgsplit.ParseDSN(dsn)
	if err != nil {
		t.Fatal(err)
	}
	config.ReplicaTimeout = 20 * time.Second // a slow machine is not a replica in trouble
	change("primary", config.Primary)
	for i, r := range config.Replicas {
		change(fmt.Sprintf("replica%d", i+1), r.Pool)
	}
	db, err := pgsplit.OpenDB(config)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = db.Close() })
	return db
}

// journal is what hooks saw, in order.
type journal struct {
	mu    sync.Mutex
	lines []string // guarded by mu
}

func (j *journal) add(line string) {
	j.mu.Lock()
	defer j.mu.Unlock()
	j.lines = append(j.lines, line)
}

func (j *journal) count(line string) (n int) {
	j.mu.Lock()
	defer j.mu.Unlock()
	for _, l := range j.lines {
		if l == line {
			n++
		}
	}
	return n
}

func (j *journal) all() []string {
	j.mu.Lock()
	defer j.mu.Unlock()
	return slices.Clone(j.lines)
}

// backToRest checks that nothing was leaked: no lease, no slot, no connection over what the shells may keep.
func backToRest(t testing.TB, db *sql.DB) {
	t.Helper()
	c := connectorOf(t, db)
	if n := inUse(c); n != 0 {
		t.Errorf("%d leases are out", n)
	}
	if n := db.Stats().InUse; n != 0 {
		t.Errorf("%d shells are out", n)
	}
	for _, s := range c.Stats().Servers {
		if s.Open > db.Stats().OpenConnections {
			t.Errorf("%s: %d connections for %d shells", s.Name, s.Open, db.Stats().OpenConnections)
		}
	}
	db.SetMaxIdleConns(0)
	eventually(t, "all connections are closed", func() bool { return openConnections(c) == 0 })
}

func TestBeforeConnectRotatesPasswordsOfEachServer(t *testing.T) {
	cluster := pgsplittest.Start(t)
	ctx := patient(t)
	admin := open(t, cluster.DSN())
	exec(t, ctx, admin, "create role app login password 'first'")
	if err := cluster.CatchUp(ctx); err != nil {
		t.Fatal(err)
	}
	for _, s := range cluster.Servers() {
		requirePassword(t, s, "app")
	}
	var password atomic.Value
	password.Store("first")
	dsn := strings.ReplaceAll(cluster.DSN(), "postgres@", "app@")
	db := openWith(t, dsn, func(name string, pool *pgxpool.Config) {
		pool.BeforeConnect = func(_ context.Context, c *pgx.ConnConfig) error {
			c.Password = password.Load().(string)
			c.RuntimeParams["application_name"] = name + " " + c.Password
			return nil
		}
	})
	const who = "select current_user || ' at ' || current_setting('application_name')"
	check := func() {
		t.Helper()
		want(t, ctx, db, who, "app at primary "+password.Load().(string))
		want(t, pgsplit.ReadOnly(ctx, pgsplit.ReplicaOnly()), db, who, "app at replica1 "+password.Load().(string))
	}
	check()
	exec(t, ctx, admin, "alter role app password 'second'")
	if err := cluster.CatchUp(ctx); err != nil {
		t.Fatal(err)
	}
	check() // connections that are open stay
	db.SetMaxIdleConns(0)
	db.SetMaxIdleConns(2)
	if err := db.PingContext(ctx); err == nil {
		t.Error("the old password was accepted")
	}
	password.Store("second")
	check()
}

func TestABeforeConnectThatFailsIsTheCallersErrorOnThePrimaryAndMovesReadsOnFromAReplica(t *testing.T) {
	cluster := shareCluster(t, 1)
	ctx := patient(t)
	noSecret := errors.New("no secret")
	for _, broken := range []string{"primary", "replica1"} {
		t.Run(broken, func(t *testing.T) {
			db := openWith(t, cluster.DSN(), func(name string, pool *pgxpool.Config) {
				if name == broken {
					pool.BeforeConnect = func(context.Context, *pgx.ConnConfig) error { return noSecret }
				}
			})
			if broken == "primary" {
				failsWith(t, ctx, db, noSecret)
				want(t, pgsplit.ReadOnly(ctx), db, inRecovery, "true")
			} else {
				failsWith(t, pgsplit.ReadOnly(ctx, pgsplit.ReplicaOnly()), db, noSecret)
				want(t, ctx, db, inRecovery, "false")
				want(t, pgsplit.ReadOnly(ctx), db, inRecovery, "false")
			}
			backToRest(t, db)
		})
	}
}

func TestAfterConnectSetsUpEachConnectionOnce(t *testing.T) {
	cluster := shareCluster(t, 1)
	ctx := patient(t)
	var j journal
	db := openWith(t, cluster.DSN(), func(name string, pool *pgxpool.Config) {
		pool.AfterConnect = func(ctx context.Context, conn *pgx.Conn) error {
			j.add(name)
			_, err := conn.Exec(ctx, "set app.region = '"+name+"'")
			return err
		}
	})
	for range 3 {
		want(t, ctx, db, "select current_setting('app.region')", "primary")
		want(t, pgsplit.ReadOnly(ctx), db, "select current_setting('app.region')", "replica1")
	}
	if p, r := j.count("primary"), j.count("replica1"); p != 1 || r != 1 {
		t.Errorf("it ran %d times on the primary and %d times on the replica", p, r)
	}
}

func TestAnAfterConnectErrorMakesAReplicaUnfitAndNotTheReadFail(t *testing.T) {
	cluster := shareCluster(t, 2)
	ctx := patient(t)
	var broken atomic.Bool
	broken.Store(true)
	unfit := errors.New("a type is missing")
	db := openWith(t, cluster.DSN(), func(name string, pool *pgxpool.Config) {
		pool.AfterConnect = func(context.Context, *pgx.Conn) error {
			if name == "replica1" && broken.Load() {
				return unfit
			}
			return nil
		}
	})
	for range 5 {
		want(t, pgsplit.ReadOnly(ctx), db, whichServer, "replica2")
	}
	if s := connectorOf(t, db).Stats().Servers[1]; s.State != "refusing" || s.Failures == 0 || s.Open != 0 {
		t.Errorf("%+v", s)
	}
	broken.Store(false)
	eventually(t, "it is fit again", func() bool { return text(t, pgsplit.ReadOnly(ctx), db, whichServer) == "replica1" })
}

func TestPrepareConnRunsAtEveryLeaseBeforeTheFloorIsChecked(t *testing.T) {
	cluster := shareCluster(t, 1)
	ctx := patient(t)
	var j journal
	db := openWith(t, cluster.DSN(), func(name string, pool *pgxpool.Config) {
		pool.PrepareConn = func(ctx context.Context, conn *pgx.Conn) (bool, error) {
			_, err := conn.Exec(ctx, "set app.tenant = 'prepared'")
			if name == "replica1" {
				// A pause that began before the check must be seen by it.
				j.add("prepared")
			}
			return true, err
		}
	})
	exec(t, ctx, db, "create table t (id int)")
	read := current(t, ctx, db)
	if err := cluster.CatchUp(ctx); err != nil { // a read that waits for its floor leases twice
		t.Fatal(err)
	}
	exec(t, pgsplit.ReadOnly(ctx), db, "select 1")
	leases := j.count("prepared")
	for range 3 {
		want(t, pgsplit.ReadOnly(ctx), db, "select current_setting('app.tenant')", "prepared")
	}
	conn := hold(t, ctx, db)
	for range 3 { // one lease
		want(t, read, conn, "select current_setting('app.tenant')", "prepared")
	}
	if n := j.count("prepared") - leases; n != 4 {
		t.Errorf("it ran %d times for four leases", n)
	}
}

// The hook itself moves the replica on: a check made before it would refuse the replica.
func TestWhatPrepareConnTakesIsOverBeforeTheFloorIsChecked(t *testing.T) {
	cluster := pgsplittest.Start(t, pgsplittest.Replicas(1))
	ctx := patient(t)
	replica := cluster.Replicas[0]
	db := openWith(t, cluster.DSN(), func(name string, pool *pgxpool.Config) {
		if name != "replica1" {
			return
		}
		pool.PrepareConn = func(ctx context.Context, _ *pgx.Conn) (bool, error) {
			return true, errors.Join(replica.ResumeReplay(ctx), cluster.CatchUp(ctx))
		}
	})
	exec(t, ctx, db, "create table t (id int)")
	exec(t, current(t, ctx, db), db, "select 1")
	pause(t, replica)
	exec(t, ctx, db, "insert into t values (1)")
	lsn, err := pgsplit.CommitLSN(ctx, db)
	if err != nil {
		t.Fatal(err)
	}
	want(t, pgsplit.ReadOnly(ctx, pgsplit.AfterLSN(lsn)), db, "select pg_is_in_recovery() || ' ' || count(*) from t", "true 1")
}

func TestTheFourAnswersOfPrepareConn(t *testing.T) {
	cluster := shareCluster(t, 1)
	ctx := patient(t)
	broken := errors.New("not prepared")
	for _, server := range []string{"primary", "replica1"} {
		for _, answer := range []struct {
			usable bool
			err    error
		}{{true, nil}, {true, broken}, {false, nil}, {false, broken}} {
			t.Run(fmt.Sprintf("%s answers %v, %v", server, answer.usable, answer.err), func(t *testing.T) {
				var armed, asked atomic.Int32
				db := openWith(t, cluster.DSN(), func(name string, pool *pgxpool.Config) {
					if name != server {
						return
					}
					pool.PrepareConn = func(context.Context, *pgx.Conn) (bool, error) {
						asked.Add(1)
						if armed.Add(-1) != 0 {
							return true, nil
						}
						return answer.usable, answer.err
					}
				})
				hint := ctx
				if server == "replica1" {
					hint = pgsplit.ReadOnly(ctx, pgsplit.ReplicaOnly())
				}
				before := text(t, hint, db, backend)
				armed.Store(1)
				asked.Store(0)
				var pid string
				err := db.QueryRowContext(hint, backend).Scan(&pid)
				if !errors.Is(err, answer.err) {
					t.Errorf("the caller got %v", err)
				}
				if answer.err != nil && server == "replica1" {
					// A read that may moves on.
					armed.Store(1)
					want(t, pgsplit.ReadOnly(ctx), db, inRecovery, "false")
				}
				if !answer.usable && answer.err == nil && (pid == before || asked.Load() != 2) {
					t.Errorf("a refused connection was not exchanged: %s for %s after %d calls", pid, before, asked.Load())
				}
				eventually(t, "the server is used again", func() bool { return db.QueryRowContext(hint, backend).Scan(&pid) == nil })
				if kept := pid == before; kept != answer.usable {
					t.Errorf("the connection was kept: %v", kept)
				}
				backToRest(t, db)
			})
		}
	}
}

func TestHooksThatRefuseEveryConnectionAreAnErrorAndNoEndlessLoop(t *testing.T) {
	cluster := shareCluster(t, 1)
	ctx := patient(t)
	db := openWith(t, cluster.DSN(), func(_ string, pool *pgxpool.Config) {
		pool.PrepareConn = func(context.Context, *pgx.Conn) (bool, error) { return false, nil }
	})
	promptly(t, "a statement", func() {
		for _, ctx := range []context.Context{ctx, pgsplit.ReadOnly(ctx)} {
			if _, err := db.ExecContext(ctx, "select 1"); err == nil || endOfContext(err) {
				t.Errorf("%v", err)
			}
		}
	})
	backToRest(t, db)
}

func TestBeforeAcquireAndAfterReleaseDecideWhetherAConnectionIsUsedAgain(t *testing.T) {
	cluster := shareCluster(t, 1)
	ctx := patient(t)
	for _, hook := range []string{"BeforeAcquire", "AfterRelease"} {
		t.Run(hook, func(t *testing.T) {
			var refuse atomic.Bool
			once := func(*pgx.Conn) bool { return !refuse.CompareAndSwap(true, false) }
			db := openWith(t, cluster.DSN(), func(_ string, pool *pgxpool.Config) {
				if hook == "AfterRelease" {
					pool.AfterRelease = once
				} else {
					//lint:ignore SA1019 it is honoured
					pool.BeforeAcquire = func(_ context.Context, c *pgx.Conn) bool { return once(c) }
				}
			})
			for _, hint := range []context.Context{ctx, pgsplit.ReadOnly(ctx, pgsplit.ReplicaOnly())} {
				first := text(t, hint, db, backend)
				want(t, hint, db, backend, first)
				refuse.Store(true)
				exec(t, hint, db, "select 1")
				if got := text(t, hint, db, backend); got == first {
					t.Error("the refused connection was used again")
				}
			}
			backToRest(t, db)
		})
	}
}

func TestBeforeCloseIsCalledOnceForEachConnection(t *testing.T) {
	cluster := shareCluster(t, 2)
	ctx := patient(t)
	var j journal
	db := openWith(t, cluster.DSN(), func(name string, pool *pgxpool.Config) {
		pool.BeforeClose = func(c *pgx.Conn) { j.add(fmt.Sprint(name, c.PgConn().PID())) }
	})
	storm(t, ctx, db, 8, 5)
	// A connection that the caller's cancel broke is one of them.
	short, cancel := context.WithTimeout(ctx, 20*time.Millisecond)
	defer cancel()
	if _, err := db.ExecContext(short, "select pg_sleep(30)"); !endOfContext(err) {
		t.Error(err)
	}
	c := connectorOf(t, db)
	if err := db.Close(); err != nil {
		t.Fatal(err)
	}
	eventually(t, "those that were on their way are closed as well", func() bool { return openConnections(c) == 0 })
	var opened uint64
	for _, s := range c.Stats().Servers {
		opened += s.Opened
	}
	lines := j.all()
	slices.Sort(lines)
	if once := slices.Compact(slices.Clone(lines)); len(once) != len(lines) || uint64(len(lines)) != opened {
		t.Errorf("%d connections were opened, BeforeClose was called %d times for %d of them", opened, len(lines), len(once))
	}
}

func TestShouldPingDecidesOnceALeaseWhetherAnIdleConnectionIsPinged(t *testing.T) {
	cluster := pgsplittest.Start(t, pgsplittest.Replicas(1))
	ctx := patient(t)
	var ping atomic.Bool
	var asked atomic.Int32
	var longest atomic.Int64
	db := openWith(t, cluster.ProxyDSN(), func(_ string, pool *pgxpool.Config) {
		pool.ShouldPing = func(_ context.Context, p pgxpool.ShouldPingParams) bool {
			asked.Add(1)
			longest.Store(max(longest.Load(), int64(p.IdleDuration)))
			if p.Conn == nil {
				t.Error("no connection")
			}
			return ping.Load()
		}
	})
	for i, hint := range []context.Context{ctx, pgsplit.ReadOnly(ctx, pgsplit.ReplicaOnly())} {
		proxy := cluster.Servers()[i].Proxy()
		exec(t, hint, db, "select 1")
		exec(t, hint, db, "select 1")
		trips := func() int64 {
			before := proxy.RoundTrips()
			exec(t, hint, db, "select 1")
			return proxy.RoundTrips() - before
		}
		asked.Store(0)
		ping.Store(false)
		without := trips()
		ping.Store(true)
		if with := trips(); with != without+1 {
			t.Errorf("%d round trips with a ping and %d without", with, without)
		}
		if n := asked.Load(); n != 2 {
			t.Errorf("it was asked %d times for two leases", n)
		}
		// A connection that died while it was idle is found by the ping, and the statement does not see it.
		proxy.CutConnections()
		exec(t, hint, db, "select 1")
	}
	if d := time.Duration(longest.Load()); d <= 0 || d > time.Minute {
		t.Errorf("an idle time of %v", d)
	}
	backToRest(t, db)
}

// tracer notes the statements.
type tracer struct{ j *journal }

func (t tracer) TraceQueryStart(ctx context.Context, _ *pgx.Conn, data pgx.TraceQueryStartData) context.Context {
	t.j.add(data.SQL)
	return ctx
}

func (t tracer) TraceQueryEnd(context.Context, *pgx.Conn, pgx.TraceQueryEndData) {}

func TestAQueryTracerOfEachServerSeesTheStatementsThere(t *testing.T) {
	cluster := shareCluster(t, 1)
	ctx := patient(t)
	journals := map[string]*journal{"primary": {}, "replica1": {}}
	db := openWith(t, cluster.DSN(), func(name string, pool *pgxpool.Config) {
		pool.ConnConfig.Tracer = tracer{journals[name]}
	})
	exec(t, ctx, db, "select 'unhinted'")
	exec(t, pgsplit.ReadOnly(ctx, pgsplit.ReplicaOnly()), db, "select 'hinted'")
	if j := journals["primary"]; j.count("select 'unhinted'") != 1 || j.count("select 'hinted'") != 0 {
		t.Errorf("primary: %q", j.all())
	}
	if j := journals["replica1"]; j.count("select 'unhinted'") != 0 || j.count("select 'hinted'") != 1 {
		t.Errorf("replica: %q", j.all())
	}
}

// panicker is a value and a tracer that fails as badly as a program can.
type panicker struct{ on *atomic.Bool }

func (p panicker) Value() (driver.Value, error) { panic("a broken Valuer") }

func (p panicker) TraceQueryStart(ctx context.Context, _ *pgx.Conn, _ pgx.TraceQueryStartData) context.Context {
	if p.on.Load() {
		panic("a broken tracer")
	}
	return ctx
}

func (p panicker) TraceQueryEnd(context.Context, *pgx.Conn, pgx.TraceQueryEndData) {}

func TestAPanicOfAValuerBecomesAnErrorAndLeaksNothing(t *testing.T) {
	cluster := shareCluster(t, 1)
	ctx := patient(t)
	db := open(t, with(patiently(cluster), "pool_max_conns=1"))
	db.SetMaxOpenConns(1)
	for _, hint := range []context.Context{ctx, pgsplit.ReadOnly(ctx, pgsplit.ReplicaOnly())} {
		for range 3 {
			var s string
			err := db.QueryRowContext(hint, "select $1::text", panicker{}).Scan(&s)
			if err == nil || !strings.Contains(err.Error(), "a broken Valuer") {
				t.Errorf("query: %v", err)
			}
			if _, err = db.ExecContext(hint, "select $1::text", panicker{}); err == nil || !strings.Contains(err.Error(), "a broken Valuer") {
				t.Errorf("exec: %v", err)
			}
		}
		exec(t, hint, db, "select 1")
	}
	tx, err := db.BeginTx(ctx, nil)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := tx.ExecContext(ctx, "select $1::text", panicker{}); err == nil {
		t.Error("no error in the transaction")
	}
	if err := tx.Commit(); err == nil {
		t.Error("a transaction whose connection was closed was committed")
	}
	exec(t, ctx, db, "select 1")
	backToRest(t, db)
}

func TestAPanicOfAHookBecomesAnErrorOrALostConnectionAndLeaksNothing(t *testing.T) {
	cluster := shareCluster(t, 1)
	ctx := patient(t)
	var on atomic.Bool
	boom := func() {
		if on.Load() {
			panic("a broken hook")
		}
	}
	for name, hook := range map[string]struct {
		set   func(*pgxpool.Config)
		quiet bool // nobody is there to get the error
	}{
		"BeforeConnect": {set: func(p *pgxpool.Config) {
			p.BeforeConnect = func(context.Context, *pgx.ConnConfig) error { boom(); return nil }
		}},
		"AfterConnect": {set: func(p *pgxpool.Config) {
			p.AfterConnect = func(context.Context, *pgx.Conn) error { boom(); return nil }
		}},
		"PrepareConn": {set: func(p *pgxpool.Config) {
			p.PrepareConn = func(context.Context, *pgx.Conn) (bool, error) { boom(); return true, nil }
		}},
		"BeforeAcquire": {set: func(p *pgxpool.Config) {
			//lint:ignore SA1019 it is honoured
			p.BeforeAcquire = func(context.Context, *pgx.Conn) bool { boom(); return true }
		}},
		"ShouldPing": {set: func(p *pgxpool.Config) {
			p.ShouldPing = func(context.Context, pgxpool.ShouldPingParams) bool { boom(); return false }
		}},
		"Tracer":       {set: func(p *pgxpool.Config) { p.ConnConfig.Tracer = panicker{&on} }},
		"AfterRelease": {quiet: true, set: func(p *pgxpool.Config) { p.AfterRelease = func(*pgx.Conn) bool { boom(); return true } }},
		"BeforeClose":  {quiet: true, set: func(p *pgxpool.Config) { p.BeforeClose = func(*pgx.Conn) { boom() } }},
	} {
		t.Run(name, func(t *testing.T) {
			on.Store(false)
			db := openWith(t, with(cluster.DSN(), "pool_max_conns=1"), func(_ string, p *pgxpool.Config) { hook.set(p) })
			db.SetMaxOpenConns(1)
			c := connectorOf(t, db)
			onReplica := pgsplit.ReadOnly(ctx, pgsplit.ReplicaOnly())
			for _, hint := range []context.Context{ctx, ctx, onReplica, onReplica} {
				if strings.HasSuffix(name, "Connect") {
					// The connections must be new ones.
					db.SetMaxIdleConns(0)
					db.SetMaxIdleConns(1)
				} else {
					exec(t, hint, db, "select 1")
				}
				on.Store(true)
				_, err := db.ExecContext(hint, "select 1")
				on.Store(false)
				switch {
				case hook.quiet && err != nil:
					t.Errorf("%v", err)
				case !hook.quiet && (err == nil || !strings.Contains(err.Error(), "a broken ")):
					t.Errorf("%v", err)
				}
				if n := inUse(c); n != 0 {
					t.Fatalf("%d leases are out", n)
				}
				eventually(t, "the server is used again", func() bool {
					_, err := db.ExecContext(hint, "select 1")
					return err == nil
				})
			}
			if name == "BeforeClose" {
				on.Store(true)
			}
			backToRest(t, db)
		})
	}
}

// withinSomeDeadline runs a statement with longer and longer deadlines, until one suffices. A hook of the one who asks the primary
// for its position waits for that itself: half of its deadline.
func withinSomeDeadline(ctx context.Context, db *sql.DB) error {
	for deadline := 200 * time.Millisecond; ; deadline *= 2 {
		bounded, cancel := context.WithTimeout(ctx, deadline)
		_, err := db.ExecContext(bounded, "select 1")
		cancel()
		if !errors.Is(err, context.DeadlineExceeded) || deadline > 10*time.Second {
			return err
		}
	}
}

// Hooks run without any lock of the driver's. A program's own deadlock remains: with SetMaxOpenConns(1) the hook's
// statement waits for the connection that the hook's caller has, as with any other driver.
func TestAHookMayUseTheSameDB(t *testing.T) {
	cluster := shareCluster(t, 1)
	ctx := patient(t)
	for _, name := range []string{"BeforeConnect", "AfterConnect", "PrepareConn", "AfterRelease", "BeforeClose", "ShouldPing"} {
		t.Run(name, func(t *testing.T) {
			var db *sql.DB
			var inside, calls atomic.Int32
			back := func() {
				if db == nil || !inside.CompareAndSwap(0, 1) {
					return // the statements of the hook run it again
				}
				defer inside.Store(0)
				calls.Add(1)
				for _, ctx := range []context.Context{ctx, pgsplit.ReadOnly(ctx), pgsplit.ReadOnly(ctx, pgsplit.MaxStaleness(time.Minute))} {
					if err := withinSomeDeadline(ctx, db); err != nil && name != "BeforeClose" {
						t.Errorf("%v", err)
					}
				}
			}
			db = openWith(t, with(cluster.DSN(), "pool_max_conns=4"), func(_ string, p *pgxpool.Config) {
				switch name {
				case "BeforeConnect":
					p.BeforeConnect = func(context.Context, *pgx.ConnConfig) error { back(); return nil }
				case "AfterConnect":
					p.AfterConnect = func(context.Context, *pgx.Conn) error { back(); return nil }
				case "PrepareConn":
					p.PrepareConn = func(context.Context, *pgx.Conn) (bool, error) { back(); return true, nil }
				case "AfterRelease":
					p.AfterRelease = func(*pgx.Conn) bool { back(); return true }
				case "BeforeClose":
					p.BeforeClose = func(*pgx.Conn) { back() }
				case "ShouldPing":
					p.ShouldPing = func(context.Context, pgxpool.ShouldPingParams) bool { back(); return false }
				}
			})
			promptly(t, "a hook that uses its own sql.DB", func() {
				for range 2 {
					exec(t, ctx, db, "select 1")
					exec(t, pgsplit.ReadOnly(ctx), db, "select 1")
					exec(t, pgsplit.ReadOnly(ctx, pgsplit.MaxStaleness(time.Minute)), db, "select 1")
				}
				if err := db.Close(); err != nil {
					t.Error(err)
				}
			})
			if calls.Load() == 0 {
				t.Error("the hook never ran")
			}
		})
	}
}

// Connections are opened, and servers probed, on goroutines that no caller of database/sql guards.
func TestAHookThatPanicsOrEndsItsGoroutineWhileAConnectionIsOpenedMovesReadsOn(t *testing.T) {
	cluster := shareCluster(t, 1)
	ctx := patient(t)
	var broken atomic.Bool
	for name, set := range map[string]func(*pgxpool.Config){
		"BeforeConnect ends its goroutine": func(pool *pgxpool.Config) {
			pool.BeforeConnect = func(context.Context, *pgx.ConnConfig) error {
				if broken.Load() {
					runtime.Goexit()
				}
				return nil
			}
		},
		"OnNotice panics": func(pool *pgxpool.Config) {
			pool.ConnConfig.RuntimeParams["client_min_messages"] = "debug5"
			pool.ConnConfig.OnNotice = func(conn *pgconn.PgConn, _ *pgconn.Notice) {
				if broken.Load() && conn.TxStatus() != 0 { // after the startup
					panic("a notice")
				}
			}
		},
	} {
		t.Run(name, func(t *testing.T) {
			broken.Store(true)
			db := openWith(t, with(cluster.DSN(), "replica_retry_min=10ms", "replica_retry_max=20ms"), func(name string, pool *pgxpool.Config) {
				if name == "replica1" {
					set(pool)
				}
			})
			for range 3 {
				want(t, pgsplit.ReadOnly(ctx), db, inRecovery, "false")
			}
			eventually(t, "it is probed", func() bool { return replicaStats(t, db).Probes > 2 })
			broken.Store(false)
			eventually(t, "it is used", func() bool { return text(t, pgsplit.ReadOnly(ctx), db, inRecovery) == "true" })
		})
	}
}
