package host

import (
	"context"
	"os"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/s3-csi/s3-csi-driver/pkg/proc"
)

// Groups keeps the peer groups of mounts while those mounts are replaced. When the last mount of a group goes, its slaves, which
// containers with HostToContainer have, become private, and the kernel forgets their master.
type Groups struct {
	files  *openFiles
	places map[string]string // where a mount of a group is or was, by the group's number in mount tables
}

// HoldGroups keeps the groups of the shared ones of the namespace's mounts until Close.
func (n *Namespace) HoldGroups(ctx context.Context, mounts []Mount) (*Groups, error) {
	g := &Groups{files: newOpenFiles(), places: map[string]string{}}
	shared := slices.DeleteFunc(slices.Clone(mounts), func(m Mount) bool { return peerGroup(m) == "" })
	if len(shared) == 0 {
		return g, nil
	}
	err := n.Do(ctx, "keeping the peer groups of mounts", func() error {
		return using(func() error { return g.add(shared) }, g.files)
	})
	if err != nil {
		g.Close()
		return nil, err
	}
	return g, nil
}

// add clones mounts. An unattached clone is in the group of its original.
func (g *Groups) add(shared []Mount) error {
	procDir, err := unix.Open(proc.Dir, openDir, 0)
	if err != nil {
		return err
	}
	defer unix.Close(procDir)
	for _, m := range shared {
		number := strings.TrimPrefix(peerGroup(m), "shared:")
		if g.places[number] != "" {
			continue
		}
		f, err := nsHandle{proc: procDir}.open(m)
		if err != nil {
			continue // hidden, or unmounted in between
		}
		fd, err := unix.OpenTree(int(f.Fd()), "", unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC|unix.AT_EMPTY_PATH)
		f.Close()
		if err != nil {
			continue // its slaves become private
		}
		g.files.add(fd, m.Mountpoint)
		g.places[number] = m.Mountpoint
	}
	return nil
}

// Close releases the groups.
func (g *Groups) Close() { g.files.release() }

// masterOf returns where the master of a mount is or was, "" if it is unknown.
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

// origin returns the directory that the replacement of a mount is cloned from, and its mount. That is the healthy mount or, if the
// stale mount is a slave, the healthy mount where its master was, so that the replacement becomes a slave of that.
func (src *source) origin(ctx context.Context, files *openFiles, stale Mount) (*os.File, Mount) {
	place := src.Groups.masterOf(stale)
	if place == "" {
		return src.root, src.Source
	}
	fd, err := unix.Open(place, openPlace, 0)
	if err != nil {
		return src.root, src.Source
	}
	root := files.add(fd, place)
	mounts, err := readMounts(ctx, threadMountinfo)
	if err != nil {
		return src.root, src.Source
	}
	top, err := mountOf(root, mounts)
	if err != nil || top.Mountpoint != place || !sameDevice(top, src.Source) || !isBelow(stale.shown(), top.Root) {
		return src.root, src.Source
	}
	return root, top
}
