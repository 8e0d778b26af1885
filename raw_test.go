package pgsplit_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"runtime"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/pgsplit/pgsplit"
	"github.com/pgsplit/pgsplit/pgsplittest"
)

func TestRawGivesThePrimarysConnectionForWhatDatabaseSQLCannotDo(t *testing.T) {
	cluster := shareCluster(t, 1)
	ctx := patient(t)
	runSQL(t, ctx, cluster, ledger)
	db := open(t, cluster.DSN())
	conn := hold(t, ctx, db)
	for name, f := range map[string]func(*pgx.Conn) error{
		"COPY": func(c *pgx.Conn) error {
			rows := pgx.CopyFromRows([][]any{{10, 1}, {11, 1}, {12, 1}})
			n, err := c.CopyFrom(ctx, pgx.Identifier{"ledger"}, []string{"id", "amount"}, rows)
			if n != 3 {
				t.Errorf("%d rows copied", n)
			}
			return err
		},
		"a batch": func(c *pgx.Conn) error {
			var b pgx.Batch
			var sum int
			b.Queue("insert into ledger values (20, 20)")
			b.Queue("select sum(amount) from ledger where id = 20").QueryRow(func(row pgx.Row) error { return row.Scan(&sum) })
			if err := c.SendBatch(ctx, &b).Close(); err != nil {
				return err
			}
			if sum != 20 {
				t.Errorf("the batch read %d", sum)
			}
			return nil
		},
		"LISTEN": func(c *pgx.Conn) error {
			if _, err := c.Exec(ctx, "listen news"); err != nil {
				return err
			}
			exec(t, ctx, db, "select pg_notify('news', 'hello')")
			n, err := c.WaitForNotification(ctx)
			if err != nil {
				return err
			}
			if n.Payload != "hello" {
				t.Errorf("payload %q", n.Payload)
			}
			_, err = c.Exec(ctx, "unlisten news")
			return err
		},
		"a large object": func(c *pgx.Conn) error {
			return pgx.BeginFunc(ctx, c, func(tx pgx.Tx) error {
				objects := tx.LargeObjects()
				id, err := objects.Create(ctx, 0)
				if err != nil {
					return err
				}
				object, err := objects.Open(ctx, id, pgx.LargeObjectModeRead|pgx.LargeObjectModeWrite)
				if err != nil {
					return err
				}
				if _, err := object.Write([]byte("large")); err != nil {
					return err
				}
				if _, err := object.Seek(0, io.SeekStart); err != nil {
					return err
				}
				content, err := io.ReadAll(object)
				if string(content) != "large" {
					t.Errorf("the object is %q", content)
				}
				return err
			})
		},
	} {
		if err := pgsplit.Raw(ctx, conn, f); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
	if got := text(t, ctx, conn, "select count(*)::text from ledger"); got != "5" {
		t.Errorf("%s rows", got)
	}
}

func TestRawStaysOnTheHeldConnectionsSession(t *testing.T) {
	cluster := shareCluster(t, 1)
	ctx := patient(t)
	conn := hold(t, ctx, open(t, cluster.DSN()))
	exec(t, ctx, conn, "create temp table mine (id int)")
	err := pgsplit.Raw(ctx, conn, func(c *pgx.Conn) error {
		_, err := c.CopyFrom(ctx, pgx.Identifier{"mine"}, []string{"id"}, pgx.CopyFromRows([][]any{{1}, {2}}))
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	if got := text(t, ctx, conn, "select count(*)::text from mine"); got != "2" {
		t.Errorf("%s rows", got)
	}
}

func TestRawUnderReadOnlyGivesAConnectionThatRefusesWrites(t *testing.T) {
	cluster := shareCluster(t, 1)
	ctx := patient(t)
	runSQL(t, ctx, cluster, ledger)
	read := pgsplit.ReadOnly(ctx)
	for name, dsn := range map[string]string{"replica1": cluster.DSN(), "primary": cluster.Primary.URI()} {
		conn := hold(t, ctx, open(t, dsn))
		var server string
		if err := pgsplit.Raw(read, conn, func(c *pgx.Conn) error {
			return c.QueryRow(ctx, clusterName).Scan(&server)
		}); err != nil || server != name {
			t.Errorf("on %s %v, want %s", server, err, name)
		}
		for _, statement := range []string{"insert into ledger values (2)", "select nextval('counter')", "create table another (id int)"} {
			refusedWrite(t, pgsplit.Raw(read, conn, func(c *pgx.Conn) error {
				_, err := c.Exec(ctx, statement)
				return err
			}))
		}
	}
	nothingWritten(t, ctx, cluster.Primary)
}

func TestRawUnderReadOnlyWithAFloorGivesAConnectionThatHasIt(t *testing.T) {
	cluster := pgsplittest.Start(t)
	ctx := patient(t)
	db := open(t, cluster.DSN())
	where := func(ctx context.Context) (server string) {
		t.Helper()
		conn := hold(t, ctx, db)
		defer conn.Close()
		if err := pgsplit.Raw(ctx, conn, func(c *pgx.Conn) error {
			return c.QueryRow(ctx, clusterName).Scan(&server)
		}); err != nil {
			t.Error(err)
		}
		return server
	}
	if got := where(pgsplit.ReadOnly(pgsplit.WithLSN(ctx, newFloor(t, ctx, cluster)))); got != "replica1" {
		t.Errorf("the replica has the floor: on %s", got)
	}
	if got := where(pgsplit.ReadOnly(pgsplit.WithLSN(ctx, staleFloor(t, ctx, cluster, db)))); got != "primary" {
		t.Errorf("no replica has the floor: on %s", got)
	}
}

var errOfTheCaller = errors.New("the caller's own")

func TestRawReturnsTheErrorOfItsFunctionAsItIs(t *testing.T) {
	cluster := shareCluster(t, 0)
	ctx := patient(t)
	conn := hold(t, ctx, open(t, cluster.DSN()))
	if err := pgsplit.Raw(ctx, conn, func(*pgx.Conn) error { return errOfTheCaller }); err != errOfTheCaller { // itself
		t.Errorf("%v", err)
	}
	if err := pgsplit.Raw(ctx, conn, func(*pgx.Conn) error { return driverTrouble }); err != driverTrouble { // itself
		t.Errorf("%v", err)
	}
	if err := conn.PingContext(ctx); err != nil {
		t.Errorf("the connection after it: %v", err)
	}
}

var driverTrouble = &pgconn.PgError{Code: "57014", Message: "canceled"}

// A function that does not return: by a panic, or as t.FailNow ends a test.
func TestRawSurvivesAFunctionThatDoesNotReturn(t *testing.T) {
	cluster := shareCluster(t, 1)
	ctx := patient(t)
	db := open(t, cluster.DSN())
	db.SetMaxOpenConns(1)
	for name, leave := range map[string]func(){
		"panic":                func() { panic(errOfTheCaller) },
		"runtime.Goexit":       runtime.Goexit,
		"panic of a nil error": func() { panic(error(nil)) }, // what a caller may do
	} {
		for where, ctx := range map[string]context.Context{"primary": ctx, "replica1": pgsplit.ReadOnly(ctx)} {
			t.Run(name+" on "+where, func(t *testing.T) {
				conn := hold(t, ctx, db)
				var after any
				left := make(chan bool)
				go func() {
					returned := false
					defer func() {
						after = recover()
						left <- returned
					}()
					_ = pgsplit.Raw(ctx, conn, func(c *pgx.Conn) error {
						if _, err := c.Exec(ctx, "begin"); err != nil {
							t.Error(err)
						}
						leave()
						return nil
					})
					returned = true
				}()
				if <-left {
					t.Error("Raw returned")
				}
				if name == "panic" && after != any(errOfTheCaller) {
					t.Errorf("the panic came out as %v", after)
				}
				returns(t, "conn.Close", func() { _ = conn.Close() })
				returns(t, "the next statement", func() {
					if got := text(t, ctx, db, clusterName); got != where {
						t.Errorf("the next statement ran on %s", got)
					}
				})
				if n := db.Stats().InUse; n != 0 {
					t.Errorf("%d connections leaked", n)
				}
			})
		}
	}
	for _, s := range cluster.Servers() {
		until(t, "nothing is left in a transaction on "+s.Name(), func() bool {
			return onServer(t, ctx, s, "select count(*)::text from pg_stat_activity where state like 'idle in transaction%'") == "0"
		})
	}
}

func TestAConnectionThatRawLeavesInUseIsNotPooled(t *testing.T) {
	cluster := shareCluster(t, 1)
	ctx := patient(t)
	db := open(t, cluster.DSN())
	db.SetMaxOpenConns(1)
	for name, leave := range map[string]func(c *pgx.Conn) error{
		"in a transaction": func(c *pgx.Conn) error {
			_, err := c.Exec(ctx, "begin")
			return err
		},
		"in a failed transaction": func(c *pgx.Conn) error {
			_, err := c.Exec(ctx, "begin; select 1/0")
			if err == nil {
				return errors.New("1/0")
			}
			return nil
		},
		"busy": func(c *pgx.Conn) error {
			_, err := c.Query(ctx, "select n from generate_series(1, 1000000) n")
			return err
		},
		"closed": func(c *pgx.Conn) error { return c.Close(ctx) },
	} {
		for where, ctx := range map[string]context.Context{"primary": ctx, "replica1": pgsplit.ReadOnly(ctx)} {
			conn := hold(t, ctx, db)
			var pid uint32
			if err := pgsplit.Raw(ctx, conn, func(c *pgx.Conn) error {
				pid = c.PgConn().PID()
				return leave(c)
			}); err != nil {
				t.Errorf("%s, %s: %v", where, name, err)
			}
			if err := conn.Close(); err != nil {
				t.Errorf("%s, %s: %v", where, name, err)
			}
			if got := text(t, ctx, db, "select pg_backend_pid()::text"); got == fmt.Sprint(pid) {
				t.Errorf("%s: the next caller got the connection that was left %s", where, name)
			}
		}
	}
}

func TestATransactionThatRawBeginsBelongsToTheHeldConnection(t *testing.T) {
	cluster := shareCluster(t, 1)
	ctx := patient(t)
	runSQL(t, ctx, cluster, ledger)
	conn := hold(t, ctx, open(t, cluster.DSN()))
	command := func(text string) {
		t.Helper()
		if err := pgsplit.Raw(ctx, conn, func(c *pgx.Conn) error {
			_, err := c.Exec(ctx, text)
			return err
		}); err != nil {
			t.Fatal(err)
		}
	}
	command("begin")
	exec(t, ctx, conn, "insert into ledger values (2)")
	if got := text(t, pgsplit.ReadOnly(ctx), conn, "select count(*)::text from ledger"); got != "2" {
		t.Errorf("inside the transaction %s rows", got)
	}
	command("rollback")
	if got := text(t, ctx, conn, "select count(*)::text from ledger"); got != "1" {
		t.Errorf("after it was rolled back %s rows", got)
	}
}
