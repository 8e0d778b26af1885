package pgsplit

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"sync"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
)

// This file finds the primary among several hosts. Of those that take writes it is the one on the highest timeline: the
// others were put aside by a failover, and do not know. Once the primary's cluster is known, hosts of another one are not it
// whatever their timeline, and not while it is away either.

// survey is what the hosts of a primary were last found to be. It is made before the first connection, and anew after
// each loss.
type survey struct {
	mu       sync.Mutex
	made     bool   // guarded by mu
	timeline uint32 // the highest one that a host writes; guarded by mu
	round    *round // the one under way; guarded by mu
}

// due has the next connection make the survey anew.
func (v *survey) due() {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.made = false
}

// round is one making of the survey, for all who connect meanwhile.
type round struct {
	done     chan struct{} // closed once it is over
	complete bool          // it was not given up; set before done is closed
}

// join is the round that is under way, or a new one that is the caller's to end. It is nil if none is due.
func (v *survey) join() (r *round, ours bool) {
	v.mu.Lock()
	defer v.mu.Unlock()
	if v.made {
		return nil, false
	}
	if v.round == nil {
		v.round, ours = &round{done: make(chan struct{})}, true
	}
	return v.round, ours
}

func (v *survey) end(r *round, found uint32, complete bool) {
	v.mu.Lock()
	defer v.mu.Unlock()
	if found != 0 {
		v.made, v.timeline = true, max(v.timeline, found)
	}
	v.round, r.complete = nil, complete
	close(r.done)
}

// highest is the highest timeline that a primary was seen to write, here or among the hosts of the config, which are all
// asked at the same time if that is due, once for all who connect. A host that does not answer within replica_timeout is
// passed over.
func (s *server) highest(ctx context.Context, config *pgx.ConnConfig) uint32 {
	v := &s.survey
	for ctx.Err() == nil {
		r, ours := v.join()
		if r == nil {
			break
		}
		if ours {
			found := s.askHosts(ctx, config)
			v.end(r, found, ctx.Err() == nil)
		}
		select {
		case <-r.done:
		case <-ctx.Done():
			continue
		}
		if r.complete {
			break
		}
	}
	v.mu.Lock()
	defer v.mu.Unlock()
	return max(v.timeline, s.connector.samples.current())
}

// askHosts asks every host of the config on a connection of its own.
func (s *server) askHosts(ctx context.Context, config *pgx.ConnConfig) (highest uint32) {
	ctx, cancel := context.WithTimeout(ctx, s.connector.config.ReplicaTimeout)
	defer cancel()
	hosts := eachHost(config)
	answers := make(chan uint32, len(hosts))
	for _, host := range hosts {
		go func() {
			var timeline uint32
			defer func() { answers <- timeline }()
			// It calls the config's functions. Whatever fails, pgx's own attempt will say.
			_ = contained("connect", func() error {
				conn, err := pgconn.ConnectConfig(ctx, host)
				if err != nil {
					return err
				}
				defer conn.Close(ctx)
				system, written, err := s.writtenTimeline(ctx, conn)
				if s.ofCluster(system) {
					timeline = written
				}
				return err
			})
		}()
	}
	for range hosts {
		highest = max(highest, <-answers)
	}
	return highest
}

// eachHost takes a config of several hosts apart. What pgx tries for one host in turn, as with and without TLS, stays
// together.
func eachHost(config *pgx.ConnConfig) (hosts []*pgconn.Config) {
	all := config.Config.Copy()
	tries := append([]*pgconn.FallbackConfig{{Host: all.Host, Port: all.Port, TLSConfig: all.TLSConfig}}, all.Fallbacks...)
	for _, try := range tries {
		if n := len(hosts); n > 0 && hosts[n-1].Host == try.Host && hosts[n-1].Port == try.Port {
			hosts[n-1].Fallbacks = append(hosts[n-1].Fallbacks, try)
			continue
		}
		host := config.Config.Copy()
		host.Host, host.Port, host.TLSConfig, host.Fallbacks = try.Host, try.Port, try.TLSConfig, nil
		host.RuntimeParams["application_name"] = probeName
		// Notices are for the connection that is to be used. Here they would come from several hosts at once.
		host.ValidateConnect, host.AfterConnect, host.OnNotice = nil, nil, nil
		hosts = append(hosts, host)
	}
	return hosts
}

// writtenTimeline is the cluster and the timeline that the server writes; zero if it writes none, or does not tell.
func (s *server) writtenTimeline(ctx context.Context, conn *pgconn.PgConn) (system uint64, timeline uint32, err error) {
	results, err := conn.Exec(ctx, "select (select system_identifier from pg_catalog.pg_control_system()), "+
		timelineExpression+" where not pg_catalog.pg_is_in_recovery()").ReadAll()
	if err != nil || len(results) != 1 || len(results[0].Rows) != 1 {
		return 0, 0, err
	}
	row := fields{values: results[0].Rows[0]}
	system, _ = strconv.ParseUint(row.text(), 10, 64)
	written, err := strconv.ParseUint(row.text(), 10, 32)
	if err != nil {
		return system, 0, nil
	}
	return system, uint32(written), nil
}

// ofCluster tells whether the system identifier is that of the primary's cluster, as far as either is known.
func (s *server) ofCluster(system uint64) bool {
	known := s.connector.system.Load()
	return known == 0 || system == 0 || system == known
}

var errOtherCluster = errors.New("it belongs to another cluster than the primary did so far")

// isPrimary has the next of several hosts tried where one follows an earlier timeline than the primary did already, or
// belongs to another cluster.
func (s *server) isPrimary(seen uint32, check pgconn.ValidateConnectFunc) pgconn.ValidateConnectFunc {
	if seen == 0 && s.connector.system.Load() == 0 {
		return check
	}
	return func(ctx context.Context, conn *pgconn.PgConn) error {
		if check != nil {
			if err := check(ctx, conn); err != nil {
				return err
			}
		}
		switch system, timeline, err := s.writtenTimeline(ctx, conn); {
		case err != nil:
			return err
		case !s.ofCluster(system):
			return errOtherCluster
		case timeline != 0 && timeline < seen:
			return fmt.Errorf("it follows timeline %d: %w", timeline, errPutAside)
		}
		return nil
	}
}
