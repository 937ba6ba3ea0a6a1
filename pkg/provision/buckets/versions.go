package buckets

import (
	"bytes"
	"context"
	"crypto/rand"
	"encoding/xml"
	"fmt"
	"io"
	"time"

	"github.com/aws/aws-sdk-go-v2/aws"
	"github.com/aws/aws-sdk-go-v2/service/s3"
	"github.com/aws/aws-sdk-go-v2/service/s3/types"
	"github.com/aws/smithy-go/middleware"
	smithyhttp "github.com/aws/smithy-go/transport/http"

	"github.com/s3-csi/s3-csi-driver/pkg/backend"
	"github.com/s3-csi/s3-csi-driver/pkg/conc"
	"github.com/s3-csi/s3-csi-driver/pkg/fault"
	"github.com/s3-csi/s3-csi-driver/pkg/provision/throttle"
)

// Version is a version or a delete marker in a listing.
type Version struct {
	Key     string
	ID      string // "null" for an object from before versioning
	ETag    string
	Size    int64
	Time    time.Time // when it was written; for an object that was uploaded in parts, when its upload began
	Latest  bool
	Deleted bool // it is a delete marker
}

// VersionPage is a page of a listing, in the order of keys, and the newest version of each key first. NextKey and NextVersion are the markers
// of the next page, if More is set.
type VersionPage struct {
	Versions             []Version
	More                 bool
	NextKey, NextVersion string
	Encoded              bool // see Listing
}

// VersionsFrom is where a page of versions begins, and how large it is. All fields are optional.
type VersionsFrom struct {
	Key, Version string
	Size         int32 // 0: the service's choice
}

// ListVersions lists a page of versions and delete markers after a key, or after a version of it, in the order of the service's response. The SDK
// keeps versions and delete markers apart, which loses the order of those with the same time, so this function reads the response itself.
func ListVersions(ctx context.Context, b Bucket, prefix string, from VersionsFrom, options ...func(*s3.Options)) (VersionPage, error) {
	ctx, cancel := context.WithTimeout(ctx, RequestBound)
	defer cancel()
	var body []byte
	_, err := b.Client.ListObjectVersions(ctx, &s3.ListObjectVersionsInput{
		Bucket: b.Name(), Prefix: backend.Optional(prefix), KeyMarker: backend.Optional(from.Key), VersionIdMarker: backend.Optional(from.Version),
		EncodingType: types.EncodingTypeUrl, MaxKeys: positive(from.Size),
	}, append(options, keepBody(&body))...)
	if err != nil {
		return VersionPage{}, err
	}
	var raw struct {
		IsTruncated                        bool
		EncodingType                       types.EncodingType
		NextKeyMarker, NextVersionIdMarker string //nolint:revive // the names of the elements
		Items                              []struct {
			XMLName              xml.Name
			Key, VersionId, ETag string //nolint:revive // the names of the elements
			Size                 int64
			LastModified         time.Time
			IsLatest             bool
		} `xml:",any"`
	}
	if err := xml.Unmarshal(body, &raw); err != nil {
		return VersionPage{}, fault.Errorf(fault.Unavailable, "the service's listing of versions cannot be parsed: %w", err)
	}
	page := VersionPage{More: raw.IsTruncated, NextVersion: raw.NextVersionIdMarker, Encoded: raw.EncodingType != ""}
	if page.NextKey, err = PlainKey(&raw.NextKeyMarker, raw.EncodingType); err != nil {
		return VersionPage{}, err
	}
	for _, item := range raw.Items {
		if item.XMLName.Local != "Version" && item.XMLName.Local != "DeleteMarker" {
			continue
		}
		v := Version{ID: item.VersionId, ETag: item.ETag, Size: item.Size, Time: item.LastModified, Latest: item.IsLatest,
			Deleted: item.XMLName.Local == "DeleteMarker"}
		if v.Key, err = PlainKey(&item.Key, raw.EncodingType); err != nil {
			return VersionPage{}, err
		}
		if v.ID == "" {
			v.ID = nullVersion
		}
		page.Versions = append(page.Versions, v)
	}
	return page, nil
}

// nullVersion is the version id of an object that was written while the bucket's versioning was not enabled.
const nullVersion = "null"

// maxVersions is the maximum size of a listing of versions: 1000 keys of 1024 bytes, six bytes for each if they are escaped, and the rest.
const maxVersions = 8 << 20

// keepBody keeps the body of a response of up to maxVersions bytes.
func keepBody(body *[]byte) func(*s3.Options) {
	return func(o *s3.Options) {
		o.APIOptions = append(o.APIOptions, func(s *middleware.Stack) error {
			return s.Deserialize.Insert(middleware.DeserializeMiddlewareFunc("KeepBody", func(ctx context.Context, in middleware.DeserializeInput,
				next middleware.DeserializeHandler) (middleware.DeserializeOutput, middleware.Metadata, error) {
				out, metadata, err := next.HandleDeserialize(ctx, in)
				if resp, ok := out.RawResponse.(*smithyhttp.Response); ok && err == nil {
					data, readErr := io.ReadAll(io.LimitReader(resp.Body, maxVersions+1))
					if len(data) > maxVersions {
						data, readErr = nil, fault.Errorf(fault.Unavailable, "the response has more than %d bytes", maxVersions)
					}
					*body = data
					var rest io.Reader = bytes.NewReader(data)
					if readErr != nil {
						rest = io.MultiReader(rest, failing{readErr})
					}
					resp.Body = struct {
						io.Reader
						io.Closer
					}{rest, resp.Body}
				}
				return out, metadata, err
			}), "OperationDeserializer", middleware.After)
		})
	}
}

type failing struct{ err error }

func (f failing) Read([]byte) (int, error) { return 0, f.err }

// Versioned returns a Precondition unless the bucket's versioning is enabled now.
func Versioned(ctx context.Context, b Bucket) error {
	ctx, cancel := context.WithTimeout(ctx, RequestBound)
	defer cancel()
	out, err := b.Client.GetBucketVersioning(ctx, &s3.GetBucketVersioningInput{Bucket: b.Name()})
	switch {
	case backend.IsUnsupported(err):
		return fault.Errorf(fault.Precondition, "%s has no versioning: its service does not support it", b)
	case err != nil:
		return unproven(b, backend.Classify(err, "reading the versioning state of "+b.String()))
	case out.Status == types.BucketVersioningStatusSuspended:
		return fault.Errorf(fault.Precondition, "the versioning of %s is suspended: enable it", b)
	case out.Status != types.BucketVersioningStatusEnabled:
		return fault.Errorf(fault.Precondition, "the versioning of %s is off: enable it", b)
	}
	return nil
}

// unproven adds to a refusal of the service which permissions the proof needs.
func unproven(b Bucket, err error) error {
	if !fault.Is(err, fault.Denied) {
		return err
	}
	return fault.Errorf(fault.Precondition, "whether versions can be read in %s cannot be tested: %w; allow s3:GetBucketVersioning, "+
		"s3:ListBucketVersions, s3:GetObjectVersion and s3:DeleteObjectVersion to the driver", b, err)
}

const (
	// shortestWait is the least time between two markers of a cut.
	shortestWait = 100 * time.Millisecond
	// maxMarkers is how many markers are written before the service's clock is considered stopped.
	maxMarkers = 40
)

// Cut returns a time of the bucket's service that divides its versions, and returns when it is over. With skew as the maximum difference between the
// clocks of the service's servers:
//
//   - what was written before the call has a time up to the cut
//   - what is written after the call has a later time
//
// This also holds for services whose times are whole seconds, because the cut is the end of a second.
//
// The markers that it writes below a prefix also prove what reading the bucket as of that time needs: versions have ids, are listed with the
// newest one first and with the time of their writing, deletions are listed, and a version can be copied. The error is a Precondition that
// says what is not so.
func Cut(ctx context.Context, b Bucket, below string, skew time.Duration) (time.Time, error) {
	if err := Versioned(ctx, b); err != nil {
		return time.Time{}, err
	}
	m := newMarkers(b, below)
	defer m.remove(ctx)
	first, err := m.put(ctx)
	if err != nil {
		return time.Time{}, unproven(b, err)
	}
	cut := first.Add(skew)
	for last := first; !last.After(cut.Add(skew)); {
		if len(m.ids) == maxMarkers {
			return time.Time{}, fault.Errorf(fault.Unavailable, "the clock of the service of %s does not advance: it has shown %s since the snapshot began", b, last)
		}
		if !conc.Sleep(ctx, max(shortestWait, cut.Add(skew).Sub(last))) {
			return time.Time{}, fault.Errorf(fault.Timeout, "waiting for the clock of the service of %s: %w", b, context.Cause(ctx))
		}
		if last, err = m.put(ctx); err != nil {
			return time.Time{}, unproven(b, err)
		}
	}
	if err := m.prove(ctx); err != nil {
		return time.Time{}, unproven(b, err)
	}
	return cut, nil
}

// markers are the versions of a test object.
type markers struct {
	b         Bucket
	key       string
	ids       []string // in the order in which they were written
	times     []time.Time
	created   map[string]bool // for remove
	copyOf    string
	ofTheCopy map[string]bool
}

func newMarkers(b Bucket, below string) *markers {
	key := below + rand.Text()
	return &markers{b: b, key: key, created: map[string]bool{}, copyOf: key + "-copy", ofTheCopy: map[string]bool{}}
}

func (m *markers) what() string {
	return "testing versions with " + m.key + " in " + m.b.String()
}

func markerText(n int) string {
	return fmt.Sprintf("Marker %d of the time of a snapshot. It can be deleted.\n", n)
}

// put writes a marker and returns its time.
func (m *markers) put(ctx context.Context) (time.Time, error) {
	ctx, cancel := context.WithTimeout(ctx, RequestBound)
	defer cancel()
	var out *s3.PutObjectOutput
	err := throttle.Repeat(ctx, func(ctx context.Context) (err error) {
		out, err = m.b.Client.PutObject(ctx, PutInput(m.b, m.key, []byte(markerText(len(m.ids)))), NoRetry)
		return err
	})
	if err != nil {
		err = backend.Classify(err, m.what())
		if Indeterminate(err) {
			m.created[""] = true
		}
		return time.Time{}, err
	}
	id := aws.ToString(out.VersionId)
	m.created[id] = true
	if id == "" || id == nullVersion {
		return time.Time{}, fault.Errorf(fault.Precondition, "%s has no versions: its service wrote an object without a version id", m.b)
	}
	m.ids = append(m.ids, id)
	list, err := m.list(ctx)
	if err != nil {
		return time.Time{}, err
	}
	m.times = append(m.times, list[0].Time)
	for i, v := range list {
		n := len(m.ids) - 1 - i
		switch {
		case v.ID != m.ids[n] || v.Deleted || v.Latest != (i == 0):
			return time.Time{}, fault.Errorf(fault.Precondition, "the service of %s does not list versions with the newest one first", m.b)
		case v.Time.IsZero() || !v.Time.Equal(m.times[n]):
			return time.Time{}, fault.Errorf(fault.Precondition, "the service of %s does not keep the times of versions: that of a version which was "+
				"overwritten changed from %s to %s", m.b, m.times[n].UTC(), v.Time.UTC())
		}
	}
	return list[0].Time, nil
}

// list lists the markers, of which there must be as many as were written.
func (m *markers) list(ctx context.Context) ([]Version, error) {
	page, err := ListVersions(ctx, m.b, m.key, VersionsFrom{})
	switch {
	case backend.IsUnsupported(err):
		return nil, fault.Errorf(fault.Precondition, "the service of %s does not list versions", m.b)
	case err != nil:
		return nil, backend.Classify(err, m.what())
	case len(page.Versions) != len(m.ids):
		return nil, fault.Errorf(fault.Precondition, "the service of %s listed %d versions of an object that has %d", m.b, len(page.Versions), len(m.ids))
	}
	return page.Versions, nil
}

// prove tests that the first marker can be copied, and that a deletion is listed.
func (m *markers) prove(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, RequestBound)
	defer cancel()
	var made *s3.CopyObjectOutput
	err := throttle.Repeat(ctx, func(ctx context.Context) (err error) {
		made, err = m.b.Client.CopyObject(ctx, &s3.CopyObjectInput{Bucket: m.b.Name(), Key: &m.copyOf,
			CopySource: aws.String(m.b.Info.Name + "/" + m.key + "?versionId=" + m.ids[0])}, NoRetry)
		return err
	})
	if err != nil {
		if backend.IsNotFound(err) || backend.IsUnsupported(err) {
			return fault.Errorf(fault.Precondition, "the service of %s does not copy versions: %w", m.b, backend.Classify(err, m.what()))
		}
		m.ofTheCopy[""] = true
		return backend.Classify(err, m.what())
	}
	m.ofTheCopy[aws.ToString(made.VersionId)] = true
	got, err := m.b.Client.GetObject(ctx, &s3.GetObjectInput{Bucket: m.b.Name(), Key: &m.copyOf})
	if err != nil {
		return backend.Classify(err, m.what())
	}
	defer got.Body.Close()
	text, err := io.ReadAll(io.LimitReader(got.Body, 1<<10))
	if err != nil {
		return backend.Classify(err, m.what())
	}
	if string(text) != markerText(0) {
		return fault.Errorf(fault.Precondition, "the service of %s copies the current version of an object when it is asked for an older one", m.b)
	}
	var gone *s3.DeleteObjectOutput
	err = throttle.Repeat(ctx, func(ctx context.Context) (err error) {
		gone, err = m.b.Client.DeleteObject(ctx, &s3.DeleteObjectInput{Bucket: m.b.Name(), Key: &m.key}, NoRetry)
		return err
	})
	if err != nil {
		m.created[""] = true
		return backend.Classify(err, m.what())
	}
	m.created[aws.ToString(gone.VersionId)] = true
	page, err := ListVersions(ctx, m.b, m.key, VersionsFrom{})
	if err != nil {
		return backend.Classify(err, m.what())
	}
	deleted, kept := false, 0
	for _, v := range page.Versions {
		switch {
		case v.Key != m.key:
		case v.Deleted:
			deleted = deleted || v.Latest && v.ID == aws.ToString(gone.VersionId) && !v.Time.IsZero()
		case !v.Latest:
			kept++
		}
	}
	if !deleted || kept != len(m.ids) {
		return fault.Errorf(fault.Precondition, "the service of %s does not list the deletion of an object as its newest version", m.b)
	}
	return nil
}

// remove removes all versions of the test objects.
func (m *markers) remove(ctx context.Context) {
	removeProbe(ctx, m.b, m.key, m.created)
	removeProbe(ctx, m.b, m.copyOf, m.ofTheCopy)
}
