package mount

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"time"

	"golang.org/x/sync/errgroup"
	"k8s.io/klog/v2"

	"github.com/s3-csi/s3-csi-driver/pkg/failpoint"
	"github.com/s3-csi/s3-csi-driver/pkg/host"
	"github.com/s3-csi/s3-csi-driver/pkg/launcher"
)

const (
	reconcileEvery = time.Minute
	reconcileBound = 2 * time.Minute
	reconcileWidth = 100 // mounts that are looked at, or ended, at a time
	// formerBound is for a mount that has a successor: files that are open in it keep it for as long as their owners like.
	formerBound = 5 * time.Second
	formerAgain = 15 * time.Second
	// staleAge is for a publication whose target is gone and that nobody unpublished.
	staleAge = 10 * time.Minute
)

// reconcile compares what should be with what is, for every mount, and mends what differs.
func (m *Manager) reconcile(ctx context.Context) error {
	began := time.Now()
	defer func() { m.metrics.reconcile.Observe(time.Since(began).Seconds()) }()
	var names []string
	nctx, cancel := context.WithTimeout(ctx, reconcileBound)
	defer cancel()
	if err := m.restore(nctx); err != nil {
		return err
	}
	if err := m.do(nctx, func() (err error) { names, err = m.store.names(); return err }); err != nil {
		return err
	}
	// Side by side: one that takes long to end, or never does, must not keep the others from their credentials, nor
	// what is left of crashes from being cleared away.
	tctx, cancel := context.WithTimeout(ctx, m.tending)
	defer cancel()
	var g errgroup.Group
	g.SetLimit(reconcileWidth)
	for key, lives := range livesByKey(names) {
		g.Go(func() error {
			unlock, ok := m.keys.TryLock(key) // whoever is at work on it does what is to be done
			if !ok {
				return nil
			}
			defer unlock()
			for _, name := range lives {
				m.watchers.follow(name)
				if _, err := m.tend(tctx, name); err != nil && ctx.Err() == nil {
					m.complaints.log(ctx, name, err, "The mount is not as it should be; it is tried again", "mount", name, "in", reconcileEvery)
				}
			}
			return nil
		})
	}
	_ = g.Wait()
	lctx, cancel := context.WithTimeout(ctx, reconcileBound)
	defer cancel()
	return m.clearLeftovers(lctx)
}

// livesByKey are the names of mounts by their keys, a successor before those whose places it takes: they end when it has them.
func livesByKey(names []string) map[string][]string {
	lives := map[string][]string{}
	for _, name := range names {
		lives[keyOf(name)] = append(lives[keyOf(name)], name)
	}
	for _, all := range lives {
		slices.SortFunc(all, func(a, b string) int { // generations, without leading zeros
			return cmp.Or(cmp.Compare(len(b), len(a)), cmp.Compare(b, a))
		})
	}
	return lives
}

// view is what there is to see of one mount.
type view struct {
	rec    record
	have   bool          // rec was read
	pubs   []publication // whose targets show it, or should
	living bool          // one of them does, or the mount shows somewhere else on the host
	held   bool          // somebody unmounted one of them by hand, and the CO has not asked for that
	stale  bool          // a file system of an earlier life, or of a mount that this one succeeds, shows somewhere on the host
	pinned bool          // former file systems of it are pinned, because something may still show them
	left   bool          // publications were moved away from it, and it has none
}

// look looks at one mount.
func (m *Manager) look(ctx context.Context, name string) (view, error) {
	var v view
	if err := m.do(ctx, func() (err error) {
		if v.rec, v.have, err = m.store.record(name); errors.Is(err, errDamaged) {
			m.complaints.log(ctx, name+" record", err, "The mount's record is lost", "mount", name)
			v.have, err = false, nil
		}
		if err != nil {
			return err
		}
		if v.have && v.rec.Phase == phaseRunning {
			if err := m.store.succeed(v.rec); err != nil {
				return err
			}
		}
		all, err := m.store.allPublications()
		v.pubs = slices.DeleteFunc(slices.Clone(all), func(p publication) bool { return p.Mount != name })
		v.left = len(v.pubs) == 0 && cameFrom(all, name, "")
		v.held = v.have && v.rec.Phase == phaseRunning && slices.ContainsFunc(v.pubs, held)
		return err
	}); err != nil {
		return view{}, err
	}
	mounts, err := m.Namespace.Mounts(ctx)
	if err != nil {
		return view{}, err
	}
	source, mounted := mountedAt(mounts, m.store.sourceDir(name))
	at := placesOf(v.pubs)
	names := append([]string{name}, v.rec.Former...)
	former := m.store.known(mounts, names, at.targets)
	delete(former, source.Minor)
	v.pinned = len(m.store.pins(mounts, name)) > 0
	for _, mnt := range mounts {
		shown, ours := nameOfSource(mnt.Source)
		if !ours || m.store.own(mnt) {
			continue
		}
		// A publication that is being moved here still shows the mount that it comes from.
		moving := movingAway(v.pubs, shown, mnt)
		v.living = v.living || shown == name || at.targets[mnt.Mountpoint] && (moving || slices.Contains(v.rec.Former, shown))
		v.stale = v.stale || mounted && v.have && (moving || serves(mnt, names) && former.has(mnt) && at.here(mnt))
	}
	return v, nil
}

// held tells whether a publication is the CO's yet, whatever is mounted at its target. The CO has the directory removed when
// it gives it up; until then a container may run on a copy of the mount, and would write into its own directory below if that
// was taken away. Young ones may be of a start that was cut short, and that nobody asks for any more.
func held(p publication) bool {
	if time.Since(p.Created) < staleAge {
		return false
	}
	_, err := host.Look(p.Target)
	return err == nil
}

// tend looks at one mount and mends what is not as it should be. It tells when to look again, 0: with the others. The
// key's lock is held.
func (m *Manager) tend(ctx context.Context, name string) (again time.Duration, err error) {
	v, err := m.look(ctx, name)
	switch {
	case err != nil:
		return 0, err
	case !v.have && v.living:
		return 0, nil // records are lost; the unpublish of its last target ends it
	case !v.have:
		rec, err := m.recordOf(ctx, name)
		if err != nil {
			return 0, err
		}
		return 0, m.endUnrecorded(ctx, rec)
	case v.rec.Phase == phaseStarting:
		klog.FromContext(ctx).Info("Clearing away a mount whose start was cut short", "mount", name, "volume", v.rec.VolumeID)
		return 0, m.discard(ctx, v.rec)
	case v.rec.Phase == phaseEnding && v.living:
		return 0, m.keepKeys(ctx, v.rec) // a retry of its unpublish goes on with it
	case v.rec.Superseded && v.living:
		return 0, m.keepKeys(ctx, v.rec) // its successor takes its places
	case v.rec.Superseded, v.left && !v.living:
		v.rec.Superseded = true
		kerr := m.keepKeys(ctx, v.rec)
		ctx, cancel := context.WithTimeout(ctx, formerBound)
		defer cancel()
		if err := m.end(ctx, v.rec, successor{shown: true}); err != nil {
			return formerAgain, errors.Join(err, kerr)
		}
		return 0, nil
	case v.rec.Phase == phaseEnding || !v.living && !v.held:
		return 0, m.end(ctx, v.rec, successor{})
	}
	return m.uphold(ctx, v)
}

// uphold keeps a mount that is in use serving, with current credentials, at all its places.
func (m *Manager) uphold(ctx context.Context, v view) (again time.Duration, err error) {
	rec := v.rec
	life, err := m.lifeOf(ctx, rec)
	if err != nil {
		return 0, err
	}
	reason := reasonHelper
	if life == alive {
		m.states.set(rec.Name, rec.Client, stateServing)
		kerr := m.refresh(ctx, rec) // without new credentials it is healed all the same
		old, err := m.outdated(rec)
		if err != nil || kerr != nil && old {
			return 0, errors.Join(err, kerr)
		}
		if !old {
			herr := m.healOnce(ctx, rec, v.stale)
			if v.pinned && herr == nil {
				herr = m.releasePins(ctx, rec.Name)
			}
			return 0, errors.Join(herr, kerr)
		}
		reason = reasonConfig
	}
	if life == dead {
		m.states.set(rec.Name, rec.Client, stateDead)
	}
	if !m.Heal {
		return 0, nil // the next publication mends it
	}
	if wait := m.troubles.wait(rec.Name); wait > 0 {
		klog.FromContext(ctx).Info("The client dies again and again, or cannot be started; it is left for a moment", "mount", rec.Name, "volume", rec.VolumeID, "for", wait.Round(time.Second))
		return wait, nil
	}
	failpoint.Here("uphold.dead")
	if life == dead {
		if err := m.restart(ctx, &rec, &supply{}); err != nil {
			return m.troubles.wait(rec.Name), err
		}
		return 0, m.healOnce(ctx, rec, true)
	}
	if _, err := m.renew(ctx, rec, &supply{}, reason); err != nil {
		return m.troubles.wait(rec.Name), err
	}
	return time.Second, nil
}

// healOnce heals a mount's publications where that is known to be needed, or where this driver has not looked yet: the one
// before it may have died over it.
func (m *Manager) healOnce(ctx context.Context, rec record, needed bool) error {
	if !m.Heal || !needed && !m.healed.first(rec.Name) {
		return nil
	}
	return m.heal(ctx, rec)
}

// clearLeftovers clears away what belongs to no mount: units, processes, publications whose targets are gone, file
// systems of helpers, programs of older versions.
func (m *Manager) clearLeftovers(ctx context.Context) error {
	var errs []error
	errs = append(errs, m.clearUnits(ctx), m.clearPublications(ctx), m.do(ctx, m.store.clearScratch), m.clearPins(ctx))
	if m.CleanPrograms != nil {
		var used []string
		err := m.do(ctx, func() error {
			records, err := m.store.records()
			for _, r := range records {
				if len(r.Command.Argv) > 0 {
					used = append(used, filepath.Dir(r.Command.Argv[0]))
				}
			}
			return err
		})
		if err == nil {
			err = m.CleanPrograms(ctx, used)
		}
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}

// clearUnits ends helpers of mounts that are not there: their directories are gone, by a crash or by somebody's hand. What
// a file system of ours is still served by is left alone.
func (m *Manager) clearUnits(ctx context.Context) error {
	units, err := m.Launcher.List(ctx)
	if err != nil {
		return fmt.Errorf("looking for helpers that belong to no mount: %w", err)
	}
	strays, err := m.condemn(ctx, units)
	if err != nil {
		return err
	}
	var errs []error
	for _, u := range strays {
		klog.FromContext(ctx).Info("Ending a helper that belongs to no mount", "unit", u.Name, "uid", u.UID)
		kctx, cancel := context.WithTimeout(ctx, undoBound) // one that hangs in the kernel must not keep the others
		errs = append(errs, m.Launcher.Kill(kctx, u.UID))
		cancel()
		m.alloc.Lock()
		delete(m.condemned, u.UID)
		m.alloc.Unlock()
	}
	return errors.Join(errs...)
}

// condemn picks the units that belong to no mount, and keeps their uids from new ones until they are ended: a volume that is
// mounted anew tends to get the uid that it had, and would be killed in the place of what had it before.
func (m *Manager) condemn(ctx context.Context, units []launcher.UnitInfo) (strays []launcher.UnitInfo, err error) {
	m.alloc.Lock()
	defer m.alloc.Unlock()
	// After the units were listed: a mount has its directory before its unit.
	var used map[uint32]bool
	if err := m.do(ctx, func() (err error) { used, err = m.store.uids(); return err }); err != nil {
		return nil, err
	}
	mounts, err := m.Namespace.Mounts(ctx)
	if err != nil {
		return nil, err
	}
	for _, mnt := range mounts {
		if uid, ok := servedBy(mnt); ok {
			used[uid] = true
		}
	}
	m.condemned = map[uint32]bool{}
	for _, u := range units {
		if !used[u.UID] && u.UID >= m.UIDs.First && u.UID <= m.UIDs.Last {
			strays = append(strays, u)
			m.condemned[u.UID] = true
		}
	}
	return strays, nil
}

// clearPublications forgets publications whose target and whose mount are gone: nobody will unpublish them.
func (m *Manager) clearPublications(ctx context.Context) error {
	return m.do(ctx, func() error {
		all, err := m.store.allPublications()
		if err != nil {
			return err
		}
		for _, p := range all {
			if time.Since(p.Created) < staleAge {
				continue
			}
			_, terr := host.Look(p.Target) // what is mounted there may hang
			_, merr := os.Lstat(m.store.mountDir(p.Mount))
			if errors.Is(terr, fs.ErrNotExist) && errors.Is(merr, fs.ErrNotExist) {
				klog.FromContext(ctx).Info("Forgetting a publication whose target is gone", "volume", p.VolumeID, "target", p.Target)
				if err := m.store.removePublication(p.Target); err != nil {
					return err
				}
			}
		}
		return nil
	})
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

// gone tells whether a mount's directories are no more.
func (m *Manager) gone(ctx context.Context, name string) bool {
	gone := false
	err := m.do(ctx, func() error {
		_, err := os.Lstat(m.store.mountDir(name))
		gone = errors.Is(err, fs.ErrNotExist)
		return nil
	})
	return err == nil && gone
}
