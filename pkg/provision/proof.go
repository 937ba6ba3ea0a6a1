package provision

import (
	"context"
	"sync"
	"time"

	"github.com/aws/aws-sdk-go-v2/aws"
	"github.com/aws/aws-sdk-go-v2/service/s3"
	"k8s.io/klog/v2"

	"github.com/s3-csi/s3-csi-driver/pkg/backend"
	"github.com/s3-csi/s3-csi-driver/pkg/credentials"
	"github.com/s3-csi/s3-csi-driver/pkg/fault"
	"github.com/s3-csi/s3-csi-driver/pkg/policy"
	"github.com/s3-csi/s3-csi-driver/pkg/volume"
)

// A volume with scope: required is made where a session for one prefix lists that prefix and not its neighbour. A service that
// takes a session policy and does not keep to it would otherwise be found by whoever looks for it.

const (
	provenTTL    = time.Hour        // a service does not unlearn it
	disprovenTTL = 10 * time.Second // so that an operator's fix is seen while a crowd of retries is not passed on
	knownProofs  = 1024
	// neutralPrefix is what a proof looks at in a bucket that has just been made for a volume.
	neutralPrefix = "s3-csi-scope-check/"
)

// leftToNodes begins the log line of a proof that the controller cannot make and need not.
const leftToNodes = "Whether sessions can be limited to a prefix is left to the nodes to prove, with each mount: "

// proofSession is a session for one prefix. Without keys it is none.
type proofSession struct {
	keys  credentials.Keys
	class string // of its order
}

// proofKey says what a proof is about. backend is a revision, who a digest.
type proofKey struct {
	backend, who, role, bucket string
	lenient                    bool
}

// proofs remembers how proofs ended.
type proofs struct {
	now func() time.Time
	mu  sync.Mutex
	all map[proofKey]proof
}

type proof struct {
	err   error
	until time.Time
}

func newProofs(now func() time.Time) *proofs { return &proofs{now: now, all: map[proofKey]proof{}} }

func (ps *proofs) get(key proofKey) (err error, known bool) {
	ps.mu.Lock()
	defer ps.mu.Unlock()
	was, ok := ps.all[key]
	return was.err, ok && ps.now().Before(was.until)
}

func (ps *proofs) put(key proofKey, err error) {
	ttl := provenTTL
	switch {
	case fault.Is(err, fault.Timeout): // says more about the asker than about the service
		return
	case err != nil:
		ttl = disprovenTTL
	}
	ps.mu.Lock()
	defer ps.mu.Unlock()
	if len(ps.all) >= knownProofs {
		clear(ps.all)
	}
	ps.all[key] = proof{err, ps.now().Add(ttl)}
}

// proveScope is the proof for a prefix volume. Warm, it sends nothing.
func (p *Provisioner) proveScope(ctx context.Context, pl place, who identity, r CreateRequest) error {
	if !scopeRequired(pl.be, r.Parameters) {
		return nil
	}
	prefix := r.Parameters.VolumePrefix(r.Name, 1)
	if err := expressible(pl.be, pl.info.Name, prefix, r.Parameters.Node); err != nil {
		return err
	}
	key := p.proofKey(pl.be, who, pl.info.Name, r.Parameters)
	return p.once(ctx, key, func() error {
		s, err := p.proofSession(ctx, pl.be, who, pl.info.Name, prefix, r.Parameters)
		if err != nil || s.keys.IsZero() {
			return err
		}
		return p.reachesNoFurther(ctx, pl, s, prefix, key.lenient)
	})
}

// bucketProof is the part of a proof that needs the bucket.
type bucketProof func(context.Context, backend.BucketInfo) error

// prepareProof is the proof for a bucket volume as far as it goes without the bucket; nil: nothing is left to be proven. What holds
// for one bucket that the driver made holds for all.
func (p *Provisioner) prepareProof(ctx context.Context, be backend.Backend, who identity, bucket string, params volume.Parameters) (bucketProof, error) {
	if err := expressible(be, bucket, "", params.Node); err != nil {
		return nil, err
	}
	key := p.proofKey(be, who, "", params)
	if err, known := p.proofs.get(key); known {
		return nil, err
	}
	s, err := p.proofSession(ctx, be, who, bucket, neutralPrefix, params)
	if err != nil || s.keys.IsZero() {
		p.proofs.put(key, err)
		return nil, err
	}
	return func(ctx context.Context, info backend.BucketInfo) error {
		err := p.reachesNoFurther(ctx, place{be: be, info: info}, s, neutralPrefix, key.lenient)
		if fault.Is(err, fault.NotFound) {
			err = fault.Errorf(fault.Busy, "%w; the bucket has just been made", err)
		}
		p.proofs.put(key, err)
		return err
	}, nil
}

// once does a proof that is not remembered, one at a time.
func (p *Provisioner) once(ctx context.Context, key proofKey, prove func() error) error {
	if err, known := p.proofs.get(key); known {
		return err
	}
	release, err := p.locks.Lock(ctx, "scope "+key.backend+" "+key.bucket)
	if err != nil {
		return fault.Errorf(fault.Timeout, "waiting for the proof that sessions can be limited to a prefix: %w", err)
	}
	defer release()
	err, known := p.proofs.get(key)
	if !known {
		err = prove()
		p.proofs.put(key, err)
	}
	return err
}

func (p *Provisioner) proofKey(be backend.Backend, who identity, bucket string, params volume.Parameters) proofKey {
	return proofKey{be.Revision(), p.digest(who.keys), proofRole(who, params), bucket, lenient(be, params)}
}

// lenient tells whether nodes make the sessions of the volume with something that the controller does not have. They prove them
// with each mount, so that the controller proves what it can.
func lenient(be backend.Backend, params volume.Parameters) bool {
	switch params.Node.Credentials {
	case credentials.SourceWorkload:
		return true
	case credentials.SourceSecret:
		return be.ControllerCredentials != credentials.SourceSecret
	}
	return false
}

// proofRole is the role that a proof's session takes on: the controller's, or else the volume's, where the controller works with
// what nodes work with.
func proofRole(who identity, params volume.Parameters) string {
	if role := volume.Role(params.Node.RoleARN); who.role == "" && params.Node.Credentials != credentials.SourceWorkload && !role.Templated() {
		return string(role)
	}
	return who.role
}

// proofSession makes a session for the prefix, or none where the controller cannot make one, and need not.
func (p *Provisioner) proofSession(ctx context.Context, be backend.Backend, who identity, bucket, prefix string, params volume.Parameters) (proofSession, error) {
	who.role = proofRole(who, params)
	order, err := p.plan(ctx, be, who, sessionOf{bucket: bucket, name: "scope-check", policy: func(aws bool, partition string) (string, error) {
		return policy.Scope{Partition: partition, Bucket: bucket, Prefix: prefix, ReadOnly: true, AWS: aws}.Session()
	}})
	if err == nil && order.Kind == credentials.AsIs {
		err = fault.Errorf(fault.Precondition, "the controller's own credentials cannot be narrowed: set controllerRoleARN on %s to a role that they may take on, "+
			"or name a roleARN in the StorageClass, or declare in sts.kinds how the service makes sessions; or do without the proof and the promise, with scope: auto", be)
	}
	var keys credentials.Keys
	if err == nil {
		keys, err = p.sessions.Make(ctx, order)
	}
	switch {
	case err == nil:
		return proofSession{keys, order.Class()}, nil
	case lenient(be, params) && !fault.Is(err, fault.Timeout):
		klog.FromContext(ctx).Info(leftToNodes+"the controller cannot make one",
			"backend", be.Name, "bucket", bucket, "credentials", params.Node.Credentials, "reason", err)
		return proofSession{}, nil
	}
	return proofSession{}, fault.Errorf(fault.KindOf(err), "scope: required needs a proof that a session can be limited to a prefix of bucket %s: %w", bucket, err)
}

// reachesNoFurther tries whether the session for prefix lists it, and nothing beside it.
func (p *Provisioner) reachesNoFurther(ctx context.Context, pl place, s proofSession, prefix string, lenient bool) error {
	client, err := p.clients.Bucket(ctx, pl.be, s.keys, pl.info)
	if err != nil {
		return err
	}
	_, err = client.ListObjectsV2(ctx, &s3.ListObjectsV2Input{Bucket: pl.bucket(), Prefix: &prefix, MaxKeys: aws.Int32(1)})
	err = backend.Classify(err, "scope: required needs a proof that a session can be limited to a prefix: listing "+pl.info.Name+"/"+prefix+" of "+pl.be.String()+" with a session for it")
	switch {
	case err == nil:
		return p.buckets.ProveScope(ctx, pl.be, s.keys, s.class, pl.info.Name, prefix, pl.info.Region, pl.info.Owner)
	case !fault.Is(err, fault.Denied):
		return err
	case lenient:
		klog.FromContext(ctx).Info(leftToNodes+"the controller's may not list", "backend", pl.be.Name, "bucket", pl.info.Name, "reason", err)
		return nil
	}
	return fault.Errorf(fault.Denied, "%w; allow s3:ListBucket to the controller's identity, or to the role that it takes on", err)
}
