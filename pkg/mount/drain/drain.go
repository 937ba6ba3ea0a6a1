// Package drain stops a mount without losing data: it unmounts the source, waits until the client has stored everything and has
// exited, and removes the mount's files. A client that exits before it has finished is started again.
package drain

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"k8s.io/klog/v2"

	"github.com/s3-csi/s3-csi-driver/pkg/client"
	"github.com/s3-csi/s3-csi-driver/pkg/failpoint"
	"github.com/s3-csi/s3-csi-driver/pkg/fault"
	"github.com/s3-csi/s3-csi-driver/pkg/helper"
	"github.com/s3-csi/s3-csi-driver/pkg/host"
	"github.com/s3-csi/s3-csi-driver/pkg/mount"
	"github.com/s3-csi/s3-csi-driver/pkg/mount/creds"
	"github.com/s3-csi/s3-csi-driver/pkg/mount/runner"
	"github.com/s3-csi/s3-csi-driver/pkg/mount/source"
	"github.com/s3-csi/s3-csi-driver/pkg/mount/state"
	"github.com/s3-csi/s3-csi-driver/pkg/mount/tracker"
)

const (
	exitGrace = 2 * time.Second       // for a helper that was asked to quit
	exitPause = 10 * time.Millisecond // between two checks for processes
	// orphanBound is how long a client without a helper may keep running: the credentials that it was last given expire after that.
	orphanBound = 15 * time.Minute
	// refreshEvery is how often a draining client gets new credentials, and is checked for settings that have changed.
	refreshEvery = time.Minute
	// uploadsBound bounds the query of pending uploads after a call has timed out: the answer must still reach the caller.
	uploadsBound = 200 * time.Millisecond
	// statusBound bounds the wait for a helper's status if the hang timeout is off.
	statusBound = 15 * time.Second
)

// Options are the options of Stop.
type Options struct {
	// Grant supplies credentials to a client that has to be started again; nil: there are none.
	Grant *creds.Grant
	// Copies is source.AwaitReplace if another mount has taken over the targets, and containers may still show copies of this one. Those
	// are not detached, because a container without its mount would write into its own directory below.
	Copies source.Copies
}

// Drainer stops mounts. The caller of a method that is given a mount holds the lock of the mount's key.
type Drainer struct {
	runner    *runner.Runner
	launcher  runner.Launcher
	clients   client.Registry
	store     *state.Store
	sources   *source.Sources
	creds     *creds.Provider
	tracker   *tracker.Tracker
	peer      func(name string) *helper.Peer
	hangAfter time.Duration // 0: never

	checkEvery, refreshEvery, orphanBound, reportBound time.Duration
}

// New returns a drainer. checkEvery is the time between two checks of a client's progress; without progress for the runner's
// HangTimeout the client is killed; 0: never.
func New(r *runner.Runner, checkEvery time.Duration) *Drainer {
	if r.HangTimeout == 0 {
		checkEvery = statusBound
	}
	return &Drainer{
		runner: r, launcher: r.Launcher, clients: r.Clients, store: r.Store, sources: r.Sources, creds: r.Creds, tracker: r.Tracker, peer: r.Peer,
		hangAfter: r.HangTimeout, checkEvery: checkEvery, refreshEvery: refreshEvery, orphanBound: orphanBound, reportBound: reportBound,
	}
}

// Stop stops a mount without publications: everything that was written and closed is stored, the client has exited and nothing is
// left. It can be interrupted anywhere, by ctx or by a crash, and repeated.
func (d *Drainer) Stop(ctx context.Context, m state.Mount, o Options) error {
	if m.Client == "" {
		return d.StopUnrecorded(ctx, m)
	}
	if m.Phase != state.Ending {
		m.Phase, m.Ending = state.Ending, time.Now()
		if err := d.store.Write(ctx, m); err != nil {
			return err
		}
	}
	d.tracker.Mount(m.Name).Set(m.Client, tracker.Draining)
	failpoint.Here("end.recorded")
	if err := d.drain(ctx, m, o); err != nil {
		return err
	}
	failpoint.Here("end.drained")
	if err := d.reportUnstored(ctx, m); err != nil {
		return err
	}
	if err := d.stopHelper(ctx, m); err != nil {
		return err
	}
	failpoint.Here("end.helper")
	cl, err := d.clients.Of(m.Client)
	if err != nil {
		return err
	}
	if err := d.keepQuarantined(ctx, m, cl); err != nil {
		return err
	}
	if err := d.store.Remove(ctx, m.Name); err != nil {
		return fmt.Errorf("removing mount %s: %w", m.Name, err)
	}
	d.tracker.Forget(m.Name)
	klog.FromContext(ctx).Info("Unmounted", "mount", m.Name, "client", m.Client, "bucket", m.Spec.Bucket, "prefix", m.Spec.Prefix,
		"took", time.Since(m.Ending).Round(time.Millisecond))
	return nil
}

// StopWithPredecessors is Stop for a mount and, before it, its predecessors: they may still upload files that were open when they were
// replaced, and a later unpublish of the target finds them only through this mount's record.
func (d *Drainer) StopWithPredecessors(ctx context.Context, m state.Mount) error {
	if err := d.StopPredecessors(ctx, m); err != nil {
		return err
	}
	return d.Stop(ctx, m, Options{})
}

// StopPredecessors stops the predecessors of a mount.
func (d *Drainer) StopPredecessors(ctx context.Context, m state.Mount) error {
	for _, name := range m.Predecessors {
		predecessor, ok, err := d.store.Mount(ctx, name)
		if err == nil && ok {
			err = d.Stop(ctx, predecessor, Options{})
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// reportUnstored returns an error if the client could not store files that were closed. Their data is lost, so the caller learns it once,
// and the next call goes on.
func (d *Drainer) reportUnstored(ctx context.Context, m state.Mount) error {
	status, err := d.peer(m.Name).Status(ctx)
	if m.UnstoredReported || err != nil || status.Unstored == nil {
		return nil
	}
	u := *status.Unstored
	m.UnstoredReported = true
	if err := d.store.Write(ctx, m); err != nil {
		return err
	}
	d.tracker.Metrics.Unstored.WithLabelValues(m.Client).Add(float64(u.Files))
	klog.FromContext(ctx).Error(nil, "Closed files are not stored", "mount", m.Name, "volume", m.VolumeID, "client", m.Client,
		"bucket", m.Spec.Bucket, "prefix", m.Spec.Prefix, "files", u.Files, "key", u.Name, "reason", u.Reason)
	return fault.Errorf(fault.Precondition,
		"mount %s: client %s could not store %d closed files, such as %q: %s; their data is lost, write them again; a retry of the unpublish succeeds",
		m.Name, m.Client, u.Files, u.Name, u.Reason)
}

// keepQuarantined moves quarantined files out of the cache, before that is removed.
func (d *Drainer) keepQuarantined(ctx context.Context, m state.Mount, cl client.Client) error {
	if cl.Quarantine == "" {
		return nil
	}
	kept, err := d.store.Keep(ctx, m.Name, cl.Quarantine)
	if err != nil {
		return fmt.Errorf("preserving the quarantined files of mount %s: %w", m.Name, err)
	}
	if kept != "" {
		klog.FromContext(ctx).Error(nil, "Quarantined files are kept, inspect and remove them", "mount", m.Name,
			"volume", m.VolumeID, "bucket", m.Spec.Bucket, "prefix", m.Spec.Prefix, "directory", kept)
	}
	return nil
}

// quarantineDir is where a mount's client quarantines files; "" if it has none.
func (d *Drainer) quarantineDir(m state.Mount) string {
	cl, err := d.clients.Of(m.Client)
	if err != nil || cl.Quarantine == "" {
		return ""
	}
	return filepath.Join(d.store.CacheDir(m.Name), cl.Quarantine)
}

// StopUnrecorded stops a mount whose record is lost, or was never written. Its client, if there is one, still gets the time to store
// its data; it cannot be started again.
func (d *Drainer) StopUnrecorded(ctx context.Context, m state.Mount) error {
	if m.UID == 0 { // nothing was started
		return d.runner.Discard(ctx, m)
	}
	m.Client, m.Ending = "unknown", time.Now()
	if err := d.peer(m.Name).End(ctx); err != nil && !errors.Is(err, helper.ErrGone) {
		return fmt.Errorf("announcing the unmount to the helper of mount %s: %w", m.Name, err)
	}
	if err := d.sources.Unmount(ctx, m, source.Detach); err != nil {
		return InProgress(m, err)
	}
	how, err := d.awaitExit(ctx, m)
	if err != nil {
		return err
	}
	if how != "" {
		return fault.Errorf(fault.Precondition, "the record of mount %s is lost, and its client exited abnormally (%s): "+
			"copy the files that were not uploaded from %s to the bucket, then remove %s", m.Name, how, d.store.CacheDir(m.Name), d.store.MountDir(m.Name))
	}
	for _, cl := range d.clients.Source.Clients().All() { // it was one of them
		if err := d.keepQuarantined(ctx, m, cl); err != nil {
			return err
		}
	}
	return d.runner.Discard(ctx, m)
}

// drain returns when the client has stored everything and has exited.
func (d *Drainer) drain(ctx context.Context, m state.Mount, o Options) error {
	for {
		// A helper that does not answer is not waited for: the client ends with its file system in any case.
		if err := d.peer(m.Name).End(ctx); err != nil && !errors.Is(err, helper.ErrGone) && (ctx.Err() != nil || !fault.Is(err, fault.Timeout)) {
			return fmt.Errorf("announcing the unmount to the helper of mount %s: %w", m.Name, err)
		}
		failpoint.Here("drain.told")
		if err := d.sources.Unmount(ctx, m, o.Copies); err != nil {
			return InProgress(m, d.withUploads(ctx, m, err))
		}
		failpoint.Here("drain.unmounted")
		how, err := d.awaitExit(ctx, m)
		if errors.Is(err, errOutdated) {
			d.update(ctx, &m, o.Grant)
			continue
		}
		if err != nil {
			return err
		}
		log := klog.FromContext(ctx).WithValues("mount", m.Name, "volume", m.VolumeID, "client", m.Client)
		cl, err := d.clients.Of(m.Client)
		if how == "" {
			if err == nil && cl.ExitsEarly && !m.Spec.ReadOnly {
				log.Info("Client may have exited before everything was stored")
			}
			return nil
		}
		log.Info("Client exited abnormally while draining", "detail", how)
		if err != nil {
			return err
		}
		if !mount.KeepsOnDisk(cl, m.Spec) || m.Linger != nil {
			return nil // what was closed was stored by then
		}
		if exists, err := d.store.CacheExists(ctx, m.Name); err != nil || !exists {
			return err // it exited cleanly before, and its directories were being removed
		}
		if err := d.runner.Restart(ctx, &m, cmp.Or(o.Grant, &creds.Grant{})); err != nil {
			return fault.Errorf(fault.Unavailable, "client %s exited abnormally (%s) and may have pending uploads in %s; restarting it to finish them: %w",
				m.Client, how, d.store.CacheDir(m.Name), err)
		}
	}
}

// update starts a draining client again with its backend's current settings, with which it may be able to store its files. If that fails, the
// client drains as it is, or its exit is dealt with like any other.
func (d *Drainer) update(ctx context.Context, m *state.Mount, grant *creds.Grant) {
	of := []any{"mount", m.Name, "volume", m.VolumeID, "client", m.Client}
	klog.FromContext(ctx).Info("Restarting draining client, its backend has other settings", of...)
	err := d.runner.Restart(ctx, m, cmp.Or(grant, &creds.Grant{}))
	d.tracker.CountRestart(m.Client, tracker.ReasonConfig, err)
	if err != nil && ctx.Err() == nil {
		d.tracker.LogError(ctx, m.Name+" settings", err, "Cannot restart draining client with its backend's settings", of...)
	}
}

// outdated reports whether a client uses settings of its backend that are no longer configured, such as the former password of a proxy, and
// keeps what it has not stored on disk: then it can be started again with the current ones.
func (d *Drainer) outdated(m state.Mount) (bool, error) {
	if m.Backend == "" || m.Linger != nil || !m.KeepsOnDisk(d.clients) { // "": its record is lost
		return false, nil
	}
	return d.runner.Outdated(m)
}

// withUploads adds the uploads that a client has in flight to an error. ctx may have ended.
func (d *Drainer) withUploads(ctx context.Context, m state.Mount, err error) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), uploadsBound)
	defer cancel()
	status, serr := d.peer(m.Name).Status(ctx)
	if serr != nil || status.Queue == nil || status.Queue.Uploads == 0 {
		return err
	}
	return WithQueue(status.Queue, err)
}

// awaitExit waits until the client has exited and returns its exit summary, "" for a clean exit. Without a helper, or if that does
// not answer for the hang timeout, it waits for the mount's processes and reads the helper's exit file. A client that makes no
// progress for the hang timeout is killed. A drain that takes long gets new credentials, and ends with errOutdated if its client must be started
// again.
func (d *Drainer) awaitExit(ctx context.Context, m state.Mount) (how string, err error) {
	entry := d.tracker.Mount(m.Name)
	var last helper.Status
	for checkSettings := false; ; {
		checkSettings = d.refreshIfDue(ctx, m) || checkSettings
		if checkSettings && last.State == helper.StateRunning {
			if old, err := d.outdated(m); err == nil && old {
				return "", errOutdated
			}
			checkSettings = false
		}
		status, err := d.nextStatus(ctx, m, last.Revision, d.checkEvery)
		silent := entry.Drain.HelperAnswered(err == nil || last.State != "")
		switch {
		case err == nil:
			d.tracker.LogConflicts(ctx, m, status.Conflicts, d.quarantineDir(m))
			if status.State != helper.StateRunning {
				return exitOf(status), nil
			}
			last = status
			entry.Drain.Queued(status.Queue)
		case errors.Is(err, helper.ErrGone), errors.Is(err, errUnchanged) && last.State == "" && d.hangAfter != 0 && silent >= d.hangAfter:
			if err := d.awaitOrphan(ctx, m); err != nil {
				return "", err
			}
			return d.runner.LastExit(ctx, m)
		case ctx.Err() != nil, !errors.Is(err, errUnchanged):
			return "", waitEnded(ctx, m, last, err)
		case last.State == helper.StateRunning && d.hangAfter != 0 && !d.makesProgress(m, last):
			if err := d.runner.KillUnresponsive(ctx, m, "it makes no progress"); err != nil {
				return "", err
			}
		}
	}
}

// exitOf returns the exit summary of a client that does not run, "" for a clean exit.
func exitOf(status helper.Status) string {
	switch {
	case status.State == helper.StateIdle: // started for a restart of the client that was interrupted
		return runner.ExitUnknown
	case runner.ExitedAbnormally(status):
		return runner.ExitSummary(status)
	}
	return ""
}

// waitEnded returns the error of a wait that ended before the client was done, with what the client reported last.
func waitEnded(ctx context.Context, m state.Mount, last helper.Status, err error) error {
	if ctx.Err() != nil {
		err = context.Cause(ctx)
	}
	return InProgress(m, WithQueue(last.Queue, withOutput(last, err)))
}

// refreshIfDue gives a client that drains for long new credentials, and reports whether it was time to.
func (d *Drainer) refreshIfDue(ctx context.Context, m state.Mount) bool {
	if !d.tracker.Mount(m.Name).Drain.RefreshDue(d.refreshEvery) {
		return false
	}
	if err := d.creds.RefreshDraining(ctx, m); err != nil && ctx.Err() == nil {
		d.tracker.LogError(ctx, m.Name+" keys", err, "Cannot refresh credentials of draining client", "mount", m.Name, "volume", m.VolumeID)
	}
	return true
}

// makesProgress reports whether a client has used CPU time, or stored something, within the hang timeout.
func (d *Drainer) makesProgress(m state.Mount, status helper.Status) bool {
	entry := d.tracker.Mount(m.Name)
	cpu, err := host.CPUTime(status.ClientPID, m.UID)
	if err != nil {
		entry.Drain.Active()
		return true
	}
	return entry.Drain.Progress(cpu, status.Revision) < d.hangAfter
}

// errOutdated means that a client runs with settings that are no longer configured.
var errOutdated = errors.New("the backend has other settings than those that the client was started with")

// errUnchanged means that the status did not change in time.
var errUnchanged = errors.New("the helper's status has not changed")

// nextStatus waits for a status after since. If there is none in time, the error is errUnchanged.
func (d *Drainer) nextStatus(ctx context.Context, m state.Mount, since uint64, bound time.Duration) (helper.Status, error) {
	sctx, cancel := context.WithTimeout(ctx, bound)
	defer cancel()
	status, err := d.peer(m.Name).WaitStatus(sctx, since)
	if err != nil && sctx.Err() != nil && ctx.Err() == nil {
		err = errUnchanged
	}
	return status, err
}

// awaitOrphan waits until the processes of a mount without a helper have exited. Its client gets no new credentials: when those that
// it has have expired it is killed, because it cannot store anything any more.
func (d *Drainer) awaitOrphan(ctx context.Context, m state.Mount) error {
	octx, cancel := context.WithDeadline(ctx, d.tracker.Mount(m.Name).Drain.OrphanedSince().Add(d.orphanBound))
	defer cancel()
	err := d.awaitGone(octx, m)
	if err == nil || octx.Err() == nil || ctx.Err() != nil {
		return err
	}
	klog.FromContext(ctx).Error(nil, "Credentials of orphaned client expired, killing it", "mount", m.Name, "volume", m.VolumeID, "client", m.Client)
	return d.launcher.Kill(ctx, m.UID)
}

func (d *Drainer) awaitGone(ctx context.Context, m state.Mount) error {
	for {
		alive, err := d.launcher.Alive(ctx, m.UID)
		if err != nil || !alive {
			return err
		}
		select {
		case <-time.After(exitPause):
		case <-ctx.Done():
			return InProgress(m, fmt.Errorf("its processes (uid %d) have not exited: %w", m.UID, context.Cause(ctx)))
		}
	}
}

func (d *Drainer) stopHelper(ctx context.Context, m state.Mount) error {
	if status, err := d.peer(m.Name).Quit(ctx); err == nil {
		gctx, cancel := context.WithTimeout(ctx, exitGrace)
		host.AwaitExit(gctx, status.PID, m.UID) // usually nothing is left then, and a search for processes is expensive
		err := d.awaitGone(gctx, m)
		cancel()
		if err == nil {
			return nil
		}
	}
	if err := d.launcher.Kill(ctx, m.UID); err != nil {
		return fmt.Errorf("killing the helper of mount %s: %w", m.Name, err)
	}
	return nil
}

// InProgress returns the error for a mount that is still draining. The drain continues.
func InProgress(m state.Mount, err error) error {
	if m.Ending.IsZero() { // it is to linger
		m.Ending = time.Now()
	}
	return fault.Errorf(fault.Busy, "draining: %w (for %s; volume %s, mount %s, client %s); the drain continues, and a retry waits for it",
		err, time.Since(m.Ending).Round(time.Second), m.VolumeID, m.Name, m.Client)
}

// WithQueue adds a client's upload queue to an error; nil: unknown.
func WithQueue(q *client.Queue, err error) error {
	if q == nil {
		return fmt.Errorf("the client is still uploading data: %w", err)
	}
	return fmt.Errorf("%s: %w", formatQueue(*q), err)
}

// withOutput adds the last line of a client's output to an error: it is why uploads fail, if they do. Lines on the client's start and
// on the progress of the drain are left out.
func withOutput(s helper.Status, err error) error {
	for _, line := range slices.Backward(s.Tail) {
		if !strings.HasPrefix(line, "s3-csi-") && !strings.Contains(line, "NOTICE: Draining: ") {
			return fmt.Errorf("%w; last output of the client: %s", err, line)
		}
	}
	return err
}

// formatQueue formats a queue: "3 uploads, 1.2 GiB".
func formatQueue(q client.Queue) string {
	const units = "KMGTPE"
	size, unit := float64(q.Bytes), ""
	for i := 0; size >= 1024 && i < len(units); i++ {
		size, unit = size/1024, units[i:i+1]+"i"
	}
	uploads := fmt.Sprintf("%d uploads", q.Uploads)
	if q.Uploads == 1 {
		uploads = "1 upload"
	}
	if unit == "" {
		return fmt.Sprintf("%s, %d B", uploads, q.Bytes)
	}
	return fmt.Sprintf("%s, %.1f %sB", uploads, size, unit)
}
