//go:build linux

package host

import (
	"fmt"
	"os"
	"strconv"
	"strings"
	"time"

	"github.com/s3-csi/s3-csi-driver/pkg/cputime"
	"github.com/s3-csi/s3-csi-driver/pkg/fault"
)

// CPUTime is the user and system time that the process has used so far, all its threads together, in steps of 10 ms.
// Where no process of that pid has that real uid, because it ended and the pid may be another's by now, the error is a
// fault.NotFound. Nothing is read that waits for the process's memory, so that it answers for a process that hangs.
func CPUTime(pid int, uid uint32) (time.Duration, error) {
	// The owner is read after the time: a pid that has changed hands in between then shows the new owner's uid. A
	// process of the same uid is the same mount's.
	stat, err := os.ReadFile(procPath(pid, "stat"))
	if err != nil {
		return 0, noProcess(pid, uid, err)
	}
	status, err := os.ReadFile(procPath(pid, "status"))
	if err != nil {
		return 0, noProcess(pid, uid, err)
	}
	owner, err := statusUID(string(status))
	if err != nil {
		return 0, fmt.Errorf("finding the owner of process %d: %w", pid, err)
	}
	if owner != uid {
		return 0, fault.Errorf(fault.NotFound, "process %d is not of uid %d but of %d", pid, uid, owner)
	}
	used, err := cputime.Parse(string(stat))
	if err != nil {
		return 0, fmt.Errorf("finding the CPU time of process %d: %w", pid, err)
	}
	return used, nil
}

// noProcess gives the error of a read in /proc its kind.
func noProcess(pid int, uid uint32, err error) error {
	if isGone(err) {
		return fault.Errorf(fault.NotFound, "there is no process %d (of uid %d) any more: %w", pid, uid, err)
	}
	return fmt.Errorf("finding the CPU time of process %d: %w", pid, err)
}

// statusUID reads the real uid from the text of /proc/<pid>/status, proc_pid_status(5).
func statusUID(status string) (uint32, error) {
	for line := range strings.Lines(status) {
		value, ok := strings.CutPrefix(line, "Uid:")
		if !ok {
			continue
		}
		fields := strings.Fields(value)
		if len(fields) == 0 {
			break
		}
		uid, err := strconv.ParseUint(fields[0], 10, 32)
		if err != nil {
			return 0, fmt.Errorf("status: %w", err)
		}
		return uint32(uid), nil
	}
	return 0, fmt.Errorf("status names no uid: %q", status)
}
