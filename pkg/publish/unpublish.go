package publish

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"time"

	"k8s.io/klog/v2"

	"github.com/s3-csi/s3-csi-driver/pkg/failpoint"
	"github.com/s3-csi/s3-csi-driver/pkg/fault"
	"github.com/s3-csi/s3-csi-driver/pkg/host"
	"github.com/s3-csi/s3-csi-driver/pkg/mount"
	"github.com/s3-csi/s3-csi-driver/pkg/mount/state"
)

// Unpublish removes a volume from its target and, if that was the mount's last publication, stops the mount. It returns nil only if
// everything that was written and closed there is stored. If that takes longer than the caller's deadline, the error reports the
// pending uploads; the drain continues, and a retry waits for it.
func (p *Publisher) Unpublish(ctx context.Context, volumeID, target string) error {
	target = p.ResolveTarget(target)
	if err := p.checkTarget(target); err != nil {
		return err
	}
	deadline, ok := ctx.Deadline()
	if !ok {
		deadline = time.Now().Add(p.parts.DrainTimeout)
	}
	// The error must reach the caller before the caller's own deadline.
	deadline = deadline.Add(-min(time.Second, time.Until(deadline)/2))
	return p.targets.do(ctx, target, "unpublish "+volumeID, func() error {
		wctx, cancel := context.WithDeadline(context.WithoutCancel(ctx), deadline)
		defer cancel()
		return p.unpublish(wctx, volumeID, target)
	})
}

// PublishedAt returns a target at which a volume is published, or "" if there is none. A target counts until everything that was written
// there is stored.
func (p *Publisher) PublishedAt(ctx context.Context, volumeID string) (string, error) {
	all, err := p.parts.Store.Pubs.All(ctx)
	for _, pub := range all {
		if pub.VolumeID == volumeID {
			return pub.Target, err
		}
	}
	return "", err
}

func (p *Publisher) unpublish(ctx context.Context, volumeID, target string) error {
	pub, have, err := p.parts.Store.Pubs.Get(ctx, target)
	if err != nil {
		return err
	}
	if have && pub.VolumeID != volumeID {
		return fault.Errorf(fault.Precondition, "target %s belongs to volume %s, not %s", target, pub.VolumeID, volumeID)
	}
	mounts, err := p.parts.Namespace.Mounts(ctx)
	if err != nil {
		return err
	}
	if top, mounted := host.TopAt(mounts, target); mounted {
		name, ours := mount.NameOf(top.Source)
		switch {
		case !ours && !have:
			return fault.Errorf(fault.Precondition, "target %s has a mount of another program (%s, type %s): unmount it first", target, top.Source, top.FSType)
		case ours && !have:
			// The record is lost, and the mount table has the mount's name. A retry must find it while the mount drains.
			pub = state.Publication{Target: target, VolumeID: volumeID, Mount: name, Created: time.Now()}
			if err := p.parts.Store.Pubs.Write(ctx, pub); err != nil {
				return err
			}
			failpoint.Here("unpublish.recorded")
		}
		if err := p.unmountTarget(ctx, target); err != nil {
			return err
		}
	}
	failpoint.Here("unpublish.unmounted")
	if pub.Mount != "" {
		if err := p.parts.Mounts.Release(ctx, pub, func(ctx context.Context) error { return p.unmountHealed(ctx, target) }); err != nil {
			return err
		}
		klog.FromContext(ctx).Info("Unpublished", "mount", pub.Mount)
	}
	return p.removeTarget(ctx, target)
}

// unmountHealed unmounts a target again that was healed since it was unmounted.
func (p *Publisher) unmountHealed(ctx context.Context, target string) error {
	_, _, mounted, err := p.mountAt(ctx, target)
	if err != nil || !mounted {
		return err
	}
	return p.unmountTarget(ctx, target)
}

// removeTarget removes the empty directory at the target, as the CSI specification requires of NodeUnpublishVolume.
func (p *Publisher) removeTarget(ctx context.Context, target string) error {
	return p.parts.Namespace.Do(ctx, "removing the target", func() error {
		if err := host.RemoveTarget(p.realRoot, target); err != nil {
			return fmt.Errorf("removing target %s: %w", target, err)
		}
		return nil
	})
}

// unmountTarget unmounts all of the driver's mounts at the target.
func (p *Publisher) unmountTarget(ctx context.Context, target string) error {
	for {
		mounts, err := p.parts.Namespace.Mounts(ctx)
		if err != nil {
			return err
		}
		top, mounted := host.TopAt(mounts, target)
		if !mounted {
			return nil
		}
		if _, ours := mount.NameOf(top.Source); !ours {
			return fault.Errorf(fault.Precondition, "target %s: %s (type %s) is mounted over the volume: unmount it first", target, top.Source, top.FSType)
		}
		unmount := func() error { return host.UnmountTarget(p.realRoot, target) }
		if err := p.parts.Namespace.UnmountWhenIdle(host.For(ctx, mount.Account(top.Source)), top, unmount); err != nil {
			return err
		}
	}
}

// Stats returns the usage of a volume as it was measured, or else as its client reports it, which is asked in any case. So ctx should have
// a deadline. It is fault.NotFound if the volume is not published at the path.
func (p *Publisher) Stats(ctx context.Context, volumeID, path string) (mount.Stats, error) {
	path = p.ResolveTarget(path)
	pub, ok, err := p.parts.Store.Pubs.Get(ctx, path)
	if err != nil {
		return mount.Stats{}, err
	}
	if !ok || pub.VolumeID != volumeID {
		return mount.Stats{}, fault.Errorf(fault.NotFound, "volume %s is not published at %s on this node", volumeID, path)
	}
	mounts, err := p.parts.Namespace.Mounts(ctx)
	if err != nil {
		return mount.Stats{}, err
	}
	top, ok := host.TopAt(mounts, path)
	if name, ours := mount.NameOf(top.Source); !ok || !ours || name != pub.Mount {
		return mount.Stats{}, fault.Errorf(fault.NotFound, "volume %s: the mount at %s is gone; republish the volume to restore it", volumeID, path)
	}
	st, err := p.parts.Namespace.Statfs(host.For(ctx, mount.Account(top.Source)), path)
	switch {
	case host.IsCorruptedMount(err):
		return mount.Stats{}, fault.Errorf(fault.Unavailable, "volume %s at %s: the mount is stale, or its client fails: %w", volumeID, path, err)
	case errors.Is(err, fs.ErrNotExist):
		return mount.Stats{}, fault.Errorf(fault.NotFound, "volume %s: %w", volumeID, err)
	case err != nil:
		return mount.Stats{}, fmt.Errorf("volume %s at %s: its client does not answer: %w", volumeID, path, err)
	}
	stats := mount.StatsOf(st)
	if u, ok := p.parts.Usage.Of(volumeID); ok {
		stats = stats.With(u)
	}
	return stats, nil
}
