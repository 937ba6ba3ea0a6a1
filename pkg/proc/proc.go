// Package proc reads what /proc shows of processes. It reads only files that never block with a process that waits for a FUSE client.
// Others do: cmdline, environ and maps, and while the process is stuck in execve(2) also stat and every link.
package proc

import (
	"errors"
	"fmt"
	"os"
	"path"
	"strconv"

	"golang.org/x/sys/unix"
)

// Dir shows the processes of this process's PID namespace, which is the host's in the driver.
const Dir = "/proc"

// Path returns the path of a file of a process.
func Path(pid int, elem ...string) string {
	return path.Join(append([]string{Dir, strconv.Itoa(pid)}, elem...)...)
}

// PIDs lists the pids of all processes.
func PIDs() ([]int, error) {
	dir, err := os.Open(Dir)
	if err != nil {
		return nil, fmt.Errorf("list processes: %w", err)
	}
	defer dir.Close()
	names, err := dir.Readdirnames(-1)
	if err != nil {
		return nil, fmt.Errorf("list processes: %w", err)
	}
	var pids []int
	for _, name := range names {
		if pid, err := strconv.Atoi(name); err == nil && pid > 0 {
			pids = append(pids, pid)
		}
	}
	return pids, nil
}

// Gone reports whether a file in /proc could not be read because its process has exited.
func Gone(err error) bool { return errors.Is(err, unix.ENOENT) || errors.Is(err, unix.ESRCH) }
