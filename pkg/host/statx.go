//go:build linux

package host

import (
	"fmt"

	"golang.org/x/sys/unix"
)

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
