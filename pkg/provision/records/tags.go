package records

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"maps"
	"slices"
	"strconv"
	"strings"
	"unicode"

	"github.com/aws/aws-sdk-go-v2/aws"
	"github.com/aws/aws-sdk-go-v2/service/s3"
	"github.com/aws/aws-sdk-go-v2/service/s3/types"

	"github.com/s3-csi/s3-csi-driver/pkg/backend"
	"github.com/s3-csi/s3-csi-driver/pkg/fault"
	"github.com/s3-csi/s3-csi-driver/pkg/volume"
)

// Tags that prove that this driver created a bucket for a volume.
const (
	TagPrefix     = "s3.csi/"
	TagDriver     = TagPrefix + "driver"
	TagCluster    = TagPrefix + "cluster" // omitted without a cluster id, because some services refuse empty values
	TagVolume     = TagPrefix + "volume"  // the volume id
	TagName       = TagPrefix + "name"    // the volume's name
	TagParameters = TagPrefix + "parameters"
	TagOnDelete   = TagPrefix + "on-delete"
	TagState      = TagPrefix + "state"
	TagCapacity   = TagPrefix + "capacity" // in bytes; omitted without a size
	TagFillers    = TagPrefix + "fillers"  // see Record.Fillers
	TagUsage      = TagPrefix + "usage"    // see Record.Usage; omitted without usage
)

// maxTagValue is S3's limit for a tag's value, in characters.
const maxTagValue = 256

// Tags are the tags of a bucket.
type Tags map[string]string

// tagRune reports whether a character is valid in a tag's value on every service
// (https://docs.aws.amazon.com/AmazonS3/latest/userguide/tagging.html).
func tagRune(r rune) bool {
	return 'a' <= r && r <= 'z' || 'A' <= r && r <= 'Z' || '0' <= r && r <= '9' || strings.ContainsRune(" +-=._:/@", r)
}

// tagValue returns s, or a hash of it if s is not valid in a tag.
func tagValue(s string) string {
	if len(s) <= 128 && strings.TrimSpace(s) == s && !strings.ContainsFunc(s, func(r rune) bool { return !tagRune(r) || unicode.IsSpace(r) }) {
		return s
	}
	sum := sha256.Sum256([]byte(s))
	return volume.NameSegment(s) + "/" + hex.EncodeToString(sum[:16])
}

// NewTags returns the tags of a new bucket volume.
func (s *Store) NewTags(name string, id volume.ID, params volume.Parameters) Tags {
	t := Tags{
		TagDriver: s.Owner.Driver, TagVolume: id.String(), TagName: tagValue(name), TagParameters: params.Digest(),
		TagOnDelete: string(params.OnDelete), TagState: string(StateActive),
	}
	if s.Owner.Cluster != "" {
		t[TagCluster] = s.Owner.Cluster
	}
	t.SetCapacity(params.CapacityBytes)
	t.SetUsage(params.Usage)
	t.SetOthers(params.Tags)
	if params.Content.String() != "" {
		t[TagState] = string(StateFilling)
	}
	return t
}

// SetOthers sets tags that are not the driver's; an empty value removes one.
func (t Tags) SetOthers(tags map[string]string) {
	for k, v := range tags {
		t[k] = v
		if v == "" {
			delete(t, k)
		}
	}
}

// Fixed returns the tags of the driver that stay as they were at creation: all but those of the settings that a request can change.
func (t Tags) Fixed() Tags {
	fixed := t.Ours()
	delete(fixed, TagOnDelete)
	delete(fixed, TagCapacity)
	delete(fixed, TagFillers)
	delete(fixed, TagUsage)
	return fixed
}

// Capacity returns the recorded size in bytes; 0: none.
func (t Tags) Capacity() int64 {
	n, err := strconv.ParseInt(t[TagCapacity], 10, 64)
	if err != nil || n < 0 {
		return 0
	}
	return n
}

// SetCapacity records a size in bytes; 0: none.
func (t Tags) SetCapacity(bytes int64) {
	delete(t, TagCapacity)
	if bytes != 0 {
		t[TagCapacity] = strconv.FormatInt(bytes, 10)
	}
}

// Usage returns how often usage is measured.
func (t Tags) Usage() volume.Usage {
	u, err := volume.ParseUsage(t[TagUsage])
	if err != nil {
		return 0
	}
	return u
}

// Fillers returns the claims of the runs that may still copy content into the volume.
func (t Tags) Fillers() []string {
	return strings.FieldsFunc(t[TagFillers], func(r rune) bool { return r == '/' })
}

// SetFillers records claims. If a tag has no place for all of them, the first ones are left out.
func (t Tags) SetFillers(claims []string) {
	value := strings.Join(claims, "/")
	for len(value) > maxTagValue && len(claims) > 1 {
		claims = claims[1:]
		value = strings.Join(claims, "/")
	}
	t[TagFillers] = value
}

// SetUsage records how often usage is measured; 0 changes nothing.
func (t Tags) SetUsage(u volume.Usage) {
	if u != 0 {
		t[TagUsage] = u.String()
	}
}

// Ours returns the tags that this driver could have written; the others are the operator's and stay as they are.
func (t Tags) Ours() Tags {
	mine := Tags{}
	for k, v := range t {
		if strings.HasPrefix(k, TagPrefix) {
			mine[k] = v
		}
	}
	return mine
}

// Owner returns the owner that the tags name.
func (t Tags) Owner() Owner { return Owner{Driver: t[TagDriver], Cluster: t[TagCluster]} }

// Of reports whether the tags are those of exactly that volume of that owner.
func (t Tags) Of(o Owner, id volume.ID) bool {
	return t.Owner() == o && t[TagVolume] == id.String()
}

// Set returns the tags for requests.
func (t Tags) Set() []types.Tag {
	list := make([]types.Tag, 0, len(t))
	for _, k := range slices.Sorted(maps.Keys(t)) {
		list = append(list, types.Tag{Key: aws.String(k), Value: aws.String(t[k])})
	}
	return list
}

// ReadTags reads a bucket's tags. It is no error if there are none. NotFound: the bucket does not exist.
func ReadTags(ctx context.Context, client *s3.Client, bucket string) (Tags, error) {
	out, err := client.GetBucketTagging(ctx, &s3.GetBucketTaggingInput{Bucket: &bucket})
	switch {
	case backend.IsNotFound(err) && !backend.IsNoSuchBucket(err):
		return Tags{}, nil
	case err != nil:
		return nil, backend.Classify(err, "reading the tags of bucket "+bucket)
	}
	t := Tags{}
	for _, tag := range out.TagSet {
		t[aws.ToString(tag.Key)] = aws.ToString(tag.Value)
	}
	return t, nil
}

// WriteTags replaces a bucket's tags. S3 has no conditional form of this request.
func WriteTags(ctx context.Context, client *s3.Client, bucket string, t Tags) error {
	_, err := client.PutBucketTagging(ctx, &s3.PutBucketTaggingInput{Bucket: &bucket, Tagging: &types.Tagging{TagSet: t.Set()}})
	return backend.Classify(err, "tagging bucket "+bucket)
}

// record returns what the tags say as a record, which has nothing else.
func (t Tags) record() Record {
	return Record{
		Driver: t[TagDriver], Cluster: t[TagCluster], Name: t[TagName], VolumeID: t[TagVolume], ParametersDigest: t[TagParameters],
		OnDelete: volume.OnDelete(t[TagOnDelete]), CapacityBytes: t.Capacity(), Usage: t.Usage().String(), State: State(t[TagState]), Fillers: t.Fillers(),
	}
}

// with returns the tags with those fields of the record that can change.
func (t Tags) with(r Record) Tags {
	old := t.record()
	t = maps.Clone(t)
	t[TagState] = string(r.State)
	if r.OnDelete != old.OnDelete {
		t[TagOnDelete] = string(r.OnDelete)
	}
	if r.CapacityBytes != old.CapacityBytes {
		t.SetCapacity(r.CapacityBytes)
	}
	if r.Usage != old.Usage {
		t[TagUsage] = r.Usage
	}
	delete(t, TagFillers)
	if r.State == StateFilling && len(r.Fillers) > 0 {
		t.SetFillers(r.Fillers)
	}
	return t
}

// Owner is the driver and the cluster that a volume belongs to. Cluster may be empty.
type Owner struct{ Driver, Cluster string }

// maxOwner is the maximum length of both fields, which become values of bucket tags.
const maxOwner = 128

// Check refuses an owner that is not valid in tags.
func (o Owner) Check() error {
	if o.Driver == "" {
		return fault.Errorf(fault.Invalid, "driver name is empty")
	}
	for what, s := range map[string]string{"driver name": o.Driver, "cluster id": o.Cluster} {
		if len(s) > maxOwner {
			return fault.Errorf(fault.Invalid, "%s has more than %d bytes", what, maxOwner)
		}
		if strings.ContainsFunc(s, func(r rune) bool { return !tagRune(r) || r == ' ' }) {
			return fault.Errorf(fault.Invalid, "%s %q: bucket tags allow only letters, digits and + - = . _ : / @", what, s)
		}
	}
	return nil
}

func (o Owner) String() string {
	if o.Cluster == "" {
		return "driver " + o.Driver + " without a cluster id"
	}
	return "driver " + o.Driver + " of cluster " + o.Cluster
}
