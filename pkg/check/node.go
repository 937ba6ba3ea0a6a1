//go:build linux

package check

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/s3-csi/s3-csi-driver/pkg/backend"
	"github.com/s3-csi/s3-csi-driver/pkg/client"
	"github.com/s3-csi/s3-csi-driver/pkg/host"
	"github.com/s3-csi/s3-csi-driver/pkg/launcher"
	"github.com/s3-csi/s3-csi-driver/pkg/programs"
	"github.com/s3-csi/s3-csi-driver/pkg/resolvconf"
	"github.com/s3-csi/s3-csi-driver/pkg/sandbox"
)

const (
	nodeBound = 2 * time.Minute
	// installName is the driver's name in the host's directory of programs during a check.
	installName = "check"
	// moveBeneath is MOVE_MOUNT_BENEATH of include/uapi/linux/mount.h.
	moveBeneath = 0x200
)

// Node is a host to check, with the settings of the node service.
type Node struct {
	Program       string // the helper's program, in this process's view
	ClientDir     string // in this process's view
	DefaultClient string
	StateDir      string // on the host
	CacheDir      string // on the host
	HostDir       string // on the host
	AllowIsolated bool   // the node service publishes even if it is isolated from the host
	Launcher      string // "systemd", "process" or "auto"
	PodDNS        bool   // helpers resolve names like this process, not like the host
	UIDs          launcher.UIDRange
	Version       string
	Backends      []backend.Backend
	Clients       client.Set
}

// Check checks the host and removes what it created.
func (n Node) Check(ctx context.Context) Section {
	ctx, cancel := context.WithTimeout(ctx, nodeBound)
	defer cancel()
	r := &nodeRun{Node: n, version: map[string]string{}, broken: map[string]error{}}
	r.do(ctx)
	return Section{Name: "node", Rows: r.all}
}

type nodeRun struct {
	Node
	rows
	ns      *host.Namespace
	systemd bool  // it will launch helpers
	hidden  bool  // helpers run in mount namespaces that hide some directories
	dnsErr  error // why helpers resolve names like the host despite PodDNS
	// version and broken are the versions of the clients that the host can run, and the errors of the others, by client.
	version map[string]string
	broken  map[string]error
}

func (r *nodeRun) do(ctx context.Context) {
	what := item{"hostMounts", "the host's mount namespace", true}
	stateDir := item{"stateDir", "clients can access the state directory", true}
	cacheDir := item{"cacheDir", "clients can access the cache directory", true}
	var err error
	if r.ns, err = host.NewNamespace(); err != nil {
		r.add(what.row(No, one(err), ""))
		r.unknown("the host's mount namespace cannot be entered", item{"isolation", "the driver sees the host", true}, item{"fuseDevice", "/dev/fuse", true}, item{"fuseMount", "mounting FUSE", true},
			stateDir, cacheDir, item{"launcher", "the launcher of helpers", true}, item{"hostPrograms", "programs run from the host's directory", true})
	} else {
		how := "this process is in it"
		if r.ns.Foreign() {
			how = "it can be entered"
		}
		r.add(what.row(Yes, how, ""))
		r.isolation(ctx)
		r.fuse(ctx)
		r.passable(ctx, stateDir, "--state-dir", r.StateDir)
		r.passable(ctx, cacheDir, "--cache-dir", r.CacheDir)
		r.launching(ctx)
		r.programs(ctx)
	}
	r.pids()
	r.kernel()
	r.cgroups(ctx)
	r.clients()
	r.dns(ctx)
}

// isolation checks whether the node service would refuse to publish because it is isolated from the host.
func (r *nodeRun) isolation(ctx context.Context) {
	what := item{"isolation", "the driver sees the host", !r.AllowIsolated}
	err := r.ns.Isolated(ctx, host.OwnDir{Flag: "--state-dir", Path: r.StateDir}, host.OwnDir{Flag: "--cache-dir", Path: r.CacheDir})
	r.noError(what, err, "")
}

// fuse opens the device and mounts it briefly below the state directory.
func (r *nodeRun) fuse(ctx context.Context) {
	device, mounting := item{"fuseDevice", "/dev/fuse", true}, item{"fuseMount", "mounting FUSE", true}
	err := r.ns.Do(ctx, "mount FUSE", func() error {
		fuse, err := host.OpenFuse()
		if err != nil {
			return noDeviceError{err}
		}
		defer fuse.Close()
		return mountOnce(fuse, r.StateDir, r.UIDs.First)
	})
	if none := (noDeviceError{}); errors.As(err, &none) {
		r.add(device.row(No, one(err), ""))
		r.unknown("/dev/fuse does not exist", mounting)
		return
	}
	r.add(device.row(Yes, "", ""))
	if err != nil {
		r.add(mounting.row(No, one(err), "the node's container must be privileged, and --state-dir must be writable on the host"))
		return
	}
	r.add(mounting.row(Yes, "below "+r.StateDir, ""))
}

// noDeviceError means that the device could not be opened.
type noDeviceError struct{ error }

// mountOnce mounts and unmounts. No process serves the mount, so it must not be accessed.
func mountOnce(fuse *os.File, stateDir string, uid uint32) (err error) {
	if _, statErr := os.Lstat(stateDir); errors.Is(statErr, os.ErrNotExist) {
		defer func() { _ = os.Remove(stateDir) }()
	}
	if err := os.MkdirAll(stateDir, 0o711); err != nil {
		return err
	}
	path, err := os.MkdirTemp(stateDir, "check-")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, os.Remove(path)) }()
	dir, err := host.OpenDir(path)
	if err != nil {
		return err
	}
	defer dir.Close()
	if err := host.MountFuse(fuse, dir, host.FuseMount{Source: "s3csi-check", UID: uid, GID: uid}); err != nil {
		return err
	}
	return unix.Unmount(path, unix.MNT_DETACH|unix.UMOUNT_NOFOLLOW)
}

// passable checks whether a mount's user can reach one of the driver's directories.
func (r *nodeRun) passable(ctx context.Context, what item, flag, dir string) {
	err := r.ns.Passable(ctx, dir, r.UIDs.First)
	if err != nil {
		err = fmt.Errorf("%s: %w", flag, err)
	}
	r.noError(what, err, dir)
}

// launching determines the launcher of helpers.
func (r *nodeRun) launching(ctx context.Context) {
	what := item{"launcher", "the launcher of helpers", true}
	confinement := item{"sandbox", "the sandbox of helpers and clients", false}
	survives := item{"survivesDriver", "mounts survive driver restarts", false}
	if r.Launcher != "process" {
		options := launcher.Options{UIDs: r.UIDs}
		if r.PodDNS && r.ns.Foreign() {
			options.Resolver = noBinds{}
		}
		s, err := launcher.NewSystemd(r.ns, r.Program, options)
		var box launcher.Sandbox
		if err == nil {
			box, err = s.Check(ctx)
		}
		switch {
		case err == nil:
			r.systemd = true
			if ok, why := s.ResolvesBy(); !ok && r.PodDNS && r.ns.Foreign() {
				r.dnsErr = errors.New(why)
			}
			r.add(what.row(Yes, "systemd "+box.Version, ""))
			r.hidden = box.Landlock == 0
			if len(box.Missing) > 0 {
				r.add(confinement.row(No, describe(box)+", missing: "+strings.Join(box.Missing, ", "), "needs a newer systemd, the unified cgroup hierarchy, or a shared / on the host; mounts work without it"))
			} else {
				r.add(confinement.row(Yes, fmt.Sprintf("%s, system calls, and %d properties of units", describe(box), len(box.Present)), ""))
			}
			r.add(survives.row(Yes, "", ""))
			return
		case r.Launcher == "systemd" || !errors.Is(err, launcher.ErrNoSystemd):
			r.add(what.row(No, one(err), "check systemd and D-Bus on the host (systemctl is-system-running), or set --launcher=process"))
			r.unknown("systemd is unresponsive", confinement, survives)
			return
		}
		r.add(what.row(Yes, "process: "+one(err), ""))
	} else {
		r.add(what.row(Yes, "process, set with --launcher", ""))
	}
	p := launcher.NewProcess(r.ns, r.Program, launcher.Options{UIDs: r.UIDs})
	switch box := p.Sandbox(); {
	case len(box.Missing) > 0:
		r.add(confinement.row(No, describe(box)+", missing: "+strings.Join(box.Missing, ", "), "boot a kernel with CONFIG_SECCOMP_FILTER, or allow the driver's container seccomp(2)"))
	case box.Landlock > 0:
		r.add(confinement.row(Yes, describe(box)+", and system calls, without limits of memory, tasks and CPU", ""))
	default:
		r.add(confinement.row(No, describe(box)+": clients have their own user and no privileges, but read and write what any user may", "boot a kernel with Landlock (Linux 5.19, lsm=...,landlock), or use launcher systemd"))
	}
	if ok, why := p.SurvivesDriver(); !ok {
		r.add(survives.row(No, why, ""))
	} else {
		r.add(survives.row(Yes, "", ""))
	}
}

// describe returns the kind of a sandbox and what it restricts.
func describe(box launcher.Sandbox) string {
	if box.Landlock == 0 {
		return box.Kind() + " (" + box.NoLandlock + ")"
	}
	return fmt.Sprintf("%s, version %d (%s)", box.Kind(), box.Landlock, strings.Join(append([]string{"files"}, sandbox.Restrictions(box.Landlock)...), ", "))
}

// noBinds is for a launcher that starts no helpers.
type noBinds struct{}

func (noBinds) Binds(context.Context) ([]resolvconf.Bind, error) { return nil, nil }

// programs installs the programs on the host like the node service, runs them, and removes them.
func (r *nodeRun) programs(ctx context.Context) {
	what := item{"hostPrograms", "programs run from the host's directory", r.systemd || r.ns.Foreign()}
	found, files := map[string]string{}, append([]string{r.Program}, programs.Files(r.Clients.All(), r.ClientDir)...)
	for _, c := range r.Clients.All() {
		if name, ok := programs.Find(c, r.ClientDir); ok {
			found[c.Name] = name
		}
	}
	had := r.ns.Do(ctx, "stat "+r.HostDir, func() error {
		_, err := os.Lstat(r.HostDir)
		return err
	}) == nil
	installed, err := programs.Install(ctx, r.ns, programs.Options{Dir: r.HostDir, DriverName: installName, Version: r.Version, Files: files, Sandboxed: r.hidden})
	if err == nil {
		err = r.ns.Passable(ctx, installed.Dir, r.UIDs.First)
	}
	if err == nil {
		_, err = programs.Try(ctx, r.ns, installed.Path(filepath.Base(r.Program)))
	}
	for name, file := range found {
		path := filepath.Join(r.ClientDir, file)
		if err == nil {
			path = installed.Path(file)
		}
		if err == nil || !what.needed {
			r.version[name], r.broken[name] = programs.Try(ctx, r.ns, path)
		}
	}
	cleaning, cancel := context.WithTimeout(context.WithoutCancel(ctx), cleanupBound)
	defer cancel()
	if installed.Dir != "" {
		err = cmp.Or(err, installed.Close(), r.ns.Do(cleaning, "remove "+installed.Dir, func() error { return os.RemoveAll(filepath.Dir(installed.Dir)) }))
	}
	if !had { // fails if it is not empty
		_ = r.ns.Do(cleaning, "remove "+r.HostDir, func() error { return os.Remove(r.HostDir) })
	}
	r.noError(what, err, r.HostDir)
}

// isDefault reports whether volumes that name no client use c.
func (r *nodeRun) isDefault(c client.Client) bool {
	own := func(b backend.Backend) bool { return b.DefaultClient == c.Name }
	return c.Name == r.DefaultClient || slices.ContainsFunc(r.Backends, own)
}

func (r *nodeRun) pids() {
	needed := slices.ContainsFunc(r.Clients.All(), func(c client.Client) bool { return c.CallerPIDs && r.isDefault(c) })
	what := item{"hostPIDs", "clients see the pids of their callers", needed}
	r.noError(what, host.HostPID(), "")
}

// kernel checks the system calls that publishing and healing need, with arguments that have no effect.
func (r *nodeRun) kernel() {
	var name unix.Utsname
	release := "unknown"
	if unix.Uname(&name) == nil {
		release = unix.ByteSliceToString(name.Release[:])
	}
	var at unix.Statx_t
	how := &unix.OpenHow{Flags: unix.O_PATH | unix.O_CLOEXEC, Resolve: unix.RESOLVE_BENEATH | unix.RESOLVE_NO_SYMLINKS}
	fd, openErr := unix.Openat2(unix.AT_FDCWD, ".", how)
	if openErr == nil {
		_ = unix.Close(fd)
	}
	tree, treeErr := unix.OpenTree(-1, "", unix.OPEN_TREE_CLOEXEC|unix.AT_EMPTY_PATH)
	if treeErr == nil {
		_ = unix.Close(tree)
	}
	statErr := unix.Statx(unix.AT_FDCWD, "/", unix.AT_STATX_DONT_SYNC, unix.STATX_MNT_ID, &at)
	if statErr == nil && at.Mask&unix.STATX_MNT_ID == 0 {
		statErr = unix.ENOSYS
	}
	moveErr := unix.MoveMount(-1, "", -1, "", unix.MOVE_MOUNT_F_EMPTY_PATH|unix.MOVE_MOUNT_T_EMPTY_PATH)
	beneathErr := unix.MoveMount(-1, "", -1, "", unix.MOVE_MOUNT_F_EMPTY_PATH|unix.MOVE_MOUNT_T_EMPTY_PATH|moveBeneath)
	for _, f := range []struct {
		item
		err          error
		since, costs string
	}{
		{item{"openat2", "kernel: openat2", true}, openErr, "5.6", "targets cannot be opened safely"},
		{item{"openTree", "kernel: open_tree", true}, treeErr, "5.2", "mounts cannot be published"},
		{item{"moveMount", "kernel: move_mount", true}, moveErr, "5.2", "mounts cannot be published"},
		{item{"mountSetattr", "kernel: mount_setattr", true}, unix.MountSetattr(-1, "", unix.AT_EMPTY_PATH, &unix.MountAttr{Attr_set: unix.MOUNT_ATTR_RDONLY}), "5.12", "mounts cannot be published"},
		{item{"statxMountID", "kernel: mount ids in statx", true}, statErr, "5.8", "mounts cannot be distinguished"},
		{item{"moveMountBeneath", "kernel: move_mount beneath a mount", false}, beneathErr, "6.5", "a stale mount is covered by a new one instead of replaced"},
	} {
		if f.err == nil || errors.Is(f.err, unix.EBADF) {
			r.add(f.row(Yes, "kernel "+release, ""))
			continue
		}
		why := fmt.Sprintf("kernel %s returns %q: %s", release, f.err, f.costs)
		r.add(f.row(No, why, "requires Linux "+f.since+"; on a newer kernel, a seccomp profile blocks it"))
	}
}

var errOldCgroups = errors.New("the host uses cgroups version 1")

func (r *nodeRun) cgroups(ctx context.Context) {
	what := item{"cgroups", "unified cgroup hierarchy (version 2)", false}
	if r.ns == nil {
		r.unknown("the host's mount namespace cannot be entered", what)
		return
	}
	err := r.ns.Do(ctx, "read the host's cgroups", func() error {
		var st unix.Statfs_t
		if err := unix.Statfs("/sys/fs/cgroup", &st); err != nil {
			return err
		}
		if st.Type != unix.CGROUP2_SUPER_MAGIC {
			return errOldCgroups
		}
		return nil
	})
	switch {
	case errors.Is(err, errOldCgroups):
		r.add(what.row(No, "the host uses cgroups version 1, so clients' access to metadata addresses cannot be blocked", ""))
	case err != nil:
		r.add(what.row(Unknown, one(err), ""))
	default:
		r.add(what.row(Yes, "", ""))
	}
}

func (r *nodeRun) clients() {
	for _, c := range r.Clients.All() {
		what := item{"client." + c.Name, "the client " + c.Name, r.isDefault(c)}
		name, found := programs.Find(c, r.ClientDir)
		path := filepath.Join(r.ClientDir, name)
		version, ran := r.version[c.Name]
		err := r.broken[c.Name]
		if found {
			err = cmp.Or(programs.Check(c, path), err)
		}
		switch {
		case !found:
			r.add(what.row(No, "program not found: "+path, "install it there, or set --client-dir to its directory"))
		case err != nil:
			r.add(what.row(No, one(err), ""))
		case !ran:
			r.add(what.row(Unknown, path+" was not run, because programs cannot be run from the host's directory", ""))
		default:
			r.add(what.row(Yes, path+": "+version, ""))
		}
	}
}
