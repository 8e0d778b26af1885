package pgsplit

import (
	"errors"
	"net/netip"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
)

// ParseDSN parses a data source name:
//
//	dsn = uri *(blank uri) | keyword-value
//
// The first URI is the primary and each further one a replica, with its own user, password and TLS and, in its query, name,
// label, weight and pool_*:
//
//	postgres://app:pw@db1/shop?replica_max_lag=10s postgres://db2?name=b postgres://reader:pw2@db3:5433?weight=2
//
// Blanks are space, \t, \n, \v, \f and \r; those around the whole do not count, so a primary's URI, a blank and an empty
// string is a DSN without replicas. A blank before "postgres://" or "postgresql://" always begins the next URI: write it as
// %20 inside a value. Short, in either form and as often as needed:
//
//	replica = host *("," host)
//	host    = name[:port] | "[" IPv6 "]"[:port] | "/" folder-of-a-Unix-socket
//
// A replica takes from the primary's DSN whatever its own URI leaves out: user, database, TLS, pool and runtime parameters.
// It never takes host, port (5432 unless given), target_session_attrs, krbspn, PGHOST or PGPORT. The password goes with the
// user: a replica with a user other than the primary's and no password gets PGPASSWORD or its line of .pgpass, never the
// primary's. A replica cannot name another database, nor a service.
//
// Everything else is for pgx: an empty DSN means the PG* environment variables, and one without parameters of pgsplit gives
// pgx's own configuration, but for two rules. A primary of several hosts without target_session_attrs (in the DSN or in
// PGTARGETSESSIONATTRS; "any" in a service file is not told from nothing) accepts only a server that is not in recovery. And
// what pool_max_conns, pool_max_conn_lifetime and pool_max_conn_idle_time do not say is left to sql.DB (see Config).
//
// The parameters replica_max_wait, replica_max_lag, replica_timeout, replica_retry_min, replica_retry_max (durations with a
// Go unit, "200ms"), replica_max_lag_bytes (an integer with B, kB, MB, GB or TB, multiples of 1024), replica_balance,
// replica_on_stale, replica_on_primary_down and replica_tx set the fields of Config that name them, once each and on the
// primary alone. Any other parameter that begins with "replica", but for pgx's replication, and any unknown pool_* is an
// error.
//
// Every error wraps ErrConfig, names the parameter and which URI it is on, and quotes no value, because in a mangled DSN
// any piece can be the password.
func ParseDSN(dsn string) (*Config, error) {
	sources, err := splitDSN(dsn, "")
	if err != nil {
		return nil, err
	}
	specs, err := parseReplicas(sources[0].text, sources[1:])
	if err != nil {
		return nil, err
	}
	return newConfig(sources[0], specs)
}

// source is the text of one server and what errors call it.
type source struct {
	where string
	text  string
}

// The errors of connection strings that pgx takes and pgsplit does not.
var (
	errHosts       = errors.New("must be a list of name[:port], [IPv6][:port] or /folder; a whole URI stands after a blank")
	errNoHost      = errors.New("names no host")
	errServiceHere = errors.New("service and servicefile: a replica cannot have a service of its own, write its settings")
)

// splitDSN returns the primary and the replicas' URIs. where names the variable that the text is from, or is empty.
func splitDSN(dsn, where string) ([]source, error) {
	if strings.IndexByte(dsn, 0) >= 0 {
		return nil, configErrorf(where, "%v", errNUL)
	}
	if !isURI(strings.TrimLeft(dsn, blanks)) {
		// Not trimmed: a blank at the end can be an escaped part of the last value, and pgx skips the others itself.
		return []source{{where, dsn}}, nil
	}
	var sources []source
	for i, uri := range splitURIs(dsn) {
		label := "URI " + strconv.Itoa(i+1)
		if where != "" {
			label = where + ", " + label
		}
		sources = append(sources, source{label, uri})
	}
	return sources, nil
}

// splitURIs cuts s before every URI that follows a blank. Other blanks are left for pgx, which accepts some and rejects most.
func splitURIs(s string) []string {
	s = strings.Trim(s, blanks)
	var uris []string
	start := 0
	for i := 1; i < len(s); i++ {
		if strings.IndexByte(blanks, s[i-1]) >= 0 && isURI(s[i:]) {
			uris = append(uris, strings.TrimRight(s[start:i], blanks))
			start = i
		}
	}
	return append(uris, s[start:])
}

// saysSessionAttrs reports whether the connection string or the environment says which kind of server to look for.
func saysSessionAttrs(connString string) bool {
	if os.Getenv("PGTARGETSESSIONATTRS") != "" {
		return true
	}
	c, err := scan(connString, takeNothing)
	if err != nil {
		return false
	}
	_, ok := c.settings["target_session_attrs"]
	return ok
}

// A parameter is one of pgsplit's own, given at most once.
type parameter struct {
	name  string
	parse func(c *Config, value string) error
	// format returns the value for a DSN, or "" for the default.
	format func(c *Config) string
}

var parameters = []parameter{
	{
		"replica_max_wait",
		func(c *Config, v string) (err error) { c.MaxWait, err = parseDuration(v); return err },
		func(c *Config) string { return formatDuration(c.MaxWait, 0) },
	},
	{
		"replica_max_lag",
		func(c *Config, v string) (err error) { c.MaxLag, err = parseDuration(v); return err },
		func(c *Config) string { return formatDuration(c.MaxLag, 0) },
	},
	{
		"replica_max_lag_bytes",
		func(c *Config, v string) (err error) { c.MaxLagBytes, err = parseBytes(v); return err },
		func(c *Config) string { return formatBytes(c.MaxLagBytes) },
	},
	{
		"replica_timeout",
		func(c *Config, v string) (err error) { c.ReplicaTimeout, err = parsePause(v); return err },
		func(c *Config) string { return formatDuration(c.ReplicaTimeout, defaultReplicaTimeout) },
	},
	{
		"replica_retry_min",
		func(c *Config, v string) (err error) { c.RetryMin, err = parsePause(v); return err },
		func(c *Config) string { return formatDuration(c.RetryMin, defaultRetryMin) },
	},
	{
		"replica_retry_max",
		func(c *Config, v string) (err error) { c.RetryMax, err = parsePause(v); return err },
		func(c *Config) string { return formatDuration(c.RetryMax, max(defaultRetryMax, c.RetryMin)) },
	},
	{
		"replica_balance",
		func(c *Config, v string) (err error) {
			c.Balance, err = parseWord[Balance](balanceWords, v)
			return err
		},
		func(c *Config) string { return formatWord(balanceWords, c.Balance) },
	},
	{
		"replica_on_stale",
		func(c *Config, v string) (err error) {
			c.OnStale, err = parseWord[OnStale](onStaleWords, v)
			return err
		},
		func(c *Config) string { return formatWord(onStaleWords, c.OnStale) },
	},
	{
		"replica_on_primary_down",
		func(c *Config, v string) (err error) {
			c.OnPrimaryDown, err = parseWord[OnPrimaryDown](onPrimaryDownWords, v)
			return err
		},
		func(c *Config) string { return formatWord(onPrimaryDownWords, c.OnPrimaryDown) },
	},
	{
		"replica_tx",
		func(c *Config, v string) (err error) { c.Tx, err = parseWord[TxRouting](txRoutingWords, v); return err },
		func(c *Config) string { return formatWord(txRoutingWords, c.Tx) },
	},
}

// poolParameters are those that pgxpool knows.
var poolParameters = []string{
	"pool_max_conns", "pool_min_conns", "pool_min_idle_conns", "pool_max_conn_lifetime", "pool_max_conn_idle_time",
	"pool_health_check_period", "pool_max_conn_lifetime_jitter", "pool_ping_timeout",
}

func parseDuration(v string) (time.Duration, error) {
	d, err := time.ParseDuration(v)
	if err != nil {
		if _, e := strconv.ParseFloat(v, 64); e == nil {
			return 0, errors.New("a duration needs a unit, as in 200ms, 5s or 1m")
		}
		return 0, errors.New("not a duration, such as 200ms, 5s or 1m")
	}
	if d < 0 {
		return 0, errors.New("must not be negative")
	}
	return d, nil
}

// parsePause parses a duration that cannot be 0.
func parsePause(v string) (time.Duration, error) {
	d, err := parseDuration(v)
	if err == nil && d == 0 {
		err = errors.New("must be more than 0")
	}
	return d, err
}

func formatDuration(d, byDefault time.Duration) string {
	if d == byDefault {
		return ""
	}
	return d.String()
}

// byteUnits are PostgreSQL's, each 1024 times the one before it, and as case-sensitive as PostgreSQL's.
var byteUnits = []string{"B", "kB", "MB", "GB", "TB"}

func parseBytes(v string) (int64, error) {
	digits := strings.TrimRight(v, "BkMGT")
	unit := v[len(digits):]
	n, err := strconv.ParseInt(strings.TrimRight(digits, blanks), 10, 64)
	switch {
	case err != nil:
		return 0, errors.New("not an integer with a unit, such as 64MB (B, kB, MB, GB, TB)")
	case n < 0:
		return 0, errors.New("must not be negative")
	case n == 0 && unit == "":
		return 0, nil
	case unit == "":
		return 0, errors.New("a size needs a unit, as in 64MB (B, kB, MB, GB, TB)")
	}
	power := slices.Index(byteUnits, unit)
	if power < 0 {
		return 0, errors.New("the units are B, kB, MB, GB and TB")
	}
	shift := 10 * power
	if n > (1<<63-1)>>shift {
		return 0, errors.New("too large")
	}
	return n << shift, nil
}

func formatBytes(n int64) string {
	if n == 0 {
		return ""
	}
	power := 0
	for power < len(byteUnits)-1 && n%1024 == 0 {
		n, power = n/1024, power+1
	}
	return strconv.FormatInt(n, 10) + byteUnits[power]
}

func parseWord[T ~uint8](words []string, v string) (T, error) {
	i := slices.Index(words, v)
	if i < 0 {
		return 0, errors.New("must be " + strings.Join(words, " or "))
	}
	return T(i), nil
}

// formatWord returns "" for the first word, which is the default.
func formatWord[T ~uint8](words []string, v T) string {
	if v == 0 {
		return ""
	}
	return words[v]
}

// isOurs reports whether the key is, or was meant to be, a parameter of pgsplit.
func isOurs(key string) bool {
	return hasPrefixFold(key, "replica") && !strings.EqualFold(key, "replication")
}

func hasPrefixFold(s, prefix string) bool {
	return len(s) >= len(prefix) && strings.EqualFold(s[:len(prefix)], prefix)
}

// unknownParameter says which known parameter is meant. The key is quoted only if it is nearly that one: then it cannot
// hold a piece of a password.
func unknownParameter(where, key string, known []string) error {
	best, least := "", 1<<30
	for _, name := range known {
		if d := editDistance(strings.ToLower(key), name); d < least {
			best, least = name, d
		}
	}
	if least <= 3 {
		return configErrorf(where, "unknown parameter %q: did you mean %s?", key, best)
	}
	prefix := "replica"
	if hasPrefixFold(key, "pool_") {
		prefix = "pool_"
	}
	return configErrorf(where, "unknown parameter that begins with %q: the nearest one is %s", prefix, best)
}

// editDistance counts the bytes to insert, delete or replace between a and b.
func editDistance(a, b string) int {
	row := make([]int, len(b)+1)
	for j := range row {
		row[j] = j
	}
	for i := range len(a) {
		diagonal := row[0]
		row[0] = i + 1
		for j := range len(b) {
			cost := 1
			if a[i] == b[j] {
				cost = 0
			}
			diagonal, row[j+1] = row[j+1], min(diagonal+cost, row[j]+1, row[j+1]+1)
		}
	}
	return row[len(b)]
}

// replicaSpec is what was said of one replica, before it inherits.
type replicaSpec struct {
	where    string
	replica  Replica
	settings map[string]string
}

// parseReplicas reads the connection strings of replicas. One with the primary's very text is the primary, even if it names
// no host.
func parseReplicas(primary string, sources []source) ([]replicaSpec, error) {
	var specs []replicaSpec
	for _, s := range sources {
		if s.text == primary {
			continue
		}
		spec, err := parseReplica(s)
		if err != nil {
			return nil, err
		}
		specs = append(specs, spec)
	}
	return specs, nil
}

// parseReplica reads a replica's own connection string.
func parseReplica(s source) (replicaSpec, error) {
	spec := replicaSpec{where: s.where}
	c, err := scan(s.text, func(key string) bool {
		return key == "name" || key == "label" || key == "weight" || isOurs(key)
	})
	if err != nil {
		return spec, configErrorf(s.where, "%v", err)
	}
	given := map[string]bool{}
	for _, p := range c.taken {
		if isOurs(p.key) {
			return spec, configErrorf(s.where, "parameters that begin with \"replica\" belong to the primary")
		}
		if given[p.key] {
			return spec, configErrorf(s.where, "%s: given twice", p.key)
		}
		given[p.key] = true
		switch p.key {
		case "name":
			spec.replica.Name = p.value
		case "label":
			spec.replica.Label = p.value
		case "weight":
			n, err := strconv.ParseInt(p.value, 10, 32)
			if err != nil || n < 1 {
				return spec, configErrorf(s.where, "weight: must be an integer of 1 or more")
			}
			spec.replica.Weight = int(n)
		}
	}
	if err := checkOwnSettings(c.settings); err != nil {
		return spec, configErrorf(s.where, "%v", err)
	}
	spec.settings = c.settings
	return spec, nil
}

// checkOwnSettings completes a replica's hosts and ports, which nothing else may supply.
func checkOwnSettings(m map[string]string) error {
	for _, key := range []string{"service", "servicefile"} {
		if _, ok := m[key]; ok {
			return errServiceHere
		}
	}
	hosts := strings.Split(m["host"], ",")
	if slices.Contains(hosts, "") {
		return errNoHost
	}
	ports := strings.Split(m["port"], ",")
	if len(ports) == 1 {
		ports = slices.Repeat(ports, len(hosts))
	}
	for i := range ports {
		if ports[i] == "" {
			ports[i] = "5432"
		}
	}
	m["port"] = strings.Join(ports, ",")
	return nil
}

// parseHosts reads the short way to name replicas: hosts with or without a port.
func parseHosts(where, list, defaultPort string) ([]replicaSpec, error) {
	var specs []replicaSpec
	for _, item := range strings.Split(list, ",") {
		host, port, ok := splitHostPort(strings.Trim(item, blanks))
		if !ok {
			return nil, errHosts
		}
		if port == "" {
			port = defaultPort
		}
		specs = append(specs, replicaSpec{where: where, settings: map[string]string{"host": host, "port": port}})
	}
	return specs, nil
}

// splitHostPort reads one host. The port is "" if there is none.
func splitHostPort(s string) (host, port string, ok bool) {
	if strings.HasPrefix(s, "/") {
		return s, "", true
	}
	if strings.HasPrefix(s, "[") {
		end := strings.IndexByte(s, ']')
		if end < 0 {
			return "", "", false
		}
		host, s = s[1:end], s[end+1:]
		if addr, err := netip.ParseAddr(host); err != nil || !addr.Is6() {
			return "", "", false
		}
	} else {
		host = s[:indexAnyOrLen(s, ":")]
		s = s[len(host):]
		if !isPlainHost(host) {
			return "", "", false
		}
	}
	if s == "" {
		return host, "", true
	}
	port, ok = strings.CutPrefix(s, ":")
	return host, port, ok && isPort(port)
}

// isPlainHost reports whether s is a host name or an IPv4 address.
func isPlainHost(s string) bool {
	for i := range len(s) {
		if c := s[i]; !isUnreserved(c) && c < 0x80 || c == '~' {
			return false
		}
	}
	return s != ""
}

func isPort(s string) bool {
	n, err := strconv.ParseUint(s, 10, 16)
	return err == nil && n > 0 && s[0] != '+'
}

// isUnreserved reports whether c stands for itself anywhere in a URI (RFC 3986, section 2.3).
func isUnreserved(c byte) bool {
	return 'a' <= c && c <= 'z' || 'A' <= c && c <= 'Z' || '0' <= c && c <= '9' || strings.IndexByte("-._~", c) >= 0
}

// newConfig puts the primary's text and the replicas together.
func newConfig(primary source, specs []replicaSpec) (*Config, error) {
	info, err := scan(primary.text, isOurs)
	if err != nil {
		return nil, configErrorf(primary.where, "%v", err)
	}
	c := &Config{ReplicaTimeout: defaultReplicaTimeout}
	short, err := c.applyParameters(primary.where, info.taken)
	if err != nil {
		return nil, err
	}
	if c.Primary, err = parsePool(primary.where, info.rest); err != nil {
		return nil, err
	}
	specs = append(short, specs...)
	at := places{primary.where, func(i int) string { return replicaPlace(i, specs[i].where) }}
	for i, spec := range specs {
		r := spec.replica
		r.Pool, err = parsePool(at.replica(i), formatSettings(inherit(info.settings, c.Primary, spec.settings)))
		if err != nil {
			return nil, err
		}
		c.Replicas = append(c.Replicas, r)
	}
	if err := c.validateAt(at); err != nil {
		return nil, err
	}
	return c.prepared()
}

// replicaPlace is what errors call a replica: its place among all, and where it was named.
func replicaPlace(i int, where string) string {
	place := configPlaces.replica(i)
	if where != "" {
		place += " (" + where + ")"
	}
	return place
}

// applyParameters sets the fields of c and returns the replicas that parameters name.
func (c *Config) applyParameters(where string, taken []setting) (short []replicaSpec, err error) {
	given := map[string]bool{}
	for _, p := range taken {
		if p.key == "replica" {
			specs, err := parseHosts(where, p.value, "5432")
			if err != nil {
				return nil, configErrorf(where, "replica: %v", err)
			}
			short = append(short, specs...)
			continue
		}
		i := slices.IndexFunc(parameters, func(known parameter) bool { return known.name == p.key })
		if i < 0 {
			return nil, unknownParameter(where, p.key, ourNames())
		}
		if given[p.key] {
			return nil, configErrorf(where, "%s: given twice", p.key)
		}
		given[p.key] = true
		if err := parameters[i].parse(c, p.value); err != nil {
			return nil, configErrorf(where, "%s: %v", p.key, err)
		}
	}
	return short, nil
}

func ourNames() []string {
	names := []string{"replica"}
	for _, p := range parameters {
		names = append(names, p.name)
	}
	return names
}

// isPerHost reports whether a setting of the primary says nothing about another server. (name, label and weight mean
// nothing on the primary: pgx takes them for runtime parameters.)
func isPerHost(key string) bool {
	switch key {
	case "host", "port", "target_session_attrs", "krbspn", "name", "label", "weight":
		return true
	}
	return false
}

// inherit returns the settings of a replica: its own, over those of the primary's DSN that are not about one host (F24: it
// is parsed anew for its host). Host, port and target_session_attrs are always in it, so that neither a service file nor
// PGHOST, PGPORT or PGTARGETSESSIONATTRS supplies them.
func inherit(from map[string]string, primary *pgxpool.Config, own map[string]string) map[string]string {
	m := map[string]string{"target_session_attrs": "any"}
	for key, value := range from {
		if !isPerHost(key) {
			m[key] = value
		}
	}
	user := primary.ConnConfig.User
	if own["user"] != "" && own["user"] != user {
		// The primary's password is not for this user, wherever it came from.
		delete(m, "password")
		if hasService(m) {
			m["password"] = os.Getenv("PGPASSWORD")
		}
		// The server's default is the database of the user's name.
		m["database"] = databaseOf(primary)
	}
	for key, value := range own {
		if value == "" && (key == "user" || key == "password" || key == "database") {
			continue
		}
		m[key] = value
	}
	return m
}

// hasService reports whether a service file has a say in settings that a connection string leaves out.
func hasService(m map[string]string) bool {
	_, ok := m["service"]
	return ok || os.Getenv("PGSERVICE") != ""
}

// parsePool lets pgxpool parse the text of one server.
func parsePool(where, text string) (*pgxpool.Config, error) {
	// Parsed once without pgxpool: what it finds of pool_*, in a service file too, is told from its defaults only so.
	info, err := pgconn.ParseConfig(text)
	if err != nil {
		return nil, configErrorf(where, "%s", reasonOf(err))
	}
	for key := range info.RuntimeParams {
		if isOurs(key) {
			return nil, configErrorf(where, "parameters that begin with \"replica\" belong in the DSN, not in a service file")
		}
		if hasPrefixFold(key, "pool_") && !slices.Contains(poolParameters, key) {
			return nil, unknownParameter(where, key, poolParameters)
		}
	}
	pool, err := pgxpool.ParseConfig(text)
	if err != nil {
		return nil, configErrorf(where, "%s", reasonOf(err))
	}
	given := func(key string) bool { _, ok := info.RuntimeParams[key]; return ok }
	if !given("pool_max_conns") {
		pool.MaxConns = 0
	}
	if !given("pool_max_conn_lifetime") {
		pool.MaxConnLifetime = 0
	}
	if !given("pool_max_conn_idle_time") {
		pool.MaxConnIdleTime = 0
	}
	return pool, nil
}

// pgxReasons are what pgx's errors say after the connection string, the more exact ones first.
var pgxReasons = []string{
	"unable to read CA file", "unable to add CA to cert pool", "unable to load system certificate pool", "sslmode is invalid",
	"both \"sslcert\" and \"sslkey\" are required", "unable to resolve sslcert", "unable to resolve sslkey",
	"unable to read sslkey", "failed to decode sslkey", "unable to find sslpassword", "unable to decrypt key",
	"unable to read cert", "unable to load cert", "failed to configure TLS", "failed to read service file",
	"unable to find service", "failed to read service", "invalid sslcertmode", "invalid connect_timeout", "could not match",
	"invalid port", "unknown target_session_attrs value", "invalid min_protocol_version", "invalid max_protocol_version",
	"min_protocol_version cannot be greater than max_protocol_version", "unknown channel_binding value", "invalid require_auth",
	"cannot parse statement_cache_capacity", "cannot parse description_cache_capacity", "invalid default_query_exec_mode",
	"pool_max_conns too small", "cannot parse pool_max_conns", "cannot parse pool_min_conns", "cannot parse pool_min_idle_conns",
	"cannot parse pool_max_conn_lifetime_jitter", "cannot parse pool_max_conn_lifetime", "cannot parse pool_max_conn_idle_time",
	"cannot parse pool_health_check_period", "cannot parse pool_ping_timeout",
}

// reasonOf says what pgx found wrong. pgx's own error is not wrapped: it carries the connection string, and its redaction
// is a best effort.
func reasonOf(err error) string {
	text := err.Error()
	// What follows the string begins here; a quote inside the string only makes more text to look through.
	_, text, _ = strings.Cut(text, "`: ")
	for _, reason := range pgxReasons {
		if strings.Contains(text, reason) {
			if reason == "could not match" {
				return "one port for all hosts, or one for each"
			}
			return reason
		}
	}
	return "not a connection string that pgx can parse"
}
