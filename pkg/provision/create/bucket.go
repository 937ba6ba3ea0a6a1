package create

import (
	"context"
	"errors"
	"maps"
	"time"

	"github.com/aws/aws-sdk-go-v2/service/s3"
	"k8s.io/klog/v2"

	"github.com/s3-csi/s3-csi-driver/pkg/backend"
	"github.com/s3-csi/s3-csi-driver/pkg/conc"
	"github.com/s3-csi/s3-csi-driver/pkg/credentials"
	"github.com/s3-csi/s3-csi-driver/pkg/fault"
	"github.com/s3-csi/s3-csi-driver/pkg/provision/buckets"
	"github.com/s3-csi/s3-csi-driver/pkg/provision/identity"
	"github.com/s3-csi/s3-csi-driver/pkg/provision/proofs"
	"github.com/s3-csi/s3-csi-driver/pkg/provision/records"
	"github.com/s3-csi/s3-csi-driver/pkg/volume"
)

const (
	// settleTime is how long a bucket may be without the tags that another controller is about to set.
	settleTime  = 3 * time.Second
	settleEvery = 250 * time.Millisecond
)

// createBucket creates a bucket volume:
//
//  1. prove that sessions can be limited to it, as far as that works without the bucket
//  2. if the bucket exists: it is the volume if it has exactly the volume's tags (except for settings that were changed since),
//     otherwise it is a conflict
//  3. else create it with its tags, or tag it afterwards if the service drops them
//  4. finish the proof; if it fails, remove the bucket that this call created
func (c *Creator) createBucket(ctx context.Context, a identity.Access, r Request) (volume.ID, error) {
	be, keys := a.Backend, a.Keys
	id := r.Parameters.ID(r.Name, 1)
	v := bucketCreation{creator: c, be: be, keys: keys, bucket: id.Bucket, owner: r.Parameters.Node.ExpectedBucketOwner,
		want: c.Records.NewTags(r.Name, id, r.Parameters)}
	v.proof, v.refused = c.Proofs.Bucket(ctx, be, proofs.Subject{Who: a.Who, Bucket: id.Bucket, Parameters: r.Parameters})
	release, err := c.Opener.Lock(ctx, be, id.Bucket)
	if err != nil {
		return volume.ID{}, fault.Errorf(fault.Busy, "bucket %s: another call is creating or deleting it: %w", id.Bucket, err)
	}
	defer release()
	// Another process may have created or removed the bucket a moment ago.
	c.Opener.Invalidate(be, id.Bucket)
	b, err := c.Opener.Open(ctx, be, keys, id.Bucket, r.Parameters.Node.ExpectedBucketOwner)
	switch {
	case err == nil:
		if err = v.found(ctx, b); err == nil {
			err = v.limited(ctx, b.Info, notMade)
		}
		return id, err
	case !fault.Is(err, fault.NotFound):
		return volume.ID{}, err
	case v.refused != nil:
		return volume.ID{}, v.refused
	}
	if err := r.check(ctx); err != nil {
		return volume.ID{}, err
	}
	defer c.Opener.Invalidate(be, id.Bucket)
	made, err := v.create(ctx)
	if err == nil {
		err = v.limited(ctx, backend.BucketInfo{Name: v.bucket, Region: be.StartRegion(), Owner: v.owner}, made)
	}
	return id, err
}

// notMade says that another call created the bucket.
const notMade = false

// bucketCreation is one CreateVolume of a bucket volume.
type bucketCreation struct {
	creator *Creator
	be      backend.Backend
	keys    credentials.Keys
	bucket  string
	owner   string // account id that must own it, if set in the class
	want    records.Tags
	// proof is the part of the proof of scope that needs the bucket; nil: none. refused is why it failed without the bucket.
	proof   proofs.BucketProof
	refused error
}

// found decides about a bucket that exists.
func (c *bucketCreation) found(ctx context.Context, b buckets.Bucket) error {
	have, err := c.settled(ctx, b.Client)
	if err != nil {
		return err
	}
	if len(have) > 0 || !c.be.AdoptUntaggedBuckets {
		err := decideBucket(have, c.want, c.bucket)
		if len(have) == 0 && err != nil {
			return fault.Errorf(fault.Exists, "%w; if a controller was stopped while it created this bucket on a service that drops tags, set adoptUntaggedBuckets: "+
				"true for %s, or remove the empty bucket", err, c.be.Name)
		}
		return err
	}
	empty, err := buckets.IsEmpty(ctx, b, "")
	if err != nil {
		return err
	}
	if !empty {
		return fault.Errorf(fault.Exists, "bucket %s exists without tags and is not empty: only an empty one is adopted", c.bucket)
	}
	klog.FromContext(ctx).Info("Adopting empty bucket without tags", "bucket", c.bucket, "backend", c.be.Name)
	return c.tag(ctx, b.Client, func(err error) error { return err })
}

// settled reads the bucket's tags, repeatedly for settleTime if there are none: on a service that drops tags at creation another
// controller may be about to tag the bucket.
func (c *bucketCreation) settled(ctx context.Context, client *s3.Client) (records.Tags, error) {
	until := time.Now().Add(settleTime)
	for {
		have, err := records.ReadTags(ctx, client, c.bucket)
		if err != nil || len(have) > 0 || c.be.AWS() || time.Now().After(until) {
			return have, err
		}
		if !conc.Sleep(ctx, settleEvery) {
			return nil, fault.Errorf(fault.Timeout, "waiting for the tags of bucket %s: %w", c.bucket, ctx.Err())
		}
	}
}

// create creates a bucket that did not exist a moment ago. made is false if another controller, for example, created it.
func (c *bucketCreation) create(ctx context.Context) (made bool, err error) {
	client, err := c.creator.Clients.S3(ctx, c.be, c.keys, "")
	if err != nil {
		return false, err
	}
	_, err = buckets.Create(ctx, client, c.be, c.bucket, c.want.Set())
	switch code := backend.ErrorCode(err); {
	case code == "BucketAlreadyOwnedByYou":
		return false, c.lost(ctx, client)
	case err != nil:
		err = backend.Classify(err, "creating bucket "+c.bucket+" on "+c.be.String())
		if !buckets.Indeterminate(err) {
			return false, err
		}
		if have, readErr := records.ReadTags(ctx, client, c.bucket); readErr == nil && decideBucket(have, c.want, c.bucket) == nil {
			return false, nil
		}
		return false, buckets.UnknownOutcome(ctx, err)
	}
	undo := func(err error) error { return c.undo(ctx, client, err) }
	reader := client
	if c.owner != "" {
		// CreateBucket has no expected owner. S3 refuses this request if another account owns the bucket.
		info := backend.BucketInfo{Name: c.bucket, Region: c.be.StartRegion(), Owner: c.owner}
		if reader, err = c.creator.Clients.Bucket(ctx, c.be, c.keys, info); err != nil {
			return true, undo(err)
		}
	}
	have, err := records.ReadTags(ctx, reader, c.bucket)
	if err != nil {
		if buckets.Indeterminate(err) || fault.Is(err, fault.NotFound) {
			return true, fault.Errorf(fault.Busy, "bucket %s was created, and reading its tags failed: %w", c.bucket, err)
		}
		if backend.IsUnsupported(err) {
			err = c.noTags(err)
		}
		return true, undo(err)
	}
	// Only a bucket that this call created is tagged afterwards. AWS keeps tags, and returns 200 for a bucket that the caller owns
	// already (us-east-1), so a bucket without tags is not one that this call created.
	if len(have) == 0 && !c.be.AWS() {
		return true, c.tag(ctx, client, undo)
	}
	return true, decideBucket(have, c.want, c.bucket)
}

// limited verifies that sessions for the volume can be limited to it. If not, it removes a bucket that this call created. Any other
// bucket may be a volume that is in use, so the error must not be final.
func (c *bucketCreation) limited(ctx context.Context, info backend.BucketInfo, made bool) error {
	err := c.refused
	if err == nil && c.proof != nil {
		err = c.proof(ctx, info)
	}
	switch {
	case err == nil || buckets.Indeterminate(err):
		return err
	case !made:
		return fault.Errorf(fault.Busy, "bucket %s exists for the volume and cannot be used yet: %w", c.bucket, err)
	}
	client, clientErr := c.creator.Clients.S3(ctx, c.be, c.keys, "")
	if clientErr != nil {
		return fault.Errorf(fault.Busy, "%w; removing the bucket %s: %w", err, c.bucket, clientErr)
	}
	return c.undo(ctx, client, err)
}

// undo removes the bucket that this call created, because of err. S3 deletes only empty buckets. If the bucket stays, the error must
// not be final, because the CO would never delete it.
func (c *bucketCreation) undo(ctx context.Context, client *s3.Client, err error) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), buckets.CleanupBound)
	defer cancel()
	if _, delErr := client.DeleteBucket(ctx, &s3.DeleteBucketInput{Bucket: &c.bucket}); delErr != nil && !backend.IsNotFound(delErr) {
		return fault.Errorf(fault.Busy, "%w; bucket %s, which was created for the volume, is left: %w", err, c.bucket, backend.Classify(delErr, "removing it"))
	}
	return err
}

// lost decides about a bucket that was created between the check and CreateBucket.
func (c *bucketCreation) lost(ctx context.Context, client *s3.Client) error {
	have, err := c.settled(ctx, client)
	switch {
	case err != nil:
		return err
	case len(have) == 0:
		return fault.Errorf(fault.Busy, "bucket %s was created by another client just now and is not tagged yet", c.bucket)
	}
	return decideBucket(have, c.want, c.bucket)
}

// tag tags a bucket that has no tags and reads them back. It calls undo for a bucket that cannot be tagged: without tags its owner
// would be unknown.
func (c *bucketCreation) tag(ctx context.Context, client *s3.Client, undo func(error) error) error {
	err := records.WriteTags(ctx, client, c.bucket, c.want)
	var have records.Tags
	if err == nil {
		have, err = records.ReadTags(ctx, client, c.bucket)
	}
	switch {
	case err == nil && maps.Equal(have.Ours(), c.want.Ours()):
		return nil
	case err != nil && buckets.Indeterminate(err):
		return fault.Errorf(fault.Busy, "bucket %s was created, but it is unknown whether it is tagged: %w", c.bucket, err)
	case err == nil && len(have) > 0:
		return decideBucket(have, c.want, c.bucket)
	}
	if err != nil {
		return undo(c.noTags(err))
	}
	return undo(fault.Errorf(fault.Precondition, "%s accepts bucket tags but does not store them, and they identify the owner of a bucket: set bucketName, so "+
		"that volumes are prefixes of a bucket", c.be))
}

// noTags is the error for a service without tags of buckets.
func (c *bucketCreation) noTags(err error) error {
	return fault.Errorf(fault.Precondition, "%s does not store bucket tags, which identify the owner of a bucket: set bucketName, so that volumes are prefixes "+
		"of a bucket: %w", c.be, err)
}

// NotBucketVolume refuses a bucket that is itself a volume, of any owner: volumes must not be nested. Another bucket cannot become
// one later, because bucket volumes are created with their bucket.
func (c *Creator) NotBucketVolume(ctx context.Context, b buckets.Bucket) error {
	err := c.Opener.Once(ctx, b, "its tags", buckets.Unlimited, func(ctx context.Context) error { return c.readNotBucketVolume(ctx, b) })
	if errors.Is(err, errTagsDenied) {
		return nil
	}
	return err
}

// errTagsDenied means that these credentials cannot read tags, so they create no bucket volumes. It is not cached, because others may.
var errTagsDenied = errors.New("reading tags is denied")

func (c *Creator) readNotBucketVolume(ctx context.Context, b buckets.Bucket) error {
	have, err := records.ReadTags(ctx, b.Client, b.Info.Name)
	switch fault.KindOf(err) {
	case fault.Denied:
		return errTagsDenied
	case fault.Unsupported:
		// A service without tags has no bucket volumes.
	case fault.NotFound:
		return c.noBucket(b, err)
	default:
		if err != nil {
			return err
		}
	}
	if mine := have.Ours(); len(mine) > 0 {
		return fault.Errorf(fault.Precondition, "parameters.bucketName: %s is itself volume %q of %s: volumes cannot be nested, choose another bucket", b,
			mine[records.TagVolume], mine.Owner())
	}
	return nil
}

// sameVolume reports whether tags are those of the volume, which may have been filled since.
func sameVolume(mine, want records.Tags) bool {
	if want[records.TagState] == string(records.StateFilling) && mine[records.TagState] == string(records.StateActive) {
		want = maps.Clone(want)
		want[records.TagState] = string(records.StateActive)
	}
	return maps.Equal(mine, want)
}

// decideBucket decides what the tags of an existing bucket mean for a CreateVolume with tags want; nil: it is the volume itself.
func decideBucket(have, want records.Tags, bucket string) error {
	mine := have.Ours()
	switch {
	case sameVolume(mine.Fixed(), want.Fixed()):
		return nil
	case len(mine) == 0:
		return fault.Errorf(fault.Exists, "bucket %s exists and is not tagged as a volume of this driver: it is not adopted; choose another bucketNamePrefix or "+
			"volume name", bucket)
	case mine[records.TagVolume] != want[records.TagVolume] || mine.Owner() != want.Owner():
		return fault.Errorf(fault.Exists, "bucket %s is tagged as volume %q of %s, not as volume %q of %s", bucket, mine[records.TagVolume], mine.Owner(),
			want[records.TagVolume], want.Owner())
	case mine[records.TagState] == string(records.StateDeleting):
		return fault.Errorf(fault.Busy, "%w", &DeletingError{want[records.TagVolume]})
	case mine[records.TagState] == string(records.StateDeleted):
		return fault.Errorf(fault.Exists, "bucket %s was retained when its volume was deleted (onDelete: %s): it is not reused; choose another volume name, or "+
			"remove the bucket", bucket, mine[records.TagOnDelete])
	}
	return fault.Errorf(fault.Exists, "volume %s exists with another name or other parameters", want[records.TagVolume])
}
