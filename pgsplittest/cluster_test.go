package pgsplittest

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"go.uber.org/goleak"
)

func TestMain(m *testing.M) {
	goleak.VerifyTestMain(m)
}

// must fails the test on an error.
func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// query reads one value from a server.
func query[T any](t *testing.T, s *Server, sql string) (value T) {
	t.Helper()
	ctx, cancel := bounded(t.Context())
	defer cancel()
	must(t, s.queryRow(ctx, &value, sql))
	return value
}

// connect opens a connection that ends with the test.
func connect(t *testing.T, uri string) *pgx.Conn {
	t.Helper()
	conn, err := pgx.Connect(t.Context(), uri)
	must(t, err)
	t.Cleanup(func() { closeConn(conn) })
	return conn
}

// eventually fails the test when a condition does not come true within a minute.
func eventually(t *testing.T, what string, condition func() bool) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	if poll(ctx, pollInterval, func() (bool, error) { return condition(), nil }) != nil {
		t.Fatalf("not within a minute: %s", what)
	}
}

func TestStartGivesAPrimaryAndReplicasThatStream(t *testing.T) {
	t.Parallel()
	c := Start(t, Replicas(2))
	must(t, c.Primary.Exec(t.Context(), "create table seen as select 42 as x"))
	must(t, c.CatchUp(t.Context()))

	if got := query[bool](t, c.Primary, "select pg_is_in_recovery()"); got {
		t.Error("the primary is in recovery")
	}
	if len(c.Replicas) != 2 || c.Replicas[0].Name() != "replica1" || c.Replicas[1].Name() != "replica2" {
		t.Errorf("replicas are %v", c.Replicas)
	}
	const identity = "select system_identifier from pg_control_system()"
	want := query[int64](t, c.Primary, identity)
	for _, r := range c.Replicas {
		if !query[bool](t, r, "select pg_is_in_recovery()") {
			t.Errorf("%s is not in recovery", r.Name())
		}
		if got := query[int](t, r, "select x from seen"); got != 42 {
			t.Errorf("%s reads %d", r.Name(), got)
		}
		if got := query[int64](t, r, identity); got != want {
			t.Errorf("system identifier of %s is %d, of the primary %d", r.Name(), got, want)
		}
	}
	if got := query[int](t, c.Primary, "select current_setting('server_version_num')::int / 10000"); got != c.Version() {
		t.Errorf("Version() = %d, the server says %d", c.Version(), got)
	}
}

func TestEveryAddressLeadsToItsServer(t *testing.T) {
	t.Parallel()
	c := Start(t, Replicas(1))
	direct, proxied := strings.Fields(c.DSN()), strings.Fields(c.ProxyDSN())
	if len(direct) != 2 || len(proxied) != 2 {
		t.Fatalf("DSN() = %q, ProxyDSN() = %q", c.DSN(), c.ProxyDSN())
	}
	for i, s := range c.Servers() {
		for _, uri := range []string{direct[i], proxied[i], s.URI(), s.ProxyURI(), s.Proxy().URI(), s.SocketURI()} {
			var name string
			must(t, connect(t, uri).QueryRow(t.Context(), "show cluster_name").Scan(&name))
			if name != s.Name() {
				t.Errorf("%s leads to %s, want %s", uri, name, s.Name())
			}
		}
		if want := fmt.Sprintf("@%s:%d/", s.Host(), s.Port()); !strings.Contains(s.URI(), want) {
			t.Errorf("URI() = %s, want %s in it", s.URI(), want)
		}
	}
}

func TestSettingsReachTheServersTheyAreMeantFor(t *testing.T) {
	t.Parallel()
	c := Start(t, Replicas(1),
		Setting("work_mem", "1MB"), PrimarySetting("work_mem", "2MB"), ReplicaSetting("work_mem", "3MB"),
		Setting("search_path", "it's"), ReplicaSetting("autovacuum", "on"))
	for _, test := range []struct {
		server     *Server
		name, want string
	}{
		{c.Primary, "work_mem", "2MB"},
		{c.Replicas[0], "work_mem", "3MB"},
		{c.Primary, "autovacuum", "off"},
		{c.Replicas[0], "autovacuum", "on"},
		{c.Replicas[0], "fsync", "off"},
	} {
		if got := query[string](t, test.server, "show "+test.name); got != test.want {
			t.Errorf("%s on %s is %s, want %s", test.name, test.server.Name(), got, test.want)
		}
	}
}

func TestAReplicaThatRefusesReadersIsStarted(t *testing.T) {
	t.Parallel()
	c := Start(t, Replicas(1), ReplicaSetting("hot_standby", "off"))
	_, err := c.Replicas[0].Conn(t.Context())
	if err == nil || !strings.Contains(err.Error(), "57P03") {
		t.Fatalf("a replica with hot_standby=off says %v", err)
	}
}

func TestAClusterWithoutReplicas(t *testing.T) {
	t.Parallel()
	c := Start(t, Replicas(0))
	if len(c.Replicas) != 0 || len(c.Servers()) != 1 || strings.Contains(c.DSN(), " ") {
		t.Errorf("replicas %v, DSN %q", c.Replicas, c.DSN())
	}
	must(t, c.CatchUp(t.Context()))
	if _, err := pgx.Connect(t.Context(), c.RoundRobin().URI()); err == nil {
		t.Error("a round robin over nothing accepts")
	}
}

func TestCatchUpLeavesOutReplicasThatCannot(t *testing.T) {
	t.Parallel()
	c := Start(t, Replicas(4))
	paused, frozen, stopped, fit := c.Replicas[0], c.Replicas[1], c.Replicas[2], c.Replicas[3]
	must(t, paused.PauseReplay(t.Context()))
	must(t, frozen.Freeze())
	must(t, stopped.Stop(t.Context(), Fast))
	must(t, c.Primary.Exec(t.Context(), "create table t as select 1 as x"))
	must(t, c.CatchUp(t.Context()))
	if n := query[int](t, fit, "select count(*) from pg_class where relname = 't'"); n != 1 {
		t.Error("CatchUp returned before the healthy replica had the table")
	}
	if n := query[int](t, paused, "select count(*) from pg_class where relname = 't'"); n != 0 {
		t.Error("the paused replica has replayed the table")
	}
	must(t, frozen.Thaw())
}

func TestCatchUpFollowsThePrimaryOfTheDay(t *testing.T) {
	t.Parallel()
	c := Start(t, Replicas(2))
	must(t, c.CatchUp(t.Context()))
	must(t, c.Primary.Kill(t.Context()))
	must(t, c.Replicas[0].Promote(t.Context()))
	must(t, c.Replicas[1].Follow(t.Context(), c.Replicas[0]))
	c.Primary = c.Replicas[0]
	must(t, c.Primary.Exec(t.Context(), "create table after_failover as select 1 as x"))
	must(t, c.CatchUp(t.Context()))
	if got := query[int](t, c.Replicas[1], "select x from after_failover"); got != 1 {
		t.Errorf("read %d", got)
	}
}

func TestCloseLeavesNothing(t *testing.T) {
	NeedServer(t)
	before := goleak.IgnoreCurrent()
	c, err := StartCluster(t.Context(), Replicas(2))
	must(t, err)
	var pids []int
	for _, s := range c.Servers() {
		pids = append(pids, processes(t, s)...)
	}
	must(t, c.Replicas[0].Freeze())
	must(t, c.Replicas[1].Kill(t.Context()))
	if len(pids) < 9 {
		t.Fatalf("three servers have the processes %v", pids)
	}
	must(t, c.Close())
	must(t, c.Close())
	for _, pid := range pids {
		if !gone(pid) {
			t.Errorf("process %d is still there", pid)
		}
	}
	if _, err := os.Stat(c.folder); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("%s is still there: %v", c.folder, err)
	}
	if c.Primary.Running() {
		t.Error("the primary is running")
	}
	goleak.VerifyNone(t, before)
}

// processes returns a server's postmaster and its children.
func processes(t *testing.T, s *Server) []int {
	t.Helper()
	postmaster := s.current().cmd.Process.Pid
	pids, err := children(postmaster)
	must(t, err)
	return append(pids, postmaster)
}

func TestStartClusterObeysItsContext(t *testing.T) {
	NeedServer(t)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	c, err := StartCluster(ctx)
	if err == nil {
		c.Close()
		t.Fatal("a cancelled start succeeded")
	}
	if !errors.Is(err, context.Canceled) {
		t.Errorf("error is %v", err)
	}
}

func TestAServerThatCannotStartSaysWhy(t *testing.T) {
	t.Parallel()
	NeedServer(t)
	c, err := StartCluster(t.Context(), Replicas(0), Setting("no_such_setting", "1"))
	if err == nil {
		c.Close()
		t.Fatal("it started")
	}
	if !strings.Contains(err.Error(), "no_such_setting") || !strings.Contains(err.Error(), "primary") {
		t.Errorf("error is %v", err)
	}
}

func TestATakenPortIsReported(t *testing.T) {
	t.Parallel()
	a, b := Start(t, Replicas(0)), Start(t, Replicas(0))
	must(t, b.Primary.Stop(t.Context(), Immediate))
	conf := filepath.Join(b.Primary.DataDir(), "postgresql.conf")
	text, err := os.ReadFile(conf)
	must(t, err)
	must(t, os.WriteFile(conf, fmt.Appendf(text, "port = %d\nunix_socket_directories = ''\n", a.Primary.Port()), 0o600))
	if err := b.Primary.Start(t.Context()); !errors.Is(err, errPortTaken) {
		t.Errorf("start on the port of another server: %v", err)
	}
}

// useCache points the user's cache folder to an empty one, and returns it.
func useCache(t *testing.T) string {
	t.Helper()
	home := t.TempDir()
	t.Setenv("HOME", home)
	t.Setenv("XDG_CACHE_HOME", filepath.Join(home, "cache"))
	cache, err := os.UserCacheDir()
	must(t, err)
	return cache
}

func TestTheTemplateIsMadeOnceAndMadeAnewWhenDamaged(t *testing.T) {
	cache := useCache(t)
	archives := func() []string {
		t.Helper()
		files, err := filepath.Glob(filepath.Join(cache, "pgsplit", "templates", "*"))
		must(t, err)
		return files
	}
	Start(t, Replicas(0))
	made := archives()
	if len(made) != 1 {
		t.Fatalf("templates after the first start: %v", made)
	}
	first, err := os.Stat(made[0])
	must(t, err)
	Start(t, Replicas(0))
	second, err := os.Stat(made[0])
	must(t, err)
	if !os.SameFile(first, second) {
		t.Error("the second start made another template")
	}
	for _, size := range []int64{0, 1000, first.Size() / 2} {
		damaged := filepath.Join(t.TempDir(), "damaged")
		text, err := os.ReadFile(made[0])
		must(t, err)
		must(t, os.WriteFile(damaged, text[:size], 0o600))
		if err := unpack(damaged, filepath.Join(t.TempDir(), "data"), nil); !errors.Is(err, errNotAnArchive) {
			t.Errorf("%d bytes of a template: %v", size, err)
		}
	}
	must(t, os.Truncate(made[0], first.Size()/2))
	Start(t, Replicas(1))
	repaired, err := os.Stat(made[0])
	must(t, err)
	if repaired.Size() != first.Size() {
		t.Errorf("a damaged template was replaced by one of %d bytes, want %d", repaired.Size(), first.Size())
	}
	if got := archives(); !slices.Equal(got, made) {
		t.Errorf("templates at the end: %v, want %v", got, made)
	}
}

func TestWithoutACacheFolderEveryClusterHasItsOwnTemplate(t *testing.T) {
	file := filepath.Join(t.TempDir(), "file")
	must(t, os.WriteFile(file, nil, 0o600))
	t.Setenv("HOME", file)
	t.Setenv("XDG_CACHE_HOME", file)
	c := Start(t, Replicas(1))
	must(t, c.CatchUp(t.Context()))
}

func TestSweepRemovesWhatDeadProcessesLeft(t *testing.T) {
	c := Start(t, Replicas(0))
	base := t.TempDir()
	dead, locked, other := filepath.Join(base, folderPattern+"1"), filepath.Join(base, folderPattern+"2"), filepath.Join(base, "new-"+folderPattern+"3")
	for _, dir := range []string{dead, locked, other} {
		must(t, os.MkdirAll(filepath.Join(dir, "primary"), 0o700))
		must(t, os.WriteFile(filepath.Join(dir, "lock"), nil, 0o600))
	}
	lock, err := os.Open(filepath.Join(locked, "lock"))
	must(t, err)
	defer lock.Close()
	if !tryLock(lock) {
		t.Fatal("cannot lock")
	}
	sweep(base)
	sweep(filepath.Dir(c.folder))
	for dir, want := range map[string]bool{dead: false, locked: true, other: true, c.folder: true} {
		if _, err := os.Stat(dir); (err == nil) != want {
			t.Errorf("after the sweep, %s exists: %v, want %v", dir, err == nil, want)
		}
	}
}
