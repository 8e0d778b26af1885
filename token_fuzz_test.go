package pgsplit

import (
	"bytes"
	"errors"
	"reflect"
	"strings"
	"testing"
)

func FuzzATokensTextIsItsOnlyOne(f *testing.F) {
	for _, token := range canonicalTokens {
		f.Add([]byte(tokenText(f, token)))
	}
	f.Add([]byte("AQAAAAB"))
	f.Add([]byte(strings.Repeat("_", maxPlainSize)))
	f.Fuzz(func(t *testing.T, text []byte) {
		var token Token
		err := token.UnmarshalText(text)
		if err != nil {
			if !errors.Is(err, ErrInvalidToken) || !reflect.DeepEqual(token, Token{}) {
				t.Fatalf("%q: %v, %+v", text, err, token)
			}
			return
		}
		if again := tokenText(t, token); again != string(text) {
			t.Fatalf("%q was read as %+v, which is written as %q", text, token, again)
		}
		if !reflect.DeepEqual(token, token.canonical()) {
			t.Fatalf("%q: %+v is not canonical", text, token)
		}
	})
}

// The bytes of a body reach further than the characters of a text, which are seldom base64.
func FuzzATokensBodyIsItsOnlyOne(f *testing.F) {
	for _, token := range canonicalTokens {
		f.Add(token.appendBody(nil))
	}
	f.Fuzz(func(t *testing.T, body []byte) {
		token, err := parseTokenBody(body)
		if err != nil {
			if !errors.Is(err, ErrInvalidToken) {
				t.Fatalf("%x: %v", body, err)
			}
			return
		}
		if again := token.appendBody(nil); !bytes.Equal(again, body) {
			t.Fatalf("%x was read as %+v, which is written as %x", body, token, again)
		}
		if !reflect.DeepEqual(token, token.canonical()) {
			t.Fatalf("%x: %+v is not canonical", body, token)
		}
	})
}

func FuzzOpenTakesOnlyWhatSealMade(f *testing.F) {
	k := mustKeyring(f, testKey("a"), testKey("b"))
	for _, token := range canonicalTokens {
		f.Add(k.Seal(token))
		f.Add(mustKeyring(f, testKey("b")).Seal(token))
		f.Add(mustKeyring(f, testKey("c")).Seal(token))
		f.Add(tokenText(f, token))
	}
	f.Add(strings.Repeat("A", 1000))
	f.Fuzz(func(t *testing.T, text string) {
		token, err := k.Open(text)
		if err != nil {
			if !errors.Is(err, ErrInvalidToken) || !reflect.DeepEqual(token, Token{}) {
				t.Fatalf("%q: %v, %+v", text, err, token)
			}
			return
		}
		if text != k.Seal(token) && text != mustKeyring(t, testKey("b")).Seal(token) {
			t.Fatalf("%q was opened as %+v, and no key seals that so", text, token)
		}
	})
}

func FuzzMergeIsAJoin(f *testing.F) {
	f.Add([]byte{})
	f.Add([]byte("\x01\x05\x01\x01\x01\x01\x01\x01\x02\x02\x02\x02\x02\x00\x03\x01\x00\x01\x02\x01"))
	f.Add(bytes.Repeat([]byte{5, 1, 2, 7, 3}, 24))
	f.Fuzz(func(t *testing.T, seed []byte) { checkMerge(t, smallTokens(seed)) })
}
