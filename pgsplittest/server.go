package pgsplittest

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
)

const serverHost = "127.0.0.1"

// A Mode is a way to stop a server.
type Mode int

const (
	// Fast ends the connections with FATAL 57P01, and writes everything to disk. A primary first waits until its
	// replicas have received everything.
	Fast Mode = iota
	// Immediate ends the connections and recovers from WAL at the next start, as after a power failure.
	Immediate
)

// A Server is one PostgreSQL server of a cluster. Its methods are safe for concurrent use, except that those that
// start, stop, freeze or promote it wait for each other.
type Server struct {
	cluster *Cluster
	name    string
	port    int
	proxy   *Proxy

	lifeMu sync.Mutex // held while the server is started, stopped, frozen or thawed

	mu      sync.Mutex // guards the fields below, never held for long
	process *process   // the last one started; nil before the first start
	frozen  bool
	killed  bool // the last process left its traces: postmaster.pid and what it names
}

// process is one life of a postmaster.
type process struct {
	cmd   *exec.Cmd
	log   int64         // size of the log file when it started
	ended chan struct{} // closed when the process has ended
	err   error         // how it ended; set before ended is closed
}

func (p *process) running() bool {
	select {
	case <-p.ended:
		return false
	default:
		return true
	}
}

// Name returns "primary", "replica1", "replica2" and so on. It is also the server's cluster_name, and its
// application_name at its primary, and does not change with a promotion.
func (s *Server) Name() string { return s.name }

// Host returns 127.0.0.1.
func (s *Server) Host() string { return serverHost }

// Port returns the server's TCP port, the same in all its lives.
func (s *Server) Port() int { return s.port }

func (s *Server) address() string { return net.JoinHostPort(serverHost, strconv.Itoa(s.port)) }

// URI returns the server's connection URI, over TCP and without a proxy.
func (s *Server) URI() string { return uri(s.address()) }

// ProxyURI returns the connection URI of the server's proxy.
func (s *Server) ProxyURI() string { return uri(s.proxy.Addr()) }

// SocketURI returns the server's connection URI over its unix socket.
func (s *Server) SocketURI() string {
	return fmt.Sprintf("postgres:///postgres?host=%s&port=%d&user=postgres", url.QueryEscape(s.cluster.folder), s.port)
}

func uri(address string) string {
	return "postgres://postgres@" + address + "/postgres?sslmode=disable"
}

// Proxy returns the proxy in front of the server, which is made with the cluster.
func (s *Server) Proxy() *Proxy { return s.proxy }

// DataDir returns the server's data folder.
func (s *Server) DataDir() string { return filepath.Join(s.cluster.folder, s.name) }

func (s *Server) logFile() string { return s.DataDir() + ".log" }

// Log returns the end of the server's log, at most 8 kB.
func (s *Server) Log() string { return s.logSince(0) }

// logSince is Log without what was written before the log had a size.
func (s *Server) logSince(size int64) string {
	const most = 8 << 10
	f, err := os.Open(s.logFile())
	if err != nil {
		return ""
	}
	defer f.Close()
	end, err := f.Seek(0, io.SeekEnd)
	if err != nil {
		return ""
	}
	tail := make([]byte, end-max(size, end-most))
	n, _ := f.ReadAt(tail, end-int64(len(tail)))
	return string(tail[:n])
}

// configure writes the configuration of a new server.
func (s *Server) configure(o *options) error {
	primary := s == s.cluster.Primary
	settings := []setting{
		{name: "listen_addresses", value: serverHost},
		{name: "port", value: strconv.Itoa(s.port)},
		{name: "unix_socket_directories", value: s.cluster.folder},
		{name: "cluster_name", value: s.name},
		{name: "log_line_prefix", value: "%m [%p] "},
		{name: "fsync", value: "off"},
		{name: "shared_buffers", value: "16MB"},
		// In the data folder instead of /dev/shm, where those of a killed server would stay.
		{name: "dynamic_shared_memory_type", value: "mmap"},
		{name: "autovacuum", value: "off"},
		{name: "wal_level", value: "replica"},
		{name: "hot_standby", value: "on"},
		// F18: the same everywhere and never below initdb's choice, or a replica refuses to start.
		{name: "max_connections", value: "200"},
		{name: "max_wal_senders", value: "20"},
		// A replica that was stopped for a while finds its WAL again.
		{name: "wal_keep_size", value: "256MB"},
		{name: "max_wal_size", value: "256MB"},
		{name: "checkpoint_timeout", value: "1h"},
		// F19: a stalled replica hears from its primary after 1 s instead of 10.
		{name: "wal_receiver_status_interval", value: "1s"},
		{name: "wal_retrieve_retry_interval", value: "100ms"},
	}
	if !primary {
		settings = append(settings, setting{name: "primary_conninfo", value: s.conninfo(s.cluster.Primary)})
		standby := filepath.Join(s.DataDir(), "standby.signal")
		if err := os.WriteFile(standby, nil, 0o600); err != nil {
			return fmt.Errorf("pgsplittest: configure %s: %w", s.name, err)
		}
		if err := giveTo(s.cluster.bin.owner, standby); err != nil {
			return fmt.Errorf("pgsplittest: configure %s: %w", s.name, err)
		}
	}
	for _, extra := range o.settings {
		if primary && extra.primary || !primary && extra.replicas {
			settings = append(settings, extra)
		}
	}
	var conf strings.Builder
	conf.WriteString("\n")
	for _, line := range settings {
		fmt.Fprintf(&conf, "%s = '%s'\n", line.name, strings.ReplaceAll(line.value, "'", "''"))
	}
	f, err := os.OpenFile(filepath.Join(s.DataDir(), "postgresql.conf"), os.O_APPEND|os.O_WRONLY, 0)
	if err != nil {
		return fmt.Errorf("pgsplittest: configure %s: %w", s.name, err)
	}
	_, err = f.WriteString(conf.String())
	if err = errors.Join(err, f.Close()); err != nil {
		return fmt.Errorf("pgsplittest: configure %s: %w", s.name, err)
	}
	return nil
}

func (s *Server) conninfo(upstream *Server) string {
	return fmt.Sprintf("host=%s port=%d user=postgres application_name=%s sslmode=disable", serverHost, upstream.port, s.name)
}

// errPortTaken says that another process was quicker.
var errPortTaken = errors.New("port is taken")

// Start starts a server that was stopped or killed, with the same data on the same port, and returns when it accepts
// connections. It does nothing when the server is running.
func (s *Server) Start(ctx context.Context) error {
	ctx, cancel := bounded(ctx)
	defer cancel()
	s.lifeMu.Lock()
	defer s.lifeMu.Unlock()
	if s.Running() {
		return nil
	}
	p, err := s.launch()
	if err != nil {
		return fmt.Errorf("pgsplittest: start %s: %w", s.name, err)
	}
	s.mu.Lock()
	s.process, s.frozen, s.killed = p, false, false
	s.mu.Unlock()
	err = poll(ctx, 5*time.Millisecond, func() (bool, error) {
		if !p.running() {
			if strings.Contains(s.logSince(p.log), "could not bind") {
				return false, errPortTaken
			}
			return false, fmt.Errorf("it ended: %v", p.err)
		}
		return s.ready(p), nil
	})
	if err != nil {
		return fmt.Errorf("pgsplittest: start %s: %w\n%s", s.name, err, s.logSince(p.log))
	}
	return nil
}

// launch starts the postmaster. The goroutine that starts it keeps its thread until the postmaster has ended, because
// with the thread that started it a process would lose its parent (see dieWithParent).
func (s *Server) launch() (*process, error) {
	log, err := os.OpenFile(s.logFile(), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return nil, err
	}
	defer log.Close()
	size, err := log.Seek(0, io.SeekEnd)
	if err != nil {
		return nil, err
	}
	cmd := s.cluster.bin.command(context.Background(), s.DataDir(), "postgres", "-D", s.DataDir())
	cmd.Stdout, cmd.Stderr = log, log
	dieWithParent(cmd)
	p := &process{cmd: cmd, log: size, ended: make(chan struct{})}
	started := make(chan error)
	go func() {
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		err := cmd.Start()
		started <- err
		if err != nil {
			return
		}
		p.err = cmd.Wait()
		close(p.ended)
	}()
	if err := <-started; err != nil {
		return nil, err
	}
	return p, nil
}

// ready tells whether the postmaster says in its pid file that it accepts connections. Unlike an attempt to connect
// this costs the server nothing while it is busy starting, and holds for a replica with hot_standby=off as well, which
// is up and refuses everybody.
func (s *Server) ready(p *process) bool {
	data, err := os.ReadFile(filepath.Join(s.DataDir(), "postmaster.pid"))
	if err != nil {
		return false
	}
	lines := strings.Split(string(data), "\n")
	if len(lines) < 8 || lines[0] != strconv.Itoa(p.cmd.Process.Pid) {
		return false
	}
	status := strings.TrimSpace(lines[7])
	return status == "ready" || status == "standby"
}

// Running tells whether the server's postmaster exists, frozen or not.
func (s *Server) Running() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.process != nil && s.process.running()
}

// responds tells whether the server is running and not frozen.
func (s *Server) responds() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.process != nil && s.process.running() && !s.frozen
}

// current returns the running process, or nil.
func (s *Server) current() *process {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.process == nil || !s.process.running() {
		return nil
	}
	return s.process
}

// Stop shuts the server down and waits for its end. A frozen server is thawed first. It does nothing when the server
// is not running.
func (s *Server) Stop(ctx context.Context, mode Mode) error {
	ctx, cancel := bounded(ctx)
	defer cancel()
	s.lifeMu.Lock()
	defer s.lifeMu.Unlock()
	p := s.current()
	if p == nil {
		return nil
	}
	if err := s.thaw(p); err != nil {
		return fmt.Errorf("pgsplittest: stop %s: %w", s.name, err)
	}
	sig := sigFast
	if mode == Immediate {
		sig = sigImmediate
	}
	if err := p.cmd.Process.Signal(sig); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return fmt.Errorf("pgsplittest: stop %s: %w", s.name, err)
	}
	select {
	case <-p.ended:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("pgsplittest: stop %s: %w\n%s", s.name, ctx.Err(), s.Log())
	}
}

// Restart is [Server.Stop] and [Server.Start]. A restart ends a replay pause.
func (s *Server) Restart(ctx context.Context, mode Mode) error {
	if err := s.Stop(ctx, mode); err != nil {
		return err
	}
	return s.Start(ctx)
}

// Kill ends all processes of the server with SIGKILL, and waits for their end. It leaves postmaster.pid behind, as a
// machine that loses power does. It does nothing when the server is not running.
func (s *Server) Kill(ctx context.Context) error {
	ctx, cancel := bounded(ctx)
	defer cancel()
	s.lifeMu.Lock()
	defer s.lifeMu.Unlock()
	p := s.current()
	if p == nil {
		return nil
	}
	if err := s.kill(ctx, p); err != nil {
		return fmt.Errorf("pgsplittest: kill %s: %w", s.name, err)
	}
	return nil
}

func (s *Server) kill(ctx context.Context, p *process) error {
	// Stopped, it cannot have further children. PostgreSQL puts each child in a process group of its own, so the
	// postmaster's group is the postmaster.
	backends, err := s.freeze(p)
	if err != nil {
		return err
	}
	s.mu.Lock()
	s.killed = true
	s.mu.Unlock()
	if err := p.cmd.Process.Kill(); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return err
	}
	for _, pid := range backends {
		if err := signalProcess(pid, sigKill); err != nil {
			return err
		}
	}
	select {
	case <-p.ended:
	case <-ctx.Done():
		return ctx.Err()
	}
	// A server does not start while a process of its former life is attached to the shared memory.
	return poll(ctx, pollInterval, func() (bool, error) {
		for _, pid := range backends {
			if !gone(pid) {
				return false, nil
			}
		}
		return true, nil
	})
}

// Freeze stops all processes of the server with SIGSTOP. Connections stay open, and new ones are taken by the kernel;
// nobody is answered until [Server.Thaw].
func (s *Server) Freeze() error {
	s.lifeMu.Lock()
	defer s.lifeMu.Unlock()
	p := s.current()
	if p == nil {
		return fmt.Errorf("pgsplittest: freeze %s: it is not running", s.name)
	}
	if _, err := s.freeze(p); err != nil {
		return fmt.Errorf("pgsplittest: freeze %s: %w", s.name, err)
	}
	return nil
}

// freeze stops the postmaster and its children, and returns the children.
func (s *Server) freeze(p *process) ([]int, error) {
	s.mu.Lock()
	s.frozen = true
	s.mu.Unlock()
	if err := p.cmd.Process.Signal(sigFreeze); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return nil, err
	}
	var backends []int
	stopped := map[int]bool{}
	// The signal may take a moment to stop the postmaster: look again until nobody new is there.
	for {
		pids, err := children(p.cmd.Process.Pid)
		if err != nil {
			return nil, err
		}
		found := false
		for _, pid := range pids {
			if stopped[pid] {
				continue
			}
			if err := signalProcess(pid, sigFreeze); err != nil {
				return nil, err
			}
			stopped[pid], found = true, true
			backends = append(backends, pid)
		}
		if !found {
			return backends, nil
		}
	}
}

// Thaw lets a frozen server go on where it was.
func (s *Server) Thaw() error {
	s.lifeMu.Lock()
	defer s.lifeMu.Unlock()
	p := s.current()
	if p == nil {
		return fmt.Errorf("pgsplittest: thaw %s: it is not running", s.name)
	}
	if err := s.thaw(p); err != nil {
		return fmt.Errorf("pgsplittest: thaw %s: %w", s.name, err)
	}
	return nil
}

func (s *Server) thaw(p *process) error {
	s.mu.Lock()
	frozen := s.frozen
	s.frozen = false
	s.mu.Unlock()
	if !frozen {
		return nil
	}
	pids, err := children(p.cmd.Process.Pid)
	if err != nil {
		return err
	}
	for _, pid := range append(pids, p.cmd.Process.Pid) {
		if err := signalProcess(pid, sigThaw); err != nil {
			return err
		}
	}
	return nil
}

// KillBackend ends one of the server's backends, which it opens for this, with SIGKILL. The postmaster then ends all
// others and recovers from WAL: the same postmaster at the same address, with possibly older data. It returns when
// the server accepts connections again.
func (s *Server) KillBackend(ctx context.Context) error {
	ctx, cancel := bounded(ctx)
	defer cancel()
	victim, err := s.Conn(ctx)
	if err != nil {
		return err
	}
	defer closeConn(victim)
	witness, err := s.Conn(ctx)
	if err != nil {
		return err
	}
	defer closeConn(witness)
	var pid int
	if err := victim.QueryRow(ctx, "select pg_backend_pid()").Scan(&pid); err != nil {
		return fmt.Errorf("pgsplittest: kill a backend of %s: %w", s.name, err)
	}
	if err := signalProcess(pid, sigKill); err != nil {
		return fmt.Errorf("pgsplittest: kill a backend of %s: %w", s.name, err)
	}
	// The witness loses its connection when the postmaster has begun; it would accept a new one before.
	if _, err := witness.WaitForNotification(ctx); ctx.Err() != nil {
		return fmt.Errorf("pgsplittest: kill a backend of %s: %w", s.name, err)
	}
	err = poll(ctx, 5*time.Millisecond, func() (bool, error) {
		if !s.Running() {
			return false, errors.New("the server ended")
		}
		conn, err := s.Conn(ctx)
		if err != nil {
			return false, nil
		}
		closeConn(conn)
		return true, nil
	})
	if err != nil {
		return fmt.Errorf("pgsplittest: kill a backend of %s: %w\n%s", s.name, err, s.Log())
	}
	return nil
}

// end ends the server for good.
func (s *Server) end() error {
	ctx, cancel := context.WithTimeout(context.Background(), waitLimit)
	defer cancel()
	// Immediate rather than killed: an ordered end takes the server's shared memory along.
	quick, cancelQuick := context.WithTimeout(ctx, 10*time.Second)
	defer cancelQuick()
	err := s.Stop(quick, Immediate)
	if err != nil {
		err = s.Kill(ctx)
	}
	s.removeSharedMemory()
	return err
}

// removeSharedMemory removes the System V segment of a killed server, which it would have found and removed itself at
// its next start. There are few to be had, and no harm is done if this fails.
func (s *Server) removeSharedMemory() {
	s.mu.Lock()
	killed := s.killed
	s.mu.Unlock()
	if !killed {
		return
	}
	data, err := os.ReadFile(filepath.Join(s.DataDir(), "postmaster.pid"))
	if err != nil {
		return
	}
	// The seventh line holds key and id of the segment.
	lines := strings.Split(string(data), "\n")
	if len(lines) < 7 {
		return
	}
	if ids := strings.Fields(lines[6]); len(ids) == 2 {
		exec.Command("ipcrm", "-m", ids[1]).Run()
	}
}

// Conn opens a connection to the server, over TCP and without a proxy. The caller closes it.
func (s *Server) Conn(ctx context.Context) (*pgx.Conn, error) {
	config, err := pgx.ParseConfig(s.URI())
	if err != nil {
		return nil, fmt.Errorf("pgsplittest: %w", err)
	}
	// Neither PGTARGETSESSIONATTRS nor PGOPTIONS of the environment is meant here.
	config.ValidateConnect = nil
	config.RuntimeParams = map[string]string{"application_name": "pgsplittest"}
	conn, err := pgx.ConnectConfig(ctx, config)
	if err != nil {
		return nil, fmt.Errorf("pgsplittest: connect to %s: %w", s.name, err)
	}
	return conn, nil
}

// closeConn says goodbye to the server, but does not wait for one that does not listen.
func closeConn(conn *pgx.Conn) {
	ctx, cancel := context.WithTimeout(context.Background(), time.Second)
	defer cancel()
	conn.Close(ctx)
}

// Exec runs SQL on a connection of its own. Without arguments it may be several statements.
func (s *Server) Exec(ctx context.Context, sql string, args ...any) error {
	ctx, cancel := bounded(ctx)
	defer cancel()
	conn, err := s.Conn(ctx)
	if err != nil {
		return err
	}
	defer closeConn(conn)
	if _, err := conn.Exec(ctx, sql, args...); err != nil {
		return fmt.Errorf("pgsplittest: %s: %w", s.name, err)
	}
	return nil
}

// queryRow reads one value on a connection of its own.
func (s *Server) queryRow(ctx context.Context, dest any, sql string) error {
	conn, err := s.Conn(ctx)
	if err != nil {
		return err
	}
	defer closeConn(conn)
	if err := conn.QueryRow(ctx, sql).Scan(dest); err != nil {
		return fmt.Errorf("pgsplittest: %s: %w", s.name, err)
	}
	return nil
}

// until opens a connection and calls done with it until it returns true or an error.
func (s *Server) until(ctx context.Context, done func(*pgx.Conn) (bool, error)) error {
	conn, err := s.Conn(ctx)
	if err != nil {
		return err
	}
	defer closeConn(conn)
	err = poll(ctx, pollInterval, func() (bool, error) { return done(conn) })
	if err != nil {
		return fmt.Errorf("pgsplittest: %s: %w", s.name, err)
	}
	return nil
}

// PauseReplay stops the replay of WAL on a replica, which then gets stale, and returns when it has stopped. WAL is
// received all the same.
func (s *Server) PauseReplay(ctx context.Context) error {
	ctx, cancel := bounded(ctx)
	defer cancel()
	if err := s.Exec(ctx, "select pg_wal_replay_pause()"); err != nil {
		return err
	}
	query := "select pg_get_wal_replay_pause_state() = 'paused'"
	if s.cluster.bin.major < 14 {
		query = "select pg_is_wal_replay_paused()" // all that 13 can say
	}
	return s.until(ctx, func(conn *pgx.Conn) (paused bool, err error) {
		err = conn.QueryRow(ctx, query).Scan(&paused)
		return paused, err
	})
}

// ResumeReplay ends [Server.PauseReplay]. It does not wait for the replica to catch up.
func (s *Server) ResumeReplay(ctx context.Context) error {
	return s.Exec(ctx, "select pg_wal_replay_resume()")
}

// Promote makes a replica a primary, on a new timeline, and returns when it accepts writes. A primary that is running
// stays one: two primaries, as in a failover gone wrong. Other replicas go on following the one they had; see
// [Server.Follow].
func (s *Server) Promote(ctx context.Context) error {
	ctx, cancel := bounded(ctx)
	defer cancel()
	if err := s.Exec(ctx, "select pg_promote(false)"); err != nil {
		return err
	}
	return s.until(ctx, func(conn *pgx.Conn) (writable bool, err error) {
		err = conn.QueryRow(ctx, "select not pg_is_in_recovery()").Scan(&writable)
		return writable, err
	})
}

// Follow makes a replica stream from another server, as failover tools do after a promotion. It does not wait until it
// does.
func (s *Server) Follow(ctx context.Context, upstream *Server) error {
	ctx, cancel := bounded(ctx)
	defer cancel()
	if err := s.Exec(ctx, fmt.Sprintf("alter system set primary_conninfo = '%s'", s.conninfo(upstream))); err != nil {
		return err
	}
	return s.Exec(ctx, "select pg_reload_conf()")
}

// positionQuery gives the end of what a server has: as a primary its insert position, in recovery its replay position.
// NULL, from a replica that has replayed nothing yet, counts as 0.
const positionQuery = `select coalesce(pg_wal_lsn_diff(
	case when pg_is_in_recovery() then pg_last_wal_replay_lsn() else pg_current_wal_insert_lsn() end, '0/0'), 0)::bigint`

// Position returns the insert position of a primary, and the replay position of a replica.
func (s *Server) Position(ctx context.Context) (uint64, error) {
	ctx, cancel := bounded(ctx)
	defer cancel()
	var position int64
	if err := s.queryRow(ctx, &position, positionQuery); err != nil {
		return 0, err
	}
	return uint64(position), nil
}

// Lag returns how many bytes of WAL the server has yet to replay to be where the cluster's primary is now. An idle
// replica stays 24 or 40 bytes behind where the last record ends with a page: they are the next page's header.
func (s *Server) Lag(ctx context.Context) (bytes uint64, err error) {
	own, err := s.Position(ctx)
	if err != nil {
		return 0, err
	}
	primary, err := s.cluster.Primary.Position(ctx)
	if err != nil {
		return 0, err
	}
	if own >= primary {
		return 0, nil
	}
	return primary - own, nil
}

// WaitFor returns when the server has replayed everything up to a position. When a replica makes no progress for
// 200 ms, the primary is made to send more, so its position rises a little.
func (s *Server) WaitFor(ctx context.Context, lsn uint64) error {
	ctx, cancel := bounded(ctx)
	defer cancel()
	var last int64
	since := time.Now()
	return s.until(ctx, func(conn *pgx.Conn) (bool, error) {
		var position int64
		if err := conn.QueryRow(ctx, positionQuery).Scan(&position); err != nil {
			return false, err
		}
		if uint64(position) >= lsn {
			return true, nil
		}
		if position != last {
			last, since = position, time.Now()
		} else if time.Since(since) > 200*time.Millisecond {
			s.cluster.nudge(ctx)
			since = time.Now()
		}
		return false, nil
	})
}

// nudge makes the primary send WAL. If there is none to nudge, the waiting goes on without.
func (c *Cluster) nudge(ctx context.Context) {
	if c.Primary.responds() {
		_ = c.Primary.Exec(ctx, "select pg_logical_emit_message(true, 'pgsplittest', '')")
	}
}
