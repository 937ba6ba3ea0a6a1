package main

import (
	"context"
	"path"
	"strings"
	"sync"
	"syscall"
	"time"

	fusefs "github.com/hanwen/go-fuse/v2/fs"
	"github.com/hanwen/go-fuse/v2/fuse"
	"github.com/rclone/rclone/cmd/mount2"
	"github.com/rclone/rclone/fs"
	"github.com/rclone/rclone/vfs"
	"github.com/rclone/rclone/vfs/vfscommon"
)

// vfsDirCacheTime is a --dir-cache-time that never ends, for rclone's VFS: directories decides instead. rclone doubles it.
const vfsDirCacheTime = 100 * 365 * 24 * time.Hour

// patience is how much longer than its time a listing is used while a directory above is being listed, which can take minutes.
const patience = time.Minute

// directories decides how long rclone's VFS uses the listing of a directory.
//
// rclone's VFS forgets a directory's entries when their listing is old, and makes new nodes for the next one. But the kernel keeps using
// the former node of a subdirectory that is a working directory or is mounted by itself, as a subPath volume mount is. One directory
// then has two nodes, each with a listing of its own, and a file that is written through one is missing in the other until it is
// uploaded and listed. So here the VFS keeps its nodes. A use of a directory makes it list again if its listing is old, and trim makes
// it forget the entries of directories that are not used, unless the kernel knows a subdirectory.
type directories struct {
	keep time.Duration // how long a listing is used

	mu      sync.Mutex
	byName  map[string]*directory
	running map[*listing]struct{}
	root    *vfs.Dir
}

// listing is a running request for the entries of a directory.
type listing struct {
	name     string
	uploaded map[string]fs.Object // meanwhile, by the name of the file
}

type directory struct {
	listed time.Time // when the last listing began
	used   time.Time // when the last use ended
	users  int
	node   *node // of the last use
}

func newDirectories(keep time.Duration) *directories {
	return &directories{keep: keep, byName: map[string]*directory{}, running: map[*listing]struct{}{}}
}

// serve returns the root node of a VFS, whose directories are kept here from now on.
func (d *directories) serve(files *mount2.FS) (*node, error) {
	root, err := files.Root()
	if err != nil {
		return nil, err
	}
	dir, err := files.VFS.Root()
	if err != nil {
		return nil, err
	}
	d.root = dir
	return &node{Node: root, dirs: d}, nil
}

func (d *directories) get(name string) *directory {
	e := d.byName[name]
	if e == nil {
		e = &directory{}
		d.byName[name] = e
	}
	return e
}

// listing begins a listing.
func (d *directories) listing(name string) *listing {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.get(name).listed = time.Now()
	l := &listing{name: name, uploaded: map[string]fs.Object{}}
	d.running[l] = struct{}{}
	return l
}

// listed ends a listing, and returns the objects that were uploaded meanwhile. The response may lack them or have their former
// versions. Without them, the VFS would hide a new file, or would show a changed one with its former size and cut it off there.
func (d *directories) listed(l *listing) (uploaded map[string]fs.Object) {
	d.mu.Lock()
	defer d.mu.Unlock()
	delete(d.running, l)
	return l.uploaded
}

// uploaded records that an upload has ended.
func (d *directories) uploaded(o fs.Object) {
	d.mu.Lock()
	defer d.mu.Unlock()
	for l := range d.running {
		if vfscommon.FindParent(o.Remote()) == l.name {
			l.uploaded[o.Remote()] = o
		}
	}
}

// expire makes all directories list again at their next use.
func (d *directories) expire() {
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, e := range d.byName {
		e.listed = time.Time{}
	}
}

// use must be called before a directory's entries are used, and done afterwards.
func (d *directories) use(n *node) (done func()) {
	name := n.String()
	d.mu.Lock()
	e := d.get(name)
	e.node = n
	e.users++
	age := time.Since(e.listed)
	old := age >= d.keep && !(d.keep > 0 && age < d.keep+patience && d.listingAbove(name))
	d.mu.Unlock()
	if old { // it waits for listings above
		d.root.ForgetPath(path.Join(name, "any"), fs.EntryObject) // the directory is listed again, its entries stay until then
	}
	return func() {
		d.mu.Lock()
		defer d.mu.Unlock()
		e.users--
		e.used = time.Now()
	}
}

// listingAbove reports whether a directory above is being listed. Call under mu.
func (d *directories) listingAbove(name string) bool {
	for l := range d.running {
		if l.name == "" && name != "" || strings.HasPrefix(name, l.name+"/") {
			return true
		}
	}
	return false
}

// trim makes the VFS forget the entries of directories that have not been used for a while, if the kernel knows none of their
// subdirectories.
func (d *directories) trim(unused time.Duration) {
	for name, n := range d.unused(unused) {
		if n.String() == name && n.hasSubdirectory() {
			continue
		}
		d.mu.Lock()
		still := d.byName[name].isUnused(unused)
		if still {
			delete(d.byName, name)
		}
		d.mu.Unlock()
		if still && n.String() == name { // otherwise it was renamed
			d.root.ForgetPath(name, fs.EntryDirectory)
		}
	}
}

// unused returns the directories that have not been used for a while.
func (d *directories) unused(since time.Duration) map[string]*node {
	d.mu.Lock()
	defer d.mu.Unlock()
	all := map[string]*node{}
	for name, e := range d.byName {
		if e.isUnused(since) {
			all[name] = e.node
		}
	}
	return all
}

func (e *directory) isUnused(since time.Duration) bool {
	return e != nil && e.node != nil && e.users == 0 && time.Since(e.used) >= since
}

// keepTrimmed trims until ctx ends.
func (d *directories) keepTrimmed(ctx context.Context, every time.Duration) {
	tick := time.NewTicker(every)
	defer tick.Stop()
	for {
		select {
		case <-tick.C:
			d.trim(max(every, 2*d.keep))
		case <-ctx.Done():
			return
		}
	}
}

// node is a file or directory for the kernel.
type node struct {
	*mount2.Node
	dirs *directories
}

// WrapChild makes a node of rclone's node, when the kernel looks it up.
func (n *node) WrapChild(_ context.Context, ops fusefs.InodeEmbedder) fusefs.InodeEmbedder {
	if child, ok := ops.(*mount2.Node); ok {
		return &node{Node: child, dirs: n.dirs}
	}
	return ops
}

// hasSubdirectory reports whether the kernel knows a subdirectory.
func (n *node) hasSubdirectory() bool {
	for _, child := range n.Children() {
		if child.Mode() == fuse.S_IFDIR {
			return true
		}
	}
	return false
}

func (n *node) Lookup(ctx context.Context, name string, out *fuse.EntryOut) (*fusefs.Inode, syscall.Errno) {
	defer n.dirs.use(n)()
	return n.Node.Lookup(ctx, name, out)
}

func (n *node) Readdir(ctx context.Context) (fusefs.DirStream, syscall.Errno) {
	defer n.dirs.use(n)()
	return n.Node.Readdir(ctx)
}

func (n *node) Mkdir(ctx context.Context, name string, mode uint32, out *fuse.EntryOut) (*fusefs.Inode, syscall.Errno) {
	defer n.dirs.use(n)()
	return n.Node.Mkdir(ctx, name, mode, out)
}

func (n *node) Rename(ctx context.Context, oldName string, newParent fusefs.InodeEmbedder, newName string, flags uint32) syscall.Errno {
	to, ok := newParent.(*node)
	if !ok {
		return syscall.EXDEV
	}
	defer n.dirs.use(n)()
	defer n.dirs.use(to)()
	return n.Node.Rename(ctx, oldName, to.Node, newName, flags)
}
