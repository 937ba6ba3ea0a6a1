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

// Resolver says what helpers see in the place of the host's files, so that names are resolved otherwise than the host does
// (resolvconf.Copy).
type Resolver interface {
	Binds(ctx context.Context) ([]resolvconf.Bind, error)
}

// certificates is where /etc/ssl leads on some distributions.
const certificates = "/var/lib/ca-certificates"

// system are the directories below which programs, their libraries and their configuration are, and the kernel's own file
// systems: whatever is mounted there is there for good.
func system() []string {
	return []string{"/bin", "/dev", "/etc", "/gnu", "/lib", "/lib32", "/lib64", "/libx32", "/nix", "/proc", "/sbin", "/sys", "/usr"}
}

// leaveMounts takes this thread, a throwaway, into a mount namespace of its own that has no more than a helper needs: the
// root, what is mounted below the system's directories, and what the paths lead over.
//
// A copy of any other mount would keep its file system for as long as the helper lives: a FUSE client would never end, and a
// disk could not be taken away. Where mounts are private, as on hosts without systemd, nothing that is done on the host ever
// removes a copy; so none is made, and what the host mounts later does not arrive. The copies that unshare(2) makes go with
// the old root, also those that are hidden below others. No file system but those that stay is asked anything.
func leaveMounts(paths []string) error {
	if err := unix.Unshare(unix.CLONE_NEWNS); err != nil {
		return fmt.Errorf("make a mount namespace: %w", err)
	}
	// First of all: what is unmounted here must not be unmounted on the host.
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return fmt.Errorf("make the mounts private: %w", err)
	}
	stay, err := staying(paths)
	if err != nil {
		return fmt.Errorf("read the mount table: %w", err)
	}
	root, err := moveCopy("/", "/")
	if err != nil {
		return err
	}
	defer unix.Close(root)
	// The copy lies on the old root. Paths from "/" lead through the old one, those from here through the new one.
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
	// The old root lies on the new one now, and is what the working directory leads to.
	if err := errors.Join(unix.Unmount(".", unix.MNT_DETACH), unix.Chdir("/")); err != nil {
		return fmt.Errorf("leave the old root: %w", err)
	}
	return nil
}

// moveCopy mounts what is mounted on a path on another, without what is mounted below it, and gives its root.
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

// staying are the mount points, but for the root, that this thread's namespace is to have; those above others come first.
func staying(paths []string) ([]string, error) {
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

// ownView takes this thread, a throwaway, to where a unit's helper sees the files of its Resolver.
func (p *Process) ownView(u Unit, binds []resolvconf.Bind) error {
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
		return fmt.Errorf("shut it off from the host's mounts: %w", err)
	}
	return resolvconf.Apply(binds)
}
