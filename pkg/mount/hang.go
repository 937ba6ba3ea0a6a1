package mount

import (
	"context"
	"errors"
	"os"
	"slices"
	"sync"
	"time"

	"golang.org/x/sys/unix"
	"k8s.io/klog/v2"

	"github.com/s3-csi/s3-csi-driver/pkg/client"
	"github.com/s3-csi/s3-csi-driver/pkg/failpoint"
	"github.com/s3-csi/s3-csi-driver/pkg/helper"
	"github.com/s3-csi/s3-csi-driver/pkg/host"
)

// A hang is looked for so many times within its timeout, but not more often than that.
const (
	hangLooks   = 8
	minHangTick = 50 * time.Millisecond
	maxHangTick = 15 * time.Second
)

// hangTick is the time between two looks.
func (m *Manager) hangTick() time.Duration {
	if m.HangTimeout == 0 {
		return maxHangTick
	}
	return min(max(m.HangTimeout/hangLooks, minHangTick), maxHangTick)
}

// hangs remembers which clients do not answer or do not work, and since when.
type hangs struct {
	mu sync.Mutex
	of map[string]*hang
}

type hang struct {
	silent  time.Time // since when no request is answered; zero: they are
	looking bool      // somebody asks right now
	gone    bool      // nobody is interested any more, but for who asks
	given   bool      // up
	// Of a mount that is to end.
	mute   time.Time // since when its helper says nothing; zero: it does
	orphan time.Time // since when its helper is known to be gone
	keyed  time.Time // when its client got new keys
	// What was seen of a client that stores what it has, when it last did something.
	worked   time.Time
	cpu      time.Duration
	revision uint64
	queue    *client.Queue // what it said last
}

func (h *hangs) get(name string) *hang {
	if h.of == nil {
		h.of = map[string]*hang{}
	}
	if h.of[name] == nil {
		h.of[name] = &hang{}
	}
	return h.of[name]
}

// begin tells whether this caller is to look at a mount, end what it saw; end returns for how long nothing was answered.
func (h *hangs) begin(name string) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	s := h.get(name)
	if s.looking {
		return false
	}
	s.looking = true
	return true
}

func (h *hangs) end(name string, answered bool) (silent time.Duration) {
	h.mu.Lock()
	defer h.mu.Unlock()
	s := h.get(name)
	s.looking = false
	switch {
	case s.gone:
		delete(h.of, name)
	case answered:
		s.silent = time.Time{}
	case s.silent.IsZero():
		s.silent = time.Now()
	default:
		silent = time.Since(s.silent)
	}
	return silent
}

// heard notes whether a helper that is to end its client says anything, and gives for how long it has not.
func (h *hangs) heard(name string, anything bool) (silent time.Duration) {
	h.mu.Lock()
	defer h.mu.Unlock()
	s := h.get(name)
	switch {
	case anything:
		s.mute, s.orphan = time.Time{}, time.Time{}
	case s.mute.IsZero():
		s.mute = time.Now()
	default:
		silent = time.Since(s.mute)
	}
	return silent
}

// orphaned is since when a client is known to have no helper.
func (h *hangs) orphaned(name string) time.Time {
	h.mu.Lock()
	defer h.mu.Unlock()
	s := h.get(name)
	if s.orphan.IsZero() {
		s.orphan = time.Now()
	}
	return s.orphan
}

// wantsKeys tells, each time that reconcileEvery has passed, that a client which is to end should get new keys.
func (h *hangs) wantsKeys(name string) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	s := h.get(name)
	wants := !s.keyed.IsZero() && time.Since(s.keyed) >= reconcileEvery
	if wants || s.keyed.IsZero() { // at first it has those of a moment ago
		s.keyed = time.Now()
	}
	return wants
}

// works tells whether a client that is to end has done anything for so long: used the processor, or stored something.
func (h *hangs) works(name string, status helper.Status, uid uint32, timeout time.Duration) bool {
	cpu, err := host.CPUTime(status.ClientPID, uid)
	h.mu.Lock()
	defer h.mu.Unlock()
	s := h.get(name)
	if err != nil || s.worked.IsZero() || cpu != s.cpu || status.Revision != s.revision {
		s.worked, s.cpu, s.revision = time.Now(), cpu, status.Revision
		return true
	}
	return time.Since(s.worked) < timeout
}

// queued notes what a client that is to end has left to store; left gives it.
func (h *hangs) queued(name string, q *client.Queue) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.get(name).queue = q
}

func (h *hangs) left(name string) *client.Queue {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.of[name] == nil {
		return nil
	}
	return h.of[name].queue
}

func (h *hangs) giveUp(name string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.get(name).given = true
}

// gaveUp tells whether the client was killed because it did not answer.
func (h *hangs) gaveUp(name string) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.of[name] != nil && h.of[name].given
}

func (h *hangs) forget(name string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if s := h.of[name]; s != nil && s.looking {
		*s = hang{looking: true, gone: true}
		return
	}
	delete(h.of, name)
}

// watchHangs looks for clients that do not answer, until ctx ends. A process that waits for one cannot be killed, so its
// container never ends and nobody would ask for the volume to be unpublished.
func (m *Manager) watchHangs(ctx context.Context) {
	if m.HangTimeout == 0 {
		return
	}
	var wg sync.WaitGroup
	defer wg.Wait()
	ticker := time.NewTicker(m.hangTick())
	defer ticker.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-ticker.C:
		}
		mounts, err := m.Namespace.Mounts(ctx)
		if err != nil {
			m.complaints.log(ctx, "hangs", err, "The mount table cannot be read: hanging clients go unnoticed")
			continue
		}
		for _, mnt := range mounts {
			name, ours := nameOfSource(mnt.Source)
			if !ours || mnt.Mountpoint != m.store.sourceDir(name) || !m.hangs.begin(name) {
				continue
			}
			wg.Go(func() {
				answered := m.answers(ctx, mnt)
				if silent := m.hangs.end(name, answered); silent >= m.HangTimeout && ctx.Err() == nil {
					m.cutOff(ctx, name, mnt)
				}
			})
		}
	}
}

// answers tells whether a mount's client answers, or nobody asks it anything.
func (m *Manager) answers(ctx context.Context, mnt host.Mount) bool {
	ctx, cancel := context.WithTimeout(ctx, m.hangTick())
	defer cancel()
	waiting, ok, err := m.ctl.Waiting(ctx, mnt.Minor)
	if err == nil && (!ok || waiting == 0) {
		return true
	}
	_, err = m.Namespace.Statfs(ctx, mnt.Mountpoint)
	var errno unix.Errno
	return err == nil || errors.As(err, &errno)
}

// cutOff aborts the connection of a client that does not answer, which frees whoever waits for it, and kills the client.
// What then comes is what comes after any death.
func (m *Manager) cutOff(ctx context.Context, name string, mnt host.Mount) {
	ctx, cancel := context.WithTimeout(ctx, undoBound)
	defer cancel()
	rec, err := m.recordOf(ctx, name)
	if err != nil {
		m.complaints.log(ctx, name, err, "A client does not answer, and nothing is known of its mount", "mount", name)
		return
	}
	failpoint.Here("hang.found")
	release, ok := m.pin(ctx, mnt)
	if !ok {
		return
	}
	defer release()
	m.states.set(name, rec.Client, stateHung)
	m.hangs.giveUp(name)
	err = m.ctl.Abort(ctx, mnt.Minor)
	release()
	if err != nil {
		m.complaints.log(ctx, name, err, "The connection of a client that does not answer cannot be aborted", "mount", name, "volume", rec.VolumeID)
		return
	}
	failpoint.Here("hang.aborted")
	if err := m.giveUp(ctx, rec, "it has answered nothing"); err != nil {
		m.complaints.log(ctx, name, err, "A client that does not answer cannot be killed", "mount", name, "volume", rec.VolumeID)
	}
}

// pin keeps a mount, if it is still there, until it is released: its device's number is another's as soon as it is gone, and
// the wrong connection would be aborted.
func (m *Manager) pin(ctx context.Context, mnt host.Mount) (release func(), ok bool) {
	drop := func(f *os.File) { f.Close() }
	source, err := inHost(ctx, m.Namespace, "opening "+mnt.Mountpoint, drop, func() (*os.File, error) { return host.OpenDir(mnt.Mountpoint) })
	if err != nil {
		return nil, false
	}
	release = sync.OnceFunc(func() { source.Close() })
	id, err := host.MountID(source)
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

// giveUp kills a client that has done nothing for --hang-timeout, and says what that costs.
func (m *Manager) giveUp(ctx context.Context, rec record, why string) error {
	ctx, cancel := context.WithTimeout(ctx, undoBound)
	defer cancel()
	lost := "what was written to files that were not closed"
	if cl, err := m.clientOf(rec.Client); err == nil && keepsOnDisk(cl, rec.Spec) {
		lost = "nothing that was closed: it is in the mount's cache, and stored when the client runs again"
	}
	if rec.Spec.ReadOnly {
		lost = "nothing: the mount is read-only"
	} else {
		m.metrics.lost.WithLabelValues(rec.Client).Inc()
	}
	klog.FromContext(ctx).Error(nil, "The client hangs: it is killed", "mount", rec.Name, "volume", rec.VolumeID, "client", rec.Client, "for", m.HangTimeout, "why", why, "lost", lost)
	m.hangs.giveUp(rec.Name)
	if err := m.peer(rec.Name).Kill(ctx); err == nil {
		return nil
	}
	return m.Launcher.Kill(ctx, rec.UID) // its helper does not answer either, or is too old to know how
}

// keepsOnDisk tells whether a client may hold closed files that are not stored yet, in its cache directory.
func keepsOnDisk(cl client.Client, spec Spec) bool { return cl.Queue != nil && !spec.ReadOnly }
