package soak

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgsplit/pgsplit/pgsplittest"
)

// Options say what a run is made of. Zero fields have defaults.
type Options struct {
	Seed       uint64
	Duration   time.Duration
	Processes  int // of callers; default 2
	Workload   Workload
	Trouble    Trouble
	RoundRobin bool                 // the workers know one address that leads to all replicas in turn
	Settings   []pgsplittest.Option // of the cluster, which has two replicas
	Rules      Rules                // Servers and Replicas are filled in
	Early      bool                 // end with the first violation
	Parameters string               // of the DSN, beginning with &

	Command     []string // starts a worker: a program that calls Work when IsWorker
	Environment []string // of the workers, besides this process's own
	Folder      string   // for the histories
}

// complete fills in the defaults.
func (o *Options) complete() {
	if o.Processes == 0 {
		o.Processes = 2
	}
	w := &o.Workload
	if w.Callers == 0 {
		w.Callers = 8
	}
	if w.Keys == 0 {
		w.Keys = 12
	}
	if w.Pace == 0 {
		w.Pace = 10 * time.Millisecond
	}
	if w.Mix == nil {
		w.Mix = everything
	}
	if w.Budget == 0 {
		w.Budget = 3 * time.Second
	}
	if w.MaxWait == 0 {
		w.MaxWait = 50 * time.Millisecond
	}
	t := &o.Trouble
	if t.Hold == (Span{}) {
		t.Hold = Span{100 * time.Millisecond, time.Second}
	}
	if t.Quiet == (Span{}) {
		t.Quiet = Span{100 * time.Millisecond, time.Second}
	}
	if o.Rules.Skew == 0 {
		o.Rules.Skew = 2 * time.Millisecond
	}
}

// faultsFile is the name of the nemesis's own history in Options.Folder.
const faultsFile = "faults.jsonl"

// run is one run, while it goes on.
type run struct {
	Options
	cluster *pgsplittest.Cluster
	workers []*process
	faults  *recorder
}

// Run starts a cluster and workers, makes trouble for as long as it was told, and judges what happened. An error is one
// of the run itself.
func Run(ctx context.Context, o Options) (Verdict, error) {
	o.complete()
	cluster, err := pgsplittest.StartCluster(ctx, append([]pgsplittest.Option{pgsplittest.Replicas(2)}, o.Settings...)...)
	if err != nil {
		return Verdict{}, err
	}
	verdict, err := (&run{Options: o, cluster: cluster}).run(ctx)
	return verdict, errors.Join(err, cluster.Close())
}

func (r *run) run(ctx context.Context) (Verdict, error) {
	if err := r.prepare(ctx); err != nil {
		return Verdict{}, err
	}
	r.Rules.Servers = 1 + len(r.cluster.Replicas)
	for _, s := range r.cluster.Replicas {
		r.Rules.Replicas = append(r.Rules.Replicas, s.Port())
	}
	var err error
	if r.faults, err = newRecorder(filepath.Join(r.Folder, faultsFile)); err != nil {
		return Verdict{}, err
	}
	err = r.startWorkers()
	if err == nil {
		err = r.trouble(ctx)
	}
	err = errors.Join(err, r.stopWorkers(), r.faults.close())
	if err != nil {
		return Verdict{}, err
	}
	return r.judge(ctx)
}

// prepare makes the tables and waits until every replica has them.
func (r *run) prepare(ctx context.Context) error {
	err := r.cluster.Primary.Exec(ctx, `create table register (key int primary key, version bigint not null, op bigint not null);
create table ledger (op bigint not null, key int not null, version bigint not null);
create index on ledger (key, version)`)
	if err == nil {
		err = r.cluster.Primary.Exec(ctx, "insert into register select i, 0, 0 from generate_series(0, $1 - 1) i", r.Workload.Keys)
	}
	if err == nil {
		err = r.cluster.CatchUp(ctx)
	}
	return err
}

func (r *run) dsn() string {
	dsn := r.cluster.ProxyDSN()
	if r.RoundRobin {
		dsn = r.cluster.Primary.ProxyURI() + " " + r.cluster.RoundRobin().URI()
	}
	primary, replicas, _ := strings.Cut(dsn, " ")
	return primary + r.Parameters + " " + replicas
}

// trouble lets the nemesis do its work until the time is over, or until a violation is found.
func (r *run) trouble(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, r.Duration)
	defer cancel()
	n := &nemesis{
		cluster: r.cluster, roundRobin: r.RoundRobin, plan: r.Trouble, clock: newClock(),
		rand:     rand.New(rand.NewPCG(r.Seed, 0)),
		record:   func(f Fault) { r.faults.record(f) },
		announce: func(column string) { r.tell(message{Column: column}) },
	}
	var all sync.WaitGroup
	defer all.Wait()
	all.Go(func() { n.run(ctx) })
	look := time.NewTicker(500 * time.Millisecond)
	defer look.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-look.C:
		}
		for _, p := range r.workers {
			if p.ended() {
				cancel()
				return fmt.Errorf("a worker ended by itself: %s", p.stderr.String())
			}
		}
		if !r.Early {
			continue
		}
		r.faults.flush()
		// While the primary does not answer there is no verdict.
		if v, err := r.judge(ctx); err == nil && len(v.Violations) > 0 {
			cancel()
			return nil
		}
	}
}

// judge reads the histories, and then the ledger: it has all that they acknowledge.
func (r *run) judge(ctx context.Context) (Verdict, error) {
	h, err := readHistory(r.Folder)
	if err != nil {
		return Verdict{}, err
	}
	conn, err := r.cluster.Primary.Conn(ctx)
	if err != nil {
		return Verdict{}, err
	}
	defer conn.Close(context.WithoutCancel(ctx))
	rows, err := conn.Query(ctx, "select op, key, version from ledger")
	if err != nil {
		return Verdict{}, err
	}
	h.Ledger, err = pgx.CollectRows(rows, func(row pgx.CollectableRow) (v Value, err error) {
		err = row.Scan(&v.Op, &v.Key, &v.Version)
		return v, err
	})
	if err != nil {
		return Verdict{}, err
	}
	return Check(h, r.Rules), nil
}

// readHistory reads all that the processes of a run have written.
func readHistory(folder string) (*History, error) {
	h := &History{}
	paths, err := filepath.Glob(filepath.Join(folder, "worker*.jsonl"))
	if err != nil {
		return nil, err
	}
	for _, path := range paths {
		ops, err := readLines[Op](path)
		if err != nil {
			return nil, err
		}
		h.Ops = append(h.Ops, ops...)
	}
	h.Faults, err = readLines[Fault](filepath.Join(folder, faultsFile))
	return h, err
}

// process is a worker as its parent sees it.
type process struct {
	cmd    *exec.Cmd
	stdout io.Reader
	stderr bytes.Buffer  // to be read once it has ended
	done   chan struct{} // closed when it has ended
	err    error         // how; set before done is closed

	mu    sync.Mutex
	stdin io.WriteCloser // guarded by mu
}

func (p *process) ended() bool {
	select {
	case <-p.done:
		return true
	default:
		return false
	}
}

// startWorkers starts the workers. Those that were started are attended to even if one was not.
func (r *run) startWorkers() error {
	defer func() {
		for i, p := range r.workers {
			go r.attend(p, rand.New(rand.NewPCG(r.Seed, uint64(i+1))))
		}
	}()
	for i := range r.Processes {
		assigned, err := json.Marshal(assignment{
			Workload: r.Workload, DSN: r.dsn(), Process: i + 1, Seed: r.Seed,
			History: filepath.Join(r.Folder, fmt.Sprintf("worker%d.jsonl", i+1)),
		})
		if err != nil {
			return err
		}
		p := &process{cmd: exec.Command(r.Command[0], r.Command[1:]...), done: make(chan struct{})}
		p.cmd.Env = append(append(os.Environ(), r.Environment...), workerVariable+"="+string(assigned))
		p.cmd.Stderr = &p.stderr
		if p.stdin, err = p.cmd.StdinPipe(); err != nil {
			return err
		}
		if p.stdout, err = p.cmd.StdoutPipe(); err != nil {
			return err
		}
		if err := p.cmd.Start(); err != nil {
			return err
		}
		r.workers = append(r.workers, p)
	}
	return nil
}

// attend serves a worker until it has ended.
func (r *run) attend(p *process, dealer *rand.Rand) {
	r.distribute(p.stdout, dealer)
	p.err = p.cmd.Wait()
	close(p.done)
}

// distribute passes on what a worker sends, to any worker, until it ends.
func (r *run) distribute(out io.Reader, dealer *rand.Rand) {
	lines := bufio.NewReader(out)
	for {
		line, err := lines.ReadBytes('\n')
		if err != nil {
			return
		}
		r.deliver(r.workers[dealer.IntN(len(r.workers))], line)
	}
}

// tell sends a message to every worker.
func (r *run) tell(m message) {
	line, err := json.Marshal(m)
	if err != nil {
		return // it holds nothing that has no JSON
	}
	for _, p := range r.workers {
		r.deliver(p, append(line, '\n'))
	}
}

func (r *run) deliver(p *process, line []byte) {
	p.mu.Lock()
	defer p.mu.Unlock()
	_, _ = p.stdin.Write(line) // one that has ended needs none
}

// stopLimit bounds how long workers may take to end what they have begun.
const stopLimit = 30 * time.Second

// stopWorkers has the workers end, and waits for them.
func (r *run) stopWorkers() error {
	for _, p := range r.workers {
		_ = p.stdin.Close() // it is closed either way
	}
	timer := time.NewTimer(stopLimit)
	defer timer.Stop()
	var errs []error
	for _, p := range r.workers {
		select {
		case <-p.done:
		case <-timer.C:
			_ = p.cmd.Process.Kill() // it may have ended just now
			<-p.done
			errs = append(errs, fmt.Errorf("worker %d did not end within %v", p.cmd.Process.Pid, stopLimit))
		}
		if p.err != nil {
			errs = append(errs, fmt.Errorf("worker: %w\n%s", p.err, p.stderr.String()))
		}
	}
	return errors.Join(errs...)
}
