package supervisor

import (
	"context"
	"path/filepath"
	"slices"

	"github.com/s3-csi/s3-csi-driver/pkg/host"
	"github.com/s3-csi/s3-csi-driver/pkg/mount"
	"github.com/s3-csi/s3-csi-driver/pkg/mount/heal"
	"github.com/s3-csi/s3-csi-driver/pkg/mount/pins"
	"github.com/s3-csi/s3-csi-driver/pkg/mount/state"
)

// snapshot is the publications and the mount table at one time, indexed by the names of mounts, so that the view of one mount takes
// no look at the others.
type snapshot struct {
	all     []state.Publication
	pubs    map[string][]state.Publication // of each mount
	moved   map[string]bool                // some publications were moved away from these mounts
	sources map[string]host.Mount          // by the path of the source: the topmost mount
	own     map[string][]host.Mount        // sources and pins, by the mount whose name they carry
	shown   map[string][]host.Mount        // the driver's other mounts, by the mount whose name they carry
	pinned  map[string]bool                // these mounts have pins
}

// snapshot reads publications and mount table once. The latter comes second, because a target is recorded before it is mounted.
func (s *Supervisor) snapshot(ctx context.Context) (snapshot, error) {
	pubs, err := s.store.Pubs.All(ctx)
	if err != nil {
		return snapshot{}, err
	}
	mounts, err := s.namespace.Mounts(ctx)
	if err != nil {
		return snapshot{}, err
	}
	now := snapshot{
		all: pubs, pubs: map[string][]state.Publication{}, moved: map[string]bool{}, sources: map[string]host.Mount{},
		own: map[string][]host.Mount{}, shown: map[string][]host.Mount{}, pinned: s.pins.Names(mounts),
	}
	for _, p := range pubs {
		now.pubs[p.Mount] = append(now.pubs[p.Mount], p)
		for _, name := range p.MovedFrom {
			now.moved[name] = true
		}
	}
	sources := s.store.SourcesDir()
	for _, mnt := range mounts {
		if filepath.Dir(mnt.Mountpoint) == sources {
			now.sources[mnt.Mountpoint] = mnt // later entries lie on top
		}
		name, ours := mount.NameOf(mnt.Source)
		switch {
		case !ours:
		case s.pins.Own(mnt):
			now.own[name] = append(now.own[name], mnt)
		default:
			now.shown[name] = append(now.shown[name], mnt)
		}
	}
	return now, nil
}

// view is the actual state of one mount.
type view struct {
	mount     state.Mount
	have      bool                // mount was read
	pubs      []state.Publication // whose targets show it, or should
	mounted   bool                // a file system is on its source
	shown     bool                // at one of them, or elsewhere on the host
	stale     bool                // a file system of an earlier generation, or of a predecessor, shows somewhere on the host
	pinned    bool                // former file systems are pinned, because they may still be shown
	movedAway bool                // it has no publication, and some were moved away from it
	former    bool                // there is a file system, other than the one on its source, that containers may show instead of it
}

// view returns the state of a mount. have reports whether its record was read.
func (s *Supervisor) view(now snapshot, name string, m state.Mount, have bool) view {
	v := view{mount: m, have: have, pubs: now.pubs[name], pinned: now.pinned[name]}
	v.movedAway = len(v.pubs) == 0 && now.moved[name]
	source, mounted := now.sources[s.store.SourceDir(name)]
	v.mounted = mounted
	at := heal.PlacesOf(v.pubs)
	names := append([]string{name}, m.Predecessors...)
	former := pins.Devices{}
	for _, n := range names {
		for _, mnt := range slices.Concat(now.own[n], now.shown[n]) {
			if pins.Serves(mnt, names) && (s.pins.Own(mnt) || at.Targets[mnt.Mountpoint]) {
				former[mnt.Minor] = true
			}
		}
	}
	delete(former, source.Minor)
	v.former = len(former) > 0 || slices.ContainsFunc(v.pubs, func(p state.Publication) bool { return len(p.MovedFrom) > 0 })
	seen := map[string]bool{}
	look := func(shown string) {
		if seen[shown] {
			return
		}
		seen[shown] = true
		for _, mnt := range now.shown[shown] {
			// A publication that is being moved here still shows the mount that it comes from.
			moving := heal.MovingAway(v.pubs, shown, mnt)
			v.shown = v.shown || shown == name || at.Targets[mnt.Mountpoint] && (moving || slices.Contains(m.Predecessors, shown))
			v.stale = v.stale || mounted && have && (moving || pins.Serves(mnt, names) && former.Has(mnt) && at.Has(mnt))
		}
	}
	for _, n := range names {
		look(n)
	}
	for _, p := range v.pubs {
		for _, n := range p.MovedFrom {
			look(n)
		}
	}
	return v
}

// pass is a reconcile pass over all mounts: a snapshot with the records of all mounts.
type pass struct {
	super   *Supervisor
	seen    snapshot
	records map[string]state.Mount // those that could be read
	// outdated are the mounts of which containers show another file system than the current one; searched is false if that is
	// unknown.
	outdated map[string]bool
	searched bool
}

// BeginPass reads the actual state of all mounts once, and returns a function that reconciles the mounts of one key, in this order. If
// another call works on the key that function does nothing. It calls failed with errors.
//
// What was read only serves to find mounts that are in order, which is nearly all of them. Before any other mount is changed, its
// state is read again under the lock of its key.
func (s *Supervisor) BeginPass(ctx context.Context) (func(ctx context.Context, key string, names []string, failed func(name string, err error)), error) {
	s.keys.changed.Clear() // before the first read: what changes from here on is not in the snapshot
	all, err := s.store.Mounts(ctx)
	if err != nil {
		return nil, err
	}
	p := &pass{super: s, records: make(map[string]state.Mount, len(all))}
	for _, m := range all {
		p.records[m.Name] = m
	}
	if p.seen, err = s.snapshot(ctx); err != nil {
		return nil, err
	}
	p.searchPods(ctx)
	return p.tryReconcile, nil
}

// searchPods finds the outdated mounts if this process has not healed all mounts yet. Most have nothing to heal when the driver starts, and
// are found by one search of all mount namespaces instead of one for each.
func (p *pass) searchPods(ctx context.Context) {
	unhealed := false
	for _, m := range p.records {
		unhealed = unhealed || m.Phase == state.Running && p.super.healer.Unhealed(m)
	}
	if !unhealed {
		return
	}
	outdated, err := p.super.healer.OutdatedInPods(ctx, p.seen.all, func(name string) (uint32, bool) {
		mnt, mounted := p.seen.sources[p.super.store.SourceDir(name)]
		return mnt.Minor, mounted
	})
	if err != nil {
		p.super.tracker.LogError(ctx, "search", err, "Cannot search for stale mounts in pods")
		return
	}
	p.outdated, p.searched = outdated, true
}

func (p *pass) tryReconcile(ctx context.Context, key string, names []string, failed func(name string, err error)) {
	unlock, ok := p.super.keys.TryLock(key)
	if !ok {
		return
	}
	defer unlock()
	_, changed := p.super.keys.changed.Load(key)
	current := !changed
	for _, name := range names {
		if current {
			done, err := p.confirmMount(ctx, name)
			if err != nil {
				failed(name, err)
			}
			if done {
				p.super.tracker.Mount(name).Reconciled(err, 0)
				continue
			}
		}
		current = false // the reconciliation of one mount may change the others of its key
		again, err := p.super.reconcileMount(ctx, name)
		if err != nil {
			failed(name, err)
		}
		if p.super.store.Exists(ctx, name) {
			p.super.tracker.Mount(name).Reconciled(err, again)
		}
	}
}

// confirmMount refreshes the credentials of a mount that is in use and in order, as far as the snapshot shows. done is false if it may have
// to be changed.
func (p *pass) confirmMount(ctx context.Context, name string) (done bool, err error) {
	m, have := p.records[name]
	if !have || m.Phase != state.Running || m.Superseded || p.succeeds(m) {
		return false, nil
	}
	v := p.super.view(p.seen, name, m, have)
	if m.Lingers() && !v.shown {
		reason, err := p.super.lingerer.Due(ctx, m)
		return err != nil || reason == "", err
	}
	if !v.mounted || !v.shown || v.stale || v.pinned {
		return false, nil
	}
	unhealed := p.super.healer.Unhealed(m)
	if unhealed && (v.former || !p.searched || p.outdated[name]) {
		return false, nil
	}
	health, rerr, err := p.super.refresh(ctx, m)
	switch {
	case err != nil:
		return true, err
	case health != mount.Healthy:
		return false, nil
	case unhealed:
		p.super.tracker.Mount(name).MarkHealed() // it was found to have nothing to heal
	}
	return true, rerr
}

// succeeds reports whether a mount may still have to take over publications of its predecessors.
func (p *pass) succeeds(m state.Mount) bool {
	return slices.ContainsFunc(m.Predecessors, func(name string) bool {
		former, have := p.records[name]
		return have && !former.Superseded || len(p.seen.pubs[name]) > 0
	})
}
