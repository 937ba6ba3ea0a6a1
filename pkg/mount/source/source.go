// Package source mounts and unmounts sources: the FUSE file systems of mounts, of which publications are bind mounts.
package source

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"math"
	"os"
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
	idleReads   = 4                      // this many reads in a row must see no waiting request
	idlePause   = 5 * time.Millisecond   // between two of them
	copiesPause = 100 * time.Millisecond // between two searches of all mount namespaces
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
		source, err := host.OpenDir(s.store.SourceDir(m.Name))
		if err != nil {
			return nil, err
		}
		defer source.Close()
		fuse, err := host.OpenFuse()
		if err != nil {
			return nil, err
		}
		err = host.MountFuse(fuse, source, host.FuseMount{
			Source: m.Source, UID: m.UID, GID: m.UID, ReadOnly: m.Spec.ReadOnly, SELinuxContext: m.Spec.SELinuxContext,
		})
		if err == nil && ctx.Err() != nil { // the caller has given up
			err = errors.Join(ctx.Err(), host.Unmount(s.store.SourceDir(m.Name)))
		}
		if err != nil {
			fuse.Close()
			return nil, err
		}
		failpoint.Here("mount.mounted")
		return fuse, nil
	})
	if err != nil {
		return nil, fmt.Errorf("mounting the file system of mount %s: %w", m.Name, err)
	}
	return fuse, nil
}

// Find returns the file system on a mount's source in a mount table.
func (s *Sources) Find(mounts []host.Mount, name string) (mnt host.Mount, mounted bool) {
	return host.TopAt(mounts, s.store.SourceDir(name))
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

// Clear unmounts the file system on the source of a mount whose client has exited. With pin it is pinned first, because publications
// may show it.
func (s *Sources) Clear(ctx context.Context, m state.Mount, pin bool) error {
	for {
		mounts, err := s.ns.Mounts(ctx)
		if err != nil {
			return err
		}
		mnt, mounted := s.Find(mounts, m.Name)
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

// Unmount unmounts a mount's source once no request waits for the client, and detaches copies in other mount namespaces: any of
// them would keep the client alive. If the mount is replaced, its copies are replaced first and not detached.
func (s *Sources) Unmount(ctx context.Context, m state.Mount, replaced bool) error {
	// Copies may be left of a source that was unmounted before. Its device number alone may belong to another file system now.
	gone := host.Mount{Minor: m.Minor, Source: m.Source, FSType: "fuse"}
	for {
		if replaced {
			if err := s.awaitReplaced(ctx, m); err != nil {
				return err
			}
		}
		mounts, err := s.ns.Mounts(ctx)
		if err != nil {
			return err
		}
		mnt, mounted := s.Find(mounts, m.Name)
		if mounted {
			if err := s.awaitIdle(ctx, mnt); err != nil {
				return err
			}
			if err := s.unmount(ctx, mnt); err != nil {
				return err
			}
			gone = mnt
		}
		// Bind mounts in this namespace are publications, or were made by another process. The latter keep the client running,
		// which the error of the wait for its exit reports.
		if gone.Minor != 0 && !replaced && s.connected(ctx, gone.Minor) {
			if n, err := s.ns.DetachCopies(ctx, gone); err != nil {
				klog.FromContext(ctx).Error(err, "Cannot detach copies in other mount namespaces", "mount", m.Name)
			} else if n > 0 {
				klog.FromContext(ctx).Info("Detached copies in other mount namespaces", "mount", m.Name, "copies", n)
			}
		}
		if !mounted {
			return s.pins.UnpinAll(ctx, m.Name)
		}
		gone.Minor = 0
	}
}

// connected reports whether a file system may have mounts, in whatever namespace: its connection exists as long as it has any. The
// search for these mounts reads the mount table of every namespace on the node.
func (s *Sources) connected(ctx context.Context, minor uint32) bool {
	_, exists, err := s.ctl.Waiting(ctx, minor)
	return exists || err != nil
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
	for began := time.Now(); ; {
		mounts, err := s.ns.Mounts(ctx)
		if err != nil {
			return "", err
		}
		where, err := s.pins.ShownElsewhere(ctx, mounts, s.pins.Known(mounts, []string{m.Name}, nil))
		if err != nil || where == "" || time.Since(began) >= bound {
			return where, err
		}
		select {
		case <-time.After(copiesPause):
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
	if mnt, mounted := s.Find(mounts, m.Name); mounted {
		return s.awaitIdle(ctx, mnt)
	}
	return nil
}

// awaitIdle waits until the FUSE connection has had no waiting request for a moment. umount(2) would drop a RELEASE that is still
// queued, and with it the data that the client would store then.
func (s *Sources) awaitIdle(ctx context.Context, mnt host.Mount) error {
	for seen := 0; ; {
		waiting, ok, err := s.ctl.Waiting(ctx, mnt.Minor)
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
			return fault.Errorf(fault.Busy, "%d file system requests are in flight: %w", max(waiting, 1), context.Cause(ctx))
		}
	}
}
