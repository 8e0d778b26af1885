package pgsplit_test

import (
	"bytes"
	"context"
	"database/sql"
	"encoding/base64"
	"errors"
	"fmt"
	"math"
	"sync"
	"testing"
	"time"

	"github.com/pgsplit/pgsplit"
	"github.com/pgsplit/pgsplit/pgsplittest"
)

// hostile is a cluster whose only replica lacks the second row, which the token's caller has written, and would be waited
// for as good as for ever.
type hostile struct {
	cluster *pgsplittest.Cluster
	db      *sql.DB
	keyring *pgsplit.Keyring
	token   pgsplit.Token
}

func newHostile(t testing.TB) (*hostile, context.Context) {
	t.Helper()
	ctx := patient(t)
	h := &hostile{cluster: pgsplittest.Start(t), keyring: keyringOf(t, 1)}
	h.db = open(t, with(h.cluster.ProxyDSN(), "replica_max_wait=1h"))
	exec(t, ctx, h.db, "create table notes (id int primary key, body text)")
	exec(t, ctx, h.db, "insert into notes values (1)")
	if err := h.cluster.CatchUp(ctx); err != nil {
		t.Fatal(err)
	}
	if err := h.cluster.Replicas[0].PauseReplay(ctx); err != nil {
		t.Fatal(err)
	}
	session := pgsplit.NewSession()
	exec(t, pgsplit.WithSession(ctx, session), h.db, "insert into notes values (2)")
	h.token = tokenOf(t, ctx, session)
	return h, ctx
}

func keyringOf(t testing.TB, seed byte) *pgsplit.Keyring {
	t.Helper()
	k, err := pgsplit.NewKeyring(bytes.Repeat([]byte{seed}, 32))
	if err != nil {
		t.Fatal(err)
	}
	return k
}

// session is what a server makes of the text that a caller presents.
func (h *hostile) session(t testing.TB, text string) *pgsplit.Session {
	t.Helper()
	token, err := h.keyring.Open(text)
	switch {
	case err == nil:
		return pgsplit.SessionFromToken(token)
	case !errors.Is(err, pgsplit.ErrInvalidToken):
		t.Errorf("%q: %v", text, err)
	}
	return pgsplit.SessionWithoutTrust()
}

// read reads in a session, without a deadline that would bound a wait.
func (h *hostile) read(t testing.TB, s *pgsplit.Session) (shown string, err error) {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		err = h.db.QueryRowContext(pgsplit.ReadOnly(pgsplit.WithSession(ctx, s)), whatAndWhere).Scan(&shown)
	}()
	select {
	case <-ended:
	case <-time.After(time.Minute):
		cancel()
		<-ended
		t.Fatal("the read waits")
	}
	return shown, err
}

// resume lets the replica have everything.
func (h *hostile) resume(t testing.TB, ctx context.Context) {
	t.Helper()
	if err := h.cluster.Replicas[0].ResumeReplay(ctx); err != nil {
		t.Fatal(err)
	}
	if err := h.cluster.CatchUp(ctx); err != nil {
		t.Fatal(err)
	}
}

func TestACallerWhoseTokenWasTamperedWithReadsOnThePrimary(t *testing.T) {
	h, _ := newHostile(t)
	sealed := h.keyring.Seal(h.token)
	raw, err := base64.RawURLEncoding.DecodeString(sealed)
	if err != nil {
		t.Fatal(err)
	}
	plain, err := h.token.MarshalText()
	if err != nil {
		t.Fatal(err)
	}
	texts := map[string]string{
		"nothing":         "",
		"sealed by other": keyringOf(t, 9).Seal(h.token),
		"not sealed":      string(plain),
		"twice":           sealed + sealed,
	}
	for bit := range 8 * len(raw) {
		changed := bytes.Clone(raw)
		changed[bit/8] ^= 1 << (bit % 8)
		texts[fmt.Sprint("bit ", bit)] = base64.RawURLEncoding.EncodeToString(changed)
	}
	for size := range sealed {
		texts[fmt.Sprint("first ", size)], texts[fmt.Sprint("last ", size)] = sealed[:size], sealed[len(sealed)-size:]
	}
	for name, text := range texts {
		s := h.session(t, text)
		if got, err := h.read(t, s); got != "2 false" || err != nil {
			t.Errorf("%s: %s, %v", name, got, err)
		}
		if !s.Changed() {
			t.Errorf("%s: no token takes its place", name)
		}
	}
	if stats := connectorOf(t, h.db).Stats(); stats.Reasons["session"] < uint64(len(texts)) {
		t.Errorf("%d texts, %v", len(texts), stats.Reasons)
	}
}

// What lies within a trusted program's reach, such as a job's payload, can be damaged as well. The damage may ask for less
// or more than before; nothing is waited for that no server has.
func TestAnUnsealedTokenWithAnyBitChangedIsRefusedOrReadOnce(t *testing.T) {
	h, ctx := newHostile(t)
	h.resume(t, ctx)
	h.token.Floors[0].PinnedUntil = time.Now().Add(time.Hour)
	h.token.Floors[0].Instance = 7
	text, err := h.token.MarshalText()
	if err != nil {
		t.Fatal(err)
	}
	raw, err := base64.RawURLEncoding.DecodeString(string(text))
	if err != nil {
		t.Fatal(err)
	}
	refused, ahead := 0, 0
	for bit := range 8 * len(raw) {
		changed := bytes.Clone(raw)
		changed[bit/8] ^= 1 << (bit % 8)
		var token pgsplit.Token
		if err := token.UnmarshalText([]byte(base64.RawURLEncoding.EncodeToString(changed))); err != nil {
			if !errors.Is(err, pgsplit.ErrInvalidToken) {
				t.Errorf("bit %d: %v", bit, err)
			}
			refused++
			continue
		}
		s := pgsplit.SessionFromToken(token)
		got, err := h.read(t, s)
		own, _ := token.Floor(h.token.Floors[0].System)
		if own.Timeline > h.token.Floors[0].Timeline {
			// This primary has been put aside, for all that the caller knows.
			ahead++
			if !errors.Is(err, pgsplit.ErrNoFreshReplica) {
				t.Errorf("bit %d: %+v: %s, %v", bit, token, got, err)
			}
		} else if got != "2 false" && got != "2 true" || err != nil {
			t.Errorf("bit %d: %+v: %s, %v", bit, token, got, err)
		}
		if _, err := s.Token(ctx); err != nil {
			t.Errorf("bit %d: %v", bit, err)
		}
	}
	t.Logf("of %d tokens %d are refused, %d come from a later timeline", 8*len(raw), refused, ahead)
	if refused == 0 || ahead == 0 || refused+ahead == 8*len(raw) {
		t.Error("a kind is missing")
	}
}

// verdict is what becomes of a forged token: what a read shows, and how often which counter rises.
type verdict struct {
	shown         string
	err           error
	lost, foreign uint64
}

func TestAForgedTokenIsNotObeyed(t *testing.T) {
	h, ctx := newHostile(t)
	own := h.token.Floors[0]
	forged := func(change func(*pgsplit.TokenFloor)) []pgsplit.TokenFloor {
		f := own
		change(&f)
		return []pgsplit.TokenFloor{f}
	}
	primary := verdict{shown: "2 false"}
	lost := verdict{shown: "2 false", lost: 1}
	foreign := verdict{shown: "1 true", foreign: 1}
	putAside := verdict{err: pgsplit.ErrNoFreshReplica}
	cases := map[string]struct {
		floors []pgsplit.TokenFloor
		want   verdict
	}{
		"a little in the future": {forged(func(f *pgsplit.TokenFloor) { f.LSN += 1 << 20 }), lost},
		"far in the future":      {forged(func(f *pgsplit.TokenFloor) { f.LSN += 1 << 40 }), lost},
		"FFFFFFFF/FFFFFFFE":      {forged(func(f *pgsplit.TokenFloor) { f.LSN = math.MaxUint64 - 1 }), lost},
		"FFFFFFFF/FFFFFFFF":      {forged(func(f *pgsplit.TokenFloor) { f.LSN = math.MaxUint64 }), lost},
		"of no timeline":         {forged(func(f *pgsplit.TokenFloor) { f.Timeline, f.LSN = 0, math.MaxUint64 }), lost},
		"pinned for ever":        {forged(func(f *pgsplit.TokenFloor) { f.PinnedUntil = time.Unix(math.MaxUint32, 0) }), primary},
		"of the next timeline":   {forged(func(f *pgsplit.TokenFloor) { f.Timeline++ }), putAside},
		"of the last timeline":   {forged(func(f *pgsplit.TokenFloor) { f.Timeline, f.LSN = math.MaxUint32, math.MaxUint64 }), putAside},
		"of another cluster":     {forged(func(f *pgsplit.TokenFloor) { f.System++; f.LSN = math.MaxUint64 }), foreign},
		"of three others": {[]pgsplit.TokenFloor{{System: 7, LSN: math.MaxUint64}, {System: 8, Timeline: math.MaxUint32},
			{System: 9, PinnedUntil: time.Unix(math.MaxUint32, 0)}}, foreign},
	}
	for name, c := range cases {
		t.Run(name, func(t *testing.T) {
			before := connectorOf(t, h.db).Stats()
			s := h.session(t, h.keyring.Seal(pgsplit.Token{Floors: c.floors}))
			shown, err := h.read(t, s)
			after := connectorOf(t, h.db).Stats()
			got := verdict{shown: shown, lost: after.LostTokens - before.LostTokens, foreign: after.ForeignTokens - before.ForeignTokens}
			if errors.Is(err, c.want.err) {
				got.err = c.want.err
			}
			if got != c.want || c.want.err == nil && err != nil {
				t.Errorf("%+v, %v, want %+v", got, err, c.want)
			}
			if c.want.lost == 0 {
				return
			}
			// The caller goes on with a token that nobody stumbles over.
			again := tokenOf(t, ctx, s)
			if f, _ := again.Floor(own.System); !s.Changed() || f.LSN < own.LSN || f.LSN >= c.floors[0].LSN || f.Timeline != own.Timeline {
				t.Errorf("the new token is %+v", again)
			}
		})
	}
	// What was claimed does not stay with the process: the next caller reads on the replica.
	if got, err := h.read(t, pgsplit.NewSession()); got != "1 true" || err != nil {
		t.Errorf("a caller without history: %s, %v", got, err)
	}
	h.resume(t, ctx)
	if got, err := h.read(t, pgsplit.SessionFromToken(h.token)); got != "2 true" || err != nil {
		t.Errorf("the caller with its own token, once the replica has all: %s, %v", got, err)
	}
	// These ask for where the primary is now, which a replica that runs has.
	for name, floors := range map[string][]pgsplit.TokenFloor{
		"of an instance that isn't": forged(func(f *pgsplit.TokenFloor) { f.Instance, f.LSN = math.MaxUint32, 1 }),
		"to be resolved":            forged(func(f *pgsplit.TokenFloor) { f.Resolve, f.LSN = true, 0 }),
	} {
		if got, err := h.read(t, h.session(t, h.keyring.Seal(pgsplit.Token{Floors: floors}))); got != "2 true" && got != "2 false" || err != nil {
			t.Errorf("%s: %s, %v", name, got, err)
		}
	}
}

// A write of a caller who claims a timeline that does not exist is refused, and costs nobody anything else.
func TestAForgedTimelineEndsWithItsCaller(t *testing.T) {
	h, ctx := newHostile(t)
	h.token.Floors[0].Timeline++
	s := pgsplit.SessionFromToken(h.token)
	if _, err := h.db.ExecContext(pgsplit.WithSession(ctx, s), "insert into notes values (3)"); !errors.Is(err, pgsplit.ErrNoPrimary) {
		t.Errorf("a write: %v", err)
	}
	exec(t, pgsplit.WithSession(ctx, pgsplit.NewSession()), h.db, "insert into notes values (3)")
}

// The highest position there is costs the primary what a read there costs in any session, and no question: no server can have
// written that much since it was last asked.
func TestATokenWithTheHighestPositionCostsThePrimaryTheCallersOwnReads(t *testing.T) {
	const requests, parallel = 40, 8
	h, ctx := newHostile(t)
	forged := pgsplit.Token{Floors: []pgsplit.TokenFloor{h.token.Floors[0]}}
	forged.Floors[0].LSN = math.MaxUint64
	honest := pgsplit.Token{Floors: []pgsplit.TokenFloor{{System: forged.Floors[0].System, PinnedUntil: time.Now().Add(time.Hour)}}}
	request := func(token pgsplit.Token) {
		if got, err := h.read(t, h.session(t, h.keyring.Seal(token))); got != "2 false" || err != nil {
			t.Errorf("%s, %v", got, err)
		}
	}
	costs := func(token pgsplit.Token) int64 {
		return roundTrips(t, h.cluster, func() error {
			for range requests {
				request(token)
			}
			return nil
		})
	}
	costs(honest) // connections, and a first sample
	if mine, other := costs(honest), costs(forged); other > mine {
		t.Errorf("%d requests take %d round trips, %d with an honest token", requests, other, mine)
	} else {
		t.Logf("%d requests take %d round trips, %d with an honest token", requests, other, mine)
	}
	for range 2 * parallel {
		hold(t, ctx, h.db)
	}
	together := roundTrips(t, h.cluster, func() error {
		var callers sync.WaitGroup
		for range parallel {
			callers.Go(func() {
				for range requests / parallel {
					request(forged)
				}
			})
		}
		callers.Wait()
		return nil
	})
	if together > 2*requests {
		t.Errorf("%d at a time: %d round trips", parallel, together)
	} else {
		t.Logf("%d requests, %d at a time: %d round trips", requests, parallel, together)
	}
}
