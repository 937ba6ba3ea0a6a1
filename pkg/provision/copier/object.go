package copier

import (
	"context"
	"errors"
	"fmt"
	"net/url"

	"github.com/aws/aws-sdk-go-v2/aws"
	"github.com/aws/aws-sdk-go-v2/service/s3"
	"github.com/aws/aws-sdk-go-v2/service/s3/types"
	"golang.org/x/sync/errgroup"
	"k8s.io/klog/v2"

	"github.com/s3-csi/s3-csi-driver/pkg/backend"
	"github.com/s3-csi/s3-csi-driver/pkg/fault"
	"github.com/s3-csi/s3-csi-driver/pkg/provision/buckets"
)

// maxChanges is how often an object is tried that changes all the time.
const maxChanges = 8

// What copies are sent without, because the service refuses it.
const (
	bareTarget int32 = iota + 1 // the condition on the target
	bareSource                  // also that on the source, whose ETag is compared afterwards
)

// conditions returns the conditions of a copy.
func conditions(o Object, bare int32) (target, source *string) {
	if bare < bareTarget {
		target = aws.String("*")
	}
	if bare < bareSource {
		source = backend.Optional(o.ETag)
	}
	return target, source
}

// errGone means that the source has no such object any more.
var errGone = errors.New("the object was deleted")

// copyObject copies an object. An entry without a key means that it was deleted meanwhile, if a new listing agrees.
func (r *run) copyObject(ctx context.Context, o Object) (e entry, changed bool, err error) {
	bare, absent := r.bare.Load(), false
	for attempt := 0; attempt < maxChanges; attempt++ {
		etag, err := r.copyOnce(ctx, o, bare)
		switch {
		case err == nil:
			if bare > r.bare.Load() {
				r.bare.Store(bare)
			}
			return entry{Key: o.Key, Size: o.Size, ETag: etag, SourceETag: o.ETag, Version: o.Version}, changed, nil
		case errors.Is(err, errSlow):
			attempt-- // the next one is smaller, down to the smallest
			continue
		case backend.ErrorCode(err) == "DirectoryObjectContainsData" && o.Size == 0:
			// versitygw does not copy objects whose keys end in "/".
			if etag, err = r.putEmpty(ctx, o, bare); err == nil {
				return entry{Key: o.Key, ETag: etag, SourceETag: o.ETag, Version: o.Version}, changed, nil
			}
			if !backend.IsPreconditionFailed(err) {
				return entry{}, changed, r.errRefused(o, err)
			}
		case bare < bareSource && backend.IsUnsupported(err):
			bare++
			continue
		case r.inParts(o) && backend.IsUnsupported(err):
			r.whole.Store(true)
			bare = r.bare.Load()
			continue
		case errors.Is(err, errGone), isAbsent(err):
			have, headErr := r.headObject(ctx, r.from, o)
			replaced := headErr == nil && o.ETag != "" && have.ETag != o.ETag
			switch {
			case o.Fixed && (replaced || errors.Is(headErr, errGone)):
				return entry{}, false, r.errLost(o)
			case errors.Is(headErr, errGone):
				return entry{}, true, nil
			case headErr != nil:
				return entry{}, changed, r.errRefused(o, headErr)
			case absent:
				return entry{}, changed, fault.Errorf(fault.Precondition,
					"copying %q of %s: the service says that there is no such object, but HEAD finds it: it does not read the names of sources as S3 does; "+
						"give the object a name without special characters: %w", o.Key, r.from, backend.Classify(err, "copying"))
			}
			o, absent, changed = have, true, changed || replaced // it may have come back
			continue
		case !errors.Is(err, errOther) && !backend.IsPreconditionFailed(err):
			return entry{}, changed, r.errRefused(o, err)
		}
		// Either the target has the object, copied by another process or by a request whose answer was lost, or the source changed.
		have, err := r.headObject(ctx, r.target, Object{Key: o.Key})
		if err == nil && (!o.Fixed || have.Size == o.Size) {
			return entry{Key: o.Key, Size: have.Size, ETag: have.ETag, Version: o.Version}, changed || have.Size != o.Size, nil
		}
		if err != nil && !errors.Is(err, errGone) {
			return entry{}, changed, r.errRefused(o, err)
		}
		if o.Fixed {
			return entry{}, false, r.errLost(o)
		}
		changed = true
		if o, err = r.headObject(ctx, r.from, o); errors.Is(err, errGone) {
			return entry{}, true, nil
		} else if err != nil {
			return entry{}, changed, r.errRefused(o, err)
		}
	}
	return entry{}, changed, fault.Errorf(fault.Busy, "copying %q of %s: it changes all the time", o.Key, r.from)
}

// isAbsent reports whether a response says that the source of a copy does not exist.
func isAbsent(err error) bool {
	return backend.IsNotFound(err) && !backend.IsNoSuchBucket(err) && backend.ErrorCode(err) != "NoSuchUpload"
}

// inParts reports whether an object is copied in parts.
func (r *run) inParts(o Object) bool { return o.Size > r.requests.limit.Load() && !r.whole.Load() }

// errOther means that the source was replaced while it was copied without a condition. The copy is removed.
var errOther = errors.New("the object was replaced")

// copyOnce copies an object if it is unchanged and the target has none.
func (r *run) copyOnce(ctx context.Context, o Object, bare int32) (etag string, err error) {
	if r.inParts(o) {
		etag, err = r.copyParts(ctx, o, bare)
	} else {
		etag, err = r.copyWhole(ctx, o, bare)
	}
	if err == nil && etag == "" {
		// The response proves nothing.
		have, err := r.headObject(ctx, r.target, Object{Key: o.Key})
		if errors.Is(err, errGone) || err == nil && have.Size != o.Size {
			return "", fault.Errorf(fault.Unavailable, "the service reported success without an ETag, and has no copy of %d bytes", o.Size)
		}
		if err != nil {
			return "", err
		}
		etag = have.ETag
	}
	if err != nil || bare < bareSource || o.Version != "" || o.ETag == "" {
		return etag, err
	}
	switch have, err := r.headObject(ctx, r.from, o); {
	case err != nil && !errors.Is(err, errGone):
		return "", err
	case err == nil && have.ETag != o.ETag:
		if err := r.dropObject(ctx, o.Key); err != nil {
			return "", err
		}
		return "", errOther
	}
	return etag, nil
}

func (r *run) copyWhole(ctx context.Context, o Object, bare int32) (etag string, err error) {
	target, source := conditions(o, bare)
	smaller := o.Size
	if r.whole.Load() {
		smaller = 0
	}
	out, err := call(ctx, r.requests.copyOf(smaller), r.target.Bucket.Client.CopyObject, &s3.CopyObjectInput{
		Bucket: r.target.Bucket.Name(), Key: r.target.key(o.Key), CopySource: r.from.copySource(o), CopySourceIfMatch: source,
		ExpectedSourceBucketOwner: backend.Optional(r.from.Bucket.Info.Owner), IfNoneMatch: target,
	})
	if err == nil && out.CopyObjectResult != nil {
		etag = aws.ToString(out.CopyObjectResult.ETag)
	}
	return etag, err
}

// dropObject removes an object from the target.
func (r *run) dropObject(ctx context.Context, key string) error {
	_, err := call(ctx, r.requests.sendBounded, r.target.Bucket.Client.DeleteObject, &s3.DeleteObjectInput{
		Bucket: r.target.Bucket.Name(), Key: r.target.key(key),
	})
	return backend.Classify(err, "removing "+r.target.Prefix+key+" of "+r.target.Bucket.String())
}

// copyParts copies a large object in parts, with its metadata and tags.
func (r *run) copyParts(ctx context.Context, o Object, bare int32) (etag string, err error) {
	create, err := r.uploadLike(ctx, o, bare)
	if err != nil {
		return "", err
	}
	client := r.target.Bucket.Client
	up, err := call(ctx, r.requests.sendBounded, client.CreateMultipartUpload, create)
	if err != nil {
		return "", err
	}
	parts, err := r.copyRanges(ctx, o, bare, up)
	var out *s3.CompleteMultipartUploadOutput
	if err == nil {
		target, _ := conditions(o, bare)
		out, err = call(ctx, r.requests.copyOf(0), client.CompleteMultipartUpload, &s3.CompleteMultipartUploadInput{
			Bucket: create.Bucket, Key: create.Key, UploadId: up.UploadId, IfNoneMatch: target, MultipartUpload: &types.CompletedMultipartUpload{Parts: parts},
		})
	}
	switch {
	case err == nil:
		return aws.ToString(out.ETag), nil
	case backend.ErrorCode(err) == "NoSuchUpload":
		// An earlier attempt completed it, and its answer was lost, or another process aborted it. The next run finds out.
		err = fault.Errorf(fault.Busy, "the outcome of the upload is unknown: %w", err)
	}
	r.abortUpload(ctx, *create.Key, aws.ToString(up.UploadId))
	return "", err
}

// putEmpty writes an object without content that is like one of the source.
func (r *run) putEmpty(ctx context.Context, o Object, bare int32) (etag string, err error) {
	like, err := r.uploadLike(ctx, o, bare)
	if err != nil {
		return "", err
	}
	target, _ := conditions(o, bare)
	out, err := call(ctx, r.requests.sendBounded, r.target.Bucket.Client.PutObject, &s3.PutObjectInput{
		Bucket: like.Bucket, Key: like.Key, Metadata: like.Metadata, ContentType: like.ContentType, Tagging: like.Tagging, IfNoneMatch: target,
	})
	if err != nil {
		return "", err
	}
	return aws.ToString(out.ETag), nil
}

// copyRanges copies the parts of an object to an upload.
func (r *run) copyRanges(ctx context.Context, o Object, bare int32, up *s3.CreateMultipartUploadOutput) ([]types.CompletedPart, error) {
	least := max(minPart, (o.Size+maxParts-1)/maxParts)
	length := max(least, min(r.requests.limit.Load(), 512<<20))
	smaller := length
	if length == least {
		smaller = 0
	}
	_, source := conditions(o, bare)
	parts := make([]types.CompletedPart, (o.Size+length-1)/length)
	g, ctx := errgroup.WithContext(ctx)
	g.SetLimit(r.workers)
	for i := range parts {
		start := int64(i) * length
		end := min(start+length, o.Size) - 1
		number := aws.Int32(int32(i + 1))
		g.Go(func() error {
			return r.requests.copyOf(smaller)(ctx, func(ctx context.Context) error {
				out, err := r.target.Bucket.Client.UploadPartCopy(ctx, &s3.UploadPartCopyInput{
					Bucket: r.target.Bucket.Name(), Key: r.target.key(o.Key), UploadId: up.UploadId, PartNumber: number,
					CopySource: r.from.copySource(o), CopySourceIfMatch: source, CopySourceRange: aws.String(fmt.Sprintf("bytes=%d-%d", start, end)),
					ExpectedSourceBucketOwner: backend.Optional(r.from.Bucket.Info.Owner),
				}, buckets.NoRetry)
				if err != nil {
					return err
				}
				if out.CopyPartResult == nil || aws.ToString(out.CopyPartResult.ETag) == "" {
					return fault.Errorf(fault.Unavailable, "the service reported that it has copied part %d, without an ETag", *number)
				}
				parts[i] = types.CompletedPart{PartNumber: number, ETag: out.CopyPartResult.ETag}
				return nil
			})
		})
	}
	return parts, g.Wait()
}

// uploadLike returns an upload with the metadata and tags of an object, which a copy in one request would keep by itself.
func (r *run) uploadLike(ctx context.Context, o Object, bare int32) (*s3.CreateMultipartUploadInput, error) {
	bucket, key, version := r.from.Bucket, r.from.key(o.Key), backend.Optional(o.Version)
	_, source := conditions(o, bare)
	head, err := call(ctx, r.requests.sendBounded, bucket.Client.HeadObject, &s3.HeadObjectInput{
		Bucket: bucket.Name(), Key: key, VersionId: version, IfMatch: source,
	})
	if err != nil {
		return nil, err
	}
	in := &s3.CreateMultipartUploadInput{
		Bucket: r.target.Bucket.Name(), Key: r.target.key(o.Key), Metadata: head.Metadata, CacheControl: head.CacheControl,
		ContentDisposition: head.ContentDisposition, ContentEncoding: head.ContentEncoding, ContentLanguage: head.ContentLanguage, ContentType: head.ContentType,
	}
	if aws.ToInt32(head.TagCount) == 0 {
		return in, nil
	}
	tags, err := call(ctx, r.requests.sendBounded, bucket.Client.GetObjectTagging, &s3.GetObjectTaggingInput{
		Bucket: bucket.Name(), Key: key, VersionId: version,
	})
	if err != nil {
		return nil, err
	}
	set := url.Values{}
	for _, t := range tags.TagSet {
		set.Set(aws.ToString(t.Key), aws.ToString(t.Value))
	}
	in.Tagging = backend.Optional(set.Encode())
	return in, nil
}

// abortUpload removes an upload that was not completed. What it leaves is removed at the end of the copy.
func (r *run) abortUpload(ctx context.Context, key, id string) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), buckets.CleanupBound)
	defer cancel()
	b := r.target.Bucket
	_, err := b.Client.AbortMultipartUpload(ctx, &s3.AbortMultipartUploadInput{Bucket: b.Name(), Key: &key, UploadId: &id}, buckets.NoRetry)
	if err != nil && !backend.IsNotFound(err) {
		klog.FromContext(ctx).Error(err, "Aborting upload failed", "bucket", b.Info.Name, "key", key)
	}
}

// headObject returns an object as it is now, or errGone.
func (r *run) headObject(ctx context.Context, p Place, o Object) (Object, error) {
	out, err := call(ctx, r.requests.sendBounded, p.Bucket.Client.HeadObject, &s3.HeadObjectInput{
		Bucket: p.Bucket.Name(), Key: p.key(o.Key), VersionId: backend.Optional(o.Version),
	})
	switch {
	case backend.IsNotFound(err):
		return o, errGone
	case err != nil:
		return o, err
	case out.ContentLength == nil:
		return o, fault.Errorf(fault.Unavailable, "the service's response to HEAD of %q has no Content-Length", p.Prefix+o.Key)
	}
	o.ETag, o.Size = aws.ToString(out.ETag), aws.ToInt64(out.ContentLength)
	return o, nil
}

// errLost is the error for an object that must be as it was, and is not.
func (r *run) errLost(o Object) error {
	if o.Version == "" {
		return fault.Errorf(fault.Precondition, "%q of %s is not as the manifest of the snapshot says: another program deleted or changed it", o.Key,
			r.from)
	}
	return fault.Errorf(fault.Precondition, "version %s of %q of %s was deleted or replaced before it was copied: a lifecycle rule or another program must "+
		"keep old versions until the copy is finished",
		o.Version, o.Key, r.from)
}

// errRefused is the error for an object that cannot be copied. It names the object.
func (r *run) errRefused(o Object, err error) error {
	what := fmt.Sprintf("copying %q of %s", o.Key, r.from)
	if o.Size > r.requests.limit.Load() && backend.IsUnsupported(err) {
		return fault.Errorf(fault.Unsupported, "%w; the service copies its %d bytes neither in parts (UploadPartCopy) nor at once (CopyObject)",
			backend.Classify(err, what), o.Size)
	}
	switch backend.ErrorCode(err) {
	case "InvalidObjectState":
		return fault.Errorf(fault.Precondition, "%w; it is archived: restore it, or move it out of the volume", backend.Classify(err, what))
	case "InvalidRequest":
		return fault.Errorf(fault.Precondition, "%w; the driver cannot copy objects that are encrypted with a key of the client (SSE-C)", backend.Classify(err, what))
	}
	return backend.Classify(err, what)
}
