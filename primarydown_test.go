package pgsplit_test

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"net"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgconn"

	"github.com/pgsplit/pgsplit"
	"github.com/pgsplit/pgsplit/pgsplittest"
)

// primaryDownReads opens a cluster where replicas stand in for a primary that is down, and stops the primary.
func primaryDownReads(t testing.TB, parameters ...string) (*pgsplittest.Cluster, *sql.DB, context.Context) {
	t.Helper()
	cluster := pgsplittest.Start(t, pgsplittest.Replicas(2))
	ctx := patient(t)
	db := open(t, with(patiently(cluster), append(parameters, "replica_on_primary_down=read")...))
	exec(t, ctx, db, "create table t (id int primary key); create sequence s; insert into t values (1)")
	if err := cluster.CatchUp(ctx); err != nil {
		t.Fatal(err)
	}
	return cluster, db, ctx
}

// loses stops the primary and waits until that is known.
func loses(t testing.TB, ctx context.Context, cluster *pgsplittest.Cluster, db *sql.DB) {
	t.Helper()
	stop(t, cluster.Primary)
	eventually(t, "the loss is seen", func() bool {
		_, err := db.ExecContext(pgsplit.Primary(ctx), "select 1")
		return errors.Is(err, pgsplit.ErrNoPrimary)
	})
}

func TestUnhintedWorkIsBackOnThePrimarySoonAfterItAccepts(t *testing.T) {
	t.Parallel() // it mostly waits
	cluster := pgsplittest.Start(t, pgsplittest.Replicas(1))
	ctx := patient(t)
	const soon = time.Second + 100*time.Millisecond // and the question itself
	modes := []string{"error", "read"}
	for name, mean := range map[string]func(ctx context.Context, s *pgsplittest.Server) error{
		"killed":  func(ctx context.Context, s *pgsplittest.Server) error { return s.Kill(ctx) },
		"stopped": func(ctx context.Context, s *pgsplittest.Server) error { return s.Stop(ctx, pgsplittest.Fast) },
	} {
		t.Run(name, func(t *testing.T) {
			// Writes wait for the primary, so it is probed more often than that. Each try begins at a probe's pace, so a longer
			// pause would fail them all.
			dbs := map[string]*sql.DB{}
			for _, mode := range modes {
				dbs[mode] = open(t, with(cluster.DSN(), "replica_on_primary_down="+mode, "replica_retry_min=1h", "replica_retry_max=1h"))
				warm(t, ctx, dbs[mode])
			}
			primary := func(mode string) pgsplit.ServerStats { return connectorOf(t, dbs[mode]).Stats().Servers[0] }
			inOneOf(t, 5, func() error {
				before, probed := time.Now(), map[string]uint64{}
				for _, mode := range modes {
					probed[mode] = primary(mode).Probes
				}
				if err := mean(ctx, cluster.Primary); err != nil {
					t.Fatal(err)
				}
				down := time.Now()
				eventually(t, "it is down and was probed", func() bool {
					all := true
					for _, mode := range modes {
						_, err := dbs[mode].ExecContext(ctx, "select 1")
						if mode == "read" && err == nil && primary(mode).State == "down" {
							want(t, ctx, dbs[mode], inRecovery, "true")
						}
						all = all && primary(mode).State == "down" && primary(mode).Probes >= probed[mode]+2
					}
					return all
				})
				for _, mode := range modes {
					s := primary(mode)
					if n, took := s.Probes-probed[mode], time.Since(down); n > probesIn(took, time.Second) {
						t.Errorf("%s: %d probes in %v", mode, n, took)
					}
					if s.Cause == nil || s.Since.Before(before) {
						t.Errorf("%s: %+v", mode, s)
					}
				}
				start(t, cluster.Primary)
				conn, err := cluster.Primary.Conn(ctx)
				if err != nil {
					t.Fatal(err)
				}
				defer conn.Close(ctx)
				accepting, back := time.Now(), map[string]time.Duration{}
				eventually(t, "unhinted work is back", func() bool {
					for _, mode := range modes {
						var recovering string
						if back[mode] == 0 && dbs[mode].QueryRowContext(ctx, inRecovery).Scan(&recovering) == nil && recovering == "false" {
							back[mode] = time.Since(accepting)
						}
					}
					return len(back) == len(modes)
				})
				t.Logf("back after %v", back)
				for mode, took := range back {
					for range 20 {
						want(t, ctx, dbs[mode], inRecovery, "false")
					}
					want(t, pgsplit.ReadOnly(ctx), dbs[mode], inRecovery, "true")
					if took > soon {
						err = fmt.Errorf("%s: unhinted work was back %v after the primary accepted", mode, took)
					}
				}
				return err
			})
		})
	}
}

func TestWithoutAPrimaryUnhintedReadsRunOnReplicasAndWritesFailWithNoPrimary(t *testing.T) {
	cluster, db, ctx := primaryDownReads(t)
	stmt := prepare(t, ctx, db, "insert into t values ($1)")
	loses(t, ctx, cluster, db)
	c := connectorOf(t, db)
	before := c.Stats().Reasons["primary_down"]
	for range 5 {
		want(t, ctx, db, inRecovery, "true")
		want(t, ctx, db, "select count(*)::text from t where id = 1", "1")
	}
	if n := c.Stats().Reasons["primary_down"] - before; n != 10 {
		t.Errorf("%d decisions for ten statements", n)
	}
	inTx := func(opts *sql.TxOptions, query string) error { return inTx(ctx, db, opts, query) }
	for name, write := range map[string]func() error{
		"Exec":             func() error { _, err := db.ExecContext(ctx, "insert into t values (2)"); return err },
		"an argument":      func() error { _, err := db.ExecContext(ctx, "insert into t values ($1)", 2); return err },
		"Query":            func() error { return scanOne(db.QueryContext(ctx, "insert into t values (2) returning id")) },
		"DDL":              func() error { _, err := db.ExecContext(ctx, "create table u ()"); return err },
		"a temp table":     func() error { _, err := db.ExecContext(ctx, "create temp table u ()"); return err },
		"nextval":          func() error { return scanOne(db.QueryContext(ctx, "select nextval('s')")) },
		"for update":       func() error { return scanOne(db.QueryContext(ctx, "select id from t for update")) },
		"a transaction":    func() error { return inTx(nil, "insert into t values (2)") },
		"repeatable read":  func() error { return inTx(&sql.TxOptions{Isolation: sql.LevelRepeatableRead}, "delete from t") },
		"serializable":     func() error { return inTx(&sql.TxOptions{Isolation: sql.LevelSerializable}, "select 1") },
		"a former Stmt":    func() error { _, err := stmt.ExecContext(ctx, 2); return err },
		"a Stmt":           func() error { return prepareAndInsertInto(ctx, db, "insert into t values (2)") },
		"a held Conn":      func() error { _, err := hold(t, ctx, db).ExecContext(ctx, "insert into t values (2)"); return err },
		"Primary":          func() error { _, err := db.ExecContext(pgsplit.Primary(ctx), "select 1"); return err },
		"Primary, Begin":   func() error { _, err := db.BeginTx(pgsplit.Primary(ctx), nil); return err },
		"Primary, Prepare": func() error { _, err := db.PrepareContext(pgsplit.Primary(ctx), "select 1"); return err },
		"CommitLSN":        func() error { _, err := pgsplit.CommitLSN(ctx, db); return err },
	} {
		err := write()
		if !errors.Is(err, pgsplit.ErrNoPrimary) || !pgsplit.IsNoPrimary(err) {
			t.Errorf("%s: %v", name, err)
		}
		if strings.Count(name, "Primary") == 0 && name != "CommitLSN" && name != "serializable" {
			var pgErr *pgconn.PgError
			if !errors.As(err, &pgErr) || pgErr.Code != "25006" {
				t.Errorf("%s: %v does not tell the replica's answer", name, err)
			}
		}
	}
	if _, err := db.ExecContext(ctx, "select 1/0"); pgsplit.IsNoPrimary(err) || err == nil {
		t.Errorf("a division: %v", err)
	}
	// A write under ReadOnly is what it always is.
	if _, err := db.ExecContext(pgsplit.ReadOnly(ctx), "insert into t values (2)"); !errors.Is(err, pgsplit.ErrReadOnly) || pgsplit.IsNoPrimary(err) {
		t.Errorf("under ReadOnly: %v", err)
	}
	start(t, cluster.Primary)
	eventually(t, "the primary is used again", func() bool { _, err := db.ExecContext(ctx, "select nextval('s')"); return err == nil })
	want(t, ctx, db, "select count(*)::text from t", "1")
}

// prepareAndInsertInto prepares a write and runs it.
func prepareAndInsertInto(ctx context.Context, db *sql.DB, query string) error {
	stmt, err := db.PrepareContext(ctx, query)
	if err != nil {
		return err
	}
	defer stmt.Close()
	_, err = stmt.ExecContext(ctx)
	return err
}

func TestAHeldConnectionGoesBackToThePrimaryAndATransactionEndsWhereItBegan(t *testing.T) {
	cluster, db, ctx := primaryDownReads(t)
	loses(t, ctx, cluster, db)
	conn := hold(t, ctx, db)
	want(t, ctx, conn, inRecovery, "true")
	tx, err := db.BeginTx(ctx, nil)
	if err != nil {
		t.Fatal(err)
	}
	defer tx.Rollback()
	want(t, ctx, tx, inRecovery, "true")
	where := text(t, ctx, tx, whichServer)
	start(t, cluster.Primary)
	eventually(t, "the held connection is back on the primary", func() bool { return text(t, ctx, conn, inRecovery) == "false" })
	exec(t, ctx, conn, "insert into t values (2)")
	want(t, ctx, db, inRecovery, "false")
	want(t, ctx, tx, whichServer, where)
	if _, err := tx.ExecContext(ctx, "insert into t values (3)"); !errors.Is(err, pgsplit.ErrNoPrimary) {
		t.Errorf("a write in the replica's transaction: %v", err)
	}
	_ = tx.Rollback()
	for range 10 {
		want(t, ctx, db, inRecovery, "false")
	}
}

func TestASessionNeverSeesLessWhileReplicasStandIn(t *testing.T) {
	cluster, db, ctx := primaryDownReads(t)
	session := pgsplit.NewSession()
	inSession := pgsplit.WithSession(ctx, session)
	exec(t, inSession, db, "insert into t values (2)")
	if err := cluster.CatchUp(ctx); err != nil {
		t.Fatal(err)
	}
	token := tokenOf(t, ctx, session)
	pause(t, cluster.Replicas[0])
	exec(t, inSession, db, "insert into t values (3)")
	if err := cluster.Replicas[1].WaitFor(ctx, uint64(commitLSN(t, ctx, db))); err != nil {
		t.Fatal(err)
	}
	tokenOf(t, ctx, session)
	ahead := pgsplit.NewSession()
	pause(t, cluster.Replicas[1])
	exec(t, pgsplit.WithSession(ctx, ahead), db, "insert into t values (4)")
	tokenOf(t, ctx, ahead)
	loses(t, ctx, cluster, db)
	for range 5 {
		early := pgsplit.WithSession(ctx, pgsplit.SessionFromToken(token))
		if got := text(t, early, db, "select count(*)::text from t"); got < "2" {
			t.Errorf("%s rows, the caller has seen 2", got)
		}
		want(t, inSession, db, "select count(*) || ' ' || current_setting('cluster_name') from t", "3 replica2")
		_, err := db.ExecContext(pgsplit.WithSession(ctx, ahead), "select 1")
		if !errors.Is(err, pgsplit.ErrNoFreshReplica) || !errors.Is(err, pgsplit.ErrNoPrimary) {
			t.Errorf("a caller who has seen more than any replica: %v", err)
		}
		want(t, ctx, db, inRecovery, "true")
	}
}

// What a session does on a replica that stands in is reading, whatever it is carried by.
func TestASessionsTransactionOnAReplicaThatStandsInIsARead(t *testing.T) {
	cluster, db, ctx := primaryDownReads(t)
	session := pgsplit.NewSession()
	inSession := pgsplit.WithSession(ctx, session)
	exec(t, inSession, db, "insert into t values (2)")
	tokenOf(t, ctx, session)
	if err := cluster.CatchUp(ctx); err != nil {
		t.Fatal(err)
	}
	loses(t, ctx, cluster, db)
	for _, isolation := range []sql.IsolationLevel{sql.LevelDefault, sql.LevelRepeatableRead} {
		tx, err := db.BeginTx(inSession, &sql.TxOptions{Isolation: isolation})
		if err != nil {
			t.Fatal(err)
		}
		want(t, inSession, tx, "select count(*) || ' ' || pg_is_in_recovery() from t", "2 true")
		if err := tx.Commit(); err != nil {
			t.Errorf("%s: %v", isolation, err)
		}
		want(t, inSession, db, "select count(*) || ' ' || pg_is_in_recovery() from t", "2 true")
		want(t, pgsplit.ReadOnly(inSession), db, "select count(*) || ' ' || pg_is_in_recovery() from t", "2 true")
	}
	begun := time.Now()
	if _, err := session.Token(ctx); err != nil {
		t.Errorf("the token of a session that only read: %v", err)
	}
	if took := time.Since(begun); took > 20*time.Second {
		t.Errorf("it took %v", took)
	}
	tx, err := db.BeginTx(inSession, nil)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := tx.ExecContext(inSession, "insert into t values (3)"); !errors.Is(err, pgsplit.ErrNoPrimary) {
		t.Errorf("a write: %v", err)
	}
	_ = tx.Rollback()
	want(t, inSession, db, "select count(*)::text from t", "2")
}

func TestWithoutAnyServerStandInsFailWithNoPrimary(t *testing.T) {
	cluster, db, ctx := primaryDownReads(t)
	stop(t, cluster.Servers()...)
	eventually(t, "all losses are seen", func() bool {
		_, err := db.ExecContext(ctx, "select 1")
		return errors.Is(err, pgsplit.ErrNoPrimary)
	})
	for range 5 {
		failsWith(t, ctx, db, pgsplit.ErrNoPrimary)
		failsWith(t, pgsplit.ReadOnly(ctx), db, pgsplit.ErrNoPrimary)
		if _, err := db.BeginTx(ctx, nil); !errors.Is(err, pgsplit.ErrNoPrimary) {
			t.Error(err)
		}
	}
	start(t, cluster.Replicas[1])
	eventually(t, "a replica stands in", func() bool {
		var where string
		return db.QueryRowContext(ctx, whichServer).Scan(&where) == nil && where == "replica2"
	})
}

// severalHosts is a primary of several addresses.
func severalHosts(cluster *pgsplittest.Cluster, hosts ...*pgsplittest.Server) string {
	var names, ports []string
	for _, s := range hosts {
		names, ports = append(names, "127.0.0.1"), append(ports, strconv.Itoa(s.Port()))
	}
	return "host=" + strings.Join(names, ",") + " port=" + strings.Join(ports, ",") +
		" user=postgres dbname=postgres sslmode=disable connect_timeout=20"
}

// promoted fails over to the first replica without the old primary knowing.
func promoted(t testing.TB, ctx context.Context, cluster *pgsplittest.Cluster) {
	t.Helper()
	if err := cluster.CatchUp(ctx); err != nil {
		t.Fatal(err)
	}
	stop(t, cluster.Primary)
	if err := cluster.Replicas[0].Promote(ctx); err != nil {
		t.Fatal(err)
	}
}

func TestAPromotedReplicaAmongThePrimarysHostsIsFoundAndTheOldPrimaryGetsNothing(t *testing.T) {
	for name, order := range map[string]func(old, heir *pgsplittest.Server) []*pgsplittest.Server{
		"the old one last":  func(old, heir *pgsplittest.Server) []*pgsplittest.Server { return []*pgsplittest.Server{heir, old} },
		"the old one first": func(old, heir *pgsplittest.Server) []*pgsplittest.Server { return []*pgsplittest.Server{old, heir} },
	} {
		t.Run(name, func(t *testing.T) {
			cluster := pgsplittest.Start(t, pgsplittest.Replicas(1))
			ctx := patient(t)
			old, heir := cluster.Primary, cluster.Replicas[0]
			db := open(t, severalHosts(cluster, order(old, heir)...))
			exec(t, ctx, db, "create table t (id int)")
			want(t, ctx, db, whichServer, "primary")
			promoted(t, ctx, cluster)
			eventually(t, "the new primary is found", func() bool { _, err := db.ExecContext(ctx, "insert into t values (1)"); return err == nil })
			start(t, old) // it believes that it still is the primary
			for i := range 10 {
				db.SetMaxIdleConns(0) // each on a new connection
				db.SetMaxIdleConns(2)
				if !within(time.Minute, func() bool {
					var where string
					err := db.QueryRowContext(ctx, "insert into t values (2) returning current_setting('cluster_name')").Scan(&where)
					if err == nil && where == "primary" {
						t.Fatal("the old primary took a write")
					}
					return err == nil
				}) {
					t.Fatalf("connection %d: the new primary was not found again: %v", i, connectorOf(t, db).Stats().Servers[0].Cause)
				}
				want(t, pgsplit.ReadOnly(ctx), db, whichServer, "replica1")
			}
			if n := onServer(t, ctx, old, "select count(*)::text from t"); n != "0" {
				t.Errorf("%s rows were written to the old primary", n)
			}
		})
	}
}

// Nobody has seen the new timeline when the program starts, and the old primary is the first host, or the first to answer.
func TestOfSeveralHostsThatTakeWritesTheHighestTimelineIsThePrimary(t *testing.T) {
	cluster := pgsplittest.Start(t, pgsplittest.Replicas(1))
	ctx := patient(t)
	old, heir := cluster.Primary, cluster.Replicas[0]
	t.Run("all who connect at the same time ask once", func(t *testing.T) {
		db := open(t, "host=127.0.0.1,127.0.0.1 port="+portOf(t, old.Proxy().Addr())+","+portOf(t, heir.Proxy().Addr())+
			" user=postgres dbname=postgres sslmode=disable")
		before := heir.Proxy().Accepted()
		var wg sync.WaitGroup
		for range 10 {
			wg.Go(func() { want(t, ctx, db, whichServer, "primary") })
		}
		wg.Wait()
		if n := heir.Proxy().Accepted() - before; n != 1 {
			t.Errorf("the other host was asked %d times, want 1", n)
		}
	})
	if cluster.Version() >= 15 {
		// Each host sends a notice to whom it lets in, and all are asked at once.
		onServer(t, ctx, old, "update pg_database set datcollversion = 'another' where datname = current_database() returning datname")
	}
	promoted(t, ctx, cluster)
	start(t, old) // it believes that it still is the primary
	for name, hosts := range map[string][]*pgsplittest.Server{"the old one first": {old, heir}, "the old one last": {heir, old}} {
		t.Run(name, func(t *testing.T) {
			db := open(t, severalHosts(cluster, hosts...))
			for range 3 {
				want(t, ctx, db, whichServer, "replica1")
				db.SetMaxIdleConns(0) // the next one on a new connection
				db.SetMaxIdleConns(2)
			}
			want(t, pgsplit.ReadOnly(ctx), db, whichServer, "replica1")
		})
	}
	// With the new primary gone before the program starts, nobody can know.
	stop(t, heir)
	want(t, ctx, open(t, severalHosts(cluster, old, heir)), whichServer, "primary")
}

// A host of another cluster may be on whichever timeline.
func TestAHostOfAnotherClusterDoesNotTakeOver(t *testing.T) {
	ours := pgsplittest.Start(t, pgsplittest.Replicas(0))
	ctx := patient(t)
	// With a cache of its own it is not made from the same template.
	t.Setenv("XDG_CACHE_HOME", t.TempDir())
	t.Setenv("HOME", t.TempDir())
	foreign := pgsplittest.Start(t, pgsplittest.Replicas(1))
	db := open(t, severalHosts(ours, foreign.Replicas[0], ours.Primary))
	want(t, ctx, db, whichServer, "primary")
	promoted(t, ctx, foreign)
	anew := func() {
		db.SetMaxIdleConns(0) // the next one on a new connection
		db.SetMaxIdleConns(2)
	}
	anew()
	want(t, ctx, db, whichServer, "primary")
	stop(t, ours.Primary)
	eventually(t, "the loss is seen", func() bool {
		_, err := db.ExecContext(ctx, "create table lost ()") // which no other cluster may get
		return pgsplit.IsNoPrimary(err)
	})
	start(t, ours.Primary)
	eventually(t, "the primary is back", func() bool { return db.PingContext(ctx) == nil })
	anew()
	want(t, ctx, db, whichServer, "primary")
	if got := onServer(t, ctx, foreign.Replicas[0], "select count(*)::text from pg_class where relname = 'lost'"); got != "0" {
		t.Error("the other cluster was written to")
	}
}

func portOf(t testing.TB, address string) string {
	t.Helper()
	_, port, err := net.SplitHostPort(address)
	if err != nil {
		t.Fatal(err)
	}
	return port
}

// throughAFront opens a primary, with a table, by an address that can lead to its replica.
func throughAFront(t *testing.T, ctx context.Context) (*pgsplittest.Cluster, *front, *sql.DB) {
	t.Helper()
	cluster := pgsplittest.Start(t, pgsplittest.Replicas(1))
	f := newFront(t, cluster.Primary, up)
	db := open(t, strings.Replace(cluster.Primary.URI(), f.target, f.listener.Addr().String(), 1))
	exec(t, ctx, db, "create table t (id int)")
	return cluster, f, db
}

// The old primary comes back at the only address that there is.
func TestAPrimaryBelowATimelineAlreadySeenIsNoPrimary(t *testing.T) {
	ctx := patient(t)
	cluster, f, db := throughAFront(t, ctx)
	old, heir := cluster.Primary, cluster.Replicas[0]
	promoted(t, ctx, cluster)
	f.leadsTo(heir) // as a virtual address is moved
	eventually(t, "the new primary is used", func() bool { _, err := db.ExecContext(ctx, "insert into t values (1)"); return err == nil })
	start(t, old)
	f.leadsTo(old)
	f.drop()
	eventually(t, "the loss is seen", func() bool {
		_, err := db.ExecContext(ctx, "insert into t values (2)")
		return pgsplit.IsNoPrimary(err)
	})
	for range 10 {
		failsWith(t, ctx, db, pgsplit.ErrNoPrimary)
		failsWith(t, pgsplit.ReadOnly(ctx), db, pgsplit.ErrNoPrimary)
	}
	if n := onServer(t, ctx, old, "select count(*)::text from t"); n != "0" {
		t.Errorf("%s rows were written to the old primary", n)
	}
	f.leadsTo(heir)
	eventually(t, "the new primary is used again", func() bool { _, err := db.ExecContext(ctx, "insert into t values (3)"); return err == nil })
	if n := onServer(t, ctx, heir, "select count(*)::text from t where id <> 2"); n != "2" {
		t.Errorf("%s rows", n)
	}
}

// As after an upgrade: the new cluster begins with a timeline below the old one's.
func TestTheAddressOfAPrimaryMayMoveToANewCluster(t *testing.T) {
	ctx := patient(t)
	cluster, f, db := throughAFront(t, ctx)
	promoted(t, ctx, cluster)
	f.leadsTo(cluster.Replicas[0])
	eventually(t, "the new primary is used", func() bool { _, err := db.ExecContext(ctx, "insert into t values (1)"); return err == nil })
	before := pgsplit.NewSession()
	exec(t, pgsplit.WithSession(ctx, before), db, "insert into t values (2)")
	kept := tokenOf(t, ctx, before)
	// With a cache of its own it is not made from the same template.
	t.Setenv("XDG_CACHE_HOME", t.TempDir())
	t.Setenv("HOME", t.TempDir())
	upgraded := pgsplittest.Start(t, pgsplittest.Replicas(0))
	f.leadsTo(upgraded.Primary)
	f.drop()
	eventually(t, "the new cluster is used", func() bool { _, err := db.ExecContext(ctx, "create table u (id int)"); return err == nil })
	for _, session := range []*pgsplit.Session{pgsplit.NewSession(), pgsplit.SessionFromToken(kept), before} {
		inSession := pgsplit.WithSession(ctx, session)
		exec(t, inSession, db, "truncate u; insert into u values (1)")
		want(t, pgsplit.ReadOnly(inSession), db, "select count(*)::text from u", "1")
	}
}

// A connection to the old primary that was at hand when the new one was met is of no more use.
func TestAConnectionToTheOldPrimaryIsNotUsedOnceTheNewOneIsKnown(t *testing.T) {
	ctx := patient(t)
	cluster, f, db := throughAFront(t, ctx)
	heir := cluster.Replicas[0]
	if err := cluster.CatchUp(ctx); err != nil {
		t.Fatal(err)
	}
	for name, begin := range map[string]func() (queryer, func() error){
		"Conn": func() (queryer, func() error) { conn := hold(t, ctx, db); return conn, conn.Close },
		"Tx": func() (queryer, func() error) {
			tx, err := db.BeginTx(ctx, nil)
			if err != nil {
				t.Fatal(err)
			}
			return tx, tx.Commit
		},
	} {
		q, end := begin()
		want(t, ctx, q, whichServer, "primary")
		defer func() {
			_ = end()
			for range 5 {
				if got := text(t, ctx, db, "insert into t values (2) returning current_setting('cluster_name')"); got != "replica1" {
					t.Errorf("after the end of the %s %s takes writes", name, got)
				}
			}
		}()
	}
	if err := heir.Promote(ctx); err != nil {
		t.Fatal(err)
	}
	f.leadsTo(heir)
	want(t, ctx, db, whichServer, "replica1")
}

// What a standby refuses by other codes than 25006 (F12) needs the primary no less.
func TestWhatAStandInRefusesInItsOwnWordsFailsWithNoPrimary(t *testing.T) {
	cluster, db, ctx := primaryDownReads(t)
	loses(t, ctx, cluster, db)
	for _, query := range []string{
		"listen x", "notify x", "vacuum t", "lock t", "create unlogged table u ()", "copy t from stdin",
		"select pg_logical_emit_message(true, 'a', 'b')", "select lo_create(0)", "select pg_current_wal_lsn()",
		"begin read write", "begin isolation level serializable",
	} {
		conn := hold(t, ctx, db)
		_, err := conn.ExecContext(ctx, query)
		if !pgsplit.IsNoPrimary(err) {
			t.Errorf("%s: %v", query, err)
		}
		_, _ = conn.ExecContext(ctx, "rollback")
		_ = conn.Close()
	}
}
