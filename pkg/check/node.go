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
	nodeBound   = 2 * time.Minute
	installName = "check" // the driver's name in the host's directory of programs during a check
	moveBeneath = 0x200   // MOVE_MOUNT_BENEATH of include/uapi/linux/mount.h
)

// Node is a host to check, with the settings of the node service.
type Node struct {
	Program       string // the helper's program, in this process's view
	ClientDir     string // in this process's view
	DefaultClient string
	StateDir      host.OwnDir
	CacheDir      host.OwnDir
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
	r := &nodeRun{in: n, version: map[string]string{}, broken: map[string]error{}}
	r.rows.tryAll(ctx, r.hostProbes())
	r.kernel()
	r.rows.tryAll(ctx, []probe{{Optional("cgroups", "unified cgroup hierarchy (version 2)"), "", []*string{&r.noHost}, r.cgroups}})
	r.clients()
	r.dns(ctx)
	return Section{Name: "node", Rows: r.rows}
}

type nodeRun struct {
	in      Node
	rows    rows
	ns      *host.Namespace
	systemd bool             // it will launch helpers
	box     launcher.Sandbox // of helpers
	// survives reports whether mounts survive the driver, and why not.
	survives func() (bool, string)
	dnsErr   error // why helpers resolve names like the host despite PodDNS
	// version and broken are the versions of the clients that the host can run, and the errors of the others, by client.
	version                      map[string]string
	broken                       map[string]error
	noHost, noDevice, noLauncher string // why something cannot be tried; "": it can
}

// hostProbes returns what the node service needs of the host, in the order in which it is tried.
func (r *nodeRun) hostProbes() []probe {
	onHost, started := []*string{&r.noHost}, []*string{&r.noHost, &r.noLauncher}
	needPIDs := slices.ContainsFunc(r.in.Clients.All(), func(c client.Client) bool { return c.CallerPIDs && r.isDefault(c) })
	return []probe{
		{Needed("hostMounts", "the host's mount namespace"), "", nil, r.enter},
		{NeededIf(!r.in.AllowIsolated, "isolation", "the driver sees the host"), "", onHost, r.isolation},
		{Needed("fuseDevice", "/dev/fuse"), "", onHost, r.fuseDevice},
		{Needed("fuseMount", "mounting FUSE"), "", []*string{&r.noHost, &r.noDevice}, r.fuseMount},
		{Needed("stateDir", "clients can access the state directory"), "", onHost, r.passable(r.in.StateDir)},
		{Needed("cacheDir", "clients can access the cache directory"), "", onHost, r.passable(r.in.CacheDir)},
		{Needed("launcher", "the launcher of helpers"), "", onHost, r.launcher},
		{Optional("sandbox", "the sandbox of helpers and clients"), "", started, r.sandbox},
		{Optional("survivesDriver", "mounts survive driver restarts"), "", started, r.survivesDriver},
		{Needed("hostPrograms", "programs run from the host's directory"), "", onHost, r.programs},
		{NeededIf(needPIDs, "hostPIDs", "clients see the pids of their callers"), "", nil,
			func(_ context.Context, what Item) Row { return what.noError(host.HostPID(), "") }},
	}
}

// enter finds the host's mount namespace.
func (r *nodeRun) enter(_ context.Context, what Item) Row {
	var err error
	if r.ns, err = host.NewNamespace(); err != nil {
		r.noHost = "the host's mount namespace cannot be entered"
		return what.Row(No, OneLine(err), "")
	}
	if r.ns.Foreign() {
		return what.Row(Yes, "it can be entered", "")
	}
	return what.Row(Yes, "this process is in it", "")
}

// isolation checks whether the node service would refuse to publish because it is isolated from the host.
func (r *nodeRun) isolation(ctx context.Context, what Item) Row {
	return what.noError(r.ns.Isolated(ctx, r.in.StateDir, r.in.CacheDir), "")
}

func (r *nodeRun) fuseDevice(ctx context.Context, what Item) Row {
	err := r.ns.Do(ctx, "open /dev/fuse", func() error {
		fuse, err := host.OpenFuse()
		if err == nil {
			err = fuse.Close()
		}
		return err
	})
	if err != nil {
		r.noDevice = "/dev/fuse does not exist"
	}
	return what.noError(err, "")
}

// fuseMount mounts the device briefly below the state directory.
func (r *nodeRun) fuseMount(ctx context.Context, what Item) Row {
	dir := r.in.StateDir.Path
	if err := r.ns.Do(ctx, "mount FUSE", func() error { return mountOnce(dir, r.in.UIDs.First) }); err != nil {
		return what.Row(No, OneLine(err), "the node's container must be privileged, and --state-dir must be writable on the host")
	}
	return what.Row(Yes, "below "+dir, "")
}

// mountOnce mounts and unmounts. No process serves the mount, so it must not be accessed.
func mountOnce(stateDir string, uid uint32) (err error) {
	fuse, err := host.OpenFuse()
	if err != nil {
		return err
	}
	defer fuse.Close()
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
func (r *nodeRun) passable(dir host.OwnDir) func(context.Context, Item) Row {
	return func(ctx context.Context, what Item) Row {
		err := r.ns.Passable(ctx, dir.Path, r.in.UIDs.First)
		if err != nil {
			err = fmt.Errorf("%s: %w", dir.Flag, err)
		}
		return what.noError(err, dir.Path)
	}
}

// launcher determines the launcher of helpers.
func (r *nodeRun) launcher(ctx context.Context, what Item) Row {
	why := "process, set with --launcher"
	if r.in.Launcher != "process" {
		options := launcher.Options{UIDs: r.in.UIDs}
		if r.in.PodDNS && r.ns.Foreign() {
			options.Resolver = noBinds{}
		}
		s, err := launcher.NewSystemd(r.ns, r.in.Program, options)
		if err == nil {
			r.box, err = s.Check(ctx)
		}
		switch {
		case err == nil:
			r.systemd, r.survives = true, func() (bool, string) { return true, "" }
			if ok, why := s.ResolvesBy(); !ok && r.in.PodDNS && r.ns.Foreign() {
				r.dnsErr = errors.New(why)
			}
			return what.Row(Yes, "systemd "+r.box.Version, "")
		case r.in.Launcher == "systemd" || !errors.Is(err, launcher.ErrNoSystemd):
			r.noLauncher = "systemd is unresponsive"
			return what.Row(No, OneLine(err), "check systemd and D-Bus on the host (systemctl is-system-running), or set --launcher=process")
		}
		why = "process: " + OneLine(err)
	}
	p := launcher.NewProcess(r.ns, r.in.Program, launcher.Options{UIDs: r.in.UIDs})
	r.box, r.survives = p.Sandbox(), p.SurvivesDriver
	return what.Row(Yes, why, "")
}

func (r *nodeRun) sandbox(_ context.Context, what Item) Row {
	missing := describe(r.box) + ", missing: " + strings.Join(r.box.Missing, ", ")
	switch {
	case len(r.box.Missing) > 0 && r.systemd:
		return what.Row(No, missing, "needs a newer systemd, the unified cgroup hierarchy, or a shared / on the host; mounts work without it")
	case len(r.box.Missing) > 0:
		return what.Row(No, missing, "boot a kernel with CONFIG_SECCOMP_FILTER, or allow the driver's container seccomp(2)")
	case r.systemd:
		return what.Row(Yes, fmt.Sprintf("%s, system calls, and %d properties of units", describe(r.box), len(r.box.Present)), "")
	case r.box.Landlock > 0:
		return what.Row(Yes, describe(r.box)+", and system calls, without limits of memory, tasks and CPU", "")
	}
	return what.Row(No, describe(r.box)+": clients have their own user and no privileges, but read and write what any user may",
		"boot a kernel with Landlock (Linux 5.19, lsm=...,landlock), or use launcher systemd")
}

func (r *nodeRun) survivesDriver(_ context.Context, what Item) Row {
	if ok, why := r.survives(); !ok {
		return what.Row(No, why, "")
	}
	return what.Row(Yes, "", "")
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
func (r *nodeRun) programs(ctx context.Context, what Item) Row {
	what.needed = r.systemd || r.ns.Foreign()
	uninstall, err := Uninstaller(ctx, r.ns, r.in.HostDir, installName)
	if err != nil {
		return what.noError(err, "")
	}
	files := append([]string{r.in.Program}, programs.Files(r.in.Clients.All(), r.in.ClientDir)...)
	installed, err := programs.Install(ctx, r.ns, programs.Options{
		Dir: r.in.HostDir, DriverName: installName, Version: r.in.Version, Files: files, Sandboxed: r.systemd && r.box.Landlock == 0,
	})
	if err == nil {
		err = r.ns.Passable(ctx, installed.Dir, r.in.UIDs.First)
	}
	if err == nil {
		_, err = programs.Try(ctx, r.ns, installed.Path(filepath.Base(r.in.Program)))
	}
	for _, c := range r.in.Clients.All() {
		file, found := programs.Find(c, r.in.ClientDir)
		path := filepath.Join(r.in.ClientDir, file)
		if err == nil {
			path = installed.Path(file)
		}
		if found && (err == nil || !what.needed) {
			r.version[c.Name], r.broken[c.Name] = programs.Try(ctx, r.ns, path)
		}
	}
	if installed.Dir != "" {
		err = cmp.Or(err, installed.Close())
	}
	return what.noError(cmp.Or(err, uninstall()), r.in.HostDir)
}

// Uninstaller returns the function that removes the programs that a check installs for a driver of that name, also after ctx has ended.
func Uninstaller(ctx context.Context, ns *host.Namespace, hostDir, driverName string) (uninstall func() error, err error) {
	had, err := host.Call(ctx, ns, "stat "+hostDir, nil, func() (bool, error) {
		_, err := os.Lstat(hostDir)
		return err == nil, nil
	})
	return func() error {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), cleanupBound)
		defer cancel()
		dir := filepath.Join(hostDir, driverName)
		return ns.Do(ctx, "remove "+dir, func() error {
			err := os.RemoveAll(dir)
			if !had { // fails if it is not empty
				_ = os.Remove(hostDir)
			}
			return err
		})
	}, err
}

// isDefault reports whether volumes that name no client use c.
func (r *nodeRun) isDefault(c client.Client) bool {
	own := func(b backend.Backend) bool { return b.DefaultClient == c.Name }
	return c.Name == r.in.DefaultClient || slices.ContainsFunc(r.in.Backends, own)
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
	setErr := unix.MountSetattr(-1, "", unix.AT_EMPTY_PATH, &unix.MountAttr{Attr_set: unix.MOUNT_ATTR_RDONLY})
	for _, f := range []struct {
		what         Item
		err          error
		since, costs string
	}{
		{Needed("openat2", "kernel: openat2"), openErr, "5.6", "targets cannot be opened safely"},
		{Needed("openTree", "kernel: open_tree"), treeErr, "5.2", "mounts cannot be published"},
		{Needed("moveMount", "kernel: move_mount"), moveErr, "5.2", "mounts cannot be published"},
		{Needed("mountSetattr", "kernel: mount_setattr"), setErr, "5.12", "mounts cannot be published"},
		{Needed("statxMountID", "kernel: mount ids in statx"), statErr, "5.8", "mounts cannot be distinguished"},
		{Optional("moveMountBeneath", "kernel: move_mount beneath a mount"), beneathErr, "6.5", "a stale mount is covered by a new one instead of replaced"},
	} {
		row := f.what.Row(Yes, "kernel "+release, "")
		if f.err != nil && !errors.Is(f.err, unix.EBADF) {
			row = f.what.Row(No, fmt.Sprintf("kernel %s returns %q: %s", release, f.err, f.costs),
				"requires Linux "+f.since+"; on a newer kernel, a seccomp profile blocks it")
		}
		r.rows = append(r.rows, row)
	}
}

var errOldCgroups = errors.New("the host uses cgroups version 1")

func (r *nodeRun) cgroups(ctx context.Context, what Item) Row {
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
		return what.Row(No, "the host uses cgroups version 1, so clients' access to metadata addresses cannot be blocked", "")
	case err != nil:
		return what.Row(Unknown, OneLine(err), "")
	}
	return what.Row(Yes, "", "")
}

func (r *nodeRun) clients() {
	for _, c := range r.in.Clients.All() {
		r.rows = append(r.rows, r.client(c, NeededIf(r.isDefault(c), "client."+c.Name, "the client "+c.Name)))
	}
}

func (r *nodeRun) client(c client.Client, what Item) Row {
	name, found := programs.Find(c, r.in.ClientDir)
	path := filepath.Join(r.in.ClientDir, name)
	if !found {
		return what.Row(No, "program not found: "+path, "install it there, or set --client-dir to its directory")
	}
	version, ran := r.version[c.Name]
	switch err := cmp.Or(programs.Check(c, path), r.broken[c.Name]); {
	case err != nil:
		return what.Row(No, OneLine(err), "")
	case !ran:
		return what.Row(Unknown, path+" was not run, because programs cannot be run from the host's directory", "")
	}
	return what.Row(Yes, path+": "+version, "")
}
