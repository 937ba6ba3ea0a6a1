// Package monitor triggers the reconciliation of mounts: when clients or helpers exit, when clients are unresponsive, and periodically.
// It also collects garbage, such as processes and files without a mount. Package supervisor does the reconciling.
package monitor

import (
	"cmp"
	"context"
	"errors"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"
	"k8s.io/klog/v2"

	"github.com/s3-csi/s3-csi-driver/pkg/client"
	"github.com/s3-csi/s3-csi-driver/pkg/helper"
	"github.com/s3-csi/s3-csi-driver/pkg/host"
	"github.com/s3-csi/s3-csi-driver/pkg/mount"
	"github.com/s3-csi/s3-csi-driver/pkg/mount/creds"
	"github.com/s3-csi/s3-csi-driver/pkg/mount/pins"
	"github.com/s3-csi/s3-csi-driver/pkg/mount/state"
	"github.com/s3-csi/s3-csi-driver/pkg/mount/tracker"
)

const (
	reconcileEvery = time.Minute
	reconcileBound = 2 * time.Minute
	reconcileWidth = 100 // mounts that are reconciled at a time
)

// Mounts reconciles mounts. Package supervisor implements it and documents the methods.
type Mounts interface {
	Reconcile(ctx context.Context, name string) (again time.Duration, gone bool, err error)
	BeginPass(ctx context.Context) (tryReconcile func(ctx context.Context, key string, names []string, failed func(name string, err error)), err error)
}

// Monitor triggers the reconciliation of mounts.
type Monitor struct {
	Namespace *host.Namespace
	Fusectl   *host.Fusectl
	Store     *state.Store
	Pins      *pins.Pins
	Tracker   *tracker.Tracker
	Clients   client.Registry
	Peer      func(name string) *helper.Peer
	Mounts    Mounts
	// KillUnresponsive kills a client, and KillOrphans helpers that belong to no mount.
	KillUnresponsive func(ctx context.Context, m state.Mount, why string) error
	KillOrphans      func(ctx context.Context) error
	// Changed returns a channel that is closed when the configuration of a backend changes.
	Changed func() <-chan struct{}
	// StaleAge is the age from which a publication without a target is removed.
	StaleAge time.Duration
	// HangTimeout is after how long without an answer a mount's connection is aborted; 0: never.
	HangTimeout time.Duration
	// CleanPrograms removes installed programs that no process runs, except those in the directories used; nil: there are none.
	CleanPrograms func(ctx context.Context, used []string) error

	bound time.Duration // of the reconciliation of all mounts in one pass; 0: reconcileBound

	mu        sync.Mutex
	follow    func(name string) // watches a helper; nil: the monitor does not run
	followed  map[string]bool   // the mounts whose helpers are watched
	followers sync.WaitGroup
}

// Run reconciles all mounts at once and then each minute, and a single mount as soon as its client exits, until ctx ends. It never
// unmounts anything because it ends.
func (m *Monitor) Run(ctx context.Context) {
	m.reportOrphanedCaches(ctx)
	m.setFollow(func(name string) { m.watch(ctx, name) })
	defer m.followers.Wait()
	defer m.setFollow(nil)
	var wg sync.WaitGroup
	defer wg.Wait()
	wg.Go(func() { m.watchHangs(ctx) })
	wg.Go(func() { m.watchLingers(ctx) })
	ticker := time.NewTicker(reconcileEvery)
	defer ticker.Stop()
	for {
		changed, began := m.Changed(), time.Now()
		if err := m.reconcile(ctx); err != nil && ctx.Err() == nil {
			m.Tracker.LogError(ctx, "reconcile", err, "Reconcile pass failed", "retryIn", reconcileEvery)
		}
		m.Tracker.PassDue(began.Add(reconcileEvery))
		select {
		case <-ctx.Done():
			return
		case <-changed:
		case <-ticker.C:
		}
	}
}

// Restore restores the mounts that a reboot ended and whose clients may have pending uploads.
func Restore(ctx context.Context, store *state.Store, clients client.Registry) error {
	names, err := store.Restore(ctx, func(m state.Mount) bool {
		cl, err := clients.Of(m.Client)
		return err != nil || mount.KeepsOnDisk(cl, m.Spec)
	})
	if len(names) > 0 {
		klog.FromContext(ctx).Info("Restored mounts after reboot to finish uploads", "mounts", names)
	}
	return err
}

// reconcile is one reconcile pass over all mounts, followed by garbage collection.
func (m *Monitor) reconcile(ctx context.Context) error {
	began := time.Now()
	defer func() { m.Tracker.Metrics.Reconcile.Observe(time.Since(began).Seconds()) }()
	names, err := m.list(ctx)
	if err != nil {
		return err
	}
	err = m.reconcileAll(ctx, names)
	cctx, cancel := context.WithTimeout(ctx, reconcileBound)
	defer cancel()
	return errors.Join(err, m.collectGarbage(cctx))
}

// reconcileAll reconciles the mounts of these names.
func (m *Monitor) reconcileAll(ctx context.Context, names []string) error {
	for _, name := range names {
		m.Follow(name)
	}
	rctx, cancel := context.WithTimeout(ctx, cmp.Or(m.bound, reconcileBound))
	defer cancel()
	tryReconcile, err := m.Mounts.BeginPass(rctx)
	if err != nil {
		return err
	}
	// Concurrently: a mount that drains for long must not delay the credentials of others, nor the garbage collection.
	var g errgroup.Group
	g.SetLimit(reconcileWidth)
	for key, generations := range byKey(names) {
		g.Go(func() error {
			tryReconcile(rctx, key, generations, func(name string, err error) {
				if ctx.Err() == nil {
					m.Tracker.LogError(ctx, name, err, "Reconcile of mount failed", "mount", name, "retryIn", reconcileEvery)
				}
			})
			return nil
		})
	}
	return g.Wait()
}

func (m *Monitor) list(ctx context.Context) ([]string, error) {
	ctx, cancel := context.WithTimeout(ctx, reconcileBound)
	defer cancel()
	if err := Restore(ctx, m.Store, m.Clients); err != nil {
		return nil, err
	}
	return m.Store.Names(ctx)
}

// byKey returns the names of mounts by their keys, a successor before its predecessors: those stop when it has their publications.
func byKey(names []string) map[string][]string {
	generations := map[string][]string{}
	for _, name := range names {
		generations[mount.KeyOf(name)] = append(generations[mount.KeyOf(name)], name)
	}
	for _, all := range generations {
		slices.SortFunc(all, func(a, b string) int { // the numbers of generations have no leading zeros
			return cmp.Or(cmp.Compare(len(b), len(a)), cmp.Compare(b, a))
		})
	}
	return generations
}

// collectGarbage removes what belongs to no mount: processes, publications without targets, file systems of helpers, pins, programs of
// older versions.
func (m *Monitor) collectGarbage(ctx context.Context) error {
	return errors.Join(
		m.KillOrphans(ctx),
		m.Store.Pubs.RemoveStale(ctx, m.StaleAge),
		m.Store.RemoveOrphans(ctx),
		m.Pins.Clear(ctx, func(ctx context.Context, name string) bool { return !m.Store.Exists(ctx, name) }),
		m.cleanPrograms(ctx),
	)
}

func (m *Monitor) cleanPrograms(ctx context.Context) error {
	if m.CleanPrograms == nil {
		return nil
	}
	mounts, err := m.Store.Mounts(ctx) // again: others were started since the pass began
	if err != nil {
		return err
	}
	var used []string
	for _, mnt := range mounts {
		if len(mnt.Command.Argv) > 0 {
			used = append(used, filepath.Dir(mnt.Command.Argv[0]))
		}
	}
	return m.CleanPrograms(ctx, used)
}

// reportOrphanedCaches logs cache directories that belong to no mount. They may hold the only copy of a file, so they are never removed
// automatically.
func (m *Monitor) reportOrphanedCaches(ctx context.Context) {
	left, err := m.Store.OrphanedCaches(ctx)
	switch {
	case err != nil:
		klog.FromContext(ctx).Error(err, "Cannot read cache directory", "directory", m.Store.Cache)
	case len(left) > 0:
		klog.FromContext(ctx).Info("Orphaned cache directories may hold pending uploads", "directories", left)
	}
}

const (
	lingerCheck = time.Second     // between two looks for lingering mounts whose time is over
	lingerRetry = 5 * time.Second // until one that did not end is reconciled again
)

// watchLingers reconciles each lingering mount when its time is over, until ctx ends.
func (m *Monitor) watchLingers(ctx context.Context) {
	var wg sync.WaitGroup
	defer wg.Wait()
	var ending sync.Map // names
	ticker := time.NewTicker(lingerCheck)
	defer ticker.Stop()
	for {
		for _, l := range m.Tracker.Lingering() {
			if time.Now().Before(l.Until) {
				continue
			}
			if _, ends := ending.LoadOrStore(l.Name, struct{}{}); !ends {
				wg.Go(func() {
					defer ending.Delete(l.Name)
					m.endLinger(ctx, l.Name)
				})
			}
		}
		select {
		case <-ctx.Done():
			return
		case <-ticker.C:
		}
	}
}

// endLinger reconciles a mount whose time to linger is over. If the mount does not end, it returns when the next attempt is due.
func (m *Monitor) endLinger(ctx context.Context, name string) {
	_, gone, err := m.Mounts.Reconcile(ctx, name)
	if gone || ctx.Err() != nil {
		return
	}
	if err != nil {
		m.Tracker.LogError(ctx, name, err, "Cannot end lingering mount", "mount", name, "retryIn", lingerRetry)
	}
	select {
	case <-ctx.Done():
	case <-time.After(lingerRetry):
	}
}

// helperGoneRetry is the time between two reconciliations of a mount whose helper has exited: nothing else reports its client's exit.
const helperGoneRetry = 3 * time.Second

// Follow starts to watch the helper of a mount, if it is not watched and the monitor runs.
func (m *Monitor) Follow(name string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.follow == nil || m.followed[name] {
		return
	}
	if m.followed == nil {
		m.followed = map[string]bool{}
	}
	m.followed[name] = true
	follow := m.follow
	m.followers.Go(func() {
		follow(name)
		m.mu.Lock()
		defer m.mu.Unlock()
		delete(m.followed, name)
	})
}

func (m *Monitor) setFollow(follow func(name string)) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.follow = follow
}

// watch reconciles a mount as soon as its client or its helper exits. It returns when ctx ends or the mount is gone.
func (m *Monitor) watch(ctx context.Context, name string) {
	peer := m.Peer(name)
	for since := uint64(0); ctx.Err() == nil; {
		status, err := peer.WaitStatus(ctx, since)
		if err == nil {
			m.observe(ctx, name, status)
		}
		switch {
		case ctx.Err() != nil:
			return
		case err == nil && (status.State == helper.StateRunning || status.State == helper.StateIdle || status.Ending):
			since = status.Revision
			continue
		case err != nil && !errors.Is(err, helper.ErrGone):
			klog.FromContext(ctx).V(4).Info("Helper does not answer", "mount", name, "error", err.Error())
		}
		again, gone, err := m.Mounts.Reconcile(ctx, name)
		if err != nil && ctx.Err() == nil {
			m.Tracker.LogError(ctx, name, err, "Reconcile of mount failed", "mount", name)
		}
		if gone {
			return
		}
		withoutHelper := again
		if again == 0 {
			again, withoutHelper = reconcileEvery, helperGoneRetry
		}
		since = 0
		rest(ctx, peer, pause{status.Revision, again, withoutHelper})
	}
}

// pause is how long to wait for a change of a helper's status, and with no helper.
type pause struct {
	since                     uint64
	withHelper, withoutHelper time.Duration
}

// rest waits until a helper's status changes, or the pause is over.
func rest(ctx context.Context, peer *helper.Peer, p pause) {
	ctx, cancel := context.WithTimeout(ctx, p.withHelper)
	defer cancel()
	for began := time.Now(); ctx.Err() == nil; {
		if _, err := peer.WaitStatus(ctx, p.since); err == nil || errors.Is(err, helper.ErrGone) && time.Since(began) >= p.withoutHelper {
			return
		}
		select { // another helper may be started
		case <-time.After(time.Second):
		case <-ctx.Done():
		}
	}
}

// observe counts and logs the write conflicts and the session status that a helper reports: session failures once when they begin, and
// once when they end.
func (m *Monitor) observe(ctx context.Context, name string, status helper.Status) {
	entry := m.Tracker.Mount(name)
	entry.Reported(status)
	conflicts := entry.ConflictsChanged(status.Conflicts)
	session := status.Session
	if !conflicts && (session == nil || !entry.SessionChanged(*session)) {
		return
	}
	mnt, err := m.Store.MountOrRemains(ctx, name)
	if err != nil || mnt.Client == "" {
		return
	}
	if conflicts {
		if cl, err := m.Clients.Of(mnt.Client); err == nil {
			m.Tracker.LogConflicts(ctx, mnt, status.Conflicts, filepath.Join(m.Store.CacheDir(name), cl.Quarantine))
		}
	}
	if session == nil {
		return
	}
	problem, changed := entry.Session(mnt.Client, *session)
	if !changed {
		return
	}
	log := klog.FromContext(ctx).WithValues("mount", name, "volume", mnt.VolumeID, "client", mnt.Client, "bucket", mnt.Spec.Bucket, "prefix", mnt.Spec.Prefix,
		"source", mnt.Spec.Source, "role", mnt.Spec.RoleARN)
	switch {
	case problem == "":
		log.Info("Session renewed after failures", "expires", creds.Time(session.Expires))
	case session.Over:
		log.Error(session.Fault(), "Session expired", "expired", creds.Time(session.Expires), "failingSince", creds.Time(session.FailedSince), "remedy",
			creds.Remedy(mnt))
	default:
		log.Error(session.Fault(), "Session renewal failed", "expires", creds.Time(session.Expires), "failingSince", creds.Time(session.FailedSince), "remedy",
			creds.Remedy(mnt))
	}
}
