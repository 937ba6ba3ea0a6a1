//go:build linux

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

// idMapped is what mount tables show of an id-mapped mount, mount_setattr(2).
const idMapped = "idmapped"

// idMapping is how an id-mapped mount shows users and groups, as files uid_map and gid_map say it, user_namespaces(7): the
// first id of the file system, the first one in its place, and how many. The order of the lines means nothing.
type idMapping struct{ users, groups []string }

// newIDMapping brings the lines of a mapping into one form.
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

// mapLike id-maps a clone, which is attached nowhere yet, as the mount of the namespace that like was opened on. A mount's
// mapping is always a user namespace's: here that of one of the processes that lead to the namespace, as container runtimes
// make it. Where none has the same one, the mount is not to be had again, fault.Unsupported.
func (in inside) mapLike(like, clone *os.File) error {
	mapping, err := mappingOf(like)
	if err != nil {
		return err
	}
	users, err := in.userNamespace(mapping)
	if err != nil {
		return err
	}
	defer unix.Close(users)
	attr := unix.MountAttr{Attr_set: unix.MOUNT_ATTR_IDMAP, Userns_fd: uint64(users)}
	if err := unix.MountSetattr(int(clone.Fd()), "", unix.AT_EMPTY_PATH, &attr); err != nil {
		return fmt.Errorf("id-mapping the living mount: %w", err)
	}
	return nil
}

// userNamespace opens the user namespace with a mapping that one of the processes is in which lead to the namespace. The
// error is errEnded where none of them lives any more.
func (in inside) userNamespace(want idMapping) (int, error) {
	ended := len(in.pids) > 0
	for _, pid := range in.pids {
		users, err := unix.Openat(in.proc, strconv.Itoa(pid)+"/ns/user", unix.O_RDONLY|unix.O_CLOEXEC, 0)
		if err != nil {
			continue // it has ended
		}
		ended = false
		have, err := in.mappingOfProcess(pid)
		// The pid may have become another process's in between.
		if again, reErr := in.sameNamespace(pid, users); err == nil && reErr == nil && again && have.equal(want) {
			return users, nil
		}
		unix.Close(users)
	}
	if ended {
		return -1, errEnded
	}
	return -1, fault.Errorf(fault.Unsupported, "it is an id-mapped mount, and no process there has the mapping (users %q, groups %q); restart the pod", want.users, want.groups)
}

// mappingOfProcess is the one of a process's user namespace.
func (in inside) mappingOfProcess(pid int) (idMapping, error) {
	users, err := readAt(in.proc, strconv.Itoa(pid)+"/uid_map")
	if err != nil {
		return idMapping{}, err
	}
	groups, err := readAt(in.proc, strconv.Itoa(pid)+"/gid_map")
	return newIDMapping(strings.Split(string(users), "\n"), strings.Split(string(groups), "\n")), err
}

// sameNamespace tells whether a process is in a user namespace that is open.
func (in inside) sameNamespace(pid, users int) (bool, error) {
	var open, its unix.Stat_t
	if err := errors.Join(unix.Fstat(users, &open), unix.Fstatat(in.proc, strconv.Itoa(pid)+"/ns/user", &its, 0)); err != nil {
		return false, err
	}
	return open.Dev == its.Dev && open.Ino == its.Ino, nil
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

	// maxMapping is more than the 340 lines that a mapping can have take for users and groups.
	maxMapping = 64 << 10
)

// mountRequest is struct mnt_id_req of include/uapi/linux/mount.h, version 0.
type mountRequest struct {
	size, _   uint32
	id, param uint64
}

var errMappingUnknown = fault.Errorf(fault.Unsupported, "it is an id-mapped mount, whose mapping cannot be read back before Linux 6.15; restart the pod")

// mappingOf reads the mapping of an id-mapped mount of the calling thread's namespace. The ids in the place of the file
// system's are those of this process's user namespace.
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
	_, _, errno := unix.Syscall6(unix.SYS_STATMOUNT, uintptr(unsafe.Pointer(&req)), uintptr(unsafe.Pointer(&buf[0])), uintptr(len(buf)), 0, 0, 0) //nolint:gosec // x/sys has no call for it
	switch {
	case errno == unix.ENOSYS: // or a seccomp profile says so
		return idMapping{}, errMappingUnknown
	case errno != 0:
		return idMapping{}, fmt.Errorf("reading the id-mapping of the mount %s: %w", f.Name(), errno)
	}
	return parseStatmount(buf)
}

// parseStatmount reads the mapping in a struct statmount.
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

// statmountList reads a list of strings, each of which ends with a NUL, of which a struct statmount has number and offset.
func statmountList(buf []byte, at int) ([]string, error) {
	number, offset := binary.NativeEndian.Uint32(buf[at:]), binary.NativeEndian.Uint32(buf[at+4:])
	rest := string(buf[statmountStrings+min(int(offset), len(buf)-statmountStrings):])
	all := strings.SplitN(rest, "\x00", int(min(number, 1000))+1)
	if len(all) != int(number)+1 {
		return nil, fmt.Errorf("the kernel's answer about the id-mapping has %d of %d lines", len(all)-1, number)
	}
	return all[:number], nil
}
