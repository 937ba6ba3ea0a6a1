package erase

import (
	"cmp"
	"context"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
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

// send sends a request when the throttle allows it, and retries while the service throttles or does not respond. Retries of the SDK are
// disabled, because they would hide this from the throttle.
func (e *erasure) send(ctx context.Context, request func(context.Context) error) error {
	return e.sendAs(ctx, erasing, func(ctx context.Context) error {
		ctx, cancel := context.WithTimeout(ctx, buckets.RequestBound)
		defer cancel()
		return request(ctx)
	})
}

func (e *erasure) sendAs(ctx context.Context, c class, request func(context.Context) error) error {
	for attempt := 1; ; attempt++ {
		if err := e.throttle.acquire(ctx, c); err != nil {
			return err
		}
		err := request(ctx)
		again := err != nil && transient(err)
		e.throttle.release(c, again)
		if !again || attempt == maxSends || !e.pause(ctx, attempt) {
			return err
		}
	}
}

// pause waits before another attempt.
func (e *erasure) pause(ctx context.Context, attempt int) bool {
	d := min(longestWait, firstRetry<<attempt)
	return backend.Sleep(ctx, d/2+rand.N(d/2)) //nolint:gosec // jitter
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
		if e.single.Load() {
			for _, o := range batch {
				if err := e.removeOne(ctx, o); err != nil {
					return err
				}
			}
			return nil
		}
		var out *s3.DeleteObjectsOutput
		err := e.send(ctx, func(ctx context.Context) (err error) {
			// Older services need Content-MD5, newer ones a checksum, which the SDK adds: send both.
			out, err = e.Bucket.Client.DeleteObjects(ctx, deleteInput(e.Bucket, batch), buckets.NoRetry, s3.WithAPIOptions(smithyhttp.AddContentChecksumMiddleware))
			return err
		})
		if backend.IsNotImplemented(err) {
			e.single.Store(true)
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

// judge counts the refused objects of a multi-delete and returns those to retry.
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

const (
	minPause = 200 * time.Millisecond
	maxPause = 20 * time.Second
	// looksPerErase is how many listings of Look may be in flight for each request of an erasure. They are short, and must not wait
	// behind a volume with many objects.
	looksPerErase = 16
)

// class is a class of requests. Each has slots of its own.
type class int

const (
	erasing class = iota
	looking
	classes
)

// throttle limits how many deletion requests are in flight at a service. When the service throttles, it halves the limit and
// pauses, then slowly raises the limit again. Limit and pause are the same for both classes.
type throttle struct {
	max int

	mu     sync.Mutex
	limit  int // of erasing
	busy   [classes]int
	good   int           // responses since the limit last changed; one of erasing counts looksPerErase times
	pause  time.Duration // of the next slow-down
	until  time.Time     // no request is sent before
	change chan struct{} // closed when a waiter may have a chance
}

func newThrottle(limit int) *throttle {
	return &throttle{max: limit, limit: limit, pause: minPause, change: make(chan struct{})}
}

// weight is how many slots of looking a request takes.
func (c class) weight() int {
	if c == looking {
		return 1
	}
	return looksPerErase
}

// acquire waits for a slot, which release returns.
func (t *throttle) acquire(ctx context.Context, c class) error {
	for {
		t.mu.Lock()
		wait := time.Until(t.until)
		if wait <= 0 && t.busy[c]*c.weight() < t.limit*looksPerErase {
			t.busy[c]++
			t.mu.Unlock()
			return nil
		}
		change := t.change
		t.mu.Unlock()
		if wait <= 0 {
			wait = time.Minute // until a slot is free
		}
		timer := time.NewTimer(wait)
		select {
		case <-change:
		case <-timer.C:
		case <-ctx.Done():
			timer.Stop()
			return ctx.Err()
		}
		timer.Stop()
	}
}

// release returns a slot. slow reports that the service throttled the request.
func (t *throttle) release(c class, slow bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.busy[c]--
	now := time.Now()
	switch {
	case slow && now.Before(t.until): // of the same burst
	case slow:
		t.limit, t.good = max(1, t.limit/2), 0
		t.until = now.Add(t.pause)
		t.pause = min(maxPause, 2*t.pause)
	default:
		if t.good += c.weight(); t.good >= 2*t.limit*looksPerErase {
			t.limit, t.good, t.pause = min(t.max, t.limit+1), 0, max(minPause, t.pause/2)
		}
	}
	close(t.change)
	t.change = make(chan struct{})
}
