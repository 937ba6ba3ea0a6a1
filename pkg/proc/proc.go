// Package proc reads what /proc shows of processes. It reads only files that never block with a process that waits for a FUSE client.
// Others do: cmdline, environ and maps, and while the process is stuck in execve(2) also stat and every link.
package proc

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path"
	"slices"
	"strconv"
	"strings"
	"time"

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

// Status is the text of /proc/<pid>/status (proc_pid_status(5)).
type Status []byte

// ReadStatus reads the status of a process. Gone reports whether an error means that the process has exited.
func ReadStatus(pid int) (Status, error) { return new(StatusReader).Read(pid) }

// StatusReader reads the statuses of many processes without an allocation for each.
type StatusReader struct{ buf []byte }

// statusSize is more than the size of a status, in bytes. A longer one, of a process in many groups, is read as well.
const statusSize = 4 << 10

// Read is ReadStatus. The status is valid until the next call.
func (r *StatusReader) Read(pid int) (Status, error) {
	fd, err := Retry(func() (int, error) { return unix.Open(Path(pid, "status"), unix.O_RDONLY|unix.O_CLOEXEC, 0) })
	if err != nil {
		return nil, fmt.Errorf("open the status of process %d: %w", pid, err)
	}
	defer unix.Close(fd)
	if r.buf, err = ReadAll(fd, r.buf[:0]); err != nil {
		return nil, fmt.Errorf("read the status of process %d: %w", pid, err)
	}
	return r.buf, nil
}

// ReadAll appends the rest of an open file to buf. Unlike os.File, it does not add the file to Go's poller.
func ReadAll(fd int, buf []byte) ([]byte, error) {
	for {
		if len(buf) == cap(buf) {
			buf = slices.Grow(buf, statusSize)
		}
		n, err := Retry(func() (int, error) { return unix.Read(fd, buf[len(buf):cap(buf)]) })
		if n <= 0 {
			return buf, err
		}
		buf = buf[:len(buf)+n]
	}
}

// Retry repeats a system call that a signal interrupted.
func Retry(call func() (int, error)) (n int, err error) {
	for {
		if n, err = call(); !errors.Is(err, unix.EINTR) {
			return n, err
		}
	}
}

// Field returns the value of a field, "" if the kernel does not show it. The first field, Name, is the process's to choose, but it
// cannot hold a line break. It is not returned.
func (s Status) Field(name string) string {
	_, rest, _ := bytes.Cut(s, []byte("\n"+name+":"))
	line, _, _ := bytes.Cut(rest, []byte("\n"))
	return string(bytes.TrimSpace(line))
}

// UIDs returns the real and the effective uid.
func (s Status) UIDs() (ruid, euid uint32, ok bool) {
	fields := strings.Fields(s.Field("Uid"))
	if len(fields) != 4 {
		return 0, 0, false
	}
	r, rerr := strconv.ParseUint(fields[0], 10, 32)
	e, eerr := strconv.ParseUint(fields[1], 10, 32)
	return uint32(r), uint32(e), rerr == nil && eerr == nil
}

// Memory returns the resident memory in bytes, 0 if the process has exited.
func (s Status) Memory() uint64 {
	kib, err := strconv.ParseUint(strings.TrimSuffix(s.Field("VmRSS"), " kB"), 10, 53)
	if err != nil {
		return 0
	}
	return kib << 10
}

// Running reports whether the process, or a thread of it, has not exited.
func (s Status) Running() bool {
	state, threads := s.Field("State"), s.Field("Threads")
	switch {
	case state == "" || state[0] == 'X':
		return false
	case state[0] != 'Z':
		return true
	}
	// The first thread of this zombie has exited. Others that still run, or hang, are counted.
	return threads != "" && threads != "0" && threads != "1"
}

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
