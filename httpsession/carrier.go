package httpsession

import (
	"crypto/rand"
	"iter"
	"net/http"
	"strings"

	"github.com/pgsplit/pgsplit"
)

const (
	maxOpened  = 128 // tokens of one request that are looked at
	maxCookies = 4   // cookies that may stay with a caller that only reads
	maxRemoved = 16  // cookies that one response removes: some proxies take no more than 4 KB of header

	suffixSize = 8 // characters of a cookie's name after its prefix
)

// tokens are the sealed tokens that a request brings, with the names of their cookies.
func (m *middleware) tokens(r *http.Request) iter.Seq2[string, string] {
	return func(yield func(cookie, sealed string) bool) {
		if m.header != "" {
			for _, line := range r.Header[m.header] {
				for sealed := range strings.SplitSeq(line, ",") {
					if sealed = strings.TrimSpace(sealed); sealed != "" && !yield("", sealed) {
						return
					}
				}
			}
			return
		}
		for _, line := range r.Header["Cookie"] {
			for pair := range strings.SplitSeq(line, ";") {
				name, value, _ := strings.Cut(strings.TrimSpace(pair), "=")
				if m.owns(name) && !yield(name, value) {
					return
				}
			}
		}
	}
}

// owns tells whether a cookie's name is one of those that send makes.
func (m *middleware) owns(name string) bool {
	suffix, found := strings.CutPrefix(name, m.cookie.Name)
	return found && len(suffix) == suffixSize && strings.Trim(suffix, "abcdefghijklmnopqrstuvwxyz234567") == ""
}

// send puts a token into a response's header, and removes cookies of its caller.
func (m *middleware) send(header http.Header, r *http.Request, token pgsplit.Token, outdated []string) {
	sealed := m.keyring.Seal(token)
	if m.header != "" {
		header.Set(m.header, sealed)
		return
	}
	cookie := m.cookie
	cookie.Name += strings.ToLower(rand.Text()[:suffixSize])
	cookie.Value = sealed
	cookie.Secure = cookie.Secure || r.TLS != nil || strings.EqualFold(r.Header.Get("X-Forwarded-Proto"), "https")
	header.Add("Set-Cookie", cookie.String())
	cookie.Value, cookie.MaxAge = "", -1
	for i, name := range outdated {
		if i == maxRemoved {
			break
		}
		cookie.Name = name
		header.Add("Set-Cookie", cookie.String())
	}
}
