package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/url"
	"strings"
	"testing"
	"time"

	"github.com/pgsplit/pgsplit/pgsplittest"
)

// secret is the password in the DSNs, which no output may hold.
const secret = "s3cr-t%2Fw"

// withSecret gives every URI of a DSN a user and a password. The clusters ask nobody for one.
func withSecret(dsn, user string) string {
	return strings.ReplaceAll(dsn, "postgres://postgres@", "postgres://"+user+":"+secret+"@")
}

// checked runs check and returns its report and exit status.
func checked(t *testing.T, dsn string, flags ...string) (report, int) {
	t.Helper()
	dsn = withSecret(dsn, "postgres")
	var out, text, errs bytes.Buffer
	status := run(t.Context(), append(append([]string{"check", "--json"}, flags...), dsn), &out, &errs)
	var r report
	if err := json.Unmarshal(out.Bytes(), &r); err != nil {
		t.Fatalf("%v: %s%s", err, out.String(), errs.String())
	}
	noSecret(t, out.String()+errs.String())
	if r.Status != []string{"fine", "warnings", "errors"}[status] {
		t.Errorf("status %s, exit status %d", r.Status, status)
	}
	text.WriteString(r.text(100))
	noSecret(t, text.String())
	return r, status
}

func noSecret(t *testing.T, text string) {
	t.Helper()
	plain, err := url.PathUnescape(secret)
	if err != nil {
		t.Fatal(err)
	}
	if strings.Contains(text, secret) || strings.Contains(text, plain) {
		t.Errorf("the password is in\n%s", text)
	}
}

func (r *report) has(sev severity, name, server string) bool {
	for _, f := range r.Findings {
		if f.Severity == sev && f.Name == name && strings.Contains(f.Server, server) {
			return true
		}
	}
	return false
}

// finds runs check until it has the finding, for what a server was told to change a moment ago.
func finds(t *testing.T, dsn string, sev severity, name, server string, flags ...string) {
	t.Helper()
	wantStatus := statusErrors - sev.rank()
	deadline := time.Now().Add(30 * time.Second)
	for {
		r, status := checked(t, dsn, flags...)
		if r.has(sev, name, server) && status >= wantStatus {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("no %s %s of %s, exit status %d:\n%s", sev, name, server, status, r.text(100))
		}
	}
}

// fine runs check until nothing is worse than a note.
func fine(t *testing.T, dsn string) report {
	t.Helper()
	deadline := time.Now().Add(30 * time.Second)
	for {
		r, status := checked(t, dsn)
		if status == statusFine {
			return r
		}
		if time.Now().After(deadline) {
			t.Fatalf("exit status %d:\n%s", status, r.text(100))
		}
	}
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// set changes settings of a server. It does not wait until they hold.
func set(t *testing.T, s *pgsplittest.Server, settings ...string) {
	t.Helper()
	for _, setting := range settings {
		must(t, s.Exec(t.Context(), "alter system set "+setting))
	}
	must(t, s.Exec(t.Context(), "select pg_reload_conf()"))
}

// pair is a DSN of the cluster's primary and one replica, by the names that findings have for them.
func pair(c *pgsplittest.Cluster, query string) (dsn, replica string) {
	return c.Primary.URI() + " " + c.Replicas[0].URI() + "&name=r1" + query, "r1"
}

func TestCheckNamesWhatIsWrongWithACluster(t *testing.T) {
	cluster := pgsplittest.Start(t, pgsplittest.Replicas(2))
	ctx := t.Context()
	primary, one, two := cluster.Primary, cluster.Replicas[0], cluster.Replicas[1]
	dsn, r1 := pair(cluster, "")
	must(t, primary.Exec(ctx, "create role plain login; create role shut login"))
	must(t, cluster.CatchUp(ctx))

	t.Run("a healthy one is fine", func(t *testing.T) {
		r := fine(t, cluster.DSN())
		if len(r.Servers) != 3 {
			t.Fatalf("%d servers", len(r.Servers))
		}
		for n, s := range r.Servers {
			i := s.Hosts[0].Instances[0]
			if i.System == "" || i.Timeline != 1 || i.Position == "" || i.ReadOnly != readOnlyHolds || i.Pooled || len(i.Missing) > 0 {
				t.Errorf("%s: %+v", s.Name, i)
			}
			if standby := n > 0; i.standby() != standby || standby && !i.Lag.Proven {
				t.Errorf("%s: %s, behind %s", s.Name, i.Found, i.Lag)
			}
		}
		var out bytes.Buffer
		if status := run(ctx, append([]string{"check"}, strings.Fields(cluster.DSN())...), &out, io.Discard); status != statusFine {
			t.Errorf("exit status %d", status)
		}
		if !strings.HasPrefix(out.String(), "server ") || strings.Count(out.String(), " enforced ") != 3 {
			t.Errorf("the table is\n%s", out.String())
		}
	})
	t.Run("roles are exchanged", func(t *testing.T) {
		exchanged := one.URI() + " " + primary.URI() + "&name=p"
		finds(t, exchanged, severityError, "primary-is-replica", "primary")
		finds(t, exchanged, severityError, "replica-is-primary", "p")
	})
	t.Run("one instance has two names", func(t *testing.T) {
		finds(t, dsn+" "+one.SocketURI()+"&name=socket", severityWarning, "same-address-twice", "r1, socket")
		finds(t, primary.URI()+" "+primary.SocketURI()+"&name=socket", severityError, "same-address-twice", "primary, socket")
	})
	t.Run("one address has two instances", func(t *testing.T) {
		r := fine(t, primary.URI()+" "+cluster.RoundRobin().URI()+"&name=ro")
		if got := r.Servers[1].Hosts[0].Instances; len(got) != 2 || got[0].Listen == got[1].Listen {
			t.Errorf("%d instances behind the balancer", len(got))
		} else if text := r.legend(); !strings.Contains(text, "ro #2 is "+got[1].Listen) {
			t.Errorf("it is not told where the instances are: %s", text)
		}
		finds(t, primary.URI()+" "+cluster.RoundRobin().URI()+"&name=ro "+two.URI()+"&name=r2", severityWarning, "same-address-twice", "r2")
	})
	t.Run("target_session_attrs", func(t *testing.T) {
		hosts := fmt.Sprintf("postgres://postgres@127.0.0.1:%d,127.0.0.1:%d/postgres?sslmode=disable", two.Port(), primary.Port())
		fine(t, hosts+" "+one.URI())
		finds(t, hosts+"&target_session_attrs=any "+one.URI(), severityWarning, "target-session-attrs-inherited", "primary")
		wrong, _ := pair(cluster, "&target_session_attrs=read-write")
		finds(t, wrong, severityError, "target-session-attrs-inherited", "")
		wrong, _ = pair(cluster, "&target_session_attrs=read-only")
		finds(t, wrong, severityWarning, "target-session-attrs-inherited", r1)
		t.Setenv("PGTARGETSESSIONATTRS", "standby")
		finds(t, dsn, severityError, "target-session-attrs-inherited", "")
	})
	t.Run("a pooler takes the read-only parameter away", func(t *testing.T) {
		behind := primary.URI() + " " + one.ProxyURI() + "&name=r1"
		for _, mode := range []pgsplittest.PoolerMode{pgsplittest.PoolerDropsParameter, pgsplittest.PoolerRefusesParameter} {
			one.Proxy().EmulatePooler(mode)
			finds(t, behind, severityWarning, "pooler-drops-read-only", r1)
		}
		one.Proxy().EmulatePooler(pgsplittest.PoolerOff)
		fine(t, behind)
	})
	t.Run("nobody answers", func(t *testing.T) {
		finds(t, dsn+" postgres://127.0.0.1:1?name=gone", severityError, "unreachable", "gone")
		one.Proxy().BlackHole()
		defer one.Proxy().Restore()
		finds(t, dsn+" "+one.ProxyURI()+"&name=mute", severityError, "unreachable", "mute", "-timeout", "1s")
	})
	t.Run("the role may not look", func(t *testing.T) {
		plain := strings.ReplaceAll(dsn, "postgres@", "plain@")
		fine(t, plain)
		finds(t, plain, severityNote, "no-privilege", r1)
		must(t, primary.Exec(ctx, "revoke execute on function pg_control_checkpoint() from public"))
		must(t, cluster.CatchUp(ctx))
		finds(t, plain, severityError, "no-privilege", r1)
		must(t, primary.Exec(ctx, "grant execute on function pg_control_checkpoint() to public"))
	})
	t.Run("the primary's sessions are read only", func(t *testing.T) {
		must(t, primary.Exec(ctx, "alter role shut set default_transaction_read_only = on"))
		finds(t, strings.ReplaceAll(dsn, "postgres@", "shut@"), severityError, "primary-read-only", "primary")
	})
	t.Run("replay is paused", func(t *testing.T) {
		must(t, one.PauseReplay(ctx))
		must(t, primary.Exec(ctx, "create table news ()"))
		finds(t, dsn, severityWarning, "lagging", r1)
		must(t, one.ResumeReplay(ctx))
		must(t, cluster.CatchUp(ctx))
	})
	t.Run("reads are cancelled", func(t *testing.T) {
		set(t, one, "max_standby_streaming_delay = '1s'")
		finds(t, dsn, severityWarning, "conflicts-cancel-reads", r1)
		set(t, one, "max_standby_streaming_delay = -1")
		fine(t, dsn)
		set(t, one, "max_standby_archive_delay = '1s'")
		fine(t, dsn)
		set(t, one, "restore_command = 'false'")
		finds(t, dsn, severityWarning, "conflicts-cancel-reads", r1)
		set(t, one, "restore_command = ''", "hot_standby_feedback = on")
		fine(t, dsn)
	})
	t.Run("slots", func(t *testing.T) {
		set(t, primary, "wal_keep_size = 0")
		finds(t, dsn, severityWarning, "slot-missing", r1)
		set(t, one, "primary_slot_name = 'kept'")
		finds(t, dsn, severityError, "slot-missing", r1)
		must(t, primary.Exec(ctx, "select pg_create_physical_replication_slot('kept')"))
		r := fine(t, dsn)
		if r.has(severityNote, "slot-missing", r1) {
			t.Errorf("it has a slot:\n%s", r.text(100))
		}
	})
	t.Run("hot standby is off", func(t *testing.T) {
		set(t, two, "hot_standby = off")
		must(t, two.Restart(ctx, pgsplittest.Fast))
		name := "hot-standby-off"
		sev := severityError
		if cluster.Version() < 14 {
			name, sev = "starting-up", severityWarning // it says so
		}
		finds(t, dsn+" "+two.URI()+"&name=r2", sev, name, "r2")
	})
	t.Run("failovers", func(t *testing.T) {
		must(t, one.Promote(ctx))
		finds(t, dsn, severityError, "replica-is-primary", r1)
		both := fmt.Sprintf("postgres://postgres@127.0.0.1:%d,127.0.0.1:%d/postgres?sslmode=disable", primary.Port(), one.Port())
		finds(t, both, severityError, "two-primaries", "primary")
	})
}

func TestCheckTellsClustersAndTimelinesApartAndReportsWithoutAPrimary(t *testing.T) {
	cluster := pgsplittest.Start(t, pgsplittest.Replicas(3))
	ctx := t.Context()
	old, promoted, follower, forgotten := cluster.Primary, cluster.Replicas[0], cluster.Replicas[1], cluster.Replicas[2]
	with := func(primary, replica *pgsplittest.Server) string {
		return primary.URI() + " " + replica.URI() + "&name=r"
	}

	t.Run("another cluster", func(t *testing.T) {
		// With a cache of its own it is not made from the same template.
		t.Setenv("XDG_CACHE_HOME", t.TempDir())
		t.Setenv("HOME", t.TempDir())
		foreign := pgsplittest.Start(t)
		finds(t, with(old, foreign.Replicas[0]), severityError, "other-cluster", "r")
	})
	t.Run("the primary is down", func(t *testing.T) {
		must(t, old.Stop(ctx, pgsplittest.Fast))
		finds(t, with(old, follower), severityError, "unreachable", "primary")
		finds(t, with(old, follower), severityWarning, "lagging", "r")
	})
	t.Run("a failover", func(t *testing.T) {
		must(t, promoted.Promote(ctx))
		finds(t, with(promoted, follower), severityWarning, "other-timeline", "r")
		must(t, follower.Follow(ctx, promoted))
		fine(t, with(promoted, follower))
	})
	t.Run("the old primary comes back", func(t *testing.T) {
		must(t, old.Start(ctx))
		finds(t, with(old, follower), severityError, "other-timeline", "r")
		finds(t, with(promoted, forgotten), severityError, "other-timeline", "r")
	})
}

func TestCheckTakesTheEnvironmentWithoutADSN(t *testing.T) {
	for _, name := range []string{"DATABASE_RO_URLS", "DATABASE_RO_URL", "DB_RO_HOST"} {
		t.Setenv(name, "")
	}
	t.Setenv("DATABASE_URL", "postgres://u:"+secret+"@127.0.0.1:1/x")
	t.Setenv("DATABASE_RO_URL", "postgres://127.0.0.1:2/?name=env")
	for _, blank := range [][]string{nil, {""}, {"", ""}} {
		var out, errs bytes.Buffer
		if status := run(t.Context(), append([]string{"check", "-json"}, blank...), &out, &errs); status != statusErrors {
			t.Errorf("%q: exit status %d: %s", blank, status, errs.String())
		}
		if !strings.Contains(out.String(), `"server": "env"`) {
			t.Errorf("%q: no replica of the environment in\n%s", blank, out.String())
		}
		noSecret(t, out.String()+errs.String())
	}
}

func TestAnUnusableDSNEndsInOneMark(t *testing.T) {
	for parameter, want := range map[string]string{"replica_maxlag=1s": "replica_max_lag?\n", "replica_max_lag=1": ".\n"} {
		var out bytes.Buffer
		run(t.Context(), []string{"check", "postgres://127.0.0.1:1/x?" + parameter}, &out, io.Discard)
		if text := out.String(); !strings.Contains(text, want) || strings.Contains(text, "?.") {
			t.Errorf("%s: no %q in\n%s", parameter, want, text)
		}
	}
}

func TestNoPasswordIsPrintedWhateverIsWrongWithTheArguments(t *testing.T) {
	dsn := "postgres://u:" + secret + "@127.0.0.1:1/x"
	for _, args := range [][]string{
		{dsn, "-" + dsn},
		{"-" + dsn},
		{"-timeout", dsn},
		{"-timeout=-1s", dsn},
		{"-json=" + dsn},
		{"postgres://u:" + secret + "@[127.0.0.1:1/x"},
		{dsn + "?replica_max_lag=" + secret},
		{dsn + "?replica_" + secret + "=1"},
		{"postgres://u:x@" + secret + "@127.0.0.1:1/x"},
		{dsn + " postgres://u:x@y:" + secret + "@127.0.0.1:1/x"},
		{dsn, "host=127.0.0.1", "password=" + secret},
		{"host=127.0.0.1 port=none password=" + secret},
		{dsn + " postgres://127.0.0.1:2/?weight=" + secret},
	} {
		var out, errs bytes.Buffer
		if status := run(context.Background(), append([]string{"check"}, args...), &out, &errs); status != statusErrors {
			t.Errorf("%q: exit status %d", args, status)
		}
		noSecret(t, out.String()+errs.String())
	}
}
