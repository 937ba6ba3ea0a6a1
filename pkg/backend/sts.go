package backend

import (
	"context"

	"github.com/aws/aws-sdk-go-v2/service/sts"

	"github.com/s3-csi/s3-csi-driver/pkg/credentials"
)

// STS returns a client of the backend's security token service or, if none is declared, of a possible one at the backend's own
// endpoint. Zero keys are the process's own chain. Errors are those of S3.
func (c *Clients) STS(ctx context.Context, b Backend, keys credentials.Keys) (*sts.Client, error) {
	return c.sts(ctx, b, keys)
}
