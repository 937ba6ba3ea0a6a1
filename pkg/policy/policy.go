// Package policy makes session policies: from what a mount or a deletion may touch to the smallest IAM policy that says so.
//
// It is pure. A policy that is given to a security token service together with a request for a session makes the session's
// rights the intersection of the policy and of what the role or user may do (IAM User Guide, "Session policies"). That alone is
// not enough: a bucket policy that names the session itself adds to it. So everything else is denied as well, which nothing can
// take back.
package policy

import (
	"slices"

	"github.com/s3-csi/s3-csi-driver/pkg/volume"
)

// MaxSize is how many characters a session policy may have (STS API Reference, AssumeRole, "Policy"). AWS has a second limit, on
// a packed form of the policy that only STS can compute and that it tells as PackedPolicySize in its answer; short policies keep
// within it.
const MaxSize = 2048

// Scope is what a mount, or a deletion, may touch.
type Scope struct {
	// Partition is that of the ARNs: "aws", "aws-cn", "aws-us-gov"; "" is "aws", as it is on services that are not AWS.
	Partition string
	// Bucket is the name of a bucket or, on AWS, the ARN of an access point.
	Bucket string
	// Prefix is "" for a whole bucket, and otherwise ends in "/".
	Prefix   string
	ReadOnly bool
	Needs    Needs
	// KMS also allows the use of KMS keys, through S3 and for this bucket alone. AWS only; ignored elsewhere.
	KMS bool
	// AWS tells that the policy is for AWS. Other services know neither the escapes of wildcards in policies nor access points
	// and directory buckets.
	AWS bool
}

// Needs is what a client does to objects beside reading them and storing new ones, which includes multipart uploads and copies
// within the volume.
type Needs struct {
	Delete bool // it removes objects; a rename does too
}

// Session is the policy of a mount, as compact JSON in ASCII: equal scopes have equal texts. It allows to list what is below the
// prefix, to read it and, unless the mount is read-only, to store, and denies all else. A whole bucket is all but the driver's
// records (volume.RecordPrefix): their names can be seen in a listing of all keys, and nothing else of them.
//
// The error is a Precondition: the policy cannot say it. Its text tells what to do.
func (s Scope) Session() (string, error) {
	t, err := s.target()
	if err != nil {
		return "", err
	}
	if t.directory != "" {
		return s.finish(t.directorySession(s.ReadOnly, s.KMS))
	}
	p, err := s.pattern(s.Prefix)
	if err != nil {
		return "", err
	}
	below := p + "*"
	actions := []string{"s3:GetObject"}
	if !s.ReadOnly {
		// Parts of uploads and copies are PutObject too (Service Authorization Reference, Amazon S3).
		actions = append(actions, "s3:PutObject", "s3:AbortMultipartUpload")
		if s.Needs.Delete {
			actions = append(actions, "s3:DeleteObject")
		}
	}
	g := grants{
		listing: []string{"s3:ListBucket"},
		objects: []objectGrant{{actions, []string{below}}},
	}
	if s.Prefix != "" {
		g.prefixes = []string{below}
	} else {
		g.except = volume.RecordPrefix + "/*"
	}
	if s.KMS && s.AWS {
		g.kms = []string{"kms:Decrypt"}
		if !s.ReadOnly {
			g.kms = append(g.kms, "kms:GenerateDataKey")
		}
	}
	return s.finish(t.statements(g))
}

// Deletion is the policy of what removes a volume's data, as compact JSON: to list objects, versions and unfinished uploads and
// to delete them below the prefix, and to read and write the objects recordKeys. Below a record key that ends in "/" everything
// can be written and deleted too: that is for tests of what the service can do.
//
// A whole bucket can be deleted itself, and its tags read and written. Unfinished uploads are listed without regard to the
// prefix, because IAM has no condition for it: names of uploads of other volumes of the bucket can be seen. The existence of the
// bucket (HeadBucket) cannot be asked for a prefix.
//
// The error is a Precondition: the policy cannot say it. Its text tells what to do.
func (s Scope) Deletion(recordKeys []string) (string, error) {
	t, err := s.target()
	if err != nil {
		return "", err
	}
	if t.directory != "" {
		return "", s.refusal("has to delete from a directory bucket, where a policy can say nothing about objects", scopeOff)
	}
	p, err := s.pattern(s.Prefix)
	if err != nil {
		return "", err
	}
	g := grants{
		listing: []string{"s3:ListBucket", "s3:ListBucketVersions"},
		bucket:  []string{"s3:ListBucketMultipartUploads"},
	}
	if s.Prefix == "" {
		g.bucket = append(g.bucket, "s3:GetBucketTagging", "s3:PutBucketTagging", "s3:DeleteBucket")
	} else {
		g.prefixes = []string{p + "*"}
	}
	removed := []string{p + "*"}
	var records []string
	for _, key := range slices.Sorted(slices.Values(recordKeys)) {
		k, err := s.pattern(key)
		if err != nil {
			return "", err
		}
		if k != "" && k[len(k)-1] == '/' {
			k += "*"
			if s.Prefix != "" {
				removed = append(removed, k)
			}
		}
		records = append(records, k)
	}
	// The same for versions, and their tags: they are gone with the object.
	g.objects = []objectGrant{{[]string{"s3:DeleteObject*", "s3:AbortMultipartUpload"}, unique(removed)}}
	if len(records) > 0 {
		g.objects = append(g.objects, objectGrant{[]string{"s3:GetObject", "s3:PutObject"}, unique(records)})
	}
	if s.KMS && s.AWS && len(records) > 0 {
		// For the records, in a bucket that encrypts what is stored in it. To delete needs no key.
		g.kms, g.kmsOpen = []string{"kms:Decrypt", "kms:GenerateDataKey"}, true
	}
	if g.prefixes != nil && !s.AWS {
		// Who cannot list a key is told 403 and not 404 where it is missing. AWS does not look at conditions for that.
		g.prefixes = append(g.prefixes, unique(records)...)
	}
	return s.finish(t.statements(g))
}
