package runner

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"
	"golang.org/x/sync/semaphore"
	"k8s.io/klog/v2"

	"github.com/s3-csi/s3-csi-driver/pkg/backend"
	"github.com/s3-csi/s3-csi-driver/pkg/client"
	"github.com/s3-csi/s3-csi-driver/pkg/failpoint"
	"github.com/s3-csi/s3-csi-driver/pkg/fault"
	"github.com/s3-csi/s3-csi-driver/pkg/helper"
	"github.com/s3-csi/s3-csi-driver/pkg/mount"
	"github.com/s3-csi/s3-csi-driver/pkg/mount/creds"
	"github.com/s3-csi/s3-csi-driver/pkg/mount/sockets"
	"github.com/s3-csi/s3-csi-driver/pkg/mount/state"
	"github.com/s3-csi/s3-csi-driver/pkg/mount/tracker"
)

// StartParams are the parameters of a new mount.
type StartParams struct {
	VolumeID string
	Identity string // whose credentials they are, for the log
	Spec     mount.Spec
	Grant    *creds.Grant
	// Predecessors are the mounts whose publications the new one takes over, and Rotated the identity that they serve.
	Predecessors []string
	Rotated      string
	LingerFor    time.Duration // see state.Mount
}

// Start starts a new mount and returns when a directory read through it has succeeded. On failure nothing of it is left.
//
// Its steps: allocate name, uid and directories; launch the helper and mount the FUSE file system, beside each other; start the client;
// give it the session; read the root; record that it runs. The session is made and proven beside all that, and the client, which waits
// for it, gets it only then. If it is refused, the client is killed. A client with static keys is started when they are proven.
func (r *Runner) Start(ctx context.Context, p StartParams) (state.Mount, error) {
	be, err := r.Backend(p.Spec.Backend)
	if err != nil {
		return state.Mount{}, err
	}
	cl, err := r.Clients.Of(cmp.Or(p.Spec.Client, be.DefaultClient))
	if err != nil {
		return state.Mount{}, err
	}
	release, err := r.starts.acquire(ctx, p.Spec.Backend)
	if err != nil {
		return state.Mount{}, err
	}
	defer release()
	t, up := r.beginTrial(ctx, p, be)
	t.known = t.known && !cl.StaticKeys // its client starts with the keys, when they are proven
	defer t.end()
	s := &start{runner: r, params: p, backend: be, client: cl, trial: t}
	m, err := s.startMount(ctx, up)
	if errors.Is(err, errElsewhere) { // which is known now
		m, err = s.startMount(ctx, up)
	}
	if err != nil {
		return state.Mount{}, err
	}
	t.steps.log(ctx, m.Name)
	entry := r.Tracker.Mount(m.Name)
	entry.Set(m.Client, tracker.Healthy)
	entry.MarkHealed() // it has no bind mounts yet
	r.Started(m.Name)
	klog.FromContext(ctx).Info("Mounted", "mount", m.Name, "unit", m.Unit(), "client", cl.Name, "bucket", p.Spec.Bucket, "prefix", p.Spec.Prefix,
		"uid", m.UID, "identity", p.Identity, "session", p.Grant.Order().Kind, "role", p.Grant.Order().RoleARN, "took", time.Since(m.Created).Round(time.Millisecond))
	return m, nil
}

// start is the start of a new mount.
type start struct {
	runner  *Runner
	params  StartParams
	backend backend.Backend
	client  client.Client
	trial   *trial // of the credentials
}

// startMount starts the mount. The context up ends when the credentials are refused, too.
func (s *start) startMount(ctx, up context.Context) (state.Mount, error) {
	spare, end := s.runner.Spares.Begin(s.backend.Addresses(s.params.Spec.Source))
	defer end()
	m, err := s.runner.UIDs.Allocate(ctx, state.Mount{VolumeID: s.params.VolumeID, Spec: s.params.Spec, Client: s.client.Name}, spare)
	if err != nil {
		if spare != nil {
			s.runner.Spares.Discard(*spare)
		}
		return state.Mount{}, err
	}
	m.Predecessors, m.Rotated, m.LingerFor = s.params.Predecessors, s.params.Rotated, s.params.LingerFor
	s.trial.steps.done("allocated")
	failpoint.Here("start.allocated")
	if err := s.trial.explain(ctx, s.bringUp(ctx, up, &m)); err != nil {
		cctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), cleanupBound)
		defer cancel()
		return state.Mount{}, mount.WithCleanupError(err, errors.Join(s.runner.Discard(cctx, m), s.runner.releaseSpare(cctx, m)))
	}
	return m, nil
}

// bringUp does the steps of run that need a clean-up when they fail.
func (s *start) bringUp(ctx, up context.Context, m *state.Mount) error {
	var (
		fuse *os.File
		g    errgroup.Group
	)
	// These two are short and leave something behind. They are not cancelled, but waited for when the credentials are refused:
	// an abandoned step would finish after the clean-up.
	g.Go(func() error {
		defer s.trial.steps.done("helper")
		return s.bringUpHelper(ctx, *m)
	})
	g.Go(func() (err error) {
		defer s.trial.steps.done("fuse")
		fuse, err = s.runner.Sources.Mount(ctx, *m)
		return err
	})
	err := g.Wait()
	var bucket backend.BucketInfo
	if err == nil {
		bucket, err = s.trial.expect(up)
	}
	if err == nil {
		err = s.runner.setCommand(up, m, service{s.client, s.backend, bucket})
	}
	if err != nil {
		if fuse != nil {
			fuse.Close()
		}
		return err
	}
	failpoint.Here("start.mounted")
	var serving errgroup.Group
	kept := *m
	serving.Go(func() error { // on a disk, which is slow
		defer s.trial.steps.done("copy")
		return s.runner.Store.WriteCopy(ctx, kept, mount.KeepsOnDisk(s.client, kept.Spec))
	})
	serving.Go(func() error { return s.runner.releaseSpare(ctx, kept) })
	serving.Go(func() error { return s.serveBeside(up, kept, fuse) })
	if err := serving.Wait(); err != nil {
		return err
	}
	failpoint.Here("start.serving")
	bucket = s.params.Grant.Bucket() // as it was proven
	m.Phase, m.Region, m.Owner = state.Running, bucket.Region, bucket.Owner
	defer s.trial.steps.done("recorded")
	return s.runner.recordMounted(ctx, m)
}

// serveBeside has the helper run the client on the FUSE descriptor, which it takes over, gives it the session once that is proven, and
// waits until the mount answers. ctx ends when the session is refused.
func (s *start) serveBeside(ctx context.Context, m state.Mount, fuse *os.File) error {
	if m.Command.StaticKeys {
		defer s.trial.steps.done("answers")
		grant := s.params.Grant // of which the trial has finished
		return s.runner.serve(ctx, m, clientStart{s.backend, helper.StartRequest{Keys: grant.Made(), Order: grant.RenewalOrder()}, fuse})
	}
	status, err := s.runner.startClient(ctx, m, clientStart{s.backend, helper.StartRequest{Await: true}, fuse})
	if err != nil {
		return err
	}
	s.trial.steps.done("client")
	session := make(chan struct{})
	g, ctx := errgroup.WithContext(ctx)
	g.Go(func() error {
		defer s.trial.steps.done("answers")
		return s.runner.awaitReady(ctx, m, status, session)
	})
	g.Go(func() error {
		if err := s.trial.wait(ctx); err != nil {
			return err
		}
		switch proven, err := s.runner.command(ctx, m, service{s.client, s.backend, s.params.Grant.Bucket()}); {
		case err != nil:
			return err
		case !slices.Equal(proven.Argv, m.Command.Argv) || !slices.Equal(proven.Env, m.Command.Env):
			return errElsewhere
		}
		failpoint.Here("serve.proven")
		if err := s.runner.Peer(m.Name).Renew(ctx, s.params.Grant.Made(), s.params.Grant.RenewalOrder()); err != nil {
			return fmt.Errorf("giving client %s its session: %w", m.Client, err)
		}
		s.trial.steps.done("session")
		close(session)
		failpoint.Here("serve.delivered")
		return nil
	})
	return g.Wait()
}

// bringUpHelper makes a new mount's spare its helper, or starts a helper if there is no spare, or it cannot be used.
func (s *start) bringUpHelper(ctx context.Context, m state.Mount) error {
	if m.Spare == "" {
		return s.runner.launchHelper(ctx, m, s.backend)
	}
	u, err := s.runner.prepareUnit(ctx, m, s.backend)
	if err != nil {
		return err
	}
	err = s.runner.Spares.Assign(ctx, s.runner.Peer(m.Name), u)
	if err == nil {
		failpoint.Here("spare.assigned")
		klog.FromContext(ctx).V(2).Info("Spare helper assigned", "unit", m.Spare, "mount", m.Name, "uid", m.UID)
		s.runner.Tracker.Metrics.SpareRequests.WithLabelValues(tracker.SpareTaken).Inc()
		s.runner.Spares.DescribeLater(u)
		return nil
	}
	if ctx.Err() != nil {
		return fmt.Errorf("assigning a spare helper: %w", err)
	}
	s.runner.Tracker.Metrics.SpareRequests.WithLabelValues(tracker.SpareFailed).Inc()
	klog.FromContext(ctx).Info("Spare helper unusable, starting another", "mount", m.Name, "unit", m.Spare, "error", err.Error())
	if err := s.runner.Launcher.Kill(ctx, m.UID); err != nil {
		return fmt.Errorf("killing an unusable spare helper: %w", err)
	}
	return s.runner.launchHelper(ctx, m, s.backend)
}

// recordMounted writes a mount's record with the device number of its source.
func (r *Runner) recordMounted(ctx context.Context, m *state.Mount) error {
	written, mounted, err := r.Store.Mounted(ctx, *m)
	switch {
	case err != nil:
		return err
	case !mounted:
		return mount.SourceUnmounted(m.Name)
	}
	*m = written
	return nil
}

// releaseSpare removes what a mount does not need of its spare. It can be repeated.
func (r *Runner) releaseSpare(ctx context.Context, m state.Mount) error {
	if m.Spare == "" {
		return nil
	}
	return r.Store.RemoveSpare(ctx, m.Spare)
}

// launchHelper starts a mount's helper, without a client.
func (r *Runner) launchHelper(ctx context.Context, m state.Mount, be backend.Backend) error {
	u, err := r.prepareUnit(ctx, m, be)
	if err != nil {
		return err
	}
	if err := r.Store.RestoreHelperDir(ctx, m); err != nil {
		return fmt.Errorf("preparing the helper's directory: %w", err)
	}
	if u.Socket, err = sockets.Listen(ctx, r.Namespace, m.Name, r.Store.Socket(m.Name)); err != nil {
		return err
	}
	defer u.Socket.Close()
	failpoint.Here("launch.listening")
	if err := r.Launcher.Start(ctx, u); err != nil {
		return fmt.Errorf("starting the helper: %w", err)
	}
	failpoint.Here("launch.started")
	return nil
}

// clientStart is the start of a client on the FUSE descriptor, which it takes over. The backend is the one that the mount's command line was
// made for: the current one may have another proxy, which must not get these credentials. Without keys in the request, the helper makes
// them from its order or has some.
type clientStart struct {
	backend backend.Backend
	request helper.StartRequest
	fuse    *os.File
}

// serve has the helper run a client, and waits until the mount answers.
func (r *Runner) serve(ctx context.Context, m state.Mount, c clientStart) error {
	status, err := r.startClient(ctx, m, c)
	if err != nil {
		return err
	}
	begun := make(chan struct{})
	close(begun)
	return r.awaitReady(ctx, m, status, begun)
}

// startClient has the helper run a client.
func (r *Runner) startClient(ctx context.Context, m state.Mount, c clientStart) (status helper.Status, err error) {
	defer c.fuse.Close() // the connection ends with the client only if the driver has no descriptor of it
	req := c.request
	req.Client, req.Command, req.ProxyCredentials = m.Client, m.Command, c.backend.ProxyCredentials()
	status, err = r.Peer(m.Name).Start(ctx, req, c.fuse)
	failpoint.Here("serve.started")
	if err != nil {
		return status, fmt.Errorf("starting client %s: %w", m.Client, err)
	}
	return status, nil
}

// maxStarts is how many mounts of one backend start at a time, so that an unreachable backend does not delay those of others.
const maxStarts = 32

// startLimiter limits the cold starts of each backend, in order of arrival.
type startLimiter struct {
	mu        sync.Mutex
	byBackend map[string]*semaphore.Weighted
}

// acquire waits for a slot. release must be called.
func (l *startLimiter) acquire(ctx context.Context, backend string) (release func(), err error) {
	l.mu.Lock()
	if l.byBackend == nil {
		l.byBackend = map[string]*semaphore.Weighted{}
	}
	s := l.byBackend[backend]
	if s == nil {
		s = semaphore.NewWeighted(maxStarts)
		l.byBackend[backend] = s
	}
	l.mu.Unlock()
	if err := s.Acquire(ctx, 1); err != nil {
		return nil, fault.Errorf(fault.Busy, "%d mounts of backend %s are already starting, and none finished in time: %w", maxStarts, backend, err)
	}
	return func() { s.Release(1) }, nil
}
