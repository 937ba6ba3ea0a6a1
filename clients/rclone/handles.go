package main

import (
	"sync"
	"syscall"

	"github.com/hanwen/go-fuse/v2/fuse"
)

// handles knows the open files of a FUSE file system.
//
// The kernel sends RELEASE in the background and drops what it has not sent when the file system is unmounted. A file
// whose RELEASE is lost would stay open, and open files are not uploaded. So what is still open when the connection has
// ended is released here.
type handles struct {
	fuse.RawFileSystem

	mu   sync.Mutex
	open map[handle]struct{}
}

type handle struct{ node, fh uint64 }

func newHandles(fs fuse.RawFileSystem) *handles {
	return &handles{RawFileSystem: fs, open: map[handle]struct{}{}}
}

func (h *handles) add(k handle) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.open[k] = struct{}{}
}

func (h *handles) remove(k handle) {
	h.mu.Lock()
	defer h.mu.Unlock()
	delete(h.open, k)
}

// Open opens a file.
func (h *handles) Open(cancel <-chan struct{}, in *fuse.OpenIn, out *fuse.OpenOut) fuse.Status {
	status := h.RawFileSystem.Open(cancel, in, out)
	if status.Ok() {
		h.add(handle{in.NodeId, out.Fh})
	}
	return status
}

// Create makes and opens a file.
func (h *handles) Create(cancel <-chan struct{}, in *fuse.CreateIn, name string, out *fuse.CreateOut) fuse.Status {
	status := h.RawFileSystem.Create(cancel, in, name, out)
	if status.Ok() {
		h.add(handle{out.NodeId, out.Fh})
	}
	return status
}

// Release closes a file. It is forgotten first: the number is free for another file as soon as it is closed.
func (h *handles) Release(cancel <-chan struct{}, in *fuse.ReleaseIn) {
	h.remove(handle{in.NodeId, in.Fh})
	h.RawFileSystem.Release(cancel, in)
}

// SetAttr changes a file's size or time.
//
// A size that is set by path, with no descriptor, is set with the file open all the same: of a file that is not open
// rclone knows only the object in S3, and while a newer version waits to be stored that is the wrong one, or none.
func (h *handles) SetAttr(cancel <-chan struct{}, in *fuse.SetAttrIn, out *fuse.AttrOut) fuse.Status {
	if in.Valid&fuse.FATTR_SIZE == 0 || in.Valid&fuse.FATTR_FH != 0 {
		return h.RawFileSystem.SetAttr(cancel, in, out)
	}
	var opened fuse.OpenOut
	if status := h.Open(cancel, &fuse.OpenIn{InHeader: in.InHeader, Flags: syscall.O_RDWR}, &opened); !status.Ok() {
		return status
	}
	status := h.RawFileSystem.SetAttr(cancel, in, out)
	h.Release(cancel, &fuse.ReleaseIn{InHeader: in.InHeader, Fh: opened.Fh})
	return status
}

// releaseAll closes what is open and says how much that was. No request may be under way any more.
func (h *handles) releaseAll() int {
	h.mu.Lock()
	left := h.open
	h.open = map[handle]struct{}{}
	h.mu.Unlock()
	for k := range left {
		in := &fuse.ReleaseIn{Fh: k.fh}
		in.NodeId = k.node
		h.RawFileSystem.Release(nil, in)
	}
	return len(left)
}
