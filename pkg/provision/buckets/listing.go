package buckets

import (
	"context"
	"fmt"
	"net/url"
	"slices"
	"strconv"
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

// CopySource names an object for copy requests. Services decode it like a query, so a plus sign must be escaped.
func CopySource(b Bucket, o Object) *string {
	parts := strings.Split(o.Key, "/")
	for i, p := range parts {
		parts[i] = strings.ReplaceAll(url.QueryEscape(p), "+", "%20")
	}
	s := b.Info.Name + "/" + strings.Join(parts, "/")
	if o.Version != "" {
		s += "?versionId=" + url.QueryEscape(o.Version)
	}
	return &s
}

// Pager returns the pages of a listing one by one; more is false with the last one.
type Pager func(ctx context.Context) (page []Object, more bool, err error)

// PlainKey decodes a key of a listing. Keys may contain characters that XML cannot, so listings request an encoding, which the response
// confirms.
func PlainKey(key *string, encoding types.EncodingType) (string, error) {
	s := aws.ToString(key)
	if !strings.EqualFold(string(encoding), string(types.EncodingTypeUrl)) {
		return s, nil
	}
	plain, err := url.QueryUnescape(s)
	if err != nil {
		return "", fault.Errorf(fault.Precondition, "the service says that it encodes the keys of its listing, but does not encode %q: its listings are unreliable",
			s)
	}
	return plain, nil
}

// ShownKeys is the maximum number of keys in an error.
const ShownKeys = 3

// Quoted returns some of the keys for messages.
func Quoted(keys []string) string {
	quoted := make([]string, min(len(keys), ShownKeys))
	for i := range quoted {
		quoted[i] = strconv.QuoteToASCII(keys[i])
	}
	s := strings.Join(quoted, ", ")
	if more := len(keys) - ShownKeys; more > 0 {
		s += fmt.Sprintf(" and %d more", more)
	}
	return s
}

// CheckBelow returns an error if a listed key is not below the prefix, because nothing else may ever be deleted.
func CheckBelow(prefix, key string) error {
	if !strings.HasPrefix(key, prefix) || prefix != "" && !strings.HasSuffix(prefix, "/") {
		return fault.Errorf(fault.Unavailable, "the service listed the key %q, which is not below %q: its listings are unreliable, so nothing more is "+
			"deleted", key, prefix)
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

// Listed is a current object in a listing.
type Listed struct {
	Key, ETag string
	Size      int64
}

// Listing is a page of current objects.
type Listing struct {
	Objects  []Listed
	Prefixes []string // common ones
	More     bool
	Token    string // of the next page
	Encoded  bool   // the service encoded the keys, so that they are exact
}

// From is where a page begins, and how large it is. All fields are optional.
type From struct {
	After, Token, Delimiter string
	Size                    int32 // 0: the service's choice
}

// List lists a page of current objects.
func List(ctx context.Context, b Bucket, prefix string, from From, options ...func(*s3.Options)) (Listing, error) {
	ctx, cancel := context.WithTimeout(ctx, RequestBound)
	defer cancel()
	out, err := b.Client.ListObjectsV2(ctx, &s3.ListObjectsV2Input{
		Bucket: b.Name(), Prefix: backend.Optional(prefix), StartAfter: backend.Optional(from.After), ContinuationToken: backend.Optional(from.Token),
		Delimiter: backend.Optional(from.Delimiter), EncodingType: types.EncodingTypeUrl, MaxKeys: positive(from.Size),
	}, options...)
	if err != nil {
		return Listing{}, err
	}
	if n := len(out.Contents) + len(out.CommonPrefixes); int(aws.ToInt32(out.KeyCount)) > n {
		return Listing{}, fault.Errorf(fault.Unavailable, "the service says that its listing has %d keys, but it has %d: its listings are unreliable",
			*out.KeyCount, n)
	}
	l := Listing{Objects: make([]Listed, len(out.Contents)), More: aws.ToBool(out.IsTruncated), Token: aws.ToString(out.NextContinuationToken),
		Encoded: out.EncodingType != ""}
	for i, c := range out.Contents {
		l.Objects[i] = Listed{ETag: aws.ToString(c.ETag), Size: aws.ToInt64(c.Size)}
		if l.Objects[i].Key, err = PlainKey(c.Key, out.EncodingType); err != nil {
			return Listing{}, err
		}
	}
	for _, c := range out.CommonPrefixes {
		plain, err := PlainKey(c.Prefix, out.EncodingType)
		if err != nil {
			return Listing{}, err
		}
		l.Prefixes = append(l.Prefixes, plain)
	}
	return l, nil
}

// CurrentObjects lists current objects; pageSize 0 is the service's choice.
func CurrentObjects(b Bucket, prefix string, pageSize int32, options ...func(*s3.Options)) Pager {
	token := ""
	return func(ctx context.Context) ([]Object, bool, error) {
		l, err := List(ctx, b, prefix, From{Token: token, Size: pageSize}, options...)
		if err != nil {
			return nil, false, err
		}
		page := make([]Object, len(l.Objects))
		for i, o := range l.Objects {
			page[i].Key = o.Key
		}
		more, err := advances(l.More, l.Token != "" && l.Token != token, page)
		token = l.Token
		return page, more, err
	}
}

// AllVersions lists versions and delete markers; pageSize 0 is the service's choice.
func AllVersions(b Bucket, prefix string, pageSize int32, options ...func(*s3.Options)) Pager {
	key, version := "", ""
	return func(ctx context.Context) ([]Object, bool, error) {
		l, err := ListVersions(ctx, b, prefix, VersionsFrom{key, version, pageSize}, options...)
		if err != nil {
			return nil, false, err
		}
		page := make([]Object, len(l.Versions))
		for i, v := range l.Versions {
			page[i] = Object{v.Key, v.ID}
		}
		more, err := advances(l.More, l.NextKey != "" && (l.NextKey != key || l.NextVersion != version), page)
		key, version = l.NextKey, l.NextVersion
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

// IsEmptyExcept is IsEmpty, but does not count what is below another prefix.
func IsEmptyExcept(ctx context.Context, b Bucket, prefix, except string) (bool, error) {
	next := CurrentObjects(b, prefix, 1)
	return nothingIn(ctx, b, prefix, func(ctx context.Context) ([]Object, bool, error) {
		page, more, err := next(ctx)
		return slices.DeleteFunc(page, func(o Object) bool { return strings.HasPrefix(o.Key, except) }), more, err
	})
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
