package state

import (
	"errors"
	"fmt"
	"io/fs"
	"slices"
	"sync"
	"syscall"
)

// recordCache keeps the records of a directory that were read, so that a publication on a node with many mounts reads only the files
// that have changed. Records are replaced as a whole (writeRecord), so a changed one has another inode. This driver forgets those that it
// writes: a file system may give a third version the inode of the first.
type recordCache[T any] struct {
	clone func(T) T // callers may modify what they get

	mu        sync.Mutex
	known     map[string]cachedRecord[T] // by file
	forgotten uint64                     // how often a record was forgotten
}

type cachedRecord[T any] struct {
	version fileVersion
	record  T
}

// fileVersion identifies the content of a file.
type fileVersion struct {
	device, inode uint64
	size          int64
	modified      syscall.Timespec
}

func newRecordCache[T any](clone func(T) T) *recordCache[T] {
	return &recordCache[T]{clone: clone, known: map[string]cachedRecord[T]{}}
}

// read returns the record in a file of the state directory, and reads it if the file has changed.
func (c *recordCache[T]) read(s *Store, file string) (record T, ok bool, err error) {
	c.mu.Lock()
	cached, found := c.known[file]
	forgotten := c.forgotten
	c.mu.Unlock()
	// Before the content: if the file is replaced in between, it is read again the next time.
	version, err := s.versionOf(file)
	if errors.Is(err, fs.ErrNotExist) {
		c.forget(file)
		return record, false, nil
	}
	if err != nil {
		return record, false, err
	}
	if found && cached.version == version {
		return c.clone(cached.record), true, nil
	}
	if ok, err = s.readRecord(file, &record); ok && err == nil {
		c.keep(file, cachedRecord[T]{version, c.clone(record)}, forgotten)
	}
	return record, ok, err
}

// keep keeps a record, unless one was forgotten since: then it may be a version between two of one inode.
func (c *recordCache[T]) keep(file string, r cachedRecord[T], forgotten uint64) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.forgotten == forgotten {
		c.known[file] = r
	}
}

// forget forgets the record in a file.
func (c *recordCache[T]) forget(file string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.known, file)
	c.forgotten++
}

// prune forgets records that were removed, if there are many. present is how many there are.
func (c *recordCache[T]) prune(present int) {
	const spare = 100
	c.mu.Lock()
	defer c.mu.Unlock()
	if len(c.known) > present+spare {
		clear(c.known)
	}
}

func (s *Store) versionOf(file string) (v fileVersion, err error) {
	fi, err := s.root.Lstat(file)
	if err != nil {
		return v, s.located(err)
	}
	st, ok := fi.Sys().(*syscall.Stat_t)
	if !ok {
		return v, fmt.Errorf("%s: its version is unknown", file)
	}
	return fileVersion{st.Dev, st.Ino, st.Size, st.Mtim}, nil
}

// clone returns a copy that shares nothing that can be modified.
func (m Mount) clone() Mount {
	m.Spec.Options = slices.Clone(m.Spec.Options)
	for _, p := range []**uint32{&m.Spec.UID, &m.Spec.GID, &m.Spec.DirMode, &m.Spec.FileMode, &m.Spec.MountGroup} {
		*p = copied(*p)
	}
	m.Linger = copied(m.Linger)
	m.Predecessors = slices.Clone(m.Predecessors)
	m.Command.Argv, m.Command.Env = slices.Clone(m.Command.Argv), slices.Clone(m.Command.Env)
	m.Command.Ports, m.Command.Files = slices.Clone(m.Command.Ports), slices.Clone(m.Command.Files)
	return m
}

// clone returns a copy that shares nothing that can be modified.
func (p Publication) clone() Publication {
	p.MovedFrom = slices.Clone(p.MovedFrom)
	return p
}

// copied returns a pointer to a copy, nil for nil.
func copied[T any](p *T) *T {
	if p == nil {
		return nil
	}
	return new(*p)
}
