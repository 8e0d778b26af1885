package main

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"io"
	"net"
	"time"

	"github.com/pgsplit/pgsplit"
	"github.com/pgsplit/pgsplit/pgsplittest"
)

const defaultPause = 400 * time.Millisecond

// demo shows one round after the other until ctx ends, and serves its pages at address meanwhile, unless that is empty.
func demo(ctx context.Context, out io.Writer, address string, once bool, pause time.Duration) (err error) {
	var listener net.Listener
	if address != "" {
		if listener, err = net.Listen("tcp", address); err != nil {
			return err
		}
		defer listener.Close() // in vain, if the pages have been served
	}
	fmt.Fprintln(out, "Starting a primary and two replicas ...")
	cluster, err := pgsplittest.StartCluster(ctx, pgsplittest.Replicas(2))
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, cluster.Close()) }()
	s := &show{out: out, cluster: cluster, control: newControl(cluster.Replicas), pause: pause}
	config, err := pgsplit.ParseDSN(cluster.DSN())
	if err != nil {
		return err
	}
	for i := range config.Replicas {
		config.Replicas[i].Name = replicaName(i)
	}
	config.OnDecision = func(ctx context.Context, d pgsplit.Decision) {
		if last, ok := ctx.Value(lastDecision{}).(*pgsplit.Decision); ok {
			*last = d
		}
	}
	if s.db, err = pgsplit.OpenDB(config); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, s.db.Close()) }()
	s.db.SetMaxOpenConns(4)
	for _, table := range []string{"messages", "notes"} {
		if _, err := s.db.ExecContext(ctx, "create table "+table+" (id serial primary key, body text)"); err != nil {
			return err
		}
	}
	if err := cluster.CatchUp(ctx); err != nil {
		return err
	}
	fmt.Fprintf(out, "PostgreSQL %d. Each row is one statement of one program with one sql.DB. The servers:\n", cluster.Version())
	for _, server := range cluster.Servers() {
		fmt.Fprintf(out, "  %-9s %s\n", server.Name(), server.URI())
	}
	if listener != nil {
		defer s.serve(ctx, listener)()
		fmt.Fprintf(out, "Take part at http://%s/\n", listener.Addr())
	}
	ctx = noting(ctx, &s.last)
	for {
		switch err := s.round(ctx); {
		case errors.Is(err, errHandedOver) && !once:
			fmt.Fprintln(out, "\nThe page has the replicas now, until Ctrl-C.")
			<-ctx.Done()
			return ctx.Err()
		case errors.Is(err, errHandedOver):
			return nil
		case err != nil || once:
			return err
		}
	}
}

func replicaName(i int) string { return fmt.Sprintf("replica%d", i+1) }

type lastDecision struct{}

// noting is ctx whose statements note the decision about them in last.
func noting(ctx context.Context, last *pgsplit.Decision) context.Context {
	return context.WithValue(ctx, lastDecision{}, last)
}

// errHandedOver ends the show: somebody pauses and resumes replicas by hand.
var errHandedOver = errors.New("the page has the replicas")

// show is the running demo.
type show struct {
	out     io.Writer
	cluster *pgsplittest.Cluster
	control *control
	db      *sql.DB
	pause   time.Duration
	last    pgsplit.Decision
	written int
}

// round plays one act after the other.
func (s *show) round(ctx context.Context) error {
	type set = func(context.Context) error
	pause := func(i int) set { return func(ctx context.Context) error { return s.control.show(ctx, i, true) } }
	resume := func(i int) set { return func(ctx context.Context) error { return s.control.show(ctx, i, false) } }
	for _, act := range []struct {
		title string
		set   []set
	}{
		{"Both replicas follow.", nil},
		{"replica1 stops replaying: a read that must see the last write goes to replica2.",
			[]set{pause(0)}},
		{"Both stop: such a read goes to the primary, and one that did not ask for it is stale.",
			[]set{pause(1)}},
		{"Both go on: they catch up and serve again.",
			[]set{resume(0), resume(1), s.cluster.CatchUp}},
	} {
		for _, set := range act.set {
			if err := set(ctx); err != nil {
				if s.control.handedOver() { // a replica that is paused by hand does not catch up
					return errHandedOver
				}
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
	case <-s.control.byHand:
		return errHandedOver
	case <-ctx.Done():
		return ctx.Err()
	}
}

// print shows the statement that was decided last.
func (s *show) print(statement, sees string) {
	d := s.last
	s.row(statement, position(d.Floor), serverName(d), d.Reason.String(), position(d.Position), sees)
}

// serverName is what the demo calls the server of a decision.
func serverName(d pgsplit.Decision) string {
	if d.Role == "primary" {
		return d.Role
	}
	return d.Server
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
