package runner

import (
	"context"
	"errors"
	"fmt"

	"github.com/s3-csi/s3-csi-driver/pkg/backend"
	"github.com/s3-csi/s3-csi-driver/pkg/credentials"
	"github.com/s3-csi/s3-csi-driver/pkg/failpoint"
	"github.com/s3-csi/s3-csi-driver/pkg/helper"
	"github.com/s3-csi/s3-csi-driver/pkg/mount/creds"
	"github.com/s3-csi/s3-csi-driver/pkg/mount/source"
	"github.com/s3-csi/s3-csi-driver/pkg/mount/state"
)

// errNoCredentials is for a mount whose helper exited with the keys of its secret or the token of its pod.
var errNoCredentials = errors.New("the helper exited and its credentials were lost: republish the volume to supply them again, " +
	"or copy the files in the mount's cache to the bucket manually and remove the mount's directories")

// Restart starts a mount's client again, on the same cache and with a new FUSE connection. The client stores what it finds in the
// cache. The mount keeps its name and, if its helper still runs, its helper and session. Without a helper the grant supplies the
// credentials; if it is empty, the driver's own are used if the mount has those.
//
// Its steps: update the command line; ensure an idle helper; unmount the stale file system; mount a new one; start the client.
func (r *Runner) Restart(ctx context.Context, m *state.Mount, grant *creds.Grant) error {
	var planError error
	if grant.IsEmpty() {
		own, err := r.Creds.PlanOwn(ctx, *m)
		if err == nil {
			grant = own
		}
		planError = err // a running helper has credentials
	}
	if err := grant.Fit(ctx, m.Client); err != nil {
		return err
	}
	be, err := r.Backend(m.Spec.Backend)
	if err != nil {
		return err
	}
	// First, so that a client that still serves is not killed for a backend that cannot be reached.
	if err := r.updateCommand(ctx, m, be, grant); err != nil {
		return err
	}
	if err := r.ensureIdleHelper(ctx, *m, be, grant); err != nil {
		return errors.Join(err, planError)
	}
	failpoint.Here("restart.idle")
	if err := r.Sources.Clear(ctx, *m, source.Pinned); err != nil {
		return err
	}
	failpoint.Here("restart.cleared")
	m.OOMKills = r.oomKills(ctx, *m)
	fuse, err := r.Sources.Mount(ctx, *m)
	if err != nil {
		return err
	}
	failpoint.Here("restart.mounted")
	if err := r.recordMounted(ctx, m); err != nil {
		fuse.Close()
		return err
	}
	if err := r.serve(ctx, *m, clientStart{be, helper.StartRequest{Keys: grant.Made(), Order: grant.RenewalOrder()}, fuse}); err != nil {
		// A file system that does not answer would count as healthy. Without it the client exits by itself.
		cctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), cleanupBound)
		defer cancel()
		return errors.Join(err, r.Sources.Clear(cctx, *m, source.Unpinned))
	}
	failpoint.Here("restart.serving")
	return nil
}

// ensureIdleHelper ensures that the mount has a helper that accepts a new client, and that has credentials or will get them with it.
func (r *Runner) ensureIdleHelper(ctx context.Context, m state.Mount, be backend.Backend, grant *creds.Grant) error {
	hctx, cancel := context.WithTimeout(ctx, helperBound)
	defer cancel()
	status, err := r.Peer(m.Name).Status(hctx)
	if err == nil && status.State == helper.StateRunning {
		if status, err = r.killClient(ctx, m, status); err != nil {
			return err
		}
		failpoint.Here("restart.killed")
	}
	switch {
	case err == nil && status.State == helper.StateExited && (!status.Ending || ExitedAbnormally(status)):
		if session := status.Session; session != nil && !session.Over && grant.Order().Kind != credentials.AsIs {
			return nil // the helper's session is still valid
		}
		_, err := r.Creds.Keys(ctx, grant)
		return err
	case err == nil && status.State == helper.StateIdle && !status.Ending && !grant.IsEmpty():
		_, err := r.Creds.Keys(ctx, grant)
		return err // it was started for this by a restart that was interrupted
	case err == nil, errors.Is(err, helper.ErrGone), ctx.Err() == nil: // also one that does not answer
		if grant.IsEmpty() {
			return errNoCredentials
		}
		if _, err := r.Creds.Keys(ctx, grant); err != nil { // before anything is killed for it
			return err
		}
		if err := r.Launcher.Kill(ctx, m.UID); err != nil {
			return err
		}
		failpoint.Here("restart.ended")
		return r.launchHelper(ctx, m, be)
	}
	return err
}

// KillClient kills the client of a mount, if its helper runs one, and keeps the helper.
func (r *Runner) KillClient(ctx context.Context, m state.Mount) error {
	hctx, cancel := context.WithTimeout(ctx, helperBound)
	defer cancel()
	status, err := r.Peer(m.Name).Status(hctx)
	if err == nil && status.State == helper.StateRunning {
		_, err = r.killClient(ctx, m, status)
	}
	return err
}

// killClient kills a client that runs without a file system, or that does not answer, and returns its helper's status then.
func (r *Runner) killClient(ctx context.Context, m state.Mount, status helper.Status) (helper.Status, error) {
	ctx, cancel := context.WithTimeout(ctx, killBound)
	defer cancel()
	peer := r.Peer(m.Name)
	// It may be exiting already: the kernel has reported the end of its connection to it.
	if err := peer.Kill(ctx); err != nil && !errors.Is(err, helper.ErrGone) {
		return status, fmt.Errorf("killing the client: %w", err)
	}
	for status.State == helper.StateRunning {
		next, err := peer.WaitStatus(ctx, status.Revision)
		if err != nil {
			return status, err
		}
		status = next
	}
	return status, nil
}
