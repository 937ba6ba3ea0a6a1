// Package launcher starts helpers on a host, and finds and kills the processes of a mount.
//
// Systemd starts helpers as transient services of the host's systemd. Process starts them as plain children, for hosts without
// systemd, for development and for the demo. A launcher identifies a mount by its uid, which no other mount and no user has.
package launcher

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
	"k8s.io/klog/v2"

	"github.com/s3-csi/s3-csi-driver/pkg/fault"
	"github.com/s3-csi/s3-csi-driver/pkg/helper"
	"github.com/s3-csi/s3-csi-driver/pkg/host"
	"github.com/s3-csi/s3-csi-driver/pkg/launcher/runas"
	"github.com/s3-csi/s3-csi-driver/pkg/osfile"
	"github.com/s3-csi/s3-csi-driver/pkg/proc"
	"github.com/s3-csi/s3-csi-driver/pkg/sandbox"
)

// LogFile is the file in a mount's state directory to which a helper of Process logs; the helper bounds its size. The driver's
// standard error would end with the driver.
const LogFile = "helper.log"

// Unit is one helper to start.
type Unit struct {
	Name, Description string
	// UID and GID are the mount's own. The helper and its client run with these and no further groups.
	UID, GID uint32
	// StateDir is the absolute path, in the host's mount namespace, of a directory that UID owns.
	StateDir string
	// CacheDir is another such directory, or "". A sandbox lets the helper write only to these two.
	CacheDir string
	// Callers means that the client looks up the callers of its file system in /proc (client.Client.CallerPIDs), so a sandbox
	// must not hide them.
	Callers bool
	// Needs are addresses that the mount must reach although the sandbox denies them by default, see metadata.
	Needs []netip.Addr
	// Limits are enforced by launchers with a cgroup for each helper.
	Limits Limits
	// Spare means that the helper is started ahead of need, see helper.Arguments.
	Spare bool
	// Socket is the listening socket of helper.Listen. The caller closes it after Start.
	Socket *os.File
}

// Doer runs functions in the host's mount namespace (host.Namespace). If it is Foreign, the function runs on an OS thread that ends
// afterwards, in another mount namespace than the process's.
type Doer interface {
	Do(ctx context.Context, what string, fn func() error) error
	Foreign() bool
}

// Options configure a launcher. A field that is zero has its default.
type Options struct {
	UIDs UIDRange // of the helpers to start and to list; the default is DefaultUIDs
	// Resolver has the files by which helpers resolve names, in another mount namespace than the host's. The default is that they resolve
	// names as the host does. Systemd also does so if units get no mount namespace although the kernel has no Landlock.
	Resolver Resolver

	// The others are for Systemd.

	// Sockets are the paths, on the host, of the sockets to call systemd; the first that answers is used. A socket named "private" is
	// systemd's own, any other is a bus. The default is both.
	Sockets       []string
	StopTimeout   time.Duration // that a helper has when systemd stops it; the default is DefaultStopTimeout
	SliceLimits   Limits        // of all helpers together; a zero field keeps the administrator's setting
	DefaultLimits Limits        // of units without their own
	Properties    []Property    // set on every unit, if the host's systemd knows them
	Nameservers   []netip.Addr  // that units may reach although they are among the addresses that the sandbox denies
	NoLandlock    bool          // units have mount namespaces of their own, as on a kernel without Landlock
}

// Process launches helpers as children of the driver. Each runs in its own session, as its mount's uid, without capabilities or a
// way to get any, in the host's mount namespace (but see Options.Resolver). Unless the driver is in PID 1's cgroups, helpers run in a
// cgroup outside of its own. They survive the driver, and init reaps them then. Until then each method call reaps exited
// helpers.
type Process struct {
	ns      Doer
	program string // on the host
	uids    UIDRange
	view    *view // nil: names are resolved as the host does

	landlock   int    // version of Landlock that restricts helpers; 0: none
	noLandlock string // why there is none

	scan processScan

	mu       sync.Mutex
	children map[int]struct{} // not reaped yet
}

// Sandbox returns the state of the sandbox.
func (p *Process) Sandbox() Sandbox {
	box := Sandbox{Landlock: p.landlock, Missing: unfiltered()}
	if p.landlock == 0 {
		box.NoLandlock = p.noLandlock
	}
	return box
}

// ResolvesBy reports whether helpers resolve names by the launcher's Resolver, and if not, why.
func (p *Process) ResolvesBy() (bool, string) {
	if p.view == nil {
		return false, "not requested"
	}
	return true, ""
}

// Prepares reports whether a helper can be started as a spare and later become that of a mount. The mount namespace of a Resolver
// may not show the directories that it gets then. Nothing denies helpers of this launcher any address.
func (p *Process) Prepares([]netip.Addr) bool { return p.view == nil || !p.view.alone.Load() }

// Limit does nothing, because this launcher enforces no limits.
func (p *Process) Limit(context.Context, Unit) error { return nil }

// Describe does nothing, because processes have no descriptions.
func (p *Process) Describe(context.Context, Unit) error { return nil }

// NewProcess returns a launcher of a program, a path on the host, that is a helper in its mode `helper`. It starts nothing.
func NewProcess(ns Doer, program string, o Options) *Process {
	p := &Process{ns: ns, program: program, uids: o.UIDs.orDefault(), view: newView(ns, o.Resolver), children: map[int]struct{}{}}
	p.landlock, p.noLandlock = kernelLandlock()
	return p
}

// Start starts a unit's helper and returns when its program has been executed; helper.Peer shows whether it serves. After an error
// that wraps ctx's, the helper may still start: Kill the uid before it is used again.
func (p *Process) Start(ctx context.Context, u Unit) error {
	p.reap()
	if err := u.check(p.uids); err != nil {
		return err
	}
	pid, err := p.start(ctx, u)
	if err != nil {
		return fmt.Errorf("start the helper of %s: %w", u.Name, err)
	}
	log := klog.FromContext(ctx).WithValues("unit", u.Name, "pid", pid, "uid", u.UID)
	// Not on the thread that started it, which cannot write there.
	err = p.ns.Do(ctx, "moving the helper of "+u.Name, func() error { return p.leaveCgroup(pid) })
	switch {
	case err != nil && ctx.Err() != nil: // it may not have been moved
		return fmt.Errorf("start the helper of %s: %w", u.Name, err)
	case err != nil:
		log.Error(err, "Helper stays in the driver's cgroup", "effect", "the mount ends with the driver's container, unit or task")
	}
	log.V(2).Info("Helper started", "spare", u.Spare)
	return nil
}

func (p *Process) start(ctx context.Context, u Unit) (pid int, err error) {
	var view *os.File
	if p.view != nil {
		if view, err = p.view.openNamespace(ctx, u, p.program); err != nil {
			return 0, err
		}
		defer view.Close()
	}
	return host.Call(ctx, p.ns, "starting the helper of "+u.Name, nil, func() (int, error) {
		if err := ctx.Err(); err != nil {
			return 0, err // the caller has stopped waiting
		}
		// It is executed through a descriptor, because its path may not be accessible to the mount's uid.
		program, err := os.Open(p.program)
		if err != nil {
			return 0, err
		}
		defer program.Close()
		return p.startOnOwnThread(u, program, view)
	})
}

// directories returns those that belong to the mount.
func (u Unit) directories() []string {
	return helper.Assignment{StateDir: u.StateDir, CacheDir: u.CacheDir}.Directories()
}

func (u Unit) check(uids UIDRange) error {
	switch {
	case u.Name == "":
		return errors.New("start a helper: no name")
	case u.Socket == nil:
		return fmt.Errorf("start the helper of %s: no socket", u.Name)
	case !filepath.IsAbs(u.StateDir):
		return fmt.Errorf("start the helper of %s: the state directory %q is not an absolute path", u.Name, u.StateDir)
	case u.GID == 0:
		return fault.Errorf(fault.Invalid, "start the helper of %s: gid 0 is not allowed", u.Name)
	}
	if err := uids.check(u.UID); err != nil {
		return fmt.Errorf("start the helper of %s: %w", u.Name, err)
	}
	return nil
}

// startOnOwnThread drops privileges on an OS thread of its own, starts the helper from there, and ends the thread. Its steps:
// enter the host's cgroup namespace and the view, if there is one; drop capabilities; enter the sandbox; execute the helper.
func (p *Process) startOnOwnThread(u Unit, program, view *os.File) (pid int, err error) {
	start := func() {
		if p.ns.Foreign() {
			enterHostCgroups()
		}
		if view != nil {
			if err = enterView(view); err != nil {
				return
			}
		}
		if err = runas.Reduce(); err != nil {
			return
		}
		args := u.arguments(p.landlock > 0)
		if err = helper.Restrict(args); err != nil {
			return
		}
		if pid, err = p.exec(u, program, args); err != nil {
			return
		}
		p.mu.Lock()
		p.children[pid] = struct{}{}
		p.mu.Unlock()
	}
	if p.ns.Foreign() {
		start() // on the thread that has entered the host's mount namespace; another one would be in the container's
	} else {
		proc.OnThrowawayThread(start)
	}
	return pid, err
}

// arguments returns the command line of the unit's helper, without the program.
func (u Unit) arguments(landlock bool) []string {
	return helper.Arguments{Name: u.Name, StateDir: u.StateDir, CacheDir: u.CacheDir, Landlock: landlock, Spare: u.Spare}.CommandLine()
}

// kernelLandlock returns the version of the kernel's Landlock, or 0 and why there is none.
func kernelLandlock() (abi int, why string) {
	abi, err := sandbox.ABI()
	if err != nil {
		return 0, err.Error()
	}
	return abi, ""
}

// unfiltered returns what a Sandbox is missing without a filter of system calls.
func unfiltered() []string {
	if err := sandbox.FiltersCalls(); err != nil {
		return []string{"seccomp (" + err.Error() + ")"}
	}
	return nil
}

// exec starts the helper from this thread. All descriptors but the socket and the log are close-on-exec.
func (p *Process) exec(u Unit, program *os.File, args []string) (int, error) {
	log, err := openLog(u)
	if err != nil {
		return 0, err
	}
	defer log.Close()
	var pid int
	err = withFDs(func(fds []uintptr) error {
		high, err := dupAbove(fds[0], fds[1:])
		if err != nil {
			return err
		}
		defer unix.Close(high)
		// /proc/self is the child here: the path is resolved after the fork.
		pid, err = syscall.ForkExec(fmt.Sprintf("/proc/self/fd/%d", high),
			append([]string{filepath.Base(p.program)}, args...),
			&syscall.ProcAttr{
				Dir:   "/",
				Env:   helper.Environment(),
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

// forkExecSlack is the number of descriptors above the highest passed one that ForkExec may use, and close, in the child to reorder
// them. The program's descriptor must be above those.
const forkExecSlack = 16

// dupAbove duplicates a descriptor to a number that ForkExec does not use for the passed ones.
func dupAbove(fd uintptr, passed []uintptr) (int, error) {
	high, err := unix.FcntlInt(fd, unix.F_DUPFD_CLOEXEC, int(slices.Max(passed))+forkExecSlack)
	if err != nil {
		return 0, fmt.Errorf("copy a descriptor: %w", err)
	}
	return high, nil
}

// openLog opens a unit's log for appending and makes the unit's uid its owner. That uid owns the directory, so nothing in it is
// followed or trusted.
func openLog(u Unit) (*os.File, error) {
	path := filepath.Join(u.StateDir, LogFile)
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_APPEND|os.O_CREATE|unix.O_NOFOLLOW|unix.O_NONBLOCK, 0o600)
	if errors.Is(err, unix.ENOSPC) { // the client has filled the disk, and still needs a helper to stop cleanly
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
		err = errors.New("it has more than one hard link") // the owner of another user's file, linked there, must not change
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
		return osfile.WithFD(files[len(fds)], func(fd int) error {
			fds = append(fds, uintptr(fd))
			return next()
		})
	}
	return next()
}

func (p *Process) reap() {
	p.mu.Lock()
	defer p.mu.Unlock()
	var exited unix.Siginfo
	if err := unix.Waitid(unix.P_ALL, 0, &exited, unix.WEXITED|unix.WNOHANG|unix.WNOWAIT, nil); err == nil && exited.Signo == 0 {
		return // no child has exited, which is known without asking for each
	}
	for pid := range p.children {
		var ws unix.WaitStatus
		got, err := unix.Wait4(pid, &ws, unix.WNOHANG, nil)
		if got == pid || errors.Is(err, unix.ECHILD) {
			delete(p.children, pid)
		}
	}
}
