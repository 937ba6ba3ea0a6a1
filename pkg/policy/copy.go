package policy

import "github.com/s3-csi/s3-csi-driver/pkg/volume"

// Copy is what a copy of a prefix to another one may touch. Both are of one service.
type Copy struct {
	Source, Target Scope
	Versions       bool // of the source are listed and read
}

// Policy is the policy for a copy, as compact JSON. It allows listing and reading the source, listing, reading, writing and deleting below the
// target's prefix, and listing unfinished uploads in the target's bucket, and denies everything else. A whole bucket excludes the driver's
// records.
//
// The error is a Precondition: no policy can express the copy. Its text says what to do.
func (c Copy) Policy() (string, error) {
	from, fromKeys, err := c.Source.side()
	if err != nil {
		return "", err
	}
	to, toKeys, err := c.Target.side()
	if err != nil {
		return "", err
	}
	list, uploads := []string{"s3:ListBucket"}, []string{"s3:ListBucketMultipartUploads"}
	read := []string{"s3:GetObject", "s3:GetObjectTagging"}
	if c.Versions {
		// The wildcard stands for four actions, which would be too long for two buckets on AWS.
		list, read = append(list, "s3:ListBucketVersions"), []string{"s3:GetObject*"}
	}
	write := []string{"s3:PutObject", "s3:PutObjectTagging", "s3:AbortMultipartUpload", "s3:DeleteObject"}
	targets := to.own([]string{toKeys})
	objects := unique(append(from.own([]string{fromKeys}), targets...))
	names := unique(append(from.buckets(), to.buckets()...))
	prefixes := map[string][]string{from.bucket: {fromKeys}}
	prefixes[to.bucket] = append(prefixes[to.bucket], toKeys)

	var all, denied []statement
	for _, name := range names {
		all = append(all, statement{Effect: allow, Action: list, Resource: oneOrMany{name}})
		if keys := prefixes[name]; keys[0] != "*" {
			all[len(all)-1].Condition = when("StringLike", "s3:prefix", keys...)
			denied = append(denied, statement{Effect: deny, Action: list, Resource: oneOrMany{name}, Condition: when("StringNotLike", "s3:prefix", keys...)})
		} else {
			denied = append(denied, statement{Effect: deny, Action: oneOrMany{"s3:*"}, Resource: oneOrMany{name + "/" + volume.RecordPrefix + "/*"}})
		}
	}
	all = append(all,
		statement{Effect: allow, Action: uploads, Resource: to.buckets()},
		statement{Effect: allow, Action: read, Resource: objects},
		statement{Effect: allow, Action: write, Resource: targets})
	allowed := append(append(append(list, uploads...), read...), write...)
	if c.Target.KMS && c.Target.AWS {
		use := []string{"kms:Decrypt", "kms:GenerateDataKey"}
		condition := when("StringLike", "kms:ViaService", through)
		for _, name := range names {
			condition["StringLike"]["kms:EncryptionContext:aws:s3:arn"] = append(condition["StringLike"]["kms:EncryptionContext:aws:s3:arn"], name, name+"/*")
		}
		all = append(all, statement{Effect: allow, Action: use, Resource: oneOrMany{"*"}, Condition: condition})
		allowed = append(allowed, use...)
	}
	if !to.plain {
		all = append(all, statement{Effect: deny, NotAction: allowed, Resource: oneOrMany{"*"}})
	}
	all = append(all,
		statement{Effect: deny, Action: oneOrMany{"s3:*"}, NotResource: append(names, objects...)},
		statement{Effect: deny, Action: write, NotResource: targets})
	return c.Target.finish(append(all, denied...))
}

// side returns a bucket of a copy, and the pattern of its keys.
func (s Scope) side() (target, string, error) {
	t, err := s.target()
	if err != nil {
		return t, "", err
	}
	if t.bucket == "" {
		return t, "", s.refusal("is copied in a directory bucket or through an access point, where a policy cannot restrict it", scopeOff)
	}
	p, err := s.pattern(s.Prefix)
	return t, p + "*", err
}
