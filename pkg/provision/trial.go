package provision

import (
	"context"

	"github.com/aws/aws-sdk-go-v2/service/s3"

	"github.com/s3-csi/s3-csi-driver/pkg/backend"
	"github.com/s3-csi/s3-csi-driver/pkg/provision/buckets"
)

// Trial tests what a service can do, for an operator who wants to know before there is a volume. It writes below one prefix and
// removes what it wrote.
type Trial struct {
	Backend backend.Backend
	Client  *s3.Client // of the bucket
	Bucket  backend.BucketInfo
	Prefix  string // ends in "/"
}

func (t Trial) bucket() buckets.Bucket {
	return buckets.Bucket{Backend: t.Backend, Info: t.Bucket, Client: t.Client}
}

// ConditionalWrites reports whether If-None-Match and If-Match are honoured. Errors have a fault kind.
func (t Trial) ConditionalWrites(ctx context.Context) (bool, error) {
	return buckets.ProbeConditional(ctx, t.bucket(), t.Prefix)
}

// UploadListing reports whether unfinished uploads are listed by the beginnings of their keys, or at least in a listing of all.
// Errors have a fault kind.
func (t Trial) UploadListing(ctx context.Context) (byPrefix, atAll bool, err error) {
	how, err := buckets.ProbeUploadListing(ctx, t.bucket(), t.Prefix)
	return how == buckets.UploadsByPrefix, how == buckets.UploadsByPrefix || how == buckets.UploadsWide, err
}
