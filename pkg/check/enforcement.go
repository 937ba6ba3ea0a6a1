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
func (s *stsRun) plan(ctx context.Context) (credentials.Order, error) {
	return s.Sessions.Plan(ctx, session.Request{
		Backend: s.be, Source: credentials.SourceDriver, RoleARN: s.be.ControllerRoleARN, Bucket: s.info.Name, Name: "check", Allowed: true,
		Policy: s.policyFor,
	})
}

func (s *stsRun) inside() string  { return s.prefix + "vol-1/" }
func (s *stsRun) outside() string { return s.prefix + "vol-10/" }

func (s *stsRun) policyFor(onAWS bool, partition string) (string, error) {
	scope := policy.Scope{Partition: partition, Bucket: s.info.Name, Prefix: s.inside(), Needs: policy.Needs{Delete: true}, KMS: onAWS, AWS: onAWS}
	return scope.Session()
}

// enforced makes a session for one volume and tries what it must not be able to do.
func (s *stsRun) enforced(ctx context.Context, what item) Row {
	if s.run.client == nil {
		return what.row(Unknown, noBucket, "")
	}
	o, err := s.plan(ctx)
	if err == nil && o.Kind != credentials.AsIs {
		what.needed = true // volumes depend on it
	} else if s.order.IsZero() {
		return what.row(Unknown, "no session could be made", "")
	} else if o, err = s.undeclaredOrder(ctx); err != nil {
		return what.row(Unknown, one(err), "")
	}
	keys, err := s.Sessions.Make(ctx, o)
	if err != nil {
		return what.row(Unknown, one(err), "")
	}
	for _, key := range []string{s.inside() + "file", s.outside() + "file"} {
		if err := s.put(ctx, s.run.client, key, content); err != nil {
			return failed(what, err, "writing "+key)
		}
	}
	access := backend.Access{Keys: keys, Class: o.Class() + " check", Bucket: s.info, Prefix: s.inside()}
	if _, err := s.Buckets.CheckAccess(ctx, s.be, access); err != nil {
		return what.row(No, "a session for one volume cannot use it: "+one(err), "")
	}
	err = s.Buckets.ProveScope(ctx, s.be, access)
	switch {
	case fault.Is(err, fault.Precondition):
		return what.row(No, one(err), "")
	case err != nil:
		return what.row(Unknown, one(err), "")
	}
	return s.objectsOf(ctx, what, keys)
}

// undeclaredOrder is an order of a kind that the backend does not declare.
func (s *stsRun) undeclaredOrder(ctx context.Context) (o credentials.Order, err error) {
	o = s.order
	if o.STS, err = s.Clients.STSService(ctx, s.be); err != nil {
		return o, err
	}
	o.Policy, err = s.policyFor(s.be.AWS(), s.be.Partition())
	return o, err
}

// objectsOf uses a session on objects of its own and of the other volume.
func (s *stsRun) objectsOf(ctx context.Context, what item, keys credentials.Keys) Row {
	client, err := s.Clients.Bucket(ctx, s.be, keys, s.info)
	if err != nil {
		return what.row(Unknown, one(err), "")
	}
	own := s.inside() + "file"
	if err := s.get(ctx, client, own, content); err != nil {
		return what.row(No, one(backend.Classify(err, "read the volume's own object with its session")), "")
	}
	if err := s.put(ctx, client, own, content); err != nil {
		return what.row(No, one(backend.Classify(err, "write an object of the volume with its session")), "")
	}
	other := s.outside() + "file"
	for _, try := range []struct {
		doing string
		do    func() error
	}{
		{"read", func() error { return s.get(ctx, client, other, content) }},
		{"write", func() error { return s.put(ctx, client, other, content) }},
		{"copy", func() error {
			_, err := client.CopyObject(ctx, &s3.CopyObjectInput{Bucket: &s.info.Name, Key: aws.String(own + "-copy"), CopySource: aws.String(s.info.Name + "/" + other)})
			return err
		}},
		{"delete", func() error {
			_, err := client.DeleteObject(ctx, &s3.DeleteObjectInput{Bucket: &s.info.Name, Key: &other})
			return err
		}},
	} {
		switch err := try.do(); {
		case err == nil:
			return what.row(No, fmt.Sprintf("a session for one volume can %s objects of another", try.doing),
				"set scope: off for the backend in the driver's config file, and give each volume its own secret")
		case !fault.Is(backend.Classify(err, ""), fault.Denied):
			return failed(what, err, try.doing+" another volume's object")
		}
	}
	return what.row(Yes, "a session for "+s.inside()+" can use it, but cannot list, read, write, copy or delete in "+s.outside(), "")
}
