//go:build linux

package host

import (
	"fmt"
	"os"
	"strconv"
	"strings"

	"github.com/s3-csi/s3-csi-driver/pkg/proc"
)

// processName returns the name of a process for messages: "bash (pid 12)". It reads only comm, because cmdline and environ are in
// the process's memory and can block with it.
func processName(pid int) string {
	comm, err := os.ReadFile(proc.Path(pid, "comm"))
	name := strings.TrimSuffix(string(comm), "\n")
	if err != nil || name == "" {
		return fmt.Sprintf("pid %d", pid)
	}
	if strings.ContainsFunc(name, func(r rune) bool { return r < ' ' || r == 0x7f }) {
		name = strconv.Quote(name)
	}
	return fmt.Sprintf("%s (pid %d)", name, pid)
}
