package mount

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"golang.org/x/sync/errgroup"
	"k8s.io/klog/v2"

	"github.com/s3-csi/s3-csi-driver/pkg/credentials"
	"github.com/s3-csi/s3-csi-driver/pkg/host"
)

// sweep ends mounts that nobody uses and clears away those that were never finished.
func (m *Manager) sweep(ctx context.Context) error {
	var (
		records  []record
		halfMade []string
	)
	err := m.do(ctx, func() (err error) {
		records, halfMade, err = m.store.records()
		return err
	})
	if err != nil {
		return err
	}
	for _, rec := range records {
		halfMade = append(halfMade, rec.Name)
	}
	// Side by side: one that takes long to end, or never does, must not keep the others from their credentials.
	var (
		g    errgroup.Group
		errs = make([]error, len(halfMade))
	)
	g.SetLimit(sweepWidth)
	for i, name := range halfMade {
		g.Go(func() error { errs[i] = m.tend(ctx, name); return nil })
	}
	_ = g.Wait()
	return errors.Join(errs...)
}

// tend looks at one mount, unless somebody is at work on its key.
func (m *Manager) tend(ctx context.Context, name string) error {
	unlock, ok := m.keys.TryLock(keyOf(name))
	if !ok {
		return nil
	}
	defer unlock()
	var (
		rec  record
		have bool
		used bool
	)
	err := m.do(ctx, func() (err error) {
		if rec, have, err = m.store.record(name); err != nil {
			return err
		}
		all, err := m.store.allPublications()
		used = usedElsewhere(all, name, "")
		return err
	})
	if err == nil && !used {
		used, err = m.bound(ctx, name)
	}
	switch {
	case err != nil:
		return err
	case !have && used:
		return nil // records are lost; the unpublish of its last target ends it
	case !have:
		if rec, err = m.recordOf(ctx, name); err != nil {
			return err
		}
		return m.endUnrecorded(ctx, rec)
	case used && rec.Phase == phaseRunning:
		return m.refresh(ctx, rec)
	case used:
		return nil // a retry of its publish or unpublish goes on with it
	case rec.Phase == phaseStarting:
		klog.FromContext(ctx).Info("Clearing away a mount whose start was cut short", "mount", name, "volume", rec.VolumeID)
		return m.discard(ctx, rec)
	}
	return m.end(ctx, rec, successor{})
}

// bound tells whether a mount shows anywhere but at its source: at a target whose record is lost, or where somebody else
// bound it.
func (m *Manager) bound(ctx context.Context, name string) (bool, error) {
	mounts, err := m.Namespace.Mounts(ctx)
	return slices.ContainsFunc(mounts, func(mnt host.Mount) bool {
		shown, ours := nameOfSource(mnt.Source)
		return ours && shown == name && mnt.Mountpoint != m.store.sourceDir(name)
	}), err
}

// refresh gives a mount of the driver's own credentials the current ones.
func (m *Manager) refresh(ctx context.Context, rec record) error {
	if rec.Spec.Source != credentials.SourceDriver {
		return nil
	}
	keys, err := m.Backends.DriverKeys(ctx)
	if err != nil {
		return fmt.Errorf("refreshing the credentials of mount %s (volume %s): %w", rec.Name, rec.VolumeID, err)
	}
	return m.giveKeys(ctx, rec, keys)
}

// reportCaches says what of the cache belongs to no mount. It may be the only copy of a file, so it is for a human to remove.
func (m *Manager) reportCaches(ctx context.Context) {
	var left []string
	err := m.do(ctx, func() (err error) { left, err = m.store.leftCaches(); return err })
	switch {
	case err != nil:
		klog.FromContext(ctx).Error(err, "The cache directory cannot be looked at", "directory", m.CacheDir)
	case len(left) > 0:
		klog.FromContext(ctx).Info("Mounts that did not come to their end, by a reboot for example, left directories that may hold files that were never stored: "+
			"look at them and remove them", "directories", left)
	}
}
