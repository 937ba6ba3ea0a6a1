// Package source mounts and unmounts sources: the FUSE file systems of mounts, of which publications are bind mounts.
package source

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"math"
	"os"
	"slices"
	"time"

	"k8s.io/klog/v2"

	"github.com/s3-csi/s3-csi-driver/pkg/failpoint"
	"github.com/s3-csi/s3-csi-driver/pkg/fault"
	"github.com/s3-csi/s3-csi-driver/pkg/host"
	"github.com/s3-csi/s3-csi-driver/pkg/mount"
	"github.com/s3-csi/s3-csi-driver/pkg/mount/pins"
	"github.com/s3-csi/s3-csi-driver/pkg/mount/state"
)

const (
	idleReads = 4                    // this many reads in a row must see no waiting request
	idlePause = 5 * time.Millisecond // between two of them
	// firstCopiesPause and lastCopiesPause bound the doubling interval between searches of all mount namespaces.
	firstCopiesPause, lastCopiesPause = 100 * time.Millisecond, 5 * time.Second
	// searchBound bounds the search for copies, which leaves time for what follows.
	searchBound = 10 * time.Second
	// pinnedBound and busyBound are how long a connection may last after its last mount on the host was unmounted and copies were detached:
	// without requests, and with them. What keeps it then is no publication: a copy that a user namespace has locked, or a file that is
	// open on a detached one.
	pinnedBound, busyBound = time.Second, 30 * time.Second
)

// Sources are the sources of all mounts.
type Sources struct {
	ns    *host.Namespace
	ctl   *host.Fusectl
	store *state.Store
	pins  *pins.Pins
}

// New returns the sources of the mounts of a store. ctl is FUSE's control file system.
func New(ns *host.Namespace, ctl *host.Fusectl, store *state.Store, p *pins.Pins) *Sources {
	return &Sources{ns: ns, ctl: ctl, store: store, pins: p}
}

// Mount mounts a new FUSE file system on a mount's source and returns the descriptor for its client.
func (s *Sources) Mount(ctx context.Context, m state.Mount) (*os.File, error) {
	drop := func(f *os.File) { f.Close() } // which leaves a stale mount, to be unmounted by the clean-up of the failed start
	fuse, err := host.Call(ctx, s.ns, "mounting "+m.Source, drop, func() (*os.File, error) {
		fuse, err := host.NewFuseMount(s.store.SourceDir(m.Name), host.FuseMount{
			Source: m.Source, UID: m.UID, GID: m.UID, ReadOnly: m.Spec.ReadOnly, SELinuxContext: m.Spec.SELinuxContext,
		})
		if err != nil {
			return nil, err
		}
		if ctx.Err() != nil { // the caller has given up
			return nil, errors.Join(ctx.Err(), host.Unmount(s.store.SourceDir(m.Name)), fuse.Close())
		}
		failpoint.Here("mount.mounted")
		return fuse, nil
	})
	if err != nil {
		return nil, fmt.Errorf("mounting the file system of mount %s: %w", m.Name, err)
	}
	return fuse, nil
}

// Mounted reports whether a file system is mounted on a mount's source.
func (s *Sources) Mounted(ctx context.Context, m state.Mount) (bool, error) {
	dir := s.store.SourceDir(m.Name)
	return host.Call(ctx, s.ns, "looking at "+dir, nil, func() (bool, error) {
		place, err := host.Inspect(dir)
		if errors.Is(err, fs.ErrNotExist) {
			err = nil
		}
		return place.Mountpoint, err
	})
}

// Pinning is whether a file system is pinned before it is unmounted, because publications may show it.
type Pinning bool

// Unpinned file systems were never bound to a target.
const (
	Pinned   Pinning = true
	Unpinned Pinning = false
)

// Clear unmounts the file system on the source of a mount whose client has exited.
func (s *Sources) Clear(ctx context.Context, m state.Mount, pin Pinning) error {
	for {
		mounts, err := s.ns.Mounts(ctx)
		if err != nil {
			return err
		}
		mnt, mounted := host.TopAt(mounts, s.store.SourceDir(m.Name))
		if !mounted {
			return nil
		}
		if pin {
			if err := s.pins.Pin(ctx, m.Name, mounts, mnt); err != nil {
				return err
			}
		}
		if err := s.unmount(ctx, mnt); err != nil {
			return err
		}
	}
}

// Copies is what is done with copies of an unmounted source in other mount namespaces.
type Copies bool

// Copies would keep the client alive. Those of a mount that was replaced are replaced first.
const (
	Detach       Copies = false
	AwaitReplace Copies = true
)

// Unmount unmounts a mount's source once no request waits for the client.
func (s *Sources) Unmount(ctx context.Context, m state.Mount, copies Copies) error {
	replaced := copies == AwaitReplace
	// Copies may be left of a source that was unmounted before. Its device number alone may belong to another file system now.
	gone := host.Mount{Minor: m.Minor, Source: m.Source, FSType: "fuse"}
	for first := true; ; first = false {
		if replaced {
			if err := s.awaitReplaced(ctx, m); err != nil {
				return err
			}
		}
		mounts, err := s.ns.Mounts(ctx)
		if err != nil {
			return err
		}
		mnt, mounted := host.TopAt(mounts, s.store.SourceDir(m.Name))
		if mounted {
			gone = mnt
		}
		if mounted || first && gone.Minor != 0 && !replaced {
			if err := s.endConnection(ctx, m, unmounting{gone, mounted, replaced}); err != nil {
				return err
			}
		}
		if !mounted {
			return s.pins.UnpinAll(ctx, m.Name)
		}
	}
}

// unmounting is a file system that is, or was, mounted on a source. replaced: it has no copies any more.
type unmounting struct {
	mnt               host.Mount
	mounted, replaced bool
}

// endConnection unmounts a file system from a mount's source, if it is mounted there, and ends its connection. A connection exists as long as its file
// system has a mount, in whatever namespace.
func (s *Sources) endConnection(ctx context.Context, m state.Mount, u unmounting) error {
	c, err := s.ctl.Open(ctx, u.mnt.Minor) // now, because its number may be reused once it is unmounted
	if err != nil {
		return err
	}
	defer c.Close()
	if u.mounted {
		if c != nil {
			if err := s.awaitIdle(ctx, c); err != nil {
				return err
			}
		}
		if err := s.unmount(ctx, u.mnt); err != nil {
			return err
		}
	}
	if c == nil || u.replaced {
		return nil
	}
	return s.dropCopies(klog.NewContext(ctx, klog.FromContext(ctx).WithValues("mount", m.Name, "volume", m.VolumeID)), u, c)
}

// dropCopies detaches the copies of a file system in other mount namespaces, and aborts its connection if something still keeps it: none of
// these may delay the end of the mount. If it was not mounted, the connection may be another's.
//
// Bind mounts in this namespace are publications, or were made by another process. The latter keep the client running, which the error of
// the wait for its exit reports.
func (s *Sources) dropCopies(ctx context.Context, u unmounting, c *host.Connection) error {
	if _, exists, err := c.Waiting(); err == nil && !exists {
		return nil
	}
	log, mnt := klog.FromContext(ctx), u.mnt
	search, cancel := context.WithTimeout(ctx, searchBound)
	defer cancel()
	n, err := s.ns.DetachCopies(search, mnt)
	if ctx.Err() != nil {
		return fault.Errorf(fault.Busy, "searching for private copies of the file system: %w", cmp.Or(err, context.Cause(ctx)))
	}
	if err != nil {
		log.Error(err, "Cannot detach copies in other mount namespaces")
	}
	if n > 0 {
		log.Info("Detached copies in other mount namespaces", "copies", n)
	}
	if !u.mounted { // the number of a connection that ended before this driver started may be another's
		where, err := s.ns.ShownInOtherNamespaces(search, "searching for copies of "+mnt.Source, mnt.IsCopy)
		if err != nil || where == "" {
			return nil //nolint:nilerr // the wait for the client's exit follows
		}
	}
	mounts, err := s.ns.Mounts(ctx)
	if err != nil || slices.ContainsFunc(mounts, mnt.IsCopy) {
		return err
	}
	for began := time.Now(); ; {
		waiting, exists, err := c.Waiting()
		if err != nil || !exists {
			return err
		}
		if lasts := time.Since(began); waiting == 0 && lasts >= pinnedBound || lasts >= busyBound {
			break
		}
		select {
		case <-time.After(idlePause):
		case <-ctx.Done():
			return fault.Errorf(fault.Busy, "private copies of the file system in other mount namespaces are in use: %w", context.Cause(ctx))
		}
	}
	log.Info("Aborting the connection of an unmounted volume, another mount namespace keeps it")
	return c.Abort()
}

func (s *Sources) unmount(ctx context.Context, mnt host.Mount) error {
	return s.ns.UnmountWhenIdle(host.For(ctx, mount.Account(mnt.Source)), mnt, func() error { return host.Unmount(mnt.Mountpoint) })
}

// awaitReplaced waits until no file system of a mount shows besides its source and pins.
func (s *Sources) awaitReplaced(ctx context.Context, m state.Mount) error {
	where, err := s.ShownElsewhere(ctx, m, math.MaxInt64)
	if err != nil || where == "" {
		return err
	}
	return fault.Errorf(fault.Busy, "mount %s was replaced, but a bind mount of it remains at %s: %w", m.Name, where, context.Cause(ctx))
}

// ShownElsewhere returns where a file system of a mount shows besides its source and pins, in any mount namespace; "" is nowhere. It waits
// for up to bound, and not longer than ctx, until it is nowhere: a mount namespace that is being made, of a systemd unit for example, has
// copies for a moment.
func (s *Sources) ShownElsewhere(ctx context.Context, m state.Mount, bound time.Duration) (where string, err error) {
	for began, pause := time.Now(), firstCopiesPause; ; pause = min(2*pause, lastCopiesPause) {
		mounts, err := s.ns.Mounts(ctx)
		if err != nil {
			return "", err
		}
		where, err := s.pins.ShownElsewhere(ctx, mounts, s.pins.Known(mounts, []string{m.Name}, nil))
		if err != nil || where == "" || time.Since(began) >= bound {
			return where, err
		}
		select {
		case <-time.After(pause):
		case <-ctx.Done():
			return where, nil
		}
	}
}

// WaitIdle waits until no request waits for the client of a mount.
func (s *Sources) WaitIdle(ctx context.Context, m state.Mount) error {
	mounts, err := s.ns.Mounts(ctx)
	if err != nil {
		return err
	}
	mnt, mounted := host.TopAt(mounts, s.store.SourceDir(m.Name))
	if !mounted {
		return nil
	}
	c, err := s.ctl.Open(ctx, mnt.Minor)
	if err != nil || c == nil {
		return err
	}
	defer c.Close()
	return s.awaitIdle(ctx, c)
}

// awaitIdle waits until the FUSE connection has had no waiting request for a moment. umount(2) would drop a RELEASE that is still
// queued, and with it the data that the client would store then.
func (s *Sources) awaitIdle(ctx context.Context, c *host.Connection) error {
	for seen := 0; ; {
		waiting, ok, err := c.Waiting()
		switch {
		case err != nil:
			return err
		case !ok:
			return nil // the connection has ended, so no request will be answered
		case waiting == 0:
			if seen++; seen == idleReads {
				return nil
			}
		default:
			seen = 0
		}
		select {
		case <-time.After(idlePause):
		case <-ctx.Done():
			if waiting == 0 {
				return fault.Errorf(fault.Busy, "checking that no file system request is in flight: %w", context.Cause(ctx))
			}
			return fault.Errorf(fault.Busy, "%d file system requests are in flight: %w", waiting, context.Cause(ctx))
		}
	}
}
