//go:build linux

package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/hanwen/go-fuse/v2/fs"
	"github.com/hanwen/go-fuse/v2/fuse"
)

// readAhead is how much a read gets at a time.
const readAhead = 8 << 20

// Create implements fs.NodeCreater.
func (n *node) Create(ctx context.Context, name string, flags, _ uint32, out *fuse.EntryOut) (*fs.Inode, fs.FileHandle, uint32, syscall.Errno) { //nolint:unparam // go-fuse's interface
	if flags&syscall.O_SYNC != 0 {
		return nil, nil, 0, syscall.EINVAL
	}
	if _, _, errno := n.look(ctx, name); errno != syscall.ENOENT {
		if errno == 0 {
			errno = syscall.EEXIST
		}
		return nil, nil, 0, errno
	}
	w, errno := n.tree.startWriting(ctx, n.key+name)
	if errno != 0 {
		return nil, nil, 0, errno
	}
	n.tree.attributes(&out.Attr, false, object{mtime: time.Now()})
	return n.child(ctx, name, false), w, 0, 0
}

// Open implements fs.NodeOpener. A file has one writer or any number of readers.
func (n *node) Open(ctx context.Context, flags uint32) (fs.FileHandle, uint32, syscall.Errno) { //nolint:unparam // go-fuse's interface
	t := n.tree
	if flags&syscall.O_SYNC != 0 {
		return nil, 0, syscall.EINVAL
	}
	t.mu.Lock()
	w := t.writing[n.key]
	t.mu.Unlock()
	if w != nil {
		if errno := w.takeOver(ctx); errno != 0 {
			return nil, 0, errno
		}
	}
	replace := flags&syscall.O_TRUNC != 0 && t.overwrite
	switch mode := flags & syscall.O_ACCMODE; {
	case mode == syscall.O_WRONLY && !replace:
		return nil, 0, syscall.EPERM
	case mode != syscall.O_RDONLY && replace:
		w, errno := t.startWriting(ctx, n.key)
		return w, 0, errno
	}
	o, err := t.store.head(ctx, n.key)
	if errors.Is(err, errAbsent) {
		return nil, 0, syscall.ENOENT
	} else if err != nil {
		return nil, 0, t.failed("open", n.key, err)
	}
	t.mu.Lock()
	t.reading[n.key]++
	t.mu.Unlock()
	return &reader{tree: t, key: n.key, object: o}, 0, 0
}

// reader is a file that is open for reading.
type reader struct {
	tree   *tree
	key    string
	object object

	mu    sync.Mutex
	data  []byte // the last part that was read
	start int64  // where it begins
}

// Read implements fs.FileReader.
func (r *reader) Read(ctx context.Context, dest []byte, off int64) (fuse.ReadResult, syscall.Errno) {
	r.mu.Lock()
	defer r.mu.Unlock()
	end := min(off+int64(len(dest)), r.object.size)
	if off >= end {
		return fuse.ReadResultData(nil), 0
	}
	if off < r.start || end > r.start+int64(len(r.data)) {
		data, err := r.tree.store.read(ctx, r.key, r.object.etag, off, min(max(readAhead, end-off), r.object.size-off))
		if err != nil {
			return nil, r.tree.failed("read", r.key, err)
		}
		if int64(len(data)) < end-off {
			return nil, r.tree.failed("read", r.key, fmt.Errorf("got %d bytes", len(data)))
		}
		r.data, r.start = data, off
	}
	return fuse.ReadResultData(bytes.Clone(r.data[off-r.start : end-r.start])), 0
}

// Write implements fs.FileWriter: a file opened for both without O_TRUNC can only be read.
func (r *reader) Write(context.Context, []byte, int64) (uint32, syscall.Errno) {
	return 0, syscall.EBADF
}

// Release implements fs.FileReleaser.
func (r *reader) Release(context.Context) syscall.Errno {
	r.tree.mu.Lock()
	defer r.tree.mu.Unlock()
	if r.tree.reading[r.key]--; r.tree.reading[r.key] == 0 {
		delete(r.tree.reading, r.key)
	}
	return 0
}

// writer is a file that is open for writing, or was and is not stored yet.
type writer struct {
	tree   *tree
	key    string
	opener uint32 // thread or process that opened it

	mu       sync.Mutex
	transfer transfer
	flushed  bool // closed at least once
	done     bool // stored, or failed for good
	errno    syscall.Errno
	mtime    time.Time
}

func (t *tree) startWriting(ctx context.Context, key string) (*writer, syscall.Errno) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.writing[key] != nil || t.reading[key] > 0 {
		return nil, syscall.EPERM
	}
	w := &writer{tree: t, key: key, opener: caller(ctx), transfer: transfer{store: t.store, key: key}, mtime: time.Now()}
	t.writing[key] = w
	return w, 0
}

func (w *writer) attributes() object {
	w.mu.Lock()
	defer w.mu.Unlock()
	return object{size: w.transfer.size, mtime: w.mtime}
}

// Write implements fs.FileWriter: bytes come one after the other.
func (w *writer) Write(ctx context.Context, data []byte, off int64) (uint32, syscall.Errno) {
	w.mu.Lock()
	defer w.mu.Unlock()
	switch {
	case w.errno != 0:
		return 0, w.errno
	case w.done:
		return 0, syscall.EIO
	case off != w.transfer.size:
		w.errno = syscall.EINVAL
	}
	w.flushed = false
	if w.errno == 0 {
		if err := w.transfer.write(context.WithoutCancel(ctx), data); err != nil {
			w.errno = w.tree.failed("write", w.key, err)
		}
	}
	if w.errno != 0 { // nothing of the file is kept
		w.done = true
		w.transfer.abort(context.WithoutCancel(ctx))
		w.tree.stored(w)
		return 0, w.errno
	}
	return uint32(len(data)), 0
}

// Read implements fs.FileReader.
func (w *writer) Read(context.Context, []byte, int64) (fuse.ReadResult, syscall.Errno) {
	return nil, syscall.EBADF
}

// Fsync implements fs.FileFsyncer: it stores the file and ends the writing.
func (w *writer) Fsync(ctx context.Context, _ uint32) syscall.Errno { return w.store(ctx) }

// Flush implements fs.FileFlusher: a close stores the file, unless nothing was written or somebody else closes it (a
// shell hands on what it opened).
func (w *writer) Flush(ctx context.Context) syscall.Errno {
	w.mu.Lock()
	w.flushed = true
	later := w.transfer.size == 0 || !sameProcess(w.opener, caller(ctx))
	w.mu.Unlock()
	if later {
		return 0
	}
	return w.store(ctx)
}

// Release implements fs.FileReleaser.
func (w *writer) Release(ctx context.Context) syscall.Errno { return w.store(ctx) }

// takeOver stores a file that everybody closed, for somebody who opens it again.
func (w *writer) takeOver(ctx context.Context) syscall.Errno {
	w.mu.Lock()
	flushed := w.flushed
	w.mu.Unlock()
	if !flushed {
		return syscall.EPERM
	}
	return w.store(ctx)
}

// store makes the object be there, once. A caller that goes away does not stop it.
func (w *writer) store(ctx context.Context) syscall.Errno {
	w.mu.Lock()
	defer w.mu.Unlock()
	if !w.done {
		w.done = true
		if err := w.transfer.complete(context.WithoutCancel(ctx)); err != nil {
			w.errno = w.tree.failed("upload", w.key, err)
			w.transfer.abort(context.WithoutCancel(ctx))
		}
		w.tree.stored(w)
	}
	return w.errno
}

// stored forgets what the bucket knows now, or never will: the file, and with it the directories above it.
func (t *tree) stored(w *writer) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.writing[w.key] == w {
		delete(t.writing, w.key)
	}
	if w.errno == 0 {
		for dir := range t.dirs {
			if strings.HasPrefix(w.key, dir) {
				delete(t.dirs, dir)
			}
		}
	}
}

func caller(ctx context.Context) uint32 {
	if c, ok := fuse.FromContext(ctx); ok {
		return c.Pid
	}
	return 0
}

// sameProcess tells whether two threads are of one process.
func sameProcess(a, b uint32) bool { return a == b || leader(a) != 0 && leader(a) == leader(b) }

func leader(thread uint32) uint32 {
	status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", thread))
	if err != nil {
		return 0
	}
	var pid uint32
	for line := range strings.Lines(string(status)) {
		if _, err := fmt.Sscanf(line, "Tgid: %d", &pid); err == nil {
			return pid
		}
	}
	return 0
}
