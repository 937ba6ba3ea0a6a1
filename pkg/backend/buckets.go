package backend

import (
	"context"
	"crypto/rand"
	"net/http"
	"sync"
	"time"

	"github.com/aws/aws-sdk-go-v2/aws"
	"github.com/aws/aws-sdk-go-v2/service/s3"

	"github.com/s3-csi/s3-csi-driver/pkg/credentials"
	"github.com/s3-csi/s3-csi-driver/pkg/fault"
)

// How long answers are kept, and how many. Failures are kept for a moment only, so that an operator's fix is seen while a
// crowd of retries is not passed on.
const (
	successTTL   = 5 * time.Minute
	failureTTL   = 10 * time.Second
	rememberedOf = 2048             // of each kind
	callBound    = 45 * time.Second // of one call, whose askers may allow more
)

// Buckets finds out about buckets and remembers it for a short time, for each identity apart. Calls that ask for the same at
// the same time are one. All methods may be called concurrently; it has no goroutine of its own.
type Buckets struct {
	clients  *Clients
	salt     []byte // of identities' digests, which are kept in memory only
	infos    *memo[bucketKey, BucketInfo]
	versions *memo[bucketKey, Versioning]
	locks    *memo[bucketKey, Retention]
	accounts *memo[bucketKey, account]
	proofs   *memo[bucketKey, struct{}]
	told     sync.Map // backend names whose missing account was logged
	now      func() time.Time
	// mute are revisions of backends whose STS does not know the question for the account, until when that is believed.
	mute sync.Map
}

// bucketKey is whom an answer is about and for. backend is a revision.
type bucketKey struct{ backend, bucket, identity, owner string }

// BucketInfo is what validation found out.
type BucketInfo struct {
	Name   string
	Region string // what requests are signed for, and on AWS where they go; never empty
	Owner  string // account id that every request names as the expected bucket owner; "": none is named
}

// NewBuckets starts nothing. now is the clock; nil is time.Now.
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
		infos:    newMemo[bucketKey](now, rememberedOf, callBound, keepShortly[BucketInfo]),
		versions: newMemo[bucketKey](now, rememberedOf, callBound, keepShortly[Versioning]),
		locks:    newMemo[bucketKey](now, rememberedOf, callBound, keepShortly[Retention]),
		accounts: newMemo[bucketKey](now, rememberedOf, callBound, keepAccount),
		proofs:   newMemo[bucketKey](now, rememberedOf, callBound, keepProof),
	}, nil
}

func keepShortly[V any](_ V, err error) time.Duration {
	switch {
	case err == nil:
		return successTTL
	case fault.Is(err, fault.Timeout): // says more about the asker than about the bucket
		return 0
	}
	return failureTTL
}

// identity names keys without giving them away; all that use the process's own chain are one.
func (b *Buckets) identity(keys credentials.Keys) string {
	if keys.IsZero() {
		return "driver"
	}
	return keys.Digest(b.salt)
}

// Validate makes sure that the bucket is there and that keys may list it, and finds its region. owner is the account id that
// must own it; "" is the backend's expectedBucketOwner, or else the caller's own account where STS tells it.
//
// NotFound: the service says that there is no such bucket. Denied: it may be there, but not for these keys or not of that
// owner. Answers are remembered: see Forget.
func (b *Buckets) Validate(ctx context.Context, be Backend, keys credentials.Keys, bucket, owner string) (BucketInfo, error) {
	key := bucketKey{be.Revision(), bucket, b.identity(keys), owner}
	return b.infos.do(ctx, key, func(ctx context.Context) (BucketInfo, error) {
		owner, err := b.expectedOwner(ctx, be, keys, owner)
		if err != nil {
			return BucketInfo{}, err
		}
		return b.validate(ctx, be, keys, BucketInfo{Name: bucket, Region: be.StartRegion(), Owner: owner})
	})
}

// Forget drops what is remembered of a bucket for every identity, after it was created, deleted or changed.
func (b *Buckets) Forget(be Backend, bucket string) {
	revision := be.Revision()
	match := func(k bucketKey) bool { return k.backend == revision && k.bucket == bucket }
	b.infos.forget(match)
	b.versions.forget(match)
	b.locks.forget(match)
	b.proofs.forget(match)
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

// head asks whether the bucket is there, and gives the region that the answer names.
//
// An answer to HEAD has no body, so that a refusal has no reason, and a 404 may come from any web server. Then a listing of
// one key, which needs the same permission, gets the words. It costs a request on the way to an error only.
func head(ctx context.Context, client *s3.Client, bucket string) (string, error) {
	out, err := client.HeadBucket(ctx, &s3.HeadBucketInput{Bucket: &bucket})
	if err == nil {
		return aws.ToString(out.BucketRegion), nil
	}
	a, ok := answered(err)
	if !ok || a.region() != "" && a.region() != client.Options().Region {
		return "", err
	}
	switch a.status {
	case http.StatusMovedPermanently, http.StatusBadRequest, http.StatusForbidden, http.StatusNotFound:
	default:
		return "", err
	}
	_, why := client.ListObjectsV2(ctx, &s3.ListObjectsV2Input{Bucket: &bucket, MaxKeys: aws.Int32(1)})
	if why == nil {
		if a.absent() {
			return "", fault.Errorf(fault.Busy, "the bucket was not there and then it was: it has just been created, or the service is not consistent: try again")
		}
		return "", err
	}
	if _, ok := answered(why); !ok && !canceled(why) {
		return "", err
	}
	return "", why
}

// ownerHint adds to a refusal what the expected owner may have to do with it: S3 answers 403 where it differs.
func ownerHint(err error, owner string) error {
	if owner == "" || !fault.Is(err, fault.Denied) {
		return err
	}
	return fault.Errorf(fault.Denied, "%w; the request also demanded that account %s owns the bucket (expectedBucketOwner; the caller's own account where nobody set it), "+
		"and a bucket of another account is refused in the same way", err, owner)
}
