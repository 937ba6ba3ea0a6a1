package check

import (
	"context"
	"fmt"

	"github.com/aws/aws-sdk-go-v2/aws"
	"github.com/aws/aws-sdk-go-v2/service/s3"

	"github.com/s3-csi/s3-csi-driver/pkg/backend"
	"github.com/s3-csi/s3-csi-driver/pkg/credentials"
	"github.com/s3-csi/s3-csi-driver/pkg/fault"
	"github.com/s3-csi/s3-csi-driver/pkg/policy"
	"github.com/s3-csi/s3-csi-driver/pkg/session"
)

// plan returns the order for a volume's session, with the policy of one of two volumes whose names have the same beginning.
func (r *run) plan(ctx context.Context) (credentials.Order, error) {
	return r.in.Sessions.Plan(ctx, session.Request{
		Backend: r.be, Source: credentials.SourceDriver, RoleARN: r.be.ControllerRoleARN, Bucket: r.info.Name, Name: "check", Allowed: true,
		Policy: r.policyFor,
	})
}

func (r *run) inside() string  { return r.prefix + "vol-1/" }
func (r *run) outside() string { return r.prefix + "vol-10/" }

func (r *run) policyFor(onAWS bool, partition string) (string, error) {
	scope := policy.Scope{Partition: partition, Bucket: r.info.Name, Prefix: r.inside(), Needs: policy.Needs{Delete: true}, KMS: onAWS, AWS: onAWS}
	return scope.Session()
}

// enforced makes a session for one volume and tries what it must not be able to do.
func (r *run) enforced(ctx context.Context, what Item) Row {
	o, err := r.plan(ctx)
	if err == nil && o.Kind != credentials.AsIs {
		what.needed = true // volumes depend on it
	} else if r.order.IsZero() {
		return what.Row(Unknown, "no session could be made", "")
	} else if o, err = r.undeclaredOrder(ctx); err != nil {
		return what.Row(Unknown, OneLine(err), "")
	}
	keys, err := r.in.Sessions.Make(ctx, o)
	if err != nil {
		return what.Row(Unknown, OneLine(err), "")
	}
	for _, key := range []string{r.inside() + "file", r.outside() + "file"} {
		if err := r.put(ctx, r.client, key, content); err != nil {
			return failed(what, err, "writing "+key)
		}
	}
	access := backend.Access{Keys: keys, Class: o.Class() + " check", Bucket: r.info, Prefix: r.inside()}
	if _, err := r.in.Buckets.CheckAccess(ctx, r.be, access); err != nil {
		return what.Row(No, "a session for one volume cannot use it: "+OneLine(err), "")
	}
	err = r.in.Buckets.ProveScope(ctx, r.be, access)
	switch {
	case fault.Is(err, fault.Precondition):
		return what.Row(No, OneLine(err), "")
	case err != nil:
		return what.Row(Unknown, OneLine(err), "")
	}
	return r.objectsOf(ctx, what, keys)
}

// undeclaredOrder is an order of a kind that the backend does not declare.
func (r *run) undeclaredOrder(ctx context.Context) (o credentials.Order, err error) {
	o = r.order
	if o.STS, err = r.in.Clients.STSService(ctx, r.be); err != nil {
		return o, err
	}
	o.Policy, err = r.policyFor(r.be.AWS(), r.be.Partition())
	return o, err
}

// objectsOf uses a session on objects of its own and of the other volume.
func (r *run) objectsOf(ctx context.Context, what Item, keys credentials.Keys) Row {
	client, err := r.in.Clients.Bucket(ctx, r.be, keys, r.info)
	if err != nil {
		return what.Row(Unknown, OneLine(err), "")
	}
	own := r.inside() + "file"
	if err := r.get(ctx, client, own, content); err != nil {
		return what.Row(No, OneLine(backend.Classify(err, "read the volume's own object with its session")), "")
	}
	if err := r.put(ctx, client, own, content); err != nil {
		return what.Row(No, OneLine(backend.Classify(err, "write an object of the volume with its session")), "")
	}
	other := r.outside() + "file"
	for _, try := range []struct {
		doing string
		do    func() error
	}{
		{"read", func() error { return r.get(ctx, client, other, content) }},
		{"write", func() error { return r.put(ctx, client, other, content) }},
		{"copy", func() error {
			_, err := client.CopyObject(ctx, &s3.CopyObjectInput{Bucket: &r.info.Name, Key: aws.String(own + "-copy"), CopySource: aws.String(r.info.Name + "/" +
				other)})
			return err
		}},
		{"delete", func() error {
			_, err := client.DeleteObject(ctx, &s3.DeleteObjectInput{Bucket: &r.info.Name, Key: &other})
			return err
		}},
	} {
		switch err := try.do(); {
		case err == nil:
			return what.Row(No, fmt.Sprintf("a session for one volume can %s objects of another", try.doing),
				"set scope: off for the backend in the driver's config file, and give each volume its own secret")
		case !fault.Is(backend.Classify(err, ""), fault.Denied):
			return failed(what, err, try.doing+" another volume's object")
		}
	}
	return what.Row(Yes, "a session for "+r.inside()+" can use it, but cannot list, read, write, copy or delete in "+r.outside(), "")
}
