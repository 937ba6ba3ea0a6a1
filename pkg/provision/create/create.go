// Package create creates volumes: a prefix of a bucket with its record, or a bucket with its tags. A call that finds the volume it
// would create returns it.
package create

import (
	"context"

	"github.com/s3-csi/s3-csi-driver/pkg/backend"
	"github.com/s3-csi/s3-csi-driver/pkg/credentials"
	"github.com/s3-csi/s3-csi-driver/pkg/fault"
	"github.com/s3-csi/s3-csi-driver/pkg/provision/buckets"
	"github.com/s3-csi/s3-csi-driver/pkg/provision/identity"
	"github.com/s3-csi/s3-csi-driver/pkg/provision/proofs"
	"github.com/s3-csi/s3-csi-driver/pkg/provision/records"
	"github.com/s3-csi/s3-csi-driver/pkg/volume"
)

// Request is a request to create a volume.
type Request struct {
	Name       string // as the CO gave it
	Namespace  string // of the claim, if the CO passes it; it only decides whether the operator's rules allow the volume
	Parameters volume.Parameters
	Options    []volume.Option  // the volume's mount options
	Keys       credentials.Keys // of the request's secret; zero: none
	RoleARN    string           // of the request's secret; "": none
	// Check is called before a volume with content is created, Fill when it exists; nil: it has no content. Their access has the settings of the
	// config file, without those of Options.
	Check func(ctx context.Context, a identity.Access) error
	Fill  func(ctx context.Context, a identity.Access, id volume.ID) error

	access identity.Access // for Check and Fill
}

// DeletingError is in the chain of the error for a name whose volume is being deleted.
type DeletingError struct{ VolumeID string }

// Error implements error.
func (d *DeletingError) Error() string {
	return "volume " + d.VolumeID + " of that name is being deleted"
}

func (r Request) check(ctx context.Context) error {
	if r.Check == nil {
		return nil
	}
	return r.Check(ctx, r.access)
}

// Service returns properties of a bucket; *backend.Buckets implements it.
type Service interface {
	Validate(ctx context.Context, be backend.Backend, keys credentials.Keys, bucket backend.BucketInfo) (backend.BucketInfo, error)
	buckets.Service
}

// Proofs proves that sessions can be limited to a volume, if it needs that; *proofs.Prover implements it.
type Proofs interface {
	Prefix(ctx context.Context, b buckets.Bucket, s proofs.Subject) error
	Bucket(ctx context.Context, be backend.Backend, s proofs.Subject) (proofs.BucketProof, error)
}

// Creator creates volumes. All methods may be called concurrently.
type Creator struct {
	Identities *identity.Identities
	Clients    *backend.Clients
	Service    Service
	Opener     *buckets.Opener
	Records    *records.Store
	Proofs     Proofs
}

// Create creates the volume of that name, or returns it if it exists with the same parameters. In a bucket and below a base prefix that
// were used before, it takes two S3 requests.
//
// Exists: the name or the prefix is used otherwise. Precondition: the bucket or its service does not support such a volume. Denied: the
// operator's rules or the service do not allow it.
func (c *Creator) Create(ctx context.Context, r Request) (id volume.ID, err error) {
	configured, who, err := c.Identities.Find(r.Parameters.Backend, r.Keys, r.RoleARN)
	if err != nil {
		return volume.ID{}, err
	}
	be := configured.For(r.Options)
	if err := admit(be, r); err != nil {
		return volume.ID{}, err
	}
	keys, err := c.Identities.Keys(ctx, be, who)
	if err != nil {
		return volume.ID{}, err
	}
	defer func() { c.Identities.Invalidate(be, who, keys, err) }()
	a := identity.Access{Backend: be, Who: who, Keys: keys}
	r.access = identity.Access{Backend: configured, Who: who, Keys: keys}
	if r.Parameters.BucketName == "" {
		id, err = c.createBucket(ctx, a, r)
	} else {
		id, err = c.createPrefix(ctx, a, r)
	}
	if err == nil && r.Fill != nil {
		err = r.Fill(ctx, r.access, id)
	}
	return id, err
}

// admit refuses volumes that no node would mount: a scope below the backend's, or a violation of the operator's rules. Nodes check each
// publication against the same rules, with the pod's service account and the secret.
func admit(be backend.Backend, r Request) error {
	node := r.Parameters.Node
	if err := be.CheckBucketName(r.Parameters.BucketFor(r.Name)); err != nil {
		return fault.Field("parameters.bucketName", "%w", err)
	}
	if _, err := be.ScopeOf(node.Scope); err != nil {
		return err
	}
	if err := backend.CheckTemplates(node.RoleARN); err != nil {
		return fault.Field("parameters.roleARN", "%q %w", node.RoleARN, err)
	}
	return be.Allows(backend.Use{
		Namespace: r.Namespace, Bucket: r.Parameters.BucketFor(r.Name), RoleARN: knownRole(be, node, r.Namespace), Source: node.Credentials, Creation: true,
	})
}

// knownRole returns the role that the volume's mounts assume, or "" if it depends on the pod. Pods can only use claims of their
// namespace.
func knownRole(be backend.Backend, node volume.Attributes, namespace string) string {
	role := volume.Role(node.RoleARN)
	if role == "" && node.Credentials == credentials.SourceWorkload {
		role = volume.Role(be.WorkloadRoleARN)
	}
	if !role.Templated() {
		return string(role)
	}
	// If two service accounts result in the same role, it does not depend on them.
	one, err := role.Expand(namespace, "a")
	other, _ := role.Expand(namespace, "b")
	if err != nil || one != other {
		return ""
	}
	return one
}
