// Package creds plans, makes, proves and delivers the credentials of mounts.
package creds

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/s3-csi/s3-csi-driver/pkg/backend"
	"github.com/s3-csi/s3-csi-driver/pkg/client"
	"github.com/s3-csi/s3-csi-driver/pkg/conc"
	"github.com/s3-csi/s3-csi-driver/pkg/credentials"
	"github.com/s3-csi/s3-csi-driver/pkg/fault"
	"github.com/s3-csi/s3-csi-driver/pkg/helper"
	"github.com/s3-csi/s3-csi-driver/pkg/mount"
	"github.com/s3-csi/s3-csi-driver/pkg/mount/state"
	"github.com/s3-csi/s3-csi-driver/pkg/policy"
	"github.com/s3-csi/s3-csi-driver/pkg/session"
	"github.com/s3-csi/s3-csi-driver/pkg/volume"
)

const (
	// sessionNameLen is how much of a mount's key is in the names of its sessions: enough to find the mount in a log.
	sessionNameLen = 12
	helperBound    = 10 * time.Second // for a helper to answer
	settleBound    = 10 * time.Second // for a helper's attempt to make a session
)

// Backends are the S3 services.
type Backends interface {
	Backend(name string) (backend.Backend, error)
	// CheckAccess proves that the keys have the permissions below the prefix that a client needs, and returns the bucket's region
	// and owner, "" if unknown.
	CheckAccess(ctx context.Context, be backend.Backend, a backend.Access) (backend.BucketInfo, error)
	// ProveScope proves that a session is limited to its prefix. A proof is cached for the class.
	ProveScope(ctx context.Context, be backend.Backend, a backend.Access) error
}

// Sessions plans and makes sessions.
type Sessions interface {
	// Plan decides how a mount's sessions are made. It calls no service other than the driver's own credential chain.
	Plan(ctx context.Context, r session.Request) (credentials.Order, error)
	// Make requests a session from the token service. An order of kind AsIs returns its own keys.
	Make(ctx context.Context, o credentials.Order) (credentials.Keys, error)
}

// Provider plans, makes, proves and delivers credentials.
type Provider struct {
	backends Backends
	sessions Sessions
	clients  client.Registry
	peer     func(name string) *helper.Peer
	learnt   *conc.Cache[learntKey, backend.BucketInfo] // by proofs
}

// New returns a provider. peer returns the helper of a mount.
func New(backends Backends, sessions Sessions, clients client.Registry, peer func(name string) *helper.Peer) *Provider {
	return &Provider{backends: backends, sessions: sessions, clients: clients, peer: peer, learnt: newLearnt()}
}

// Plan decides how the sessions of a publication's mount are made. It calls no service.
func (p *Provider) Plan(ctx context.Context, r mount.Request, spec mount.Spec) (*Grant, error) {
	return p.planFor(ctx, spec, spec.Client, func(q *session.Request) { fillFrom(q, r) })
}

// PlanOwn is Plan without a publication, for a mount with the driver's own credentials: they were allowed when it was published.
// For other mounts the grant is empty.
func (p *Provider) PlanOwn(ctx context.Context, m state.Mount) (*Grant, error) {
	if m.Spec.Source != credentials.SourceDriver {
		return &Grant{}, nil
	}
	return p.planFor(ctx, m.Spec, m.Client, func(q *session.Request) { q.Allowed = true })
}

func (p *Provider) planFor(ctx context.Context, spec mount.Spec, clientName string, fill func(*session.Request)) (*Grant, error) {
	be, err := p.backends.Backend(spec.Backend)
	if err != nil {
		return &Grant{}, err
	}
	clientName = cmp.Or(clientName, be.DefaultClient, p.clients.Default)
	g := &Grant{client: clientName, plan: func(ctx context.Context, clientName string) (credentials.Order, error) {
		q, cl, err := p.request(spec, clientName)
		if err != nil {
			return credentials.Order{}, err
		}
		fill(&q)
		if err := checkStatic(cl, q); err != nil {
			return credentials.Order{}, err
		}
		order, err := p.order(ctx, q)
		if err != nil {
			return credentials.Order{}, err
		}
		if cl.StaticKeys && order.Kind != credentials.AsIs {
			return credentials.Order{}, staticError(cl, "the volume's credentials are sessions (%s), which expire; "+
				"set scope: off, and no roleARN in the volume and its secret", order.Kind)
		}
		return order, nil
	}}
	g.order, err = g.plan(ctx, clientName)
	g.state = planned
	return g, err
}

// UsageKeys makes a session for measuring the usage of a publication's volume, which its client never gets. It can list what the mount
// shows, and read its record. Where sessions are not limited, it can do what the credentials can.
func (p *Provider) UsageKeys(ctx context.Context, r mount.Request, spec mount.Spec, record mount.RecordPlace) (credentials.Keys, error) {
	be, err := p.backends.Backend(spec.Backend)
	if err != nil {
		return credentials.Keys{}, err
	}
	q, _, err := p.request(spec, cmp.Or(spec.Client, be.DefaultClient))
	if err != nil {
		return credentials.Keys{}, err
	}
	fillFrom(&q, r)
	q.Policy = func(aws bool, partition string) (string, error) {
		return policy.Scope{Partition: partition, Bucket: spec.Bucket, Prefix: spec.Prefix, KMS: aws, AWS: aws}.Usage(record.Key, record.Tags)
	}
	order, err := p.order(ctx, q)
	if err != nil {
		return credentials.Keys{}, err
	}
	return p.sessions.Make(ctx, order)
}

func (p *Provider) order(ctx context.Context, q session.Request) (credentials.Order, error) {
	order, err := p.sessions.Plan(ctx, q)
	if err != nil {
		return credentials.Order{}, fmt.Errorf("credentials (%s): %w", q.Source, err)
	}
	return order, nil
}

// fillFrom sets what a session request takes from a publication.
func fillFrom(q *session.Request, r mount.Request) {
	q.Keys, q.SecretRoleARN, q.Tokens, q.Ephemeral = r.Keys, r.SecretRoleARN, r.Tokens, r.Ephemeral
	q.Pod = session.Pod{Namespace: r.PodNamespace, ServiceAccount: r.ServiceAccount}
}

// request returns the session request of a spec's mount with the client of that name.
func (p *Provider) request(spec mount.Spec, name string) (q session.Request, cl client.Client, err error) {
	be, err := p.backends.Backend(spec.Backend)
	if err != nil {
		return q, cl, err
	}
	if cl, err = p.clients.Of(name); err != nil {
		return q, cl, err
	}
	options, err := spec.ParseOptions()
	if err != nil {
		return q, cl, err
	}
	return session.Request{
		Backend: be, Source: spec.Source, RoleARN: spec.RoleARN, Scope: spec.Scope, Duration: spec.SessionDuration, Bucket: spec.Bucket,
		Policy: func(aws bool, partition string) (string, error) {
			return policy.Scope{
				Partition: partition, Bucket: spec.Bucket, Prefix: spec.Prefix, ReadOnly: spec.ReadOnly,
				Needs: cl.Needs(options, spec.ReadOnly), KMS: aws, AWS: aws,
			}.Session()
		},
		Name: spec.Key()[:sessionNameLen],
	}, cl, nil
}

// Keys returns the keys of a grant, and makes them if necessary; an empty grant has none.
func (p *Provider) Keys(ctx context.Context, g *Grant) (credentials.Keys, error) {
	if g.state != planned || g.IsEmpty() {
		return g.keys, nil
	}
	keys, err := p.sessions.Make(ctx, g.order)
	if err == nil {
		g.keys, g.state = keys, made
	}
	return keys, err
}

// Prove makes the keys of a grant and checks that they have the permissions that the client needs and, if they must be limited to the
// volume, that they have no others.
func (p *Provider) Prove(ctx context.Context, g *Grant, be backend.Backend, spec mount.Spec) error {
	if g.state == proven {
		return nil
	}
	options, err := spec.ParseOptions()
	if err != nil {
		return err
	}
	own := be
	be = be.For(options)
	keys, err := p.Keys(ctx, g)
	if err != nil {
		return err
	}
	access := backend.Access{Keys: keys, Class: g.order.Class(), Bucket: bucketOf(spec), Prefix: spec.Prefix}
	if g.bucket, err = p.backends.CheckAccess(ctx, be, access); err != nil {
		return err
	}
	scope, err := be.ScopeOf(spec.Scope)
	if err != nil {
		return err
	}
	if scope == volume.ScopeRequired && g.order.Kind != credentials.AsIs {
		access.Bucket.Region, access.Bucket.Owner = g.bucket.Region, g.bucket.Owner
		if err := p.backends.ProveScope(ctx, be, access); err != nil {
			return err
		}
	}
	if g.state == made {
		g.state = proven
	}
	p.learnt.Put(learntKeyOf(g, own, spec), g.bucket, nil)
	return nil
}

func bucketOf(spec mount.Spec) backend.BucketInfo {
	return backend.BucketInfo{Name: spec.Bucket, Region: spec.Region, Owner: spec.ExpectedBucketOwner}
}

// Deliver gives a grant to the helper of a running mount. The helper makes the sessions; the one that the client has stays until it
// expires. If it has expired, or could not be renewed, the helper tries at once, and the status is that of afterwards.
func (p *Provider) Deliver(ctx context.Context, m state.Mount, g *Grant) (helper.Status, error) {
	return p.deliver(ctx, m, g, nil)
}

func refreshError(m state.Mount, err error) error {
	return fmt.Errorf("refreshing the credentials of mount %s (volume %s): %w", m.Name, m.VolumeID, err)
}

// Apply is deliverTo, and returns an error if the mount's session has failed.
func (p *Provider) Apply(ctx context.Context, m state.Mount, g *Grant, known *helper.Status) error {
	status, err := p.deliver(ctx, m, g, known)
	if err != nil {
		return err
	}
	return SessionError(m, status)
}

func (p *Provider) deliver(ctx context.Context, m state.Mount, g *Grant, known *helper.Status) (status helper.Status, err error) {
	defer func() {
		if err != nil {
			err = fmt.Errorf("refreshing the credentials of mount %s (volume %s): %w", m.Name, m.VolumeID, err)
		}
	}()
	if err := g.Fit(ctx, m.Client); err != nil {
		return helper.Status{}, err
	}
	peer := p.peer(m.Name)
	bounded, cancel := context.WithTimeout(ctx, helperBound)
	defer cancel()
	if g.order.Kind == credentials.AsIs {
		if known != nil && known.Session.HasKeys(g.order.Keys) {
			return helper.Status{}, nil
		}
		return helper.Status{}, peer.Renew(bounded, g.order.Keys, credentials.Order{})
	}
	if known != nil {
		status = *known
	} else if status, err = peer.Status(bounded); err != nil {
		return helper.Status{}, err
	}
	if status.Session != nil && status.Session.OrderDigest == "" {
		if err := p.proveFirst(ctx, m, g); err != nil {
			return helper.Status{}, err
		}
		bounded, cancel = context.WithTimeout(ctx, helperBound) // the proof took its time
		defer cancel()
	}
	switch {
	case g.hasKeys():
		return helper.Status{}, peer.Renew(bounded, g.keys, g.order)
	case status.Session == nil || !status.Session.Has(g.order):
		if err := peer.Renew(bounded, credentials.Keys{}, g.order); err != nil {
			return helper.Status{}, err
		}
		return p.awaitRenewal(ctx, peer, status), nil
	case status.Session.Over && status.Session.Error == "": // it expired during the first attempt to renew it
		return p.awaitRenewal(ctx, peer, status), nil
	}
	return status, nil
}

// proveFirst is Prove for a mount that ran on keys as they are, and whose session must now reach no further than the volume: it is
// unknown yet whether the service enforces that.
func (p *Provider) proveFirst(ctx context.Context, m state.Mount, g *Grant) error {
	be, err := p.backends.Backend(m.Spec.Backend)
	if err != nil {
		return err
	}
	if scope, err := be.ScopeOf(m.Spec.Scope); err != nil || scope != volume.ScopeRequired {
		return err
	}
	return p.Prove(ctx, g, be, m.Spec)
}

// awaitRenewal waits, for a session that has expired or could not be renewed, until the helper has tried to make another.
func (p *Provider) awaitRenewal(ctx context.Context, peer *helper.Peer, status helper.Status) helper.Status {
	if status.Session == nil || !status.Session.Over && status.Session.Error == "" {
		return status
	}
	before := *status.Session
	sctx, cancel := context.WithTimeout(ctx, settleBound)
	defer cancel()
	for {
		next, err := peer.WaitStatus(sctx, status.Revision)
		if err != nil { // a repeated failure changes no revision
			break
		}
		status = next
		if s := status.Session; s == nil || s.Renewals != before.Renewals || s.Failures != before.Failures {
			return status
		}
	}
	lctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Second)
	defer cancel()
	if last, err := peer.Status(lctx); err == nil {
		return last
	}
	return status
}

// Refresh delivers the driver's current credentials to a mount that uses them, unless its helper has them. Other mounts get theirs from
// their publications. known is the helper's status of a moment ago; nil: the helper is asked.
func (p *Provider) Refresh(ctx context.Context, m state.Mount, known *helper.Status) error {
	g, err := p.PlanOwn(ctx, m)
	if err != nil {
		return refreshError(m, err)
	}
	if g.IsEmpty() {
		return nil
	}
	_, err = p.deliver(ctx, m, g, known)
	return err
}

// RefreshDraining is Refresh for a draining mount, whose uploads may take longer than its credentials are valid.
func (p *Provider) RefreshDraining(ctx context.Context, m state.Mount) error {
	if err := p.Refresh(ctx, m, nil); err != nil && !errors.Is(err, helper.ErrGone) {
		return err
	}
	return nil
}

// SessionError returns an error if a mount's session has expired, or if its renewal fails permanently. An unavailable token service is
// not an error as long as the session is valid.
func SessionError(m state.Mount, status helper.Status) error {
	return fault.See(credentials.Page, sessionError(m, status))
}

func sessionError(m state.Mount, status helper.Status) error {
	s := status.Session
	if s == nil || s.Error == "" && !s.Over {
		return nil
	}
	cause := s.Fault()
	kind := fault.KindOf(cause)
	of := fmt.Sprintf("the session of mount %s (volume %s)", m.Name, m.VolumeID)
	switch {
	case s.Over && cause == nil && s.OrderDigest != "":
		return fault.Errorf(fault.Unavailable, "%s expired at %s; it is being renewed", of, Time(s.Expires))
	case s.Over && cause == nil:
		return fault.Errorf(fault.Unauthenticated, "the session of mount %s (volume %s) expired at %s, and its helper has no credentials to renew it: %s", m.Name,
			m.VolumeID, Time(s.Expires), Remedy(m))
	case s.Over:
		return fault.Errorf(kind, "the session of mount %s (volume %s) expired at %s and could not be renewed since %s: %w; %s", m.Name, m.VolumeID, Time(s.Expires),
			Time(s.FailedSince), cause, Remedy(m))
	case kind.Permanent():
		return fault.Errorf(kind, "the session of mount %s (volume %s) expires at %s and its renewal is refused since %s: %w; %s", m.Name, m.VolumeID,
			Time(s.Expires), Time(s.FailedSince), cause, Remedy(m))
	}
	return nil
}

// Time formats a time for people.
func Time(t time.Time) string {
	if t.IsZero() {
		return "an unknown time"
	}
	return t.UTC().Format(time.RFC3339)
}

// Remedy returns what to do about a session that cannot be renewed.
func Remedy(m state.Mount) string {
	const retry = "the helper retries automatically"
	switch m.Spec.Source {
	case credentials.SourceSecret:
		return "correct the keys in the volume's secret, or the permissions of their owner; each republish supplies the secret again, and " + retry
	case credentials.SourceWorkload:
		return "check that the role trusts service account " + m.Spec.Identity +
			" and that kubelet republishes the volume (requiresRepublish: true), which supplies new tokens; " + retry
	}
	return "correct the driver's own credentials, or the role's trust policy; " + retry
}
