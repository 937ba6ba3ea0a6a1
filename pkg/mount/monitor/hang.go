package monitor

import (
	"context"
	"errors"
	"os"
	"slices"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/s3-csi/s3-csi-driver/pkg/failpoint"
	"github.com/s3-csi/s3-csi-driver/pkg/host"
	"github.com/s3-csi/s3-csi-driver/pkg/mount"
	"github.com/s3-csi/s3-csi-driver/pkg/mount/state"
	"github.com/s3-csi/s3-csi-driver/pkg/mount/tracker"
)

const (
	// Clients are probed this often within the hang timeout, within bounds.
	probesPerTimeout = 8
	minProbeEvery    = 50 * time.Millisecond
	maxProbeEvery    = 15 * time.Second
	// killBound bounds the abort of a connection and the kill of its client.
	killBound = 20 * time.Second
	answered  = true // the result of a probe
)

// ProbeEvery is the time between two probes of a client, for a hang timeout.
func ProbeEvery(hangTimeout time.Duration) time.Duration {
	return min(max(hangTimeout/probesPerTimeout, minProbeEvery), maxProbeEvery)
}

// watchHangs looks for unresponsive clients until ctx ends. A process that waits for one cannot be killed, so its container would never
// end and the volume would never be unpublished.
func (m *Monitor) watchHangs(ctx context.Context) {
	if m.HangTimeout == 0 {
		return
	}
	var wg sync.WaitGroup
	defer wg.Wait()
	ticker := time.NewTicker(ProbeEvery(m.HangTimeout))
	defer ticker.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-ticker.C:
		}
		m.probeAll(ctx, &wg)
	}
}

// probeAll probes all clients. Those that have no request to answer, nearly all, are found by one read of FUSE's control file system;
// each of the others is asked by a goroutine of wg.
func (m *Monitor) probeAll(ctx context.Context, wg *sync.WaitGroup) {
	mounts, err := m.Namespace.Mounts(ctx)
	if err != nil {
		m.Tracker.LogError(ctx, "hangs", err, "Cannot read mount table to find unresponsive clients")
		return
	}
	probed := map[string]host.Mount{}
	var minors []uint32
	for _, mnt := range mounts {
		name, ours := mount.NameOf(mnt.Source)
		if ours && mnt.Mountpoint == m.Store.SourceDir(name) && m.Tracker.Mount(name).BeginProbe() {
			probed[name] = mnt
			minors = append(minors, mnt.Minor)
		}
	}
	if len(probed) == 0 {
		return
	}
	wctx, cancel := context.WithTimeout(ctx, ProbeEvery(m.HangTimeout))
	defer cancel()
	waiting, err := m.Fusectl.WaitingAll(wctx, minors)
	for name, mnt := range probed {
		entry := m.Tracker.Mount(name)
		if err == nil && waiting[mnt.Minor] == 0 { // or its connection has ended
			entry.EndProbe(answered)
			continue
		}
		wg.Go(func() {
			if silent := entry.EndProbe(m.answers(ctx, mnt)); silent >= m.HangTimeout && ctx.Err() == nil {
				m.abortConnection(ctx, name, mnt)
			}
		})
	}
}

// answers reports whether a mount's client answers.
func (m *Monitor) answers(ctx context.Context, mnt host.Mount) bool {
	ctx, cancel := context.WithTimeout(ctx, ProbeEvery(m.HangTimeout))
	defer cancel()
	_, err := m.Namespace.Statfs(ctx, mnt.Mountpoint)
	var errno unix.Errno
	return err == nil || errors.As(err, &errno)
}

// abortConnection aborts the connection of an unresponsive client, so that every process that waits for it gets an error, and kills the client.
// It is restarted like one that exited.
func (m *Monitor) abortConnection(ctx context.Context, name string, mnt host.Mount) {
	ctx, cancel := context.WithTimeout(ctx, killBound)
	defer cancel()
	rec, err := m.Store.MountOrRemains(ctx, name)
	if err != nil {
		m.Tracker.LogError(ctx, name, err, "Cannot read record of unresponsive mount", "mount", name)
		return
	}
	if rec.Phase == state.Starting {
		return // its client waits for its session, and its publication bounds that
	}
	failpoint.Here("hang.found")
	release, ok := m.holdMount(ctx, mnt)
	if !ok {
		return
	}
	defer release()
	entry := m.Tracker.Mount(name)
	entry.Set(rec.Client, tracker.Unresponsive)
	entry.Killed()
	err = m.Fusectl.Abort(ctx, mnt.Minor)
	release()
	if err != nil {
		m.Tracker.LogError(ctx, name, err, "Cannot abort connection of unresponsive client", "mount", name, "volume", rec.VolumeID)
		return
	}
	failpoint.Here("hang.aborted")
	if err := m.KillUnresponsive(ctx, rec, "it does not answer"); err != nil {
		m.Tracker.LogError(ctx, name, err, "Cannot kill unresponsive client", "mount", name, "volume", rec.VolumeID)
	}
}

// holdMount keeps a mount in existence until release. Otherwise its device number could be reused, and another connection would be aborted.
func (m *Monitor) holdMount(ctx context.Context, mnt host.Mount) (release func(), ok bool) {
	dir, err := host.Call(ctx, m.Namespace, "opening "+mnt.Mountpoint, func(f *os.File) { f.Close() },
		func() (*os.File, error) { return host.OpenDir(mnt.Mountpoint) })
	if err != nil {
		return nil, false
	}
	release = sync.OnceFunc(func() { dir.Close() })
	id, err := host.MountID(dir)
	if err == nil {
		var mounts []host.Mount
		mounts, err = m.Namespace.Mounts(ctx)
		ok = slices.ContainsFunc(mounts, func(now host.Mount) bool {
			return now.ID == id && now.ID == mnt.ID && now.Minor == mnt.Minor && now.Source == mnt.Source
		})
	}
	if err != nil || !ok {
		release()
		return nil, false
	}
	return release, true
}
