//go:build linux

package host

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/s3-csi/s3-csi-driver/pkg/fault"
)

// Passable is a fault.Precondition that names the first directory on the way to path, or path itself, through which a user
// without rights cannot pass. Symbolic links are resolved first; what does not exist yet is left out.
//
// The kernel is asked in the user's name, so that access control lists and security modules count, too: modes alone could
// mislead. The user is of its own group and of no other.
func (n *Namespace) Passable(ctx context.Context, path string, uid uint32) error {
	enter := n.entry()
	if enter == nil {
		enter = func() error { return nil } // the thread is thrown away all the same: it becomes the user's
	}
	return n.run(ctx, fmt.Sprintf("trying whether uid %d can pass through %s", uid, path), enter, func() error {
		dirs, err := openWay(path)
		defer func() {
			for _, d := range dirs {
				_ = d.Close() // O_PATH
			}
		}()
		if err != nil {
			return err
		}
		if err := becomeUser(uid); err != nil {
			return err
		}
		for _, d := range dirs {
			var st unix.Stat_t
			switch err := unix.Fstatat(int(d.Fd()), ".", &st, unix.AT_SYMLINK_NOFOLLOW); { // looked up in d, which takes the right to search it
			case errors.Is(err, unix.EACCES), errors.Is(err, unix.EPERM):
				return closed(d, uid, err)
			case err != nil:
				return &fs.PathError{Op: "stat", Path: d.Name(), Err: err}
			}
		}
		return nil
	})
}

// openWay opens the directories that lead to a path, and itself where it exists. Those that it opened are the caller's to
// close, also where it fails.
func openWay(path string) (dirs []*os.File, err error) {
	for {
		resolved, err := filepath.EvalSymlinks(path)
		if err == nil {
			path = resolved
			break
		}
		if !errors.Is(err, fs.ErrNotExist) || path == "/" {
			return nil, err
		}
		path = filepath.Dir(path)
	}
	for at, rest := "/", strings.TrimPrefix(path, "/"); ; {
		fd, err := unix.Open(at, unix.O_PATH|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
		if err != nil {
			return dirs, &fs.PathError{Op: "open", Path: at, Err: err}
		}
		dirs = append(dirs, os.NewFile(uintptr(fd), at))
		if rest == "" {
			return dirs, nil
		}
		var name string
		name, rest, _ = strings.Cut(rest, "/")
		at = filepath.Join(at, name)
	}
}

// becomeUser has this thread access files as a user without rights: a file system uid other than 0 takes the capabilities
// that override permissions from it (capabilities(7)). The thread cannot be used for anything else afterwards.
func becomeUser(uid uint32) error {
	// Not Go's own wrapper, which changes the groups of all threads.
	if _, _, errno := unix.RawSyscall(unix.SYS_SETGROUPS, 0, 0, 0); errno != 0 {
		return fmt.Errorf("become a user without rights: setgroups: %w", errno)
	}
	for what, set := range map[string]func(int) (int, error){"setfsgid": unix.SetfsgidRetGid, "setfsuid": unix.SetfsuidRetUid} {
		if _, err := set(int(uid)); err != nil {
			return fmt.Errorf("become a user without rights: %s: %w", what, err)
		}
		if now, err := set(-1); err != nil || now != int(uid) { // setfsuid(2) tells no other way whether it succeeded
			return fmt.Errorf("become a user without rights: %s: the id is still %d: %w", what, now, errors.Join(err, unix.EPERM))
		}
	}
	return nil
}

// closed is the error of a directory that a user cannot pass through. Its inode is looked at by descriptor, which takes no
// right.
func closed(d *os.File, uid uint32, err error) error {
	var st unix.Stat_t
	if serr := unix.Fstat(int(d.Fd()), &st); serr != nil {
		return errors.Join(&fs.PathError{Op: "search", Path: d.Name(), Err: err}, serr)
	}
	owner := fmt.Sprint(st.Uid)
	if st.Uid == 0 {
		owner = "root"
	}
	what := "open it for them (chmod o+x)"
	if st.Mode&0o001 != 0 {
		what = "its access control list or a security module of the host refuses uid " + fmt.Sprint(uid) + ": allow it there"
	}
	return fault.Errorf(fault.Precondition, "clients, which run as users of their own, cannot pass through %s (mode %04o, owner %s): %w: %s, or choose another directory",
		d.Name(), st.Mode&0o7777, owner, err, what)
}
