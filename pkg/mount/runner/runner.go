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

// Programs are the programs of the clients.
type Programs interface {
	// Path returns the path of a client's program on the host. A program that cannot run there is fault.Precondition.
	Path(ctx context.Context, c client.Client) (string, error)
}

// Runner starts, probes, restarts and kills mounts. The caller of a method that is given a mount holds the lock of the mount's key.
type Runner struct {
	Namespace *host.Namespace
	Launcher  Launcher
	UIDs      *uids.Allocator
	Spares    *spares.Pool
	Backend   func(name string) (backend.Backend, error)
	Clients   client.Registry
	Store     *state.Store
	Sources   *source.Sources
	Creds     *creds.Provider
	Tracker   *tracker.Tracker
	Peer      func(name string) *helper.Peer // the helper of a mount, see sockets.Peers
	Programs  Programs
	Version   string // the driver's
	// Limits are those of mounts whose volumes set none; 0 is unlimited. The launcher may be unable to enforce them.
	Limits       launcher.Limits
	MountTimeout time.Duration // of a cold start, for error messages
	HangTimeout  time.Duration // after which an unresponsive client is killed; 0: never
	// Started is called with the name of each mount that was started.
	Started func(name string)

	starts startLimiter
}

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
	if err := r.Sources.Unmount(ctx, m, source.Detach); err != nil {
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
	switch {
	case m.Spec.ReadOnly:
		lost = "nothing: the mount is read-only"
	case m.Linger != nil:
		lost = "nothing: the mount lingers"
	default:
		r.Tracker.Metrics.Unflushed.WithLabelValues(m.Client).Inc()
	}
	klog.FromContext(ctx).Error(nil, "Client unresponsive, killing it", "mount", m.Name, "volume", m.VolumeID, "client", m.Client,
		"for", r.HangTimeout, "reason", why, "lost", lost)
	r.Tracker.Mount(m.Name).Killed()
	if err := r.Peer(m.Name).Kill(ctx); err == nil {
		return nil
	}
	return r.Launcher.Kill(ctx, m.UID) // the helper does not answer either
}
