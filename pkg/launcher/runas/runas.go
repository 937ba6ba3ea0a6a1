// Package runas irrevocably changes a process that systemd started to a mount's own uid, and executes the same program again.
//
// systemd's User= refuses a number that is not in the host's user database (the unit fails with 217/USER), and mounts' uids are in
// no database. So a unit's first process is root, inside the whole sandbox, with only the capabilities that the change needs.
// This package is the first code that runs in it.
package runas

import (
	"errors"
	"fmt"
	"os"
	"runtime"
	"strconv"

	"golang.org/x/sys/unix"
)

// Mode is the first argument of a program that must call Exec.
const Mode = "run-as"

// join is the argument with which Exec enters another mount namespace first.
const join = "--join"

// minID is the smallest uid and gid of mounts; smaller ones belong to root and the system's services.
const minID = 1000

// Identity is what a process becomes.
type Identity struct {
	UID, GID uint32
	// Join means that it also enters the mount namespace that its standard output is a descriptor of, and has the standard error as
	// its output from then on. That needs CAP_SYS_ADMIN and CAP_SYS_CHROOT.
	Join bool
}

// Argv returns the command line of a program that becomes as described and continues with args.
func (i Identity) Argv(program string, args ...string) []string {
	argv := []string{program, Mode, strconv.FormatUint(uint64(i.UID), 10), strconv.FormatUint(uint64(i.GID), 10)}
	if i.Join {
		argv = append(argv, join)
	}
	return append(argv, args...)
}

// Parse reads a command line that Identity.Argv returned; ok is false for any other.
func Parse(argv []string) (i Identity, args []string, ok bool) {
	if len(argv) < 4 || argv[1] != Mode {
		return Identity{}, nil, false
	}
	var uerr, gerr error
	i.UID, uerr = id(argv[2])
	i.GID, gerr = id(argv[3])
	args = argv[4:]
	if i.Join = len(args) > 0 && args[0] == join; i.Join {
		args = args[1:]
	}
	return i, args, uerr == nil && gerr == nil
}

func id(s string) (uint32, error) {
	n, err := strconv.ParseUint(s, 10, 32)
	if err != nil {
		return 0, err
	}
	if n < minID || n == 1<<32-1 || strconv.FormatUint(n, 10) != s {
		return 0, fmt.Errorf("%s is not the uid or gid of a mount", s)
	}
	return uint32(n), nil
}

// Exec irrevocably drops every privilege, becomes what a command line of Identity.Argv says, and executes the running program with the
// rest of it. Before it drops privileges, it calls restrict with that rest, to restrict this thread further. It returns only after an
// error.
func Exec(argv []string, restrict func(args []string) error) error {
	i, args, ok := Parse(argv)
	if !ok {
		return errors.New("run-as: requires a uid and a gid, both at least 1000, and arguments")
	}
	// The following changes only this thread; the exec ends all others.
	runtime.LockOSThread()
	var err error
	if i.Join {
		err = joinMounts()
	}
	if err == nil {
		err = become(int(i.UID), int(i.GID), func() error { return restrict(args) })
	}
	if err != nil {
		return fmt.Errorf("run-as %d: %w", i.UID, err)
	}
	err = unix.Exec("/proc/self/exe", append([]string{argv[0]}, args...), os.Environ())
	return fmt.Errorf("run-as %d: execute this program again: %w", i.UID, err)
}

// joinMounts moves this thread into the mount namespace that descriptor 1 is of, and makes descriptor 1 a copy of descriptor 2.
func joinMounts() error {
	if err := unix.Unshare(unix.CLONE_FS); err != nil { // which setns(2) requires
		return fmt.Errorf("leave the other threads' root: %w", err)
	}
	if err := unix.Setns(unix.Stdout, unix.CLONE_NEWNS); err != nil {
		return fmt.Errorf("enter the mount namespace of helpers: %w", err)
	}
	if err := unix.Dup3(unix.Stderr, unix.Stdout, 0); err != nil {
		return fmt.Errorf("replace the standard output: %w", err)
	}
	return nil
}

// become restricts the thread, changes it to an unprivileged uid and gid, and checks that no capability is left.
func become(uid, gid int, restrict func() error) error {
	if err := Reduce(); err != nil {
		return err
	}
	if err := restrict(); err != nil {
		return err
	}
	if err := unix.Setgroups(nil); err != nil {
		return fmt.Errorf("drop groups: %w", err)
	}
	if err := unix.Setresgid(gid, gid, gid); err != nil {
		return fmt.Errorf("become gid %d: %w", gid, err)
	}
	// The kernel empties the permitted and the effective set when the uid is no longer 0.
	if err := unix.Setresuid(uid, uid, uid); err != nil {
		return fmt.Errorf("become uid %d: %w", uid, err)
	}
	header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var have, none [2]unix.CapUserData
	if err := errors.Join(unix.Capset(&header, &none[0]), unix.Capget(&header, &have[0])); err != nil {
		return fmt.Errorf("clear and read capabilities: %w", err)
	}
	if have != none {
		return fmt.Errorf("capabilities remain: %+v", have)
	}
	return nil
}

// Reduce removes every way to privileges from this thread and its future children. It keeps the permitted and the effective set, which a
// change of the uid needs and then empties.
func Reduce() error {
	if err := unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0); err != nil {
		return fmt.Errorf("set no_new_privs: %w", err)
	}
	for c := range uintptr(64) {
		held, err := unix.PrctlRetInt(unix.PR_CAPBSET_READ, c, 0, 0, 0)
		if err != nil || held == 0 {
			continue // not in the set, or unknown to this kernel
		}
		if err := unix.Prctl(unix.PR_CAPBSET_DROP, c, 0, 0, 0); err != nil {
			return fmt.Errorf("drop capability %d from the bounding set: %w", c, err)
		}
	}
	if err := unix.Prctl(unix.PR_CAP_AMBIENT, unix.PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0); err != nil {
		return fmt.Errorf("clear ambient capabilities: %w", err)
	}
	header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var have [2]unix.CapUserData
	if err := unix.Capget(&header, &have[0]); err != nil {
		return fmt.Errorf("read capabilities: %w", err)
	}
	have[0].Inheritable, have[1].Inheritable = 0, 0
	if err := unix.Capset(&header, &have[0]); err != nil {
		return fmt.Errorf("clear inheritable capabilities: %w", err)
	}
	return nil
}
