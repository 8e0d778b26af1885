package pgsplit

import (
	"strings"
	"testing"
)

// fromMap looks variables up in a map.
func fromMap(env map[string]string) lookupFunc {
	return func(name string) (string, bool) {
		value, ok := env[name]
		return value, ok
	}
}

func TestTheEnvironmentSaysWhereTheServersAre(t *testing.T) {
	isolatePGEnv(t)
	for _, test := range []struct {
		name, prefix string
		env          map[string]string
		want         string // the primary, then each replica
	}{
		{"a URL alone", "", map[string]string{"DATABASE_URL": "postgres://app:pw@db1/shop"}, "app:pw@db1:5432/shop"},
		{
			"a URL and a replica's URL", "",
			map[string]string{"DATABASE_URL": "postgres://app:pw@db1/shop", "DATABASE_RO_URL": "postgres://reader:pw2@db2"},
			"app:pw@db1:5432/shop reader:pw2@db2:5432/shop",
		},
		{
			"several replicas", "",
			map[string]string{"DATABASE_URL": "postgres://app:pw@db1/shop", "DATABASE_RO_URLS": "postgres://db2\npostgres://db3:5433\n"},
			"app:pw@db1:5432/shop app:pw@db2:5432/shop app:pw@db3:5433/shop",
		},
		{
			"replicas in the primary's URL come first", "",
			map[string]string{"DATABASE_URL": "postgres://app:pw@db1/shop?replica=db2 postgres://db3", "DATABASE_RO_URL": "postgres://db4"},
			"app:pw@db1:5432/shop app:pw@db2:5432/shop app:pw@db3:5432/shop app:pw@db4:5432/shop",
		},
		{
			"keywords and values", "",
			map[string]string{"DATABASE_URL": "host=db1 user=app password=pw dbname=shop", "DATABASE_RO_URL": "host=db2 user=reader password='p w'"},
			"app:pw@db1:5432/shop reader:p w@db2:5432/shop",
		},
		{
			"the list goes before the single URL, and that before the host", "",
			map[string]string{
				"DATABASE_URL": "postgres://app@db1/shop", "DATABASE_RO_URLS": "postgres://db2", "DATABASE_RO_URL": "postgres://db3",
				"DB_RO_HOST": "db4",
			},
			"app:@db1:5432/shop app:@db2:5432/shop",
		},
		{
			"the prefix goes before the bare name", "APP_",
			map[string]string{
				"APP_DATABASE_URL": "postgres://app@db1/shop", "DATABASE_URL": "postgres://app@db8/shop",
				"APP_DATABASE_RO_URL": "postgres://db2", "DATABASE_RO_URLS": "postgres://db9",
			},
			"app:@db1:5432/shop app:@db2:5432/shop",
		},
		{
			"without the prefixed name the bare one counts", "APP_",
			map[string]string{"DATABASE_URL": "postgres://app@db1/shop", "DATABASE_RO_URL": "postgres://db2"},
			"app:@db1:5432/shop app:@db2:5432/shop",
		},
		{
			"a bare replica beside a prefixed primary", "APP_",
			map[string]string{"APP_DATABASE_URL": "postgres://app@db1/shop", "DATABASE_RO_URL": "postgres://db2"},
			"app:@db1:5432/shop app:@db2:5432/shop",
		},
		{
			"a blank prefixed replica turns the bare one off", "APP_",
			map[string]string{"APP_DATABASE_URL": "postgres://app@db1/shop", "APP_DATABASE_RO_URL": " ", "DATABASE_RO_URL": "postgres://db2"},
			"app:@db1:5432/shop",
		},
		{
			"a blank list does not hide the single URL", "",
			map[string]string{"DATABASE_URL": "postgres://app@db1/shop", "DATABASE_RO_URLS": "", "DATABASE_RO_URL": "postgres://db2"},
			"app:@db1:5432/shop app:@db2:5432/shop",
		},
		{
			"a blank prefixed primary counts as unset", "APP_",
			map[string]string{"APP_DATABASE_URL": "", "DATABASE_URL": "postgres://app@db1/shop"},
			"app:@db1:5432/shop",
		},
		{
			"an equal replica is none", "",
			map[string]string{"DATABASE_URL": "postgres://app@db1/shop", "DATABASE_RO_URL": "postgres://app@db1/shop"},
			"app:@db1:5432/shop",
		},
		{
			"an equal text is none, whatever is in it", "",
			map[string]string{
				"DATABASE_URL":    "postgres://app@db1/shop?replica_max_wait=1s postgres://db2",
				"DATABASE_RO_URL": " postgres://app@db1/shop?replica_max_wait=1s postgres://db2\n",
			},
			"app:@db1:5432/shop app:@db2:5432/shop",
		},
		{
			"fields", "APP_",
			map[string]string{
				"APP_DB_HOST": "db1", "APP_DB_PORT": "6000", "APP_DB_USER": "app", "APP_DB_PASSWORD": "p'w\\ ", "APP_DB_NAME": "shop",
				"APP_DB_SSLMODE": "disable", "APP_DB_RO_HOST": "db2, db3:6001",
			},
			"app:p'w\\ @db1:6000/shop app:p'w\\ @db2:6000/shop app:p'w\\ @db3:6001/shop",
		},
		{
			"each field falls back by itself", "APP_",
			map[string]string{"APP_DB_HOST": "db1", "DB_HOST": "db9", "DB_USER": "app", "DB_NAME": "shop", "DB_RO_HOST": "db2"},
			"app:@db1:5432/shop app:@db2:5432/shop",
		},
		{
			"fields and a replica's URL", "",
			map[string]string{"DB_HOST": "db1", "DB_USER": "app", "DB_NAME": "shop", "DATABASE_RO_URL": "postgres://reader@db2/shop"},
			"app:@db1:5432/shop reader:@db2:5432/shop",
		},
		{
			"the host of the fields is no replica", "",
			map[string]string{"DB_HOST": "db1", "DB_USER": "app", "DB_NAME": "shop", "DB_RO_HOST": "db1"},
			"app:@db1:5432/shop",
		},
		{
			"a URL goes before fields", "",
			map[string]string{"DATABASE_URL": "postgres://app@db1/shop", "DB_HOST": "db9"},
			"app:@db1:5432/shop",
		},
	} {
		t.Run(test.name, func(t *testing.T) {
			c, err := configFromLookup(test.prefix, fromMap(test.env))
			if err != nil {
				t.Fatal(err)
			}
			got := []string{endpoint(c, -1)}
			for i := range c.Replicas {
				got = append(got, endpoint(c, i))
			}
			if strings.Join(got, " ") != test.want {
				t.Errorf("got %s\nwant %s", strings.Join(got, " "), test.want)
			}
		})
	}
}

func TestAnErrorNamesTheVariableThatWasRead(t *testing.T) {
	isolatePGEnv(t)
	const primary = "postgres://app:s3cr3t@db1/shop"
	for _, test := range []struct {
		name, prefix string
		env          map[string]string
		parts        []string
	}{
		{"nothing is set", "APP_", nil, []string{"APP_DATABASE_URL", "APP_DB_HOST", "PGHOST"}},
		{"the prefixed URL", "APP_", map[string]string{"APP_DATABASE_URL": primary + "?replica_tx=x"}, []string{"APP_DATABASE_URL", "replica_tx"}},
		{"the bare URL", "APP_", map[string]string{"DATABASE_URL": primary + "?replica_tx=x"}, []string{": DATABASE_URL", "replica_tx"}},
		{"keywords", "", map[string]string{"DATABASE_URL": "host=db1 password=s3cr3t replica_tx=x"}, []string{"DATABASE_URL: replica_tx"}},
		{
			"the second of several", "",
			map[string]string{"DATABASE_URL": primary, "DATABASE_RO_URLS": "postgres://db2 postgres://app:s3cr3t@db3/other"},
			[]string{"DATABASE_RO_URLS, URI 2", "another database"},
		},
		{
			"no host", "APP_",
			map[string]string{"APP_DATABASE_URL": primary, "DATABASE_RO_URL": "postgres:///shop"},
			[]string{": DATABASE_RO_URL", "no host"},
		},
		{
			"a prefixed host beside a whole URL", "APP_",
			map[string]string{"DATABASE_URL": primary, "APP_DB_RO_HOST": "db2"},
			[]string{"APP_DB_RO_HOST", "in DATABASE_URL", "use APP_DATABASE_RO_URL"},
		},
		{
			"a bare host beside a whole URL", "APP_",
			map[string]string{"APP_DATABASE_URL": primary, "DB_RO_HOST": "db2"},
			[]string{": DB_RO_HOST", "in APP_DATABASE_URL"},
		},
		{
			"a list of hosts that is none", "",
			map[string]string{"DB_HOST": "db1", "DB_PASSWORD": "s3cr3t", "DB_RO_HOST": "app:s3cr3t@db2"},
			[]string{"DB_RO_HOST", "list of"},
		},
		{"a field", "", map[string]string{"DB_HOST": "db1", "DB_PASSWORD": "s3cr3t", "DB_PORT": "s3cr3t"}, []string{"DB_", "invalid port"}},
		{
			"keywords, then a URI", "",
			map[string]string{"DATABASE_URL": "host=db1 password=s3cr3t postgres://db2"},
			[]string{"DATABASE_URL", "Config"},
		},
		{"a NUL byte", "", map[string]string{"DATABASE_URL": primary, "DATABASE_RO_URL": "postgres://db2\x00"}, []string{"DATABASE_RO_URL", "NUL"}},
	} {
		t.Run(test.name, func(t *testing.T) {
			_, err := configFromLookup(test.prefix, fromMap(test.env))
			wantConfigError(t, err, test.parts...)
		})
	}
}

func TestPgxsOwnVariablesAreEnoughForAPrimary(t *testing.T) {
	isolatePGEnv(t)
	t.Setenv("PGHOST", "db1")
	t.Setenv("PGPORT", "6000")
	t.Setenv("PGUSER", "app")
	t.Setenv("PGDATABASE", "shop")
	t.Setenv("PGSPLITTEST_DB_RO_HOST", "db2")
	t.Setenv("PGSPLITTEST_DATABASE_URL", "")
	c, err := ConfigFromEnv("PGSPLITTEST_")
	if err != nil {
		t.Fatal(err)
	}
	if got := endpoint(c, -1) + " " + endpoint(c, 0); got != "app:@db1:6000/shop app:@db2:5432/shop" {
		t.Error(got)
	}
}
