package launcher

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// A uid is not an identity: a pod without a user namespace of its own can run processes under any uid, that of a mount
// included. So a process belongs to a mount only if it has the mount's uid and is where the mount's launcher puts processes.
// A client that an attacker took over must not escape that by making namespaces of its own: those count as the place that
// they were made in.

// member reports whether a process of that uid, whose /proc/<pid>/status is given, is one of a mount's.
type member func(pid int, uid uint32, status []byte) bool

// finder calls fn with a member that is valid until fn returns, on a thread that sees what the member needs to see. fn may
// still run when finder returns ctx's error.
type finder func(ctx context.Context, fn func(is member) error) error

// findOnHost is the finder of launchers without cgroups of their own.
func findOnHost(_ context.Context, fn func(is member) error) error { return fn(onHost) }

// onHost reports whether a process is in the user namespace of this process and in the PID namespace that /proc shows, or in
// namespaces below them that its own uid made. A container runtime makes those of pods as root, so a pod's process is
// not on the host, whatever namespaces it makes inside; one of a pod with hostPID is.
func onHost(pid int, uid uint32, status []byte) bool {
	return (sameUsers(pid) || madeUsers(pid, uid)) && (pidNamespaces(status) <= 1 || madePIDs(pid, uid))
}

// pidNamespaces is the number of PID namespaces that a process has a pid in, from the one that /proc shows on down
// (NSpid in proc_pid_status(5)); 0 if the kernel does not say.
func pidNamespaces(status []byte) int {
	_, rest, ok := bytes.Cut(status, []byte("\nNSpid:"))
	if !ok {
		return 0
	}
	line, _, _ := bytes.Cut(rest, []byte("\n"))
	return len(bytes.Fields(line))
}

// sameUsers reports whether a process sees the uids of this one: it is in the same user namespace, or in one that maps every
// uid to itself, which only root can make. All users may read the file, and reading it waits for nothing of the process.
func sameUsers(pid int) bool {
	theirs, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/uid_map")
	if err != nil {
		return false // it has ended
	}
	ours, err := os.ReadFile("/proc/self/uid_map")
	return err != nil || bytes.Equal(theirs, ours)
}

// maxNested bounds how deep namespaces are nested (user_namespaces(7), pid_namespaces(7)).
const maxNested = 33

// madeUsers reports whether a process's user namespace is below this process's, and every one on the way was made by uid.
func madeUsers(pid int, uid uint32) bool {
	return climb(pid, "user", "/proc/self/ns/user", func(namespace int) bool {
		owner, err := unix.IoctlGetUint32(namespace, unix.NS_GET_OWNER_UID)
		return err == nil && owner == uid
	})
}

// madePIDs reports whether a process's PID namespace is below the host's, and every one on the way was made by uid. A user
// without capabilities can make a PID namespace only in a user namespace of its own, which is its owner (ioctl_nsfs(2)). The
// host's is this process's own: that of PID 1 cannot be read everywhere.
func madePIDs(pid int, uid uint32) bool {
	var own unix.Stat_t
	if unix.Stat("/proc/self/ns/user", &own) != nil {
		return false
	}
	return climb(pid, "pid", "/proc/self/ns/pid", func(namespace int) bool {
		users, err := unix.IoctlRetInt(namespace, unix.NS_GET_USERNS)
		if err != nil {
			return false
		}
		defer unix.Close(users)
		owner, err := unix.IoctlGetUint32(users, unix.NS_GET_OWNER_UID)
		return err == nil && owner == uid && !isNamespace(users, own)
	})
}

// climb goes from a process's namespace up to the one at top. It reports false if ok does for one on the way, which top is
// not, or if top is not above: the kernel shows no namespaces above this process's own.
func climb(pid int, kind, top string, ok func(namespace int) bool) bool {
	var end unix.Stat_t
	if unix.Stat(top, &end) != nil {
		return false
	}
	namespace, err := unix.Open("/proc/"+strconv.Itoa(pid)+"/ns/"+kind, unix.O_RDONLY|unix.O_CLOEXEC, 0)
	for range maxNested {
		if err != nil {
			return false
		}
		if isNamespace(namespace, end) {
			_ = unix.Close(namespace)
			return true
		}
		parent := -1
		if err = unix.EPERM; ok(namespace) {
			parent, err = unix.IoctlRetInt(namespace, unix.NS_GET_PARENT) // close-on-exec
		}
		_ = unix.Close(namespace)
		namespace = parent
	}
	if err == nil {
		_ = unix.Close(namespace)
	}
	return false
}

// isNamespace reports whether a descriptor is of a namespace. Device and inode identify it (namespaces(7)).
func isNamespace(fd int, of unix.Stat_t) bool {
	var st unix.Stat_t
	return unix.Fstat(fd, &st) == nil && st.Dev == of.Dev && st.Ino == of.Ino
}

// unitCgroups are the places in the host's cgroups where processes of mounts can be if this host's systemd starts them.
type unitCgroups struct {
	slice string   // begins the paths of units
	other []string // where the launcher of processes leaves helpers, which a change of the launcher takes over
}

// readUnitCgroups finds them. The calling thread must be in the host's cgroup namespace.
func readUnitCgroups() (unitCgroups, error) {
	first, err := cgroupOf("1")
	if err != nil {
		return unitCgroups{}, fmt.Errorf("find systemd's cgroup: %w", err)
	}
	own, err := cgroupOf(strconv.Itoa(os.Getpid()))
	if err != nil {
		return unitCgroups{}, fmt.Errorf("find the driver's cgroup: %w", err)
	}
	// On a host that is a container itself, systemd's root need not be the hierarchy's.
	root := strings.TrimSuffix(strings.TrimSuffix(first, "init.scope"), "/")
	return unitCgroups{
		slice: root + "/system.slice/" + Slice + "/",
		other: []string{root, root + "/", "/", "/" + cgroupName, own},
	}, nil
}

// cgroupOf is a process's path in the hierarchy in which systemd keeps units: one of its own beside those of version 1, else
// the unified one.
func cgroupOf(pid string) (string, error) {
	file, err := os.ReadFile("/proc/" + pid + "/cgroup")
	if err != nil {
		return "", err
	}
	cgroups := parseCgroups(file)
	if path, ok := cgroups["name=systemd"]; ok {
		return path, nil
	}
	return cgroups[""], nil
}

// hasUnit reports whether a path is the cgroup of one of this driver's units, or below one.
func (c unitCgroups) hasUnit(path string) bool {
	rest, ok := strings.CutPrefix(path, c.slice)
	unit, _, _ := strings.Cut(rest, "/")
	return ok && strings.HasPrefix(unit, unitPrefix) && strings.HasSuffix(unit, unitSuffix)
}

// is is the member of the launcher of units. A unit's cgroup has only what the unit started, in whatever namespaces. Outside
// of units are the processes of another launcher.
func (c unitCgroups) is(pid int, uid uint32, status []byte) bool {
	path, err := cgroupOf(strconv.Itoa(pid))
	if err != nil {
		return false // it has ended
	}
	return c.hasUnit(path) || slices.Contains(c.other, path) && onHost(pid, uid, status)
}

// find is the finder of the launcher of units.
func (s *Systemd) find(ctx context.Context, fn func(is member) error) error {
	return s.ns.Do(ctx, "looking for processes of mounts", func() error {
		if s.ns.Foreign() {
			enterHostCgroups() // else paths begin at the container's own
		}
		cgroups, err := readUnitCgroups()
		if err != nil {
			return err
		}
		return fn(cgroups.is)
	})
}
