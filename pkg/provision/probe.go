package provision

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
)

// cleanupBound bounds the removal of a test's traces, which happens even when the caller has gone.
const cleanupBound = 10 * time.Second

func (pl place) id() bucketID { return bucketID{pl.be.Revision(), pl.info.Name} }

// conditional tells whether the bucket's service honours If-None-Match and If-Match. It is proven once per bucket, by what the
// service does and not by what it says it does. Where it does not, the operator must have promised a single controller.
func (p *Provisioner) conditional(ctx context.Context, pl place) (bool, error) {
	known := func() (proven, conditional bool) {
		p.known.see(pl.id(), func(f *facts) { proven, conditional = f.proven, f.conditional })
		return
	}
	proven, conditional := known()
	if !proven {
		release, err := p.locks.Lock(ctx, "probe "+pl.be.Name+" "+pl.info.Name)
		if err != nil {
			return false, fault.Errorf(fault.Timeout, "waiting for the test of conditional writes in %s: %w", pl, err)
		}
		defer release()
		if proven, conditional = known(); !proven {
			if conditional, err = proveConditional(ctx, pl.asOwn(), probesPrefix); err != nil {
				return false, err
			}
			p.known.see(pl.id(), func(f *facts) { f.proven, f.conditional = true, conditional })
		}
	}
	if !conditional && !pl.be.SingleController {
		return false, fault.Errorf(fault.Precondition, "%s ignores or refuses conditional writes (If-None-Match, If-Match), so that two controllers could make the same volume twice: "+
			"if only one controller of one cluster ever works on this backend, set singleController: true for it in the driver's config file", pl)
	}
	return conditional, nil
}

// proveConditional writes a key of its own below a prefix: once more where it must not be there, and once over a version that never was.
func proveConditional(ctx context.Context, pl place, below string) (honoured bool, err error) {
	key := below + rand.Text()
	what := "testing conditional writes with " + key + " in " + pl.String()
	versions := map[string]bool{} // of the test object; "" where the bucket has none or it is not known
	put := func(set func(*s3.PutObjectInput)) error {
		in := putInput(pl, key, []byte("A test of conditional writes. It can be removed.\n"))
		set(in)
		out, err := pl.client.PutObject(ctx, in, once)
		switch {
		case err == nil:
			versions[aws.ToString(out.VersionId)] = true
		case !backend.IsPreconditionFailed(err) && indeterminate(backend.Classify(err, what)):
			versions[""] = true
		}
		return err
	}
	defer func() { removeProbe(ctx, pl, key, versions) }()
	none := func(in *s3.PutObjectInput) { in.IfNoneMatch = aws.String("*") }
	wrong := func(in *s3.PutObjectInput) { in.IfMatch = aws.String(`"00000000000000000000000000000000"`) }
	if err := put(none); err != nil {
		if refusesHeader(err) {
			return false, nil
		}
		return false, backend.Classify(err, what)
	}
	for _, condition := range []func(*s3.PutObjectInput){none, wrong} {
		switch err := put(condition); {
		case err == nil, refusesHeader(err):
			return false, nil
		case !backend.IsPreconditionFailed(err):
			return false, backend.Classify(err, what)
		}
	}
	return true, nil
}

// removeProbe removes a test object; on a versioned bucket nothing of it is to stay.
func removeProbe(ctx context.Context, pl place, key string, versions map[string]bool) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), cleanupBound)
	defer cancel()
	for v := range versions {
		in := &s3.DeleteObjectInput{Bucket: pl.bucket(), Key: &key}
		if v != "" {
			in.VersionId = &v
		}
		if _, err := pl.client.DeleteObject(ctx, in); err != nil {
			klog.FromContext(ctx).Error(err, "A test object could not be removed; it can be removed by hand", "bucket", pl.info.Name, "key", key)
		}
	}
}

// refusesHeader tells whether a service says that it has no such condition.
func refusesHeader(err error) bool {
	return backend.IsNotImplemented(err) || backend.ErrorCode(err) == "InvalidArgument" || backend.ErrorCode(err) == "InvalidRequest"
}

// uploadListing finds out, once per bucket, how unfinished uploads can be listed. MinIO matches a prefix only with whole keys,
// and lists all where there is none.
func (p *Provisioner) uploadListing(ctx context.Context, pl place) (uploadListing, error) {
	known := func() (how uploadListing) {
		p.known.see(pl.id(), func(f *facts) { how = f.uploads })
		return
	}
	if how := known(); how != uploadsUnknown {
		return how, nil
	}
	release, err := p.locks.Lock(ctx, "probe "+pl.be.Name+" "+pl.info.Name)
	if err != nil {
		return 0, fault.Errorf(fault.Timeout, "waiting for the test of upload listings in %s: %w", pl, err)
	}
	defer release()
	if how := known(); how != uploadsUnknown {
		return how, nil
	}
	how, err := proveUploadListing(ctx, pl.asOwn(), probesPrefix)
	if err != nil {
		return 0, err
	}
	if how == uploadsNone {
		klog.FromContext(ctx).Info("The service does not list unfinished uploads: those of deleted volumes stay until the service expires them", "backend", pl.be.Name, "bucket", pl.info.Name)
	}
	p.known.see(pl.id(), func(f *facts) { f.uploads = how })
	return how, nil
}

func proveUploadListing(ctx context.Context, pl place, below string) (how uploadListing, err error) {
	prefix := below + rand.Text() + "/"
	key := prefix + "x"
	what := "testing how unfinished uploads are listed with " + key + " in " + pl.String()
	up, err := pl.client.CreateMultipartUpload(ctx, &s3.CreateMultipartUploadInput{Bucket: pl.bucket(), Key: &key}, once)
	if err != nil {
		if backend.IsNotImplemented(err) {
			return uploadsNone, nil
		}
		return 0, backend.Classify(err, what)
	}
	defer func() {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), cleanupBound)
		defer cancel()
		_, abortErr := pl.client.AbortMultipartUpload(ctx, &s3.AbortMultipartUploadInput{Bucket: pl.bucket(), Key: &key, UploadId: up.UploadId})
		if abortErr != nil && !backend.IsNotFound(abortErr) {
			klog.FromContext(ctx).Error(abortErr, "A test upload could not be aborted", "bucket", pl.info.Name, "key", key)
		}
	}()
	for _, try := range []struct {
		how    uploadListing
		prefix string
	}{{uploadsByPrefix, prefix}, {uploadsWide, ""}} {
		seen := false
		err := listUploads(ctx, pl, try.prefix, func(key, id string) error {
			seen = seen || strings.HasPrefix(key, prefix) && id == aws.ToString(up.UploadId)
			return nil
		})
		switch {
		case backend.IsNotImplemented(err):
			return uploadsNone, nil
		case err != nil:
			return 0, backend.Classify(err, what)
		case seen:
			return try.how, nil
		}
	}
	return uploadsNone, nil
}
