//go:build darwin || dragonfly || freebsd || linux || netbsd || openbsd

package pgsplittest

import (
	"fmt"
	"os"
	"os/exec"
	"os/user"
	"path/filepath"
	"strconv"
	"syscall"
)

const (
	sigFast      = syscall.SIGINT
	sigImmediate = syscall.SIGQUIT
	sigFreeze    = syscall.SIGSTOP
	sigThaw      = syscall.SIGCONT
	sigKill      = syscall.SIGKILL
)

// owner is the user who runs the servers when this process is root.
type owner struct {
	name     string
	uid, gid int
}

// serverOwner returns nil unless this process is root: PostgreSQL refuses to run as root.
func serverOwner() (*owner, error) {
	if os.Geteuid() != 0 {
		return nil, nil
	}
	for _, name := range []string{"postgres", "nobody"} {
		u, err := user.Lookup(name)
		if err != nil {
			continue
		}
		uid, uidErr := strconv.Atoi(u.Uid)
		gid, gidErr := strconv.Atoi(u.Gid)
		if uidErr != nil || gidErr != nil || uid == 0 {
			continue
		}
		return &owner{name: name, uid: uid, gid: gid}, nil
	}
	return nil, fmt.Errorf("pgsplittest: PostgreSQL does not run as root, and there is no user postgres or nobody to run it")
}

func runAs(cmd *exec.Cmd, own *owner) {
	// A process group of its own keeps a Ctrl-C in the terminal away: the cluster is closed in order instead.
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	if own != nil {
		cmd.SysProcAttr.Credential = &syscall.Credential{Uid: uint32(own.uid), Gid: uint32(own.gid)}
	}
}

// giveTo makes own the owner of a file or folder that this process created.
func giveTo(own *owner, path string) error {
	if own == nil {
		return nil
	}
	return os.Lchown(path, own.uid, own.gid)
}

// reachable tells whether own may enter dir.
func reachable(own *owner, dir string) bool {
	if own == nil {
		return true
	}
	for {
		info, err := os.Stat(dir)
		if err != nil {
			return false
		}
		stat, ok := info.Sys().(*syscall.Stat_t)
		mine := ok && int(stat.Uid) == own.uid && info.Mode().Perm()&0o100 != 0
		if !mine && info.Mode().Perm()&0o001 == 0 {
			return false
		}
		parent := filepath.Dir(dir)
		if parent == dir {
			return true
		}
		dir = parent
	}
}

// tryLock takes the lock on an open file, which ends with the process at the latest, or returns false.
func tryLock(f *os.File) bool {
	return syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB) == nil
}

func signalProcess(pid int, sig syscall.Signal) error {
	if err := syscall.Kill(pid, sig); err != nil && err != syscall.ESRCH {
		return fmt.Errorf("signal %v to process %d: %w", sig, pid, err)
	}
	return nil
}
