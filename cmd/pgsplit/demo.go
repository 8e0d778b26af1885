package main

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"io"
	"time"

	"github.com/pgsplit/pgsplit"
	"github.com/pgsplit/pgsplit/pgsplittest"
)

const defaultPause = 400 * time.Millisecond

// demo shows one round after the other until ctx ends.
func demo(ctx context.Context, out io.Writer, once bool, pause time.Duration) (err error) {
	fmt.Fprintln(out, "Starting a primary and two replicas ...")
	cluster, err := pgsplittest.StartCluster(ctx, pgsplittest.Replicas(2))
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, cluster.Close()) }()
	s := &show{out: out, cluster: cluster, pause: pause}
	config, err := pgsplit.ParseDSN(cluster.DSN())
	if err != nil {
		return err
	}
	for i := range config.Replicas {
		config.Replicas[i].Name = fmt.Sprintf("replica%d", i+1)
	}
	config.OnDecision = func(_ context.Context, d pgsplit.Decision) { s.last = d }
	if s.db, err = pgsplit.OpenDB(config); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, s.db.Close()) }()
	// One statement runs at a time here, so one connection to each server is enough.
	s.db.SetMaxOpenConns(1)
	if _, err := s.db.ExecContext(ctx, "create table messages (id serial primary key, body text)"); err != nil {
		return err
	}
	if err := cluster.CatchUp(ctx); err != nil {
		return err
	}
	fmt.Fprintf(out, "PostgreSQL %d. Each row is one statement of one program with one sql.DB. The servers:\n", cluster.Version())
	for _, server := range cluster.Servers() {
		fmt.Fprintf(out, "  %-9s %s\n", server.Name(), server.URI())
	}
	for {
		if err := s.round(ctx); err != nil || once {
			return err
		}
	}
}

// show is the running demo.
type show struct {
	out     io.Writer
	cluster *pgsplittest.Cluster
	db      *sql.DB
	pause   time.Duration
	last    pgsplit.Decision
	written int
}

// round plays one act after the other.
func (s *show) round(ctx context.Context) error {
	one, two := s.cluster.Replicas[0], s.cluster.Replicas[1]
	for _, act := range []struct {
		title string
		set   []func(context.Context) error
	}{
		{"Both replicas follow.", nil},
		{"replica1 stops replaying: a read that must see the last write goes to replica2.",
			[]func(context.Context) error{one.PauseReplay}},
		{"Both stop: such a read goes to the primary, and one that did not ask for it is stale.",
			[]func(context.Context) error{two.PauseReplay}},
		{"Both go on: they catch up and serve again.",
			[]func(context.Context) error{one.ResumeReplay, two.ResumeReplay, s.cluster.CatchUp}},
	} {
		for _, set := range act.set {
			if err := set(ctx); err != nil {
				return err
			}
		}
		fmt.Fprintf(s.out, "\n%s\n", act.title)
		s.row("statement", "floor", "served by", "why", "replayed", "sees")
		if err := s.act(ctx); err != nil {
			return err
		}
	}
	return nil
}

// act writes once and reads the write back, with and without saying that it must be seen.
func (s *show) act(ctx context.Context) error {
	if _, err := s.db.ExecContext(ctx, "insert into messages (body) values ('hello')"); err != nil {
		return err
	}
	s.written++
	s.print("write", fmt.Sprintf("row %d", s.written))
	lsn, err := pgsplit.CommitLSN(ctx, s.db)
	if err != nil {
		return err
	}
	for _, read := range []struct {
		name string
		ctx  context.Context
	}{
		{"read", pgsplit.ReadOnly(ctx, pgsplit.AfterLSN(lsn), pgsplit.MaxWait(50*time.Millisecond))},
		{"read", pgsplit.ReadOnly(ctx, pgsplit.AfterLSN(lsn), pgsplit.MaxWait(50*time.Millisecond))},
		{"read, no floor", pgsplit.ReadOnly(ctx)},
	} {
		if err := s.wait(ctx); err != nil {
			return err
		}
		var rows int
		if err := s.db.QueryRowContext(read.ctx, "select count(*) from messages").Scan(&rows); err != nil {
			return err
		}
		sees := fmt.Sprintf("%d of %d rows", rows, s.written)
		if rows < s.written {
			sees += ": stale"
		}
		s.print(read.name, sees)
	}
	return s.wait(ctx)
}

func (s *show) wait(ctx context.Context) error {
	timer := time.NewTimer(s.pause)
	defer timer.Stop()
	select {
	case <-timer.C:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// print shows the statement that was decided last.
func (s *show) print(statement, sees string) {
	d := s.last
	server := d.Server
	if d.Role == "primary" {
		server = d.Role
	}
	s.row(statement, position(d.Floor), server, d.Reason.String(), position(d.Position), sees)
}

func position(lsn pgsplit.LSN) string {
	if lsn == 0 {
		return "-"
	}
	return lsn.String()
}

func (s *show) row(statement, floor, server, why, replayed, sees string) {
	fmt.Fprintf(s.out, "  %-15s %-10s %-10s %-16s %-10s %s\n", statement, floor, server, why, replayed, sees)
}
