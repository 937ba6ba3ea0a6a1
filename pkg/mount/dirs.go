package mount

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/s3-csi/s3-csi-driver/pkg/failpoint"
)

func (s store) caFile(name string) string { return filepath.Join(s.mountDir(name), "ca.pem") }

// uids are those that mounts have, by the owners of their directories, and those whose cache outlived a reboot: what is in
// it is not for another mount's client, and a mount's processes are found by its uid. A mount's cache is made under the
// lock that its uid is chosen under, so nothing else need be read: a hundred mounts may come up at once.
func (s store) uids() (map[uint32]bool, error) {
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
		add(filepath.Join(s.dir, "mounts"), s.helperDir),
		add(s.cache, func(name string) string { return filepath.Join(s.cache, name) }))
	return used, err
}

// make makes a mount's directories and, first of all, its record: whoever finds a directory knows whose it is.
func (s store) make(r record) error {
	if err := os.Mkdir(s.mountDir(r.Name), modeClosed); err != nil {
		return err
	}
	failpoint.Here("make.directory")
	if err := s.writeRecord(r); err != nil {
		return err
	}
	failpoint.Here("make.recorded")
	if err := s.admit(r.Name, int(r.UID)); err != nil {
		return err
	}
	if err := s.makeHelperDir(r.Name, int(r.UID)); err != nil {
		return err
	}
	if err := os.Mkdir(s.cacheDir(r.Name), modeClosed); err != nil {
		return err
	}
	if err := os.Lchown(s.cacheDir(r.Name), int(r.UID), int(r.UID)); err != nil {
		return err
	}
	failpoint.Here("make.directories")
	return os.Mkdir(s.sourceDir(r.Name), modeClosed)
}

// remove removes a mount's directories, its record last. Nothing may be mounted on the source and none of the mount's
// processes may be left: what is below the directories is theirs.
func (s store) remove(name string) error {
	if err := ignoreMissing(os.Remove(s.sourceDir(name))); err != nil {
		return err
	}
	failpoint.Here("remove.source")
	if err := errors.Join(ignoreMissing(os.Remove(s.keptRecord(name))), os.RemoveAll(s.cacheDir(name))); err != nil {
		return err
	}
	failpoint.Here("remove.cache")
	if err := s.removeScratch(name); err != nil {
		return err
	}
	entries, err := os.ReadDir(s.mountDir(name))
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	for _, e := range entries {
		if path := filepath.Join(s.mountDir(name), e.Name()); path != s.recordFile(name) {
			err = errors.Join(err, os.RemoveAll(path))
		}
	}
	if err != nil {
		return err
	}
	failpoint.Here("remove.files")
	return os.RemoveAll(s.mountDir(name))
}
