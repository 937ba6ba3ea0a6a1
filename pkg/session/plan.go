// Package session makes a mount's credentials: it decides how (Planner), as an order that can be given to another process, and
// asks the token service for what the order says (Maker). Main is the internal mode that makes one session for a helper.
//
// What is decided follows from the backend's configuration and from the material alone: nothing is tried and nothing falls
// back on something else after a refusal.
package session

import (
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

// Pod is who uses a mount, as far as the request tells; "" is not known.
type Pod struct{ Namespace, ServiceAccount string }

// Request is all that a mount's sessions depend on.
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
	// Policy gives the session policy. It is called only where a session is made that it narrows.
	Policy func(aws bool, partition string) (string, error)
	// Name is the last part of the session's name, which tells mounts apart: letters, digits, and - . _ = , + @.
	Name string
	// Ephemeral is an inline volume of a pod: it never gets what the driver itself has.
	Ephemeral bool
	// Allowed says that the operator's rules have been asked already, as for the controller's own work and for what runs.
	Allowed bool
}

// Chain is what the driver's process itself has.
type Chain interface {
	// DriverKeys are its own credentials as they are now.
	DriverKeys(ctx context.Context) (credentials.Keys, error)
	// STSService is how a backend's token service is reached.
	STSService(ctx context.Context, b backend.Backend) (credentials.STSService, error)
}

// Planner decides how sessions are made. All methods may be called concurrently.
type Planner struct {
	chain    Chain
	env      func(string) string
	readFile func(string) ([]byte, error)
}

// NewPlanner makes one for this process: its environment and its files are the driver's own.
func NewPlanner(chain Chain) *Planner {
	return &Planner{chain: chain, env: os.Getenv, readFile: readToken}
}

// chained is how long a session of AWS can last that was made with the keys of another (IAM User Guide, "Role chaining").
const chained = time.Hour

// Plan decides how the request's sessions are made. It asks nobody but the driver's own credential chain.
//
// Denied: the operator's rules do not allow it. Precondition: there is no way as things are configured, and the text says what
// to change. Unauthenticated: there is nothing to make a session of.
func (p *Planner) Plan(ctx context.Context, r Request) (credentials.Order, error) {
	if r.Ephemeral && r.Source == credentials.SourceDriver {
		return credentials.Order{}, fault.Errorf(fault.Precondition, "inline volumes of pods never use the driver's own credentials: say credentials: workload, or give the volume a secret with nodePublishSecretRef")
	}
	scope, err := r.Backend.ScopeOf(r.Scope)
	if err != nil {
		return credentials.Order{}, err
	}
	role, err := Role(r)
	if err != nil {
		return credentials.Order{}, err
	}
	if !r.Allowed {
		if err := r.Backend.Allows(backend.Use{Namespace: r.Pod.Namespace, Bucket: r.Bucket, RoleARN: role, Source: r.Source}); err != nil {
			return credentials.Order{}, err
		}
	}
	l := &plan{Request: r, planner: p, scope: scope, role: role}
	if scope == volume.ScopeAuto && r.Policy != nil && cannotScope(r.Backend, r.Bucket) {
		if _, err := r.Policy(true, r.Backend.Partition()); err != nil {
			l.scope = volume.ScopeOff
		}
	}
	var o credentials.Order
	switch r.Source {
	case credentials.SourceWorkload:
		o, err = l.workload()
	case credentials.SourceSecret:
		o, err = l.narrow(r.Keys)
	case credentials.SourceDriver:
		o, err = l.driver(ctx)
	default:
		err = fault.Errorf(fault.Invalid, "there are no credentials of source %q", r.Source)
	}
	if err != nil {
		return credentials.Order{}, err
	}
	if o.Kind == credentials.AsIs {
		return o, nil
	}
	if o, err = l.complete(ctx, o); err != nil {
		return credentials.Order{}, err
	}
	return o, nil
}

// cannotScope tells of buckets of which policies on AWS cannot name every part: that a mount of one cannot be kept to its prefix is
// known from its name.
func cannotScope(b backend.Backend, bucket string) bool {
	kind, err := volume.ValidateBucketName(bucket)
	return err == nil && b.AWS() && (kind == volume.BucketDirectory || kind == volume.BucketAccessPoint)
}

// Role is the role that the request's sessions take on: the volume's, or the secret's, or for workload volumes the backend's,
// with the pod's namespace and service account in it. "": none is named.
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

// plan is one run of Plan.
type plan struct {
	Request
	planner *Planner
	scope   string
	role    string
}

// driver plans with what the driver's process has.
func (l *plan) driver(ctx context.Context) (credentials.Order, error) {
	// A role session of the driver that was made of a web identity token is made again of it, with the policy: no role has to
	// trust itself for that. The token's file is nobody's but the driver's, so that its content goes along.
	if own, tokenFile := l.planner.webIdentity(); tokenFile != "" && l.scope != volume.ScopeOff && (l.role == "" || l.role == own) && l.Backend.Makes(credentials.WebIdentity) {
		raw, err := l.planner.readFile(tokenFile)
		if err != nil {
			return credentials.Order{}, fault.Errorf(fault.Unauthenticated, "reading the driver's own web identity token (AWS_WEB_IDENTITY_TOKEN_FILE): %w", err)
		}
		token := strings.TrimSpace(string(raw))
		if audience := l.Backend.Audience(); audience != "" && slices.Contains(audiences(token), audience) {
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

// webIdentity is the role and the token file of the driver's process, if that is where the SDK takes its credentials from: keys
// in the environment come before it.
func (p *Planner) webIdentity() (role, file string) {
	id, secret := p.env("AWS_ACCESS_KEY_ID"), p.env("AWS_SECRET_ACCESS_KEY")
	if id == "" {
		id = p.env("AWS_ACCESS_KEY")
	}
	if secret == "" {
		secret = p.env("AWS_SECRET_KEY")
	}
	role, file = p.env("AWS_ROLE_ARN"), p.env("AWS_WEB_IDENTITY_TOKEN_FILE")
	if id != "" && secret != "" || role == "" || file == "" {
		return "", ""
	}
	return role, file
}

// narrow plans for keys. A role that is named is taken on whatever the scope is; the scope decides about the policy.
func (l *plan) narrow(keys credentials.Keys) (credentials.Order, error) {
	b := l.Backend
	static := keys.SessionToken == ""
	o := credentials.Order{Keys: keys}
	switch {
	case keys.IsZero():
		return o, fault.Errorf(fault.Unauthenticated, "there are no keys to use %s with", b)
	case l.role != "" && b.Makes(credentials.AssumeRole):
		o.Kind = credentials.AssumeRole
	case l.role != "":
		return o, fault.Errorf(fault.Precondition, "role %s is named, and %s makes no sessions of kind %s: %s, or take roleARN out of the volume and the secret", l.role, b, credentials.AssumeRole, declare(b, credentials.AssumeRole))
	case l.scope == volume.ScopeOff:
		o.Kind = credentials.AsIs
	case static && b.Makes(credentials.FederationToken):
		o.Kind = credentials.FederationToken
	case static && b.RoleOptional() && b.Makes(credentials.AssumeRole):
		o.Kind = credentials.AssumeRole
	case l.scope == volume.ScopeRequired:
		return o, l.noWay(static)
	default:
		o.Kind = credentials.AsIs
	}
	return o, nil
}

// noWay says what has to be configured for scope: required.
func (l *plan) noWay(static bool) error {
	b := l.Backend
	why := "scope: required asks for a session of the mount's own, and there is no way to make one: "
	switch {
	case !b.AWS() && b.STS == nil:
		why += "the backend declares no token service: set sts for it in the driver's config file (sts: {roleOptional: true} for MinIO), if the service has one that enforces session policies"
	case static && !b.Makes(credentials.AssumeRole):
		why += "the backend's sts.kinds name neither assumeRole nor federationToken"
	case static:
		why += "name a role with roleARN in the volume or the secret, or add federationToken to the backend's sts.kinds (roleOptional: true where AssumeRole needs no role, as on MinIO)"
	case b.AWS():
		why += "these keys are a session's already and can only be narrowed by taking on a role: name one with roleARN in the volume or the secret that trusts their role"
	default:
		why += "these keys are a session's already and no role is named with roleARN that they could take on: give the volume keys of a user"
	}
	return fault.Errorf(fault.Precondition, "%s: %s", b, why)
}

// declare says how a backend gets a kind of session.
func declare(b backend.Backend, kind credentials.Kind) string {
	if b.STS == nil && !b.AWS() {
		return "declare the backend's token service with sts in the driver's config file"
	}
	return "add " + string(kind) + " to the backend's sts.kinds in the driver's config file"
}

// workload plans with the pod's own tokens. They are always exchanged: there are no keys to use as they are.
func (l *plan) workload() (credentials.Order, error) {
	b := l.Backend
	tokens := l.Tokens.Only(b.Audiences()...)
	sts, hasSTS := tokens[b.Audience()]
	agent, hasAgent := tokens[credentials.PodIdentityAudience]
	toSTS := hasSTS && b.Makes(credentials.WebIdentity) && (l.role != "" || b.RoleOptional())
	switch {
	case toSTS:
		return credentials.Order{Kind: credentials.WebIdentity, Token: sts.Value}, nil
	case hasAgent && l.role == "" && l.scope != volume.ScopeOff:
		return credentials.Order{}, fault.Errorf(fault.Precondition, "%s: what EKS Pod Identity gives can only be narrowed to the volume by taking on a role: name one with roleARN in the volume or workloadRoleARN on the backend "+
			"that trusts the association's role (%s), or say scope: off", b, unreadAnnotation)
	case hasAgent && l.role != "" && !b.Makes(credentials.AssumeRole):
		return credentials.Order{}, fault.Errorf(fault.Precondition, "role %s is named for EKS Pod Identity's session to take on, and %s makes no sessions of kind %s: %s", l.role, b, credentials.AssumeRole, declare(b, credentials.AssumeRole))
	case hasAgent:
		return credentials.Order{Kind: credentials.PodIdentity, Token: agent.Value, AgentURI: b.AgentURI()}, nil
	case !b.Makes(credentials.WebIdentity):
		return credentials.Order{}, fault.Errorf(fault.Precondition, "the volume has credentials: workload, and %s exchanges no tokens: %s", b, declare(b, credentials.WebIdentity))
	case b.Audience() == "":
		return credentials.Order{}, fault.Errorf(fault.Precondition, "the volume has credentials: workload, and %s has no audience, so that no token may be sent to it: set sts.audience in the driver's config file, and the same in tokenRequests of the CSIDriver object", b)
	case !hasSTS:
		return credentials.Order{}, fault.Errorf(fault.Precondition, "the volume has credentials: workload, and the request brings no token of audience %s for %s (it brings %s): add the audience to tokenRequests of the CSIDriver object", b.Audience(), b, l.Tokens)
	}
	return credentials.Order{}, fault.Errorf(fault.Precondition, "the volume has credentials: workload, and no role is named that %s could give the pod: set roleARN in the volume (in a PersistentVolume that exists, mountOptions: [role-arn=<ARN>]), or workloadRoleARN on the backend in the driver's config file (%s)", b, unreadAnnotation)
}

// unreadAnnotation is for those who come from drivers that read it.
const unreadAnnotation = "the annotation eks.amazonaws.com/role-arn of the pod's service account cannot be read: this driver does not talk to the Kubernetes API"

// complete adds to an order what all kinds need.
func (l *plan) complete(ctx context.Context, o credentials.Order) (credentials.Order, error) {
	b := l.Backend
	o.RoleARN, o.Backend = l.role, b.String()
	o.Name = sessionName(l.Request, o.Kind)
	if l.scope != volume.ScopeOff && l.Policy != nil {
		partition := b.Partition()
		if r, err := credentials.ParseRole(l.role); err == nil && b.AWS() {
			partition = r.Partition
		}
		policy, err := l.Policy(b.AWS(), partition)
		if err != nil {
			return o, err
		}
		o.Policy = policy
	}
	if err := l.checkDuration(o); err != nil {
		return o, err
	}
	if o.Duration = l.Duration; o.Duration == 0 && o.Kind == credentials.FederationToken {
		o.Duration = time.Hour // the service's default is half a day
	}
	if o.Kind == credentials.PodIdentity && o.RoleARN == "" {
		return o, nil // only the agent is asked
	}
	var err error
	o.STS, err = l.planner.chain.STSService(ctx, b)
	return o, err
}

// checkDuration refuses what AWS would refuse, in better words (STS API Reference: AssumeRole, AssumeRoleWithWebIdentity,
// GetFederationToken). Other services have bounds of their own and say so.
func (l *plan) checkDuration(o credentials.Order) error {
	d := l.Duration
	if d == 0 || !l.Backend.AWS() {
		return nil
	}
	longest, why := 12*time.Hour, "and at most the role's own maximum"
	switch {
	case o.Kind == credentials.FederationToken:
		longest, why = volume.MaxSessionDuration, "for keys of a user"
	case o.Keys.SessionToken != "" || o.Kind == credentials.PodIdentity:
		longest, why = chained, "because it is made with the keys of another session (role chaining)"
	}
	if d < 15*time.Minute || d > longest {
		return fault.Errorf(fault.Precondition, "sessionDuration %s: AWS makes this session for 15m to %s, %s: change sessionDuration of the volume", d, short(longest), why)
	}
	return nil
}

// short is a duration without the zeros at its end.
func short(d time.Duration) string {
	return strings.TrimSuffix(strings.TrimSuffix(d.String(), "0s"), "0m")
}
