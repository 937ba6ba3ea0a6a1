package launcher

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"github.com/godbus/dbus/v5"
	"k8s.io/klog/v2"

	"github.com/s3-csi/s3-csi-driver/pkg/fault"
)

// Names on the host. The slice is below system.slice, because a dash is a level (systemd.slice(5)).
const (
	Slice      = "system-s3csi.slice"
	unitPrefix = "s3csi-"
	unitSuffix = ".service"
)

const (
	// DefaultStopTimeout is how long a unit that systemd stops, at shutdown as a rule, may store what it has left before
	// it is killed.
	DefaultStopTimeout = 2 * time.Minute
	// minSystemd is the first version with Type=exec, without which a failed start is not told.
	minSystemd = 240
	// statePause is the time between two looks at a unit whose signals may have been lost.
	statePause = 100 * time.Millisecond
	// confinePause is the time between two looks at a process that is giving up its privileges.
	confinePause = 2 * time.Millisecond
	// maxUnitName leaves room below systemd's own 255 bytes.
	maxUnitName = 200
)

// Systemd launches helpers as transient services of the host's systemd: each in a sandbox and a cgroup of its own, under its
// mount's uid, logging to the journal. They have nothing to do with the driver's life. It keeps no connection and no
// process: each call dials systemd, and dials again while systemd or the bus restarts, until ctx ends or patience does.
type Systemd struct {
	ns          Doer
	program     string
	uids        UIDRange
	sockets     []string
	stopTimeout time.Duration
	sliceLimits Limits
	defaults    Limits
	extra       []Property
	resolver    Resolver      // nil: names are resolved as the host does
	slots       chan struct{} // bounds the connections
	census      census

	mu         sync.Mutex
	limited    bool              // sliceLimits are set
	unshared   bool              // the host's / is no shared mount
	version    string            // of the systemd that answered last
	lacking    map[string]bool   // properties that it does not know
	unenforced map[string]string // properties that do nothing on this host, and why
}

// Property is a unit property as systemd's D-Bus interface takes it (org.freedesktop.systemd1(5)).
type Property struct {
	Name  string
	Value any
}

// SystemdOption changes how a Systemd works.
type SystemdOption func(*Systemd)

// WithSystemdUIDs bounds the uids that are started, looked for and killed. Without it, it is DefaultUIDs.
func WithSystemdUIDs(r UIDRange) SystemdOption { return func(s *Systemd) { s.uids = r } }

// WithSockets are the paths, on the host, where systemd is called; the first that answers is used. Without it they are
// DefaultSockets. One whose name is "private" is taken for systemd's own, the others for a bus.
func WithSockets(paths ...string) SystemdOption { return func(s *Systemd) { s.sockets = paths } }

// WithStopTimeout is how long a helper that systemd stops may take. Without it, it is DefaultStopTimeout.
func WithStopTimeout(d time.Duration) SystemdOption { return func(s *Systemd) { s.stopTimeout = d } }

// WithSliceLimits bounds all helpers together. A zero field leaves what the host's administrator has set.
func WithSliceLimits(l Limits) SystemdOption { return func(s *Systemd) { s.sliceLimits = l } }

// WithDefaultLimits are the limits of units that have none of their own.
func WithDefaultLimits(l Limits) SystemdOption { return func(s *Systemd) { s.defaults = l } }

// WithProperties sets more properties on every unit, where the host's systemd knows them.
func WithProperties(p ...Property) SystemdOption { return func(s *Systemd) { s.extra = p } }

// WithSystemdResolver has units resolve names by what the Resolver says. Without it, and where units get no mount namespace,
// they do as the host does.
func WithSystemdResolver(r Resolver) SystemdOption { return func(s *Systemd) { s.resolver = r } }

// DefaultSockets are the system bus, and systemd's own socket for when the bus does not answer.
func DefaultSockets() []string {
	return []string{"/run/dbus/system_bus_socket", "/run/systemd/private"}
}

// NewSystemd makes a launcher of a helper program, an absolute path on the host that the units' uids can execute. Its
// main function calls runas.Exec for the mode runas.Mode, and helper.Run for `helper`. NewSystemd does not call systemd:
// Check does.
func NewSystemd(ns Doer, program string, opts ...SystemdOption) (*Systemd, error) {
	s := &Systemd{
		ns: ns, program: program, uids: DefaultUIDs(), sockets: DefaultSockets(), stopTimeout: DefaultStopTimeout,
		slots: make(chan struct{}, maxConnections), lacking: map[string]bool{}, unenforced: map[string]string{},
	}
	s.census.find = s.find
	for _, o := range opts {
		o(s)
	}
	if !filepath.IsAbs(program) {
		return nil, fmt.Errorf("launch helpers with systemd: the program %q is not an absolute path", program)
	}
	if len(s.sockets) == 0 {
		return nil, errors.New("launch helpers with systemd: no socket is given")
	}
	for _, l := range []Limits{s.sliceLimits, s.defaults} {
		if err := l.check(); err != nil {
			return nil, fmt.Errorf("launch helpers with systemd: %w", err)
		}
	}
	return s, nil
}

// With is the same launcher, and what it knows of the host, for another program: Check needs none, and where the program is
// can depend on what Check says.
func (s *Systemd) With(program string) (*Systemd, error) {
	if !filepath.IsAbs(program) {
		return nil, fmt.Errorf("launch helpers with systemd: the program %q is not an absolute path", program)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	other := &Systemd{
		ns: s.ns, program: program, uids: s.uids, sockets: s.sockets, stopTimeout: s.stopTimeout, sliceLimits: s.sliceLimits, defaults: s.defaults,
		extra: s.extra, resolver: s.resolver, slots: s.slots, limited: s.limited, unshared: s.unshared, version: s.version,
		lacking: maps.Clone(s.lacking), unenforced: maps.Clone(s.unenforced),
	}
	other.census.find = other.find
	return other, nil
}

// Program is the helper program that units are made of, a path on the host.
func (s *Systemd) Program() string { return s.program }

// SurvivesDriver tells that helpers go on when the driver ends.
func (s *Systemd) SurvivesDriver() (bool, string) { return true, "" }

// Start starts a unit's helper and returns when its program runs, under its uid and without privileges; whether it serves
// is for helper.Peer to find out. A unit of that name that has ended is replaced, one that lives is an error (fault.Exists).
// After an error that wraps ctx's, the helper may come to life yet: Kill the uid before it is used again.
func (s *Systemd) Start(ctx context.Context, u Unit) error {
	if err := s.check(u); err != nil {
		return err
	}
	var pid int
	err := withFDs(func(fds []uintptr) error {
		again := false
		return s.with(ctx, "start the helper of "+u.Name, func(ctx context.Context, b *bus) (err error) {
			pid, err = s.start(ctx, b, u, fds[0], again)
			again = true // the unit may be there when systemd's answer was lost
			return err
		})
	}, u.Socket)
	if err != nil {
		return err
	}
	klog.FromContext(ctx).V(2).Info("Helper started", "unit", unitName(u.Name), "pid", pid, "uid", u.UID)
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
		return fault.Errorf(fault.Invalid, "start a helper: %q cannot be the name of a unit", u.Name)
	case u.GID < minUID:
		return fault.Errorf(fault.Invalid, "start the helper of %s: gid %d is not a mount's", u.Name, u.GID)
	case u.CacheDir != "" && !filepath.IsAbs(u.CacheDir):
		return fmt.Errorf("start the helper of %s: the cache directory %q is not an absolute path", u.Name, u.CacheDir)
	}
	return nil
}

// validUnitName tells whether a name stands for itself within a unit's name.
func validUnitName(name string) bool {
	return name != "" && len(name) <= maxUnitName && !strings.ContainsFunc(name, func(r rune) bool {
		return (r < 'a' || r > 'z') && (r < 'A' || r > 'Z') && (r < '0' || r > '9') && !strings.ContainsRune("-_.", r)
	})
}

func unitName(name string) string { return unitPrefix + name + unitSuffix }

// start asks for the unit, without the properties that systemd turns out not to know, and waits for its process. again
// tells that an earlier try may have been heard.
func (s *Systemd) start(ctx context.Context, b *bus, u Unit, socket uintptr, again bool) (pid int, err error) {
	if err := s.limitSlice(ctx, b); err != nil {
		return 0, err
	}
	if err := s.lookAtMounts(ctx); err != nil {
		return 0, err
	}
	binds, err := s.binds(ctx)
	if err != nil {
		return 0, err
	}
	name := unitName(u.Name)
	for cleared := false; ; {
		job := make(chan string, 1) // the connection waits for whoever does not take a job's end
		_, err := b.StartTransientUnitContext(ctx, name, "fail", s.properties(u, binds, dbus.UnixFD(socket)), job)
		switch {
		case err == nil:
			return s.awaitStart(ctx, b, u, job)
		case isDBusError(err, errReadOnly) && s.learn(ctx, err):
		case isDBusError(err, errUnitExists):
			state, serr := b.unit(ctx, name)
			switch {
			case serr != nil:
				return 0, serr
			case !state.ours():
				return 0, fault.Errorf(fault.Exists, "the host has a unit %s that is not this driver's", name)
			case !state.dead() && again:
				return s.awaitStart(ctx, b, u, nil)
			case !state.dead():
				return 0, fault.Errorf(fault.Exists, "unit %s exists and is %s", name, state.active())
			case cleared:
				return 0, fault.Errorf(fault.Busy, "unit %s has ended and does not go away", name)
			}
			cleared = true
			if err := b.forget(ctx, name); err != nil {
				return 0, err
			}
		default:
			return 0, err
		}
	}
}

// awaitStart waits until the unit's process is the helper, confined. job may be nil: then, and where its end is missed, the
// unit's state tells.
func (s *Systemd) awaitStart(ctx context.Context, b *bus, u Unit, job <-chan string) (pid int, err error) {
	name := unitName(u.Name)
	var state unitState
	for ended := false; !ended; {
		select {
		case <-job:
			ended = true
		case <-time.After(statePause):
		case <-ctx.Done():
			return 0, fmt.Errorf("wait for systemd to start it: %w", context.Cause(ctx))
		}
		// Without what is particular to services: that costs systemd a look at the unit's cgroup.
		if state, err = b.GetUnitPropertiesContext(ctx, name); err != nil {
			return 0, err
		}
		ended = ended || state.active() == "active" || state.dead() && !state.hasJob()
	}
	main, err := b.GetServicePropertyContext(ctx, name, "MainPID")
	if err != nil {
		return 0, err
	}
	if n, ok := main.Value.Value().(uint32); ok {
		pid = int(n)
	}
	if state.active() != "active" || pid == 0 {
		return 0, s.failed(ctx, b, name)
	}
	for {
		confined, seccomp, err := confined(pid, u.UID)
		if confined {
			s.observe(seccomp)
			return pid, nil
		}
		if err != nil { // it has ended
			if state, serr := b.unit(ctx, name); serr == nil && state.active() != "active" {
				return 0, s.failed(ctx, b, name)
			}
		}
		select {
		case <-time.After(confinePause):
		case <-ctx.Done():
			return 0, fmt.Errorf("wait for process %d to become uid %d without privileges: %w", pid, u.UID, context.Cause(ctx))
		}
	}
}

// failed says why a unit did not start, and takes it away.
func (s *Systemd) failed(ctx context.Context, b *bus, name string) error {
	state, err := b.unit(ctx, name)
	if err != nil {
		return err
	}
	r := state.result()
	err = fault.Errorf(fault.Precondition, "systemd could not start %s on the host: %s; journalctl -u %s says more", s.program, r, name)
	if ferr := b.forget(ctx, name); ferr != nil {
		klog.FromContext(ctx).Error(ferr, "A unit that failed could not be taken away", "unit", name)
	}
	return err
}

// Alive reports whether any process of the mount with that uid is running: in a unit of this driver's, or left by another launcher.
func (s *Systemd) Alive(ctx context.Context, uid uint32) (bool, error) {
	if err := DefaultUIDs().check(uid); err != nil {
		return false, fmt.Errorf("look for processes: %w", err)
	}
	alive, err := s.census.take(ctx)
	return alive[uid], err
}

// Free reports whether a uid that no mount has can be given to one: see Process.Free.
func (s *Systemd) Free(ctx context.Context, uid uint32) (bool, error) {
	if err := DefaultUIDs().check(uid); err != nil {
		return false, fmt.Errorf("look for processes: %w", err)
	}
	return s.census.free(ctx, uid)
}

// Kill ends that uid's units and kills every process of the mount that has it, and returns when nothing is left, or with ctx: a process that
// hangs in the kernel, on a FUSE mount as a rule, goes only when that connection is aborted. It needs systemd's answer,
// because a unit that is still being started has no process yet.
func (s *Systemd) Kill(ctx context.Context, uid uint32) error {
	if err := DefaultUIDs().check(uid); err != nil {
		return fmt.Errorf("kill processes: %w", err)
	}
	return s.with(ctx, fmt.Sprintf("kill the processes of uid %d", uid), func(ctx context.Context, b *bus) error {
		units, err := b.list(ctx)
		if err != nil {
			return err
		}
		var its []string
		for _, u := range units {
			if u.UID == uid {
				its = append(its, unitName(u.Name))
			}
		}
		return s.end(ctx, b, its, func() error { return killAll(ctx, s.find, uid, func() {}) })
	})
}

// Remove ends the unit of that name, alive or not, and forgets it. One that is not there is no error; one that is not this
// driver's is left alone (fault.Exists).
func (s *Systemd) Remove(ctx context.Context, name string) error {
	if !validUnitName(name) {
		return fault.Errorf(fault.Invalid, "end a unit: %q cannot be the name of one", name)
	}
	return s.with(ctx, "end unit "+unitName(name), func(ctx context.Context, b *bus) error {
		state, err := b.unit(ctx, unitName(name))
		if err != nil || !state.loaded() {
			return err
		}
		if !state.ours() {
			return fault.Errorf(fault.Exists, "the host's unit %s is not this driver's", unitName(name))
		}
		return s.end(ctx, b, []string{unitName(name)}, func() error { return nil })
	})
}

// end stops units without mercy: a start that is queued is cancelled, processes are killed, then kill is called, and the
// units are waited for and forgotten.
func (s *Systemd) end(ctx context.Context, b *bus, units []string, kill func() error) error {
	for _, name := range units {
		if _, err := b.StopUnitContext(ctx, name, "replace", nil); err != nil && !isDBusError(err, errNoSuchUnit) {
			return fmt.Errorf("stop %s: %w", name, err)
		}
		if err := b.kill(ctx, name); err != nil {
			return fmt.Errorf("kill %s: %w", name, err)
		}
	}
	if err := kill(); err != nil {
		return err
	}
	for _, name := range units {
		for {
			state, err := b.unit(ctx, name)
			if err != nil {
				return err
			}
			if state.dead() {
				break
			}
			select {
			case <-time.After(killPause):
			case <-ctx.Done():
				return fmt.Errorf("unit %s is still %s: %w", name, state.active(), context.Cause(ctx))
			}
		}
		if err := b.forget(ctx, name); err != nil {
			return err
		}
	}
	return nil
}

// limitSlice bounds all helpers together, once. systemd keeps that for as long as the host is up.
func (s *Systemd) limitSlice(ctx context.Context, b *bus) error {
	s.mu.Lock()
	done := s.limited
	s.mu.Unlock()
	props := s.sliceLimits.properties()
	if done || len(props) == 0 {
		return nil // the first service makes the slice
	}
	if err := b.SetUnitPropertiesContext(ctx, Slice, true, wire(props)...); err != nil {
		return fmt.Errorf("limit %s: %w", Slice, err)
	}
	s.mu.Lock()
	s.limited = true
	s.mu.Unlock()
	return nil
}
