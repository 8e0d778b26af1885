package pgsplit_test

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgconn"

	"github.com/pgsplit/pgsplit"
	"github.com/pgsplit/pgsplit/pgsplittest"
)

// outcome is what becomes of a statement: the servers that may answer it, or the error.
type outcome struct {
	servers []string
	fails   error  // errors.Is
	code    string // or a *pgconn.PgError with this SQLSTATE, and none of the sentinels
}

func (o outcome) check(ctx context.Context, db *sql.DB) error {
	var server string
	err := db.QueryRowContext(ctx, whichServer).Scan(&server)
	switch {
	case o.fails != nil:
		if !errors.Is(err, o.fails) {
			return fmt.Errorf("%q and %v, want %v", server, err, o.fails)
		}
	case o.code != "":
		var pgErr *pgconn.PgError
		if !errors.As(err, &pgErr) || !strings.Contains(err.Error(), o.code) || pgsplit.IsNoPrimary(err) || endOfContext(err) {
			return fmt.Errorf("%q and %v, want SQLSTATE %s", server, err, o.code)
		}
	case err != nil || !slices.Contains(o.servers, server):
		return fmt.Errorf("%q and %v, want one of %q", server, err, o.servers)
	}
	return nil
}

// outcomes are what an unhinted statement, a ReadOnly read and a ReplicaOnly one come to, and an unhinted statement where
// replicas stand in for the primary.
func outcomes(primary condition, replicas ...condition) (unhinted, read, only, standIn outcome) {
	var alive []string
	for i, c := range replicas {
		if c == up {
			alive = append(alive, fmt.Sprintf("replica%d", i+1))
		}
	}
	switch primary {
	case up:
		unhinted = outcome{servers: []string{"primary"}}
	case full: // its own error, as without this driver
		unhinted = outcome{code: "53300"}
	default:
		unhinted = outcome{fails: pgsplit.ErrNoPrimary}
	}
	read, only, standIn = unhinted, outcome{fails: pgsplit.ErrNoReplica}, unhinted
	if len(alive) > 0 {
		read, only = outcome{servers: alive}, outcome{servers: alive}
		if primary == dead || primary == starting {
			standIn = read
		}
	}
	return unhinted, read, only, standIn
}

// stateOf is what Stats says of a server that was tried.
var stateOf = map[condition]string{up: "healthy", dead: "down", starting: "down", full: "refusing"}

func TestStartupInEveryCombinationOfServersUpDownStartingAndFull(t *testing.T) {
	cluster := pgsplittest.Start(t, pgsplittest.Replicas(2))
	ctx := patient(t)
	each := []condition{up, dead, starting, full}
	var wg sync.WaitGroup
	turns := make(chan struct{}, 4)
	for _, primary := range each {
		for _, one := range each {
			for _, two := range each {
				wg.Go(func() {
					turns <- struct{}{}
					defer func() { <-turns }()
					startsIn(t, ctx, cluster, primary, one, two)
				})
			}
		}
	}
	wg.Wait()
}

func startsIn(t *testing.T, ctx context.Context, cluster *pgsplittest.Cluster, is ...condition) {
	dsn, fronts := frontsOf(t, cluster, is...)
	dsn = with(dsn, "replica_timeout=30s", "replica_retry_min=20ms", "replica_retry_max=100ms")
	db, standIn := open(t, dsn), open(t, with(dsn, "replica_on_primary_down=read"))
	defer db.Close()
	defer standIn.Close()
	only := pgsplit.ReadOnly(ctx, pgsplit.ReplicaOnly())
	unhinted, read, onlyReplicas, stoodIn := outcomes(is[0], is[1:]...)
	for range 2 { // what is known of the servers by then changes nothing
		for what, err := range map[string]error{
			"unhinted":                      unhinted.check(ctx, db),
			"Primary":                       unhinted.check(pgsplit.Primary(ctx), standIn),
			"ReadOnly":                      read.check(pgsplit.ReadOnly(ctx), db),
			"ReadOnly with stand-ins":       read.check(pgsplit.ReadOnly(ctx), standIn),
			"ReplicaOnly":                   onlyReplicas.check(only, db),
			"unhinted where a replica will": stoodIn.check(ctx, standIn),
		} {
			if err != nil {
				t.Errorf("%v, %s: %v", is, what, err)
			}
		}
	}
	for i, s := range connectorOf(t, db).Stats().Servers {
		// With one replica up the other one may not have been tried.
		if s.State != stateOf[is[i]] && s.Failures > 0 {
			t.Errorf("%v: %s %d is called %s", is, s.Role, i, s.State)
		}
	}
	for _, f := range fronts {
		f.is(up)
	}
	for mode, db := range map[string]*sql.DB{"error": db, "read": standIn} {
		used := map[string]bool{}
		if !within(time.Minute, func() bool {
			for _, ctx := range []context.Context{ctx, pgsplit.ReadOnly(ctx), only} {
				var server string
				if db.QueryRowContext(ctx, whichServer).Scan(&server) == nil {
					used[server] = true
				}
			}
			return len(used) == 3
		}) {
			t.Errorf("%v, mode %s: when all were up only %v were used", is, mode, used)
			continue
		}
		eventually(t, "all are called healthy", func() bool {
			for _, s := range connectorOf(t, db).Stats().Servers {
				if s.State != "healthy" {
					return false
				}
			}
			return true
		})
		if err := (outcome{servers: []string{"primary"}}).check(ctx, db); err != nil {
			t.Errorf("%v, mode %s: unhinted when all were up: %v", is, mode, err)
		}
		if err := (outcome{servers: []string{"replica1", "replica2"}}).check(pgsplit.ReadOnly(ctx), db); err != nil {
			t.Errorf("%v, mode %s: ReadOnly when all were up: %v", is, mode, err)
		}
	}
}

// The fronts above say what PostgreSQL says.
func TestAReplicaThatRefusesReadersForNowIsDownAndUsedOnceItTakesThem(t *testing.T) {
	cluster := pgsplittest.Start(t, pgsplittest.Replicas(1), pgsplittest.ReplicaSetting("hot_standby", "off"))
	ctx := patient(t)
	db := open(t, patiently(cluster))
	for range 3 {
		want(t, pgsplit.ReadOnly(ctx), db, inRecovery, "false")
	}
	failsWith(t, pgsplit.ReadOnly(ctx, pgsplit.ReplicaOnly()), db, pgsplit.ErrNoReplica)
	var pgErr *pgconn.PgError
	if s := replicaStats(t, db); s.State != "down" || !errors.As(s.Cause, &pgErr) || pgErr.Code != "57P03" {
		t.Errorf("%s because of %v", s.State, s.Cause)
	}
	acceptReaders(t, cluster.Replicas[0])
	eventually(t, "the replica is used", func() bool { return text(t, pgsplit.ReadOnly(ctx), db, inRecovery) == "true" })
	if s := replicaStats(t, db); s.State != "healthy" || s.Cause != nil {
		t.Errorf("%s because of %v", s.State, s.Cause)
	}
}

// acceptReaders makes a replica that was started with hot_standby=off take readers.
func acceptReaders(t testing.TB, s *pgsplittest.Server) {
	t.Helper()
	stop(t, s)
	conf, err := os.OpenFile(filepath.Join(s.DataDir(), "postgresql.conf"), os.O_APPEND|os.O_WRONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	_, err = conf.WriteString("hot_standby = on\n")
	if err := errors.Join(err, conf.Close()); err != nil {
		t.Fatal(err)
	}
	start(t, s)
}

// All replicas behind, then all down: the primary answers each read, that is counted, and nothing about the replicas changes
// until they are back.
func TestWhileNoReplicaCanServeThePrimaryDoesAndNoStateFlaps(t *testing.T) {
	const reads = 200
	cluster := pgsplittest.Start(t, pgsplittest.Replicas(2))
	ctx := patient(t)
	db := open(t, patiently(cluster))
	c := connectorOf(t, db)
	warm(t, ctx, db)
	pause(t, cluster.Replicas...)
	exec(t, ctx, db, "create table t (id int)")
	behind := pgsplit.ReadOnly(pgsplit.WithLSN(ctx, commitLSN(t, ctx, db)))
	serves := func(read context.Context, reason string) {
		t.Helper()
		before := c.Stats()
		for range reads {
			want(t, read, db, inRecovery, "false")
		}
		after := c.Stats()
		if n := after.Reasons[reason] - before.Reasons[reason]; n != reads {
			t.Errorf("%d of %d reads have the reason %s", n, reads, reason)
		}
		for i, s := range after.Servers {
			if b := before.Servers[i]; s.State != b.State || !s.Since.Equal(b.Since) {
				t.Errorf("%s: %s since %v became %s since %v", s.Name, b.State, b.Since, s.State, s.Since)
			}
		}
	}
	serves(behind, "replicas_behind")
	stop(t, cluster.Replicas...)
	eventually(t, "all are down", func() bool {
		want(t, pgsplit.ReadOnly(ctx), db, inRecovery, "false")
		s := c.Stats().Servers
		return s[1].State == "down" && s[2].State == "down"
	})
	serves(pgsplit.ReadOnly(ctx), "replicas_down")
	start(t, cluster.Replicas...)
	eventually(t, "replicas serve again", func() bool { return text(t, pgsplit.ReadOnly(ctx), db, inRecovery) == "true" })
}
