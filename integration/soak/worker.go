package soak

import (
	"bufio"
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"github.com/pgsplit/pgsplit"
)

// Workload says what the generators of a run do. Zero fields have the defaults that Options.complete gives.
type Workload struct {
	Callers int            // in each process
	Keys    int            // shared by all
	Pace    time.Duration  // between two scenarios of a caller
	Mix     map[string]int // weights of scenarios by name; see scenarios
	Commit  []string       // settings of synchronous_commit that writes use; empty: the server's
	MaxWait time.Duration  // the longest MaxWait of a read
	Budget  time.Duration  // that most operations have
}

// assignment is what the parent tells a worker.
type assignment struct {
	Workload
	DSN     string
	Process int
	Seed    uint64
	History string // file to write
}

// workerVariable holds the assignment, as JSON, in the environment of a worker.
const workerVariable = "PGSPLIT_SOAK_WORKER"

// IsWorker tells whether this process was started as a worker. It should call Work then, and end.
func IsWorker() bool { return os.Getenv(workerVariable) != "" }

// message is a line between a worker and its parent.
type message struct {
	Handover *handover `json:"handover,omitempty"`
	Column   string    `json:"column,omitempty"` // that register has from now on
}

// handover is a session's token on its way to another caller, and what that caller has to know to be judged.
type handover struct {
	Token uint64   `json:"token"` // the operation that took it
	Form  string   `json:"form"`  // sealed or text
	Text  string   `json:"text"`
	Carry bool     `json:"carry"`
	After []uint64 `json:"after,omitempty"`
	Keys  []int    `json:"keys"` // worth reading
}

// sealedForm and textForm are a handover's forms.
const (
	sealedForm = "sealed"
	textForm   = "text"
)

// promise is a position that covers all writes up to when it was asked for.
type promise struct {
	floor *Op
	lsn   pgsplit.LSN
}

// worker is one process of callers.
type worker struct {
	assignment
	db      *sql.DB
	keyring *pgsplit.Keyring
	history *recorder
	clock   clock
	ids     atomic.Uint64
	inbox   chan handover
	column  atomic.Pointer[string]

	promises [64]atomic.Pointer[promise] // the latest ones
	promised atomic.Uint64

	mu  sync.Mutex
	out *json.Encoder // guarded by mu
}

// Work runs the generators of this process until its standard input ends. It exchanges tokens with other workers through
// standard input and output.
func Work(in io.Reader, out io.Writer) error {
	w := &worker{clock: newClock(), inbox: make(chan handover, 64), out: json.NewEncoder(out)}
	if err := json.Unmarshal([]byte(os.Getenv(workerVariable)), &w.assignment); err != nil {
		return fmt.Errorf("%s: %w", workerVariable, err)
	}
	config, err := pgsplit.ParseDSN(w.DSN)
	if err != nil {
		return err
	}
	config.OnDecision = decided
	if w.db, err = pgsplit.OpenDB(config); err != nil {
		return err
	}
	defer w.db.Close()
	w.db.SetMaxIdleConns(w.Callers)
	// Known to all workers. It is no secret here.
	if w.keyring, err = pgsplit.NewKeyring([]byte("the key that all workers of a soak share")); err != nil {
		return err
	}
	if w.history, err = newRecorder(w.History); err != nil {
		return err
	}
	ctx, stop := context.WithCancel(context.Background())
	var all sync.WaitGroup
	all.Go(func() { w.flushUntil(ctx) })
	for i := range w.Callers {
		c := &caller{worker: w, number: i, rand: rand.New(rand.NewPCG(w.Seed, uint64(w.Process)<<32|uint64(i)))}
		all.Go(func() { c.run(ctx) })
	}
	err = w.listen(in)
	stop()
	all.Wait()
	return errors.Join(err, w.history.close())
}

// listen takes what the parent sends until it ends.
func (w *worker) listen(in io.Reader) error {
	lines := bufio.NewScanner(in)
	for lines.Scan() {
		var m message
		if err := json.Unmarshal(lines.Bytes(), &m); err != nil {
			return fmt.Errorf("from the parent: %w", err)
		}
		if m.Column != "" {
			w.column.Store(&m.Column)
		}
		if m.Handover != nil {
			select {
			case w.inbox <- *m.Handover:
			default: // nobody has time for it
			}
		}
	}
	return lines.Err()
}

// flushUntil makes the history readable while it is written.
func (w *worker) flushUntil(ctx context.Context) {
	tick := time.NewTicker(200 * time.Millisecond)
	defer tick.Stop()
	for {
		select {
		case <-tick.C:
			w.history.flush()
		case <-ctx.Done():
			return
		}
	}
}

// offer hands a token to whichever caller of whichever process takes it.
func (w *worker) offer(h handover) {
	w.mu.Lock()
	defer w.mu.Unlock()
	_ = w.out.Encode(message{Handover: &h}) // without a parent the worker is about to end
}
