package integration

import (
	"context"

	"github.com/pgsplit/pgsplit/pgsplittest"
)

// binariesCluster runs the servers on this machine.
type binariesCluster struct {
	*pgsplittest.Cluster
}

func startBinaries(ctx context.Context, replicas int) (cluster, error) {
	c, err := pgsplittest.StartCluster(ctx, pgsplittest.Replicas(replicas))
	if err != nil {
		return nil, err
	}
	return binariesCluster{c}, nil
}

func (c binariesCluster) PrimaryURI() string { return c.Primary.URI() }

func (c binariesCluster) ReplicaURI(i int) string { return c.Replicas[i].URI() }

func (c binariesCluster) CatchUp(ctx context.Context, i int) error {
	// F2: unlike the insert position, this one is sent to the replicas even while the primary is idle.
	lsn, err := queryValue[uint64](ctx, c.PrimaryURI(), "select (pg_current_wal_flush_lsn() - '0/0'::pg_lsn)::bigint")
	if err != nil {
		return err
	}
	return c.Replicas[i].WaitFor(ctx, lsn)
}

func (c binariesCluster) PauseReplay(ctx context.Context, i int) error {
	return c.Replicas[i].PauseReplay(ctx)
}

func (c binariesCluster) ResumeReplay(ctx context.Context, i int) error {
	return c.Replicas[i].ResumeReplay(ctx)
}

func (c binariesCluster) StopReplica(ctx context.Context, i int) error {
	return c.Replicas[i].Stop(ctx, pgsplittest.Fast)
}

func (c binariesCluster) StartReplica(ctx context.Context, i int) error {
	return c.Replicas[i].Start(ctx)
}

func (c binariesCluster) StopPrimary(ctx context.Context) error {
	return c.Primary.Stop(ctx, pgsplittest.Fast)
}

func (c binariesCluster) Promote(ctx context.Context, i int) error {
	return c.Replicas[i].Promote(ctx)
}
