package provision

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"maps"
	"slices"
	"strings"
	"unicode"

	"github.com/aws/aws-sdk-go-v2/aws"
	"github.com/aws/aws-sdk-go-v2/service/s3"
	"github.com/aws/aws-sdk-go-v2/service/s3/types"

	"github.com/s3-csi/s3-csi-driver/pkg/backend"
	"github.com/s3-csi/s3-csi-driver/pkg/fault"
	"github.com/s3-csi/s3-csi-driver/pkg/volume"
)

// The tags that prove that this driver made a bucket for a volume.
const (
	tagPrefix     = "s3.csi/"
	tagDriver     = tagPrefix + "driver"
	tagCluster    = tagPrefix + "cluster" // left out when there is no cluster id: some services refuse empty values
	tagVolume     = tagPrefix + "volume"  // the volume id
	tagName       = tagPrefix + "name"    // the volume's name
	tagParameters = tagPrefix + "parameters"
	tagOnDelete   = tagPrefix + "on-delete"
	tagState      = tagPrefix + "state"
)

// tags are a bucket's.
type tags map[string]string

// tagRune tells whether a character can stand in a tag's value everywhere
// (https://docs.aws.amazon.com/AmazonS3/latest/userguide/tagging.html).
func tagRune(r rune) bool {
	return 'a' <= r && r <= 'z' || 'A' <= r && r <= 'Z' || '0' <= r && r <= '9' || strings.ContainsRune(" +-=._:/@", r)
}

// tagValue is s, or what stands for it where a tag cannot hold it.
func tagValue(s string) string {
	if len(s) <= 128 && strings.TrimSpace(s) == s && !strings.ContainsFunc(s, func(r rune) bool { return !tagRune(r) || unicode.IsSpace(r) }) {
		return s
	}
	sum := sha256.Sum256([]byte(s))
	return volume.NameSegment(s) + "/" + hex.EncodeToString(sum[:16])
}

// volumeTags are the tags of a bucket volume.
func (p *Provisioner) volumeTags(r CreateRequest, id volume.ID) tags {
	t := tags{
		tagDriver: p.owner.driver, tagVolume: id.String(), tagName: tagValue(r.Name), tagParameters: r.Parameters.Digest(),
		tagOnDelete: string(r.Parameters.OnDelete), tagState: string(stateActive),
	}
	if p.owner.cluster != "" {
		t[tagCluster] = p.owner.cluster
	}
	return t
}

// ours are the tags that this driver could have written; the others are the operator's and stay as they are.
func (t tags) ours() tags {
	mine := tags{}
	for k, v := range t {
		if strings.HasPrefix(k, tagPrefix) {
			mine[k] = v
		}
	}
	return mine
}

func (t tags) owner() owner { return owner{driver: t[tagDriver], cluster: t[tagCluster]} }

// of tells whether the tags are those of exactly that volume of that owner.
func (t tags) of(o owner, id volume.ID) bool {
	return t.owner() == o && t[tagVolume] == id.String()
}

func (t tags) set() []types.Tag {
	list := make([]types.Tag, 0, len(t))
	for _, k := range slices.Sorted(maps.Keys(t)) {
		list = append(list, types.Tag{Key: aws.String(k), Value: aws.String(t[k])})
	}
	return list
}

// decideBucket decides what the tags of a bucket that is there mean for a CreateVolume with tags want: nil is the volume itself.
func decideBucket(have, want tags, bucket string) error {
	mine := have.ours()
	switch {
	case maps.Equal(mine, want):
		return nil
	case len(mine) == 0:
		return fault.Errorf(fault.Exists, "the bucket %s is there and is not tagged as a volume of this driver: it is not taken over; choose another bucketNamePrefix or volume name", bucket)
	case mine[tagVolume] != want[tagVolume] || mine.owner() != want.owner():
		return fault.Errorf(fault.Exists, "the bucket %s is tagged as volume %q of %s, and not as volume %q of %s", bucket, mine[tagVolume], mine.owner(), want[tagVolume], want.owner())
	case mine[tagState] == string(stateDeleting):
		return fault.Errorf(fault.Busy, "volume %s is being deleted", want[tagVolume])
	case mine[tagState] == string(stateDeleted):
		return fault.Errorf(fault.Exists, "the bucket %s was kept when its volume was deleted (onDelete: %s): it is not used again; choose another volume name, or remove the bucket", bucket, mine[tagOnDelete])
	}
	return fault.Errorf(fault.Exists, "volume %s is there and was made with another name or other parameters", want[tagVolume])
}

// readTags reads a bucket's tags; no tags are not an error. NotFound: there is no such bucket, where the service tells.
func readTags(ctx context.Context, client *s3.Client, bucket string) (tags, error) {
	out, err := client.GetBucketTagging(ctx, &s3.GetBucketTaggingInput{Bucket: &bucket})
	switch {
	case backend.IsNotFound(err) && !backend.IsNoSuchBucket(err):
		return tags{}, nil
	case err != nil:
		return nil, backend.Classify(err, "reading the tags of bucket "+bucket)
	}
	t := tags{}
	for _, tag := range out.TagSet {
		t[aws.ToString(tag.Key)] = aws.ToString(tag.Value)
	}
	return t, nil
}

// writeTags replaces a bucket's tags, of which there is no conditional form.
func writeTags(ctx context.Context, client *s3.Client, bucket string, t tags) error {
	_, err := client.PutBucketTagging(ctx, &s3.PutBucketTaggingInput{Bucket: &bucket, Tagging: &types.Tagging{TagSet: t.set()}})
	return backend.Classify(err, "tagging bucket "+bucket)
}

// setState changes the state in a volume's tags and leaves all others as they are.
func setState(ctx context.Context, pl place, t tags, s state) error {
	t = maps.Clone(t)
	t[tagState] = string(s)
	return writeTags(ctx, pl.client, pl.info.Name, t)
}
