package pgsplit

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
)

// isolatePGEnv hides the environment and the home folder of whoever runs the tests from pgx.
func isolatePGEnv(t testing.TB) {
	t.Helper()
	for _, entry := range os.Environ() {
		name, _, _ := strings.Cut(entry, "=")
		if strings.HasPrefix(name, "PG") {
			t.Setenv(name, "") // restores it afterwards
			os.Unsetenv(name)
		}
	}
	home := t.TempDir()
	t.Setenv("HOME", home)
	t.Setenv("USERPROFILE", home)
	t.Setenv("PGPASSFILE", filepath.Join(home, "no-pgpass"))
	t.Setenv("PGSERVICEFILE", filepath.Join(home, "no-service"))
}

func mustParse(t testing.TB, dsn string) *Config {
	t.Helper()
	c, err := ParseDSN(dsn)
	if err != nil {
		t.Fatalf("ParseDSN(%q): %v", dsn, err)
	}
	return c
}

// wantConfigError checks that err wraps ErrConfig, holds every part, and hides the marker that stands for a password.
func wantConfigError(t *testing.T, err error, parts ...string) {
	t.Helper()
	if !errors.Is(err, ErrConfig) {
		t.Fatalf("got %v, want an error that wraps ErrConfig", err)
	}
	for _, part := range parts {
		if !strings.Contains(err.Error(), part) {
			t.Errorf("error %q does not say %q", err, part)
		}
	}
	if strings.Contains(err.Error(), "s3cr3t") {
		t.Errorf("error %q shows the password", err)
	}
	var parse *pgconn.ParseConfigError
	if errors.As(err, &parse) {
		t.Errorf("error %q carries pgx's error, and that the connection string", err)
	}
}

func writeFile(t testing.TB, name, text string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), name)
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

// endpoint is "user:password@host:port/database" of a replica, or of the primary for -1.
func endpoint(c *Config, i int) string {
	p := c.Primary
	if i >= 0 {
		p = c.Replicas[i].Pool
	}
	cc := p.ConnConfig
	return fmt.Sprintf("%s:%s@%s/%s", cc.User, cc.Password, addressesOf(p)[0], cc.Database)
}

func replicaNames(c *Config) string {
	var names []string
	for _, r := range c.Replicas {
		names = append(names, r.Name)
	}
	return strings.Join(names, " ")
}

func TestTheEmptyDSNIsPgxsEnvironment(t *testing.T) {
	isolatePGEnv(t)
	t.Setenv("PGHOST", "db.example")
	t.Setenv("PGPORT", "6543")
	t.Setenv("PGUSER", "app")
	t.Setenv("PGDATABASE", "shop")
	for _, dsn := range []string{"", " ", "\n\t"} {
		c := mustParse(t, dsn)
		if got := endpoint(c, -1); got != "app:@db.example:6543/shop" {
			t.Errorf("%q: %s", dsn, got)
		}
		if len(c.Replicas) != 0 {
			t.Errorf("%q: replicas %v", dsn, c.Replicas)
		}
	}
}

func TestTheFirstURIIsThePrimaryAndTheOthersAreReplicas(t *testing.T) {
	isolatePGEnv(t)
	const primary = "postgres://app:pw@db1/shop"
	for _, blank := range []string{" ", "\n", "\t", "\r\n", "\v\f", "  \n  "} {
		c := mustParse(t, blank+primary+blank+"postgresql://db2"+blank+"postgres://reader:pw2@db3:5433/shop"+blank)
		if got := endpoint(c, -1); got != "app:pw@db1:5432/shop" {
			t.Errorf("blank %q: primary %s", blank, got)
		}
		if got := endpoint(c, 0); got != "app:pw@db2:5432/shop" {
			t.Errorf("blank %q: replica 1 %s", blank, got)
		}
		if got := endpoint(c, 1); got != "reader:pw2@db3:5433/shop" {
			t.Errorf("blank %q: replica 2 %s", blank, got)
		}
	}
}

func TestAnEmptySecondURIMeansNone(t *testing.T) {
	isolatePGEnv(t)
	if c := mustParse(t, "postgres://db1/shop"+" "+""); len(c.Replicas) != 0 {
		t.Errorf("replicas %v", c.Replicas)
	}
}

func TestADSNWithoutOurParametersIsHandedOnVerbatim(t *testing.T) {
	isolatePGEnv(t)
	for _, dsn := range []string{
		"postgres://app:p%20w@db1/shop?application_name= x &sslmode=disable&",
		"host=db1  user = app password='a b\\'c' dbname=shop ",
		"host=db1 password=a\\ ",
		"postgres://db1/shop?a=b&a=c",
	} {
		if got := mustParse(t, dsn).Primary.ConnString(); got != dsn {
			t.Errorf("pgx was given %q for %q", got, dsn)
		}
	}
}

func TestOurParametersAreCutOutAndTheRestStays(t *testing.T) {
	isolatePGEnv(t)
	for _, test := range []struct{ dsn, rest string }{
		{"postgres://db1/shop?replica=db2&sslmode=disable", "postgres://db1/shop?sslmode=disable"},
		{"postgres://db1/shop?sslmode=disable&replica=db2", "postgres://db1/shop?sslmode=disable"},
		{"postgres://db1/shop?a=%41&replica=db2&b= x ", "postgres://db1/shop?a=%41&b= x"},
		{"postgres://db1/shop?replica=db2", "postgres://db1/shop"},
		{"postgres://db1?%72eplica=db2", "postgres://db1"},
		{"host=db1 replica=db2 dbname=shop", "host=db1 dbname=shop"},
		{"host=db1 dbname='shop'replica='db2'user=app", "host=db1 dbname='shop'user=app"},
		{"replica = db2 host = db1", "host = db1"},
	} {
		c := mustParse(t, test.dsn)
		if got := c.Primary.ConnString(); got != test.rest {
			t.Errorf("%q: pgx was given %q, want %q", test.dsn, got, test.rest)
		}
		if got := replicaNames(c); got != "db2:5432" {
			t.Errorf("%q: replicas %s", test.dsn, got)
		}
	}
}

func TestEveryParameterSetsItsField(t *testing.T) {
	isolatePGEnv(t)
	want := Config{
		MaxWait: 100 * time.Millisecond, MaxLag: 10 * time.Second, MaxLagBytes: 64 << 20, ReplicaTimeout: 2 * time.Second,
		RetryMin: 100 * time.Millisecond, RetryMax: 5 * time.Second, Balance: RoundRobin, OnStale: StaleError, OnPrimaryDown: PrimaryDownRead, Tx: TxReadOnly,
	}
	for _, dsn := range []string{
		"postgres://db1/shop?replica_max_wait=100ms&replica_max_lag=10s&replica_max_lag_bytes=64MB&replica_timeout=2s" +
			"&replica_retry_min=100ms&replica_retry_max=5s&replica_balance=round_robin&replica_on_stale=error&replica_on_primary_down=read&replica_tx=readonly",
		"host=db1 replica_max_wait=100ms replica_max_lag=10s replica_max_lag_bytes='64 MB' replica_timeout=2s " +
			"replica_retry_min=100ms replica_retry_max=5s replica_balance=round_robin replica_on_stale=error replica_on_primary_down=read replica_tx=readonly",
	} {
		got := *mustParse(t, dsn)
		got.Primary, got.Replicas = nil, nil
		if got.String() != want.String() {
			t.Errorf("%q:\n got %v\nwant %v", dsn, got, want)
		}
	}
}

func TestTheDefaultsNeedNoParameter(t *testing.T) {
	isolatePGEnv(t)
	want := Config{ReplicaTimeout: time.Second, RetryMin: 250 * time.Millisecond, RetryMax: 2 * time.Second}
	for _, dsn := range []string{
		"postgres://db1/shop",
		"postgres://db1/shop?replica_max_wait=0&replica_max_lag=0s&replica_max_lag_bytes=0&replica_balance=least_busy" +
			"&replica_on_stale=primary&replica_on_primary_down=error&replica_tx=hint",
	} {
		got := *mustParse(t, dsn)
		got.Primary = nil
		if got.String() != want.String() {
			t.Errorf("%q:\n got %v\nwant %v", dsn, got, want)
		}
	}
}

func TestBytesAreReadInPostgreSQLsUnits(t *testing.T) {
	for text, want := range map[string]int64{
		"1B": 1, "1kB": 1 << 10, "3MB": 3 << 20, "2GB": 2 << 30, "1TB": 1 << 40, "0": 0, "0MB": 0, "64 MB": 64 << 20,
		"8388607TB": 8388607 << 40,
	} {
		if got, err := parseBytes(text); err != nil || got != want {
			t.Errorf("%q: %d, %v, want %d", text, got, err, want)
		}
	}
	for _, text := range []string{"", "MB", "64", "-1MB", "64mb", "64KB", "1.5GB", "8388608TB", "99999999999999999999B", "64MBB", "1 0MB"} {
		if got, err := parseBytes(text); err == nil {
			t.Errorf("%q: %d, want an error", text, got)
		}
	}
}

func TestAnUnusableParameterIsAnErrorThatNamesIt(t *testing.T) {
	isolatePGEnv(t)
	for _, test := range []struct {
		dsn   string
		parts []string
	}{
		{"replica_max_wait=200", []string{"replica_max_wait", "unit"}},
		{"replica_max_wait=soon", []string{"replica_max_wait", "duration"}},
		{"replica_max_wait=-1s", []string{"replica_max_wait", "negative"}},
		{"replica_max_lag=-1s", []string{"replica_max_lag", "negative"}},
		{"replica_max_lag_bytes=64", []string{"replica_max_lag_bytes", "unit"}},
		{"replica_max_lag_bytes=-64MB", []string{"replica_max_lag_bytes", "negative"}},
		{"replica_timeout=0", []string{"replica_timeout", "more than 0"}},
		{"replica_retry_min=0s", []string{"replica_retry_min", "more than 0"}},
		{"replica_balance=random", []string{"replica_balance", "least_busy or round_robin"}},
		{"replica_on_stale=read", []string{"replica_on_stale", "primary or error"}},
		{"replica_on_primary_down=fail", []string{"replica_on_primary_down", "error or read"}},
		{"replica_tx=read-only", []string{"replica_tx", "hint or readonly"}},
		{"replica_tx=hint&replica_tx=hint", []string{"replica_tx", "twice"}},
		{"replica_maxwait=1s", []string{`"replica_maxwait"`, "did you mean replica_max_wait?"}},
		{"replicas=db2", []string{`"replicas"`, "did you mean replica?"}},
		{"Replica_Timeout=1s", []string{"did you mean replica_timeout?"}},
		{"replica_of_my_own_making=1s", []string{"unknown parameter", "replica_"}},
		{"pool_max_con=1", []string{`"pool_max_con"`, "did you mean pool_max_conns?"}},
		{"POOL_MAX_CONNS=1", []string{"did you mean pool_max_conns?"}},
		{"pool_something_else_entirely=1", []string{"unknown parameter", `"pool_"`}},
		{"pool_max_conns=0", []string{"pool_max_conns too small"}},
		{"pool_max_conns=many", []string{"cannot parse pool_max_conns"}},
		{"pool_max_conn_lifetime_jitter=1", []string{"cannot parse pool_max_conn_lifetime_jitter"}},
		{"pool_min_conns=-1", []string{"MinConns is negative"}},
		{"replica=", []string{"replica: ", "list of"}},
		{"replica=db2,", []string{"replica: ", "list of"}},
		{"replica=db2:0", []string{"replica: ", "list of"}},
		{"replica=db2:65536", []string{"replica: ", "list of"}},
		{"replica=db2:", []string{"replica: ", "list of"}},
		{"replica=::1", []string{"replica: ", "list of"}},
		{"replica=[::1", []string{"replica: ", "list of"}},
		{"replica=[db2]", []string{"replica: ", "list of"}},
		{"replica=app:s3cr3t@db2", []string{"replica: ", "list of"}},
		{"replica=db2&replica=db2", []string{"replica 2", "replica 1", "has it already"}},
		{"sslmode=maybe", []string{"sslmode is invalid"}},
		{"connect_timeout=soon", []string{"invalid connect_timeout"}},
		{"target_session_attrs=leader", []string{"unknown target_session_attrs"}},
		{"sslrootcert=/s3cr3t", []string{"unable to read CA file"}},
		{"service=none", []string{"failed to read service file"}},
	} {
		_, err := ParseDSN("postgres://app:s3cr3t@db1/shop?" + test.dsn)
		wantConfigError(t, err, append(test.parts, "URI 1")...)
		if strings.HasPrefix(test.dsn, "replica=app") {
			continue // the keyword form would end the value at the blank alone, as here
		}
		_, err = ParseDSN("host=db1 password=s3cr3t " + strings.ReplaceAll(test.dsn, "&", " "))
		wantConfigError(t, err, test.parts...)
	}
}

func TestTheParameterReplicationIsPgxs(t *testing.T) {
	isolatePGEnv(t)
	c := mustParse(t, "postgres://db1/shop?replication=database")
	if got := c.Primary.ConnConfig.RuntimeParams["replication"]; got != "database" {
		t.Errorf("replication is %q", got)
	}
}

func TestTheShortWayNamesHostsOfEveryKind(t *testing.T) {
	isolatePGEnv(t)
	const want = "db2:5432 db3:5433 10.0.0.4:5432 [::1]:5432 [fe80::1%eth0]:5434 /run/pg:5432"
	for _, dsn := range []string{
		"postgres://db1:6000/shop?replica=db2,db3:5433,10.0.0.4&replica=[::1],[fe80::1%25eth0]:5434&replica=/run/pg",
		"host=db1 port=6000 dbname=shop replica='db2, db3:5433 , 10.0.0.4' replica=[::1],[fe80::1%eth0]:5434 replica=/run/pg",
	} {
		if got := replicaNames(mustParse(t, dsn)); got != want {
			t.Errorf("%q:\n got %s\nwant %s", dsn, got, want)
		}
	}
}

func TestHostsOfTheShortWayComeBeforeURIs(t *testing.T) {
	isolatePGEnv(t)
	if got := replicaNames(mustParse(t, "postgres://db1/shop?replica=db2 postgres://db3?name=c")); got != "db2:5432 c" {
		t.Errorf("replicas %s", got)
	}
}

func TestAReplicasURISaysItsNameLabelWeightAndPool(t *testing.T) {
	isolatePGEnv(t)
	c := mustParse(t, "postgres://db1/shop?pool_max_conns=8&pool_ping_timeout=2s postgres://db2?name=b&label=eu%20west&weight=3&pool_max_conns=4")
	r := c.Replicas[0]
	if r.Name != "b" || r.Label != "eu west" || r.Weight != 3 {
		t.Errorf("replica %v", r)
	}
	if r.Pool.MaxConns != 4 || r.Pool.PingTimeout != 2*time.Second || c.Primary.MaxConns != 8 {
		t.Errorf("pools: primary %d, replica %d with ping timeout %s", c.Primary.MaxConns, r.Pool.MaxConns, r.Pool.PingTimeout)
	}
	if _, ok := r.Pool.ConnConfig.RuntimeParams["name"]; ok {
		t.Error("the name would be sent to the server")
	}
}

func TestNameLabelAndWeightOfThePrimaryAreRuntimeParameters(t *testing.T) {
	isolatePGEnv(t)
	c := mustParse(t, "postgres://db1/shop?label=x&replica=db2")
	if got := c.Primary.ConnConfig.RuntimeParams["label"]; got != "x" {
		t.Errorf("label %q", got)
	}
	if _, ok := c.Replicas[0].Pool.ConnConfig.RuntimeParams["label"]; ok {
		t.Error("the replica inherits the label")
	}
}

func TestAReplicaInheritsAllThatIsNotAboutAHost(t *testing.T) {
	isolatePGEnv(t)
	c := mustParse(t, "postgres://app:pw@db1:6000/shop?sslmode=verify-full&application_name=web&connect_timeout=3"+
		"&default_query_exec_mode=exec&statement_cache_capacity=7&options=-c%20work_mem%3D1MB&krbspn=postgres/db1&target_session_attrs=primary"+
		"&pool_max_conns=9 postgres://db2")
	r := c.Replicas[0].Pool
	cc := r.ConnConfig
	if got := endpoint(c, 0); got != "app:pw@db2:5432/shop" {
		t.Errorf("endpoint %s", got)
	}
	if cc.TLSConfig == nil || cc.TLSConfig.ServerName != "db2" {
		t.Errorf("TLS is for another host: %v", cc.TLSConfig)
	}
	if len(cc.Fallbacks) != 0 || cc.ValidateConnect != nil || cc.KerberosSpn != "" {
		t.Errorf("fallbacks %v, check of the kind of server %t, SPN %q", cc.Fallbacks, cc.ValidateConnect != nil, cc.KerberosSpn)
	}
	if cc.RuntimeParams["application_name"] != "web" || cc.RuntimeParams["options"] != "-c work_mem=1MB" {
		t.Errorf("runtime parameters %v", cc.RuntimeParams)
	}
	if cc.ConnectTimeout != 3*time.Second || cc.StatementCacheCapacity != 7 || cc.DefaultQueryExecMode != pgx.QueryExecModeExec || r.MaxConns != 9 {
		t.Errorf("replica %v, %s, %d, %v", r.MaxConns, cc.ConnectTimeout, cc.StatementCacheCapacity, cc.DefaultQueryExecMode)
	}
}

func TestAReplicasOwnURIWinsOverWhatItInherits(t *testing.T) {
	isolatePGEnv(t)
	c := mustParse(t, "postgres://app:pw@db1/shop?sslmode=verify-full&application_name=web postgres://db2?sslmode=disable&application_name=report")
	cc := c.Replicas[0].Pool.ConnConfig
	if cc.TLSConfig != nil || cc.RuntimeParams["application_name"] != "report" {
		t.Errorf("TLS %v, application_name %q", cc.TLSConfig, cc.RuntimeParams["application_name"])
	}
}

func TestNoVariableMovesAReplicaToThePrimarysHost(t *testing.T) {
	isolatePGEnv(t)
	t.Setenv("PGHOST", "db1")
	t.Setenv("PGPORT", "6000")
	t.Setenv("PGTARGETSESSIONATTRS", "read-write")
	t.Setenv("PGUSER", "app")
	c := mustParse(t, "dbname=shop replica=db2,/run/pg")
	for i, want := range []string{"app:@db2:5432/shop", "app:@/run/pg:5432/shop"} {
		if got := endpoint(c, i); got != want {
			t.Errorf("replica %d: %s", i+1, got)
		}
		if c.Replicas[i].Pool.ConnConfig.ValidateConnect != nil {
			t.Errorf("replica %d must be read-write", i+1)
		}
	}
	if !sameCheck(c.Primary.ConnConfig.ValidateConnect, pgconn.ValidateConnectTargetSessionAttrsReadWrite) {
		t.Error("the primary lost PGTARGETSESSIONATTRS")
	}
}

func TestAServiceFileSuppliesTheReplicaAllButItsHost(t *testing.T) {
	isolatePGEnv(t)
	t.Setenv("PGSERVICEFILE", writeFile(t, "service", "[shop]\nhost=db1\nport=6000\nuser=app\npassword=pw\ndbname=shop\n"+
		"target_session_attrs=read-write\npool_max_conns=3\n"))
	c := mustParse(t, "service=shop replica=db2")
	if got := endpoint(c, -1) + " " + endpoint(c, 0); got != "app:pw@db1:6000/shop app:pw@db2:5432/shop" {
		t.Error(got)
	}
	if c.Primary.MaxConns != 3 || c.Replicas[0].Pool.MaxConns != 3 || c.Replicas[0].Pool.ConnConfig.ValidateConnect != nil {
		t.Errorf("%v", c)
	}
	c = mustParse(t, "postgres:///?service=shop postgres://reader@db2")
	if got := endpoint(c, 0); got != "reader:@db2:5432/shop" {
		t.Errorf("another user got the service's password: %s", got)
	}
}

func TestAServiceFileCannotHoldOurParameters(t *testing.T) {
	isolatePGEnv(t)
	t.Setenv("PGSERVICEFILE", writeFile(t, "service", "[shop]\nhost=db1\nreplica_max_wait=1s\n[typo]\nhost=db1\npool_max_con=3\n"))
	_, err := ParseDSN("service=shop")
	wantConfigError(t, err, "service file")
	_, err = ParseDSN("service=typo")
	wantConfigError(t, err, "did you mean pool_max_conns?")
}

func TestThePasswordFollowsTheUser(t *testing.T) {
	isolatePGEnv(t)
	pgpass := writeFile(t, "pgpass", "db1:5432:shop:app:frompass1\ndb2:5432:shop:app:frompass2\ndb2:5432:shop:reader:readerpass\n")
	for _, test := range []struct{ name, pgpassword, dsn, want string }{
		{"inherited", "", "postgres://app:pw@db1/shop postgres://db2", "app:pw@db2:5432/shop"},
		{"inherited by the same user", "", "postgres://app:pw@db1/shop postgres://app@db2", "app:pw@db2:5432/shop"},
		{"its own", "", "postgres://app:pw@db1/shop postgres://:pw2@db2", "app:pw2@db2:5432/shop"},
		{"its own with its own user", "", "postgres://app:pw@db1/shop postgres://reader:pw2@db2", "reader:pw2@db2:5432/shop"},
		{"not the primary's for another user", "", "postgres://app:pw@db1/shop postgres://reader@db3", "reader:@db3:5432/shop"},
		{"from .pgpass for another user", "", "postgres://app:pw@db1/shop postgres://reader@db2", "reader:readerpass@db2:5432/shop"},
		{"from .pgpass anew for its host", "", "postgres://app@db1/shop postgres://db2", "app:frompass2@db2:5432/shop"},
		{"from PGPASSWORD for another user", "env", "postgres://app:pw@db1/shop postgres://reader@db2", "reader:env@db2:5432/shop"},
		{"an empty one is none", "", "postgres://app:pw@db1/shop postgres://db2?password=&user=", "app:pw@db2:5432/shop"},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Setenv("PGPASSFILE", pgpass)
			t.Setenv("PGPASSWORD", test.pgpassword)
			if got := endpoint(mustParse(t, test.dsn), 0); got != test.want {
				t.Errorf("got %s, want %s", got, test.want)
			}
		})
	}
}

func TestAnotherUserOpensThePrimarysDatabase(t *testing.T) {
	isolatePGEnv(t)
	// Without a name the server opens the database that is called like the user.
	c := mustParse(t, "postgres://app:pw@db1 postgres://reader:pw2@db2")
	if got := endpoint(c, 0); got != "reader:pw2@db2:5432/app" {
		t.Error(got)
	}
}

func TestAReplicaURIThatCannotBeOneIsAnError(t *testing.T) {
	isolatePGEnv(t)
	for _, test := range []struct {
		uri   string
		parts []string
	}{
		{"postgres://db2/other", []string{"another database"}},
		{"postgres://db2?dbname=other", []string{"another database"}},
		{"postgres://reader:pw2@db2/reader", []string{"another database"}},
		{"postgres:///shop", []string{"no host"}},
		{"postgres://", []string{"no host"}},
		{"postgres://db2,", []string{"no host"}},
		{"postgres://:5433", []string{"no host"}},
		{"postgres://db2?host=", []string{"no host"}},
		{"postgres://db2?service=x", []string{"service"}},
		{"postgres://db2?servicefile=x", []string{"service"}},
		{"postgres://db2?weight=0", []string{"weight"}},
		{"postgres://db2?weight=-1", []string{"weight"}},
		{"postgres://db2?weight=1.5", []string{"weight"}},
		{"postgres://db2?weight=", []string{"weight"}},
		{"postgres://db2?weight=99999999999", []string{"weight"}},
		{"postgres://db2?name=a&name=b", []string{"name", "twice"}},
		{"postgres://db2?name=primary", []string{"replica 1", "name"}},
		{"postgres://db2?name=a%0Ab", []string{"replica 1", "control"}},
		{"postgres://db2?replica_max_wait=1s", []string{"belong to the primary"}},
		{"postgres://db2?pool_max_con=1", []string{"did you mean pool_max_conns?"}},
		{"postgres://db2?target_session_attrs=primary", []string{"replica 1", "target_session_attrs"}},
		{"postgres://db2?target_session_attrs=read-write", []string{"replica 1", "target_session_attrs"}},
		{"postgres://db2?target_session_attrs=leader", []string{"unknown target_session_attrs"}},
		{"postgres://db2:99999", []string{"invalid port"}},
		{"postgres://db2,db3?port=1,2,3", []string{"port"}},
		{"postgres://[db2", []string{"IPv6"}},
		{"postgres://db2/a b", []string{"%20"}},
		{"postgres://db2?a", []string{"key=value"}},
		{"postgres://db2?a=%zz", []string{"percent"}},
	} {
		_, err := ParseDSN("postgres://app:s3cr3t@db1/shop " + test.uri)
		wantConfigError(t, err, append(test.parts, "URI 2")...)
	}
}

func TestAReplicaMayAskForTheKindOfServer(t *testing.T) {
	isolatePGEnv(t)
	for attrs, want := range map[string]pgconn.ValidateConnectFunc{
		"any":            nil,
		"standby":        pgconn.ValidateConnectTargetSessionAttrsStandby,
		"read-only":      pgconn.ValidateConnectTargetSessionAttrsReadOnly,
		"prefer-standby": pgconn.ValidateConnectTargetSessionAttrsPreferStandby,
	} {
		c := mustParse(t, "postgres://db1/shop postgres://db2,db3:5433?target_session_attrs="+attrs)
		cc := c.Replicas[0].Pool.ConnConfig
		if !sameCheck(cc.ValidateConnect, want) {
			t.Errorf("%s: another check", attrs)
		}
		if got := fmt.Sprint(addressesOf(c.Replicas[0].Pool)); got != "[db2:5432 db3:5433]" {
			t.Errorf("%s: addresses %s", attrs, got)
		}
	}
}

func TestAPrimaryOfSeveralHostsIsLookedForAmongThem(t *testing.T) {
	isolatePGEnv(t)
	service := writeFile(t, "service", "[rw]\ntarget_session_attrs=read-write\n[standby]\ntarget_session_attrs=standby\n")
	t.Setenv("PGSERVICEFILE", service)
	primary := pgconn.ValidateConnectTargetSessionAttrsPrimary
	readWrite := pgconn.ValidateConnectTargetSessionAttrsReadWrite
	for _, test := range []struct {
		env, dsn string
		want     pgconn.ValidateConnectFunc
	}{
		{"", "postgres://db1,db2/shop", primary},
		{"", "host=db1,db2", primary},
		{"", "postgres://db1:1,db1:2/shop", primary},
		{"", "postgres://db1/shop?sslmode=prefer", nil},
		{"", "postgres://db1/shop", nil},
		{"", "postgres://db1,db2/shop?target_session_attrs=any", nil},
		{"", "postgres://db1,db2/shop?target_session_attrs=read-write", readWrite},
		{"", "postgres://db1,db2/shop?target_session_attrs=primary", primary},
		{"", "postgres://db1,db2/shop?service=rw", readWrite},
		{"any", "postgres://db1,db2/shop", nil},
		{"read-write", "postgres://db1,db2/shop", readWrite},
		{"read-write", "postgres://db1/shop", readWrite},
	} {
		t.Setenv("PGTARGETSESSIONATTRS", test.env)
		if got := mustParse(t, test.dsn).Primary.ConnConfig.ValidateConnect; !sameCheck(got, test.want) {
			t.Errorf("%q with PGTARGETSESSIONATTRS=%s: another check", test.dsn, test.env)
		}
	}
	for _, attrs := range []string{"standby", "read-only", "prefer-standby"} {
		t.Setenv("PGTARGETSESSIONATTRS", attrs)
		_, err := ParseDSN("postgres://db1/shop")
		wantConfigError(t, err, "PGTARGETSESSIONATTRS")
		t.Setenv("PGTARGETSESSIONATTRS", "")
		_, err = ParseDSN("postgres://db1,db2/shop?target_session_attrs=" + attrs)
		wantConfigError(t, err, "target_session_attrs")
	}
	_, err := ParseDSN("host=db1 service=standby")
	wantConfigError(t, err, "target_session_attrs")
}

func TestAReplicaThatIsThePrimaryIsLeftOut(t *testing.T) {
	isolatePGEnv(t)
	for _, test := range []struct{ dsn, replicas string }{
		{"postgres://app:pw@db1/shop postgres://app:pw@db1/shop", ""},
		{"postgres://app:pw@db1/shop postgres://reader:pw2@DB1:5432/shop", ""},
		{"postgres://db1/shop?target_session_attrs=read-write postgres://db1/shop?target_session_attrs=read-write", ""},
		{"postgres://db1/shop?replica=db1,db2,db1", "db2:5432"},
		{"postgres://db1/shop?replica=db1:5433", "db1:5433"},
		{"postgres://db1/shop?replica_max_wait=1s postgres://db1/shop?replica_max_wait=1s", ""},
		{"postgres:///shop postgres:///shop", ""},
		{"postgres://db1,db2/shop postgres://db1,db2/shop", ""},
		{"postgres://db1,db2/shop?replica=db1,db2", "db1:5432 db2:5432"},
		{"postgres://db1,db2/shop postgres://db1,db2?target_session_attrs=standby", "db1:5432"},
	} {
		if got := replicaNames(mustParse(t, test.dsn)); got != test.replicas {
			t.Errorf("%q: replicas %q, want %q", test.dsn, got, test.replicas)
		}
	}
}

func TestWhatThePoolParametersDoNotSayIsLeftToSQLDB(t *testing.T) {
	isolatePGEnv(t)
	c := mustParse(t, "postgres://db1/shop postgres://db2")
	for i, p := range []int32{c.Primary.MaxConns, c.Replicas[0].Pool.MaxConns} {
		if p != 0 {
			t.Errorf("pool %d: MaxConns %d", i, p)
		}
	}
	if c.Primary.MaxConnLifetime != 0 || c.Primary.MaxConnIdleTime != 0 || c.Primary.HealthCheckPeriod != time.Minute {
		t.Errorf("lifetime %s, idle time %s, health check %s", c.Primary.MaxConnLifetime, c.Primary.MaxConnIdleTime, c.Primary.HealthCheckPeriod)
	}
	c = mustParse(t, "host=db1 pool_max_conns=5 pool_max_conn_lifetime=1h pool_max_conn_idle_time=5m pool_min_conns=1 replica=db2")
	for _, p := range []string{describePool(c.Primary), describePool(c.Replicas[0].Pool)} {
		if !strings.Contains(p, "max_conns=5") {
			t.Error(p)
		}
	}
	if p := c.Replicas[0].Pool; p.MaxConnLifetime != time.Hour || p.MaxConnIdleTime != 5*time.Minute || p.MinConns != 1 {
		t.Errorf("lifetime %s, idle time %s, min %d", p.MaxConnLifetime, p.MaxConnIdleTime, p.MinConns)
	}
}

func TestKeywordsThenAURISaysToUseConfig(t *testing.T) {
	isolatePGEnv(t)
	for _, dsn := range []string{
		"host=db1 password=s3cr3t postgres://db2",
		"host=db1 password=s3cr3t postgres://db2?sslmode=disable",
		"host=db1 password=s3cr3t postgresql://reader:s3cr3t@db2/shop?a=b host=db3",
	} {
		_, err := ParseDSN(dsn)
		wantConfigError(t, err, "Config")
	}
	if c := mustParse(t, "host=db1 application_name='x postgres://db2'"); len(c.Replicas) != 0 {
		t.Errorf("a quoted value was taken for a URI: %v", c)
	}
}

func TestMoreReplicasThanAClusterHasAreRefused(t *testing.T) {
	isolatePGEnv(t)
	hosts := make([]string, 65)
	for i := range hosts {
		hosts[i] = fmt.Sprintf("db%d", i+2)
	}
	mustParse(t, "postgres://db1/shop?replica="+strings.Join(hosts[:64], ","))
	_, err := ParseDSN("postgres://db1/shop?replica=" + strings.Join(hosts, ","))
	wantConfigError(t, err, "65 replicas")
}

// mangledDSNs each hold the password s3cr3t where a hurried edit can leave it.
var mangledDSNs = []string{
	"postgres://app:s3cr3t/x@db1/shop",
	"postgres://app:s3cr3t?/x@db1/shop",
	"postgres://app:s3cr3t#/x@db1/shop",
	"postgres://app:x/s3cr3t@db1/shop",
	"postgres://app:x:s3cr3t/y@db1/shop",
	"postgres://app:s3cr3t%@db1/shop",
	"postgres://app:%s3cr3t@db1/shop",
	"postgres://app:s3cr3t x@db1/shop",
	"postgres://app:x s3cr3t@db1/shop",
	"postgres://app:s3cr3t@db1:port/shop",
	"postgres://app:s3cr3t@[db1/shop",
	"postgres://app:s3cr3t@db1/shop?sslmode",
	"postgres://app:s3cr3t@db1/shop?sslmode=a=b",
	"postgres://app:s3cr3t@db1/shop?sslmode=maybe",
	"postgres://app:s3cr3t@db1/shop?replica=",
	"postgres://app:x@db1/shop?password=s3cr3t&replica_tx=1",
	"postgres://app:x/?replica_s3cr3t=1@db1/shop",
	"postgres://app:x/?replicas3cr3t=1@db1/shop",
	"postgres://app:x/?pool_s3cr3t=1",
	"postgres://app:x/?replica_max_wait=s3cr3t@db1",
	"postgres://app:x/?replica=s3cr3t@db1",
	"postgres://app:x/?s3cr3t",
	"postgres://app:x/?s3cr3t=%zz",
	"postgres://app:x/?target_session_attrs=s3cr3t",
	"postgres://app:x/?channel_binding=s3cr3t",
	"postgres://app:x/?min_protocol_version=s3cr3t",
	"postgres://app:x/?default_query_exec_mode=s3cr3t",
	"postgres://app:x/?statement_cache_capacity=s3cr3t",
	"postgres://app:x/?pool_max_conns=s3cr3t",
	"postgres://app:x/?sslrootcert=s3cr3t",
	"postgres://app:x/?sslcert=s3cr3t&sslkey=s3cr3t",
	"postgres://app:x/?service=s3cr3t",
	"postgres://app:x/?require_auth=s3cr3t",
	"postgres://app:x/?sslcertmode=s3cr3t",
	"postgres://db1:s3cr3t/shop",
	"postgres://db1/shop postgres://app:s3cr3t/x@db2",
	"postgres://db1/shop postgres://db2/s3cr3t",
	"postgres://db1/shop postgres://db2?weight=s3cr3t",
	"postgres://db1/shop postgres://db2?name=s3cr3t postgres://db3?name=s3cr3t",
	"postgres://db1/shop postgres://s3cr3t postgres://s3cr3t",
	"postgres:/app:s3cr3t@db1/shop",
	"postgres//app:s3cr3t@db1/shop",
	"Postgres://app:s3cr3t@db1/shop",
	"mysql://app:s3cr3t@db1/shop",
	"app:s3cr3t@db1/shop",
	"s3cr3t",
	"host=db1 password=s3cr3t port",
	"host=db1 password=s3cr3t port=x",
	"host=db1 password='s3cr3t",
	"host=db1 password s3cr3t",
	"host=db1 password s3cr3t port=1",
	"host=db1 password=x s3cr3t port=1",
	"host=db1 sslmode=s3cr3t",
	"host=db1 replica_timeout= password=s3cr3t",
	"host=db1 replica= password=s3cr3t",
	"host=db1 replica_on_stale='x password=s3cr3t'",
	"host=db1 password=s3cr3t postgres://app:s3cr3t@db2",
	"host=db1 password=s3cr3t\x00",
	"postgres://app:s3cr3t@db1/shop\x00",
	"host=db1 connect_timeout=s3cr3t",
}

func TestNoErrorShowsThePassword(t *testing.T) {
	isolatePGEnv(t)
	for _, dsn := range mangledDSNs {
		if _, err := ParseDSN(dsn); err == nil {
			t.Errorf("%q: no error", dsn)
		} else {
			wantConfigError(t, err)
		}
		_, err := configFromLookup("", func(name string) (string, bool) {
			switch name {
			case "DATABASE_URL":
				return "postgres://app:s3cr3t@db0/shop", true
			case "DATABASE_RO_URL":
				return dsn, true
			}
			return "", false
		})
		if err != nil {
			wantConfigError(t, err, "DATABASE_")
		}
	}
}

func TestFormatDSNWritesWhatParseDSNReads(t *testing.T) {
	isolatePGEnv(t)
	for _, test := range []struct{ dsn, want string }{
		{"", ""},
		{"host=db1", "host=db1"},
		{"replica=db2 host=db1 replica_max_wait=100ms password='a b\\'c\\\\'", `host=db1 password='a b\'c\\' replica=db2 replica_max_wait=100ms`},
		{"postgres://db1", "postgres://db1/"},
		{"postgres://app:p%40w@db1:6000,db2/shop?a=b", "postgres://app:p%40w@/shop?a=b&host=db1,db2&port=6000,"},
		{"postgres://db1/shop?replica=db2:5433,[::1],/run/pg", "postgres://db1/shop?replica=db2:5433,%5B::1%5D,/run/pg"},
		{
			"postgres://app:pw@db1/shop postgres://db2 postgres://reader:pw2@db3?label=eu&weight=2&name=c&pool_max_conns=3",
			"postgres://app:pw@db1/shop?replica=db2 postgres://reader:pw2@db3:5432/?label=eu&name=c&pool_max_conns=3&weight=2",
		},
		{
			"postgres://db1/shop?replica_retry_max=100ms&replica_timeout=5s&replica_max_lag_bytes=65536kB&replica_balance=round_robin&pool_max_conns=2&pool_health_check_period=2m",
			"postgres://db1/shop?pool_health_check_period=2m0s&pool_max_conns=2&replica_balance=round_robin&replica_max_lag_bytes=64MB&replica_retry_max=100ms&replica_retry_min=100ms&replica_timeout=5s",
		},
		{"postgres:///shop?user=&host=&port=&password=", "postgres:///shop?host=&password=&port=&user="},
	} {
		c := mustParse(t, test.dsn)
		got, err := FormatDSN(c)
		if err != nil || got != test.want {
			t.Errorf("%q:\n got %q, %v\nwant %q", test.dsn, got, err, test.want)
			continue
		}
		if field := difference(c, mustParse(t, got)); field != "" {
			t.Errorf("%q: %s is lost", test.dsn, field)
		}
	}
}

func TestFormatDSNWritesChangedPoolsAndOptions(t *testing.T) {
	isolatePGEnv(t)
	c := mustParse(t, "host=db1 user=app password=pw replica=db2")
	c.MaxLag = time.Minute
	c.Primary.MaxConns, c.Replicas[0].Pool.MaxConns = 3, 5
	c.Replicas[0].Name = "b"
	got, err := FormatDSN(c)
	const want = "postgres://app:pw@db1/?pool_max_conns=3&replica_max_lag=1m0s postgres://db2:5432/?name=b&pool_max_conns=5"
	if err != nil || got != want {
		t.Errorf("got %q, %v\nwant %q", got, err, want)
	}
}

func TestFormatDSNRefusesWhatADSNCannotSay(t *testing.T) {
	isolatePGEnv(t)
	for _, test := range []struct {
		change func(*Config)
		field  string
	}{
		{func(c *Config) { c.Primary.ConnConfig.Host = "db9" }, "Primary.ConnConfig.Host"},
		{func(c *Config) { c.Primary.ConnConfig.Password = "changed s3cr3t" }, "Primary.ConnConfig.Password"},
		{func(c *Config) { c.Primary.ConnConfig.RuntimeParams["application_name"] = "x" }, "Primary.ConnConfig.RuntimeParams"},
		{func(c *Config) { c.Primary.ConnConfig.TLSConfig = nil }, "Primary.ConnConfig.TLSConfig"},
		{func(c *Config) { c.Primary.ConnConfig.Fallbacks = nil }, "Primary.ConnConfig.Fallbacks"},
		{func(c *Config) { c.Primary.ConnConfig.StatementCacheCapacity = 1 }, "Primary.ConnConfig.StatementCacheCapacity"},
		{func(c *Config) { c.Replicas[0].Pool.ConnConfig.User = "x" }, "Replicas[0].Pool.ConnConfig.User"},
		{func(c *Config) { c.Replicas[0].Pool.MaxConns = 0 }, "Replicas[0].Pool.MaxConns"},
		{func(c *Config) { c.Primary = nil }, "Primary"},
	} {
		c := mustParse(t, "postgres://app:s3cr3t@db1/shop?pool_max_conns=2&replica=db2")
		test.change(c)
		got, err := FormatDSN(c)
		if err == nil {
			t.Errorf("%s: %q, want an error", test.field, got)
			continue
		}
		wantConfigError(t, err, test.field)
	}
}
