package copier

import (
	"context"
	"errors"
	"fmt"
	"net/url"
	"sync/atomic"

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

// mover copies single objects of a task.
type mover struct {
	*requests
	// bare is what copies are sent without, because the service refuses it.
	bare atomic.Int32
	// whole is set if the service does not copy parts of objects.
	whole atomic.Bool
}

// What copies are sent without.
const (
	bareTarget int32 = iota + 1 // the condition on the target
	bareSource                  // also that on the source, whose ETag is compared afterwards
)

// prove tests whether the service honours conditions on the target: it copies an object of the target onto itself, unless that is large.
func (r *mover) prove(ctx context.Context, e entry) (proven, honoured bool) {
	if e.Size > r.limit.Load() {
		return false, false
	}
	err := r.copying(ctx, 0, func(ctx context.Context) error {
		_, err := r.Target.Bucket.Client.CopyObject(ctx, &s3.CopyObjectInput{
			Bucket: r.Target.Bucket.Name(), Key: aws.String(r.Target.Prefix + e.Key), CopySource: copySource(r.Target, Object{Key: e.Key}), IfNoneMatch: aws.String("*"),
		}, buckets.NoRetry)
		return err
	})
	return true, backend.IsPreconditionFailed(err)
}

// errGone means that the source has no such object any more.
var errGone = errors.New("the object was deleted")

// copyObject copies an object. An entry without a key means that it was deleted meanwhile, if a new listing agrees.
func (r *mover) copyObject(ctx context.Context, o Object) (e entry, changed bool, err error) {
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
				return entry{}, changed, r.refused(o, err)
			}
		case bare < bareSource && backend.IsUnsupported(err):
			bare++
			continue
		case r.inParts(o) && backend.IsUnsupported(err):
			r.whole.Store(true)
			bare = r.bare.Load()
			continue
		case errors.Is(err, errGone), isAbsent(err):
			have, headErr := r.head(ctx, r.Source.Place(), o)
			replaced := headErr == nil && o.ETag != "" && have.ETag != o.ETag
			switch {
			case o.Fixed && (replaced || errors.Is(headErr, errGone)):
				return entry{}, false, r.lost(o)
			case errors.Is(headErr, errGone):
				return entry{}, true, nil
			case headErr != nil:
				return entry{}, changed, r.refused(o, headErr)
			case absent:
				return entry{}, changed, fault.Errorf(fault.Precondition,
					"copying %q of %s: the service says that there is no such object, but HEAD finds it: it does not read the names of sources as S3 does; "+
						"give the object a name without special characters: %w", o.Key, r.Source.Place(), backend.Classify(err, "copying"))
			}
			o, absent, changed = have, true, changed || replaced // it may have come back
			continue
		case !errors.Is(err, errOther) && !backend.IsPreconditionFailed(err):
			return entry{}, changed, r.refused(o, err)
		}
		// Either the target has the object, copied by another process or by a request whose answer was lost, or the source changed.
		have, err := r.head(ctx, r.Target, Object{Key: o.Key})
		if err == nil && (!o.Fixed || have.Size == o.Size) {
			return entry{Key: o.Key, Size: have.Size, ETag: have.ETag, Version: o.Version}, changed || have.Size != o.Size, nil
		}
		if err != nil && !errors.Is(err, errGone) {
			return entry{}, changed, r.refused(o, err)
		}
		if o.Fixed {
			return entry{}, false, r.lost(o)
		}
		changed = true
		if o, err = r.head(ctx, r.Source.Place(), o); errors.Is(err, errGone) {
			return entry{}, true, nil
		} else if err != nil {
			return entry{}, changed, r.refused(o, err)
		}
	}
	return entry{}, changed, fault.Errorf(fault.Busy, "copying %q of %s: it changes all the time", o.Key, r.Source.Place())
}

// isAbsent reports whether a response says that the source of a copy does not exist.
func isAbsent(err error) bool {
	return backend.IsNotFound(err) && !backend.IsNoSuchBucket(err) && backend.ErrorCode(err) != "NoSuchUpload"
}

// inParts reports whether an object is copied in parts.
func (r *mover) inParts(o Object) bool { return o.Size > r.limit.Load() && !r.whole.Load() }

// errOther means that the source was replaced while it was copied without a condition. The copy is removed.
var errOther = errors.New("the object was replaced")

// copyOnce copies an object if it is unchanged and the target has none.
func (r *mover) copyOnce(ctx context.Context, o Object, bare int32) (etag string, err error) {
	if r.inParts(o) {
		etag, err = r.copyParts(ctx, o, bare)
	} else {
		etag, err = r.copyWhole(ctx, o, bare)
	}
	if err == nil && etag == "" {
		// The response proves nothing.
		have, err := r.head(ctx, r.Target, Object{Key: o.Key})
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
	switch have, err := r.head(ctx, r.Source.Place(), o); {
	case err != nil && !errors.Is(err, errGone):
		return "", err
	case err == nil && have.ETag != o.ETag:
		if err := r.drop(ctx, o.Key); err != nil {
			return "", err
		}
		return "", errOther
	}
	return etag, nil
}

func (r *mover) copyWhole(ctx context.Context, o Object, bare int32) (etag string, err error) {
	in := &s3.CopyObjectInput{
		Bucket: r.Target.Bucket.Name(), Key: aws.String(r.Target.Prefix + o.Key), CopySource: r.copySource(o), CopySourceIfMatch: sourceCondition(o, bare),
		ExpectedSourceBucketOwner: backend.Optional(r.Source.Place().Bucket.Info.Owner), IfNoneMatch: targetCondition(bare),
	}
	smaller := o.Size
	if r.whole.Load() {
		smaller = 0
	}
	err = r.copying(ctx, smaller, func(ctx context.Context) error {
		out, err := r.Target.Bucket.Client.CopyObject(ctx, in, buckets.NoRetry)
		if err == nil && out.CopyObjectResult != nil {
			etag = aws.ToString(out.CopyObjectResult.ETag)
		}
		return err
	})
	return etag, err
}

func targetCondition(bare int32) *string {
	if bare >= bareTarget {
		return nil
	}
	return aws.String("*")
}

func sourceCondition(o Object, bare int32) *string {
	if bare >= bareSource {
		return nil
	}
	return backend.Optional(o.ETag)
}

// drop removes an object from the target.
func (r *mover) drop(ctx context.Context, key string) error {
	err := r.bounded(ctx, func(ctx context.Context) error {
		_, err := r.Target.Bucket.Client.DeleteObject(ctx, &s3.DeleteObjectInput{Bucket: r.Target.Bucket.Name(), Key: aws.String(r.Target.Prefix + key)},
			buckets.NoRetry)
		return err
	})
	return backend.Classify(err, "removing "+r.Target.Prefix+key+" of "+r.Target.Bucket.String())
}

// copyParts copies a large object in parts, with its metadata and tags.
func (r *mover) copyParts(ctx context.Context, o Object, bare int32) (etag string, err error) {
	create, err := r.uploadLike(ctx, o, bare)
	if err != nil {
		return "", err
	}
	var up *s3.CreateMultipartUploadOutput
	err = r.bounded(ctx, func(ctx context.Context) (err error) {
		up, err = r.Target.Bucket.Client.CreateMultipartUpload(ctx, create, buckets.NoRetry)
		return err
	})
	if err != nil {
		return "", err
	}
	done := false
	defer func() {
		if !done {
			r.abort(ctx, *create.Key, aws.ToString(up.UploadId))
		}
	}()
	parts, err := r.parts(ctx, o, bare, create.Key, up.UploadId)
	var out *s3.CompleteMultipartUploadOutput
	if err == nil {
		err = r.copying(ctx, 0, func(ctx context.Context) (err error) {
			out, err = r.Target.Bucket.Client.CompleteMultipartUpload(ctx, &s3.CompleteMultipartUploadInput{
				Bucket: create.Bucket, Key: create.Key, UploadId: up.UploadId, IfNoneMatch: targetCondition(bare),
				MultipartUpload: &types.CompletedMultipartUpload{Parts: parts},
			}, buckets.NoRetry)
			return err
		})
	}
	if backend.ErrorCode(err) == "NoSuchUpload" {
		// An earlier attempt completed it, and its answer was lost, or another process aborted it. The next run finds out.
		return "", fault.Errorf(fault.Busy, "the outcome of the upload is unknown: %w", err)
	}
	if err != nil {
		return "", err
	}
	done = true
	return aws.ToString(out.ETag), nil
}

// putEmpty writes an object without content that is like one of the source.
func (r *mover) putEmpty(ctx context.Context, o Object, bare int32) (etag string, err error) {
	like, err := r.uploadLike(ctx, o, bare)
	if err != nil {
		return "", err
	}
	in := &s3.PutObjectInput{Bucket: like.Bucket, Key: like.Key, Metadata: like.Metadata, ContentType: like.ContentType, Tagging: like.Tagging,
		IfNoneMatch: targetCondition(bare)}
	err = r.bounded(ctx, func(ctx context.Context) error {
		out, err := r.Target.Bucket.Client.PutObject(ctx, in, buckets.NoRetry)
		if err == nil {
			etag = aws.ToString(out.ETag)
		}
		return err
	})
	return etag, err
}

// parts copies the parts of an object.
func (r *mover) parts(ctx context.Context, o Object, bare int32, key, upload *string) ([]types.CompletedPart, error) {
	least := max(minPart, (o.Size+maxParts-1)/maxParts)
	length := max(least, min(r.limit.Load(), 512<<20))
	smaller := length
	if length == least {
		smaller = 0
	}
	count := int((o.Size + length - 1) / length)
	parts := make([]types.CompletedPart, count)
	g, ctx := errgroup.WithContext(ctx)
	g.SetLimit(r.Workers)
	for i := range parts {
		start := int64(i) * length
		end := min(start+length, o.Size) - 1
		g.Go(func() error {
			return r.copying(ctx, smaller, func(ctx context.Context) error {
				out, err := r.Target.Bucket.Client.UploadPartCopy(ctx, &s3.UploadPartCopyInput{
					Bucket: r.Target.Bucket.Name(), Key: key, UploadId: upload, PartNumber: aws.Int32(int32(i + 1)),
					CopySource: r.copySource(o), CopySourceIfMatch: sourceCondition(o, bare), CopySourceRange: aws.String(fmt.Sprintf("bytes=%d-%d", start, end)),
					ExpectedSourceBucketOwner: backend.Optional(r.Source.Place().Bucket.Info.Owner),
				}, buckets.NoRetry)
				if err != nil {
					return err
				}
				if out.CopyPartResult == nil || aws.ToString(out.CopyPartResult.ETag) == "" {
					return fault.Errorf(fault.Unavailable, "the service reported that it has copied part %d, without an ETag", i+1)
				}
				parts[i] = types.CompletedPart{PartNumber: aws.Int32(int32(i + 1)), ETag: out.CopyPartResult.ETag}
				return nil
			})
		})
	}
	return parts, g.Wait()
}

// uploadLike returns an upload with the metadata and tags of an object, which a copy in one request would keep by itself.
func (r *mover) uploadLike(ctx context.Context, o Object, bare int32) (*s3.CreateMultipartUploadInput, error) {
	from := r.Source.Place()
	key := aws.String(from.Prefix + o.Key)
	var head *s3.HeadObjectOutput
	err := r.bounded(ctx, func(ctx context.Context) (err error) {
		head, err = from.Bucket.Client.HeadObject(ctx, &s3.HeadObjectInput{Bucket: from.Bucket.Name(), Key: key, VersionId: backend.Optional(o.Version),
			IfMatch: sourceCondition(o, bare)}, buckets.NoRetry)
		return err
	})
	if err != nil {
		return nil, err
	}
	in := &s3.CreateMultipartUploadInput{
		Bucket: r.Target.Bucket.Name(), Key: aws.String(r.Target.Prefix + o.Key), Metadata: head.Metadata, CacheControl: head.CacheControl,
		ContentDisposition: head.ContentDisposition, ContentEncoding: head.ContentEncoding, ContentLanguage: head.ContentLanguage, ContentType: head.ContentType,
	}
	if aws.ToInt32(head.TagCount) == 0 {
		return in, nil
	}
	err = r.bounded(ctx, func(ctx context.Context) error {
		tags, err := from.Bucket.Client.GetObjectTagging(ctx, &s3.GetObjectTaggingInput{Bucket: from.Bucket.Name(), Key: key, VersionId: backend.Optional(o.Version)}, buckets.NoRetry)
		if err != nil {
			return err
		}
		set := url.Values{}
		for _, t := range tags.TagSet {
			set.Set(aws.ToString(t.Key), aws.ToString(t.Value))
		}
		in.Tagging = backend.Optional(set.Encode())
		return nil
	})
	return in, err
}

// abort removes an upload that was not completed. What it leaves is removed at the end of the copy.
func (r *mover) abort(ctx context.Context, key, id string) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), buckets.CleanupBound)
	defer cancel()
	_, err := r.Target.Bucket.Client.AbortMultipartUpload(ctx, &s3.AbortMultipartUploadInput{Bucket: r.Target.Bucket.Name(), Key: &key, UploadId: &id}, buckets.NoRetry)
	if err != nil && !backend.IsNotFound(err) {
		klog.FromContext(ctx).Error(err, "Aborting upload failed", "bucket", r.Target.Bucket.Info.Name, "key", key)
	}
}

// head returns an object as it is now, or errGone.
func (r *mover) head(ctx context.Context, p Place, o Object) (Object, error) {
	var out *s3.HeadObjectOutput
	err := r.bounded(ctx, func(ctx context.Context) (err error) {
		out, err = p.Bucket.Client.HeadObject(ctx, &s3.HeadObjectInput{Bucket: p.Bucket.Name(), Key: aws.String(p.Prefix + o.Key), VersionId: backend.Optional(o.Version)}, buckets.NoRetry)
		return err
	})
	switch {
	case backend.IsNotFound(err):
		return o, errGone
	case err == nil && out.ContentLength == nil:
		err = fault.Errorf(fault.Unavailable, "the service's response to HEAD of %q has no Content-Length", p.Prefix+o.Key)
		fallthrough
	case err != nil:
		return o, err
	}
	o.ETag, o.Size = aws.ToString(out.ETag), aws.ToInt64(out.ContentLength)
	return o, nil
}

// copySource names an object for copy requests.
func (r *mover) copySource(o Object) *string { return copySource(r.Source.Place(), o) }

func copySource(from Place, o Object) *string {
	return buckets.CopySource(from.Bucket, buckets.Object{Key: from.Prefix + o.Key, Version: o.Version})
}

// lost is the error for an object that must be as it was, and is not.
func (r *mover) lost(o Object) error {
	if o.Version == "" {
		return fault.Errorf(fault.Precondition, "%q of %s is not as the manifest of the snapshot says: another program deleted or changed it", o.Key,
			r.Source.Place())
	}
	return fault.Errorf(fault.Precondition, "version %s of %q of %s was deleted or replaced before it was copied: a lifecycle rule or another program must "+
		"keep old versions until the copy is finished",
		o.Version, o.Key, r.Source.Place())
}

// refused is the error for an object that cannot be copied. It names the object.
func (r *mover) refused(o Object, err error) error {
	what := fmt.Sprintf("copying %q of %s", o.Key, r.Source.Place())
	if o.Size > r.limit.Load() && backend.IsUnsupported(err) {
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
