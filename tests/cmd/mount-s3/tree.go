//go:build linux

package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/hanwen/go-fuse/v2/fs"
	"github.com/hanwen/go-fuse/v2/fuse"
)

// tree is the file system. What the bucket does not know yet, new directories and files that are being written, is in
// maps by key.
type tree struct {
	store             *store
	remove, overwrite bool
	uid, gid          uint32
	dirMode, fileMode uint32
	started           time.Time

	mu      sync.Mutex
	dirs    map[string]bool    // keys that end in "/"
	writing map[string]*writer // by key
	reading map[string]int     // open for reading, by key
}

func newTree(s *store, a *arguments) *tree {
	t := &tree{
		store: s, remove: a.has("allow-delete"), overwrite: a.has("allow-overwrite"), started: time.Now(),
		uid: uint32(a.number("uid", uint64(os.Getuid()))), gid: uint32(a.number("gid", uint64(os.Getgid()))),
		dirMode: 0o755, fileMode: 0o644,
		dirs: map[string]bool{}, writing: map[string]*writer{}, reading: map[string]int{},
	}
	for name, to := range map[string]*uint32{"dir-mode": &t.dirMode, "file-mode": &t.fileMode} {
		if text := a.value(name); text != "" {
			_, _ = fmt.Sscanf(text, "%o", to)
		}
	}
	return t
}

func (t *tree) root() *node { return &node{tree: t, key: t.store.prefix} }

// node is a directory, whose key is empty or ends in "/", or a file.
type node struct {
	fs.Inode
	tree *tree
	key  string
}

func (n *node) isDir() bool { return n.key == "" || strings.HasSuffix(n.key, "/") }

func (t *tree) attributes(out *fuse.Attr, dir bool, o object) {
	out.Owner = fuse.Owner{Uid: t.uid, Gid: t.gid}
	out.Mode, out.Nlink = syscall.S_IFREG|t.fileMode, 1
	if dir {
		out.Mode, out.Nlink = syscall.S_IFDIR|t.dirMode, 2
	}
	if o.mtime.IsZero() {
		o.mtime = t.started
	}
	out.Size, out.Blocks, out.Blksize = uint64(o.size), uint64(o.size+511)/512, 4096
	out.SetTimes(&o.mtime, &o.mtime, &o.mtime)
}

// look finds out what a name in a directory is.
func (n *node) look(ctx context.Context, name string) (dir bool, o object, errno syscall.Errno) {
	t, key := n.tree, n.key+name
	t.mu.Lock()
	w, local := t.writing[key], t.dirs[key+"/"]
	t.mu.Unlock()
	if w != nil {
		return false, w.attributes(), 0
	}
	if local {
		return true, object{}, 0
	}
	// Both questions at a time, as the real one asks them: a missing object must answer 404.
	var o1 object
	var err1 error
	asked := make(chan struct{})
	go func() {
		defer close(asked)
		o1, err1 = t.store.head(ctx, key)
	}()
	dirs, objects, err2 := t.store.list(ctx, key+"/", 1)
	<-asked
	switch {
	case err2 != nil:
		return false, o, t.failed("lookup", key, err2)
	case len(dirs)+len(objects) > 0:
		return true, object{}, 0
	case errors.Is(err1, errAbsent):
		return false, o, syscall.ENOENT
	case err1 != nil:
		return false, o, t.failed("lookup", key, err1)
	}
	return false, o1, 0
}

func (t *tree) failed(what, key string, err error) syscall.Errno {
	if errors.Is(err, context.Canceled) {
		return syscall.EINTR // a signal came to who asks, such as those by which Go's scheduler interrupts a thread
	}
	fmt.Printf("%s WARN %s of %q failed: %v\n", time.Now().UTC().Format(time.RFC3339Nano), what, key, err)
	return syscall.EIO
}

func (n *node) child(ctx context.Context, name string, dir bool) *fs.Inode {
	if c := n.GetChild(name); c != nil && c.IsDir() == dir {
		return c
	}
	if dir {
		return n.NewInode(ctx, &node{tree: n.tree, key: n.key + name + "/"}, fs.StableAttr{Mode: syscall.S_IFDIR})
	}
	return n.NewInode(ctx, &node{tree: n.tree, key: n.key + name}, fs.StableAttr{Mode: syscall.S_IFREG})
}

// Lookup implements fs.NodeLookuper.
func (n *node) Lookup(ctx context.Context, name string, out *fuse.EntryOut) (*fs.Inode, syscall.Errno) {
	dir, o, errno := n.look(ctx, name)
	if errno != 0 {
		return nil, errno
	}
	n.tree.attributes(&out.Attr, dir, o)
	return n.child(ctx, name, dir), 0
}

// Getattr implements fs.NodeGetattrer.
func (n *node) Getattr(ctx context.Context, _ fs.FileHandle, out *fuse.AttrOut) syscall.Errno {
	if n.isDir() {
		n.tree.attributes(&out.Attr, true, object{})
		return 0
	}
	n.tree.mu.Lock()
	w := n.tree.writing[n.key]
	n.tree.mu.Unlock()
	if w != nil {
		n.tree.attributes(&out.Attr, false, w.attributes())
		return 0
	}
	o, err := n.tree.store.head(ctx, n.key)
	if errors.Is(err, errAbsent) {
		return syscall.ENOENT
	} else if err != nil {
		return n.tree.failed("getattr", n.key, err)
	}
	n.tree.attributes(&out.Attr, false, o)
	return 0
}

// Setattr implements fs.NodeSetattrer: only what is not stored yet may change, and then only its times.
func (n *node) Setattr(ctx context.Context, f fs.FileHandle, _ *fuse.SetAttrIn, out *fuse.AttrOut) syscall.Errno {
	n.tree.mu.Lock()
	local := n.tree.writing[n.key] != nil || n.tree.dirs[n.key]
	n.tree.mu.Unlock()
	if !local {
		return syscall.EPERM
	}
	return n.Getattr(ctx, f, out)
}

// Statfs implements fs.NodeStatfser: there is always room.
func (n *node) Statfs(_ context.Context, out *fuse.StatfsOut) syscall.Errno {
	out.Bsize, out.Frsize, out.NameLen = 4096, 4096, 255
	out.Blocks, out.Bfree, out.Bavail = 1<<40, 1<<40, 1<<40
	out.Files, out.Ffree = 1<<40, 1<<40
	return 0
}

// Readdir implements fs.NodeReaddirer.
func (n *node) Readdir(ctx context.Context) (fs.DirStream, syscall.Errno) {
	dirs, objects, err := n.tree.store.list(ctx, n.key, 0)
	if err != nil {
		return nil, n.tree.failed("readdir", n.key, err)
	}
	modes := map[string]uint32{}
	for name := range objects {
		modes[name] = syscall.S_IFREG
	}
	n.tree.mu.Lock()
	for key := range n.tree.writing {
		if name, ok := strings.CutPrefix(key, n.key); ok {
			modes[name] = syscall.S_IFREG
		}
	}
	for key := range n.tree.dirs {
		if name, ok := strings.CutPrefix(key, n.key); ok {
			modes[strings.TrimSuffix(name, "/")] = syscall.S_IFDIR
		}
	}
	n.tree.mu.Unlock()
	for _, name := range dirs {
		modes[name] = syscall.S_IFDIR
	}
	var entries []fuse.DirEntry
	for name, mode := range modes {
		if name != "" && name != "." && name != ".." && !strings.ContainsAny(name, "/\x00") {
			entries = append(entries, fuse.DirEntry{Name: name, Mode: mode})
		}
	}
	slices.SortFunc(entries, func(a, b fuse.DirEntry) int { return strings.Compare(a.Name, b.Name) })
	return fs.NewListDirStream(entries), 0
}

// Mkdir implements fs.NodeMkdirer: a directory is local until a file is stored in it.
func (n *node) Mkdir(ctx context.Context, name string, _ uint32, out *fuse.EntryOut) (*fs.Inode, syscall.Errno) {
	if _, _, errno := n.look(ctx, name); errno != syscall.ENOENT {
		if errno == 0 {
			errno = syscall.EEXIST
		}
		return nil, errno
	}
	n.tree.mu.Lock()
	n.tree.dirs[n.key+name+"/"] = true
	n.tree.mu.Unlock()
	n.tree.attributes(&out.Attr, true, object{})
	return n.child(ctx, name, true), 0
}

// Rmdir implements fs.NodeRmdirer: only a local, empty directory can go.
func (n *node) Rmdir(_ context.Context, name string) syscall.Errno {
	t, key := n.tree, n.key+name+"/"
	t.mu.Lock()
	defer t.mu.Unlock()
	if !t.dirs[key] {
		return syscall.EPERM
	}
	for other := range t.dirs {
		if other != key && strings.HasPrefix(other, key) {
			return syscall.ENOTEMPTY
		}
	}
	for other := range t.writing {
		if strings.HasPrefix(other, key) {
			return syscall.ENOTEMPTY
		}
	}
	delete(t.dirs, key)
	return 0
}

// Unlink implements fs.NodeUnlinker.
func (n *node) Unlink(ctx context.Context, name string) syscall.Errno {
	t, key := n.tree, n.key+name
	t.mu.Lock()
	w := t.writing[key]
	t.mu.Unlock()
	if !t.remove || w != nil {
		return syscall.EPERM
	}
	if err := t.store.remove(ctx, key); err != nil {
		return t.failed("unlink", key, err)
	}
	return 0
}

// Rename implements fs.NodeRenamer: only directory buckets can.
func (n *node) Rename(context.Context, string, fs.InodeEmbedder, string, uint32) syscall.Errno {
	return syscall.ENOSYS
}

// Symlink implements fs.NodeSymlinker.
func (n *node) Symlink(context.Context, string, string, *fuse.EntryOut) (*fs.Inode, syscall.Errno) {
	return nil, syscall.EPERM
}

// Link implements fs.NodeLinker.
func (n *node) Link(context.Context, fs.InodeEmbedder, string, *fuse.EntryOut) (*fs.Inode, syscall.Errno) {
	return nil, syscall.EPERM
}
