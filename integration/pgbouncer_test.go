//go:build linux

package integration

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"os/user"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/pgsplit/pgsplit"
)

// findPgBouncer returns the pgbouncer to test with, or "" where there is none and PGSPLIT_TEST_PGBOUNCER does not ask
// for one.
func findPgBouncer(t *testing.T) string {
	t.Helper()
	path, err := exec.LookPath("pgbouncer")
	for _, dir := range []string{"/usr/sbin", "/usr/local/sbin"} {
		if err != nil {
			path, err = exec.LookPath(filepath.Join(dir, "pgbouncer"))
		}
	}
	switch {
	case err == nil:
		return path
	case os.Getenv("PGSPLIT_TEST_PGBOUNCER") == "require":
		t.Fatal("PGSPLIT_TEST_PGBOUNCER=require, and there is no pgbouncer in $PATH: `apt-get install pgbouncer`")
	}
	t.Log("DID NOT RUN: no pgbouncer in $PATH (PGSPLIT_TEST_PGBOUNCER=require makes this a failure)")
	return ""
}

// pgBouncer starts a PgBouncer in transaction mode in front of the servers at uris, which share credentials; with
// several of them its server connections are dealt to them in turn. It returns the URI to connect to, and ends the
// process when the test ends.
func pgBouncer(t *testing.T, binary string, settings string, uris ...string) string {
	t.Helper()
	config, err := pgx.ParseConfig(uris[0])
	must(t, err)
	backend := net.JoinHostPort(config.Host, strconv.Itoa(int(config.Port)))
	if len(uris) > 1 {
		backend = dealer(t, uris)
	}
	host, port, err := net.SplitHostPort(backend)
	must(t, err)

	own, err := bouncerUser()
	must(t, err)
	dir, err := os.MkdirTemp("", "pgbouncer-")
	must(t, err)
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	password := ""
	if config.Password != "" {
		password = " password=" + config.Password // PgBouncer takes no empty one
	}
	listen := freePort(t)
	ini := filepath.Join(dir, "pgbouncer.ini")
	must(t, os.WriteFile(ini, fmt.Appendf(nil, `[databases]
%s = host=%s port=%s user=%s%s
[pgbouncer]
listen_addr = 127.0.0.1
listen_port = %d
unix_socket_dir =
auth_type = any
pool_mode = transaction
default_pool_size = 4
server_round_robin = 1
%s
`, config.Database, host, port, config.User, password, listen, settings), 0o644))

	cmd := exec.Command(binary, ini)
	output := &safeBuffer{}
	cmd.Stdout, cmd.Stderr = output, output
	// It does not outlive a test process that crashes.
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
	if own != nil {
		must(t, os.Chown(dir, int(own.Uid), int(own.Gid)))
		cmd.SysProcAttr.Credential = own
	}
	started, ended := make(chan error, 1), make(chan struct{})
	go func() {
		defer close(ended)
		// The kernel means the thread that started the process by its parent.
		runtime.LockOSThread()
		err := cmd.Start()
		started <- err
		if err == nil {
			_ = cmd.Wait()
		}
	}()
	must(t, <-started)
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		<-ended
	})

	uri := fmt.Sprintf("postgres://%s@127.0.0.1:%d/%s?sslmode=disable&default_query_exec_mode=exec", config.User, listen, config.Database)
	deadline := time.After(30 * time.Second)
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	for {
		conn, err := net.Dial("tcp", net.JoinHostPort("127.0.0.1", strconv.Itoa(listen)))
		if err == nil {
			_ = conn.Close()
			return uri
		}
		select {
		case <-tick.C:
		case <-ended:
			t.Fatalf("pgbouncer ended:\n%s", output)
		case <-deadline:
			t.Fatalf("pgbouncer does not listen after 30 s: %v\n%s", err, output)
		}
	}
}

// bouncerUser is who runs it when this process is root, as whom it refuses to run.
func bouncerUser() (*syscall.Credential, error) {
	if os.Geteuid() != 0 {
		return nil, nil
	}
	for _, name := range []string{"postgres", "nobody"} {
		u, err := user.Lookup(name)
		if err != nil {
			continue
		}
		uid, err := strconv.ParseUint(u.Uid, 10, 32)
		if err != nil {
			return nil, err
		}
		gid, err := strconv.ParseUint(u.Gid, 10, 32)
		if err != nil {
			return nil, err
		}
		return &syscall.Credential{Uid: uint32(uid), Gid: uint32(gid)}, nil
	}
	return nil, errors.New("there is no user postgres or nobody to run pgbouncer")
}

func freePort(t *testing.T) int {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	must(t, err)
	defer l.Close()
	return l.Addr().(*net.TCPAddr).Port
}

// safeBuffer takes what a process prints.
type safeBuffer struct {
	mu   sync.Mutex
	text strings.Builder // guarded by mu
}

func (b *safeBuffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.text.Write(p)
}

func (b *safeBuffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.text.String()
}

// dealer listens on an address whose connections go to the servers in turn, as of a load-balanced service.
func dealer(t *testing.T, uris []string) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	must(t, err)
	var open sync.WaitGroup
	t.Cleanup(func() {
		_ = l.Close()
		open.Wait()
	})
	open.Go(func() {
		for n := 0; ; n++ {
			client, err := l.Accept()
			if err != nil {
				return
			}
			config, err := pgx.ParseConfig(uris[n%len(uris)])
			if err != nil {
				t.Error(err)
				return
			}
			server, err := net.Dial("tcp", net.JoinHostPort(config.Host, strconv.Itoa(int(config.Port))))
			if err != nil {
				_ = client.Close()
				continue
			}
			for _, way := range [][2]net.Conn{{client, server}, {server, client}} {
				open.Go(func() {
					_, _ = io.Copy(way[0], way[1])
					_ = client.Close()
					_ = server.Close()
				})
			}
		}
	})
	return l.Addr().String()
}

// What PgBouncer does with the read-only parameter: refuse it, as it does by default before it knows it, or drop it.
var bouncerSettings = map[string]string{
	"by default":                     "",
	"with ignore_startup_parameters": "ignore_startup_parameters = default_transaction_read_only",
}

// behindPgBouncer runs a test on a primary and two replicas; the replicas are one address, behind which a transaction
// may reach either.
func behindPgBouncer(t *testing.T, test func(t *testing.T, ctx context.Context, c cluster, db *sql.DB)) {
	binary := findPgBouncer(t)
	if binary == "" {
		return
	}
	for name, settings := range bouncerSettings {
		t.Run(name, func(t *testing.T) {
			ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
			t.Cleanup(cancel)
			c := startCluster(t, 2)
			mustExec(t, ctx, c.PrimaryURI(), "create table note (body text); insert into note values ('first')")
			must(t, c.CatchUp(ctx, 0))
			must(t, c.CatchUp(ctx, 1))
			primary := pgBouncer(t, binary, settings, c.PrimaryURI())
			replicas := pgBouncer(t, binary, settings, c.ReplicaURI(0), c.ReplicaURI(1))
			db, err := sql.Open("pgsplit", primary+" "+replicas)
			must(t, err)
			t.Cleanup(func() { _ = db.Close() })
			test(t, ctx, c, db)
		})
	}
}

func queryText(t *testing.T, ctx context.Context, db *sql.DB, query string) (value string) {
	t.Helper()
	if err := db.QueryRowContext(ctx, query).Scan(&value); err != nil {
		t.Fatalf("%s: %v", query, err)
	}
	return value
}

func TestBehindPgBouncerAWriteUnderReadOnlyIsRefused(t *testing.T) {
	behindPgBouncer(t, func(t *testing.T, ctx context.Context, c cluster, db *sql.DB) {
		read := pgsplit.ReadOnly(ctx)
		refused := func(what string, err error) {
			t.Helper()
			var pgErr *pgconn.PgError
			if !errors.Is(err, pgsplit.ErrReadOnly) || !errors.As(err, &pgErr) || pgErr.Code != "25006" {
				t.Errorf("%s: %v", what, err)
			}
		}
		tryAll := func(where string) {
			t.Helper()
			if got := queryText(t, read, db, "select pg_is_in_recovery()::text"); got != where {
				t.Fatalf("in recovery %s, this is about %s", got, where)
			}
			_, err := db.ExecContext(read, "insert into note values ('refused')")
			refused("Exec", err)
			var body string
			refused("Query", db.QueryRowContext(read, "insert into note values ($1) returning body", "refused").Scan(&body))
			stmt, err := db.PrepareContext(read, "insert into note values ($1)")
			must(t, err)
			defer stmt.Close()
			_, err = stmt.ExecContext(read, "refused")
			refused("Stmt", err)
			tx, err := db.BeginTx(read, nil)
			must(t, err)
			defer tx.Rollback()
			_, err = tx.ExecContext(read, "insert into note values ('refused')")
			refused("Tx", err)
		}
		tryAll("true")
		must(t, c.StopReplica(ctx, 0))
		must(t, c.StopReplica(ctx, 1))
		// PgBouncer itself still lets everybody in, and has them wait for a server.
		tryAll("false")
		wantNotes(t, ctx, "the primary", c.PrimaryURI(), 1)
		_, err := db.ExecContext(ctx, "insert into note values ('allowed')")
		must(t, err)
		wantNotes(t, ctx, "the primary", c.PrimaryURI(), 2)
	})
}

func TestBehindPgBouncerAFloorIsKeptThoughEachTransactionMayReachAnotherServer(t *testing.T) {
	behindPgBouncer(t, func(t *testing.T, ctx context.Context, c cluster, db *sql.DB) {
		db.SetMaxIdleConns(4)
		must(t, c.PauseReplay(ctx, 0))
		_, err := db.ExecContext(ctx, "insert into note values ('second')")
		must(t, err)
		lsn, err := pgsplit.CommitLSN(ctx, db)
		must(t, err)
		must(t, c.CatchUp(ctx, 1))

		// Without a floor both replicas answer: the pooler has connections to each.
		seen := map[string]int{}
		read := pgsplit.ReadOnly(ctx)
		var readers sync.WaitGroup
		var mu sync.Mutex
		for range 8 {
			readers.Go(func() {
				for range 25 {
					var n string
					if err := db.QueryRowContext(read, "select count(*)::text from note").Scan(&n); err != nil {
						t.Error(err)
						return
					}
					mu.Lock()
					seen[n]++
					mu.Unlock()
				}
			})
		}
		readers.Wait()
		if seen["1"] == 0 || seen["2"] == 0 {
			t.Errorf("rows seen without a floor, and how often: %v; this test is about a stale server and a fresh one", seen)
		}
		floor := pgsplit.ReadOnly(pgsplit.WithLSN(ctx, lsn))
		onReplica := 0
		for range 200 {
			tx, err := db.BeginTx(floor, nil)
			must(t, err)
			for _, q := range []interface {
				QueryRowContext(context.Context, string, ...any) *sql.Row
			}{tx, db} {
				var n int
				var standby bool
				must(t, q.QueryRowContext(floor, "select count(*), pg_is_in_recovery() from note").Scan(&n, &standby))
				if n != 2 {
					t.Fatalf("a read with a floor saw %d rows on %T, in recovery %t", n, q, standby)
				}
				if standby {
					onReplica++
				}
			}
			must(t, tx.Commit())
		}
		if onReplica == 0 {
			t.Error("the fresh replica served none of 400 reads")
		}
	})
}

func TestBehindPgBouncerATransactionWithAFloorHasTheIsolationAskedFor(t *testing.T) {
	behindPgBouncer(t, func(t *testing.T, ctx context.Context, c cluster, db *sql.DB) {
		lsn, err := pgsplit.CommitLSN(ctx, db)
		must(t, err)
		must(t, c.CatchUp(ctx, 0))
		must(t, c.CatchUp(ctx, 1))
		floor := pgsplit.ReadOnly(pgsplit.WithLSN(ctx, lsn))
		for level, want := range map[sql.IsolationLevel]string{
			sql.LevelDefault:        "true read committed",
			sql.LevelReadCommitted:  "true read committed",
			sql.LevelRepeatableRead: "false repeatable read",
			sql.LevelSerializable:   "false serializable",
		} {
			tx, err := db.BeginTx(floor, &sql.TxOptions{Isolation: level})
			must(t, err)
			var got string
			must(t, tx.QueryRowContext(ctx, "select pg_is_in_recovery()::text || ' ' || current_setting('transaction_isolation')").Scan(&got))
			must(t, tx.Commit())
			if got != want {
				t.Errorf("%s: %s, want %s", level, got, want)
			}
		}
	})
}

func TestBehindPgBouncerManyWorkersLeaveNothingBehind(t *testing.T) {
	behindPgBouncer(t, func(t *testing.T, ctx context.Context, c cluster, db *sql.DB) {
		db.SetMaxOpenConns(8)
		lsn, err := pgsplit.CommitLSN(ctx, db)
		must(t, err)
		reads := []context.Context{ctx, pgsplit.ReadOnly(ctx), pgsplit.ReadOnly(pgsplit.WithLSN(ctx, lsn))}
		var workers sync.WaitGroup
		for w := range 8 {
			workers.Go(func() {
				for n := range 40 {
					ctx := reads[(w+n)%len(reads)]
					stmt, err := db.PrepareContext(ctx, "select $1::int")
					if err != nil {
						t.Error(err)
						return
					}
					var got int
					if err := stmt.QueryRowContext(ctx, n).Scan(&got); err != nil || got != n {
						t.Errorf("%d %v", got, err)
					}
					if err := stmt.Close(); err != nil {
						t.Error(err)
					}
					if _, err := db.ExecContext(ctx, "select 1/0"); err == nil {
						t.Error("1/0")
					}
				}
			})
		}
		workers.Wait()
		for _, uri := range []string{c.PrimaryURI(), c.ReplicaURI(0), c.ReplicaURI(1)} {
			n, err := queryValue[int](ctx, uri, "select count(*) from pg_stat_activity where state like 'idle in transaction%'")
			must(t, err)
			if n != 0 {
				t.Errorf("%d connections idle in a transaction", n)
			}
		}
	})
}
