package pgsplit_test

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/pgsplit/pgsplit/pgsplittest"
)

// sharedClusters are those that one test after the other uses, by their number of replicas.
var sharedClusters [3]sharedCluster

type sharedCluster struct {
	mu      sync.Mutex // held by the test that uses it
	cluster *pgsplittest.Cluster
}

// shareCluster gives the test a cluster that others have used before, empty again: starting one takes longer than most
// tests do. It is for tests that leave servers, their files and their proxies as they are; after a failure the next test
// gets a new one.
func shareCluster(t testing.TB, replicas int) *pgsplittest.Cluster {
	t.Helper()
	pgsplittest.NeedServer(t)
	s := &sharedClusters[replicas]
	if !s.mu.TryLock() {
		t.Fatal("the shared cluster is in use: tests that run in parallel start their own")
	}
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	if s.cluster == nil {
		cluster, err := pgsplittest.StartCluster(ctx, pgsplittest.Replicas(replicas))
		if err != nil {
			s.mu.Unlock()
			t.Fatal(err)
		}
		s.cluster = cluster
	}
	t.Cleanup(func() {
		defer s.mu.Unlock()
		err := s.empty()
		if err != nil || t.Failed() {
			err = errors.Join(err, s.close())
		}
		if err != nil {
			t.Error(err)
		}
	})
	return s.cluster
}

// emptyDatabase ends what a test has left running, and removes what it has made.
const emptyDatabase = `
do $$
declare role name;
begin
	perform pg_terminate_backend(pid) from pg_stat_activity where backend_type = 'client backend' and pid <> pg_backend_pid();
	drop schema public cascade;
	create schema public;
	grant usage on schema public to public;
	for role in select rolname from pg_roles where oid >= 16384 loop
		execute format('drop owned by %1$I cascade', role);
		execute format('drop role %1$I', role);
	end loop;
	alter database postgres reset all;
	alter role postgres reset all;
end $$`

// empty fails where a server is not as it was, as far as that shows.
func (s *sharedCluster) empty() error {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	if err := s.cluster.Primary.Exec(ctx, emptyDatabase); err != nil {
		return err
	}
	if err := s.cluster.CatchUp(ctx); err != nil {
		return err
	}
	for _, replica := range s.cluster.Replicas {
		// CatchUp leaves a paused one out.
		if err := replica.Exec(ctx, "select 1 / (not pg_is_wal_replay_paused())::int"); err != nil {
			return fmt.Errorf("%s does not replay: %w", replica.Name(), err)
		}
	}
	return nil
}

func (s *sharedCluster) close() error {
	cluster := s.cluster
	if cluster == nil {
		return nil
	}
	s.cluster = nil
	if err := cluster.Close(); err != nil {
		return fmt.Errorf("close the shared cluster: %w", err)
	}
	return nil
}

func stopSharedClusters() error {
	var errs []error
	for i := range sharedClusters {
		errs = append(errs, sharedClusters[i].close())
	}
	return errors.Join(errs...)
}
