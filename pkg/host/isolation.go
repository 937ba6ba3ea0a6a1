package host

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/s3-csi/s3-csi-driver/pkg/fault"
)

// systemdBooted exists where systemd is the init of a system: sd_booted(3).
const systemdBooted = "/run/systemd/system"

// OwnDir is a directory of the driver and the flag that sets it.
type OwnDir struct{ Flag, Path string }

// pidNamespace is what decides whether this process is in the PID namespace of a host.
type pidNamespace struct {
	pid  int    // of this process
	self string // the target of /proc/self
	link string // "pid:[4026531836]"
	init string // the command name of PID 1
}

func readPIDNamespace() (ns pidNamespace, err error) {
	ns.pid = os.Getpid()
	if ns.self, err = os.Readlink("/proc/self"); err != nil {
		return ns, err
	}
	if ns.link, err = os.Readlink("/proc/self/ns/pid"); err != nil {
		return ns, err
	}
	first, err := os.ReadFile("/proc/1/comm")
	ns.init = strings.TrimSpace(string(first))
	return ns, err
}

// foreignProc returns what is wrong with /proc, "" if it shows this PID namespace.
func (ns pidNamespace) foreignProc() string {
	if ns.self == strconv.Itoa(ns.pid) {
		return ""
	}
	return fmt.Sprintf("/proc belongs to another PID namespace than this process: it shows pid %d as %s", ns.pid, ns.self)
}

// surroundings are the facts that decide whether the driver is on a host.
type surroundings struct {
	ns        pidNamespace
	booted    bool     // systemd booted PID 1's system
	foreign   bool     // PID 1 is in another mount namespace than this process
	madeThere bool     // this process's root file system is mounted in PID 1's mount namespace too
	layered   []OwnDir // directories on the writable layer of this process's container
}

// Isolated returns nil if this process sees the host, else a fault.Precondition that names the reason and the setting. The driver
// takes PID 1's mount namespace for the host's and expects helpers to outlive the driver. In a container with a PID namespace of
// its own both are wrong: volumes can be mounted, but all mounts end with the container, and files that clients have not stored by
// then are lost. dirs are the directories that must outlive the driver.
func (n *Namespace) Isolated(ctx context.Context, dirs ...OwnDir) error {
	s, err := n.surroundings(ctx, dirs)
	if err != nil {
		return fault.Errorf(fault.Precondition, "cannot determine whether the driver is isolated from the host: %w; %s", err, isolationRemedy)
	}
	return s.isolated()
}

const isolationRemedy = `set hostPID: true on the node's pod (docker: --privileged --pid=host; Nomad: privileged = true and pid_mode = "host"); ` +
	"see docs/how-to/operations.md#a-driver-that-cannot-see-the-host"

// isolated decides. The initial PID namespace is the host's: its PID 1 is the machine's init, and the driver works in that process's
// mount namespace. Any other PID namespace can belong to a container, a pod (shareProcessNamespace) or a host that is itself a
// container (kind, LXC, systemd-nspawn). It counts as a host only by positive evidence, so that an unknown arrangement is refused
// (--allow-isolated overrides that) and loses no data:
//   - PID 1 is a systemd that booted its system. tini, a shell and the pause container are not, even if they see the host's /run.
//   - PID 1 is in another mount namespace, in which the root file system of this process's container is mounted: the container
//     runtime runs there, so the driver is in a container of that host (k3d, or LXC with another init). The pause container of a
//     pod does not have the file systems of the pod's other containers, and a copy of this mount namespace has the same root.
//
// The cgroup namespace is no evidence: by the runtime's default a container has the host's, or one of its own also with hostPID.
//
// Directories on an overlay root are reported only for a driver that is isolated anyway: hosts that are containers themselves, and
// hosts with an immutable root, have an overlay root too, and it outlives their containers.
func (s surroundings) isolated() error {
	why := s.ns.foreignProc()
	switch {
	case why != "":
	case s.ns.link == initPIDNamespace:
		return nil
	case s.ns.pid == 1:
		why = "the driver is PID 1 of a PID namespace of its own"
	case s.ns.init == "systemd" && s.booted, s.foreign && s.madeThere:
		return nil
	default:
		why = fmt.Sprintf("PID 1 of the driver's PID namespace (%s) is not the init of a host", s.ns.init)
		if !s.foreign {
			why += ", and is in the driver's container"
		}
	}
	for _, d := range s.layered {
		why += fmt.Sprintf("; %s %s is on the container's own writable layer, which is removed with the container", d.Flag, d.Path)
	}
	return fault.Errorf(fault.Precondition, "the driver is isolated from the host, and its mounts and pending uploads would be lost when "+
		"its container ends: %s; %s", why, isolationRemedy)
}

// surroundings reads the facts. In the initial PID namespace the others do not matter, and are not read.
func (n *Namespace) surroundings(ctx context.Context, dirs []OwnDir) (s surroundings, err error) {
	s.foreign = n.foreign
	if s.ns, err = readPIDNamespace(); err != nil || s.ns.link == initPIDNamespace {
		return s, err
	}
	s.booted, err = Call(ctx, n, "checking "+systemdBooted, nil, func() (bool, error) {
		fi, err := os.Stat(systemdBooted)
		if errors.Is(err, os.ErrNotExist) || errors.Is(err, unix.ENOTDIR) {
			return false, nil
		}
		return err == nil && fi.IsDir(), err
	})
	if err != nil {
		return s, err
	}
	if s.foreign {
		s.madeThere, err = n.showsOwnRoot(ctx)
		return s, err
	}
	s.layered, err = Call(ctx, n, "checking the driver's directories", nil, func() ([]OwnDir, error) { return onLayer(dirs) })
	return s, err
}

// showsOwnRoot reports whether this process's root file system is mounted in the namespace, other than as its root.
func (n *Namespace) showsOwnRoot(ctx context.Context) (bool, error) {
	own, err := readMounts(ctx, ownMountinfo)
	if err != nil {
		return false, err
	}
	theirs, err := n.Mounts(ctx)
	if err != nil {
		return false, err
	}
	return showsRoot(own, theirs), nil
}

// showsRoot is showsOwnRoot for two mount tables.
func showsRoot(own, theirs []Mount) bool {
	mine, ok := TopAt(own, "/")
	if first, same := TopAt(theirs, "/"); !ok || same && sameDevice(first, mine) {
		return false
	}
	return slices.ContainsFunc(theirs, func(m Mount) bool { return sameDevice(m, mine) })
}

// onLayer returns the directories on an overlay that is this process's root, which is a container's writable layer, and not on
// a mount of their own. Of a directory that does not exist, the closest one above counts.
func onLayer(dirs []OwnDir) (layered []OwnDir, err error) {
	var fs unix.Statfs_t
	if err := unix.Statfs("/", &fs); err != nil || fs.Type != unix.OVERLAYFS_SUPER_MAGIC {
		return nil, err
	}
	root, err := mountID("/")
	if err != nil {
		return nil, err
	}
	for _, d := range dirs {
		path := d.Path
		at, err := mountID(path)
		for errors.Is(err, os.ErrNotExist) && path != "/" {
			path = filepath.Dir(path)
			at, err = mountID(path)
		}
		if err != nil {
			return nil, err
		}
		if at == root {
			layered = append(layered, d)
		}
	}
	return layered, nil
}

func mountID(path string) (uint64, error) {
	var st unix.Statx_t
	if err := unix.Statx(unix.AT_FDCWD, path, unix.AT_STATX_DONT_SYNC, unix.STATX_MNT_ID, &st); err != nil {
		return 0, &os.PathError{Op: "statx", Path: path, Err: err}
	}
	return st.Mnt_id, nil
}

// initPIDNamespace is the link of the machine's first PID namespace, whose inode number is the same on every machine
// (PROC_PID_INIT_INO in the kernel's include/linux/proc_ns.h).
const initPIDNamespace = "pid:[4026531836]"

// HostPID returns nil if FUSE clients see the pids of the processes that call them, else a fault.Precondition with the reason. The
// kernel translates pids into the PID namespace in which the file system was mounted, so this process must be in the host's. The
// PID namespace of a nested host (a Kubernetes node that is a container) is not the machine's first one; it is refused only if it
// is clearly a container's or a pod's own.
func HostPID() error {
	ns, err := readPIDNamespace()
	if err != nil {
		return fault.Errorf(fault.Precondition, "finding the PID namespace (is /proc mounted?): %w", err)
	}
	return ns.shared()
}

// shared is HostPID for a namespace.
func (ns pidNamespace) shared() error {
	why := ns.foreignProc()
	switch {
	case why != "":
	case ns.link == initPIDNamespace:
		return nil
	case ns.pid == 1:
		why = "this process is PID 1 of a PID namespace of its own"
	case ns.init == "pause":
		why = "this process is in its pod's own PID namespace"
	default:
		return nil
	}
	const remedy = "set hostPID: true on the node's pod (or --pid=host on its container)"
	return fault.Errorf(fault.Precondition, "FUSE clients cannot see the pids of their callers: %s; %s", why, remedy)
}
