package mount

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/s3-csi/s3-csi-driver/pkg/backend"
	"github.com/s3-csi/s3-csi-driver/pkg/credentials"
	"github.com/s3-csi/s3-csi-driver/pkg/fault"
	"github.com/s3-csi/s3-csi-driver/pkg/helper"
	"github.com/s3-csi/s3-csi-driver/pkg/policy"
	"github.com/s3-csi/s3-csi-driver/pkg/session"
	"github.com/s3-csi/s3-csi-driver/pkg/volume"
)

const (
	// sessionNameLen is how much of a mount's key stands in the names of its sessions: enough to find the mount in a log.
	sessionNameLen = 12
	// settleBound is how long a helper may take that tries to make a session: what an attempt may take.
	settleBound = 10 * time.Second
)

// supply is what a mount's client is to work with: an order, and the session that was made from it once somebody needed one.
// A zero order is nobody's: what the mount's helper has is all there is.
type supply struct {
	order credentials.Order
	keys  credentials.Keys
	// client is what the order was planned for, whose sessions may do what it needs; plan plans for another.
	client string
	plan   func(ctx context.Context, client string) (credentials.Order, error)
	// making is closed when the session that somebody has begun to make is there, or is not for err; nil: nobody has.
	making chan struct{}
	err    error
	// bucket is what was learnt of it when the keys were tried; proven tells that they were.
	bucket backend.BucketInfo
	proven bool
}

// String shows nothing secret: fmt does not ask the fields for theirs.
func (s supply) String() string { return "supply(" + s.order.String() + ")" }

// GoString keeps %#v from printing secrets.
func (s supply) GoString() string { return s.String() }

// plan decides what the sessions of a publication's mount are made from. Nothing is asked of any service.
func (m *Manager) plan(ctx context.Context, r Request, spec Spec) (*supply, error) {
	return m.planFor(ctx, spec, spec.Client, func(q *session.Request) {
		q.Keys, q.SecretRoleARN, q.Tokens, q.Ephemeral = r.Keys, r.SecretRoleARN, r.Tokens, r.Ephemeral
		q.Pod = session.Pod{Namespace: r.PodNamespace, ServiceAccount: r.ServiceAccount}
	})
}

// planAlone is plan for a mount that nobody publishes right now: of the driver's own credentials, whose use was allowed when it
// was published. For others there is no order.
func (m *Manager) planAlone(ctx context.Context, rec record) (*supply, error) {
	if rec.Spec.Source != credentials.SourceDriver {
		return &supply{}, nil
	}
	return m.planFor(ctx, rec.Spec, rec.Client, func(q *session.Request) { q.Allowed = true })
}

func (m *Manager) planFor(ctx context.Context, spec Spec, client string, fill func(*session.Request)) (*supply, error) {
	if client == "" {
		client = m.DefaultClient
	}
	s := &supply{client: client, plan: func(ctx context.Context, client string) (credentials.Order, error) {
		q, err := m.sessionRequest(spec, client)
		if err != nil {
			return credentials.Order{}, err
		}
		if fill != nil {
			fill(&q)
		}
		order, err := m.Sessions.Plan(ctx, q)
		if err != nil {
			return credentials.Order{}, fmt.Errorf("credentials (%s): %w", spec.Source, err)
		}
		return order, nil
	}}
	var err error
	s.order, err = s.plan(ctx, client)
	return s, err
}

// fit plans anew for a mount whose client is another than the supply's: the driver's default client may have changed since it
// was started.
func (s *supply) fit(ctx context.Context, rec record) (err error) {
	if s.plan == nil || s.client == rec.Client {
		return nil
	}
	s.client, s.keys, s.proven = rec.Client, credentials.Keys{}, false
	s.order, err = s.plan(ctx, rec.Client)
	return err
}

// sessionRequest is what a spec says about the sessions of its mount with that client.
func (m *Manager) sessionRequest(spec Spec, client string) (session.Request, error) {
	be, err := m.Backends.Backend(spec.Backend)
	if err != nil {
		return session.Request{}, err
	}
	cl, err := m.clientOf(client)
	if err != nil {
		return session.Request{}, err
	}
	options, err := spec.options()
	if err != nil {
		return session.Request{}, err
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
	}, nil
}

// take gives the keys of a supply, which are made now where nobody needed them yet; none where there is no order.
func (m *Manager) take(ctx context.Context, s *supply) (credentials.Keys, error) {
	if s.making != nil {
		<-s.making // whoever began bounds it
		s.making = nil
		return s.keys, s.err
	}
	if !s.keys.IsZero() || s.order.IsZero() {
		return s.keys, nil
	}
	keys, err := m.Sessions.Make(ctx, s.order)
	if err == nil {
		s.keys = keys
	}
	return keys, err
}

// begin has a supply's session made while other things are done, until take wants it. end gives it up, and has to be called.
func (m *Manager) begin(ctx context.Context, s *supply) (end func()) {
	ctx, cancel := context.WithCancel(ctx)
	making := make(chan struct{})
	keys, order := s.keys, s.order
	s.making = making
	go func() {
		defer close(making)
		s.keys, s.err = m.take(ctx, &supply{keys: keys, order: order})
	}()
	return func() { cancel(); <-making }
}

// prove makes a supply's session and tries it with what the client will do, and, where it has to reach no further than the
// volume, with what it must not be able to do.
func (m *Manager) prove(ctx context.Context, s *supply, be backend.Backend, spec Spec) error {
	if s.proven {
		return nil
	}
	keys, err := m.take(ctx, s)
	if err != nil {
		return err
	}
	if s.bucket, err = m.Backends.CheckAccess(ctx, be, keys, spec.Bucket, spec.Prefix, spec.Region, spec.ExpectedBucketOwner); err != nil {
		return err
	}
	scope, err := be.ScopeOf(spec.Scope)
	if err != nil {
		return err
	}
	if scope == volume.ScopeRequired && s.order.Kind != credentials.AsIs {
		if err := m.Backends.ProveScope(ctx, be, keys, s.order.Class(), spec.Bucket, spec.Prefix, s.bucket.Region, s.bucket.Owner); err != nil {
			return err
		}
	}
	s.proven = true
	return nil
}

// further is the order that a helper makes further sessions from: none where the keys are all there is.
func (s *supply) further() credentials.Order {
	if s.order.Kind == credentials.AsIs {
		return credentials.Order{}
	}
	return s.order
}

// give hands a running mount what its client is to work with from now on. The token service is asked only for a helper that
// cannot: one of an older driver. The session that the client has stays as long as it lasts; where it is over, or could not be
// renewed, the helper tries at once, and the status is that of afterwards.
func (m *Manager) give(ctx context.Context, rec record, s *supply) (helper.Status, error) {
	fail := func(err error) (helper.Status, error) {
		return helper.Status{}, fmt.Errorf("refreshing the credentials of mount %s (volume %s): %w", rec.Name, rec.VolumeID, err)
	}
	if err := s.fit(ctx, rec); err != nil {
		return fail(err)
	}
	hctx, cancel := context.WithTimeout(ctx, helperBound)
	defer cancel()
	peer := m.peer(rec.Name)
	if s.order.Kind == credentials.AsIs {
		if err := peer.Credentials(hctx, s.order.Keys); err != nil {
			return fail(err)
		}
		return helper.Status{}, nil
	}
	status, err := peer.Hello(hctx)
	if err == nil && status.Session != nil && status.Session.OrderDigest == "" {
		if err = m.proveFirst(ctx, rec, s); err == nil { // which takes its time
			cancel()
			hctx, cancel = context.WithTimeout(ctx, helperBound)
			defer cancel()
		}
	}
	switch {
	case err != nil:
		return fail(err)
	case status.Session == nil:
		if !m.handed.due(rec.Name, s.order.Digest(m.salt), time.Now()) {
			return status, nil
		}
		keys, err := m.take(ctx, s)
		if err == nil {
			err = peer.Credentials(hctx, keys)
		}
		if err != nil {
			return fail(err)
		}
		m.handed.note(rec.Name, s.order.Digest(m.salt), time.Now(), keys.Expires)
	case !s.keys.IsZero(): // somebody needed them, and here they are
		if err := peer.Renew(hctx, s.keys, s.order); err != nil {
			return fail(err)
		}
		return helper.Status{}, nil
	case !status.Session.Has(s.order):
		if err := peer.Renew(hctx, credentials.Keys{}, s.order); err != nil {
			return fail(err)
		}
		return m.settled(ctx, peer, status), nil
	case status.Session.Over && status.Session.Error == "": // it ended during the first attempt to renew it
		return m.settled(ctx, peer, status), nil
	}
	return status, nil
}

// proveFirst is prove for a mount that ran on keys as they are and whose backend, or whose operator, now wants its session to
// reach no further than the volume: nobody has tried yet whether the service sees to that.
func (m *Manager) proveFirst(ctx context.Context, rec record, s *supply) error {
	be, err := m.Backends.Backend(rec.Spec.Backend)
	if err != nil {
		return err
	}
	if scope, err := be.ScopeOf(rec.Spec.Scope); err != nil || scope != volume.ScopeRequired {
		return err
	}
	return m.prove(ctx, s, be, rec.Spec)
}

// handed remembers the sessions that helpers of older drivers were given, so that not each minute asks for another.
type handed struct {
	mu sync.Mutex
	of map[string]handedSession
}

type handedSession struct {
	digest    string    // of its order
	made, end time.Time // end is zero where it does not
}

// due tells whether a mount should be given a session: of another order, or because half of the time of the last one is over.
func (h *handed) due(name, digest string, now time.Time) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	last, ok := h.of[name]
	return !ok || last.digest != digest || !last.end.IsZero() && now.Sub(last.made) >= last.end.Sub(last.made)/2
}

func (h *handed) note(name, digest string, made, end time.Time) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.of == nil {
		h.of = map[string]handedSession{}
	}
	h.of[name] = handedSession{digest, made, end}
}

func (h *handed) forget(name string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	delete(h.of, name)
}

// settled waits, for a session that is in trouble, until the helper has tried to make another: from an order that it was just
// given, or because the session is over.
func (m *Manager) settled(ctx context.Context, peer *helper.Peer, status helper.Status) helper.Status {
	before := *status.Session
	if !before.Over && before.Error == "" {
		return status
	}
	ctx, cancel := context.WithTimeout(ctx, settleBound)
	defer cancel()
	for {
		next, err := peer.Status(ctx, status.Revision)
		if err != nil { // the same failure once more changes no revision
			break
		}
		status = next
		if s := status.Session; s == nil || s.Renewals != before.Renewals || s.Failures != before.Failures {
			return status
		}
	}
	hctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Second)
	defer cancel()
	if last, err := peer.Hello(hctx); err == nil {
		return last
	}
	return status
}

// sessionTrouble is what is wrong with a mount's session, for whoever publishes it: that it is over, or that nobody will get another.
// A token service that does not answer is none as long as the session lasts.
func sessionTrouble(rec record, status helper.Status) error {
	s := status.Session
	if s == nil || s.Error == "" && !s.Over {
		return nil
	}
	why := s.Fault()
	switch kind := fault.KindOf(why); {
	case s.Over && why == nil && s.OrderDigest != "":
		return fault.Errorf(fault.Unavailable, "the session of mount %s (volume %s) is over since %s, and the next one is being made", rec.Name, rec.VolumeID, stamp(s.Expires))
	case s.Over && why == nil:
		return fault.Errorf(fault.Unauthenticated, "the session of mount %s (volume %s) is over since %s, and nothing is there to make another from: %s", rec.Name, rec.VolumeID, stamp(s.Expires), remedy(rec))
	case s.Over:
		return fault.Errorf(kind, "the session of mount %s (volume %s) is over since %s: it could not be renewed since %s: %w; %s", rec.Name, rec.VolumeID, stamp(s.Expires), stamp(s.FailedSince), why, remedy(rec))
	case refused(kind):
		return fault.Errorf(kind, "the session of mount %s (volume %s) ends at %s and is refused another since %s: %w; %s", rec.Name, rec.VolumeID, stamp(s.Expires), stamp(s.FailedSince), why, remedy(rec))
	}
	return nil
}

// refused tells failures that go on until somebody changes something from those that pass.
func refused(kind fault.Kind) bool {
	switch kind {
	case fault.Denied, fault.Unauthenticated, fault.Precondition, fault.Invalid:
		return true
	}
	return false
}

func stamp(t time.Time) string {
	if t.IsZero() {
		return "an unknown time"
	}
	return t.UTC().Format(time.RFC3339)
}

// remedy says what to do about a session that cannot be renewed.
func remedy(rec record) string {
	const again = "the helper tries again, and recovers by itself"
	switch rec.Spec.Source {
	case credentials.SourceSecret:
		return "correct the keys in the volume's secret, or what their owner may do; each publication brings the secret anew, and " + again
	case credentials.SourceWorkload:
		return "see that the role trusts service account " + rec.Spec.Identity + " and that kubelet publishes the volume again and again (requiresRepublish: true), which brings new tokens; " + again
	}
	return "correct the driver's own credentials, or what the role trusts; " + again
}

// handOver gives a running mount of the very same spec what its publication brings, and tells what is wrong with its session.
func (m *Manager) handOver(ctx context.Context, rec record, s *supply) error {
	status, err := m.give(ctx, rec, s)
	if err != nil {
		return err
	}
	return sessionTrouble(rec, status)
}

// refresh gives a mount of the driver's own credentials the current ones. Nothing is done for others: their publications do.
func (m *Manager) refresh(ctx context.Context, rec record) error {
	s, err := m.planAlone(ctx, rec)
	if err != nil {
		return fmt.Errorf("refreshing the credentials of mount %s (volume %s): %w", rec.Name, rec.VolumeID, err)
	}
	if s.order.IsZero() {
		return nil
	}
	_, err = m.give(ctx, rec, s)
	return err
}

// keepKeys is refresh for a mount on its way out: what is open in it, or left to store, may outlast the keys that it has.
func (m *Manager) keepKeys(ctx context.Context, rec record) error {
	if err := m.refresh(ctx, rec); err != nil && !errors.Is(err, helper.ErrGone) {
		return err
	}
	return nil
}
