package soak

import (
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/pgsplit/pgsplit/pgsplittest"
)

// nemesis makes trouble, by a schedule that its seed decides.
type nemesis struct {
	cluster    *pgsplittest.Cluster
	roundRobin bool // the workers know one address for all replicas
	rand       *rand.Rand
	plan       Trouble
	clock      clock
	record     func(Fault)
	announce   func(column string) // tells the workers of a new column
	columns    atomic.Int32
}

// Trouble says what the nemesis does.
type Trouble struct {
	Faults      []string // names of faults; nil: all but promote and setback
	Hold, Quiet Span     // how long a fault lasts, and how long all is well between faults
	Calm        Span     // how long all is well after one fault in six
	Overlap     bool     // two at a time, now and then
	Backlog     int      // MB of log that a replica has to replay again after a restart; 0: 20
}

// Span is a range of durations.
type Span struct{ Min, Max time.Duration }

func (s Span) pick(r *rand.Rand) time.Duration {
	if s.Max <= s.Min {
		return s.Min
	}
	return s.Min + time.Duration(r.Int64N(int64(s.Max-s.Min)))
}

// fault is a kind of trouble. It is done to its servers and undone.
type fault struct {
	on   target
	down bool // see Fault.Down
	do   func(*victims, context.Context, *nemesis) error
	undo func(*victims, context.Context, *nemesis) error // nil: it is over by itself
}

// target is what a fault is done to.
type target int

const (
	aReplica target = iota
	someReplicas
	thePrimary
	anyone   // the primary or a replica
	aNetwork // of the primary or of a replica, or of all replicas where they share an address
)

// victims are the servers of one fault, and what it left behind.
type victims struct {
	servers []*pgsplittest.Server
	proxies []*pgsplittest.Proxy
	rand    *rand.Rand // its own, because two faults may go on at a time
	cleanup []func()
}

func (v *victims) names() []string {
	var names []string
	for _, s := range v.servers {
		names = append(names, s.Name())
	}
	return names
}

// each does something to every server.
func (v *victims) each(f func(*pgsplittest.Server) error) error {
	for _, s := range v.servers {
		if err := f(s); err != nil {
			return err
		}
	}
	return nil
}

// network makes a fault that is done to proxies.
func network(do, undo func(*pgsplittest.Proxy)) fault {
	wrap := func(f func(*pgsplittest.Proxy)) func(*victims, context.Context, *nemesis) error {
		if f == nil {
			return nil
		}
		return func(v *victims, _ context.Context, _ *nemesis) error {
			for _, p := range v.proxies {
				f(p)
			}
			return nil
		}
	}
	return fault{on: aNetwork, down: true, do: wrap(do), undo: wrap(undo)}
}

// faults are all kinds, by name.
var faults = map[string]fault{
	"pause": {on: someReplicas, do: (*victims).pause, undo: (*victims).resume},
	"kill":  {on: aReplica, down: true, do: (*victims).kill, undo: (*victims).start},
	"stop":  {on: aReplica, down: true, do: (*victims).stop, undo: (*victims).start},
	"freeze": {
		on: aReplica, down: true,
		do:   func(v *victims, _ context.Context, _ *nemesis) error { return v.each((*pgsplittest.Server).Freeze) },
		undo: func(v *victims, _ context.Context, _ *nemesis) error { return v.each((*pgsplittest.Server).Thaw) },
	},
	"crash":           {on: aReplica, down: true, do: (*victims).crash},
	"restart":         {on: aReplica, down: true, do: (*victims).restart},
	"setback":         {on: aReplica, down: true, do: (*victims).setback, undo: (*victims).catchUp},
	"restart-primary": {on: thePrimary, down: true, do: (*victims).restartFast},
	"fill":            {on: anyone, down: true, do: (*victims).fill, undo: (*victims).empty},
	"storm":           {on: thePrimary, do: (*victims).storm, undo: (*victims).empty},
	"column":          {on: someReplicas, do: (*victims).addColumn, undo: (*victims).resume},
	"doubt":           {on: thePrimary, down: true, do: (*victims).doubt, undo: (*victims).empty},
	"promote":         {on: aReplica, do: (*victims).promote},
	"reset":           network((*pgsplittest.Proxy).CutConnections, nil),
	"late-reset":      {on: thePrimary, down: true, do: (*victims).lateReset},
	"cut":             network((*pgsplittest.Proxy).Cut, (*pgsplittest.Proxy).Restore),
	"black-hole":      network((*pgsplittest.Proxy).BlackHole, (*pgsplittest.Proxy).Restore),
	"deaf":            network((*pgsplittest.Proxy).BlackHoleToServer, (*pgsplittest.Proxy).Restore),
	"mute":            network((*pgsplittest.Proxy).BlackHoleToClient, (*pgsplittest.Proxy).Restore),
	"slow": {on: aNetwork, do: (*victims).slow, undo: func(v *victims, _ context.Context, _ *nemesis) error {
		for _, p := range v.proxies {
			p.SetDelay(0)
		}
		return nil
	}},
}

// lateReset lets writes arrive, and their answers not: then the connections break off.
func (v *victims) lateReset(ctx context.Context, _ *nemesis) error {
	p := v.proxies[0]
	p.BlackHoleToClient()
	defer p.Restore()
	pause(ctx, 20*time.Millisecond)
	p.CutConnections()
	return nil
}

func (v *victims) pause(ctx context.Context, _ *nemesis) error {
	return v.each(func(s *pgsplittest.Server) error { return s.PauseReplay(ctx) })
}

func (v *victims) resume(ctx context.Context, _ *nemesis) error {
	return v.each(func(s *pgsplittest.Server) error { return s.ResumeReplay(ctx) })
}

func (v *victims) kill(ctx context.Context, _ *nemesis) error {
	return v.each(func(s *pgsplittest.Server) error { return s.Kill(ctx) })
}

func (v *victims) stop(ctx context.Context, _ *nemesis) error {
	mode := []pgsplittest.Mode{pgsplittest.Fast, pgsplittest.Immediate}[v.rand.IntN(2)]
	return v.each(func(s *pgsplittest.Server) error { return s.Stop(ctx, mode) })
}

func (v *victims) start(ctx context.Context, _ *nemesis) error {
	return v.each(func(s *pgsplittest.Server) error { return s.Start(ctx) })
}

// backlog puts a replica far ahead of its last restartpoint, which is where it begins again when it is restarted. The log
// changes no page, so nothing but replay brings the replica forward again.
func (v *victims) backlog(ctx context.Context, n *nemesis, s *pgsplittest.Server) error {
	size := n.plan.Backlog
	if size == 0 {
		size = 20
	}
	err := n.cluster.Primary.Exec(ctx,
		"select count(pg_logical_emit_message(false, 'soak', repeat('x', 1000000))) from generate_series(1, $1)", size)
	if err != nil {
		return err
	}
	position, err := n.cluster.Primary.Position(ctx)
	if err != nil {
		return err
	}
	bounded, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	return s.WaitFor(bounded, position)
}

func (v *victims) crash(ctx context.Context, n *nemesis) error {
	if err := v.backlog(ctx, n, v.servers[0]); err != nil {
		return err
	}
	pause(ctx, 100*time.Millisecond) // reads remember how far it was
	return v.servers[0].KillBackend(ctx)
}

func (v *victims) restart(ctx context.Context, n *nemesis) error {
	if err := v.backlog(ctx, n, v.servers[0]); err != nil {
		return err
	}
	pause(ctx, 100*time.Millisecond)
	return v.servers[0].Restart(ctx, pgsplittest.Immediate)
}

// setback has a replica come back behind where it was, and stay there.
func (v *victims) setback(ctx context.Context, n *nemesis) error {
	if err := v.restart(ctx, n); err != nil {
		return err
	}
	return v.pause(ctx, n)
}

func (v *victims) catchUp(ctx context.Context, n *nemesis) error {
	if err := v.start(ctx, n); err != nil { // in case it did not come back
		return err
	}
	return v.resume(ctx, n)
}

// restartFast restarts a primary without loss of what was committed asynchronously.
func (v *victims) restartFast(ctx context.Context, _ *nemesis) error {
	return v.servers[0].Restart(ctx, pgsplittest.Fast)
}

// fill takes all connections that the server has.
func (v *victims) fill(ctx context.Context, _ *nemesis) error {
	for range 1000 {
		conn, err := v.servers[0].Conn(ctx)
		if err != nil {
			return ctx.Err() // it is full
		}
		v.cleanup = append(v.cleanup, func() {
			ctx, cancel := context.WithTimeout(context.Background(), time.Second)
			defer cancel()
			_ = conn.Close(ctx) // it is gone either way
		})
	}
	return fmt.Errorf("%s takes any number of connections", v.servers[0].Name())
}

// empty does what is left to do.
func (v *victims) empty(context.Context, *nemesis) error {
	for _, f := range v.cleanup {
		f()
	}
	v.cleanup = nil
	return nil
}

// background runs f again and again until the fault is undone.
func (v *victims) background(f func(context.Context) error) {
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	wg.Go(func() {
		for ctx.Err() == nil {
			if f(ctx) != nil {
				pause(ctx, 50*time.Millisecond) // another fault is in the way
			}
		}
	})
	v.cleanup = append(v.cleanup, func() {
		cancel()
		wg.Wait()
	})
}

// storm makes log that conflicts with what is being read on a replica: rows that its snapshots still see are removed, and
// the table that it reads is locked.
func (v *victims) storm(_ context.Context, _ *nemesis) error {
	primary := v.servers[0]
	v.background(func(ctx context.Context) error {
		if err := primary.Exec(ctx, "vacuum register"); err != nil {
			return err
		}
		err := primary.Exec(ctx, "begin; set local lock_timeout = '200ms'; lock table register in access exclusive mode; select pg_current_xact_id(); commit")
		pause(ctx, 20*time.Millisecond)
		return err
	})
	return nil
}

// addColumn adds a column that the victims do not have yet, and says so.
func (v *victims) addColumn(ctx context.Context, n *nemesis) error {
	if err := v.pause(ctx, n); err != nil {
		return err
	}
	column := fmt.Sprintf("c%d", n.columns.Add(1))
	err := n.cluster.Primary.Exec(ctx, fmt.Sprintf("begin; set local lock_timeout = '1s'; alter table register add column %s int; commit", column))
	if err == nil {
		n.announce(column)
	}
	return err
}

// doubt lets writes wait for locks, and their connections break off meanwhile. They commit when the fault is undone.
func (v *victims) doubt(ctx context.Context, n *nemesis) error {
	conn, err := v.servers[0].Conn(ctx)
	if err != nil {
		return err
	}
	v.cleanup = append(v.cleanup, func() {
		ctx, cancel := context.WithTimeout(context.Background(), time.Second)
		defer cancel()
		_ = conn.Close(ctx) // which ends the transaction
	})
	if _, err := conn.Exec(ctx, "begin; select from register order by key for update"); err != nil {
		return err
	}
	pause(ctx, 100*time.Millisecond)
	breakOff(n.proxyOf(v.servers[0]))
	return nil
}

// breakOff resets the connections, and what pgx then tries to cancel on new ones. It has had its time when it returns.
func breakOff(p *pgsplittest.Proxy) {
	p.Cut()
	pause(context.Background(), 50*time.Millisecond)
	p.Restore()
}

// promote makes a replica a primary that nobody knows, for the rest of the run.
func (v *victims) promote(ctx context.Context, _ *nemesis) error {
	return v.servers[0].Promote(ctx)
}

func (v *victims) slow(_ context.Context, _ *nemesis) error {
	delay := time.Duration(5+v.rand.IntN(100)) * time.Millisecond
	for _, p := range v.proxies {
		p.SetDelay(delay)
	}
	return nil
}

// proxyOf is the proxy that workers reach the server by.
func (n *nemesis) proxyOf(s *pgsplittest.Server) *pgsplittest.Proxy {
	if n.roundRobin && s != n.cluster.Primary {
		return n.cluster.RoundRobin()
	}
	return s.Proxy()
}

// choose picks servers that are not in use by another fault; none if there are none.
func (n *nemesis) choose(t target, used []*pgsplittest.Server) *victims {
	v := &victims{rand: rand.New(rand.NewPCG(n.rand.Uint64(), n.rand.Uint64()))}
	replicas := n.cluster.Replicas
	one := replicas[n.rand.IntN(len(replicas))]
	switch {
	case t == thePrimary, t != aReplica && t != someReplicas && n.rand.IntN(3) == 0:
		v.servers = []*pgsplittest.Server{n.cluster.Primary}
	case t == someReplicas && n.rand.IntN(4) == 0, t == aNetwork && n.roundRobin:
		v.servers = replicas
	default:
		v.servers = []*pgsplittest.Server{one}
	}
	for _, s := range v.servers {
		if slices.Contains(used, s) {
			return nil
		}
		if p := n.proxyOf(s); !slices.Contains(v.proxies, p) {
			v.proxies = append(v.proxies, p)
		}
	}
	return v
}

// run makes trouble until ctx ends, and leaves all servers well.
func (n *nemesis) run(ctx context.Context) {
	names := n.plan.Faults
	if names == nil {
		for name := range faults {
			if name != "promote" && name != "setback" {
				names = append(names, name)
			}
		}
		slices.Sort(names)
	}
	for {
		quiet := n.plan.Quiet
		if n.rand.IntN(6) == 0 && n.plan.Calm.Max > 0 {
			quiet = n.plan.Calm
		}
		if pause(ctx, quiet.pick(n.rand)); ctx.Err() != nil {
			return
		}
		first := names[n.rand.IntN(len(names))]
		v := n.choose(faults[first].on, nil)
		hold := n.plan.Hold.pick(n.rand)
		var all sync.WaitGroup
		all.Go(func() { n.commit(ctx, first, v, hold) })
		if n.plan.Overlap && n.rand.IntN(3) == 0 {
			second := names[n.rand.IntN(len(names))]
			if w := n.choose(faults[second].on, v.servers); w != nil {
				hold := n.plan.Hold.pick(n.rand)
				all.Go(func() { n.commit(ctx, second, w, hold) })
			}
		}
		all.Wait()
	}
}

// healLimit bounds how long it may take until a server is well again.
const healLimit = 30 * time.Second

// commit does one fault, lets it last and undoes it, whatever else happens.
func (n *nemesis) commit(ctx context.Context, name string, v *victims, hold time.Duration) {
	f := faults[name]
	done := Fault{Kind: name, Servers: v.names(), Down: f.down, Start: n.clock.now()}
	acting, cancel := context.WithTimeout(context.WithoutCancel(ctx), healLimit)
	defer cancel()
	err := f.do(v, acting, n)
	if err == nil && f.undo != nil {
		pause(ctx, hold)
	}
	if f.undo != nil {
		healing, cancel := context.WithTimeout(context.WithoutCancel(ctx), healLimit)
		defer cancel()
		if undone := f.undo(v, healing, n); err == nil {
			err = undone
		}
	}
	_ = v.empty(acting, n) // what is left after a failure
	done.End = n.clock.now()
	if err != nil {
		done.Error = err.Error()
	}
	n.record(done)
}
