package pgsplit

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
)

func mustPool(t testing.TB, connString string) *pgxpool.Config {
	t.Helper()
	p, err := pgxpool.ParseConfig(connString)
	if err != nil {
		t.Fatal(err)
	}
	return p
}

func TestPreparingAConfigFillsTheDefaults(t *testing.T) {
	isolatePGEnv(t)
	c := &Config{
		Primary:  mustPool(t, "postgres://app@db1/shop"),
		Replicas: []Replica{{Pool: mustPool(t, "postgres://app@db2/shop")}, {Pool: mustPool(t, "postgres://app@[::1]:5433/shop"), Name: "c", Weight: 3}},
	}
	p, err := c.prepared()
	if err != nil {
		t.Fatal(err)
	}
	if p.ReplicaTimeout != time.Second || p.Replicas[0].Name != "db2:5432" || p.Replicas[0].Weight != 1 || p.Replicas[1].Name != "c" || p.Replicas[1].Weight != 3 {
		t.Errorf("%v", p)
	}
	if c.ReplicaTimeout != 0 || c.Replicas[0].Name != "" || c.Replicas[0].Weight != 0 {
		t.Errorf("the caller's config was changed: %v", c)
	}
}

func TestAPreparedConfigSharesNothingWithTheCallers(t *testing.T) {
	isolatePGEnv(t)
	c := mustParse(t, "postgres://app@db1/shop?application_name=web&replica=db2")
	p, err := c.prepared()
	if err != nil {
		t.Fatal(err)
	}
	c.Primary.MaxConns = 9
	c.Primary.ConnConfig.RuntimeParams["application_name"] = "changed"
	c.Primary.ConnConfig.Fallbacks[0].Host = "changed"
	c.Replicas[0].Pool.ConnConfig.Host = "changed"
	c.Replicas[0].Name = "changed"
	if p.Primary.MaxConns != 0 || p.Primary.ConnConfig.RuntimeParams["application_name"] != "web" ||
		p.Primary.ConnConfig.Fallbacks[0].Host != "db1" || p.Replicas[0].Pool.ConnConfig.Host != "db2" || p.Replicas[0].Name != "db2:5432" {
		t.Errorf("the copy changed with the original: %v", p)
	}
}

func TestTheValuesOfAHandMadePoolConfigCountAsTheyStand(t *testing.T) {
	isolatePGEnv(t)
	primary := mustPool(t, "postgres://app@db1/shop")
	p, err := (&Config{Primary: primary}).prepared()
	if err != nil {
		t.Fatal(err)
	}
	if p.Primary.MaxConns != primary.MaxConns || p.Primary.MaxConnLifetime != time.Hour || p.Primary.MaxConnIdleTime != 30*time.Minute {
		t.Errorf("MaxConns %d, lifetime %s, idle time %s", p.Primary.MaxConns, p.Primary.MaxConnLifetime, p.Primary.MaxConnIdleTime)
	}
}

func TestAHandMadePrimaryOfSeveralHostsIsLookedForAmongThem(t *testing.T) {
	isolatePGEnv(t)
	own := func(_ *pgxpool.Config) {}
	for _, test := range []struct {
		connString string
		change     func(*pgxpool.Config)
		want       pgconn.ValidateConnectFunc
	}{
		{"postgres://db1,db2/shop", own, pgconn.ValidateConnectTargetSessionAttrsPrimary},
		{"postgres://db1,db2/shop?target_session_attrs=any", own, nil},
		{"postgres://db1/shop", own, nil},
		{"postgres://db1,db2/shop", func(p *pgxpool.Config) {
			p.ConnConfig.ValidateConnect = pgconn.ValidateConnectTargetSessionAttrsReadWrite
		}, pgconn.ValidateConnectTargetSessionAttrsReadWrite},
	} {
		pool := mustPool(t, test.connString)
		test.change(pool)
		p, err := (&Config{Primary: pool}).prepared()
		if err != nil {
			t.Fatal(err)
		}
		if !sameCheck(p.Primary.ConnConfig.ValidateConnect, test.want) {
			t.Errorf("%s: another check", test.connString)
		}
	}
}

func TestAHandMadeReplicaThatIsThePrimaryIsLeftOut(t *testing.T) {
	isolatePGEnv(t)
	p, err := (&Config{
		Primary:  mustPool(t, "postgres://app@db1/shop"),
		Replicas: []Replica{{Pool: mustPool(t, "postgres://app@db1/shop")}, {Pool: mustPool(t, "postgres://app@Db1/shop")}},
	}).prepared()
	if err != nil || len(p.Replicas) != 0 {
		t.Errorf("%v, %v", p, err)
	}
}

func TestAConfigThatNoConnectorCanUseIsRefused(t *testing.T) {
	isolatePGEnv(t)
	for _, test := range []struct {
		change func(c *Config)
		part   string
	}{
		{func(c *Config) { c.Primary = nil }, "Primary is required"},
		{func(c *Config) { c.Primary = &pgxpool.Config{} }, "Primary: a pool config must come from pgxpool.ParseConfig"},
		{func(c *Config) { c.Primary = &pgxpool.Config{ConnConfig: &pgx.ConnConfig{}} }, "Primary: a pool config must come from"},
		{func(c *Config) { c.Primary.MaxConns = -1 }, "Primary: MaxConns is negative"},
		{func(c *Config) { c.Primary.MinIdleConns = -1 }, "Primary: MinIdleConns is negative"},
		{func(c *Config) { c.Primary.PingTimeout = -1 }, "Primary: PingTimeout is negative"},
		{func(c *Config) {
			c.Primary.ConnConfig.ValidateConnect = pgconn.ValidateConnectTargetSessionAttrsPreferStandby
		}, "Primary: target_session_attrs"},
		{func(c *Config) { c.MaxWait = -1 }, "MaxWait"},
		{func(c *Config) { c.MaxLag = -1 }, "MaxLag"},
		{func(c *Config) { c.MaxLagBytes = -1 }, "MaxLagBytes"},
		{func(c *Config) { c.ReplicaTimeout = -1 }, "ReplicaTimeout"},
		{func(c *Config) { c.Balance = 7 }, "Balance has no meaning: unknown(7)"},
		{func(c *Config) { c.OnStale = 7 }, "OnStale"},
		{func(c *Config) { c.OnPrimaryDown = 7 }, "OnPrimaryDown"},
		{func(c *Config) { c.Tx = 7 }, "Tx"},
		{func(c *Config) { c.Replicas[1].Pool = nil }, "replica 2: Pool is required"},
		{func(c *Config) { c.Replicas[1].Pool.ConnConfig = nil }, "replica 2: a pool config"},
		{func(c *Config) { c.Replicas[1].Weight = -1 }, "replica 2: weight"},
		{func(c *Config) { c.Replicas[1].Name = "db2:5432" }, "replica 2: name: replica 1 has it already"},
		{func(c *Config) { c.Replicas[1].Name = "Primary" }, "replica 2: name"},
		{func(c *Config) { c.Replicas[1].Label = "a\nb" }, "replica 2: name and label"},
		{func(c *Config) { c.Replicas[1].Pool.ConnConfig.Host = "/a\nb" }, "replica 2: name and label"},
		{func(c *Config) { c.Replicas[1].Pool.ConnConfig.Database = "other" }, "replica 2: another database"},
		{func(c *Config) {
			c.Replicas[1].Pool.ConnConfig.ValidateConnect = pgconn.ValidateConnectTargetSessionAttrsReadWrite
		}, "replica 2: target_session_attrs"},
		{func(c *Config) { c.Replicas = make([]Replica, 65) }, "65 replicas"},
	} {
		c := &Config{
			Primary: mustPool(t, "postgres://app:s3cr3t@db1/shop"),
			Replicas: []Replica{
				{Pool: mustPool(t, "postgres://app:s3cr3t@db2/shop")},
				{Pool: mustPool(t, "postgres://app:s3cr3t@db3/shop")},
			},
		}
		test.change(c)
		_, err := c.prepared()
		wantConfigError(t, err, test.part)
	}
	var none *Config
	if _, err := none.prepared(); !errors.Is(err, ErrConfig) {
		t.Errorf("nil: %v", err)
	}
}

func TestACopyOfThePrimaryWithAnotherHostIsRefused(t *testing.T) {
	isolatePGEnv(t)
	for _, sslmode := range []string{"prefer", "allow", "require", "verify-full"} {
		primary := mustPool(t, "postgres://app:s3cr3t@db1/shop?sslmode="+sslmode)
		replica := primary.Copy()
		replica.ConnConfig.Host = "db2"
		_, err := (&Config{Primary: primary, Replicas: []Replica{{Pool: replica}}}).prepared()
		wantConfigError(t, err, "replica 1", "parse it for its own host")
	}
	primary := mustPool(t, "postgres://app@db1/shop?sslmode=disable")
	replica := primary.Copy()
	replica.ConnConfig.Host = "db2"
	if _, err := (&Config{Primary: primary, Replicas: []Replica{{Pool: replica}}}).prepared(); err != nil {
		t.Errorf("nothing of this copy leads to the primary: %v", err)
	}
}

func TestNoVerbPrintsAPassword(t *testing.T) {
	isolatePGEnv(t)
	c := mustParse(t, "postgres://app:s3cr3t@db1/shop?options=-c%20my.token%3Ds3cr3t postgres://reader:s3cr3t@db2")
	type exported struct {
		C *Config
		V Config
		R Replica
		L []Replica
	}
	type hidden struct {
		c *Config
		v Config
		r Replica
	}
	for _, v := range []any{
		c, *c, c.Replicas, c.Replicas[0], &c.Replicas[0], exported{c, *c, c.Replicas[0], c.Replicas}, &exported{C: c},
		hidden{c, *c, c.Replicas[0]}, map[string]*Config{"a": c}, []any{c, *c}, fmt.Errorf("about %v", c),
	} {
		for _, verb := range []string{"%v", "%+v", "%#v", "%s", "%q", "%x", "%d"} {
			got := fmt.Sprintf(verb, v)
			if strings.Contains(got, "s3cr3t") || strings.Contains(got, fmt.Sprintf("%x", "s3cr3t")) {
				t.Errorf("%s of %T shows the password: %s", verb, v, got)
			}
		}
	}
	for _, got := range []string{c.String(), c.GoString(), c.Replicas[0].String(), c.Replicas[0].GoString()} {
		if strings.Contains(got, "s3cr3t") || !strings.Contains(got, "db2:5432") {
			t.Errorf("%s", got)
		}
	}
	var none *Config
	if got := fmt.Sprintf("%v %v %v", none, Config{}, Replica{}); !strings.Contains(got, "<nil>") {
		t.Errorf("%s", got)
	}
}

func TestChoicesPrintTheirWordInADSN(t *testing.T) {
	got := fmt.Sprint(LeastBusy, RoundRobin, StalePrimary, StaleError, PrimaryDownError, PrimaryDownRead, TxHint, TxReadOnly, Balance(9))
	if want := "least_busy round_robin primary error error read hint readonly unknown(9)"; got != want {
		t.Errorf("got %s, want %s", got, want)
	}
}

func TestAHandMadeConfigIsWrittenAsADSN(t *testing.T) {
	isolatePGEnv(t)
	c := &Config{
		Primary:  mustPool(t, "host=db1 user=app password=pw dbname=shop sslmode=disable pool_max_conns=4"),
		Replicas: []Replica{{Label: "eu", Pool: mustPool(t, "host=db2 user=reader password=pw2 dbname=shop sslmode=disable pool_max_conns=4")}},
	}
	got, err := FormatDSN(c)
	const want = "postgres://app:pw@db1/shop?pool_max_conn_idle_time=30m0s&pool_max_conn_lifetime=1h0m0s&pool_max_conns=4&sslmode=disable " +
		"postgres://reader:pw2@db2/?label=eu"
	if err != nil || got != want {
		t.Errorf("got %q, %v\nwant %q", got, err, want)
	}
	c.Replicas[0].Pool = mustPool(t, "host=db2 user=app dbname=shop sslmode=disable pool_max_conns=4")
	_, err = FormatDSN(c)
	wantConfigError(t, err, "Replicas[0].Pool.ConnConfig.Password")
}
