package mount

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/sys/unix"
	"k8s.io/klog/v2"

	"github.com/s3-csi/s3-csi-driver/pkg/client"
	"github.com/s3-csi/s3-csi-driver/pkg/fault"
	"github.com/s3-csi/s3-csi-driver/pkg/helper"
	"github.com/s3-csi/s3-csi-driver/pkg/host"
	"github.com/s3-csi/s3-csi-driver/pkg/namedlock"
)

// Manager publishes and unpublishes volumes on this node.
type Manager struct {
	Options
	store store
	ctl   *host.Fusectl

	targets flights         // what is under way, by target
	volumes namedlock.Locks // by volume id: single-writer checks
	keys    namedlock.Locks // by mount key: one life after the other
	starts  gates           // by backend: cold starts

	alloc     sync.Mutex      // generations and uids
	condemned map[uint32]bool // uids that are about to be cleared of leftovers; under alloc

	watchers   watchers
	hangs      hangs
	troubles   troubles
	complaints complaints
	healed     seen // mounts whose publications this driver has looked at
	metrics    *metrics
	states     *states
	sessions   *sessions
	handed     handed // to helpers that cannot make sessions

	salt []byte
	lock *os.File // held until Run ends

	tending   time.Duration // what a look at all mounts may take, and what it mends
	givenRoot string        // TargetRoot as the operator and the CO write it
}

const (
	// maxStateDir keeps the helpers' socket paths within sockaddr_un's 107 bytes (unix(7)).
	maxStateDir = 48
	undoBound   = 20 * time.Second
	exitBound   = 3 * time.Second  // for what is under way when the driver ends, which takes no longer than 5 s for that
	helperBound = 10 * time.Second // for a helper to answer what needs no client
	answerBound = time.Second      // for a client to show that it is dead
	lockBound   = time.Second      // for what a killed driver was starting
	lockPause   = 20 * time.Millisecond
	passBound   = 10 * time.Second // for the file systems that the state and the cache directory are on
)

// New checks the options, prepares the state directory and locks it for Run. It starts nothing.
func New(ctx context.Context, o Options) (*Manager, error) {
	switch {
	case !filepath.IsAbs(o.StateDir) || len(o.StateDir) > maxStateDir:
		return nil, fmt.Errorf("--state-dir %q: it must be an absolute path of at most %d bytes", o.StateDir, maxStateDir)
	case !filepath.IsAbs(o.CacheDir):
		return nil, fmt.Errorf("--cache-dir %q: it must be an absolute path", o.CacheDir)
	case o.UIDs.First < 1000 || o.UIDs.Last < o.UIDs.First:
		return nil, fmt.Errorf("--uid-range %d-%d: it must begin at 1000 or above and not be empty", o.UIDs.First, o.UIDs.Last)
	}
	if _, err := o.Client(o.DefaultClient); err != nil {
		return nil, fmt.Errorf("--default-client: %w", err)
	}
	m := newManager(o)
	lock, err := inHost(ctx, m.Namespace, "preparing "+o.StateDir, func(f *os.File) { f.Close() }, m.prepare)
	if err != nil {
		return nil, fmt.Errorf("preparing the state directory %s: %w", o.StateDir, err)
	}
	if err := m.checkPassable(ctx); err != nil {
		lock.Close()
		return nil, err
	}
	m.lock = lock
	m.ctl = host.NewFusectl(o.Namespace, m.store.fusectl())
	// Before anybody can publish: what an earlier life has left to store must be stored before the next one serves.
	if err := m.restore(ctx); err != nil {
		klog.FromContext(ctx).Error(err, "Mounts that a reboot ended cannot be brought back; it is tried again", "in", reconcileEvery)
	}
	return m, nil
}

// prepare makes what the state directory is to have, and gives its lock.
func (m *Manager) prepare() (_ *os.File, err error) {
	if err := m.store.prepare(); err != nil {
		return nil, err
	}
	if err := m.resolve(); err != nil {
		return nil, err
	}
	lock, err := m.lockState()
	if err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			lock.Close()
		}
	}()
	if err := m.store.clearTemporaries(); err != nil {
		return nil, err
	}
	if m.salt, err = m.store.salt(); err != nil {
		return nil, err
	}
	for _, dir := range []string{m.store.sources(), m.store.scratch()} {
		if err := host.SharedMountpoint(dir); err != nil {
			return nil, err
		}
	}
	return lock, nil
}

// checkPassable sees that mounts' own users can get to what is theirs in the state and the cache directory.
func (m *Manager) checkPassable(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, passBound)
	defer cancel()
	for _, d := range []struct{ flag, dir string }{{"--state-dir", filepath.Join(m.StateDir, "mounts")}, {"--cache-dir", m.CacheDir}} {
		if err := m.Namespace.Passable(ctx, d.dir, m.UIDs.First); err != nil {
			return fmt.Errorf("%s: %w", d.flag, err)
		}
	}
	return nil
}

// newManager is New without anything on disk.
func newManager(o Options) *Manager {
	m := &Manager{Options: o, store: store{dir: o.StateDir, cache: o.CacheDir}, givenRoot: o.TargetRoot, tending: reconcileBound}
	m.troubles.now = time.Now
	m.metrics = newMetrics(o.Namespace.Overdue)
	m.states, m.sessions = m.metrics.states, m.metrics.sessions
	return m
}

// Collectors are the manager's metrics.
func (m *Manager) Collectors() []prometheus.Collector { return m.metrics.collectors() }

// forget drops what this process remembers of a mount that is gone.
func (m *Manager) forget(name string) {
	m.states.drop(name)
	m.sessions.forget(name)
	m.metrics.conflicts.forget(name)
	m.handed.forget(name)
	m.hangs.forget(name)
	m.troubles.forget(name)
	m.healed.forget(name)
}

// resolve makes the operator's directories those that the mount table shows: any of them may be behind symbolic links.
func (m *Manager) resolve() (err error) {
	if m.StateDir, err = filepath.EvalSymlinks(m.StateDir); err != nil {
		return err
	}
	if len(m.StateDir) > maxStateDir {
		return fmt.Errorf("it is %s, which is longer than %d bytes", m.StateDir, maxStateDir)
	}
	if m.CacheDir, err = filepath.EvalSymlinks(m.CacheDir); err != nil {
		return err
	}
	m.store = store{dir: m.StateDir, cache: m.CacheDir, bounded: true}
	if m.TargetRoot == "" {
		return nil
	}
	root, err := filepath.EvalSymlinks(m.TargetRoot)
	if err == nil {
		m.TargetRoot = root
	}
	return ignoreMissing(err) // the CO may make it later, as a plain directory
}

// real is a target's path as the mount table shows it.
func (m *Manager) real(target string) string {
	if rest, below := strings.CutPrefix(target, m.givenRoot+"/"); below && m.givenRoot != "" {
		return filepath.Join(m.TargetRoot, rest)
	}
	return target
}

// Run keeps what should be and what is the same, until ctx ends: at once and each minute, and for a single mount as soon as
// its client ends. Then it waits a moment for what is under way; it never unmounts on its way out.
func (m *Manager) Run(ctx context.Context) error {
	defer m.lock.Close()
	m.reportCaches(ctx)
	m.watchers.start(func(name string) { m.watch(ctx, name) })
	defer m.watchers.stop()
	var wg sync.WaitGroup
	defer wg.Wait()
	wg.Go(func() { m.watchHangs(ctx) })
	ticker := time.NewTicker(reconcileEvery)
	defer ticker.Stop()
	for {
		changed := m.Backends.Changed()
		if err := m.reconcile(ctx); err != nil && ctx.Err() == nil {
			m.complaints.log(ctx, "reconcile", err, "Not everything is as it should be; it is tried again", "in", reconcileEvery)
		}
		select {
		case <-ctx.Done():
			m.targets.wait(exitBound)
			return nil
		case <-changed:
		case <-ticker.C:
		}
	}
}

// lockState keeps a second driver off the same state directory, for as long as the file is open.
func (m *Manager) lockState() (*os.File, error) {
	f, err := os.OpenFile(filepath.Join(m.StateDir, "lock"), os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, err
	}
	// A child that a driver was starting when it was killed has the lock until it executes its own program.
	for end := time.Now().Add(lockBound); ; time.Sleep(lockPause) {
		err = unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
		if err == nil {
			return f, nil
		}
		if !errors.Is(err, unix.EWOULDBLOCK) || time.Now().After(end) {
			break
		}
	}
	f.Close()
	if errors.Is(err, unix.EWOULDBLOCK) {
		return nil, errors.New("another driver is running with it: stop that one, or give this one its own --state-dir, --cache-dir and --uid-range")
	}
	return nil, fmt.Errorf("locking it: %w", err)
}

// peer is the helper of a mount.
func (m *Manager) peer(name string) *helper.Peer {
	return helper.NewPeer(func(ctx context.Context) (*net.UnixConn, error) {
		return inHost(ctx, m.Namespace, "connecting to a helper", func(c *net.UnixConn) { c.Close() }, func() (*net.UnixConn, error) {
			return net.DialUnix("unix", nil, &net.UnixAddr{Name: m.store.socket(name), Net: "unix"})
		})
	})
}

// inHost is Namespace.Do for work that gives something. Where it comes after ctx has ended it goes to drop.
func inHost[T any](ctx context.Context, ns *host.Namespace, what string, drop func(T), fn func() (T, error)) (T, error) {
	var (
		mu        sync.Mutex
		made      []T
		abandoned bool
		none      T
	)
	err := ns.Do(ctx, what, func() error {
		v, err := fn()
		if err != nil {
			return err
		}
		mu.Lock()
		defer mu.Unlock()
		if abandoned {
			drop(v)
		} else {
			made = append(made, v)
		}
		return nil
	})
	mu.Lock()
	defer mu.Unlock()
	if err == nil {
		return made[0], nil
	}
	abandoned = true
	for _, v := range made {
		drop(v)
	}
	return none, err
}

// undone joins a failure with that of its undoing, if there is one. Only what was undone altogether may be final for the
// caller: after a final answer nobody comes back to clear up.
func undone(err, undo error) error {
	if undo == nil {
		return err
	}
	return fault.Errorf(fault.Unavailable, "%w; and it could not be undone altogether (a retry does that): %w", err, undo)
}

// do is Namespace.Do for the store's plain file work.
func (m *Manager) do(ctx context.Context, fn func() error) error {
	return m.Namespace.Do(ctx, "reading or writing "+m.StateDir, fn)
}

// account is a mount's, by its source in the mount table, for calls that wait for its client: see host.For.
func account(source string) string { return "mount " + source }

// clientOf is the client of a volume, whose choice wins over the driver's.
func (m *Manager) clientOf(name string) (client.Client, error) {
	if name == "" {
		name = m.DefaultClient
	}
	return m.Client(name)
}

// mountedAt finds the top mount on a path; ok is false when nothing is mounted there.
func mountedAt(mounts []host.Mount, path string) (top host.Mount, ok bool) {
	for _, mnt := range mounts {
		if mnt.Mountpoint == path {
			top, ok = mnt, true // later entries lie on top
		}
	}
	return top, ok
}

// usedElsewhere tells whether a mount has a publication at another target than this one ("": at any).
func usedElsewhere(all []publication, name, target string) bool {
	return slices.ContainsFunc(all, func(p publication) bool { return p.Mount == name && p.Target != target })
}

// keyOf is the key in a mount's name.
func keyOf(name string) string {
	key, _, _ := strings.Cut(name, "-")
	return key
}
