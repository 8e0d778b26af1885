//go:build darwin || dragonfly || freebsd || netbsd || openbsd

package pgsplittest

import (
	"os/exec"
	"strconv"
	"strings"
	"syscall"
)

// dieWithParent does nothing: only Linux can. A server left behind ends when its folder is swept away.
func dieWithParent(*exec.Cmd) {}

func memoryFolder() string { return "" }

// children returns the processes whose parent is pid.
func children(pid int) ([]int, error) {
	out, err := exec.Command("ps", "-A", "-o", "pid=,ppid=").Output()
	if err != nil {
		return nil, err
	}
	var pids []int
	for line := range strings.Lines(string(out)) {
		fields := strings.Fields(line)
		if len(fields) != 2 || fields[1] != strconv.Itoa(pid) {
			continue
		}
		if child, err := strconv.Atoi(fields[0]); err == nil {
			pids = append(pids, child)
		}
	}
	return pids, nil
}

// gone tells whether a process has ended.
func gone(pid int) bool {
	return syscall.Kill(pid, 0) == syscall.ESRCH
}
