// Package session makes a mount's credentials. The Planner decides how, in the form of an order that another process can use;
// the Maker gets a session for the order from the token service. Main is the internal mode that makes one session for a helper.
//
// The backend's configuration and the type of the credentials alone decide: the Planner tries nothing, and a refused order is
// not replaced by another kind.
package session

import (
	"cmp"
	"context"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/s3-csi/s3-csi-driver/pkg/backend"
	"github.com/s3-csi/s3-csi-driver/pkg/credentials"
	"github.com/s3-csi/s3-csi-driver/pkg/fault"
	"github.com/s3-csi/s3-csi-driver/pkg/volume"
)

// Pod is the user of a mount, as far as the request names it; "" is unknown.
type Pod struct{ Namespace, ServiceAccount string }

// Request is everything that a mount's sessions depend on.
type Request struct {
	Backend backend.Backend
	Source  string           // credentials.Source…
	Keys    credentials.Keys // of SourceSecret
	// SecretRoleARN is the role that the secret names.
	SecretRoleARN string
	Tokens        credentials.Tokens // of SourceWorkload
	Pod           Pod
	// RoleARN is the volume's, a volume.Role; for the controller's own work the backend's ControllerRoleARN.
	RoleARN  string
	Scope    string        // of the volume, one of volume.Scope…; "": as the backend says
	Duration time.Duration // of a session; 0: the service's default
	Bucket   string
	// Policy returns the session policy. It is called only if the session is narrowed.
	Policy func(aws bool, partition string) (string, error)
	// Name is the last part of the session's name and unique for the mount: letters, digits, and - . _ = , + @.
	Name string
	// Ephemeral marks an inline volume of a pod, which never uses the driver's own credentials.
	Ephemeral bool
	// Allowed skips the operator's rules, for the controller's own work and for running mounts.
	Allowed bool
}

// Chain is the driver's own credential chain.
type Chain interface {
	// DriverKeys returns the driver's current credentials.
	DriverKeys(ctx context.Context) (credentials.Keys, error)
	// STSService returns how a backend's token service is reached.
	STSService(ctx context.Context, b backend.Backend) (credentials.STSService, error)
}

// Planner decides how sessions are made. It is safe for concurrent use.
type Planner struct {
	chain     Chain
	env       func(string) string
	readToken func(string) (string, error)
}

// NewPlanner returns a planner that reads this process's environment and files.
func NewPlanner(chain Chain) *Planner {
	return &Planner{chain: chain, env: os.Getenv, readToken: ReadToken}
}

// chained is the maximum validity of a session of AWS that was made with the keys of another session (IAM User Guide, "Role chaining").
const chained = time.Hour

// Plan decides how the request's sessions are made. It sends no requests but those of the driver's own credential chain.
//
// Denied: the operator's rules do not allow it. Precondition: the configuration does not allow it, and the text says what to
// change. Unauthenticated: there are no credentials to make a session from.
func (p *Planner) Plan(ctx context.Context, r Request) (credentials.Order, error) {
	o, err := p.plan(ctx, r)
	if err != nil {
		return credentials.Order{}, fault.SeeElse(credentials.Page, err)
	}
	return o, nil
}

func (p *Planner) plan(ctx context.Context, r Request) (o credentials.Order, err error) {
	if r.Ephemeral && r.Source == credentials.SourceDriver {
		return o, fault.Errorf(fault.Precondition, "inline volumes cannot use the driver's own credentials; set credentials: workload, or give "+
			"the volume a secret with nodePublishSecretRef")
	}
	l := &plan{request: r, planner: p}
	if l.scope, err = r.Backend.ScopeOf(r.Scope); err != nil {
		return o, err
	}
	if l.role, err = Role(r); err != nil {
		return o, err
	}
	if !r.Allowed {
		if err := r.Backend.Allows(backend.Use{Namespace: r.Pod.Namespace, Bucket: r.Bucket, RoleARN: l.role, Source: r.Source}); err != nil {
			return o, err
		}
	}
	if l.scope == volume.ScopeAuto && r.Policy != nil && cannotScope(r.Backend, r.Bucket) {
		if _, err := r.Policy(true, r.Backend.Partition()); err != nil {
			l.scope = volume.ScopeOff
		}
	}
	switch r.Source {
	case credentials.SourceWorkload:
		o, err = l.workload()
	case credentials.SourceSecret:
		o, err = l.narrow(r.Keys)
	case credentials.SourceDriver:
		o, err = l.driver(ctx)
	default:
		err = fault.Errorf(fault.Invalid, "unknown credential source %q", r.Source)
	}
	if err != nil || o.Kind == credentials.AsIs {
		return o, err
	}
	return l.complete(ctx, o)
}

// cannotScope reports whether policies on AWS cannot name prefixes of the bucket, which its name shows.
func cannotScope(b backend.Backend, bucket string) bool {
	kind, err := volume.ValidateBucketName(bucket)
	return err == nil && b.AWS() && (kind == volume.BucketDirectory || kind == volume.BucketAccessPoint)
}

// Role returns the role of the request's sessions: the volume's, the secret's, or for workload volumes the backend's, with the
// pod's namespace and service account filled in. "": there is none.
func Role(r Request) (string, error) {
	named, where := r.RoleARN, "roleARN of the volume"
	switch {
	case named != "":
	case r.Source == credentials.SourceSecret:
		named, where = r.SecretRoleARN, "roleARN of the secret"
	case r.Source == credentials.SourceWorkload:
		named, where = r.Backend.WorkloadRoleARN, "workloadRoleARN of "+r.Backend.String()
	}
	if named == "" {
		return "", nil
	}
	if err := backend.CheckTemplates(named); err != nil {
		return "", fault.Errorf(fault.Precondition, "%s: %q %w", where, named, err)
	}
	role, err := volume.Role(named).Expand(r.Pod.Namespace, r.Pod.ServiceAccount)
	if err != nil {
		return "", fault.Errorf(fault.KindOf(err), "%s: %w", where, err)
	}
	if err := r.Backend.CheckRole(role); err != nil {
		return "", fault.Errorf(fault.Precondition, "%s: %q %w", where, role, err)
	}
	return role, nil
}

// plan is the state of one call of Plan.
type plan struct {
	request Request
	planner *Planner
	scope   string
	role    string
}

// driver plans with the driver's own credentials.
func (l *plan) driver(ctx context.Context) (credentials.Order, error) {
	// If the driver's own credentials come from a web identity token, use that token with the policy: assuming the role with
	// its own session would need a role that trusts itself. The order has the token, because only the driver can read its file.
	if own, tokenFile := l.planner.webIdentity(); tokenFile != "" && l.scope != volume.ScopeOff && (l.role == "" || l.role == own) &&
		l.request.Backend.Makes(credentials.WebIdentity) {
		token, err := l.planner.readToken(tokenFile)
		if err != nil {
			return credentials.Order{}, fault.Errorf(fault.Unauthenticated, "read the driver's own web identity token (AWS_WEB_IDENTITY_TOKEN_FILE): %w", err)
		}
		if audience := l.request.Backend.Audience(); audience != "" && slices.Contains(audiences(token), audience) {
			l.role = own
			return credentials.Order{Kind: credentials.WebIdentity, Token: token}, nil
		}
	}
	keys, err := l.planner.chain.DriverKeys(ctx)
	if err != nil {
		return credentials.Order{}, err
	}
	return l.narrow(keys)
}

// webIdentity returns the role and the token file of the driver's process, if the SDK uses them: keys in the environment take
// precedence.
func (p *Planner) webIdentity() (role, file string) {
	id := cmp.Or(p.env("AWS_ACCESS_KEY_ID"), p.env("AWS_ACCESS_KEY"))
	secret := cmp.Or(p.env("AWS_SECRET_ACCESS_KEY"), p.env("AWS_SECRET_KEY"))
	role, file = p.env("AWS_ROLE_ARN"), p.env("AWS_WEB_IDENTITY_TOKEN_FILE")
	if id != "" && secret != "" || role == "" || file == "" {
		return "", ""
	}
	return role, file
}

// narrow plans for keys. A named role is assumed with every scope; the scope decides about the policy.
func (l *plan) narrow(keys credentials.Keys) (credentials.Order, error) {
	b := l.request.Backend
	static := keys.SessionToken == ""
	o := credentials.Order{Keys: keys}
	switch {
	case keys.IsZero():
		return o, fault.Errorf(fault.Unauthenticated, "no keys for %s", b)
	case l.role != "" && b.Makes(credentials.AssumeRole):
		o.Kind = credentials.AssumeRole
	case l.role != "":
		return o, fault.Errorf(fault.Precondition, "role %s cannot be assumed, because %s does not support sessions of kind %s; %s, or remove roleARN from the "+
			"volume and the secret", l.role, b, credentials.AssumeRole, declare(b, credentials.AssumeRole))
	case l.scope == volume.ScopeOff:
		o.Kind = credentials.AsIs
	case static && b.Makes(credentials.FederationToken):
		o.Kind = credentials.FederationToken
	case static && b.RoleOptional() && b.Makes(credentials.AssumeRole):
		o.Kind = credentials.AssumeRole
	case l.scope == volume.ScopeRequired:
		return o, l.noSessionError(static)
	default:
		o.Kind = credentials.AsIs
	}
	return o, nil
}

// noSessionError returns what must be configured for scope: required.
func (l *plan) noSessionError(static bool) error {
	b := l.request.Backend
	why := "scope: required needs a session, and none can be made: "
	switch {
	case !b.AWS() && b.STS == nil:
		why += "the backend declares no token service; if the service has one that enforces session policies, set sts in the driver's config file (sts: " +
			"{roleOptional: true} for MinIO)"
	case static && !b.Makes(credentials.AssumeRole):
		why += "the backend's sts.kinds has neither assumeRole nor federationToken"
	case static:
		why += "set roleARN in the volume or the secret, or add federationToken to the backend's sts.kinds (roleOptional: true if AssumeRole needs no role, as on " +
			"MinIO)"
	case b.AWS():
		why += "session keys can only be narrowed by assuming a role; set roleARN in the volume or the secret to a role that trusts theirs"
	default:
		why += "session keys can only be narrowed by assuming a role, and there is no roleARN; give the volume keys of a user"
	}
	return fault.Errorf(fault.Precondition, "%s: %s", b, why)
}

// declare returns how to enable a kind of session for a backend.
func declare(b backend.Backend, kind credentials.Kind) string {
	if b.STS == nil && !b.AWS() {
		return "declare the backend's token service with sts in the driver's config file"
	}
	return "add " + string(kind) + " to the backend's sts.kinds in the driver's config file"
}

// workload plans with the pod's tokens.
func (l *plan) workload() (credentials.Order, error) {
	b := l.request.Backend
	tokens := l.request.Tokens.Only(b.Audiences()...)
	sts, hasSTS := tokens[b.Audience()]
	agent, hasAgent := tokens[credentials.PodIdentityAudience]
	toSTS := hasSTS && b.Makes(credentials.WebIdentity) && (l.role != "" || b.RoleOptional())
	switch {
	case toSTS:
		return credentials.Order{Kind: credentials.WebIdentity, Token: sts.Value}, nil
	case hasAgent && l.role == "" && l.scope != volume.ScopeOff:
		return credentials.Order{}, fault.Errorf(fault.Precondition, "%s: a session of EKS Pod Identity can only be narrowed by assuming a role; set roleARN in the "+
			"volume or workloadRoleARN on the backend to a role "+
			"that trusts the association's role (%s), or set scope: off", b, unreadAnnotation)
	case hasAgent && l.role != "" && !b.Makes(credentials.AssumeRole):
		return credentials.Order{}, fault.Errorf(fault.Precondition, "role %s cannot be assumed with the session of EKS Pod Identity, because %s does not support "+
			"sessions of kind %s; %s", l.role, b, credentials.AssumeRole, declare(b, credentials.AssumeRole))
	case hasAgent:
		return credentials.Order{Kind: credentials.PodIdentity, Token: agent.Value, AgentURI: b.AgentURI()}, nil
	case !b.Makes(credentials.WebIdentity):
		return credentials.Order{}, fault.Errorf(fault.Precondition, "the volume has credentials: workload, but %s does not support the exchange of tokens; %s", b,
			declare(b, credentials.WebIdentity))
	case b.Audience() == "":
		return credentials.Order{}, fault.Errorf(fault.Precondition, "the volume has credentials: workload, but %s has no audience; set sts.audience in the "+
			"driver's config file and the same audience in tokenRequests of the CSIDriver object", b)
	case !hasSTS:
		return credentials.Order{}, fault.Errorf(fault.Precondition, "the volume has credentials: workload, but the request has no token of audience %s for %s (it "+
			"has %s); add the audience to tokenRequests of the CSIDriver object", b.Audience(), b, l.request.Tokens)
	}
	return credentials.Order{}, fault.Errorf(fault.Precondition, "the volume has credentials: workload, but there is no role for %s; set roleARN in the volume "+
		"(in an existing PersistentVolume, mountOptions: [role-arn=<ARN>]) or workloadRoleARN on the backend in the driver's config file (%s)", b, unreadAnnotation)
}

// unreadAnnotation is for users of drivers that read the annotation.
const unreadAnnotation = "the driver does not use the Kubernetes API, so it cannot read the annotation eks.amazonaws.com/role-arn of the service account"

// complete sets the fields of an order that all kinds need.
func (l *plan) complete(ctx context.Context, o credentials.Order) (credentials.Order, error) {
	b := l.request.Backend
	o.RoleARN, o.Backend = l.role, b.String()
	o.Name = sessionName(l.request, o.Kind)
	if l.scope != volume.ScopeOff && l.request.Policy != nil {
		partition := b.Partition()
		if r, err := credentials.ParseRole(l.role); err == nil && b.AWS() {
			partition = r.Partition
		}
		policy, err := l.request.Policy(b.AWS(), partition)
		if err != nil {
			return o, err
		}
		o.Policy = policy
	}
	if err := l.checkDuration(o); err != nil {
		return o, err
	}
	if o.Duration = l.request.Duration; o.Duration == 0 && o.Kind == credentials.FederationToken {
		o.Duration = time.Hour // the service's default is half a day
	}
	if o.Kind == credentials.PodIdentity && o.RoleARN == "" {
		return o, nil // no token service is used
	}
	var err error
	o.STS, err = l.planner.chain.STSService(ctx, b)
	return o, err
}

// checkDuration refuses durations that AWS would refuse (STS API Reference: AssumeRole, AssumeRoleWithWebIdentity,
// GetFederationToken). Other services have limits of their own.
func (l *plan) checkDuration(o credentials.Order) error {
	d := l.request.Duration
	if d == 0 || !l.request.Backend.AWS() {
		return nil
	}
	longest, why := 12*time.Hour, "and at most the role's own maximum"
	switch {
	case o.Kind == credentials.FederationToken:
		longest, why = volume.MaxSessionDuration, "for keys of a user"
	case o.Keys.SessionToken != "" || o.Kind == credentials.PodIdentity:
		longest, why = chained, "because of role chaining"
	}
	if d < 15*time.Minute || d > longest {
		return fault.Errorf(fault.Precondition, "sessionDuration %s is not within AWS's limits for this session, 15m to %s %s; change sessionDuration of the volume",
			d, short(longest), why)
	}
	return nil
}

// short formats a duration without trailing zeros.
func short(d time.Duration) string {
	return strings.TrimSuffix(strings.TrimSuffix(d.String(), "0s"), "0m")
}
