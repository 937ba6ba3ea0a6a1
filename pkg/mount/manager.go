package mount

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
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

	"github.com/s3-csi/s3-csi-driver/pkg/backend"
	"github.com/s3-csi/s3-csi-driver/pkg/client"
	"github.com/s3-csi/s3-csi-driver/pkg/credentials"
	"github.com/s3-csi/s3-csi-driver/pkg/fault"
	"github.com/s3-csi/s3-csi-driver/pkg/helper"
	"github.com/s3-csi/s3-csi-driver/pkg/host"
	"github.com/s3-csi/s3-csi-driver/pkg/launcher"
	"github.com/s3-csi/s3-csi-driver/pkg/namedlock"
	"github.com/s3-csi/s3-csi-driver/pkg/volume"
)

// Request is one publication to make: a NodePublishVolume, parsed.
type Request struct {
	VolumeID       string
	Target         string             // target_path
	Volume         volume.ID          // where the data is
	Attributes     volume.Attributes  // from the volume context
	Options        []volume.Option    // of the context, then of the capability
	ReadOnly       bool               // this publication is read-only
	SingleWriter   bool               // at most one publication of this volume on the node
	MountGroup     *uint32            // VOLUME_MOUNT_GROUP
	SELinuxContext string             // for mount(2)
	Source         string             // credentials.Source…
	Keys           credentials.Keys   // of SourceSecret
	SecretRoleARN  string             // the role that the secret names; "": none
	Tokens         credentials.Tokens // of SourceWorkload
	PodNamespace   string             // of the pod that it is for; "": not told
	ServiceAccount string             // of that pod; "": not told
	Ephemeral      bool               // an inline volume of the pod, which never gets the driver's own credentials
	Identity       string             // for people: "driver", "secret:<access key id>", "workload:<namespace>/<service account>"
}

// Stats is what NodeGetVolumeStats reports.
type Stats struct {
	TotalBytes, UsedBytes, AvailableBytes int64
	Inodes, InodesUsed, InodesFree        int64
}

// Launcher brings helpers to life. A mount's uid is its own, so a uid names all its processes.
type Launcher interface {
	Start(ctx context.Context, u launcher.Unit) error
	// Free tells whether a uid that no mount has can be given to one: nobody's processes have it.
	Free(ctx context.Context, uid uint32) (bool, error)
	// Alive tells whether a process of that uid is there.
	Alive(ctx context.Context, uid uint32) (bool, error)
	// Kill ends them and returns when they are gone.
	Kill(ctx context.Context, uid uint32) error
	// List lists what was started and is there, whether it lives or not.
	List(ctx context.Context) ([]launcher.UnitInfo, error)
	// OOMKills counts a mount's processes that the kernel has killed for want of memory.
	OOMKills(ctx context.Context, name string, uid uint32) (uint64, error)
}

// Backends is what the manager asks of the S3 services.
type Backends interface {
	Backend(name string) (backend.Backend, error)
	// Changed is closed when Backend begins to answer something else.
	Changed() <-chan struct{}
	// CheckAccess proves that the keys can do below the prefix what a client will do, and tells the bucket's region and
	// owner, of which "" is not known.
	CheckAccess(ctx context.Context, be backend.Backend, keys credentials.Keys, bucket, prefix, region, owner string) (backend.BucketInfo, error)
	// DriverKeys are the process's own credentials as they are now.
	DriverKeys(ctx context.Context) (credentials.Keys, error)
}

// UIDRange is the range of user ids that mounts get, both ends included.
type UIDRange struct{ First, Last uint32 }

// Options are what a Manager is made of.
type Options struct {
	Namespace     *host.Namespace
	Launcher      Launcher
	Backends      Backends
	Client        func(name string) (client.Client, error) // client.Get
	StateDir      string                                   // on a tmpfs: gone with a reboot, as the mounts are
	CacheDir      string                                   // on a disk
	ClientDir     string                                   // the client programs
	DefaultClient string
	TargetRoot    string // targets must lie below it; "": anywhere
	UIDs          UIDRange
	MountTimeout  time.Duration // for a cold start
	DrainTimeout  time.Duration // for an unpublish whose caller gave no deadline
	Version       string        // the driver's
	// Limits are what a mount may use whose volume does not say; 0: as much as it likes. The launcher may be one that cannot
	// enforce them.
	Limits launcher.Limits
	// Heal puts living mounts in the place of dead ones, also in containers.
	Heal bool
	// HangTimeout is after how long without an answer a mount's connection is aborted; 0: never.
	HangTimeout time.Duration
	// CleanPrograms removes installed programs that no process runs, except those in the directories used; nil: none are
	// installed.
	CleanPrograms func(ctx context.Context, used []string) error
}

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
	err := m.Namespace.Do(ctx, "preparing "+o.StateDir, func() (err error) {
		if err := m.store.prepare(); err != nil {
			return err
		}
		if err := m.resolve(); err != nil {
			return err
		}
		if m.lock, err = m.lockState(); err != nil {
			return err
		}
		if err := m.store.clearTemporaries(); err != nil {
			return err
		}
		if m.salt, err = m.store.salt(); err != nil {
			return err
		}
		return host.SharedMountpoint(m.store.sources())
	})
	if err != nil {
		if m.lock != nil {
			m.lock.Close()
		}
		return nil, fmt.Errorf("preparing the state directory %s: %w", o.StateDir, err)
	}
	m.ctl = host.NewFusectl(o.Namespace, filepath.Join(m.StateDir, "fusectl"))
	// Before anybody can publish: what an earlier life has left to store must be stored before the next one serves.
	if err := m.restore(ctx); err != nil {
		klog.FromContext(ctx).Error(err, "Mounts that a reboot ended cannot be brought back; it is tried again", "in", reconcileEvery)
	}
	return m, nil
}

// newManager is New without anything on disk.
func newManager(o Options) *Manager {
	m := &Manager{Options: o, store: store{dir: o.StateDir, cache: o.CacheDir}, givenRoot: o.TargetRoot, tending: reconcileBound}
	m.troubles.now = time.Now
	m.metrics = newMetrics(o.Namespace.Overdue)
	m.states = m.metrics.states
	return m
}

// Collectors are the manager's metrics.
func (m *Manager) Collectors() []prometheus.Collector { return m.metrics.collectors() }

// forget drops what this process remembers of a mount that is gone.
func (m *Manager) forget(name string) {
	m.states.drop(name)
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
	m.store = store{dir: m.StateDir, cache: m.CacheDir}
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
	err = unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
	if err == nil {
		return f, nil
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

// clientOf is the client of a volume, whose choice wins over the driver's.
func (m *Manager) clientOf(name string) (client.Client, error) {
	if name == "" {
		name = m.DefaultClient
	}
	return m.Client(name)
}

// keysFor are the keys that a mount gets.
func (m *Manager) keysFor(ctx context.Context, r Request) (credentials.Keys, error) {
	if r.Source == credentials.SourceSecret {
		return r.Keys, nil
	}
	keys, err := m.Backends.DriverKeys(ctx)
	if err != nil {
		return credentials.Keys{}, fmt.Errorf("the driver's own credentials: %w", err)
	}
	return keys, nil
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

// Stats tells what the file system of a publication says of its size. The answer comes from the client, so it is waited
// for only until ctx ends.
func (m *Manager) Stats(ctx context.Context, volumeID, path string) (Stats, error) {
	path = m.real(path)
	var (
		p  publication
		ok bool
	)
	err := m.do(ctx, func() (err error) {
		p, ok, err = m.store.publication(path)
		return err
	})
	if err != nil {
		return Stats{}, err
	}
	if !ok || p.VolumeID != volumeID {
		return Stats{}, fault.Errorf(fault.NotFound, "volume %s is not published at %s on this node", volumeID, path)
	}
	mounts, err := m.Namespace.Mounts(ctx)
	if err != nil {
		return Stats{}, err
	}
	top, ok := mountedAt(mounts, path)
	if name, ours := nameOfSource(top.Source); !ok || !ours || name != p.Mount {
		return Stats{}, fault.Errorf(fault.NotFound, "volume %s: the mount at %s is gone; publishing it again brings it back", volumeID, path)
	}
	st, err := m.Namespace.Statfs(ctx, path)
	switch {
	case errors.Is(err, unix.ENOTCONN), errors.Is(err, unix.ECONNABORTED), errors.Is(err, unix.EIO):
		return Stats{}, fault.Errorf(fault.Unavailable, "volume %s at %s: its client has died: %w", volumeID, path, err)
	case errors.Is(err, fs.ErrNotExist):
		return Stats{}, fault.Errorf(fault.NotFound, "volume %s: %w", volumeID, err)
	case err != nil:
		return Stats{}, fmt.Errorf("volume %s at %s does not answer: %w", volumeID, path, err)
	}
	bytes := func(blocks uint64) int64 { return saturate(blocks, uint64(st.Frsize)) }
	return Stats{
		TotalBytes: bytes(st.Blocks), UsedBytes: bytes(st.Blocks - min(st.Blocks, st.Bfree)), AvailableBytes: bytes(st.Bavail),
		Inodes: saturate(st.Files, 1), InodesUsed: saturate(st.Files-min(st.Files, st.Ffree), 1), InodesFree: saturate(st.Ffree, 1),
	}, nil
}

// saturate multiplies within an int64: object stores like to say that they have 2^63 blocks.
func saturate(n, size uint64) int64 {
	const limit = uint64(1<<63 - 1)
	if size == 0 || n > limit/size {
		return int64(limit)
	}
	return int64(n * size)
}
