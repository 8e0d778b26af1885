package pgsplittest

import (
	"errors"
	"io"
	"os"
	"syscall"
)

// copyRange appends n bytes of a file from the offset on to another one. The kernel copies: the race detector would look at
// each of the bytes otherwise.
func copyRange(to, from *os.File, offset, n int64) error {
	out, in := int(to.Fd()), int(from.Fd())
	for n > 0 {
		sent, err := syscall.Sendfile(out, in, &offset, int(min(n, 1<<30)))
		switch {
		case errors.Is(err, syscall.EINTR):
		case err != nil: // not between these file systems
			return copyBytes(to, from, offset, n)
		case sent == 0:
			return io.ErrUnexpectedEOF
		}
		n -= int64(max(sent, 0))
	}
	return nil
}
