package backend

import (
	"context"

	"github.com/aws/aws-sdk-go-v2/service/sts"

	"github.com/s3-csi/s3-csi-driver/pkg/credentials"
)

// STS gives a client of the backend's security token service, or of what may be one at the backend's own endpoint: for trials of
// what there is. keys' zero value is the process's own chain. Errors are those of S3.
func (c *Clients) STS(ctx context.Context, b Backend, keys credentials.Keys) (*sts.Client, error) {
	return c.sts(ctx, b, keys)
}
