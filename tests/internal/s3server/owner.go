package s3server

import (
	"context"
	"encoding/json"

	"github.com/aws/aws-sdk-go-v2/service/s3"
	"github.com/versity/versitygw/auth"
	"github.com/versity/versitygw/backend/posix"
	"github.com/versity/versitygw/s3err"
	"github.com/versity/versitygw/s3response"
)

// objects is the gateway's store of objects, in which all buckets are the account's, as the security token service calls it.
// The gateway itself takes the access key that has made a bucket for its owner, and refuses who expects another
// (x-amz-expected-bucket-owner).
type objects struct{ *posix.Posix }

// CopyObject compares the owner of the source's bucket (x-amz-source-expected-bucket-owner) with the account.
func (o objects) CopyObject(ctx context.Context, in s3response.CopyObjectInput) (s3response.CopyObjectOutput, error) {
	if err := isAccount(&in.ExpectedSourceBucketOwner); err != nil {
		return s3response.CopyObjectOutput{}, err
	}
	return o.Posix.CopyObject(ctx, in)
}

// UploadPartCopy is like CopyObject.
func (o objects) UploadPartCopy(ctx context.Context, in *s3.UploadPartCopyInput) (s3response.CopyPartResult, error) {
	if err := isAccount(&in.ExpectedSourceBucketOwner); err != nil {
		return s3response.CopyPartResult{}, err
	}
	return o.Posix.UploadPartCopy(ctx, in)
}

// isAccount refuses another expected owner than the account, and takes the right one away.
func isAccount(owner **string) error {
	if *owner != nil && **owner != "" && **owner != account {
		return s3err.GetAPIError(s3err.ErrAccessDenied)
	}
	*owner = nil
	return nil
}

// GetBucketAcl is asked for a bucket's owner.
func (o objects) GetBucketAcl(ctx context.Context, in *s3.GetBucketAclInput) ([]byte, error) { //nolint:revive // the name is the interface's
	data, err := o.Posix.GetBucketAcl(ctx, in)
	if err != nil {
		return nil, err
	}
	acl, err := auth.ParseACL(data)
	if err != nil {
		return nil, err
	}
	acl.Owner = account
	return json.Marshal(acl)
}
