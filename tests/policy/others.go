package policy

import (
	"context"

	"github.com/aws/aws-sdk-go-v2/aws"
	awscredentials "github.com/aws/aws-sdk-go-v2/credentials"
	"github.com/aws/aws-sdk-go-v2/service/s3"
	"github.com/aws/aws-sdk-go-v2/service/s3/types"
	"github.com/aws/aws-sdk-go-v2/service/sts"
)

// others are calls that no mount needs and no session may make: about buckets, permissions, tags, locks, other sessions.
func others() []row {
	key := prefix + "a"
	tags := []types.Tag{{Key: aws.String("a"), Value: aws.String("b")}}
	rows := map[string]call{
		"delete the bucket": func(ctx context.Context, c *s3.Client, p Place) error {
			_, err := c.DeleteBucket(ctx, &s3.DeleteBucketInput{Bucket: &p.Bucket})
			return err
		},
		"delete another bucket": func(ctx context.Context, c *s3.Client, p Place) error {
			_, err := c.DeleteBucket(ctx, &s3.DeleteBucketInput{Bucket: &p.other})
			return err
		},
		"make a bucket": func(ctx context.Context, c *s3.Client, p Place) error {
			_, err := c.CreateBucket(ctx, &s3.CreateBucketInput{Bucket: aws.String(p.Bucket + "-new")})
			return err
		},
		"read the bucket policy": func(ctx context.Context, c *s3.Client, p Place) error {
			_, err := c.GetBucketPolicy(ctx, &s3.GetBucketPolicyInput{Bucket: &p.Bucket})
			return err
		},
		"write a bucket policy": func(ctx context.Context, c *s3.Client, p Place) error {
			_, err := c.PutBucketPolicy(ctx, &s3.PutBucketPolicyInput{Bucket: &p.Bucket, Policy: aws.String(
				`{"Version":"2012-10-17","Statement":[{"Effect":"Allow","Principal":"*","Action":"s3:GetObject","Resource":"arn:aws:s3:::` + p.Bucket + `/*"}]}`)})
			return err
		},
		"delete the bucket policy": func(ctx context.Context, c *s3.Client, p Place) error {
			_, err := c.DeleteBucketPolicy(ctx, &s3.DeleteBucketPolicyInput{Bucket: &p.Bucket})
			return err
		},
		"write the bucket's ACL": func(ctx context.Context, c *s3.Client, p Place) error {
			_, err := c.PutBucketAcl(ctx, &s3.PutBucketAclInput{Bucket: &p.Bucket, ACL: types.BucketCannedACLPrivate})
			return err
		},
		"write an object's ACL": func(ctx context.Context, c *s3.Client, p Place) error {
			_, err := c.PutObjectAcl(ctx, &s3.PutObjectAclInput{Bucket: &p.Bucket, Key: &key, ACL: types.ObjectCannedACLPrivate})
			return err
		},
		"read an object's tags": func(ctx context.Context, c *s3.Client, p Place) error {
			_, err := c.GetObjectTagging(ctx, &s3.GetObjectTaggingInput{Bucket: &p.Bucket, Key: &key})
			return err
		},
		"write an object's tags": func(ctx context.Context, c *s3.Client, p Place) error {
			_, err := c.PutObjectTagging(ctx, &s3.PutObjectTaggingInput{Bucket: &p.Bucket, Key: &key, Tagging: &types.Tagging{TagSet: tags}})
			return err
		},
		"delete an object's tags": func(ctx context.Context, c *s3.Client, p Place) error {
			_, err := c.DeleteObjectTagging(ctx, &s3.DeleteObjectTaggingInput{Bucket: &p.Bucket, Key: &key})
			return err
		},
		"read the bucket's tags": func(ctx context.Context, c *s3.Client, p Place) error {
			_, err := c.GetBucketTagging(ctx, &s3.GetBucketTaggingInput{Bucket: &p.Bucket})
			return err
		},
		"write the bucket's tags": func(ctx context.Context, c *s3.Client, p Place) error {
			_, err := c.PutBucketTagging(ctx, &s3.PutBucketTaggingInput{Bucket: &p.Bucket, Tagging: &types.Tagging{TagSet: tags}})
			return err
		},
		"switch versions on": func(ctx context.Context, c *s3.Client, p Place) error {
			_, err := c.PutBucketVersioning(ctx, &s3.PutBucketVersioningInput{Bucket: &p.Bucket,
				VersioningConfiguration: &types.VersioningConfiguration{Status: types.BucketVersioningStatusEnabled}})
			return err
		},
		"read whether there are versions": func(ctx context.Context, c *s3.Client, p Place) error {
			_, err := c.GetBucketVersioning(ctx, &s3.GetBucketVersioningInput{Bucket: &p.Bucket})
			return err
		},
		"lock an object": func(ctx context.Context, c *s3.Client, p Place) error {
			_, err := c.PutObjectLegalHold(ctx, &s3.PutObjectLegalHoldInput{Bucket: &p.Bucket, Key: &key,
				LegalHold: &types.ObjectLockLegalHold{Status: types.ObjectLockLegalHoldStatusOn}})
			return err
		},
		"list an upload's parts": uploadOf(prefix+"listed", func(ctx context.Context, c *s3.Client, p Place, id *string) error {
			_, err := c.ListParts(ctx, &s3.ListPartsInput{Bucket: &p.Bucket, Key: aws.String(prefix + "listed"), UploadId: id})
			return err
		}),
		"take on another role": func(ctx context.Context, _ *s3.Client, p Place) error {
			_, err := p.sts().AssumeRole(ctx, &sts.AssumeRoleInput{RoleArn: aws.String(p.Service.OtherRole), RoleSessionName: aws.String("further")})
			return err
		},
	}
	var all []row
	for name, call := range rows {
		r := row{name, nil, call, nil}
		switch name {
		case "delete an object's tags":
			r.may = []Scope{Deleting} // with the object they are gone too
		case "read the bucket's tags":
			r.may = []Scope{MeasuringWhole}
		}
		all = append(all, r)
	}
	return all
}

// sts is the security token service, with the session.
func (p Place) sts() *sts.Client {
	at := p.Service.STS
	return sts.New(sts.Options{BaseEndpoint: aws.String(at.Endpoint), Region: at.Region, RetryMaxAttempts: 1,
		Credentials: awscredentials.NewStaticCredentialsProvider(p.keys.AccessKeyID, p.keys.SecretAccessKey, p.keys.SessionToken)})
}
