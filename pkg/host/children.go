//go:build linux

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

// child is a mount below a dead one. No path leads to it any more, because the dead file system answers no look-up,
// and the kernel knows no other way to open a mount. So what is put below the living mount is either the child itself,
// where the kernel has the names on the way still cached, or a clone of the same directory of the same file system,
// found where the host has that mounted, as it has all volumes of a pod.
type child struct {
	mount Mount
	rel   string   // below its parent
	place *os.File // where it goes
	clone *os.File // attached nowhere; nil: none could be made, see why
	from  Mount    // what it was cloned from
	why   error
	below []*child // what goes below the clone
	moved *os.File // the child itself, nil where it cannot be reached
}

// resolveCached is RESOLVE_CACHED of include/uapi/linux/openat2.h, since Linux 5.12: fail (EAGAIN) instead of asking a
// file system.
const resolveCached = 0x20

// maxSources bounds in how many places of the host a child's file system is looked for.
const maxSources = 8

// children prepares what goes below onto, which takes the place of parent.
func (r *replacement) children(ctx context.Context, parent Mount, onto *os.File) ([]*child, error) {
	var all []*child
	for _, m := range r.tree.below(parent) {
		c := &child{mount: m, rel: strings.TrimPrefix(m.Mountpoint, strings.TrimSuffix(parent.Mountpoint, "/")+"/")}
		all = append(all, c)
		if m = r.tree.top(m); m.ID != c.mount.ID {
			c.mount = m // what is stacked there is not seen, and goes with the child only if that itself is moved
		}
		c.clone, c.from, c.why = r.standIn(ctx, m)
		if c.why != nil && ctx.Err() != nil {
			return nil, c.why
		}
		if err := r.findPlace(ctx, c, onto); err != nil {
			return nil, fault.Errorf(fault.Precondition, "%s (%s) is mounted below it and would be lost, because the living "+
				"file system has no place for it: %w", m.Mountpoint, m.Source, err)
		}
		if c.clone == nil {
			continue
		}
		var err error
		if c.below, err = r.children(ctx, m, c.clone); err != nil {
			return nil, err
		}
	}
	return all, nil
}

// standIn makes a clone that shows what a child shows, and says of which mount.
func (r *replacement) standIn(ctx context.Context, m Mount) (clone *os.File, from Mount, err error) {
	if hasOption(m.Options, idMapped) {
		return nil, Mount{}, fault.Errorf(fault.Unsupported, "it is id-mapped, and only the mount itself can tell how")
	}
	if r.isDead(m) {
		clone, err = r.living.clone(ctx, r.held, m)
		return clone, r.Living, err
	}
	if r.table == nil {
		table, err := r.n.Mounts(ctx)
		if err != nil {
			return nil, Mount{}, err
		}
		r.table = table
	}
	sources := slices.DeleteFunc(slices.Clone(r.table), func(s Mount) bool {
		return !sameDevice(s, m) || s.FSType != m.FSType || s.ID == m.ID || !isBelow(m.Root, s.Root)
	})
	slices.SortStableFunc(sources, func(a, b Mount) int { return len(b.Root) - len(a.Root) }) // the shortest way first
	err = fault.Errorf(fault.Unsupported, "the host has its file system mounted nowhere else")
	for _, source := range sources[:min(len(sources), maxSources)] {
		if clone, err = r.cloneFrom(ctx, source, m); err == nil {
			return clone, source, nil
		}
	}
	return nil, Mount{}, err
}

// cloneFrom makes a clone of what m shows from another mount of its file system, one of the host's.
func (r *replacement) cloneFrom(ctx context.Context, source, m Mount) (*os.File, error) {
	var clone *os.File
	what := fmt.Sprintf("looking up %s in %s", m.Root, source.Mountpoint)
	err := r.ask(ctx, what, r.held, func(context.Context) error {
		proc, err := unix.Open(procDir, openDir, 0)
		if err != nil {
			return err
		}
		defer unix.Close(proc)
		top, err := inside{proc: proc}.open(source)
		if err != nil {
			return err
		}
		defer top.Close()
		dir := top
		if rel := strings.TrimPrefix(strings.TrimPrefix(m.Root, source.Root), "/"); rel != "" {
			fd, err := openBelow(top, rel, openPlace)
			if err != nil {
				return fmt.Errorf("%s: %w", what, err)
			}
			dir = r.held.add(fd, m.Root)
		}
		clone, err = cloneMount(r.held, dir, source, m)
		return err
	})
	if err != nil {
		return nil, err
	}
	return clone, nil
}

// findPlace opens the directory or file that a child goes onto, by asking the living file system.
func (r *replacement) findPlace(ctx context.Context, c *child, onto *os.File) error {
	what := fmt.Sprintf("looking up %s in %s", c.rel, r.Living.Mountpoint)
	return r.ask(ctx, what, r.held, func(ctx context.Context) error {
		fd, err := openBelow(onto, c.rel, openPlace)
		if errors.Is(err, unix.ENOENT) && c.clone != nil {
			fd, err = r.makePlace(ctx, c, onto)
		}
		if err != nil {
			return fmt.Errorf("%s: %w", what, err)
		}
		c.place = r.held.add(fd, c.rel)
		return nil
	})
}

// makePlace makes the directories that lead to a child, as whoever mounted it had to: an empty directory is nothing that
// S3 could keep, and some clients forget theirs when they end.
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
			return -1, fmt.Errorf("making directory %s: %w", name, err)
		}
		fd, err := openBelow(dir, name, openPlace|unix.O_DIRECTORY)
		if err != nil {
			return -1, err
		}
		dir = r.held.add(fd, name)
	}
	return unix.FcntlInt(dir.Fd(), unix.F_DUPFD_CLOEXEC, 0)
}

// openChildren opens those children themselves that the kernel can find without asking the dead file system. A look-up
// that asks it would not only fail: the kernel takes the failure for a removed directory and detaches what is on it.
func (r *replacement) openChildren(in inside, dead *os.File) error {
	for _, c := range r.below {
		how := unix.OpenHow{Flags: openPlace, Resolve: lookUp&^unix.RESOLVE_NO_XDEV | resolveCached}
		if fd, err := unix.Openat2(int(dead.Fd()), c.rel, &how); err == nil {
			f := r.held.add(fd, c.rel)
			if in.check(f, c.mount) == nil {
				c.moved = f
			}
		}
		what := c.moved
		if what == nil {
			what = c.clone
		}
		if what == nil {
			return fault.Errorf(fault.Precondition, "%s (%s) is mounted below it and would be lost: it can neither be "+
				"reached through a dead file system nor be mounted once more; unmount it or restart the pod: %w",
				c.mount.Mountpoint, c.mount.Source, c.why)
		}
		if same, err := sameType(what, c.place); err != nil || !same {
			return fault.Errorf(fault.Precondition, "%s (%s) is mounted below it and does not fit to what the volume has there "+
				"(one is a directory, the other is not): %w", c.mount.Mountpoint, c.mount.Source, errors.Join(unix.ENOTDIR, err))
		}
	}
	// The kernel does not move children of a shared mount.
	if len(r.below) > 0 {
		return setPropagation(int(dead.Fd()), unix.MS_PRIVATE)
	}
	return nil
}

// moveChildren puts children where they go.
func moveChildren(children []*child) error {
	const here = unix.MOVE_MOUNT_F_EMPTY_PATH | unix.MOVE_MOUNT_T_EMPTY_PATH
	for _, c := range children {
		if c.moved != nil && unix.MoveMount(int(c.moved.Fd()), "", int(c.place.Fd()), "", here) == nil {
			continue
		}
		if c.clone == nil {
			return fmt.Errorf("moving %s to the living mount: %w", c.mount.Mountpoint, unix.EINVAL)
		}
		if err := unix.MoveMount(int(c.clone.Fd()), "", int(c.place.Fd()), "", here); err != nil {
			return fmt.Errorf("mounting %s below the living mount: %w", c.mount.Mountpoint, err)
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
