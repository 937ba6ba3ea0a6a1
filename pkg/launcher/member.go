package launcher

import (
	"bytes"
	"context"
	"os"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/s3-csi/s3-csi-driver/pkg/host"
	"github.com/s3-csi/s3-csi-driver/pkg/proc"
)

// A uid is not an identity: a pod without its own user namespace can run processes as any uid, including a mount's. So a process
// belongs to a mount only if it has the mount's uid and runs where the mount's launcher puts processes. A compromised client must not
// escape that with namespaces of its own, so those count as the namespaces in which they were made.

// member reports whether a process with that uid and status belongs to a mount.
type member func(pid int, uid uint32, status proc.Status) bool

// finder calls fn with a member that is valid until fn returns, on a thread in the namespaces that the member needs. fn may still run
// when finder returns ctx's error.
type finder func(ctx context.Context, fn func(is member) error) error

func (s *processScan) findOnHost(ctx context.Context, fn func(is member) error) error {
	return fn(onHost(ctx, &s.looks))
}

// onHost returns a member that reports whether a process is in this process's user namespace and in the PID namespace of /proc, or in namespaces below them
// that its own uid made. Container runtimes make those of pods as root, so a pod's process is not on the host, whatever namespaces it
// makes inside. A process of a pod with hostPID is on the host. One whose namespaces cannot be read because it hangs is not.
func onHost(ctx context.Context, looks *host.Looks) member {
	return func(pid int, uid uint32, status proc.Status) bool {
		open := func(kind string) (int, error) { return looks.OpenNamespace(ctx, pid, kind) }
		return (sameUsers(pid) || madeUsers(open, uid)) && (pidNamespaces(status) <= 1 || madePIDs(open, uid))
	}
}

// pidNamespaces returns the number of PID namespaces in which a process has a pid, from that of /proc on down (NSpid in
// proc_pid_status(5)), 0 if the kernel does not report it.
func pidNamespaces(status proc.Status) int { return len(strings.Fields(status.Field("NSpid"))) }

// sameUsers reports whether a process sees the same uids as this one: it is in the same user namespace, or in one that maps every uid
// to itself, which only root can make. All users may read the file, and the read does not wait for the process.
func sameUsers(pid int) bool {
	theirs, err := os.ReadFile(proc.Path(pid, "uid_map"))
	if err != nil {
		return false // it has exited
	}
	ours, err := os.ReadFile("/proc/self/uid_map")
	return err != nil || bytes.Equal(theirs, ours)
}

// maxNested is the maximum depth of namespaces (user_namespaces(7), pid_namespaces(7)).
const maxNested = 33

// madeUsers reports whether a process's user namespace is below this process's, and every one on the way was made by uid.
func madeUsers(open func(kind string) (int, error), uid uint32) bool {
	return climbNamespaces(open, "user", "/proc/self/ns/user", func(namespace int) bool {
		owner, err := unix.IoctlGetUint32(namespace, unix.NS_GET_OWNER_UID)
		return err == nil && owner == uid
	})
}

// madePIDs reports whether a process's PID namespace is below the host's, and every one on the way was made by uid. A user without
// capabilities can make a PID namespace only in its own user namespace, which then owns it (ioctl_nsfs(2)). This process's PID
// namespace is taken for the host's, because that of PID 1 cannot be read everywhere.
func madePIDs(open func(kind string) (int, error), uid uint32) bool {
	var own unix.Stat_t
	if unix.Stat("/proc/self/ns/user", &own) != nil {
		return false
	}
	return climbNamespaces(open, "pid", "/proc/self/ns/pid", func(namespace int) bool {
		users, err := unix.IoctlRetInt(namespace, unix.NS_GET_USERNS)
		if err != nil {
			return false
		}
		defer unix.Close(users)
		owner, err := unix.IoctlGetUint32(users, unix.NS_GET_OWNER_UID)
		return err == nil && owner == uid && !isNamespace(users, own)
	})
}

// climbNamespaces goes from a process's namespace, which open opens, up to the one at top. It reports false if ok does for a namespace below
// top, or if top is not reached: the kernel shows no namespaces above this process's own.
func climbNamespaces(open func(kind string) (int, error), kind, top string, ok func(namespace int) bool) bool {
	var end unix.Stat_t
	if unix.Stat(top, &end) != nil {
		return false
	}
	namespace, err := open(kind)
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

// isNamespace reports whether a descriptor refers to a namespace, which device and inode identify (namespaces(7)).
func isNamespace(fd int, of unix.Stat_t) bool {
	var st unix.Stat_t
	return unix.Fstat(fd, &st) == nil && st.Dev == of.Dev && st.Ino == of.Ino
}

// unitCgroups are the cgroups of the host in which processes of mounts can be if its systemd starts them.
type unitCgroups struct {
	slice string   // prefix of the paths of units
	other []string // of helpers that Process started, before a change of the launcher
	there member   // of the processes in those
}

// readUnitCgroups reads them. The calling thread must be in the host's cgroup namespace.
func readUnitCgroups() (unitCgroups, error) {
	first, err := cgroupOf(1)
	if err != nil {
		return unitCgroups{}, err
	}
	own, err := cgroupOf(os.Getpid())
	if err != nil {
		return unitCgroups{}, err
	}
	// On a host that is a container, systemd's root may be below the hierarchy's.
	root := strings.TrimSuffix(strings.TrimSuffix(first, "init.scope"), "/")
	return unitCgroups{
		slice: root + "/system.slice/" + Slice + "/",
		other: []string{root, root + "/", "/", "/" + cgroupName, own},
	}, nil
}

// cgroupOf returns a process's path in the hierarchy in which systemd keeps units: systemd's own one with version 1, else the unified
// one.
func cgroupOf(pid int) (string, error) {
	cgroups, err := cgroupsOf(pid)
	if path, ok := cgroups["name=systemd"]; ok {
		return path, err
	}
	return cgroups[""], err
}

// hasUnit reports whether a path is the cgroup of one of this driver's units, or below one.
func (c unitCgroups) hasUnit(path string) bool {
	rest, ok := strings.CutPrefix(path, c.slice)
	unit, _, _ := strings.Cut(rest, "/")
	return ok && strings.HasPrefix(unit, unitPrefix) && strings.HasSuffix(unit, unitSuffix)
}

// isMember is the member of Systemd. A unit's cgroup has only processes of the unit, in any namespaces. Processes of another launcher are
// outside of units.
func (c unitCgroups) isMember(pid int, uid uint32, status proc.Status) bool {
	path, err := cgroupOf(pid)
	if err != nil {
		return false // it has exited
	}
	return c.hasUnit(path) || slices.Contains(c.other, path) && c.there(pid, uid, status)
}

func (s *Systemd) find(ctx context.Context, fn func(is member) error) error {
	return s.ns.Do(ctx, "looking for processes of mounts", func() error {
		if s.ns.Foreign() {
			enterHostCgroups() // else paths begin at the container's own
		}
		cgroups, err := readUnitCgroups()
		if err != nil {
			return err
		}
		cgroups.there = onHost(ctx, &s.scan.looks)
		return fn(cgroups.isMember)
	})
}
