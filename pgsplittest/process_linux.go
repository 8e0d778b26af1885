package pgsplittest

import (
	"os"
	"os/exec"
	"strconv"
	"strings"
	"syscall"
)

// dieWithParent has the kernel shut a server down at once when the thread that started it ends, so that no server
// outlives a test process that crashed. Whoever starts the process must keep its thread for as long as the process
// lives (see launch).
func dieWithParent(cmd *exec.Cmd) {
	cmd.SysProcAttr.Pdeathsig = syscall.SIGQUIT
}

// memoryFolder returns a folder in memory with more than 1 GiB free, or "".
func memoryFolder() string {
	const dir, needed = "/dev/shm", 1 << 30
	var fs syscall.Statfs_t
	if err := syscall.Statfs(dir, &fs); err != nil || fs.Bavail*uint64(fs.Bsize) < needed {
		return ""
	}
	return dir
}

// children returns the processes whose parent is pid.
func children(pid int) ([]int, error) {
	entries, err := os.ReadDir("/proc")
	if err != nil {
		return nil, err
	}
	var pids []int
	for _, e := range entries {
		child, err := strconv.Atoi(e.Name())
		if err != nil {
			continue
		}
		if _, parent, ok := processState(child); ok && parent == pid {
			pids = append(pids, child)
		}
	}
	return pids, nil
}

// gone tells whether a process has ended, be it that nobody has asked for its exit status yet.
func gone(pid int) bool {
	state, _, ok := processState(pid)
	return !ok || state == "Z" || state == "X"
}

func processState(pid int) (state string, parent int, ok bool) {
	data, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/stat")
	if err != nil {
		return "", 0, false
	}
	// "pid (name) state parent ...", where the name may hold blanks and parentheses.
	stat := string(data)
	fields := strings.Fields(stat[strings.LastIndexByte(stat, ')')+1:])
	if len(fields) < 2 {
		return "", 0, false
	}
	parent, err = strconv.Atoi(fields[1])
	return fields[0], parent, err == nil
}
