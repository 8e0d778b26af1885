//go:build !(darwin || dragonfly || freebsd || linux || netbsd || openbsd)

package pgsplittest

import (
	"errors"
	"os"
	"os/exec"
	"syscall"
)

// Elsewhere than on Unix the package compiles, so that tests that use it do, and starts nothing.

const (
	sigFast      = syscall.SIGINT
	sigImmediate = syscall.SIGQUIT
	sigFreeze    = syscall.SIGQUIT
	sigThaw      = syscall.SIGQUIT
	sigKill      = syscall.SIGKILL
)

var errNotUnix = errors.New("pgsplittest: servers can be started on Unix only")

type owner struct {
	name string
}

func serverOwner() (*owner, error)            { return nil, errNotUnix }
func runAs(*exec.Cmd, *owner)                 {}
func dieWithParent(*exec.Cmd)                 {}
func giveTo(*owner, string) error             { return errNotUnix }
func reachable(*owner, string) bool           { return false }
func tryLock(*os.File) bool                   { return false }
func signalProcess(int, syscall.Signal) error { return errNotUnix }
func memoryFolder() string                    { return "" }
func children(int) ([]int, error)             { return nil, errNotUnix }
func gone(int) bool                           { return true }
