package snapshot

import (
	"context"

	"github.com/s3-csi/s3-csi-driver/pkg/backend"
	"github.com/s3-csi/s3-csi-driver/pkg/policy"
	"github.com/s3-csi/s3-csi-driver/pkg/provision/buckets"
	"github.com/s3-csi/s3-csi-driver/pkg/provision/identity"
	"github.com/s3-csi/s3-csi-driver/pkg/provision/runs"
)

// CopyOptions are the dependencies of OpenCopy.
type CopyOptions struct {
	Identities *identity.Identities
	Clients    *backend.Clients
	Opener     *buckets.Opener
}

// OpenCopy opens the buckets of a copy. If the backend supports sessions, their clients use one that is limited to the copy, so that a bug in
// this program, or a service that lists wrong keys, reaches no other data. Records and manifests are written with the controller's own
// identity.
func OpenCopy(ctx context.Context, o CopyOptions, be backend.Backend, r *runs.Run, what string, source, target policy.Scope, versions bool) (from, to buckets.Bucket, err error) {
	own := o.Identities.Own(be, o.Clients.DriverKeys, r.Latest)
	scoped, err := o.Identities.Narrow(ctx, be, identity.Narrowing{
		Bucket: target.Bucket, Name: identity.SessionName("copy", what), Purpose: "the copy of " + what, Latest: r.Latest,
		Policy: func(aws bool, partition string) (string, error) {
			c := policy.Copy{Source: source, Target: target, Versions: versions}
			for _, s := range []*policy.Scope{&c.Source, &c.Target} {
				s.Partition, s.KMS, s.AWS = partition, aws, aws
			}
			return c.Policy()
		},
	})
	if err != nil {
		return from, to, err
	}
	open := func(name string) (buckets.Bucket, error) {
		keys, err := o.Identities.Keys(ctx, be, r.Latest())
		if err != nil {
			return buckets.Bucket{}, err
		}
		b, err := o.Opener.Open(ctx, be, keys, name, "")
		if err != nil {
			return b, err
		}
		return buckets.ForRun(ctx, o.Clients, b, own, scoped)
	}
	if from, err = open(source.Bucket); err != nil {
		return from, to, err
	}
	to, err = open(target.Bucket)
	return from, to, err
}
