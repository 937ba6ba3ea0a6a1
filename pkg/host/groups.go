//go:build linux

package host

import (
	"context"
	"os"
	"slices"
	"strings"

	"golang.org/x/sys/unix"
)

// Groups keeps peer groups of mounts for as long as those mounts are being replaced. When the last mount of a group goes, its
// slaves, which containers with HostToContainer have, become private, and nothing tells any more whose slaves they were.
type Groups struct {
	held   *held
	places map[string]string // where a mount of a group is, or was, by the group's number in mount tables
}

// HoldGroups keeps the groups of those of the namespace's mounts that are shared, until Close.
func (n *Namespace) HoldGroups(ctx context.Context, mounts []Mount) (*Groups, error) {
	g := &Groups{held: hold(), places: map[string]string{}}
	shared := slices.DeleteFunc(slices.Clone(mounts), func(m Mount) bool { return peerGroup(m) == "" })
	if len(shared) == 0 {
		return g, nil
	}
	err := n.Do(ctx, "keeping the peer groups of mounts", func() error {
		return using(func() error { return g.add(shared) }, g.held)
	})
	if err != nil {
		g.Close()
		return nil, err
	}
	return g, nil
}

// add clones mounts. A clone that is attached nowhere is in the group of its original.
func (g *Groups) add(shared []Mount) error {
	proc, err := unix.Open(procDir, openDir, 0)
	if err != nil {
		return err
	}
	defer unix.Close(proc)
	for _, m := range shared {
		number := strings.TrimPrefix(peerGroup(m), "shared:")
		if g.places[number] != "" {
			continue
		}
		f, err := inside{proc: proc}.open(m)
		if err != nil {
			continue // hidden, or unmounted meanwhile
		}
		fd, err := unix.OpenTree(int(f.Fd()), "", unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC|unix.AT_EMPTY_PATH)
		f.Close()
		if err != nil {
			continue // its slaves become private
		}
		g.held.add(fd, m.Mountpoint)
		g.places[number] = m.Mountpoint
	}
	return nil
}

// Close lets go of the groups.
func (g *Groups) Close() { g.held.drop() }

// masterOf is where a mount is, or was, whose slave m is; "": that is not known.
func (g *Groups) masterOf(m Mount) string {
	if g == nil {
		return ""
	}
	for _, field := range m.Optional {
		if number, ok := strings.CutPrefix(field, "master:"); ok {
			return g.places[number]
		}
	}
	return ""
}

// origin is what the replacement of a mount is cloned from: the living mount, or where the replaced one is a slave, the living
// mount that now is where its master was, so that it becomes a slave of that.
func (l *living) origin(ctx context.Context, h *held, dead Mount) (*os.File, Mount) {
	place := l.Groups.masterOf(dead)
	if place == "" {
		return l.root, l.Living
	}
	fd, err := unix.Open(place, openPlace, 0)
	if err != nil {
		return l.root, l.Living
	}
	root := h.add(fd, place)
	mounts, err := readMounts(ctx, threadMountinfo)
	if err != nil {
		return l.root, l.Living
	}
	top, err := mountOf(root, mounts)
	if err != nil || top.Mountpoint != place || !sameDevice(top, l.Living) || !isBelow(dead.Root, top.Root) {
		return l.root, l.Living
	}
	return root, top
}
