package httpsession

import (
	"context"
	"log/slog"
	"math/rand/v2"
	"net/http"
	"slices"
	"sync"
	"time"

	"github.com/pgsplit/pgsplit"
)

// exchange is one request and its response. Its handler's goroutine owns it, but for first, which may be called from
// any: handlers flush from goroutines of their own.
type exchange struct {
	m       *middleware
	request *http.Request // as the handler gets it
	header  http.Header   // the response's
	session *pgsplit.Session
	pin     time.Duration // PinOnStart

	received []parcel      // what could be opened
	lost     []string      // the cookies of what could not be
	unread   bool          // there were more
	merged   pgsplit.Token // all received

	leaving sync.Once
	told    pgsplit.Token // what the caller knows; leave changes it
	left    bool          // it has a token of the session; leave changes it
}

type exchangeKey struct{}

// parcel is a token in the cookie that brought it.
type parcel struct {
	cookie string // empty if it came in a header
	token  pgsplit.Token
}

// receive begins an exchange with what the request brings.
func (m *middleware) receive(r *http.Request) *exchange {
	x := &exchange{m: m}
	for cookie, sealed := range m.tokens(r) {
		if len(x.received)+len(x.lost) == maxOpened {
			x.unread = true
			break
		}
		token, err := m.keyring.Open(sealed)
		if err != nil {
			m.stats.Invalid.Add(1)
			m.log(r, slog.LevelDebug, "token_invalid", "error", err)
			x.lost = append(x.lost, cookie)
			continue
		}
		x.received = append(x.received, parcel{cookie, token})
	}
	for _, p := range x.received {
		x.merged = x.merged.Merge(p.token)
	}
	if x.distrusted() {
		x.session = pgsplit.SessionWithoutTrust()
	} else {
		x.session, x.told = pgsplit.SessionFromToken(x.merged), x.merged
	}
	return x
}

// join adds what a middleware, this exchange's own or one inside of it, asks for.
func (x *exchange) join(m *middleware) {
	if m.monotonic {
		x.session.CarryReads()
	}
	x.pin = max(x.pin, m.pin)
}

// first is called before the header leaves, with the status that it will have.
func (x *exchange) first(status int) {
	x.leaving.Do(func() { x.leave(status) })
}

// finish is called when the handler has returned, or panics.
func (x *exchange) finish() {
	ended := false
	x.leaving.Do(func() {
		x.leave(0)
		ended = true
	})
	if !ended && x.late(time.Now()) {
		x.m.stats.Late.Add(1)
		x.m.log(x.request, slog.LevelWarn, "token_late")
	}
}

// leave puts the session's token into the header, if it has something new to say.
func (x *exchange) leave(status int) {
	if x.streams(status) {
		x.session.Pin(x.pin)
	}
	token, changed := x.merged, false
	if x.session.Changed() {
		// Without cancel: a caller that only closed its sending side still reads the answer, and so does one whose
		// handler's time is up. Token itself takes no longer than 2 seconds.
		known, err := x.session.Token(context.WithoutCancel(x.request.Context()))
		if err != nil {
			x.m.stats.Unsure.Add(1)
			x.m.log(x.request, slog.LevelWarn, "token_unsure", "error", err)
		}
		if x.distrusted() {
			known = known.Merge(x.merged) // what could be read, the session knows nothing of
		}
		if changed = readOn(known) || !same(known, x.told, time.Now()); changed {
			token, x.told, x.left = known, known, true
		}
	}
	if !changed {
		if len(x.received) <= maxCookies {
			return
		}
		x.m.stats.Merged.Add(1)
	}
	x.m.stats.Sent.Add(1)
	x.m.send(x.header, x.request, token, x.outdated())
	if len(x.header["Cache-Control"]) == 0 {
		x.header.Set("Cache-Control", "private")
	}
}

// readOn tells whether a token says where its caller read last. Such a one leaves even if it is the one that came: what was
// read there now is more than before, and the response to a parallel request may remove the cookie that came.
func readOn(t pgsplit.Token) bool {
	return slices.ContainsFunc(t.Floors, func(f pgsplit.TokenFloor) bool { return f.Instance != 0 })
}

// streams tells whether PinOnStart applies to a response that begins with the status.
func (x *exchange) streams(status int) bool {
	return x.pin > 0 && !safe(x.request.Method) && status >= 200 && status < 300 && status != http.StatusNoContent
}

// outdated are the cookies that the response's token takes the place of: all that were looked at. The session went on
// from those that could be read, even to less if one claimed what never was.
//
// Where there are more than one response removes, which of them is left to chance: parallel responses to one caller
// would otherwise all remove the same ones, and each adds one.
func (x *exchange) outdated() []string {
	cookies := slices.Clone(x.lost)
	for _, i := range rand.Perm(len(x.received)) {
		cookies = append(cookies, x.received[i].cookie)
	}
	return cookies
}

// distrusted tells whether the request brought something that says nothing.
func (x *exchange) distrusted() bool { return x.unread || len(x.lost) > 0 }

// late tells whether the session has something to say that the caller has not been told, and will not find out.
func (x *exchange) late(now time.Time) bool {
	if !x.session.Changed() {
		return false
	}
	every, _ := x.told.Floor(0) // what is said about all clusters
	for _, f := range x.session.TokenNow().Floors {
		told, _ := x.told.Floor(f.System)
		switch {
		case told.PinnedUntil.After(now), every.PinnedUntil.After(now):
		case (told.Resolve || every.Resolve) && !x.left: // its next request asks the primary, as this one did
		case f.Instance != 0 && (f.Instance != told.Instance || !x.left),
			!covers(pgsplit.Token{Floors: []pgsplit.TokenFloor{told}}, pgsplit.Token{Floors: []pgsplit.TokenFloor{f}}, now):
			return true
		}
	}
	return false
}

// covers tells whether a asks for everything that b asks for.
func covers(a, b pgsplit.Token, now time.Time) bool { return same(a.Merge(b), a, now) }

// same tells whether two tokens ask for the same.
func same(a, b pgsplit.Token, now time.Time) bool {
	return slices.EqualFunc(asking(a, now), asking(b, now), func(a, b pgsplit.TokenFloor) bool {
		until := a.PinnedUntil
		a.PinnedUntil = b.PinnedUntil
		return a == b && until.Equal(b.PinnedUntil)
	})
}

// asking are the floors that ask for something now.
func asking(t pgsplit.Token, now time.Time) []pgsplit.TokenFloor {
	var floors []pgsplit.TokenFloor
	for _, f := range t.Floors {
		if !f.PinnedUntil.After(now) {
			f.PinnedUntil = time.Time{}
		}
		if f.LSN != 0 || f.Instance != 0 || f.Resolve || !f.PinnedUntil.IsZero() {
			floors = append(floors, f)
		}
	}
	return floors
}
