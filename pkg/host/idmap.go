package host

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/s3-csi/s3-csi-driver/pkg/fault"
)

// idMapped is the option that mount tables show of an id-mapped mount (mount_setattr(2)).
const idMapped = "idmapped"

// idMapping is the mapping of users and groups of an id-mapped mount, as lines of uid_map and gid_map (user_namespaces(7)): the first
// id in the file system, the first one shown, and their number. The order of the lines has no meaning.
type idMapping struct{ users, groups []string }

func newIDMapping(users, groups []string) idMapping {
	one := func(lines []string) []string {
		all := make([]string, 0, len(lines))
		for _, line := range lines {
			if fields := strings.Fields(line); len(fields) > 0 {
				all = append(all, strings.Join(fields, " "))
			}
		}
		slices.Sort(all)
		return all
	}
	return idMapping{one(users), one(groups)}
}

func (m idMapping) equal(other idMapping) bool {
	return slices.Equal(m.users, other.users) && slices.Equal(m.groups, other.groups)
}

// mapLike id-maps an unattached clone like the mount that like was opened on. A mapping is always that of a user namespace; container
// runtimes use the container's. So one of the known processes of the namespace must have the same mapping, else the error is a
// fault.Unsupported.
func (h nsHandle) mapLike(like, clone *os.File) error {
	mapping, err := mappingOf(like)
	if err != nil {
		return err
	}
	users, err := h.userNamespace(mapping)
	if err != nil {
		return err
	}
	defer unix.Close(users)
	attr := unix.MountAttr{Attr_set: unix.MOUNT_ATTR_IDMAP, Userns_fd: uint64(users)}
	if err := unix.MountSetattr(int(clone.Fd()), "", unix.AT_EMPTY_PATH, &attr); err != nil {
		return fmt.Errorf("id-mapping the clone: %w", err)
	}
	return nil
}

// userNamespace opens the user namespace with a mapping, that of one of the known processes of the namespace. The error is errEnded
// if all of them have exited.
func (h nsHandle) userNamespace(want idMapping) (int, error) {
	ended := len(h.pids) > 0
	for _, pid := range h.pids {
		users, err := openNamespaceOf(pid, "user") // a kernel that reports mappings can do that
		if err != nil {
			continue // it has exited
		}
		ended = false
		have, err := h.mappingOfProcess(pid)
		// The pid may have been reused in between.
		if err == nil && have.equal(want) && hasUserNamespace(pid, users) {
			return users, nil
		}
		unix.Close(users)
	}
	if ended {
		return -1, errEnded
	}
	return -1, fault.Errorf(fault.Unsupported, "it is id-mapped, and no process there has its mapping (users %q, groups %q); restart the container",
		want.users, want.groups)
}

func (h nsHandle) mappingOfProcess(pid int) (idMapping, error) {
	users, err := readAt(h.proc, strconv.Itoa(pid)+"/uid_map")
	if err != nil {
		return idMapping{}, err
	}
	groups, err := readAt(h.proc, strconv.Itoa(pid)+"/gid_map")
	return newIDMapping(strings.Split(string(users), "\n"), strings.Split(string(groups), "\n")), err
}

func hasUserNamespace(pid, users int) bool {
	again, err := openNamespaceOf(pid, "user")
	if err != nil {
		return false
	}
	defer unix.Close(again)
	var open, its unix.Stat_t
	return errors.Join(unix.Fstat(users, &open), unix.Fstat(again, &its)) == nil && open.Dev == its.Dev && open.Ino == its.Ino
}

// From include/uapi/linux/mount.h: statmount(2) since Linux 6.8, mappings since 6.15.
const (
	statmountUIDMap = 0x2000
	statmountGIDMap = 0x4000

	// The offsets in struct statmount.
	statmountMask    = 8
	statmountUsers   = 152
	statmountGroups  = 160
	statmountStrings = 512

	// maxMapping is larger than two mappings of 340 lines, the maximum, for users and groups.
	maxMapping = 64 << 10
)

// mountRequest is struct mnt_id_req of include/uapi/linux/mount.h, version 0.
type mountRequest struct {
	size, _   uint32
	id, param uint64
}

var errMappingUnknown = fault.Errorf(fault.Unsupported, "it is id-mapped, with a mapping that cannot be read before Linux 6.15; restart the container")

// mappingOf reads the mapping of an id-mapped mount in the calling thread's namespace. The shown ids are those of this process's user
// namespace.
func mappingOf(f *os.File) (idMapping, error) {
	var st unix.Statx_t
	if err := unix.Statx(int(f.Fd()), "", unix.AT_EMPTY_PATH|unix.AT_STATX_DONT_SYNC|unix.AT_NO_AUTOMOUNT, unix.STATX_MNT_ID_UNIQUE, &st); err != nil {
		return idMapping{}, fmt.Errorf("finding the id of the mount %s: %w", f.Name(), err)
	}
	if st.Mask&unix.STATX_MNT_ID_UNIQUE == 0 {
		return idMapping{}, errMappingUnknown
	}
	req := mountRequest{id: st.Mnt_id, param: statmountUIDMap | statmountGIDMap}
	req.size = uint32(unsafe.Sizeof(req))
	buf := make([]byte, statmountStrings+maxMapping)
	_, _, errno := unix.Syscall6(unix.SYS_STATMOUNT, //nolint:gosec // x/sys has no call for it
		uintptr(unsafe.Pointer(&req)), uintptr(unsafe.Pointer(&buf[0])), uintptr(len(buf)), 0, 0, 0)
	switch {
	case errno == unix.ENOSYS: // or a seccomp profile refuses the call
		return idMapping{}, errMappingUnknown
	case errno != 0:
		return idMapping{}, fmt.Errorf("reading the id-mapping of the mount %s: %w", f.Name(), errno)
	}
	return parseStatmount(buf)
}

func parseStatmount(buf []byte) (idMapping, error) {
	if mask := binary.NativeEndian.Uint64(buf[statmountMask:]); mask&statmountUIDMap == 0 || mask&statmountGIDMap == 0 {
		return idMapping{}, errMappingUnknown
	}
	users, err := statmountList(buf, statmountUsers)
	if err != nil {
		return idMapping{}, err
	}
	groups, err := statmountList(buf, statmountGroups)
	return newIDMapping(users, groups), err
}

// statmountList reads a list of NUL-terminated strings. A struct statmount has their number and offset at at.
func statmountList(buf []byte, at int) ([]string, error) {
	number, offset := binary.NativeEndian.Uint32(buf[at:]), binary.NativeEndian.Uint32(buf[at+4:])
	rest := string(buf[statmountStrings+min(int(offset), len(buf)-statmountStrings):])
	all := strings.SplitN(rest, "\x00", int(min(number, 1000))+1)
	if len(all) != int(number)+1 {
		return nil, fmt.Errorf("the kernel returned %d of %d lines of the id-mapping", len(all)-1, number)
	}
	return all[:number], nil
}
