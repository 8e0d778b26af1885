package pgsplit

import (
	"encoding/json"
	"testing"
)

func TestAnLSNIsReadInBothOfPostgresTextForms(t *testing.T) {
	for text, want := range map[string]LSN{
		"0/0":               0,
		"0/301F7C0":         0x301F7C0,
		"0/0301F7C0":        0x301F7C0, // 19 pads (F15)
		"16/B374D848":       0x16_B374D848,
		"16/b374d848":       0x16_B374D848,
		"FFFFFFFF/FFFFFFFF": ^LSN(0),
	} {
		if got, err := ParseLSN(text); err != nil || got != want {
			t.Errorf("%s: %x, %v", text, uint64(got), err)
		}
	}
	for _, text := range []string{"", "/", "0/", "/0", "0", "0/0/0", " 0/0", "0/0 ", "0x1/0", "-1/0", "+1/0", "1_0/0",
		"123456789/0", "0/123456789", "g/0", "0/0\n"} {
		if got, err := ParseLSN(text); err == nil {
			t.Errorf("%q was read as %s", text, got)
		}
	}
}

func TestAnLSNTravelsThroughTextJSONAndColumns(t *testing.T) {
	want := LSN(0x16_0374D848)
	if want.String() != "16/374D848" {
		t.Error(want)
	}
	encoded, err := json.Marshal(map[string]LSN{"lsn": want})
	if err != nil || string(encoded) != `{"lsn":"16/374D848"}` {
		t.Errorf("%s %v", encoded, err)
	}
	var decoded map[string]LSN
	if err := json.Unmarshal(encoded, &decoded); err != nil || decoded["lsn"] != want {
		t.Error(decoded, err)
	}
	if v, err := want.Value(); err != nil || v != "16/374D848" {
		t.Error(v, err)
	}
	for _, src := range []any{"16/374D848", []byte("16/0374D848")} {
		var got LSN
		if err := got.Scan(src); err != nil || got != want {
			t.Errorf("%T: %s %v", src, got, err)
		}
	}
	got := want
	if err := got.Scan(nil); err != nil || got != 0 {
		t.Error(got, err)
	}
	if got.Scan(7) == nil || got.Scan("7") == nil {
		t.Error("scanned what is no position")
	}
	if want.Compare(want-1) != 1 || want.Compare(want) != 0 || want.Compare(want+1) != -1 {
		t.Error("Compare")
	}
}

func FuzzParseLSN(f *testing.F) {
	for _, text := range []string{"0/0", "16/B374D848", "0/0301F7C0", "x", "FFFFFFFF/FFFFFFFF"} {
		f.Add(text)
	}
	f.Fuzz(func(t *testing.T, text string) {
		lsn, err := ParseLSN(text)
		if err != nil {
			return
		}
		if again, err := ParseLSN(lsn.String()); err != nil || again != lsn {
			t.Errorf("%q is %s, which is %s: %v", text, lsn, again, err)
		}
	})
}

// F3: positions just behind a header where nothing was written yet are never reached by an idle standby.
func TestAPositionBehindAHeaderIsMappedToTheBoundary(t *testing.T) {
	g := walGeometry{block: 8192, segment: 16 << 20}
	segment := LSN(g.segment)
	for _, test := range []struct{ lsn, want LSN }{
		{5*segment + 40, 5 * segment},
		{5*segment + 24, 5*segment + 24 - 24}, // no record can end there; a segment is a page as well
		{5*segment + 8192 + 24, 5*segment + 8192},
		{5*segment + 8192 + 40, 5*segment + 8192 + 40}, // a record's own bytes
		{5*segment + 8192, 5*segment + 8192},
		{5*segment + 8192 + 32, 5*segment + 8192 + 32},
		{0, 0},
	} {
		if got := g.replayable(test.lsn); got != test.want {
			t.Errorf("%s: got %s, want %s", test.lsn, got, test.want)
		}
	}
	if got := (walGeometry{}).replayable(24); got != 24 {
		t.Errorf("without a known geometry: %s", got)
	}
}
