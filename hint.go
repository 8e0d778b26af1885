package pgsplit

import (
	"context"
	"time"
)

// Hint is what a context says about where its statements may run. It is immutable once it is in a context.
type Hint struct {
	// ReadOnly is set by ReadOnly: the statement may run on a replica, and must not write.
	ReadOnly bool
	// Primary is set by Primary: the statement runs on the primary, as it would without any hint.
	Primary bool
	// Floor is the least position that a read must see; zero asks for none.
	Floor LSN
	// MaxWait overrides Config.MaxWait if HasMaxWait.
	MaxWait    time.Duration
	HasMaxWait bool
	// MaxStaleness is how old what a read sees may be; zero sets no bound.
	MaxStaleness time.Duration
	// Prefer is the label of the replicas to try first.
	Prefer string
	// ReplicaOnly forbids the primary as a fallback.
	ReplicaOnly bool

	scope *scope // the sessions around the context
}

type hintKey struct{}

// noHint is what a context without any hint says.
var noHint Hint

// hintOf reads the hint without copying it: it must not be changed.
func hintOf(ctx context.Context) *Hint {
	if h, ok := ctx.Value(hintKey{}).(*Hint); ok {
		return h
	}
	return &noHint
}

// HintFrom is the hint that ctx carries, and whether it carries one. A hint is only a value in a context: code under
// test can be checked with it without any server.
func HintFrom(ctx context.Context) (Hint, bool) {
	h := hintOf(ctx)
	return *h, h != &noHint
}

func withHint(ctx context.Context, change func(*Hint)) context.Context {
	h := *hintOf(ctx)
	change(&h)
	return context.WithValue(ctx, hintKey{}, &h)
}

// ReadOption is an option of ReadOnly.
type ReadOption func(*Hint)

// ReadOnly returns a context whose statements may be served by a replica and are read only wherever they run: a write
// fails with ErrReadOnly. It overrides an earlier Primary. Options replace those of an enclosing ReadOnly; floors take
// the maximum.
//
// Given to BeginTx, the whole transaction is read only and stays on one server.
func ReadOnly(ctx context.Context, opts ...ReadOption) context.Context {
	return withHint(ctx, func(h *Hint) {
		h.ReadOnly, h.Primary = true, false
		for _, opt := range opts {
			opt(h)
		}
	})
}

// Primary returns a context whose statements run on the primary, read-write. It overrides an earlier ReadOnly.
func Primary(ctx context.Context) context.Context {
	return withHint(ctx, func(h *Hint) { h.ReadOnly, h.Primary = false, true })
}

// WithLSN returns a context whose ReadOnly reads see at least what had been committed at lsn. It routes nothing by
// itself, and an enclosing higher floor stays. A bare position does not know its timeline: after a failover that lost
// commits, a server of the new timeline can pass it without having them.
func WithLSN(ctx context.Context, lsn LSN) context.Context {
	return withHint(ctx, AfterLSN(lsn))
}

// AfterLSN is WithLSN as an option of one ReadOnly.
func AfterLSN(lsn LSN) ReadOption {
	return func(h *Hint) { h.Floor = max(h.Floor, lsn) }
}

// MaxWait bounds how long one read waits, over all replicas together, for a replica to reach its floor before the
// primary answers. It never takes more than half of the time left until the context's deadline. The default is
// Config.MaxWait; zero never waits.
func MaxWait(d time.Duration) ReadOption {
	return func(h *Hint) { h.MaxWait, h.HasMaxWait = max(d, 0), true }
}

// MaxStaleness keeps a read off replicas that are not proven to have all that the primary had d ago.
func MaxStaleness(d time.Duration) ReadOption {
	return func(h *Hint) { h.MaxStaleness = max(d, 0) }
}

// Prefer tries the replicas with this label first.
func Prefer(label string) ReadOption {
	return func(h *Hint) { h.Prefer = label }
}

// ReplicaOnly forbids the primary as a fallback: where no replica can serve the read it fails with ErrNoReplica, or
// with ErrNoFreshReplica if one could but is not proven to have reached the floor.
func ReplicaOnly() ReadOption {
	return func(h *Hint) { h.ReplicaOnly = true }
}
