// Package state keeps the records of mounts and publications on disk, so that they survive a restart of the driver.
//
// The state directory is on a tmpfs, so it is gone with a reboot, as the mounts are. The cache directory is on a disk: files that
// clients have not stored yet outlive a reboot there, with a copy of their mounts' records.
//
// Records are read and written through a directory that was opened once in the host's mount namespace. What mounts, or touches the disk
// of the cache, which may hang, runs in that namespace and ends with its context. Only the record that a method names must be locked by
// the caller: writers of a mount's record, and of its publications, hold the lock of the mount's key.
package state

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/s3-csi/s3-csi-driver/pkg/conc"
	"github.com/s3-csi/s3-csi-driver/pkg/failpoint"
	"github.com/s3-csi/s3-csi-driver/pkg/fault"
	"github.com/s3-csi/s3-csi-driver/pkg/host"
	"github.com/s3-csi/s3-csi-driver/pkg/mount"
	"github.com/s3-csi/s3-csi-driver/pkg/osfile"
)

const (
	// maxDir keeps the helpers' socket paths within sockaddr_un's 107 bytes (unix(7)).
	maxDir    = 48
	lockBound = time.Second      // how long a lock may be held by a child that a killed driver was starting
	passBound = 10 * time.Second // for the file systems of the state and the cache directory to answer
)

// Store is the state directory and the cache directory of one driver. Its own methods are of mounts.
//
//	mounts/<name>/mount.json    the record
//	mounts/<name>/helper.sock   the helper's socket
//	mounts/<name>/state         the helper's own directory: a link to
//	scratch/<name>/             its file system
//	sources/<name>              the mount point
//	spares/<spare>/             see spares.go
//	publications/<hash>.json    one for each target
//	usage/<hash>.json           one for each volume whose usage is measured
//
// See paths.go for their permissions.
type Store struct {
	Paths
	Pubs   Publications
	Usages Usages

	ns           *host.Namespace
	root         *os.Root // the state directory
	salt         []byte
	held         locks
	reads        atomic.Int64 // of records
	mounts       *recordCache[Mount]
	publications *recordCache[Publication]
}

// newStore returns a store that is not open yet.
func newStore(ns *host.Namespace, paths Paths) *Store {
	s := &Store{Paths: paths, ns: ns, mounts: newRecordCache(Mount.clone), publications: newRecordCache(Publication.clone)}
	s.Pubs, s.Usages = Publications{s, &conc.Reader[[]Publication]{}}, Usages{s}
	return s
}

// Open prepares the directories and locks them. It fails if another driver uses them. uid is one of those
// that mounts get: it must be able to pass the directories.
func Open(ctx context.Context, ns *host.Namespace, paths Paths, uid uint32) (*Store, error) {
	switch {
	case !filepath.IsAbs(paths.Dir) || len(paths.Dir) > maxDir:
		return nil, fmt.Errorf("--state-dir %q: it must be an absolute path of at most %d bytes", paths.Dir, maxDir)
	case !filepath.IsAbs(paths.Cache):
		return nil, fmt.Errorf("--cache-dir %q: it must be an absolute path", paths.Cache)
	}
	s, err := host.Call(ctx, ns, "preparing "+paths.Dir, func(s *Store) { s.Close() }, func() (*Store, error) {
		s := newStore(ns, paths)
		return s, s.open()
	})
	if err != nil {
		return nil, fmt.Errorf("preparing the state directory %s: %w", paths.Dir, err)
	}
	pctx, cancel := context.WithTimeout(ctx, passBound)
	defer cancel()
	for _, d := range []struct{ flag, dir string }{{"--state-dir", s.MountsDir()}, {"--cache-dir", s.Cache}} {
		if err := ns.Passable(pctx, d.dir, uid); err != nil {
			s.Close()
			return nil, fmt.Errorf("%s: %w", d.flag, err)
		}
	}
	return s, nil
}

// Close releases the locks and closes the state directory.
func (s *Store) Close() error {
	err := s.held.Close()
	if s.root != nil {
		err = errors.Join(err, s.root.Close())
	}
	return err
}

// Reads returns the number of records of mounts and publications that were read, for tests of what a reconcile pass costs.
func (s *Store) Reads() int { return int(s.reads.Load()) }

// Salt is the node's random salt. It outlives a reboot if the cache directory does.
func (s *Store) Salt() []byte { return bytes.Clone(s.salt) }

// open prepares, opens and locks the directories. Call it inside Do.
func (s *Store) open() (err error) {
	if err := s.prepare(); err != nil {
		return err
	}
	// The mount table shows paths without symbolic links.
	if s.Dir, err = filepath.EvalSymlinks(s.Dir); err != nil {
		return err
	}
	if len(s.Dir) > maxDir {
		return fmt.Errorf("its path without symbolic links, %s, is longer than %d bytes", s.Dir, maxDir)
	}
	if s.Cache, err = filepath.EvalSymlinks(s.Cache); err != nil {
		return err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, s.Close())
		}
	}()
	if s.held, err = s.lockDirs(); err != nil {
		return err
	}
	if s.root, err = os.OpenRoot(s.Dir); err != nil {
		return err
	}
	if err := s.clearTemporaries(); err != nil {
		return err
	}
	if s.salt, err = s.readSalt(); err != nil {
		return err
	}
	for _, dir := range []string{s.SourcesDir(), s.scratch()} {
		if err := host.SharedMountpoint(dir); err != nil {
			return err
		}
	}
	return nil
}

// do runs fn in the host's mount namespace until ctx ends: fn mounts, or uses the cache directory.
func (s *Store) do(ctx context.Context, fn func() error) error {
	return noSpace(s.ns.Do(ctx, "reading or writing "+s.Dir, fn))
}

// get is do for a function with a result.
func get[T any](ctx context.Context, s *Store, fn func() (T, error)) (T, error) {
	v, err := host.Call(ctx, s.ns, "reading "+s.Dir, nil, fn)
	return v, noSpace(err)
}

// noSpace adds to the error of a full disk what to do. Other errors are returned as they are.
func noSpace(err error) error {
	if !errors.Is(err, unix.ENOSPC) && !errors.Is(err, unix.EDQUOT) {
		return err
	}
	return fault.See("docs/reference/errors.md#publishing-clients-and-the-node",
		fault.Errorf(fault.Exhausted, "%w; free space on that file system of the node", err))
}

// readDir returns the names in one of the state directory's directories.
func (s *Store) readDir(dir string) ([]string, error) {
	f, err := s.root.Open(dir)
	if err != nil {
		return nil, s.located(err)
	}
	defer f.Close()
	return f.Readdirnames(-1)
}

// readRecord reads a record in the state directory. One that cannot be parsed is ErrDamaged.
func (s *Store) readRecord(file string, record any) (ok bool, err error) {
	s.reads.Add(1)
	b, err := s.root.ReadFile(file)
	if err != nil {
		return false, ignoreMissing(s.located(err))
	}
	err = decode(filepath.Join(s.Dir, file), b, record)
	return err == nil, err
}

func decode(file string, content []byte, record any) error {
	if err := json.Unmarshal(content, record); err != nil {
		return fmt.Errorf("%s is %w: %w", file, ErrDamaged, err)
	}
	return nil
}

// writeRecord replaces a record in the state directory. That does not outlive the kernel, so nothing is synced.
func (s *Store) writeRecord(file string, record any) error {
	b, err := json.Marshal(record)
	if err != nil {
		return err
	}
	w := osfile.Writer{Root: s.root, BeforeRename: func() { failpoint.Here("write.temporary") }}
	return noSpace(s.located(w.Write(file, append(b, '\n'))))
}

// removeRecord removes a record in the state directory. It can be repeated.
func (s *Store) removeRecord(file string) error { return ignoreMissing(s.located(s.root.Remove(file))) }

// located adds the state directory to an error that has a path below it.
func (s *Store) located(err error) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf("%s: %w", s.Dir, err)
}

// CacheFree returns how many bytes clients can still write to the cache directory.
func (s *Store) CacheFree(ctx context.Context) (uint64, error) {
	st, err := s.ns.Statfs(ctx, s.Cache)
	return st.Bavail * uint64(st.Bsize), err
}

func ignoreMissing(err error) error {
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return err
}

// exists reports whether the state directory has a file. One that cannot be looked at may exist.
func (s *Store) exists(file string) bool {
	_, err := s.root.Lstat(file)
	return !errors.Is(err, fs.ErrNotExist)
}

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

// Mount returns a mount's record; ok is false if there is none. A record that cannot be read is ErrDamaged, never absent.
func (s *Store) Mount(_ context.Context, name string) (m Mount, ok bool, err error) {
	file := recordFile(name)
	m, ok, err = s.mounts.read(s, file)
	if ok && m.Name != name {
		return m, false, fmt.Errorf("%s is %w: it describes another mount, %q", filepath.Join(s.Dir, file), ErrDamaged, m.Name)
	}
	return m, ok, err
}

// MountOrRemains returns a mount's record. If that is lost, it returns the name, the key and, by the owner of the mount's directory,
// the uid; the uid is 0 if no helper was ever started.
func (s *Store) MountOrRemains(ctx context.Context, name string) (Mount, error) {
	m, ok, err := s.Mount(ctx, name)
	if err == nil && !ok || errors.Is(err, ErrDamaged) {
		m = Mount{Name: name, Key: mount.KeyOf(name)}
		m.UID, err = get(ctx, s, func() (uint32, error) { return ownerOf(s.HelperDir(name)) })
	}
	return m, err
}

// Mounts returns the readable records of all mounts. A directory without one is of a driver that exited while it made the mount, or the
// record was damaged.
func (s *Store) Mounts(ctx context.Context) ([]Mount, error) { return s.recordsOf(ctx, "") }

// MountsOf returns the records of the mounts with that key. One that cannot be read is an error: its mount would be started twice.
func (s *Store) MountsOf(ctx context.Context, key string) ([]Mount, error) {
	return s.recordsOf(ctx, key)
}

func (s *Store) recordsOf(ctx context.Context, key string) (records []Mount, err error) {
	names, err := s.readDir(mountsDir)
	if err != nil {
		return nil, err
	}
	for _, name := range names {
		if !mount.ValidName(name) || key != "" && mount.KeyOf(name) != key {
			continue
		}
		m, ok, err := s.Mount(ctx, name)
		if err != nil && (key != "" || !errors.Is(err, ErrDamaged)) {
			return nil, err
		}
		if ok && err == nil {
			records = append(records, m)
		}
	}
	s.mounts.prune(len(names))
	return records, nil
}

// Names returns the names of all mounts of which anything exists: a directory, a record, a mount point.
func (s *Store) Names(context.Context) (names []string, err error) {
	seen := map[string]bool{}
	for _, dir := range []string{mountsDir, sourcesDir} {
		entries, err := s.readDir(dir)
		if err != nil {
			return nil, err
		}
		for _, name := range entries {
			if mount.ValidName(name) && !seen[name] {
				seen[name] = true
				names = append(names, name)
			}
		}
	}
	return names, nil
}

// Exists reports whether a mount's directory exists, as far as it can be read.
func (s *Store) Exists(_ context.Context, name string) bool {
	return s.exists(filepath.Join(mountsDir, name))
}

// Write writes a mount's record.
func (s *Store) Write(_ context.Context, m Mount) error {
	file := recordFile(m.Name)
	defer s.mounts.forget(file)
	return s.writeRecord(file, m)
}

// Supersede records that other mounts took over a mount's publications, so that no publication joins it.
func (s *Store) Supersede(ctx context.Context, m *Mount) error {
	if m.Superseded {
		return nil
	}
	m.Superseded = true
	return s.Write(ctx, *m)
}

// Mounted writes a mount's record with the device number of the file system on its source.
func (s *Store) Mounted(ctx context.Context, m Mount) (_ Mount, mounted bool, err error) {
	source, err := get(ctx, s, func() (host.PathState, error) { return host.Inspect(s.SourceDir(m.Name)) })
	if err != nil || !source.Mountpoint {
		return Mount{}, false, err
	}
	m.Minor = source.Minor
	return m, true, s.Write(ctx, m)
}
