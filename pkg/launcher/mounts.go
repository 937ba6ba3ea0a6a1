package launcher

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/moby/sys/mountinfo"
	"golang.org/x/sys/unix"

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
	f, err := os.Open("/proc/thread-self/mountinfo")
	if err != nil {
		return nil, err
	}
	defer f.Close()
	mounts, err := mountinfo.GetMountsFromReader(f, func(m *mountinfo.Info) (skip, stop bool) { return !stays(m, paths), false })
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

func stays(m *mountinfo.Info, paths []string) bool {
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

// enterResolverView moves this thread, which ends afterwards, into a mount namespace with the files of a unit's Resolver.
func (p *Process) enterResolverView(u Unit, binds []resolvconf.Bind) error {
	paths := []string{u.StateDir, filepath.Dir(p.program), certificates}
	if u.CacheDir != "" {
		paths = append(paths, u.CacheDir)
	}
	for _, b := range binds {
		paths = append(paths, b.Source, b.Target)
	}
	for i, path := range paths {
		if resolved, err := filepath.EvalSymlinks(path); err == nil {
			paths[i] = resolved // as the mount table has it
		}
	}
	if err := leaveMounts(paths); err != nil {
		return fmt.Errorf("isolate it from the host's mounts: %w", err)
	}
	return resolvconf.Apply(binds)
}
