package main

import (
	"context"
	"errors"
	"net"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgsplit/pgsplit"
)

const (
	// An address is connected to until so many connections in a row have shown no new instance.
	sameInARow = 3
	// mostAttempts bounds how often an address is connected to.
	mostAttempts = 12
	// lagPoll is the time between two looks at a replica that is behind.
	lagPoll = 5 * time.Millisecond
)

// survey asks the servers of a configuration, and keeps the connections for the next time.
type survey struct {
	timeout time.Duration // of each server
	wait    time.Duration // for a replica that is behind
	places  []*place
	servers []server
}

// place is one address of a server, with the connections to its instances.
type place struct {
	server int
	host   *host
	config *pgx.ConnConfig
	links  []*link
}

// link is an open connection to an instance.
type link struct {
	conn  *pgx.Conn
	asked string
	inst  *instance
}

// newSurvey asks nobody yet.
func newSurvey(c *pgsplit.Config, timeout, wait time.Duration) *survey {
	s := &survey{timeout: timeout, wait: wait}
	s.add(rolePrimary, rolePrimary, c.Primary)
	for _, r := range c.Replicas {
		s.add(r.Name, roleReplica, r.Pool)
	}
	return s
}

func (s *survey) add(name, role string, pool *pgxpool.Config) {
	srv := server{Name: shown(name), Role: role, Attrs: attrsOf(pool.ConnConfig.ValidateConnect)}
	for _, config := range configsOf(pool.ConnConfig) {
		h := &host{Address: shown(net.JoinHostPort(config.Host, strconv.Itoa(int(config.Port)))), Instances: []*instance{}}
		srv.Hosts = append(srv.Hosts, h)
		s.places = append(s.places, &place{server: len(s.servers), host: h, config: config})
	}
	s.servers = append(s.servers, srv)
}

// shown is what is printed of a host. In a URI whose password holds an @, the rest of the password becomes a piece of it.
func shown(host string) string {
	if at := strings.LastIndexByte(host, '@'); at >= 0 {
		return hidden + host[at:]
	}
	return host
}

const hidden = "..."

// configsOf returns one configuration for each address, which accepts whoever answers there. pgx lists an address twice
// where TLS is optional.
func configsOf(config *pgx.ConnConfig) []*pgx.ConnConfig {
	all := append([]*pgconn.FallbackConfig{{Host: config.Host, Port: config.Port, TLSConfig: config.TLSConfig}}, config.Fallbacks...)
	var list []*pgx.ConnConfig
	for _, f := range all {
		i := slices.IndexFunc(list, func(c *pgx.ConnConfig) bool { return c.Host == f.Host && c.Port == f.Port })
		if i >= 0 {
			list[i].Fallbacks = append(list[i].Fallbacks, f)
			continue
		}
		one := config.Copy()
		one.Host, one.Port, one.TLSConfig, one.Fallbacks, one.ValidateConnect = f.Host, f.Port, f.TLSConfig, nil, nil
		one.RuntimeParams["application_name"] = "pgsplit check"
		list = append(list, one)
	}
	return list
}

// look asks every server, all at once. What does not answer is in the report.
func (s *survey) look(ctx context.Context) []server {
	var wg sync.WaitGroup
	for _, p := range s.places {
		wg.Go(func() {
			ctx, cancel := context.WithTimeout(ctx, s.timeout)
			defer cancel()
			p.look(ctx, s.servers[p.server].Role)
		})
	}
	wg.Wait()
	s.proveLag(ctx)
	return s.servers
}

// look asks the instances that are known, and finds out who is there if one of them is gone.
func (p *place) look(ctx context.Context, role string) {
	known := len(p.links) > 0
	for _, l := range p.links {
		i, err := learn(ctx, l.conn, l.asked)
		if err != nil || i.id != l.inst.id {
			known = false
			break
		}
		i.RefusesWrite = l.inst.RefusesWrite
		l.inst = i
	}
	if !known {
		p.close()
		p.host.Attempts, p.host.Failed, p.host.Cause, p.host.Code, p.host.Detail = 0, 0, "", "", ""
		p.discover(ctx, role)
	}
	p.host.Instances = []*instance{}
	for _, l := range p.links {
		p.host.Instances = append(p.host.Instances, l.inst)
	}
}

// discover connects to each of the addresses that the host's name stands for, until no new instance shows.
func (p *place) discover(ctx context.Context, role string) {
	configs := []*pgx.ConnConfig{p.config}
	if !strings.HasPrefix(p.config.Host, "/") {
		found, err := p.config.LookupFunc(ctx, p.config.Host)
		if err != nil {
			p.failed(err)
			return
		}
		configs = nil
		for _, address := range found {
			one := p.config.Copy()
			one.LookupFunc = func(context.Context, string) ([]string, error) { return []string{address}, nil }
			configs = append(configs, one)
		}
	}
	var mu sync.Mutex // over p
	var wg sync.WaitGroup
	for _, config := range configs {
		wg.Go(func() { p.knock(ctx, &mu, config, role) })
	}
	wg.Wait()
	if len(p.links) > 0 && len(configs) > 1 && isLoopback(p.config.Host) {
		p.host.Failed = 0 // localhost is two addresses, and one is enough
	}
	if role == rolePrimary && len(p.links) > 0 {
		p.plain(ctx)
	}
}

func isLoopback(host string) bool { return strings.EqualFold(host, "localhost") }

// knock connects to one address. Each instance's first connection stays open, so that a balancer that counts connections
// shows the others; the rest are closed at the end.
func (p *place) knock(ctx context.Context, mu *sync.Mutex, config *pgx.ConnConfig, role string) {
	var spare []*pgx.Conn
	defer func() {
		for _, conn := range spare {
			closeConn(conn)
		}
	}()
	for attempt, same := 0, 0; attempt < mostAttempts && same < sameInARow; attempt++ {
		l, err := connect(ctx, config)
		mu.Lock()
		p.host.Attempts++
		same++
		switch {
		case err != nil:
			p.failed(err)
		case slices.ContainsFunc(p.links, func(other *link) bool { return other.inst.id == l.inst.id }):
			spare = append(spare, l.conn)
		default:
			p.links = append(p.links, l)
			same = 0
		}
		mu.Unlock()
		if ctx.Err() != nil {
			return
		}
	}
}

// failed notes why an attempt failed.
func (p *place) failed(err error) {
	p.host.Failed++
	p.host.Cause, p.host.Code, p.host.Detail = cause(err)
}

// connect opens a connection for reads as the driver does, and learns who answers.
func connect(ctx context.Context, config *pgx.ConnConfig) (*link, error) {
	readOnly := config.Copy()
	readOnly.RuntimeParams[readOnlyParameter] = "on"
	asked := readOnlyHolds
	conn, err := pgx.ConnectConfig(ctx, readOnly)
	var pgErr *pgconn.PgError
	if errors.As(err, &pgErr) && pgErr.Code == "08P01" && strings.Contains(pgErr.Message, readOnlyParameter) {
		asked = readOnlyRefused
		conn, err = pgx.ConnectConfig(ctx, config)
	}
	if err != nil {
		return nil, err
	}
	inst, err := learn(ctx, conn, asked)
	if err != nil {
		closeConn(conn)
		return nil, err
	}
	return &link{conn: conn, asked: asked, inst: inst}, nil
}

// plain looks at a session for writes.
func (p *place) plain(ctx context.Context) {
	conn, err := pgx.ConnectConfig(ctx, p.config)
	if err != nil {
		return
	}
	defer closeConn(conn)
	if askOne(ctx, conn, readOnlyQuery) == "on" {
		for _, l := range p.links {
			l.inst.RefusesWrite = true
		}
	}
}

// proveLag takes the primary's position, and watches how each standby gets there: whoever has replayed it is no staler
// than the time since (F11).
func (s *survey) proveLag(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, s.timeout)
	defer cancel()
	primary := s.primary()
	if primary == nil {
		return
	}
	taken := time.Now()
	primary.inst.setPosition(askOne(ctx, primary.conn, flushQuery))
	goal := primary.inst.replayable()
	var wg sync.WaitGroup
	for _, p := range s.places {
		for _, l := range p.links {
			if l.inst.standby() && l.inst.System == primary.inst.System && goal != 0 {
				wg.Go(func() { l.approach(ctx, goal, taken, s.wait) })
			}
		}
	}
	wg.Wait()
}

// primary is the connection to the primary in use.
func (s *survey) primary() *link {
	for _, used := range s.servers[0].used() {
		for _, p := range s.places {
			for _, l := range p.links {
				if l.inst == used && !used.standby() {
					return l
				}
			}
		}
	}
	return nil
}

func (l *link) approach(ctx context.Context, goal pgsplit.LSN, taken time.Time, wait time.Duration) {
	ticker := time.NewTicker(lagPoll)
	defer ticker.Stop()
	for first := true; ; first = false {
		l.inst.setPosition(askOne(ctx, l.conn, replayQuery))
		if ctx.Err() != nil {
			return
		}
		behind := uint64(max(goal, l.inst.position) - l.inst.position)
		since := time.Since(taken)
		if first {
			l.inst.Lag = &lag{Bytes: behind}
		}
		l.inst.Lag.Left, l.inst.Lag.Millis = behind, since.Milliseconds()
		if l.inst.Lag.Proven = behind == 0; behind == 0 || since >= wait || l.inst.Paused {
			return
		}
		select {
		case <-ticker.C:
		case <-ctx.Done():
			return
		}
	}
}

func (s *survey) close() {
	for _, p := range s.places {
		p.close()
	}
}

func (p *place) close() {
	for _, l := range p.links {
		closeConn(l.conn)
	}
	p.links = nil
}

// closeConn says goodbye, and does not wait for one that does not listen.
func closeConn(conn *pgx.Conn) {
	ctx, cancel := context.WithTimeout(context.Background(), time.Second)
	defer cancel()
	_ = conn.Close(ctx) // it is gone either way
}

// configOf parses the DSN, or the environment where there is none: variables of the shell that are not set lead there too,
// and not to a server on this machine.
func configOf(args []string) (*pgsplit.Config, error) {
	dsn := strings.Join(args, " ")
	if strings.TrimSpace(dsn) == "" {
		return pgsplit.ConfigFromEnv("")
	}
	return pgsplit.ParseDSN(dsn)
}
