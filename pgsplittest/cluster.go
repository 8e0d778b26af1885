package pgsplittest

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
)

const (
	// waitLimit bounds a call whose context has no deadline.
	waitLimit = time.Minute
	// pollInterval is the time between two looks at something that no event announces.
	pollInterval = 2 * time.Millisecond
)

// A Cluster is a primary and its streaming replicas. Its methods are safe for concurrent use.
type Cluster struct {
	// Primary is the server that the replicas follow at first. A test that promotes a replica may assign it here: Lag,
	// WaitFor and CatchUp measure against this server.
	Primary *Server
	// Replicas are named replica1, replica2 and so on.
	Replicas []*Server

	bin        *binaries
	servers    []*Server // the primary first; never changes
	roundRobin *Proxy
	folder     string   // holds all data, logs and sockets
	lock       *os.File // tells other processes that the folder is in use
	closeOnce  sync.Once
	closeErr   error
}

// NeedServer skips a test under -short, because it needs a PostgreSQL server. Start calls it; it is for tests that use
// StartCluster, or something that does.
func NeedServer(t testing.TB) {
	t.Helper()
	if testing.Short() {
		t.Skip("needs a PostgreSQL server; run without -short")
	}
}

// Start starts a cluster for one test, and closes it when the test ends. Where there is none to start, the test fails;
// under -short it is skipped.
func Start(t testing.TB, opts ...Option) *Cluster {
	t.Helper()
	NeedServer(t)
	c, err := StartCluster(context.Background(), opts...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := c.Close(); err != nil {
			t.Error(err)
		}
	})
	return c
}

// StartCluster starts a cluster outside a test. It returns when every server accepts connections and every replica
// streams from the primary. ctx bounds the start only; the caller must call Close.
func StartCluster(ctx context.Context, opts ...Option) (*Cluster, error) {
	ctx, cancel := bounded(ctx)
	defer cancel()
	o := options{replicas: 1}
	for _, opt := range opts {
		opt(&o)
	}
	if o.replicas < 0 {
		return nil, fmt.Errorf("pgsplittest: %d replicas", o.replicas)
	}
	bin, err := openBinaries(ctx, o.binDir)
	if err != nil {
		return nil, err
	}
	// A port that is free when chosen can be taken before the server binds it.
	for attempt := 1; ; attempt++ {
		c, err := newCluster(ctx, bin, &o)
		if err == nil {
			return c, nil
		}
		if !errors.Is(err, errPortTaken) || attempt == 5 {
			return nil, err
		}
	}
}

func newCluster(ctx context.Context, bin *binaries, o *options) (_ *Cluster, err error) {
	c := &Cluster{bin: bin}
	defer func() {
		if err != nil {
			err = errors.Join(err, c.Close())
		}
	}()
	if err := c.makeFolder(); err != nil {
		return nil, err
	}
	ports, release, err := freePorts(1 + o.replicas)
	if err != nil {
		return nil, err
	}
	defer release()
	for i, port := range ports {
		name := "primary"
		if i > 0 {
			name = "replica" + strconv.Itoa(i)
		}
		s := &Server{cluster: c, name: name, port: port}
		c.servers = append(c.servers, s)
		if s.proxy, err = newProxy(s.address()); err != nil {
			return nil, err
		}
	}
	c.Primary, c.Replicas = c.servers[0], append([]*Server(nil), c.servers[1:]...)
	var targets []string
	for _, s := range c.Replicas {
		targets = append(targets, s.address())
	}
	if c.roundRobin, err = newProxy(targets...); err != nil {
		return nil, err
	}
	if err := c.makeData(ctx, o); err != nil {
		return nil, err
	}
	release()
	// F18: all at once. A replica that is up before its primary tries again every 100 ms.
	if err := c.each(func(s *Server) error { return s.Start(ctx) }); err != nil {
		return nil, err
	}
	if err := c.waitStreaming(ctx); err != nil {
		return nil, err
	}
	return c, nil
}

// folderPattern names the folders of running clusters. A folder gets this name when it is locked.
const folderPattern = "pgsplittest-"

// makeFolder makes the cluster's folder and locks it.
func (c *Cluster) makeFolder() error {
	base, err := c.bin.baseFolder()
	if err != nil {
		return err
	}
	sweep(base)
	folder, err := os.MkdirTemp(base, "new-"+folderPattern)
	if err != nil {
		return fmt.Errorf("pgsplittest: %w", err)
	}
	c.folder = folder
	if err := giveTo(c.bin.owner, folder); err != nil {
		return fmt.Errorf("pgsplittest: %w", err)
	}
	if c.lock, err = os.Create(filepath.Join(folder, "lock")); err != nil {
		return fmt.Errorf("pgsplittest: %w", err)
	}
	if !tryLock(c.lock) {
		return fmt.Errorf("pgsplittest: cannot lock %s", c.lock.Name())
	}
	final := filepath.Join(base, strings.TrimPrefix(filepath.Base(folder), "new-"))
	if err := os.Rename(folder, final); err != nil {
		return fmt.Errorf("pgsplittest: %w", err)
	}
	c.folder = final
	return nil
}

// baseFolder returns where the clusters' folders go: memory where there is room for it.
func (b *binaries) baseFolder() (string, error) {
	for _, dir := range []string{memoryFolder(), os.TempDir(), "/tmp"} {
		// A socket's path must be shorter than 104 bytes on some systems.
		socket := filepath.Join(dir, "new-"+folderPattern+"4294967295", ".s.PGSQL.65535.lock")
		if dir != "" && filepath.IsAbs(dir) && len(socket) < 100 && reachable(b.owner, dir) {
			return dir, nil
		}
	}
	return "", fmt.Errorf("pgsplittest: user %s, who runs the servers for root, can enter neither %s nor /tmp", b.owner.name, os.TempDir())
}

// sweep removes the folders of clusters whose process died without closing them. A server that is still running in one
// notices, and ends.
func sweep(base string) {
	locks, _ := filepath.Glob(filepath.Join(base, folderPattern+"*", "lock")) // fails only on a bad pattern
	for _, path := range locks {
		f, err := os.OpenFile(path, os.O_RDWR, 0)
		if err != nil {
			continue // another user's
		}
		if tryLock(f) {
			os.RemoveAll(filepath.Dir(path))
		}
		f.Close()
	}
}

// freePorts returns n free ports, which are held until release is called, for the first time.
//
// They are below the range that systems take the ports of outgoing connections from. From inside that range a server's
// port could go to somebody's connection while the server is stopped, and it could not start again.
func freePorts(n int) (ports []int, release func(), err error) {
	const lowest, highest = 10240, 32767
	var held []net.Listener
	release = sync.OnceFunc(func() {
		for _, l := range held {
			l.Close()
		}
	})
	for attempt := 0; len(ports) < n; attempt++ {
		port := lowest + rand.IntN(highest-lowest+1)
		l, err := net.Listen("tcp", net.JoinHostPort(serverHost, strconv.Itoa(port)))
		if err != nil {
			if attempt > 1000 {
				release()
				return nil, nil, fmt.Errorf("pgsplittest: find a free port: %w", err)
			}
			continue
		}
		held, ports = append(held, l), append(ports, port)
	}
	return ports, release, nil
}

// makeData gives every server a copy of one fresh data folder. F18: copied before the first start, a replica needs no
// base backup.
func (c *Cluster) makeData(ctx context.Context, o *options) error {
	for attempt := 1; ; attempt++ {
		archive, err := c.bin.template(ctx, c.folder)
		if err != nil {
			return err
		}
		err = c.each(func(s *Server) error {
			if err := unpack(archive, s.DataDir(), c.bin.owner); err != nil {
				return fmt.Errorf("pgsplittest: make the data folder of %s: %w", s.name, err)
			}
			return s.configure(o)
		})
		damaged := errors.Is(err, errNotAnArchive) || errors.Is(err, os.ErrNotExist)
		if !damaged || attempt == 2 {
			return err
		}
		os.Remove(archive)
		for _, s := range c.servers {
			os.RemoveAll(s.DataDir())
		}
	}
}

// each runs f for all servers at once.
func (c *Cluster) each(f func(*Server) error) error {
	errs := make([]error, len(c.servers))
	var wg sync.WaitGroup
	for i, s := range c.servers {
		wg.Go(func() { errs[i] = f(s) })
	}
	wg.Wait()
	return errors.Join(errs...)
}

func (c *Cluster) waitStreaming(ctx context.Context) error {
	if len(c.Replicas) == 0 {
		return nil
	}
	const query = `select count(*) from pg_stat_replication where state = 'streaming'`
	return c.Primary.until(ctx, func(conn *pgx.Conn) (bool, error) {
		var streaming int
		err := conn.QueryRow(ctx, query).Scan(&streaming)
		return streaming >= len(c.Replicas), err
	})
}

// DSN returns the URIs of all servers, the primary's first, with blanks between.
func (c *Cluster) DSN() string {
	return c.join((*Server).URI)
}

// ProxyDSN is [Cluster.DSN] by way of each server's proxy.
func (c *Cluster) ProxyDSN() string {
	return c.join((*Server).ProxyURI)
}

func (c *Cluster) join(uri func(*Server) string) string {
	var uris []string
	for _, s := range c.servers {
		uris = append(uris, uri(s))
	}
	return strings.Join(uris, " ")
}

// RoundRobin returns one address with all replicas behind it, as of a load-balanced read-only service: its connections
// go to the replicas in turn. A replica that refuses is passed over. Without replicas every connection is reset.
func (c *Cluster) RoundRobin() *Proxy { return c.roundRobin }

// Version returns the servers' major version, as 15.
func (c *Cluster) Version() int { return c.bin.major }

// Servers returns all servers, in the order in which they were started as primary and replicas.
func (c *Cluster) Servers() []*Server { return append([]*Server(nil), c.servers...) }

// CatchUp waits until the replicas have replayed what the primary has flushed by now. Replicas that are stopped, frozen,
// paused or promoted are left out, since they would never get there.
func (c *Cluster) CatchUp(ctx context.Context) error {
	ctx, cancel := bounded(ctx)
	defer cancel()
	var flushed int64
	if err := c.Primary.queryRow(ctx, &flushed, `select pg_wal_lsn_diff(pg_current_wal_flush_lsn(), '0/0')::bigint`); err != nil {
		return err
	}
	return c.each(func(s *Server) error {
		if s == c.Primary || !s.responds() {
			return nil
		}
		var follows bool
		const query = `select case when pg_is_in_recovery() then not pg_is_wal_replay_paused() else false end`
		if err := s.queryRow(ctx, &follows, query); err != nil {
			return err
		}
		if !follows {
			return nil
		}
		return s.WaitFor(ctx, uint64(flushed))
	})
}

// Close ends every server and removes all data. Later calls do nothing and return what the first one returned.
func (c *Cluster) Close() error {
	c.closeOnce.Do(func() {
		for _, s := range c.servers {
			if s.proxy != nil {
				s.proxy.Close()
			}
		}
		if c.roundRobin != nil {
			c.roundRobin.Close()
		}
		c.closeErr = c.each((*Server).end)
		if c.lock != nil {
			c.lock.Close()
		}
		if c.folder != "" {
			c.closeErr = errors.Join(c.closeErr, os.RemoveAll(c.folder))
		}
	})
	return c.closeErr
}

// bounded gives a context without a deadline one.
func bounded(ctx context.Context) (context.Context, context.CancelFunc) {
	if _, ok := ctx.Deadline(); ok {
		return context.WithCancel(ctx)
	}
	return context.WithTimeout(ctx, waitLimit)
}

// poll calls done every interval until it returns true or an error, or ctx ends.
func poll(ctx context.Context, interval time.Duration, done func() (bool, error)) error {
	ticker := time.NewTicker(interval)
	defer ticker.Stop()
	for {
		if ok, err := done(); ok || err != nil {
			return err
		}
		select {
		case <-ticker.C:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}
