package host

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/s3-csi/s3-csi-driver/pkg/fault"
)

// child is a mount below a stale one. Usually no path leads to it, because the stale file system answers no look-up, and the kernel
// has no other way to open a mount. If the kernel still has the names on the way in its cache, the child itself is moved below the
// healthy mount. Otherwise a clone replaces it: the same directory of the same file system, from where the host has that
// mounted, as it has all volumes of a pod.
type child struct {
	mount Mount
	rel   string   // path below its parent
	place *os.File // what it is attached to
	clone *os.File // unattached; nil: it could not be made, see why
	from  Mount    // the mount that it was cloned from
	why   error
	below []*child // children of the clone
	moved *os.File // the child itself, nil if it cannot be opened
}

// resolveCached is RESOLVE_CACHED of include/uapi/linux/openat2.h, since Linux 5.12: fail with EAGAIN instead of sending a request to
// a file system.
const resolveCached = 0x20

// maxSources bounds the mounts of the host from which a child is tried to be cloned.
const maxSources = 8

// prepareChildren prepares the mounts below parent for onto, which replaces parent.
func (r *replacement) prepareChildren(ctx context.Context, parent Mount, onto *os.File) ([]*child, error) {
	var all []*child
	for _, m := range r.tree.below(parent) {
		c := &child{mount: m, rel: strings.TrimPrefix(m.Mountpoint, strings.TrimSuffix(parent.Mountpoint, "/")+"/")}
		all = append(all, c)
		if m = r.tree.top(m); m.ID != c.mount.ID {
			c.mount = m // mounts under it are hidden, and are kept only if the child itself is moved
		}
		c.clone, c.from, c.why = r.cloneChild(ctx, m)
		if c.why != nil && ctx.Err() != nil {
			return nil, c.why
		}
		if err := r.findPlace(ctx, c, onto); err != nil {
			return nil, fault.Errorf(fault.Precondition, "%s (%s) is mounted below it and would be lost, because the volume "+
				"lacks its mount point: %w", m.Mountpoint, m.Source, err)
		}
		if c.clone == nil {
			continue
		}
		var err error
		if c.below, err = r.prepareChildren(ctx, m, c.clone); err != nil {
			return nil, err
		}
	}
	return all, nil
}

// cloneChild makes a clone of the directory that a child shows, and returns the mount that it cloned.
func (r *replacement) cloneChild(ctx context.Context, m Mount) (clone *os.File, from Mount, err error) {
	if hasOption(m.Options, idMapped) {
		return nil, Mount{}, fault.Errorf(fault.Unsupported, "it is id-mapped, with a mapping that cannot be read")
	}
	if r.src.isStale(m) {
		clone, err = r.src.clone(ctx, r.files, m)
		return clone, r.src.swap.Source, err
	}
	if r.src.table == nil {
		table, err := r.src.n.Mounts(ctx)
		if err != nil {
			return nil, Mount{}, err
		}
		r.src.table = table
	}
	sources := slices.DeleteFunc(slices.Clone(r.src.table), func(s Mount) bool {
		return !sameDevice(s, m) || s.FSType != m.FSType || s.ID == m.ID || !isBelow(m.Root, s.Root)
	})
	slices.SortStableFunc(sources, func(a, b Mount) int { return len(b.Root) - len(a.Root) }) // the shortest path first
	err = fault.Errorf(fault.Unsupported, "its file system is not mounted anywhere else on the host")
	for _, source := range sources[:min(len(sources), maxSources)] {
		if clone, err = r.cloneFrom(ctx, source, m); err == nil {
			return clone, source, nil
		}
	}
	return nil, Mount{}, err
}

// cloneFrom makes a clone of the directory that m shows from another mount of its file system on the host.
func (r *replacement) cloneFrom(ctx context.Context, source, m Mount) (*os.File, error) {
	var clone *os.File
	what := fmt.Sprintf("looking up %s in %s", m.Root, source.Mountpoint)
	err := r.src.askClient(ctx, what, r.files, func(context.Context) error {
		top, err := openMount(source)
		if err != nil {
			return err
		}
		defer top.Close()
		if clone, err = cloneMount(r.files, top, source, m); err != nil {
			return fmt.Errorf("%s: %w", what, err)
		}
		return nil
	})
	if err != nil {
		return nil, err
	}
	return clone, nil
}

// findPlace looks up the directory or file in the healthy file system that a child is attached to.
func (r *replacement) findPlace(ctx context.Context, c *child, onto *os.File) error {
	what := fmt.Sprintf("looking up %s in %s", c.rel, r.src.swap.Source.Mountpoint)
	return r.src.askClient(ctx, what, r.files, func(ctx context.Context) error {
		fd, err := openBelow(onto, c.rel, openPlace)
		if errors.Is(err, unix.ENOENT) && c.clone != nil {
			fd, err = r.makePlace(ctx, c, onto)
		}
		if err != nil {
			return fmt.Errorf("%s: %w", what, err)
		}
		c.place = r.files.add(fd, c.rel)
		return nil
	})
}

// makePlace makes the directories that lead to a child. They existed before, but S3 does not store empty directories, and some
// clients lose them when they exit.
func (r *replacement) makePlace(ctx context.Context, c *child, onto *os.File) (int, error) {
	if st, err := cachedStat(c.clone); err != nil || st.Mode&unix.S_IFMT != unix.S_IFDIR {
		return -1, errors.Join(unix.ENOENT, err)
	}
	dir := onto
	for name := range strings.SplitSeq(c.rel, "/") {
		if err := ctx.Err(); err != nil {
			return -1, err
		}
		err := unix.Mkdirat(int(dir.Fd()), name, 0o755)
		if err != nil && !errors.Is(err, unix.EEXIST) {
			return -1, fmt.Errorf("creating directory %s: %w", name, err)
		}
		fd, err := openBelow(dir, name, openPlace|unix.O_DIRECTORY)
		if err != nil {
			return -1, err
		}
		dir = r.files.add(fd, name)
	}
	return unix.FcntlInt(dir.Fd(), unix.F_DUPFD_CLOEXEC, 0)
}

// openChildren opens the children that the kernel finds in its cache. A request to the stale file system would not only fail: the
// kernel would take the failure for a removed directory and detach the mounts on it.
func (r *replacement) openChildren(h nsHandle, stale *os.File) error {
	for _, c := range r.below {
		how := unix.OpenHow{Flags: openPlace, Resolve: lookUp&^unix.RESOLVE_NO_XDEV | resolveCached}
		if fd, err := unix.Openat2(int(stale.Fd()), c.rel, &how); err == nil {
			f := r.files.add(fd, c.rel)
			if h.check(f, c.mount) == nil {
				c.moved = f
			}
		}
		what := c.moved
		if what == nil {
			what = c.clone
		}
		if what == nil {
			return fault.Errorf(fault.Precondition, "%s (%s) is mounted below it and would be lost, because it can be "+
				"neither moved nor cloned; unmount it or restart the container: %w",
				c.mount.Mountpoint, c.mount.Source, c.why)
		}
		if same, err := sameType(what, c.place); err != nil || !same {
			return fault.Errorf(fault.Precondition, "%s (%s) is mounted below it and cannot be attached to the volume "+
				"(only one of them is a directory): %w", c.mount.Mountpoint, c.mount.Source, errors.Join(unix.ENOTDIR, err))
		}
	}
	// The kernel does not move children of a shared mount.
	if len(r.below) > 0 {
		return setPropagation(int(stale.Fd()), unix.MS_PRIVATE)
	}
	return nil
}

// moveChildren attaches children, or their clones, to the healthy mount.
func moveChildren(children []*child) error {
	for _, c := range children {
		if c.moved != nil && moveMount(int(c.moved.Fd()), c.place, 0) == nil {
			continue
		}
		if c.clone == nil {
			return fmt.Errorf("moving %s to the healthy mount: %w", c.mount.Mountpoint, unix.EINVAL)
		}
		if err := moveMount(int(c.clone.Fd()), c.place, 0); err != nil {
			return fmt.Errorf("mounting %s below the healthy mount: %w", c.mount.Mountpoint, err)
		}
		if err := moveChildren(c.below); err != nil {
			return err
		}
		if err := setPropagation(int(c.clone.Fd()), propagationOf(c.mount)); err != nil {
			return fmt.Errorf("%s: %w", c.mount.Mountpoint, err)
		}
	}
	return nil
}
