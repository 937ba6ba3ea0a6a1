package launcher

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"time"

	"k8s.io/klog/v2"

	"github.com/s3-csi/s3-csi-driver/pkg/conc"
	"github.com/s3-csi/s3-csi-driver/pkg/fault"
)

// Names on the host. A dash in a slice's name is a level, so the slice is below system.slice (systemd.slice(5)).
const (
	Slice      = "system-s3csi.slice"
	unitPrefix = "s3csi-"
	unitSuffix = ".service"
)

const (
	// DefaultStopTimeout is the time that a unit has to store its data when systemd stops it, usually at a shutdown, before it
	// is killed.
	DefaultStopTimeout = 2 * time.Minute
	// minSystemd is the first version with Type=exec, without which a failed start is not reported.
	minSystemd = 240
	// statePause is the interval between two reads of a unit's state, in case its signals were lost. For each read, systemd collects and
	// sends all properties of the unit, so the many units of a busy node must not be read often while they start.
	statePause = time.Second
	// confinePause is the interval between two checks of a process that drops its privileges.
	confinePause = 2 * time.Millisecond
	// maxUnitName leaves room within systemd's limit of 255 bytes.
	maxUnitName = 200
)

// Systemd launches helpers as transient services of the host's systemd. Each has its own sandbox and cgroup, runs as its mount's uid,
// and logs to the journal. They do not depend on the driver. Each call connects to systemd, and retries while systemd or the bus
// restarts, until ctx or patience ends.
type Systemd struct {
	ns          Doer
	program     string // on the host
	uids        UIDRange
	stopTimeout time.Duration
	sliceLimits Limits
	defaults    Limits
	systemd     *dialer
	sandbox     *hostSandbox
	view        *view // nil: units resolve names as the host does
	scan        processScan
	limited     atomic.Bool // sliceLimits are set
}

// Property is a unit property as systemd's D-Bus interface takes it (org.freedesktop.systemd1(5)).
type Property struct {
	Name  string
	Value any
}

// NewSystemd returns a launcher of a helper program, an absolute path on the host that the units' uids can execute. The program calls
// runas.Exec in the mode runas.Mode, and helper.Run in the mode `helper`. NewSystemd does not call systemd; Check does.
func NewSystemd(ns Doer, program string, o Options) (*Systemd, error) {
	if o.Sockets == nil {
		o.Sockets = []string{"/run/dbus/system_bus_socket", "/run/systemd/private"}
	}
	s := &Systemd{
		ns: ns, uids: o.UIDs.orDefault(), stopTimeout: cmp.Or(o.StopTimeout, DefaultStopTimeout), sliceLimits: o.SliceLimits, defaults: o.DefaultLimits,
		systemd: &dialer{ns: ns, sockets: o.Sockets, slots: make(chan struct{}, maxConnections)},
		sandbox: &hostSandbox{
			extra: o.Properties, resolver: o.Resolver, nameservers: o.Nameservers,
			noLandlock: "not requested", lacking: map[string]bool{},
		},
		view: newView(ns, o.Resolver),
	}
	if !o.NoLandlock {
		s.sandbox.landlock, s.sandbox.noLandlock = kernelLandlock()
	}
	s.scan.find = s.find
	for _, l := range []Limits{s.sliceLimits, s.defaults} {
		if err := l.check(); err != nil {
			return nil, fmt.Errorf("launch helpers with systemd: %w", err)
		}
	}
	return s, s.SetProgram(program)
}

// SetProgram changes the program of helpers to start. Call it before Start: Check needs no program, and its result can decide where the
// program is installed.
func (s *Systemd) SetProgram(program string) error {
	if !filepath.IsAbs(program) {
		return fmt.Errorf("launch helpers with systemd: the program %q is not an absolute path", program)
	}
	s.program = program
	return nil
}

// Program returns the path of the helper program on the host.
func (s *Systemd) Program() string { return s.program }

// SurvivesDriver reports that helpers survive the driver.
func (s *Systemd) SurvivesDriver() (bool, string) { return true, "" }

// Start starts a unit's helper and returns when its program runs as its uid and without privileges; helper.Peer shows whether it
// serves. A unit of that name that has ended is replaced; one that runs is an error (fault.Exists). After an error that wraps ctx's,
// the helper may still start: Kill the uid before it is used again.
func (s *Systemd) Start(ctx context.Context, u Unit) error {
	if err := s.check(u); err != nil {
		return err
	}
	files := []*os.File{u.Socket}
	if s.view != nil && s.sandbox.confines() {
		view, err := s.view.openNamespace(ctx, u, s.program)
		if err != nil {
			return fmt.Errorf("start the helper of %s: %w", u.Name, err)
		}
		defer view.Close()
		files = append(files, view)
	}
	var pid int
	err := withFDs(func(fds []uintptr) error {
		start := unitStart{launcher: s, unit: u, fds: fds}
		return s.systemd.call(ctx, "start the helper of "+u.Name, func(ctx context.Context, b *bus) (err error) {
			pid, err = start.run(ctx, b)
			start.repeated = true
			return err
		})
	}, files...)
	if err != nil {
		return err
	}
	klog.FromContext(ctx).V(2).Info("Helper started", "unit", unitName(u.Name), "pid", pid, "uid", u.UID, "spare", u.Spare)
	return nil
}

func (s *Systemd) check(u Unit) error {
	if err := u.check(s.uids); err != nil {
		return err
	}
	if err := u.Limits.check(); err != nil {
		return fmt.Errorf("start the helper of %s: %w", u.Name, err)
	}
	switch {
	case !validUnitName(u.Name):
		return fault.Errorf(fault.Invalid, "start a helper: invalid unit name %q", u.Name)
	case u.GID < minUID:
		return fault.Errorf(fault.Invalid, "start the helper of %s: gid %d is not in --uid-range", u.Name, u.GID)
	case u.CacheDir != "" && !filepath.IsAbs(u.CacheDir):
		return fmt.Errorf("start the helper of %s: the cache directory %q is not an absolute path", u.Name, u.CacheDir)
	}
	return nil
}

// validUnitName reports whether a name needs no escapes within a unit's name.
func validUnitName(name string) bool {
	return name != "" && len(name) <= maxUnitName && !strings.ContainsFunc(name, func(r rune) bool {
		return (r < 'a' || r > 'z') && (r < 'A' || r > 'Z') && (r < '0' || r > '9') && !strings.ContainsRune("-_.", r)
	})
}

func unitName(name string) string { return unitPrefix + name + unitSuffix }

// unitStart is the start of a unit, which may take several calls to systemd.
type unitStart struct {
	launcher *Systemd
	unit     Unit
	fds      []uintptr // of the socket and, with a Resolver and Landlock, the mount namespace
	repeated bool      // a former call may have started the unit, if systemd's answer was lost

	// Of the current call:
	cleared    bool // an ended unit of that name was removed
	unconfined bool // the unit could not use Landlock
}

// run starts the unit and waits for its process. It retries without each property that systemd does not know, without Landlock if the
// process cannot use it, and after it has removed an ended unit of that name.
func (u *unitStart) run(ctx context.Context, b *bus) (pid int, err error) {
	s, name := u.launcher, unitName(u.unit.Name)
	u.cleared, u.unconfined = false, false
	if err := s.limitSlice(ctx, b); err != nil {
		return 0, err
	}
	for {
		if err := s.checkMounts(ctx); err != nil {
			return 0, err
		}
		binds, err := s.sandbox.binds(ctx)
		if err != nil {
			return 0, err
		}
		job := make(chan string, 1) // buffered, so that the connection never waits for a receiver
		_, err = b.conn.StartTransientUnitContext(ctx, name, "fail", s.properties(u.unit, binds, u.fds), job)
		switch {
		case err == nil:
			pid, err := s.awaitStart(ctx, b, u.unit, job)
			if !errors.Is(err, errNoLandlock) || u.unconfined {
				return pid, err
			}
			u.unconfined = true
			s.sandbox.dropLandlock(ctx, "the unit of the first helper could not use it; see its journal")
		case isDBusError(err, errReadOnly) && s.sandbox.recordUnsupported(ctx, err):
		case isDBusError(err, errUnitExists):
			if pid, err := u.resolveConflict(ctx, b); err != nil || pid != 0 {
				return pid, err
			}
		default:
			return 0, err
		}
	}
}

// resolveConflict handles a unit of the same name. If a former call has started it, that continues, and the pid is its process's. If it
// has ended, it is removed, and the pid is 0. Any other one is an error.
func (u *unitStart) resolveConflict(ctx context.Context, b *bus) (pid int, err error) {
	name := unitName(u.unit.Name)
	state, err := b.unit(ctx, name)
	switch {
	case err != nil:
		return 0, err
	case !state.ours():
		return 0, fault.Errorf(fault.Exists, "unit %s exists and was not started by this driver", name)
	case !state.dead() && u.repeated:
		return u.launcher.awaitStart(ctx, b, u.unit, nil)
	case !state.dead():
		return 0, fault.Errorf(fault.Exists, "unit %s exists and is %s", name, state.active())
	case u.cleared:
		return 0, fault.Errorf(fault.Busy, "unit %s has exited, but systemd does not remove it", name)
	}
	u.cleared = true
	return 0, b.forgetUnit(ctx, name)
}

// awaitStart waits until the unit's process is the helper, without privileges. If job is nil, or its end is missed, the unit's state
// shows the end of the start.
func (s *Systemd) awaitStart(ctx context.Context, b *bus, u Unit, job <-chan string) (pid int, err error) {
	name := unitName(u.Name)
	var state unitState
	active := false
	for ended := false; !ended; {
		select {
		case result := <-job:
			ended, active = true, result == "done" // the program was executed
		case <-time.After(statePause):
		case <-ctx.Done():
			return 0, fmt.Errorf("wait for systemd to start it: %w", context.Cause(ctx))
		}
		if active {
			break
		}
		// Not all properties of a service, for which systemd would read the unit's cgroup.
		if state, err = b.conn.GetUnitPropertiesContext(ctx, name); err != nil {
			return 0, err
		}
		active = state.active() == "active"
		ended = ended || active || state.dead() && !state.hasJob()
	}
	main, err := b.conn.GetServicePropertyContext(ctx, name, "MainPID")
	if err != nil {
		return 0, err
	}
	if n, ok := main.Value.Value().(uint32); ok {
		pid = int(n)
	}
	if !active || pid == 0 {
		return 0, b.failureOf(ctx, name, s.program)
	}
	for {
		confined, err := confined(pid, u.UID)
		if confined {
			return pid, nil
		}
		if err != nil { // it has exited
			if state, serr := b.unit(ctx, name); serr == nil && state.active() != "active" {
				return 0, b.failureOf(ctx, name, s.program)
			}
		}
		if !conc.Sleep(ctx, confinePause) {
			return 0, fmt.Errorf("wait for process %d to become uid %d without privileges: %w", pid, u.UID, context.Cause(ctx))
		}
	}
}

// Alive reports whether any process of the mount with that uid runs, in a unit of this driver or started by another launcher.
func (s *Systemd) Alive(ctx context.Context, uid uint32) (bool, error) {
	return s.scan.alive(ctx, uid)
}

// Kill ends that uid's units and kills every process of its mount. It returns when none is left or ctx ends. A process that is blocked
// in the kernel, usually by a FUSE mount, exits only when that connection is aborted. Kill needs systemd, because a unit that is still
// starting has no process yet.
func (s *Systemd) Kill(ctx context.Context, uid uint32) error {
	if err := DefaultUIDs().check(uid); err != nil {
		return fmt.Errorf("kill processes: %w", err)
	}
	return s.systemd.call(ctx, fmt.Sprintf("kill the processes of uid %d", uid), func(ctx context.Context, b *bus) error {
		units, err := b.listUnits(ctx)
		if err != nil {
			return err
		}
		var its []string
		for _, u := range units {
			if u.UID == uid {
				its = append(its, unitName(u.Name))
			}
		}
		return b.endUnits(ctx, its, func() error { return s.scan.killAll(ctx, uid, killPause, func() {}) })
	})
}

// untilReboot is for settings that systemd must not keep longer.
const untilReboot = true

// limitSlice sets the limits of all helpers together, once.
func (s *Systemd) limitSlice(ctx context.Context, b *bus) error {
	props := s.sliceLimits.properties()
	if s.limited.Load() || len(props) == 0 {
		return nil // systemd creates the slice with the first service
	}
	if err := b.conn.SetUnitPropertiesContext(ctx, Slice, untilReboot, wire(props)...); err != nil {
		return fmt.Errorf("limit %s: %w", Slice, err)
	}
	s.limited.Store(true)
	return nil
}
