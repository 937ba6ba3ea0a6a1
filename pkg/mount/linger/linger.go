// Package linger keeps the mounts of volumes that ask for it after their last publication, so that the next one needs only a bind mount.
//
// How a mount lingers:
//
//   - It lingers once everything that was written and closed is stored, and if that is known. Otherwise it stops.
//   - Its record says until when (state.Mount.Linger). That is written before the last publication's record is removed, and removed
//     before another publication is bound. A driver that is killed in between finds a mount without publications, which lingers or
//     stops as after its last unpublish. So a mount whose record says that it lingers has nothing to store.
//   - It keeps a session only if its credentials are the driver's. Those of a secret or a pod are dropped, and the next publication's
//     are proven before it is bound.
//   - It ends, and is not healed, when its time is over, or before that for one of the reasons tracker.Ended….
package linger

import (
	"context"
	"errors"
	"time"

	"k8s.io/klog/v2"

	"github.com/s3-csi/s3-csi-driver/pkg/backend"
	"github.com/s3-csi/s3-csi-driver/pkg/credentials"
	"github.com/s3-csi/s3-csi-driver/pkg/failpoint"
	"github.com/s3-csi/s3-csi-driver/pkg/fault"
	"github.com/s3-csi/s3-csi-driver/pkg/helper"
	"github.com/s3-csi/s3-csi-driver/pkg/host"
	"github.com/s3-csi/s3-csi-driver/pkg/mount"
	"github.com/s3-csi/s3-csi-driver/pkg/mount/creds"
	"github.com/s3-csi/s3-csi-driver/pkg/mount/drain"
	"github.com/s3-csi/s3-csi-driver/pkg/mount/pins"
	"github.com/s3-csi/s3-csi-driver/pkg/mount/runner"
	"github.com/s3-csi/s3-csi-driver/pkg/mount/state"
	"github.com/s3-csi/s3-csi-driver/pkg/mount/tracker"
	"github.com/s3-csi/s3-csi-driver/pkg/mount/want"
)

// evictBound bounds the end of the lingering mounts that exceed the limits, in an unpublish. The next reconcile pass ends the others.
const evictBound = 5 * time.Second

// Limits bound the lingering mounts of a node. If one of them is 0, none lingers.
type Limits struct {
	Mounts int
	Memory uint64 // of their helpers and clients, in bytes
}

func (b Limits) none() bool { return b.Mounts == 0 || b.Memory == 0 }

// eviction is a lingering mount that must end, and why.
type eviction struct {
	name, reason string
}

// exceeding returns the mounts that must end so that the others are within the limits. all are the lingering mounts, the least recently
// used first.
func (b Limits) exceeding(all []tracker.Linger) (end []eviction) {
	var memory uint64
	for _, m := range all {
		memory += m.Memory
	}
	for i, m := range all {
		var reason string
		switch {
		case len(all)-i > b.Mounts:
			reason = tracker.EndedMounts
		case memory > b.Memory:
			reason = tracker.EndedMemory
		default:
			return end
		}
		end = append(end, eviction{m.Name, reason})
		memory -= m.Memory
	}
	return end
}

// Lingerer begins, checks and ends the lingering of mounts. The caller of a method that is given a mount holds the lock of the mount's
// key.
type Lingerer struct {
	Runner  *runner.Runner
	Drainer *drain.Drainer
	Pins    *pins.Pins
	Backend func(name string) (backend.Backend, error)
	Store   *state.Store
	Creds   *creds.Provider
	Tracker *tracker.Tracker
	Peer    func(name string) *helper.Peer // the helper of a mount
	Limits  Limits
	// TryLock locks the key of a mount unless another call holds the lock.
	TryLock func(key string) (unlock func(), ok bool)
}

// Retire ends the use of a mount without publications: it lingers, or else stops.
func (l *Lingerer) Retire(ctx context.Context, m state.Mount) error {
	err := l.beginLingering(ctx, m)
	var unable *drain.NotFlushedError
	if !errors.As(err, &unable) {
		return err
	}
	if unable != errNoLinger {
		klog.FromContext(ctx).Info("Mount cannot linger", "mount", m.Name, "volume", m.VolumeID, "client", m.Client, "reason", unable.Reason)
	}
	return l.Drainer.StopWithPredecessors(ctx, m)
}

// errNoLinger is the error of a mount whose volumes do not ask to linger.
var errNoLinger = &drain.NotFlushedError{Reason: "it is not to linger"}

func unable(reason string) error { return &drain.NotFlushedError{Reason: reason} }

// beginLingering lets a mount without publications linger. If the mount has to be stopped instead, the error is a drain.NotFlushedError.
//
// Its steps: check whether it may; stop its predecessors; check that its client serves and is current; wait until everything is stored;
// record that it lingers; drop credentials that are not the driver's.
func (l *Lingerer) beginLingering(ctx context.Context, m state.Mount) error {
	switch {
	case m.LingerFor == 0:
		return errNoLinger
	case m.Lingers(): // a crash may have cut off what follows its record
		_, err := l.dropCredentialsOrEnd(ctx, m)
		return err
	case m.Phase != state.Running || m.Superseded:
		return errNoLinger
	case l.Limits.none():
		return unable("lingering is off on this node")
	case m.Rotated != "" || m.Rotating:
		return unable("its secret was rotated, so no publication can join it")
	}
	if err := l.Drainer.StopPredecessors(ctx, m); err != nil {
		return err
	}
	status, revision, err := l.checkFit(ctx, m)
	if err != nil {
		return err
	}
	if err := l.Drainer.Flush(ctx, m); err != nil {
		return err
	}
	failpoint.Here("linger.flushed")
	if err := l.Pins.UnpinAll(ctx, m.Name); err != nil {
		return err
	}
	memory := memoryOf(m, status)
	if memory > l.Limits.Memory {
		return unable("its processes use more memory than may linger on this node")
	}
	now := time.Now().Round(0)
	m.Linger = &state.Linger{Since: now, Until: now.Add(m.LingerFor), Backend: revision}
	if err := l.Store.Write(ctx, m); err != nil { // first: without credentials, a client that is in doubt could not be restarted
		return err
	}
	failpoint.Here("linger.recorded")
	if lingers, err := l.dropCredentialsOrEnd(ctx, m); err != nil || !lingers {
		return err
	}
	failpoint.Here("linger.forgot")
	l.trackLinger(m, memory)
	klog.FromContext(ctx).Info("Mount lingers", "mount", m.Name, "volume", m.VolumeID, "client", m.Client, "until", m.Linger.Until, "memory", memory)
	return nil
}

// dropCredentials drops the credentials of a mount that are not the driver's.
func (l *Lingerer) dropCredentials(ctx context.Context, m state.Mount) error {
	if m.Spec.Source == credentials.SourceDriver {
		return nil
	}
	return l.Peer(m.Name).Forget(ctx)
}

// dropCredentialsOrEnd is forget for a mount that has just begun to linger. If its helper does not, the mount ends.
func (l *Lingerer) dropCredentialsOrEnd(ctx context.Context, m state.Mount) (lingers bool, err error) {
	if err := l.dropCredentials(ctx, m); err != nil {
		klog.FromContext(ctx).Info("Cannot drop credentials of lingering mount", "mount", m.Name, "error", err.Error())
		return false, l.End(ctx, m, tracker.EndedClient)
	}
	return true, nil
}

// checkFit checks that a mount's client serves with the current configuration and a session that is renewed. It returns the status of
// its helper and the revision of its backend.
func (l *Lingerer) checkFit(ctx context.Context, m state.Mount) (helper.Status, string, error) {
	reason, status, err := l.reasonToEnd(ctx, m)
	if err != nil {
		return status, "", unable(err.Error())
	}
	if reason != "" {
		return status, "", unable("it would end at once, reason " + reason)
	}
	be, err := l.Backend(m.Spec.Backend)
	if err != nil {
		return status, "", unable(err.Error())
	}
	return status, be.Revision(), nil
}

// reasonToEnd returns why a mount must not linger, "" if it may, and the status of its helper.
func (l *Lingerer) reasonToEnd(ctx context.Context, m state.Mount) (reason string, status helper.Status, err error) {
	be, err := l.Backend(m.Spec.Backend)
	switch {
	case fault.Is(err, fault.Precondition):
		return tracker.EndedBackend, status, nil // it is no longer configured
	case err != nil:
		return "", status, err
	case m.Linger != nil && be.Revision() != m.Linger.Backend:
		return tracker.EndedBackend, status, nil
	}
	if old, err := l.Runner.Outdated(m); err != nil || old {
		return tracker.EndedBackend, status, err
	}
	health, status, err := l.Runner.ProbeStatus(ctx, m)
	switch {
	case err != nil:
		return "", status, err
	case health != mount.Healthy:
		return tracker.EndedClient, status, nil
	}
	if problem := creds.SessionError(m, status); problem != nil {
		reason = tracker.EndedSession
	}
	return reason, status, nil
}

// Due returns why a lingering mount must end now, "" if it stays. It refreshes the credentials of one that stays. It ends others
// that exceed the limits together with this one.
func (l *Lingerer) Due(ctx context.Context, m state.Mount) (reason string, err error) {
	switch {
	case !time.Now().Before(m.Linger.Until):
		return tracker.EndedTime, nil
	case l.Limits.Mounts == 0:
		return tracker.EndedMounts, nil
	case l.Limits.Memory == 0:
		return tracker.EndedMemory, nil
	}
	reason, status, err := l.reasonToEnd(ctx, m)
	if err != nil || reason != "" {
		return reason, err
	}
	if err := l.dropCredentials(ctx, m); err != nil {
		return "", err
	}
	if err := l.Creds.Refresh(ctx, m, &status); err != nil {
		if fault.KindOf(err).Permanent() {
			return tracker.EndedSession, nil
		}
		return "", err
	}
	l.trackLinger(m, memoryOf(m, status))
	for _, e := range l.Limits.exceeding(l.Tracker.Lingering()) {
		if e.name == m.Name {
			return e.reason, nil
		}
	}
	l.Evict(ctx)
	return "", nil
}

// Reconcile ends a lingering mount if it must end.
func (l *Lingerer) Reconcile(ctx context.Context, m state.Mount) error {
	reason, err := l.Due(ctx, m)
	if err != nil || reason == "" {
		return err
	}
	return l.End(ctx, m, reason)
}

// trackLinger notes that a mount lingers.
func (l *Lingerer) trackLinger(m state.Mount, memory uint64) {
	l.Tracker.Mount(m.Name).Linger(m.Client, tracker.Linger{Name: m.Name, Since: m.Linger.Since, Until: m.Linger.Until, Memory: memory})
}

// memoryOf returns the resident memory of a mount's helper and client, as far as they can be read.
func memoryOf(m state.Mount, status helper.Status) (bytes uint64) {
	for _, pid := range []int{status.PID, status.ClientPID} {
		if n, err := host.Memory(pid, m.UID); err == nil {
			bytes += n
		}
	}
	return bytes
}

// End stops a lingering mount.
func (l *Lingerer) End(ctx context.Context, m state.Mount, reason string) error {
	klog.FromContext(ctx).Info("Lingering mount ends", "mount", m.Name, "volume", m.VolumeID, "client", m.Client, "reason", reason,
		"lingered", time.Since(m.Linger.Since).Round(time.Second))
	l.Tracker.Metrics.LingerEnds.WithLabelValues(m.Client, reason).Inc()
	failpoint.Here("linger.ending")
	return l.Drainer.StopWithPredecessors(ctx, m)
}

// Join prepares a lingering mount for a publication, with that one's credentials. joined is false if the mount had to end.
func (l *Lingerer) Join(ctx context.Context, m *state.Mount, w want.Mount) (joined bool, err error) {
	reason, _, err := l.reasonToEnd(ctx, *m)
	if err != nil {
		return false, err
	}
	if reason == "" {
		switch err := l.renewJoined(ctx, *m, w.Grant); {
		case err != nil && m.Spec.Source != credentials.SourceDriver:
			return false, err // it lingers on, for a publication with credentials that work
		case err != nil && ctx.Err() != nil:
			return false, err
		case err != nil:
			reason = tracker.EndedSession
		}
	}
	if reason != "" {
		return false, l.End(ctx, *m, reason)
	}
	lingered := time.Since(m.Linger.Since)
	m.Linger, m.LingerFor = nil, w.Linger
	if err := l.Store.Write(ctx, *m); err != nil { // before a pod can write
		return false, err
	}
	failpoint.Here("linger.joined")
	l.Tracker.Mount(m.Name).Set(m.Client, tracker.Healthy)
	l.Tracker.Metrics.LingerHits.WithLabelValues(m.Client).Inc()
	klog.FromContext(ctx).Info("Lingering mount is used again", "mount", m.Name, "volume", w.Publication.VolumeID, "client", m.Client,
		"lingered", lingered.Round(time.Millisecond))
	return true, nil
}

// renewJoined delivers a publication's credentials to a lingering mount. Those of a secret or a pod are proven first: the mount has none
// with which it was proven.
func (l *Lingerer) renewJoined(ctx context.Context, m state.Mount, grant *creds.Grant) error {
	if m.Spec.Source != credentials.SourceDriver {
		if err := grant.Fit(ctx, m.Client); err != nil {
			return err
		}
		be, err := l.Backend(m.Spec.Backend)
		if err != nil {
			return err
		}
		if err := l.Creds.Prove(ctx, grant, be, m.Spec); err != nil {
			return err
		}
	}
	return l.Creds.Apply(ctx, m, grant, nil)
}

// Extend records that a publication of a running mount asks for a longer time to linger.
func (l *Lingerer) Extend(ctx context.Context, m *state.Mount, d time.Duration) error {
	if d <= m.LingerFor {
		return nil
	}
	m.LingerFor = d
	return l.Store.Write(ctx, *m)
}

// Evict ends the lingering mounts that exceed the limits. Those whose keys are locked are in use, or end already.
func (l *Lingerer) Evict(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, evictBound)
	defer cancel()
	for _, e := range l.Limits.exceeding(l.Tracker.Lingering()) {
		if err := l.evictOne(ctx, e); err != nil {
			klog.FromContext(ctx).Info("Cannot end lingering mount, will retry", "mount", e.name, "error", err.Error())
		}
	}
}

func (l *Lingerer) evictOne(ctx context.Context, e eviction) error {
	unlock, ok := l.TryLock(mount.KeyOf(e.name))
	if !ok {
		return nil
	}
	defer unlock()
	m, ok, err := l.Store.Mount(ctx, e.name)
	if err != nil || !ok || !m.Lingers() {
		return err
	}
	return l.End(ctx, m, e.reason)
}
