package pgsplit_test

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/pgsplit/pgsplit"
	"github.com/pgsplit/pgsplit/pgsplittest"
)

// failsWith checks that a statement fails with a sentinel.
func failsWith(t testing.TB, ctx context.Context, q queryer, sentinel error) {
	t.Helper()
	if _, err := q.ExecContext(ctx, "select 1"); !errors.Is(err, sentinel) {
		t.Errorf("%v, want %v", err, sentinel)
	}
}

// replicaStats are the statistics of the only replica.
func replicaStats(t testing.TB, db *sql.DB) pgsplit.ServerStats {
	t.Helper()
	servers := connectorOf(t, db).Stats().Servers
	if len(servers) != 2 {
		t.Fatalf("%d servers", len(servers))
	}
	return servers[1]
}

func stop(t testing.TB, servers ...*pgsplittest.Server) {
	t.Helper()
	for _, s := range servers {
		if err := s.Stop(patient(t), pgsplittest.Immediate); err != nil {
			t.Fatal(err)
		}
	}
}

func start(t testing.TB, servers ...*pgsplittest.Server) {
	t.Helper()
	for _, s := range servers {
		if err := s.Start(patient(t)); err != nil {
			t.Fatal(err)
		}
	}
}

func pause(t testing.TB, servers ...*pgsplittest.Server) {
	t.Helper()
	for _, s := range servers {
		if err := s.PauseReplay(patient(t)); err != nil {
			t.Fatal(err)
		}
	}
}

func TestAProgramStartsWithEveryReplicaDownAndReadsThereOnceTheyAreBack(t *testing.T) {
	cluster := pgsplittest.Start(t, pgsplittest.Replicas(2))
	ctx := patient(t)
	stop(t, cluster.Replicas...)
	db := open(t, cluster.DSN())
	if err := db.PingContext(ctx); err != nil {
		t.Error(err)
	}
	if err := db.PingContext(pgsplit.ReadOnly(ctx)); err != nil {
		t.Error(err)
	}
	want(t, ctx, db, inRecovery, "false")
	read := pgsplit.ReadOnly(ctx)
	for range 5 {
		want(t, read, db, inRecovery, "false")
	}
	c := connectorOf(t, db)
	if n := c.Stats().Reasons["replicas_down"]; n < 5 {
		t.Errorf("%d reads were counted as replicas_down", n)
	}
	start(t, cluster.Replicas...)
	eventually(t, "the replicas are used again", func() bool {
		servers := map[string]bool{}
		for range 6 {
			servers[text(t, read, db, whichServer)] = true
		}
		return servers["replica1"] && servers["replica2"] && !servers["primary"]
	})
	for _, s := range c.Stats().Servers {
		if s.State != "healthy" {
			t.Errorf("%s is still called %s", s.Name, s.State)
		}
	}
}

func TestOpeningADSNDoesNothing(t *testing.T) {
	cluster := pgsplittest.Start(t, pgsplittest.Replicas(2))
	before := goleak.IgnoreCurrent()
	for _, dsn := range []string{
		with(cluster.ProxyDSN(), "pool_min_conns=3", "pool_max_conn_lifetime=1s", "replica_max_lag=1s"),
		"postgres://nobody@no.such.host.invalid/db postgres://nobody@neither.host.invalid:1",
		"host=no.such.host.invalid user=nobody",
		"",
	} {
		driver := &pgsplit.Driver{}
		connector, err := driver.OpenConnector(dsn)
		if err != nil {
			t.Fatalf("%q: %v", dsn, err)
		}
		noneLeft(t, before)
		// sql.DB has a goroutine of its own from the start.
		db := sql.OpenDB(connector)
		noneLeft(t, before, goleak.IgnoreTopFunction("database/sql.(*DB).connectionOpener"))
		if err := db.Close(); err != nil {
			t.Error(err)
		}
	}
	for _, s := range cluster.Servers() {
		if n := s.Proxy().Accepted(); n != 0 {
			t.Errorf("%s was dialled %d times", s.Name(), n)
		}
	}
	noneLeft(t, before)
}

func TestABlackHoledReplicaCostsAReadItsTimeoutOnceAndLaterReadsNothing(t *testing.T) {
	cluster := pgsplittest.Start(t, pgsplittest.Replicas(1))
	ctx := patient(t)
	replica := cluster.Replicas[0].Proxy()
	replica.BlackHole()
	db := open(t, with(cluster.ProxyDSN(), "replica_timeout=300ms"))
	exec(t, ctx, db, "select 1")
	start := time.Now()
	const reads = 100
	for range reads {
		want(t, pgsplit.ReadOnly(ctx), db, inRecovery, "false")
	}
	// Each try but the first comes 250 ms after the one before or later.
	tries, took := replica.Accepted(), time.Since(start)
	if most := 1 + int64(took/(250*time.Millisecond)); tries < 1 || tries > most {
		t.Errorf("the replica was tried %d times by %d reads in %v, want 1 to %d", tries, reads, took, most)
	}
	eventually(t, "it is down", func() bool { return replicaStats(t, db).State == "down" })
	if s := replicaStats(t, db); s.Failures == 0 || s.InUse != 0 {
		t.Errorf("%+v", s)
	}
	replica.Restore()
	eventually(t, "the replica is used again", func() bool {
		return text(t, pgsplit.ReadOnly(ctx), db, inRecovery) == "true"
	})
}

func TestReplicaTimeoutIsNeverOverHalfOfTheDeadlineLeft(t *testing.T) {
	t.Parallel() // it mostly waits
	cluster := pgsplittest.Start(t, pgsplittest.Replicas(2))
	ctx := patient(t)
	for _, s := range cluster.Replicas {
		s.Proxy().BlackHole()
	}
	db := open(t, with(cluster.ProxyDSN(), "replica_timeout=1h"))
	exec(t, ctx, db, "select 1")
	inLongerAndLonger(t, 400*time.Millisecond, func(deadline time.Duration) error {
		short, cancel := context.WithTimeout(pgsplit.ReadOnly(ctx), deadline)
		defer cancel()
		var recovering string
		err := db.QueryRowContext(short, inRecovery).Scan(&recovering)
		if err == nil && recovering != "false" {
			t.Errorf("in recovery %s", recovering)
		}
		return err
	})
}

// While one caller waits for a primary that does not answer, another one keeps its own deadline.
func TestAReadWithMaxStalenessKeepsItsDeadlineWhileAnotherAsksThePrimary(t *testing.T) {
	cluster := pgsplittest.Start(t, pgsplittest.Replicas(1))
	ctx := patient(t)
	db := open(t, with(cluster.ProxyDSN(), "replica_timeout=30s"))
	exec(t, pgsplit.ReadOnly(ctx), db, "select 1")
	primary := cluster.Primary.Proxy()
	primary.BlackHole()
	first, end := context.WithCancel(pgsplit.ReadOnly(ctx, pgsplit.MaxStaleness(time.Minute)))
	var wg sync.WaitGroup
	wg.Go(func() { _, _ = db.ExecContext(first, "select 1") })
	defer wg.Wait()
	defer end()
	eventually(t, "the first caller asks", func() bool { return primary.Accepted() > 0 })
	second, cancel := context.WithTimeout(pgsplit.ReadOnly(ctx, pgsplit.MaxStaleness(time.Minute)), 100*time.Millisecond)
	defer cancel()
	promptly(t, "a read with a deadline", func() {
		if _, err := db.ExecContext(second, "select 1"); !endOfContext(err) {
			t.Errorf("%v", err)
		}
	})
}

func TestAReplicaThatRefusesTheRoleOnlyMovesReadsOn(t *testing.T) {
	cluster := pgsplittest.Start(t, pgsplittest.Replicas(1))
	ctx := patient(t)
	exec(t, ctx, open(t, cluster.DSN()), "create role app login password 'right'")
	if err := cluster.CatchUp(ctx); err != nil {
		t.Fatal(err)
	}
	requirePassword(t, cluster.Replicas[0], "app")
	for name, user := range map[string]string{"unknown role": "nobody", "wrong password": "app:wrong", "no password": "app"} {
		t.Run(name, func(t *testing.T) {
			db := open(t, cluster.Primary.URI()+" "+strings.Replace(cluster.Replicas[0].URI(), "postgres@", user+"@", 1))
			for range 3 {
				want(t, pgsplit.ReadOnly(ctx), db, inRecovery, "false")
			}
			failsWith(t, pgsplit.ReadOnly(ctx, pgsplit.ReplicaOnly()), db, pgsplit.ErrNoReplica)
			if s := replicaStats(t, db); s.Failures == 0 || s.State != "refusing" {
				t.Errorf("%+v", s)
			}
		})
	}
	db := open(t, cluster.Primary.URI()+" "+strings.Replace(cluster.Replicas[0].URI(), "postgres@", "app:right@", 1))
	want(t, pgsplit.ReadOnly(ctx), db, "select current_user || ' ' || pg_is_in_recovery()", "app true")
}

// requirePassword makes a server ask a role for its password.
func requirePassword(t testing.TB, s *pgsplittest.Server, role string) {
	t.Helper()
	path := filepath.Join(s.DataDir(), "pg_hba.conf")
	rules, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_TRUNC, 0) // it keeps its owner
	if err != nil {
		t.Fatal(err)
	}
	_, err = f.WriteString("host all " + role + " 127.0.0.1/32 password\n" + string(rules))
	if err := errors.Join(err, f.Close(), s.Exec(patient(t), "select pg_reload_conf()")); err != nil {
		t.Fatal(err)
	}
	// The postmaster reads it in its own time.
	config := strings.Replace(s.URI(), "postgres@", role+":none@", 1)
	eventually(t, "the server asks for a password", func() bool {
		db, err := sql.Open("pgsplit", config)
		if err != nil {
			t.Fatal(err)
		}
		defer db.Close()
		return db.PingContext(patient(t)) != nil
	})
}

func TestReplicaOnlyReadsFailWithNoReplicaWhenAllAreDown(t *testing.T) {
	cluster := pgsplittest.Start(t, pgsplittest.Replicas(2))
	ctx := patient(t)
	db := open(t, patiently(cluster))
	only := pgsplit.ReadOnly(ctx, pgsplit.ReplicaOnly())
	want(t, only, db, inRecovery, "true")
	stop(t, cluster.Replicas...)
	// A connection that was idle may still meet the end of its server.
	eventually(t, "the loss is seen", func() bool {
		_, err := db.ExecContext(only, "select 1")
		return errors.Is(err, pgsplit.ErrNoReplica)
	})
	for range 5 {
		failsWith(t, only, db, pgsplit.ErrNoReplica)
	}
	want(t, pgsplit.ReadOnly(ctx), db, inRecovery, "false")
	if n := connectorOf(t, db).Stats().Reasons["no_replica"]; n < 6 {
		t.Errorf("%d reads were counted as no_replica", n)
	}
	// Without any replica it is the same.
	single := open(t, cluster.Primary.URI())
	failsWith(t, only, single, pgsplit.ErrNoReplica)
}

func TestReplicaOnlyReadsFailWithNoFreshReplicaWhenAllAreBehind(t *testing.T) {
	cluster := pgsplittest.Start(t, pgsplittest.Replicas(2))
	ctx := patient(t)
	db := open(t, patiently(cluster))
	pause(t, cluster.Replicas...)
	exec(t, ctx, db, "create table t (id int)")
	lsn, err := pgsplit.CommitLSN(ctx, db)
	if err != nil {
		t.Fatal(err)
	}
	only := pgsplit.ReadOnly(ctx, pgsplit.ReplicaOnly(), pgsplit.AfterLSN(lsn))
	for range 3 {
		failsWith(t, only, db, pgsplit.ErrNoFreshReplica)
	}
	want(t, pgsplit.ReadOnly(ctx, pgsplit.AfterLSN(lsn)), db, inRecovery, "false")
	// One that is behind and one that is down is still no fresh replica.
	stop(t, cluster.Replicas[0])
	eventually(t, "the loss is seen", func() bool {
		_, err := db.ExecContext(only, "select 1")
		return errors.Is(err, pgsplit.ErrNoFreshReplica)
	})
	want(t, pgsplit.ReadOnly(ctx, pgsplit.ReplicaOnly()), db, whichServer, "replica2")
}

func TestReadsGoOnWhileThePrimaryIsDown(t *testing.T) {
	cluster := pgsplittest.Start(t, pgsplittest.Replicas(2))
	ctx := patient(t)
	db := open(t, patiently(cluster))
	exec(t, ctx, db, "create table t (id int)")
	read := current(t, ctx, db)
	if err := cluster.CatchUp(ctx); err != nil {
		t.Fatal(err)
	}
	stop(t, cluster.Primary)
	eventually(t, "the loss is seen", func() bool {
		_, err := db.ExecContext(ctx, "select 1")
		return errors.Is(err, pgsplit.ErrNoPrimary)
	})
	for range 5 {
		failsWith(t, ctx, db, pgsplit.ErrNoPrimary)
		failsWith(t, pgsplit.Primary(ctx), db, pgsplit.ErrNoPrimary)
		if _, err := db.BeginTx(ctx, nil); !errors.Is(err, pgsplit.ErrNoPrimary) {
			t.Errorf("BeginTx: %v", err)
		}
		want(t, pgsplit.ReadOnly(ctx), db, inRecovery, "true")
		want(t, read, db, "select count(*)::text from t", "0")
	}
	if _, err := pgsplit.CommitLSN(ctx, db); !errors.Is(err, pgsplit.ErrNoPrimary) {
		t.Errorf("CommitLSN: %v", err)
	}
	// A floor that nobody alive can prove.
	failsWith(t, pgsplit.ReadOnly(ctx, pgsplit.AfterLSN(1<<40)), db, pgsplit.ErrNoFreshReplica)
	failsWith(t, pgsplit.ReadOnly(ctx, pgsplit.AfterLSN(1<<40)), db, pgsplit.ErrNoPrimary)
	// A program that starts now can read as well.
	late := open(t, patiently(cluster))
	want(t, pgsplit.ReadOnly(ctx), late, inRecovery, "true")
	failsWith(t, ctx, late, pgsplit.ErrNoPrimary)

	start(t, cluster.Primary)
	for _, db := range []*sql.DB{db, late} {
		eventually(t, "the primary is used again", func() bool {
			_, err := db.ExecContext(ctx, "select 1")
			return err == nil
		})
		want(t, ctx, db, inRecovery, "false")
	}
}

func TestNoServerAtAllIsNoPrimaryAndUnderReplicaOnlyNoReplica(t *testing.T) {
	cluster := pgsplittest.Start(t, pgsplittest.Replicas(2))
	ctx := patient(t)
	stop(t, cluster.Servers()...)
	db := open(t, cluster.DSN())
	for range 3 {
		failsWith(t, ctx, db, pgsplit.ErrNoPrimary)
		failsWith(t, pgsplit.ReadOnly(ctx), db, pgsplit.ErrNoPrimary)
		failsWith(t, pgsplit.ReadOnly(ctx, pgsplit.ReplicaOnly()), db, pgsplit.ErrNoReplica)
	}
	start(t, cluster.Servers()...)
	eventually(t, "the primary is used", func() bool {
		_, err := db.ExecContext(ctx, "select 1")
		return err == nil
	})
	eventually(t, "the replicas are used", func() bool { return text(t, pgsplit.ReadOnly(ctx), db, inRecovery) == "true" })
}

func TestReplicaOnStaleErrorKeepsReadsWithAFloorOffThePrimary(t *testing.T) {
	cluster := pgsplittest.Start(t, pgsplittest.Replicas(2))
	ctx := patient(t)
	db := open(t, with(patiently(cluster), "replica_on_stale=error"))
	pause(t, cluster.Replicas...)
	exec(t, ctx, db, "create table t (id int)")
	lsn, err := pgsplit.CommitLSN(ctx, db)
	if err != nil {
		t.Fatal(err)
	}
	failsWith(t, pgsplit.ReadOnly(ctx, pgsplit.AfterLSN(lsn)), db, pgsplit.ErrNoFreshReplica)
	want(t, pgsplit.ReadOnly(ctx), db, inRecovery, "true")
	if err := errors.Join(cluster.Replicas[1].ResumeReplay(ctx), cluster.CatchUp(ctx)); err != nil {
		t.Fatal(err)
	}
	for range 4 {
		want(t, pgsplit.ReadOnly(ctx, pgsplit.AfterLSN(lsn)), db, whichServer, "replica2")
	}
	// It is about stale replicas, not about those that are down.
	stop(t, cluster.Replicas...)
	eventually(t, "the loss is seen", func() bool {
		var server string
		err := db.QueryRowContext(pgsplit.ReadOnly(ctx, pgsplit.AfterLSN(lsn)), whichServer).Scan(&server)
		return err == nil && server == "primary"
	})
}

// lagging pauses all replicas and moves the primary on, then waits until the paused ones lag more than age.
func lagging(t testing.TB, ctx context.Context, db *sql.DB, cluster *pgsplittest.Cluster, age time.Duration, replicas ...*pgsplittest.Server) {
	t.Helper()
	pause(t, replicas...)
	exec(t, ctx, db, "select pg_logical_emit_message(true, 'lag', repeat('x', 1 << 20))")
	end := time.Now().Add(age)
	within(age, func() bool { return time.Now().After(end) })
}

func TestStaleReplicasGetNoReadsWithABoundOnStaleness(t *testing.T) {
	t.Parallel() // it mostly waits
	cluster := pgsplittest.Start(t, pgsplittest.Replicas(2))
	ctx := patient(t)
	const age = 1100 * time.Millisecond // replica_max_lag_bytes counts from where the primary was a second ago
	type bound struct {
		name string
		db   *sql.DB
		opts []pgsplit.ReadOption
	}
	bounds := []bound{
		{"MaxStaleness", open(t, patiently(cluster)), []pgsplit.ReadOption{pgsplit.MaxStaleness(age)}},
		{"replica_max_lag", open(t, with(patiently(cluster), "replica_max_lag="+age.String())), nil},
		{"replica_max_lag_bytes", open(t, with(patiently(cluster), "replica_max_lag_bytes=64kB")), nil},
	}
	servers := func(b bound) string {
		seen := map[string]bool{}
		for range 10 {
			seen[text(t, pgsplit.ReadOnly(ctx, b.opts...), b.db, whichServer)] = true
		}
		return strings.Join(slices.Sorted(maps.Keys(seen)), " ")
	}
	each := func(what string, reads func(servers string) bool) {
		t.Helper()
		for _, b := range bounds {
			eventually(t, b.name+": "+what, func() bool { return reads(servers(b)) })
		}
	}
	onReplicas := func(servers string) bool { return !strings.Contains(servers, "primary") }
	each("replicas serve all reads", onReplicas)
	lagging(t, ctx, bounds[0].db, cluster, age, cluster.Replicas[0])
	for _, b := range bounds {
		for range 5 {
			if s := servers(b); strings.Contains(s, "replica1") {
				t.Errorf("%s: with replica1 stale %s served the reads", b.name, s)
			}
		}
	}
	each("the fresh replica serves all reads", func(servers string) bool { return servers == "replica2" })
	lagging(t, ctx, bounds[0].db, cluster, age, cluster.Replicas[1])
	for _, b := range bounds {
		for range 5 {
			if s := servers(b); s != "primary" {
				t.Errorf("%s: with both stale %s served the reads", b.name, s)
			}
		}
		failsWith(t, pgsplit.ReadOnly(ctx, append(b.opts, pgsplit.ReplicaOnly())...), b.db, pgsplit.ErrNoFreshReplica)
		// A read without a bound is served all the same.
		if len(b.opts) > 0 {
			want(t, pgsplit.ReadOnly(ctx), b.db, inRecovery, "true")
		}
	}
	for _, s := range cluster.Replicas {
		if err := s.ResumeReplay(ctx); err != nil {
			t.Fatal(err)
		}
	}
	each("replicas serve all reads again", onReplicas)
}

// That a replica was not asked lately says nothing against it.
func TestReadsWithAFloorAreSharedOutAmongTheReplicasThatHaveIt(t *testing.T) {
	cluster := pgsplittest.Start(t, pgsplittest.Replicas(2))
	ctx := patient(t)
	db := open(t, patiently(cluster))
	exec(t, ctx, db, "create table t (id int)")
	n := map[string]int{}
	for i := range 10 {
		exec(t, ctx, db, "insert into t values ($1)", i)
		read := current(t, ctx, db)
		if err := cluster.CatchUp(ctx); err != nil {
			t.Fatal(err)
		}
		for range 10 {
			n[text(t, read, db, whichServer)]++
		}
	}
	if n["replica1"] < 20 || n["replica2"] < 20 {
		t.Errorf("a hundred reads: %v", n)
	}
}

// An idle primary is not lag, and neither is a replica that was restarted: F11.
func TestAReplicaOfAnIdlePrimaryIsNotStale(t *testing.T) {
	t.Parallel() // it mostly waits
	cluster := pgsplittest.Start(t, pgsplittest.Replicas(1))
	ctx := patient(t)
	// A machine that stops for a moment may leave the replica unproven for as long. Where idleness is taken for lag, no more
	// than the bound goes by without a read on the primary.
	var db *sql.DB
	inLongerAndLonger(t, 200*time.Millisecond, func(bound time.Duration) error {
		db = open(t, with(cluster.DSN(), "replica_max_lag="+bound.String()))
		eventually(t, "the replica serves", func() bool { return text(t, pgsplit.ReadOnly(ctx), db, inRecovery) == "true" })
		since, row := time.Now(), 0
		if !within(20*bound, func() bool {
			if row++; text(t, pgsplit.ReadOnly(ctx), db, inRecovery) != "true" {
				since, row = time.Now(), 0
			}
			return row > 20 && time.Since(since) > 3*bound
		}) {
			return fmt.Errorf("with a bound of %v all reads never ran on the replica of an idle primary for three times as long", bound)
		}
		return nil
	})
	if err := cluster.Replicas[0].Restart(ctx, pgsplittest.Fast); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the restarted replica serves", func() bool {
		var recovery string
		err := db.QueryRowContext(pgsplit.ReadOnly(ctx), inRecovery).Scan(&recovery)
		return err == nil && recovery == "true"
	})
}

func TestWhileThePrimaryIsDownReplicaMaxLagLetsReadsGoOnAndMaxStalenessDoesNot(t *testing.T) {
	t.Parallel() // it mostly waits
	cluster := pgsplittest.Start(t, pgsplittest.Replicas(2))
	ctx := patient(t)
	const age = 300 * time.Millisecond
	db := open(t, with(patiently(cluster), "replica_max_lag=300ms"))
	bounded := pgsplit.ReadOnly(ctx, pgsplit.MaxStaleness(age))
	lagging(t, ctx, db, cluster, age, cluster.Replicas...)
	eventually(t, "the primary serves", func() bool { return text(t, pgsplit.ReadOnly(ctx), db, inRecovery) == "false" })
	if err := cluster.Primary.Kill(ctx); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the loss is seen", func() bool {
		_, err := db.ExecContext(ctx, "select 1")
		return errors.Is(err, pgsplit.ErrNoPrimary)
	})
	end := time.Now().Add(2 * age)
	within(10*time.Second, func() bool {
		want(t, pgsplit.ReadOnly(ctx), db, inRecovery, "true")
		return time.Now().After(end)
	})
	for range 5 {
		failsWith(t, bounded, db, pgsplit.ErrNoFreshReplica)
		want(t, pgsplit.ReadOnly(ctx), db, inRecovery, "true")
	}
	// What the caller has seen is kept all the same.
	failsWith(t, pgsplit.ReadOnly(ctx, pgsplit.AfterLSN(1<<40)), db, pgsplit.ErrNoFreshReplica)
	start(t, cluster.Primary)
	eventually(t, "the bound holds again", func() bool { return text(t, pgsplit.ReadOnly(ctx), db, inRecovery) == "false" })
}

func TestPreferTriesTheReplicasWithTheLabelFirst(t *testing.T) {
	cluster := pgsplittest.Start(t, pgsplittest.Replicas(3))
	ctx := patient(t)
	dsn := strings.TrimSpace(with(cluster.Primary.URI(), "replica_timeout=20s"))
	for i, s := range cluster.Replicas {
		dsn += " " + s.URI() + "&label=" + []string{"east", "east", "west"}[i]
	}
	db := open(t, dsn)
	counts := func(ctx context.Context) map[string]int {
		n := map[string]int{}
		for range 12 {
			n[text(t, ctx, db, whichServer)]++
		}
		return n
	}
	if n := counts(pgsplit.ReadOnly(ctx, pgsplit.Prefer("west"))); n["replica3"] != 12 {
		t.Errorf("west: %v", n)
	}
	if n := counts(pgsplit.ReadOnly(ctx, pgsplit.Prefer("east"))); n["replica1"] != 6 || n["replica2"] != 6 {
		t.Errorf("east: %v", n)
	}
	if n := counts(pgsplit.ReadOnly(ctx, pgsplit.Prefer("north"))); n["replica1"] != 4 || n["replica2"] != 4 || n["replica3"] != 4 {
		t.Errorf("an unknown label: %v", n)
	}
	stop(t, cluster.Replicas[2])
	eventually(t, "others serve what prefers the label that is down", func() bool {
		var server string
		err := db.QueryRowContext(pgsplit.ReadOnly(ctx, pgsplit.Prefer("west"), pgsplit.ReplicaOnly()), whichServer).Scan(&server)
		return err == nil && server != "replica3"
	})
}

func TestWeightsShareSequentialReadsOutInProportion(t *testing.T) {
	cluster := pgsplittest.Start(t, pgsplittest.Replicas(2))
	ctx := patient(t)
	for _, balance := range []string{"least_busy", "round_robin"} {
		for _, weights := range [][2]int{{1, 1}, {2, 1}, {1, 5}} {
			t.Run(fmt.Sprint(balance, weights), func(t *testing.T) {
				dsn := with(cluster.Primary.URI(), "replica_timeout=20s", "replica_balance="+balance)
				for i, s := range cluster.Replicas {
					dsn += fmt.Sprintf(" %s&weight=%d", s.URI(), weights[i])
				}
				db := open(t, strings.Join(strings.Fields(dsn), " "))
				n := map[string]int{}
				for range 5 * (weights[0] + weights[1]) {
					n[text(t, pgsplit.ReadOnly(ctx), db, whichServer)]++
				}
				if n["replica1"] != 5*weights[0] || n["replica2"] != 5*weights[1] {
					t.Errorf("%v", n)
				}
			})
		}
	}
}

// Least busy avoids a replica that is at work; round robin does not look.
func TestLeastBusyAvoidsAReplicaThatIsAtWork(t *testing.T) {
	cluster := pgsplittest.Start(t, pgsplittest.Replicas(2))
	ctx := patient(t)
	for balance, both := range map[string]bool{"least_busy": false, "round_robin": true} {
		t.Run(balance, func(t *testing.T) {
			db := open(t, with(patiently(cluster), "replica_balance="+balance))
			conn := hold(t, ctx, db)
			busy := text(t, pgsplit.ReadOnly(ctx), conn, whichServer)
			n := map[string]int{}
			for range 10 {
				n[text(t, pgsplit.ReadOnly(ctx), db, whichServer)]++
			}
			if used := n[busy] > 0; used != both || len(n) != 1+n[busy]/5 {
				t.Errorf("with %s at work: %v", busy, n)
			}
		})
	}
}
