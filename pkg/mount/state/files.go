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
	"sync/atomic"
	"syscall"
	"time"

	"github.com/s3-csi/s3-csi-driver/pkg/failpoint"
	"github.com/s3-csi/s3-csi-driver/pkg/mount"
	"github.com/s3-csi/s3-csi-driver/pkg/osfile"
)

// files is the state directory. Its methods do plain file I/O and must be called in the host's mount namespace.
//
//	mounts/<name>/mount.json    the record
//	mounts/<name>/helper.sock   the helper's socket
//	mounts/<name>/state         the helper's own directory, of the mount's uid, or a link to
//	scratch/<name>/             its file system
//	sources/<name>              the mount point
//	spares/<spare>/             see spares.go
//	publications/<hash>.json    one for each target
//	usage/<hash>.json           one for each volume whose usage is measured
//
// See access.go for their permissions.
type files struct {
	Paths
	// bounded: what mounts can write to in dir is limited, each in a file system of its own.
	bounded bool
	reads   *atomic.Int64 // of records; nil: they are not counted

	mounts       *recordCache[Mount] // nil: records are read every time
	publications *recordCache[Publication]
}

// clearTemporaries removes files that a driver was writing when it exited. There must be no other writer.
func (f files) clearTemporaries() error {
	for _, dir := range []string{f.Dir, f.publicationsDir(), f.usageDir(), f.Cache} {
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
func (f files) readSalt() ([]byte, error) {
	files := []string{filepath.Join(f.Dir, "salt"), filepath.Join(f.Cache, "salt")}
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

// nextGeneration counts up, across all keys. It skips numbers whose cache directory survived a reboot. It starts at a random number:
// another driver, or another host whose processes this one sees, may mount the same volume, and its mounts' names must differ.
func (f files) nextGeneration(key string) (uint64, error) {
	file := filepath.Join(f.Dir, "generation")
	var last uint64
	switch b, err := os.ReadFile(file); {
	case err == nil:
		if last, err = strconv.ParseUint(strings.TrimSpace(string(b)), 10, 63); err != nil {
			return 0, fmt.Errorf("%s does not contain a number: %w", file, err)
		}
	case errors.Is(err, fs.ErrNotExist):
		var start [4]byte
		_, _ = rand.Read(start[:]) // never fails (crypto/rand)
		last = uint64(binary.BigEndian.Uint32(start[:]))
	default:
		return 0, err
	}
	for {
		last++
		_, err := os.Lstat(f.CacheDir(mount.Name(key, last)))
		if errors.Is(err, fs.ErrNotExist) {
			break
		}
		if err != nil {
			return 0, err
		}
	}
	return last, writeFile(file, []byte(strconv.FormatUint(last, 10)+"\n"))
}

func (f files) record(name string) (r Mount, ok bool, err error) {
	r, ok, err = f.mounts.read(f, f.recordFile(name))
	if ok && r.Name != name {
		return r, false, fmt.Errorf("%s is %w: it describes another mount, %q", f.recordFile(name), ErrDamaged, r.Name)
	}
	return r, ok, err
}

func (f files) writeRecord(r Mount) error {
	file := f.recordFile(r.Name)
	defer f.mounts.forget(file)
	return writeJSON(file, r)
}

// owner returns a mount's uid by its helper's directory, for a mount whose record is lost; 0: no helper was ever started.
func (f files) owner(name string) (uint32, error) { return ownerOf(f.HelperDir(name)) }

// ownerOf returns the uid of a file's owner; 0: there is no such file.
func ownerOf(file string) (uint32, error) {
	fi, err := os.Lstat(file)
	if err != nil {
		return 0, ignoreMissing(err)
	}
	st, ok := fi.Sys().(*syscall.Stat_t)
	if !ok {
		return 0, fmt.Errorf("%s: its owner is unknown", file)
	}
	return st.Uid, nil
}

// ErrDamaged is the error of a record that cannot be read. Only its file's name identifies the mount.
var ErrDamaged = errors.New("damaged")

// recordsOf reads the records of the mounts with that key; "" is all keys. A directory without a readable record is of a driver that
// exited while it made the mount, or its record was damaged.
func (f files) recordsOf(key string) (records []Mount, err error) {
	entries, err := os.ReadDir(f.MountsDir())
	if err != nil {
		return nil, err
	}
	for _, e := range entries {
		if !mount.ValidName(e.Name()) || key != "" && mount.KeyOf(e.Name()) != key {
			continue
		}
		r, ok, err := f.record(e.Name())
		if err != nil && (key != "" || !errors.Is(err, ErrDamaged)) {
			return nil, err
		}
		if ok && err == nil {
			records = append(records, r)
		}
	}
	f.mounts.prune(len(entries))
	return records, nil
}

func (f files) names() ([]string, error) {
	var names []string
	seen := map[string]bool{}
	for _, dir := range []string{f.MountsDir(), f.SourcesDir()} {
		entries, err := os.ReadDir(dir)
		if err != nil {
			return nil, err
		}
		for _, e := range entries {
			if mount.ValidName(e.Name()) && !seen[e.Name()] {
				seen[e.Name()] = true
				names = append(names, e.Name())
			}
		}
	}
	return names, nil
}

func (f files) succeed(rec Mount) error {
	pubs := publicationFiles{f}
	for _, former := range rec.Predecessors {
		old, ok, err := f.record(former)
		if err != nil && !errors.Is(err, ErrDamaged) {
			return err
		}
		if ok && err == nil && !old.Superseded {
			old.Superseded = true
			if err := f.writeRecord(old); err != nil {
				return err
			}
			failpoint.Here("succeed.superseded")
		}
		moved, err := pubs.of(former)
		if err != nil {
			return err
		}
		for _, p := range moved {
			p.Mount = rec.Name
			if err := pubs.write(p); err != nil {
				return err
			}
			failpoint.Here("succeed.moved")
		}
	}
	return nil
}

// leftCaches is Store.OrphanedCaches. It removes the directories that are empty.
func (f files) leftCaches() (dirs []string, err error) {
	entries, err := os.ReadDir(f.Cache)
	if err != nil {
		return nil, err
	}
	for _, e := range entries {
		if !e.IsDir() || isSpare(e.Name()) {
			continue
		}
		// A mount that is being started has its other directory first.
		if _, err := os.Lstat(f.MountDir(e.Name())); errors.Is(err, fs.ErrNotExist) && os.Remove(f.CacheDir(e.Name())) != nil {
			dirs = append(dirs, f.CacheDir(e.Name()))
		}
	}
	return dirs, nil
}

func (f files) keep(name, dir string) (string, error) {
	from, to := filepath.Join(f.CacheDir(name), dir), filepath.Join(f.Cache, keptPrefix+name)
	if fi, err := os.Lstat(from); err != nil || !fi.IsDir() {
		return "", ignoreMissing(err)
	}
	// The client chose its mode, and every user may pass through the cache directory.
	if err := os.Chmod(from, modeClosed); err != nil {
		return "", err
	}
	return to, os.Rename(from, to)
}

func ignoreMissing(err error) error {
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return err
}

func (f files) readJSON(file string, v any) (ok bool, err error) {
	if f.reads != nil {
		f.reads.Add(1)
	}
	b, err := os.ReadFile(file)
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	if err != nil {
		return false, err
	}
	if err := json.Unmarshal(b, v); err != nil {
		return false, fmt.Errorf("%s is %w: %w", file, ErrDamaged, err)
	}
	return true, nil
}

func writeJSON(file string, v any) error {
	b, err := json.Marshal(v)
	if err != nil {
		return err
	}
	return writeFile(file, append(b, '\n'))
}

// writeFile replaces a file as a whole. The state directory does not outlive the kernel, so nothing is synced.
func writeFile(file string, b []byte) error {
	return osfile.Writer{BeforeRename: func() { failpoint.Here("write.temporary") }}.Write(file, b)
}

// writeDurably is writeFile for what must survive a power cut.
func writeDurably(file string, b []byte) error {
	return osfile.Writer{Durable: true, BeforeRename: func() { failpoint.Here("write.durable") }}.Write(file, b)
}

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
	if err := f.makeWritable(r); err != nil {
		return err
	}
	failpoint.Here("make.directories")
	return os.Mkdir(f.SourceDir(r.Name), modeClosed)
}

// makeWritable makes the directories that a mount's helper can write to, or takes those of its spare.
func (f files) makeWritable(r Mount) error {
	if r.Spare != "" {
		if err := f.takeScratch(r.Name, r.Spare, int(r.UID)); err != nil {
			return err
		}
		return f.takeCache(r.Name, r.Spare)
	}
	if err := f.makeHelperDir(r.Name, int(r.UID)); err != nil {
		return err
	}
	if err := os.Mkdir(f.CacheDir(r.Name), modeClosed); err != nil {
		return err
	}
	return os.Lchown(f.CacheDir(r.Name), int(r.UID), int(r.UID))
}

func (f files) remove(ctx context.Context, name string) error {
	if err := ignoreMissing(os.Remove(f.SourceDir(name))); err != nil {
		return err
	}
	failpoint.Here("remove.source")
	if err := errors.Join(ignoreMissing(os.Remove(f.keptRecord(name))), osfile.RemoveTree(ctx, f.CacheDir(name))); err != nil {
		return err
	}
	failpoint.Here("remove.cache")
	if err := f.removeScratch(ctx, name); err != nil {
		return err
	}
	entries, err := os.ReadDir(f.MountDir(name))
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	for _, e := range entries {
		if path := filepath.Join(f.MountDir(name), e.Name()); path != f.recordFile(name) {
			err = errors.Join(err, osfile.RemoveTree(ctx, path))
		}
	}
	if err != nil {
		return err
	}
	failpoint.Here("remove.files")
	return osfile.RemoveTree(ctx, f.MountDir(name))
}

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

func (f files) restore(ctx context.Context, keeps func(Mount) bool) (names []string, err error) {
	var errs []error
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
		restored, err := f.restoreOne(ctx, name, keeps)
		if err != nil { // one cache must not keep the others from being restored
			errs = append(errs, fmt.Errorf("mount %s: %w", name, err))
		}
		if restored {
			names = append(names, name)
		}
	}
	return names, errors.Join(errs...)
}

func (f files) restoreOne(ctx context.Context, name string, keeps func(Mount) bool) (bool, error) {
	var rec Mount
	if _, err := f.readJSON(f.keptRecord(name), &rec); err != nil && !errors.Is(err, ErrDamaged) {
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
		return false, errors.Join(osfile.RemoveTree(ctx, f.CacheDir(name)), ignoreMissing(os.Remove(f.keptRecord(name))))
	}
	rec.Phase, rec.Ending, rec.Minor, rec.OOMKills, rec.Superseded, rec.Predecessors, rec.Spare = Ending, time.Now(), 0, 0, false, nil, ""
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
