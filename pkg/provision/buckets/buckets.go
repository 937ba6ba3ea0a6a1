// Package buckets opens and lists buckets, and detects the features of their service. It does not depend on volumes.
package buckets

import (
	"bytes"
	"context"
	"crypto/md5" //nolint:gosec // Content-MD5 guards against damage in transit, nothing else
	"encoding/base64"
	"slices"
	"time"

	"github.com/aws/aws-sdk-go-v2/aws"
	"github.com/aws/aws-sdk-go-v2/service/s3"
	"github.com/aws/aws-sdk-go-v2/service/s3/types"

	"github.com/s3-csi/s3-csi-driver/pkg/backend"
	"github.com/s3-csi/s3-csi-driver/pkg/conc"
	"github.com/s3-csi/s3-csi-driver/pkg/credentials"
	"github.com/s3-csi/s3-csi-driver/pkg/fault"
	"github.com/s3-csi/s3-csi-driver/pkg/provision/throttle"
)

// Bucket is an opened bucket.
type Bucket struct {
	Backend backend.Backend
	Keys    credentials.Keys
	Info    backend.BucketInfo
	Client  *s3.Client
	// Own is a client with the controller's own identity, if Client has a session that is limited to one volume; nil: use Client.
	Own *s3.Client
}

// AsOwn returns the bucket with the controller's own identity. Tests of the service and manifests need it, because their objects are outside
// any volume.
func (b Bucket) AsOwn() Bucket {
	if b.Own != nil {
		b.Client = b.Own
	}
	return b
}

// ForRun returns the bucket for work that outlasts sessions and that a busy service must not end: its clients ask for keys with each request, and are
// patient. own is the controller's identity, scoped the session of the work; nil: it has none.
func ForRun(ctx context.Context, clients *backend.Clients, b Bucket, own, scoped backend.KeySource) (Bucket, error) {
	open := func(keys backend.KeySource) (*s3.Client, error) {
		client, err := clients.BucketWith(ctx, b.Backend, keys, b.Info)
		if err != nil {
			return nil, err
		}
		return throttle.Patient(client), nil
	}
	var err error
	if b.Client, err = open(own); err != nil || scoped == nil {
		return b, err
	}
	b.Own = b.Client
	b.Client, err = open(scoped)
	return b, err
}

// Name returns the bucket's name for requests.
func (b Bucket) Name() *string { return &b.Info.Name }

// String returns the bucket's name for messages.
func (b Bucket) String() string { return "bucket " + b.Info.Name + " of " + b.Backend.String() }

// Opener opens buckets and caches facts about them. All methods may be called concurrently.
type Opener struct {
	clients   *backend.Clients
	validator *backend.Buckets
	cache     *bucketCache
	locks     conc.Locks
}

// NewOpener returns an Opener. It starts nothing. now is the clock.
func NewOpener(clients *backend.Clients, validator *backend.Buckets, now func() time.Time) *Opener {
	return &Opener{clients: clients, validator: validator, cache: newBucketCache(now)}
}

// Open validates the bucket and returns it with a client. NotFound: the bucket does not exist.
func (o *Opener) Open(ctx context.Context, be backend.Backend, keys credentials.Keys, name, expectedOwner string) (Bucket, error) {
	info, err := o.validator.Validate(ctx, be, keys, backend.BucketInfo{Name: name, Owner: expectedOwner})
	if err != nil {
		return Bucket{}, err
	}
	client, err := o.clients.Bucket(ctx, be, keys, info)
	if err != nil {
		return Bucket{}, err
	}
	return Bucket{Backend: be, Keys: keys, Info: info, Client: client}, nil
}

// OpenUncached is Open, but does not rely on a cached NotFound.
func (o *Opener) OpenUncached(ctx context.Context, be backend.Backend, keys credentials.Keys, name string) (Bucket, error) {
	b, err := o.Open(ctx, be, keys, name, "")
	if fault.Is(err, fault.NotFound) {
		o.Invalidate(be, name)
		b, err = o.Open(ctx, be, keys, name, "")
	}
	return b, err
}

// Lock prevents that this process creates and deletes a bucket at the same time.
func (o *Opener) Lock(ctx context.Context, be backend.Backend, name string) (release func(), err error) {
	return o.locks.Lock(ctx, be.Name+" "+name)
}

// Invalidate drops the cached facts about a bucket that was, or may have been, created or deleted.
func (o *Opener) Invalidate(be backend.Backend, name string) {
	o.validator.Forget(be, name)
	o.cache.invalidate(bucketID{be.Revision(), name})
}

// Once calls do, unless it succeeded for that bucket and that fact within ttl. Concurrent callers share one call; one whose shared
// call failed makes its own, because its credentials may be others.
func (o *Opener) Once(ctx context.Context, b Bucket, fact string, ttl time.Duration, do func(context.Context) error) error {
	_, err := o.cache.get(ctx, b, fact, func(ctx context.Context) (known, error) { return known{ttl: ttl}, do(ctx) })
	return err
}

// NoRetry sends a request without retries of the SDK.
func NoRetry(o *s3.Options) { o.Retryer, o.RetryMaxAttempts = aws.NopRetryer{}, 0 }

// Create sends CreateBucket, and again without what the service does not accept. tagged reports whether it accepted the tags.
func Create(ctx context.Context, client *s3.Client, be backend.Backend, name string, tags []types.Tag) (tagged bool, err error) {
	conf := &types.CreateBucketConfiguration{Tags: tags}
	if region := be.StartRegion(); region != "us-east-1" { // it is named by leaving the location out
		conf.LocationConstraint = types.BucketLocationConstraint(region)
	}
	for {
		in := &s3.CreateBucketInput{Bucket: &name, CreateBucketConfiguration: conf}
		if conf.Tags == nil && conf.LocationConstraint == "" {
			in.CreateBucketConfiguration = nil
		}
		_, err = client.CreateBucket(ctx, in, NoRetry)
		switch code := backend.ErrorCode(err); {
		case be.AWS():
			return err == nil, err
		case code == "InvalidLocationConstraint" && conf.LocationConstraint != "":
			conf.LocationConstraint = ""
		case conf.Tags != nil && backend.IsUnsupported(err):
			conf.Tags = nil
		default:
			return err == nil && conf.Tags != nil, err
		}
	}
}

// Names returns the names of all buckets that the client's credentials show, sorted.
func Names(ctx context.Context, client *s3.Client) (names []string, err error) {
	for token := ""; ; {
		out, err := client.ListBuckets(ctx, &s3.ListBucketsInput{ContinuationToken: backend.Optional(token)})
		if err != nil {
			return nil, err
		}
		for _, b := range out.Buckets {
			names = append(names, aws.ToString(b.Name))
		}
		next := aws.ToString(out.ContinuationToken)
		switch {
		case next == "":
			slices.Sort(names)
			return slices.Compact(names), nil
		case next == token:
			return nil, fault.Errorf(fault.Unavailable, "the service reports more buckets but repeats its token: its listings are unreliable")
		}
		token = next
	}
}

// PutInput returns a PutObject request with a checksum that every service supports.
func PutInput(b Bucket, key string, data []byte) *s3.PutObjectInput {
	sum := md5.Sum(data) //nolint:gosec // Content-MD5 guards against damage in transit, nothing else
	return &s3.PutObjectInput{
		Bucket: b.Name(), Key: &key, Body: bytes.NewReader(data), ContentType: aws.String("application/json"),
		// Buckets with a default retention refuse objects without a checksum.
		ContentMD5: aws.String(base64.StdEncoding.EncodeToString(sum[:])),
	}
}

// Indeterminate reports whether a request that failed with err may still have succeeded.
func Indeterminate(err error) bool {
	switch fault.KindOf(err) {
	case fault.Unavailable, fault.Timeout, fault.Busy, fault.Unknown:
		return true
	}
	return false
}

// UnknownOutcome marks err as that of a request which may have had its effect: Busy, or Timeout where ctx has ended.
func UnknownOutcome(ctx context.Context, err error) error {
	kind := fault.Busy
	if ctx.Err() != nil {
		kind = fault.Timeout
	}
	return fault.Errorf(kind, "the outcome is unknown, a retry will determine it: %w", err)
}

const (
	// cachedFacts is the maximum number of cached facts. A StorageClass whose base prefix contains the namespace adds one for each
	// namespace.
	cachedFacts = 1 << 14
	// Unlimited keeps a fact until the bucket is invalidated, because features of a service do not change.
	Unlimited = 10 * 365 * 24 * time.Hour
	// findBound is the timeout for determining one fact, regardless of its callers.
	findBound = 2 * time.Minute
)

// bucketID is the cache key of a bucket; backend is a revision.
type bucketID struct{ backend, name string }

func (b Bucket) id() bucketID { return bucketID{b.Backend.Revision(), b.Info.Name} }

type factKey struct {
	bucket bucketID
	fact   string
}

// known is the value of a fact. Its meaning depends on the fact.
type known struct {
	value int
	ttl   time.Duration // 0: not cached
}

// bucketCache caches facts about buckets, but not errors.
type bucketCache struct {
	facts *conc.Cache[factKey, known]
}

func newBucketCache(now func() time.Time) *bucketCache {
	return &bucketCache{conc.NewCache[factKey](now, cachedFacts, findBound, func(k known, err error) time.Duration {
		if err != nil {
			return 0
		}
		return k.ttl
	})}
}

// get returns a cached fact, or determines it with find. See Opener.Once.
func (c *bucketCache) get(ctx context.Context, b Bucket, fact string, find func(context.Context) (known, error)) (int, error) {
	for {
		own := false
		k, err := c.facts.Get(ctx, factKey{b.id(), fact}, func(ctx context.Context) (known, error) {
			own = true
			return find(ctx)
		})
		switch {
		case err == nil:
			return k.value, nil
		case ctx.Err() != nil:
			return 0, fault.Errorf(fault.Timeout, "%s: waiting for %s: %w", b, fact, err)
		case own:
			return 0, err
		}
	}
}

func (c *bucketCache) invalidate(id bucketID) {
	c.facts.Invalidate(func(k factKey) bool { return k.bucket == id })
}
