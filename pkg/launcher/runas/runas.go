// Package runas irrevocably changes a process that systemd started to a mount's own uid, and executes the same program again.
//
// systemd's User= refuses a number that is not in the host's user database (the unit fails with 217/USER), and mounts' uids are in
// no database. So a unit's first process is root, inside the whole sandbox, with only the three capabilities that the change needs.
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

// minID is the smallest uid and gid of mounts; smaller ones belong to root and the system's services.
const minID = 1000

// Argv returns the command line of a program that becomes uid and gid and continues with args.
func Argv(program string, uid, gid uint32, args ...string) []string {
	return append([]string{program, Mode, strconv.FormatUint(uint64(uid), 10), strconv.FormatUint(uint64(gid), 10)}, args...)
}

// Parse reads a command line that Argv returned; ok is false for any other.
func Parse(argv []string) (uid, gid uint32, args []string, ok bool) {
	if len(argv) < 4 || argv[1] != Mode {
		return 0, 0, nil, false
	}
	u, uerr := id(argv[2])
	g, gerr := id(argv[3])
	return u, g, argv[4:], uerr == nil && gerr == nil
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

// Exec irrevocably drops every privilege, becomes the uid and gid of a command line that Argv returned, and executes the running
// program with the rest of it. Before it drops privileges, it calls restrict with that rest, to restrict this thread further. It
// returns only after an error.
func Exec(argv []string, restrict func(args []string) error) error {
	uid, gid, args, ok := Parse(argv)
	if !ok {
		return errors.New("run-as: requires a uid and a gid, both at least 1000, and arguments")
	}
	// The following changes only this thread; the exec ends all others.
	runtime.LockOSThread()
	if err := become(int(uid), int(gid), func() error { return restrict(args) }); err != nil {
		return fmt.Errorf("run-as %d: %w", uid, err)
	}
	err := unix.Exec("/proc/self/exe", append([]string{argv[0]}, args...), os.Environ())
	return fmt.Errorf("run-as %d: execute this program again: %w", uid, err)
}

// become restricts the thread, changes it to an unprivileged uid and gid, and checks that no capability is left.
func become(uid, gid int, restrict func() error) error {
	if err := unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0); err != nil {
		return fmt.Errorf("set no_new_privs: %w", err)
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
	// The kernel empties the permitted and the effective set when the uid is no longer 0.
	if err := unix.Setresuid(uid, uid, uid); err != nil {
		return fmt.Errorf("become uid %d: %w", uid, err)
	}
	header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var empty, have [2]unix.CapUserData
	if err := unix.Capset(&header, &empty[0]); err != nil {
		return fmt.Errorf("clear capabilities: %w", err)
	}
	if err := unix.Capget(&header, &have[0]); err != nil {
		return fmt.Errorf("read capabilities: %w", err)
	}
	if have != empty {
		return fmt.Errorf("capabilities remain: %+v", have)
	}
	return nil
}
