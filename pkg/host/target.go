package host

import (
	"errors"
	"fmt"
	"os"
	"path"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/s3-csi/s3-csi-driver/pkg/fault"
)

const (
	targetField = "target_path"
	// targetMode is the mode of a target directory that the driver makes. The mounted file system has its own mode.
	targetMode = 0o750
	// openDir opens a directory as a location only, without a request to its file system, which may be unresponsive or stale.
	openDir = unix.O_PATH | unix.O_DIRECTORY | unix.O_CLOEXEC
	// strictly makes the kernel refuse symbolic links in every component below the root, and ways out of it.
	strictly = unix.RESOLVE_BENEATH | unix.RESOLVE_NO_SYMLINKS | unix.RESOLVE_NO_MAGICLINKS
	// openTries bounds retries after a rename or mount during the resolution (EAGAIN), or a signal (EINTR).
	openTries = 16
)

// OpenTarget opens the directory of a target path as an O_PATH descriptor; call it inside Do. It refuses symbolic links in every
// component below root, so that the owner of a directory on the way cannot redirect a mount. The root itself ("" is "/") is the
// operator's and may be a symbolic link; target must lie below it. If something is mounted on the target, that is opened, even if
// it is stale, without a request to its file system.
//
// A missing target is a fault.NotFound. An invalid path is a fault.Invalid for target_path. The cause stays in the chain
// (errors.Is(err, unix.ENOENT)).
func OpenTarget(root, target string) (*os.File, error) {
	parent, name, err := openParent(root, target)
	if errors.Is(err, unix.ENOENT) {
		return nil, fault.Errorf(fault.NotFound, "target %s does not exist: %w", target, err)
	}
	if err != nil {
		return nil, err
	}
	defer parent.Close()
	return openIn(parent, name, target)
}

// MakeTarget is OpenTarget for a target whose last directory may be missing and is then made (0750). Its parent must exist.
func MakeTarget(root, target string) (*os.File, error) {
	parent, name, err := openParent(root, target)
	if err != nil {
		return nil, err
	}
	defer parent.Close()
	if err := unix.Mkdirat(int(parent.Fd()), name, targetMode); err != nil && !errors.Is(err, unix.EEXIST) {
		return nil, fmt.Errorf("creating target %s: %w", target, err)
	}
	return openIn(parent, name, target)
}

func openIn(parent *os.File, name, target string) (*os.File, error) {
	fd, err := openStrictly(int(parent.Fd()), name)
	switch {
	case err == nil:
		return os.NewFile(uintptr(fd), target), nil
	case errors.Is(err, unix.ELOOP):
		return nil, fault.Field(targetField, "%s is a symbolic link: %w", target, err)
	case errors.Is(err, unix.ENOTDIR):
		return nil, fault.Field(targetField, "%s is not a directory: %w", target, err)
	case errors.Is(err, unix.ENOENT):
		return nil, fault.Errorf(fault.NotFound, "target %s does not exist: %w", target, err)
	}
	return nil, fmt.Errorf("opening target %s: %w", target, err)
}

// CheckTarget refuses targets that hide a part of the system, if no root confines targets: root is "" or "/". An error is a fault.Invalid
// for target_path.
func CheckTarget(root, target string) error {
	if (root == "" || path.Clean(root) == "/") && ofSystem(strings.Split(strings.Trim(path.Clean(target), "/"), "/")) {
		return fault.Field(targetField, "%s is a directory of the system; to mount there, set --target-root to a directory above it", target)
	}
	return nil
}

// ofSystem reports whether a path, by its names, is a directory in which no orchestrator has targets. Their data directories are in
// /var/lib, /opt, /srv, /home or elsewhere, and targets are some levels below those.
func ofSystem(names []string) bool {
	depth := len(names)
	if depth == 1 {
		return true // in the root
	}
	switch names[0] {
	case "bin", "boot", "dev", "etc", "lib", "lib32", "lib64", "libx32", "proc", "sbin", "sys", "usr", "nix", "gnu":
		return true
	case "home":
		return depth == 2
	case "run":
		return depth == 2 || slices.Contains([]string{"dbus", "lock", "systemd", "udev", "user"}, names[1])
	case "var":
		return depth == 2 || names[1] == "lib" && depth == 3 || slices.Contains([]string{"cache", "lock", "log", "mail", "run", "spool"}, names[1])
	}
	return false
}

// RemoveTarget removes the empty directory of an unmounted target; call it inside Do. A missing target is not an error. A directory
// that is not empty, is still a mount point (unix.EBUSY) or is not a directory is an error. Symbolic links are refused as by
// OpenTarget.
func RemoveTarget(root, target string) error {
	parent, name, err := openParent(root, target)
	if err != nil {
		if errors.Is(err, unix.ENOENT) {
			return nil
		}
		return err
	}
	defer parent.Close()
	err = unix.Unlinkat(int(parent.Fd()), name, unix.AT_REMOVEDIR)
	switch {
	case err == nil, errors.Is(err, unix.ENOENT):
		return nil
	case errors.Is(err, unix.ENOTDIR):
		return fault.Field(targetField, "%s is not a directory and was not removed: %w", target, err)
	case errors.Is(err, unix.ENOTEMPTY):
		return fault.Errorf(fault.Precondition, "target %s is not mounted and not empty, so it was not removed; check its content: %w", target, err)
	}
	return fmt.Errorf("removing target %s: %w", target, err)
}

// OpenDir opens a directory of the driver's own as an O_PATH descriptor, without a request to its file system; call it inside Do.
// It follows symbolic links, because the operator chooses where the driver keeps its state.
func OpenDir(dir string) (*os.File, error) {
	fd, err := unix.Open(dir, openDir, 0)
	if err != nil {
		return nil, fmt.Errorf("opening directory %s: %w", dir, err)
	}
	return os.NewFile(uintptr(fd), dir), nil
}

// openParent opens the parent directory of a target and returns the target's name in it.
func openParent(root, target string) (*os.File, string, error) {
	if root == "" {
		root = "/"
	}
	rel, err := below(root, target)
	if err != nil {
		return nil, "", err
	}
	rootFD, err := unix.Open(root, openDir, 0)
	if err != nil {
		return nil, "", fault.Errorf(fault.Precondition, "opening %s, the root of all targets: %w", root, err)
	}
	defer unix.Close(rootFD)
	dir, name := path.Split(rel)
	dir = path.Clean(dir) // "" is "."
	fd, err := openStrictly(rootFD, dir)
	parent := path.Dir(target)
	switch {
	case err == nil:
		return os.NewFile(uintptr(fd), parent), name, nil
	case errors.Is(err, unix.ELOOP):
		return nil, "", fault.Field(targetField, "%[1]s is a symbolic link, which is not allowed below %[2]s; if the operator made it, set --target-root to "+
			"%[1]s: %[3]w",
			path.Join(root, firstSymlink(rootFD, dir)), root, err)
	case errors.Is(err, unix.ENOENT):
		return nil, "", fault.Field(targetField, "its parent directory %s does not exist on the host; the path must be the host's (in Nomad: set "+
			"stage_publish_base_dir to <data_dir>/client/csi/<type>/<plugin id>): %w", parent, err)
	case errors.Is(err, unix.ENOTDIR):
		return nil, "", fault.Field(targetField, "a component of its parent %s is not a directory: %w", parent, err)
	case errors.Is(err, unix.ENAMETOOLONG):
		return nil, "", fault.Field(targetField, "the path is too long: %w", err)
	}
	return nil, "", fmt.Errorf("opening %s, the parent of the target: %w", parent, err)
}

// below checks a target path and returns it relative to root.
func below(root, target string) (string, error) {
	switch {
	case target == "":
		return "", fault.Field(targetField, "is empty")
	case strings.ContainsRune(target, 0):
		return "", fault.Field(targetField, "%q contains a NUL byte", target)
	case !path.IsAbs(target):
		return "", fault.Field(targetField, "%q is not an absolute path", target)
	case path.Clean(target) != target:
		return "", fault.Field(targetField, "%q is not a clean path; use %q", target, path.Clean(target))
	case len(path.Base(target)) > unix.NAME_MAX || len(target) >= unix.PathMax:
		return "", fault.Field(targetField, "the path is too long (%d bytes)", len(target))
	}
	prefix := strings.TrimSuffix(path.Clean(root), "/") + "/"
	rel, ok := strings.CutPrefix(target, prefix)
	if !ok || rel == "" {
		return "", fault.Field(targetField, "%q is not below %s", target, prefix)
	}
	return rel, nil
}

// openStrictly opens a directory below another one and refuses symbolic links.
func openStrictly(dir int, rel string) (int, error) {
	return openat2(dir, rel, unix.OpenHow{Flags: openDir, Resolve: strictly})
}

// openat2 is openat2(2), repeated as openTries says.
func openat2(dir int, rel string, how unix.OpenHow) (int, error) {
	for try := 0; ; try++ {
		fd, err := unix.Openat2(dir, rel, &how)
		if try < openTries && (errors.Is(err, unix.EAGAIN) || errors.Is(err, unix.EINTR)) {
			continue
		}
		return fd, err
	}
}

// firstSymlink returns the part of rel up to its first symbolic link, for an error text.
func firstSymlink(dir int, rel string) string {
	names := strings.Split(rel, "/")
	for i := range names {
		part := strings.Join(names[:i+1], "/")
		var buf [1]byte
		if _, err := unix.Readlinkat(dir, part, buf[:]); err == nil {
			return part
		}
	}
	return rel
}

// PathState is the state of a path.
type PathState struct {
	Major, Minor uint32 // device of the file system
	Mountpoint   bool   // a mount point
}

// Inspect returns the state of a path, without following its last component and without a request to the file system (statx(2),
// AT_STATX_DONT_SYNC). So it returns at once on an unresponsive or stale mount, and is much cheaper than reading the mount table.
// Call it inside Do. A missing path is unix.ENOENT.
func Inspect(path string) (PathState, error) {
	var st unix.Statx_t
	err := unix.Statx(unix.AT_FDCWD, path, unix.AT_SYMLINK_NOFOLLOW|unix.AT_NO_AUTOMOUNT|unix.AT_STATX_DONT_SYNC, 0, &st)
	if err != nil {
		return PathState{}, fmt.Errorf("reading the state of %s: %w", path, err)
	}
	return PathState{Major: st.Dev_major, Minor: st.Dev_minor, Mountpoint: st.Attributes&unix.STATX_ATTR_MOUNT_ROOT != 0}, nil
}
