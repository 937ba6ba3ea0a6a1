package state

import (
	"errors"
	"fmt"
	"os"
	"syscall"

	"github.com/s3-csi/s3-csi-driver/pkg/fault"
)

// Access to the driver's directories. The root of a volume is open to every user by default, because pods run as any user.
// Other users of the host are kept out by a closed directory on the path to each mount point of a volume. The
// mount table, which every process can read, shows those paths.
const (
	modeClosed   = 0o700 // sources, publications: only the driver passes
	modeAdmit    = 0o710 // mounts/<name>: the mount's own group passes too
	modePassable = 0o711 // directories on the way to those of mounts: every user passes, only the driver lists them
)

// keptPrefix is the prefix of the names of quarantine directories in the cache directory.
const keptPrefix = "kept-"

// prepare makes the directories and closes them to other users. A changed mode takes effect at
// once, whatever is mounted below.
func (s *Store) prepare() error {
	for _, d := range []struct {
		path string
		mode os.FileMode
	}{
		{s.Dir, modePassable}, {s.MountsDir(), modePassable}, {s.Cache, modePassable},
		{s.scratch(), modePassable},
		{s.SourcesDir(), modeClosed}, {s.publicationsDir(), modeClosed}, {s.usageDir(), modeClosed}, {s.sparesDir(), modeClosed},
	} {
		if err := restrictDir(d.path, d.mode); err != nil {
			return fmt.Errorf("making the state directory: %w", err)
		}
	}
	return nil
}

// restrictDir makes a directory, or takes from one that exists what mode does not allow. The directory becomes the driver's
// own user's.
func restrictDir(dir string, mode os.FileMode) error {
	if err := os.MkdirAll(dir, mode); err != nil {
		return err
	}
	fi, err := os.Stat(dir)
	if err != nil {
		return err
	}
	if fi.Mode()&os.ModeSticky != 0 && fi.Mode()&0o002 != 0 {
		return fault.Errorf(fault.Precondition, "%s is writable for all users of the host: choose a directory that only the driver uses", dir)
	}
	if st, ok := fi.Sys().(*syscall.Stat_t); !ok || int(st.Uid) != os.Geteuid() {
		if err := os.Chown(dir, os.Geteuid(), os.Getegid()); err != nil {
			return err
		}
	}
	if fi.Mode().Perm()&^mode == 0 {
		return nil
	}
	return os.Chmod(dir, fi.Mode().Perm()&mode)
}

// admit lets the mount's own group, which is its helper's and its client's, pass through the mount's directory.
func (s *Store) admit(name string, gid int) error {
	dir := s.MountDir(name)
	return errors.Join(os.Lchown(dir, -1, gid), os.Chmod(dir, modeAdmit))
}
