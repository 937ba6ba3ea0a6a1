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

// Passable returns nil if an unprivileged user can pass through every directory on the way to path, and path itself, else a
// fault.Precondition that names the first that the user cannot. It resolves symbolic links first, and ignores what does not exist.
//
// It tries the access as that user, so that access control lists and security modules count, not only modes. The user is in its own
// group only.
func (n *Namespace) Passable(ctx context.Context, path string, uid uint32) error {
	enter := n.entry()
	if enter == nil {
		enter = func() error { return nil } // the thread must end afterwards: it becomes the user's
	}
	return n.run(ctx, fmt.Sprintf("checking whether uid %d can pass through %s", uid, path), enter, func() error {
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
			switch err := unix.Fstatat(int(d.Fd()), ".", &st, unix.AT_SYMLINK_NOFOLLOW); { // a look-up in d needs the permission to search it
			case errors.Is(err, unix.EACCES), errors.Is(err, unix.EPERM):
				return closed(d, uid, err)
			case err != nil:
				return &fs.PathError{Op: "stat", Path: d.Name(), Err: err}
			}
		}
		return nil
	})
}

// openWay opens the directories that lead to a path, and the path itself if it exists. The caller closes them, also after an error.
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

// becomeUser makes this thread access files as an unprivileged user: a file system uid other than 0 removes the capabilities that
// override permissions (capabilities(7)). The thread must not be used for anything else afterwards.
func becomeUser(uid uint32) error {
	// Not Go's own wrapper, which changes the groups of all threads.
	if _, _, errno := unix.RawSyscall(unix.SYS_SETGROUPS, 0, 0, 0); errno != 0 {
		return fmt.Errorf("become an unprivileged user: setgroups: %w", errno)
	}
	for what, set := range map[string]func(int) (int, error){"setfsgid": unix.SetfsgidRetGid, "setfsuid": unix.SetfsuidRetUid} {
		if _, err := set(int(uid)); err != nil {
			return fmt.Errorf("become an unprivileged user: %s: %w", what, err)
		}
		if now, err := set(-1); err != nil || now != int(uid) { // the only way to see whether setfsuid(2) succeeded
			return fmt.Errorf("become an unprivileged user: %s: the id is still %d: %w", what, now, errors.Join(err, unix.EPERM))
		}
	}
	return nil
}

// closed returns the error for a directory that a user cannot pass through. Reading its inode by descriptor needs no permission.
func closed(d *os.File, uid uint32, err error) error {
	var st unix.Stat_t
	if serr := unix.Fstat(int(d.Fd()), &st); serr != nil {
		return errors.Join(&fs.PathError{Op: "search", Path: d.Name(), Err: err}, serr)
	}
	owner := fmt.Sprint(st.Uid)
	if st.Uid == 0 {
		owner = "root"
	}
	what := "make it accessible (chmod o+x)"
	if st.Mode&0o001 != 0 {
		what = "its access control list or a security module of the host denies uid " + fmt.Sprint(uid) + ": allow that uid"
	}
	return fault.Errorf(fault.Precondition, "clients, which do not run as root, cannot pass through %s (mode %04o, owner %s): %w: %s, or choose another directory",
		d.Name(), st.Mode&0o7777, owner, err, what)
}
