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

// plan decides how a volume's session would be made, with the policy of one of two volumes whose names begin alike.
func (s *stsTrial) plan(ctx context.Context) (credentials.Order, error) {
	return s.Sessions.Plan(ctx, session.Request{
		Backend: s.be, Source: credentials.SourceDriver, RoleARN: s.be.ControllerRoleARN, Bucket: s.info.Name, Name: "check", Allowed: true,
		Policy: s.policyFor,
	})
}

func (s *stsTrial) inside() string  { return s.prefix + "vol-1/" }
func (s *stsTrial) outside() string { return s.prefix + "vol-10/" }

func (s *stsTrial) policyFor(onAWS bool, partition string) (string, error) {
	scope := policy.Scope{Partition: partition, Bucket: s.info.Name, Prefix: s.inside(), Needs: policy.Needs{Delete: true}, KMS: onAWS, AWS: onAWS}
	return scope.Session()
}

// enforced makes a session for one volume and tries what it must not do, with the rights that the session is made of.
func (s *stsTrial) enforced(ctx context.Context, what thing) Row {
	if s.trial.client == nil {
		return what.row(Unknown, "there is no bucket to try it in", "")
	}
	o, err := s.plan(ctx)
	if err == nil && o.Kind != credentials.AsIs {
		what.needed = true // what is made is relied upon
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
		if err := s.put(ctx, s.trial.client, key); err != nil {
			return failed(what, err, "writing "+key)
		}
	}
	if _, err := s.Buckets.CheckAccess(ctx, s.be, keys, s.info.Name, s.inside(), s.info.Region, s.info.Owner); err != nil {
		return what.row(No, "a session for one volume cannot use it: "+one(err), "")
	}
	err = s.Buckets.ProveScope(ctx, s.be, keys, o.Class()+" check", s.info.Name, s.inside(), s.info.Region, s.info.Owner)
	switch {
	case fault.Is(err, fault.Precondition):
		return what.row(No, one(err), "")
	case err != nil:
		return what.row(Unknown, one(err), "")
	}
	return s.objectsOf(ctx, what, keys)
}

// undeclaredOrder is one of a way that nobody declared.
func (s *stsTrial) undeclaredOrder(ctx context.Context) (o credentials.Order, err error) {
	o = s.order
	if o.STS, err = s.Clients.STSService(ctx, s.be); err != nil {
		return o, err
	}
	o.Policy, err = s.policyFor(s.be.AWS(), s.be.Partition())
	return o, err
}

// objectsOf tries a session on real objects of its own and of the other volume.
func (s *stsTrial) objectsOf(ctx context.Context, what thing, keys credentials.Keys) Row {
	client, err := s.Clients.Bucket(ctx, s.be, keys, s.info)
	if err != nil {
		return what.row(Unknown, one(err), "")
	}
	own := s.inside() + "file"
	if err := s.get(ctx, client, own); err != nil {
		return what.row(No, one(backend.Classify(err, "reading an object of its own with a volume's session")), "")
	}
	if err := s.put(ctx, client, own); err != nil {
		return what.row(No, one(backend.Classify(err, "writing an object of its own with a volume's session")), "")
	}
	other := s.outside() + "file"
	for _, try := range []struct {
		doing string
		do    func() error
	}{
		{"read", func() error { return s.get(ctx, client, other) }},
		{"write", func() error { return s.put(ctx, client, other) }},
		{"copy", func() error {
			_, err := client.CopyObject(ctx, &s3.CopyObjectInput{Bucket: &s.info.Name, Key: aws.String(own + "-copy"), CopySource: aws.String(s.info.Name + "/" + other)})
			return err
		}},
		{"delete", func() error {
			_, err := client.DeleteObject(ctx, &s3.DeleteObjectInput{Bucket: &s.info.Name, Key: &other})
			return err
		}},
		{"list", func() error {
			_, err := client.ListObjectsV2(ctx, &s3.ListObjectsV2Input{Bucket: &s.info.Name, Prefix: aws.String(s.outside())})
			return err
		}},
	} {
		switch err := try.do(); {
		case err == nil:
			return what.row(No, fmt.Sprintf("a session that was made for one volume can %s objects of another", try.doing),
				"say scope: off for the backend in the driver's config file, and give each volume a secret of its own")
		case !fault.Is(backend.Classify(err, ""), fault.Denied):
			return failed(what, err, "trying to "+try.doing+" another volume's object")
		}
	}
	return what.row(Yes, "a session for "+s.inside()+" can use that and cannot list, read, write, copy or delete in "+s.outside(), "")
}
