package proc

import (
	"errors"
	"fmt"
	"time"

	"golang.org/x/sys/unix"
)

// CPUTime returns the user and system time that all threads of a process have used so far. A process that is idle or unresponsive uses
// none. It reads the process's clock, because the file stat blocks while the process is stuck in execve(2).
func CPUTime(pid int) (time.Duration, error) {
	var used unix.Timespec
	clock := int32(^pid << 3) // MAKE_PROCESS_CPUCLOCK of the kernel's include/linux/posix-timers_types.h
	err := unix.ClockGettime(clock, &used)
	if errors.Is(err, unix.EINVAL) { // no process has that pid
		err = unix.ESRCH
	}
	if err != nil {
		return 0, fmt.Errorf("read the CPU time of process %d: %w", pid, err)
	}
	return time.Duration(used.Nano()), nil
}
