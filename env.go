package pgsplit

import (
	"os"
	"strings"
)

// ConfigFromEnv makes a Config from environment variables. With prefix "APP_" it looks for APP_DATABASE_URL and so on
// first, and for the bare names then; prefix may be empty. The more specific name always wins: any variable with the
// prefix goes before every bare one, and within one of the two steps the order is that of this list.
//
// The primary:
//
//   - DATABASE_URL, whatever ParseDSN takes, replicas and parameters included.
//   - DB_HOST, with DB_PORT, DB_USER, DB_PASSWORD, DB_NAME and DB_SSLMODE. Each of these falls back to its bare name by
//     itself, and then to pgx's own default (PGPORT, PGUSER, ...).
//   - neither: pgx's PGHOST or PGSERVICE. Without those it is an error, since a forgotten variable would quietly mean a
//     server on this machine.
//
// The replicas, after those that DATABASE_URL itself names:
//
//   - DATABASE_RO_URLS, URIs separated by blanks.
//   - DATABASE_RO_URL, the same, or the keywords and values of one.
//   - DB_RO_HOST, a list of hosts as for the parameter replica of ParseDSN, which take all else from the primary's fields,
//     the port too. Beside a DATABASE_URL it is an error: a host does not say what of the URL should hold for it.
//
// Only the first that is set counts. Nothing is derived from the primary's host. A replica's DSN that leaves something out
// inherits it as ParseDSN says. One that is blank, or is the primary itself, means single-server mode; a blank variable with
// the prefix keeps the bare ones from being looked at, so that APP_DATABASE_RO_URL="" turns a shared DATABASE_RO_URL off. A
// blank variable of the primary is as good as unset.
//
// Every error wraps ErrConfig, and names the variable that was really read.
func ConfigFromEnv(prefix string) (*Config, error) {
	return configFromLookup(prefix, os.LookupEnv)
}

// lookupFunc is os.LookupEnv, or a test's.
type lookupFunc func(name string) (value string, ok bool)

func configFromLookup(prefix string, lookup lookupFunc) (*Config, error) {
	env := environment{prefix, lookup}
	primary, err := env.primary()
	if err != nil {
		return nil, err
	}
	specs, err := env.replicas(primary)
	if err != nil {
		return nil, err
	}
	// DATABASE_URL may name replicas itself.
	own, err := parseReplicas(primary.sources[0].text, primary.sources[1:])
	if err != nil {
		return nil, err
	}
	return newConfig(primary.sources[0], append(own, specs...))
}

// environment finds variables by their names without the prefix.
type environment struct {
	prefix string
	lookup lookupFunc
}

// levels are the prefixes in the order in which they are looked for.
func (e environment) levels() []string {
	if e.prefix == "" {
		return []string{""}
	}
	return []string{e.prefix, ""}
}

// value returns a variable without the blanks around it.
func (e environment) value(name string) (value string, set bool) {
	value, set = e.lookup(name)
	return strings.Trim(value, blanks), set
}

// field returns the first value of name that is not blank, with the prefix or without.
func (e environment) field(name string) string {
	for _, level := range e.levels() {
		if v, _ := e.value(level + name); v != "" {
			return v
		}
	}
	return ""
}

// primaryEnv is what the environment says of the primary.
type primaryEnv struct {
	url     string   // the variable that holds a whole DSN, if one does
	text    string   // what it holds
	port    string   // the default port of a host-only replica
	sources []source // the primary's text, and URIs of replicas beside it
}

func (e environment) primary() (primaryEnv, error) {
	for _, level := range e.levels() {
		name := level + "DATABASE_URL"
		if raw, _ := e.lookup(name); strings.Trim(raw, blanks) != "" {
			sources, err := splitDSN(raw, name)
			return primaryEnv{url: name, text: strings.Trim(raw, blanks), sources: sources}, err
		}
		if v, _ := e.value(level + "DB_HOST"); v != "" {
			return e.primaryFromFields(level + "DB_HOST"), nil
		}
	}
	for _, name := range []string{"PGHOST", "PGSERVICE"} {
		if v, _ := e.value(name); v != "" {
			return primaryEnv{port: "5432", sources: []source{{name, ""}}}, nil
		}
	}
	return primaryEnv{}, configErrorf("", "none of the variables %sDATABASE_URL, %sDB_HOST, PGHOST and PGSERVICE says where the primary is", e.prefix, e.prefix)
}

func (e environment) primaryFromFields(hostName string) primaryEnv {
	m := map[string]string{}
	for _, f := range []struct{ key, name string }{
		{"host", "DB_HOST"},
		{"port", "DB_PORT"},
		{"user", "DB_USER"},
		{"database", "DB_NAME"},
		{"sslmode", "DB_SSLMODE"},
	} {
		if v := e.field(f.name); v != "" {
			m[f.key] = v
		}
	}
	if v := e.password(); v != "" {
		m["password"] = v
	}
	port := m["port"]
	if port == "" {
		port = "5432"
	}
	return primaryEnv{port: port, sources: []source{{hostName + " and the other DB_ variables", formatKeywords(m)}}}
}

// password is not trimmed: blanks can be a part of it.
func (e environment) password() string {
	for _, level := range e.levels() {
		if v, _ := e.lookup(level + "DB_PASSWORD"); v != "" {
			return v
		}
	}
	return ""
}

// replicas reads the first of the replica variables that is set.
func (e environment) replicas(primary primaryEnv) ([]replicaSpec, error) {
	for _, level := range e.levels() {
		blank := false
		for _, name := range []string{level + "DATABASE_RO_URLS", level + "DATABASE_RO_URL"} {
			raw, set := e.lookup(name)
			if strings.Trim(raw, blanks) != "" {
				return replicasFromURLs(name, raw, primary)
			}
			blank = blank || set
		}
		name := level + "DB_RO_HOST"
		hosts, set := e.value(name)
		if hosts != "" {
			if primary.url != "" {
				return nil, configErrorf(name, "a replica that is only a host cannot stand beside the whole URL in %s: use %sDATABASE_RO_URL", primary.url, level)
			}
			specs, err := parseHosts(name, hosts, primary.port)
			if err != nil {
				return nil, configErrorf(name, "%v", err)
			}
			return specs, nil
		}
		if blank || set {
			return nil, nil
		}
	}
	return nil, nil
}

// replicasFromURLs reads URIs, or one replica as keywords and values.
func replicasFromURLs(name, raw string, primary primaryEnv) ([]replicaSpec, error) {
	if strings.Trim(raw, blanks) == primary.text {
		return nil, nil
	}
	sources, err := splitDSN(raw, name)
	if err != nil {
		return nil, err
	}
	return parseReplicas(primary.sources[0].text, sources)
}
