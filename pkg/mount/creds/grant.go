package creds

import (
	"cmp"
	"context"
	"time"

	"github.com/s3-csi/s3-csi-driver/pkg/backend"
	"github.com/s3-csi/s3-csi-driver/pkg/conc"
	"github.com/s3-csi/s3-csi-driver/pkg/credentials"
	"github.com/s3-csi/s3-csi-driver/pkg/mount"
)

// grantState is how far the credentials of a grant are.
type grantState int

const (
	empty   grantState = iota // there is no order: the mount's helper has all there is
	planned                   // there is an order
	made                      // there are keys
	proven                    // the keys were tried, and the bucket is known
)

// Grant is the credentials of a mount's client: an order, and the session that is made from it when it is needed. The zero value is
// empty. A grant is used by one goroutine.
type Grant struct {
	state  grantState
	order  credentials.Order
	keys   credentials.Keys // in states made and proven
	bucket backend.BucketInfo
	// The order depends on the client, whose sessions may do what it needs. plan plans for another one.
	client string
	plan   func(ctx context.Context, client string) (credentials.Order, error)
}

// IsEmpty reports whether there is nothing to make credentials from.
func (g *Grant) IsEmpty() bool { return g.order.IsZero() }

// Order returns the order, zero for an empty grant.
func (g *Grant) Order() credentials.Order { return g.order }

// RenewalOrder returns the order from which a helper makes further sessions; zero if the keys are used as they are.
func (g *Grant) RenewalOrder() credentials.Order {
	if g.order.Kind == credentials.AsIs {
		return credentials.Order{}
	}
	return g.order
}

// Made returns the keys, if they were made.
func (g *Grant) Made() credentials.Keys { return g.keys }

// Bucket returns what was learnt of the bucket when the keys were proven.
func (g *Grant) Bucket() backend.BucketInfo { return g.bucket }

// Fit plans again if the mount's client is another than the grant's: the driver's default client may have changed since.
func (g *Grant) Fit(ctx context.Context, client string) (err error) {
	if g.plan == nil || g.client == client {
		return nil
	}
	g.client, g.keys, g.state = client, credentials.Keys{}, planned
	g.order, err = g.plan(ctx, client)
	return err
}

// String shows nothing secret: fmt does not call the fields' methods.
func (g Grant) String() string { return "grant(" + g.order.String() + ")" }

// GoString keeps %#v from printing secrets.
func (g Grant) GoString() string { return g.String() }

func (g *Grant) hasKeys() bool { return g.state == made || g.state == proven }

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
