package buckets

import (
	"context"
	"fmt"

	"github.com/s3-csi/s3-csi-driver/pkg/backend"
	"github.com/s3-csi/s3-csi-driver/pkg/credentials"
)

// Service returns properties of a bucket; *backend.Buckets implements it.
type Service interface {
	Versioning(ctx context.Context, be backend.Backend, keys credentials.Keys, info backend.BucketInfo) (backend.Versioning, error)
	Retention(ctx context.Context, be backend.Backend, keys credentials.Keys, info backend.BucketInfo) (backend.Retention, error)
}

// Unpurgeable returns why versions in the bucket cannot be deleted, and what to do instead; "": they can be.
func Unpurgeable(ctx context.Context, s Service, b Bucket, versioning backend.Versioning) (why string, err error) {
	if versioning.MFADelete {
		return "deleting versions needs MFA; use onDelete: delete, which leaves versions", nil
	}
	retention, err := s.Retention(ctx, b.Backend, b.Keys, b.Info)
	if err != nil || retention.Mode == "" {
		return "", err
	}
	return fmt.Sprintf("its object lock keeps every version (%s, %d days, %d years by default), and this driver bypasses no retention; use onDelete: "+
		"delete, which leaves versions",
		retention.Mode, retention.Days, retention.Years), nil
}
