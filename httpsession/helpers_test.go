package httpsession_test

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/http/cookiejar"
	"net/http/httptest"
	"net/url"
	"strings"
	"testing"
	"time"

	"github.com/pgsplit/pgsplit"
	"github.com/pgsplit/pgsplit/httpsession"
)

// system is a cluster that no test has met.
const system = 7_400_000_000_000_000_001

func keyring(t testing.TB, seed byte) *pgsplit.Keyring {
	t.Helper()
	k, err := pgsplit.NewKeyring(bytes.Repeat([]byte{seed}, 32))
	if err != nil {
		t.Fatal(err)
	}
	return k
}

// at is a token for the unknown cluster, issued at that second.
func at(lsn pgsplit.LSN, second int64) pgsplit.Token {
	return pgsplit.Token{
		Issued: time.Unix(second, 0),
		Floors: []pgsplit.TokenFloor{{System: system, Timeline: 1, LSN: lsn}},
	}
}

// name is the nth cookie's.
func name(n int) string { return "pgsplit_aaaaaa" + string(rune('a'+n/26)) + string(rune('a'+n%26)) }

// cookies is a Cookie header with n tokens, of which the nth has position n and was issued at second n, the newest
// first.
func cookies(k *pgsplit.Keyring, n int) string {
	var pairs []string
	for ; n > 0; n-- {
		pairs = append(pairs, name(n)+"="+k.Seal(at(pgsplit.LSN(n), int64(n))))
	}
	return strings.Join(pairs, "; ")
}

func get(cookie string) *http.Request {
	r := httptest.NewRequest(http.MethodGet, "/", nil)
	if cookie != "" {
		r.Header.Set("Cookie", cookie)
	}
	return r
}

// sent are the cookies that a response sets, and the names of those that it removes.
func sent(t testing.TB, k *pgsplit.Keyring, h http.Header) (tokens []pgsplit.Token, removed []string) {
	t.Helper()
	for _, c := range (&http.Response{Header: h}).Cookies() {
		if c.MaxAge < 0 {
			removed = append(removed, c.Name)
			continue
		}
		token, err := k.Open(c.Value)
		if err != nil {
			t.Fatalf("%s: %v", c, err)
		}
		tokens = append(tokens, token)
	}
	return tokens, removed
}

// presented is what the caller's next request would ask for, and in how many cookies.
func presented(t testing.TB, k *pgsplit.Keyring, jar http.CookieJar, at string) (token pgsplit.Token, n int) {
	t.Helper()
	u, err := url.Parse(at)
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range jar.Cookies(u) {
		of, err := k.Open(c.Value)
		if err != nil {
			t.Fatal(err)
		}
		token = token.Merge(of)
		n++
	}
	return token, n
}

// caller is a browser.
func caller(t testing.TB) *http.Client {
	t.Helper()
	jar, err := cookiejar.New(nil)
	if err != nil {
		t.Fatal(err)
	}
	transport := &http.Transport{}
	t.Cleanup(transport.CloseIdleConnections)
	return &http.Client{Jar: jar, Transport: transport, Timeout: time.Minute}
}

// fetch returns the body of a response, and its header.
func fetch(t testing.TB, client *http.Client, method, url string, header ...string) (string, http.Header) {
	t.Helper()
	r, err := http.NewRequest(method, url, nil)
	if err != nil {
		t.Fatal(err)
	}
	for i := 0; i < len(header); i += 2 {
		r.Header.Set(header[i], header[i+1])
	}
	response, err := client.Do(r)
	if err != nil {
		t.Fatal(err)
	}
	defer response.Body.Close()
	body, err := io.ReadAll(response.Body)
	if err != nil {
		t.Fatal(err)
	}
	return string(body), response.Header
}

// recovering answers panics as middlewares around a whole program do.
func recovering(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		defer func() {
			if cause := recover(); cause != nil {
				http.Error(w, fmt.Sprint(cause), http.StatusInternalServerError)
			}
		}()
		next.ServeHTTP(w, r)
	})
}

// endings are the ways in which handlers answer.
var endings = map[string]func(w http.ResponseWriter, r *http.Request){
	"nothing": func(http.ResponseWriter, *http.Request) {},
	"WriteHeader": func(w http.ResponseWriter, _ *http.Request) {
		w.WriteHeader(http.StatusCreated)
	},
	"Write":       func(w http.ResponseWriter, _ *http.Request) { _, _ = w.Write([]byte("done")) },
	"WriteString": func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, "done") },
	"redirect":    func(w http.ResponseWriter, r *http.Request) { http.Redirect(w, r, "/seen", http.StatusSeeOther) },
	"error":       func(w http.ResponseWriter, _ *http.Request) { http.Error(w, "no", http.StatusConflict) },
	"Flush":       func(w http.ResponseWriter, _ *http.Request) { w.(http.Flusher).Flush() },
	"Flush of the controller": func(w http.ResponseWriter, _ *http.Request) {
		if err := http.NewResponseController(w).Flush(); err != nil {
			panic(err)
		}
		_, _ = io.WriteString(w, "done")
	},
	"Copy": func(w http.ResponseWriter, _ *http.Request) {
		_, _ = io.Copy(w, io.LimitReader(neverending{}, 100_000))
	},
	"informational first": func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Link", "</style.css>; rel=preload")
		w.WriteHeader(http.StatusEarlyHints)
		w.WriteHeader(http.StatusOK)
	},
	"Hijack": func(w http.ResponseWriter, _ *http.Request) {
		conn, rw, err := w.(http.Hijacker).Hijack()
		if err != nil {
			panic(err)
		}
		defer conn.Close()
		_, _ = io.WriteString(rw, "HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 0\r\n")
		_ = w.Header().Write(rw)
		_, _ = io.WriteString(rw, "\r\n")
		_ = rw.Flush()
	},
	"panic": func(http.ResponseWriter, *http.Request) { panic("oh") },
}

// neverending is a reader without WriteTo.
type neverending struct{}

func (neverending) Read(b []byte) (int, error) {
	return copy(b, bytes.Repeat([]byte{'x'}, len(b))), nil
}

// quiet keeps what is expected out of the tests' output.
func quiet() httpsession.Option { return httpsession.Logger(slog.New(slog.DiscardHandler)) }

// patient bounds a test.
func patient(t testing.TB) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
	t.Cleanup(cancel)
	return ctx
}
