package pgsplit

import (
	"errors"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
)

var seedDSNs = []string{
	"",
	"postgres://app:pw@db1:5433/shop?sslmode=disable&connect_timeout=3",
	"postgresql://a,b:1,[::1]:2/d?target_session_attrs=read-write&x=%20y",
	"postgres://u@:p@h?a@b/c",
	"postgres://%2Ftmp:5433/d?ssl=true&sslmode=disable&ssl=true",
	"host=db1 port = 5433 user='a b' password=p\\'w dbname=shop",
	"host=a,b port=1 a='x'b=y\\",
	"postgres://db1/shop?replica=db2,[::1]:1,/tmp&replica_max_wait=1s postgres://r:s@db3?weight=2&name=n&label=l",
	"host=db1 replica=db2 replica_timeout=2s pool_max_conns=3",
	"postgres:///?host=&port=&user=&password=&ssl=false",
	" \tpostgres://db1 ",
	"host=h sslmode=require ssl=true",
}

func FuzzParseDSNAgreesWithPgx(f *testing.F) {
	isolatePGEnv(f)
	for _, dsn := range append(seedDSNs, mangledDSNs...) {
		f.Add(dsn)
	}
	f.Fuzz(func(t *testing.T, dsn string) {
		text := strings.TrimLeft(dsn, blanks)
		if !isURI(text) {
			text = dsn
		} else if text = strings.TrimRight(text, blanks); len(splitURIs(text)) > 1 {
			return
		}
		if readsFiles(text) {
			return
		}
		want, wantErr := pgx.ParseConfig(text)
		got, err := ParseDSN(dsn)
		if wantErr == nil {
			checkScanner(t, text)
			for key := range want.RuntimeParams {
				if isOurs(key) || hasPrefixFold(key, "pool_") || isURI(key) {
					return // ours, pgxpool's, or keywords and then a URI
				}
			}
			if isOneOf(want.ValidateConnect, standbyChecks) {
				return
			}
		}
		if (err == nil) != (wantErr == nil) {
			t.Fatalf("%q: pgsplit says %v, pgx %v", dsn, err, wantErr)
		}
		if err != nil {
			return
		}
		pool, err := pgxpool.ParseConfig(text)
		if err != nil {
			t.Fatal(err)
		}
		// The two deliberate differences.
		pool.MaxConns, pool.MaxConnLifetime, pool.MaxConnIdleTime = 0, 0, 0
		requirePrimary(pool)
		if field := poolDifference(got.Primary, pool); field != "" {
			t.Fatalf("%q: %s differs from pgx's", dsn, field)
		}
		if len(got.Replicas) != 0 {
			t.Fatalf("%q: replicas %v", dsn, got.Replicas)
		}
	})
}

// readsFiles keeps the fuzzer from files: what it finds there is not its business.
func readsFiles(text string) bool {
	c, err := scan(text, takeNothing)
	if err != nil {
		return false
	}
	for _, key := range []string{"service", "servicefile", "passfile", "sslcert", "sslkey", "sslrootcert"} {
		if c.settings[key] != "" {
			return true
		}
	}
	return false
}

// checkScanner compares pgsplit's reading of a connection string with pgx's: what is scanned and written again must mean
// the same to pgx.
func checkScanner(t *testing.T, text string) {
	t.Helper()
	c, err := scan(text, takeNothing)
	if errors.Is(err, errMixedForms) {
		return
	}
	if err != nil {
		t.Fatalf("%q: pgx takes it, the scanner says %v", text, err)
	}
	if c.rest != text {
		t.Fatalf("%q: nothing was taken, but %q is left", text, c.rest)
	}
	want, err := pgxpool.ParseConfig(text)
	if err != nil {
		return
	}
	again := formatSettings(c.settings)
	got, err := pgxpool.ParseConfig(again)
	if err != nil {
		t.Fatalf("%q was written as %q: %v", text, again, err)
	}
	if field := poolDifference(got, want); field != "" {
		t.Fatalf("%q was written as %q: %s differs", text, again, field)
	}
}

func FuzzFormatDSNRoundTrips(f *testing.F) {
	isolatePGEnv(f)
	for _, dsn := range seedDSNs {
		f.Add(dsn)
	}
	f.Fuzz(func(t *testing.T, dsn string) {
		for _, s := range splitURIs(dsn) {
			if readsFiles(s) {
				return
			}
		}
		c, err := ParseDSN(dsn)
		if err != nil {
			return
		}
		text, err := FormatDSN(c)
		if err != nil {
			t.Fatalf("%q: %v", dsn, err)
		}
		back, err := ParseDSN(text)
		if err != nil {
			t.Fatalf("%q was written as %q: %v", dsn, text, err)
		}
		if field := difference(c, back); field != "" {
			t.Fatalf("%q was written as %q: %s differs", dsn, text, field)
		}
		if again, err := FormatDSN(back); err != nil || again != text {
			t.Fatalf("%q was written as %q, and that as %q, %v", dsn, text, again, err)
		}
	})
}

func FuzzErrorsHideThePassword(f *testing.F) {
	isolatePGEnv(f)
	for _, dsn := range append(seedDSNs, mangledDSNs...) {
		before, after, _ := strings.Cut(dsn, "s3cr3t")
		f.Add(before, after)
	}
	f.Fuzz(func(t *testing.T, before, after string) {
		dsn := before + "s3cr3t" + after
		c, err := ParseDSN(dsn)
		if err != nil {
			wantHidden(t, dsn, err)
			return
		}
		if _, err := FormatDSN(c); err != nil {
			wantHidden(t, dsn, err)
		}
	})
}

func wantHidden(t *testing.T, dsn string, err error) {
	t.Helper()
	for ; err != nil; err = errors.Unwrap(err) {
		if strings.Contains(err.Error(), "s3cr3t") {
			t.Fatalf("%q: error %q shows the password", dsn, err)
		}
	}
}
