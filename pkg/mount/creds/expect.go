package creds

import (
	"cmp"
	"time"

	"github.com/s3-csi/s3-csi-driver/pkg/backend"
	"github.com/s3-csi/s3-csi-driver/pkg/conc"
	"github.com/s3-csi/s3-csi-driver/pkg/credentials"
	"github.com/s3-csi/s3-csi-driver/pkg/mount"
)

// What proofs learnt of buckets is kept for learntFor, for at most maxLearnt buckets.
const (
	learntFor = time.Hour
	maxLearnt = 2048
)

// learntKey is what the result of a proof depends on. class names the identity.
type learntKey struct{ backend, bucket, class, region, owner string }

func learntKeyOf(g *Grant, be backend.Backend, spec mount.Spec) learntKey {
	return learntKey{be.Revision(), spec.Bucket, g.order.Class(), spec.Region, spec.ExpectedBucketOwner}
}

func newLearnt() *conc.Cache[learntKey, backend.BucketInfo] {
	return conc.NewCache[learntKey](time.Now, maxLearnt, time.Minute, func(backend.BucketInfo, error) time.Duration { return learntFor })
}

// Expect returns what Prove will probably learn of the grant's bucket, so that a client can be started beside the proof; ok is false
// if that cannot be told. It is what the last proof learnt, or else what the configuration says and the account of the role.
func (p *Provider) Expect(g *Grant, be backend.Backend, spec mount.Spec) (info backend.BucketInfo, ok bool) {
	if g.state == proven {
		return g.bucket, true
	}
	if info, ok, _ := p.learnt.Peek(learntKeyOf(g, be, spec)); ok {
		return info, true
	}
	info = backend.BucketInfo{Name: spec.Bucket, Region: cmp.Or(spec.Region, be.Region), Owner: cmp.Or(spec.ExpectedBucketOwner, be.ExpectedBucketOwner)}
	if info.Region == "" {
		if be.AWS() {
			return info, false // any region
		}
		info.Region = be.StartRegion()
	}
	if info.Owner == "" && (be.AWS() || be.STS != nil) {
		role, err := credentials.ParseRole(g.order.RoleARN)
		if err != nil || role.Account == "" {
			return info, false // the account of the keys
		}
		info.Owner = role.Account
	}
	return info, true
}
