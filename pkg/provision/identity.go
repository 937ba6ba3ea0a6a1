package provision

import (
	"context"
	"sync"

	"github.com/s3-csi/s3-csi-driver/pkg/backend"
	"github.com/s3-csi/s3-csi-driver/pkg/credentials"
	"github.com/s3-csi/s3-csi-driver/pkg/fault"
	"github.com/s3-csi/s3-csi-driver/pkg/session"
	"github.com/s3-csi/s3-csi-driver/pkg/volume"
)

// Sessions decides how sessions are made, and makes them.
type Sessions interface {
	// Plan asks nobody but the process's own credential chain. An order of kind credentials.AsIs says that no session is made.
	Plan(ctx context.Context, r session.Request) (credentials.Order, error)
	// Make asks the security token service. A refusal is Denied or Unauthenticated, a service that is too busy Busy, one that
	// does not answer Unavailable or Timeout.
	Make(ctx context.Context, o credentials.Order) (credentials.Keys, error)
}

// knownRoles is how many identities' role sessions are kept.
const knownRoles = 256

// identity is as whom the controller works on a backend.
type identity struct {
	keys credentials.Keys // of the request's secret; zero: the process's own chain
	role string           // to take on with them; "": none
}

// identify finds the backend, and as whom the operator wants the controller to work there: with the request's secret or
// without one, and in the secret's role or else in the backend's.
func (p *Provisioner) identify(name string, secret credentials.Keys, secretRole string) (backend.Backend, identity, error) {
	be, err := p.config.Config().Backend(name)
	if err != nil {
		return backend.Backend{}, identity{}, err
	}
	keys, err := be.ControllerKeys(secret)
	if err != nil {
		return backend.Backend{}, identity{}, err
	}
	who := identity{keys: keys, role: secretRole}
	if who.role == "" {
		who.role = be.ControllerRoleARN
	}
	return be, who, nil
}

// roles are the sessions of roles that the controller takes on, by identity.
type roles struct {
	mu  sync.Mutex
	all map[roleKey]*lease
}

// roleKey says whose session it is. backend is a revision, keys a digest.
type roleKey struct{ backend, keys, role string }

func (p *Provisioner) digest(keys credentials.Keys) string {
	if keys.IsZero() {
		return "driver"
	}
	return keys.Digest(p.salt)
}

// role gives the session of the identity's role, which all requests of that identity share.
func (p *Provisioner) role(be backend.Backend, who identity) *lease {
	key := roleKey{be.Revision(), p.digest(who.keys), who.role}
	p.roles.mu.Lock()
	defer p.roles.mu.Unlock()
	l := p.roles.all[key]
	if l == nil {
		if len(p.roles.all) >= knownRoles {
			clear(p.roles.all)
		}
		l = newLease("the controller's role "+who.role, p.now, func(ctx context.Context) (credentials.Keys, error) { return p.takeOn(ctx, be, who) })
		p.roles.all[key] = l
	}
	return l
}

// takeOn makes a session of the identity's role that may do all that the role may.
func (p *Provisioner) takeOn(ctx context.Context, be backend.Backend, who identity) (credentials.Keys, error) {
	order, err := p.plan(ctx, be, who, sessionOf{name: "controller"})
	var keys credentials.Keys
	if err == nil {
		keys, err = p.sessions.Make(ctx, order)
	}
	if err != nil {
		return credentials.Keys{}, fault.Errorf(fault.KindOf(err), "the controller takes on role %s for its work on %s: %w", who.role, be, err)
	}
	return keys, nil
}

// keysOf gives the keys that the identity works with for now; zero: the process's own chain.
func (p *Provisioner) keysOf(ctx context.Context, be backend.Backend, who identity) (credentials.Keys, error) {
	if who.role == "" {
		return who.keys, nil
	}
	return p.role(be, who).get(ctx)
}

// distrust drops the session with which a request was made, where its answer says that it is none (any more): the next request
// gets a new one.
func (p *Provisioner) distrust(be backend.Backend, who identity, used credentials.Keys, err error) {
	if who.role != "" && fault.Is(err, fault.Unauthenticated) {
		p.role(be, who).drop(used.AccessKeyID)
	}
}

// sessionOf is a session that the controller wants for itself.
type sessionOf struct {
	bucket string
	name   string                                           // what the service's audit log shows beside the driver's name
	policy func(aws bool, partition string) (string, error) // nil: it may do all that the identity may
}

// plan decides how the controller makes a session. A backend's rules and its least scope are about mounts.
func (p *Provisioner) plan(ctx context.Context, be backend.Backend, who identity, s sessionOf) (credentials.Order, error) {
	be.Scope = volume.ScopeAuto
	return p.sessions.Plan(ctx, session.Request{
		Backend: be, Source: be.ControllerCredentials, Keys: who.keys, RoleARN: who.role, Bucket: s.bucket, Policy: s.policy, Name: s.name, Allowed: true,
	})
}
