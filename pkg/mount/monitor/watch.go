package monitor

import (
	"context"
	"errors"
	"path/filepath"
	"sync"
	"time"

	"k8s.io/klog/v2"

	"github.com/s3-csi/s3-csi-driver/pkg/helper"
	"github.com/s3-csi/s3-csi-driver/pkg/mount/creds"
)

// goneAgain is when a mount is reconciled again whose helper has exited: nothing else reports its client's exit.
const goneAgain = 3 * time.Second

// Watchers watch the helpers of mounts, one goroutine for each mount, while the monitor runs.
type Watchers struct {
	mu    sync.Mutex
	names map[string]bool
	watch func(name string) // nil: the monitor does not run
	wg    sync.WaitGroup
}

// NewWatchers returns watchers that watch nothing.
func NewWatchers() *Watchers { return &Watchers{names: map[string]bool{}} }

// Follow starts to watch a mount, if it is not watched.
func (w *Watchers) Follow(name string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.watch == nil || w.names[name] {
		return
	}
	w.names[name] = true
	watch := w.watch
	w.wg.Go(func() {
		watch(name)
		w.mu.Lock()
		defer w.mu.Unlock()
		delete(w.names, name)
	})
}

func (w *Watchers) start(watch func(name string)) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.watch = watch
}

// stop keeps new watches from beginning and waits for the others.
func (w *Watchers) stop() {
	w.start(nil)
	w.wg.Wait()
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
			again, withoutHelper = reconcileEvery, goneAgain
		}
		since = 0
		m.rest(ctx, peer, status.Revision, again, withoutHelper)
	}
}

// rest waits for d, or until the helper's status changes. Without a helper it waits no longer than withoutHelper.
func (m *Monitor) rest(ctx context.Context, peer *helper.Peer, since uint64, d, withoutHelper time.Duration) {
	ctx, cancel := context.WithTimeout(ctx, d)
	defer cancel()
	for began := time.Now(); ctx.Err() == nil; {
		if _, err := peer.WaitStatus(ctx, since); err == nil || errors.Is(err, helper.ErrGone) && time.Since(began) >= withoutHelper {
			return
		}
		select { // another helper may be started
		case <-time.After(time.Second):
		case <-ctx.Done():
		}
	}
}

// observe counts and logs what a helper reports of its client's write conflicts and of its session: failures once when they begin, and
// once when they are over.
func (m *Monitor) observe(ctx context.Context, name string, status helper.Status) {
	entry := m.Tracker.Mount(name)
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
	trouble, changed := entry.Session(mnt.Client, *session)
	if !changed {
		return
	}
	log := klog.FromContext(ctx).WithValues("mount", name, "volume", mnt.VolumeID, "client", mnt.Client, "bucket", mnt.Spec.Bucket, "prefix", mnt.Spec.Prefix,
		"source", mnt.Spec.Source, "role", mnt.Spec.RoleARN)
	switch {
	case trouble == "":
		log.Info("Session renewed after failures", "expires", creds.Time(session.Expires))
	case session.Over:
		log.Error(session.Fault(), "Session expired", "expired", creds.Time(session.Expires), "failingSince", creds.Time(session.FailedSince), "remedy", creds.Remedy(mnt))
	default:
		log.Error(session.Fault(), "Session renewal failed", "expires", creds.Time(session.Expires), "failingSince", creds.Time(session.FailedSince), "remedy", creds.Remedy(mnt))
	}
}
