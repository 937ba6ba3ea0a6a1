package host

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/s3-csi/s3-csi-driver/pkg/fault"
)

// lookUp makes the kernel resolve names inside one file system only, without symbolic links that a container may have put there.
const lookUp = unix.RESOLVE_BENEATH | unix.RESOLVE_NO_SYMLINKS | unix.RESOLVE_NO_MAGICLINKS | unix.RESOLVE_NO_XDEV

// openPlace opens a file of any kind as a location only.
const openPlace = unix.O_PATH | unix.O_NOFOLLOW | unix.O_CLOEXEC

// source is the healthy mount that stale ones are replaced with, opened.
type source struct {
	swap     Swap
	n        *Namespace
	files    *openFiles
	root     *os.File // in n's namespace
	timedOut error    // of a look-up that the client did not answer in time; further ones are not tried
	// table is the mount table of n, for what is mounted below stale mounts. It is read when it is needed.
	table []Mount
}

// openSource opens s.Source and checks that it is still the mount that the caller read.
func (n *Namespace) openSource(ctx context.Context, s Swap) (*source, error) {
	if s.Source.Root != "/" || s.Bound <= 0 || s.Stale == nil {
		return nil, fault.Errorf(fault.Invalid, "replacing stale mounts with %s: the root of the file system (not %q), a time "+
			"limit (not %s) and a rule for stale mounts are required", s.Source.Mountpoint, s.Source.Root, s.Bound)
	}
	src := &source{swap: s, n: n, files: newOpenFiles()}
	what := "opening the healthy mount " + s.Source.Mountpoint
	err := n.Do(ctx, what, func() error {
		return withFiles(func() error { return src.open(ctx) }, src.files)
	})
	if err != nil {
		src.files.release()
		return nil, fmt.Errorf("%s: %w", what, err)
	}
	return src, nil
}

func (src *source) open(ctx context.Context) error {
	fd, err := unix.Open(src.swap.Source.Mountpoint, openPlace|unix.O_DIRECTORY, 0)
	if err != nil {
		return err
	}
	root := src.files.add(fd, src.swap.Source.Mountpoint)
	top, _, err := findMount(ctx, root)
	if err != nil {
		return err
	}
	if top.ID != src.swap.Source.ID || !src.isHealthy(top) || top.Root != src.swap.Source.Root {
		return fault.Errorf(fault.Busy, "another mount (%s) has replaced it", top.Source)
	}
	src.root = root
	return nil
}

// askClient runs fn, which may wait for the client, in the namespace of the healthy mount and within the bound. fn adds the files that it
// opens to files.
func (src *source) askClient(ctx context.Context, what string, files *openFiles, fn func(ctx context.Context) error) error {
	bounded, cancel := context.WithTimeout(For(ctx, "mount "+src.swap.Source.Source), src.swap.Bound)
	defer cancel()
	return src.n.Do(bounded, what, func() error {
		return withFiles(func() error { return fn(bounded) }, src.files, files)
	})
}

// clone makes an unattached mount of the directory (or file) that a stale mount shows, with the stale mount's flags, nosuid and
// nodev.
func (src *source) clone(ctx context.Context, files *openFiles, stale Mount) (*os.File, error) {
	stale.Root = stale.shown()
	rel := strings.TrimPrefix(stale.Root, "/")
	if src.timedOut != nil && rel != "" {
		return nil, src.timedOut
	}
	stale.Options += ",nosuid,nodev"
	var clone *os.File
	err := src.askClient(ctx, fmt.Sprintf("looking up %s in %s", stale.Root, src.swap.Source.Mountpoint), files, func(ctx context.Context) (err error) {
		root, of := src.cloneOrigin(ctx, files, stale)
		clone, err = cloneMount(files, root, of, stale)
		return err
	})
	switch {
	case err == nil:
		return clone, nil
	case isMissing(err):
		return nil, fault.Errorf(fault.NotFound, "%s no longer exists in the volume: %w", stale.Root, err)
	case errors.Is(err, context.DeadlineExceeded) && ctx.Err() == nil:
		src.timedOut = err
	}
	return nil, err
}

// isMissing reports whether a look-up found nothing, or only a symbolic link.
func isMissing(err error) bool {
	return errors.Is(err, unix.ENOENT) || errors.Is(err, unix.ENOTDIR) || errors.Is(err, unix.ELOOP)
}

func openBelow(dir *os.File, rel string, flags uint64) (int, error) {
	return openat2(int(dir.Fd()), rel, unix.OpenHow{Flags: flags, Resolve: lookUp})
}

// cloneMount makes an unattached mount of the directory that like shows, with the flags of like. dir is the root of the mount of, in the same
// file system. The clone is in no peer group. If like is a slave, it is a slave of of's group, if there is one.
func cloneMount(files *openFiles, dir *os.File, of, like Mount) (*os.File, error) {
	if rel := strings.TrimPrefix(strings.TrimPrefix(like.Root, of.Root), "/"); rel != "" {
		fd, err := openBelow(dir, rel, openPlace)
		if err != nil {
			return nil, err
		}
		dir = files.add(fd, like.Root)
	}
	fd, err := cloneTree(dir)
	if err != nil {
		return nil, fmt.Errorf("cloning the mount: %w", err)
	}
	clone := files.add(fd, dir.Name()) // an unattached clone is removed with its descriptor
	attr := flagsOf(of, like)
	attr.Propagation = unix.MS_PRIVATE
	if like.Slave() {
		attr.Propagation = unix.MS_SLAVE
	}
	if err := unix.MountSetattr(fd, "", unix.AT_EMPTY_PATH, &attr); err != nil {
		return nil, fmt.Errorf("setting mount flags: %w", err)
	}
	return clone, nil
}

// flagsOf returns the change that gives a clone of of the flags that mount tables show of like.
func flagsOf(of, like Mount) unix.MountAttr {
	attr := unix.MountAttr{Attr_clr: unix.MOUNT_ATTR__ATIME}
	for _, flag := range []struct {
		option string
		bit    uint64
	}{
		{"ro", unix.MOUNT_ATTR_RDONLY},
		{"nosuid", unix.MOUNT_ATTR_NOSUID},
		{"nodev", unix.MOUNT_ATTR_NODEV},
		{"noexec", unix.MOUNT_ATTR_NOEXEC},
		{"nodiratime", unix.MOUNT_ATTR_NODIRATIME},
		{"nosymfollow", unix.MOUNT_ATTR_NOSYMFOLLOW}, // Linux 5.14: used only if a mount table shows it
	} {
		switch {
		case hasOption(like.Options, flag.option):
			attr.Attr_set |= flag.bit
		case hasOption(of.Options, flag.option):
			attr.Attr_clr |= flag.bit
		}
	}
	switch {
	case hasOption(like.Options, "noatime"):
		attr.Attr_set |= unix.MOUNT_ATTR_NOATIME
	case hasOption(like.Options, "relatime"):
		attr.Attr_set |= unix.MOUNT_ATTR_RELATIME
	default: // mount tables show no option for strict access times
		attr.Attr_set |= unix.MOUNT_ATTR_STRICTATIME
	}
	return attr
}

// propagationOf returns the propagation type for the attached replacement of m. A mount that was attached below a shared mount has
// become shared, in a group of its own.
func propagationOf(m Mount) uint64 {
	switch {
	case slices.Contains(m.Optional, "unbindable"):
		return unix.MS_UNBINDABLE
	case m.Shared():
		return unix.MS_SHARED // and it stays a slave if it is one
	case m.Slave():
		return unix.MS_SLAVE
	}
	return unix.MS_PRIVATE
}

// openFiles is a set of descriptors that is closed when its last user releases it: a call that its caller has abandoned still uses
// them.
type openFiles struct {
	mu    sync.Mutex
	users int
	files []*os.File
}

func newOpenFiles() *openFiles { return &openFiles{users: 1} }

// acquire adds a user, and reports false if the set is closed already.
func (o *openFiles) acquire() bool {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.users == 0 {
		return false
	}
	o.users++
	return true
}

func (o *openFiles) release() {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.users--; o.users > 0 {
		return
	}
	for _, f := range o.files {
		f.Close()
	}
	o.files = nil
}

func (o *openFiles) add(fd int, name string) *os.File {
	f := os.NewFile(uintptr(fd), name)
	o.mu.Lock()
	defer o.mu.Unlock()
	o.files = append(o.files, f)
	return f
}

// withFiles runs fn as a user of all the sets.
func withFiles(fn func() error, sets ...*openFiles) error {
	for i, o := range sets {
		if !o.acquire() {
			for _, acquired := range sets[:i] {
				acquired.release()
			}
			return fault.Errorf(fault.Timeout, "not started: the caller has timed out")
		}
	}
	defer func() {
		for _, o := range sets {
			o.release()
		}
	}()
	return fn()
}

// Groups keeps the peer groups of mounts while those mounts are replaced. When the last mount of a group goes, its slaves, which
// containers with HostToContainer have, become private, and the kernel forgets their master.
type Groups struct {
	files  *openFiles
	places map[string]string // where a mount of a group is or was, by the group's number in mount tables
}

// HoldGroups keeps the groups of the shared ones of the namespace's mounts until Close.
func (n *Namespace) HoldGroups(ctx context.Context, mounts []Mount) (*Groups, error) {
	g := &Groups{files: newOpenFiles(), places: map[string]string{}}
	shared := slices.DeleteFunc(slices.Clone(mounts), func(m Mount) bool { return !m.Shared() })
	if len(shared) == 0 {
		return g, nil
	}
	if err := n.Do(ctx, "keeping the peer groups of mounts", func() error {
		return withFiles(func() error { g.add(shared); return nil }, g.files)
	}); err != nil {
		g.Close()
		return nil, err
	}
	return g, nil
}

// add clones mounts. An unattached clone is in the group of its original.
func (g *Groups) add(shared []Mount) {
	for _, m := range shared {
		number := m.peerGroup()
		if g.places[number] != "" {
			continue
		}
		f, err := openMount(m)
		if err != nil {
			continue // hidden, or unmounted in between
		}
		fd, err := cloneTree(f)
		f.Close()
		if err != nil {
			continue // its slaves become private
		}
		g.files.add(fd, m.Mountpoint)
		g.places[number] = m.Mountpoint
	}
}

// Close releases the groups.
func (g *Groups) Close() { g.files.release() }

// masterOf returns where the master of a mount is or was, "" if it is unknown.
func (g *Groups) masterOf(m Mount) string {
	if g == nil {
		return ""
	}
	return g.places[m.propagation("master:")]
}

// cloneOrigin returns the directory that the replacement of a mount is cloned from, and its mount. That is the healthy mount or, if the
// stale mount is a slave, the healthy mount where its master was, so that the replacement becomes a slave of that.
func (src *source) cloneOrigin(ctx context.Context, files *openFiles, stale Mount) (*os.File, Mount) {
	place := src.swap.Groups.masterOf(stale)
	if place == "" {
		return src.root, src.swap.Source
	}
	fd, err := unix.Open(place, openPlace, 0)
	if err != nil {
		return src.root, src.swap.Source
	}
	root := files.add(fd, place)
	top, _, err := findMount(ctx, root)
	if err != nil || top.Mountpoint != place || !src.isHealthy(top) || !isBelow(stale.shown(), top.Root) {
		return src.root, src.swap.Source
	}
	return root, top
}
