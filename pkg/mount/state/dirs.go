package state

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/s3-csi/s3-csi-driver/pkg/failpoint"
)

// uids returns the uids in use, by the owners of the mounts' directories and of caches that survived a reboot: another mount's client
// must not read those. Records need not be read, because a mount's cache is made under the lock under which its uid is chosen.
func (f files) uids() (map[uint32]bool, error) {
	used := map[uint32]bool{}
	add := func(dir string, file func(name string) string) error {
		entries, err := os.ReadDir(dir)
		if err != nil {
			return err
		}
		for _, e := range entries {
			uid, err := ownerOf(file(e.Name()))
			if err != nil {
				return err
			}
			used[uid] = true
		}
		return nil
	}
	err := errors.Join(
		add(f.MountsDir(), f.HelperDir),
		add(f.Cache, func(name string) string { return filepath.Join(f.Cache, name) }))
	return used, err
}

// make makes a mount's directories and, first of all, its record, so that each directory can be attributed.
func (f files) make(r Mount) error {
	if err := os.Mkdir(f.MountDir(r.Name), modeClosed); err != nil {
		return err
	}
	failpoint.Here("make.directory")
	if err := f.writeRecord(r); err != nil {
		return err
	}
	failpoint.Here("make.recorded")
	if err := f.admit(r.Name, int(r.UID)); err != nil {
		return err
	}
	if err := f.makeHelperDir(r.Name, int(r.UID)); err != nil {
		return err
	}
	if err := os.Mkdir(f.CacheDir(r.Name), modeClosed); err != nil {
		return err
	}
	if err := os.Lchown(f.CacheDir(r.Name), int(r.UID), int(r.UID)); err != nil {
		return err
	}
	failpoint.Here("make.directories")
	return os.Mkdir(f.SourceDir(r.Name), modeClosed)
}

// remove removes a mount's directories, its record last. Nothing may be mounted on the source, and none of the mount's processes may be
// left.
func (f files) remove(name string) error {
	if err := ignoreMissing(os.Remove(f.SourceDir(name))); err != nil {
		return err
	}
	failpoint.Here("remove.source")
	if err := errors.Join(ignoreMissing(os.Remove(f.keptRecord(name))), os.RemoveAll(f.CacheDir(name))); err != nil {
		return err
	}
	failpoint.Here("remove.cache")
	if err := f.removeScratch(name); err != nil {
		return err
	}
	entries, err := os.ReadDir(f.MountDir(name))
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	for _, e := range entries {
		if path := filepath.Join(f.MountDir(name), e.Name()); path != f.recordFile(name) {
			err = errors.Join(err, os.RemoveAll(path))
		}
	}
	if err != nil {
		return err
	}
	failpoint.Here("remove.files")
	return os.RemoveAll(f.MountDir(name))
}
