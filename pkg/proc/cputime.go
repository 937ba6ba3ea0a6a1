package proc

import (
	"fmt"
	"os"
	"strconv"
	"strings"
	"time"
)

// tick is the unit of utime and stime in /proc/<pid>/stat: sysconf(_SC_CLK_TCK) is 100 on every architecture that Go
// runs on (USER_HZ in the kernel's include/asm-generic/param.h).
const tick = time.Second / 100

// CPUTime returns the user and system time that all threads of a process have used so far, in steps of 10 ms. A process that
// is idle or unresponsive uses none.
func CPUTime(pid int) (time.Duration, error) {
	stat, err := os.ReadFile(Path(pid, "stat"))
	if err != nil {
		return 0, fmt.Errorf("read the CPU time of process %d: %w", pid, err)
	}
	used, err := parseCPUTime(string(stat))
	if err != nil {
		return 0, fmt.Errorf("read the CPU time of process %d: %w", pid, err)
	}
	return used, nil
}

// parseCPUTime reads utime and stime, fields 14 and 15, from the text of /proc/<pid>/stat (proc_pid_stat(5)).
func parseCPUTime(stat string) (time.Duration, error) {
	// The second field is the program's name in brackets, which may hold brackets and spaces itself.
	end := strings.LastIndexByte(stat, ')')
	if end < 0 {
		return 0, fmt.Errorf("stat has no program name: %q", stat)
	}
	fields := strings.Fields(stat[end+1:]) // from field 3 on
	const utime, stime = 14 - 3, 15 - 3
	if len(fields) <= stime {
		return 0, fmt.Errorf("stat has %d fields after the program's name, too few: %q", len(fields), stat)
	}
	var ticks uint64
	for _, field := range fields[utime : stime+1] {
		value, err := strconv.ParseUint(field, 10, 62) // two of them cannot overflow
		if err != nil {
			return 0, fmt.Errorf("stat: %w", err)
		}
		ticks += value
	}
	const most = uint64((1<<63 - 1) / tick)
	return time.Duration(min(ticks, most)) * tick, nil
}
