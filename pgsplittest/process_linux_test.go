package pgsplittest

import (
	"bufio"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
)

// The servers of a process that is killed end with it: this test runs itself in a second process, and kills that.
func TestServersEndWithTheirProcess(t *testing.T) {
	NeedServer(t)
	const role = "PGSPLITTEST_VICTIM"
	if os.Getenv(role) != "" {
		c := Start(t, Replicas(1))
		var pids []int
		for _, s := range c.Servers() {
			pids = append(pids, processes(t, s)...)
		}
		fmt.Println("pids", strings.Trim(fmt.Sprint(pids), "[]"))
		fmt.Println("folder", c.folder)
		<-t.Context().Done() // never: killed before
	}
	victim := exec.Command(os.Args[0], "-test.run=^TestServersEndWithTheirProcess$")
	victim.Env = append(os.Environ(), role+"=1")
	out, err := victim.StdoutPipe()
	must(t, err)
	must(t, victim.Start())
	defer victim.Wait()
	defer victim.Process.Kill()
	var pids []int
	var folder string
	for lines := bufio.NewScanner(out); folder == "" && lines.Scan(); {
		fields := strings.Fields(lines.Text())
		switch {
		case len(fields) > 1 && fields[0] == "pids":
			for _, f := range fields[1:] {
				pid, err := strconv.Atoi(f)
				must(t, err)
				pids = append(pids, pid)
			}
		case len(fields) == 2 && fields[0] == "folder":
			folder = fields[1]
		}
	}
	if len(pids) < 6 || folder == "" {
		t.Fatalf("the second process started %v in %q", pids, folder)
	}
	must(t, victim.Process.Kill())
	for _, pid := range pids {
		eventually(t, fmt.Sprintf("end of process %d", pid), func() bool { return gone(pid) })
	}
	// What starts a cluster does. Another process's test may be at it already, and have the folder's lock.
	eventually(t, "removal of "+folder, func() bool {
		sweep(filepath.Dir(folder))
		_, err := os.Stat(folder)
		return errors.Is(err, fs.ErrNotExist)
	})
}
