package remove

import (
	"context"
	"crypto/sha256"
	"encoding/hex"

	"k8s.io/klog/v2"

	"github.com/s3-csi/s3-csi-driver/pkg/backend"
	"github.com/s3-csi/s3-csi-driver/pkg/credentials"
	"github.com/s3-csi/s3-csi-driver/pkg/fault"
	"github.com/s3-csi/s3-csi-driver/pkg/policy"
	"github.com/s3-csi/s3-csi-driver/pkg/provision/buckets"
	"github.com/s3-csi/s3-csi-driver/pkg/provision/identity"
	"github.com/s3-csi/s3-csi-driver/pkg/provision/records"
	"github.com/s3-csi/s3-csi-driver/pkg/volume"
)

// If the backend supports sessions, a deletion uses one that is limited to its volume and its record, so that a bug in this program, or a
// service that lists wrong keys, cannot delete another volume's data. The backend's configuration and the controller's
// identity decide whether there is a session; responses of the service never do.

// openToDelete opens the bucket of a deletion's volume. Its clients get keys for each request, because a deletion may take longer than a
// session is valid.
func (r *Remover) openToDelete(ctx context.Context, be backend.Backend, d *deletion, id volume.ID) (buckets.Bucket, error) {
	own := func(ctx context.Context) (credentials.Keys, error) {
		keys, err := r.Identities.Keys(ctx, be, d.latest())
		if err == nil && keys.IsZero() {
			keys, err = r.Clients.DriverKeys(ctx)
		}
		return keys, err
	}
	keys, err := r.Identities.Keys(ctx, be, d.latest())
	if err != nil {
		return buckets.Bucket{}, err
	}
	b, err := r.Opener.Open(ctx, be, keys, id.Bucket, "")
	if err != nil {
		return buckets.Bucket{}, err
	}
	if b.Client, err = r.Clients.BucketWith(ctx, be, own, b.Info); err != nil {
		return buckets.Bucket{}, err
	}
	if !d.planned {
		if d.scoped, err = r.deletionKeys(ctx, be, d, id); err != nil {
			return buckets.Bucket{}, err
		}
		d.planned = true
	}
	if d.scoped == nil {
		return b, nil
	}
	b.Own = b.Client
	b.Client, err = r.Clients.BucketWith(ctx, be, d.scoped, b.Info)
	return b, err
}

// deletionKeys returns the sessions for a deletion, after making the first one; nil: no session can be made.
func (r *Remover) deletionKeys(ctx context.Context, be backend.Backend, d *deletion, id volume.ID) (backend.KeySource, error) {
	if be.Scope == volume.ScopeOff {
		return nil, nil
	}
	order, err := r.planDeletion(ctx, be, d.latest(), id)
	if err != nil || order.Kind == credentials.AsIs {
		return nil, err
	}
	session := r.Identities.NewSession("deleting volume "+id.String(), func(ctx context.Context) (credentials.Keys, error) {
		order, err := r.planDeletion(ctx, be, d.latest(), id)
		var keys credentials.Keys
		switch {
		case err == nil && order.Kind == credentials.AsIs:
			err = fault.Errorf(fault.Busy, "the latest request has credentials of another kind: a retry uses them")
		case err == nil:
			keys, err = r.Identities.Make(ctx, order)
		}
		if err != nil {
			return credentials.Keys{}, fault.Errorf(fault.KindOf(err), "making a session for the deletion of volume %s: %w", id, err)
		}
		return keys, nil
	})
	_, err = session.Keys(ctx)
	return session.Keys, err
}

// planDeletion plans the session for a deletion. A volume that no policy can describe was created without scope and is deleted without a
// session: the order is AsIs.
func (r *Remover) planDeletion(ctx context.Context, be backend.Backend, who identity.Identity, id volume.ID) (credentials.Order, error) {
	var keys []string
	if segment, _, ok := id.NameSegment(); ok {
		keys = []string{records.Key(segment)}
	}
	var inexpressible error
	order, err := r.Identities.Plan(ctx, be, who, identity.SessionRequest{Bucket: id.Bucket, Name: "delete-" + shortHash(id.String()), Policy: func(aws bool, partition string) (text string, err error) {
		text, err = policy.Scope{Partition: partition, Bucket: id.Bucket, Prefix: id.Prefix, KMS: aws, AWS: aws}.Deletion(keys)
		inexpressible = err
		return text, err
	}})
	if inexpressible != nil {
		klog.FromContext(ctx).Info("Deleting volume without a scoped session", "volume", id.String(), "reason", inexpressible)
		return credentials.Order{Kind: credentials.AsIs}, nil //nolint:nilerr // logged; the deletion then has no session
	}
	return order, err
}

// shortHash returns a short hash for a session's name, whose length is limited.
func shortHash(s string) string {
	sum := sha256.Sum256([]byte(s))
	return hex.EncodeToString(sum[:6])
}
