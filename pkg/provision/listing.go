package provision

import (
	"context"
	"fmt"
	"net/url"
	"strings"
	"time"

	"github.com/aws/aws-sdk-go-v2/aws"
	"github.com/aws/aws-sdk-go-v2/service/s3"
	"github.com/aws/aws-sdk-go-v2/service/s3/types"

	"github.com/s3-csi/s3-csi-driver/pkg/fault"
)

// requestBound bounds one request of a deletion, whose context has no deadline.
const requestBound = 2 * time.Minute

// object is something to be deleted.
type object struct {
	key     string
	version string // "": the current object
}

// Keys may hold characters that XML cannot. Services that can, encode them in listings when asked to, and say that they did.
func plainKey(key *string, encoding types.EncodingType) (string, error) {
	s := aws.ToString(key)
	if encoding != types.EncodingTypeUrl {
		return s, nil
	}
	plain, err := url.QueryUnescape(s)
	if err != nil {
		return "", fmt.Errorf("the service encoded the key %q in a way that cannot be read: %w", s, err)
	}
	return plain, nil
}

// below makes sure that what a listing gives is inside the prefix: nothing else may ever be deleted.
func below(prefix, key string) error {
	if !strings.HasPrefix(key, prefix) || prefix != "" && !strings.HasSuffix(prefix, "/") {
		return fault.Errorf(fault.Unavailable, "the service listed the key %q, which is not below %q: its listings cannot be trusted, nothing more is deleted", key, prefix)
	}
	return nil
}

func optional(s string) *string {
	if s == "" {
		return nil
	}
	return &s
}

func positive(n int32) *int32 {
	if n <= 0 {
		return nil
	}
	return &n
}

// pager gives the pages of a listing; more is false with the last one.
type pager func(ctx context.Context) (page []object, more bool, err error)

// advances tells whether a listing has more. One that says so and does not go on from where it was would never end: where it
// gave something, that is a page's work, after which everything begins anew; where it did not, it proves nothing.
func advances(truncated, moved bool, page []object) (bool, error) {
	if truncated && !moved && len(page) == 0 {
		return false, fault.Errorf(fault.Busy, "the service says that its listing has more and does not go on: its listings cannot be trusted")
	}
	return truncated && moved, nil
}

// currentObjects lists current objects; pageSize 0 is the service's choice.
func currentObjects(pl place, prefix string, pageSize int32) pager {
	var token *string
	return func(ctx context.Context) ([]object, bool, error) {
		ctx, cancel := context.WithTimeout(ctx, requestBound)
		defer cancel()
		out, err := pl.client.ListObjectsV2(ctx, &s3.ListObjectsV2Input{
			Bucket: pl.bucket(), Prefix: optional(prefix), ContinuationToken: token, EncodingType: types.EncodingTypeUrl, MaxKeys: positive(pageSize),
		})
		if err != nil {
			return nil, false, err
		}
		page := make([]object, 0, len(out.Contents))
		for _, c := range out.Contents {
			key, err := plainKey(c.Key, out.EncodingType)
			if err != nil {
				return nil, false, err
			}
			page = append(page, object{key: key})
		}
		next := aws.ToString(out.NextContinuationToken)
		more, err := advances(aws.ToBool(out.IsTruncated), next != "" && next != aws.ToString(token), page)
		token = &next
		return page, more, err
	}
}

// allVersions lists versions and delete markers; pageSize 0 is the service's choice.
func allVersions(pl place, prefix string, pageSize int32) pager {
	var key, version *string
	return func(ctx context.Context) ([]object, bool, error) {
		ctx, cancel := context.WithTimeout(ctx, requestBound)
		defer cancel()
		out, err := pl.client.ListObjectVersions(ctx, &s3.ListObjectVersionsInput{
			Bucket: pl.bucket(), Prefix: optional(prefix), KeyMarker: key, VersionIdMarker: version, EncodingType: types.EncodingTypeUrl, MaxKeys: positive(pageSize),
		})
		if err != nil {
			return nil, false, err
		}
		page := make([]object, 0, len(out.Versions)+len(out.DeleteMarkers))
		add := func(key, version *string) error {
			plain, err := plainKey(key, out.EncodingType)
			v := aws.ToString(version)
			if v == "" {
				v = "null" // the version of a time without versioning
			}
			page = append(page, object{key: plain, version: v})
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
		next, err := plainKey(out.NextKeyMarker, out.EncodingType)
		if err != nil {
			return nil, false, err
		}
		moved := next != "" && (next != aws.ToString(key) || aws.ToString(out.NextVersionIdMarker) != aws.ToString(version))
		more, err := advances(aws.ToBool(out.IsTruncated), moved, page)
		key, version = &next, out.NextVersionIdMarker
		return page, more, err
	}
}

// listUploads calls each for every unfinished upload that the service lists for the prefix, which it may match only with whole
// keys.
func listUploads(ctx context.Context, pl place, prefix string, each func(key, id string) error) error {
	var key, id *string
	for {
		out, err := uploadsPage(ctx, pl, &s3.ListMultipartUploadsInput{
			Bucket: pl.bucket(), Prefix: optional(prefix), KeyMarker: key, UploadIdMarker: id, EncodingType: types.EncodingTypeUrl,
		})
		if err != nil {
			return err
		}
		for _, u := range out.Uploads {
			plain, err := plainKey(u.Key, out.EncodingType)
			if err == nil {
				err = each(plain, aws.ToString(u.UploadId))
			}
			if err != nil {
				return err
			}
		}
		next, err := plainKey(out.NextKeyMarker, out.EncodingType)
		if err != nil {
			return err
		}
		nextID := aws.ToString(out.NextUploadIdMarker)
		// Some services say that there is more and then begin anew.
		if !aws.ToBool(out.IsTruncated) || next == "" || next == aws.ToString(key) && nextID == aws.ToString(id) {
			return nil
		}
		key, id = &next, optional(nextID)
	}
}

func uploadsPage(ctx context.Context, pl place, in *s3.ListMultipartUploadsInput) (*s3.ListMultipartUploadsOutput, error) {
	ctx, cancel := context.WithTimeout(ctx, requestBound)
	defer cancel()
	return pl.client.ListMultipartUploads(ctx, in)
}

// uploadsBelow calls each for every unfinished upload below the prefix, in whatever way the service lets them be found.
//
// MinIO forgets in its wide listing what was begun before its last start; it expires such uploads by itself (after a day, unless
// configured otherwise), and nothing but asking for each exact key would show them.
func (p *Provisioner) uploadsBelow(ctx context.Context, pl place, prefix string, each func(key, id string) error) error {
	how, err := p.uploadListing(ctx, pl)
	if err != nil || how == uploadsNone {
		return err
	}
	ask := prefix
	if how == uploadsWide {
		ask = ""
	}
	return listUploads(ctx, pl, ask, func(key, id string) error {
		if !strings.HasPrefix(key, prefix) {
			if how == uploadsWide {
				return nil
			}
			return below(prefix, key)
		}
		return each(key, id)
	})
}
