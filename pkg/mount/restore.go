package mount

import (
	"context"
	"encoding/json"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"time"

	"k8s.io/klog/v2"

	"github.com/s3-csi/s3-csi-driver/pkg/failpoint"
)

// The state directory is gone with a reboot, as the mounts are; the cache directory is not. Beside a mount's cache lies a
// copy of the mount's record, <cache>/<name>.json. With that of a client that may hold files which are not stored yet, the
// mount comes back as one that is ending, and what it was given is stored after all. The cache of another holds nothing
// that is not in S3, and is removed.

func (s store) keptRecord(name string) string { return s.cacheDir(name) + ".json" }

// keepRecord writes that copy: durably, so that it outlives a power cut, where files are lost without it.
func (s store) keepRecord(rec record, durably bool) error {
	b, err := json.Marshal(rec)
	if err != nil {
		return err
	}
	if durably {
		return writeDurably(s.keptRecord(rec.Name), b)
	}
	return writeFile(s.keptRecord(rec.Name), b)
}

// writeDurably is writeFile for what must be there after a power cut.
func writeDurably(file string, b []byte) error {
	tmp := file + temporary
	f, err := os.OpenFile(tmp, os.O_CREATE|os.O_TRUNC|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	_, err = f.Write(b)
	err = errors.Join(err, f.Sync(), f.Close())
	failpoint.Here("write.durable")
	if err == nil {
		err = os.Rename(tmp, file)
	}
	if err != nil {
		return err
	}
	dir, err := os.Open(filepath.Dir(file))
	if err != nil {
		return err
	}
	return errors.Join(dir.Sync(), dir.Close())
}

// restore brings back mounts that a reboot ended and that may hold files which were not stored, as keeps tells. It gives
// their names. The caches of the others are removed.
func (s store) restore(keeps func(record) bool) (names []string, err error) {
	entries, err := os.ReadDir(s.cache)
	if err != nil {
		return nil, err
	}
	for _, e := range entries {
		name, ok := strings.CutSuffix(e.Name(), ".json")
		if !ok || !validName(name) {
			continue
		}
		// A directory without the record is one that was not restored to the end.
		if _, err := os.Lstat(s.recordFile(name)); !errors.Is(err, fs.ErrNotExist) {
			continue
		}
		back, err := s.restoreOne(name, keeps)
		if err != nil {
			return names, err
		}
		if back {
			names = append(names, name)
		}
	}
	return names, nil
}

func (s store) restoreOne(name string, keeps func(record) bool) (bool, error) {
	var rec record
	if _, err := readJSON(s.keptRecord(name), &rec); err != nil && !errors.Is(err, errDamaged) {
		return false, err
	}
	uid, err := ownerOf(s.cacheDir(name))
	if err != nil {
		return false, err
	}
	if rec.Name != name || rec.UID != uid || uid == 0 {
		// Nothing is left to store, or nobody knows where to: the directory, if there is one, is reported and kept.
		return false, ignoreMissing(os.Remove(s.keptRecord(name)))
	}
	if !keeps(rec) {
		return false, errors.Join(os.RemoveAll(s.cacheDir(name)), ignoreMissing(os.Remove(s.keptRecord(name))))
	}
	rec.Phase, rec.Ending, rec.Minor, rec.OOMKills, rec.Superseded, rec.Former = phaseEnding, time.Now(), 0, 0, false, nil
	for _, dir := range []string{s.mountDir(name), s.sourceDir(name)} {
		if err := os.Mkdir(dir, modeClosed); err != nil && !errors.Is(err, fs.ErrExist) {
			return false, err
		}
	}
	if err := errors.Join(s.admit(name, int(uid)), s.makeHelperDir(name, int(uid))); err != nil {
		return false, err
	}
	failpoint.Here("restore.directories")
	return true, s.writeRecord(rec)
}

// restore is store.restore, told to the log.
func (m *Manager) restore(ctx context.Context) error {
	return m.do(ctx, func() error {
		names, err := m.store.restore(func(rec record) bool {
			cl, err := m.clientOf(rec.Client)
			return err != nil || keepsOnDisk(cl, rec.Spec)
		})
		for _, name := range names {
			klog.FromContext(ctx).Info("A mount did not come to its end, by a reboot for example: what it had left to store is stored now", "mount", name)
		}
		return err
	})
}
