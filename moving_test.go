package pgsplit_test

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgsplit/pgsplit"
	"github.com/pgsplit/pgsplit/pgsplittest"
)

// visits are the servers that one statement was sent to.
type visits struct {
	mu      sync.Mutex
	servers []string // guarded by mu
}

type visitsKey struct{}

func (v *visits) all() []string {
	v.mu.Lock()
	defer v.mu.Unlock()
	return slices.Clone(v.servers)
}

// visiting makes the decisions of one statement known.
func visiting(ctx context.Context) (context.Context, *visits) {
	v := &visits{}
	return context.WithValue(ctx, visitsKey{}, v), v
}

// openVisited opens a DSN so that visiting works.
func openVisited(t testing.TB, dsn string) *sql.DB {
	t.Helper()
	config, err := pgsplit.ParseDSN(dsn)
	if err != nil {
		t.Fatal(err)
	}
	config.OnDecision = func(ctx context.Context, d pgsplit.Decision) {
		if v, ok := ctx.Value(visitsKey{}).(*visits); ok {
			v.mu.Lock()
			defer v.mu.Unlock()
			v.servers = append(v.servers, d.Server)
		}
	}
	db, err := pgsplit.OpenDB(config)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = db.Close() })
	return db
}

// isUnchanged checks that an error is the server's own, with nothing around it.
func isUnchanged(t testing.TB, err error, code string) {
	t.Helper()
	pgErr, ok := err.(*pgconn.PgError) //nolint:errorlint // that it is not wrapped is what is asked
	if !ok || pgErr.Code != code {
		t.Errorf("%T %v, want the server's own %s", err, err, code)
	}
}

// replicasMovedOn is how many reads moved on from replicas.
func replicasMovedOn(c *pgsplit.Connector) (n uint64) {
	for _, s := range c.Stats().Servers[1:] {
		n += s.MovedOn
	}
	return n
}

func TestAStormOfRecoveryConflictsReachesNoCallerAndDoesNotHammerTheReplicas(t *testing.T) {
	cluster := pgsplittest.Start(t, pgsplittest.Replicas(2), pgsplittest.ReplicaSetting("max_standby_streaming_delay", "0"))
	ctx := patient(t)
	runSQL(t, ctx, cluster, "create table t (id int, v int); insert into t select i, 0 from generate_series(1, 100) i")
	if err := cluster.CatchUp(ctx); err != nil {
		t.Fatal(err)
	}
	db := openVisited(t, patiently(cluster))
	db.SetMaxIdleConns(20)
	c := connectorOf(t, db)
	end := make(chan struct{})
	var nemesis, readers sync.WaitGroup
	nemesis.Go(func() {
		ticker := time.NewTicker(20 * time.Millisecond)
		defer ticker.Stop()
		for i := 0; ; i++ {
			select {
			case <-end:
				return
			case <-ticker.C:
			}
			for _, query := range []string{"update t set v = v + 1", "vacuum t", "alter table t alter v set default 1"}[:2+i%2] {
				if err := cluster.Primary.Exec(ctx, query); err != nil {
					t.Errorf("%s: %v", query, err)
				}
			}
		}
	})
	var mu sync.Mutex
	reads, perServer := 0, map[string]int{}
	for range 20 {
		readers.Go(func() {
			for {
				select {
				case <-end:
					return
				default:
				}
				read, v := visiting(pgsplit.ReadOnly(ctx))
				var n int
				// A conflict may come when the row is here already, before the end of the statement: nothing can move on then.
				if err := db.QueryRowContext(read, "select (select count(*) from t) from pg_sleep(0.05)").Scan(&n); n != 100 {
					t.Errorf("%d rows, %v", n, err)
				}
				servers := v.all()
				slices.Sort(servers)
				if len(servers) == 0 || len(slices.Compact(slices.Clone(servers))) != len(servers) {
					t.Errorf("one read ran on %q", servers)
				}
				mu.Lock()
				reads++
				for _, s := range servers {
					perServer[s]++
				}
				mu.Unlock()
			}
		})
	}
	eventually(t, "the storm is one", func() bool {
		mu.Lock()
		defer mu.Unlock()
		return reads > 300 && replicasMovedOn(c) > 50 || t.Failed()
	})
	close(end)
	readers.Wait()
	nemesis.Wait()
	for _, s := range c.Stats().Servers[1:] {
		if s.State == "down" || s.Statements != uint64(perServer[s.Name]) || s.Statements > uint64(reads) {
			t.Errorf("%d reads: %+v, and %d decisions", reads, s, perServer[s.Name])
		}
	}
	t.Logf("%d reads, %d moved on, by server %v", reads, replicasMovedOn(c), perServer)
}

func TestARecoveryConflictInsideATransactionGoesToTheCaller(t *testing.T) {
	cluster := pgsplittest.Start(t, pgsplittest.Replicas(2), pgsplittest.ReplicaSetting("max_standby_streaming_delay", "0"))
	ctx := patient(t)
	runSQL(t, ctx, cluster, "create table t (id int, v int); insert into t select i, 0 from generate_series(1, 100) i")
	if err := cluster.CatchUp(ctx); err != nil {
		t.Fatal(err)
	}
	db := open(t, with(cluster.DSN(), "replica_timeout=20s", "application_name=victim"))
	tx, err := db.BeginTx(pgsplit.ReadOnly(ctx), &sql.TxOptions{Isolation: sql.LevelRepeatableRead})
	if err != nil {
		t.Fatal(err)
	}
	defer tx.Rollback()
	where := text(t, ctx, tx, whichServer)
	server := cluster.Replicas[0]
	if where == "replica2" {
		server = cluster.Replicas[1]
	}
	watch := observe(t, server, "victim")
	failed := make(chan error, 1)
	go func() {
		_, err := tx.ExecContext(ctx, "select count(*) from t, pg_sleep(20)")
		failed <- err
	}()
	eventually(t, "it runs", func() bool { return watch.count("wait_event = 'PgSleep'") == 1 })
	runSQL(t, ctx, cluster, "update t set v = v + 1")
	runSQL(t, ctx, cluster, "vacuum t")
	isUnchanged(t, <-failed, "40001")
	if n := replicasMovedOn(connectorOf(t, db)); n != 0 {
		t.Errorf("%d moved on", n)
	}
}

// What the primary says by 40001 is between the caller and others.
func TestASerializationFailureOfThePrimaryGoesToTheCallerAndNothingRunsAgain(t *testing.T) {
	cluster := pgsplittest.Start(t, pgsplittest.Replicas(1))
	ctx := patient(t)
	runSQL(t, ctx, cluster, `create table t (v int); insert into t values (0); create sequence runs;
		create function fail() returns int language plpgsql as
			$$ begin if not pg_is_in_recovery() then perform nextval('runs'); end if; raise sqlstate '40001'; end $$`)
	if err := cluster.CatchUp(ctx); err != nil {
		t.Fatal(err)
	}
	db := open(t, patiently(cluster))
	tx, err := db.BeginTx(ctx, &sql.TxOptions{Isolation: sql.LevelRepeatableRead})
	if err != nil {
		t.Fatal(err)
	}
	defer tx.Rollback()
	want(t, ctx, tx, "select v::text from t", "0")
	exec(t, ctx, db, "update t set v = 1")
	_, err = tx.ExecContext(ctx, "update t set v = 2")
	isUnchanged(t, err, "40001")
	_ = tx.Rollback()

	runs := func() string {
		return text(t, ctx, db, "select case when is_called then last_value else 0 end::text from runs")
	}
	for i, ctx := range []context.Context{ctx, pgsplit.Primary(ctx)} {
		_, err := db.ExecContext(ctx, "select fail()")
		isUnchanged(t, err, "40001")
		if got := runs(); got != fmt.Sprint(i+1) {
			t.Errorf("it ran %s times", got)
		}
	}
	c := connectorOf(t, db)
	before := c.Stats().Servers
	// The replica's moves on, and the primary's answer stands: a read only session may not call nextval.
	_, err = db.ExecContext(pgsplit.ReadOnly(ctx), "select fail()")
	if !errors.Is(err, pgsplit.ErrReadOnly) {
		t.Errorf("%v, want the primary's answer", err)
	}
	after := c.Stats().Servers
	if after[0].Statements != before[0].Statements+1 || after[1].Statements != before[1].Statements+1 || after[1].MovedOn != 1 {
		t.Errorf("it ran on %+v", after)
	}
}

func TestReadsThatNameWhatIsNotReplayedYetAreAnsweredByThePrimary(t *testing.T) {
	cluster := pgsplittest.Start(t, pgsplittest.Replicas(2))
	ctx := patient(t)
	db := open(t, patiently(cluster))
	exec(t, ctx, db, "create table old (id int); insert into old values (1)")
	if err := cluster.CatchUp(ctx); err != nil {
		t.Fatal(err)
	}
	warm(t, ctx, db)
	pause(t, cluster.Replicas...)
	c := connectorOf(t, db)
	for _, thing := range []struct{ ddl, query, code string }{
		{"alter table old add column fresh text default 'x'", "select fresh from old", "42703"},
		{"create table new (a text); insert into new values ('x')", "select a from new", "42P01"},
		{"create function newest() returns text language sql as $$select 'x'$$", "select newest()", "42883"},
		{"create type mood as enum ('x')", "select 'x'::mood::text", "42704"},
		{"create view look as select 'x' as a", "select a from look", "42P01"},
	} {
		exec(t, ctx, db, thing.ddl)
		read := pgsplit.ReadOnly(ctx)
		ways := map[string]func() error{
			"Query": func() error { return scanOne(db.QueryContext(read, thing.query)) },
			"QueryRow": func() error {
				var s string
				err := db.QueryRowContext(read, thing.query).Scan(&s)
				if err == nil && s != "x" {
					t.Errorf("%s: %q", thing.query, s)
				}
				return err
			},
			"Exec": func() error { _, err := db.ExecContext(read, thing.query); return err },
			"Exec with an argument": func() error {
				_, err := db.ExecContext(read, "select * from ("+thing.query+") q where $1::int = 1", 1)
				return err
			},
			"Conn": func() error { _, err := hold(t, ctx, db).ExecContext(read, thing.query); return err },
		}
		for way, do := range ways {
			before, moved := c.Stats().Reasons["moved_on"], replicasMovedOn(c)
			if err := do(); err != nil {
				t.Errorf("%s by %s: %v", thing.query, way, err)
			}
			if n := c.Stats().Reasons["moved_on"] - before; n != 1 {
				t.Errorf("%s by %s: moved on to the primary %d times", thing.query, way, n)
			}
			if n := replicasMovedOn(c) - moved; n != 2 {
				t.Errorf("%s by %s: moved on from %d replicas", thing.query, way, n)
			}
		}
		before := c.Stats().Reasons["moved_on"]
		stmt := prepare(t, read, db, thing.query)
		for range 3 {
			if got, err := answer(read, stmt); err != nil || got != "x" {
				t.Errorf("%s prepared: %q %v", thing.query, got, err)
			}
		}
		if n := c.Stats().Reasons["moved_on"] - before; n < 4 {
			t.Errorf("%s prepared: moved on %d times", thing.query, n)
		}

		tx, err := db.BeginTx(read, nil)
		if err != nil {
			t.Fatal(err)
		}
		want(t, ctx, tx, inRecovery, "true")
		_, err = tx.ExecContext(ctx, thing.query)
		isUnchanged(t, err, thing.code)
		_ = tx.Rollback()

		_, err = db.ExecContext(pgsplit.ReadOnly(ctx, pgsplit.ReplicaOnly()), thing.query)
		isUnchanged(t, err, thing.code)
	}
	for _, s := range c.Stats().Servers {
		if s.State != "healthy" || s.Failures != 0 || s.Probes != 0 {
			t.Errorf("%+v", s)
		}
	}
}

func TestATypingErrorIsAnsweredByThePrimaryItself(t *testing.T) {
	cluster := pgsplittest.Start(t, pgsplittest.Replicas(2))
	ctx := patient(t)
	db := open(t, patiently(cluster))
	warm(t, ctx, db)
	pause(t, cluster.Replicas...)
	exec(t, ctx, db, "create table t (id int)")
	read, only := pgsplit.ReadOnly(ctx), pgsplit.ReadOnly(ctx, pgsplit.ReplicaOnly())
	for range 3 {
		_, err := db.ExecContext(read, "select idd from t")
		isUnchanged(t, err, "42703")     // the replicas would say that there is no table
		var parsing *pgconn.PrepareError // pgx's own
		if _, err = db.PrepareContext(read, "select idd from t"); !errors.As(err, &parsing) {
			t.Errorf("%T %v", err, err)
		} else {
			isUnchanged(t, errors.Unwrap(parsing), "42703")
		}
		_, err = db.ExecContext(only, "select idd from t")
		isUnchanged(t, err, "42P01")
	}
	s := connectorOf(t, db).Stats().Servers
	if s[0].State != "healthy" || s[1].MovedOn != 9 || s[2].MovedOn != 9 {
		t.Errorf("%+v", s)
	}
}

// What may become of a connection before the first row is there.
var losses = map[string]func(ctx context.Context, s *pgsplittest.Server) error{
	"pg_terminate_backend": func(ctx context.Context, s *pgsplittest.Server) error {
		return s.Exec(ctx, "select pg_terminate_backend(pid) from pg_stat_activity where application_name like 'lost%'")
	},
	"immediate stop": func(ctx context.Context, s *pgsplittest.Server) error { return s.Stop(ctx, pgsplittest.Immediate) },
	"fast stop":      func(ctx context.Context, s *pgsplittest.Server) error { return s.Stop(ctx, pgsplittest.Fast) },
	"crash":          func(ctx context.Context, s *pgsplittest.Server) error { return s.KillBackend(ctx) },
	"kill":           func(ctx context.Context, s *pgsplittest.Server) error { return s.Kill(ctx) },
	"reset":          func(_ context.Context, s *pgsplittest.Server) error { s.Proxy().CutConnections(); return nil },
}

func TestAReadWhoseConnectionIsLostBeforeItsFirstRowRunsElsewhere(t *testing.T) {
	cluster := pgsplittest.Start(t, pgsplittest.Replicas(1))
	ctx := patient(t)
	replica := cluster.Replicas[0]
	for name, lose := range losses {
		t.Run(name, func(t *testing.T) {
			app := "lost_" + strings.ReplaceAll(name, " ", "_") // a reset leaves the server asleep
			db := open(t, with(cluster.ProxyDSN(), "replica_timeout=20s", "application_name="+app))
			warm(t, ctx, db)
			watch := observe(t, replica, app)
			ways := map[string]func() (string, error){
				"Query": func() (s string, err error) {
					err = db.QueryRowContext(pgsplit.ReadOnly(ctx), asleepOnReplica).Scan(&s)
					return s, err
				},
				"Stmt": func() (string, error) {
					stmt := prepare(t, pgsplit.ReadOnly(ctx), db, asleepOnReplica)
					return answer(pgsplit.ReadOnly(ctx), stmt)
				},
			}
			type result struct {
				where, way string
				err        error
			}
			got := make(chan result)
			for way, do := range ways {
				go func() {
					where, err := do()
					got <- result{where, way, err}
				}()
			}
			eventually(t, "they run", func() bool {
				return watch.count("wait_event = 'PgSleep'") == len(ways)
			})
			if err := lose(ctx, replica); err != nil {
				t.Fatal(err)
			}
			for range ways {
				if r := <-got; r.err != nil || r.where != "primary" {
					t.Errorf("%s: %q %v", r.way, r.where, r.err)
				}
			}
			s := replicaStats(t, db)
			if s.MovedOn != uint64(len(ways)) {
				t.Errorf("%d moved on: %+v %v", s.MovedOn, s, connectorOf(t, db).Stats().Reasons)
			}
			start(t, replica)
			eventually(t, "the replica is used again", func() bool { return text(t, pgsplit.ReadOnly(ctx), db, inRecovery) == "true" })
		})
	}
}

func TestReadsAndTransactionsOnIdleConnectionsThatWereLostRunElsewhere(t *testing.T) {
	cluster := pgsplittest.Start(t, pgsplittest.Replicas(1))
	ctx := patient(t)
	for name, lose := range losses {
		t.Run(name, func(t *testing.T) {
			db := open(t, with(cluster.ProxyDSN(), "replica_timeout=20s", "application_name=lost"))
			const each = 3
			idleAt(t, ctx, db, 2*each)
			if err := lose(ctx, cluster.Replicas[0]); err != nil {
				t.Fatal(err)
			}
			read := pgsplit.ReadOnly(ctx)
			for range each {
				exec(t, read, db, "select 1")
				tx, err := db.BeginTx(read, nil)
				if err != nil {
					t.Fatal(err)
				}
				exec(t, ctx, tx, "select 1")
				if err := tx.Commit(); err != nil {
					t.Error(err)
				}
			}
			start(t, cluster.Replicas[0])
			eventually(t, "the replica is used again", func() bool { return text(t, read, db, inRecovery) == "true" })
		})
	}
}

func TestALossInsideATransactionOrAfterTheFirstRowGoesToTheCaller(t *testing.T) {
	cluster := pgsplittest.Start(t, pgsplittest.Replicas(1))
	ctx := patient(t)
	proxy := cluster.Replicas[0].Proxy()
	db := open(t, with(cluster.ProxyDSN(), "replica_timeout=20s"))
	warm(t, ctx, db)
	read := pgsplit.ReadOnly(ctx)
	const total = 200000
	rows, err := db.QueryContext(read, fmt.Sprintf("select pg_is_in_recovery(), repeat('x', 1000) from generate_series(1, %d) n", total))
	if err != nil {
		t.Fatal(err)
	}
	defer rows.Close()
	n, onReplica, before := 0, false, replicaStats(t, db)
	for rows.Next() {
		var x string
		if err := rows.Scan(&onReplica, &x); err != nil || !onReplica {
			t.Fatal(onReplica, err)
		}
		if n++; n == 1 {
			proxy.CutConnections()
		}
	}
	if rows.Err() == nil || n >= total {
		t.Errorf("%d rows and %v", n, rows.Err())
	}
	if errors.Is(rows.Err(), driver.ErrBadConn) {
		t.Error(rows.Err())
	}
	_ = rows.Close()
	if s := replicaStats(t, db); s.MovedOn != 0 || s.Statements != before.Statements {
		t.Errorf("%+v", s)
	}

	eventually(t, "the replica is used", func() bool { return text(t, read, db, inRecovery) == "true" })
	tx, err := db.BeginTx(read, nil)
	if err != nil {
		t.Fatal(err)
	}
	want(t, ctx, tx, inRecovery, "true")
	proxy.CutConnections()
	if _, err := tx.ExecContext(ctx, "select 1"); err == nil {
		t.Error("a statement of a transaction ran elsewhere")
	}
	if err := tx.Commit(); err == nil {
		t.Error("it was committed")
	}
	if s := replicaStats(t, db); s.MovedOn != 0 {
		t.Errorf("%+v", s)
	}
}

func TestAWriteWhoseConnectionIsLostRunsAtMostOnceAndFails(t *testing.T) {
	for _, mode := range []string{"error", "read"} {
		for name, arrives := range map[string]bool{"the statement does not arrive": false, "its answer does not arrive": true} {
			t.Run(mode+", "+name, func(t *testing.T) {
				cluster := pgsplittest.Start(t, pgsplittest.Replicas(1))
				ctx := patient(t)
				runSQL(t, ctx, cluster, "create table t (id int)")
				proxy := cluster.Primary.Proxy()
				db := openWith(t, with(cluster.ProxyDSN(), "replica_on_primary_down="+mode), func(_ string, pool *pgxpool.Config) {
					pool.ShouldPing = func(context.Context, pgxpool.ShouldPingParams) bool { return false } // however slow the machine is
				})
				idleAt(t, ctx, db, 3)
				tx, err := db.BeginTx(ctx, nil)
				if err != nil {
					t.Fatal(err)
				}
				defer tx.Rollback()
				exec(t, ctx, tx, "insert into t values (3)")
				ways := map[string]func() error{
					"Exec": func() error { _, err := db.ExecContext(ctx, "insert into t values (1)"); return err },
					"Query": func() error {
						return scanOne(db.QueryContext(ctx, "insert into t values (2) returning id", pgx.QueryExecModeSimpleProtocol))
					},
					"Commit": func() error { return tx.Commit() },
				}
				if arrives {
					proxy.BlackHoleToClient()
				} else {
					proxy.BlackHoleToServer()
				}
				failed := make(chan error, len(ways))
				spoken := proxy.RoundTrips()
				for way, do := range ways {
					go func() {
						err := do()
						if err == nil || errors.Is(err, driver.ErrBadConn) {
							t.Errorf("%s: %v", way, err)
						}
						failed <- err
					}()
				}
				eventually(t, "all were sent", func() bool { return proxy.RoundTrips() >= spoken+int64(len(ways)) })
				if arrives {
					eventually(t, "they ran", func() bool { return onServer(t, ctx, cluster.Primary, "select count(*)::text from t") == "3" })
				}
				proxy.CutConnections()
				proxy.Restore() // a second run would succeed
				for range ways {
					<-failed
				}
				eventually(t, "the primary is used again", func() bool { _, err := db.ExecContext(ctx, "insert into t values (4)"); return err == nil })
				if got := onServer(t, ctx, cluster.Primary, "select coalesce(max(n), 0)::text from (select count(*) n from t where id < 4 group by id) q"); got > "1" {
					t.Errorf("a row is there %s times", got)
				}
			})
		}
	}
}

// Without a hint it is as with raw pgx: only where pgx knows that nothing was sent does database/sql try again.
func TestUnhintedStatementsOnDeadIdleConnectionsDoAsWithRawPgx(t *testing.T) {
	for name, lose := range map[string]func(ctx context.Context, s *pgsplittest.Server) error{
		"pg_terminate_backend": losses["pg_terminate_backend"], "reset": losses["reset"],
	} {
		t.Run(name, func(t *testing.T) {
			cluster := pgsplittest.Start(t, pgsplittest.Replicas(1))
			ctx := patient(t)
			runSQL(t, ctx, cluster, "create table t (id int)")
			results := map[string][]string{}
			for driver, db := range map[string]*sql.DB{
				"pgx":     openRaw(t, cluster.Primary.ProxyURI()+"&application_name=lost"),
				"pgsplit": open(t, with(cluster.ProxyDSN(), "application_name=lost")),
			} {
				for len(results[driver]) < 3 && ctx.Err() == nil {
					exec(t, ctx, db, "select 1")
					exec(t, ctx, db, "select 1") // F22: pgx pings what is used again for the first time
					used := time.Now()
					watch := observe(t, cluster.Primary, "lost")
					if err := lose(ctx, cluster.Primary); err != nil {
						t.Fatal(err)
					}
					eventually(t, "the backend has gone", func() bool { return len(watch.pids()) == 0 })
					_, err := db.ExecContext(ctx, "insert into t values (1)")
					var pgErr *pgconn.PgError
					what := fmt.Sprint(err == nil)
					if err != nil {
						t.Logf("%s: %v", driver, err)
					}
					if errors.As(err, &pgErr) {
						what = pgErr.Code
					}
					if time.Since(used) < time.Second { // else it was pinged
						results[driver] = append(results[driver], what)
					}
					// What is lost next must not be a probe.
					eventually(t, "the server is quiet", func() bool {
						own := db.Stats().OpenConnections
						if driver == "pgsplit" {
							s := connectorOf(t, db).Stats().Servers[0]
							if s.State != "healthy" {
								_, _ = db.ExecContext(ctx, "select 1") // it may still be reset
								return false
							}
							own = s.Open
						}
						return cluster.Primary.Proxy().Connections() <= own
					})
				}
				if err := db.Close(); err != nil {
					t.Error(err)
				}
			}
			if len(results["pgx"]) < 3 || !slices.Equal(results["pgx"], results["pgsplit"]) {
				t.Errorf("%v", results)
			}
			t.Logf("%v", results)
		})
	}
}

// count is how many of the application's backends are as the condition says.
func (o *observer) count(condition string) (n int) {
	o.t.Helper()
	if err := o.conn.QueryRow(context.Background(), "select count(*) from pg_stat_activity where application_name = $1 and "+condition,
		o.app).Scan(&n); err != nil {
		o.t.Fatal(err)
	}
	return n
}

// A replica's answer does not stand where the primary might have given another one.
func TestAReadThatNamesWhatIsNotReplayedYetFailsWithNoPrimaryWhileThereIsNone(t *testing.T) {
	cluster := pgsplittest.Start(t, pgsplittest.Replicas(2))
	ctx := patient(t)
	db := open(t, patiently(cluster))
	exec(t, ctx, db, "create table t (id int)")
	if err := cluster.CatchUp(ctx); err != nil {
		t.Fatal(err)
	}
	for _, s := range cluster.Replicas {
		if err := s.PauseReplay(ctx); err != nil {
			t.Fatal(err)
		}
	}
	exec(t, ctx, db, "alter table t add column news int")
	stop(t, cluster.Primary)
	_, err := db.ExecContext(pgsplit.ReadOnly(ctx), "select news from t")
	var pgErr *pgconn.PgError
	if !pgsplit.IsNoPrimary(err) || !errors.As(err, &pgErr) || pgErr.Code != "42703" {
		t.Errorf("%v", err)
	}
}
