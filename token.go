package pgsplit

import (
	"cmp"
	"crypto/hmac"
	"crypto/sha256"
	"encoding/base64"
	"encoding/binary"
	"fmt"
	"math"
	"math/bits"
	"slices"
	"strings"
	"time"
)

// maxTokenFloors bounds the text of a token. What becomes of a fifth cluster says Token.Floor.
const maxTokenFloors = 4

// lastTokenTime is the last time that a token can hold, 2106-02-07 06:28:15 UTC.
var lastTokenTime = time.Unix(math.MaxUint32, 0).UTC()

// Token is a session's floors in a form that travels to another process: in a cookie or a header, sealed by a Keyring,
// or in the payload of a job, as text.
//
// A token has one canonical form, which Merge, Keyring.Open and UnmarshalText return and which Keyring.Seal and
// MarshalText write, whatever they are given:
//   - the floors are sorted by System, two of one cluster are merged, and of more than 4 clusters the 4 with the
//     highest System are kept, which are the ones that initdb made last;
//   - times are whole seconds in UTC. Issued is rounded down. PinnedUntil is rounded up, because a pin must not end
//     early. What lies before 1970-01-01 00:00:01 is the zero time, what lies after 2106-02-07 06:28:15 is that second.
//
// A canonical token comes back from its text exactly, and no two texts are the same token.
type Token struct {
	// Issued is when the session last said something, by the clock of the process that wrote it; zero if unknown.
	Issued time.Time

	// Floors are at most 4, in ascending order of System.
	Floors []TokenFloor
}

// TokenFloor is what a reader of one cluster must see.
type TokenFloor struct {
	System      uint64    // system_identifier of the cluster
	Timeline    uint32    // the timeline that LSN is on; 0: unknown
	LSN         LSN       // 0: none
	Instance    uint32    // short hash of the instance that was read last; 0: none, or Resolve
	PinnedUntil time.Time // reads go to the primary until then; zero: not pinned
	Resolve     bool      // LSN may not be all: the receiver takes the primary's position once
}

// IsZero tells whether the token has no floors, so that there is nothing to carry.
func (t Token) IsZero() bool { return len(t.Floors) == 0 }

// Floor returns the token's floor for a cluster, and whether it has one.
//
// A token with 4 floors may have lost those of clusters whose System is lower than all that it has. For such a cluster
// Floor returns one that is pinned for as long as a token can say: its reads go to the primary. So a caller of more
// than 4 clusters reads more from primaries, and never something stale.
func (t Token) Floor(system uint64) (TokenFloor, bool) {
	var floor TokenFloor
	found, lowest := false, true
	for _, f := range t.Floors {
		switch {
		case f.System < system && f.System != anyCluster:
			lowest = false
		case f.System == system && found:
			floor = floor.merge(f)
		case f.System == system:
			floor, found = f, true
		}
	}
	if !found && lowest && len(t.Floors) >= maxTokenFloors {
		return TokenFloor{System: system, PinnedUntil: lastTokenTime}, true
	}
	return floor, found
}

// Merge returns the canonical token that asks for what t asks and for what o asks. It only goes up, and neither the
// order nor the number of times that tokens are merged changes the outcome: whoever stores tokens may merge each one as
// it comes.
//
// Issued is the later one. In the floor of a cluster
//   - the position on the higher timeline stands, and on one timeline the higher position: a position on a later
//     timeline lies beyond the point where it began, and what an earlier timeline has beyond that point is gone (F10);
//   - a position on an unknown timeline gives way to one on a known timeline and sets Resolve: which of the two is
//     further cannot be told, but the primary's position is;
//   - Instance is the one that either names; two different ones set Resolve: where each has been by now nobody knows, but
//     the primary's position lies beyond both;
//   - the later PinnedUntil stands, and Resolve if either has it, which takes the place of an Instance.
//
// Of more than 4 clusters the result keeps 4: see Token, and for the others Floor.
func (t Token) Merge(o Token) Token {
	issued := t.Issued
	if o.Issued.After(issued) {
		issued = o.Issued
	}
	return Token{Issued: issued, Floors: slices.Concat(t.Floors, o.Floors)}.canonical()
}

// merge is Merge for two floors of one cluster. It is a join: commutative, associative and idempotent.
func (f TokenFloor) merge(o TokenFloor) TokenFloor {
	if mutant == lastWriterMerge {
		return o
	}
	higher, other := f, o
	order := cmp.Or(cmp.Compare(f.Timeline, o.Timeline), f.LSN.Compare(o.LSN))
	if order < 0 {
		higher, other = o, f
	}
	higher.Instance = max(f.Instance, o.Instance)
	if other.PinnedUntil.After(higher.PinnedUntil) {
		higher.PinnedUntil = other.PinnedUntil
	}
	// Timeline 0 sorts below all others, so only other can be the one that is unknown.
	unknown := higher.Timeline != 0 && other.Timeline == 0 && other.LSN != 0
	scattered := f.Instance != 0 && o.Instance != 0 && f.Instance != o.Instance
	higher.Resolve = f.Resolve || o.Resolve || unknown || scattered
	return higher.resolved()
}

// resolved leaves the instance out where the primary's position is taken: that covers what was read anywhere.
func (f TokenFloor) resolved() TokenFloor {
	if f.Resolve {
		f.Instance = 0
	}
	return f
}

// canonical returns the form that Token documents. It shares nothing with t.
//
// Which clusters are kept depends on nothing but System. Only so is Merge associative: a cluster that was left out once
// does not come back later without what it had asked for.
func (t Token) canonical() Token {
	floors := slices.Clone(t.Floors)
	slices.SortFunc(floors, func(a, b TokenFloor) int { return cmp.Compare(a.System, b.System) })
	c := Token{Issued: tokenTime(tokenSeconds(t.Issued, false))}
	for _, f := range floors {
		f = f.resolved()
		f.PinnedUntil = tokenTime(tokenSeconds(f.PinnedUntil, true))
		if last := len(c.Floors) - 1; last >= 0 && c.Floors[last].System == f.System {
			c.Floors[last] = c.Floors[last].merge(f)
		} else {
			c.Floors = append(c.Floors, f)
		}
	}
	if lost := len(c.Floors) - maxTokenFloors; lost > 0 {
		first := 0
		if c.Floors[0].System == anyCluster {
			first = 1 // it says something about all of them
		}
		c.Floors = slices.Delete(c.Floors, first, first+lost)
	}
	return c
}

// tokenSeconds is a time as a token writes it: seconds since 1970, 0 for the zero time.
func tokenSeconds(t time.Time, up bool) uint32 {
	s := t.Unix()
	switch {
	case s >= math.MaxUint32:
		return math.MaxUint32
	case s < 0:
		return 0
	case up && t.Nanosecond() > 0:
		s++
	}
	return uint32(s)
}

func tokenTime(seconds uint32) time.Time {
	if seconds == 0 {
		return time.Time{}
	}
	return time.Unix(int64(seconds), 0).UTC()
}

// The texts are unpadded URL-safe base64 of these bytes, all integers big endian:
//
//	text   = 1 body
//	sealed = 2 key-id[4] body mac[16]
//	body   = issued[4] floor{0,4}                   floors by ascending system
//	floor  = system[8] head [timeline] lsn[0..8] [instance[4]] [pin]
//	head   = one byte: length of lsn, and a bit for each of the rest
//
// timeline is an unsigned varint. pin is a signed one, PinnedUntil relative to Issued, which is short for a pin that is
// near. Each value has one encoding: lsn starts with no zero byte, varints are as short as they can be, and what is
// zero is left out.
const (
	tokenPlain  = 1
	tokenSealed = 2

	keyIDSize = 4
	macSize   = 16

	maxFloorSize  = 8 + 1 + 5 + 8 + 4 + 5
	maxBodySize   = 4 + maxTokenFloors*maxFloorSize
	maxPlainSize  = 1 + maxBodySize
	maxSealedSize = 1 + keyIDSize + maxBodySize + macSize
)

// Bits of a floor's head.
const (
	headLSN      = 0x0f
	headTimeline = 1 << 4
	headInstance = 1 << 5
	headPinned   = 1 << 6
	headResolve  = 1 << 7
)

var tokenEncoding = base64.RawURLEncoding.Strict()

// MarshalText implements encoding.TextMarshaler, and with it JSON: at most 172 letters, digits, - and _. It never
// fails.
//
// The text is not signed: whoever can write it sets floors and pins. It is for payloads that only trusted programs
// write, such as a job in a queue of one's own. What passes through a browser is sealed with a Keyring.
func (t Token) MarshalText() ([]byte, error) {
	return tokenEncoding.AppendEncode(nil, t.canonical().appendBody([]byte{tokenPlain})), nil
}

// UnmarshalText implements encoding.TextUnmarshaler. It takes exactly what MarshalText writes; every other text, an
// empty or a sealed one too, is an error that wraps ErrInvalidToken and leaves t as it was.
func (t *Token) UnmarshalText(text []byte) error {
	b, err := decodeToken(string(text), maxPlainSize)
	if err != nil {
		return err
	}
	switch b[0] {
	case tokenPlain:
	case tokenSealed:
		return invalidToken("it is sealed, and is opened with a Keyring")
	default:
		return invalidToken("unknown version")
	}
	read, err := parseTokenBody(b[1:])
	if err != nil {
		return err
	}
	*t = read
	return nil
}

func invalidToken(why string) error { return fmt.Errorf("%w: %s", ErrInvalidToken, why) }

// decodeToken returns the bytes of a text, at least one and at most size.
func decodeToken(text string, size int) ([]byte, error) {
	switch {
	case len(text) > tokenEncoding.EncodedLen(size):
		return nil, invalidToken("too long")
	case len(text) == 0:
		return nil, invalidToken("empty")
	case strings.ContainsAny(text, "\r\n"): // which package base64 skips
		return nil, invalidToken("not base64")
	}
	b, err := tokenEncoding.DecodeString(text)
	if err != nil {
		return nil, invalidToken("not base64")
	}
	return b, nil
}

// appendBody appends a canonical token.
func (t Token) appendBody(b []byte) []byte {
	issued := tokenSeconds(t.Issued, false)
	b = binary.BigEndian.AppendUint32(b, issued)
	for _, f := range t.Floors {
		b = f.append(b, issued)
	}
	return b
}

func (f TokenFloor) append(b []byte, issued uint32) []byte {
	b = binary.BigEndian.AppendUint64(b, f.System)
	head := len(b)
	lsnSize := (bits.Len64(uint64(f.LSN)) + 7) / 8
	b = append(b, byte(lsnSize))
	if f.Timeline != 0 {
		b[head] |= headTimeline
		b = binary.AppendUvarint(b, uint64(f.Timeline))
	}
	for i := lsnSize - 1; i >= 0; i-- {
		b = append(b, byte(f.LSN>>(8*i)))
	}
	if f.Instance != 0 {
		b[head] |= headInstance
		b = binary.BigEndian.AppendUint32(b, f.Instance)
	}
	if pin := tokenSeconds(f.PinnedUntil, true); pin != 0 {
		b[head] |= headPinned
		b = binary.AppendVarint(b, int64(pin)-int64(issued))
	}
	if f.Resolve {
		b[head] |= headResolve
	}
	return b
}

// parseTokenBody takes exactly what appendBody writes of a canonical token.
func parseTokenBody(b []byte) (Token, error) {
	r := tokenReader{rest: b}
	issued := uint32(r.integer(4))
	t := Token{Issued: tokenTime(issued)}
	for r.broken == "" && len(r.rest) > 0 {
		f := r.floor(issued)
		switch last := len(t.Floors) - 1; {
		case last+1 == maxTokenFloors:
			r.fail("too many floors")
		case last >= 0 && f.System <= t.Floors[last].System:
			r.fail("floors out of order")
		}
		t.Floors = append(t.Floors, f)
	}
	if r.broken != "" {
		return Token{}, invalidToken(r.broken)
	}
	return t, nil
}

// tokenReader reads a body. After the first thing that is wrong it returns zeros.
type tokenReader struct {
	rest   []byte
	broken string // what was wrong first
}

func (r *tokenReader) fail(why string) {
	if r.broken == "" {
		r.broken = why
	}
	r.rest = nil
}

func (r *tokenReader) floor(issued uint32) TokenFloor {
	f := TokenFloor{System: r.integer(8)}
	head := byte(r.integer(1))
	if head&headTimeline != 0 {
		v, n := binary.Uvarint(r.rest)
		r.varint(n)
		if v == 0 || v > math.MaxUint32 {
			r.fail("not a timeline")
		}
		f.Timeline = uint32(v)
	}
	if size := int(head & headLSN); size > 8 {
		r.fail("not a position")
	} else if size > 0 {
		f.LSN = LSN(r.integer(size))
		if f.LSN>>(8*(size-1)) == 0 {
			r.fail("not a position")
		}
	}
	if head&headInstance != 0 {
		if f.Instance = uint32(r.integer(4)); f.Instance == 0 {
			r.fail("not an instance")
		}
	}
	if head&headPinned != 0 {
		v, n := binary.Varint(r.rest)
		r.varint(n)
		// A sum beyond int64 wraps around to a negative one.
		if v += int64(issued); v <= 0 || v > math.MaxUint32 {
			r.fail("not a time")
		}
		f.PinnedUntil = tokenTime(uint32(v))
	}
	if f.Resolve = head&headResolve != 0; f != f.resolved() {
		r.fail("an instance where there is none")
	}
	return f
}

// integer reads size bytes, at most 8.
func (r *tokenReader) integer(size int) uint64 {
	if len(r.rest) < size {
		r.fail("torn")
		return 0
	}
	var v uint64
	for _, b := range r.rest[:size] {
		v = v<<8 | uint64(b)
	}
	r.rest = r.rest[size:]
	return v
}

// varint goes past a varint of n bytes, as package binary reports n.
func (r *tokenReader) varint(n int) {
	switch {
	case n == 0:
		r.fail("torn")
	case n < 0 || n > 1 && r.rest[n-1] == 0:
		r.fail("not the shortest form of a number")
	default:
		r.rest = r.rest[n:]
	}
}

// Keyring seals tokens that pass through the hands of others, and opens them. A sealed token cannot be changed or made
// by who lacks the key, but it can be read, copied and presented again: it is no proof of who presents it.
//
// A Keyring comes from NewKeyring and is safe for concurrent use. It prints without its keys.
type Keyring struct {
	// A function, because no printer looks into one, not even where it cannot call Format: on an unexported field.
	ring func() []*tokenKey
}

// keys are none on a Keyring that did not come from NewKeyring.
func (k *Keyring) keys() []*tokenKey {
	if k == nil || k.ring == nil {
		return nil
	}
	return k.ring()
}

// tokenKey holds what is derived from a key; the key itself is not kept.
type tokenKey struct {
	id  [keyIDSize]byte
	mac [sha256.Size]byte
}

// minKeySize is the output size of the hash, as RFC 2104 section 3 asks of an HMAC key.
const minKeySize = sha256.Size

// What the hash and the MAC are taken over starts with one of these, so that a key that is used for something else too
// gives nobody a token.
const (
	domainKeyID  = "pgsplit token key id\x00"
	domainMACKey = "pgsplit token mac key\x00"
	domainMAC    = "pgsplit token\x00"
)

// NewKeyring makes a Keyring that seals with the first key and opens what any of them sealed. To change the key, first
// add the new one as the last everywhere, then make it the first, and drop the old one when its tokens have expired.
//
// There must be at least one key. Each has at least 32 bytes, from a source of random bytes such as crypto/rand, and is
// given once; otherwise the error wraps ErrConfig. The caller may overwrite the slices afterwards.
func NewKeyring(keys ...[]byte) (*Keyring, error) {
	if len(keys) == 0 {
		return nil, fmt.Errorf("%w: a keyring needs a key", ErrConfig)
	}
	var ring []*tokenKey
	for i, key := range keys {
		if len(key) < minKeySize {
			return nil, fmt.Errorf("%w: key %d of the keyring has %d bytes, less than %d", ErrConfig, i+1, len(key), minKeySize)
		}
		derived := deriveTokenKey(key)
		for j, earlier := range ring {
			if *earlier == *derived {
				return nil, fmt.Errorf("%w: keys %d and %d of the keyring are the same", ErrConfig, j+1, i+1)
			}
		}
		ring = append(ring, derived)
	}
	return &Keyring{ring: func() []*tokenKey { return ring }}, nil
}

func deriveTokenKey(key []byte) *tokenKey {
	id := sha256.Sum256(slices.Concat([]byte(domainKeyID), key))
	return &tokenKey{id: [keyIDSize]byte(id[:]), mac: sha256.Sum256(slices.Concat([]byte(domainMACKey), key))}
}

// sign returns the MAC of what precedes it in a sealed token.
func (k *tokenKey) sign(b []byte) []byte {
	h := hmac.New(sha256.New, k.mac[:])
	h.Write([]byte(domainMAC))
	h.Write(b)
	return h.Sum(nil)[:macSize]
}

// Seal returns the token in its canonical form, signed with HMAC-SHA256 under the first key: at most 199 letters,
// digits, - and _, which a cookie, a header and a URL take as they are. It panics on a Keyring that did not come from
// NewKeyring.
func (k *Keyring) Seal(t Token) string {
	keys := k.keys()
	if len(keys) == 0 {
		panic("pgsplit: Seal on a Keyring without keys")
	}
	key := keys[0]
	b := t.canonical().appendBody(append([]byte{tokenSealed}, key.id[:]...))
	return tokenEncoding.EncodeToString(append(b, key.sign(b)...))
}

// Open returns the token in a text that Seal made with one of the keys. Every other text, an empty one too, is an error
// that wraps ErrInvalidToken: torn, changed, sealed with another key, or not sealed at all. A text that is too long is
// refused unread.
func (k *Keyring) Open(sealed string) (Token, error) {
	b, err := decodeToken(sealed, maxSealedSize)
	if err != nil {
		return Token{}, err
	}
	signed := len(b) - macSize
	switch {
	case b[0] == tokenPlain:
		return Token{}, invalidToken("it is not sealed")
	case b[0] != tokenSealed:
		return Token{}, invalidToken("unknown version")
	case signed < 1+keyIDSize:
		return Token{}, invalidToken("torn")
	}
	if err := k.verify([keyIDSize]byte(b[1:]), b[:signed], b[signed:]); err != nil {
		return Token{}, err
	}
	return parseTokenBody(b[1+keyIDSize : signed])
}

// verify tries each key with that id: ids are short, and two keys can share one.
func (k *Keyring) verify(id [keyIDSize]byte, signed, mac []byte) error {
	why := "sealed with an unknown key"
	for _, key := range k.keys() {
		if key.id != id {
			continue
		}
		if hmac.Equal(key.sign(signed), mac) {
			return nil
		}
		why = "forged or changed"
	}
	return invalidToken(why)
}

// Format implements fmt.Formatter: every verb prints the number of keys and nothing of them.
func (k Keyring) Format(f fmt.State, _ rune) {
	fmt.Fprintf(f, "pgsplit.Keyring(%d keys)", len(k.keys()))
}
