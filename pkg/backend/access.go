package backend

import (
	"cmp"
	"context"
	"crypto/rand"
	"net/http"
	"strings"
	"sync"
	"time"

	"github.com/aws/aws-sdk-go-v2/aws"
	"github.com/aws/aws-sdk-go-v2/service/s3"
	"github.com/aws/aws-sdk-go-v2/service/s3/types"

	"github.com/s3-csi/s3-csi-driver/pkg/credentials"
	"github.com/s3-csi/s3-csi-driver/pkg/fault"
	"github.com/s3-csi/s3-csi-driver/pkg/volume"
)

// accessProbe is the prefix of a key that does not exist; CheckAccess adds a random part. It is not below ".s3-csi/", which the
// sessions of mounts may not read.
const accessProbe = "s3-csi-access-check-"

// CheckAccess tries what a mount's client will do with these keys: list one key below prefix, and HEAD a key below it that does
// not exist, which must be a 404. It writes nothing and returns what it learnt about the bucket. Region "" is the backend's, and is
// corrected if the service names another; the owner is as in Validate. The result is not cached, because it depends on one session's
// permissions.
//
// Both requests are sent at once unless the region is a guess. If both fail, the listing's error is returned.
//
// NotFound: there is no such bucket. Denied: the keys are not enough for a mount.
func (b *Buckets) CheckAccess(ctx context.Context, be Backend, a Access) (BucketInfo, error) {
	info := a.Bucket
	var err error
	info.Owner, err = b.expectedOwner(ctx, be, a.Keys, info.Owner)
	if err != nil {
		return BucketInfo{}, err
	}
	guessed := info.Region == "" && be.Region == "" && be.AWS()
	info.Region = cmp.Or(info.Region, be.StartRegion())
	c := &accessCheck{b: b, be: be, keys: a.Keys, prefix: a.Prefix}

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
		return BucketInfo{}, ownerHint(Classify(err, "list with the mount's credentials "+c.place(info)), info.Owner)
	}
	if guessed || info != early {
		err = c.head(ctx, info)
	} else {
		<-asked
		err = headErr
	}
	return c.judge(info, err)
}

// Access is the use of a part of a bucket with some keys.
type Access struct {
	Keys credentials.Keys
	// Class names the identity that sessions are made from (credentials.Order.Class).
	Class  string
	Bucket BucketInfo
	Prefix string // "" or ends in "/"
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
	return listOne(ctx, client, info.Name, c.prefix)
}

// listOne lists one key below a prefix.
func listOne(ctx context.Context, client *s3.Client, bucket, prefix string) error {
	_, err := client.ListObjectsV2(ctx, &s3.ListObjectsV2Input{Bucket: &bucket, Prefix: Optional(prefix), MaxKeys: aws.Int32(1),
		EncodingType: types.EncodingTypeUrl})
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

// judge interprets the response to head for a prefix that can be listed.
func (c *accessCheck) judge(info BucketInfo, err error) (BucketInfo, error) {
	if err == nil || IsNotFound(err) {
		return info, nil
	}
	what := "read with the mount's credentials below " + c.place(info)
	if a, ok := Answered(err); ok && a.Status == http.StatusForbidden {
		return BucketInfo{}, ownerHint(fault.Errorf(fault.Denied, "%w; the prefix can be listed, but HEAD of a missing key must be a 404: "+
			"either s3:GetObject is not allowed below the prefix, or the service is one of those that answer 403 for missing keys despite the permission to list",
			Classify(err, what)), info.Owner)
	}
	return BucketInfo{}, Classify(err, what)
}

// Optional returns a text for requests, or nil for "".
func Optional(s string) *string {
	if s == "" {
		return nil
	}
	return &s
}

// proofTTL is long because services rarely stop enforcing policies.
const proofTTL = time.Hour

// neighbour is appended to a prefix to get a different prefix with the same beginning. No volume's name ends like this.
const neighbour = "-s3-csi-scope-check/"

func keepProof(_ struct{}, err error) time.Duration {
	if err == nil {
		return proofTTL
	}
	return keepShortly(struct{}{}, err)
}

// ProveScope checks that a session for one prefix of a bucket cannot list the bucket's root, list a neighbour prefix with the same
// beginning, or read an object outside. For a session for a whole bucket it checks that the driver's records are refused. For
// what the session can do see CheckAccess.
//
// Directory buckets are not checked, because their sessions are for the whole bucket.
//
// The result is cached per revision of the backend, bucket and class. The bucket's region and owner are those in CheckAccess's result.
//
// Precondition: the service does not enforce session policies.
func (b *Buckets) ProveScope(ctx context.Context, be Backend, a Access) error {
	if be.AWS() && strings.HasSuffix(a.Bucket.Name, directorySuffix) {
		return nil // policies of its sessions cannot name parts of the bucket
	}
	key := bucketKey{be.Revision(), a.Bucket.Name, a.Class, a.Bucket.Owner}
	if a.Prefix == "" {
		key.identity += " whole" // another policy
	}
	_, err := b.proofs.Get(ctx, key, func(ctx context.Context) (struct{}, error) {
		a.Bucket.Region = cmp.Or(a.Bucket.Region, be.StartRegion())
		return struct{}{}, b.proveScope(ctx, be, a)
	})
	return err
}

func (b *Buckets) proveScope(ctx context.Context, be Backend, a Access) error {
	info, prefix := a.Bucket, a.Prefix
	lists := []string{"", strings.TrimSuffix(prefix, "/") + neighbour}
	object := accessProbe + rand.Text()
	if prefix == "" {
		lists, object = []string{volume.RecordPrefix + "/"}, volume.RecordPrefix+"/"+object
	}
	client, err := b.clients.Bucket(ctx, be, a.Keys, info)
	if err != nil {
		return err
	}
	all := make([]error, len(lists)+1)
	var wg sync.WaitGroup
	for i, list := range lists {
		wg.Go(func() {
			all[i] = refused(be, listOne(ctx, client, info.Name, list), "list "+info.Name+"/"+list)
		})
	}
	wg.Go(func() {
		_, err := client.HeadObject(ctx, &s3.HeadObjectInput{Bucket: &info.Name, Key: &object})
		all[len(lists)] = refused(be, err, "read metadata of objects such as "+info.Name+"/"+object)
	})
	wg.Wait()
	// A session that exceeds its scope matters more than a service that did not respond.
	for _, err := range all {
		if fault.Is(err, fault.Precondition) {
			return err
		}
	}
	return cmp.Or(all...)
}

// refused interprets the response to a request that must be refused.
func refused(be Backend, err error, what string) error {
	if err == nil || IsNotFound(err) && !IsNoSuchBucket(err) {
		return fault.See(credentials.Page, fault.Errorf(fault.Precondition, "%s does not enforce session policies: a session for one volume can also %s; "+
			"set scope: off on the backend in the driver's config file, and give each volume its own secret", be, what))
	}
	if a, _ := Answered(err); a.Status == http.StatusForbidden {
		if _, other := meaningOf(a.Code); !other {
			return nil
		}
	}
	if is[*fault.Error](err) {
		return err
	}
	return Classify(err, "check that "+be.String()+" enforces session policies ("+what+")")
}
