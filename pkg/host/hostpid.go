//go:build linux

package host

import (
	"fmt"
	"os"
	"strconv"
	"strings"

	"github.com/s3-csi/s3-csi-driver/pkg/fault"
)

// initPIDNamespace is the link of the machine's first PID namespace, whose inode number is the same on every machine
// (PROC_PID_INIT_INO in the kernel's include/linux/proc_ns.h).
const initPIDNamespace = "pid:[4026531836]"

// HostPID returns nil if FUSE clients see the pids of the processes that call them, else a fault.Precondition with the reason. The
// kernel translates pids into the PID namespace in which the file system was mounted, so this process must be in the host's. The
// PID namespace of a nested host (a Kubernetes node that is a container) is not the machine's first one; it is refused only if it
// is clearly a container's or a pod's own.
func HostPID() error {
	self, err := os.Readlink("/proc/self")
	if err != nil {
		return fault.Errorf(fault.Precondition, "finding the PID namespace (is /proc mounted?): %w", err)
	}
	link, err := os.Readlink("/proc/self/ns/pid")
	if err != nil {
		return fault.Errorf(fault.Precondition, "finding the PID namespace: %w", err)
	}
	first, err := os.ReadFile("/proc/1/comm")
	if err != nil {
		return fault.Errorf(fault.Precondition, "finding the PID namespace: %w", err)
	}
	return hostPID(os.Getpid(), self, link, strings.TrimSpace(string(first)))
}

// hostPID is HostPID for given facts: this process's pid, the target of /proc/self, the PID namespace, and the name of PID 1.
func hostPID(pid int, self, namespace, first string) error {
	const remedy = "set hostPID: true on the node's pod (or --pid=host on its container)"
	var why string
	switch {
	case self != strconv.Itoa(pid):
		why = fmt.Sprintf("/proc belongs to another PID namespace than this process: it shows pid %d as %s", pid, self)
	case namespace == initPIDNamespace:
		return nil
	case pid == 1:
		why = "this process is PID 1 of a PID namespace of its own"
	case first == "pause":
		why = "this process is in its pod's own PID namespace"
	default:
		return nil
	}
	return fault.Errorf(fault.Precondition, "FUSE clients cannot see the pids of their callers: %s; %s", why, remedy)
}
