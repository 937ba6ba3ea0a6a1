package backend

import (
	"context"
	"time"

	"github.com/s3-csi/s3-csi-driver/pkg/credentials"
)

// Buckets validates buckets and remembers for a short time what it found.
type Buckets struct{}

// NewBuckets starts nothing. now is the clock; nil is time.Now.
func NewBuckets(clients *Clients, now func() time.Time) (*Buckets, error) { panic("soon") }

// BucketInfo is what validation found out.
type BucketInfo struct {
	Name   string
	Region string // where requests for it are signed for; never empty
	Owner  string // account id that is sent as the expected bucket owner; "": none is sent
}

// Validate makes sure that the bucket is there and that keys may use it. owner "" is the backend's expectedBucketOwner,
// or else the caller's own account where STS tells it. NotFound: there is no such bucket; Denied: it may be there.
func (b *Buckets) Validate(ctx context.Context, be Backend, keys credentials.Keys, bucket, owner string) (BucketInfo, error) {
	panic("soon")
}

// Forget drops what is remembered of a bucket, after it was created or deleted.
func (b *Buckets) Forget(be Backend, bucket string) {}

// CheckAccess tries what a mount's client will do.
func (b *Buckets) CheckAccess(ctx context.Context, be Backend, keys credentials.Keys, bucket, prefix, region, owner string) error {
	panic("soon")
}

// Versioning is a bucket's versioning state.
type Versioning struct {
	Enabled   bool // every overwrite and delete keeps a version
	Suspended bool // was enabled; old versions may be there
	MFADelete bool // versions cannot be deleted by a program
}

// Retention is a bucket's object lock configuration.
type Retention struct {
	Enabled bool   // object lock is on
	Mode    string // "GOVERNANCE", "COMPLIANCE"; "": no default retention
	Days    int    // default retention in days, or
	Years   int    // in years
}

// Versioning asks for the bucket's versioning state, remembered as Validate's answers are.
func (b *Buckets) Versioning(ctx context.Context, be Backend, keys credentials.Keys, info BucketInfo) (Versioning, error) {
	panic("soon")
}

// Retention asks for the bucket's default retention, remembered as Validate's answers are.
func (b *Buckets) Retention(ctx context.Context, be Backend, keys credentials.Keys, info BucketInfo) (Retention, error) {
	panic("soon")
}
