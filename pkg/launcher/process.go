// Package launcher brings helpers to life on a host and finds and ends the processes of a mount.
//
// Systemd starts them as transient services of the host's systemd. Process starts them as plain children, for hosts
// without systemd, for development and for the demo. A mount is known to a launcher by its uid, which no other mount and no
// user has.
package launcher

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"sync"
	"syscall"

	"golang.org/x/sys/unix"
	"k8s.io/klog/v2"

	"github.com/s3-csi/s3-csi-driver/pkg/fault"
	"github.com/s3-csi/s3-csi-driver/pkg/resolvconf"
)

// LogFile is the file in a mount's state directory that a helper of this launcher logs to; the helper bounds its size.
// It is not the driver's own standard error, because that ends with the driver and the helper does not.
const LogFile = "helper.log"

// Unit is one helper to start.
type Unit struct {
	Name, Description string
	// UID and GID are the mount's own. The helper and its client have these and no further groups.
	UID, GID uint32
	// StateDir is an absolute path in the host's mount namespace, of a directory that UID owns.
	StateDir string
	// CacheDir is another such directory, or "". Beside StateDir it is all that a sandbox lets the helper write to.
	CacheDir string
	// Callers tells that the client looks up in /proc which processes call its file system (client.Client.CallerPIDs), so a
	// sandbox has to let it see them.
	Callers bool
	// Needs are addresses that the mount must reach although a sandbox denies them to others, see metadata.
	Needs []netip.Addr
	// Limits are for launchers that have a cgroup for each helper.
	Limits Limits
	// Socket is the listening socket that helper.Listen made. It stays the caller's to close, after Start.
	Socket *os.File
}

// Doer does work in the host's mount namespace (host.Namespace). Where Foreign, the function runs on an OS thread that
// is thrown away afterwards, in a mount namespace other than the process's.
type Doer interface {
	Do(ctx context.Context, what string, fn func() error) error
	Foreign() bool
}

// Process launches helpers as children of the driver: each in a session of its own, under its mount's uid, without
// capabilities or a way to get any, in the host's mount namespace (but see WithResolver) and, where the driver is in a container or a systemd
// unit, in a cgroup outside. They go on when the driver is killed; init reaps them then. Before that the driver has to:
// no goroutine waits for them, but each call of a method reaps what has ended.
type Process struct {
	ns       Doer
	program  string
	onHost   bool // program is a path on the host
	uids     UIDRange
	resolver Resolver // nil: names are resolved as the host does

	census census

	mu       sync.Mutex
	children map[int]struct{} // not reaped yet
	moved    bool             // leaving the driver's cgroup was tried,
	moveErr  error            // with this outcome
}

// Option changes how a launcher works.
type Option func(*Process)

// WithUIDs bounds the uids that are started. Without it, it is DefaultUIDs.
func WithUIDs(r UIDRange) Option { return func(p *Process) { p.uids = r } }

// WithHostProgram says that the program's path is the host's. Without it, it is one in this process's own view.
func WithHostProgram() Option { return func(p *Process) { p.onHost = true } }

// WithResolver gives helpers a mount namespace of their own, in which they resolve names by what the Resolver says. Without it
// they are in the host's, and resolve names as the host does.
func WithResolver(r Resolver) Option { return func(p *Process) { p.resolver = r } }

// ResolvesBy tells whether helpers resolve names by the launcher's Resolver, and why not.
func (p *Process) ResolvesBy() (bool, string) {
	if p.resolver == nil {
		return false, "no other way is asked for"
	}
	return true, ""
}

// NewProcess makes a launcher of a helper program, whose mode is `helper`. It starts nothing.
func NewProcess(ns Doer, program string, opts ...Option) *Process {
	p := &Process{ns: ns, program: program, uids: DefaultUIDs(), children: map[int]struct{}{}}
	for _, o := range opts {
		o(p)
	}
	return p
}

// Start starts a unit's helper and returns when its program has been executed; whether it serves is for helper.Peer to
// find out. After an error that wraps ctx's, the helper may come to life yet: Kill the uid before it is used again.
func (p *Process) Start(ctx context.Context, u Unit) error {
	p.reap()
	if err := u.check(p.uids); err != nil {
		return err
	}
	// It is executed through a descriptor: the path may not exist on the host, and the mount's uid need not be able to
	// reach it.
	var own *os.File
	if !p.onHost {
		f, err := os.Open(p.program)
		if err != nil {
			return fmt.Errorf("start the helper of %s: %w", u.Name, err)
		}
		defer f.Close()
		own = f
	}
	var binds []resolvconf.Bind
	if p.resolver != nil {
		var err error
		if binds, err = p.resolver.Binds(ctx); err != nil {
			return fmt.Errorf("start the helper of %s: %w", u.Name, err)
		}
	}
	var pid int
	var cgroupErr error
	err := p.ns.Do(ctx, "starting the helper of "+u.Name, func() error {
		if err := ctx.Err(); err != nil {
			return err // nobody waits any more
		}
		program := own
		if p.onHost {
			f, err := os.Open(p.program)
			if err != nil {
				return err
			}
			defer f.Close()
			program = f
		}
		var err error
		pid, cgroupErr, err = p.startOnOwnThread(u, program, binds)
		return err
	})
	if err != nil {
		return fmt.Errorf("start the helper of %s: %w", u.Name, err)
	}
	log := klog.FromContext(ctx).WithValues("unit", u.Name, "pid", pid, "uid", u.UID)
	if cgroupErr != nil {
		log.Error(cgroupErr, "The helper stays in the driver's cgroup: the end of the driver's container or unit will end the mount")
	}
	log.V(2).Info("Helper started")
	return nil
}

func (u Unit) check(uids UIDRange) error {
	switch {
	case u.Name == "":
		return errors.New("start a helper: it has no name")
	case u.Socket == nil:
		return fmt.Errorf("start the helper of %s: there is no socket", u.Name)
	case !filepath.IsAbs(u.StateDir):
		return fmt.Errorf("start the helper of %s: the state directory %q is not an absolute path", u.Name, u.StateDir)
	case u.GID == 0:
		return fault.Errorf(fault.Invalid, "start the helper of %s: gid 0 is not for mounts", u.Name)
	}
	if err := uids.check(u.UID); err != nil {
		return fmt.Errorf("start the helper of %s: %w", u.Name, err)
	}
	return nil
}

// startOnOwnThread gives up on an OS thread what a helper must not have, starts it from there, and throws the thread
// away.
func (p *Process) startOnOwnThread(u Unit, program *os.File, binds []resolvconf.Bind) (pid int, cgroupErr, err error) {
	start := func() {
		hostView := true
		if p.ns.Foreign() {
			hostView = enterHostCgroups()
		}
		if len(binds) > 0 {
			if err = p.ownView(u, binds); err != nil {
				return
			}
		}
		if err = reduceThread(); err != nil {
			return
		}
		if pid, err = p.exec(u, program); err != nil {
			return
		}
		p.mu.Lock()
		p.children[pid] = struct{}{}
		p.mu.Unlock()
		cgroupErr = p.leaveCgroup(pid, hostView)
	}
	if p.ns.Foreign() {
		start() // on the throwaway that entered the host's mount namespace; another thread would be in the container's
	} else {
		onThrowaway(start)
	}
	return pid, cgroupErr, err
}

// onThrowaway runs fn on an OS thread that ends with it: it is never unlocked. The process's first thread does not end
// but would show in /proc/self with what fn did to it, so it is held while another one is used.
func onThrowaway(fn func()) {
	done := make(chan struct{})
	go func() {
		defer close(done)
		runtime.LockOSThread()
		if unix.Gettid() == os.Getpid() {
			onThrowaway(fn)
			runtime.UnlockOSThread()
			return
		}
		fn()
	}()
	<-done
}

// reduceThread takes from this thread, and so from what it starts, every way to privileges. It keeps its effective set,
// which changing the uid needs; the uid's change empties that.
func reduceThread() error {
	if err := unix.Prctl(unix.PR_CAP_AMBIENT, unix.PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0); err != nil {
		return fmt.Errorf("clear ambient capabilities: %w", err)
	}
	for c := range uintptr(64) {
		err := unix.Prctl(unix.PR_CAPBSET_DROP, c, 0, 0, 0)
		if errors.Is(err, unix.EINVAL) && c > unix.CAP_LAST_CAP {
			break // the kernel has no more
		}
		if errors.Is(err, unix.EINVAL) {
			continue // an older kernel
		}
		if err != nil {
			return fmt.Errorf("drop capability %d from the bounding set: %w", c, err)
		}
	}
	header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var data [2]unix.CapUserData
	if err := unix.Capget(&header, &data[0]); err != nil {
		return fmt.Errorf("read capabilities: %w", err)
	}
	data[0].Inheritable, data[1].Inheritable = 0, 0
	if err := unix.Capset(&header, &data[0]); err != nil {
		return fmt.Errorf("clear inheritable capabilities: %w", err)
	}
	if err := unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0); err != nil {
		return fmt.Errorf("set no_new_privs: %w", err)
	}
	return nil
}

// exec starts the helper from this thread. Descriptors other than the socket and the log are close-on-exec.
func (p *Process) exec(u Unit, program *os.File) (int, error) {
	log, err := openLog(u)
	if err != nil {
		return 0, err
	}
	defer log.Close()
	var pid int
	err = withFDs(func(fds []uintptr) error {
		high, err := outOfTheWay(fds[0], fds[1:])
		if err != nil {
			return err
		}
		defer unix.Close(high)
		// /proc/self is the child here: the path is resolved after the fork.
		pid, err = syscall.ForkExec(fmt.Sprintf("/proc/self/fd/%d", high),
			[]string{filepath.Base(p.program), "helper", "--name", u.Name, "--state-dir", u.StateDir},
			&syscall.ProcAttr{
				Dir:   "/",
				Env:   []string{"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"},
				Files: []uintptr{fds[1], fds[2], fds[2]},
				Sys:   &syscall.SysProcAttr{Setsid: true, Credential: &syscall.Credential{Uid: u.UID, Gid: u.GID}},
			})
		return err
	}, program, u.Socket, log)
	if err != nil {
		return 0, fmt.Errorf("execute %s as uid %d: %w", p.program, u.UID, err)
	}
	return pid, nil
}

// shuffled is how many descriptors above the highest one that it is given ForkExec may use in the child, to get all to their
// places. Whatever is there in the child is closed: a program to be executed must not be.
const shuffled = 16

// outOfTheWay copies a descriptor to a number that ForkExec does not use when it passes others on.
func outOfTheWay(fd uintptr, passed []uintptr) (int, error) {
	high, err := unix.FcntlInt(fd, unix.F_DUPFD_CLOEXEC, int(slices.Max(passed))+shuffled)
	if err != nil {
		return 0, fmt.Errorf("copy a descriptor: %w", err)
	}
	return high, nil
}

// openLog opens a unit's log for appending and gives it to the unit's uid. The directory is that uid's, so nothing in it
// is followed or trusted.
func openLog(u Unit) (*os.File, error) {
	path := filepath.Join(u.StateDir, LogFile)
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_APPEND|os.O_CREATE|unix.O_NOFOLLOW|unix.O_NONBLOCK, 0o600)
	if errors.Is(err, unix.ENOSPC) { // the client has filled the directory, and must still be ended in order
		return os.OpenFile(os.DevNull, os.O_WRONLY, 0)
	}
	if err != nil {
		return nil, fmt.Errorf("open the helper's log: %w", err)
	}
	fi, err := f.Stat()
	if err == nil && !fi.Mode().IsRegular() {
		err = errors.New("it is not a regular file")
	}
	if st, ok := fi.Sys().(*syscall.Stat_t); err == nil && ok && st.Nlink != 1 {
		err = errors.New("it has a second name") // a link to a file of somebody else's must not change hands
	}
	if err == nil {
		err = f.Chown(int(u.UID), int(u.GID))
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("the helper's log %s: %w", path, err), f.Close())
	}
	return f, nil
}

// withFDs calls fn with the files' descriptors, which stay open until it returns.
func withFDs(fn func(fds []uintptr) error, files ...*os.File) error {
	var fds []uintptr
	var next func() error
	next = func() error {
		if len(fds) == len(files) {
			return fn(fds)
		}
		raw, err := files[len(fds)].SyscallConn()
		if err != nil {
			return err
		}
		var inner error
		if err := raw.Control(func(fd uintptr) {
			fds = append(fds, fd)
			inner = next()
		}); err != nil {
			return err
		}
		return inner
	}
	return next()
}

// reap collects children that have ended.
func (p *Process) reap() {
	p.mu.Lock()
	defer p.mu.Unlock()
	for pid := range p.children {
		var ws unix.WaitStatus
		got, err := unix.Wait4(pid, &ws, unix.WNOHANG, nil)
		if got == pid || errors.Is(err, unix.ECHILD) {
			delete(p.children, pid)
		}
	}
}
