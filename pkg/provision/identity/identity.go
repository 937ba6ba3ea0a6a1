// Package identity selects the identity that the controller uses on a backend, and makes and renews its sessions.
package identity

import (
	"context"
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"sync"
	"time"

	"k8s.io/klog/v2"

	"github.com/s3-csi/s3-csi-driver/pkg/backend"
	"github.com/s3-csi/s3-csi-driver/pkg/credentials"
	"github.com/s3-csi/s3-csi-driver/pkg/fault"
	"github.com/s3-csi/s3-csi-driver/pkg/session"
	"github.com/s3-csi/s3-csi-driver/pkg/volume"
)

// Sessions decides how sessions are made, and makes them.
type Sessions interface {
	// Plan decides how a session is made. It sends no requests, except by the process's own credential chain. An order of kind
	// credentials.AsIs means that no session is made.
	Plan(ctx context.Context, r session.Request) (credentials.Order, error)
	// Make gets a session from the security token service. The error is Denied or Unauthenticated if the service refuses, Busy if it
	// throttles, and Unavailable or Timeout if it does not respond.
	Make(ctx context.Context, o credentials.Order) (credentials.Keys, error)
}

// cachedRoles is the maximum number of cached role sessions.
const cachedRoles = 256

// Identity is the identity of the controller on a backend.
type Identity struct {
	Keys credentials.Keys // of the request's secret; zero: the process's own chain
	Role string           // ARN of the role to assume with them; "": none
}

// Access is the controller's access to a backend.
type Access struct {
	Backend backend.Backend
	Who     Identity
	Keys    credentials.Keys // current ones of Who
}

// Identities finds identities and their credentials. All methods may be called concurrently.
type Identities struct {
	config   backend.Configured
	sessions Sessions
	now      func() time.Time
	salt     []byte // of digests, which are kept in memory only

	mu    sync.Mutex
	roles map[roleKey]*Session
}

// roleKey is the key of a role's session. backend is a revision, keys a digest.
type roleKey struct{ backend, keys, role string }

// New returns Identities. It starts nothing. config is read at each call; now is the clock.
func New(config backend.Configured, sessions Sessions, now func() time.Time) (*Identities, error) {
	salt := make([]byte, 16)
	if _, err := rand.Read(salt); err != nil {
		return nil, err
	}
	return &Identities{config: config, sessions: sessions, now: now, salt: salt, roles: map[roleKey]*Session{}}, nil
}

// Find returns the backend and the controller's identity on it: the keys of the request's secret or the controller's own, according to the
// backend's configuration, and the role of the secret or else of the backend.
func (i *Identities) Find(name string, secret credentials.Keys, secretRole string) (backend.Backend, Identity, error) {
	be, err := i.config.Config().Backend(name)
	if err != nil {
		return backend.Backend{}, Identity{}, err
	}
	keys, err := be.ControllerKeys(secret)
	if err != nil {
		return backend.Backend{}, Identity{}, err
	}
	who := Identity{Keys: keys, Role: secretRole}
	if who.Role == "" {
		who.Role = be.ControllerRoleARN
	}
	return be, who, nil
}

// Digest returns a digest of the keys, for maps in memory.
func (i *Identities) Digest(keys credentials.Keys) string {
	if keys.IsZero() {
		return "driver"
	}
	return keys.Digest(i.salt)
}

// Keys returns the current keys of the identity; zero: the process's own chain.
func (i *Identities) Keys(ctx context.Context, be backend.Backend, who Identity) (credentials.Keys, error) {
	if who.Role == "" {
		return who.Keys, nil
	}
	return i.role(be, who).Keys(ctx)
}

// Invalidate drops the session of a failed request if the service no longer accepts it, so that the next request gets a new one.
func (i *Identities) Invalidate(be backend.Backend, who Identity, used credentials.Keys, err error) {
	if who.Role != "" && fault.Is(err, fault.Unauthenticated) {
		i.role(be, who).drop(used.AccessKeyID)
	}
}

// role returns the session of the identity's role, which all requests of that identity share.
func (i *Identities) role(be backend.Backend, who Identity) *Session {
	key := roleKey{be.Revision(), i.Digest(who.Keys), who.Role}
	i.mu.Lock()
	defer i.mu.Unlock()
	s := i.roles[key]
	if s == nil {
		if len(i.roles) >= cachedRoles {
			clear(i.roles)
		}
		s = i.NewSession("the controller's role "+who.Role, func(ctx context.Context) (credentials.Keys, error) { return i.assume(ctx, be, who) })
		i.roles[key] = s
	}
	return s
}

// assume makes a session with all permissions of the identity's role.
func (i *Identities) assume(ctx context.Context, be backend.Backend, who Identity) (credentials.Keys, error) {
	order, err := i.Plan(ctx, be, who, SessionRequest{Name: "controller"})
	var keys credentials.Keys
	if err == nil {
		keys, err = i.Make(ctx, order)
	}
	if err != nil {
		return credentials.Keys{}, fault.See("docs/reference/errors.md#creating-and-deleting-volumes", fault.Errorf(fault.KindOf(err),
			"%s: the controller could not assume role %s: %w", be, who.Role, err))
	}
	return keys, nil
}

// SessionRequest is a request for a session of the controller.
type SessionRequest struct {
	Bucket string
	Name   string                                           // for the service's audit log
	Policy func(aws bool, partition string) (string, error) // nil: all permissions of the identity
}

// Plan decides how the controller makes a session. The backend's rules and scope do not apply, because they are for mounts.
func (i *Identities) Plan(ctx context.Context, be backend.Backend, who Identity, r SessionRequest) (credentials.Order, error) {
	be.Scope = volume.ScopeAuto
	return i.sessions.Plan(ctx, session.Request{
		Backend: be, Source: be.ControllerCredentials, Keys: who.Keys, RoleARN: who.Role, Bucket: r.Bucket, Policy: r.Policy, Name: r.Name, Allowed: true,
	})
}

// Make makes a planned session.
func (i *Identities) Make(ctx context.Context, o credentials.Order) (credentials.Keys, error) {
	return i.sessions.Make(ctx, o)
}

// Narrowing is a request for sessions that are limited by a policy.
type Narrowing struct {
	Bucket  string
	Name    string                                           // for the service's audit log
	Purpose string                                           // for messages: "the deletion of volume x"
	Latest  func() Identity                                  // the identity to make them from, because earlier ones may expire
	Policy  func(aws bool, partition string) (string, error) // its error means that no policy can describe the limit
}

// Narrow returns the sessions, after making the first one; nil: the backend has no scope, the configuration and the identity make no
// sessions, or no policy can describe the limit. Responses of the service never decide that.
func (i *Identities) Narrow(ctx context.Context, be backend.Backend, n Narrowing) (backend.KeySource, error) {
	if be.Scope == volume.ScopeOff {
		return nil, nil
	}
	order, err := i.planNarrow(ctx, be, n)
	if err != nil || order.Kind == credentials.AsIs {
		return nil, err
	}
	session := i.NewSession(n.Purpose, func(ctx context.Context) (credentials.Keys, error) {
		order, err := i.planNarrow(ctx, be, n)
		var keys credentials.Keys
		switch {
		case err == nil && order.Kind == credentials.AsIs:
			err = fault.Errorf(fault.Busy, "the latest request has credentials of another kind: a retry uses them")
		case err == nil:
			keys, err = i.Make(ctx, order)
		}
		if err != nil {
			return credentials.Keys{}, fault.Errorf(fault.KindOf(err), "making a session for %s: %w", n.Purpose, err)
		}
		return keys, nil
	})
	_, err = session.Keys(ctx)
	return session.Keys, err
}

func (i *Identities) planNarrow(ctx context.Context, be backend.Backend, n Narrowing) (credentials.Order, error) {
	var inexpressible error
	order, err := i.Plan(ctx, be, n.Latest(), SessionRequest{Bucket: n.Bucket, Name: n.Name, Policy: func(aws bool, partition string) (text string, err error) {
		text, err = n.Policy(aws, partition)
		inexpressible = err
		return text, err
	}})
	if inexpressible != nil {
		klog.FromContext(ctx).Info("Working without a scoped session", "for", n.Purpose, "reason", inexpressible)
		return credentials.Order{Kind: credentials.AsIs}, nil //nolint:nilerr // logged; there is no session then
	}
	return order, err
}

// Own returns a source of the identity's current keys, for clients that live longer than a session.
func (i *Identities) Own(be backend.Backend, driver func(context.Context) (credentials.Keys, error), latest func() Identity) backend.KeySource {
	return func(ctx context.Context) (credentials.Keys, error) {
		keys, err := i.Keys(ctx, be, latest())
		if err == nil && keys.IsZero() {
			keys, err = driver(ctx)
		}
		return keys, err
	}
}

// SessionName returns a name for the sessions of a kind of work on something, whose length is limited.
func SessionName(work, of string) string {
	sum := sha256.Sum256([]byte(of))
	return work + "-" + hex.EncodeToString(sum[:6])
}

const (
	// renewalMargin is how long before its expiry a session is renewed, at most a fifth of its validity.
	renewalMargin = 5 * time.Minute
	// renewalPause is the pause after a failed renewal.
	renewalPause = 10 * time.Second
	// makeBound is the timeout of one attempt, which may call a pod identity agent and an STS.
	makeBound = 15 * time.Second
)

// Session provides the keys of a session. It renews the session before its expiry, when keys are requested. It has no goroutine. All methods
// may be called concurrently.
type Session struct {
	what string // purpose of the session, for the log
	make func(context.Context) (credentials.Keys, error)
	now  func() time.Time

	turn  chan struct{} // holds one token, which guards the fields below; a lock that can be awaited with a context
	keys  credentials.Keys
	renew time.Time // when to renew; zero: never
}

// NewSession returns a Session, which gets its first keys when they are needed. what is its purpose, for the log.
func (i *Identities) NewSession(what string, makeKeys func(context.Context) (credentials.Keys, error)) *Session {
	s := &Session{what: what, make: makeKeys, now: i.now, turn: make(chan struct{}, 1)}
	s.turn <- struct{}{}
	return s
}

// Keys returns valid keys. If the renewal of a session fails, the old keys are used until they expire.
func (s *Session) Keys(ctx context.Context) (credentials.Keys, error) {
	select {
	case <-s.turn:
		defer func() { s.turn <- struct{}{} }()
	case <-ctx.Done():
		return credentials.Keys{}, fault.Errorf(fault.Timeout, "waiting for a session: %w", ctx.Err())
	}
	now := s.now()
	if !s.keys.IsZero() && (s.renew.IsZero() || now.Before(s.renew)) {
		return s.keys, nil
	}
	making, cancel := context.WithTimeout(ctx, makeBound)
	defer cancel()
	keys, err := s.make(making)
	if err != nil {
		if !s.keys.IsZero() && now.Before(s.keys.Expires) {
			klog.FromContext(ctx).Error(err, "Session renewal failed, using current session", "for", s.what, "until", s.keys.Expires)
			s.renew = now.Add(renewalPause)
			return s.keys, nil
		}
		s.keys = credentials.Keys{}
		return credentials.Keys{}, err
	}
	s.keys, s.renew = keys, time.Time{}
	if !keys.Expires.IsZero() {
		left := keys.Expires.Sub(s.now())
		s.renew = keys.Expires.Add(-min(renewalMargin, left/5))
	}
	return keys, nil
}

// drop drops the session with that access key id, which the service no longer accepts.
func (s *Session) drop(accessKeyID string) {
	<-s.turn
	defer func() { s.turn <- struct{}{} }()
	if s.keys.AccessKeyID == accessKeyID {
		s.keys = credentials.Keys{}
	}
}
