package policy

import (
	"strings"

	"github.com/s3-csi/s3-csi-driver/pkg/volume"
)

// target is the name of a scope's bucket in policies. Exactly one of its names is set.
type target struct {
	// plain is set if the service may not support NotAction: MinIO parses it and then refuses the policy, because the statement has
	// no actions (github.com/minio/pkg, policy.Statement).
	plain  bool
	bucket string // ARN of a bucket
	// accessPoint is the ARN of an access point.
	//
	// S3 authorizes a request through one twice: about the access point's own ARN and, unless the bucket's policy delegates to
	// the access point, about the bucket's, with the condition key s3:DataAccessPointArn (S3 User Guide, "Configuring IAM policies
	// for using access points"). So both have to be allowed, the second for any bucket, but only through the access point.
	accessPoint string
	directory   string // ARN of a directory bucket, in whatever region and account: its name is unique among all
}

func (s Scope) partition() string {
	if s.Partition == "" {
		return "aws"
	}
	return s.Partition
}

const (
	partitionName    volume.Pattern = `^aws(-[a-z]{1,8}){0,3}$`
	accessPointARN   volume.Pattern = `^arn:(aws[a-z-]*):s3:([a-z0-9-]{1,32}):([0-9]{12}):accesspoint[/:]([a-z0-9]([a-z0-9-]{1,48}[a-z0-9]))$`
	directoryBuckets                = "policies of directory buckets do not support prefixes: use the whole bucket as the volume, a bucket of another kind, or " +
		"scope: off"
	scopeOff = "use scope: off for the volume, if its backend allows it"
)

// target returns the name of the scope's bucket in policies. The error is a Precondition.
func (s Scope) target() (target, error) {
	if !partitionName.MatchString(s.partition()) || !s.AWS && s.partition() != "aws" {
		return target{}, s.refusal("is in the unknown partition "+quote(s.Partition), "use aws, aws-cn or aws-us-gov, or aws for services other than AWS")
	}
	if strings.HasPrefix(s.Bucket, "arn:") {
		part := accessPointARN.FindStringSubmatch(s.Bucket)
		switch {
		case !s.AWS:
			return target{}, s.refusal("is given by an ARN, which only AWS supports", "use the bucket's name")
		case part == nil:
			return target{}, s.refusal("has an ARN that is not an access point's (arn:<partition>:s3:<region>:<account>:accesspoint/<name>)",
				"use the bucket's name or an access point's ARN")
		case part[1] != s.partition():
			return target{}, s.refusal("has an access point in another partition than "+s.partition(), "use an access point of the backend's partition")
		}
		return target{accessPoint: "arn:" + part[1] + ":s3:" + part[2] + ":" + part[3] + ":accesspoint/" + part[4]}, nil
	}
	if err := volume.CheckBucketName(s.Bucket); err != nil {
		return target{}, s.refusal("has no bucket that a policy can name: "+quote(s.Bucket)+" "+err.Error(), "use another bucket")
	}
	if s.AWS {
		kind, err := volume.ValidateBucketName(s.Bucket)
		if err != nil {
			return target{}, s.refusal("has no bucket that a policy can name: "+err.Error(), "use another bucket")
		}
		switch kind {
		case volume.BucketAccessPoint:
			return target{}, s.refusal("is given by an access point's alias, which policies do not support", "use the name of its bucket, or "+scopeOff)
		case volume.BucketDirectory:
			if s.Prefix != "" {
				return target{}, s.refusal("is a prefix of a directory bucket", directoryBuckets)
			}
			return target{directory: "arn:" + s.partition() + ":s3express:*:*:bucket/" + s.Bucket}, nil
		}
	}
	return target{plain: !s.AWS, bucket: "arn:" + s.partition() + ":s3:::" + s.Bucket}, nil
}

// buckets are the resources of actions on the bucket.
func (t target) buckets() []string {
	if t.accessPoint != "" {
		return []string{t.accessPoint, t.everyBucket()}
	}
	return []string{t.bucket}
}

// objects are the resources of actions on objects whose keys match the patterns.
func (t target) objects(keys []string) []string {
	if t.accessPoint != "" {
		return append(t.own(keys), t.everyBucket())
	}
	return t.own(keys)
}

// own are the objects under the target's own name.
func (t target) own(keys []string) []string {
	base := t.bucket + "/"
	if t.accessPoint != "" {
		base = t.accessPoint + "/object/"
	}
	all := make([]string, len(keys))
	for i, k := range keys {
		all[i] = base + k
	}
	return all
}

// everyBucket is the ARN of all buckets of an access point's partition.
func (t target) everyBucket() string {
	_, rest, _ := strings.Cut(t.accessPoint, ":")
	partition, _, _ := strings.Cut(rest, ":")
	return "arn:" + partition + ":s3:::*"
}

// guards deny access to a bucket that bypasses the access point.
func (t target) guards() []statement {
	if t.accessPoint == "" {
		return nil
	}
	return []statement{{Effect: deny, Action: oneOrMany{"s3:*"}, Resource: oneOrMany{t.everyBucket()},
		Condition: when("StringNotEquals", "s3:DataAccessPointArn", t.accessPoint)}}
}

// directorySession is a mount's policy for a directory bucket, which has one action for everything: creating a session of its own
// (S3 User Guide, "Authorizing Zonal endpoint API operations with CreateSession"). The client can reach everything in it.
func (t target) directorySession(readOnly, kms bool) []statement {
	const create = "s3express:CreateSession"
	grant := statement{Effect: allow, Action: oneOrMany{create}, Resource: oneOrMany{t.directory}}
	if readOnly {
		grant.Condition = when("StringEquals", "s3express:SessionMode", "ReadOnly")
	}
	all, allowed := []statement{grant}, []string{create}
	if kms {
		// The keys of a directory bucket are used when the session is created, for reading and for writing (S3 User Guide, "Setting
		// default server-side encryption behavior for directory buckets").
		use := []string{"kms:Decrypt", "kms:GenerateDataKey"}
		c := when("StringLike", "kms:ViaService", throughExpress)
		c["StringLike"]["kms:EncryptionContext:aws:s3:arn"] = oneOrMany{t.directory}
		all = append(all, statement{Effect: allow, Action: use, Resource: oneOrMany{"*"}, Condition: c})
		allowed = append(allowed, use...)
	}
	all = append(all,
		statement{Effect: deny, NotAction: allowed, Resource: oneOrMany{"*"}},
		statement{Effect: deny, Action: oneOrMany{"s3express:*"}, NotResource: oneOrMany{t.directory}})
	if readOnly {
		all = append(all, statement{Effect: deny, Action: oneOrMany{create}, Resource: oneOrMany{"*"},
			Condition: when("StringNotEquals", "s3express:SessionMode", "ReadOnly")})
	}
	if kms {
		all = append(all, statement{Effect: deny, Action: oneOrMany{"kms:*"}, Resource: oneOrMany{"*"},
			Condition: when("StringNotLike", "kms:ViaService", throughExpress)})
	}
	return all
}

const throughExpress = "s3express.*"
