// Package state keeps the records of mounts and publications on disk, so that they survive a restart of the driver.
//
// The state directory is on a tmpfs, so it is gone with a reboot, as the mounts are. The cache directory is on a disk: files that
// clients have not stored yet outlive a reboot there, with a copy of their mounts' records.
//
// A Store's methods enter the host's mount namespace by themselves. They do plain file I/O, with nothing but the record that
// they name locked by the caller: writers of a mount's record, and of its publications, hold the lock of the mount's key.
package state

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/s3-csi/s3-csi-driver/pkg/fault"
	"github.com/s3-csi/s3-csi-driver/pkg/host"
	"github.com/s3-csi/s3-csi-driver/pkg/mount"
)

const (
	// maxDir keeps the helpers' socket paths within sockaddr_un's 107 bytes (unix(7)).
	maxDir    = 48
	lockBound = time.Second      // how long a lock may be held by a child that a killed driver was starting
	passBound = 10 * time.Second // for the file systems of the state and the cache directory to answer
	readBound = 30 * time.Second // for a read of all publications, which several callers may share
)

// Store is the state directory and the cache directory of one driver. Its own methods are of mounts.
type Store struct {
	base
	Pubs   Publications
	Spares Spares
	Usages Usages
	salt   []byte
	held   locks
}

// base is shared by the parts of a Store.
type base struct {
	files
	ns *host.Namespace
}

// Open prepares the directories and locks them. It fails if another driver uses them. uid is one of those
// that mounts get: it must be able to pass the directories.
func Open(ctx context.Context, ns *host.Namespace, dir, cache string, uid uint32) (*Store, error) {
	switch {
	case !filepath.IsAbs(dir) || len(dir) > maxDir:
		return nil, fmt.Errorf("--state-dir %q: it must be an absolute path of at most %d bytes", dir, maxDir)
	case !filepath.IsAbs(cache):
		return nil, fmt.Errorf("--cache-dir %q: it must be an absolute path", cache)
	}
	s := &Store{base: base{files{Paths: Paths{Dir: dir, Cache: cache}, reads: &atomic.Int64{},
		mounts: newRecordCache(Mount.clone), publications: newRecordCache(Publication.clone)}, ns}}
	held, err := host.Call(ctx, ns, "preparing "+dir, func(l locks) { l.Close() }, s.open)
	if err != nil {
		return nil, fmt.Errorf("preparing the state directory %s: %w", dir, err)
	}
	s.held, s.Pubs, s.Spares, s.Usages = held, newPublications(s.base), Spares{s.base}, Usages{s.base}
	pctx, cancel := context.WithTimeout(ctx, passBound)
	defer cancel()
	for _, d := range []struct{ flag, dir string }{{"--state-dir", s.MountsDir()}, {"--cache-dir", s.Cache}} {
		if err := ns.Passable(pctx, d.dir, uid); err != nil {
			held.Close()
			return nil, fmt.Errorf("%s: %w", d.flag, err)
		}
	}
	return s, nil
}

// Close releases the locks.
func (s *Store) Close() error { return s.held.Close() }

// Reads returns the number of records of mounts and publications that were read, for tests of what a reconcile pass costs.
func (s *Store) Reads() int { return int(s.reads.Load()) }

// Salt is the node's random salt. It outlives a reboot if the cache directory does.
func (s *Store) Salt() []byte { return bytes.Clone(s.salt) }

func (s *Store) open() (_ locks, err error) {
	if err := s.prepare(); err != nil {
		return nil, err
	}
	// The mount table shows paths without symbolic links.
	if s.Dir, err = filepath.EvalSymlinks(s.Dir); err != nil {
		return nil, err
	}
	if len(s.Dir) > maxDir {
		return nil, fmt.Errorf("its path without symbolic links, %s, is longer than %d bytes", s.Dir, maxDir)
	}
	if s.Cache, err = filepath.EvalSymlinks(s.Cache); err != nil {
		return nil, err
	}
	s.bounded = true
	held, err := s.lockDirs()
	if err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			held.Close()
		}
	}()
	if err := s.clearTemporaries(); err != nil {
		return nil, err
	}
	if s.salt, err = s.readSalt(); err != nil {
		return nil, err
	}
	for _, dir := range []string{s.SourcesDir(), s.scratch()} {
		if err := host.SharedMountpoint(dir); err != nil {
			return nil, err
		}
	}
	return held, nil
}

// do runs plain file I/O in the host's mount namespace.
func (s base) do(ctx context.Context, fn func() error) error {
	return noSpace(s.ns.Do(ctx, "reading or writing "+s.Dir, fn))
}

// noSpace adds to the error of a full disk what to do. Other errors are returned as they are.
func noSpace(err error) error {
	if !errors.Is(err, unix.ENOSPC) && !errors.Is(err, unix.EDQUOT) {
		return err
	}
	return fault.See("docs/reference/errors.md#publishing-clients-and-the-node", fault.Errorf(fault.Exhausted, "%w; free space on that file system of the node", err))
}

// CacheFree returns how many bytes clients can still write to the cache directory.
func (s *Store) CacheFree(ctx context.Context) (uint64, error) {
	st, err := s.ns.Statfs(ctx, s.Cache)
	return st.Bavail * uint64(st.Bsize), err
}

func get[T any](ctx context.Context, s base, fn func() (T, error)) (T, error) {
	v, err := host.Call(ctx, s.ns, "reading "+s.Dir, nil, fn)
	return v, noSpace(err)
}

// find is get for something that may not exist.
func find[T any](ctx context.Context, s base, fn func() (T, bool, error)) (T, bool, error) {
	type found struct {
		v  T
		ok bool
	}
	f, err := get(ctx, s, func() (f found, err error) { f.v, f.ok, err = fn(); return f, err })
	return f.v, f.ok, err
}

// Mount returns a mount's record; ok is false if there is none. A record that cannot be read is ErrDamaged, never absent.
func (s *Store) Mount(ctx context.Context, name string) (m Mount, ok bool, err error) {
	return find(ctx, s.base, func() (Mount, bool, error) { return s.record(name) })
}

// MountOrRemains returns a mount's record. If that is lost, it returns the name, the key and, by the owner of the mount's directory,
// the uid; the uid is 0 if no helper was ever started.
func (s *Store) MountOrRemains(ctx context.Context, name string) (Mount, error) {
	return get(ctx, s.base, func() (Mount, error) {
		m, ok, err := s.record(name)
		if err == nil && !ok || errors.Is(err, ErrDamaged) {
			m = Mount{Name: name, Key: mount.KeyOf(name)}
			m.UID, err = s.owner(name)
		}
		return m, err
	})
}

// Mounts returns the readable records of all mounts.
func (s *Store) Mounts(ctx context.Context) ([]Mount, error) {
	return get(ctx, s.base, func() ([]Mount, error) { return s.recordsOf("") })
}

// MountsOf returns the records of the mounts with that key. One that cannot be read is an error: its mount would be started twice.
func (s *Store) MountsOf(ctx context.Context, key string) ([]Mount, error) {
	return get(ctx, s.base, func() ([]Mount, error) { return s.recordsOf(key) })
}

// Names returns the names of all mounts of which anything exists: a directory, a record, a mount point.
func (s *Store) Names(ctx context.Context) ([]string, error) { return get(ctx, s.base, s.names) }

// Exists reports whether a mount's directory exists, as far as it can be read.
func (s *Store) Exists(ctx context.Context, name string) bool {
	exists, err := get(ctx, s.base, func() (bool, error) { return exists(s.MountDir(name)) })
	return err != nil || exists
}

// CacheExists reports whether a mount's cache directory exists. It is the first directory that Remove removes.
func (s *Store) CacheExists(ctx context.Context, name string) (bool, error) {
	return get(ctx, s.base, func() (bool, error) { return exists(s.CacheDir(name)) })
}

func exists(path string) (bool, error) {
	_, err := os.Lstat(path)
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	return err == nil, err
}

// Write writes a mount's record.
func (s *Store) Write(ctx context.Context, m Mount) error {
	return s.do(ctx, func() error { return s.writeRecord(m) })
}

// Supersede records that other mounts took over a mount's publications, so that no publication joins it.
func (s *Store) Supersede(ctx context.Context, m *Mount) error {
	if m.Superseded {
		return nil
	}
	m.Superseded = true
	return s.Write(ctx, *m)
}

// WriteBoth writes a mount's record and its copy in the cache directory, which outlives a power cut.
func (s *Store) WriteBoth(ctx context.Context, m Mount) error {
	return s.do(ctx, func() error {
		if err := s.keepRecord(m, true); err != nil {
			return err
		}
		return s.writeRecord(m)
	})
}

// WriteCopy writes the copy of a mount's record in the cache directory; durably: so that it outlives a power cut.
func (s *Store) WriteCopy(ctx context.Context, m Mount, durably bool) error {
	return s.do(ctx, func() error { return s.keepRecord(m, durably) })
}

// Mounted writes a mount's record with the device number of the file system on its source.
func (s *Store) Mounted(ctx context.Context, m Mount) (Mount, bool, error) {
	return find(ctx, s.base, func() (Mount, bool, error) {
		source, err := host.Inspect(s.SourceDir(m.Name))
		if err != nil || !source.Mountpoint {
			return Mount{}, false, err
		}
		m.Minor = source.Minor
		return m, true, s.writeRecord(m)
	})
}

// NextGeneration returns a number for a new mount with that key. It is larger than all before it, across all keys.
func (s *Store) NextGeneration(ctx context.Context, key string) (uint64, error) {
	return get(ctx, s.base, func() (uint64, error) { return s.nextGeneration(key) })
}

// UIDs returns the uids in use: of mounts, and of caches that outlived a reboot.
func (s *Store) UIDs(ctx context.Context) (map[uint32]bool, error) { return get(ctx, s.base, s.uids) }

// Make makes a mount's directories and its record.
func (s *Store) Make(ctx context.Context, m Mount) error {
	return s.do(ctx, func() error { return s.make(m) })
}

// RestoreHelperDir mounts the file system of a mount's HelperDir again if it was unmounted.
func (s *Store) RestoreHelperDir(ctx context.Context, m Mount) error {
	return s.do(ctx, func() error { return s.remountHelperDir(m.Name, int(m.UID)) })
}

// WriteCA writes a mount's CAFile, readable by the client.
func (s *Store) WriteCA(ctx context.Context, name, certificates string) error {
	return s.do(ctx, func() error { return os.WriteFile(s.CAFile(name), []byte(certificates), 0o644) })
}

// Remove removes a mount's directories, its record last. Nothing may be mounted on its source, and none of its processes may be left.
func (s *Store) Remove(ctx context.Context, name string) error {
	return s.do(ctx, func() error { return s.remove(ctx, name) })
}

// Keep moves a directory out of a mount's cache to a directory beside it and returns that one's path; "" if there is nothing to
// keep. None of the mount's processes may be left.
func (s *Store) Keep(ctx context.Context, name, dir string) (path string, err error) {
	return get(ctx, s.base, func() (string, error) { return s.keep(name, dir) })
}

// RemoveOrphans removes the file systems of mounts that are gone.
func (s *Store) RemoveOrphans(ctx context.Context) error {
	return s.do(ctx, func() error { return s.clearScratch(ctx) })
}

// OrphanedCaches returns the directories of the cache that belong to no mount and are not empty.
func (s *Store) OrphanedCaches(ctx context.Context) ([]string, error) {
	return get(ctx, s.base, s.leftCaches)
}

// Restore restores the mounts that a reboot ended and that may have pending uploads, as keeps reports, in phase
// Ending. It returns their names, also with an error. The caches of the others are removed.
func (s *Store) Restore(ctx context.Context, keeps func(Mount) bool) (names []string, err error) {
	type restored struct {
		names []string
		err   error
	}
	v, err := get(ctx, s.base, func() (restored, error) {
		names, err := s.restore(ctx, keeps)
		return restored{names, err}, nil
	})
	return v.names, errors.Join(err, v.err)
}
