package check

import (
	"context"

	"github.com/s3-csi/s3-csi-driver/pkg/backend"
	"github.com/s3-csi/s3-csi-driver/pkg/credentials"
)

// Workload is what a volume with credentials: workload would use.
type Workload struct {
	RoleARN string // "": there is none to check
	Token   string // of a service account, a secret
	Prefix  string // what the role must be able to list in the bucket
}

// workload exchanges the token for a session of the role, and lists with it what a mount would.
func (r *run) workload(ctx context.Context) Row {
	what := item{"workloadRole", "the role " + r.Workload.RoleARN + " of a workload", true}
	service, err := r.Clients.STSService(ctx, r.be)
	if err != nil {
		return what.row(No, one(err), "")
	}
	keys, err := r.Sessions.Make(ctx, credentials.Order{
		Kind: credentials.WebIdentity, RoleARN: r.Workload.RoleARN, Token: r.Workload.Token, Name: sessionName, STS: service, Backend: r.be.String(),
	})
	if err != nil {
		return what.row(No, one(err), "")
	}
	const exchanged = "its trust policy accepts the token"
	if r.Bucket == "" {
		return what.row(Yes, exchanged+"; use --bucket to see whether the role can list a bucket", "")
	}
	bucket := backend.BucketInfo{Name: r.Bucket, Region: r.info.Region, Owner: r.info.Owner}
	if _, err := r.Buckets.CheckAccess(ctx, r.be, backend.Access{Keys: keys, Bucket: bucket, Prefix: r.Workload.Prefix}); err != nil {
		return what.row(No, exchanged+", but the role's permissions are not enough: "+one(err), "")
	}
	return what.row(Yes, exchanged+", and the role can list "+r.Bucket+"/"+r.Workload.Prefix, "")
}
