package provision

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
)

const (
	maxBatch    = 1000 // of S3's DeleteObjects
	maxSends    = 8    // of one request
	firstRetry  = 100 * time.Millisecond
	longestWait = 10 * time.Second
)

// send sends a request of a deletion when the throttle allows, and again while the service is slow or does not answer. The
// request must not be retried by the SDK, which would hide that from the throttle.
func (e *eraser) send(ctx context.Context, request func(context.Context) error) error {
	for attempt := 1; ; attempt++ {
		if err := e.throttle.acquire(ctx); err != nil {
			return err
		}
		bounded, cancel := context.WithTimeout(ctx, requestBound)
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
func (e *eraser) pause(ctx context.Context, attempt int) bool {
	d := min(longestWait, firstRetry<<attempt)
	return sleep(ctx, d/2+rand.N(d/2)) //nolint:gosec // jitter
}

func transient(err error) bool {
	switch fault.KindOf(backend.Classify(err, "")) {
	case fault.Unavailable, fault.Timeout:
		return true
	}
	return backend.IsConflict(err)
}

// remove deletes the objects of a page. What the service refuses to delete is counted and is no error.
func (e *eraser) remove(ctx context.Context, page []object) error {
	if e.still != nil {
		if err := e.still(ctx); err != nil {
			return err
		}
	}
	// Servers that keep objects as files refuse to remove a directory's object before what is in it.
	slices.SortFunc(page, func(a, b object) int {
		dirA, dirB := strings.HasSuffix(a.key, "/"), strings.HasSuffix(b.key, "/")
		switch {
		case dirA && dirB:
			return cmp.Compare(b.key, a.key)
		case dirA:
			return 1
		case dirB:
			return -1
		}
		return 0
	})
	var batch []object
	for i, o := range page {
		// A request in XML would name another key.
		if !xmlSafe(o.key) {
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

// removeBatch deletes up to 1000 objects with one request, and those again that the service was too busy for.
func (e *eraser) removeBatch(ctx context.Context, batch []object) error {
	for attempt := 1; len(batch) > 0; attempt++ {
		if e.onlySingle() {
			return e.removeEach(ctx, batch)
		}
		var out *s3.DeleteObjectsOutput
		err := e.send(ctx, func(ctx context.Context) (err error) {
			// Older services demand Content-MD5, newer ones a checksum, which the SDK adds: they get both.
			out, err = e.pl.client.DeleteObjects(ctx, deleteInput(e.pl, batch), once, s3.WithAPIOptions(smithyhttp.AddContentChecksumMiddleware))
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
		e.progress.objects.Add(int64(len(batch) - len(out.Errors)))
		if len(busy) > 0 && !e.pause(ctx, attempt) {
			return ctx.Err()
		}
		batch = busy
	}
	return nil
}

func deleteInput(pl place, batch []object) *s3.DeleteObjectsInput {
	ids := make([]types.ObjectIdentifier, len(batch))
	for i, o := range batch {
		ids[i] = types.ObjectIdentifier{Key: &o.key, VersionId: optional(o.version)}
	}
	return &s3.DeleteObjectsInput{Bucket: pl.bucket(), Delete: &types.Delete{Objects: ids, Quiet: aws.Bool(true)}}
}

// judge counts what a multi-delete refused and gives what is worth another attempt.
func (e *eraser) judge(batch []object, failed []types.Error, more bool) (busy []object) {
	if len(failed) == 0 {
		return nil
	}
	asked := make(map[object]bool, len(batch))
	for _, o := range batch {
		asked[o] = true
	}
	for _, f := range failed {
		code := aws.ToString(f.Code)
		o := object{aws.ToString(f.Key), aws.ToString(f.VersionId)}
		if more && asked[o] && tooBusy(code) {
			busy = append(busy, o)
			continue
		}
		e.refuse(o, code, aws.ToString(f.Message))
	}
	return busy
}

// tooBusy tells the codes of a key in a multi-delete that say nothing about the key.
func tooBusy(code string) bool {
	switch code {
	case "SlowDown", "InternalError", "ServiceUnavailable", "RequestTimeout", "OperationAborted", "Throttling", "TooManyRequests":
		return true
	}
	return false
}

func (e *eraser) removeEach(ctx context.Context, batch []object) error {
	for _, o := range batch {
		if err := e.removeOne(ctx, o); err != nil {
			return err
		}
	}
	return nil
}

func (e *eraser) removeOne(ctx context.Context, o object) error {
	err := e.send(ctx, func(ctx context.Context) error {
		_, err := e.pl.client.DeleteObject(ctx, &s3.DeleteObjectInput{Bucket: e.pl.bucket(), Key: &o.key, VersionId: optional(o.version)}, once)
		return err
	})
	switch code := backend.ErrorCode(err); {
	case err == nil, backend.IsNotFound(err) && !backend.IsNoSuchBucket(err):
		e.progress.objects.Add(1)
		return nil
	case code != "" && !transient(err) && !backend.IsNoSuchBucket(err):
		e.refuse(o, code, "")
		return nil
	}
	return err
}

func (e *eraser) refuse(o object, code, message string) {
	e.mu.Lock()
	defer e.mu.Unlock()
	what := o.key
	if o.version != "" {
		what += " version " + o.version
	}
	e.refused.add(what, code, message)
	e.progress.refused.Add(1)
}

func (e *eraser) onlySingle() bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.single
}

// xmlSafe tells whether XML 1.0 can hold the key (https://www.w3.org/TR/xml/#charsets) and hands it on unchanged.
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
