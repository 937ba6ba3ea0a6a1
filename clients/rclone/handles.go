package main

import (
	"sync"
	"syscall"

	"github.com/hanwen/go-fuse/v2/fuse"
)

// handles tracks the open files of a FUSE file system, and works around two limitations of rclone's VFS:
//
//   - The kernel sends RELEASE in the background and drops pending requests at unmount. rclone does not upload open files, so
//     releaseAll releases the remaining ones after the connection has ended.
//   - rclone fetches the missing parts of a changed file when the file is closed. If that fails, the error is lost, the file is
//     never uploaded and the change is discarded. So handles fetches a file before its first change, and the writer gets the error.
type handles struct {
	fuse.RawFileSystem

	// renaming, if not nil, is called with the last part of a file's new name, before and after it is renamed.
	renaming func(name string)
	// renames, if not nil, keeps uploads apart from renames.
	renames *renames

	mu   sync.Mutex
	open map[handle]*state
}

type handle struct{ node, fh uint64 }

// state is the state of an open file.
type state struct {
	mu    sync.Mutex
	whole bool // all of it is in the cache
}

func newHandles(fs fuse.RawFileSystem) *handles {
	return &handles{RawFileSystem: fs, open: map[handle]*state{}}
}

func (h *handles) add(k handle, s *state) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.open[k] = s
}

func (h *handles) get(k handle) *state {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.open[k]
}

func (h *handles) remove(k handle) {
	h.mu.Lock()
	defer h.mu.Unlock()
	delete(h.open, k)
}

// alsoReading returns the flags of an open file that fetch can read. The kernel has checked the caller's permissions.
func alsoReading(flags uint32) uint32 {
	if flags&syscall.O_ACCMODE == syscall.O_WRONLY {
		flags = flags&^syscall.O_ACCMODE | syscall.O_RDWR
	}
	return flags
}

func (h *handles) Open(cancel <-chan struct{}, in *fuse.OpenIn, out *fuse.OpenOut) fuse.Status {
	readable := *in
	readable.Flags = alsoReading(in.Flags)
	status := h.RawFileSystem.Open(cancel, &readable, out)
	if status.Ok() {
		h.add(handle{in.NodeId, out.Fh}, &state{whole: in.Flags&syscall.O_TRUNC != 0})
	}
	return status
}

func (h *handles) Create(cancel <-chan struct{}, in *fuse.CreateIn, name string, out *fuse.CreateOut) fuse.Status {
	readable := *in
	readable.Flags = alsoReading(in.Flags)
	status := h.RawFileSystem.Create(cancel, &readable, name, out)
	if status.Ok() {
		// Another writer may have created the file since the kernel's lookup, so it may not be empty.
		h.add(handle{out.NodeId, out.Fh}, &state{whole: in.Flags&syscall.O_TRUNC != 0})
	}
	return status
}

// Release closes a file. Its handle is removed first, because its number can be reused as soon as it is closed.
func (h *handles) Release(cancel <-chan struct{}, in *fuse.ReleaseIn) {
	h.remove(handle{in.NodeId, in.Fh})
	h.RawFileSystem.Release(cancel, in)
}

func (h *handles) Rename(cancel <-chan struct{}, in *fuse.RenameIn, oldName, newName string) fuse.Status {
	if h.renames != nil {
		defer h.renames.begin(oldName, newName)()
	}
	if h.renaming != nil {
		h.renaming(newName)
		defer h.renaming(newName)
	}
	return h.RawFileSystem.Rename(cancel, in, oldName, newName)
}

func (h *handles) Write(cancel <-chan struct{}, in *fuse.WriteIn, data []byte) (uint32, fuse.Status) {
	if status := h.fetch(cancel, in.InHeader, in.Fh); !status.Ok() {
		return 0, status
	}
	return h.RawFileSystem.Write(cancel, in, data)
}

// SetAttr changes a file's size or time.
//
// A size that is set by path is set with the file open: for a file that is not open, rclone uses the object in S3, which is
// outdated or absent while a newer version waits for its upload.
func (h *handles) SetAttr(cancel <-chan struct{}, in *fuse.SetAttrIn, out *fuse.AttrOut) fuse.Status {
	if in.Valid&fuse.FATTR_SIZE == 0 {
		return h.RawFileSystem.SetAttr(cancel, in, out)
	}
	fh := in.Fh
	if in.Valid&fuse.FATTR_FH == 0 {
		var opened fuse.OpenOut
		if status := h.Open(cancel, &fuse.OpenIn{InHeader: in.InHeader, Flags: syscall.O_RDWR}, &opened); !status.Ok() {
			return status
		}
		fh = opened.Fh
		defer h.Release(cancel, &fuse.ReleaseIn{InHeader: in.InHeader, Fh: fh})
	}
	if in.Size > 0 {
		if status := h.fetch(cancel, in.InHeader, fh); !status.Ok() {
			return status
		}
	}
	return h.RawFileSystem.SetAttr(cancel, in, out)
}

// fetchSize is the size of the reads that fetch a file, in bytes.
const fetchSize = 1 << 20

// fetch reads all of an open file into the cache, once.
func (h *handles) fetch(cancel <-chan struct{}, header fuse.InHeader, fh uint64) fuse.Status {
	s := h.get(handle{header.NodeId, fh})
	if s == nil {
		return fuse.EBADF
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.whole {
		return fuse.OK
	}
	var attr fuse.AttrOut
	if status := h.RawFileSystem.GetAttr(cancel, &fuse.GetAttrIn{InHeader: header}, &attr); !status.Ok() {
		return status
	}
	buf := make([]byte, fetchSize)
	for offset := uint64(0); ; {
		in := &fuse.ReadIn{InHeader: header, Fh: fh, Offset: offset, Size: fetchSize}
		result, status := h.RawFileSystem.Read(cancel, in, buf)
		if !status.Ok() {
			return status
		}
		got, status := result.Bytes(buf)
		n := len(got)
		result.Done()
		if !status.Ok() {
			return status
		}
		if n == 0 {
			if offset < attr.Size {
				return fuse.EIO // a short read must not truncate the file
			}
			s.whole = true
			return fuse.OK
		}
		offset += uint64(n)
	}
}

// releaseAll closes all open files and returns their number. No request may be in flight.
func (h *handles) releaseAll() int {
	h.mu.Lock()
	left := h.open
	h.open = map[handle]*state{}
	h.mu.Unlock()
	for k := range left {
		in := &fuse.ReleaseIn{Fh: k.fh}
		in.NodeId = k.node
		h.RawFileSystem.Release(nil, in)
	}
	return len(left)
}
