package backend

import (
	"context"
	"strings"

	"github.com/aws/aws-sdk-go-v2/aws"
	"github.com/aws/aws-sdk-go-v2/service/s3"
	"github.com/aws/aws-sdk-go-v2/service/s3/types"

	"github.com/s3-csi/s3-csi-driver/pkg/credentials"
)

// directorySuffix is the suffix of directory buckets, which have neither versions nor locks.
const directorySuffix = "--x-s3"

// Versioning is a bucket's versioning state. The zero value is a bucket that never had versions.
type Versioning struct {
	Enabled   bool // every overwrite and delete keeps a version
	Suspended bool // was enabled before, so there may be old versions
	MFADelete bool // no program can delete versions
}

// Retention is a bucket's object lock configuration. The zero value is no lock.
type Retention struct {
	Enabled bool   // objects can be locked
	Mode    string // of the default retention: "GOVERNANCE" or "COMPLIANCE"; "": there is no default
	Days    int    // the default retention in days, or
	Years   int    // in years
}

// Versioning returns the bucket's versioning state, which is cached like Validate's answer. A service without the operation has no
// versions.
func (b *Buckets) Versioning(ctx context.Context, be Backend, keys credentials.Keys, info BucketInfo) (Versioning, error) {
	if strings.HasSuffix(info.Name, directorySuffix) {
		return Versioning{}, nil
	}
	key := bucketKey{be.Revision(), info.Name, b.identity(keys), info.Owner}
	return b.versions.Get(ctx, key, func(ctx context.Context) (Versioning, error) {
		client, err := b.clients.Bucket(ctx, be, keys, info)
		if err != nil {
			return Versioning{}, err
		}
		out, err := client.GetBucketVersioning(ctx, &s3.GetBucketVersioningInput{Bucket: &info.Name})
		switch {
		case IsNotImplemented(err):
			return Versioning{}, nil
		case err != nil:
			return Versioning{}, ownerHint(Classify(err, "reading the versioning state of bucket "+info.Name+" of "+be.String()), info.Owner)
		}
		return Versioning{
			Enabled:   out.Status == types.BucketVersioningStatusEnabled,
			Suspended: out.Status == types.BucketVersioningStatusSuspended,
			MFADelete: out.MFADelete == types.MFADeleteStatusEnabled,
		}, nil
	})
}

// Retention returns the bucket's object lock and default retention, which is cached like Validate's answer. A service without the
// operation and a bucket without the configuration have no lock.
func (b *Buckets) Retention(ctx context.Context, be Backend, keys credentials.Keys, info BucketInfo) (Retention, error) {
	if strings.HasSuffix(info.Name, directorySuffix) {
		return Retention{}, nil
	}
	key := bucketKey{be.Revision(), info.Name, b.identity(keys), info.Owner}
	return b.locks.Get(ctx, key, func(ctx context.Context) (Retention, error) {
		client, err := b.clients.Bucket(ctx, be, keys, info)
		if err != nil {
			return Retention{}, err
		}
		out, err := client.GetObjectLockConfiguration(ctx, &s3.GetObjectLockConfigurationInput{Bucket: &info.Name})
		switch {
		case IsNotImplemented(err), IsNotFound(err) && !IsNoSuchBucket(err):
			return Retention{}, nil
		case err != nil:
			return Retention{}, ownerHint(Classify(err, "reading the object lock configuration of bucket "+info.Name+" of "+be.String()), info.Owner)
		}
		var r Retention
		if c := out.ObjectLockConfiguration; c != nil {
			r.Enabled = c.ObjectLockEnabled == types.ObjectLockEnabledEnabled
			if c.Rule != nil && c.Rule.DefaultRetention != nil {
				d := c.Rule.DefaultRetention
				r.Mode, r.Days, r.Years = string(d.Mode), int(aws.ToInt32(d.Days)), int(aws.ToInt32(d.Years))
			}
		}
		return r, nil
	})
}
