package state

import (
	"bytes"
	"context"
	"crypto/rand"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/s3-csi/s3-csi-driver/pkg/failpoint"
	"github.com/s3-csi/s3-csi-driver/pkg/mount"
	"github.com/s3-csi/s3-csi-driver/pkg/osfile"
)

// clearTemporaries removes files that a driver was writing when it exited. There must be no other writer.
func (s *Store) clearTemporaries() error {
	for _, dir := range []string{s.Dir, s.publicationsDir(), s.usageDir(), s.Cache} {
		entries, err := os.ReadDir(dir)
		if err != nil {
			return err
		}
		for _, e := range entries {
			if e.Type().IsRegular() && strings.HasSuffix(e.Name(), osfile.TempSuffix) {
				if err := ignoreMissing(os.Remove(filepath.Join(dir, e.Name()))); err != nil {
					return err
				}
			}
		}
	}
	return nil
}

// readSalt returns the node's random salt, which is made at first use. It survives a reboot if the cache does: a mount that still has
// data to store is found by its key then.
func (s *Store) readSalt() ([]byte, error) {
	files := []string{filepath.Join(s.Dir, "salt"), filepath.Join(s.Cache, "salt")}
	var salt []byte
	for _, file := range files {
		b, err := os.ReadFile(file)
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return nil, err
		}
		if len(b) == 32 && salt == nil {
			salt = b
		}
	}
	if salt == nil {
		salt = make([]byte, 32)
		_, _ = rand.Read(salt) // never fails (crypto/rand)
	}
	for _, file := range files {
		if b, err := os.ReadFile(file); err == nil && bytes.Equal(b, salt) {
			continue
		}
		if err := writeDurably(file, salt); err != nil {
			return nil, err
		}
	}
	return salt, nil
}

// writeDurably replaces a file of the cache directory that must survive a power cut.
func writeDurably(file string, b []byte) error {
	return osfile.Writer{Durable: true, BeforeRename: func() { failpoint.Here("write.durable") }}.Write(file, b)
}

// NextGeneration returns a number for a new mount with that key. It is larger than all before it, across all keys.
func (s *Store) NextGeneration(ctx context.Context, key string) (uint64, error) {
	return get(ctx, s, func() (uint64, error) { return s.nextGeneration(key) })
}

// nextGeneration counts up, across all keys. It skips numbers whose cache directory survived a reboot. It starts at a random number:
// another driver, or another host whose processes this one sees, may mount the same volume, and its mounts' names must differ.
func (s *Store) nextGeneration(key string) (uint64, error) {
	const file = "generation"
	var last uint64
	switch b, err := s.root.ReadFile(file); {
	case err == nil:
		if last, err = strconv.ParseUint(strings.TrimSpace(string(b)), 10, 63); err != nil {
			return 0, fmt.Errorf("%s does not contain a number: %w", filepath.Join(s.Dir, file), err)
		}
	case errors.Is(err, fs.ErrNotExist):
		var start [4]byte
		_, _ = rand.Read(start[:]) // never fails (crypto/rand)
		last = uint64(binary.BigEndian.Uint32(start[:]))
	default:
		return 0, s.located(err)
	}
	for {
		last++
		_, err := os.Lstat(s.CacheDir(mount.Name(key, last)))
		if errors.Is(err, fs.ErrNotExist) {
			break
		}
		if err != nil {
			return 0, err
		}
	}
	return last, s.writeRecord(file, last)
}

// UIDs returns the uids in use, by the owners of the mounts' directories and of caches that survived a reboot: another mount's client
// must not read those. Records need not be read, because a mount's cache is made under the lock under which its uid is chosen.
func (s *Store) UIDs(ctx context.Context) (map[uint32]bool, error) {
	return get(ctx, s, func() (map[uint32]bool, error) {
		used := map[uint32]bool{}
		for dir, owned := range map[string]func(name string) string{s.MountsDir(): s.HelperDir, s.Cache: s.CacheDir} {
			entries, err := os.ReadDir(dir)
			if err != nil {
				return nil, err
			}
			for _, e := range entries {
				uid, err := ownerOf(owned(e.Name()))
				if err != nil {
					return nil, err
				}
				used[uid] = true
			}
		}
		return used, nil
	})
}

// Make makes a mount's directories and, first of all, its record, so that each directory can be attributed.
func (s *Store) Make(ctx context.Context, m Mount) error {
	return s.do(ctx, func() error {
		if err := os.Mkdir(s.MountDir(m.Name), modeClosed); err != nil {
			return err
		}
		failpoint.Here("make.directory")
		if err := s.Write(ctx, m); err != nil {
			return err
		}
		failpoint.Here("make.recorded")
		if err := s.admitGroup(m.Name, int(m.UID)); err != nil {
			return err
		}
		if err := s.makeWritable(m); err != nil {
			return err
		}
		failpoint.Here("make.directories")
		return os.Mkdir(s.SourceDir(m.Name), modeClosed)
	})
}

// makeWritable makes the directories that a mount's helper can write to, or takes those of its spare.
func (s *Store) makeWritable(m Mount) error {
	if m.Spare != "" {
		if err := s.takeScratch(m.Name, m.Spare, int(m.UID)); err != nil {
			return err
		}
		return s.takeCache(m.Name, m.Spare)
	}
	if err := s.makeHelperDir(m.Name, int(m.UID)); err != nil {
		return err
	}
	return s.makeCache(m.Name, int(m.UID))
}

func (s *Store) makeCache(name string, uid int) error {
	if err := os.Mkdir(s.CacheDir(name), modeClosed); err != nil {
		return err
	}
	return os.Lchown(s.CacheDir(name), uid, uid)
}

// WriteCA writes a mount's CAFile, readable by the client.
func (s *Store) WriteCA(_ context.Context, name, certificates string) error {
	return noSpace(s.located(s.root.WriteFile(filepath.Join(mountsDir, name, caName), []byte(certificates), 0o644)))
}

// Remove removes a mount's directories, its record last. Nothing may be mounted on its source, and none of its processes may be left.
func (s *Store) Remove(ctx context.Context, name string) error {
	return s.do(ctx, func() error { return s.remove(ctx, name) })
}

func (s *Store) remove(ctx context.Context, name string) error {
	if err := ignoreMissing(os.Remove(s.SourceDir(name))); err != nil {
		return err
	}
	failpoint.Here("remove.source")
	if err := errors.Join(ignoreMissing(os.Remove(s.keptRecord(name))), osfile.RemoveTree(ctx, s.CacheDir(name))); err != nil {
		return err
	}
	failpoint.Here("remove.cache")
	if err := s.removeScratch(ctx, name); err != nil {
		return err
	}
	entries, err := os.ReadDir(s.MountDir(name))
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	for _, e := range entries {
		if e.Name() != recordName {
			err = errors.Join(err, osfile.RemoveTree(ctx, filepath.Join(s.MountDir(name), e.Name())))
		}
	}
	if err != nil {
		return err
	}
	failpoint.Here("remove.files")
	return osfile.RemoveTree(ctx, s.MountDir(name))
}

// CacheExists reports whether a mount's cache directory exists. It is the first directory that Remove removes.
func (s *Store) CacheExists(ctx context.Context, name string) (bool, error) {
	return get(ctx, s, func() (bool, error) {
		_, err := os.Lstat(s.CacheDir(name))
		return err == nil, ignoreMissing(err)
	})
}

// OrphanedCaches returns the directories of the cache that belong to no mount and are not empty. It removes those that are empty.
func (s *Store) OrphanedCaches(ctx context.Context) ([]string, error) {
	return get(ctx, s, func() (dirs []string, err error) {
		entries, err := os.ReadDir(s.Cache)
		for _, e := range entries {
			if !e.IsDir() || isSpare(e.Name()) {
				continue
			}
			// A mount that is being started has its other directory first.
			if dir := s.CacheDir(e.Name()); !s.exists(filepath.Join(mountsDir, e.Name())) && os.Remove(dir) != nil {
				dirs = append(dirs, dir)
			}
		}
		return dirs, err
	})
}

// Keep moves a directory out of a mount's cache to a directory beside it and returns that one's path; "" if there is nothing to
// keep. None of the mount's processes may be left.
func (s *Store) Keep(ctx context.Context, name, dir string) (path string, err error) {
	return get(ctx, s, func() (string, error) {
		from, to := filepath.Join(s.CacheDir(name), dir), filepath.Join(s.Cache, keptPrefix+name)
		if fi, err := os.Lstat(from); err != nil || !fi.IsDir() {
			return "", ignoreMissing(err)
		}
		// The client chose its mode, and every user may pass through the cache directory.
		if err := os.Chmod(from, modeClosed); err != nil {
			return "", err
		}
		return to, os.Rename(from, to)
	})
}

// The state directory is gone after a reboot, as the mounts are; the cache directory is not. Beside a mount's cache is a copy of the
// mount's record, <cache>/<name>.json. If the client may hold files that are not stored yet, the copy restores the mount in phase
// Ending, so that they are stored after all. Any other cache holds nothing that is not in S3, and is removed.

// WriteCopy writes the copy of a mount's record in the cache directory. If durably is set, it outlives a power cut.
func (s *Store) WriteCopy(ctx context.Context, m Mount, durably bool) error {
	b, err := json.Marshal(m)
	if err != nil {
		return err
	}
	return s.do(ctx, func() error {
		if durably {
			return writeDurably(s.keptRecord(m.Name), b)
		}
		return osfile.Writer{BeforeRename: func() { failpoint.Here("write.temporary") }}.Write(s.keptRecord(m.Name), b)
	})
}

// WriteBoth writes a mount's record and its copy in the cache directory, which outlives a power cut.
func (s *Store) WriteBoth(ctx context.Context, m Mount) error {
	const durably = true
	if err := s.WriteCopy(ctx, m, durably); err != nil {
		return err
	}
	return s.Write(ctx, m)
}

// Restore restores the mounts that a reboot ended and that may have pending uploads, as keeps reports, in phase
// Ending. It returns their names, also with an error. The caches of the others are removed.
func (s *Store) Restore(ctx context.Context, keeps func(Mount) bool) (names []string, err error) {
	entries, err := get(ctx, s, func() ([]os.DirEntry, error) { return os.ReadDir(s.Cache) })
	var errs []error
	for _, e := range entries {
		name, ok := strings.CutSuffix(e.Name(), ".json")
		// A directory without the record is of a restore that was interrupted.
		if !ok || !mount.ValidName(name) || s.exists(recordFile(name)) {
			continue
		}
		restored, err := get(ctx, s, func() (bool, error) { return s.restore(ctx, name, keeps) })
		if err != nil { // one cache must not keep the others from being restored
			errs = append(errs, fmt.Errorf("mount %s: %w", name, err))
		}
		if restored {
			names = append(names, name)
		}
	}
	return names, errors.Join(append(errs, err)...)
}

func (s *Store) restore(ctx context.Context, name string, keeps func(Mount) bool) (bool, error) {
	var m Mount
	b, err := os.ReadFile(s.keptRecord(name))
	if err == nil {
		err = decode(s.keptRecord(name), b, &m)
	}
	if ignoreMissing(err) != nil && !errors.Is(err, ErrDamaged) {
		return false, err
	}
	uid, err := ownerOf(s.CacheDir(name))
	if err != nil {
		return false, err
	}
	if m.Name != name || m.UID != uid || uid == 0 {
		// Nothing is left to store, or it is unknown where to: a directory is reported and kept.
		return false, ignoreMissing(os.Remove(s.keptRecord(name)))
	}
	if !keeps(m) {
		return false, errors.Join(osfile.RemoveTree(ctx, s.CacheDir(name)), ignoreMissing(os.Remove(s.keptRecord(name))))
	}
	m.Phase, m.Ending, m.Minor, m.OOMKills, m.Superseded, m.Predecessors, m.Spare = Ending, time.Now(), 0, 0, false, nil, ""
	for _, dir := range []string{s.MountDir(name), s.SourceDir(name)} {
		if err := os.Mkdir(dir, modeClosed); err != nil && !errors.Is(err, fs.ErrExist) {
			return false, err
		}
	}
	if err := errors.Join(s.admitGroup(name, int(uid)), s.makeHelperDir(name, int(uid))); err != nil {
		return false, err
	}
	failpoint.Here("restore.directories")
	return true, s.Write(ctx, m)
}
