package remove

import (
	"context"

	"github.com/s3-csi/s3-csi-driver/pkg/backend"
	"github.com/s3-csi/s3-csi-driver/pkg/policy"
	"github.com/s3-csi/s3-csi-driver/pkg/provision/buckets"
	"github.com/s3-csi/s3-csi-driver/pkg/provision/identity"
	"github.com/s3-csi/s3-csi-driver/pkg/provision/records"
	"github.com/s3-csi/s3-csi-driver/pkg/volume"
)

// If the backend supports sessions, a deletion uses one that is limited to its volume or snapshot and its record, so that a bug in this program, or
// a service that lists wrong keys, cannot delete other data. The backend's configuration and the controller's
// identity decide whether there is a session; responses of the service never do.

// target is what a deletion may touch.
type target struct {
	what           string // "volume lab:b/v/", for messages
	id             string
	bucket, prefix string
	records        []string // keys, and prefixes that end in "/", which are written and deleted too
}

// volumeTarget returns what the deletion of a volume may touch.
func volumeTarget(id volume.ID) target {
	t := target{what: "volume " + id.String(), id: id.String(), bucket: id.Bucket, prefix: id.Prefix}
	if segment, _, ok := id.NameSegment(); ok {
		t.records = []string{records.Key(segment)}
	}
	return t
}

// openToDelete opens the bucket of a deletion. Its clients get keys for each request, because a deletion may take longer than a
// session is valid.
func (r *Remover) openToDelete(ctx context.Context, be backend.Backend, d *deletion, t target) (buckets.Bucket, error) {
	keys, err := r.Identities.Keys(ctx, be, d.run.Latest())
	if err != nil {
		return buckets.Bucket{}, err
	}
	b, err := r.Opener.Open(ctx, be, keys, t.bucket, "")
	if err != nil {
		return buckets.Bucket{}, err
	}
	if !d.planned {
		if d.scoped, err = r.deletionKeys(ctx, be, d.run.Latest, t); err != nil {
			return buckets.Bucket{}, err
		}
		d.planned = true
	}
	return buckets.ForRun(ctx, r.Clients, b, r.Identities.Own(be, r.Clients.DriverKeys, d.run.Latest), d.scoped)
}

// deletionKeys returns the sessions for a deletion, after making the first one; nil: no session can be made. A volume that no policy can
// describe was created without scope and is deleted without a session.
func (r *Remover) deletionKeys(ctx context.Context, be backend.Backend, latest func() identity.Identity, t target) (backend.KeySource, error) {
	return r.Identities.Narrow(ctx, be, identity.Narrowing{
		Bucket: t.bucket, Name: identity.SessionName("delete", t.id), Purpose: "the deletion of " + t.what, Latest: latest,
		Policy: func(aws bool, partition string) (string, error) {
			return policy.Scope{Partition: partition, Bucket: t.bucket, Prefix: t.prefix, KMS: aws, AWS: aws}.Deletion(t.records)
		},
	})
}
