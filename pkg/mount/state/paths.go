package state

import (
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"

	"github.com/s3-csi/s3-csi-driver/pkg/fault"
)

// The names in the state directory.
const (
	mountsDir, sourcesDir, publicationsDir, usageDir = "mounts", "sources", "publications", "usage"
	recordName, caName                               = "mount.json", "ca.pem"
)

// Paths are the paths of the store's files and directories.
type Paths struct {
	Dir   string // --state-dir
	Cache string // --cache-dir: <name>/ holds what a client keeps on disk
}

// SourcesDir is the directory of sources and of pins.
func (p Paths) SourcesDir() string { return filepath.Join(p.Dir, sourcesDir) }

// SourceDir is the mount point of a mount's FUSE file system.
func (p Paths) SourceDir(name string) string { return filepath.Join(p.SourcesDir(), name) }

// MountsDir is the directory of mounts' directories.
func (p Paths) MountsDir() string { return filepath.Join(p.Dir, mountsDir) }

// MountDir is a mount's directory. It belongs to the driver; the mount's own group can pass it.
func (p Paths) MountDir(name string) string { return filepath.Join(p.MountsDir(), name) }

// HelperDir is the part of a mount's directory that its helper and its client can write to.
func (p Paths) HelperDir(name string) string { return filepath.Join(p.MountDir(name), "state") }

// Socket is the socket of a mount's helper.
func (p Paths) Socket(name string) string { return filepath.Join(p.MountDir(name), "helper.sock") }

// StatusSocket is the socket on which the driver serves its status.
func (p Paths) StatusSocket() string { return filepath.Join(p.Dir, "status.sock") }

// CAFile holds the certificates that a mount's client trusts its backend by.
func (p Paths) CAFile(name string) string { return filepath.Join(p.MountDir(name), caName) }

// CacheDir is where a mount's client keeps data on disk.
func (p Paths) CacheDir(name string) string { return filepath.Join(p.Cache, name) }

// FusectlDir is where the driver mounts FUSE's control file system if the host has not. Its root is open to every user, so the
// directory around it is closed.
func (p Paths) FusectlDir() string { return filepath.Join(p.Dir, "fusectl", "connections") }

// Owns reports whether a path is one of the driver's own directories or inside one.
func (p Paths) Owns(path string) (dir string, owns bool) {
	for _, dir := range []string{p.Dir, p.Cache} {
		if path == dir || strings.HasPrefix(path, dir+"/") {
			return dir, true
		}
	}
	return "", false
}

func (p Paths) keptRecord(name string) string { return p.CacheDir(name) + ".json" }

func (p Paths) publicationsDir() string { return filepath.Join(p.Dir, publicationsDir) }

func (p Paths) usageDir() string { return filepath.Join(p.Dir, usageDir) }

func (p Paths) scratch() string { return filepath.Join(p.Dir, "scratch") }

func (p Paths) scratchDir(name string) string { return filepath.Join(p.scratch(), name) }

// recordFile is the file of a mount's record, in the state directory.
func recordFile(name string) string { return filepath.Join(mountsDir, name, recordName) }

// hashed is the file of a record in one of the state directory's directories, by what the record is of.
func hashed(dir, of string) string {
	sum := sha256.Sum256([]byte(of))
	return filepath.Join(dir, hex.EncodeToString(sum[:16])+".json")
}

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

// admitGroup lets the mount's own group, which is its helper's and its client's, pass through the mount's directory.
func (s *Store) admitGroup(name string, gid int) error {
	dir := s.MountDir(name)
	return errors.Join(os.Lchown(dir, -1, gid), os.Chmod(dir, modeAdmit))
}
