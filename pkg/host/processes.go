package host

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"strconv"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"
	"k8s.io/klog/v2"

	"github.com/s3-csi/s3-csi-driver/pkg/fault"
	"github.com/s3-csi/s3-csi-driver/pkg/proc"
)

const (
	// lookBound bounds a look at a process, which takes the kernel microseconds.
	lookBound = 500 * time.Millisecond
	// maxHung and maxHungEach bound the looks that hang, in all and for the processes of one pod or cgroup.
	maxHung, maxHungEach = 256, 4
)

// Looks bounds looks at processes. Most files of a process in /proc block while the process is stuck in execve(2), which waits for a FUSE
// client if the process has a changed page or an open file of its file system: also for root, and for as long as the client likes. So a look
// that does not return is abandoned, and there is no other at that process until it returns. The zero value is ready for use.
type Looks struct {
	mu   sync.Mutex
	hung map[*look]struct{}

	noPidfds bool // as on kernels that open no namespace of a pidfd; for tests
}

// look is a look at a process.
type look struct {
	pid  int
	what string
	// The rest is set when it hangs.
	process int    // its pidfd, as the pid may be reused; -1: it has exited
	account string // see accountOf
	started time.Time
}

// errHung is the error of a look at a process that hangs.
func errHung(pid int) error {
	return fault.Errorf(fault.Timeout, "%s hangs in the kernel", processName(pid))
}

// lookAt calls fn, which looks at a process, and returns its result. The error is a fault.Timeout if fn does not return in time; a later
// result that is an io.Closer is then closed.
func lookAt[T any](ctx context.Context, l *Looks, at look, fn func() (T, error)) (T, error) {
	type result struct {
		value T
		err   error
	}
	var none T
	if err := l.checkHung(ctx, at.pid); err != nil {
		return none, err
	}
	done, abandoned := make(chan result), make(chan struct{})
	at.process, at.started = -1, time.Now()
	go func() {
		value, err := fn()
		select {
		case done <- result{value, err}:
		case <-abandoned:
			if late, closable := any(value).(io.Closer); closable && err == nil {
				late.Close()
			}
			l.removeHung(&at)
		}
	}()
	bound := time.NewTimer(lookBound)
	defer bound.Stop()
	defer close(abandoned)
	select {
	case r := <-done:
		return r.value, r.err
	case <-bound.C:
		l.addHung(ctx, &at)
		return none, errHung(at.pid)
	}
}

// checkHung returns an error if no look at a process may begin.
func (l *Looks) checkHung(ctx context.Context, pid int) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(l.hung) == 0 {
		return nil
	}
	account, each := accountOf(pid), 0
	for h := range l.hung {
		if h.pid == pid && h.process >= 0 && !exited(h.process) {
			return errHung(pid)
		}
		if h.account == account {
			each++
		}
	}
	if each >= maxHungEach || len(l.hung) >= maxHung {
		return fault.Errorf(fault.Exhausted, "%s: not looked at, because %d processes of %s hang", processName(pid), each, account)
	}
	return nil
}

func (l *Looks) addHung(ctx context.Context, h *look) {
	h.account = accountOf(h.pid)
	if process, err := unix.PidfdOpen(h.pid, 0); err == nil {
		h.process = process
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.hung == nil {
		l.hung = map[*look]struct{}{}
	}
	l.hung[h] = struct{}{}
	klog.FromContext(ctx).Info("Process hangs in the kernel, skipping it", "process", processName(h.pid), "account", h.account, "call", h.what)
}

func (l *Looks) removeHung(h *look) {
	l.mu.Lock()
	defer l.mu.Unlock()
	delete(l.hung, h)
	if h.process >= 0 {
		unix.Close(h.process)
	}
}

// hungCalls returns the looks that hang.
func (l *Looks) hungCalls() []string {
	l.mu.Lock()
	defer l.mu.Unlock()
	var all []string
	for h := range l.hung {
		all = append(all, fmt.Sprintf("%s of %s (%s)", h.what, processName(h.pid), time.Since(h.started).Round(time.Millisecond)))
	}
	return all
}

func exited(pidfd int) bool {
	n, err := proc.Retry(func() (int, error) { return unix.Poll([]unix.PollFd{{Fd: int32(pidfd), Events: unix.POLLIN}}, 0) })
	return err == nil && n > 0
}

// Program returns the path of a process's program.
func (l *Looks) Program(ctx context.Context, pid int) (string, error) {
	return lookAt(ctx, l, look{pid: pid, what: "reading the program"}, func() (string, error) { return os.Readlink(proc.Path(pid, "exe")) })
}

// OpenNamespace opens a process's namespace of a kind: "mnt", "pid" or "user". proc.Gone reports whether an error means that the process has
// exited.
func (l *Looks) OpenNamespace(ctx context.Context, pid int, kind string) (int, error) {
	if !l.noPidfds {
		// Since Linux 6.11 the kernel opens it without waiting for a process that hangs.
		fd, err := openNamespaceOf(pid, kind)
		if !errors.Is(err, unix.ENOTTY) && !errors.Is(err, unix.EINVAL) {
			return fd, err
		}
	}
	fd, err := lookAt(ctx, l, look{pid: pid, what: "opening the namespace " + kind}, func() (descriptor, error) {
		fd, err := unix.Open(proc.Path(pid, "ns", kind), unix.O_RDONLY|unix.O_CLOEXEC, 0)
		return descriptor(fd), err
	})
	return int(fd), err
}

// descriptor is a file descriptor.
type descriptor int

// Close closes it.
func (d descriptor) Close() error { return unix.Close(int(d)) }

func openNamespaceOf(pid int, kind string) (int, error) {
	process, err := unix.PidfdOpen(pid, 0)
	if err != nil {
		return -1, err
	}
	defer unix.Close(process)
	// PIDFD_GET_…_NAMESPACE of include/uapi/linux/pidfd.h
	return unix.IoctlRetInt(process, map[string]uint{"mnt": 0xff03, "pid": 0xff05, "user": 0xff09}[kind])
}

// mountNamespace returns the inode number of a process's mount namespace, which identifies it as long as it exists.
func (l *Looks) mountNamespace(ctx context.Context, pid int) (uint64, error) {
	fd, err := l.OpenNamespace(ctx, pid, "mnt")
	if err != nil {
		return 0, err
	}
	defer unix.Close(fd)
	var st unix.Stat_t
	err = unix.Fstat(fd, &st)
	return st.Ino, err
}

// maxUsers bounds the users of a mount that are named.
const maxUsers = 10

// Users returns up to ten processes that keep a mount busy, as "bash (pid 12)": their working or root directory, executable or an
// open file is on it. It reads only links and fdinfo in /proc, and so answers for an unresponsive mount, too. It does not see
// processes that this one may not inspect or that hang, nor memory maps of closed files.
func (n *Namespace) Users(ctx context.Context, m Mount) ([]string, error) {
	var users []string
	err := n.runCall(ctx, "searching for users of "+m.Mountpoint, nil, func() error {
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
