// Package proofs verifies, for volumes with scope: required, that a session can be limited to the volume: the session can list the volume's
// prefix, but not another one. Otherwise a service that accepts session policies without enforcing them would go unnoticed.
package proofs

import (
	"context"
	"slices"
	"strings"
	"time"

	"github.com/aws/aws-sdk-go-v2/aws"
	"github.com/aws/aws-sdk-go-v2/service/s3"
	"github.com/aws/aws-sdk-go-v2/service/s3/types"
	"k8s.io/klog/v2"

	"github.com/s3-csi/s3-csi-driver/pkg/backend"
	"github.com/s3-csi/s3-csi-driver/pkg/conc"
	"github.com/s3-csi/s3-csi-driver/pkg/credentials"
	"github.com/s3-csi/s3-csi-driver/pkg/fault"
	"github.com/s3-csi/s3-csi-driver/pkg/policy"
	"github.com/s3-csi/s3-csi-driver/pkg/provision/buckets"
	"github.com/s3-csi/s3-csi-driver/pkg/provision/identity"
	"github.com/s3-csi/s3-csi-driver/pkg/volume"
)

const (
	provenTTL    = time.Hour        // a service keeps this feature
	disprovenTTL = 10 * time.Second // short, so that a fix takes effect soon, but concurrent retries share a result
	cachedProofs = 1024
	proofBound   = 45 * time.Second // of one proof, regardless of its callers
	// neutralPrefix is the prefix of a proof in a bucket that has just been created for a volume.
	neutralPrefix = "s3-csi-scope-check/"
)

// Prover makes proofs and caches them. All methods may be called concurrently.
type Prover struct {
	identities *identity.Identities
	clients    *backend.Clients
	scopes     Scopes
	cache      *conc.Cache[proofKey, struct{}]
}

// Scopes proves that keys are limited to a prefix; *backend.Buckets does.
type Scopes interface {
	ProveScope(ctx context.Context, be backend.Backend, a backend.Access) error
}

// New returns a Prover. It starts nothing. now is the clock.
func New(identities *identity.Identities, clients *backend.Clients, scopes Scopes, now func() time.Time) *Prover {
	return &Prover{identities: identities, clients: clients, scopes: scopes, cache: conc.NewCache[proofKey](now, cachedProofs, proofBound, keep)}
}

func keep(_ struct{}, err error) time.Duration {
	switch {
	case err == nil:
		return provenTTL
	case fault.Is(err, fault.Timeout): // may be caused by the caller's deadline
		return 0
	}
	return disprovenTTL
}

// Subject is a volume to make a proof for.
type Subject struct {
	Who            identity.Identity
	Bucket, Prefix string // the volume's; a volume that is a bucket has no prefix
	Parameters     volume.Parameters
}

// proofKey is the cache key of a proof. backend is a revision, who a digest.
type proofKey struct {
	backend, who, role, bucket string
	lenient                    bool
}

func (p *Prover) key(be backend.Backend, s Subject, bucket string) proofKey {
	return proofKey{be.Revision(), p.identities.Digest(s.Who.Keys), proofRole(s), bucket, lenient(be, s.Parameters)}
}

// Required reports whether mounts of the volume must have a session that is limited to the volume.
func Required(be backend.Backend, params volume.Parameters) bool {
	scope, err := be.ScopeOf(params.Node.Scope)
	return err == nil && scope == volume.ScopeRequired
}

// Prefix makes the proof for a prefix volume, if it needs one. If it is cached, it sends no requests.
func (p *Prover) Prefix(ctx context.Context, b buckets.Bucket, s Subject) error {
	if !Required(b.Backend, s.Parameters) {
		return nil
	}
	if err := checkExpressible(b.Backend, s); err != nil {
		return err
	}
	key := p.key(b.Backend, s, b.Info.Name)
	_, err := p.cache.Get(ctx, key, func(ctx context.Context) (struct{}, error) {
		session, err := p.session(ctx, b.Backend, s)
		if err == nil && !session.keys.IsZero() {
			err = p.reachesNoFurther(ctx, b, session)
		}
		return struct{}{}, err
	})
	return err
}

// BucketProof is the part of a proof that needs the bucket.
type BucketProof func(context.Context, backend.BucketInfo) error

// Bucket makes the part of the proof for a bucket volume that is possible without the bucket, and returns the rest; nil: nothing is left to
// prove. A proof for one bucket that the driver created applies to all.
func (p *Prover) Bucket(ctx context.Context, be backend.Backend, s Subject) (BucketProof, error) {
	if !Required(be, s.Parameters) {
		return nil, nil
	}
	if err := checkExpressible(be, s); err != nil {
		return nil, err
	}
	key := p.key(be, s, "")
	if _, known, err := p.cache.Peek(key); known {
		return nil, err
	}
	s.Prefix = neutralPrefix
	session, err := p.session(ctx, be, s)
	if err != nil || session.keys.IsZero() {
		p.cache.Put(key, struct{}{}, err)
		return nil, err
	}
	return func(ctx context.Context, info backend.BucketInfo) error {
		err := p.reachesNoFurther(ctx, buckets.Bucket{Backend: be, Info: info}, session)
		if fault.Is(err, fault.NotFound) {
			err = fault.Errorf(fault.Busy, "%w; the bucket has just been created", err)
		}
		p.cache.Put(key, struct{}{}, err)
		return err
	}, nil
}

// checkExpressible refuses a volume to which no session can be limited, with any credentials: the backend's service does not support sessions,
// or no policy can express the volume's prefix.
func checkExpressible(be backend.Backend, s Subject) error {
	node := s.Parameters.Node
	source := node.Credentials
	if source == "" {
		source = credentials.SourceDriver // or a secret, which is the same here
	}
	kinds := []credentials.Kind{credentials.AssumeRole, credentials.WebIdentity, credentials.FederationToken}
	switch source {
	case credentials.SourceWorkload:
		kinds = []credentials.Kind{credentials.WebIdentity, credentials.PodIdentity}
	case credentials.SourceSecret:
		kinds = []credentials.Kind{credentials.AssumeRole, credentials.FederationToken}
	}
	if !slices.ContainsFunc(kinds, be.Makes) {
		return fault.Errorf(fault.Precondition, "scope: required is impossible with credentials: %s on %s: its service is not known to make sessions; "+
			"if it has a security token service, declare it for the backend (sts, sts.kinds), else use another scope", source, be)
	}
	longest := policy.Scope{ // that a client may need
		Partition: be.Partition(), Bucket: s.Bucket, Prefix: s.Prefix, ReadOnly: node.ReadOnly, Needs: policy.Needs{Delete: true}, KMS: be.AWS(), AWS: be.AWS(),
	}
	if _, err := longest.Session(); err != nil {
		where := "parameters.prefix"
		if s.Prefix == "" {
			where = "parameters.bucketNamePrefix"
		} else if strings.HasSuffix(s.Bucket, "--x-s3") {
			where = "parameters.bucketName"
		}
		return fault.Errorf(fault.Precondition, "%s: scope: required is impossible: %w", where, err)
	}
	return nil
}

// lenient reports whether nodes make the volume's sessions from credentials that the controller does not have. Nodes then verify the scope
// of each mount, and the controller verifies what it can.
func lenient(be backend.Backend, params volume.Parameters) bool {
	switch params.Node.Credentials {
	case credentials.SourceWorkload:
		return true
	case credentials.SourceSecret:
		return be.ControllerCredentials != credentials.SourceSecret
	}
	return false
}

// proofRole returns the role for a proof's session: the controller's, or else the volume's if controller and nodes have the same
// credentials.
func proofRole(s Subject) string {
	if role := volume.Role(s.Parameters.Node.RoleARN); s.Who.Role == "" && s.Parameters.Node.Credentials != credentials.SourceWorkload && !role.Templated() {
		return string(role)
	}
	return s.Who.Role
}

// proofSession is a session for one prefix, with the class of its order. Without keys there is no session.
type proofSession struct {
	keys          credentials.Keys
	class, prefix string
	lenient       bool
}

// leftToNodes is the log message for a proof that the controller cannot make, and that nodes make with each mount.
const leftToNodes = "Cannot verify scope, leaving it to nodes"

// session makes a session for the prefix, or none if the controller cannot make one and nodes verify the scope.
func (p *Prover) session(ctx context.Context, be backend.Backend, s Subject) (proofSession, error) {
	who := s.Who
	who.Role = proofRole(s)
	order, err := p.identities.Plan(ctx, be, who, identity.SessionRequest{
		Bucket: s.Bucket, Name: "scope-check", Policy: func(aws bool, partition string) (string, error) {
			return policy.Scope{Partition: partition, Bucket: s.Bucket, Prefix: s.Prefix, ReadOnly: true, AWS: aws}.Session()
		},
	})
	if err == nil && order.Kind == credentials.AsIs {
		err = fault.Errorf(fault.Precondition, "the controller's own credentials cannot be narrowed: set controllerRoleARN on %s to a role that they may assume, "+
			"or name a roleARN in the parameters, or declare in sts.kinds how the service makes sessions, or use scope: auto, which needs no proof", be)
	}
	var keys credentials.Keys
	if err == nil {
		keys, err = p.identities.Make(ctx, order)
	}
	switch {
	case err == nil:
		return proofSession{keys, order.Class(), s.Prefix, lenient(be, s.Parameters)}, nil
	case lenient(be, s.Parameters) && !fault.Is(err, fault.Timeout):
		klog.FromContext(ctx).Info(leftToNodes, "backend", be.Name, "bucket", s.Bucket, "credentials", s.Parameters.Node.Credentials, "reason", err)
		return proofSession{}, nil
	}
	return proofSession{}, fault.Errorf(fault.KindOf(err), "scope: required needs a proof that a session can be limited to a prefix of bucket %s: %w",
		s.Bucket, err)
}

// reachesNoFurther tests whether the session lists its prefix, and nothing else.
func (p *Prover) reachesNoFurther(ctx context.Context, b buckets.Bucket, s proofSession) error {
	client, err := p.clients.Bucket(ctx, b.Backend, s.keys, b.Info)
	if err != nil {
		return err
	}
	_, err = client.ListObjectsV2(ctx, &s3.ListObjectsV2Input{Bucket: b.Name(), Prefix: &s.prefix, MaxKeys: aws.Int32(1), EncodingType: types.EncodingTypeUrl})
	err = backend.Classify(err, "scope: required needs a proof that a session can be limited to a prefix: listing "+b.Info.Name+"/"+s.prefix+" of "+
		b.Backend.String()+" with a session for it")
	switch {
	case err == nil:
		return p.scopes.ProveScope(ctx, b.Backend, backend.Access{Keys: s.keys, Class: s.class, Bucket: b.Info, Prefix: s.prefix})
	case !fault.Is(err, fault.Denied):
		return err
	case s.lenient:
		klog.FromContext(ctx).Info(leftToNodes, "backend", b.Backend.Name, "bucket", b.Info.Name, "reason", err)
		return nil
	}
	return fault.Errorf(fault.Denied, "%w; allow s3:ListBucket to the controller's identity, or to the role that it assumes", err)
}
