package pgsplit_test

import (
	"context"
	"database/sql"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgconn"

	"github.com/pgsplit/pgsplit"
	"github.com/pgsplit/pgsplit/pgsplittest"
)

// poolers are what may stand in front of a server and not pass the read-only parameter on (F23).
var poolers = map[string]pgsplittest.PoolerMode{
	"drops the parameter":   pgsplittest.PoolerDropsParameter,
	"refuses the parameter": pgsplittest.PoolerRefusesParameter,
}

// behindPoolers runs a test on a cluster of one replica, every server of which has a pooler in front of it.
func behindPoolers(t *testing.T, test func(t *testing.T, ctx context.Context, cluster *pgsplittest.Cluster)) {
	for name, mode := range poolers {
		t.Run(name, func(t *testing.T) {
			cluster := pgsplittest.Start(t)
			ctx := patient(t)
			for _, s := range cluster.Servers() {
				s.Proxy().EmulatePooler(mode)
			}
			runSQL(t, ctx, cluster, ledger)
			test(t, ctx, cluster)
		})
	}
}

// noneInTransaction checks that no connection of the program is inside a transaction.
func noneInTransaction(t *testing.T, ctx context.Context, cluster *pgsplittest.Cluster) {
	t.Helper()
	for _, s := range cluster.Servers() {
		if got := onServer(t, ctx, s, `select count(*)::text from pg_stat_activity where state like 'idle in transaction%'`); got != "0" {
			t.Errorf("%s: %s connections idle in a transaction", s.Name(), got)
		}
	}
}

func TestBehindAPoolerAWriteUnderReadOnlyFailsOnAReplica(t *testing.T) {
	behindPoolers(t, func(t *testing.T, ctx context.Context, cluster *pgsplittest.Cluster) {
		db := open(t, cluster.ProxyDSN())
		refuseAll(t, pgsplit.ReadOnly(ctx), db, "replica1 in recovery")
		nothingWritten(t, ctx, cluster.Primary)
		noneInTransaction(t, ctx, cluster)
	})
}

func TestBehindAPoolerAWriteUnderReadOnlyFailsOnThePrimary(t *testing.T) {
	behindPoolers(t, func(t *testing.T, ctx context.Context, cluster *pgsplittest.Cluster) {
		db := open(t, cluster.Primary.ProxyURI())
		refuseAll(t, pgsplit.ReadOnly(ctx), db, "primary")
		nothingWritten(t, ctx, cluster.Primary)
		noneInTransaction(t, ctx, cluster)
		exec(t, ctx, db, "insert into ledger values (2)")
	})
}

func TestBehindAPoolerAWriteUnderReadOnlyFailsOnAReplicaThatWasPromotedUnderThePool(t *testing.T) {
	behindPoolers(t, func(t *testing.T, ctx context.Context, cluster *pgsplittest.Cluster) {
		db := open(t, cluster.ProxyDSN())
		db.SetMaxOpenConns(1)
		read := pgsplit.ReadOnly(ctx)
		before := text(t, read, db, "select pg_backend_pid()::text")
		if err := cluster.Replicas[0].Promote(ctx); err != nil {
			t.Fatal(err)
		}
		_, err := db.ExecContext(read, "insert into ledger values (2)")
		refusedWrite(t, err)
		if after := text(t, read, db, "select pg_backend_pid()::text"); after != before {
			t.Errorf("the pooled connection did not survive the promotion, so this proves nothing")
		}
		refuseAll(t, read, db, "replica1")
		nothingWritten(t, ctx, cluster.Replicas[0])
	})
}

func TestBehindAPoolerFloorsAreKept(t *testing.T) {
	behindPoolers(t, func(t *testing.T, ctx context.Context, cluster *pgsplittest.Cluster) {
		const state = "select pg_is_in_recovery()::text || ' ' || count(*) from ledger"
		db := open(t, cluster.ProxyDSN())
		db.SetMaxOpenConns(1)
		fresh := pgsplit.ReadOnly(pgsplit.WithLSN(ctx, newFloor(t, ctx, cluster)))
		if got := text(t, fresh, db, state); got != "true 1" {
			t.Errorf("a replica that has the floor: %s", got)
		}
		if err := cluster.Replicas[0].PauseReplay(ctx); err != nil {
			t.Fatal(err)
		}
		exec(t, ctx, db, "insert into ledger values (2)")
		stale := pgsplit.ReadOnly(pgsplit.WithLSN(ctx, commitLSN(t, ctx, db)))
		for range 3 {
			if got := text(t, stale, db, state); got != "false 2" {
				t.Errorf("the only replica is behind the floor: %s", got)
			}
			if got := text(t, pgsplit.ReadOnly(ctx), db, state); got != "true 1" {
				t.Errorf("without a floor: %s", got)
			}
			if got := text(t, fresh, db, state); got != "true 1" {
				t.Errorf("with the earlier floor: %s", got)
			}
		}
		noneInTransaction(t, ctx, cluster)
		if err := cluster.Replicas[0].ResumeReplay(ctx); err != nil {
			t.Fatal(err)
		}
		if err := cluster.CatchUp(ctx); err != nil {
			t.Fatal(err)
		}
		if got := text(t, stale, db, state); got != "true 2" {
			t.Errorf("the replica has reached the floor: %s", got)
		}
	})
}

// A position that was read through a pooler belongs to whichever server answered, so none may be remembered (F9).
func TestBehindAPoolerNoPositionIsRemembered(t *testing.T) {
	behindPoolers(t, func(t *testing.T, ctx context.Context, cluster *pgsplittest.Cluster) {
		db := open(t, cluster.ProxyDSN())
		connector, err := pgsplit.FromDB(db)
		if err != nil {
			t.Fatal(err)
		}
		read := pgsplit.ReadOnly(pgsplit.WithLSN(ctx, newFloor(t, ctx, cluster)), pgsplit.ReplicaOnly())
		for range 5 {
			exec(t, read, db, "select 1")
		}
		reasons := connector.Stats().Reasons
		if reasons["floor_known"] != 0 || reasons["floor_checked"] != 5 {
			t.Errorf("%d reads by a remembered position, %d by a check", reasons["floor_known"], reasons["floor_checked"])
		}
	})
}

func TestBehindAPoolerReadOnlyTakesTwoRoundTripsMoreAndAFloorThree(t *testing.T) {
	behindPoolers(t, func(t *testing.T, ctx context.Context, cluster *pgsplittest.Cluster) {
		db := open(t, cluster.ProxyDSN())
		db.SetMaxOpenConns(1)
		statements, transactions := reads[:2], reads[6:9]
		compare(t, cluster, append(statements[:2:2], transactions...), db, func() context.Context { return ctx }, 0)
		read := pgsplit.ReadOnly(ctx)
		compare(t, cluster, statements, db, func() context.Context { return read }, 2)
		compare(t, cluster, transactions, db, func() context.Context { return read }, 0)
		floor := pgsplit.ReadOnly(pgsplit.WithLSN(ctx, newFloor(t, ctx, cluster)), pgsplit.ReplicaOnly())
		compare(t, cluster, statements, db, func() context.Context { return floor }, 3)
		compare(t, cluster, transactions[:2], db, func() context.Context { return floor }, 2)
	})
}

// isolationOf begins a transaction and tells where it runs, and how.
func isolationOf(ctx context.Context, db *sql.DB, opts *sql.TxOptions) (string, error) {
	tx, err := db.BeginTx(ctx, opts)
	if err != nil {
		return "", err
	}
	defer tx.Rollback()
	var got string
	err = tx.QueryRowContext(ctx, `select current_setting('cluster_name') || ', ' || current_setting('transaction_isolation') ||
 case current_setting('transaction_read_only') when 'on' then ', read only' else ', read write' end`).Scan(&got)
	if err != nil {
		return "", err
	}
	return got, tx.Commit()
}

func TestBehindAPoolerATransactionWithAFloorIsReadCommittedOrOnThePrimary(t *testing.T) {
	behindPoolers(t, func(t *testing.T, ctx context.Context, cluster *pgsplittest.Cluster) {
		db := open(t, cluster.ProxyDSN())
		floor := pgsplit.ReadOnly(pgsplit.WithLSN(ctx, newFloor(t, ctx, cluster)))
		want := func(isolation sql.IsolationLevel, want string) {
			t.Helper()
			got, err := isolationOf(floor, db, &sql.TxOptions{Isolation: isolation})
			if err != nil || got != want {
				t.Errorf("%s: %q %v, want %q", isolation, got, err, want)
			}
		}
		want(sql.LevelDefault, "replica1, read committed, read only")
		want(sql.LevelReadCommitted, "replica1, read committed, read only")
		// One snapshot for all statements was taken before the check answered (F4).
		want(sql.LevelRepeatableRead, "primary, repeatable read, read only")
		want(sql.LevelSerializable, "primary, serializable, read only")

		runSQL(t, ctx, cluster, "alter role postgres set default_transaction_isolation = 'repeatable read'")
		db = open(t, cluster.ProxyDSN())
		floor = pgsplit.ReadOnly(pgsplit.WithLSN(ctx, newFloor(t, ctx, cluster)))
		want(sql.LevelDefault, "primary, repeatable read, read only")
		want(sql.LevelReadCommitted, "replica1, read committed, read only")
		if got := text(t, floor, db, "select current_setting('cluster_name') || ', ' || current_setting('transaction_isolation')"); got != "replica1, read committed" {
			t.Errorf("a statement of its own: %s", got)
		}
		noneInTransaction(t, ctx, cluster)
	})
}

func TestBehindAPoolerATransactionWithAFloorEndsLikeAnyOther(t *testing.T) {
	behindPoolers(t, func(t *testing.T, ctx context.Context, cluster *pgsplittest.Cluster) {
		db := open(t, cluster.ProxyDSN())
		db.SetMaxOpenConns(1)
		floor := pgsplit.ReadOnly(pgsplit.WithLSN(ctx, newFloor(t, ctx, cluster)), pgsplit.ReplicaOnly())
		raw := openRaw(t, cluster.Primary.URI())
		for name, end := range map[string]func(ctx context.Context, db *sql.DB) error{
			"commit":   func(ctx context.Context, db *sql.DB) error { return inTx(ctx, db, nil, "select 1") },
			"rollback": reads[7].do,
			"commit of a failed transaction": func(ctx context.Context, db *sql.DB) error {
				tx, err := db.BeginTx(ctx, nil)
				if err != nil {
					return err
				}
				if _, err := tx.ExecContext(ctx, "select 1/0"); err == nil {
					t.Error("1/0")
				}
				return tx.Commit()
			},
			"commit after the context has ended": func(ctx context.Context, db *sql.DB) error {
				ctx, cancel := context.WithCancel(ctx)
				defer cancel()
				tx, err := db.BeginTx(ctx, nil)
				if err != nil {
					return err
				}
				cancel()
				err = tx.Commit()
				if errors.Is(err, context.Canceled) || errors.Is(err, sql.ErrTxDone) {
					return context.Canceled // whether database/sql or the caller ended it
				}
				return err
			},
		} {
			if got, want := end(floor, db), end(ctx, raw); !errors.Is(got, want) {
				t.Errorf("%s: %v, from raw pgx %v", name, got, want)
			}
			if got := text(t, floor, db, inRecovery); got != "true" {
				t.Errorf("after %s: in recovery %s", name, got)
			}
		}
		until(t, "no transaction is open", func() bool {
			return onServer(t, ctx, cluster.Replicas[0], `select count(*)::text from pg_stat_activity where state like 'idle in tr%'`) == "0"
		})
	})
}

func TestBehindAPoolerAFailedStatementLeavesAGoodConnection(t *testing.T) {
	behindPoolers(t, func(t *testing.T, ctx context.Context, cluster *pgsplittest.Cluster) {
		db := open(t, cluster.ProxyDSN())
		db.SetMaxOpenConns(1)
		plain := pgsplit.ReadOnly(ctx)
		floor := pgsplit.ReadOnly(pgsplit.WithLSN(ctx, newFloor(t, ctx, cluster)))
		const pid = "select pg_backend_pid()::text"
		before := text(t, plain, db, pid)
		for _, read := range []context.Context{plain, floor} {
			for _, bad := range []string{"select 1/0", "syntax error", "select $1::int / 0", "commit; select 1/0"} {
				var args []any
				if bad == "select $1::int / 0" {
					args = append(args, 1)
				}
				err := scanOne(db.QueryContext(read, bad, args...))
				if pgErr := (*pgconn.PgError)(nil); !errors.As(err, &pgErr) {
					t.Errorf("%s: %v", bad, err)
				}
				noneInTransaction(t, ctx, cluster)
				if after := text(t, read, db, pid); after != before {
					t.Errorf("%s: another connection", bad)
				}
			}
		}
	})
}

func TestBehindAPoolerTheTransactionAroundAStatementEndsBeforeTheNextAndAtPutBack(t *testing.T) {
	behindPoolers(t, func(t *testing.T, ctx context.Context, cluster *pgsplittest.Cluster) {
		db := open(t, cluster.ProxyDSN())
		floor := pgsplit.ReadOnly(pgsplit.WithLSN(ctx, newFloor(t, ctx, cluster)))
		conn, err := db.Conn(ctx)
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		const when = "select now()::text"
		first := text(t, floor, conn, when)
		if second := text(t, floor, conn, when); second == first {
			t.Errorf("two statements in one transaction, of %s", first)
		}
		// The floor of each is proven anew: what happened in between is seen.
		later := pgsplit.ReadOnly(pgsplit.WithLSN(ctx, newFloor(t, ctx, cluster)))
		runSQL(t, ctx, cluster, "insert into ledger values (2)")
		if got := text(t, later, conn, "select count(*)::text from ledger"); got != "2" {
			t.Errorf("%s rows", got)
		}
		if err := conn.Close(); err != nil {
			t.Fatal(err)
		}
		noneInTransaction(t, ctx, cluster)

		rows, err := db.QueryContext(floor, "select n from generate_series(1, 100000) n")
		if err != nil {
			t.Fatal(err)
		}
		if !rows.Next() {
			t.Fatal(rows.Err())
		}
		if err := rows.Close(); err != nil {
			t.Fatal(err)
		}
		noneInTransaction(t, ctx, cluster)
	})
}

// The transaction around the last statement is still open when its connection is lost.
func TestBehindAPoolerAReplicaThatIsLostUnderAHeldConnectionIsNotTheCallersTrouble(t *testing.T) {
	for name, lose := range map[string]func(*pgsplittest.Proxy){
		"cut":    (*pgsplittest.Proxy).Cut,
		"silent": (*pgsplittest.Proxy).BlackHole,
	} {
		t.Run(name, func(t *testing.T) {
			behindPoolers(t, func(t *testing.T, ctx context.Context, cluster *pgsplittest.Cluster) {
				db := open(t, with(cluster.ProxyDSN(), "replica_timeout=500ms", "replica_retry_min=10ms", "replica_retry_max=50ms"))
				conn := hold(t, ctx, db)
				replica := cluster.Replicas[0].Proxy()
				defer replica.Restore()
				for _, opts := range [][]pgsplit.ReadOption{nil, {pgsplit.AfterLSN(newFloor(t, ctx, cluster))}} {
					replica.Restore()
					eventually(t, "the replica serves", func() bool {
						return text(t, pgsplit.ReadOnly(ctx), conn, inRecovery) == "true"
					})
					lose(replica)
					if got := text(t, pgsplit.ReadOnly(ctx, opts...), conn, inRecovery); got != "false" {
						t.Errorf("in recovery: %s", got)
					}
				}
			})
		})
	}
}

// What the driver asks a silent replica, to end the transaction around the last statement, is not waited for longer than a
// replica may take, and not by more than the deadline allows.
func TestBehindAPoolerNobodyWaitsForASilentReplicaToEndTheDriversTransaction(t *testing.T) {
	pinned := pgsplit.NewSession()
	pinned.Pin(time.Hour)
	reading := func(in func(context.Context) context.Context) func(context.Context, *sql.Conn) error {
		return func(ctx context.Context, conn *sql.Conn) error {
			_, err := conn.ExecContext(in(ctx), "select 1")
			return err
		}
	}
	next := map[string]func(context.Context, *sql.Conn) error{
		"a read of a pinned session": reading(func(ctx context.Context) context.Context {
			return pgsplit.ReadOnly(pgsplit.WithSession(ctx, pinned))
		}),
		"an unhinted statement": reading(func(ctx context.Context) context.Context { return ctx }),
		"a transaction": func(ctx context.Context, conn *sql.Conn) error {
			tx, err := conn.BeginTx(ctx, nil)
			if err != nil {
				return err
			}
			return tx.Rollback()
		},
		"the end of the connection": func(_ context.Context, conn *sql.Conn) error { return conn.Close() },
	}
	cluster := pgsplittest.Start(t)
	ctx := patient(t)
	for _, s := range cluster.Servers() {
		s.Proxy().EmulatePooler(pgsplittest.PoolerDropsParameter)
	}
	silent := cluster.Replicas[0].Proxy()
	for name, next := range next {
		t.Run(name, func(t *testing.T) {
			db := open(t, with(cluster.ProxyDSN(), "replica_timeout=100ms"))
			conn := hold(t, ctx, db)
			eventually(t, "the replica serves", func() bool { return text(t, pgsplit.ReadOnly(ctx), conn, inRecovery) == "true" })
			failures := func() uint64 { return connectorOf(t, db).Stats().Servers[1].Failures }
			before := failures()
			silent.BlackHole()
			defer silent.Restore()
			// Less than closing a connection may take.
			bounded, cancel := context.WithTimeout(ctx, 4*time.Second)
			defer cancel()
			if err := next(bounded, conn); err != nil {
				t.Error(err)
			}
			if failures() == before {
				t.Error("the silence was not held against the replica, so that the next caller meets it too")
			}
		})
	}
}

func TestBehindAPoolerACallerWhoLeavesDoesNotTakeTheHeldConnectionAlong(t *testing.T) {
	behindPoolers(t, func(t *testing.T, ctx context.Context, cluster *pgsplittest.Cluster) {
		silent := cluster.Replicas[0].Proxy()
		for name, next := range map[string]context.Context{"ReadOnly": pgsplit.ReadOnly(ctx), "unhinted": ctx} {
			t.Run(name, func(t *testing.T) {
				conn := hold(t, ctx, open(t, cluster.ProxyDSN()))
				text(t, pgsplit.ReadOnly(ctx), conn, inRecovery)
				silent.BlackHole()
				leaving, leave := context.WithCancel(pgsplit.ReadOnly(ctx))
				asked := silent.RoundTrips()
				go func() {
					defer leave()
					within(time.Minute, func() bool { return silent.RoundTrips() > asked })
				}()
				_, err := conn.ExecContext(leaving, "select 1")
				silent.Restore()
				if !errors.Is(err, context.Canceled) {
					t.Errorf("the caller who left got %v", err)
				}
				if _, err := conn.ExecContext(next, "select 1"); err != nil {
					t.Error(err)
				}
			})
		}
	})
}

func TestBehindAPoolerTheDriverKeepsNoStatementOfItsOwn(t *testing.T) {
	behindPoolers(t, func(t *testing.T, ctx context.Context, cluster *pgsplittest.Cluster) {
		const named = "select count(*)::text from pg_prepared_statements"
		// pgx is told to keep none either, as everybody behind such a pooler does.
		db := open(t, strings.ReplaceAll(cluster.ProxyDSN(), "sslmode=disable", "sslmode=disable&default_query_exec_mode=exec"))
		db.SetMaxOpenConns(1)
		for range 3 {
			floor := pgsplit.ReadOnly(pgsplit.WithLSN(ctx, newFloor(t, ctx, cluster)), pgsplit.ReplicaOnly())
			if got := text(t, floor, db, named); got != "0" {
				t.Errorf("%s prepared statements on the replica", got)
			}
			if err := inTx(floor, db, nil, "select 1"); err != nil {
				t.Error(err)
			}
		}
		stmt := prepare(t, ctx, db, "select $1::int")
		if _, err := stmt.ExecContext(ctx, 1); err != nil {
			t.Error(err)
		}
		commitLSN(t, ctx, db)
		if got := text(t, ctx, db, named); got != "0" {
			t.Errorf("%s prepared statements on the primary", got)
		}
	})
}

// A connection that was good a moment ago proves nothing about the server, behind a pooler least of all: what the driver
// itself has to ask there must not take longer than replica_timeout.
func TestAReplicaThatStopsAnsweringCostsAReadItsTimeoutThoughItsConnectionIsWarm(t *testing.T) {
	for name, mode := range map[string]pgsplittest.PoolerMode{
		"direct": pgsplittest.PoolerOff, "behind a pooler": pgsplittest.PoolerDropsParameter,
	} {
		t.Run(name, func(t *testing.T) {
			cluster := pgsplittest.Start(t)
			ctx := patient(t)
			proxy := cluster.Replicas[0].Proxy()
			proxy.EmulatePooler(mode)
			db := open(t, cluster.Primary.URI()+"&replica_timeout=200ms "+cluster.Replicas[0].ProxyURI())
			connector, err := pgsplit.FromDB(db)
			if err != nil {
				t.Fatal(err)
			}
			eventually(t, "the replica answers in time", func() bool { return text(t, pgsplit.ReadOnly(ctx), db, inRecovery) == "true" })
			floor := pgsplit.ReadOnly(pgsplit.WithLSN(ctx, newFloor(t, ctx, cluster)))
			before := connector.Stats().Servers[1].Failures
			proxy.BlackHole()
			defer proxy.Restore()
			returns(t, "a read with a floor", func() {
				for range 3 {
					if got := text(t, floor, db, inRecovery); got != "false" {
						t.Errorf("in recovery %s", got)
					}
				}
			})
			if got := connector.Stats().Servers[1]; got.State == "healthy" || got.Failures != before+1 {
				t.Errorf("%s after %d failures: later reads try it again", got.State, got.Failures-before)
			}
			eventually(t, "the replica is down", func() bool { return connector.Stats().Servers[1].State == "down" })
		})
	}
}
