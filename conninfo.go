package pgsplit

import (
	"errors"
	"strconv"
	"strings"
)

// This file reads connection strings as libpq and pgx do, only so far that parameters can be cut out of the text and a
// replica can inherit settings. What a setting means is left to pgx.

// blanks are what separates keywords, and URIs.
const blanks = " \t\n\v\f\r"

// The errors of DSNs that are no connection string. None of them quotes the text.
var (
	errNUL        = errors.New("a NUL byte is not allowed")
	errMixedForms = errors.New("a URI after keywords and values: give replicas of their own credentials as URIs after a URI, or use Config")
	errPercent    = errors.New("a percent sign without two hexadecimal digits (or %00)")
	errInnerSpace = errors.New("a space inside a URI: write %20, or begin the next URI with postgres://")
	errBracket    = errors.New("an IPv6 address must stand in [ ] and be followed by a port, a path or nothing")
	errPair       = errors.New("a query parameter must be key=value, with one equals sign")
	errNoEquals   = errors.New("a keyword without an equals sign")
	errUnfinished = errors.New("a quoted value does not end")
)

func isURI(s string) bool {
	return strings.HasPrefix(s, "postgres://") || strings.HasPrefix(s, "postgresql://")
}

// conninfo is a connection string as pgx reads it.
type conninfo struct {
	uri      bool
	settings map[string]string // by pgx's names: dbname is "database"
	taken    []setting         // the parameters that were cut out, decoded, in order
	rest     string            // the text without them, otherwise untouched
}

type setting struct{ key, value string }

// scan reads text as pgx does and cuts out the parameters that take wants.
func scan(text string, take func(key string) bool) (conninfo, error) {
	if strings.IndexByte(text, 0) >= 0 {
		return conninfo{}, errNUL
	}
	if isURI(text) {
		return scanURI(text, take)
	}
	return scanKeywords(text, take)
}

func takeNothing(string) bool { return false }

// canonicalKey is the one name of a setting that has two.
func canonicalKey(key string) string {
	if key == "dbname" {
		return "database"
	}
	return key
}

// scanURI follows libpq's grammar, where it differs from RFC 3986 too: the user ends at the first '@' that no '/' precedes,
// and hosts are a list.
func scanURI(text string, take func(string) bool) (conninfo, error) {
	c := conninfo{uri: true, settings: map[string]string{}, rest: text}
	p := text[strings.Index(text, "://")+len("://"):]
	raw := map[string]string{}
	if i := strings.IndexAny(p, "@/"); i >= 0 && p[i] == '@' {
		raw["user"], raw["password"], _ = strings.Cut(p[:i], ":")
		p = p[i+1:]
	}
	var err error
	if raw["host"], raw["port"], p, err = scanHosts(p); err != nil {
		return c, err
	}
	if path, ok := strings.CutPrefix(p, "/"); ok {
		end := strings.IndexByte(path, '?')
		if end < 0 {
			end = len(path)
		}
		raw["database"], p = path[:end], path[end:]
	}
	for _, key := range []string{"user", "password", "host", "port", "database"} {
		if raw[key] == "" {
			continue
		}
		if c.settings[key], err = decodeURI(raw[key]); err != nil {
			return c, err
		}
	}
	query, ok := strings.CutPrefix(p, "?")
	if !ok {
		return c, nil
	}
	kept, err := c.scanQuery(query, take)
	if err != nil {
		return c, err
	}
	if len(c.taken) > 0 {
		c.rest = text[:len(text)-len(p)]
		if len(kept) > 0 {
			c.rest += "?" + strings.Join(kept, "&")
		}
	}
	return c, nil
}

// scanHosts returns the raw comma lists of hosts and ports, of the same length, and what follows them.
func scanHosts(p string) (hosts, ports, rest string, err error) {
	for {
		if strings.HasPrefix(p, "[") {
			end := strings.IndexByte(p, ']')
			if end <= 1 {
				return "", "", "", errBracket
			}
			hosts += p[1:end]
			if p = p[end+1:]; p != "" && strings.IndexByte(":/?,", p[0]) < 0 {
				return "", "", "", errBracket
			}
		} else {
			host := p[:indexAnyOrLen(p, ":/?,")]
			hosts += host
			p = p[len(host):]
		}
		if after, ok := strings.CutPrefix(p, ":"); ok {
			end := indexAnyOrLen(after, "/?,")
			ports += after[:end]
			p = after[end:]
		}
		after, more := strings.CutPrefix(p, ",")
		if !more {
			return hosts, ports, p, nil
		}
		hosts, ports, p = hosts+",", ports+",", after
	}
}

func indexAnyOrLen(s, chars string) int {
	if i := strings.IndexAny(s, chars); i >= 0 {
		return i
	}
	return len(s)
}

// scanQuery reads the query into c and returns the raw pairs that stay.
func (c *conninfo) scanQuery(query string, take func(string) bool) (kept []string, err error) {
	found := map[string]string{}
	sslLast := false
	for query != "" {
		var pair string
		pair, query, _ = strings.Cut(query, "&")
		rawKey, rawValue, ok := strings.Cut(pair, "=")
		if !ok || strings.IndexByte(rawValue, '=') >= 0 {
			return nil, errPair
		}
		key, err := decodeURI(rawKey)
		if err != nil {
			return nil, err
		}
		value, err := decodeURI(rawValue)
		if err != nil {
			return nil, err
		}
		key = canonicalKey(key)
		if take(key) {
			c.taken = append(c.taken, setting{key, value})
			continue
		}
		kept = append(kept, pair)
		found[key] = value
		if key == "ssl" || key == "sslmode" {
			sslLast = key == "ssl"
		}
	}
	// JDBC's spelling: it means sslmode=require, unless an sslmode comes after it.
	if found["ssl"] == "true" {
		delete(found, "ssl")
		if sslLast {
			found["sslmode"] = "require"
		}
	}
	for key, value := range found {
		c.settings[key] = value
	}
	return kept, nil
}

// decodeURI percent-decodes one part of a URI. Spaces around it do not count.
func decodeURI(raw string) (string, error) {
	raw = strings.Trim(raw, " ")
	if strings.IndexByte(raw, ' ') >= 0 {
		return "", errInnerSpace
	}
	if strings.IndexByte(raw, '%') < 0 {
		return raw, nil
	}
	out := make([]byte, 0, len(raw))
	for i := 0; i < len(raw); i++ {
		if raw[i] != '%' {
			out = append(out, raw[i])
			continue
		}
		if i+2 >= len(raw) {
			return "", errPercent
		}
		// Both bytes by themselves, because ParseUint takes a sign.
		hi, err1 := strconv.ParseUint(raw[i+1:i+2], 16, 8)
		lo, err2 := strconv.ParseUint(raw[i+2:i+3], 16, 8)
		if err1 != nil || err2 != nil || hi+lo == 0 {
			return "", errPercent
		}
		out = append(out, byte(hi<<4|lo))
		i += 2
	}
	return string(out), nil
}

// scanKeywords reads "key=value key='value'".
func scanKeywords(text string, take func(string) bool) (conninfo, error) {
	c := conninfo{settings: map[string]string{}}
	var rest strings.Builder
	s := strings.TrimLeft(text, blanks)
	rest.WriteString(text[:len(text)-len(s)])
	for s != "" {
		if isURI(s) {
			return c, errMixedForms
		}
		eq := strings.IndexByte(s, '=')
		if eq < 0 {
			return c, errNoEquals
		}
		key := canonicalKey(strings.Trim(s[:eq], blanks))
		if key == "" || strings.ContainsAny(key, blanks) {
			return c, errNoEquals
		}
		value, after, err := scanValue(strings.TrimLeft(s[eq+1:], blanks))
		if err != nil {
			return c, err
		}
		after = strings.TrimLeft(after, blanks)
		token := s[:len(s)-len(after)]
		s = after
		if take(key) {
			c.taken = append(c.taken, setting{key, value})
			continue
		}
		rest.WriteString(token)
		if key == "user" && value == "" {
			continue // pgx: an empty user is no user
		}
		c.settings[key] = value
	}
	c.rest = rest.String()
	return c, nil
}

// scanValue reads one value, quoted or not, and returns what follows it. A backslash takes the next byte as it is.
func scanValue(s string) (value, rest string, err error) {
	quoted := strings.HasPrefix(s, "'")
	i := 0
	if quoted {
		i = 1
	}
	var out []byte
	for ; i < len(s); i++ {
		switch {
		case s[i] == '\\':
			i++
			if i < len(s) {
				out = append(out, s[i])
			}
		case quoted && s[i] == '\'':
			return string(out), s[i+1:], nil
		case !quoted && strings.IndexByte(blanks, s[i]) >= 0:
			return string(out), s[i:], nil
		default:
			out = append(out, s[i])
		}
	}
	if quoted {
		return "", "", errUnfinished
	}
	return string(out), "", nil
}
