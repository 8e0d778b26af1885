package httpsession_test

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/pgsplit/pgsplit"
	"github.com/pgsplit/pgsplit/httpsession"
)

func nothing(http.ResponseWriter, *http.Request) {}

// serve has one request answered.
func serve(h http.HandlerFunc, r *http.Request, k *pgsplit.Keyring, options ...httpsession.Option) http.Header {
	w := httptest.NewRecorder()
	httpsession.Middleware(k, options...)(h).ServeHTTP(w, r)
	return w.Result().Header
}

func TestAHandlerFindsASessionAndNoHint(t *testing.T) {
	serve(func(_ http.ResponseWriter, r *http.Request) {
		if _, ok := pgsplit.SessionFrom(r.Context()); !ok {
			t.Error("no session")
		}
		if h, _ := pgsplit.HintFrom(r.Context()); h.ReadOnly || h.Primary {
			t.Errorf("%+v", h)
		}
	}, get(""), keyring(t, 1))
}

func TestARequestThatWroteNothingSetsNoCookie(t *testing.T) {
	k := keyring(t, 1)
	for ending, answer := range endings {
		for _, brought := range []int{0, 1, 4} {
			server := httptest.NewServer(recovering(httpsession.Middleware(k)(http.HandlerFunc(answer))))
			client := caller(t)
			client.CheckRedirect = func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }
			_, h := fetch(t, client, http.MethodPost, server.URL, "Cookie", cookies(k, brought))
			if len(h["Set-Cookie"]) > 0 || h.Get("Cache-Control") == "private" {
				t.Errorf("%s, %d cookies: %v", ending, brought, h)
			}
			server.Close()
		}
	}
}

func TestTheTokenLeavesBeforeTheFirstByteHoweverAResponseEnds(t *testing.T) {
	k := keyring(t, 1)
	for ending, answer := range endings {
		t.Run(ending, func(t *testing.T) {
			server := httptest.NewServer(recovering(httpsession.Middleware(k)(http.HandlerFunc(answer))))
			defer server.Close()
			client := caller(t)
			client.CheckRedirect = func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }
			_, h := fetch(t, client, http.MethodGet, server.URL, "Cookie", cookies(k, 5))
			tokens, removed := sent(t, k, h)
			if len(tokens) != 1 || tokens[0].Floors[0].LSN != 5 || len(removed) != 5 {
				t.Errorf("%v, %v", tokens, removed)
			}
			if got := h.Get("Cache-Control"); got != "private" && ending != "panic" { // which http.Error, called from outside, removes
				t.Errorf("Cache-Control: %q", got)
			}
		})
	}
}

func TestAHandlersOwnCacheControlStands(t *testing.T) {
	k := keyring(t, 1)
	h := serve(func(w http.ResponseWriter, _ *http.Request) { w.Header().Set("Cache-Control", "no-store") }, get(cookies(k, 5)), k)
	if got := h["Cache-Control"]; !slices.Equal(got, []string{"no-store"}) {
		t.Error(got)
	}
}

func TestACallerWithManyCookiesGetsThemMerged(t *testing.T) {
	k := keyring(t, 1)
	var stats httpsession.Stats
	h := serve(nothing, get(cookies(k, 40)), k, httpsession.CountIn(&stats))
	tokens, removed := sent(t, k, h)
	if len(tokens) != 1 || tokens[0].Floors[0].LSN != 40 {
		t.Error(tokens)
	}
	slices.Sort(removed)
	if removed = slices.Compact(removed); len(removed) != 16 {
		t.Errorf("removed %v", removed)
	}
	again, others := sent(t, k, serve(nothing, get(cookies(k, 40)), k))
	if slices.Sort(others); slices.Equal(removed, others) || len(again) != 1 {
		t.Error("parallel responses remove the same ones")
	}
	size := 0
	for _, line := range h["Set-Cookie"] {
		size += len("Set-Cookie: \r\n") + len(line)
	}
	if size > 2048 {
		t.Errorf("the header takes %d bytes", size)
	}
	if stats.Sent.Load() != 1 || stats.Merged.Load() != 1 {
		t.Error(stats.Sent.Load(), stats.Merged.Load())
	}
}

func TestTokensReadInParallelSendTheNextRequestToThePrimaryOnce(t *testing.T) {
	k := keyring(t, 1)
	read := func(instance uint32, lsn pgsplit.LSN) string {
		token := at(lsn, 1)
		token.Floors[0].Instance = instance
		return k.Seal(token)
	}
	for _, c := range []struct {
		other    string
		resolves bool
	}{{read(9, 5), false}, {read(9, 6), false}, {read(8, 5), true}, {read(8, 6), true}, {k.Seal(at(6, 1)), false}, {k.Seal(at(4, 1)), false}} {
		var pairs []string
		for n := range 4 {
			pairs = append(pairs, name(n)+"="+read(9, 5))
		}
		tokens, _ := sent(t, k, serve(nothing, get(strings.Join(append(pairs, name(4)+"="+c.other), "; ")), k))
		if len(tokens) != 1 || tokens[0].Floors[0].Resolve != c.resolves {
			t.Errorf("%+v: %+v", c, tokens)
		}
	}
}

func TestCookieAttributes(t *testing.T) {
	k := keyring(t, 1)
	secure := func(r *http.Request) *http.Request { r.Header.Set("X-Forwarded-Proto", "https"); return r }
	for _, c := range []struct {
		request *http.Request
		option  func(*http.Cookie)
		want    string
	}{
		{get(""), func(*http.Cookie) {}, "; Path=/; Max-Age=86400; HttpOnly; SameSite=Lax"},
		{secure(get("")), func(*http.Cookie) {}, "; Path=/; Max-Age=86400; HttpOnly; Secure; SameSite=Lax"},
		{httptest.NewRequest(http.MethodGet, "https://x/", nil), func(*http.Cookie) {}, "; Path=/; Max-Age=86400; HttpOnly; Secure; SameSite=Lax"},
		{get(""), func(c *http.Cookie) {
			c.Path, c.MaxAge, c.HttpOnly, c.Secure, c.SameSite, c.Domain = "/shop", 60, false, true, http.SameSiteStrictMode, "example.com"
		}, "; Path=/shop; Domain=example.com; Max-Age=60; Secure; SameSite=Strict"},
	} {
		c.request.Header.Set("Cookie", cookies(k, 5))
		lines := serve(nothing, c.request, k, httpsession.Cookie(c.option))["Set-Cookie"]
		if len(lines) != 6 {
			t.Fatal(lines)
		}
		if _, attributes, _ := strings.Cut(lines[0], ";"); ";"+attributes != c.want {
			t.Errorf("%s, want %s", attributes, c.want)
		}
		maxAge := strings.Index(c.want, "Max-Age=")
		end := maxAge + strings.Index(c.want[maxAge:], ";")
		if want := "=" + c.want[:maxAge] + "Max-Age=0" + c.want[end:]; !strings.HasSuffix(lines[1], want) {
			t.Errorf("%s, want %s", lines[1], want)
		}
	}
}

func TestEachTokenHasACookieNameOfItsOwnThatTheNextRequestIsKnownBy(t *testing.T) {
	k := keyring(t, 1)
	named := httpsession.Cookie(func(c *http.Cookie) { c.Name = "__Host-lsn_" })
	brought := strings.ReplaceAll(cookies(k, 5), "pgsplit_", "__Host-lsn_")
	names := map[string]bool{}
	for range 100 {
		c := (&http.Response{Header: serve(nothing, get(brought), k, named)}).Cookies()[0]
		if names[c.Name] || !strings.HasPrefix(c.Name, "__Host-lsn_") {
			t.Fatal(c.Name)
		}
		names[c.Name] = true
		more := get(brought + ";" + c.Name + "=" + k.Seal(at(77, 1)) + " ; x=\"y")
		if tokens, removed := sent(t, k, serve(nothing, more, k, named)); tokens[0].Floors[0].LSN != 77 || len(removed) != 6 {
			t.Fatal(tokens, removed)
		}
	}
}

func TestOtherCookiesAreLeftAlone(t *testing.T) {
	k := keyring(t, 1)
	var stats httpsession.Stats
	h := serve(nothing, get("a=b; pgsplit_; pgsplit_=x; pgsplit_short=x; pgsplit_toolongaa=x; pgsplit_AAAAAAAA=x; pgsplit_aaaaaaa1=x; ;=; "+
		"Pgsplit_aaaaaaaa=x"), k, httpsession.CountIn(&stats))
	if stats.Invalid.Load() != 0 || len(h["Set-Cookie"]) > 0 {
		t.Error(stats.Invalid.Load(), h)
	}
}

func TestATokenTakesThePlaceOfThoseThatProveNothing(t *testing.T) {
	k := keyring(t, 1)
	whole := k.Seal(at(5, 1))
	for what, sealed := range map[string]string{
		"torn":            whole[:len(whole)-3],
		"forged":          keyring(t, 2).Seal(at(5, 1)),
		"changed":         whole[:12] + "AA" + whole[14:],
		"empty":           "",
		"quoted":          `"` + whole + `"`,
		"huge":            strings.Repeat("A", 100_000),
		"not even base64": "<script>",
	} {
		var stats httpsession.Stats
		var logged bytes.Buffer
		logger := slog.New(slog.NewTextHandler(&logged, &slog.HandlerOptions{Level: slog.LevelDebug}))
		r := get(name(0) + "=" + sealed + "; " + cookies(k, 1))
		h := serve(func(_ http.ResponseWriter, r *http.Request) {
			if s, _ := pgsplit.SessionFrom(r.Context()); !s.Changed() {
				t.Errorf("%s: trusted", what)
			}
		}, r, k, httpsession.CountIn(&stats), httpsession.Logger(logger))
		// Its reader goes to the primary, whatever the cluster, and it has what the other cookie says.
		tokens, removed := sent(t, k, h)
		if len(tokens) != 1 || !tokens[0].Floors[0].PinnedUntil.After(time.Now()) || tokens[0].Floors[1].LSN != 1 ||
			!slices.Equal(removed, []string{name(0), name(1)}) {
			t.Errorf("%s: %v, removed %v", what, tokens, removed)
		}
		if stats.Invalid.Load() != 1 || stats.Late.Load() != 0 {
			t.Errorf("%s: %d invalid, %d late", what, stats.Invalid.Load(), stats.Late.Load())
		}
		if !strings.Contains(logged.String(), "token_invalid") {
			t.Errorf("%s: logged %s", what, &logged)
		}
	}
}

func TestHugeCookieHeadersCostNothing(t *testing.T) {
	k := keyring(t, 1)
	var stats httpsession.Stats
	many := strings.Repeat("pgsplit_aaaaaaaa="+keyring(t, 2).Seal(at(5, 1))+"; ", 10_000)
	h := serve(nothing, get(many), k, httpsession.CountIn(&stats), quiet())
	if got := stats.Invalid.Load(); got != 128 {
		t.Errorf("%d tokens were looked at", got)
	}
	if got := len(h["Set-Cookie"]); got != 17 {
		t.Errorf("%d cookies set and removed", got)
	}
	// Those beyond the bound may say anything, so there is no trust.
	tokens, removed := sent(t, k, serve(func(_ http.ResponseWriter, r *http.Request) {
		if s, _ := pgsplit.SessionFrom(r.Context()); !s.Changed() {
			t.Error("trusted")
		}
	}, get(cookies(k, 200)), k))
	if len(tokens) != 1 || !tokens[0].Floors[0].PinnedUntil.After(time.Now()) || tokens[0].Floors[1].LSN != 200 || len(removed) != 16 {
		t.Error(tokens, removed)
	}
}

func TestTheHeaderTakesThePlaceOfCookies(t *testing.T) {
	k := keyring(t, 1)
	r := get(cookies(k, 7))
	r.Header["X-Pgsplit-Token"] = []string{k.Seal(at(3, 1)) + ", " + k.Seal(at(9, 1)), "", k.Seal(at(4, 1)), k.Seal(at(1, 1)) + "," + k.Seal(at(2, 1))}
	h := serve(nothing, r, k, httpsession.Header("x-pgsplit-token"))
	token, err := k.Open(h.Get("X-Pgsplit-Token"))
	if err != nil || token.Floors[0].LSN != 9 || len(h["Set-Cookie"]) > 0 || h.Get("Cache-Control") != "private" {
		t.Error(token, err, h)
	}
	r.Header["X-Pgsplit-Token"] = []string{k.Seal(at(3, 1)), k.Seal(at(9, 1))}
	if h := serve(nothing, r, k, httpsession.Header("x-pgsplit-token")); len(h) > 0 {
		t.Error(h)
	}
}

func TestReadOnlyMethodsAreAHintThatPrimaryOverrides(t *testing.T) {
	for method, readOnly := range map[string]bool{"GET": true, "HEAD": true, "OPTIONS": true, "POST": false, "PUT": false,
		"PATCH": false, "DELETE": false, "CONNECT": false, "BREW": false} {
		serve(func(_ http.ResponseWriter, r *http.Request) {
			if h, _ := pgsplit.HintFrom(r.Context()); h.ReadOnly != readOnly {
				t.Errorf("%s: %+v", method, h)
			}
			if h, _ := pgsplit.HintFrom(pgsplit.Primary(r.Context())); h.ReadOnly || !h.Primary {
				t.Errorf("%s: %+v", method, h)
			}
		}, httptest.NewRequest(method, "/", nil), keyring(t, 1), httpsession.ReadOnlyMethods())
	}
}

func TestAMiddlewareInsideAnotherLeavesTheSessionToIt(t *testing.T) {
	k := keyring(t, 1)
	var outer *pgsplit.Session
	inner := httpsession.Middleware(k, httpsession.ReadOnlyMethods())(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		if s, _ := pgsplit.SessionFrom(r.Context()); s != outer {
			t.Error("another session")
		}
		if h, _ := pgsplit.HintFrom(r.Context()); !h.ReadOnly {
			t.Error("no hint")
		}
	}))
	h := serve(func(w http.ResponseWriter, r *http.Request) {
		outer, _ = pgsplit.SessionFrom(r.Context())
		inner.ServeHTTP(w, r)
	}, get(cookies(k, 5)), k)
	if tokens, _ := sent(t, k, h); len(tokens) != 1 {
		t.Error(tokens)
	}
}

func TestAPanicGoesOnAsItWas(t *testing.T) {
	defer func() {
		if got := recover(); got != http.ErrAbortHandler {
			t.Error(got)
		}
	}()
	serve(func(http.ResponseWriter, *http.Request) { panic(http.ErrAbortHandler) }, get(""), keyring(t, 1))
}

func TestMistakesOfTheProgramPanicAtOnce(t *testing.T) {
	for what, make := range map[string]func(){
		"no keyring": func() { httpsession.Middleware(nil) },
		"no keys":    func() { httpsession.Middleware(&pgsplit.Keyring{}) },
		"no cookie name": func() {
			httpsession.Middleware(keyring(t, 1), httpsession.Cookie(func(c *http.Cookie) { c.Name = "a b" }))
		},
	} {
		func() {
			defer func() {
				if recover() == nil {
					t.Error(what)
				}
			}()
			make()
		}()
	}
}

// plain hides everything but http.ResponseWriter.
type plain struct{ http.ResponseWriter }

func TestTheWriterHasTheInterfacesOfTheOneInside(t *testing.T) {
	k := keyring(t, 1)
	type f struct{ http.Flusher }
	type h struct{ http.Hijacker }
	type p struct{ http.Pusher }
	inside := plain{httptest.NewRecorder()}
	writers := []http.ResponseWriter{inside,
		struct {
			plain
			f
		}{plain: inside},
		struct {
			plain
			h
		}{plain: inside},
		struct {
			plain
			p
		}{plain: inside},
		struct {
			plain
			f
			h
		}{plain: inside},
		struct {
			plain
			f
			p
		}{plain: inside},
		struct {
			plain
			h
			p
		}{plain: inside},
		struct {
			plain
			f
			h
			p
		}{plain: inside},
	}
	has := func(w http.ResponseWriter) (found []string) {
		for _, i := range []reflect.Type{reflect.TypeFor[http.Flusher](), reflect.TypeFor[http.Hijacker](), reflect.TypeFor[http.Pusher]()} {
			if reflect.TypeOf(w).Implements(i) {
				found = append(found, i.Name())
			}
		}
		return found
	}
	for _, inside := range writers {
		httpsession.Middleware(k)(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			if !slices.Equal(has(w), has(inside)) {
				t.Errorf("%v, and inside %v", has(w), has(inside))
			}
			// What is always there.
			_ = w.(io.ReaderFrom)
			_ = w.(io.StringWriter)
			_ = w.(interface{ CloseNotify() <-chan bool })
		})).ServeHTTP(inside, get(""))
	}
}

// unwrapping is another middleware's writer, which has nothing but Unwrap.
type unwrapping struct{ inside http.ResponseWriter }

func (u unwrapping) Header() http.Header         { return u.inside.Header() }
func (u unwrapping) Write(b []byte) (int, error) { return u.inside.Write(b) }
func (u unwrapping) WriteHeader(status int)      { u.inside.WriteHeader(status) }
func (u unwrapping) Unwrap() http.ResponseWriter { return u.inside }

func TestTheResponseControllerWorksThroughTheWriter(t *testing.T) {
	k := keyring(t, 1)
	use := http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		c := http.NewResponseController(w)
		for what, err := range map[string]error{
			"SetReadDeadline":  c.SetReadDeadline(time.Now().Add(time.Minute)),
			"SetWriteDeadline": c.SetWriteDeadline(time.Now().Add(time.Minute)),
			"EnableFullDuplex": c.EnableFullDuplex(),
			"Flush":            c.Flush(),
		} {
			if err != nil {
				t.Errorf("%s: %v", what, err)
			}
		}
		conn, _, err := c.Hijack()
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		_, _ = io.WriteString(conn, "0\r\n\r\n") // the end of the chunks
	})
	for what, wrap := range map[string]func(http.Handler) http.Handler{
		"alone": httpsession.Middleware(k),
		"inside of another's writer": func(next http.Handler) http.Handler {
			return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				httpsession.Middleware(k)(next).ServeHTTP(unwrapping{w}, r)
			})
		},
		"around another's writer": func(next http.Handler) http.Handler {
			return httpsession.Middleware(k)(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				next.ServeHTTP(unwrapping{w}, r)
			}))
		},
	} {
		t.Run(what, func(t *testing.T) {
			server := httptest.NewServer(wrap(use))
			defer server.Close()
			_, h := fetch(t, caller(t), http.MethodGet, server.URL, "Cookie", cookies(k, 5))
			if tokens, _ := sent(t, k, h); len(tokens) != 1 {
				t.Error(h)
			}
		})
	}
}

func TestHTTP2CanPushAndFlushThroughTheWriter(t *testing.T) {
	k := keyring(t, 1)
	server := httptest.NewUnstartedServer(httpsession.Middleware(k)(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if _, ok := w.(http.Hijacker); ok || r.ProtoMajor != 2 {
			t.Error(r.Proto, ok)
		}
		// Go's own client refuses pushes, and says so in a setting that the server obeys.
		if err := w.(http.Pusher).Push("/style.css", nil); err == nil || !strings.Contains(err.Error(), "not supported") {
			t.Error(err)
		}
		w.(http.Flusher).Flush()
	})))
	server.EnableHTTP2 = true
	server.StartTLS()
	defer server.Close()
	_, h := fetch(t, server.Client(), http.MethodGet, server.URL, "Cookie", cookies(k, 5))
	if tokens, _ := sent(t, k, h); len(tokens) != 1 || !strings.Contains(fmt.Sprint(h), "Secure") {
		t.Error(h)
	}
}

func TestCloseNotifyWorksWithoutOneInside(t *testing.T) {
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	serve(func(w http.ResponseWriter, _ *http.Request) {
		gone := w.(interface{ CloseNotify() <-chan bool }).CloseNotify()
		cancel()
		<-gone
	}, get("").WithContext(ctx), keyring(t, 1))
}
