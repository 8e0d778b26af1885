package pgsplit

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"errors"
	"sync"
	"sync/atomic"
	"time"
)

// Connector is one configured cluster: a driver.Connector for sql.OpenDB. It starts nothing before its first use, and
// nothing keeps running once the last connection that it handed out is closed.
type Connector struct {
	config   *Config
	driver   *Driver
	primary  *server
	replicas []*server

	system        atomic.Uint64 // system_identifier of the primary's cluster, zero until it was reached
	captures      atomic.Uint64 // times that the primary was asked where a session's writes ended
	captureErrors atomic.Uint64 // times that it did not say
	foreignTokens atomic.Uint64 // tokens that say nothing about the cluster
	lostTokens    atomic.Uint64 // tokens whose position the primary never had, or lost
	instances     instances
	samples       samples
	reported      samples       // what Health saw, for reports alone: no read waits for a position that may not be flushed
	asking        chan struct{} // full while the primary is asked where it is
	shells        atomic.Int64  // open shells
	turn          atomic.Uint64 // counts routed reads
	reasons       [reasonCount]atomic.Uint64

	closeOnce sync.Once
	closed    atomic.Bool

	lifeOf func(*server, identity) life // identity's life; another one only in tests of what positions are kept by
}

// NewConnector checks the config and returns a Connector for it. It copies the config, opens nothing and starts
// nothing. Errors wrap ErrConfig.
func NewConnector(config *Config) (*Connector, error) {
	config, err := config.prepared()
	if err != nil {
		return nil, err
	}
	c := &Connector{config: config, lifeOf: func(_ *server, id identity) life { return id.life }}
	c.driver = &Driver{connector: c}
	c.asking = make(chan struct{}, 1)
	c.primary = newServer(c, rolePrimary, addressesOf(config.Primary)[0].String(), Replica{Pool: config.Primary})
	for i, r := range config.Replicas {
		s := newServer(c, roleReplica, r.name(), r)
		s.index = i
		c.replicas = append(c.replicas, s)
	}
	if wrap := config.WrapConnector; wrap != nil {
		for s := range c.servers {
			if err := s.wrap(wrap); err != nil {
				for s := range c.servers {
					s.closeWrapper() // those of the servers before it
				}
				return nil, err
			}
		}
	}
	return c, nil
}

// OpenDB opens a sql.DB on the config, without a DSN. Like sql.OpenDB it does not connect.
func OpenDB(config *Config) (*sql.DB, error) {
	c, err := NewConnector(config)
	if err != nil {
		return nil, err
	}
	return sql.OpenDB(c), nil
}

var errClosed = errors.New("pgsplit: the connector is closed")

// Connect returns a new shell: it connects to no server yet, that comes with the first statement.
func (c *Connector) Connect(context.Context) (driver.Conn, error) {
	if c.closed.Load() {
		return nil, errClosed
	}
	c.shells.Add(1)
	for s := range c.servers {
		s.wake()
		s.fill()
	}
	return &Conn{connector: c}, nil
}

// Driver returns the driver of this connector.
func (c *Connector) Driver() driver.Driver { return c.driver }

// Close closes all connections that are not in use and makes the others close when they are given back. It waits for
// none of them. sql.DB's Close calls it.
func (c *Connector) Close() error {
	c.closeOnce.Do(func() {
		c.closed.Store(true)
		for s := range c.servers {
			s.close()
			s.closeWrapper()
		}
	})
	return nil
}

// shellClosed retires what the closed shell's place kept.
func (c *Connector) shellClosed() {
	c.shells.Add(-1)
	for s := range c.servers {
		s.trim()
	}
}

// servers yields the primary, then the replicas in the order of the configuration.
func (c *Connector) servers(yield func(*server) bool) {
	if !yield(c.primary) {
		return
	}
	for _, s := range c.replicas {
		if !yield(s) {
			return
		}
	}
}

// ReportError tells that a statement which ran on the server of that name (Decision.Server) met err, as read from rows,
// for instance. If the error says something about the server, which errors of SQL and of contexts do not, the server is
// probed, and gets no reads meanwhile.
func (c *Connector) ReportError(server string, err error) {
	for s := range c.servers {
		if s.name == server && blames(err) {
			s.doubt(err)
		}
	}
}

// askAgain is how long a replica that was behind when it was last asked is passed by for others that were not.
const askAgain = 10 * time.Millisecond

// look fills the views of the replicas for one decision.
func (c *Connector) look(views []view, r *request) []view {
	var stays *server
	if r.scope != nil {
		stays = c.lastRead(r)
	}
	floor := r.floor
	views = views[:0]
	for _, s := range c.replicas {
		v := view{
			label:    s.label,
			weight:   s.weight,
			inUse:    int(s.inUse.Load()),
			position: LSN(s.position.Load()),
			state:    s.health.state(),
			stays:    s == stays,
		}
		if v.position < floor {
			asked := s.asked.load()
			v.unasked = asked == 0 || present().since(asked) > askAgain
		}
		views = append(views, v)
	}
	return views
}
