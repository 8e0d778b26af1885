package pgsplit_test

import (
	"context"
	"database/sql"
	"flag"
	"os"
	"testing"

	"github.com/pgsplit/pgsplit/pgsplittest"
)

// examples is what all examples share: a primary and a replica with a table notes, whose addresses are in DATABASE_URL and
// DATABASE_RO_URL while examples run, and a sql.DB.
var examples struct {
	cluster *pgsplittest.Cluster
	db      *sql.DB
}

// startExamples starts it for the first example that runs. Examples have no testing.T: what goes wrong is a panic.
func startExamples() (context.Context, *sql.DB) {
	ctx := context.Background()
	if examples.db != nil {
		return ctx, examples.db
	}
	must := func(err error) {
		if err != nil {
			panic(err)
		}
	}
	cluster, err := pgsplittest.StartCluster(ctx)
	must(err)
	examples.cluster = cluster
	// A slow machine is not a replica in trouble, and one that is behind catches up.
	must(os.Setenv("DATABASE_URL", with(cluster.Primary.URI(), "replica_timeout=20s", "replica_max_wait=1m")))
	must(os.Setenv("DATABASE_RO_URL", cluster.Replicas[0].URI()))
	examples.db, err = sql.Open("pgsplit", os.Getenv("DATABASE_URL")+" "+os.Getenv("DATABASE_RO_URL"))
	must(err)
	_, err = examples.db.ExecContext(ctx, "create table notes (body text)")
	must(err)
	must(cluster.CatchUp(ctx))
	return ctx, examples.db
}

func stopExamples() {
	if examples.db != nil {
		_ = examples.db.Close()
	}
	if examples.cluster != nil {
		_ = examples.cluster.Close()
	}
}

// skipExamplesUnderShort leaves them out, since they cannot skip themselves.
func skipExamplesUnderShort() {
	flag.Parse()
	if !testing.Short() {
		return
	}
	skip := "^Example"
	if given := flag.Lookup("test.skip").Value.String(); given != "" {
		skip = given + "|" + skip
	}
	if err := flag.Set("test.skip", skip); err != nil {
		panic(err)
	}
}
