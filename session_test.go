package pgsplit_test

import (
	"context"
	"database/sql"
	"strconv"
	"testing"

	"github.com/pgsplit/pgsplit"
	"github.com/pgsplit/pgsplit/pgsplittest"
)

// sessionCluster is a cluster with a table, and a sql.DB on it.
func sessionCluster(t *testing.T, replicas int, parameters ...string) (*pgsplittest.Cluster, *sql.DB, context.Context) {
	t.Helper()
	cluster := pgsplittest.Start(t, pgsplittest.Replicas(replicas))
	ctx := patient(t)
	dsn := cluster.DSN()
	for _, p := range parameters {
		dsn = with(dsn, p)
	}
	db := open(t, dsn)
	exec(t, ctx, db, "create table notes (id int primary key, body text)")
	if err := cluster.CatchUp(ctx); err != nil {
		t.Fatal(err)
	}
	return cluster, db, ctx
}

// pauseAll stops the replay of all replicas.
func pauseAll(t *testing.T, ctx context.Context, cluster *pgsplittest.Cluster) {
	t.Helper()
	for _, replica := range cluster.Replicas {
		if err := replica.PauseReplay(ctx); err != nil {
			t.Fatal(err)
		}
	}
}

const whatAndWhere = "select count(*)::text || ' ' || pg_is_in_recovery()::text from notes"

func TestASessionSeesItsOwnWritesWhileReplicasLag(t *testing.T) {
	cluster, db, ctx := sessionCluster(t, 2)
	writes := map[string]func(ctx context.Context, id int){
		"autocommit": func(ctx context.Context, id int) { exec(t, ctx, db, "insert into notes values ($1)", id) },
		"returning": func(ctx context.Context, id int) {
			text(t, ctx, db, "insert into notes values ($1) returning id::text", id)
		},
		"transaction": func(ctx context.Context, id int) {
			tx, err := db.BeginTx(ctx, nil)
			if err != nil {
				t.Fatal(err)
			}
			exec(t, ctx, tx, "insert into notes values ($1)", id)
			if err := tx.Commit(); err != nil {
				t.Fatal(err)
			}
		},
		"a session that only a statement of the transaction has": func(ctx context.Context, id int) {
			bare := patient(t)
			tx, err := db.BeginTx(bare, nil)
			if err != nil {
				t.Fatal(err)
			}
			exec(t, ctx, tx, "insert into notes values ($1)", id)
			if err := tx.Commit(); err != nil {
				t.Fatal(err)
			}
		},
	}
	rows := 0
	for name, write := range writes {
		t.Run(name, func(t *testing.T) {
			pauseAll(t, ctx, cluster)
			session := pgsplit.NewSession()
			inSession := pgsplit.WithSession(ctx, session)
			read := pgsplit.ReadOnly(inSession)
			if got := text(t, read, db, whatAndWhere); got != strconv.Itoa(rows)+" true" {
				t.Errorf("before the write: %s", got)
			}
			rows++
			write(inSession, rows)
			if got := text(t, read, db, whatAndWhere); got != strconv.Itoa(rows)+" false" {
				t.Errorf("while the replicas lag: %s", got)
			}
			token, err := session.Token(ctx)
			if err != nil {
				t.Fatal(err)
			}
			elsewhere := pgsplit.ReadOnly(pgsplit.WithSession(ctx, pgsplit.SessionFromToken(token)))
			if got := text(t, elsewhere, db, whatAndWhere); got != strconv.Itoa(rows)+" false" {
				t.Errorf("with the token while they lag: %s", got)
			}
			for _, replica := range cluster.Replicas {
				if err := replica.ResumeReplay(ctx); err != nil {
					t.Fatal(err)
				}
			}
			if err := cluster.CatchUp(ctx); err != nil {
				t.Fatal(err)
			}
			for who, ctx := range map[string]context.Context{"session": read, "token": elsewhere} {
				if got := text(t, ctx, db, whatAndWhere); got != strconv.Itoa(rows)+" true" {
					t.Errorf("%s, once they caught up: %s", who, got)
				}
			}
		})
	}
}

func TestATransactionThatWroteNothingRaisesNoFloor(t *testing.T) {
	cluster, db, ctx := sessionCluster(t, 1)
	pauseAll(t, ctx, cluster)
	exec(t, ctx, db, "insert into notes values (1)")
	session := pgsplit.NewSession()
	inSession := pgsplit.WithSession(ctx, session)
	for _, end := range []func(*sql.Tx) error{(*sql.Tx).Commit, (*sql.Tx).Rollback} {
		tx, err := db.BeginTx(inSession, nil)
		if err != nil {
			t.Fatal(err)
		}
		text(t, inSession, tx, "select count(*)::text from notes")
		if err := end(tx); err != nil {
			t.Fatal(err)
		}
	}
	tx, err := db.BeginTx(inSession, nil)
	if err != nil {
		t.Fatal(err)
	}
	exec(t, inSession, tx, "insert into notes values (2)")
	if err := tx.Rollback(); err != nil {
		t.Fatal(err)
	}
	// What they read on the primary stays seen.
	if got := text(t, pgsplit.ReadOnly(inSession), db, whatAndWhere); got != "1 false" {
		t.Error(got)
	}
	token, err := session.Token(ctx)
	if err != nil || len(token.Floors) != 1 || token.Floors[0].LSN != 0 {
		t.Errorf("%+v %v", token, err)
	}
}
