package runner

import (
	"context"
	"errors"
	"fmt"
	"time"

	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"
	"k8s.io/klog/v2"

	"github.com/s3-csi/s3-csi-driver/pkg/fault"
	"github.com/s3-csi/s3-csi-driver/pkg/helper"
	"github.com/s3-csi/s3-csi-driver/pkg/host"
	"github.com/s3-csi/s3-csi-driver/pkg/mount"
	"github.com/s3-csi/s3-csi-driver/pkg/mount/state"
	"github.com/s3-csi/s3-csi-driver/pkg/mount/tracker"
)

const (
	answerBound = time.Second     // for a file system to report that its client has exited
	oomBound    = 3 * time.Second // for the launcher to count OOM kills
)

// Probe returns the health of a mount's client: mount.Down, mount.Healthy or mount.Orphaned. The file system is asked, too, because
// a helper reports an exit a moment later. A helper that does not answer is an error, not an exit.
func (r *Runner) Probe(ctx context.Context, m state.Mount) (mount.Health, error) {
	health, _, err := r.ProbeStatus(ctx, m)
	return health, err
}

// ProbeStatus is Probe that also returns the status of the helper, unless that has exited.
func (r *Runner) ProbeStatus(ctx context.Context, m state.Mount) (mount.Health, helper.Status, error) {
	hctx, cancel := context.WithTimeout(ctx, helperBound)
	defer cancel()
	status, err := r.Peer(m.Name).Status(hctx)
	if err == nil {
		r.Tracker.Mount(m.Name).Reported(status)
	}
	health := mount.Healthy
	switch {
	case errors.Is(err, helper.ErrGone):
		if alive, err := r.Launcher.Alive(ctx, m.UID); err != nil || !alive {
			return mount.Down, status, err
		}
		health = mount.Orphaned
	case err != nil:
		return mount.Down, status, fault.Errorf(fault.Unavailable, "checking the client of mount %s: its helper does not answer: %w", m.Name, err)
	case status.State != helper.StateRunning || m.Phase != state.Running:
		return mount.Down, status, nil
	}
	actx, cancel := context.WithTimeout(host.For(ctx, m.Account()), answerBound)
	defer cancel()
	st, err := r.Namespace.Statfs(actx, r.Store.SourceDir(m.Name))
	if isConnectionGone(err) {
		return mount.Down, status, nil
	}
	mounted := err == nil && st.Type == unix.FUSE_SUPER_MAGIC
	if !mounted {
		if mounted, err = r.Sources.Mounted(ctx, m); err != nil {
			return mount.Down, status, err
		}
	}
	if !mounted && health == mount.Healthy {
		health = mount.Down
	}
	return health, status, nil
}

// CauseOf returns why a mount's client must be restarted.
func (r *Runner) CauseOf(ctx context.Context, m state.Mount) tracker.Cause {
	if r.Tracker.Mount(m.Name).WasKilled() {
		return tracker.Cause{Reason: tracker.ReasonHang, Detail: fmt.Sprintf("unresponsive for %s", r.HangTimeout)}
	}
	if r.oomKills(ctx, m) > m.OOMKills {
		return tracker.Cause{Reason: tracker.ReasonOOM, Detail: "OOM-killed: " + r.describeLimit(m)}
	}
	hctx, cancel := context.WithTimeout(ctx, helperBound)
	defer cancel()
	switch status, err := r.Peer(m.Name).Status(hctx); {
	case errors.Is(err, helper.ErrGone):
		if how, err := r.LastExit(ctx, m); err == nil && how != "" {
			return tracker.Cause{Reason: tracker.ReasonHelper, Detail: "its helper exited; client: " + how}
		}
		return tracker.Cause{Reason: tracker.ReasonHelper, Detail: "its helper exited"}
	case err == nil && status.State == helper.StateExited:
		return tracker.Cause{Reason: tracker.ReasonCrash, Detail: ExitSummary(status)}
	}
	return tracker.Cause{Reason: tracker.ReasonSource, Detail: "its file system was unmounted or aborted by another process"}
}

// ExitUnknown is the exit summary of a client whose helper exited, too.
const ExitUnknown = "exit status unknown, because its helper exited as well"

// LastExit returns the exit summary of a mount's last client from the file that its helper left; "" is a clean exit.
func (r *Runner) LastExit(ctx context.Context, m state.Mount) (how string, err error) {
	end, err := host.Call(ctx, r.Namespace, "reading the exit status of "+m.Name, nil, func() (end helper.End, err error) {
		end, _, err = helper.ReadEnd(r.Store.HelperDir(m.Name))
		return end, err
	})
	if err != nil {
		return "", err
	}
	switch {
	case end.Starts == 0: // no file, or that of a helper that ran no client
		return ExitUnknown, nil
	case end.Code == 0 && end.Signal == "":
		return "", nil
	}
	return ExitSummary(helper.Status{ExitCode: end.Code, Signal: end.Signal, Tail: end.Tail}), nil
}

func (r *Runner) describeLimit(m state.Mount) string {
	own := "the mount has no limit of its own"
	if m.Spec.MemoryLimit != 0 {
		own = fmt.Sprintf("the memoryLimit of its volume is %d MiB", m.Spec.MemoryLimit>>20)
	} else if limit := r.MemoryLimit(m); limit != 0 {
		own = fmt.Sprintf("the limit from the node's --memory-limit is %d MiB", limit>>20)
	}
	return own + "; --slice-memory-limit limits all mounts together"
}

// oomKills returns how many of a mount's processes were OOM-killed. It is only for messages and metrics, so it has a short timeout, and
// returns the recorded number if the current one cannot be determined.
func (r *Runner) oomKills(ctx context.Context, m state.Mount) uint64 {
	ctx, cancel := context.WithTimeout(ctx, oomBound)
	defer cancel()
	kills, err := r.Launcher.OOMKills(ctx, m.Unit(), m.UID)
	if err != nil {
		klog.FromContext(ctx).V(2).Info("Cannot determine whether the client was OOM-killed", "mount", m.Name, "error", err.Error())
		return m.OOMKills
	}
	return kills
}

// Outdated reports whether a mount's backend has another configuration than when its client was started.
func (r *Runner) Outdated(m state.Mount) (bool, error) {
	be, err := r.Backend(m.Spec.Backend)
	if fault.Is(err, fault.Precondition) {
		return false, nil // removed from the config file: running mounts continue
	}
	if err != nil {
		return false, err
	}
	return be.MountDigest() != m.Backend, nil
}

// refreshing is how many helpers Refresh asks at a time.
const refreshing = 16

// Refresh notes the current status of all helpers in the tracker, as far as they answer before ctx ends.
func (r *Runner) Refresh(ctx context.Context) {
	names, err := r.Store.Names(ctx)
	if err != nil {
		klog.FromContext(ctx).Error(err, "Cannot list mounts")
		return
	}
	var asked errgroup.Group
	asked.SetLimit(refreshing)
	for _, name := range names {
		asked.Go(func() error {
			ctx, cancel := context.WithTimeout(ctx, helperBound)
			defer cancel()
			if status, err := r.Peer(name).Status(ctx); err == nil {
				r.Tracker.Reported(name, status)
			}
			return nil
		})
	}
	_ = asked.Wait()
}
