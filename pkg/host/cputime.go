//go:build linux

package host

import (
	"fmt"
	"time"

	"github.com/s3-csi/s3-csi-driver/pkg/fault"
	"github.com/s3-csi/s3-csi-driver/pkg/proc"
)

// CPUTime is proc.CPUTime of a process with that real uid. If no process has that pid and uid, because it exited and another
// process may have its pid, the error is a fault.NotFound.
func CPUTime(pid int, uid uint32) (time.Duration, error) {
	// The owner is read after the time: if the pid changes hands in between, the new owner shows. A process of the same uid
	// belongs to the same mount.
	used, err := proc.CPUTime(pid)
	if err != nil {
		return 0, noProcess(pid, uid, err)
	}
	status, err := proc.ReadStatus(pid)
	if err != nil {
		return 0, noProcess(pid, uid, fmt.Errorf("read the owner of process %d: %w", pid, err))
	}
	if owner, _, ok := status.UIDs(); !ok || owner != uid {
		return 0, fault.Errorf(fault.NotFound, "process %d does not belong to uid %d but to %q", pid, uid, status.Field("Uid"))
	}
	return used, nil
}

// noProcess returns the error of a read in /proc with its kind.
func noProcess(pid int, uid uint32, err error) error {
	if proc.Gone(err) {
		return fault.Errorf(fault.NotFound, "process %d of uid %d has exited: %w", pid, uid, err)
	}
	return err
}
