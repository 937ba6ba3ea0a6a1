//go:build linux

package host

import (
	"bytes"
	"encoding/binary"
	"os"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// fakeFuse serves a few directories over /dev/fuse, with the smallest part of include/uapi/linux/fuse.h. It can become unresponsive
// without exiting.
type fakeFuse struct {
	source string
	cached uint64 // for how many seconds the kernel may keep attributes
	names  uint64 // and names
	mapped bool   // it lets itself be id-mapped

	mu     sync.Mutex
	nodes  []fakeNode // the first is the root, whose id is 1
	dev    *os.File
	hung   chan struct{} // closed: no further request is read, so that its caller can still be killed
	once   sync.Once
	done   chan struct{}
	served atomic.Int64
	// interrupted is the number of further requests that are answered with EINTR.
	interrupted atomic.Int64
	unanswered  map[uint32]bool // requests that are read, and never answered
}

// fakeSize is the size of every file of a fakeFuse.
const fakeSize = 4096

// fakeNode is a file or directory of a fakeFuse.
type fakeNode struct {
	parent uint64
	name   string
	mode   uint32
}

// fakeNodes are the files and directories of every fakeFuse.
func fakeNodes() []fakeNode {
	return []fakeNode{
		{0, "", unix.S_IFDIR | 0o755},
		{1, "sub", unix.S_IFDIR | 0o755},
		{2, "deep", unix.S_IFDIR | 0o755},
		{1, "file", unix.S_IFREG | 0o644},
		{1, "link", unix.S_IFLNK | 0o777}, // to "real"
		{1, "real", unix.S_IFDIR | 0o755},
		{6, "deep", unix.S_IFDIR | 0o755},
	}
}

// The supported operations.
const (
	opLookup     = 1
	opForget     = 2
	opGetattr    = 3
	opReadlink   = 5
	opMkdir      = 9
	opOpen       = 14
	opRead       = 15
	opWrite      = 16
	opStatfs     = 17
	opRelease    = 18
	opFlush      = 25
	opInit       = 26
	opOpendir    = 27
	opReaddir    = 28
	opReleasedir = 29
	opInterrupt  = 36
	opForgets    = 42
)

// mountFake mounts a served directory on dir through the calls under test.
func mountFake(t *testing.T, n *Namespace, dir, source string) *fakeFuse {
	t.Helper()
	return startFake(t, n, dir, &fakeFuse{source: source, nodes: fakeNodes()})
}

// startFake is mountFake for a prepared fakeFuse.
func startFake(t *testing.T, n *Namespace, dir string, f *fakeFuse) *fakeFuse {
	t.Helper()
	f.hung, f.done = make(chan struct{}), make(chan struct{})
	do(t, n, "mounting", func() error {
		fuse, err := OpenFuse()
		if err != nil {
			return err
		}
		defer fuse.Close()
		place, err := OpenDir(dir)
		if err != nil {
			return err
		}
		defer place.Close()
		if err := MountFuse(fuse, place, FuseMount{Source: f.source, UID: 65534, GID: 65533}); err != nil {
			return err
		}
		fd, err := unix.FcntlInt(fuse.Fd(), unix.F_DUPFD_CLOEXEC, 3)
		if err != nil {
			return err
		}
		// Non-blocking, so that Close ends a read and with it the connection.
		if err := unix.SetNonblock(fd, true); err != nil {
			return err
		}
		f.dev = os.NewFile(uintptr(fd), FuseDevice)
		return nil
	})
	go f.serve()
	t.Cleanup(f.exit)
	return f
}

// hang stops reading requests, so that further ones wait until the connection is aborted.
func (f *fakeFuse) hang() {
	f.once.Do(func() { close(f.hung) })
	_ = f.dev.SetReadDeadline(time.Now())
	<-f.done
}

// pause stops reading requests until resume. Requests in between wait.
func (f *fakeFuse) pause() { f.hang() }

// resume answers requests again, including those since pause.
func (f *fakeFuse) resume() {
	f.hung, f.done, f.once = make(chan struct{}), make(chan struct{}), sync.Once{}
	_ = f.dev.SetReadDeadline(time.Time{})
	go f.serve()
}

// exit closes the device, as the kernel does when a client is killed.
func (f *fakeFuse) exit() {
	_ = f.dev.Close()
	<-f.done
}

func (f *fakeFuse) serve() {
	defer close(f.done)
	buf := make([]byte, 1<<20+4096)
	for {
		select {
		case <-f.hung:
			return
		default:
		}
		n, err := f.dev.Read(buf)
		if err != nil || n < 40 {
			return // unmounted, aborted, closed or told to hang
		}
		f.served.Add(1)
		op, unique := binary.LittleEndian.Uint32(buf[4:]), binary.LittleEndian.Uint64(buf[8:])
		errno, body, silent := f.answer(op, binary.LittleEndian.Uint64(buf[16:]), buf[40:n])
		if silent {
			continue
		}
		out := binary.LittleEndian.AppendUint32(nil, uint32(16+len(body)))
		out = binary.LittleEndian.AppendUint32(out, uint32(-int32(errno)))
		out = append(binary.LittleEndian.AppendUint64(out, unique), body...)
		if _, err := f.dev.Write(out); err != nil {
			continue // the caller was interrupted
		}
	}
}

// answer returns the errno and body of an answer.
func (f *fakeFuse) answer(op uint32, node uint64, in []byte) (errno unix.Errno, body []byte, silent bool) {
	if f.unanswered[op] {
		return 0, nil, true
	}
	switch op {
	case opOpendir, opReaddir, opStatfs:
		if f.interrupted.Add(-1) >= 0 {
			return unix.EINTR, nil, false
		}
	}
	switch op {
	case opForget, opForgets, opInterrupt:
		return 0, nil, true
	case opInit:
		body = make([]byte, 64)
		binary.LittleEndian.PutUint32(body[0:], 7)
		binary.LittleEndian.PutUint32(body[4:], 31)
		copy(body[8:12], in[8:12])                     // max_readahead
		binary.LittleEndian.PutUint32(body[20:], 4096) // max_write
		if f.mapped {
			binary.LittleEndian.PutUint32(body[12:], 1<<30) // FUSE_INIT_EXT
			binary.LittleEndian.PutUint32(body[32:], 1<<8)  // FUSE_ALLOW_IDMAP
		}
		return 0, body, false
	case opGetattr: // fuse_attr_out
		body = make([]byte, 104)
		binary.LittleEndian.PutUint64(body, f.cached)
		f.attr(body[16:], node)
		return 0, body, false
	case opLookup:
		return f.lookup(node, string(bytes.TrimRight(in, "\x00")))
	case opReadlink:
		return 0, []byte("real"), false
	case opMkdir: // fuse_mkdir_in, then the name
		name := string(bytes.TrimRight(in[8:], "\x00"))
		f.mu.Lock()
		f.nodes = append(f.nodes, fakeNode{node, name, unix.S_IFDIR | 0o755})
		f.mu.Unlock()
		return f.lookup(node, name)
	case opStatfs: // fuse_kstatfs
		body = make([]byte, 80)
		binary.LittleEndian.PutUint64(body[0:], 1000)  // blocks
		binary.LittleEndian.PutUint32(body[40:], 4096) // bsize
		binary.LittleEndian.PutUint32(body[44:], 255)  // namelen
		binary.LittleEndian.PutUint32(body[48:], 4096) // frsize
		return 0, body, false
	case opOpendir, opOpen:
		return 0, make([]byte, 16), false
	case opRead:
		return 0, make([]byte, fakeSize), false
	case opReaddir, opRelease, opReleasedir:
		return 0, nil, false
	}
	return unix.ENOSYS, nil, false
}

// attr fills in a fuse_attr.
func (f *fakeFuse) attr(body []byte, node uint64) {
	f.mu.Lock()
	defer f.mu.Unlock()
	binary.LittleEndian.PutUint64(body, node)                      // ino
	binary.LittleEndian.PutUint64(body[8:], fakeSize)              // size
	binary.LittleEndian.PutUint32(body[60:], f.nodes[node-1].mode) // mode
	binary.LittleEndian.PutUint32(body[64:], 1)                    // nlink
}

// lookup answers with a fuse_entry_out.
func (f *fakeFuse) lookup(parent uint64, name string) (errno unix.Errno, body []byte, silent bool) {
	f.mu.Lock()
	i := slices.IndexFunc(f.nodes, func(node fakeNode) bool { return node.parent == parent && node.name == name })
	f.mu.Unlock()
	if i < 0 {
		return unix.ENOENT, nil, false
	}
	body = make([]byte, 128)
	binary.LittleEndian.PutUint64(body, uint64(i+1))   // nodeid
	binary.LittleEndian.PutUint64(body[16:], f.names)  // entry_valid
	binary.LittleEndian.PutUint64(body[24:], f.cached) // attr_valid
	f.attr(body[40:], uint64(i+1))
	return 0, body, false
}

// lose removes a file or directory from the file system.
func (f *fakeFuse) lose(name string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for i := range f.nodes {
		if f.nodes[i].name == name {
			f.nodes[i].parent = 0
		}
	}
}
