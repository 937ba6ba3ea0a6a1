package state

import (
	"encoding/json"
	"errors"
	"io/fs"
	"os"
	"strings"
	"time"

	"github.com/s3-csi/s3-csi-driver/pkg/failpoint"
	"github.com/s3-csi/s3-csi-driver/pkg/mount"
)

// The state directory is gone after a reboot, as the mounts are; the cache directory is not. Beside a mount's cache is a copy of the
// mount's record, <cache>/<name>.json. If the client may hold files that are not stored yet, the copy restores the mount in phase
// Ending, so that they are stored after all. Any other cache holds nothing that is not in S3, and is removed.

// keepRecord writes that copy; durably, if files would be lost without it after a power cut.
func (f files) keepRecord(rec Mount, durably bool) error {
	b, err := json.Marshal(rec)
	if err != nil {
		return err
	}
	if durably {
		return writeDurably(f.keptRecord(rec.Name), b)
	}
	return writeFile(f.keptRecord(rec.Name), b)
}

// restore restores mounts that a reboot ended and that may hold files which are not stored, as keeps reports. It returns their names.
// The caches of the others are removed.
func (f files) restore(keeps func(Mount) bool) (names []string, err error) {
	entries, err := os.ReadDir(f.Cache)
	if err != nil {
		return nil, err
	}
	for _, e := range entries {
		name, ok := strings.CutSuffix(e.Name(), ".json")
		if !ok || !mount.ValidName(name) {
			continue
		}
		// A directory without the record is of a restore that was interrupted.
		if _, err := os.Lstat(f.recordFile(name)); !errors.Is(err, fs.ErrNotExist) {
			continue
		}
		restored, err := f.restoreOne(name, keeps)
		if err != nil {
			return names, err
		}
		if restored {
			names = append(names, name)
		}
	}
	return names, nil
}

func (f files) restoreOne(name string, keeps func(Mount) bool) (bool, error) {
	var rec Mount
	if _, err := readJSON(f.keptRecord(name), &rec); err != nil && !errors.Is(err, ErrDamaged) {
		return false, err
	}
	uid, err := ownerOf(f.CacheDir(name))
	if err != nil {
		return false, err
	}
	if rec.Name != name || rec.UID != uid || uid == 0 {
		// Nothing is left to store, or it is unknown where to: a directory is reported and kept.
		return false, ignoreMissing(os.Remove(f.keptRecord(name)))
	}
	if !keeps(rec) {
		return false, errors.Join(os.RemoveAll(f.CacheDir(name)), ignoreMissing(os.Remove(f.keptRecord(name))))
	}
	rec.Phase, rec.Ending, rec.Minor, rec.OOMKills, rec.Superseded, rec.Predecessors = Ending, time.Now(), 0, 0, false, nil
	for _, dir := range []string{f.MountDir(name), f.SourceDir(name)} {
		if err := os.Mkdir(dir, modeClosed); err != nil && !errors.Is(err, fs.ErrExist) {
			return false, err
		}
	}
	if err := errors.Join(f.admit(name, int(uid)), f.makeHelperDir(name, int(uid))); err != nil {
		return false, err
	}
	failpoint.Here("restore.directories")
	return true, f.writeRecord(rec)
}
