package policy

import (
	"strings"

	"github.com/s3-csi/s3-csi-driver/pkg/volume"
)

// target is what a scope's bucket is called in policies. One of its names is not "".
type target struct {
	// plain tells that the service may not know NotAction: MinIO reads it and then refuses the policy, because its statement has
	// no actions (github.com/minio/pkg, policy.Statement).
	plain  bool
	bucket string // ARN of a bucket
	// accessPoint is the ARN of an access point.
	//
	// S3 asks twice about a request through one: about the access point's own ARN and, unless the bucket's policy leaves that to
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
	directoryBuckets                = "a directory bucket has no prefixes to its policies: use the whole bucket as the volume, a bucket of another kind, or scope: off"
	scopeOff                        = "use scope: off for the volume, where its backend lets it"
)

// target finds out what the scope's bucket is. The error is a Precondition.
func (s Scope) target() (target, error) {
	if !partitionName.MatchString(s.partition()) || !s.AWS && s.partition() != "aws" {
		return target{}, s.refusal("is in the unknown partition "+quote(s.Partition), "there are aws, aws-cn and aws-us-gov, and services that are not AWS have no other than aws")
	}
	if strings.HasPrefix(s.Bucket, "arn:") {
		part := accessPointARN.FindStringSubmatch(s.Bucket)
		switch {
		case !s.AWS:
			return target{}, s.refusal("is given by an ARN, which only AWS knows", "use the bucket's name")
		case part == nil:
			return target{}, s.refusal("has an ARN that is not an access point's (arn:<partition>:s3:<region>:<account>:accesspoint/<name>)", "use the bucket's name or an access point's ARN")
		case part[1] != s.partition():
			return target{}, s.refusal("has an access point in another partition than "+s.partition(), "use an access point of the backend's partition")
		}
		return target{accessPoint: "arn:" + part[1] + ":s3:" + part[2] + ":" + part[3] + ":accesspoint/" + part[4]}, nil
	}
	kind, err := volume.ValidateBucketName(s.Bucket)
	if err != nil {
		return target{}, s.refusal("has no bucket that a policy can name: "+err.Error(), "use another bucket")
	}
	if s.AWS {
		switch kind {
		case volume.BucketAccessPoint:
			return target{}, s.refusal("is given by an access point's alias, which policies do not know", "use the name of its bucket, or "+scopeOff)
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

// guards deny what goes to a bucket directly instead of through the access point.
func (t target) guards() []statement {
	if t.accessPoint == "" {
		return nil
	}
	return []statement{{Effect: deny, Action: oneOrMany{"s3:*"}, Resource: oneOrMany{t.everyBucket()}, Condition: when("StringNotEquals", "s3:DataAccessPointArn", t.accessPoint)}}
}

// directorySession is a mount's policy for a directory bucket, which knows one action for all: to get a session of its own
// (S3 User Guide, "Authorizing Zonal endpoint API operations with CreateSession"). Nothing in it can be kept from the client.
func (t target) directorySession(readOnly, kms bool) []statement {
	const create = "s3express:CreateSession"
	grant := statement{Effect: allow, Action: oneOrMany{create}, Resource: oneOrMany{t.directory}}
	if readOnly {
		grant.Condition = when("StringEquals", "s3express:SessionMode", "ReadOnly")
	}
	all, allowed := []statement{grant}, []string{create}
	if kms {
		// The keys of a directory bucket are used when the session is made, for reading and for writing (S3 User Guide, "Setting
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
		all = append(all, statement{Effect: deny, Action: oneOrMany{create}, Resource: oneOrMany{"*"}, Condition: when("StringNotEquals", "s3express:SessionMode", "ReadOnly")})
	}
	if kms {
		all = append(all, statement{Effect: deny, Action: oneOrMany{"kms:*"}, Resource: oneOrMany{"*"}, Condition: when("StringNotLike", "kms:ViaService", throughExpress)})
	}
	return all
}

const throughExpress = "s3express.*"
