package pgsplit

import (
	"cmp"
	"database/sql/driver"
	"errors"
	"fmt"
	"strconv"
	"strings"
)

// LSN is a position in the write-ahead log of a PostgreSQL cluster, as its type pg_lsn. Zero means no position.
//
// It travels as PostgreSQL prints it, `16/B374D848`: as text, in JSON, as a query argument and as a scanned column.
type LSN uint64

// ParseLSN reads a position in either of PostgreSQL's text forms: `0/301F7C0`, and since 19 the padded `0/0301F7C0`
// (F15).
func ParseLSN(s string) (LSN, error) {
	high, low, found := strings.Cut(s, "/")
	hi, errHigh := parseHalf(high)
	lo, errLow := parseHalf(low)
	if !found || errHigh != nil || errLow != nil {
		return 0, fmt.Errorf("pgsplit: %.40q is not a log sequence number such as 16/B374D848", s)
	}
	return LSN(hi<<32 | lo), nil
}

var errHalf = errors.New("not 1 to 8 hexadecimal digits")

// parseHalf takes what pg_lsn's own input takes: no sign, no blank, no prefix.
func parseHalf(s string) (uint64, error) {
	if len(s) == 0 || len(s) > 8 || strings.ContainsAny(s, "+-_xX") {
		return 0, errHalf
	}
	return strconv.ParseUint(s, 16, 32)
}

// String is the form that every server version reads: `16/B374D848`.
func (l LSN) String() string {
	return fmt.Sprintf("%X/%X", uint32(l>>32), uint32(l))
}

// Compare is -1 if l is before o, 0 if they are equal, 1 if l is after o.
func (l LSN) Compare(o LSN) int { return cmp.Compare(l, o) }

// Scan implements sql.Scanner for a pg_lsn or text column; NULL is the zero LSN.
func (l *LSN) Scan(src any) error {
	switch v := src.(type) {
	case nil:
		*l = 0
		return nil
	case string:
		return l.UnmarshalText([]byte(v))
	case []byte:
		return l.UnmarshalText(v)
	}
	return fmt.Errorf("pgsplit: cannot scan %T into an LSN", src)
}

// Value implements driver.Valuer: the text that a pg_lsn parameter takes.
func (l LSN) Value() (driver.Value, error) { return l.String(), nil }

// MarshalText implements encoding.TextMarshaler, and with it JSON.
func (l LSN) MarshalText() ([]byte, error) { return []byte(l.String()), nil }

// UnmarshalText implements encoding.TextUnmarshaler; it takes what ParseLSN takes.
func (l *LSN) UnmarshalText(text []byte) error {
	v, err := ParseLSN(string(text))
	if err != nil {
		return err
	}
	*l = v
	return nil
}

// Sizes of the headers that start each page and each segment of the log, on a server with 8-byte alignment.
const (
	pageHeader    = 24
	segmentHeader = 40
)

// walGeometry is the layout of a cluster's log: wal_block_size and wal_segment_size, in bytes.
type walGeometry struct {
	block, segment uint64
}

// replayable is the position that a standby reaches once it has all that lies before l. An insert position just behind
// a page header, where nothing was written yet, is one that an idle standby never reaches (F3).
func (g walGeometry) replayable(l LSN) LSN {
	switch {
	case g.segment != 0 && uint64(l)%g.segment == segmentHeader:
		return l - segmentHeader
	case g.block != 0 && uint64(l)%g.block == pageHeader:
		return l - pageHeader
	}
	return l
}
