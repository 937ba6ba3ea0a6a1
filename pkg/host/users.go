package host

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/s3-csi/s3-csi-driver/pkg/fault"
	"github.com/s3-csi/s3-csi-driver/pkg/proc"
)

// maxUsers bounds the users of a mount that are named.
const maxUsers = 10

// Users returns up to ten processes that keep a mount busy, as "bash (pid 12)": their working or root directory, executable or an
// open file is on it. It reads only links and fdinfo in /proc, and so answers for an unresponsive mount, too. It does not see
// processes that this one may not inspect or that hang, nor memory maps of closed files.
func (n *Namespace) Users(ctx context.Context, m Mount) ([]string, error) {
	var users []string
	err := n.run(ctx, "searching for users of "+m.Mountpoint, nil, func() error {
		pids, err := proc.PIDs()
		if err != nil {
			return err
		}
		var found []string
		for _, pid := range pids {
			if ctx.Err() != nil || len(found) == maxUsers {
				break
			}
			find := look{pid: pid, what: "searching for users of " + m.Mountpoint}
			uses, _ := lookAt(ctx, &n.looks, find, func() (bool, error) { return usesMount(pid, m), nil })
			if uses {
				found = append(found, processName(pid))
			}
		}
		users = found
		return ctx.Err()
	})
	if err != nil {
		return nil, err
	}
	return users, nil
}

func usesMount(pid int, m Mount) bool {
	for _, link := range []string{"cwd", "root", "exe"} {
		place, err := os.Readlink(proc.Path(pid, link))
		if err == nil && isBelow(place, m.Mountpoint) && seesMount(pid, m) {
			return true
		}
	}
	fds, err := os.ReadDir(proc.Path(pid, "fdinfo"))
	if err != nil {
		return false
	}
	for _, fd := range fds {
		info, err := os.ReadFile(proc.Path(pid, "fdinfo", fd.Name()))
		if err != nil {
			continue
		}
		if id, ok := fdinfoMountID(string(info)); ok && id == m.ID {
			return true
		}
	}
	return false
}

// seesMount reports whether a mount is in a process's namespace. A path alone could be one of another namespace.
func seesMount(pid int, m Mount) bool {
	file := tableFile{path: proc.Path(pid, "mountinfo"), limit: maxTable, keep: func(its Mount) (Mount, bool) { return its, its.ID == m.ID }}
	table, err := file.parse(context.Background())
	return err == nil && len(table.mounts) > 0
}

func isBelow(place, dir string) bool {
	return place == dir || strings.HasPrefix(place, strings.TrimSuffix(dir, "/")+"/")
}

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

// CPUTime is proc.CPUTime of a process with that real uid. If no process has that pid and uid, because it exited and another
// process may have its pid, the error is a fault.NotFound.
func CPUTime(pid int, uid uint32) (time.Duration, error) {
	// The owner is read after the time: if the pid changes hands in between, the new owner shows. A process of the same uid
	// belongs to the same mount.
	used, err := proc.CPUTime(pid)
	if err != nil {
		return 0, noProcess(pid, uid, err)
	}
	_, err = statusOf(pid, uid)
	return used, err
}

// Memory returns the resident memory of a process with that real uid, in bytes. Its errors are those of CPUTime.
func Memory(pid int, uid uint32) (uint64, error) {
	status, err := statusOf(pid, uid)
	if err != nil {
		return 0, err
	}
	return status.Memory(), nil
}

// AwaitExit waits until the process with that pid and real uid has exited. It reports false if ctx ends before, and at once if there is
// no such process or the exit cannot be known.
func AwaitExit(ctx context.Context, pid int, uid uint32) (exited bool) {
	fd, err := unix.PidfdOpen(pid, unix.PIDFD_NONBLOCK)
	if err != nil {
		return false
	}
	process := os.NewFile(uintptr(fd), "pidfd")
	defer process.Close()
	if _, err := statusOf(pid, uid); err != nil { // after it was opened: the pid may have been reused
		return false
	}
	defer context.AfterFunc(ctx, func() { _ = process.SetReadDeadline(time.Unix(1, 0)) })()
	exit, err := process.SyscallConn()
	if err != nil {
		return false
	}
	err = exit.Read(func(fd uintptr) bool { // is called again when the process has exited
		n, err := unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}, 0)
		exited = n > 0
		return exited || err != nil && !errors.Is(err, unix.EINTR)
	})
	return exited && err == nil
}

// statusOf returns the status of a process with that real uid.
func statusOf(pid int, uid uint32) (status proc.Status, err error) {
	if status, err = proc.ReadStatus(pid); err != nil {
		return status, noProcess(pid, uid, fmt.Errorf("read the status of process %d: %w", pid, err))
	}
	if owner, _, ok := status.UIDs(); !ok || owner != uid {
		return status, fault.Errorf(fault.NotFound, "process %d does not belong to uid %d but to %q", pid, uid, status.Field("Uid"))
	}
	return status, nil
}

// noProcess returns the error of a read in /proc with its kind.
func noProcess(pid int, uid uint32, err error) error {
	if proc.Gone(err) {
		return fault.Errorf(fault.NotFound, "process %d of uid %d has exited: %w", pid, uid, err)
	}
	return err
}
