package erase

import (
	"cmp"
	"context"
	"slices"
	"strings"
	"sync/atomic"
	"time"
	"unicode/utf8"

	"github.com/aws/aws-sdk-go-v2/aws"
	"github.com/aws/aws-sdk-go-v2/service/s3"
	"github.com/aws/aws-sdk-go-v2/service/s3/types"
	"github.com/aws/smithy-go"
	smithyhttp "github.com/aws/smithy-go/transport/http"
	"k8s.io/klog/v2"

	"github.com/s3-csi/s3-csi-driver/pkg/backend"
	"github.com/s3-csi/s3-csi-driver/pkg/provision/buckets"
	"github.com/s3-csi/s3-csi-driver/pkg/provision/throttle"
)

const (
	// maxBatch is the limit of S3's DeleteObjects.
	maxBatch = 1000
	// rememberSingles is how long a service that refused DeleteObjects is not asked again.
	rememberSingles = time.Hour
)

// send sends a request of an erasure, with its own timeout.
func (e *erasure) send(ctx context.Context, request func(context.Context) error) error {
	return e.throttle.Send(ctx, throttle.Long, func(ctx context.Context) error {
		ctx, cancel := context.WithTimeout(ctx, buckets.RequestBound)
		defer cancel()
		return request(ctx)
	})
}

// remove deletes the objects of a page. An object that the service refuses to delete is counted and is no error.
func (e *erasure) remove(ctx context.Context, page []buckets.Object) error {
	if e.task.Still != nil {
		if err := e.task.Still(ctx); err != nil {
			return err
		}
	}
	// Servers that keep objects as files refuse to delete a directory's object before those in it.
	slices.SortFunc(page, func(a, b buckets.Object) int {
		dirA, dirB := strings.HasSuffix(a.Key, "/"), strings.HasSuffix(b.Key, "/")
		switch {
		case dirA && dirB:
			return cmp.Compare(b.Key, a.Key)
		case dirA:
			return 1
		case dirB:
			return -1
		}
		return 0
	})
	var safe []buckets.Object
	for _, o := range page {
		if xmlSafe(o.Key) {
			safe = append(safe, o)
		} else if err := e.removeOne(ctx, o); err != nil { // the key cannot be expressed in XML
			return err
		}
	}
	for batch := range slices.Chunk(safe, maxBatch) {
		if err := e.removeBatch(ctx, batch); err != nil {
			return err
		}
	}
	return nil
}

// removeBatch deletes up to 1000 objects with one request, and retries those that the service was too busy for.
func (e *erasure) removeBatch(ctx context.Context, batch []buckets.Object) error {
	for attempt := 1; len(batch) > 0; attempt++ {
		if e.single() {
			for _, o := range batch {
				if err := e.removeOne(ctx, o); err != nil {
					return err
				}
			}
			return nil
		}
		var out *s3.DeleteObjectsOutput
		err := e.send(ctx, func(ctx context.Context) (err error) {
			ctx = backend.WithoutHeaderTimeout(ctx)
			// Older services need Content-MD5, newer ones a checksum, which the SDK adds: send both.
			out, err = e.task.Bucket.Client.DeleteObjects(ctx, deleteInput(e.task.Bucket, batch), buckets.NoRetry,
				s3.WithAPIOptions(smithyhttp.AddContentChecksumMiddleware))
			return err
		})
		if backend.IsUnsupported(err) {
			// It is the request that the service does not support, if it deletes the first object alone.
			switch oneErr := e.deleteOne(ctx, batch[0]); {
			case backend.IsUnsupported(oneErr):
				return err
			case oneErr == nil:
				e.removed(batch[0], &e.task.Progress.objects)
				batch = batch[1:]
			}
			klog.FromContext(ctx).Info("Service has no DeleteObjects, deleting objects one by one", "backend", e.task.Bucket.Backend.Name, "reason", err)
			e.singles.Store(e.task.Bucket.Backend.Name, time.Now().Add(rememberSingles))
			continue
		}
		if err != nil {
			return err
		}
		busy := e.judge(batch, out.Errors, attempt < throttle.MaxSends)
		if len(busy) > 0 && !throttle.Pause(ctx, attempt) {
			return ctx.Err()
		}
		batch = busy
	}
	return nil
}

func deleteInput(b buckets.Bucket, batch []buckets.Object) *s3.DeleteObjectsInput {
	ids := make([]types.ObjectIdentifier, len(batch))
	for i, o := range batch {
		ids[i] = types.ObjectIdentifier{Key: &o.Key, VersionId: o.VersionID()}
	}
	return &s3.DeleteObjectsInput{Bucket: b.Name(), Delete: &types.Delete{Objects: ids, Quiet: aws.Bool(true)}}
}

// single reports whether the service is known to have no multi-delete.
func (e *erasure) single() bool {
	until, ok := e.singles.Load(e.task.Bucket.Backend.Name)
	return ok && time.Now().Before(until.(time.Time)) //nolint:forcetypeassert // nothing else is stored
}

// judge counts the removed and the refused objects of a multi-delete and returns those to retry.
func (e *erasure) judge(batch []buckets.Object, failed []types.Error, more bool) (busy []buckets.Object) {
	left := make(map[buckets.Object]bool, len(batch))
	for _, o := range batch {
		left[o] = true
	}
	for _, f := range failed {
		code := aws.ToString(f.Code)
		o, err := buckets.Object{Key: aws.ToString(f.Key), Version: aws.ToString(f.VersionId)}, &smithy.GenericAPIError{Code: code}
		switch {
		case left[o] && backend.IsNotFound(err) && !backend.IsNoSuchBucket(err):
			continue
		case more && left[o] && throttle.Transient(err): // it is about the service and not about the key
			busy = append(busy, o)
		default:
			e.refuse(o, code, aws.ToString(f.Message))
		}
		delete(left, o)
	}
	for o := range left {
		e.removed(o, &e.task.Progress.objects)
	}
	return busy
}

// removed counts an object that the service says it has removed, unless it said so before.
func (e *erasure) removed(o buckets.Object, count *atomic.Int64) {
	e.mu.Lock()
	defer e.mu.Unlock()
	again := e.before[o] || e.now[o]
	if len(e.now) < maxTracked {
		e.now[o] = true
	}
	if again {
		e.again = append(e.again[:min(len(e.again), maxTracked)], o)
		return
	}
	count.Add(1)
}

// deleteOne deletes an object. It is no error if there is none.
func (e *erasure) deleteOne(ctx context.Context, o buckets.Object) error {
	err := e.send(ctx, func(ctx context.Context) error {
		_, err := e.task.Bucket.Client.DeleteObject(ctx, &s3.DeleteObjectInput{Bucket: e.task.Bucket.Name(), Key: &o.Key, VersionId: o.VersionID()}, buckets.NoRetry)
		return err
	})
	if backend.IsNotFound(err) && !backend.IsNoSuchBucket(err) {
		return nil
	}
	return err
}

func (e *erasure) removeOne(ctx context.Context, o buckets.Object) error {
	err := e.deleteOne(ctx, o)
	switch code := backend.ErrorCode(err); {
	case err == nil:
		e.removed(o, &e.task.Progress.objects)
		return nil
	case code != "" && !throttle.Transient(err) && !backend.IsNoSuchBucket(err):
		e.refuse(o, code, "")
		return nil
	}
	return err
}

func (e *erasure) refuse(o buckets.Object, code, message string) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.refused.add(nameOf(o), code, message)
	e.task.Progress.refused.Add(1)
}

// nameOf names an object for messages.
func nameOf(o buckets.Object) string {
	switch {
	case strings.HasPrefix(o.Version, uploadMark):
		return o.Version + " of " + o.Key
	case o.Version != "":
		return o.Key + " version " + o.Version
	}
	return o.Key
}

// xmlSafe reports whether XML 1.0 can represent the key (https://www.w3.org/TR/xml/#charsets).
func xmlSafe(key string) bool {
	if !utf8.ValidString(key) {
		return false
	}
	for _, r := range key {
		if r < 0x20 || r == utf8.RuneError || r == 0xFFFE || r == 0xFFFF {
			return false
		}
	}
	return true
}
