package podclient

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"time"

	"golang.org/x/sys/unix"
	"k8s.io/klog/v2"

	"github.com/s3-csi/s3-csi-driver/pkg/failpoint"
	"github.com/s3-csi/s3-csi-driver/pkg/fault"
	"github.com/s3-csi/s3-csi-driver/pkg/host"
	"github.com/s3-csi/s3-csi-driver/pkg/mount/heal"
	"github.com/s3-csi/s3-csi-driver/pkg/mount/pins"
	"github.com/s3-csi/s3-csi-driver/pkg/mount/state"
	"github.com/s3-csi/s3-csi-driver/pkg/podvolume"
)

const (
	// abortBound bounds the abort of a connection, and the replacement at a target.
	abortBound = 10 * time.Second
	// mountBound bounds a mount, which waits for no client.
	mountBound        = 10 * time.Second
	maxFailedUnmounts = 3
	// maxFormer bounds the file systems of former clients that stay mounted because a copy cannot be replaced.
	maxFormer = 8
)

// showVolume makes sure that the volume's empty file system exists and that something of the volume is mounted at its target.
func (s *Server) showVolume(ctx context.Context, v podvolume.Volume) error {
	id := idOf(v.Target)
	mounts, err := s.ns.Mounts(ctx)
	if err != nil {
		return err
	}
	_, have := host.TopAt(mounts, s.records.empty(id))
	top, mounted := host.TopAt(mounts, v.Target)
	if mounted && top.Source != sourceOf(id) {
		return errForeign(v.Target, top)
	}
	if have && mounted {
		return nil
	}
	return s.ns.Do(ctx, "mounting the empty file system of "+v.Target, func() error {
		if !have {
			place := s.records.empty(id)
			if err := makeDir(place); err != nil {
				return err
			}
			if err := host.MountEmpty(place, sourceOf(id), v.SELinuxContext); err != nil {
				return err
			}
			failpoint.Here("podclient.empty")
		}
		if mounted {
			return nil
		}
		return s.bindEmpty(v)
	})
}

func makeDir(path string) error {
	if err := os.Mkdir(path, 0o700); err != nil && !errors.Is(err, os.ErrExist) {
		return err
	}
	return nil
}

func (s *Server) bindEmpty(v podvolume.Volume) error {
	empty, err := host.OpenDir(s.records.empty(idOf(v.Target)))
	if err != nil {
		return err
	}
	defer empty.Close()
	target, err := host.MakeTarget(s.opts.TargetRoot, v.Target)
	if err != nil {
		return err
	}
	defer target.Close()
	return host.Bind(empty, target, host.BindAttrs{ReadOnly: v.ReadOnly, Shared: true})
}

// mountClient mounts a FUSE file system for the next client of a volume, which is that peer's. It returns the client's number and
// descriptor. It goes on when ctx ends, because unpublish, which ends it, must find the mount.
func (s *Server) mountClient(ctx context.Context, v podvolume.Volume, p peer) (n uint64, fuse *os.File, err error) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), mountBound)
	defer cancel()
	id := idOf(v.Target)
	mounts, err := s.ns.Mounts(ctx)
	if err != nil {
		return 0, nil, err
	}
	last, _ := s.records.current(mounts, id)
	n = last.n + 1
	path := s.records.client(id, n)
	drop := func(f *os.File) { f.Close() } // which leaves a stale mount, to be removed like that of a client that exited
	fuse, err = host.Call(ctx, s.ns, "mounting the file system of the client of "+v.Target, drop, func() (*os.File, error) {
		failpoint.Here("podclient.mounting")
		if err := makeDir(path); err != nil {
			return nil, err
		}
		m := host.FuseMount{Source: sourceOf(id), UID: p.uid, GID: p.gid, ReadOnly: v.ReadOnly, SELinuxContext: v.SELinuxContext}
		fuse, err := host.NewFuseMount(path, m)
		if err == nil {
			failpoint.Here("podclient.mounted")
		}
		return fuse, err
	})
	return n, fuse, err
}

// extent is where a volume's file systems are replaced.
type extent int

const (
	everywhere extent = iota
	atTarget
)

// replaceShown shows one of a volume's file systems instead of its others. again is true if something could not
// be replaced that a later call may replace.
func (s *Server) replaceShown(ctx context.Context, v podvolume.Volume, with fileSystem, where extent) (again bool, err error) {
	id := idOf(v.Target)
	pub := state.Publication{Target: v.Target, VolumeID: v.VolumeID, ReadOnly: v.ReadOnly}
	next := func(ctx context.Context) (host.Swap, []host.Mount, error) {
		mounts, err := s.ns.Mounts(ctx)
		if err != nil {
			return host.Swap{}, nil, err
		}
		former := map[uint32]bool{}
		for _, m := range s.records.of(mounts, id) {
			former[m.mount.Minor] = m.mount.Minor != with.mount.Minor
		}
		stale := func(m host.Mount) bool { return m.Major == 0 && m.Source == sourceOf(id) && former[m.Minor] }
		return host.Swap{Source: with.mount, Stale: stale}, mounts, nil
	}
	count := func(all []host.Swapped) (replaced int) {
		again = false
		for _, one := range all {
			if one.Err == nil {
				replaced++
				continue
			}
			again = again || heal.IsTransient(one.Err)
			klog.FromContext(ctx).V(2).Info("Mount of volume not replaced", "at", one.Mountpoint, "pid", one.PID, "error", one.Err)
		}
		if replaced > 0 {
			klog.FromContext(ctx).Info("Replaced mounts of volume", "count", replaced, "at", heal.Named(all), "client", with.n)
		}
		return replaced
	}
	if where == everywhere {
		err := heal.Rounds{Namespace: s.ns, Next: next, Count: count}.Replace(ctx, heal.PlacesOf([]state.Publication{pub}))
		return again || err != nil, err
	}
	swap, _, err := next(ctx)
	if err != nil {
		return true, err
	}
	swap.Bound = abortBound
	all, err := s.ns.SwapHere(ctx, swap, func(m host.Mount) bool { return m.Mountpoint == v.Target })
	count(all)
	return again || err != nil, err
}

// pruneFormer unmounts the file systems of clients, except that of the client keep, that show nowhere any more; and the oldest if there are too
// many, whose copies are then not replaced any more.
func (s *Server) pruneFormer(ctx context.Context, v podvolume.Volume, keep uint64) error {
	mounts, err := s.ns.Mounts(ctx)
	if err != nil {
		return err
	}
	former := slices.DeleteFunc(s.records.of(mounts, idOf(v.Target)), func(m fileSystem) bool { return m.n == 0 || m.n == keep })
	slices.SortFunc(former, func(a, b fileSystem) int { return cmp.Compare(a.n, b.n) })
	var errs []error
	for i, m := range former {
		var shownAt string
		var err error
		if len(former)-i <= maxFormer {
			shownAt, err = s.places.ShownElsewhere(ctx, mounts, pins.Devices{m.mount.Minor: true})
		}
		if err == nil && shownAt == "" {
			err = s.ns.Do(ctx, "removing "+m.mount.Mountpoint, func() error { return host.RemoveMountPoint(m.mount.Mountpoint) })
		}
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}

// abortConnection ends the connection of one of a volume's clients, which is mounted: so its number belongs to it.
func (s *Server) abortConnection(ctx context.Context, m fileSystem) error {
	ctx, cancel := context.WithTimeout(ctx, abortBound)
	defer cancel()
	if err := s.opts.Connections.Abort(ctx, m.mount.Minor); err != nil {
		return fmt.Errorf("aborting the connection of the client at %s: %w", m.mount.Mountpoint, err)
	}
	return nil
}

// removeVolume takes everything of a volume away, the record last. It can be repeated.
func (s *Server) removeVolume(ctx context.Context, v podvolume.Volume) error {
	id := idOf(v.Target)
	if err := s.stopReconciler(ctx, v.Target); err != nil {
		return err
	}
	if err := s.ns.Do(ctx, "removing the socket of "+v.Target, func() error { return removeSocket(s.opts.TargetRoot, v) }); err != nil {
		return err
	}
	mounts, err := s.ns.Mounts(ctx)
	if err != nil {
		return err
	}
	for _, m := range s.records.of(mounts, id) {
		if m.n > 0 {
			if err := s.abortConnection(ctx, m); err != nil {
				return err
			}
		}
	}
	failpoint.Here("podclient.aborted")
	if err := s.unmountTarget(ctx, v); err != nil {
		return err
	}
	err = s.ns.Do(ctx, "unmounting the file systems of "+v.Target, func() error {
		places, err := filepath.Glob(filepath.Join(s.records.mounts(), id) + ".*")
		if err != nil {
			return err
		}
		for _, dir := range places {
			if err := host.RemoveMountPoint(dir); err != nil {
				return err
			}
		}
		return host.RemoveTarget(s.opts.TargetRoot, v.Target)
	})
	if err != nil {
		return err
	}
	if err := s.records.remove(ctx, v.Target); err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.active, idOf(v.Target))
	return nil
}

// unmountTarget detaches the volume's mounts at its target. Their connections are aborted, so nothing that could be stored is lost.
func (s *Server) unmountTarget(ctx context.Context, v podvolume.Volume) error {
	for failed := 0; ; {
		mounts, err := s.ns.Mounts(ctx)
		if err != nil {
			return err
		}
		top, mounted := host.TopAt(mounts, v.Target)
		if !mounted {
			return nil
		}
		if top.Source != sourceOf(idOf(v.Target)) {
			return errForeign(v.Target, top)
		}
		err = s.ns.Do(ctx, "unmounting "+v.Target, func() error { return host.DetachTarget(s.opts.TargetRoot, v.Target) })
		switch {
		case err == nil:
		case !errors.Is(err, unix.EINVAL) && !fault.Is(err, fault.NotFound):
			return err
		case failed == maxFailedUnmounts:
			return fault.Errorf(fault.Precondition, "target %s is mounted but cannot be unmounted; does a mount on a directory above it hide it? %w",
				v.Target, err)
		default: // it was unmounted meanwhile
			failed++
		}
	}
}
