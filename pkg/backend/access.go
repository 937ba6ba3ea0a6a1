package backend

import (
	"context"
	"crypto/rand"
	"net/http"

	"github.com/aws/aws-sdk-go-v2/aws"
	"github.com/aws/aws-sdk-go-v2/service/s3"

	"github.com/s3-csi/s3-csi-driver/pkg/credentials"
	"github.com/s3-csi/s3-csi-driver/pkg/fault"
)

// accessProbe begins the name of a key that nobody has; CheckAccess adds something random. It is not below ".s3-csi/", which
// sessions of mounts may not read.
const accessProbe = "s3-csi-access-check-"

// CheckAccess tries what a mount's client will do with these keys: list one key below prefix, and HEAD a key below it that
// does not exist, which must be a 404. It writes nothing. prefix is "" or ends in "/"; region "" is the backend's, and is
// followed where the service names another; owner is as in Validate. Nothing is remembered, because a session's rights are what
// is asked for. What it learnt of the bucket is returned.
//
// NotFound: there is no such bucket. Denied: the keys are not enough for a mount.
func (b *Buckets) CheckAccess(ctx context.Context, be Backend, keys credentials.Keys, bucket, prefix, region, owner string) (BucketInfo, error) {
	owner, err := b.expectedOwner(ctx, be, keys, owner)
	if err != nil {
		return BucketInfo{}, err
	}
	if region == "" {
		region = be.StartRegion()
	}
	place := bucket + "/" + prefix
	info, err := b.inRegion(be, BucketInfo{Name: bucket, Region: region, Owner: owner}, func(info BucketInfo) (string, error) {
		client, err := b.clients.Bucket(ctx, be, keys, info)
		if err != nil {
			return "", err
		}
		_, err = client.ListObjectsV2(ctx, &s3.ListObjectsV2Input{Bucket: &bucket, Prefix: optional(prefix), MaxKeys: aws.Int32(1)})
		return "", err
	})
	if err != nil {
		return BucketInfo{}, ownerHint(Classify(err, "trying whether the mount's credentials can list "+place+" on "+be.String()), owner)
	}
	client, err := b.clients.Bucket(ctx, be, keys, info)
	if err != nil {
		return BucketInfo{}, err
	}
	key := prefix + accessProbe + rand.Text()
	_, err = client.HeadObject(ctx, &s3.HeadObjectInput{Bucket: &bucket, Key: &key})
	if err == nil || IsNotFound(err) {
		return info, nil
	}
	what := "trying whether the mount's credentials can read below " + place + " on " + be.String()
	if a, ok := answered(err); ok && a.status == http.StatusForbidden {
		return BucketInfo{}, ownerHint(fault.Errorf(fault.Denied, "%w; the prefix can be listed, but HEAD of a key that does not exist must be a 404: "+
			"either s3:GetObject is not allowed below the prefix, or the service answers 403 for missing keys because it does not see the permission to list, as some older ones do",
			Classify(err, what)), owner)
	}
	return BucketInfo{}, Classify(err, what)
}

func optional(s string) *string {
	if s == "" {
		return nil
	}
	return &s
}
