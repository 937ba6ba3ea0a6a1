package backend

import (
	"bytes"
	"context"
	"crypto/rand"
	"encoding/xml"
	"io"
	"net/http"
	"strings"
	"sync"
	"time"

	"github.com/aws/aws-sdk-go-v2/aws"
	"github.com/aws/aws-sdk-go-v2/service/s3"
	"github.com/aws/aws-sdk-go-v2/service/s3/types"
	"github.com/aws/smithy-go/middleware"
	smithyhttp "github.com/aws/smithy-go/transport/http"

	"github.com/s3-csi/s3-csi-driver/pkg/conc"
	"github.com/s3-csi/s3-csi-driver/pkg/credentials"
	"github.com/s3-csi/s3-csi-driver/pkg/fault"
)

// How long results are cached, and how many. Failures are cached briefly, so that a fix takes effect soon and retries of many
// callers do not all reach the service.
const (
	successTTL   = 5 * time.Minute
	failureTTL   = 10 * time.Second
	rememberedOf = 2048             // of each kind
	callBound    = 45 * time.Second // of one request, whose callers may allow more
)

// Buckets gets information about buckets and caches it for a short time, separately for each identity. Concurrent calls with the
// same key share one request. It is safe for concurrent use and has no goroutine of its own.
type Buckets struct {
	clients       *Clients
	salt          []byte // of identities' digests, which are kept in memory only
	infos         *conc.Cache[bucketKey, BucketInfo]
	versions      *conc.Cache[bucketKey, Versioning]
	locks         *conc.Cache[bucketKey, Retention]
	accounts      *conc.Cache[bucketKey, string]
	proofs        *conc.Cache[bucketKey, struct{}]
	accountLogged sync.Map // backend names whose missing account was logged
	now           func() time.Time
	// noCallerIdentity has the revisions of backends whose STS does not support GetCallerIdentity, and until when that is assumed.
	noCallerIdentity sync.Map
}

// bucketKey is the key of a cached result. backend is a revision.
type bucketKey struct{ backend, bucket, identity, owner string }

// BucketInfo is the result of a validation.
type BucketInfo struct {
	Name   string
	Region string // for signing requests, and on AWS for their host; never ""
	Owner  string // account id that requests send as the expected bucket owner; "": none
}

// NewBuckets returns a Buckets. now is the clock; nil is time.Now.
func NewBuckets(clients *Clients, now func() time.Time) (*Buckets, error) {
	if now == nil {
		now = time.Now
	}
	salt := make([]byte, 16)
	if _, err := rand.Read(salt); err != nil {
		return nil, err
	}
	return &Buckets{
		clients:  clients,
		salt:     salt,
		now:      now,
		infos:    conc.NewCache[bucketKey](now, rememberedOf, callBound, keepShortly[BucketInfo]),
		versions: conc.NewCache[bucketKey](now, rememberedOf, callBound, keepShortly[Versioning]),
		locks:    conc.NewCache[bucketKey](now, rememberedOf, callBound, keepShortly[Retention]),
		accounts: conc.NewCache[bucketKey](now, rememberedOf, callBound, keepAccount),
		proofs:   conc.NewCache[bucketKey](now, rememberedOf, callBound, keepProof),
	}, nil
}

func keepShortly[V any](_ V, err error) time.Duration {
	switch {
	case err == nil:
		return successTTL
	case fault.Is(err, fault.Timeout): // about the caller, not about the bucket
		return 0
	}
	return failureTTL
}

// identity returns an opaque name of the keys; all users of the process's own chain have the same.
func (b *Buckets) identity(keys credentials.Keys) string {
	if keys.IsZero() {
		return "driver"
	}
	return keys.Digest(b.salt)
}

// Validate checks that the bucket of that name exists and that keys may list it, and returns its region. The owner is the account id that
// must own it; "" is the backend's expectedBucketOwner, or else the caller's own account if STS reports it.
//
// NotFound: there is no such bucket. Denied: it may exist, but not for these keys or not with that owner. Results are cached:
// see Forget.
func (b *Buckets) Validate(ctx context.Context, be Backend, keys credentials.Keys, info BucketInfo) (BucketInfo, error) {
	key := bucketKey{be.Revision(), info.Name, b.identity(keys), info.Owner}
	return b.infos.Get(ctx, key, func(ctx context.Context) (BucketInfo, error) {
		owner, err := b.expectedOwner(ctx, be, keys, info.Owner)
		if err != nil {
			return BucketInfo{}, err
		}
		return b.validate(ctx, be, keys, BucketInfo{Name: info.Name, Region: be.StartRegion(), Owner: owner})
	})
}

// Forget drops the cached results about a bucket for every identity, after it was created, deleted or changed.
func (b *Buckets) Forget(be Backend, bucket string) {
	revision := be.Revision()
	match := func(k bucketKey) bool { return k.backend == revision && k.bucket == bucket }
	b.infos.Invalidate(match)
	b.versions.Invalidate(match)
	b.locks.Invalidate(match)
	b.proofs.Invalidate(match)
}

func (b *Buckets) validate(ctx context.Context, be Backend, keys credentials.Keys, info BucketInfo) (BucketInfo, error) {
	what := "checking bucket " + info.Name + " of " + be.String()
	info, err := b.inRegion(be, info, func(info BucketInfo) (string, error) {
		client, err := b.clients.Bucket(ctx, be, keys, info)
		if err != nil {
			return "", err
		}
		return head(ctx, client, info.Name)
	})
	if err != nil {
		return BucketInfo{}, ownerHint(Classify(err, what), info.Owner)
	}
	return info, nil
}

// head checks that the bucket exists and returns the region in the response.
//
// A response to HEAD has no body, so it has no reason for an error, and a 404 may come from any web server. In that case a
// listing of one key, which needs the same permission, gets the reason.
func head(ctx context.Context, client *s3.Client, bucket string) (string, error) {
	out, err := client.HeadBucket(ctx, &s3.HeadBucketInput{Bucket: &bucket})
	if err == nil {
		return aws.ToString(out.BucketRegion), nil
	}
	a, ok := Answered(err)
	if !ok || a.region() != "" && a.region() != client.Options().Region {
		return "", err
	}
	switch a.Status {
	case http.StatusMovedPermanently, http.StatusBadRequest, http.StatusForbidden, http.StatusNotFound:
	default:
		return "", err
	}
	why := listOne(ctx, client, bucket, "")
	if why == nil {
		if a.absent() {
			return "", fault.Errorf(fault.Busy, "the bucket did not exist and then did: it was just created, or the service is not consistent; try again")
		}
		return "", err
	}
	if _, ok := Answered(why); !ok && !canceled(why) {
		return "", err
	}
	return "", why
}

// ownerHint adds the expected owner to a refusal: S3 returns 403 if it differs.
func ownerHint(err error, owner string) error {
	if owner == "" || !fault.Is(err, fault.Denied) {
		return err
	}
	return fault.Errorf(fault.Denied, "%w; the request also requires that account %s owns the bucket (expectedBucketOwner, by default the caller's own account), "+
		"and buckets of other accounts are refused in the same way", err, owner)
}

// regionHeader has the region of the bucket in all responses of S3.
const regionHeader = "X-Amz-Bucket-Region"

// inRegion calls try for info, and again if the bucket is in another region. try returns the region in a
// response. On success the region in the result is the one to use.
func (b *Buckets) inRegion(be Backend, info BucketInfo, try func(BucketInfo) (string, error)) (BucketInfo, error) {
	named, err := try(info)
	if err != nil {
		other := movedTo(err, info.Region)
		if other == "" {
			return info, err
		}
		info.Region = other
		if named, err = try(info); err != nil {
			return info, err
		}
	}
	// The region of a successful request is right, except on AWS, where a bucket may respond in another region. Other services
	// may set the header to anything.
	if be.AWS() && regionName.MatchString(named) {
		info.Region = named
	}
	return info, nil
}

// movedTo returns the region that an error of a request in region names for the bucket, or "".
func movedTo(err error, region string) string {
	a, ok := Answered(err)
	if !ok || a.region() == region {
		return ""
	}
	switch a.Status {
	case http.StatusMovedPermanently, http.StatusTemporaryRedirect, http.StatusPermanentRedirect, http.StatusBadRequest, http.StatusForbidden:
		return a.region()
	}
	return ""
}

// nameRegion sets the header if a service names a bucket's region only in an error's body, from which the SDK reads no more than
// code and message.
func nameRegion(s *middleware.Stack) error {
	return s.Deserialize.Add(middleware.DeserializeMiddlewareFunc("NameRegion", func(ctx context.Context, in middleware.DeserializeInput,
		next middleware.DeserializeHandler) (middleware.DeserializeOutput, middleware.Metadata, error) {
		out, metadata, err := next.HandleDeserialize(ctx, in)
		resp, ok := out.RawResponse.(*smithyhttp.Response)
		if err != nil || !ok || resp.StatusCode != http.StatusBadRequest || resp.Header.Get(regionHeader) != "" {
			return out, metadata, err
		}
		body, readErr := io.ReadAll(resp.Body) // bounded
		var named struct {
			Code   string `xml:"Code"`
			Region string `xml:"Region"`
		}
		if readErr == nil && xml.Unmarshal(body, &named) == nil && named.Code == "AuthorizationHeaderMalformed" && named.Region != "" {
			resp.Header.Set(regionHeader, named.Region)
		}
		// Put what was read before the rest, or before the error that ended it.
		resp.Body = replacedBody{io.MultiReader(bytes.NewReader(body), resp.Body), resp.Body}
		return out, metadata, err
	}), middleware.After)
}

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

// Versioning returns the bucket's versioning state, which is cached like Validate's result. A service without the operation has no
// versions.
func (b *Buckets) Versioning(ctx context.Context, be Backend, keys credentials.Keys, info BucketInfo) (Versioning, error) {
	return setting[Versioning]{name: "versioning state", buckets: b, cache: b.versions, ask: func(ctx context.Context, client *s3.Client) (Versioning, error) {
		out, err := client.GetBucketVersioning(ctx, &s3.GetBucketVersioningInput{Bucket: &info.Name})
		if err != nil {
			return Versioning{}, err
		}
		return Versioning{
			Enabled:   out.Status == types.BucketVersioningStatusEnabled,
			Suspended: out.Status == types.BucketVersioningStatusSuspended,
			MFADelete: out.MFADelete == types.MFADeleteStatusEnabled,
		}, nil
	}}.read(ctx, be, keys, info)
}

// Retention returns the bucket's object lock and default retention, which is cached like Validate's result. A service without the
// operation and a bucket without the configuration have no lock.
func (b *Buckets) Retention(ctx context.Context, be Backend, keys credentials.Keys, info BucketInfo) (Retention, error) {
	return setting[Retention]{name: "object lock configuration", buckets: b, cache: b.locks, ask: func(ctx context.Context, client *s3.Client) (r Retention,
		err error) {
		out, err := client.GetObjectLockConfiguration(ctx, &s3.GetObjectLockConfigurationInput{Bucket: &info.Name})
		if IsNotFound(err) && !IsNoSuchBucket(err) {
			return r, nil
		}
		if err != nil || out.ObjectLockConfiguration == nil {
			return r, err
		}
		r.Enabled = out.ObjectLockConfiguration.ObjectLockEnabled == types.ObjectLockEnabledEnabled
		if rule := out.ObjectLockConfiguration.Rule; rule != nil && rule.DefaultRetention != nil {
			d := rule.DefaultRetention
			r.Mode, r.Days, r.Years = string(d.Mode), int(aws.ToInt32(d.Days)), int(aws.ToInt32(d.Years))
		}
		return r, nil
	}}.read(ctx, be, keys, info)
}

// setting is a bucket's setting that directory buckets and services without the operation do not have.
type setting[V any] struct {
	name    string
	buckets *Buckets
	cache   *conc.Cache[bucketKey, V]
	ask     func(context.Context, *s3.Client) (V, error)
}

func (s setting[V]) read(ctx context.Context, be Backend, keys credentials.Keys, info BucketInfo) (none V, _ error) {
	if !be.RelaxedBucketNames && strings.HasSuffix(info.Name, directorySuffix) {
		return none, nil
	}
	key := bucketKey{be.Revision(), info.Name, s.buckets.identity(keys), info.Owner}
	return s.cache.Get(ctx, key, func(ctx context.Context) (V, error) {
		client, err := s.buckets.clients.Bucket(ctx, be, keys, info)
		if err != nil {
			return none, err
		}
		v, err := s.ask(ctx, client)
		if IsNotImplemented(err) {
			return none, nil
		}
		return v, ownerHint(Classify(err, "reading the "+s.name+" of bucket "+info.Name+" of "+be.String()), info.Owner)
	})
}
