package pgsplit

import (
	"context"
	"database/sql/driver"
	"fmt"
	"io"
	"log/slog"
	"net"
	"reflect"
	"strconv"
	"strings"
	"time"
	"unicode"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
)

const (
	// defaultReplicaTimeout is Config.ReplicaTimeout when nothing else is said.
	defaultReplicaTimeout = time.Second

	// The defaults of Config.RetryMin and Config.RetryMax.
	defaultRetryMin = 250 * time.Millisecond
	defaultRetryMax = 2 * time.Second

	// maxReplicas bounds Config.Replicas: a list longer than this is a mistake, not a cluster.
	maxReplicas = 64

	// primaryName is what the primary is called beside the replicas' names, so no replica may have it.
	primaryName = "primary"
)

// Config says which servers there are and how reads are spread over them. ParseDSN and ConfigFromEnv make one; so can a
// program, from pool configs that pgxpool.ParseConfig made:
//
//	primary, err := pgxpool.ParseConfig("postgres://app@db1/shop")
//	...
//	c := &pgsplit.Config{Primary: primary, Replicas: []pgsplit.Replica{{Pool: replica}}}
//
// Only Primary is required, and the zero value of every other field is its default. The bounds and times of a pool config
// (MaxConns, MaxConnLifetime, MaxConnIdleTime, ...) count as they stand. A zero MaxConns, MaxConnLifetime or
// MaxConnIdleTime means that the knobs of sql.DB alone decide; that is what ParseDSN leaves unless the DSN has the pool_*
// parameter, while pgxpool.ParseConfig puts its own defaults there (MaxConns 4 or more, 1 hour, 30 minutes).
//
// A Config is copied when it is given to a connector: later changes have no effect. However it is formatted (%v, %+v, %#v,
// %s), it shows no password.
type Config struct {
	// Primary is the server of every statement without a hint. It may list several hosts, of which the primary is looked
	// for: without target_session_attrs it then accepts only a server that is not in recovery.
	Primary *pgxpool.Config

	// Replicas are the streaming replicas of Primary, at most 64, with the same database. None means single-server mode:
	// the same API and the same guarantees on the primary alone. A replica at the primary's own host and port is left
	// out, whatever its user.
	Replicas []Replica

	// MaxWait is how long a read waits for its floor, in total over all replicas and never over half of the deadline
	// left, before it moves on. Default 0: no wait. DSN: replica_max_wait.
	MaxWait time.Duration

	// MaxLag keeps reads off a replica that is not proven fresher than this, while a primary answers. Default 0: off.
	// DSN: replica_max_lag.
	MaxLag time.Duration

	// MaxLagBytes is the same in bytes of WAL. Default 0: off. DSN: replica_max_lag_bytes, with PostgreSQL's units, "64MB".
	MaxLagBytes int64

	// ReplicaTimeout is how long a read waits for a replica to let it in, and never over half of the deadline left, before
	// it moves on. Default (0 as well): 1 second. DSN: replica_timeout.
	ReplicaTimeout time.Duration

	// RetryMin and RetryMax bound the pauses between two probes of a server that is down: they double from the one to the
	// other, which for the primary is 1 second at most. Default (0 as well): 250 milliseconds and 2 seconds. DSN:
	// replica_retry_min, replica_retry_max.
	RetryMin, RetryMax time.Duration

	// Balance chooses among the replicas that may serve a read. Default LeastBusy. DSN: replica_balance.
	Balance Balance

	// OnStale says what a read with a floor gets when no replica is proven to have it. Default StalePrimary. DSN:
	// replica_on_stale.
	OnStale OnStale

	// OnPrimaryDown says what unhinted statements get while no primary accepts. Default PrimaryDownError. DSN:
	// replica_on_primary_down.
	OnPrimaryDown OnPrimaryDown

	// Tx says whether sql.TxOptions{ReadOnly: true} is a hint. Default TxHint. DSN: replica_tx.
	Tx TxRouting

	// OnDecision, if set, is called once for each statement and transaction when it is decided where it runs, before it
	// does, on the caller's goroutine. It must not use the sql.DB that it is called for. Default: none.
	//
	// A statement that goes to another server, or to another connection, because the first turned out to be dead or in
	// trouble, is decided anew: one decision for each server that it got to. A call whose context ends before a server was
	// found gives none, nor does the Ping of a connection that has a server already.
	OnDecision func(context.Context, Decision)

	// Logger, if set, gets one line for each change of a server's state, and for each timeline, cluster and instance that is
	// not the one met before at the same address; none for a request. No line holds a configured password. The handler runs
	// on whichever goroutine met with it, and must not use the sql.DB. Default: none.
	Logger *slog.Logger

	// WrapConnector, if set, is called once for each server when the connector is made, with the connector of the server's
	// physical connections. What it returns opens them from then on: a library for traces, metrics or interceptors goes
	// around it and sees what runs on each server. Libraries that wrap drivers, and no connectors, wrap its Driver, whose
	// OpenConnector gives that connector whatever the name. Package sqlmwhook does it for github.com/ngrok/sqlmw.
	//
	// The wrapper sees statements, transactions, pings and what is prepared for the program; executions of a prepared
	// statement are statements of the connection, since it runs on whichever server its context leads to. What this driver
	// asks by itself does not pass through it, nor does Raw. A read that moves on is seen on each server that it ran on.
	//
	// The returned connector's Connect has to call the Connect that it wraps, with its own context or one derived from it,
	// and the connection it returns has to pass calls on: an answer without the server is an error. It may run statements of
	// its own, during the calls that it passes on, before or after them, and has to leave no rows and no transaction open. The
	// connection that it wraps is gone when its Close is called. Rows and results are what the wrapper returns; its panics
	// become errors, except in those. Default: none.
	WrapConnector func(Server, driver.Connector) driver.Connector
}

// Replica is one streaming replica of the primary.
type Replica struct {
	// Name is what the replica is called in logs and statistics. Unique, and not "primary". Default: "host:port".
	Name string

	// Label groups replicas for Prefer(label), for example by region. Default: none.
	Label string

	// Weight is its share of the reads in proportion to the other replicas' weights. Default (0 as well): 1.
	Weight int

	// Pool is how to reach it. Parse it for its own host: a copy of the primary's config with another Host still reaches
	// the primary through Fallbacks and checks the certificate for the primary's name.
	Pool *pgxpool.Config
}

// Balance is how a read chooses among the replicas that may serve it.
type Balance uint8

const (
	// LeastBusy takes the replica with the fewest statements at work for its weight: "least_busy" in a DSN.
	LeastBusy Balance = iota
	// RoundRobin takes them in turn, by weight: "round_robin" in a DSN.
	RoundRobin
)

// OnStale is what happens to a read with a floor that no replica is proven to have.
type OnStale uint8

const (
	// StalePrimary sends the read to the primary: "primary" in a DSN.
	StalePrimary OnStale = iota
	// StaleError returns ErrNoFreshReplica: "error" in a DSN.
	StaleError
)

// OnPrimaryDown is what happens to an unhinted statement while no primary accepts.
type OnPrimaryDown uint8

const (
	// PrimaryDownError returns ErrNoPrimary: "error" in a DSN.
	PrimaryDownError OnPrimaryDown = iota
	// PrimaryDownRead runs the statement on a replica, where a write fails with ErrNoPrimary: "read" in a DSN. As soon as
	// the primary accepts again nothing unhinted runs on a replica any more, but for transactions that began there.
	PrimaryDownRead
)

// TxRouting is what counts as a hint when a transaction begins.
type TxRouting uint8

const (
	// TxHint routes a transaction by the hint of its context alone: "hint" in a DSN.
	TxHint TxRouting = iota
	// TxReadOnly makes sql.TxOptions{ReadOnly: true} a hint as well: "readonly" in a DSN.
	TxReadOnly
)

// The words of each choice in a DSN, by value.
var (
	balanceWords       = []string{LeastBusy: "least_busy", RoundRobin: "round_robin"}
	onStaleWords       = []string{StalePrimary: "primary", StaleError: "error"}
	onPrimaryDownWords = []string{PrimaryDownError: "error", PrimaryDownRead: "read"}
	txRoutingWords     = []string{TxHint: "hint", TxReadOnly: "readonly"}
)

// String returns the word of b in a DSN.
func (b Balance) String() string { return word(balanceWords, uint8(b)) }

// String returns the word of o in a DSN.
func (o OnStale) String() string { return word(onStaleWords, uint8(o)) }

// String returns the word of o in a DSN.
func (o OnPrimaryDown) String() string { return word(onPrimaryDownWords, uint8(o)) }

// String returns the word of t in a DSN.
func (t TxRouting) String() string { return word(txRoutingWords, uint8(t)) }

func word(words []string, i uint8) string {
	if int(i) < len(words) {
		return words[i]
	}
	return "unknown(" + strconv.Itoa(int(i)) + ")"
}

// configErrorf makes an error that wraps ErrConfig. The text must never quote what a user wrote: in a mangled DSN any
// piece of it can be a piece of the password.
func configErrorf(where, format string, args ...any) error {
	msg := fmt.Sprintf(format, args...)
	if where != "" {
		msg = where + ": " + msg
	}
	return fmt.Errorf("%w: %s", ErrConfig, msg)
}

// prepared returns a deep copy of c with every default filled in and the replicas that are the primary itself left out.
// The error wraps ErrConfig.
func (c *Config) prepared() (*Config, error) {
	if err := c.validate(); err != nil {
		return nil, err
	}
	p := *c
	p.Primary = c.Primary.Copy()
	requirePrimary(p.Primary)
	if p.ReplicaTimeout == 0 {
		p.ReplicaTimeout = defaultReplicaTimeout
	}
	if p.RetryMin == 0 {
		p.RetryMin = defaultRetryMin
		if p.RetryMax > 0 {
			p.RetryMin = min(p.RetryMin, p.RetryMax)
		}
	}
	if p.RetryMax == 0 {
		p.RetryMax = max(defaultRetryMax, p.RetryMin)
	}
	p.Replicas = nil
	for _, r := range c.Replicas {
		if isPrimaryItself(c.Primary, r.Pool) {
			continue
		}
		p.Replicas = append(p.Replicas, Replica{
			Name:   r.name(),
			Label:  r.Label,
			Weight: max(r.Weight, 1),
			Pool:   r.Pool.Copy(),
		})
	}
	return &p, nil
}

// places are what errors call the primary and each replica.
type places struct {
	primary string
	replica func(i int) string
}

var configPlaces = places{"Primary", func(i int) string { return "replica " + strconv.Itoa(i+1) }}

// validate returns the first thing about c that no connector can work with. The error wraps ErrConfig.
func (c *Config) validate() error { return c.validateAt(configPlaces) }

func (c *Config) validateAt(at places) error {
	if c == nil || c.Primary == nil {
		return configErrorf("", "Primary is required")
	}
	if err := validatePool(at.primary, c.Primary); err != nil {
		return err
	}
	if isOneOf(c.Primary.ConnConfig.ValidateConnect, standbyChecks) {
		return configErrorf(at.primary, "target_session_attrs (or PGTARGETSESSIONATTRS): standby, read-only and prefer-standby cannot find a primary")
	}
	if err := c.validateOptions(); err != nil {
		return err
	}
	if len(c.Replicas) > maxReplicas {
		return configErrorf("", "%d replicas, at most %d are allowed", len(c.Replicas), maxReplicas)
	}
	seen := map[string]int{}
	for i, r := range c.Replicas {
		where := at.replica(i)
		if err := c.validateReplica(where, r); err != nil {
			return err
		}
		if isPrimaryItself(c.Primary, r.Pool) {
			continue
		}
		if other, ok := seen[r.name()]; ok {
			return configErrorf(where, "name: %s has it already, give one of them another", at.replica(other))
		}
		seen[r.name()] = i
	}
	return nil
}

func (c *Config) validateOptions() error {
	switch {
	case c.MaxWait < 0:
		return configErrorf("", "MaxWait is negative")
	case c.MaxLag < 0:
		return configErrorf("", "MaxLag is negative")
	case c.MaxLagBytes < 0:
		return configErrorf("", "MaxLagBytes is negative")
	case c.ReplicaTimeout < 0:
		return configErrorf("", "ReplicaTimeout is negative")
	case c.RetryMin < 0:
		return configErrorf("", "RetryMin is negative")
	case c.RetryMax < 0:
		return configErrorf("", "RetryMax is negative")
	case c.RetryMax > 0 && c.RetryMax < c.RetryMin:
		return configErrorf("", "RetryMax is below RetryMin")
	case int(c.Balance) >= len(balanceWords):
		return configErrorf("", "Balance has no meaning: %s", c.Balance)
	case int(c.OnStale) >= len(onStaleWords):
		return configErrorf("", "OnStale has no meaning: %s", c.OnStale)
	case int(c.OnPrimaryDown) >= len(onPrimaryDownWords):
		return configErrorf("", "OnPrimaryDown has no meaning: %s", c.OnPrimaryDown)
	case int(c.Tx) >= len(txRoutingWords):
		return configErrorf("", "Tx has no meaning: %s", c.Tx)
	}
	return nil
}

// validateReplica checks one replica by itself and against the primary.
func (c *Config) validateReplica(where string, r Replica) error {
	if r.Pool == nil {
		return configErrorf(where, "Pool is required")
	}
	if err := validatePool(where, r.Pool); err != nil {
		return err
	}
	check := r.Pool.ConnConfig.ValidateConnect
	switch {
	case r.Weight < 0:
		return configErrorf(where, "weight is negative")
	case databaseOf(r.Pool) != databaseOf(c.Primary):
		return configErrorf(where, "another database than the primary's")
	case strings.EqualFold(r.Name, primaryName):
		return configErrorf(where, "name: %q is the primary's", primaryName)
	case strings.ContainsFunc(r.name()+r.Label, unicode.IsControl):
		return configErrorf(where, "name and label cannot hold control characters, nor can a host that serves as the name")
	case isPrimaryItself(c.Primary, r.Pool):
		return nil // left out: the rest does not matter
	case isOneOf(check, primaryChecks):
		return configErrorf(where, "target_session_attrs: primary and read-write cannot find a replica")
	case isCopyForAnotherHost(c.Primary, r.Pool):
		return configErrorf(where, "Pool is a copy of Primary with another host: parse it for its own host")
	}
	return nil
}

// validatePool checks what pgx would panic about at the first connection, and the bounds.
func validatePool(where string, p *pgxpool.Config) error {
	cc := p.ConnConfig
	if cc == nil || cc.BuildFrontend == nil || cc.DialFunc == nil || cc.LookupFunc == nil {
		return configErrorf(where, "a pool config must come from pgxpool.ParseConfig")
	}
	for _, n := range []struct {
		name  string
		value int32
	}{{"MaxConns", p.MaxConns}, {"MinConns", p.MinConns}, {"MinIdleConns", p.MinIdleConns}} {
		if n.value < 0 {
			return configErrorf(where, "%s is negative", n.name)
		}
	}
	for _, d := range []struct {
		name  string
		value time.Duration
	}{
		{"MaxConnLifetime", p.MaxConnLifetime},
		{"MaxConnLifetimeJitter", p.MaxConnLifetimeJitter},
		{"MaxConnIdleTime", p.MaxConnIdleTime},
		{"HealthCheckPeriod", p.HealthCheckPeriod},
		{"PingTimeout", p.PingTimeout},
	} {
		if d.value < 0 {
			return configErrorf(where, "%s is negative", d.name)
		}
	}
	return nil
}

// What pgx makes of target_session_attrs. The functions are the only trace that a service file or the environment leaves
// in a parsed config, so they are compared.
var (
	standbyChecks = []pgconn.ValidateConnectFunc{
		pgconn.ValidateConnectTargetSessionAttrsStandby,
		pgconn.ValidateConnectTargetSessionAttrsReadOnly,
		pgconn.ValidateConnectTargetSessionAttrsPreferStandby,
	}
	primaryChecks = []pgconn.ValidateConnectFunc{
		pgconn.ValidateConnectTargetSessionAttrsPrimary,
		pgconn.ValidateConnectTargetSessionAttrsReadWrite,
	}
)

// isOneOf reports whether f is one of the package-level functions fs.
func isOneOf(f pgconn.ValidateConnectFunc, fs []pgconn.ValidateConnectFunc) bool {
	for _, g := range fs {
		if sameCheck(f, g) {
			return true
		}
	}
	return false
}

func sameCheck(f, g pgconn.ValidateConnectFunc) bool {
	return reflect.ValueOf(f).Pointer() == reflect.ValueOf(g).Pointer()
}

// requirePrimary makes a config of several hosts look for the primary among them, unless it says what else it looks for
// (F24: without it, unhinted work goes to the first host that answers, a standby too).
func requirePrimary(p *pgxpool.Config) {
	if p.ConnConfig.ValidateConnect == nil && len(addressesOf(p)) > 1 && !saysSessionAttrs(p.ConnString()) {
		p.ConnConfig.ValidateConnect = pgconn.ValidateConnectTargetSessionAttrsPrimary
	}
}

// address is where one server listens; the host is a folder for a Unix socket.
type address struct {
	host string
	port uint16
}

func (a address) String() string { return net.JoinHostPort(a.host, strconv.Itoa(int(a.port))) }

func (a address) equal(b address) bool { return a.port == b.port && sameHost(a.host, b.host) }

// sameHost compares names as DNS does, and folders as file systems do.
func sameHost(a, b string) bool {
	if strings.HasPrefix(a, "/") {
		return a == b
	}
	return strings.EqualFold(a, b)
}

// addressesOf returns the addresses that p tries, in order. pgx lists an address twice when TLS is optional.
func addressesOf(p *pgxpool.Config) []address {
	list := []address{{p.ConnConfig.Host, p.ConnConfig.Port}}
next:
	for _, f := range p.ConnConfig.Fallbacks {
		a := address{f.Host, f.Port}
		for _, b := range list {
			if a.equal(b) {
				continue next
			}
		}
		list = append(list, a)
	}
	return list
}

// listed is the addresses as text, with commas in between.
func listed(addresses []address) string {
	var list []string
	for _, a := range addresses {
		list = append(list, a.String())
	}
	return strings.Join(list, ",")
}

// isPrimaryItself reports whether the replica is the primary's own address. With several addresses a replica that asks for
// a standby among them is a server of its own.
func isPrimaryItself(primary, replica *pgxpool.Config) bool {
	a, b := addressesOf(primary), addressesOf(replica)
	if len(a) != len(b) {
		return false
	}
	for i := range a {
		if !a[i].equal(b[i]) {
			return false
		}
	}
	return len(a) == 1 || !isOneOf(replica.ConnConfig.ValidateConnect, standbyChecks)
}

// isCopyForAnotherHost reports the mistake of F24: a copy of the primary's config whose Host alone was changed.
func isCopyForAnotherHost(primary, replica *pgxpool.Config) bool {
	p, r := primary.ConnConfig, replica.ConnConfig
	if primary.ConnString() != replica.ConnString() || addressesOf(primary)[0].equal(addressesOf(replica)[0]) {
		return false
	}
	if r.TLSConfig != nil && r.TLSConfig.ServerName == p.Host && !sameHost(p.Host, r.Host) {
		return true
	}
	for _, a := range addressesOf(replica)[1:] {
		if a.equal(address{p.Host, p.Port}) {
			return true
		}
	}
	return false
}

// databaseOf is the database that the server opens: the user's name if none is given.
func databaseOf(p *pgxpool.Config) string {
	if p.ConnConfig.Database == "" {
		return p.ConnConfig.User
	}
	return p.ConnConfig.Database
}

// name is Name or its default, the first address.
func (r Replica) name() string {
	if r.Name == "" {
		return addressesOf(r.Pool)[0].String()
	}
	return r.Name
}

// String describes c without its passwords.
func (c Config) String() string {
	var b strings.Builder
	fmt.Fprintf(&b, "pgsplit.Config{Primary: %s, Replicas: [", describePool(c.Primary))
	for i, r := range c.Replicas {
		if i > 0 {
			b.WriteString(", ")
		}
		b.WriteString(r.String())
	}
	fmt.Fprintf(&b, "], MaxWait: %s, MaxLag: %s, MaxLagBytes: %d, ReplicaTimeout: %s, "+
		"RetryMin: %s, RetryMax: %s, Balance: %s, OnStale: %s, OnPrimaryDown: %s, Tx: %s}",
		c.MaxWait, c.MaxLag, c.MaxLagBytes, c.ReplicaTimeout, c.RetryMin, c.RetryMax, c.Balance, c.OnStale, c.OnPrimaryDown, c.Tx)
	return b.String()
}

// GoString is String: %#v shows no password either.
func (c Config) GoString() string { return c.String() }

// Format writes String for every verb.
func (c Config) Format(f fmt.State, _ rune) { _, _ = io.WriteString(f, c.String()) }

// String describes r without its password.
func (r Replica) String() string {
	return fmt.Sprintf("{Name: %q, Label: %q, Weight: %d, Pool: %s}", r.Name, r.Label, r.Weight, describePool(r.Pool))
}

// GoString is String: %#v shows no password either.
func (r Replica) GoString() string { return r.String() }

// Format writes String for every verb.
func (r Replica) Format(f fmt.State, _ rune) { _, _ = io.WriteString(f, r.String()) }

// describePool names what tells servers apart. Runtime parameters stay out: their values are the user's, and can be secrets.
func describePool(p *pgxpool.Config) string {
	if p == nil || p.ConnConfig == nil {
		return "none"
	}
	tls := "off"
	if p.ConnConfig.TLSConfig != nil {
		tls = "on"
	}
	return fmt.Sprintf("{%s user=%q database=%q tls=%s max_conns=%d}",
		listed(addressesOf(p)), p.ConnConfig.User, p.ConnConfig.Database, tls, p.MaxConns)
}
