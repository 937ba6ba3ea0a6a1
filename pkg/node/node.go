// Package node assembles the parts of the driver that run on a node, from the publisher down to the store.
package node

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"k8s.io/klog/v2"

	"github.com/s3-csi/s3-csi-driver/pkg/backend"
	"github.com/s3-csi/s3-csi-driver/pkg/client"
	"github.com/s3-csi/s3-csi-driver/pkg/fault"
	"github.com/s3-csi/s3-csi-driver/pkg/host"
	"github.com/s3-csi/s3-csi-driver/pkg/launcher"
	"github.com/s3-csi/s3-csi-driver/pkg/mount"
	"github.com/s3-csi/s3-csi-driver/pkg/mount/creds"
	"github.com/s3-csi/s3-csi-driver/pkg/mount/drain"
	"github.com/s3-csi/s3-csi-driver/pkg/mount/heal"
	"github.com/s3-csi/s3-csi-driver/pkg/mount/linger"
	"github.com/s3-csi/s3-csi-driver/pkg/mount/monitor"
	"github.com/s3-csi/s3-csi-driver/pkg/mount/pins"
	"github.com/s3-csi/s3-csi-driver/pkg/mount/runner"
	"github.com/s3-csi/s3-csi-driver/pkg/mount/sockets"
	"github.com/s3-csi/s3-csi-driver/pkg/mount/source"
	"github.com/s3-csi/s3-csi-driver/pkg/mount/spares"
	"github.com/s3-csi/s3-csi-driver/pkg/mount/state"
	"github.com/s3-csi/s3-csi-driver/pkg/mount/supervisor"
	"github.com/s3-csi/s3-csi-driver/pkg/mount/tracker"
	"github.com/s3-csi/s3-csi-driver/pkg/mount/uids"
	"github.com/s3-csi/s3-csi-driver/pkg/mount/usage"
	"github.com/s3-csi/s3-csi-driver/pkg/podclient"
	"github.com/s3-csi/s3-csi-driver/pkg/publish"
	"github.com/s3-csi/s3-csi-driver/pkg/status"
)

const (
	// exitBound bounds the requests in flight when the driver stops.
	exitBound = 3 * time.Second
	// The limits of inline volumes if the operator sets none: the CPU weight of every systemd unit, and the default of
	// --tasks-max, because systemd's own is unknown.
	inlineCPUWeight = 100
	inlineTasks     = 1024
)

// Backends are the S3 services of the config file.
type Backends interface {
	creds.Backends
	publish.Backends
	usage.Backends
	// Changed returns a channel that is closed when the configuration of a backend changes.
	Changed() <-chan struct{}
}

// Options are the settings and dependencies of a node.
type Options struct {
	Namespace     *host.Namespace
	Launcher      runner.Launcher
	Preparer      spares.Preparer // nil: the launcher starts no helpers ahead of need
	Backends      Backends
	Sessions      creds.Sessions
	Clients       client.Source
	StateDir      string // on a tmpfs: it is gone with a reboot, as the mounts are
	CacheDir      string // on a disk
	Programs      runner.Programs
	DefaultClient string
	TargetRoot    string // targets must be below it; "": anywhere
	UIDs          launcher.UIDRange
	MountTimeout  time.Duration                                  // for a publish
	DrainTimeout  time.Duration                                  // for an unpublish whose caller gave no deadline
	Version       string                                         // the driver's
	Limits        launcher.Limits                                // see runner.Runner
	Heal          bool                                           // stale bind mounts are replaced, also in containers
	HangTimeout   time.Duration                                  // see monitor.Monitor
	CleanPrograms func(ctx context.Context, used []string) error // see monitor.Monitor
	Refused       error                                          // see publish.Options
	Linger        linger.Limits
	UsageRequests int                                                 // see usage.Options, MaxRequests
	Reach         func(ctx context.Context, be backend.Backend) error // see status.Reporter
	Declared      func() []backend.Backend                            // see status.Reporter
	Status        Status
}

// Status is what the driver's status shows beside mounts.
type Status struct {
	Driver         status.Driver
	Launcher       string
	EnforcesLimits bool // the launcher enforces the limits of mounts
	Notes          func() []string
	Volumes        bool // metrics of single volumes, too
}

// Node is the driver's part on a node.
type Node struct {
	*publish.Publisher
	podClients *podclient.Server
	conditions *status.Reporter
	store      *state.Store
	tracker    *tracker.Tracker
	meter      *usage.Meter
	monitor    *monitor.Monitor
	runner     *runner.Runner
	status     status.Server
	ofVolumes  []prometheus.Collector
}

// New checks the options, prepares the state directory and locks it for Run. It starts nothing.
func New(ctx context.Context, o Options) (*Node, error) {
	if o.UIDs.First < 1000 || o.UIDs.Last < o.UIDs.First {
		return nil, fmt.Errorf("--uid-range %d-%d: it must begin at 1000 or above and not be empty", o.UIDs.First, o.UIDs.Last)
	}
	if _, err := o.Clients.Clients().Get(o.DefaultClient); err != nil {
		return nil, fmt.Errorf("--default-client: %w", err)
	}
	store, err := state.Open(ctx, o.Namespace, state.Paths{Dir: o.StateDir, Cache: o.CacheDir}, o.UIDs.First)
	if err != nil {
		return nil, err
	}
	var n *Node
	if err = store.LockUIDs(ctx, o.UIDs.First, o.UIDs.Last); err == nil {
		n, err = assemble(ctx, o, store)
	}
	if err != nil {
		store.Close()
		return nil, err
	}
	return n, nil
}

func assemble(ctx context.Context, o Options, store *state.Store) (*Node, error) {
	var (
		clients  = client.Registry{Source: o.Clients, Default: o.DefaultClient}
		fusectl  = host.NewFusectl(o.Namespace, store.FusectlDir())
		peer     = sockets.Peers(o.Namespace, store.Paths)
		track    = tracker.New(o.Namespace.Overdue)
		pinned   = pins.New(o.Namespace, store.SourcesDir())
		sources  = source.New(o.Namespace, fusectl, store, pinned)
		provider = creds.New(o.Backends, o.Sessions, clients, peer)
		healer   = &heal.Healer{Enabled: o.Heal, Namespace: o.Namespace, Store: store, Pins: pinned, Tracker: track}
		users    = &uids.Allocator{Namespace: o.Namespace, Launcher: o.Launcher, Store: store, Range: o.UIDs}
	)
	run := &runner.Runner{
		Namespace: o.Namespace, Launcher: o.Launcher, Backend: o.Backends.Backend, Clients: clients, Store: store, Sources: sources, Creds: provider,
		Spares:  spares.New(spares.Options{Namespace: o.Namespace, Launcher: o.Launcher, Preparer: o.Preparer, UIDs: users, Store: store, Tracker: track}),
		Tracker: track, Peer: peer, UIDs: users, Programs: o.Programs, Version: o.Version, Limits: o.Limits,
		MountTimeout: o.MountTimeout, HangTimeout: o.HangTimeout,
	}
	super := supervisor.New(supervisor.Options{
		Runner: run, Drainer: drain.New(run, monitor.ProbeEvery(o.HangTimeout)), Healer: healer, Pins: pinned, Linger: o.Linger,
	})
	// Before anything is published: pending uploads of an earlier generation must finish before the next one serves.
	if err := monitor.Restore(ctx, store, clients); err != nil {
		klog.FromContext(ctx).Error(err, "Cannot restore mounts after reboot, will retry")
	}
	meter, err := usage.New(ctx, usage.Options{
		Store: store.Usages, Publications: store.Pubs, Backends: o.Backends, Sessions: provider, MaxRequests: o.UsageRequests, Now: time.Now,
	})
	if err != nil {
		return nil, err
	}
	publisher, err := publish.New(ctx, publish.Options{
		Namespace: o.Namespace, Store: store, Mounts: super, Targets: healer, Backends: o.Backends, Creds: provider, Usage: meter, Clients: clients,
		TargetRoot: o.TargetRoot, MountTimeout: o.MountTimeout, DrainTimeout: o.DrainTimeout, Share: share(o.Limits), Refused: o.Refused,
	})
	if err != nil {
		return nil, err
	}
	inPods, err := podclient.New(ctx, podclient.Options{
		Namespace: o.Namespace, Connections: fusectl, StateDir: store.Dir, Resolve: publisher.ResolveTarget, TargetRoot: publisher.ResolveTarget(o.TargetRoot),
		ReadyTimeout: o.MountTimeout, HangTimeout: o.HangTimeout, Refused: o.Refused,
	})
	if err != nil {
		return nil, err
	}
	shown := &status.Collector{
		Driver: o.Status.Driver, Launcher: o.Status.Launcher, Notes: o.Status.Notes, Mounts: store, Publications: store.Pubs, Tracked: track, PodClients: inPods,
		CacheDir: store.Cache, CacheFree: store.CacheFree, Memory: host.Memory, MemoryLimit: memoryLimit(o, run), Remedy: creds.Remedy, Now: time.Now,
	}
	conditions := &status.Reporter{
		Collector: shown, Health: super.Health, CheckTarget: healer.CheckTarget, Declared: o.Declared, Reach: o.Reach,
		Ask: func(ctx context.Context, m state.Mount, target string) error { // by statfs, which every client answers itself
			_, err := o.Namespace.Statfs(host.For(ctx, mount.Account(m.Source)), target)
			return err
		},
	}
	var ofVolumes []prometheus.Collector
	if o.Status.Volumes {
		ofVolumes = append(ofVolumes, status.VolumeMetrics{Collector: shown, Refresh: run.Refresh})
	}
	watch := &monitor.Monitor{
		Namespace: o.Namespace, Fusectl: fusectl, Store: store, Pins: pinned, Tracker: track, Clients: clients, Peer: peer,
		Mounts: super, KillUnresponsive: run.KillUnresponsive, KillOrphans: users.KillOrphans, Changed: o.Backends.Changed,
		StaleAge: supervisor.StaleAge, HangTimeout: o.HangTimeout, CleanPrograms: o.CleanPrograms,
	}
	run.Started = watch.Follow
	return &Node{
		Publisher: publisher, podClients: inPods, conditions: conditions, store: store, tracker: track, meter: meter, monitor: watch, runner: run,
		status: status.Server{Namespace: o.Namespace, Socket: store.StatusSocket(), Collect: shown.Collect}, ofVolumes: ofVolumes,
	}, nil
}

// memoryLimit returns the function that returns the memory limit of a mount, 0 if none is enforced.
func memoryLimit(o Options, run *runner.Runner) func(state.Mount) uint64 {
	if !o.Status.EnforcesLimits {
		return func(state.Mount) uint64 { return 0 }
	}
	return run.MemoryLimit
}

// share returns the limits of inline volumes: those of volumes without limits of their own.
func share(l launcher.Limits) client.Share {
	s := client.Share{Memory: l.MemoryMax, CPUWeight: l.CPUWeight, Tasks: l.TasksMax}
	if s.CPUWeight == 0 {
		s.CPUWeight = inlineCPUWeight
	}
	if s.Tasks == 0 {
		s.Tasks = inlineTasks
	}
	return s
}

// VolumeHealth returns the adverse conditions of a volume at one target, or ("") at all. NotFound: it is not on this node.
func (n *Node) VolumeHealth(ctx context.Context, volumeID, target string) ([]mount.Condition, error) {
	if found, err := n.podClients.Health(ctx, volumeID, target); !fault.Is(err, fault.NotFound) {
		return found, err
	}
	if target != "" {
		target = n.ResolveTarget(target)
	}
	return n.conditions.Volume(ctx, volumeID, target)
}

// StorageHealth returns a condition if backends cannot be reached from this node.
func (n *Node) StorageHealth(ctx context.Context) ([]mount.Condition, error) {
	return n.conditions.Storage(ctx)
}

// PodClients publishes volumes whose client runs in the user's own pod.
func (n *Node) PodClients() *podclient.Server { return n.podClients }

// Unpublish removes a volume from its target, of the driver's clients or of one in a pod.
func (n *Node) Unpublish(ctx context.Context, volumeID, target string) error {
	if ok, err := n.podClients.Unpublish(ctx, volumeID, target); ok || err != nil {
		return err
	}
	return n.Publisher.Unpublish(ctx, volumeID, target)
}

// Stats returns the usage of a volume, of the driver's clients or of one in a pod.
func (n *Node) Stats(ctx context.Context, volumeID, path string) (mount.Stats, error) {
	if ok, err := n.podClients.Has(ctx, path); err != nil {
		return mount.Stats{}, err
	} else if ok {
		return n.podClients.Stats(ctx, volumeID, path)
	}
	return n.Publisher.Stats(ctx, volumeID, path)
}

// Collectors returns the metrics of mounts and of clients in pods.
func (n *Node) Collectors() []prometheus.Collector {
	return slices.Concat(n.tracker.Collectors(), n.meter.Collectors(), n.podClients.Collectors(), n.ofVolumes)
}

// Status returns what runs on the node, as its helpers report it now.
func (n *Node) Status(ctx context.Context) (status.Document, error) {
	n.runner.Refresh(ctx)
	return n.status.Collect(ctx)
}

// Run keeps all mounts reconciled, helpers ready for new ones, usage measured, and clients in pods served, until ctx ends, and waits a
// moment for requests in flight. It never unmounts anything because it ends.
func (n *Node) Run(ctx context.Context) error {
	defer n.store.Close()
	var beside sync.WaitGroup
	defer beside.Wait()
	beside.Go(func() { n.runner.Spares.Run(ctx) })
	beside.Go(func() { n.status.Run(ctx) })
	beside.Go(func() { n.meter.Run(ctx) })
	beside.Go(func() { n.podClients.Run(ctx) })
	n.monitor.Run(ctx)
	n.Wait(exitBound)
	return nil
}
