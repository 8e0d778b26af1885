package integration

import (
	"context"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
)

func TestMain(m *testing.M) {
	if dsn := os.Getenv(readerDSN); dsn != "" {
		serveUntilInputEnds(dsn)
		return
	}
	flag.Parse()
	if testing.Short() {
		fmt.Println("integration: -short was given and each test here needs a cluster: none runs")
		os.Exit(0)
	}
	os.Exit(m.Run())
}

// cluster is a primary and its streaming replicas, numbered from 0, whoever runs them. A server keeps its URI for the
// cluster's whole life. Every call waits until what it asks for is so, at most until its context ends.
type cluster interface {
	// DSN is what sql.Open("pgsplit", ..) takes: the primary and all replicas.
	DSN() string
	// PrimaryURI and ReplicaURI are one server alone, for pgx. The user is a superuser.
	PrimaryURI() string
	ReplicaURI(i int) string

	// CatchUp returns when replica i has replayed all that was committed on the primary before the call.
	CatchUp(ctx context.Context, i int) error
	// PauseReplay makes replica i stale. It goes on receiving.
	PauseReplay(ctx context.Context, i int) error
	ResumeReplay(ctx context.Context, i int) error

	// StopReplica shuts replica i down as an administrator does: its sessions are ended.
	StopReplica(ctx context.Context, i int) error
	// StartReplica starts it again with the data that it had; it may be behind.
	StartReplica(ctx context.Context, i int) error
	// StopPrimary shuts the primary down for good.
	StopPrimary(ctx context.Context) error
	// Promote makes replica i a primary. It does not stop the old one.
	Promote(ctx context.Context, i int) error

	// Close ends every server and removes the data.
	Close() error
}

// startCluster starts a cluster on the backend that PGSPLIT_TEST_BACKEND names, and closes it when the test ends.
func startCluster(t testing.TB, replicas int) cluster {
	t.Helper()
	// An image may have to be fetched first.
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Minute)
	defer cancel()

	var c cluster
	var err error
	switch backend := os.Getenv("PGSPLIT_TEST_BACKEND"); backend {
	case "", "binaries":
		c, err = startBinaries(ctx, replicas)
	case "docker":
		c, err = startDocker(ctx, replicas)
	default:
		t.Fatalf("PGSPLIT_TEST_BACKEND is %q: want binaries or docker", backend)
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := c.Close(); err != nil {
			t.Errorf("closing the cluster: %v", err)
		}
	})
	return c
}

// queryValue runs sql, which returns one row of one column, on a connection of its own to the server at uri.
func queryValue[T any](ctx context.Context, uri, sql string) (value T, err error) {
	conn, err := pgx.Connect(ctx, uri)
	if err != nil {
		return value, err
	}
	defer conn.Close(context.WithoutCancel(ctx))
	err = conn.QueryRow(ctx, sql).Scan(&value)
	return value, err
}

// execSQL runs sql, which may hold several statements, on a connection of its own to the server at uri.
func execSQL(ctx context.Context, uri, sql string) error {
	conn, err := pgx.Connect(ctx, uri)
	if err != nil {
		return err
	}
	defer conn.Close(context.WithoutCancel(ctx))
	_, err = conn.PgConn().Exec(ctx, sql).ReadAll()
	return err
}

func mustExec(t *testing.T, ctx context.Context, uri, sql string) {
	t.Helper()
	if err := execSQL(ctx, uri, sql); err != nil {
		t.Fatalf("%s: %v", sql, err)
	}
}

// wantNotes checks how many rows of table note the server at uri shows.
func wantNotes(t *testing.T, ctx context.Context, server, uri string, want int) {
	t.Helper()
	got, err := queryValue[int](ctx, uri, "select count(*) from note")
	if err != nil {
		t.Fatalf("%s: %v", server, err)
	}
	if got != want {
		t.Errorf("%s shows %d rows, want %d", server, got, want)
	}
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func TestTheChosenBackendGivesAPrimaryAndTwoStreamingReplicas(t *testing.T) {
	c := startCluster(t, 2)
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()

	if want := c.PrimaryURI() + " " + c.ReplicaURI(0) + " " + c.ReplicaURI(1); c.DSN() != want {
		t.Errorf("DSN is %q, want the URIs of the three servers: %q", c.DSN(), want)
	}

	mustExec(t, ctx, c.PrimaryURI(), "create table note (body text); insert into note values ('first')")
	for i := range 2 {
		must(t, c.CatchUp(ctx, i))
		wantNotes(t, ctx, fmt.Sprintf("replica %d", i), c.ReplicaURI(i), 1)
		standby, err := queryValue[bool](ctx, c.ReplicaURI(i), "select pg_is_in_recovery()")
		must(t, err)
		if !standby {
			t.Errorf("replica %d is not in recovery", i)
		}
	}

	must(t, c.PauseReplay(ctx, 0))
	mustExec(t, ctx, c.PrimaryURI(), "insert into note values ('second')")
	must(t, c.CatchUp(ctx, 1))
	wantNotes(t, ctx, "the replica that follows", c.ReplicaURI(1), 2)
	wantNotes(t, ctx, "the paused replica", c.ReplicaURI(0), 1)

	must(t, c.ResumeReplay(ctx, 0))
	must(t, c.CatchUp(ctx, 0))
	wantNotes(t, ctx, "the resumed replica", c.ReplicaURI(0), 2)
}

func TestTheChosenBackendStopsStartsAndPromotesAReplica(t *testing.T) {
	c := startCluster(t, 2)
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()

	mustExec(t, ctx, c.PrimaryURI(), "create table note (body text); insert into note values ('first')")
	must(t, c.CatchUp(ctx, 0))
	must(t, c.CatchUp(ctx, 1))

	uri := c.ReplicaURI(0)
	must(t, c.StopReplica(ctx, 0))
	if _, err := queryValue[int](ctx, uri, "select 1"); err == nil {
		t.Error("the stopped replica still answers")
	}
	mustExec(t, ctx, c.PrimaryURI(), "insert into note values ('while it was down')")
	must(t, c.StartReplica(ctx, 0))
	must(t, c.CatchUp(ctx, 0))
	wantNotes(t, ctx, "the replica that was started again, at its old address", uri, 2)

	must(t, c.CatchUp(ctx, 1))
	must(t, c.StopPrimary(ctx))
	if _, err := queryValue[int](ctx, c.PrimaryURI(), "select 1"); err == nil {
		t.Error("the stopped primary still answers")
	}
	must(t, c.Promote(ctx, 1))
	mustExec(t, ctx, c.ReplicaURI(1), "insert into note values ('on the new primary')")
	wantNotes(t, ctx, "the promoted replica", c.ReplicaURI(1), 3)
}

func TestWithoutADockerEngineTheDockerBackendFailsWithOneClearMessage(t *testing.T) {
	// testcontainers finds its engine once a process: hence another process.
	self, err := os.Executable()
	must(t, err)
	cmd := exec.CommandContext(t.Context(), self, "-test.run=^TestTheChosenBackendGivesAPrimaryAndTwoStreamingReplicas$")
	home := t.TempDir()
	cmd.Env = append(os.Environ(), "HOME="+home, "DOCKER_HOST=unix://"+home+"/no-engine.sock", "PGSPLIT_TEST_BACKEND=docker")
	out, err := cmd.CombinedOutput()
	if err == nil {
		t.Fatalf("the test passed without an engine:\n%s", out)
	}
	if n := strings.Count(string(out), errNoDocker.Error()); n != 1 {
		t.Errorf("output has the message %d times, want once:\n%s", n, out)
	}
}
