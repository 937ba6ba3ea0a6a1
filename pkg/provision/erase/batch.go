package erase

import (
	"cmp"
	"context"
	"math/rand/v2"
	"slices"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/aws/aws-sdk-go-v2/aws"
	"github.com/aws/aws-sdk-go-v2/service/s3"
	"github.com/aws/aws-sdk-go-v2/service/s3/types"
	smithyhttp "github.com/aws/smithy-go/transport/http"

	"github.com/s3-csi/s3-csi-driver/pkg/backend"
	"github.com/s3-csi/s3-csi-driver/pkg/fault"
	"github.com/s3-csi/s3-csi-driver/pkg/provision/buckets"
)

const (
	maxBatch    = 1000 // of S3's DeleteObjects
	maxSends    = 8    // of one request
	firstRetry  = 100 * time.Millisecond
	longestWait = 10 * time.Second
)

// send sends a request when the throttle allows, and again while the service is slow or does not answer. The SDK must not retry the
// request, which would hide that from the throttle.
func (e *erasure) send(ctx context.Context, request func(context.Context) error) error {
	for attempt := 1; ; attempt++ {
		if err := e.throttle.acquire(ctx); err != nil {
			return err
		}
		bounded, cancel := context.WithTimeout(ctx, buckets.RequestBound)
		err := request(bounded)
		cancel()
		again := err != nil && transient(err)
		e.throttle.release(again)
		if !again || attempt == maxSends || !e.pause(ctx, attempt) {
			return err
		}
	}
}

// pause waits before another attempt.
func (e *erasure) pause(ctx context.Context, attempt int) bool {
	d := min(longestWait, firstRetry<<attempt)
	return buckets.Sleep(ctx, d/2+rand.N(d/2)) //nolint:gosec // jitter
}

func transient(err error) bool {
	switch fault.KindOf(backend.Classify(err, "")) {
	case fault.Unavailable, fault.Timeout:
		return true
	}
	return backend.IsConflict(err)
}

// remove deletes the objects of a page. An object that the service refuses to delete is counted and is no error.
func (e *erasure) remove(ctx context.Context, page []buckets.Object) error {
	if e.Still != nil {
		if err := e.Still(ctx); err != nil {
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
	var batch []buckets.Object
	for i, o := range page {
		// A request in XML would name another key.
		if !xmlSafe(o.Key) {
			if err := e.removeOne(ctx, o); err != nil {
				return err
			}
		} else {
			batch = append(batch, o)
		}
		if len(batch) == maxBatch || i == len(page)-1 && len(batch) > 0 {
			if err := e.removeBatch(ctx, batch); err != nil {
				return err
			}
			batch = nil
		}
	}
	return nil
}

// removeBatch deletes up to 1000 objects with one request, and retries those that the service was too busy for.
func (e *erasure) removeBatch(ctx context.Context, batch []buckets.Object) error {
	for attempt := 1; len(batch) > 0; attempt++ {
		if e.onlySingle() {
			return e.removeEach(ctx, batch)
		}
		var out *s3.DeleteObjectsOutput
		err := e.send(ctx, func(ctx context.Context) (err error) {
			// Older services need Content-MD5, newer ones a checksum, which the SDK adds: send both.
			out, err = e.Bucket.Client.DeleteObjects(ctx, deleteInput(e.Bucket, batch), buckets.NoRetry, s3.WithAPIOptions(smithyhttp.AddContentChecksumMiddleware))
			return err
		})
		if backend.IsNotImplemented(err) {
			e.mu.Lock()
			e.single = true
			e.mu.Unlock()
			continue
		}
		if err != nil {
			return err
		}
		busy := e.judge(batch, out.Errors, attempt < maxSends)
		e.Progress.objects.Add(int64(len(batch) - len(out.Errors)))
		if len(busy) > 0 && !e.pause(ctx, attempt) {
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

// judge counts what a multi-delete refused and returns what is worth another attempt.
func (e *erasure) judge(batch []buckets.Object, failed []types.Error, more bool) (busy []buckets.Object) {
	if len(failed) == 0 {
		return nil
	}
	asked := make(map[buckets.Object]bool, len(batch))
	for _, o := range batch {
		asked[o] = true
	}
	for _, f := range failed {
		code := aws.ToString(f.Code)
		o := buckets.Object{Key: aws.ToString(f.Key), Version: aws.ToString(f.VersionId)}
		if more && asked[o] && tooBusy(code) {
			busy = append(busy, o)
			continue
		}
		e.refuse(o, code, aws.ToString(f.Message))
	}
	return busy
}

// tooBusy reports whether an error code in a multi-delete is about the service and not about the key.
func tooBusy(code string) bool {
	switch code {
	case "SlowDown", "InternalError", "ServiceUnavailable", "RequestTimeout", "OperationAborted", "Throttling", "TooManyRequests":
		return true
	}
	return false
}

func (e *erasure) removeEach(ctx context.Context, batch []buckets.Object) error {
	for _, o := range batch {
		if err := e.removeOne(ctx, o); err != nil {
			return err
		}
	}
	return nil
}

func (e *erasure) removeOne(ctx context.Context, o buckets.Object) error {
	err := e.send(ctx, func(ctx context.Context) error {
		_, err := e.Bucket.Client.DeleteObject(ctx, &s3.DeleteObjectInput{Bucket: e.Bucket.Name(), Key: &o.Key, VersionId: o.VersionID()}, buckets.NoRetry)
		return err
	})
	switch code := backend.ErrorCode(err); {
	case err == nil, backend.IsNotFound(err) && !backend.IsNoSuchBucket(err):
		e.Progress.objects.Add(1)
		return nil
	case code != "" && !transient(err) && !backend.IsNoSuchBucket(err):
		e.refuse(o, code, "")
		return nil
	}
	return err
}

func (e *erasure) refuse(o buckets.Object, code, message string) {
	e.mu.Lock()
	defer e.mu.Unlock()
	what := o.Key
	if o.Version != "" {
		what += " version " + o.Version
	}
	e.refused.add(what, code, message)
	e.Progress.refused.Add(1)
}

func (e *erasure) onlySingle() bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.single
}

// xmlSafe reports whether XML 1.0 carries the key unchanged (https://www.w3.org/TR/xml/#charsets).
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
