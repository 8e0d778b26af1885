// Package httpsession carries pgsplit sessions from one HTTP request of a caller to the next: a page that is loaded
// after a form was sent shows what the form wrote, on whichever process and from whichever server.
//
//	keyring, err := pgsplit.NewKeyring(key) // 32 random bytes or more, the same in every process
//	handler := httpsession.Middleware(keyring, httpsession.ReadOnlyMethods())(mux)
//
// Each request gets a [pgsplit.Session] in its context; statements under that context raise and keep its floors. When
// the request has written, its response has a token in a cookie, sealed by the keyring, and the next request's session
// goes on from there. A request that wrote nothing sets no cookie.
//
// # When the token leaves
//
// The token leaves with the response's header: at the first WriteHeader that is not informational, Write, ReadFrom or
// Flush, when the handler returns without any of them, and when it panics. A write counts once it has committed, so
// commit first and answer then. What commits after the header is gone cannot be in it: it is counted and logged as
// token_late, and [PinOnStart] is for handlers that cannot do otherwise.
//
// A handler that hijacks the connection writes the header itself: the token is in ResponseWriter.Header() when Hijack
// returns.
//
// # Parallel requests
//
// Responses to parallel requests may arrive in any order, so each token has a cookie name of its own and none takes the
// place of another. A request merges all tokens that it brings by maximum. Its response, if it has a token, removes the
// cookies that the request brought, which that token covers, and no others. A request that brings more than 4 gets a
// merged one even if it writes nothing. One response removes at most 16 cookies, so that its header stays small.
//
// # Tokens that prove nothing
//
// A token that is torn, forged or sealed with a key that the keyring does not have may be anything, that of a caller
// who has just written too. Such a request goes on with [pgsplit.SessionWithoutTrust]: its reads use the primary. Its
// response has a token that takes the place of what it could not read, and removes those cookies. No more than 128
// tokens of a request are looked at.
//
// A token is no credential and names no user; it says where in the write-ahead log its caller has got to.
package httpsession

import (
	"context"
	"log/slog"
	"net/http"
	"strconv"
	"sync/atomic"
	"time"

	"github.com/pgsplit/pgsplit"
)

// middleware is what the options made. It does not change after that.
type middleware struct {
	keyring      *pgsplit.Keyring
	cookie       http.Cookie // Name is a prefix
	header       string      // instead of cookies, unless empty
	readOnly     bool
	forcePrimary string
	monotonic    bool
	pin          time.Duration
	stats        *Stats
	logger       *slog.Logger
}

// Option is an option of Middleware.
type Option func(*middleware)

// ReadOnlyMethods puts requests with the methods GET, HEAD and OPTIONS under pgsplit.ReadOnly: replicas may serve them.
// A handler that writes nevertheless does so under pgsplit.Primary.
func ReadOnlyMethods() Option {
	return func(m *middleware) { m.readOnly = true }
}

// ForcePrimaryHeader lets a request ask for the primary: all its reads go there if it has this header, such as
// X-Force-Primary, with a value other than "", "0" or "false". Nothing below can undo it, and it ends with the request.
// Remove the header at the edge if strangers should not decide.
func ForcePrimaryHeader(name string) Option {
	return func(m *middleware) { m.forcePrimary = name }
}

// Monotonic carries what requests have read, too: a caller's next request never sees less than the ones before. The
// price is that responses to reads set cookies. The default carries writes.
func Monotonic() Option {
	return func(m *middleware) { m.monotonic = true }
}

// PinOnStart is for handlers that commit while they stream. When a response with a status from 200 to 299 (but 204) to a
// method other than GET, HEAD and OPTIONS begins, it pins the session for d: the token that leaves sends the caller's
// reads to the primary that long, so d has to be longer than such a response takes and replicas may lag after it. A
// response that begins only after its handler has returned needs no pin and gets none.
func PinOnStart(d time.Duration) Option {
	return func(m *middleware) { m.pin = d }
}

// Header carries tokens in this header of requests and responses instead of in cookies, for callers that are no
// browsers. A caller keeps every token that a response gives it, and sends all that it has, in one header separated by
// commas or in several. When a response has a token, that one takes the place of those that its request had sent.
//
// For scripts of other origins, list the header in Access-Control-Allow-Headers and Access-Control-Expose-Headers.
func Header(name string) Option {
	return func(m *middleware) { m.header = http.CanonicalHeaderKey(name) }
}

// Cookie changes the attributes of the cookies. By default they have Path "/", HttpOnly, SameSite=Lax, a MaxAge of 24
// hours, and Secure if the request came by TLS or, as a proxy says in X-Forwarded-Proto, by https; setting Secure makes
// it unconditional. Name is what the names begin with, "pgsplit_"; eight characters follow. The value is ignored.
//
// A name that begins with "__Host-" keeps other hosts of the domain from planting cookies, which would only make reads
// use the primary; it wants Secure, Path "/" and no Domain.
//
// A token has to live longer than any replica lags: there is no use in a MaxAge of seconds. Programs that share a cookie
// domain and a keyring may share the name: each keeps what it does not know. Otherwise give each a name of its own.
func Cookie(change func(*http.Cookie)) Option {
	return func(m *middleware) { change(&m.cookie) }
}

// CountIn adds what happens to s, which several Middlewares may share.
func CountIn(s *Stats) Option {
	return func(m *middleware) { m.stats = s }
}

// Logger is where token_late and token_unsure are logged as warnings and token_invalid for debugging. The default is
// slog.Default().
func Logger(l *slog.Logger) Option {
	return func(m *middleware) { m.logger = l }
}

// Stats counts what happened to tokens. All counters only grow.
type Stats struct {
	// Sent counts responses with a token.
	Sent atomic.Uint64
	// Merged counts those among them that only merged what the request had brought.
	Merged atomic.Uint64
	// Invalid counts tokens of requests that could not be opened.
	Invalid atomic.Uint64
	// Unsure counts tokens that pin their reader, because the primary could not be asked where the writes ended.
	Unsure atomic.Uint64
	// Late counts responses whose caller was not told everything, because it was committed, or under Monotonic read,
	// after the header had left.
	Late atomic.Uint64
}

// Middleware returns what puts a session into the context of a handler's requests, where pgsplit.SessionFrom finds it,
// and carries its token by cookies. Without options it does nothing else. Put it around everything that uses the
// database, and outside of what buffers or replaces responses, such as http.TimeoutHandler.
//
// A Middleware inside of another one adds its ReadOnlyMethods, ForcePrimaryHeader, Monotonic and PinOnStart, and leaves
// the session and its token to the outer one.
//
// It panics on a keyring that did not come from pgsplit.NewKeyring, and on a cookie name that is not one.
func Middleware(keyring *pgsplit.Keyring, options ...Option) func(http.Handler) http.Handler {
	m := &middleware{
		keyring: keyring,
		cookie:  http.Cookie{Name: "pgsplit_", Path: "/", HttpOnly: true, SameSite: http.SameSiteLaxMode, MaxAge: 24 * 60 * 60},
		stats:   &Stats{},
	}
	for _, option := range options {
		option(m)
	}
	m.cookie.Value = keyring.Seal(pgsplit.Token{})
	if err := m.cookie.Valid(); err != nil {
		panic("httpsession: " + err.Error())
	}
	return func(next http.Handler) http.Handler {
		return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { m.serve(next, w, r) })
	}
}

func (m *middleware) serve(next http.Handler, w http.ResponseWriter, r *http.Request) {
	ctx := r.Context()
	if m.readOnly && safe(r.Method) {
		ctx = pgsplit.ReadOnly(ctx)
	}
	if m.forcesPrimary(r) {
		// A session around the caller's own, whose token nobody asks for: it ends with the request.
		ctx = pgsplit.WithSession(ctx, pgsplit.SessionWithoutTrust())
	}
	if outer, ok := ctx.Value(exchangeKey{}).(*exchange); ok {
		outer.join(m)
		next.ServeHTTP(w, r.WithContext(ctx))
		return
	}
	x := m.receive(r)
	x.join(m)
	x.request = r.WithContext(context.WithValue(pgsplit.WithSession(ctx, x.session), exchangeKey{}, x))
	x.header = w.Header()
	// Not by way of recover: a panic goes on as it was, with its stack.
	defer x.finish()
	next.ServeHTTP(wrap(w, x), x.request)
}

// safe tells whether requests with the method ask for nothing to be changed.
func safe(method string) bool {
	return method == http.MethodGet || method == http.MethodHead || method == http.MethodOptions
}

func (m *middleware) forcesPrimary(r *http.Request) bool {
	if m.forcePrimary == "" {
		return false
	}
	value := r.Header.Get(m.forcePrimary)
	said, err := strconv.ParseBool(value)
	return said || err != nil && value != ""
}

func (m *middleware) log(r *http.Request, level slog.Level, event string, attributes ...any) {
	logger := m.logger
	if logger == nil {
		logger = slog.Default()
	}
	logger.Log(r.Context(), level, "pgsplit: "+event, append(attributes, "method", r.Method, "pattern", r.Pattern)...)
}
