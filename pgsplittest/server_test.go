package pgsplittest

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"
)

// life is what F7 tells one life of a server from another by.
func life(t *testing.T, s *Server) (started, crashed time.Time) {
	t.Helper()
	return query[time.Time](t, s, "select pg_postmaster_start_time()"),
		query[time.Time](t, s, "select stats_reset from pg_stat_bgwriter")
}

func TestAPausedReplicaIsStaleUntilResumed(t *testing.T) {
	t.Parallel()
	c := Start(t, Replicas(1))
	r := c.Replicas[0]
	must(t, c.Primary.Exec(t.Context(), "create table t (x int)"))
	must(t, c.CatchUp(t.Context()))
	must(t, r.PauseReplay(t.Context()))
	must(t, c.Primary.Exec(t.Context(), "insert into t select generate_series(1, 1000)"))
	written, err := c.Primary.Position(t.Context())
	must(t, err)
	// The replica has received the rows, so only the pause keeps them from being seen.
	eventually(t, "the paused replica receives", func() bool {
		return uint64(query[int64](t, r, "select pg_wal_lsn_diff(pg_last_wal_receive_lsn(), '0/0')::bigint")) >= written
	})
	if n := query[int](t, r, "select count(*) from t"); n != 0 {
		t.Errorf("the paused replica shows %d rows", n)
	}
	lag, err := r.Lag(t.Context())
	must(t, err)
	if lag < 1000*8 {
		t.Errorf("the paused replica lags by %d bytes", lag)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
	defer cancel()
	if err := r.WaitFor(ctx, written); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("WaitFor on a paused replica: %v", err)
	}

	must(t, r.ResumeReplay(t.Context()))
	must(t, r.WaitFor(t.Context(), written))
	if n := query[int](t, r, "select count(*) from t"); n != 1000 {
		t.Errorf("the resumed replica shows %d rows", n)
	}
	if at, err := r.Position(t.Context()); err != nil || at < written {
		t.Errorf("after WaitFor(%d) the replica is at %d, %v", written, at, err)
	}
}

func TestLagOfThePrimaryIsZero(t *testing.T) {
	t.Parallel()
	c := Start(t, Replicas(0))
	if lag, err := c.Primary.Lag(t.Context()); err != nil || lag != 0 {
		t.Errorf("Lag() = %d, %v", lag, err)
	}
}

// F19: nobody writes, and the position is beyond what there is.
func TestWaitForMakesAQuietPrimarySendMore(t *testing.T) {
	c := Start(t, Replicas(1))
	must(t, c.CatchUp(t.Context()))
	at, err := c.Primary.Position(t.Context())
	must(t, err)
	// Sooner than a quiet primary writes something by itself, which is every 15 s.
	ctx, cancel := context.WithTimeout(t.Context(), 12*time.Second)
	defer cancel()
	must(t, c.Replicas[0].WaitFor(ctx, at+1))
}

func TestStopAndStartKeepDataAndPort(t *testing.T) {
	t.Parallel()
	c := Start(t, Replicas(1))
	must(t, c.Primary.Exec(t.Context(), "create table t as select 1 as x"))
	must(t, c.CatchUp(t.Context()))
	for _, s := range c.Servers() {
		for _, mode := range []Mode{Fast, Immediate} {
			port := s.Port()
			before, _ := life(t, s)
			must(t, s.Stop(t.Context(), mode))
			must(t, s.Stop(t.Context(), mode)) // does nothing
			if s.Running() {
				t.Errorf("%s is running after Stop(%d)", s.Name(), mode)
			}
			if _, err := s.Conn(t.Context()); err == nil {
				t.Errorf("%s accepts connections after Stop(%d)", s.Name(), mode)
			}
			must(t, s.Start(t.Context()))
			must(t, s.Start(t.Context())) // does nothing
			if !s.Running() || s.Port() != port {
				t.Errorf("%s: running %v, port %d, was %d", s.Name(), s.Running(), s.Port(), port)
			}
			if after, _ := life(t, s); !after.After(before) {
				t.Errorf("%s: start time %v, was %v", s.Name(), after, before)
			}
			must(t, c.CatchUp(t.Context()))
			if x := query[int](t, s, "select x from t"); x != 1 {
				t.Errorf("%s reads %d", s.Name(), x)
			}
		}
	}
}

func TestFastAndImmediateAreWhatPostgresCallsSo(t *testing.T) {
	t.Parallel()
	c := Start(t, Replicas(0))
	must(t, c.Primary.Restart(t.Context(), Fast))
	if log := c.Primary.Log(); !strings.Contains(log, "received fast shutdown request") {
		t.Errorf("log after a fast restart:\n%s", log)
	}
	must(t, c.Primary.Restart(t.Context(), Immediate))
	log := c.Primary.Log()
	if !strings.Contains(log, "received immediate shutdown request") || !strings.Contains(log, "was not properly shut down") {
		t.Errorf("log after an immediate restart:\n%s", log)
	}
	if len(log) > 8<<10 {
		t.Errorf("Log() returned %d bytes", len(log))
	}
}

func TestARestartEndsAPause(t *testing.T) {
	t.Parallel()
	c := Start(t, Replicas(1))
	r := c.Replicas[0]
	must(t, r.PauseReplay(t.Context()))
	must(t, r.Restart(t.Context(), Fast))
	if query[bool](t, r, "select pg_is_wal_replay_paused()") {
		t.Error("paused after a restart")
	}
}

func TestKillEndsEveryProcessAndTheServerStartsAgain(t *testing.T) {
	t.Parallel()
	c := Start(t, Replicas(1))
	must(t, c.Primary.Exec(t.Context(), "create table t as select 1 as x"))
	must(t, c.CatchUp(t.Context()))
	for _, s := range c.Servers() {
		pids := processes(t, s)
		must(t, s.Kill(t.Context()))
		must(t, s.Kill(t.Context())) // does nothing
		for _, pid := range pids {
			if !gone(pid) {
				t.Errorf("%s: process %d survived", s.Name(), pid)
			}
		}
		pidFile, err := os.ReadFile(filepath.Join(s.DataDir(), "postmaster.pid"))
		if want := strconv.Itoa(pids[len(pids)-1]) + "\n"; err != nil || !strings.HasPrefix(string(pidFile), want) {
			t.Errorf("%s: postmaster.pid is %q, %v, want it to begin with %q", s.Name(), pidFile, err, want)
		}
		must(t, s.Start(t.Context()))
		must(t, c.CatchUp(t.Context()))
		if x := query[int](t, s, "select x from t"); x != 1 {
			t.Errorf("%s reads %d", s.Name(), x)
		}
	}
}

// F7: address, port and start time stay, and yet it is another life.
func TestKillBackendRestartsTheChildrenUnderTheSamePostmaster(t *testing.T) {
	t.Parallel()
	c := Start(t, Replicas(1))
	for _, s := range c.Servers() {
		conn := connect(t, s.URI())
		started, crashed := life(t, s)
		must(t, s.KillBackend(t.Context()))
		startedNow, crashedNow := life(t, s)
		if !startedNow.Equal(started) {
			t.Errorf("%s: postmaster start time %v, was %v", s.Name(), startedNow, started)
		}
		if !crashedNow.After(crashed) {
			t.Errorf("%s: stats_reset %v, was %v", s.Name(), crashedNow, crashed)
		}
		if err := conn.Ping(t.Context()); err == nil {
			t.Errorf("%s: a connection outlived the crash", s.Name())
		}
	}
	must(t, c.CatchUp(t.Context()))
}

func TestAFrozenServerIsSilentAndGoesOnAfterwards(t *testing.T) {
	t.Parallel()
	c := Start(t, Replicas(1))
	for _, s := range c.Servers() {
		conn := connect(t, s.URI())
		must(t, conn.Ping(t.Context()))
		must(t, s.Freeze())
		if !s.Running() {
			t.Errorf("%s: a frozen server is not running", s.Name())
		}
		answer := make(chan error, 1)
		go func() { answer <- conn.Ping(t.Context()) }()
		ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
		defer cancel()
		select {
		case err := <-answer:
			t.Errorf("%s: a frozen server answers: %v", s.Name(), err)
		case <-ctx.Done():
		}
		if _, err := s.Conn(ctx); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("%s: a new connection to a frozen server: %v", s.Name(), err)
		}
		must(t, s.Thaw())
		must(t, <-answer)
	}
}

func TestAFrozenServerCanBeStoppedAndKilled(t *testing.T) {
	t.Parallel()
	c := Start(t, Replicas(2))
	for i, s := range c.Replicas {
		must(t, s.Freeze())
		if i == 0 {
			must(t, s.Stop(t.Context(), Fast))
		} else {
			must(t, s.Kill(t.Context()))
		}
		must(t, s.Start(t.Context()))
		must(t, c.CatchUp(t.Context()))
		if n, err := s.Position(t.Context()); err != nil || n == 0 {
			t.Errorf("%s: position %d, %v", s.Name(), n, err)
		}
	}
}

func TestFreezeNeedsARunningServer(t *testing.T) {
	t.Parallel()
	c := Start(t, Replicas(0))
	must(t, c.Primary.Stop(t.Context(), Immediate))
	if err := c.Primary.Freeze(); err == nil {
		t.Error("froze a server that is not running")
	}
	if err := c.Primary.Thaw(); err == nil {
		t.Error("thawed a server that is not running")
	}
}

func TestPromoteMakesAPrimaryOnANewTimeline(t *testing.T) {
	t.Parallel()
	c := Start(t, Replicas(2))
	const timeline = "select ('x' || left(pg_walfile_name(pg_current_wal_lsn()), 8))::bit(32)::int"
	old := query[int](t, c.Primary, timeline)
	promoted, other := c.Replicas[0], c.Replicas[1]
	must(t, promoted.PauseReplay(t.Context()))
	must(t, promoted.Promote(t.Context()))
	must(t, promoted.Exec(t.Context(), "create table t as select 1 as x"))
	if now := query[int](t, promoted, timeline); now <= old {
		t.Errorf("timeline %d after the promotion, %d before", now, old)
	}
	must(t, other.Follow(t.Context(), promoted))
	at, err := promoted.Position(t.Context())
	must(t, err)
	must(t, other.WaitFor(t.Context(), at))
	if x := query[int](t, other, "select x from t"); x != 1 {
		t.Errorf("the other replica reads %d", x)
	}
	if !c.Primary.Running() || query[bool](t, c.Primary, "select pg_is_in_recovery()") {
		t.Error("the old primary is no primary any more")
	}
}

func TestExecTakesArgumentsAndReportsErrors(t *testing.T) {
	t.Parallel()
	c := Start(t, Replicas(1))
	must(t, c.Primary.Exec(t.Context(), "create table t (x int); create table u (x int)"))
	must(t, c.Primary.Exec(t.Context(), "insert into t values ($1), ($2)", 1, 2))
	if n := query[int](t, c.Primary, "select sum(x) from t"); n != 3 {
		t.Errorf("sum is %d", n)
	}
	err := c.Replicas[0].Exec(t.Context(), "create table v (x int)")
	if err == nil || !strings.Contains(err.Error(), "25006") || !strings.Contains(err.Error(), "replica1") {
		t.Errorf("a write on a replica: %v", err)
	}
}

func TestTheEnvironmentDoesNotReachTheServers(t *testing.T) {
	t.Setenv("PGTARGETSESSIONATTRS", "read-write")
	t.Setenv("PGOPTIONS", "-c no_such_setting=1")
	t.Setenv("PGPORT", "1")
	c := Start(t, Replicas(1))
	must(t, c.CatchUp(t.Context()))
	if !query[bool](t, c.Replicas[0], "select pg_is_in_recovery()") {
		t.Error("Conn led elsewhere")
	}
}
