package pgsplit

import (
	"math"
	"sync/atomic"
	"time"
)

// moment is a time by the monotonic clock, in nanoseconds since the program began: whoever sets the wall clock does not
// move it, and it takes half as long to read. Zero is no time at all.
type moment int64

// never is a moment that does not come.
const never moment = math.MaxInt64

var programBegan = time.Now()

// present is the moment that it is now.
func present() moment { return moment(time.Since(programBegan)) }

// after is the moment when d has passed, at most never.
func (m moment) after(d time.Duration) moment { return m + min(moment(d), never-m) }

func (m moment) since(earlier moment) time.Duration { return time.Duration(m - earlier) }

// sharedMoment is a moment that goroutines share.
type sharedMoment struct{ n atomic.Int64 }

func (s *sharedMoment) load() moment { return moment(s.n.Load()) }

func (s *sharedMoment) store(m moment) { s.n.Store(int64(m)) }
