package publish

import (
	"context"
	"slices"

	"k8s.io/klog/v2"

	"github.com/s3-csi/s3-csi-driver/pkg/fault"
	"github.com/s3-csi/s3-csi-driver/pkg/host"
	"github.com/s3-csi/s3-csi-driver/pkg/mount"
	"github.com/s3-csi/s3-csi-driver/pkg/mount/state"
	"github.com/s3-csi/s3-csi-driver/pkg/mount/want"
)

type targetState int

const (
	absent  targetState = iota // none of the driver's mounts
	healthy                    // the volume of the request
	stale                      // a mount of the driver that must be replaced: its client has exited, or it does not match the request
	rotated                    // the volume of the request, with the credentials of its former secret
)

type target struct {
	state targetState
	mount state.Mount       // that it shows; empty if its record is lost
	pub   state.Publication // empty if its record is lost
}

// rotatedTo reports whether the target's mount must be restarted and serves the spec, although it has the key of a former secret.
func (t target) rotatedTo(spec mount.Spec) bool {
	return t.state == stale && t.mount.Rotated != "" && !t.mount.Superseded && t.pub.Mount == t.mount.Name && t.mount.Serves().Encode() == spec.Encode()
}

// mountAt returns the top mount on a target.
func (p *Publisher) mountAt(ctx context.Context, path string) (top host.Mount, mounts []host.Mount, mounted bool, err error) {
	at, err := host.Call(ctx, p.parts.Namespace, "checking target "+path, nil, func() (host.PathState, error) {
		at, _ := host.Inspect(path) // an invalid path is reported when it is opened
		return at, nil
	})
	if err != nil || !at.Mountpoint {
		return host.Mount{}, nil, false, err
	}
	if mounts, err = p.parts.Namespace.Mounts(ctx); err != nil {
		return host.Mount{}, nil, false, err
	}
	top, mounted = host.TopAt(mounts, path)
	return top, mounts, mounted, nil
}

// showsVolume reports whether a target shows one of the driver's volumes, or may show one.
func (p *Publisher) showsVolume(ctx context.Context, path string) bool {
	top, _, mounted, err := p.mountAt(ctx, path)
	_, ours := mount.NameOf(top.Source)
	return err != nil || mounted && ours
}

// readTarget reads what a target shows and compares it with a request.
func (p *Publisher) readTarget(ctx context.Context, w want.Mount) (target, error) {
	path := w.Publication.Target
	top, mounts, mounted, err := p.mountAt(ctx, path)
	if err != nil || !mounted {
		return target{}, err
	}
	name, ours := mount.NameOf(top.Source)
	if !ours {
		return target{}, fault.Errorf(fault.Precondition, "target %s has another mount (%s, type %s): unmount it first", path, top.Source, top.FSType)
	}
	t := target{state: stale}
	if t.pub, _, err = p.parts.Store.Pubs.Get(ctx, path); err != nil {
		return t, err
	}
	var have bool
	if t.mount, have, err = p.parts.Store.Mount(ctx, name); err != nil {
		return t, err
	}
	source, mounted := host.TopAt(mounts, p.parts.Store.SourceDir(name))
	if have && mounted && source.Major == top.Major && source.Minor == top.Minor {
		if t.state, err = p.compare(ctx, w, t); err != nil || t.state != stale {
			return t, err
		}
	}
	klog.FromContext(ctx).Info("Mount at target is stale, replacing it", "mount", name)
	return t, nil
}

// compare compares a target, which shows the file system of its mount, with the request.
func (p *Publisher) compare(ctx context.Context, w want.Mount, t target) (targetState, error) {
	m, pub, path := t.mount, t.pub, w.Publication.Target
	health, err := p.parts.Mounts.Health(ctx, m)
	if err != nil {
		return stale, err
	}
	differs := m.Serves().Encode() != w.Spec.Encode()
	keepsServing := health.Serves() || m.KeepsOnDisk(p.parts.Clients)
	switch {
	case m.Superseded, slices.Contains(pub.MovedFrom, m.Name): // the publication belongs to another mount now
		return stale, nil
	case !differs && m.Rotating: // a rotation was interrupted
		return rotated, nil
	case keepsServing && pub.Mount == m.Name && w.Spec.RotatedFrom(m.Serves()):
		return rotated, nil
	case !health.Serves():
		return stale, nil
	}
	if err := t.conflict(w, differs); err != nil {
		return stale, err
	}
	// The client may have been restarted since the mount table was read, and the target not be healed yet.
	if health == mount.Outdated || p.parts.Targets.CheckTarget(ctx, m, path) != nil {
		return stale, nil
	}
	return healthy, nil
}

// conflict returns an error if a target shows another volume than a request asks for. differs reports that their specs do.
func (t target) conflict(w want.Mount, differs bool) error {
	m, pub, path := t.mount, t.pub, w.Publication.Target
	switch {
	case pub.Mount == "":
		return fault.Errorf(fault.Exists, "target %s shows volume %s, and the record of that publication is lost: unpublish it first", path, m.VolumeID)
	case pub.Mount != m.Name || pub.VolumeID != w.Publication.VolumeID:
		return fault.Errorf(fault.Exists, "target %s shows volume %s: unpublish that one first", path, m.VolumeID)
	case differs:
		return fault.Errorf(fault.Exists, "target %s shows the volume with other parameters, options or credentials; "+
			"unpublish and republish the target to apply the new ones (in Kubernetes: delete the pod)", path)
	case pub.ReadOnly != w.Publication.ReadOnly:
		return fault.Errorf(fault.Exists, "target %s shows the volume with readOnly=%t: unpublish it first to change that", path, pub.ReadOnly)
	}
	return nil
}
