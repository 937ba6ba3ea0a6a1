package host

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
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
	return n.runCall(ctx, fmt.Sprintf("checking whether uid %d can pass through %s", uid, path), enter, func() error {
		path, err := resolveExisting(path)
		if err != nil {
			return err
		}
		if err := becomeUser(uid); err != nil {
			return err
		}
		for dir, rest := "/", strings.TrimPrefix(path, "/"); ; {
			var st unix.Stat_t
			switch err := unix.Lstat(dir+"/.", &st); { // a look-up in a directory needs the permission to search it
			case errors.Is(err, unix.EACCES), errors.Is(err, unix.EPERM):
				return errClosed(dir, uid, err)
			case err != nil:
				return &fs.PathError{Op: "stat", Path: dir, Err: err}
			case rest == "":
				return nil
			}
			var name string
			name, rest, _ = strings.Cut(rest, "/")
			dir = filepath.Join(dir, name)
		}
	})
}

// resolveExisting resolves the symbolic links of a path, without what does not exist at its end.
func resolveExisting(path string) (string, error) {
	for {
		resolved, err := filepath.EvalSymlinks(path)
		if err == nil || !errors.Is(err, fs.ErrNotExist) || path == "/" {
			return resolved, err
		}
		path = filepath.Dir(path)
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

// errClosed returns the error for a directory that a user cannot pass through.
func errClosed(dir string, uid uint32, err error) error {
	var st unix.Stat_t
	if serr := unix.Lstat(dir, &st); serr != nil {
		return errors.Join(&fs.PathError{Op: "search", Path: dir, Err: err}, serr)
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
		dir, st.Mode&0o7777, owner, err, what)
}
