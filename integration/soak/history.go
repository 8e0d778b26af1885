package soak

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"sync"
	"time"
)

// Kind is what an operation does.
type Kind string

const (
	// KindWrite writes Writes.
	KindWrite Kind = "write"
	// KindRead reads Reads.
	KindRead Kind = "read"
	// KindForbidden is an attempt to write under ReadOnly.
	KindForbidden Kind = "forbidden"
	// KindSession begins a session, from Tokens if there are any.
	KindSession Kind = "session"
	// KindAdvance has a session go on from Tokens as well.
	KindAdvance Kind = "advance"
	// KindToken takes a session's token.
	KindToken Kind = "token"
	// KindFloor asks for a position that covers every commit so far.
	KindFloor Kind = "floor"
	// KindBegin begins a transaction that only reads. Its reads are operations of their own.
	KindBegin Kind = "begin"
)

// Outcome is how an operation completed.
type Outcome string

const (
	// OK has happened.
	OK Outcome = "ok"
	// Fail has certainly not happened.
	Fail Outcome = "fail"
	// Unknown may have happened, or may yet.
	Unknown Outcome = "unknown"
)

// Access is what the context of an operation says.
type Access string

const (
	// Unhinted says nothing.
	Unhinted Access = ""
	// ReadOnly is pgsplit.ReadOnly.
	ReadOnly Access = "readonly"
)

// Value is a version of a key, and the write that made it.
type Value struct {
	Key     int    `json:"k"`
	Version int64  `json:"v,omitempty"`
	Op      uint64 `json:"op,omitempty"`
}

// Op is one operation of a caller: invoked at Start, completed at End.
type Op struct {
	ID      uint64  `json:"id"` // the process in the upper bits, so that no two are the same
	Caller  int     `json:"caller"`
	Kind    Kind    `json:"kind"`
	Start   int64   `json:"start"` // nanoseconds since 1970, from a clock of the process that never goes back
	End     int64   `json:"end"`
	Outcome Outcome `json:"outcome"`
	Error   string  `json:"error,omitempty"`
	State   string  `json:"state,omitempty"` // its SQLSTATE

	Way     string  `json:"way,omitempty"` // how it was done, for people
	Access  Access  `json:"access,omitempty"`
	Session uint64  `json:"session,omitempty"` // the operation that began it
	Writes  []Value `json:"writes,omitempty"`  // keys, of which the ledger knows the versions
	Reads   []Value `json:"reads,omitempty"`
	Rows    []Value `json:"rows,omitempty"` // rows of the ledger that were read

	Partial bool `json:"partial,omitempty"` // it failed after some rows had come

	Carry     bool     `json:"carry,omitempty"`     // the session's tokens carry its reads
	Tokens    []uint64 `json:"tokens,omitempty"`    // operations of KindToken
	After     []uint64 `json:"after,omitempty"`     // writes whose tokens were taken before they committed
	FloorOf   uint64   `json:"floorOf,omitempty"`   // the operation of KindFloor whose position is the read's floor
	Staleness int64    `json:"staleness,omitempty"` // MaxStaleness of the read
	Tx        uint64   `json:"tx,omitempty"`        // the operation that began its transaction
	Since     int64    `json:"since,omitempty"`     // when its snapshot was not taken yet, if not Start
	Budget    int64    `json:"budget,omitempty"`    // how long the caller gave it

	Standby bool   `json:"standby,omitempty"` // the server that read was in recovery
	Port    int    `json:"port,omitempty"`    // its port
	Server  string `json:"server,omitempty"`  // what Config.OnDecision said last
	Role    string `json:"role,omitempty"`
	Reason  string `json:"reason,omitempty"`
	Floor   string `json:"floor,omitempty"`
}

// processBits are the bits of an operation's ID below the number of its process.
const processBits = 40

// Process is the number of the process that the operation is of.
func (o *Op) Process() int { return int(o.ID >> processBits) }

// since is from when on the operation has to see things.
func (o *Op) since() int64 {
	if o.Since != 0 {
		return o.Since
	}
	return o.Start
}

// Fault is one act of the nemesis, from its beginning until all was well again.
type Fault struct {
	Kind    string   `json:"kind"`
	Servers []string `json:"servers"`
	Down    bool     `json:"down,omitempty"` // the servers do not let everybody in, or cannot be reached
	Start   int64    `json:"start"`
	End     int64    `json:"end"`
	Error   string   `json:"error,omitempty"` // what went wrong with the nemesis itself
}

// History is all that happened in a run.
type History struct {
	Ops    []Op
	Faults []Fault
	Ledger []Value // what was there on the primary when the operations had completed, or later
}

// clock gives times that never go back within the process and that compare across the machine's processes.
type clock struct{ began time.Time }

func newClock() clock { return clock{time.Now()} }

func (c clock) now() int64 { return c.began.UnixNano() + int64(time.Since(c.began)) }

// recorder writes the operations of one process to a file. It is safe for concurrent use.
type recorder struct {
	mu   sync.Mutex
	file *os.File      // guarded by mu
	out  *bufio.Writer // guarded by mu
	err  error         // the first one; guarded by mu
}

func newRecorder(path string) (*recorder, error) {
	file, err := os.Create(path)
	if err != nil {
		return nil, err
	}
	return &recorder{file: file, out: bufio.NewWriterSize(file, 64<<10)}, nil
}

func (r *recorder) record(v any) {
	line, err := json.Marshal(v)
	r.mu.Lock()
	defer r.mu.Unlock()
	if err == nil {
		_, err = r.out.Write(append(line, '\n'))
	}
	r.err = errors.Join(r.err, err)
}

// flush makes what was recorded readable.
func (r *recorder) flush() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.err = errors.Join(r.err, r.out.Flush())
}

func (r *recorder) close() error {
	r.flush()
	r.mu.Lock()
	defer r.mu.Unlock()
	return errors.Join(r.err, r.file.Close())
}

// readLines decodes a file of JSON lines. A last line that is not complete is left out: its writer still runs, or was
// killed.
func readLines[T any](path string) ([]T, error) {
	file, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer file.Close()
	var all []T
	in := bufio.NewReaderSize(file, 64<<10)
	for {
		line, err := in.ReadBytes('\n')
		if errors.Is(err, io.EOF) {
			return all, nil
		}
		if err != nil {
			return nil, err
		}
		var v T
		if err := json.Unmarshal(line, &v); err != nil {
			return nil, fmt.Errorf("%s: line %d: %w", path, len(all)+1, err)
		}
		all = append(all, v)
	}
}
