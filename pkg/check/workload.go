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
	what := Needed("workloadRole", "the role "+r.in.Workload.RoleARN+" of a workload")
	service, err := r.in.Clients.STSService(ctx, r.be)
	if err != nil {
		return what.Row(No, OneLine(err), "")
	}
	keys, err := r.in.Sessions.Make(ctx, credentials.Order{
		Kind: credentials.WebIdentity, RoleARN: r.in.Workload.RoleARN, Token: r.in.Workload.Token, Name: sessionName, STS: service, Backend: r.be.String(),
	})
	if err != nil {
		return what.Row(No, OneLine(err), "")
	}
	const exchanged = "its trust policy accepts the token"
	if r.in.Bucket == "" {
		return what.Row(Yes, exchanged+"; use --bucket to see whether the role can list a bucket", "")
	}
	bucket := backend.BucketInfo{Name: r.in.Bucket, Region: r.info.Region, Owner: r.info.Owner}
	if _, err := r.in.Buckets.CheckAccess(ctx, r.be, backend.Access{Keys: keys, Bucket: bucket, Prefix: r.in.Workload.Prefix}); err != nil {
		return what.Row(No, exchanged+", but the role's permissions are not enough: "+OneLine(err), "")
	}
	return what.Row(Yes, exchanged+", and the role can list "+r.in.Bucket+"/"+r.in.Workload.Prefix, "")
}
