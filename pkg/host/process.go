//go:build linux

package host

import (
	"fmt"
	"os"
	"path"
	"strconv"
	"strings"
)

// procDir is where processes are seen. The driver's own /proc shows the host's processes, because it shares the host's
// PID namespace.
const procDir = "/proc"

// processes lists the pids in /proc, in its order.
func processes() ([]int, error) {
	dir, err := os.Open(procDir)
	if err != nil {
		return nil, fmt.Errorf("listing processes: %w", err)
	}
	defer dir.Close()
	names, err := dir.Readdirnames(-1)
	if err != nil {
		return nil, fmt.Errorf("listing processes: %w", err)
	}
	var pids []int
	for _, name := range names {
		if pid, err := strconv.Atoi(name); err == nil && pid > 0 {
			pids = append(pids, pid)
		}
	}
	return pids, nil
}

// procPath is the path of a file of a process.
func procPath(pid int, elem ...string) string {
	return path.Join(append([]string{procDir, strconv.Itoa(pid)}, elem...)...)
}

// processName is a process as it is named in messages: "bash (pid 12)". It reads only comm: cmdline and environ live in
// the process's memory and can hang with it.
func processName(pid int) string {
	comm, err := os.ReadFile(procPath(pid, "comm"))
	name := strings.TrimSuffix(string(comm), "\n")
	if err != nil || name == "" {
		return fmt.Sprintf("pid %d", pid)
	}
	if strings.ContainsFunc(name, func(r rune) bool { return r < ' ' || r == 0x7f }) {
		name = strconv.Quote(name)
	}
	return fmt.Sprintf("%s (pid %d)", name, pid)
}
