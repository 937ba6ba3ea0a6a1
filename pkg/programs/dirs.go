package programs

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/s3-csi/s3-csi-driver/pkg/fault"
	"github.com/s3-csi/s3-csi-driver/pkg/osfile"
)

// root makes the operator's directory and returns its path without symbolic links. It refuses a directory in which users
// other than root could replace programs, or that clients cannot reach.
func (o Options) root() (string, error) {
	own := filepath.Clean(o.Dir)
	for dir := range prefixes(own) {
		mode := os.FileMode(modeParent)
		if dir == own {
			mode = modeDir
		}
		err := os.Mkdir(dir, mode)
		if err == nil {
			err = os.Chmod(dir, mode) // whatever the umask
		}
		if err != nil && !errors.Is(err, fs.ErrExist) {
			return "", err
		}
	}
	root, err := filepath.EvalSymlinks(o.Dir)
	if err != nil {
		return "", err
	}
	if err := o.visible(root); err != nil {
		return "", err
	}
	for dir := range prefixes(root) {
		if err := trusted(dir); err != nil {
			return "", err
		}
	}
	return root, nil
}

// prefixes yields the directories above a clean absolute path, and the path itself.
func prefixes(path string) func(yield func(string) bool) {
	return func(yield func(string) bool) {
		for i := 1; i < len(path); i++ {
			if path[i] == '/' && !yield(path[:i]) {
				return
			}
		}
		yield(path)
	}
}

// trusted refuses a directory in which other users than root could replace programs, or that clients cannot pass through.
func trusted(dir string) error {
	var st unix.Stat_t
	if err := unix.Lstat(dir, &st); err != nil {
		return &fs.PathError{Op: "lstat", Path: dir, Err: err}
	}
	switch {
	case st.Mode&unix.S_IFMT != unix.S_IFDIR:
		return fault.Errorf(fault.Precondition, "%s is not a directory", dir)
	case st.Uid != 0 || st.Mode&0o022 != 0 && st.Mode&unix.S_ISVTX == 0:
		return fault.Errorf(fault.Precondition, "%s is writable by users other than root (owner %d, mode %04o), which is not safe for programs that root starts: "+
			"make root its only writer (chown root, chmod go-w), or choose another --host-dir", dir, st.Uid, st.Mode&0o7777)
	case st.Mode&0o001 == 0:
		return fault.Errorf(fault.Precondition, "%s is not accessible to clients, which do not run as root (mode %04o, owner root): "+
			"make it accessible (chmod o+x), or choose another --host-dir", dir, st.Mode&0o7777)
	}
	return nil
}

// makeDir makes one of this package's own directories, or checks an existing one.
func makeDir(dir string) error {
	if err := os.Mkdir(dir, modeDir); err != nil && !errors.Is(err, fs.ErrExist) {
		return err
	}
	f, err := openDir(dir)
	if err != nil {
		return err
	}
	defer f.Close()
	if err := f.Chmod(modeDir); err != nil {
		return err
	}
	return trusted(dir)
}

// openDir opens a directory, and refuses a symbolic link to one.
func openDir(dir string) (*os.File, error) {
	return os.OpenFile(dir, os.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW, 0)
}

// lockDir waits until no other driver installs or removes programs in a directory. Closing the file releases the lock.
func lockDir(ctx context.Context, dir string) (*os.File, error) {
	f, err := openDir(dir)
	if err != nil {
		return nil, err
	}
	if err := osfile.Lock(ctx, f); err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return f, nil
}

// removeTemps removes the temporary files of killed installations. The lock is held.
func removeTemps(dir string) error {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return err
	}
	for _, e := range entries {
		if !strings.HasPrefix(e.Name(), tempPrefix) {
			continue
		}
		if err := os.Remove(filepath.Join(dir, e.Name())); err != nil {
			return err
		}
	}
	return nil
}
