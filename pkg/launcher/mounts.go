package launcher

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"

	"golang.org/x/sys/unix"

	"github.com/s3-csi/s3-csi-driver/pkg/fault"
	"github.com/s3-csi/s3-csi-driver/pkg/host"
	"github.com/s3-csi/s3-csi-driver/pkg/proc"
	"github.com/s3-csi/s3-csi-driver/pkg/resolvconf"
)

// Resolver returns the files that replace the host's for helpers, so that they resolve names differently (resolvconf.Copy).
type Resolver interface {
	Binds(ctx context.Context) ([]resolvconf.Bind, error)
}

// certificates is the target of links in /etc/ssl on some distributions.
const certificates = "/var/lib/ca-certificates"

// system are the directories of programs, libraries, configuration and the kernel's own file systems. Mounts there are permanent.
func system() []string {
	return []string{"/bin", "/dev", "/etc", "/gnu", "/lib", "/lib32", "/lib64", "/libx32", "/nix", "/proc", "/sbin", "/sys", "/usr"}
}

// leaveMounts moves this thread, which ends afterwards, into a new mount namespace with only the mounts that a helper needs: the root,
// those below the system's directories, and those on the way to the given paths.
//
// A copy of any other mount would pin its file system as long as the helper runs: a FUSE client would never exit, and a disk could
// not be removed. If mounts are private, as on hosts without systemd, an unmount on the host does not remove the copy. So no copies
// are kept, and later mounts of the host do not propagate. The copies that unshare(2) makes are removed with the old root, also
// hidden ones. There are no requests to file systems that are not kept.
func leaveMounts(paths []string) error {
	if err := unix.Unshare(unix.CLONE_NEWNS); err != nil {
		return fmt.Errorf("make a mount namespace: %w", err)
	}
	// First, so that an unmount here does not propagate to the host.
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return fmt.Errorf("make the mounts private: %w", err)
	}
	stay, err := mountsToKeep(paths)
	if err != nil {
		return fmt.Errorf("read the mount table: %w", err)
	}
	root, err := moveCopy("/", "/")
	if err != nil {
		return err
	}
	defer unix.Close(root)
	// The copy is on top of the old root. Paths from "/" resolve in the old one, those from here in the new one.
	if err := unix.Fchdir(root); err != nil {
		return fmt.Errorf("enter the copy of the root: %w", err)
	}
	for _, path := range stay {
		tree, err := moveCopy(path, strings.TrimPrefix(path, "/"))
		if errors.Is(err, unix.ENOENT) {
			continue // hidden below another mount
		}
		if err != nil {
			return err
		}
		_ = unix.Close(tree)
	}
	if err := unix.PivotRoot(".", "."); err != nil {
		return fmt.Errorf("change the root: %w", err)
	}
	// The old root is on top of the new one now, and the working directory is in it.
	if err := errors.Join(unix.Unmount(".", unix.MNT_DETACH), unix.Chdir("/")); err != nil {
		return fmt.Errorf("leave the old root: %w", err)
	}
	return nil
}

// moveCopy copies the mount on one path to another, without the mounts below it, and returns its root.
func moveCopy(from, to string) (int, error) {
	tree, err := unix.OpenTree(unix.AT_FDCWD, from, unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC|unix.AT_NO_AUTOMOUNT)
	if err != nil {
		return -1, fmt.Errorf("copy the mount on %s: %w", from, err)
	}
	if err := unix.MoveMount(tree, "", unix.AT_FDCWD, to, unix.MOVE_MOUNT_F_EMPTY_PATH); err != nil {
		return -1, errors.Join(fmt.Errorf("mount the copy of %s: %w", from, err), unix.Close(tree))
	}
	return tree, nil
}

// mountsToKeep returns the mount points, except the root, that this thread's namespace keeps, parents first.
func mountsToKeep(paths []string) ([]string, error) {
	mounts, err := host.ThreadMounts(func(m host.Mount) bool { return stays(m, paths) })
	if err != nil {
		return nil, err
	}
	var stay []string
	for _, m := range mounts {
		stay = append(stay, m.Mountpoint)
	}
	slices.Sort(stay)
	return slices.Compact(stay), nil
}

func stays(m host.Mount, paths []string) bool {
	switch {
	case m.Mountpoint == "/":
		return false // is there
	case m.FSType == "cgroup", m.FSType == "cgroup2": // wherever they are
		return true
	case slices.ContainsFunc(paths, func(path string) bool { return atOrBelow(path, m.Mountpoint) }):
		return true
	case m.FSType == "autofs", m.FSType == "fuse", strings.HasPrefix(m.FSType, "fuse."):
		return false
	}
	return slices.ContainsFunc(system(), func(dir string) bool { return atOrBelow(m.Mountpoint, dir) })
}

func atOrBelow(path, dir string) bool { return path == dir || strings.HasPrefix(path, dir+"/") }

// view makes the mount namespace of helpers that resolve names by the files of a Resolver. Where the host's mounts are shared, as systemd
// makes them, it is one for all helpers that a driver starts: later mounts and unmounts of the host propagate to it. Elsewhere it is one
// for each helper, with only the mounts that the helper needs.
type view struct {
	ns       Doer
	resolver Resolver

	alone atomic.Bool   // helpers get namespaces of their own, which do not show directories that come later
	turn  chan struct{} // held while one is made
	last  *os.File      // nil: none that further helpers can enter
	of    string        // the host's files that it hides
}

// newView returns nil without a Resolver.
func newView(ns Doer, r Resolver) *view {
	if r == nil {
		return nil
	}
	return &view{ns: ns, resolver: r, turn: make(chan struct{}, 1)}
}

// openNamespace returns the mount namespace for a helper of a program that starts now. The caller closes it.
func (v *view) openNamespace(ctx context.Context, u Unit, program string) (*os.File, error) {
	select {
	case v.turn <- struct{}{}:
		defer func() { <-v.turn }()
	case <-ctx.Done():
		return nil, fmt.Errorf("make the mount namespace of helpers: %w", context.Cause(ctx))
	}
	binds, err := v.resolver.Binds(ctx)
	if err != nil {
		return nil, err
	}
	have := ""
	if v.last != nil {
		have = v.of
	}
	made, err := host.Call(ctx, v.ns, "making the mount namespace of helpers", madeView.close, func() (madeView, error) { return v.make(u, program, binds, have) })
	if err != nil {
		return nil, fmt.Errorf("make the mount namespace of helpers: %w", err)
	}
	if !made.shared {
		return made.file, nil
	}
	if made.file != nil {
		if v.last != nil {
			v.last.Close() // helpers that are in it keep it
		}
		v.last, v.of = made.file, made.of
	}
	return duplicate(v.last)
}

// madeView is a mount namespace that was made.
type madeView struct {
	file   *os.File // nil: the last one serves
	of     string   // see view
	shared bool     // among helpers
}

func (m madeView) close() {
	if m.file != nil {
		m.file.Close()
	}
}

// make makes a mount namespace, unless the last one serves, which hides the files have. It runs on the host.
func (v *view) make(u Unit, program string, binds []resolvconf.Bind, have string) (m madeView, err error) {
	if m.of, err = resolvconf.State(binds); err != nil {
		return m, err
	}
	needed := neededBy(u, program, binds)
	if m.shared, err = propagate(slices.Concat(needed, parents(u))); err != nil {
		return m, err
	}
	v.alone.Store(!m.shared)
	if u.Spare && !m.shared {
		return m, fault.Errorf(fault.Unsupported, "no spare helpers: the host's mounts are not shared, "+
			"so the directories of a mount would not appear in its mount namespace")
	}
	if m.shared && have != "" && m.of == have {
		return m, nil
	}
	enter := func() { m.file, err = makeView(needed, m.shared, binds) }
	if v.ns.Foreign() {
		enter() // this thread has the host's mounts, and ends afterwards
	} else {
		proc.OnThrowawayThread(enter)
	}
	return m, err
}

// neededBy returns the paths that a helper needs, without symbolic links, as the mount table has them.
func neededBy(u Unit, program string, binds []resolvconf.Bind) []string {
	paths := append(u.directories(), filepath.Dir(program), certificates)
	for _, b := range binds {
		paths = append(paths, b.Source, b.Target)
	}
	return resolved(paths)
}

// resolved returns the paths without symbolic links, where they can be resolved.
func resolved(paths []string) []string {
	for i, path := range paths {
		if r, err := filepath.EvalSymlinks(path); err == nil {
			paths[i] = r
		}
	}
	return paths
}

// parents returns the directories in which the directories of further helpers will appear.
func parents(u Unit) []string {
	dirs := resolved(u.directories())
	for i, dir := range dirs {
		dirs[i] = filepath.Dir(dir)
	}
	return dirs
}

// propagate reports whether mounts and unmounts in the file systems of all these paths, and of the root, propagate to copies of those.
func propagate(paths []string) (bool, error) {
	mounts, err := host.ThreadMounts(func(m host.Mount) bool {
		return slices.ContainsFunc(paths, func(path string) bool { return m.Mountpoint == "/" || atOrBelow(path, m.Mountpoint) })
	})
	if err != nil {
		return false, err
	}
	holds := func(path string) (found host.Mount) {
		for _, m := range mounts { // later entries lie on top
			if (m.Mountpoint == "/" || atOrBelow(path, m.Mountpoint)) && len(m.Mountpoint) >= len(found.Mountpoint) {
				found = m
			}
		}
		return found
	}
	for _, path := range append(paths, "/") {
		if !holds(path).Shared() {
			return false, nil
		}
	}
	return true, nil
}

// makeView moves this thread, which ends afterwards, into a new mount namespace with the files of a Resolver, and returns the namespace.
// With shared mounts it has copies of all of the host's mounts, as long as the host has them; otherwise only those that the paths need.
func makeView(needed []string, shared bool, binds []resolvconf.Bind) (*os.File, error) {
	leave := leaveSharedMounts
	if !shared {
		leave = func() error { return leaveMounts(needed) }
	}
	if err := leave(); err != nil {
		return nil, fmt.Errorf("isolate it from the host's mounts: %w", err)
	}
	if err := resolvconf.Apply(binds); err != nil {
		return nil, err
	}
	return os.Open("/proc/thread-self/ns/mnt")
}

// leaveSharedMounts moves this thread into a new mount namespace to which the host's mounts and unmounts propagate, and which changes
// nothing on the host.
func leaveSharedMounts() error {
	if err := unix.Unshare(unix.CLONE_NEWNS); err != nil {
		return fmt.Errorf("make a mount namespace: %w", err)
	}
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_SLAVE, ""); err != nil {
		return fmt.Errorf("make the mounts follow the host's: %w", err)
	}
	if err := dropStayingClients(); err != nil {
		return fmt.Errorf("leave the host's FUSE mounts: %w", err)
	}
	return nil
}

// dropStayingClients unmounts, in this thread's mount namespace, the copies of FUSE mounts that would stay when the host unmounts theirs,
// because the mount that they are on does not follow the host's. It sends no request to a file system of a client.
func dropStayingClients() error {
	leave := map[int]bool{} // what is on these mounts: it follows the host's, or its path leads through a client's file system
	clients, err := host.ThreadMounts(func(m host.Mount) bool {
		ofClient := m.FSType == "fuse" || strings.HasPrefix(m.FSType, "fuse.")
		leave[m.ID] = m.Slave() || ofClient
		return ofClient
	})
	if err != nil {
		return err
	}
	for _, m := range clients {
		if leave[m.Parent] {
			continue
		}
		// One that is hidden below another mount cannot be reached.
		if err := unix.Unmount(m.Mountpoint, unix.MNT_DETACH|unix.UMOUNT_NOFOLLOW); err != nil && !errors.Is(err, unix.EINVAL) && !errors.Is(err, unix.ENOENT) {
			return fmt.Errorf("unmount %s: %w", m.Mountpoint, err)
		}
	}
	return nil
}

// enterView moves this thread, which ends afterwards, into a mount namespace.
func enterView(view *os.File) error {
	if err := unix.Unshare(unix.CLONE_FS); err != nil { // which setns(2) requires
		return fmt.Errorf("leave the other threads' root: %w", err)
	}
	if err := withFDs(func(fds []uintptr) error { return unix.Setns(int(fds[0]), unix.CLONE_NEWNS) }, view); err != nil {
		return fmt.Errorf("enter the mount namespace of helpers: %w", err)
	}
	return nil
}

// duplicate returns another descriptor of a file.
func duplicate(f *os.File) (other *os.File, err error) {
	err = withFDs(func(fds []uintptr) error {
		fd, err := unix.FcntlInt(fds[0], unix.F_DUPFD_CLOEXEC, 0)
		if err == nil {
			other = os.NewFile(uintptr(fd), f.Name())
		}
		return err
	}, f)
	return other, err // now, because the order of a variable and a call in one return is not defined
}
