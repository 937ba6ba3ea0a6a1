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
// Both are asked at once where the region is not a guess. Where both fail, the listing's failure is the answer.
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
		return BucketInfo{}, ownerHint(Classify(err, "trying whether the mount's credentials can list "+c.place(info)), owner)
	}
	if guessed || info != early {
		err = c.head(ctx, info)
	} else {
		<-asked
		err = headErr
	}
	return c.judge(info, err)
}

// accessCheck is what the requests of one CheckAccess have in common.
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

// judge says what the answer to head means for a prefix that can be listed.
func (c *accessCheck) judge(info BucketInfo, err error) (BucketInfo, error) {
	if err == nil || IsNotFound(err) {
		return info, nil
	}
	what := "trying whether the mount's credentials can read below " + c.place(info)
	if a, ok := answered(err); ok && a.status == http.StatusForbidden {
		return BucketInfo{}, ownerHint(fault.Errorf(fault.Denied, "%w; the prefix can be listed, but HEAD of a key that does not exist must be a 404: "+
			"either s3:GetObject is not allowed below the prefix, or the service answers 403 for missing keys because it does not see the permission to list, as some older ones do",
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
