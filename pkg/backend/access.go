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

// accessProbe is the prefix of a key that does not exist; CheckAccess adds a random part. It is not below ".s3-csi/", which the
// sessions of mounts may not read.
const accessProbe = "s3-csi-access-check-"

// CheckAccess tries what a mount's client will do with these keys: list one key below prefix, and HEAD a key below it that does
// not exist, which must be a 404. It writes nothing and returns what it learnt about the bucket. prefix is "" or ends in "/";
// region "" is the backend's, and is corrected if the service names another; owner is as in Validate. The answer is not cached,
// because it is about one session's permissions.
//
// Both requests are sent at once unless the region is a guess. If both fail, the listing's error is returned.
//
// NotFound: there is no such bucket. Denied: the keys are not enough for a mount.
func (b *Buckets) CheckAccess(ctx context.Context, be Backend, keys credentials.Keys, bucket, prefix, region, owner string) (BucketInfo, error) {
	owner, err := b.expectedOwner(ctx, be, keys, owner)
	if err != nil {
		return BucketInfo{}, err
	}
	guessed := region == "" && be.Region == "" && be.AWS()
	if region == "" {
		region = be.StartRegion()
	}
	c := &accessCheck{b: b, be: be, keys: keys, prefix: prefix}
	info := BucketInfo{Name: bucket, Region: region, Owner: owner}

	asking, cancel := context.WithCancel(ctx)
	defer cancel()
	early, asked := info, make(chan struct{})
	var headErr error
	if !guessed {
		go func() {
			defer close(asked)
			headErr = c.head(asking, early)
		}()
		defer func() { cancel(); <-asked }()
	}
	if info, err = b.inRegion(be, info, func(info BucketInfo) (string, error) { return "", c.list(ctx, info) }); err != nil {
		return BucketInfo{}, ownerHint(Classify(err, "list with the mount's credentials "+c.place(info)), owner)
	}
	if guessed || info != early {
		err = c.head(ctx, info)
	} else {
		<-asked
		err = headErr
	}
	return c.judge(info, err)
}

// accessCheck is shared by the requests of one CheckAccess.
type accessCheck struct {
	b      *Buckets
	be     Backend
	keys   credentials.Keys
	prefix string
}

func (c *accessCheck) place(info BucketInfo) string {
	return info.Name + "/" + c.prefix + " on " + c.be.String()
}

func (c *accessCheck) list(ctx context.Context, info BucketInfo) error {
	client, err := c.b.clients.Bucket(ctx, c.be, c.keys, info)
	if err != nil {
		return err
	}
	_, err = client.ListObjectsV2(ctx, &s3.ListObjectsV2Input{Bucket: &info.Name, Prefix: optional(c.prefix), MaxKeys: aws.Int32(1)})
	return err
}

func (c *accessCheck) head(ctx context.Context, info BucketInfo) error {
	client, err := c.b.clients.Bucket(ctx, c.be, c.keys, info)
	if err != nil {
		return err
	}
	key := c.prefix + accessProbe + rand.Text()
	_, err = client.HeadObject(ctx, &s3.HeadObjectInput{Bucket: &info.Name, Key: &key})
	return err
}

// judge interprets the answer to head for a prefix that can be listed.
func (c *accessCheck) judge(info BucketInfo, err error) (BucketInfo, error) {
	if err == nil || IsNotFound(err) {
		return info, nil
	}
	what := "read with the mount's credentials below " + c.place(info)
	if a, ok := answered(err); ok && a.status == http.StatusForbidden {
		return BucketInfo{}, ownerHint(fault.Errorf(fault.Denied, "%w; the prefix can be listed, but HEAD of a missing key must be a 404: "+
			"either s3:GetObject is not allowed below the prefix, or the service is one of those that answer 403 for missing keys despite the permission to list",
			Classify(err, what)), info.Owner)
	}
	return BucketInfo{}, Classify(err, what)
}

func optional(s string) *string {
	if s == "" {
		return nil
	}
	return &s
}
