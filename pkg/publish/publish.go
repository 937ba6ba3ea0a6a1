// Package publish serves NodePublishVolume, NodeUnpublishVolume and NodeGetVolumeStats for targets. It parses and checks requests,
// inspects targets, and binds mounts to them. Package supervisor, which it knows only as Mounts, manages the mounts themselves.
package publish

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"time"

	"k8s.io/klog/v2"

	"github.com/s3-csi/s3-csi-driver/pkg/backend"
	"github.com/s3-csi/s3-csi-driver/pkg/client"
	"github.com/s3-csi/s3-csi-driver/pkg/conc"
	"github.com/s3-csi/s3-csi-driver/pkg/credentials"
	"github.com/s3-csi/s3-csi-driver/pkg/failpoint"
	"github.com/s3-csi/s3-csi-driver/pkg/fault"
	"github.com/s3-csi/s3-csi-driver/pkg/host"
	"github.com/s3-csi/s3-csi-driver/pkg/mount"
	"github.com/s3-csi/s3-csi-driver/pkg/mount/creds"
	"github.com/s3-csi/s3-csi-driver/pkg/mount/state"
	"github.com/s3-csi/s3-csi-driver/pkg/mount/want"
	"github.com/s3-csi/s3-csi-driver/pkg/volume"
)

// cleanupBound bounds the clean-up after a failed publish.
const cleanupBound = 20 * time.Second

// Mounts are the mounts of the node. Package supervisor implements it and documents the methods.
type Mounts interface {
	Health(ctx context.Context, m state.Mount) (mount.Health, error)
	Refresh(ctx context.Context, m state.Mount, p state.Publication, w want.Mount) error
	Rotate(ctx context.Context, w want.Mount, shown state.Mount, p state.Publication) error
	Ensure(ctx context.Context, w want.Mount) (want.Lease, error)
	Reassign(ctx context.Context, former string, p state.Publication) error
	AwaitDrained(ctx context.Context, w want.Mount, failed error) (again bool, err error)
	Release(ctx context.Context, p state.Publication, unmount func(context.Context) error) error
}

// Targets replaces and checks bind mounts at targets. Package heal implements it.
type Targets interface {
	ReplaceTarget(ctx context.Context, m state.Mount, target string, readOnly bool) (done bool, err error)
	CheckTarget(ctx context.Context, m state.Mount, target string) error
}

// Backends are the S3 services of the config file.
type Backends interface {
	// Backend returns fault.Precondition for a name that is not configured.
	Backend(name string) (backend.Backend, error)
	// CheckClaims returns fault.Precondition if the backend contradicts the author's statements about the service.
	CheckClaims(name string, claims []volume.Claim) error
}

// Usage measures the usage of volumes. *usage.Meter implements it.
type Usage interface {
	// Observe notes a successful publication, with which a measurement can start.
	Observe(r mount.Request, spec mount.Spec)
	// Of returns what was measured; ok is false if there is nothing to report.
	Of(volumeID string) (u mount.Usage, ok bool)
}

// Options are the parts and settings of a Publisher.
type Options struct {
	Namespace    *host.Namespace
	Store        *state.Store
	Mounts       Mounts
	Targets      Targets
	Backends     Backends
	Creds        *creds.Provider
	Usage        Usage
	Clients      client.Registry
	TargetRoot   string        // targets must be below it; "": anywhere
	MountTimeout time.Duration // for a publish
	DrainTimeout time.Duration // for an unpublish whose caller gave no deadline
	Share        client.Share  // the limits of inline volumes
	Refused      error         // the reason why nothing can be published on this node, or nil
}

// Publisher serves publish, unpublish and stats.
type Publisher struct {
	parts    Options
	targets  inflight
	volumes  conc.Locks // by volume id: single-writer checks
	realRoot string     // TargetRoot without symbolic links, as the mount table shows it
}

// New returns a publisher.
func New(ctx context.Context, o Options) (*Publisher, error) {
	p := &Publisher{parts: o, realRoot: o.TargetRoot}
	if o.TargetRoot == "" {
		return p, nil
	}
	root, err := host.Call(ctx, o.Namespace, "resolving "+o.TargetRoot, nil, func() (string, error) { return filepath.EvalSymlinks(o.TargetRoot) })
	switch {
	case err == nil:
		p.realRoot = root
	case !errors.Is(err, os.ErrNotExist): // the CO may make it later, as a plain directory
		return nil, fmt.Errorf("resolving the root of targets: %w", err)
	}
	return p, nil
}

// Wait waits until no request is in flight, for at most d.
func (p *Publisher) Wait(d time.Duration) { p.targets.wait(d) }

// ResolveTarget returns a target's path as the mount table shows it.
func (p *Publisher) ResolveTarget(target string) string {
	if target == p.parts.TargetRoot {
		return p.realRoot
	}
	if rest, below := strings.CutPrefix(target, p.parts.TargetRoot+"/"); below && p.parts.TargetRoot != "" {
		return filepath.Join(p.realRoot, rest)
	}
	return target
}

// Publish makes a volume appear at its target. It is idempotent; a retry of the same request joins the one in flight. On failure,
// everything that it did is undone; a target that showed the volume before keeps it. refused is the reason to refuse the request,
// or nil; Publish decides whether that error is final for the target.
//
// Its steps: check the request; look at the target; if it shows the volume, refresh the credentials; if the secret was rotated, rotate;
// otherwise ensure a running mount and bind it, or replace the stale one.
func (p *Publisher) Publish(ctx context.Context, r mount.Request, refused error) error {
	r.Target = p.ResolveTarget(r.Target)
	var spec mount.Spec
	err := errors.Join(refused, p.parts.Refused)
	if err == nil {
		spec, err = p.checkRequest(&r)
	}
	if err != nil {
		return gradeError(err, p.showsVolume(ctx, r.Target))
	}
	request := fmt.Sprintf("publish %s ro=%t single=%t %s", r.VolumeID, r.ReadOnly, r.SingleWriter, spec.Encode())
	return p.targets.do(ctx, r.Target, request, func() error {
		wctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), p.parts.MountTimeout)
		defer cancel()
		w := want.Mount{
			Publication: state.Publication{Target: r.Target, VolumeID: r.VolumeID, ReadOnly: r.ReadOnly, SingleWriter: r.SingleWriter, Pod: podOf(r)},
			Identity:    r.Identity, Spec: spec, Linger: r.Attributes.Linger,
			Plan: func(ctx context.Context, spec mount.Spec) (*creds.Grant, error) {
				return p.parts.Creds.Plan(ctx, r, spec)
			},
		}
		for {
			err := p.publish(wctx, w, r.Ignored)
			if err == nil {
				p.parts.Usage.Observe(r, spec)
				return nil
			}
			if again, err := p.parts.Mounts.AwaitDrained(wctx, w, err); !again { // no lock is held meanwhile
				return err
			}
		}
	})
}

func podOf(r mount.Request) state.Pod {
	if r.PodName == "" {
		return state.Pod{}
	}
	return state.Pod{Namespace: r.PodNamespace, Name: r.PodName}
}

// gradeError decides whether an error of a publish is final. After a final one, the CO takes the target for unpublished and does not
// clean it up. So if the target shows a volume, only errors in the request itself are final.
func gradeError(err error, shown bool) error {
	if !shown || err == nil {
		return err
	}
	switch fault.KindOf(err) {
	case fault.Busy, fault.Timeout, fault.Unavailable, fault.Invalid, fault.Exists:
		return err
	}
	return fault.Errorf(fault.Unavailable, "the target is left unchanged: %w", err)
}

// checkRequest checks a request, expands its role's templates and returns its spec.
func (p *Publisher) checkRequest(r *mount.Request) (spec mount.Spec, err error) {
	if err := errors.Join(p.checkTarget(r.Target), p.checkClient(*r)); err != nil {
		return spec, err
	}
	if err := p.parts.Backends.CheckClaims(r.Volume.Backend, r.Claims); err != nil {
		return spec, fmt.Errorf("volume %s: %w", r.VolumeID, err)
	}
	if r.Attributes.RoleARN != "" {
		if err := backend.CheckTemplates(r.Attributes.RoleARN); err != nil { // which the expanded role does not show
			return spec, fault.Errorf(fault.Precondition, "roleARN of the volume: %q %w", r.Attributes.RoleARN, err)
		}
		if r.Attributes.RoleARN, err = volume.Role(r.Attributes.RoleARN).Expand(r.PodNamespace, r.ServiceAccount); err != nil {
			return spec, err
		}
	}
	return mount.NewSpec(*r, p.parts.Store.Salt()), nil
}

func (p *Publisher) checkClient(r mount.Request) error {
	be, err := p.parts.Backends.Backend(r.Volume.Backend)
	if err != nil {
		return err
	}
	cl, err := p.parts.Clients.Of(cmp.Or(r.Attributes.Client, be.DefaultClient))
	if err != nil {
		return fault.Field("volume_context.client", "%w", err)
	}
	if err := be.CheckBucketName(r.Volume.Bucket); err != nil {
		return fault.Field("volume_context.bucketName", "%w", err)
	}
	given := client.Volume{Place: "volume_context", Prefix: r.Volume.Prefix, Attributes: r.Attributes, Group: r.MountGroup,
		Options: []client.Given{{Field: "mountOptions", Options: r.Options}}}
	if err := cl.CheckVolume(given); err != nil {
		return err
	}
	if err := be.CheckClient(cl, r.Volume.Bucket, r.Options); err != nil {
		return err
	}
	if r.Ephemeral {
		if err := cl.CheckInline(r.Attributes, r.Options, p.parts.Share); err != nil {
			return err
		}
	}
	if cl.CallerPIDs {
		return host.HostPID()
	}
	return nil
}

// checkTarget refuses targets in the driver's own directories and the system's; host.OpenTarget checks the rest.
func (p *Publisher) checkTarget(target string) error {
	if dir, owns := p.parts.Store.Owns(target); owns {
		return fault.Field("target_path", "%s is inside %s, a directory of the driver itself", target, dir)
	}
	return host.CheckTarget(p.parts.TargetRoot, target)
}

func (p *Publisher) publish(ctx context.Context, w want.Mount, ignored []string) (err error) {
	unlock, err := p.volumes.Lock(ctx, w.Publication.VolumeID)
	if err != nil {
		return fault.Errorf(fault.Busy, "another publish of the volume is in flight: %w", err)
	}
	defer unlock()

	at, err := p.readTarget(ctx, w)
	defer func() { err = gradeError(err, at.state != absent) }()
	if err != nil {
		return err
	}
	if w.Grant, err = w.Plan(ctx, w.Spec); err != nil {
		return err
	}
	switch at.state {
	case healthy:
		return p.parts.Mounts.Refresh(ctx, at.mount, at.pub, w)
	case rotated:
		w.Publication.Created = time.Now()
		return fault.See(credentials.Page, p.parts.Mounts.Rotate(ctx, w, at.mount, at.pub))
	}
	if err := p.checkSingleWriter(ctx, w.Publication); err != nil {
		return err
	}
	w.Publication.Created = time.Now()
	if at.state == stale {
		return p.replace(ctx, w, at)
	}
	if len(ignored) > 0 {
		klog.FromContext(ctx).Info("Ignoring attributes of another driver", "ignored", ignored)
	}
	return p.mountAndBind(ctx, w)
}

// mountAndBind ensures a running mount and binds it to a target that shows nothing. On failure it removes the target, if it made that.
func (p *Publisher) mountAndBind(ctx context.Context, w want.Mount) (err error) {
	target, made, err := p.openTarget(ctx, w.Publication.Target)
	if err != nil {
		return err
	}
	defer target.Close()
	cctx := context.WithoutCancel(ctx)
	defer func() {
		if err != nil && made {
			cctx, cancel := context.WithTimeout(cctx, cleanupBound)
			defer cancel()
			err = mount.WithCleanupError(err, p.removeTarget(cctx, w.Publication.Target))
		}
	}()
	failpoint.Here("publish.target")
	lease, err := p.parts.Mounts.Ensure(ctx, w)
	if err != nil {
		return err
	}
	defer lease.Release()
	if err := p.bind(ctx, w, lease.Mount, target); err != nil {
		cctx, cancel := context.WithTimeout(cctx, cleanupBound)
		defer cancel()
		return mount.WithCleanupError(err, errors.Join(p.unmountTarget(cctx, w.Publication.Target), lease.Abandon(cctx)))
	}
	logPublished(ctx, lease.Mount, w)
	return nil
}

func logPublished(ctx context.Context, m state.Mount, w want.Mount) {
	klog.FromContext(ctx).Info("Published", "mount", m.Name, "client", m.Client, "readOnly", w.Publication.ReadOnly)
}

// replace replaces the stale mount at a target. The target always shows a mount: without one, a container that is restarted would see
// an empty volume. It is not undone: containers may use copies of the mount at the target.
func (p *Publisher) replace(ctx context.Context, w want.Mount, at target) error {
	if at.rotatedTo(w.Spec) {
		w.At = at.mount.Name
	}
	lease, err := p.parts.Mounts.Ensure(ctx, w)
	if err != nil {
		return err
	}
	defer lease.Release()
	m := lease.Mount
	pub := w.PublicationOn(m)
	if err := p.parts.Mounts.Reassign(ctx, at.pub.Mount, pub); err != nil {
		return err
	}
	failpoint.Here("replace.recorded")
	done, err := p.parts.Targets.ReplaceTarget(ctx, m, pub.Target, pub.ReadOnly)
	if err == nil && !done {
		err = p.rebind(ctx, w, m)
	}
	if err == nil {
		logPublished(ctx, m, w)
	}
	return err
}

// rebind unmounts what a target shows and binds a mount to it.
func (p *Publisher) rebind(ctx context.Context, w want.Mount, m state.Mount) error {
	if err := p.unmountTarget(ctx, w.Publication.Target); err != nil {
		return err
	}
	dir, _, err := p.openTarget(ctx, w.Publication.Target)
	if err != nil {
		return err
	}
	defer dir.Close()
	return p.bind(ctx, w, m, dir)
}

// openTarget opens the target's directory, which is made if it is missing.
func (p *Publisher) openTarget(ctx context.Context, path string) (dir *os.File, made bool, err error) {
	const create = true
	type opened struct {
		dir  *os.File
		made bool
	}
	o, err := host.Call(ctx, p.parts.Namespace, "opening the target", func(o opened) { o.dir.Close() }, func() (o opened, err error) {
		if o.dir, err = host.OpenTarget(p.realRoot, path); fault.Is(err, fault.NotFound) {
			o.made = true
			o.dir, err = host.MakeTarget(p.realRoot, path)
		}
		return o, err
	})
	return o.dir, o.made, err
}

// checkSingleWriter enforces SINGLE_NODE_SINGLE_WRITER: the CSI specification requires FAILED_PRECONDITION for a second publication of
// the same volume on the node. The volume's lock is held.
func (p *Publisher) checkSingleWriter(ctx context.Context, pub state.Publication) error {
	all, err := p.parts.Store.Pubs.All(ctx)
	if err != nil {
		return err
	}
	for _, other := range all {
		if other.VolumeID == pub.VolumeID && other.Target != pub.Target && (other.SingleWriter || pub.SingleWriter) {
			return fault.Errorf(fault.Precondition, "the volume allows a single writer and is already published at %s: unpublish it there first", other.Target)
		}
	}
	return nil
}

// bind records the publication and binds the mount to the target. The record is written first: after a crash in between, the next
// publish or unpublish finds a record without a mount and repairs it.
func (p *Publisher) bind(ctx context.Context, w want.Mount, m state.Mount, target *os.File) error {
	pub := w.PublicationOn(m)
	if err := p.parts.Store.Pubs.Write(ctx, pub); err != nil {
		return err
	}
	failpoint.Here("bind.recorded")
	err := p.parts.Namespace.Do(ctx, "binding "+m.Name+" to "+strconv.Quote(pub.Target), func() error {
		source, err := host.OpenDir(p.parts.Store.SourceDir(m.Name))
		if err != nil {
			return err
		}
		defer source.Close()
		return host.Bind(source, target, host.BindAttrs{ReadOnly: pub.ReadOnly, Shared: true})
	})
	if err != nil {
		return fmt.Errorf("binding mount %s to target %s: %w", m.Name, pub.Target, err)
	}
	failpoint.Here("bind.bound")
	return p.parts.Targets.CheckTarget(ctx, m, pub.Target)
}

// inflight holds the requests in flight, one for each target. A retry of the same request joins the running one; another request for
// the target is refused as busy.
type inflight struct {
	mu       sync.Mutex
	byTarget map[string]*call
	wg       sync.WaitGroup
}

type call struct {
	request string // for comparing
	done    chan struct{}
	err     error // valid when done is closed
}

// do runs work for a target, or joins it, and waits until it has finished or ctx ends. The work does not end with its callers: one
// that timed out retries and joins it.
func (f *inflight) do(ctx context.Context, target, request string, work func() error) error {
	f.mu.Lock()
	c := f.byTarget[target]
	switch {
	case c == nil:
		c = &call{request: request, done: make(chan struct{})}
		if f.byTarget == nil {
			f.byTarget = map[string]*call{}
		}
		f.byTarget[target] = c
		f.wg.Go(func() {
			c.err = work()
			f.mu.Lock()
			delete(f.byTarget, target)
			f.mu.Unlock()
			close(c.done)
		})
	case c.request != request:
		f.mu.Unlock()
		return fault.Errorf(fault.Busy, "another request for target %s is in flight", target)
	}
	f.mu.Unlock()
	select {
	case <-c.done:
		return c.err
	case <-ctx.Done():
		return fault.Errorf(fault.Timeout, "target %s: the request is still in progress; a retry joins it: %w", target, context.Cause(ctx))
	}
}

func (f *inflight) wait(d time.Duration) {
	idle := make(chan struct{})
	go func() { f.wg.Wait(); close(idle) }() // ends with the last request, which is bounded
	select {
	case <-idle:
	case <-time.After(d):
	}
}
