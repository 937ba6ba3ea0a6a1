package check

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/aws/aws-sdk-go-v2/aws"
	"github.com/aws/aws-sdk-go-v2/service/s3"
	"github.com/aws/aws-sdk-go-v2/service/s3/types"
	smithyhttp "github.com/aws/smithy-go/transport/http"

	"github.com/s3-csi/s3-csi-driver/pkg/backend"
	"github.com/s3-csi/s3-csi-driver/pkg/fault"
	"github.com/s3-csi/s3-csi-driver/pkg/provision/buckets"
)

// The directories of the test objects.
const (
	namesDir   = "names/"
	controlDir = "control/"
	copiesDir  = "copies/"
)

// pageSize is the number of keys in a page of a test listing.
const pageSize = 3

// names returns the names of test objects: what is encoded in URLs, headers or XML, what sorts differently as bytes, as text and as paths,
// and pairs that differ only in case, in a plus sign, or in how a letter is composed.
func names() []string {
	return []string{
		"CASE", "a b", "a%20b", "a%b", "a&<\">'b", "a+b", "a.b", "a/b", "a/c d", "a0", "a=?#;:@,b", "a[{~^!*()}]b", "case", "e\u0301", "z",
		"\u00e9", "\u65e5\u672c", "\U0001f642",
	}
}

// controlNames returns names that XML cannot express, so that they need encoded listings.
func controlNames() []string { return []string{"a\x01b", "line\nend", "delete\x7f"} }

// text returns the content of a test object.
func text(name string) string { return content + name }

// maxFailures is after how many failures of one operation a probe ends: a service may need long for each.
const maxFailures = 3

// eachName calls do for names, and returns its first error.
func eachName(names []string, doing string, do func(name string) error) error {
	var errs []error
	for _, name := range names {
		if err := do(name); err != nil {
			errs = append(errs, backend.Classify(err, fmt.Sprintf("%s with the name %q", doing, name)))
		}
		if len(errs) == maxFailures {
			return fmt.Errorf("%w (and others)", errs[0])
		}
	}
	if len(errs) > 0 {
		return errs[0]
	}
	return nil
}

// storeNames stores all objects before it reads the first: a service may take two names for the same.
func (r *run) storeNames(ctx context.Context) error {
	err := eachName(names(), "store an object", func(name string) error {
		err := r.put(ctx, r.client, r.prefix+namesDir+name, text(name))
		if err == nil {
			r.stored = append(r.stored, name)
		}
		return err
	})
	readErr := eachName(r.stored, "read an object", func(name string) error {
		return r.get(ctx, r.client, r.prefix+namesDir+name, text(name))
	})
	return cmp.Or(err, readErr)
}

// encoded returns a listing as the driver requests it.
func encoded(dir string) *s3.ListObjectsV2Input {
	return &s3.ListObjectsV2Input{Prefix: &dir, EncodingType: types.EncodingTypeUrl}
}

// walk returns the names that a listing below the check's prefix has, and an error if its pages cannot be relied on.
func (r *run) walk(ctx context.Context, in *s3.ListObjectsV2Input) (found []string, err error) {
	prefix, tokens := r.prefix+*in.Prefix, map[string]bool{}
	in.Bucket, in.Prefix, in.MaxKeys = &r.info.Name, &prefix, aws.Int32(pageSize)
	for range len(names()) + pageSize {
		out, err := r.client.ListObjectsV2(ctx, in)
		if err != nil {
			return found, backend.Classify(err, "list "+prefix)
		}
		keys := []*string{}
		for _, o := range out.Contents {
			if keys = append(keys, o.Key); o.Size == nil || o.LastModified == nil || aws.ToString(o.ETag) == "" {
				return found, fmt.Errorf("the entry of %q in a listing lacks its size, ETag or time", aws.ToString(o.Key))
			}
		}
		for _, p := range out.CommonPrefixes {
			keys = append(keys, p.Prefix)
		}
		for _, key := range keys {
			plain, err := buckets.PlainKey(key, out.EncodingType)
			if err != nil {
				plain = aws.ToString(key) // which differs from the name
			}
			found = append(found, strings.TrimPrefix(plain, prefix))
		}
		r.overfull = r.overfull || len(keys) > pageSize
		next := aws.ToString(out.NextContinuationToken)
		switch {
		case !aws.ToBool(out.IsTruncated):
			return found, nil
		case next == "":
			return found, errors.New("a page that is not the last has no token for the next one")
		case tokens[next]:
			return found, errors.New("the service repeats the token of a page, so the listing never ends")
		}
		tokens[next], in.ContinuationToken = true, &next
	}
	return found, fmt.Errorf("the listing of %d objects does not end", len(r.stored))
}

// compareNames returns the names of want that a listing lacks or repeats, and its names that no object has.
func compareNames(found, want []string) (missing, twice, unknown []string) {
	seen := map[string]int{}
	for _, name := range found {
		seen[name]++
	}
	for _, name := range want {
		switch {
		case seen[name] == 0:
			missing = append(missing, name)
		case seen[name] > 1:
			twice = append(twice, name)
		}
		delete(seen, name)
	}
	return missing, twice, slices.Sorted(maps.Keys(seen))
}

// pagination lists all names in small pages, and those after one of them. Names that are listed wrongly are for encoding.
func (r *run) pagination(ctx context.Context) error {
	found, err := r.walk(ctx, encoded(namesDir))
	if err != nil {
		return err
	}
	r.listed = found
	missing, twice, unknown := compareNames(found, r.stored)
	switch {
	case len(missing) > 0 && len(twice) > 0 || len(unknown) > 0: // see encoding
	case len(missing) > 0:
		return fmt.Errorf("the listing lacks %q, which exist", missing)
	case len(twice) > 0:
		return fmt.Errorf("the listing has %q twice", twice)
	case !directoryBucket(r.info.Name):
		want := slices.Sorted(slices.Values(r.stored))
		after := encoded(namesDir)
		after.StartAfter = aws.String(r.prefix + namesDir + want[len(want)/2])
		if found, err = r.walk(ctx, after); err != nil {
			return err
		}
		want = want[len(want)/2+1:]
		if slices.Sort(found); !slices.Equal(found, want) {
			return fmt.Errorf("the listing after %q (start-after) has %q instead of %q", *after.StartAfter, found, want)
		}
	}
	if r.overfull {
		return warningError{errors.New("the service ignores max-keys, so the pages of listings were not tested")}
	}
	return nil
}

var errNotListed = errors.New("the objects could not be listed")

func (r *run) listingOrder(context.Context) error {
	if r.listed == nil {
		return errNotListed
	}
	for i, name := range r.listed {
		if i > 0 && name < r.listed[i-1] {
			return fmt.Errorf("%q is listed after %q, which is not the order of bytes", name, r.listed[i-1])
		}
	}
	return nil
}

func (r *run) encoding(context.Context) error {
	if r.listed == nil {
		return errNotListed
	}
	missing, twice, unknown := compareNames(r.listed, r.stored)
	if len(unknown) > 0 || len(missing) > 0 && len(twice) > 0 {
		return fmt.Errorf("the listing has %q instead of %q: its encoding (encoding-type=url) is wrong", append(unknown, twice...), missing)
	}
	return nil
}

// directories lists like mountpoint-s3 when a program reads a directory.
func (r *run) directories(ctx context.Context) error {
	found, err := r.walk(ctx, &s3.ListObjectsV2Input{
		Prefix: aws.String(namesDir), Delimiter: aws.String("/"),
		OptionalObjectAttributes: []types.OptionalObjectAttributes{types.OptionalObjectAttributesRestoreStatus},
	})
	if err != nil {
		return err
	}
	want := map[string]bool{}
	for _, name := range r.stored {
		dir, _, below := strings.Cut(name, "/")
		if below {
			dir += "/"
		}
		want[dir] = true
	}
	if missing, twice, unknown := compareNames(found, slices.Sorted(maps.Keys(want))); len(missing)+len(twice)+len(unknown) > 0 {
		return fmt.Errorf("the listing of one directory lacks %q, has %q twice, and %q, which do not exist", missing, twice, unknown)
	}
	return nil
}

// controls stores, lists and copies names with control characters. A service may refuse them.
func (r *run) controls(ctx context.Context) error {
	var kept []string
	for _, name := range controlNames() {
		err := r.put(ctx, r.client, r.prefix+controlDir+name, text(name))
		if err == nil {
			kept = append(kept, name)
		} else if backend.ErrorCode(err) == "" {
			return backend.Classify(err, fmt.Sprintf("store an object with the name %q", name))
		}
	}
	found, err := r.walk(ctx, encoded(controlDir))
	if err != nil {
		return err
	}
	if missing, _, unknown := compareNames(found, kept); len(missing)+len(unknown) > 0 {
		return fmt.Errorf("objects with the names %q are listed as %q", missing, unknown)
	}
	return r.copyAll(ctx, controlDir, kept)
}

func (r *run) copies(ctx context.Context) error { return r.copyAll(ctx, namesDir, r.stored) }

// copyAll copies objects, and reads the copies.
func (r *run) copyAll(ctx context.Context, dir string, names []string) error {
	return eachName(names, "copy an object", func(name string) error {
		key := r.prefix + copiesDir + dir + name
		if err := r.copyTo(ctx, key, dir+name, nil); err != nil {
			return err
		}
		return r.get(ctx, r.client, key, text(name))
	})
}

// source names an object in copy requests.
func (r *run) source(name string) *string {
	return buckets.CopySource(r.opened(), buckets.Object{Key: r.prefix + name})
}

func (r *run) copyTo(ctx context.Context, key, from string, ifMatch *string) error {
	r.wrote[buckets.Object{Key: key}] = true
	out, err := r.client.CopyObject(ctx, &s3.CopyObjectInput{Bucket: &r.info.Name, Key: &key, CopySource: r.source(from), CopySourceIfMatch: ifMatch})
	if err == nil {
		r.noteVersion(key, out.VersionId)
	}
	return err
}

// multiDelete deletes objects with one request.
func (r *run) multiDelete(ctx context.Context) error {
	var ids []types.ObjectIdentifier
	for _, name := range r.stored {
		ids = append(ids, types.ObjectIdentifier{Key: aws.String(r.prefix + namesDir + name)})
	}
	out, err := r.client.DeleteObjects(ctx, &s3.DeleteObjectsInput{Bucket: &r.info.Name, Delete: &types.Delete{Objects: ids, Quiet: aws.Bool(true)}},
		s3.WithAPIOptions(smithyhttp.AddContentChecksumMiddleware))
	unsupported := backend.IsUnsupported(err)
	err = backend.Classify(err, "delete several objects with one request")
	switch {
	case unsupported:
		return warningError{fmt.Errorf("the driver deletes objects one by one, which takes longer: %w", err)}
	case err != nil:
		return err
	case len(out.Errors) > 0:
		e := out.Errors[0]
		return fmt.Errorf("%d of %d objects were not deleted with one request: %q: %s", len(out.Errors), len(ids), aws.ToString(e.Key), aws.ToString(e.Code))
	}
	left, err := r.walk(ctx, encoded(namesDir))
	if err == nil && len(left) > 0 {
		err = fmt.Errorf("the service reports objects as deleted that are still listed: %q", left)
	}
	return err
}

// deletes deletes all test objects one by one.
func (r *run) deletes(ctx context.Context) error {
	keys := map[string]bool{}
	for o := range r.wrote {
		keys[o.Key] = true
	}
	return eachName(slices.Sorted(maps.Keys(keys)), "delete an object", func(key string) error {
		out, err := r.client.DeleteObject(ctx, &s3.DeleteObjectInput{Bucket: &r.info.Name, Key: &key})
		if err != nil {
			return err
		}
		r.noteVersion(key, out.VersionId)
		_, err = r.client.HeadObject(ctx, &s3.HeadObjectInput{Bucket: &r.info.Name, Key: &key})
		switch {
		case backend.IsNotFound(err):
			delete(r.wrote, buckets.Object{Key: key})
			return nil
		case err == nil:
			return fault.Errorf(fault.Precondition, "it still exists, but the service reports it as deleted")
		}
		return err
	})
}
