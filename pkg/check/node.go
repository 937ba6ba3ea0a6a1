//go:build linux

package check

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/s3-csi/s3-csi-driver/pkg/backend"
	"github.com/s3-csi/s3-csi-driver/pkg/client"
	"github.com/s3-csi/s3-csi-driver/pkg/host"
	"github.com/s3-csi/s3-csi-driver/pkg/hostdir"
	"github.com/s3-csi/s3-csi-driver/pkg/launcher"
	"github.com/s3-csi/s3-csi-driver/pkg/resolvconf"
)

const (
	nodeBound = 2 * time.Minute
	// installName is the driver's name in the host's directory of programs for the time of a check.
	installName = "check"
	// moveBeneath is MOVE_MOUNT_BENEATH of include/uapi/linux/mount.h.
	moveBeneath = 0x200
)

// Node is a host to check, as the node service would use it.
type Node struct {
	Program       string // what helpers are made of, in this process's view
	ClientDir     string // in this process's view
	DefaultClient string
	StateDir      string // on the host
	CacheDir      string // on the host
	HostDir       string // on the host
	AllowIsolated bool   // the node service publishes even if it cannot see the host
	Launcher      string // "systemd", "process" or "auto"
	PodDNS        bool   // helpers are to resolve names as this process does, not as the host
	UIDs          launcher.UIDRange
	Version       string
	Backends      []backend.Backend
}

// Check checks the host. It leaves nothing behind.
func (n Node) Check(ctx context.Context) Section {
	ctx, cancel := context.WithTimeout(ctx, nodeBound)
	defer cancel()
	t := &nodeTrial{Node: n}
	t.run(ctx)
	return Section{Name: "node", Rows: t.all}
}

type nodeTrial struct {
	Node
	rows
	ns      *host.Namespace
	systemd bool  // it is there and will launch helpers
	dnsErr  error // why helpers resolve names as the host does, against PodDNS
}

func (t *nodeTrial) run(ctx context.Context) {
	what := thing{"hostMounts", "the host's mount namespace", true}
	var err error
	if t.ns, err = host.NewNamespace(); err != nil {
		t.add(what.row(No, one(err), ""))
		t.unknown("the host's mount namespace cannot be entered", thing{"isolation", "the driver sees the host", true}, thing{"fuseDevice", "/dev/fuse", true}, thing{"fuseMount", "mounting FUSE", true},
			stateDir, cacheDir, thing{"launcher", "what launches helpers", true}, thing{"hostPrograms", "programs run from the host's directory", true})
	} else {
		how := "this process is in it"
		if t.ns.Foreign() {
			how = "it can be entered"
		}
		t.add(what.row(Yes, how, ""))
		t.isolation(ctx)
		t.fuse(ctx)
		t.passable(ctx, stateDir, "--state-dir", t.StateDir)
		t.passable(ctx, cacheDir, "--cache-dir", t.CacheDir)
		t.launching(ctx)
		t.programs(ctx)
	}
	t.pids()
	t.kernel()
	t.cgroups(ctx)
	t.clients()
	t.dns(ctx)
}

// isolation finds out whether the node service would refuse to publish because it cannot see the host.
func (t *nodeTrial) isolation(ctx context.Context) {
	what := thing{"isolation", "the driver sees the host", !t.AllowIsolated}
	err := t.ns.Isolated(ctx, host.OwnDir{Flag: "--state-dir", Path: t.StateDir}, host.OwnDir{Flag: "--cache-dir", Path: t.CacheDir})
	if err != nil {
		t.add(what.row(No, one(err), ""))
		return
	}
	t.add(what.row(Yes, "", ""))
}

// fuse opens the device and mounts it on a directory of the state directory's, for a moment.
func (t *nodeTrial) fuse(ctx context.Context) {
	device, mounting := thing{"fuseDevice", "/dev/fuse", true}, thing{"fuseMount", "mounting FUSE", true}
	err := t.ns.Do(ctx, "mounting FUSE to try it", func() error {
		fuse, err := host.OpenFuse()
		if err != nil {
			return noDeviceError{err}
		}
		defer fuse.Close()
		return mountOnce(fuse, t.StateDir, t.UIDs.First)
	})
	if none := (noDeviceError{}); errors.As(err, &none) {
		t.add(device.row(No, one(err), ""))
		t.unknown("there is no device", mounting)
		return
	}
	t.add(device.row(Yes, "", ""))
	if err != nil {
		t.add(mounting.row(No, one(err), "the node's container must be privileged, and --state-dir must be writable on the host"))
		return
	}
	t.add(mounting.row(Yes, "below "+t.StateDir, ""))
}

// noDeviceError is that of a device that could not be opened.
type noDeviceError struct{ error }

// mountOnce mounts and unmounts. Nobody serves the mount, so that nothing may look at it.
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

var (
	stateDir = thing{"stateDir", "clients reach the state directory", true}
	cacheDir = thing{"cacheDir", "clients reach the cache directory", true}
)

// passable tries whether a mount's own user can get to one of the driver's directories.
func (t *nodeTrial) passable(ctx context.Context, what thing, flag, dir string) {
	if err := t.ns.Passable(ctx, dir, t.UIDs.First); err != nil {
		t.add(what.row(No, flag+": "+one(err), ""))
		return
	}
	t.add(what.row(Yes, dir, ""))
}

// launching finds out what launches helpers.
func (t *nodeTrial) launching(ctx context.Context) {
	what := thing{"launcher", "what launches helpers", true}
	sandbox := thing{"sandbox", "the sandbox of systemd's units", false}
	survives := thing{"survivesDriver", "mounts outlive the driver", false}
	if t.Launcher != "process" {
		options := []launcher.SystemdOption{launcher.WithSystemdUIDs(t.UIDs)}
		if t.PodDNS && t.ns.Foreign() {
			options = append(options, launcher.WithSystemdResolver(noBinds{}))
		}
		s, err := launcher.NewSystemd(t.ns, t.Program, options...)
		var box launcher.Sandbox
		if err == nil {
			box, err = s.Check(ctx)
		}
		switch {
		case err == nil:
			t.systemd = true
			if ok, why := s.ResolvesBy(); !ok && t.PodDNS && t.ns.Foreign() {
				t.dnsErr = errors.New(why)
			}
			t.add(what.row(Yes, "systemd "+box.Version, ""))
			if len(box.Missing) > 0 {
				t.add(sandbox.row(No, "missing: "+strings.Join(box.Missing, ", "), "a newer systemd, the unified cgroup hierarchy, or a shared / on the host brings it; mounts work without"))
			} else {
				t.add(sandbox.row(Yes, fmt.Sprintf("%d properties hold", len(box.Present)), ""))
			}
			t.add(survives.row(Yes, "", ""))
			return
		case t.Launcher == "systemd" || !errors.Is(err, launcher.ErrNoSystemd):
			t.add(what.row(No, one(err), "look at the state of systemd and D-Bus on the host (systemctl is-system-running), or choose --launcher=process"))
			t.unknown("systemd does not answer", sandbox, survives)
			return
		}
		t.add(what.row(Yes, "plain processes: "+one(err), ""))
	} else {
		t.add(what.row(Yes, "plain processes, as --launcher says", ""))
	}
	t.add(sandbox.row(No, "plain processes have a user of their own and no privileges, but no sandbox and no limits", ""))
	if ok, why := launcher.NewProcess(t.ns, t.Program, launcher.WithUIDs(t.UIDs)).SurvivesDriver(); !ok {
		t.add(survives.row(No, why, ""))
	} else {
		t.add(survives.row(Yes, "", ""))
	}
}

// noBinds is for a launcher that starts nothing.
type noBinds struct{}

func (noBinds) Binds(context.Context) ([]resolvconf.Bind, error) { return nil, nil }

// programs installs the helper's program on the host as the node service does, runs it there, and removes it.
func (t *nodeTrial) programs(ctx context.Context) {
	what := thing{"hostPrograms", "programs run from the host's directory", t.systemd || t.ns.Foreign()}
	had := t.ns.Do(ctx, "looking for "+t.HostDir, func() error {
		_, err := os.Lstat(t.HostDir)
		return err
	}) == nil
	installed, err := hostdir.Install(ctx, t.ns, hostdir.Options{Dir: t.HostDir, DriverName: installName, Version: t.Version, Files: []string{t.Program}, Sandboxed: t.systemd})
	if err == nil {
		err = t.ns.Passable(ctx, installed.Dir, t.UIDs.First)
	}
	if err == nil {
		err = installed.Try(ctx, t.ns, filepath.Base(t.Program))
	}
	cleaning, cancel := context.WithTimeout(context.WithoutCancel(ctx), cleanupBound)
	defer cancel()
	if installed.Dir != "" {
		err = cmp.Or(err, installed.Close(), t.ns.Do(cleaning, "removing "+installed.Dir, func() error { return os.RemoveAll(filepath.Dir(installed.Dir)) }))
	}
	if !had { // not if something was put there meanwhile
		_ = t.ns.Do(cleaning, "removing "+t.HostDir, func() error { return os.Remove(t.HostDir) })
	}
	if err != nil {
		t.add(what.row(No, one(err), ""))
		return
	}
	t.add(what.row(Yes, t.HostDir, ""))
}

func (t *nodeTrial) pids() {
	c, err := client.Get(t.DefaultClient)
	what := thing{"hostPIDs", "clients see the pids of their callers", err == nil && c.CallerPIDs}
	if err := host.HostPID(); err != nil {
		t.add(what.row(No, one(err), ""))
		return
	}
	t.add(what.row(Yes, "", ""))
}

// kernel asks the kernel for what healing needs. Each call is one that cannot do anything.
func (t *nodeTrial) kernel() {
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
		thing
		err          error
		since, costs string
	}{
		{thing{"openat2", "kernel: openat2", true}, openErr, "5.6", "targets cannot be opened safely"},
		{thing{"openTree", "kernel: open_tree", true}, treeErr, "5.2", "mounts cannot be published"},
		{thing{"moveMount", "kernel: move_mount", true}, moveErr, "5.2", "mounts cannot be published"},
		{thing{"mountSetattr", "kernel: mount_setattr", true}, unix.MountSetattr(-1, "", unix.AT_EMPTY_PATH, &unix.MountAttr{Attr_set: unix.MOUNT_ATTR_RDONLY}), "5.12", "mounts cannot be published"},
		{thing{"statxMountID", "kernel: mount ids in statx", true}, statErr, "5.8", "mounts cannot be told apart"},
		{thing{"moveMountBeneath", "kernel: move_mount beneath a mount", false}, beneathErr, "6.5", "a dead mount is healed by one on top of it, with the dead one left below"},
	} {
		if f.err == nil || errors.Is(f.err, unix.EBADF) {
			t.add(f.row(Yes, "kernel "+release, ""))
			continue
		}
		why := fmt.Sprintf("kernel %s says %q: %s", release, f.err, f.costs)
		t.add(f.row(No, why, "it came with Linux "+f.since+"; where the kernel is newer, a seccomp profile forbids it"))
	}
}

var errOldCgroups = errors.New("the host has cgroups of version 1")

func (t *nodeTrial) cgroups(ctx context.Context) {
	what := thing{"cgroups", "one hierarchy of cgroups (version 2)", false}
	if t.ns == nil {
		t.unknown("the host's mount namespace cannot be entered", what)
		return
	}
	err := t.ns.Do(ctx, "looking at the host's cgroups", func() error {
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
		t.add(what.row(No, "the host has cgroups of version 1: clients cannot be kept from metadata addresses", ""))
	case err != nil:
		t.add(what.row(Unknown, one(err), ""))
	default:
		t.add(what.row(Yes, "", ""))
	}
}

func (t *nodeTrial) clients() {
	for _, c := range client.All() {
		what := thing{"client." + c.Name, "the client " + c.Name, c.Name == t.DefaultClient}
		path := filepath.Join(t.ClientDir, c.Binary)
		if fi, err := os.Stat(path); err != nil || !fi.Mode().IsRegular() || fi.Mode().Perm()&0o111 == 0 {
			t.add(what.row(No, "there is no program "+path, "put it there, or name its directory with --client-dir"))
			continue
		}
		t.add(what.row(Yes, path, ""))
	}
}
