package mount

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"time"

	"k8s.io/klog/v2"

	"github.com/s3-csi/s3-csi-driver/pkg/backend"
	"github.com/s3-csi/s3-csi-driver/pkg/client"
	"github.com/s3-csi/s3-csi-driver/pkg/credentials"
	"github.com/s3-csi/s3-csi-driver/pkg/failpoint"
	"github.com/s3-csi/s3-csi-driver/pkg/fault"
	"github.com/s3-csi/s3-csi-driver/pkg/helper"
	"github.com/s3-csi/s3-csi-driver/pkg/host"
)

// killBound is how long a killed client may take to be gone, and whoever holds its last words to say so.
const killBound = 5 * time.Second

// countBound is how long a launcher may take to say how many of a mount's processes were killed for want of memory.
const countBound = 3 * time.Second

// errNoKeys is for a mount whose helper died, and with it a secret's keys or a pod's token.
var errNoKeys = errors.New("its helper died, and with it what the publication had brought for its sessions: publish the volume once more, or copy the files to the bucket by hand and remove the mount's directories")

// cause is why a client has to be started again.
type cause struct {
	reason string // for the metric
	how    string // for people
}

// causeOf finds out why a mount's client is dead.
func (m *Manager) causeOf(ctx context.Context, rec record) cause {
	if m.hangs.gaveUp(rec.Name) {
		return cause{reasonHang, fmt.Sprintf("it answered nothing for %s", m.HangTimeout)}
	}
	if m.oomKills(ctx, rec) > rec.OOMKills {
		return cause{reasonOOM, "the kernel killed it for want of memory: " + m.memoryOf(rec)}
	}
	hctx, cancel := context.WithTimeout(ctx, helperBound)
	defer cancel()
	switch status, err := m.peer(rec.Name).Hello(hctx); {
	case errors.Is(err, helper.ErrGone):
		if how, err := m.lastEnd(ctx, rec); err == nil && how != "" {
			return cause{reasonHelper, "its helper ended, and it ended with " + how}
		}
		return cause{reasonHelper, "its helper ended"}
	case err == nil && status.State == helper.StateExited:
		return cause{reasonCrash, "it ended with " + lastWords(status)}
	}
	return cause{reasonSource, "its file system was unmounted or cut off by somebody else"}
}

// memoryOf says for people what memory a mount may use.
func (m *Manager) memoryOf(rec record) string {
	own := "it has no limit of its own"
	if rec.Spec.MemoryLimit != 0 {
		own = fmt.Sprintf("its volume's memoryLimit is %d MiB", rec.Spec.MemoryLimit>>20)
	} else if cl, err := m.clientOf(rec.Client); err == nil && m.Limits.MemoryMax != 0 {
		options, _ := rec.Spec.options() // those that the client was started with
		own = fmt.Sprintf("its limit is %d MiB, by the node's --memory-limit", m.limits(rec.Spec, cl, options).MemoryMax>>20)
	}
	return own + "; all mounts together have --slice-memory-limit"
}

// oomKills counts the mount's processes that the kernel has killed for want of memory. Nothing waits long for it, or fails
// without it: it is only told to people. Where nobody says it is what it was.
func (m *Manager) oomKills(ctx context.Context, rec record) uint64 {
	ctx, cancel := context.WithTimeout(ctx, countBound)
	defer cancel()
	kills, err := m.Launcher.OOMKills(ctx, rec.Name, rec.UID)
	if err != nil {
		klog.FromContext(ctx).V(2).Info("Nobody says whether the kernel killed the client for want of memory", "mount", rec.Name, "error", err.Error())
		return rec.OOMKills
	}
	return kills
}

// restart gives a mount whose client is dead another one, and its publications the new file system. The mount keeps its
// name, its helper where that lives, its session and its cache. The key's lock is held. s is what a publication brings, if there
// is one.
func (m *Manager) restart(ctx context.Context, rec *record, s *supply) error {
	why := m.troubles.died(rec.Name, m.causeOf(ctx, *rec))
	log := klog.FromContext(ctx).WithValues("mount", rec.Name, "volume", rec.VolumeID, "client", rec.Client, "bucket", rec.Spec.Bucket, "prefix", rec.Spec.Prefix)
	log.Error(nil, "The client is dead; it is started again", "reason", why.reason, "how", why.how)
	m.states.set(rec.Name, rec.Client, stateDead)
	began := time.Now()
	if err := m.relive(ctx, rec, s); err != nil {
		m.metrics.failures.WithLabelValues(rec.Client, why.reason).Inc()
		m.troubles.failed(rec.Name)
		return fault.Errorf(fault.Unavailable, "volume %s: client %s of mount %s is dead (%s) and could not be started again: %w", rec.VolumeID, rec.Client, rec.Name, why.how, err)
	}
	m.hangs.forget(rec.Name)
	m.metrics.restarts.WithLabelValues(rec.Client, why.reason).Inc()
	m.troubles.mended(rec.Name)
	m.states.set(rec.Name, rec.Client, stateServing)
	log.Info("The client was started again", "reason", why.reason, "took", time.Since(began).Round(time.Millisecond))
	return nil
}

// relive starts a mount's client once more, on the same cache and behind a new connection. It stores what it finds there. A
// helper that lives has what it makes sessions from; for one that died somebody has to bring it: a publication, or the driver
// itself where the credentials are its own.
func (m *Manager) relive(ctx context.Context, rec *record, s *supply) error {
	var noKeys error
	if s.order.IsZero() {
		alone, err := m.planAlone(ctx, *rec)
		if err == nil {
			s = alone
		}
		noKeys = err // a helper that lives has some
	}
	if err := s.fit(ctx, *rec); err != nil {
		return err
	}
	be, err := m.Backends.Backend(rec.Spec.Backend)
	if err != nil {
		return err
	}
	// First of all: a client that serves yet is not ended for a backend that cannot be reached.
	if err := m.update(ctx, rec, be, s); err != nil {
		return err
	}
	if err := m.standIdle(ctx, *rec, be, s); err != nil {
		return errors.Join(err, noKeys)
	}
	failpoint.Here("restart.idle")
	if err := m.clearSource(ctx, *rec, true); err != nil {
		return err
	}
	failpoint.Here("restart.cleared")
	rec.OOMKills = m.oomKills(ctx, *rec)
	fuse, err := m.mountSource(ctx, *rec)
	if err != nil {
		return err
	}
	failpoint.Here("restart.mounted")
	if err := m.remember(ctx, rec); err != nil {
		fuse.Close()
		return err
	}
	if err := m.serve(ctx, *rec, s, fuse); err != nil {
		// A mount that answers nothing would be taken for one that does. Without it the client ends by itself.
		uctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), undoBound)
		defer cancel()
		return errors.Join(err, m.clearSource(uctx, *rec, false))
	}
	failpoint.Here("restart.serving")
	return nil
}

// standIdle sees to it that the mount has a helper that takes a new client, and has, or is about to be given, what that works
// with.
func (m *Manager) standIdle(ctx context.Context, rec record, be backend.Backend, s *supply) error {
	peer := m.peer(rec.Name)
	hctx, cancel := context.WithTimeout(ctx, helperBound)
	defer cancel()
	status, err := peer.Hello(hctx)
	if err == nil && status.State == helper.StateRunning {
		if status, err = m.killClient(ctx, rec, peer, status); err != nil {
			return err
		}
		failpoint.Here("restart.killed")
	}
	switch {
	case err == nil && status.State == helper.StateExited && (!status.Ending || endedBadly(status)):
		if session := status.Session; session != nil && !session.Over && s.order.Kind != credentials.AsIs {
			return nil // what it has goes on
		}
		_, err := m.take(ctx, s)
		return err
	case err == nil && status.State == helper.StateIdle && !status.Ending && !s.order.IsZero():
		_, err := m.take(ctx, s)
		return err // it was started for this, and the client did not come to it
	case err == nil, errors.Is(err, helper.ErrGone), ctx.Err() == nil: // also one that does not answer
		if s.order.IsZero() {
			return errNoKeys
		}
		if _, err := m.take(ctx, s); err != nil { // before anything is ended for it
			return err
		}
		if err := m.Launcher.Kill(ctx, rec.UID); err != nil {
			return err
		}
		failpoint.Here("restart.ended")
		return m.launchHelper(ctx, rec, be)
	}
	return err
}

func endedBadly(s helper.Status) bool { return s.ExitCode != 0 || s.Signal != "" }

// killClient ends a client that runs without a file system, or does not answer, and gives its helper's status then. The
// helper and its keys stay where it knows how to do that.
func (m *Manager) killClient(ctx context.Context, rec record, peer *helper.Peer, status helper.Status) (helper.Status, error) {
	ctx, cancel := context.WithTimeout(ctx, killBound)
	defer cancel()
	// It may be on its way out already: the kernel has told it that its connection ended.
	if err := peer.Kill(ctx); fault.Is(err, fault.Unsupported) {
		return status, fmt.Errorf("%w: %w", helper.ErrGone, m.Launcher.Kill(ctx, rec.UID))
	} else if err != nil && !errors.Is(err, helper.ErrGone) {
		return status, fmt.Errorf("killing the client: %w", err)
	}
	for status.State == helper.StateRunning {
		next, err := peer.Status(ctx, status.Revision)
		if err != nil {
			return status, err
		}
		status = next
	}
	return status, nil
}

// clearSource unmounts what is mounted on the source: dead file systems, as nothing else is cleared. shown: publications may show
// them, so they are pinned.
func (m *Manager) clearSource(ctx context.Context, rec record, shown bool) error {
	for {
		mounts, err := m.Namespace.Mounts(ctx)
		if err != nil {
			return err
		}
		mnt, mounted := mountedAt(mounts, m.store.sourceDir(rec.Name))
		if !mounted {
			return nil
		}
		if shown {
			if err := m.pinFormer(ctx, rec.Name, mounts, mnt); err != nil {
				return err
			}
		}
		if err := m.unmount(ctx, mnt, func() error { return host.Unmount(mnt.Mountpoint) }); err != nil {
			return err
		}
	}
}

// update makes the client's command line anew where the one in the record would not do any more: the backend is another
// now, or the program is gone. A session that there is something to make from is tried there first.
func (m *Manager) update(ctx context.Context, rec *record, be backend.Backend, s *supply) error {
	digest, err := be.MountDigest()
	if err != nil {
		return err
	}
	var gone bool
	if err := m.do(ctx, func() error {
		gone = len(rec.Command.Argv) == 0
		if !gone {
			_, err := os.Stat(rec.Command.Argv[0])
			gone = errors.Is(err, fs.ErrNotExist)
		}
		return nil
	}); err != nil {
		return err
	}
	if (digest == rec.Backend || rec.Backend == "") && !gone { // "": of a driver that did not write it down
		return nil
	}
	cl, err := m.clientOf(rec.Client)
	if err != nil {
		return err
	}
	bucket := backend.BucketInfo{Name: rec.Spec.Bucket, Region: rec.Region, Owner: rec.Owner}
	if !s.order.IsZero() {
		if err := m.prove(ctx, s, be, rec.Spec); err != nil {
			return err
		}
		bucket = s.bucket
	}
	if err := m.writeCA(ctx, rec.Name, be); err != nil {
		return err
	}
	return m.describeFor(rec, cl, be, digest, bucket)
}

// describeFor writes into a record how its client reaches the bucket.
func (m *Manager) describeFor(rec *record, cl client.Client, be backend.Backend, digest string, bucket backend.BucketInfo) error {
	options, err := rec.Spec.options()
	if err != nil {
		return err
	}
	rec.Command = cl.Command(m.invocation(*rec, cl, be, bucket, options))
	rec.Backend, rec.Region, rec.Owner = digest, bucket.Region, bucket.Owner
	return nil
}

// outdated tells whether a mount's backend is another now than when its client was started.
func (m *Manager) outdated(rec record) (bool, error) {
	if rec.Backend == "" {
		return false, nil // started by a driver that did not write it down
	}
	be, err := m.Backends.Backend(rec.Spec.Backend)
	if fault.Is(err, fault.Precondition) {
		return false, nil // the operator took it away: what runs goes on
	}
	if err != nil {
		return false, err
	}
	digest, err := be.MountDigest()
	return digest != rec.Backend, err
}

// renew gives a mount that serves, but not as it should, a successor: another client in the same place where it may hold
// back what it was given, because two of them on one prefix would store it in any order; else another mount, to which the
// publications move, while files that are open go on with the old one until they are closed. The key's lock is held. s is what
// a publication brings, if there is one.
func (m *Manager) renew(ctx context.Context, rec record, s *supply, reason string) (record, error) {
	cl, err := m.clientOf(rec.Client)
	if err != nil {
		return record{}, err
	}
	if rec.Spec.Source != credentials.SourceDriver && s.order.IsZero() {
		return record{}, fault.Errorf(fault.Unavailable, "volume %s: mount %s is to be replaced (%s), and what its sessions are made from is its publications': the next one brings it", rec.VolumeID, rec.Name, reason)
	}
	klog.FromContext(ctx).Info("The mount is replaced", "mount", rec.Name, "volume", rec.VolumeID, "client", rec.Client, "reason", reason)
	failed := func(err error) (record, error) {
		m.metrics.failures.WithLabelValues(rec.Client, reason).Inc()
		m.troubles.failed(rec.Name)
		return record{}, err
	}
	if keepsOnDisk(cl, rec.Spec) {
		if err := m.relive(ctx, &rec, s); err != nil {
			return failed(err)
		}
		m.metrics.restarts.WithLabelValues(rec.Client, reason).Inc()
		return rec, m.healOnce(ctx, rec, true)
	}
	if s.order.IsZero() {
		if s, err = m.planAlone(ctx, rec); err != nil {
			return failed(err)
		}
	}
	fresh, err := m.start(ctx, birth{
		volumeID: rec.VolumeID, identity: rec.Spec.Source, spec: rec.Spec, supply: s, former: append(rec.Former, rec.Name), rotated: rec.Rotated,
	})
	if err != nil {
		return failed(err)
	}
	failpoint.Here("renew.started")
	m.metrics.restarts.WithLabelValues(rec.Client, reason).Inc()
	if err := m.do(ctx, func() error { return m.store.succeed(fresh) }); err != nil {
		return record{}, err
	}
	failpoint.Here("renew.succeeded")
	if err := m.healOnce(ctx, fresh, true); err != nil {
		return record{}, err
	}
	rec.Superseded = true
	m.endSoon(ctx, rec, successor{shown: true})
	return fresh, nil
}

// endSoon ends a mount whose places others have taken, if it does so soon: files that are open in it keep it for as long as
// their owners like, and it is tried again and again.
func (m *Manager) endSoon(ctx context.Context, rec record, next successor) {
	ctx, cancel := context.WithTimeout(ctx, formerBound)
	defer cancel()
	if err := m.end(ctx, rec, next); err != nil {
		klog.FromContext(ctx).Info("The mount that was replaced has not ended yet", "mount", rec.Name, "reason", err.Error())
	}
}
