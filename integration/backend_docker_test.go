package integration

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"time"

	"github.com/testcontainers/testcontainers-go"
	tcexec "github.com/testcontainers/testcontainers-go/exec"
	tcpostgres "github.com/testcontainers/testcontainers-go/modules/postgres"
	"github.com/testcontainers/testcontainers-go/network"
	"github.com/testcontainers/testcontainers-go/wait"
)

const (
	defaultImage = "postgres:18"

	// primaryInit runs in the primary's container when its data folder is new. The replicas copy both files.
	primaryInit = `#!/bin/sh
set -eu
echo 'host replication all all trust' >>"$PGDATA/pg_hba.conf"
# F19: a quiet primary can stall a standby for as long as this.
echo 'wal_receiver_status_interval = 1s' >>"$PGDATA/postgresql.conf"
`

	// replicaMain is a replica's main process: it copies the primary, starts the server, and stays when that is stopped,
	// so that the container keeps its address and its data. $REPLICA is its application_name.
	replicaMain = `set -eu
mkdir -p "$PGDATA"
chown postgres:postgres "$PGDATA"
chmod 700 "$PGDATA"
gosu postgres pg_basebackup -D "$PGDATA" -R -X stream -c fast -d "host=primary user=postgres application_name=$REPLICA"
gosu postgres pg_ctl -D "$PGDATA" -l /tmp/postgres.log -w start || { cat /tmp/postgres.log; exit 1; }
exec tail -n +1 -F /tmp/postgres.log
`
)

var errNoDocker = errors.New("PGSPLIT_TEST_BACKEND=docker, but no Docker engine answers: start one, or unset " +
	"PGSPLIT_TEST_BACKEND to use PostgreSQL's programs on this machine")

// dockerCluster runs each server in a container of its own, all on one network.
type dockerCluster struct {
	network    *testcontainers.DockerNetwork
	primary    *tcpostgres.PostgresContainer
	primaryURI string
	replicas   []dockerReplica
}

type dockerReplica struct {
	container testcontainers.Container
	uri       string
}

// checkDocker returns an error that wraps errNoDocker where no engine answers.
func checkDocker(ctx context.Context) (err error) {
	defer func() {
		if r := recover(); r != nil { // testcontainers panics on some settings
			err = fmt.Errorf("%w: %v", errNoDocker, r)
		}
	}()
	provider, err := testcontainers.NewDockerProvider()
	if err != nil {
		return fmt.Errorf("%w: %w", errNoDocker, err)
	}
	defer provider.Close()
	if err := provider.Health(ctx); err != nil {
		return fmt.Errorf("%w: %w", errNoDocker, err)
	}
	return nil
}

func startDocker(ctx context.Context, replicas int) (_ cluster, err error) {
	if err := checkDocker(ctx); err != nil {
		return nil, err
	}
	image := os.Getenv("PGSPLIT_TEST_IMAGE")
	if image == "" {
		image = defaultImage
	}

	c := &dockerCluster{}
	defer func() {
		if err != nil {
			err = errors.Join(err, c.Close())
		}
	}()
	if c.network, err = network.New(ctx); err != nil {
		return nil, fmt.Errorf("docker network: %w", err)
	}
	c.primary, err = tcpostgres.Run(ctx, image,
		tcpostgres.WithUsername("postgres"),
		tcpostgres.WithPassword("postgres"),
		tcpostgres.WithDatabase("postgres"),
		tcpostgres.BasicWaitStrategies(),
		network.WithNetwork([]string{"primary"}, c.network),
		testcontainers.WithFiles(testcontainers.ContainerFile{
			Reader:            strings.NewReader(primaryInit),
			ContainerFilePath: "/docker-entrypoint-initdb.d/replication.sh",
			FileMode:          0o755,
		}),
	)
	if err != nil {
		return nil, fmt.Errorf("primary in %s: %w", image, err)
	}
	if c.primaryURI, err = c.primary.ConnectionString(ctx, "sslmode=disable"); err != nil {
		return nil, fmt.Errorf("primary's address: %w", err)
	}
	for i := range replicas {
		name := fmt.Sprintf("replica%d", i)
		container, err := testcontainers.Run(ctx, image,
			testcontainers.WithEnv(map[string]string{"REPLICA": name}),
			testcontainers.WithExposedPorts("5432/tcp"),
			testcontainers.WithEntrypoint("sh", "-c", replicaMain),
			testcontainers.WithWaitStrategy(wait.ForListeningPort("5432/tcp").WithStartupTimeout(2*time.Minute)),
			network.WithNetwork([]string{name}, c.network),
		)
		// A container that failed to start is to be removed as well.
		c.replicas = append(c.replicas, dockerReplica{container: container})
		if err != nil {
			return nil, fmt.Errorf("%s in %s: %w", name, image, err)
		}
		endpoint, err := container.PortEndpoint(ctx, "5432/tcp", "")
		if err != nil {
			return nil, fmt.Errorf("%s: address: %w", name, err)
		}
		c.replicas[i].uri = "postgres://postgres:postgres@" + endpoint + "/postgres?sslmode=disable"
		if err := waitFor(ctx, c.ReplicaURI(i), "select pg_is_in_recovery()"); err != nil {
			return nil, fmt.Errorf("%s: %w", name, err)
		}
	}
	return c, nil
}

func (c *dockerCluster) DSN() string {
	uris := []string{c.primaryURI}
	for _, r := range c.replicas {
		uris = append(uris, r.uri)
	}
	return strings.Join(uris, " ")
}

func (c *dockerCluster) PrimaryURI() string { return c.primaryURI }

func (c *dockerCluster) ReplicaURI(i int) string { return c.replicas[i].uri }

func (c *dockerCluster) CatchUp(ctx context.Context, i int) error {
	// F2: the insert position can be ahead of what is ever sent while the primary is idle; this covers each synchronous commit.
	lsn, err := queryValue[string](ctx, c.primaryURI, "select pg_current_wal_flush_lsn()::text")
	if err != nil {
		return fmt.Errorf("primary's position: %w", err)
	}
	return waitFor(ctx, c.ReplicaURI(i), "select coalesce(pg_last_wal_replay_lsn() >= '"+lsn+"', false)")
}

func (c *dockerCluster) PauseReplay(ctx context.Context, i int) error {
	if err := execSQL(ctx, c.ReplicaURI(i), "select pg_wal_replay_pause()"); err != nil {
		return fmt.Errorf("pausing replica %d: %w", i, err)
	}
	return waitFor(ctx, c.ReplicaURI(i), "select pg_get_wal_replay_pause_state() = 'paused'")
}

func (c *dockerCluster) ResumeReplay(ctx context.Context, i int) error {
	if err := execSQL(ctx, c.ReplicaURI(i), "select pg_wal_replay_resume()"); err != nil {
		return fmt.Errorf("resuming replica %d: %w", i, err)
	}
	return nil
}

func (c *dockerCluster) StopReplica(ctx context.Context, i int) error {
	return c.pgCtl(ctx, i, `pg_ctl -D "$PGDATA" -m fast -w stop`)
}

func (c *dockerCluster) StartReplica(ctx context.Context, i int) error {
	if err := c.pgCtl(ctx, i, `pg_ctl -D "$PGDATA" -l /tmp/postgres.log -w start`); err != nil {
		return err
	}
	return waitFor(ctx, c.ReplicaURI(i), "select true")
}

// pgCtl runs a shell command as the server's user in replica i's container.
func (c *dockerCluster) pgCtl(ctx context.Context, i int, command string) error {
	code, output, err := c.replicas[i].container.Exec(ctx, []string{"sh", "-c", command},
		tcexec.WithUser("postgres"), tcexec.Multiplexed())
	if err != nil {
		return fmt.Errorf("replica %d: %s: %w", i, command, err)
	}
	if code != 0 {
		text, _ := io.ReadAll(output)
		return fmt.Errorf("replica %d: %s: exit code %d: %s", i, command, code, text)
	}
	return nil
}

func (c *dockerCluster) StopPrimary(ctx context.Context) error {
	grace := 30 * time.Second
	if err := c.primary.Stop(ctx, &grace); err != nil {
		return fmt.Errorf("stopping the primary: %w", err)
	}
	return nil
}

func (c *dockerCluster) Promote(ctx context.Context, i int) error {
	if err := execSQL(ctx, c.ReplicaURI(i), "select pg_promote(wait => false)"); err != nil {
		return fmt.Errorf("promoting replica %d: %w", i, err)
	}
	return waitFor(ctx, c.ReplicaURI(i), "select not pg_is_in_recovery()")
}

func (c *dockerCluster) Close() error {
	var errs []error
	for _, r := range c.replicas {
		errs = append(errs, testcontainers.TerminateContainer(r.container))
	}
	if c.primary != nil {
		errs = append(errs, testcontainers.TerminateContainer(c.primary))
	}
	if c.network != nil {
		errs = append(errs, c.network.Remove(context.Background()))
	}
	return errors.Join(errs...)
}

// waitFor asks the server at uri, on a new connection each time, until sql returns true or the context ends. A server
// that cannot be reached may still be starting.
func waitFor(ctx context.Context, uri, sql string) error {
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for {
		done, err := queryValue[bool](ctx, uri, sql)
		if done {
			return nil
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return errors.Join(fmt.Errorf("waiting for %q: %w", sql, ctx.Err()), err)
		}
	}
}
