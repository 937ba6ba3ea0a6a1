package mount

import (
	"bytes"
	"crypto/rand"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"

	"github.com/s3-csi/s3-csi-driver/pkg/failpoint"
)

// store is the state directory. Its methods do plain file I/O and are called in the host's mount namespace.
//
//	mounts/<name>/mount.json    the record
//	mounts/<name>/helper.sock   the helper's socket
//	mounts/<name>/state         the helper's own directory, of the mount's uid, or a link to
//	scratch/<name>/             its file system
//	sources/<name>              the mount point
//	publications/<hash>.json    one for each target
//
// access.go has who may enter which of them.
type store struct {
	dir   string // --state-dir
	cache string // --cache-dir: <name>/ holds what a client keeps on disk
	// bounded: what mounts can write to in dir is limited, each in a file system of its own.
	bounded bool
}

func (s store) mountDir(name string) string   { return filepath.Join(s.dir, "mounts", name) }
func (s store) helperDir(name string) string  { return filepath.Join(s.mountDir(name), "state") }
func (s store) socket(name string) string     { return filepath.Join(s.mountDir(name), "helper.sock") }
func (s store) sourceDir(name string) string  { return filepath.Join(s.dir, "sources", name) }
func (s store) cacheDir(name string) string   { return filepath.Join(s.cache, name) }
func (s store) sources() string               { return filepath.Join(s.dir, "sources") }
func (s store) publications() string          { return filepath.Join(s.dir, "publications") }
func (s store) recordFile(name string) string { return filepath.Join(s.mountDir(name), "mount.json") }

func (s store) publicationFile(target string) string {
	sum := sha256.Sum256([]byte(target))
	return filepath.Join(s.publications(), hex.EncodeToString(sum[:16])+".json")
}

// clearTemporaries removes files that a driver was writing when it died. Nobody else may be writing.
func (s store) clearTemporaries() error {
	for _, dir := range []string{s.dir, s.publications(), s.cache} {
		entries, err := os.ReadDir(dir)
		if err != nil {
			return err
		}
		for _, e := range entries {
			if e.Type().IsRegular() && strings.HasSuffix(e.Name(), temporary) {
				if err := ignoreMissing(os.Remove(filepath.Join(dir, e.Name()))); err != nil {
					return err
				}
			}
		}
	}
	return nil
}

// salt is the node's random salt, made at first use. It outlives a reboot where the cache does: a mount that then still has
// something to store is found again by its key.
func (s store) salt() ([]byte, error) {
	files := []string{filepath.Join(s.dir, "salt"), filepath.Join(s.cache, "salt")}
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

// nextGeneration counts up for ever, across all keys. It skips numbers whose cache directory outlived a reboot. It begins
// anywhere: another driver, or another host that this one sees the processes of, may mount the very same volume, and what has
// its mount's name is not this driver's.
func (s store) nextGeneration(key string) (uint64, error) {
	file := filepath.Join(s.dir, "generation")
	var last uint64
	switch b, err := os.ReadFile(file); {
	case err == nil:
		if last, err = strconv.ParseUint(strings.TrimSpace(string(b)), 10, 63); err != nil {
			return 0, fmt.Errorf("%s does not hold a number: %w", file, err)
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
		_, err := os.Lstat(s.cacheDir(mountName(key, last)))
		if errors.Is(err, fs.ErrNotExist) {
			break
		}
		if err != nil {
			return 0, err
		}
	}
	return last, writeFile(file, []byte(strconv.FormatUint(last, 10)+"\n"))
}

func mountName(key string, generation uint64) string {
	return key + "-" + strconv.FormatUint(generation, 10)
}

// record reads one mount's record; ok is false when there is none. A record that cannot be read is an error: it is never
// taken for an absent one.
func (s store) record(name string) (r record, ok bool, err error) {
	ok, err = readJSON(s.recordFile(name), &r)
	if ok && r.Name != name {
		return r, false, fmt.Errorf("%s is %w: it describes another mount, %q", s.recordFile(name), errDamaged, r.Name)
	}
	return r, ok, err
}

func (s store) writeRecord(r record) error { return writeJSON(s.recordFile(r.Name), r) }

// owner is a mount's uid by its helper's directory, for a mount whose record is lost; 0: it has none, so no helper was ever
// started.
func (s store) owner(name string) (uint32, error) { return ownerOf(s.helperDir(name)) }

// ownerOf is the uid that a file belongs to; 0: there is none of that name.
func ownerOf(file string) (uint32, error) {
	fi, err := os.Lstat(file)
	if err != nil {
		return 0, ignoreMissing(err)
	}
	st, ok := fi.Sys().(*syscall.Stat_t)
	if !ok {
		return 0, fmt.Errorf("%s: its owner is not known", file)
	}
	return st.Uid, nil
}

// errDamaged is for a record that cannot be read: whose mount it was, only its name tells.
var errDamaged = errors.New("damaged")

// records reads all mounts' records. Directories without one are mounts whose maker died at once, or whose record somebody
// damaged.
func (s store) records() ([]record, error) { return s.recordsOf("") }

// recordsOf reads those of one key, and fails where one of them is damaged: its mount would be started twice. "" is all keys.
func (s store) recordsOf(key string) (records []record, err error) {
	entries, err := os.ReadDir(filepath.Join(s.dir, "mounts"))
	if err != nil {
		return nil, err
	}
	for _, e := range entries {
		if !validName(e.Name()) || key != "" && keyOf(e.Name()) != key {
			continue
		}
		r, ok, err := s.record(e.Name())
		if err != nil && (key != "" || !errors.Is(err, errDamaged)) {
			return nil, err
		}
		if ok && err == nil {
			records = append(records, r)
		}
	}
	return records, nil
}

// names are those of all mounts of which anything is there: a directory, a record, a mount point.
func (s store) names() ([]string, error) {
	var names []string
	for _, dir := range []string{filepath.Join(s.dir, "mounts"), s.sources()} {
		entries, err := os.ReadDir(dir)
		if err != nil {
			return nil, err
		}
		for _, e := range entries {
			if validName(e.Name()) && !slices.Contains(names, e.Name()) {
				names = append(names, e.Name())
			}
		}
	}
	return names, nil
}

// succeed makes the publications of those mounts whose successor a mount is its own. The file systems at their targets
// follow later.
func (s store) succeed(rec record) error {
	for _, former := range rec.Former {
		old, ok, err := s.record(former)
		if err != nil && !errors.Is(err, errDamaged) {
			return err
		}
		if ok && err == nil && !old.Superseded {
			old.Superseded = true
			if err := s.writeRecord(old); err != nil {
				return err
			}
			failpoint.Here("succeed.superseded")
		}
		pubs, err := s.publicationsOf(former)
		if err != nil {
			return err
		}
		for _, p := range pubs {
			p.Mount = rec.Name
			if err := s.writePublication(p); err != nil {
				return err
			}
			failpoint.Here("succeed.moved")
		}
	}
	return nil
}

// publicationsOf are those of one mount.
func (s store) publicationsOf(name string) ([]publication, error) {
	all, err := s.allPublications()
	return slices.DeleteFunc(all, func(p publication) bool { return p.Mount != name }), err
}

func (s store) publication(target string) (p publication, ok bool, err error) {
	file := s.publicationFile(target)
	ok, err = readJSON(file, &p)
	if ok && p.Target != target {
		return p, false, fmt.Errorf("%s describes another target, %q", file, p.Target)
	}
	return p, ok, err
}

func (s store) writePublication(p publication) error {
	return writeJSON(s.publicationFile(p.Target), p)
}

func (s store) removePublication(target string) error {
	return ignoreMissing(os.Remove(s.publicationFile(target)))
}

// allPublications reads the records of all targets.
func (s store) allPublications() ([]publication, error) {
	entries, err := os.ReadDir(s.publications())
	if err != nil {
		return nil, err
	}
	var all []publication
	for _, e := range entries {
		if !strings.HasSuffix(e.Name(), ".json") {
			continue
		}
		var p publication
		ok, err := readJSON(filepath.Join(s.publications(), e.Name()), &p)
		if err != nil {
			return nil, err
		}
		if ok {
			all = append(all, p)
		}
	}
	return all, nil
}

// leftCaches are the directories of the cache that belong to no mount: of mounts that a reboot ended, and what was kept.
// Those that are empty are removed.
func (s store) leftCaches() (dirs []string, err error) {
	entries, err := os.ReadDir(s.cache)
	if err != nil {
		return nil, err
	}
	for _, e := range entries {
		if !e.IsDir() {
			continue
		}
		// Of a mount that comes up now, the other directory is there first.
		if _, err := os.Lstat(s.mountDir(e.Name())); errors.Is(err, fs.ErrNotExist) && os.Remove(s.cacheDir(e.Name())) != nil {
			dirs = append(dirs, s.cacheDir(e.Name()))
		}
	}
	return dirs, nil
}

// keep moves a directory out of a mount's cache to one beside it and gives its path, "" where there is none. None of the
// mount's processes may be left.
func (s store) keep(name, dir string) (string, error) {
	from, to := filepath.Join(s.cacheDir(name), dir), filepath.Join(s.cache, keptPrefix+name)
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

func readJSON(file string, v any) (ok bool, err error) {
	b, err := os.ReadFile(file)
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	if err != nil {
		return false, err
	}
	if err := json.Unmarshal(b, v); err != nil {
		return false, fmt.Errorf("%s is %w: %w", file, errDamaged, err)
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

// temporary is the end of the names of files that are being written.
const temporary = ".tmp"

// writeFile replaces a file as a whole: a reader, or a driver that starts after a crash, sees the old or the new one. The
// state directory does not outlive the kernel, so nothing is synced.
func writeFile(file string, b []byte) error {
	tmp := file + temporary // one writer at a time: each file is written under its own lock
	if err := os.WriteFile(tmp, b, 0o600); err != nil {
		return err
	}
	failpoint.Here("write.temporary")
	return os.Rename(tmp, file)
}
