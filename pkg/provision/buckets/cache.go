package buckets

import (
	"context"
	"time"

	"github.com/s3-csi/s3-csi-driver/pkg/fault"
	"github.com/s3-csi/s3-csi-driver/pkg/ttlcache"
)

const (
	// cachedFacts bounds what is remembered of all buckets. A class whose base prefix is a template of namespaces makes one for
	// each of them.
	cachedFacts = 1 << 14
	// Unlimited keeps a fact until the bucket is invalidated: what a service can do does not change.
	Unlimited = 10 * 365 * 24 * time.Hour
	// findBound bounds finding out one fact, whatever its callers allow.
	findBound = 2 * time.Minute
)

// bucketID names a bucket in this process; backend is a revision.
type bucketID struct{ backend, name string }

func (b Bucket) id() bucketID { return bucketID{b.Backend.Revision(), b.Info.Name} }

type factKey struct {
	bucketID
	fact string
}

// known is what was found out. What it means depends on the fact.
type known struct {
	value int
	ttl   time.Duration // 0: it is not kept
}

// bucketCache keeps facts about buckets. Errors are not kept.
type bucketCache struct {
	facts *ttlcache.Cache[factKey, known]
}

func newBucketCache(now func() time.Time) *bucketCache {
	return &bucketCache{ttlcache.New[factKey](now, cachedFacts, findBound, func(k known, err error) time.Duration {
		if err != nil {
			return 0
		}
		return k.ttl
	})}
}

// get returns a fact, and finds it out with find where it is not known. See Opener.Once.
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
	c.facts.Invalidate(func(k factKey) bool { return k.bucketID == id })
}
