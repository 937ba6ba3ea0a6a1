// Package runner starts, probes, restarts and kills one mount: its uid, its helper, its client and its FUSE file system. It decides
// nothing: the caller chooses when a client is restarted, and with which credentials. It knows no publications.
package runner

import (
	"context"
	"fmt"
	"time"

	"k8s.io/klog/v2"

	"github.com/s3-csi/s3-csi-driver/pkg/backend"
	"github.com/s3-csi/s3-csi-driver/pkg/client"
	"github.com/s3-csi/s3-csi-driver/pkg/failpoint"
	"github.com/s3-csi/s3-csi-driver/pkg/helper"
	"github.com/s3-csi/s3-csi-driver/pkg/host"
	"github.com/s3-csi/s3-csi-driver/pkg/launcher"
	"github.com/s3-csi/s3-csi-driver/pkg/mount"
	"github.com/s3-csi/s3-csi-driver/pkg/mount/creds"
	"github.com/s3-csi/s3-csi-driver/pkg/mount/source"
	"github.com/s3-csi/s3-csi-driver/pkg/mount/spares"
	"github.com/s3-csi/s3-csi-driver/pkg/mount/state"
	"github.com/s3-csi/s3-csi-driver/pkg/mount/tracker"
	"github.com/s3-csi/s3-csi-driver/pkg/mount/uids"
)

const (
	cleanupBound = 20 * time.Second // for the clean-up of a failed start
	helperBound  = 10 * time.Second // for a helper's answer to a request that involves no client
	killBound    = 5 * time.Second  // for a killed client to exit
)

// Launcher starts helpers. Each mount has a uid of its own, so a uid identifies all processes of a mount.
type Launcher interface {
	spares.Launcher
	uids.Launcher
	// Alive reports whether a process has the uid.
	Alive(ctx context.Context, uid uint32) (bool, error)
	// OOMKills returns the number of a mount's processes that the kernel has OOM-killed.
	OOMKills(ctx context.Context, name string, uid uint32) (uint64, error)
}

// Backends are the S3 services of the config file.
type Backends interface {
	Backend(name string) (backend.Backend, error)
}

// Programs are the programs of the clients.
type Programs interface {
	// Path returns the path of a client's program on the host. A program that cannot run there is fault.Precondition.
	Path(ctx context.Context, c client.Client) (string, error)
}

// Options are the parts and settings of a Runner.
type Options struct {
	Namespace *host.Namespace
	Launcher  Launcher
	Preparer  spares.Preparer // nil: the launcher starts no helpers ahead of need
	Backends  Backends
	Clients   client.Registry
	Store     *state.Store
	Sources   *source.Sources
	Creds     *creds.Provider
	Tracker   *tracker.Tracker
	Peer      func(name string) *helper.Peer // the helper of a mount, see sockets.Peers
	UIDs      launcher.UIDRange
	Programs  Programs
	Version   string // the driver's
	// Limits are those of mounts whose volumes set none; 0 is unlimited. The launcher may be unable to enforce them.
	Limits       launcher.Limits
	MountTimeout time.Duration // of a cold start, for error messages
	HangTimeout  time.Duration // after which an unresponsive client is killed; 0: never
	// Started is called with the name of each mount that was started.
	Started func(name string)
}

// Runner starts, probes, restarts and kills mounts. The caller of a method that is given a mount holds the lock of the mount's key.
type Runner struct {
	Options
	commands commands
	uids     *uids.Allocator
	spares   *spares.Pool
	starts   startLimiter
}

// New returns a runner.
func New(o Options) *Runner {
	u := uids.New(uids.Options{Namespace: o.Namespace, Launcher: o.Launcher, Store: o.Store, Range: o.UIDs})
	return &Runner{Options: o, commands: commands{&o}, uids: u, spares: spares.New(spares.Options{
		Namespace: o.Namespace, Launcher: o.Launcher, Preparer: o.Preparer, UIDs: u, Store: o.Store, Tracker: o.Tracker,
	})}
}

// KillOrphans kills helpers that belong to no mount, see uids.Allocator.
func (r *Runner) KillOrphans(ctx context.Context) error { return r.uids.KillOrphans(ctx) }

// RunSpares keeps helpers ready for new mounts until ctx ends, see spares.Pool.
func (r *Runner) RunSpares(ctx context.Context) { r.spares.Run(ctx) }

// Discard removes a mount that no pod has written to. It can be repeated.
func (r *Runner) Discard(ctx context.Context, m state.Mount) error {
	if !mount.ValidName(m.Name) { // its paths could be any
		return fmt.Errorf("removing a mount: invalid mount name %q", m.Name)
	}
	if m.UID != 0 {
		if err := r.Launcher.Kill(ctx, m.UID); err != nil {
			return fmt.Errorf("killing the helper of mount %s: %w", m.Name, err)
		}
	}
	failpoint.Here("discard.killed")
	if err := r.Sources.Unmount(ctx, m, false); err != nil {
		return err
	}
	failpoint.Here("discard.unmounted")
	if err := r.Store.Remove(ctx, m.Name); err != nil {
		return fmt.Errorf("removing mount %s: %w", m.Name, err)
	}
	r.Tracker.Forget(m.Name)
	return nil
}

// KillUnresponsive kills a client that made no progress within the hang timeout, and logs which data is lost.
func (r *Runner) KillUnresponsive(ctx context.Context, m state.Mount, why string) error {
	ctx, cancel := context.WithTimeout(ctx, cleanupBound)
	defer cancel()
	lost := "data written to files that were not closed"
	if m.KeepsOnDisk(r.Clients) {
		lost = "nothing that was closed: the mount's cache has it, and it is uploaded after the restart"
	}
	if m.Spec.ReadOnly {
		lost = "nothing: the mount is read-only"
	} else if m.Linger != nil {
		lost = "nothing: the mount lingers"
	} else {
		r.Tracker.CountUnflushed(m.Client)
	}
	klog.FromContext(ctx).Error(nil, "Client unresponsive, killing it", "mount", m.Name, "volume", m.VolumeID, "client", m.Client, "for", r.HangTimeout, "reason", why, "lost", lost)
	r.Tracker.Mount(m.Name).Killed()
	if err := r.Peer(m.Name).Kill(ctx); err == nil {
		return nil
	}
	return r.Launcher.Kill(ctx, m.UID) // the helper does not answer either
}

// MemoryLimit returns the memory limit that the mount's processes were started with; 0: none, or unknown.
func (r *Runner) MemoryLimit(m state.Mount) uint64 { return r.commands.memoryLimit(m) }
