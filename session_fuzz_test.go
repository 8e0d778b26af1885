package pgsplit

import (
	"reflect"
	"testing"
	"time"
)

// neverConnected is a connector that no session asks anything.
func neverConnected(t testing.TB) *Connector {
	t.Helper()
	config, err := ParseDSN("postgres://127.0.0.1:1/db?replica=127.0.0.1:2")
	if err != nil {
		t.Fatal(err)
	}
	c, err := NewConnector(config)
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// clusterOf is a cluster that the token says something about, if there is one.
func clusterOf(token Token) uint64 {
	for _, f := range token.Floors {
		if f.System != anyCluster {
			return f.System
		}
	}
	return 7
}

// Whatever a token says, its session asks for nothing that the primary never had, once it was asked, and leaves a token that
// says no less about other clusters.
func FuzzASessionTakesWhateverATokenSays(f *testing.F) {
	for _, token := range canonicalTokens {
		body := token.appendBody(nil)
		f.Add(body, uint32(1), uint64(1<<30))
		f.Add(body, uint32(3), uint64(1))
	}
	c := neverConnected(f)
	f.Fuzz(func(t *testing.T, body []byte, timeline uint32, lsn uint64) {
		token, err := parseTokenBody(body)
		if err != nil {
			return
		}
		if timeline == 0 || LSN(lsn) == unproven {
			return // no primary is there
		}
		primary := floor{timeline, LSN(lsn)}
		system := clusterOf(token)
		s := SessionFromToken(token)
		claim := s.reads(c, system, time.Now())
		if claim.claimed {
			stood := s.judge(c, system, primary)
			judged := s.reads(c, system, time.Now())
			switch {
			case claim.floor.timeline > primary.timeline:
				if judged.floor != claim.floor {
					t.Fatalf("%+v: a primary that is behind made %+v of it", claim.floor, judged.floor)
				}
			case judged.floor.lsn > primary.lsn || judged.claimed:
				t.Fatalf("%+v: the primary is at %+v, and reads ask for %+v", claim.floor, primary, judged)
			case stood && judged.floor != claim.floor, !stood && judged.floor != primary:
				t.Fatalf("%+v: the primary is at %+v, it stands: %v, and reads ask for %+v", claim.floor, primary, stood, judged.floor)
			}
			if !stood && !s.Changed() {
				t.Fatalf("%+v: the caller gets no new token", claim.floor)
			}
		}
		left := s.TokenNow()
		if !reflect.DeepEqual(left, left.canonical()) {
			t.Fatalf("%+v is not canonical", left)
		}
		for _, before := range token.Floors {
			after, ok := left.Floor(before.System)
			switch {
			case before.System == anyCluster:
			case !ok, after.PinnedUntil.Before(before.PinnedUntil):
				t.Fatalf("%+v became %+v", before, after)
			case before.System != system && after != before && after.PinnedUntil != lastTokenTime:
				t.Fatalf("%+v of another cluster became %+v", before, after)
			}
		}
	})
}
