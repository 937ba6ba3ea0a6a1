package copier

import (
	"context"
	"errors"
	"fmt"
	"net/url"
	"strings"
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
	// plain is set if the service refuses conditions on the target of a copy.
	plain atomic.Bool
}

// prove tests whether the service honours conditions on the target: it copies an object of the target onto itself, unless that is large.
func (r *mover) prove(ctx context.Context, e entry) (proven, honoured bool) {
	if e.Size > r.Threshold {
		return false, false
	}
	err := r.bounded(ctx, func(ctx context.Context) error {
		_, err := r.Target.Bucket.Client.CopyObject(ctx, &s3.CopyObjectInput{
			Bucket: r.Target.Bucket.Name(), Key: aws.String(r.Target.Prefix + e.Key), CopySource: copySource(r.Target, Object{Key: e.Key}), IfNoneMatch: aws.String("*"),
		}, buckets.NoRetry)
		return err
	})
	return true, backend.IsPreconditionFailed(err)
}

// errGone means that the source has no such object any more.
var errGone = errors.New("the object was deleted")

// copyObject copies an object. An entry without a key means that it was deleted meanwhile.
func (r *mover) copyObject(ctx context.Context, o Object) (e entry, changed bool, err error) {
	for range maxChanges {
		plain := r.plain.Load()
		etag, err := r.copyOnce(ctx, o, plain)
		switch {
		case err == nil:
			return entry{Key: o.Key, Size: o.Size, ETag: etag, SourceETag: o.ETag, Version: o.Version}, changed, nil
		case !plain && refusesCondition(err):
			r.plain.Store(true)
			continue
		case backend.ErrorCode(err) == "DirectoryObjectContainsData" && o.Size == 0:
			// versitygw does not copy objects whose keys end in "/".
			if etag, err = r.putEmpty(ctx, o, plain); err == nil {
				return entry{Key: o.Key, ETag: etag, SourceETag: o.ETag, Version: o.Version}, changed, nil
			}
			if !backend.IsPreconditionFailed(err) {
				return entry{}, changed, r.refused(o, err)
			}
		case errors.Is(err, errGone), backend.IsNotFound(err) && !backend.IsNoSuchBucket(err):
			if o.Version != "" {
				return entry{}, false, r.lost(o)
			}
			return entry{}, true, nil
		case !backend.IsPreconditionFailed(err):
			return entry{}, changed, r.refused(o, err)
		}
		// Either the target has the object, copied by another process or by a request whose answer was lost, or the source changed.
		have, err := r.head(ctx, r.Target, Object{Key: o.Key})
		if err == nil && (o.Version == "" || have.Size == o.Size) {
			return entry{Key: o.Key, Size: have.Size, ETag: have.ETag, Version: o.Version}, changed || have.Size != o.Size, nil
		}
		if err != nil && !errors.Is(err, errGone) {
			return entry{}, changed, r.refused(o, err)
		}
		if o.Version != "" {
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

// copyOnce copies an object if it is unchanged and the target has none.
func (r *mover) copyOnce(ctx context.Context, o Object, plain bool) (etag string, err error) {
	if o.Size > r.Threshold {
		return r.copyParts(ctx, o, plain)
	}
	in := &s3.CopyObjectInput{
		Bucket: r.Target.Bucket.Name(), Key: aws.String(r.Target.Prefix + o.Key), CopySource: r.copySource(o), CopySourceIfMatch: backend.Optional(o.ETag),
		ExpectedSourceBucketOwner: backend.Optional(r.Source.Place().Bucket.Info.Owner),
	}
	if !plain {
		in.IfNoneMatch = aws.String("*")
	}
	var out *s3.CopyObjectOutput
	err = r.bounded(ctx, func(ctx context.Context) (err error) {
		out, err = r.Target.Bucket.Client.CopyObject(ctx, in, buckets.NoRetry)
		return err
	})
	if err != nil {
		return "", err
	}
	if out.CopyObjectResult == nil {
		return "", nil
	}
	return aws.ToString(out.CopyObjectResult.ETag), nil
}

// copyParts copies a large object in parts, with its metadata and tags.
func (r *mover) copyParts(ctx context.Context, o Object, plain bool) (etag string, err error) {
	create, err := r.uploadLike(ctx, o)
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
	parts, err := r.parts(ctx, o, create.Key, up.UploadId)
	if err != nil {
		return "", err
	}
	in := &s3.CompleteMultipartUploadInput{Bucket: create.Bucket, Key: create.Key, UploadId: up.UploadId, MultipartUpload: &types.CompletedMultipartUpload{Parts: parts}}
	if !plain {
		in.IfNoneMatch = aws.String("*")
	}
	var out *s3.CompleteMultipartUploadOutput
	err = r.bounded(ctx, func(ctx context.Context) (err error) {
		out, err = r.Target.Bucket.Client.CompleteMultipartUpload(ctx, in, buckets.NoRetry)
		return err
	})
	if backend.ErrorCode(err) == "NoSuchUpload" {
		// An earlier attempt completed it, and its answer was lost. The caller finds the object.
		return "", fault.Errorf(fault.Busy, "the outcome of completing the upload is unknown: %w", err)
	}
	if err != nil {
		return "", err
	}
	done = true
	return aws.ToString(out.ETag), nil
}

// putEmpty writes an object without content that is like one of the source.
func (r *mover) putEmpty(ctx context.Context, o Object, plain bool) (etag string, err error) {
	like, err := r.uploadLike(ctx, o)
	if err != nil {
		return "", err
	}
	in := &s3.PutObjectInput{Bucket: like.Bucket, Key: like.Key, Metadata: like.Metadata, ContentType: like.ContentType, Tagging: like.Tagging}
	if !plain {
		in.IfNoneMatch = aws.String("*")
	}
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
func (r *mover) parts(ctx context.Context, o Object, key, upload *string) ([]types.CompletedPart, error) {
	length := max(min(r.Threshold, 512<<20), minPart, (o.Size+maxParts-1)/maxParts)
	count := int((o.Size + length - 1) / length)
	parts := make([]types.CompletedPart, count)
	g, ctx := errgroup.WithContext(ctx)
	g.SetLimit(r.Workers)
	for i := range parts {
		start := int64(i) * length
		end := min(start+length, o.Size) - 1
		g.Go(func() error {
			return r.bounded(ctx, func(ctx context.Context) error {
				out, err := r.Target.Bucket.Client.UploadPartCopy(ctx, &s3.UploadPartCopyInput{
					Bucket: r.Target.Bucket.Name(), Key: key, UploadId: upload, PartNumber: aws.Int32(int32(i + 1)),
					CopySource: r.copySource(o), CopySourceIfMatch: backend.Optional(o.ETag), CopySourceRange: aws.String(fmt.Sprintf("bytes=%d-%d", start, end)),
					ExpectedSourceBucketOwner: backend.Optional(r.Source.Place().Bucket.Info.Owner),
				}, buckets.NoRetry)
				if err == nil && out.CopyPartResult != nil {
					parts[i] = types.CompletedPart{PartNumber: aws.Int32(int32(i + 1)), ETag: out.CopyPartResult.ETag}
				}
				return err
			})
		})
	}
	return parts, g.Wait()
}

// uploadLike returns an upload with the metadata and tags of an object, which a copy in one request would keep by itself.
func (r *mover) uploadLike(ctx context.Context, o Object) (*s3.CreateMultipartUploadInput, error) {
	from := r.Source.Place()
	key := aws.String(from.Prefix + o.Key)
	var head *s3.HeadObjectOutput
	err := r.bounded(ctx, func(ctx context.Context) (err error) {
		head, err = from.Bucket.Client.HeadObject(ctx, &s3.HeadObjectInput{Bucket: from.Bucket.Name(), Key: key, VersionId: backend.Optional(o.Version), IfMatch: backend.Optional(o.ETag)}, buckets.NoRetry)
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
	case err != nil:
		return o, err
	}
	o.ETag, o.Size = aws.ToString(out.ETag), aws.ToInt64(out.ContentLength)
	return o, nil
}

// copySource names an object for copy requests. Services decode it like a query, so a plus sign must be escaped.
func (r *mover) copySource(o Object) *string { return copySource(r.Source.Place(), o) }

func copySource(from Place, o Object) *string {
	parts := strings.Split(from.Prefix+o.Key, "/")
	for i, p := range parts {
		parts[i] = strings.ReplaceAll(url.QueryEscape(p), "+", "%20")
	}
	s := from.Bucket.Info.Name + "/" + strings.Join(parts, "/")
	if o.Version != "" {
		s += "?versionId=" + url.QueryEscape(o.Version)
	}
	return &s
}

// lost is the error for a version that is not there any more, or is another one.
func (r *mover) lost(o Object) error {
	return fault.Errorf(fault.Precondition, "version %s of %q of %s was deleted or replaced before it was copied: a lifecycle rule or another program must keep old versions until the copy is finished", o.Version, o.Key, r.Source.Place())
}

// refused is the error for an object that cannot be copied. It names the object.
func (r *mover) refused(o Object, err error) error {
	what := fmt.Sprintf("copying %q of %s", o.Key, r.Source.Place())
	switch backend.ErrorCode(err) {
	case "InvalidObjectState":
		return fault.Errorf(fault.Precondition, "%w; it is archived: restore it, or move it out of the volume", backend.Classify(err, what))
	case "InvalidRequest":
		return fault.Errorf(fault.Precondition, "%w; the driver cannot copy objects that are encrypted with a key of the client (SSE-C)", backend.Classify(err, what))
	}
	return backend.Classify(err, what)
}

// refusesCondition reports whether an error means that the service does not support a condition on the target of a copy.
func refusesCondition(err error) bool {
	return backend.IsNotImplemented(err) || backend.ErrorCode(err) == "InvalidArgument"
}
