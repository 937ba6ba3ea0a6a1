package buckets

import (
	"context"
	"fmt"
	"net/url"
	"strings"
	"time"

	"github.com/aws/aws-sdk-go-v2/aws"
	"github.com/aws/aws-sdk-go-v2/service/s3"
	"github.com/aws/aws-sdk-go-v2/service/s3/types"

	"github.com/s3-csi/s3-csi-driver/pkg/backend"
	"github.com/s3-csi/s3-csi-driver/pkg/fault"
)

// RequestBound is the timeout of one request of a deletion, whose context has no deadline.
const RequestBound = 2 * time.Minute

// Object is an object or a version in a listing.
type Object struct {
	Key     string
	Version string // "": the current object
}

// VersionID returns the version for requests.
func (o Object) VersionID() *string { return backend.Optional(o.Version) }

// Pager returns the pages of a listing one by one; more is false with the last one.
type Pager func(ctx context.Context) (page []Object, more bool, err error)

// PlainKey decodes a key of a listing. Keys may contain characters that XML cannot, so listings request an encoding, which the response
// confirms.
func PlainKey(key *string, encoding types.EncodingType) (string, error) {
	s := aws.ToString(key)
	if encoding != types.EncodingTypeUrl {
		return s, nil
	}
	plain, err := url.QueryUnescape(s)
	if err != nil {
		return "", fmt.Errorf("cannot decode the key %q: %w", s, err)
	}
	return plain, nil
}

// CheckBelow returns an error if a listed key is not below the prefix, because nothing else may ever be deleted.
func CheckBelow(prefix, key string) error {
	if !strings.HasPrefix(key, prefix) || prefix != "" && !strings.HasSuffix(prefix, "/") {
		return fault.Errorf(fault.Unavailable, "the service listed the key %q, which is not below %q: its listings are unreliable, so nothing more is deleted", key, prefix)
	}
	return nil
}

func positive(n int32) *int32 {
	if n <= 0 {
		return nil
	}
	return &n
}

// advances reports whether a listing has more pages. A listing that reports more but repeats its marker would never end: if the page has
// objects, deleting them and listing again makes progress; if not, it is an error.
func advances(truncated, moved bool, page []Object) (bool, error) {
	if truncated && !moved && len(page) == 0 {
		return false, fault.Errorf(fault.Busy, "the service reports a truncated listing but repeats its marker: its listings are unreliable")
	}
	return truncated && moved, nil
}

// CurrentObjects lists current objects; pageSize 0 is the service's choice.
func CurrentObjects(b Bucket, prefix string, pageSize int32) Pager {
	return CurrentObjectsAfter(b, prefix, "", pageSize)
}

// CurrentObjectsAfter is CurrentObjects for the keys after one; "" is the start.
func CurrentObjectsAfter(b Bucket, prefix, after string, pageSize int32) Pager {
	var token *string
	return func(ctx context.Context) ([]Object, bool, error) {
		ctx, cancel := context.WithTimeout(ctx, RequestBound)
		defer cancel()
		out, err := b.Client.ListObjectsV2(ctx, &s3.ListObjectsV2Input{
			Bucket: b.Name(), Prefix: backend.Optional(prefix), StartAfter: backend.Optional(after), ContinuationToken: token, EncodingType: types.EncodingTypeUrl, MaxKeys: positive(pageSize),
		})
		if err != nil {
			return nil, false, err
		}
		page := make([]Object, 0, len(out.Contents))
		for _, c := range out.Contents {
			key, err := PlainKey(c.Key, out.EncodingType)
			if err != nil {
				return nil, false, err
			}
			page = append(page, Object{Key: key})
		}
		next := aws.ToString(out.NextContinuationToken)
		more, err := advances(aws.ToBool(out.IsTruncated), next != "" && next != aws.ToString(token), page)
		token = &next
		return page, more, err
	}
}

// AllVersions lists versions and delete markers; pageSize 0 is the service's choice.
func AllVersions(b Bucket, prefix string, pageSize int32) Pager {
	var key, version *string
	return func(ctx context.Context) ([]Object, bool, error) {
		ctx, cancel := context.WithTimeout(ctx, RequestBound)
		defer cancel()
		out, err := b.Client.ListObjectVersions(ctx, &s3.ListObjectVersionsInput{
			Bucket: b.Name(), Prefix: backend.Optional(prefix), KeyMarker: key, VersionIdMarker: version, EncodingType: types.EncodingTypeUrl, MaxKeys: positive(pageSize),
		})
		if err != nil {
			return nil, false, err
		}
		page := make([]Object, 0, len(out.Versions)+len(out.DeleteMarkers))
		add := func(key, version *string) error {
			plain, err := PlainKey(key, out.EncodingType)
			v := aws.ToString(version)
			if v == "" {
				v = "null" // of an object from before versioning
			}
			page = append(page, Object{Key: plain, Version: v})
			return err
		}
		for _, v := range out.Versions {
			if err := add(v.Key, v.VersionId); err != nil {
				return nil, false, err
			}
		}
		for _, m := range out.DeleteMarkers {
			if err := add(m.Key, m.VersionId); err != nil {
				return nil, false, err
			}
		}
		next, err := PlainKey(out.NextKeyMarker, out.EncodingType)
		if err != nil {
			return nil, false, err
		}
		moved := next != "" && (next != aws.ToString(key) || aws.ToString(out.NextVersionIdMarker) != aws.ToString(version))
		more, err := advances(aws.ToBool(out.IsTruncated), moved, page)
		key, version = &next, out.NextVersionIdMarker
		return page, more, err
	}
}

// listUploads calls each for every unfinished upload that the service lists for the prefix, which some match with whole keys only.
func listUploads(ctx context.Context, b Bucket, prefix string, each func(key, id string) error) error {
	var key, id *string
	for {
		out, err := uploadsPage(ctx, b, &s3.ListMultipartUploadsInput{
			Bucket: b.Name(), Prefix: backend.Optional(prefix), KeyMarker: key, UploadIdMarker: id, EncodingType: types.EncodingTypeUrl,
		})
		if err != nil {
			return err
		}
		for _, u := range out.Uploads {
			plain, err := PlainKey(u.Key, out.EncodingType)
			if err == nil {
				err = each(plain, aws.ToString(u.UploadId))
			}
			if err != nil {
				return err
			}
		}
		next, err := PlainKey(out.NextKeyMarker, out.EncodingType)
		if err != nil {
			return err
		}
		nextID := aws.ToString(out.NextUploadIdMarker)
		// Some services report more pages and then start again.
		if !aws.ToBool(out.IsTruncated) || next == "" || next == aws.ToString(key) && nextID == aws.ToString(id) {
			return nil
		}
		key, id = &next, backend.Optional(nextID)
	}
}

func uploadsPage(ctx context.Context, b Bucket, in *s3.ListMultipartUploadsInput) (*s3.ListMultipartUploadsOutput, error) {
	ctx, cancel := context.WithTimeout(ctx, RequestBound)
	defer cancel()
	return b.Client.ListMultipartUploads(ctx, in)
}

// UploadsBelow calls each for every unfinished upload below the prefix, however the service lists them.
//
// MinIO's listing without a prefix lacks uploads that were started before its last restart. It expires them by itself (after a day by default), and only a
// request for each exact key would show them.
func (o *Opener) UploadsBelow(ctx context.Context, b Bucket, prefix string, each func(key, id string) error) error {
	how, err := o.uploadListing(ctx, b)
	if err != nil || how == UploadsNone {
		return err
	}
	ask := prefix
	if how == UploadsWide {
		ask = ""
	}
	return listUploads(ctx, b, ask, func(key, id string) error {
		if !strings.HasPrefix(key, prefix) {
			if how == UploadsWide {
				return nil
			}
			return CheckBelow(prefix, key)
		}
		return each(key, id)
	})
}

// IsEmpty reports whether no object is below the prefix: one request.
func IsEmpty(ctx context.Context, b Bucket, prefix string) (bool, error) {
	return nothingIn(ctx, b, prefix, CurrentObjects(b, prefix, 1))
}

// IsUnused reports whether neither an object nor a version or delete marker is below the prefix: one request.
func IsUnused(ctx context.Context, b Bucket, prefix string) (bool, error) {
	return nothingIn(ctx, b, prefix, AllVersions(b, prefix, 1))
}

// nothingIn reports whether a listing is empty. A page may be empty although more follow.
func nothingIn(ctx context.Context, b Bucket, prefix string, next Pager) (bool, error) {
	for {
		page, more, err := next(ctx)
		if err != nil {
			return false, backend.Classify(err, "listing "+b.Info.Name+"/"+prefix+" of "+b.Backend.String())
		}
		if len(page) > 0 || !more {
			return len(page) == 0, nil
		}
	}
}
