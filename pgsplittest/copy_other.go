//go:build !linux

package pgsplittest

import "os"

// copyRange appends n bytes of a file from the offset on to another one.
func copyRange(to, from *os.File, offset, n int64) error { return copyBytes(to, from, offset, n) }
