// Package tracker keeps the in-memory state of mounts, in one entry per mount, and their metrics.
//
// Nothing here is needed after a restart of the driver: what must survive is in package state, in the kernel's mount table and
// with the helpers.
package tracker

import (
	"context"
	"slices"
	"sync"
	"time"

	"k8s.io/klog/v2"

	"github.com/s3-csi/s3-csi-driver/pkg/conc"
	"github.com/s3-csi/s3-csi-driver/pkg/helper"
	"github.com/s3-csi/s3-csi-driver/pkg/mount/state"
)

// State is the state of a mount, as operators see it.
type State string

// The states, which are also values of a metric's label.
const (
	Healthy      State = "healthy"
	Failed       State = "failed"       // its client has exited and is not restarted yet
	Unresponsive State = "unresponsive" // its client does not answer
	Draining     State = "draining"     // it has no publication, and its client finishes its uploads
	Lingering    State = "lingering"    // it has no publication, everything is stored, and it stays for a while
)

// Tracker has the entries of all mounts.
type Tracker struct {
	Metrics Metrics
	log     conc.LogLimiter
	now     func() time.Time

	mu     sync.Mutex
	mounts map[string]*Mount
	pass   time.Time // when the next reconcile pass is due
}

// New returns a tracker without entries. overdue returns the number of system calls that are blocked after their callers timed out.
func New(overdue func() int) *Tracker {
	return &Tracker{Metrics: newMetrics(overdue), log: conc.LogLimiter{Repeat: repeatAfter}, now: time.Now, mounts: map[string]*Mount{}}
}

// Mount returns the entry of a mount, which is made if there is none.
func (t *Tracker) Mount(name string) *Mount {
	t.mu.Lock()
	defer t.mu.Unlock()
	m := t.mounts[name]
	if m == nil {
		m = &Mount{t: t}
		t.mounts[name] = m
	}
	return m
}

// observed returns the last known state ("": unknown), Unresponsive also while it is not yet for --hang-timeout.
func (m *Mount) observed() State {
	if (m.state == Healthy || m.state == "") && !m.hang.silent.IsZero() {
		return Unresponsive
	}
	return m.state
}

// Forget removes the entry of a mount that is gone.
func (t *Tracker) Forget(name string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	delete(t.mounts, name)
}

func (t *Tracker) each(visit func(m *Mount)) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, m := range t.mounts {
		m.mu.Lock()
		visit(m)
		m.mu.Unlock()
	}
}

// Mount is the entry of one mount. Its methods can be called by several goroutines.
type Mount struct {
	t *Tracker

	mu        sync.Mutex
	client    string
	state     State     // "": unknown
	since     time.Time // of state
	linger    *Linger   // in state Lingering
	helper    *helper.Status
	problem   problem
	healed    bool
	session   *session
	conflicts int
	backoff   backoff
	hang      hang

	// Drain is of the client while it is being stopped.
	Drain Drain
}

// Set notes the state of the mount.
func (m *Mount) Set(client string, state State) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.set(client, state)
	m.linger = nil
}

func (m *Mount) set(client string, state State) {
	if m.state != state {
		m.since = m.t.now()
	}
	m.client, m.state = client, state
}

// Draining reports whether the mount's client finishes its uploads.
func (m *Mount) Draining() bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.state == Draining
}

// Healed reports whether this process has healed the mount's publications.
func (m *Mount) Healed() bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.healed
}

// MarkHealed notes that this process heals the mount's publications, or that there is nothing to heal.
func (m *Mount) MarkHealed() { m.setHealed(true) }

// MarkUnhealed notes that the mount's publications have to be healed again.
func (m *Mount) MarkUnhealed() { m.setHealed(false) }

func (m *Mount) setHealed(healed bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.healed = healed
}

// Why a lingering mount ended.
const (
	EndedTime    = "time"    // its time was over
	EndedMounts  = "mounts"  // too many mounts lingered, and it was the least recently used
	EndedMemory  = "memory"  // their memory was too large, and it was the least recently used
	EndedBackend = "backend" // its backend's configuration or rules changed
	EndedSession = "session" // its session could not be renewed
	EndedClient  = "client"  // its client exited
	EndedVolume  = "volume"  // its volume was published with other settings or another secret
	EndedOverlap = "overlap" // a mount that overlaps with it was started
)

// Linger is a lingering mount: it has no publication, and its client and its cache stay for a while.
type Linger struct {
	Name         string
	Since, Until time.Time
	Memory       uint64 // of its helper and its client, in bytes
}

// Linger notes that the mount lingers, until Set notes another state.
func (m *Mount) Linger(client string, l Linger) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.set(client, Lingering)
	m.linger = &l
}

// Lingering returns the lingering mounts, the least recently used first.
func (t *Tracker) Lingering() []Linger {
	var all []Linger
	t.each(func(m *Mount) {
		if m.linger != nil {
			all = append(all, *m.linger)
		}
	})
	slices.SortFunc(all, func(a, b Linger) int { return a.Since.Compare(b.Since) })
	return all
}

// Conflicts notes the number of conflicts that a mount's helper reports, and returns how many of them are new. Those from before
// this process started are new to it: it may not have been running when they happened.
func (m *Mount) Conflicts(client string, files int) (added int) {
	m.mu.Lock()
	defer m.mu.Unlock()
	before := m.conflicts
	if files < before { // another helper, which counts from zero
		before = 0
	}
	m.conflicts = files
	m.t.Metrics.conflicts.WithLabelValues(client).Add(float64(files - before))
	return files - before
}

// ConflictsChanged reports whether a helper reports another number of conflicts than before.
func (m *Mount) ConflictsChanged(files int) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.conflicts != files
}

// hang is the observed state of a client that should serve.
type hang struct {
	silent  time.Time // since when no request is answered; zero: they are
	probing bool
	stale   bool // the probe is of a client before this one
	killed  bool
}

// BeginProbe reports whether the caller is to probe the client: no other probe is in flight. EndProbe must follow.
func (m *Mount) BeginProbe() bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.hang.probing {
		return false
	}
	m.hang.probing = true
	return true
}

// EndProbe notes the result of a probe and returns for how long no probe was answered.
func (m *Mount) EndProbe(answered bool) (silent time.Duration) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.hang.probing = false
	switch {
	case m.hang.stale:
		m.hang = hang{}
	case answered:
		m.hang.silent = time.Time{}
	case m.hang.silent.IsZero():
		m.hang.silent = time.Now()
	default:
		silent = time.Since(m.hang.silent)
	}
	return silent
}

// Killed notes that the client was killed because it was unresponsive.
func (m *Mount) Killed() {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.hang.killed = true
}

// WasKilled reports whether the client was killed because it was unresponsive.
func (m *Mount) WasKilled() bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.hang.killed
}

// Restarted discards the observed state of the previous client.
func (m *Mount) Restarted() {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.hang = hang{probing: m.hang.probing, stale: m.hang.probing}
	m.Drain.restarted()
}

// session is the session status that a helper reported.
type session struct {
	status  helper.SessionStatus
	problem string // as logged; "": none
}

const (
	// A client that ran for stable before it exited is restarted at once. Each exit after a shorter time, and each failure to
	// start, doubles the pause before the next restart.
	stable     = 10 * time.Minute
	firstPause = time.Second
	maxPause   = 2 * time.Minute
)

// Cause is why a client must be restarted.
type Cause struct {
	Reason string // for metrics: one of the Reason constants
	Detail string // for people
}

// Why a client was restarted.
const (
	ReasonCrash  = "crash"   // it exited
	ReasonOOM    = "oom"     // it was OOM-killed
	ReasonHang   = "hang"    // it was unresponsive and killed
	ReasonHelper = "helper"  // its helper exited
	ReasonSource = "source"  // its source was unmounted by another process
	ReasonConfig = "backend" // the backend's configuration changed
	ReasonSecret = "secret"  // it uses keys that its secret no longer has
)

// backoff is the crash-loop backoff of a mount's client. It is lost when the driver restarts, which costs one restart.
type backoff struct {
	tries int       // since the client last ran for stable
	last  time.Time // of the last restart, or failure of one
	cause Cause     // of an exit after which no restart has succeeded yet
	err   string    // of the last restart; "": it succeeded
}

// RestartPause returns how long to wait before the client is restarted.
func (m *Mount) RestartPause() time.Duration {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.restartPause()
}

func (m *Mount) restartPause() time.Duration {
	since := m.t.now().Sub(m.backoff.last)
	if m.backoff.tries == 0 || since >= stable {
		return 0
	}
	pause := firstPause
	for i := 1; i < m.backoff.tries && pause < maxPause; i++ {
		pause *= 2
	}
	return max(0, min(pause, maxPause)-since)
}

// Exited notes why the client must be restarted and returns the cause to report: until a restart succeeds, clients that could not
// be started do not hide the cause of the exit before them.
func (m *Mount) Exited(cause Cause) Cause {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.backoff.cause.Reason == "" || cause.Reason == ReasonOOM {
		m.backoff.cause = cause
	}
	return m.backoff.cause
}

// RestartDone notes the error of a restart, or nil.
func (m *Mount) RestartDone(err error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	now := m.t.now()
	if now.Sub(m.backoff.last) >= stable {
		m.backoff.tries = 0
	}
	m.backoff.tries++
	m.backoff.last = now
	if err != nil {
		m.backoff.err = err.Error()
		return
	}
	m.backoff.err, m.backoff.cause = "", Cause{}
}

// repeatAfter is how often an error that stays the same is logged.
const repeatAfter = 10 * time.Minute

// LogError logs an error about a subject, unless the same error was logged less than ten minutes ago. Numbers do not count:
// durations and sizes differ each time.
func (t *Tracker) LogError(ctx context.Context, subject string, err error, message string, kv ...any) {
	if ok, _ := t.log.Allow(subject, err.Error(), time.Now()); ok {
		klog.FromContext(ctx).Error(err, message, kv...)
	}
}

// LogConflicts counts and logs new conflicts that a mount's helper reports: files whose objects another writer had changed. quarantine
// is the directory of their local copies.
func (t *Tracker) LogConflicts(ctx context.Context, m state.Mount, files int, quarantine string) {
	entry := t.Mount(m.Name)
	if !entry.ConflictsChanged(files) {
		return
	}
	if added := entry.Conflicts(m.Client, files); added > 0 {
		klog.FromContext(ctx).Error(nil, "Write conflict, local copies quarantined", "mount", m.Name, "volume", m.VolumeID, "client", m.Client,
			"bucket", m.Spec.Bucket, "prefix", m.Spec.Prefix, "files", added, "directory", quarantine)
	}
}
