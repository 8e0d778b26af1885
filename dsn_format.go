package pgsplit

import (
	"crypto/tls"
	"fmt"
	"maps"
	"net/netip"
	"reflect"
	"slices"
	"strconv"
	"strings"

	"github.com/jackc/pgx/v5/pgxpool"
)

// FormatDSN returns a DSN from which ParseDSN makes a Config equivalent to c, passwords included: do not log it.
//
// It is built on the connection strings that the pool configs were parsed from and on the pool bounds and times as they
// now stand; what the strings leave to the environment or to a file stays there. Then the DSN is parsed again and compared
// with c. A Config that a DSN cannot say is therefore an error that wraps ErrConfig and names the first difference: a
// connection field changed after parsing, or a replica without a setting that it would inherit from the primary.
//
// Functions (hooks, tracers, dialers) have no place in a DSN. They are not looked at and are lost, except the checks that
// target_session_attrs stands for.
func FormatDSN(c *Config) (string, error) {
	c, err := c.prepared()
	if err != nil {
		return "", err
	}
	primary, err := settingsOf("Primary", c.Primary)
	if err != nil {
		return "", err
	}
	var short, uris []string
	for i, r := range c.Replicas {
		own, err := settingsOf("replica "+strconv.Itoa(i+1), r.Pool)
		if err != nil {
			return "", err
		}
		own = withoutInherited(own, primary, c.Primary, r.Pool)
		if host, ok := shortHost(own, r); ok && uris == nil {
			short = append(short, host)
			continue
		}
		if r.Name != (Replica{Pool: r.Pool}).name() {
			own["name"] = r.Name
		}
		if r.Label != "" {
			own["label"] = r.Label
		}
		if r.Weight > 1 {
			own["weight"] = strconv.Itoa(r.Weight)
		}
		uris = append(uris, formatURI(own))
	}
	dsn := formatPrimary(c, primary, short, uris)
	back, err := ParseDSN(dsn)
	if err != nil {
		return "", err
	}
	if field := difference(c, back); field != "" {
		return "", configErrorf("", "a DSN cannot say this: %s is not what the connection strings give", field)
	}
	return dsn, nil
}

// settingsOf returns the settings of p's connection string, with the pool's bounds and times as they now stand.
func settingsOf(where string, p *pgxpool.Config) (map[string]string, error) {
	c, err := scan(p.ConnString(), takeNothing)
	if err != nil {
		return nil, configErrorf(where, "%v", err)
	}
	m := c.settings
	maps.Copy(m, map[string]string{
		"pool_min_conns":                strconv.Itoa(int(p.MinConns)),
		"pool_min_idle_conns":           strconv.Itoa(int(p.MinIdleConns)),
		"pool_max_conn_lifetime":        p.MaxConnLifetime.String(),
		"pool_max_conn_idle_time":       p.MaxConnIdleTime.String(),
		"pool_health_check_period":      p.HealthCheckPeriod.String(),
		"pool_max_conn_lifetime_jitter": p.MaxConnLifetimeJitter.String(),
		"pool_ping_timeout":             p.PingTimeout.String(),
	})
	delete(m, "pool_max_conns")
	if p.MaxConns > 0 {
		m["pool_max_conns"] = strconv.Itoa(int(p.MaxConns))
	}
	return m, nil
}

// withoutInherited leaves out of a replica's settings what inherit adds again.
func withoutInherited(own, from map[string]string, primary, replica *pgxpool.Config) map[string]string {
	sameUser := replica.ConnConfig.User == primary.ConnConfig.User
	m := map[string]string{}
	for key, value := range own {
		inherited, ok := from[key]
		same := ok && value == inherited
		switch {
		case isPerHost(key):
			same = key == "target_session_attrs" && value == "any"
		case key == "password":
			same = same && sameUser || value == ""
		case key == "database":
			same = same || value == databaseOf(primary)
		}
		if !same {
			m[key] = value
		}
	}
	return m
}

// shortHost writes a replica that inherits everything the short way.
func shortHost(own map[string]string, r Replica) (string, bool) {
	host, port := own["host"], own["port"]
	if len(own) != 2 || r.Label != "" || r.Weight != 1 || r.Name != (Replica{Pool: r.Pool}).name() {
		return "", false
	}
	text := host
	if strings.Contains(host, ":") && !strings.HasPrefix(host, "/") {
		text = "[" + host + "]"
	}
	if port != "5432" {
		text += ":" + port
	}
	h, p, ok := splitHostPort(text)
	if p == "" {
		p = "5432"
	}
	return text, ok && h == host && p == port && !strings.Contains(host, ",") && strings.Trim(host, blanks) == host
}

// formatPrimary writes the whole DSN. The keyword form stays as long as no replica needs a URI.
func formatPrimary(c *Config, m map[string]string, short, uris []string) string {
	m = maps.Clone(m)
	for key, value := range map[string]string{
		"pool_min_conns":                "0",
		"pool_min_idle_conns":           "0",
		"pool_max_conn_lifetime":        "0s",
		"pool_max_conn_idle_time":       "0s",
		"pool_health_check_period":      "1m0s",
		"pool_max_conn_lifetime_jitter": "0s",
		"pool_ping_timeout":             "0s",
	} {
		if m[key] == value {
			delete(m, key)
		}
	}
	for _, p := range parameters {
		if value := p.format(c); value != "" {
			m[p.name] = value
		}
	}
	if len(short) > 0 {
		m["replica"] = strings.Join(short, ",")
	}
	if !isURI(c.Primary.ConnString()) && len(uris) == 0 {
		return formatKeywords(m)
	}
	return strings.Join(append([]string{formatURI(m)}, uris...), " ")
}

// formatSettings writes a connection string that pgx reads as m. A URI can hold any key, but not pgx's ssl=true of the
// keyword form, which a URI takes for sslmode=require.
func formatSettings(m map[string]string) string {
	if m["ssl"] == "true" {
		return formatKeywords(m)
	}
	return formatURI(m)
}

func sortedKeys(m map[string]string) []string { return slices.Sorted(maps.Keys(m)) }

func formatKeywords(m map[string]string) string {
	escape := strings.NewReplacer(`\`, `\\`, `'`, `\'`)
	var pairs []string
	for _, key := range sortedKeys(m) {
		value := escape.Replace(m[key])
		if value == "" || strings.ContainsAny(value, blanks+`\`) {
			value = "'" + value + "'"
		}
		if key == "database" {
			key = "dbname"
		}
		pairs = append(pairs, key+"="+value)
	}
	return strings.Join(pairs, " ")
}

// formatURI puts user, hosts and database where readers look for them if they can stand there, else into the query.
func formatURI(m map[string]string) string {
	m = maps.Clone(m)
	var b strings.Builder
	b.WriteString("postgres://")
	if user, password := m["user"], m["password"]; user != "" || password != "" {
		b.WriteString(escapeURI(user, ""))
		if password != "" {
			b.WriteString(":" + escapeURI(password, ""))
			delete(m, "password")
		}
		b.WriteString("@")
		if user != "" {
			delete(m, "user")
		}
	}
	if hosts, ok := authorityHosts(m); ok {
		b.WriteString(hosts)
		delete(m, "host")
		delete(m, "port")
	}
	b.WriteString("/")
	if database := m["database"]; database != "" {
		b.WriteString(escapeURI(database, ""))
		delete(m, "database")
	}
	for i, key := range sortedKeys(m) {
		b.WriteByte("?&"[min(i, 1)])
		value := m[key]
		if key == "database" {
			key = "dbname"
		}
		b.WriteString(escapeURI(key, "") + "=" + escapeURI(value, ",:/"))
	}
	return b.String()
}

// authorityHosts writes host:port for each host. ok is false if that would not mean the same.
func authorityHosts(m map[string]string) (list string, ok bool) {
	hosts := strings.Split(m["host"], ",")
	port, hasPort := m["port"]
	ports := strings.Split(port, ",")
	if len(hosts) != len(ports) {
		return "", false
	}
	for i, host := range hosts {
		switch addr, err := netip.ParseAddr(host); {
		case err == nil && addr.Is6():
			host = "[" + escapeURI(host, ":") + "]"
		case !isPlainHost(host):
			return "", false
		}
		if i > 0 {
			list += ","
		}
		list += host
		switch {
		case isPort(ports[i]):
			list += ":" + ports[i]
		case hasPort:
			return "", false
		}
	}
	return list, true
}

// escapeURI percent-encodes everything but unreserved bytes and those in plain.
func escapeURI(s, plain string) string {
	const hex = "0123456789ABCDEF"
	var b strings.Builder
	for i := range len(s) {
		if c := s[i]; isUnreserved(c) || strings.IndexByte(plain, c) >= 0 {
			b.WriteByte(c)
		} else {
			b.WriteString("%" + string(hex[c>>4]) + string(hex[c&15]))
		}
	}
	return b.String()
}

// difference names the first field in which two prepared configs differ, or returns "". Functions are not compared, except
// pgx's own checks of target_session_attrs.
func difference(a, b *Config) string {
	switch {
	case a.MaxWait != b.MaxWait:
		return "MaxWait"
	case a.MaxLag != b.MaxLag:
		return "MaxLag"
	case a.MaxLagBytes != b.MaxLagBytes:
		return "MaxLagBytes"
	case a.ReplicaTimeout != b.ReplicaTimeout:
		return "ReplicaTimeout"
	case a.RetryMin != b.RetryMin, a.RetryMax != b.RetryMax:
		return "RetryMin or RetryMax"
	case a.Balance != b.Balance, a.OnStale != b.OnStale, a.OnPrimaryDown != b.OnPrimaryDown, a.Tx != b.Tx:
		return "Balance, OnStale, OnPrimaryDown or Tx"
	case len(a.Replicas) != len(b.Replicas):
		return "the number of Replicas"
	}
	if field := poolDifference(a.Primary, b.Primary); field != "" {
		return "Primary." + field
	}
	for i, r := range a.Replicas {
		s, where := b.Replicas[i], fmt.Sprintf("Replicas[%d].", i)
		if r.Name != s.Name || r.Label != s.Label || r.Weight != s.Weight {
			return where + "Name, Label or Weight"
		}
		if field := poolDifference(r.Pool, s.Pool); field != "" {
			return where + "Pool." + field
		}
	}
	return ""
}

// poolDifference compares every field that is not a function, so that a field that pgx adds is not forgotten.
func poolDifference(a, b *pgxpool.Config) string {
	if field := fieldDifference(reflect.ValueOf(*a), reflect.ValueOf(*b)); field != "" {
		return field
	}
	if field := fieldDifference(reflect.ValueOf(*a.ConnConfig), reflect.ValueOf(*b.ConnConfig)); field != "" {
		return "ConnConfig." + field
	}
	ac, bc := &a.ConnConfig.Config, &b.ConnConfig.Config
	if field := fieldDifference(reflect.ValueOf(*ac), reflect.ValueOf(*bc)); field != "" {
		return "ConnConfig." + field
	}
	if !tlsEqual(ac.TLSConfig, bc.TLSConfig) {
		return "ConnConfig.TLSConfig"
	}
	if len(ac.Fallbacks) != len(bc.Fallbacks) {
		return "ConnConfig.Fallbacks"
	}
	for i, f := range ac.Fallbacks {
		g := bc.Fallbacks[i]
		if f.Host != g.Host || f.Port != g.Port || !tlsEqual(f.TLSConfig, g.TLSConfig) {
			return "ConnConfig.Fallbacks"
		}
	}
	if !sameCheck(ac.ValidateConnect, bc.ValidateConnect) {
		return "ConnConfig.ValidateConnect"
	}
	return ""
}

// fieldDifference compares the exported fields of two structs that are numbers, strings or maps of strings.
func fieldDifference(a, b reflect.Value) string {
	for i := range a.NumField() {
		f := a.Type().Field(i)
		if !f.IsExported() {
			continue
		}
		switch f.Type.Kind() {
		case reflect.Func, reflect.Pointer, reflect.Interface, reflect.Struct, reflect.Slice:
			continue // compared by the caller, or a function
		case reflect.Map:
			if a.Field(i).Len() == 0 && b.Field(i).Len() == 0 {
				continue
			}
		}
		if !reflect.DeepEqual(a.Field(i).Interface(), b.Field(i).Interface()) {
			return f.Name
		}
	}
	return ""
}

// tlsEqual compares what a DSN can say of TLS, but for the client's certificate, which pgx keeps to itself.
func tlsEqual(a, b *tls.Config) bool {
	if a == nil || b == nil {
		return a == b
	}
	return a.ServerName == b.ServerName && a.InsecureSkipVerify == b.InsecureSkipVerify && a.RootCAs.Equal(b.RootCAs) &&
		slices.Equal(a.NextProtos, b.NextProtos) && a.MinVersion == b.MinVersion && a.MaxVersion == b.MaxVersion &&
		len(a.Certificates) == len(b.Certificates) &&
		(a.VerifyPeerCertificate == nil) == (b.VerifyPeerCertificate == nil)
}
