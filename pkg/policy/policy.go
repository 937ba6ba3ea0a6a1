// Package policy makes session policies: the smallest IAM policy for what a mount or a deletion may touch.
//
// It does no I/O. The permissions of a session are the intersection of its policy and the permissions of the role or user (IAM User Guide,
// "Session policies"). A bucket policy that names the session can add permissions. Therefore the policy also denies everything else,
// which no other policy can override.
package policy

import (
	"slices"
	"strings"

	"github.com/s3-csi/s3-csi-driver/pkg/volume"
)

// MaxSize is how many characters a session policy may have (STS API Reference, AssumeRole, "Policy"). AWS has a second limit, on
// a packed form of the policy that only STS can compute; its response has the used share as PackedPolicySize. Short policies stay below
// it.
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
	// AWS is set if the policy is for AWS. Other services support neither escaped wildcards in policies nor access points and directory
	// buckets.
	AWS bool
}

// Needs is what a client does to objects beside reading them and storing new ones, which includes multipart uploads and copies
// within the volume.
type Needs struct {
	Delete bool // it deletes objects; a rename does too
}

// Session is the policy of a mount, as compact JSON in ASCII: equal scopes have equal texts. It allows listing and
// reading below the prefix and, unless the mount is read-only, writing, and denies everything else. A whole bucket excludes the
// driver's records (volume.RecordPrefix): only their names can be seen, in a listing of all keys.
//
// The error is a Precondition: no policy can express the scope. Its text says what to do.
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
	if strings.HasPrefix(s.Prefix, volume.SnapshotsPrefix) && !s.ReadOnly {
		return "", s.refusal("is a snapshot, which no volume can write to", "mount it read-only")
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

// Usage is the policy for measuring a volume's usage, as compact JSON: it allows listing below the prefix, and nothing else but reading the object
// recordKey or, with tags, the bucket's tags. "": there is no record. ReadOnly and Needs do not matter.
//
// The error is a Precondition: no policy can express the scope. Its text says what to do.
func (s Scope) Usage(recordKey string, tags bool) (string, error) {
	t, err := s.target()
	if err != nil {
		return "", err
	}
	if t.directory != "" {
		return s.finish(t.directorySession(true, s.KMS))
	}
	p, err := s.pattern(s.Prefix)
	if err != nil {
		return "", err
	}
	g := grants{listing: []string{"s3:ListBucket"}}
	if s.Prefix != "" {
		g.prefixes = []string{p + "*"}
	} else {
		g.except = volume.RecordPrefix + "/*"
	}
	if tags {
		g.bucket = []string{"s3:GetBucketTagging"}
	}
	if recordKey != "" {
		k, err := s.pattern(recordKey)
		if err != nil {
			return "", err
		}
		g.objects = []objectGrant{{[]string{"s3:GetObject"}, []string{k}}}
		if s.KMS && s.AWS { // for the record, in an encrypted bucket
			g.kms = []string{"kms:Decrypt"}
		}
	}
	return s.finish(t.statements(g))
}

// Deletion is the policy for deleting a volume's data, as compact JSON. It allows listing objects, versions and unfinished uploads,
// deleting them below the prefix, and reading and writing the objects recordKeys. Below a record key that ends in "/" it allows writing
// and deleting too, for tests of what the service can do.
//
// For a whole bucket it also allows deleting the bucket, and reading and writing its tags. Unfinished uploads are listed for the whole
// bucket, because IAM has no condition on their prefix: names of uploads of other volumes can be seen. HeadBucket is not allowed for a
// prefix.
//
// The error is a Precondition: no policy can express the scope. Its text says what to do.
func (s Scope) Deletion(recordKeys []string) (string, error) {
	t, err := s.target()
	if err != nil {
		return "", err
	}
	if t.directory != "" {
		return "", s.refusal("has to delete from a directory bucket, where a policy cannot restrict objects", scopeOff)
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
	// The wildcard covers versions, and tags, which are deleted with the object.
	g.objects = []objectGrant{{[]string{"s3:DeleteObject*", "s3:AbortMultipartUpload"}, unique(removed)}}
	if len(records) > 0 {
		g.objects = append(g.objects, objectGrant{[]string{"s3:GetObject", "s3:PutObject"}, unique(records)})
	}
	if s.KMS && s.AWS && len(records) > 0 {
		// For the records, in an encrypted bucket. Deleting needs no key.
		g.kms, g.kmsOpen = []string{"kms:Decrypt", "kms:GenerateDataKey"}, true
	}
	if g.prefixes != nil && !s.AWS {
		// Without permission to list a key, the response for a missing one is 403, not 404. AWS ignores conditions there.
		g.prefixes = append(g.prefixes, unique(records)...)
	}
	return s.finish(t.statements(g))
}
