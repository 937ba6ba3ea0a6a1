package mount

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"time"

	"k8s.io/klog/v2"

	"github.com/s3-csi/s3-csi-driver/pkg/client"
	"github.com/s3-csi/s3-csi-driver/pkg/failpoint"
	"github.com/s3-csi/s3-csi-driver/pkg/fault"
	"github.com/s3-csi/s3-csi-driver/pkg/helper"
	"github.com/s3-csi/s3-csi-driver/pkg/host"
)

const (
	quietReads = 4                     // so many reads in a row must see no request waiting
	quietPause = 5 * time.Millisecond  // between two of them
	exitGrace  = 2 * time.Second       // for a helper that was told to quit
	exitPause  = 10 * time.Millisecond // between two looks at processes
	// copiesPause is between two looks at all mount namespaces.
	copiesPause = 100 * time.Millisecond
	// orphanBound is for a client without a helper: the keys that a client is told of expire after so long.
	orphanBound = 15 * time.Minute
)

// successor is what a publication brings that an older life of its mount makes way for. Zero: there is none.
type successor struct {
	// supply is of the mount's very spec: what its helper has dies with it. nil: it brings none.
	supply *supply
	// shown: a target that the mount was published at is still the CO's, and a container may run on a copy of it. On a dead
	// one it gets errors; were it taken away, the container would write into its own directory below.
	shown bool
}

// end ends a mount without publications: everything written and closed is stored, the client has exited, nothing is left.
// It can be cut short anywhere, by ctx or by a crash, and called again. The key's lock is held.
func (m *Manager) end(ctx context.Context, rec record, next successor) error {
	if rec.Client == "" {
		return m.endUnrecorded(ctx, rec)
	}
	if rec.Phase != phaseEnding {
		rec.Phase, rec.Ending = phaseEnding, time.Now()
		if err := m.do(ctx, func() error { return m.store.writeRecord(rec) }); err != nil {
			return err
		}
	}
	m.states.set(rec.Name, rec.Client, stateDraining)
	failpoint.Here("end.recorded")
	if err := m.drain(ctx, rec, next); err != nil {
		return err
	}
	failpoint.Here("end.drained")
	if err := m.endHelper(ctx, rec); err != nil {
		return err
	}
	failpoint.Here("end.helper")
	if err := m.keepAside(ctx, rec); err != nil {
		return err
	}
	if err := m.do(ctx, func() error { return m.store.remove(rec.Name) }); err != nil {
		return fmt.Errorf("clearing away mount %s: %w", rec.Name, err)
	}
	m.forget(rec.Name)
	klog.FromContext(ctx).Info("Ended", "mount", rec.Name, "client", rec.Client, "bucket", rec.Spec.Bucket, "prefix", rec.Spec.Prefix,
		"took", time.Since(rec.Ending).Round(time.Millisecond))
	return nil
}

// keepAside takes what a client put aside for a human out of the cache before that is removed.
func (m *Manager) keepAside(ctx context.Context, rec record) error {
	cl, err := m.clientOf(rec.Client)
	if err != nil || cl.Aside == "" {
		return err
	}
	return m.keepDir(ctx, rec, cl.Aside)
}

// keepDir keeps a directory of a mount's cache, if it is there, and says so.
func (m *Manager) keepDir(ctx context.Context, rec record, dir string) error {
	var kept string
	if err := m.do(ctx, func() (err error) { kept, err = m.store.keep(rec.Name, dir); return err }); err != nil {
		return fmt.Errorf("keeping what the client of mount %s put aside: %w", rec.Name, err)
	}
	if kept != "" {
		klog.FromContext(ctx).Error(nil, "The client could not store everything: what it put aside is kept; look at it and remove it", "mount", rec.Name,
			"volume", rec.VolumeID, "bucket", rec.Spec.Bucket, "prefix", rec.Spec.Prefix, "directory", kept)
	}
	return nil
}

// endUnrecorded ends a mount whose record is lost, or was never written. Its client, if it has one, still gets the time to
// store what it was given; it cannot be started again.
func (m *Manager) endUnrecorded(ctx context.Context, rec record) error {
	if rec.UID == 0 { // nothing was ever started
		return m.discard(ctx, rec)
	}
	rec.Client, rec.Ending = "unknown", time.Now()
	peer := m.peer(rec.Name)
	if err := peer.End(ctx); err != nil && !errors.Is(err, helper.ErrGone) {
		return fmt.Errorf("telling the helper of mount %s to end: %w", rec.Name, err)
	}
	if err := m.unmountSource(ctx, rec, false); err != nil {
		return m.draining(rec, err)
	}
	how, err := m.awaitExit(ctx, rec, peer)
	if err != nil {
		return err
	}
	if how != "" {
		return fault.Errorf(fault.Precondition, "the record of mount %s is lost, and its client ended with %s: copy what it had left to store from %s to the bucket, then remove %s",
			rec.Name, how, m.store.cacheDir(rec.Name), m.store.mountDir(rec.Name))
	}
	for _, cl := range client.All() { // it was one of them
		if cl.Aside == "" {
			continue
		}
		if err := m.keepDir(ctx, rec, cl.Aside); err != nil {
			return err
		}
	}
	return m.discard(ctx, rec)
}

// drain returns when the client has exited and has stored all that it was given.
func (m *Manager) drain(ctx context.Context, rec record, next successor) error {
	peer := m.peer(rec.Name)
	for {
		// One that does not answer is not waited for: the client ends with its file system, whether it is expected or not.
		if err := peer.End(ctx); err != nil && !errors.Is(err, helper.ErrGone) && (ctx.Err() != nil || !fault.Is(err, fault.Timeout)) {
			return fmt.Errorf("telling the helper of mount %s to end: %w", rec.Name, err)
		}
		failpoint.Here("drain.told")
		if err := m.unmountSource(ctx, rec, next.shown); err != nil {
			return m.draining(rec, err)
		}
		failpoint.Here("drain.unmounted")
		how, err := m.awaitExit(ctx, rec, peer)
		if err != nil {
			return err
		}
		if how == "" {
			return nil
		}
		klog.FromContext(ctx).Info("The client did not end well", "mount", rec.Name, "volume", rec.VolumeID, "client", rec.Client, "how", how)
		cl, err := m.clientOf(rec.Client)
		if err != nil {
			return err
		}
		if !keepsOnDisk(cl, rec.Spec) {
			return nil // it holds nothing back: what was closed was stored by then
		}
		if gone, err := m.cacheGone(ctx, rec); err != nil || gone {
			return err // it ended well before, and its directories were being cleared away
		}
		if next.supply == nil {
			next.supply = &supply{}
		}
		if err := m.relive(ctx, &rec, next.supply); err != nil {
			return fault.Errorf(fault.Unavailable, "client %s ended with %s and may have files left to store, in %s; it could not be started again to store them: %w",
				rec.Client, how, m.store.cacheDir(rec.Name), err)
		}
	}
}

// cacheGone tells whether a mount's cache, the first of its directories that is cleared away, is no more.
func (m *Manager) cacheGone(ctx context.Context, rec record) (bool, error) {
	gone := false
	if err := m.do(ctx, func() error {
		_, err := os.Lstat(m.store.cacheDir(rec.Name))
		gone = errors.Is(err, fs.ErrNotExist)
		return ignoreMissing(err)
	}); err != nil {
		return false, err
	}
	return gone, nil
}

// remember writes down which device the source has now.
func (m *Manager) remember(ctx context.Context, rec *record) error {
	r := *rec
	err := m.do(ctx, func() error {
		source, err := host.Look(m.store.sourceDir(r.Name))
		if err != nil {
			return err
		}
		if !source.Mountpoint {
			return fault.Errorf(fault.Unavailable, "the source of mount %s was unmounted by somebody else", r.Name)
		}
		r.Minor = source.Minor
		return m.store.writeRecord(r)
	})
	if err == nil {
		*rec = r
	}
	return err
}

// unmountSource unmounts the source once the kernel has no request left for the client, and detaches the copies that other
// mount namespaces still hold, because any of them would keep the client alive. shown: they are left alone.
func (m *Manager) unmountSource(ctx context.Context, rec record, shown bool) error {
	// What somebody before us unmounted may have copies yet. The device's number alone may be another's by now.
	gone := host.Mount{Minor: rec.Minor, Source: rec.Source, FSType: "fuse"}
	for {
		if shown {
			if err := m.awaitSuccession(ctx, rec); err != nil {
				return err
			}
		}
		mounts, err := m.Namespace.Mounts(ctx)
		if err != nil {
			return err
		}
		mnt, mounted := mountedAt(mounts, m.store.sourceDir(rec.Name))
		if mounted {
			if err := m.quiet(ctx, mnt); err != nil {
				return err
			}
			if err := m.unmount(ctx, mnt, func() error { return host.Unmount(mnt.Mountpoint) }); err != nil {
				return err
			}
			gone = mnt
		}
		// Bind mounts in our own namespace are publications or somebody else's doing; the latter hold the client too,
		// and awaitExit's error tells about it.
		if gone.Minor != 0 && !shown {
			if n, err := m.Namespace.DetachCopies(ctx, gone); err != nil {
				klog.FromContext(ctx).Error(err, "Copies of the mount in other mount namespaces could not be detached", "mount", rec.Name)
			} else if n > 0 {
				klog.FromContext(ctx).Info("Detached copies of the mount in other mount namespaces", "mount", rec.Name, "copies", n)
			}
		}
		if !mounted {
			return m.unpinAll(ctx, rec.Name)
		}
		gone.Minor = 0
	}
}

// awaitSuccession waits until nothing shows the file systems of a mount any more whose places another takes: they are recognized
// by the mount's source and pins. A mount namespace that is being made, a unit's for example, has copies for a moment.
func (m *Manager) awaitSuccession(ctx context.Context, rec record) error {
	for {
		mounts, err := m.Namespace.Mounts(ctx)
		if err != nil {
			return err
		}
		where, err := m.shownElsewhere(ctx, mounts, m.store.known(mounts, []string{rec.Name}, nil))
		if err != nil || where == "" {
			return err
		}
		select {
		case <-time.After(copiesPause):
		case <-ctx.Done():
			return fault.Errorf(fault.Busy, "it still shows at %s, instead of its successor: %w", where, context.Cause(ctx))
		}
	}
}

// quiet waits until the FUSE connection has had no request waiting for a moment. A RELEASE that is still queued would be
// dropped by umount, and with it what the client would have stored in it.
func (m *Manager) quiet(ctx context.Context, mnt host.Mount) error {
	for seen := 0; seen < quietReads; {
		waiting, ok, err := m.ctl.Waiting(ctx, mnt.Minor)
		switch {
		case err != nil:
			return err
		case !ok:
			return nil // the connection has ended: nothing will be answered any more
		case waiting == 0:
			seen++
		default:
			seen = 0
		}
		select {
		case <-time.After(quietPause):
		case <-ctx.Done():
			return fault.Errorf(fault.Busy, "%d file system requests are still being answered: %w", max(waiting, 1), context.Cause(ctx))
		}
	}
	return nil
}

// awaitExit waits until the client has exited and tells how; "" is well. Where its helper is gone, or says nothing for
// --hang-timeout, the mount's processes are waited for, and the helper's last file tells. A client that does nothing any more
// for --hang-timeout is killed. What takes long gets new keys in between.
func (m *Manager) awaitExit(ctx context.Context, rec record, peer *helper.Peer) (how string, err error) {
	var last helper.Status
	for {
		if m.hangs.wantsKeys(rec.Name) {
			if err := m.keepKeys(ctx, rec); err != nil && ctx.Err() == nil {
				m.complaints.log(ctx, rec.Name+" keys", err, "A client that stores what it has gets no new keys", "mount", rec.Name, "volume", rec.VolumeID)
			}
		}
		status, err := m.nextStatus(ctx, peer, last.Revision)
		if err == nil {
			m.observeConflicts(ctx, rec.Name, status)
		}
		silent := m.hangs.heard(rec.Name, err == nil || last.State != "")
		switch {
		case errors.Is(err, helper.ErrGone), errors.Is(err, errNoNews) && last.State == "" && m.HangTimeout != 0 && silent >= m.HangTimeout:
			if err := m.awaitOrphan(ctx, rec); err != nil {
				return "", err
			}
			return m.lastEnd(ctx, rec)
		case ctx.Err() != nil:
			return "", m.draining(rec, describe(last.Queue, errors.Join(err, context.Cause(ctx))))
		case errors.Is(err, errNoNews):
			if last.State != helper.StateRunning || m.HangTimeout == 0 || m.hangs.works(rec.Name, last, rec.UID, m.HangTimeout) {
				continue
			}
			if err := m.giveUp(ctx, rec, "it has stored nothing and done nothing"); err != nil {
				return "", err
			}
		case err != nil:
			return "", m.draining(rec, describe(last.Queue, err))
		case status.State == helper.StateRunning:
			last = status
			m.hangs.queued(rec.Name, status.Queue)
		case status.State == helper.StateIdle: // started to bring the client back, which it did not come to
			return lostEnd, nil
		case endedBadly(status):
			return lastWords(status), nil
		default:
			return "", nil
		}
	}
}

// errNoNews tells that a helper's status stayed what it was.
var errNoNews = errors.New("the helper has nothing new to tell")

// nextStatus waits for a status beyond since, though not for so long that a client which hangs would not be noticed.
func (m *Manager) nextStatus(ctx context.Context, peer *helper.Peer, since uint64) (helper.Status, error) {
	sctx, cancel := context.WithTimeout(ctx, m.hangTick())
	defer cancel()
	status, err := peer.Status(sctx, since)
	if err != nil && sctx.Err() != nil && ctx.Err() == nil {
		err = errNoNews
	}
	return status, err
}

// lostEnd is how a client ended whose helper did not live to tell.
const lostEnd = "nobody knows what, because its helper died too"

// lastEnd is how the last client ended, by the file that its helper left.
func (m *Manager) lastEnd(ctx context.Context, rec record) (how string, err error) {
	var (
		end  helper.End
		left bool
	)
	if err := m.do(ctx, func() (err error) { end, left, err = helper.ReadEnd(m.store.helperDir(rec.Name)); return err }); err != nil {
		return "", err
	}
	switch {
	case !left || end.Starts == 0: // without a start it is the end of a helper, not of the client before it
		return lostEnd, nil
	case end.Code == 0 && end.Signal == "":
		return "", nil
	}
	return lastWords(helper.Status{ExitCode: end.Code, Signal: end.Signal, Tail: end.Tail}), nil
}

// awaitOrphan waits until no process is left of a mount whose helper is gone. Its client gets no keys any more: it is killed
// when it cannot store anything with those that it has.
func (m *Manager) awaitOrphan(ctx context.Context, rec record) error {
	octx, cancel := context.WithDeadline(ctx, m.hangs.orphaned(rec.Name).Add(orphanBound))
	defer cancel()
	err := m.awaitGone(octx, rec)
	if err == nil || octx.Err() == nil || ctx.Err() != nil {
		return err
	}
	klog.FromContext(ctx).Error(nil, "The mount's helper is gone and its client's keys have expired: it is killed", "mount", rec.Name, "volume", rec.VolumeID, "client", rec.Client)
	return m.Launcher.Kill(ctx, rec.UID)
}

// awaitGone waits until no process of the mount is left.
func (m *Manager) awaitGone(ctx context.Context, rec record) error {
	for {
		alive, err := m.Launcher.Alive(ctx, rec.UID)
		if err != nil || !alive {
			return err
		}
		select {
		case <-time.After(exitPause):
		case <-ctx.Done():
			return m.draining(rec, fmt.Errorf("its processes (uid %d) have not exited: %w", rec.UID, context.Cause(ctx)))
		}
	}
}

// endHelper ends the helper, which has nothing to do any more.
func (m *Manager) endHelper(ctx context.Context, rec record) error {
	if err := m.peer(rec.Name).Quit(ctx); err == nil {
		gctx, cancel := context.WithTimeout(ctx, exitGrace)
		err := m.awaitGone(gctx, rec)
		cancel()
		if err == nil {
			return nil
		}
	}
	if err := m.Launcher.Kill(ctx, rec.UID); err != nil {
		return fmt.Errorf("ending the helper of mount %s: %w", rec.Name, err)
	}
	return nil
}
