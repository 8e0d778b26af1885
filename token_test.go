package pgsplit

import (
	"bytes"
	"crypto/hmac"
	"crypto/sha256"
	"encoding/base64"
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"
)

// unixTime is a whole second, in the form that tokens have.
func unixTime(seconds int64) time.Time { return time.Unix(seconds, 0).UTC() }

// testKey is a key of its own for each name.
func testKey(name string) []byte {
	sum := sha256.Sum256([]byte(name))
	return sum[:]
}

func mustKeyring(t testing.TB, keys ...[]byte) *Keyring {
	t.Helper()
	k, err := NewKeyring(keys...)
	if err != nil {
		t.Fatal(err)
	}
	return k
}

func tokenText(t testing.TB, token Token) string {
	t.Helper()
	text, err := token.MarshalText()
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

// commonToken is what a web request carries: one cluster, a position, no pin.
var commonToken = Token{
	Issued: unixTime(1_790_000_000),
	Floors: []TokenFloor{{System: 7_519_872_046_283_117_001, Timeline: 3, LSN: 0x16_B374D848, Instance: 0xCAFE1234}},
}

// largestToken has the longest text.
func largestToken() Token {
	t := Token{}
	for i := range uint64(maxTokenFloors) {
		t.Floors = append(t.Floors, TokenFloor{
			System:      math.MaxUint64 - maxTokenFloors + 1 + i,
			Timeline:    math.MaxUint32,
			LSN:         math.MaxUint64,
			Instance:    math.MaxUint32,
			PinnedUntil: lastTokenTime,
		})
	}
	return t
}

var canonicalTokens = map[string]Token{
	"zero":         {},
	"issued alone": {Issued: unixTime(1)},
	"common":       commonToken,
	"largest":      largestToken(),
	"pinned before it was issued": {Issued: unixTime(math.MaxUint32), Floors: []TokenFloor{
		{System: 1, PinnedUntil: unixTime(1)}}},
	"pinned when it was issued": {Issued: unixTime(100), Floors: []TokenFloor{{System: 1, PinnedUntil: unixTime(100)}}},
	"floor that asks nothing":   {Floors: []TokenFloor{{}, {System: 1}}},
	"one of each": {Issued: unixTime(100), Floors: []TokenFloor{
		{System: 1, Timeline: 128},
		{System: 2, LSN: 0x100},
		{System: 3, Instance: 1},
		{System: math.MaxUint64, Resolve: true},
	}},
}

func TestATokenComesBackFromItsTextExactly(t *testing.T) {
	k := mustKeyring(t, testKey("a"))
	for name, want := range canonicalTokens {
		t.Run(name, func(t *testing.T) {
			var got Token
			if err := got.UnmarshalText([]byte(tokenText(t, want))); err != nil || !reflect.DeepEqual(got, want) {
				t.Errorf("plain: %+v, %v", got, err)
			}
			if got, err := k.Open(k.Seal(want)); err != nil || !reflect.DeepEqual(got, want) {
				t.Errorf("sealed: %+v, %v", got, err)
			}
		})
	}
	for size := 0; size <= 64; size++ {
		want := Token{Floors: []TokenFloor{{System: 1, LSN: 1<<size - 1}}}
		if got, err := k.Open(k.Seal(want)); err != nil || !reflect.DeepEqual(got, want) {
			t.Errorf("%s: %+v, %v", want.Floors[0].LSN, got, err)
		}
	}
}

func TestATokensTextStaysWhatOtherVersionsRead(t *testing.T) {
	const (
		plain  = "AWqxO4BoW_PIuxhRyTUDFrN02EjK_hI0"
		sealed = "AmkQHuRqsTuAaFvzyLsYUck1AxazdNhIyv4SNIGKyKFUkQpdTJbKHyLzHrI"
	)
	if text := tokenText(t, commonToken); text != plain {
		t.Errorf("plain: %s", text)
	}
	if text := mustKeyring(t, testKey("a")).Seal(commonToken); text != sealed {
		t.Errorf("sealed: %s", text)
	}
}

func TestATokenIsShortAndSafeInACookie(t *testing.T) {
	k := mustKeyring(t, testKey("a"))
	tokens := []Token{commonToken, largestToken()}
	random := rand.New(rand.NewPCG(1, 2))
	for range 2000 {
		token := largestToken()
		token.Issued = unixTime(random.Int64N(1 << 32))
		for i := range token.Floors {
			token.Floors[i].System = random.Uint64()
			token.Floors[i].LSN = LSN(random.Uint64() >> random.IntN(64))
			token.Floors[i].PinnedUntil = unixTime(random.Int64N(1 << 32))
		}
		tokens = append(tokens, token)
	}
	for _, token := range tokens {
		for text, most := range map[string]int{k.Seal(token): 199, tokenText(t, token): 172} {
			if len(text) > most {
				t.Fatalf("%d characters: %s", len(text), text)
			}
			if strings.Trim(text, "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_") != "" {
				t.Fatalf("not safe: %s", text)
			}
		}
	}
	if sealed, plain := len(k.Seal(largestToken())), len(tokenText(t, largestToken())); sealed != 199 || plain != 172 {
		t.Errorf("the largest token has %d characters sealed and %d plain", sealed, plain)
	}
	if size := len(k.Seal(commonToken)); size > 64 {
		t.Errorf("the common token has %d characters", size)
	}
}

func TestSealAndMarshalTextWriteTheCanonicalToken(t *testing.T) {
	k := mustKeyring(t, testKey("a"))
	zone := time.FixedZone("east", 3*60*60)
	for name, c := range map[string]struct{ from, want Token }{
		"unsorted": {
			Token{Floors: []TokenFloor{{System: 3}, {System: 1}, {System: 2}}},
			Token{Floors: []TokenFloor{{System: 1}, {System: 2}, {System: 3}}},
		},
		"one cluster twice": {
			Token{Floors: []TokenFloor{{System: 1, LSN: 5}, {System: 2}, {System: 1, LSN: 7, Resolve: true}}},
			Token{Floors: []TokenFloor{{System: 1, LSN: 7, Resolve: true}, {System: 2}}},
		},
		"six clusters": {
			Token{Floors: []TokenFloor{{System: 4}, {System: 1}, {System: 6}, {System: 3}, {System: 2}, {System: 5}}},
			Token{Floors: []TokenFloor{{System: 3}, {System: 4}, {System: 5}, {System: 6}}},
		},
		"no floors but a slice": {
			Token{Floors: []TokenFloor{}},
			Token{},
		},
		"parts of a second: Issued is rounded down, a pin up": {
			Token{Issued: unixTime(100).Add(999 * time.Millisecond), Floors: []TokenFloor{{PinnedUntil: unixTime(200).Add(1)}}},
			Token{Issued: unixTime(100), Floors: []TokenFloor{{PinnedUntil: unixTime(201)}}},
		},
		"another time zone": {
			Token{Issued: unixTime(100).In(zone), Floors: []TokenFloor{{PinnedUntil: unixTime(200).In(zone)}}},
			Token{Issued: unixTime(100), Floors: []TokenFloor{{PinnedUntil: unixTime(200)}}},
		},
		"too early": {
			Token{Issued: unixTime(0), Floors: []TokenFloor{{PinnedUntil: unixTime(-1).Add(1)}}},
			Token{Floors: []TokenFloor{{}}},
		},
		"part of the first second": {
			Token{Issued: unixTime(0).Add(1), Floors: []TokenFloor{{PinnedUntil: unixTime(0).Add(1)}}},
			Token{Floors: []TokenFloor{{PinnedUntil: unixTime(1)}}},
		},
		"too late": {
			Token{Issued: unixTime(math.MaxInt64 - 1<<40), Floors: []TokenFloor{{PinnedUntil: lastTokenTime.Add(1)}}},
			Token{Issued: lastTokenTime, Floors: []TokenFloor{{PinnedUntil: lastTokenTime}}},
		},
		"as early as time goes": {
			Token{Issued: unixTime(math.MinInt64 + 1<<40), Floors: []TokenFloor{{PinnedUntil: unixTime(math.MinInt64 + 1<<40)}}},
			Token{Floors: []TokenFloor{{}}},
		},
	} {
		t.Run(name, func(t *testing.T) {
			before := Token{Issued: c.from.Issued, Floors: slices.Clone(c.from.Floors)}
			if got, err := k.Open(k.Seal(c.from)); err != nil || !reflect.DeepEqual(got, c.want) {
				t.Errorf("sealed: %+v, %v", got, err)
			}
			var got Token
			if err := got.UnmarshalText([]byte(tokenText(t, c.from))); err != nil || !reflect.DeepEqual(got, c.want) {
				t.Errorf("plain: %+v, %v", got, err)
			}
			if got := c.from.Merge(Token{}); !reflect.DeepEqual(got, c.want) {
				t.Errorf("merged: %+v", got)
			}
			if !slices.Equal(c.from.Floors, before.Floors) {
				t.Errorf("the token given was changed: %+v", c.from)
			}
		})
	}
}

func TestATokenWithoutFloorsIsZero(t *testing.T) {
	for _, token := range []Token{{}, {Issued: unixTime(100)}, {Floors: []TokenFloor{}}} {
		if !token.IsZero() {
			t.Errorf("%+v is not zero", token)
		}
	}
	if (Token{Floors: []TokenFloor{{}}}).IsZero() {
		t.Error("a token with a floor is zero")
	}
}

func TestATokenTravelsInAJSONPayload(t *testing.T) {
	type job struct {
		Token Token `json:"token"`
		After Token `json:"after,omitzero"`
	}
	want := job{Token: commonToken}
	payload, err := json.Marshal(want)
	if err != nil || string(payload) != `{"token":"`+tokenText(t, commonToken)+`"}` {
		t.Fatalf("%s, %v", payload, err)
	}
	var got job
	if err := json.Unmarshal(payload, &got); err != nil || !reflect.DeepEqual(got, want) {
		t.Errorf("%+v, %v", got, err)
	}
	if err := json.Unmarshal([]byte(`{"token":""}`), &got); !errors.Is(err, ErrInvalidToken) {
		t.Error(err)
	}
}

// plainText is the text of these bytes, given in hexadecimal, after the version of a plain token.
func plainText(t *testing.T, body string) string {
	t.Helper()
	b, err := hex.DecodeString(strings.ReplaceAll("01"+body, " ", ""))
	if err != nil {
		t.Fatal(err)
	}
	return base64.RawURLEncoding.EncodeToString(b)
}

func TestATextThatMarshalTextDoesNotWriteIsInvalid(t *testing.T) {
	const (
		issued = " 00000064 "
		one    = " 0000000000000001 "
		two    = " 0000000000000002 "
	)
	// The same with nothing wrong, so that the cases below fail for what their names say.
	for name, body := range map[string]string{
		"no floors":        issued,
		"a floor":          issued + one + "00",
		"a timeline":       issued + one + "10 8001",
		"a position":       issued + one + "02 0100",
		"an instance":      issued + one + "20 00000001",
		"a pin":            issued + one + "40 8001",
		"the earliest pin": issued + one + "40 c501",
		"two floors":       issued + one + "00" + two + "00",
	} {
		var token Token
		if err := token.UnmarshalText([]byte(plainText(t, body))); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
	common := tokenText(t, commonToken)
	for name, text := range map[string]string{
		"empty":                              "",
		"version 0":                          "AAAAAAA",
		"version 3":                          "AwAAAAA",
		"version alone":                      plainText(t, ""),
		"sealed":                             mustKeyring(t, testKey("a")).Seal(commonToken),
		"torn time":                          plainText(t, "000000"),
		"torn system":                        plainText(t, issued+"00000000000001"),
		"system alone":                       plainText(t, issued+one),
		"torn timeline":                      plainText(t, issued+one+"10"),
		"torn inside a timeline":             plainText(t, issued+one+"10 80"),
		"timeline 0":                         plainText(t, issued+one+"10 00"),
		"timeline in too many bytes":         plainText(t, issued+one+"10 818000"),
		"timeline above 32 bits":             plainText(t, issued+one+"10 8080808010"),
		"timeline above 64 bits":             plainText(t, issued+one+"10 ffffffffffffffffff7f"),
		"torn position":                      plainText(t, issued+one+"02 01"),
		"position that starts with zero":     plainText(t, issued+one+"02 0001"),
		"position 0 that is not left out":    plainText(t, issued+one+"01 00"),
		"position of 9 bytes":                plainText(t, issued+one+"09 010000000000000000"),
		"position of 15 bytes":               plainText(t, issued+one+"0f 010000000000000000000000000000"),
		"torn instance":                      plainText(t, issued+one+"20 000001"),
		"instance 0":                         plainText(t, issued+one+"20 00000000"),
		"torn pin":                           plainText(t, issued+one+"40"),
		"pin in too many bytes":              plainText(t, issued+one+"40 808100"),
		"pin at the zero time":               plainText(t, issued+one+"40 c701"),
		"pin before the zero time":           plainText(t, issued+one+"40 c901"),
		"pin after the last time":            plainText(t, issued+one+"40 b8feffff1f"),
		"pin beyond 64 bits":                 plainText(t, issued+one+"40 feffffffffffffffff01"),
		"pin beyond 64 bits in its encoding": plainText(t, issued+one+"40 ffffffffffffffffffff01"),
		"trailing byte":                      plainText(t, issued+one+"00 00"),
		"one cluster twice":                  plainText(t, issued+one+"00"+one+"00"),
		"unsorted":                           plainText(t, issued+two+"00"+one+"00"),
		"five floors": plainText(t, issued+one+"00"+two+"00"+
			"0000000000000003 00 0000000000000004 00 0000000000000005 00"),
		"too long":                        tokenText(t, largestToken()) + "AA",
		"much too long":                   strings.Repeat("A", 1<<20),
		"not base64":                      common[:8] + "." + common[9:],
		"standard base64":                 strings.ReplaceAll(common, "_", "/"),
		"padded":                          plainText(t, issued+one+"00") + "==",
		"line end":                        common + "\n",
		"line end inside":                 common[:4] + "\r\n" + common[4:],
		"blank":                           " " + common,
		"bits behind the last byte":       "AQAAAAB",
		"one character, which is no byte": "A",
	} {
		t.Run(name, func(t *testing.T) {
			token := commonToken
			if err := token.UnmarshalText([]byte(text)); !errors.Is(err, ErrInvalidToken) {
				t.Errorf("%v: %+v", err, token)
			}
			if !reflect.DeepEqual(token, commonToken) {
				t.Errorf("the token was changed: %+v", token)
			}
			if _, err := mustKeyring(t, testKey("b")).Open(text); !errors.Is(err, ErrInvalidToken) {
				t.Errorf("Open: %v", err)
			}
		})
	}
}

func TestASealedBodyIsReadAsStrictlyAsAPlainOne(t *testing.T) {
	k := mustKeyring(t, testKey("a"))
	for name, body := range map[string]string{
		"empty":             "",
		"trailing byte":     "00000064 0000000000000001 00 00",
		"one cluster twice": "00000064 0000000000000001 00 0000000000000001 00",
		"timeline 0":        "00000064 0000000000000001 10 00",
	} {
		b, err := base64.RawURLEncoding.DecodeString(plainText(t, body))
		if err != nil {
			t.Fatal(err)
		}
		sealed := slices.Concat([]byte{tokenSealed}, k.keys()[0].id[:], b[1:])
		sealed = append(sealed, k.keys()[0].sign(sealed)...)
		if token, err := k.Open(base64.RawURLEncoding.EncodeToString(sealed)); !errors.Is(err, ErrInvalidToken) {
			t.Errorf("%s: %+v, %v", name, token, err)
		}
	}
}

func TestASealedTokenWithAnyBitChangedIsRefused(t *testing.T) {
	k := mustKeyring(t, testKey("a"), testKey("b"))
	for name, token := range canonicalTokens {
		b, err := base64.RawURLEncoding.DecodeString(k.Seal(token))
		if err != nil {
			t.Fatal(err)
		}
		for bit := range len(b) * 8 {
			changed := slices.Clone(b)
			changed[bit/8] ^= 1 << (bit % 8)
			if _, err := k.Open(base64.RawURLEncoding.EncodeToString(changed)); !errors.Is(err, ErrInvalidToken) {
				t.Errorf("%s, bit %d: %v", name, bit, err)
			}
		}
	}
}

func TestASealedTextWithAnyCharacterChangedIsRefused(t *testing.T) {
	k := mustKeyring(t, testKey("a"))
	text := k.Seal(commonToken)
	for i := range text {
		for c := range 256 {
			if byte(c) == text[i] {
				continue
			}
			changed := []byte(text)
			changed[i] = byte(c)
			if _, err := k.Open(string(changed)); !errors.Is(err, ErrInvalidToken) {
				t.Errorf("character %d changed to %q: %v", i, c, err)
			}
		}
	}
}

func TestATornTokenIsRefusedAtEachLength(t *testing.T) {
	k := mustKeyring(t, testKey("a"))
	for name, token := range canonicalTokens {
		sealed := k.Seal(token)
		for size := range sealed {
			for _, torn := range []string{sealed[:size], sealed[len(sealed)-size:]} {
				if _, err := k.Open(torn); !errors.Is(err, ErrInvalidToken) {
					t.Errorf("%s, %d characters: %v", name, size, err)
				}
			}
		}
	}
	// A plain text carries no proof that it is whole: it can be torn between two floors, and only there.
	text := tokenText(t, largestToken())
	for size := range text {
		var token Token
		err := token.UnmarshalText([]byte(text[:size]))
		if err == nil && tokenText(t, token) != text[:size] || err != nil && !errors.Is(err, ErrInvalidToken) {
			t.Errorf("%d characters: %+v, %v", size, token, err)
		}
	}
}

func TestOnlyTheKeyThatSealedATokenOpensIt(t *testing.T) {
	oldKey, newKey := testKey("old"), testKey("new")
	before, adding := mustKeyring(t, oldKey), mustKeyring(t, oldKey, newKey)
	switched, after := mustKeyring(t, newKey, oldKey), mustKeyring(t, newKey)
	sealedOld, sealedNew := before.Seal(commonToken), switched.Seal(commonToken)
	if adding.Seal(commonToken) != sealedOld || after.Seal(commonToken) != sealedNew {
		t.Error("not sealed with the first key")
	}
	for _, c := range []struct {
		name     string
		ring     *Keyring
		old, new bool
	}{
		{"before", before, true, false},
		{"new key added", adding, true, true},
		{"new key first", switched, true, true},
		{"old key dropped", after, false, true},
		{"zero keyring", &Keyring{}, false, false},
		{"no keyring", nil, false, false},
	} {
		for sealed, opens := range map[string]bool{sealedOld: c.old, sealedNew: c.new} {
			token, err := c.ring.Open(sealed)
			if opens && (err != nil || !reflect.DeepEqual(token, commonToken)) {
				t.Errorf("%s: %+v, %v", c.name, token, err)
			}
			if !opens && (!errors.Is(err, ErrInvalidToken) || !token.IsZero()) {
				t.Errorf("%s: opened %+v, %v", c.name, token, err)
			}
		}
	}
}

func TestAnErrorTellsWhyATokenIsInvalid(t *testing.T) {
	k := mustKeyring(t, testKey("a"))
	sealed, plain := k.Seal(commonToken), tokenText(t, commonToken)
	for text, why := range map[string]string{
		"":                            "empty",
		strings.Repeat("A", 1<<20):    "too long",
		sealed[:10] + "\n":            "not base64",
		sealed[:20]:                   "torn",
		sealed[:len(sealed)-2] + "AA": "forged or changed",
		mustKeyring(t, testKey("b")).Seal(commonToken): "sealed with an unknown key",
		plain:            "it is not sealed",
		"f" + sealed[1:]: "unknown version",
	} {
		if _, err := k.Open(text); err == nil || err.Error() != "pgsplit: invalid token: "+why {
			t.Errorf("%.20q: %v, not %s", text, err, why)
		}
	}
	for text, why := range map[string]string{
		sealed:          "it is sealed, and is opened with a Keyring",
		plain[:20]:      "torn",
		"f" + plain[1:]: "unknown version",
	} {
		if err := new(Token).UnmarshalText([]byte(text)); err == nil || err.Error() != "pgsplit: invalid token: "+why {
			t.Errorf("%.20q: %v, not %s", text, err, why)
		}
	}
}

func TestKeysThatShareAnIDBothOpen(t *testing.T) {
	// Ids have 32 bits, so that two in some 77,000 keys share one.
	seen := make(map[[keyIDSize]byte]uint64)
	key := func(n uint64) []byte { return binary.BigEndian.AppendUint64(make([]byte, 24), n) }
	var a, b []byte
	for n := uint64(0); a == nil; n++ {
		id := deriveTokenKey(key(n)).id
		if earlier, found := seen[id]; found {
			a, b = key(earlier), key(n)
		}
		seen[id] = n
	}
	ring := mustKeyring(t, a, b)
	for _, k := range []*Keyring{mustKeyring(t, a), mustKeyring(t, b)} {
		if token, err := ring.Open(k.Seal(commonToken)); err != nil || !reflect.DeepEqual(token, commonToken) {
			t.Errorf("%+v, %v", token, err)
		}
	}
	if _, err := mustKeyring(t, a).Open(mustKeyring(t, b).Seal(commonToken)); !errors.Is(err, ErrInvalidToken) {
		t.Error(err)
	}
}

func TestTheSealIsNoPlainHMACUnderTheKey(t *testing.T) {
	key := testKey("a")
	b, err := base64.RawURLEncoding.DecodeString(mustKeyring(t, key).Seal(commonToken))
	if err != nil {
		t.Fatal(err)
	}
	h := hmac.New(sha256.New, key)
	h.Write(b[:len(b)-macSize])
	if bytes.Equal(h.Sum(nil)[:macSize], b[len(b)-macSize:]) {
		t.Error("who gets an HMAC under the same key elsewhere gets a token")
	}
}

func TestAKeyringRefusesBadKeys(t *testing.T) {
	for name, keys := range map[string][][]byte{
		"none":         nil,
		"nil":          {nil},
		"short":        {make([]byte, 31)},
		"second short": {testKey("a"), testKey("b")[:31]},
		"twice":        {testKey("a"), testKey("b"), testKey("a")},
	} {
		k, err := NewKeyring(keys...)
		if !errors.Is(err, ErrConfig) || k != nil {
			t.Errorf("%s: %v, %v", name, k, err)
		}
		for _, key := range keys {
			if err != nil && len(key) > 0 && showsKey(err.Error(), key) {
				t.Errorf("%s: %v", name, err)
			}
		}
	}
	mustKeyring(t, make([]byte, 32), make([]byte, 33), bytes.Repeat([]byte{1}, 1000))
}

func TestAKeyringCopiesItsKeys(t *testing.T) {
	key := testKey("a")
	k := mustKeyring(t, key)
	sealed := k.Seal(commonToken)
	clear(key)
	if k.Seal(commonToken) != sealed {
		t.Error("the keyring uses the caller's slice")
	}
}

// showsKey tells whether a printed value has the first bytes of a key in it, in one of the ways that fmt prints bytes.
func showsKey(printed string, key []byte) bool {
	start := key[:6]
	for _, verb := range []string{"%s", "%x", "%X", "% x", "%d", "%#v", "%q", "%v"} {
		shown := strings.Trim(fmt.Sprintf(verb, start), "[]{}\"")
		if strings.Contains(printed, strings.TrimPrefix(shown, "[]byte{")) {
			return true
		}
	}
	array := strings.TrimPrefix(fmt.Sprintf("%#v", [6]byte(start)), "[6]uint8{")
	return strings.Contains(printed, strings.TrimSuffix(array, "}"))
}

func TestAKeyringPrintsWithoutItsKeys(t *testing.T) {
	key := testKey("a")
	k := mustKeyring(t, key, testKey("b"))
	hidden := struct {
		value   Keyring
		pointer *Keyring
	}{*k, k}
	for _, verb := range []string{"%v", "%+v", "%#v", "%s", "%q", "%x", "%X", "%d", "%o", "%b", "%c", "%U", "%e", "%t"} {
		for _, v := range []any{k, *k, hidden, &hidden, []*Keyring{k}, []Keyring{*k}, map[string]any{"k": k}} {
			printed := fmt.Sprintf(verb, v)
			for _, secret := range [][]byte{key, k.keys()[0].mac[:], k.keys()[0].id[:], k.keys()[1].mac[:]} {
				if showsKey(printed, slices.Concat(secret, secret)) {
					t.Errorf("%s of %T: %s", verb, v, printed)
				}
			}
		}
	}
	if printed := fmt.Sprint(k); printed != "pgsplit.Keyring(2 keys)" {
		t.Error(printed)
	}
	if encoded, err := json.Marshal([]any{k}); err != nil || string(encoded) != "[{}]" {
		t.Errorf("%s, %v", encoded, err)
	}
	if printed := fmt.Sprint((*Keyring)(nil)); printed != "<nil>" {
		t.Error(printed)
	}
}

func TestAKeyringWithoutKeysSealsNothing(t *testing.T) {
	for _, k := range []*Keyring{nil, {}} {
		func() {
			defer func() {
				if recover() == nil {
					t.Error("sealed without a key")
				}
			}()
			k.Seal(commonToken)
		}()
	}
}

func TestMergingFloorsOnlyGoesUp(t *testing.T) {
	for name, c := range map[string]struct{ a, b, want TokenFloor }{
		"higher position": {
			TokenFloor{Timeline: 1, LSN: 10}, TokenFloor{Timeline: 1, LSN: 20}, TokenFloor{Timeline: 1, LSN: 20},
		},
		"higher timeline": {
			TokenFloor{Timeline: 1, LSN: 20}, TokenFloor{Timeline: 2, LSN: 10}, TokenFloor{Timeline: 2, LSN: 10},
		},
		"both timelines unknown": {
			TokenFloor{LSN: 20}, TokenFloor{LSN: 10}, TokenFloor{LSN: 20},
		},
		"one timeline unknown": {
			TokenFloor{LSN: 20}, TokenFloor{Timeline: 1, LSN: 10}, TokenFloor{Timeline: 1, LSN: 10, Resolve: true},
		},
		"no position beside one": {
			TokenFloor{Resolve: false}, TokenFloor{Timeline: 1, LSN: 10}, TokenFloor{Timeline: 1, LSN: 10},
		},
		"two instances": {
			TokenFloor{LSN: 10, Instance: 7}, TokenFloor{LSN: 20, Instance: 8}, TokenFloor{LSN: 20, Resolve: true},
		},
		"no instance at the higher position": {
			TokenFloor{LSN: 10, Instance: 7}, TokenFloor{LSN: 20}, TokenFloor{LSN: 20, Instance: 7},
		},
		"one instance at one position": {
			TokenFloor{LSN: 10, Instance: 7}, TokenFloor{LSN: 10, Instance: 7}, TokenFloor{LSN: 10, Instance: 7},
		},
		"two instances at one position": {
			TokenFloor{LSN: 10, Instance: 7}, TokenFloor{LSN: 10, Instance: 8}, TokenFloor{LSN: 10, Resolve: true},
		},
		"later pin of the lower position": {
			TokenFloor{LSN: 10, PinnedUntil: unixTime(9)}, TokenFloor{LSN: 20, PinnedUntil: unixTime(8)},
			TokenFloor{LSN: 20, PinnedUntil: unixTime(9)},
		},
		"pin beside none": {
			TokenFloor{PinnedUntil: unixTime(9)}, TokenFloor{LSN: 20}, TokenFloor{LSN: 20, PinnedUntil: unixTime(9)},
		},
		"resolve of the lower position": {
			TokenFloor{LSN: 10, Resolve: true}, TokenFloor{LSN: 20, Instance: 7}, TokenFloor{LSN: 20, Resolve: true},
		},
	} {
		t.Run(name, func(t *testing.T) {
			c.a.System, c.b.System, c.want.System = 1, 1, 1
			a, b := Token{Issued: unixTime(5), Floors: []TokenFloor{c.a}}, Token{Issued: unixTime(6), Floors: []TokenFloor{c.b}}
			want := Token{Issued: unixTime(6), Floors: []TokenFloor{c.want}}
			if got := a.Merge(b); !reflect.DeepEqual(got, want) {
				t.Errorf("%+v", got)
			}
			if got := b.Merge(a); !reflect.DeepEqual(got, want) {
				t.Errorf("the other way round: %+v", got)
			}
		})
	}
}

func TestMergingKeepsOtherClusters(t *testing.T) {
	a := Token{Floors: []TokenFloor{{System: 2, LSN: 5}}}
	b := Token{Floors: []TokenFloor{{System: 1, LSN: 9}, {System: 3, LSN: 1}}}
	want := Token{Floors: []TokenFloor{{System: 1, LSN: 9}, {System: 2, LSN: 5}, {System: 3, LSN: 1}}}
	if got := a.Merge(b); !reflect.DeepEqual(got, want) {
		t.Errorf("%+v", got)
	}
	if len(a.Floors) != 1 || len(b.Floors) != 2 {
		t.Error("a merged token was changed")
	}
}

func TestAFloorIsFoundByItsCluster(t *testing.T) {
	token := Token{Floors: []TokenFloor{{System: 2, LSN: 5}, {System: 4, LSN: 9}}}
	for _, want := range token.Floors {
		if got, found := token.Floor(want.System); !found || got != want {
			t.Errorf("%d: %+v, %v", want.System, got, found)
		}
	}
	for _, system := range []uint64{0, 1, 3, 5} {
		if got, found := token.Floor(system); found || got != (TokenFloor{}) {
			t.Errorf("%d: %+v, %v", system, got, found)
		}
	}
	twice := Token{Floors: []TokenFloor{{System: 2, LSN: 9}, {System: 2, LSN: 5}}}
	if got, found := twice.Floor(2); !found || got.LSN != 9 {
		t.Errorf("%+v, %v", got, found)
	}
}

func TestAClusterThatATokenHadNoPlaceForReadsItsPrimary(t *testing.T) {
	token := Token{Floors: []TokenFloor{{System: 1, LSN: 5}}}.Merge(Token{
		Floors: []TokenFloor{{System: 3}, {System: 5}, {System: 7}, {System: 9}},
	})
	for system, pinned := range map[uint64]bool{1: true, 2: true, 4: false, 6: false, 8: false, 10: false} {
		floor, found := token.Floor(system)
		if found != pinned || found && (floor.System != system || !floor.PinnedUntil.Equal(lastTokenTime)) {
			t.Errorf("%d: %+v, %v", system, floor, found)
		}
	}
}

func TestMergingFloorsIsAJoin(t *testing.T) {
	var floors []TokenFloor
	for timeline := range uint32(3) {
		for lsn := range LSN(3) {
			for instance := range uint32(3) {
				floors = append(floors, TokenFloor{Timeline: timeline, LSN: lsn, Instance: instance})
			}
			floors = append(floors, TokenFloor{Timeline: timeline, LSN: lsn, Resolve: true})
		}
	}
	for _, a := range floors {
		if got := a.merge(a); got != a {
			t.Errorf("%+v with itself is %+v", a, got)
		}
		for _, b := range floors {
			ab := a.merge(b)
			if ba := b.merge(a); ab != ba {
				t.Errorf("%+v with %+v is %+v, and the other way round %+v", a, b, ab, ba)
			}
			for _, c := range floors {
				if left, right := ab.merge(c), a.merge(b.merge(c)); left != right {
					t.Fatalf("%+v, %+v, %+v: %+v or %+v", a, b, c, left, right)
				}
			}
		}
	}
}

func TestMergeIsAJoin(t *testing.T) {
	random := rand.New(rand.NewPCG(3, 4))
	seed := make([]byte, 120)
	for range 2000 {
		for i := range seed {
			seed[i] = byte(random.Uint32())
		}
		checkMerge(t, smallTokens(seed))
	}
}

// smallTokens makes three tokens of up to 5 floors with few different values, so that they often meet.
func smallTokens(seed []byte) (tokens [3]Token) {
	next := func(n int) int {
		if len(seed) == 0 {
			return 0
		}
		v := int(seed[0]) % n
		seed = seed[1:]
		return v
	}
	for i := range tokens {
		tokens[i].Issued = tokenTime(uint32(next(3)))
		for range next(6) {
			tokens[i].Floors = append(tokens[i].Floors, TokenFloor{
				System:      uint64(next(8)),
				Timeline:    uint32(next(3)),
				LSN:         LSN(next(3)),
				Instance:    uint32(next(3)),
				PinnedUntil: tokenTime(uint32(next(3))),
				Resolve:     next(2) == 1,
			})
		}
	}
	return tokens
}

func checkMerge(t *testing.T, tokens [3]Token) {
	t.Helper()
	a, b, c := tokens[0], tokens[1], tokens[2]
	ab := a.Merge(b)
	for law, pair := range map[string][2]Token{
		"commutative": {ab, b.Merge(a)},
		"associative": {ab.Merge(c), a.Merge(b.Merge(c))},
		"idempotent":  {a.Merge(a), a.Merge(Token{})},
		"absorbing":   {ab.Merge(a), ab},
		"neutral":     {Token{}.Merge(ab), ab},
	} {
		if !reflect.DeepEqual(pair[0], pair[1]) {
			t.Fatalf("not %s: %+v: %+v, %+v", law, tokens, pair[0], pair[1])
		}
	}
	if len(ab.Floors) > maxTokenFloors || ab.Issued.Before(a.Issued) {
		t.Fatalf("%+v with %+v is %+v", a, b, ab)
	}
	for _, f := range slices.Concat(a.Floors, b.Floors) {
		if got, found := ab.Floor(f.System); !found || !keepsFloor(got, f) {
			t.Fatalf("%+v with %+v: the floor %+v became %+v", a, b, f, got)
		}
	}
}

// keepsFloor tells whether who keeps the floor f keeps o as well.
func keepsFloor(f, o TokenFloor) bool {
	switch {
	case f.PinnedUntil.Equal(lastTokenTime):
		return true
	case f.PinnedUntil.Before(o.PinnedUntil), o.Resolve && !f.Resolve, o.Instance != 0 && f.Instance != o.Instance && !f.Resolve:
		return false
	case f.Timeline == o.Timeline:
		return f.LSN >= o.LSN
	case o.Timeline == 0:
		return o.LSN == 0 || f.Resolve
	}
	return f.Timeline > o.Timeline
}
