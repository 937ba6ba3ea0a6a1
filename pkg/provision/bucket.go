package provision

import (
	"context"
	"maps"
	"time"

	"github.com/aws/aws-sdk-go-v2/service/s3"
	"github.com/aws/aws-sdk-go-v2/service/s3/types"
	"k8s.io/klog/v2"

	"github.com/s3-csi/s3-csi-driver/pkg/backend"
	"github.com/s3-csi/s3-csi-driver/pkg/credentials"
	"github.com/s3-csi/s3-csi-driver/pkg/fault"
	"github.com/s3-csi/s3-csi-driver/pkg/volume"
)

const (
	// settleTime is how long a bucket may be without the tags that another controller is about to give it.
	settleTime  = 3 * time.Second
	settleEvery = 250 * time.Millisecond
)

// createBucket makes a bucket volume. A bucket that is there already is the volume if it has exactly the volume's tags, and
// somebody else's in every other case.
func (p *Provisioner) createBucket(ctx context.Context, be backend.Backend, who identity, keys credentials.Keys, r CreateRequest) (volume.ID, error) {
	id := r.Parameters.ID(r.Name, 1)
	b := bucketCreation{p: p, be: be, keys: keys, bucket: id.Bucket, owner: r.Parameters.ExpectedBucketOwner, want: p.volumeTags(r, id)}
	if scopeRequired(be, r.Parameters) {
		b.proof, b.refused = p.prepareProof(ctx, be, who, id.Bucket, r.Parameters)
	}
	release, err := p.locks.Lock(ctx, "bucket "+be.Name+" "+id.Bucket)
	if err != nil {
		return volume.ID{}, fault.Errorf(fault.Busy, "bucket %s is being worked on: %w", id.Bucket, err)
	}
	defer release()
	// A bucket that another process has made or removed just now must be seen.
	p.forget(be, id.Bucket)
	pl, err := p.place(ctx, be, keys, id.Bucket, r.Parameters.ExpectedBucketOwner)
	switch {
	case err == nil:
		if err = b.found(ctx, pl); err == nil {
			err = b.limited(ctx, pl.info, false)
		}
		return id, err
	case !fault.Is(err, fault.NotFound):
		return volume.ID{}, err
	case b.refused != nil:
		return volume.ID{}, b.refused
	}
	defer p.forget(be, id.Bucket)
	made, err := b.create(ctx)
	if err == nil {
		err = b.limited(ctx, backend.BucketInfo{Name: b.bucket, Region: be.StartRegion(), Owner: b.owner}, made)
	}
	return id, err
}

// bucketCreation is one CreateVolume of a bucket volume.
type bucketCreation struct {
	p      *Provisioner
	be     backend.Backend
	keys   credentials.Keys
	bucket string
	owner  string // account id that must own it, where the author said so
	want   tags
	// proof is that sessions can be limited, which needs the bucket; nil: none is needed. refused is why they cannot, where that
	// is known without the bucket.
	proof   bucketProof
	refused error
}

// found decides about a bucket that is there.
func (b *bucketCreation) found(ctx context.Context, pl place) error {
	have, err := b.settled(ctx, pl.client)
	if err != nil {
		return err
	}
	if len(have) > 0 || !b.be.AdoptUntaggedBuckets {
		err := decideBucket(have, b.want, b.bucket)
		if len(have) == 0 && err != nil {
			return fault.Errorf(fault.Exists, "%w. If a controller was stopped while it made this bucket on a service that drops tags, set adoptUntaggedBuckets: true for %s, or remove the empty bucket", err, b.be.Name)
		}
		return err
	}
	empty, err := isEmpty(ctx, pl, "")
	if err != nil {
		return err
	}
	if !empty {
		return fault.Errorf(fault.Exists, "the bucket %s is there without tags and is not empty: only an empty one is adopted", b.bucket)
	}
	klog.FromContext(ctx).Info("Adopting an empty bucket without tags (adoptUntaggedBuckets)", "bucket", b.bucket, "backend", b.be.Name)
	return b.tag(ctx, pl.client, func(err error) error { return err })
}

// settled reads the bucket's tags, and again for a moment where there are none: on a service that drops tags at creation the
// bucket may be one that another controller is just making.
func (b *bucketCreation) settled(ctx context.Context, client *s3.Client) (tags, error) {
	until := time.Now().Add(settleTime)
	for {
		have, err := readTags(ctx, client, b.bucket)
		if err != nil || len(have) > 0 || b.be.AWS() || time.Now().After(until) {
			return have, err
		}
		if !sleep(ctx, settleEvery) {
			return nil, fault.Errorf(fault.Timeout, "waiting for the tags of bucket %s: %w", b.bucket, ctx.Err())
		}
	}
}

// create makes a bucket where none was a moment ago. made is false where the volume's bucket turned out to be somebody else's
// work, another controller's for example.
func (b *bucketCreation) create(ctx context.Context) (made bool, err error) {
	client, err := b.p.clients.S3(ctx, b.be, b.keys, "")
	if err != nil {
		return false, err
	}
	err = b.send(ctx, client)
	switch code := backend.ErrorCode(err); {
	case code == "BucketAlreadyOwnedByYou":
		return false, b.lost(ctx, client)
	case err != nil:
		err = backend.Classify(err, "creating bucket "+b.bucket+" on "+b.be.String())
		if !indeterminate(err) {
			return false, err
		}
		if have, readErr := readTags(ctx, client, b.bucket); readErr == nil && decideBucket(have, b.want, b.bucket) == nil {
			return false, nil
		}
		return false, unknownOutcome(ctx, err)
	}
	undo := func(err error) error { return b.undo(ctx, client, err) }
	reader := client
	if b.owner != "" {
		// CreateBucket cannot be told whose the bucket is to be; S3 refuses this where it came to be another's.
		info := backend.BucketInfo{Name: b.bucket, Region: b.be.StartRegion(), Owner: b.owner}
		if reader, err = b.p.clients.Bucket(ctx, b.be, b.keys, info); err != nil {
			return true, undo(err)
		}
	}
	have, err := readTags(ctx, reader, b.bucket)
	if err != nil {
		if indeterminate(err) || fault.Is(err, fault.NotFound) {
			return true, fault.Errorf(fault.Busy, "the bucket %s was made, and reading its tags back failed: %w", b.bucket, err)
		}
		return true, undo(err)
	}
	// Only a bucket that this very call made is tagged afterwards. On AWS, which keeps tags, and which answers 200 for a bucket
	// that one owns already (us-east-1), a bucket without them is not that one.
	if len(have) == 0 && !b.be.AWS() {
		return true, b.tag(ctx, client, undo)
	}
	return true, decideBucket(have, b.want, b.bucket)
}

// limited makes sure that sessions for the volume can be limited to it. A bucket that this very call made is removed again where they
// cannot; behind any other one may be a volume that somebody has already, so that the error must not be final.
func (b *bucketCreation) limited(ctx context.Context, info backend.BucketInfo, made bool) error {
	err := b.refused
	if err == nil && b.proof != nil {
		err = b.proof(ctx, info)
	}
	switch {
	case err == nil || indeterminate(err):
		return err
	case !made:
		return fault.Errorf(fault.Busy, "the bucket %s is there for the volume, and cannot be used yet: %w", b.bucket, err)
	}
	client, clientErr := b.p.clients.S3(ctx, b.be, b.keys, "")
	if clientErr != nil {
		return fault.Errorf(fault.Busy, "%w; removing the bucket %s: %w", err, b.bucket, clientErr)
	}
	return b.undo(ctx, client, err)
}

// undo removes the bucket that this call made, because of err. S3 deletes no bucket that holds anything. A bucket that stays
// must not be behind a final error: nobody would ask for its deletion.
func (b *bucketCreation) undo(ctx context.Context, client *s3.Client, err error) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), cleanupBound)
	defer cancel()
	if _, delErr := client.DeleteBucket(ctx, &s3.DeleteBucketInput{Bucket: &b.bucket}); delErr != nil && !backend.IsNotFound(delErr) {
		return fault.Errorf(fault.Busy, "%w; the bucket %s, which was made for the volume, is left: %w", err, b.bucket, backend.Classify(delErr, "removing it"))
	}
	return err
}

// lost is for a bucket that came to be between our look and our CreateBucket.
func (b *bucketCreation) lost(ctx context.Context, client *s3.Client) error {
	have, err := b.settled(ctx, client)
	switch {
	case err != nil:
		return err
	case len(have) == 0:
		return fault.Errorf(fault.Busy, "the bucket %s was made by somebody else just now and is not tagged yet", b.bucket)
	}
	return decideBucket(have, b.want, b.bucket)
}

// send sends CreateBucket, once more without what the service does not take.
func (b *bucketCreation) send(ctx context.Context, client *s3.Client) error {
	in := &s3.CreateBucketInput{Bucket: &b.bucket, CreateBucketConfiguration: &types.CreateBucketConfiguration{Tags: b.want.set()}}
	region := b.be.StartRegion()
	if region != "us-east-1" { // which is the absence of a location
		in.CreateBucketConfiguration.LocationConstraint = types.BucketLocationConstraint(region)
	}
	var err error
	for range 3 {
		_, err = client.CreateBucket(ctx, in, once)
		if b.be.AWS() {
			return err
		}
		switch code := backend.ErrorCode(err); {
		case code == "InvalidLocationConstraint" && in.CreateBucketConfiguration.LocationConstraint != "":
			in.CreateBucketConfiguration.LocationConstraint = ""
		case in.CreateBucketConfiguration.Tags != nil && (backend.IsNotImplemented(err) || code == "MalformedXML" || code == "InvalidArgument" || code == "InvalidRequest"):
			in.CreateBucketConfiguration.Tags = nil
		default:
			return err
		}
		if c := in.CreateBucketConfiguration; c.Tags == nil && c.LocationConstraint == "" {
			in = &s3.CreateBucketInput{Bucket: &b.bucket, CreateBucketConfiguration: nil}
			_, err = client.CreateBucket(ctx, in, once)
			return err
		}
	}
	return err
}

// tag tags a bucket that has no tags and reads them back. undo is for a bucket that cannot be tagged: without tags nobody could
// know later whose it is.
func (b *bucketCreation) tag(ctx context.Context, client *s3.Client, undo func(error) error) error {
	err := writeTags(ctx, client, b.bucket, b.want)
	var have tags
	if err == nil {
		have, err = readTags(ctx, client, b.bucket)
	}
	switch {
	case err == nil && maps.Equal(have.ours(), b.want):
		return nil
	case err != nil && indeterminate(err):
		return fault.Errorf(fault.Busy, "the bucket %s is made but not known to be tagged: %w", b.bucket, err)
	case err == nil && len(have) > 0:
		return decideBucket(have, b.want, b.bucket)
	}
	if err != nil {
		return undo(fault.Errorf(fault.Precondition, "%s keeps no bucket tags, which prove whose a bucket is: use bucketName, so that volumes are prefixes of a bucket: %w", b.be, err))
	}
	return undo(fault.Errorf(fault.Precondition, "%s accepts bucket tags and loses them, and they prove whose a bucket is: use bucketName, so that volumes are prefixes of a bucket", b.be))
}

// notBucketVolume refuses a bucket that is itself a volume, of any owner: volumes must not lie in each other. A bucket that is
// none will not become one, because bucket volumes are made with their bucket.
func (p *Provisioner) notBucketVolume(ctx context.Context, pl place) error {
	shared := false
	p.known.see(pl.id(), func(f *facts) { shared = f.shared })
	if shared {
		return nil
	}
	have, err := readTags(ctx, pl.client, pl.info.Name)
	switch fault.KindOf(err) {
	case fault.Denied:
		// Who may not read a bucket's tags makes no bucket volumes. Others may, so that nothing is remembered.
		return nil
	case fault.Unsupported:
		// Where there are no tags there are no bucket volumes.
	case fault.NotFound:
		return p.noBucket(pl, err)
	default:
		if err != nil {
			return err
		}
	}
	if mine := have.ours(); len(mine) > 0 {
		return fault.Errorf(fault.Precondition, "parameters.bucketName: %s is itself volume %q of %s: volumes cannot be nested, choose another bucket", pl, mine[tagVolume], mine.owner())
	}
	p.known.see(pl.id(), func(f *facts) { f.shared = true })
	return nil
}
