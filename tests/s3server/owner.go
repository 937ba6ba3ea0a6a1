package s3server

import (
	"context"
	"encoding/json"

	"github.com/aws/aws-sdk-go-v2/service/s3"
	"github.com/versity/versitygw/auth"
	"github.com/versity/versitygw/backend/posix"
)

// objects is the gateway's store of objects, in which all buckets are the account's, as the security token service calls it.
// The gateway itself takes the access key that has made a bucket for its owner, and refuses who expects another
// (x-amz-expected-bucket-owner).
type objects struct{ *posix.Posix }

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
