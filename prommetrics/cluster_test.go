package prommetrics

import (
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/pgsplit/pgsplit"
	"github.com/pgsplit/pgsplit/pgsplittest"
)

// values are what a scrape gives, by series.
func values(t *testing.T, lines []string) map[string]float64 {
	t.Helper()
	all := map[string]float64{}
	for _, line := range lines {
		if strings.HasPrefix(line, "#") {
			continue
		}
		i := strings.LastIndexByte(line, ' ')
		value, err := strconv.ParseFloat(line[i+1:], 64)
		if err != nil {
			t.Fatal(err)
		}
		all[line[:i]] = value
	}
	return all
}

func TestAScrapeShowsWhatARealClusterDid(t *testing.T) {
	ctx := t.Context()
	cluster := pgsplittest.Start(t, pgsplittest.Replicas(1))
	config, err := pgsplit.ParseDSN(cluster.DSN())
	if err != nil {
		t.Fatal(err)
	}
	config.ReplicaTimeout = time.Minute // a slow machine is no trouble of the replica's
	db, err := pgsplit.OpenDB(config)
	if err != nil {
		t.Fatal(err)
	}
	defer db.Close()
	c := NewCollector(db)
	// write writes in a session, and read reads in the same one.
	write := func(statement string) (read func(...pgsplit.ReadOption)) {
		session := pgsplit.WithSession(ctx, pgsplit.NewSession())
		if _, err := db.ExecContext(session, statement); err != nil {
			t.Fatal(err)
		}
		return func(opts ...pgsplit.ReadOption) {
			if _, err := db.ExecContext(pgsplit.ReadOnly(session, opts...), "select count(*) from notes"); err != nil {
				t.Fatal(err)
			}
		}
	}

	write("create table notes ()")(pgsplit.MaxWait(time.Minute))
	first := values(t, scrape(t, c))
	if err := cluster.Replicas[0].PauseReplay(ctx); err != nil {
		t.Fatal(err)
	}
	write("insert into notes default values")()
	second := values(t, scrape(t, c))

	for series, before := range first {
		name, _, _ := strings.Cut(series, "{")
		if after, ok := second[series]; strings.HasSuffix(name, "_total") && (!ok || after < before) {
			t.Errorf("%s went from %v to %v", series, before, after)
		}
	}
	connector, err := pgsplit.FromDB(db)
	if err != nil {
		t.Fatal(err)
	}
	replica := `{label="",role="replica",server="` + connector.Stats().Servers[1].Name + `"}`
	for series, want := range map[string]struct{ first, second float64 }{
		"pgsplit_statements_total" + replica:                                    {1, 1},
		"pgsplit_refusals_total" + replica:                                      {0, 1},
		"pgsplit_captures_total":                                                {1, 2},
		`pgsplit_decisions_total{reason="replicas_behind"}`:                     {0, 1},
		`pgsplit_decisions_total{reason="unhinted"}`:                            {1, 2},
		"pgsplit_connections" + replica:                                         {1, 1},
		"pgsplit_server_state" + replica[:len(replica)-1] + `,state="healthy"}`: {1, 1},
	} {
		if first[series] != want.first || second[series] != want.second {
			t.Errorf("%s is %v, then %v, not %v", series, first[series], second[series], want)
		}
	}
	for _, name := range []string{"pgsplit_replica_staleness_seconds", "pgsplit_position_bytes", "pgsplit_position_timestamp_seconds"} {
		if _, ok := second[name+replica]; !ok {
			t.Errorf("there is no %s", name+replica)
		}
	}
}
