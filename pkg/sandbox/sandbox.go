// Package sandbox restricts a thread, and every process that it starts, with Landlock: the files that it may open, the TCP ports
// that it may use, and the processes that it may signal. It restricts system calls with seccomp (RestrictCalls). It needs no
// privileges, and no restriction can be lifted again.
//
// Landlock restricts the calling thread, not the process. So a launcher restricts the thread that executes a helper, and a helper
// restricts a thread of its own that starts a client and ends (Policy.Start). Each restriction is a domain of its own within that of
// its parent: a helper may signal its client, but a client cannot signal its helper.
//
// Landlock checks a file when it is opened. Descriptors that a process was given, such as that of FUSE, are not restricted. It
// does not restrict stat, UDP, pathname UNIX sockets, or listen(2) on a TCP socket without bind(2).
package sandbox

import (
	"errors"
	"fmt"
	"os"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/s3-csi/s3-csi-driver/pkg/proc"
)

// MinABI is the lowest Landlock version that is used (Linux 5.19). With version 1 a file could not be renamed to another directory,
// not even within a cache.
const MinABI = 2

// The versions with further restrictions (the kernel's Documentation/userspace-api/landlock.rst).
const (
	truncateABI = 3 // Linux 6.2
	networkABI  = 4 // Linux 6.7
	ioctlABI    = 5 // Linux 6.10
	scopeABI    = 6 // Linux 6.12
)

// ABI returns the kernel's version of Landlock. An error wraps ErrUnsupported if it has none, or one below MinABI.
func ABI() (int, error) {
	abi, _, errno := unix.Syscall(unix.SYS_LANDLOCK_CREATE_RULESET, 0, 0, unix.LANDLOCK_CREATE_RULESET_VERSION)
	switch {
	case errno == unix.EOPNOTSUPP:
		return 0, fmt.Errorf("%w: it is not among the security modules of the kernel's command line (lsm=)", ErrUnsupported)
	case errno != 0:
		return 0, fmt.Errorf("%w: %w", ErrUnsupported, errno)
	case abi < MinABI:
		return 0, fmt.Errorf("%w: its version is %d, but %d (Linux 5.19) is required", ErrUnsupported, abi, MinABI)
	}
	return int(abi), nil
}

// ErrUnsupported means that the kernel, or a filter of system calls, does not let this process use Landlock.
var ErrUnsupported = errors.New("the kernel offers this process no Landlock")

// ExitUnsupported is the exit status of a program that needs Landlock and cannot use it.
const ExitUnsupported = 75

// Restrictions returns what a version of Landlock enforces in addition to files, for reports.
func Restrictions(abi int) []string {
	var all []string
	for _, r := range []struct {
		since int
		what  string
	}{{truncateABI, "truncate"}, {networkABI, "tcp"}, {ioctlABI, "ioctl"}, {scopeABI, "signals and abstract sockets"}} {
		if abi >= r.since {
			all = append(all, r.what)
		}
	}
	return all
}

// The kinds of access. Rights that do not apply to a rule's file, such as listing a file, are left out.
const (
	readFile = unix.LANDLOCK_ACCESS_FS_READ_FILE
	read     = readFile | unix.LANDLOCK_ACCESS_FS_READ_DIR
	execute  = read | unix.LANDLOCK_ACCESS_FS_EXECUTE
	device   = readFile | unix.LANDLOCK_ACCESS_FS_WRITE_FILE | unix.LANDLOCK_ACCESS_FS_TRUNCATE | unix.LANDLOCK_ACCESS_FS_IOCTL_DEV
	change   = unix.LANDLOCK_ACCESS_FS_WRITE_FILE | unix.LANDLOCK_ACCESS_FS_TRUNCATE | unix.LANDLOCK_ACCESS_FS_REFER |
		unix.LANDLOCK_ACCESS_FS_REMOVE_DIR | unix.LANDLOCK_ACCESS_FS_REMOVE_FILE |
		unix.LANDLOCK_ACCESS_FS_MAKE_REG | unix.LANDLOCK_ACCESS_FS_MAKE_DIR | unix.LANDLOCK_ACCESS_FS_MAKE_SYM |
		unix.LANDLOCK_ACCESS_FS_MAKE_SOCK | unix.LANDLOCK_ACCESS_FS_MAKE_FIFO
	write = read | change
	// makeDevice is restricted and never allowed.
	makeDevice = unix.LANDLOCK_ACCESS_FS_MAKE_CHAR | unix.LANDLOCK_ACCESS_FS_MAKE_BLOCK
	// onFiles are the rights that apply to files that are not directories.
	onFiles = unix.LANDLOCK_ACCESS_FS_EXECUTE | unix.LANDLOCK_ACCESS_FS_READ_FILE | unix.LANDLOCK_ACCESS_FS_WRITE_FILE |
		unix.LANDLOCK_ACCESS_FS_TRUNCATE | unix.LANDLOCK_ACCESS_FS_IOCTL_DEV
)

// rule allows access to a file, or to a directory and everything below it.
type rule struct {
	path     string
	access   uint64
	required bool // it must exist; others may be missing
}

// Policy is what a thread, and the processes that it starts, may still do. The functions that return one describe it.
type Policy struct {
	files   uint64 // the accesses to files that are restricted to rules
	rules   []rule
	bind    []uint16 // TCP ports; 0 is any that the kernel chooses
	connect []uint16 // TCP ports
	open    bool     // connecting is not restricted
}

// enforced returns the restrictions of a policy that a version of Landlock offers.
func (p Policy) enforced(abi int) attributes {
	a := attributes{files: p.files, net: unix.LANDLOCK_ACCESS_NET_BIND_TCP | unix.LANDLOCK_ACCESS_NET_CONNECT_TCP,
		scoped: unix.LANDLOCK_SCOPE_ABSTRACT_UNIX_SOCKET | unix.LANDLOCK_SCOPE_SIGNAL}
	if p.open {
		a.net &^= unix.LANDLOCK_ACCESS_NET_CONNECT_TCP
	}
	if abi < truncateABI {
		a.files &^= unix.LANDLOCK_ACCESS_FS_TRUNCATE
	}
	if abi < networkABI {
		a.net = 0
	}
	if abi < ioctlABI {
		a.files &^= unix.LANDLOCK_ACCESS_FS_IOCTL_DEV
	}
	if abi < scopeABI {
		a.scoped = 0
	}
	return a
}

// attributes is the kernel's struct landlock_ruleset_attr.
type attributes struct{ files, net, scoped uint64 }

// size returns how much of the struct a version of Landlock knows.
func (attributes) size(abi int) uintptr {
	switch {
	case abi >= scopeABI:
		return 24
	case abi >= networkABI:
		return 16
	}
	return 8
}

// Restrict applies the policy to the calling thread and to the processes that it starts from now on. The thread must be locked to its
// goroutine and end with it, or execute another program. It must have no_new_privs, or CAP_SYS_ADMIN.
func (p Policy) Restrict() error {
	abi, err := ABI()
	if err != nil {
		return err
	}
	set, err := p.ruleset(abi)
	if err != nil {
		return fmt.Errorf("make a Landlock ruleset: %w", err)
	}
	defer unix.Close(set)
	if _, _, errno := unix.Syscall(unix.SYS_LANDLOCK_RESTRICT_SELF, uintptr(set), 0, 0); errno != 0 {
		return fmt.Errorf("%w: enforce a ruleset: %w", ErrUnsupported, errno)
	}
	return nil
}

// ruleset returns the descriptor of a ruleset.
func (p Policy) ruleset(abi int) (int, error) {
	a := p.enforced(abi)
	fd, _, errno := unix.Syscall(unix.SYS_LANDLOCK_CREATE_RULESET, uintptr(unsafe.Pointer(&a)), a.size(abi), 0) //nolint:gosec // x/sys has no call for it
	if errno != 0 {
		return -1, fmt.Errorf("%w: %w", ErrUnsupported, errno)
	}
	set := int(fd)
	for _, r := range p.rules {
		if err := r.add(set, a.files); err != nil {
			return -1, errors.Join(err, unix.Close(set))
		}
	}
	ports := map[uint16]uint64{}
	for _, port := range p.bind {
		ports[port] |= unix.LANDLOCK_ACCESS_NET_BIND_TCP & a.net
	}
	for _, port := range p.connect {
		ports[port] |= unix.LANDLOCK_ACCESS_NET_CONNECT_TCP & a.net
	}
	for port, access := range ports {
		if access == 0 {
			continue
		}
		if err := addPort(set, port, access); err != nil {
			return -1, errors.Join(fmt.Errorf("port %d: %w", port, err), unix.Close(set))
		}
	}
	return set, nil
}

func (r rule) add(set int, handled uint64) error {
	fd, err := unix.Open(r.path, unix.O_PATH|unix.O_CLOEXEC, 0)
	if err != nil {
		if !r.required {
			return nil // it does not exist, or the process cannot reach it either
		}
		return &os.PathError{Op: "open", Path: r.path, Err: err}
	}
	defer unix.Close(fd)
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return &os.PathError{Op: "stat", Path: r.path, Err: err}
	}
	access := r.access & handled
	if st.Mode&unix.S_IFMT != unix.S_IFDIR {
		access &= onFiles
	}
	if access == 0 {
		return nil
	}
	// The kernel's struct landlock_path_beneath_attr is packed: 8 and 4 bytes.
	beneath := unix.LandlockPathBeneathAttr{Allowed_access: access, Parent_fd: int32(fd)}
	if err := addRule(set, unix.LANDLOCK_RULE_PATH_BENEATH, unsafe.Pointer(&beneath)); err != nil { //nolint:gosec // x/sys has no call for it
		return fmt.Errorf("%w: %w", ErrUnsupported, &os.PathError{Op: "allow", Path: r.path, Err: err})
	}
	return nil
}

// rulePort is LANDLOCK_RULE_NET_PORT of the kernel's enum landlock_rule_type.
const rulePort = 2

func addPort(set int, port uint16, access uint64) error {
	// The kernel's struct landlock_net_port_attr.
	allowed := struct{ access, port uint64 }{access, uint64(port)}
	if err := addRule(set, rulePort, unsafe.Pointer(&allowed)); err != nil { //nolint:gosec // x/sys has no call for it
		return fmt.Errorf("%w: %w", ErrUnsupported, err)
	}
	return nil
}

func addRule(set int, kind uintptr, attributes unsafe.Pointer) error {
	if _, _, errno := unix.Syscall6(unix.SYS_LANDLOCK_ADD_RULE, uintptr(set), kind, uintptr(attributes), 0, 0, 0); errno != 0 {
		return errno
	}
	return nil
}

// Run calls start on a thread that is restricted to the policy and ends afterwards. What start starts keeps the restriction.
func (p Policy) Run(start func() error) (err error) {
	proc.OnThrowawayThread(func() {
		if err = p.Restrict(); err == nil {
			err = start()
		}
	})
	return err
}
