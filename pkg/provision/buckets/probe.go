package buckets

import (
	"context"
	"crypto/rand"
	"strings"
	"time"

	"github.com/aws/aws-sdk-go-v2/aws"
	"github.com/aws/aws-sdk-go-v2/service/s3"
	"k8s.io/klog/v2"

	"github.com/s3-csi/s3-csi-driver/pkg/backend"
	"github.com/s3-csi/s3-csi-driver/pkg/fault"
	"github.com/s3-csi/s3-csi-driver/pkg/provision/throttle"
	"github.com/s3-csi/s3-csi-driver/pkg/volume"
)

const (
	// CleanupBound is the timeout of a clean-up, which also runs after the caller's context ended.
	CleanupBound = 10 * time.Second

	// askAgain is how long a service that does not list unfinished uploads is not tested again.
	askAgain = time.Hour

	// Probes is the prefix of the driver's own test objects, which are no user's data.
	Probes = volume.RecordPrefix + "/probe/"
)

// UploadListing is how a service lists unfinished uploads.
type UploadListing int

// How a service lists unfinished uploads.
const (
	UploadsByPrefix UploadListing = iota + 1
	UploadsWide                   // a prefix matches whole keys only: list all, and filter
	UploadsNone                   // not at all
)

// Conditional reports whether the bucket's service honours If-None-Match and If-Match. It is tested once per bucket, by actual
// writes. If not, the backend must have singleController.
func (o *Opener) Conditional(ctx context.Context, b Bucket) (bool, error) {
	honoured, err := o.cache.get(ctx, b, "the test of conditional writes", func(ctx context.Context) (k known, err error) {
		honoured, err := ProbeConditional(ctx, b.AsOwn(), Probes)
		if honoured {
			k.value = 1
		}
		k.ttl = Unlimited
		return k, err
	})
	if err == nil && honoured == 0 && !b.Backend.SingleController {
		err = fault.Errorf(fault.Precondition, "%s ignores or refuses conditional writes (If-None-Match, If-Match), so two controllers could create the "+
			"same volume twice: "+
			"if only one controller of one cluster ever uses this backend, set singleController: true for it in the driver's config file", b)
	}
	return err == nil && honoured == 1, err
}

// ProbeConditional reports whether conditional writes are honoured. It writes a new key below a prefix, then again under two conditions
// that do not hold: the key must not exist, and it must have an ETag that it never had.
func ProbeConditional(ctx context.Context, b Bucket, below string) (honoured bool, err error) {
	key := below + rand.Text()
	what := "testing conditional writes with " + key + " in " + b.String()
	versions := map[string]bool{} // of the test object; "" if the bucket is not versioned or it is unknown
	put := func(set func(*s3.PutObjectInput)) error {
		return throttle.Repeat(ctx, func(ctx context.Context) error {
			in := PutInput(b, key, []byte("Test object for conditional writes. It can be deleted.\n"))
			set(in)
			out, err := b.Client.PutObject(ctx, in, NoRetry)
			switch {
			case err == nil:
				versions[aws.ToString(out.VersionId)] = true
			case !backend.IsPreconditionFailed(err) && Indeterminate(backend.Classify(err, what)):
				versions[""] = true
			}
			return err
		})
	}
	defer func() { removeProbe(ctx, b, key, versions) }()
	none := func(in *s3.PutObjectInput) { in.IfNoneMatch = aws.String("*") }
	wrong := func(in *s3.PutObjectInput) { in.IfMatch = aws.String(`"00000000000000000000000000000000"`) }
	if err := put(none); err != nil {
		if backend.IsUnsupported(err) {
			return false, nil
		}
		return false, backend.Classify(err, what)
	}
	for _, condition := range []func(*s3.PutObjectInput){none, wrong} {
		switch err := put(condition); {
		case err == nil, backend.IsUnsupported(err):
			return false, nil
		case !backend.IsPreconditionFailed(err):
			return false, backend.Classify(err, what)
		}
	}
	return true, nil
}

// removeProbe removes a test object, with all its versions. A version "" stands for one that is not known.
func removeProbe(ctx context.Context, b Bucket, key string, versions map[string]bool) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), CleanupBound)
	defer cancel()
	remove := func(version string) (versioned bool) {
		out, err := b.Client.DeleteObject(ctx, &s3.DeleteObjectInput{Bucket: b.Name(), Key: &key, VersionId: backend.Optional(version)})
		if err != nil {
			klog.FromContext(ctx).Error(err, "Removing test object failed", "bucket", b.Info.Name, "key", key)
			return false
		}
		return aws.ToBool(out.DeleteMarker) && aws.ToString(out.VersionId) != ""
	}
	if versions[""] && remove("") {
		page, err := ListVersions(ctx, b, key, VersionsFrom{})
		if err != nil {
			klog.FromContext(ctx).Error(err, "Listing versions of test object failed", "bucket", b.Info.Name, "key", key)
		}
		for _, v := range page.Versions {
			if v.Key == key {
				versions[v.ID] = true
			}
		}
	}
	for v := range versions {
		if v != "" {
			remove(v)
		}
	}
}

// uploadListing determines, once per bucket, how unfinished uploads are listed. MinIO matches a prefix with whole keys only, and
// lists all uploads without a prefix.
func (o *Opener) uploadListing(ctx context.Context, b Bucket) (UploadListing, error) {
	how, err := o.cache.get(ctx, b, "the test of upload listings", func(ctx context.Context) (known, error) {
		how, err := ProbeUploadListing(ctx, b.AsOwn(), Probes)
		ttl := Unlimited
		if how == UploadsNone {
			ttl = askAgain // some refusals have other reasons
			klog.FromContext(ctx).Info("Service does not list unfinished uploads, leaving them", "backend", b.Backend.Name, "bucket", b.Info.Name)
		}
		return known{value: int(how), ttl: ttl}, err
	})
	return UploadListing(how), err
}

// ProbeUploadListing starts an upload below a prefix and looks for it in listings.
func ProbeUploadListing(ctx context.Context, b Bucket, below string) (how UploadListing, err error) {
	prefix := below + rand.Text() + "/"
	key := prefix + "x"
	what := "testing how unfinished uploads are listed with " + key + " in " + b.String()
	var up *s3.CreateMultipartUploadOutput
	err = throttle.Repeat(ctx, func(ctx context.Context) (err error) {
		up, err = b.Client.CreateMultipartUpload(ctx, &s3.CreateMultipartUploadInput{Bucket: b.Name(), Key: &key}, NoRetry)
		return err
	})
	if err != nil {
		if backend.IsUnsupported(err) {
			return UploadsNone, nil
		}
		return 0, backend.Classify(err, what)
	}
	defer func() {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), CleanupBound)
		defer cancel()
		_, abortErr := b.Client.AbortMultipartUpload(ctx, &s3.AbortMultipartUploadInput{Bucket: b.Name(), Key: &key, UploadId: up.UploadId})
		if abortErr != nil && !backend.IsNotFound(abortErr) {
			klog.FromContext(ctx).Error(abortErr, "Aborting test upload failed", "bucket", b.Info.Name, "key", key)
		}
	}()
	for _, try := range []struct {
		how    UploadListing
		prefix string
	}{{UploadsByPrefix, prefix}, {UploadsWide, ""}} {
		seen := false
		err := listUploads(ctx, b, try.prefix, func(key, id string) error {
			seen = seen || strings.HasPrefix(key, prefix) && id == aws.ToString(up.UploadId)
			return nil
		})
		switch {
		case backend.IsUnsupported(err):
			return UploadsNone, nil
		case err != nil:
			return 0, backend.Classify(err, what)
		case seen:
			return try.how, nil
		}
	}
	return UploadsNone, nil
}
