// Package throttle limits the requests of runs that send many, and slows down when the service asks for it.
package throttle

import (
	"context"
	"math/rand/v2"
	"sync"
	"time"

	"github.com/aws/aws-sdk-go-v2/aws"
	"github.com/aws/aws-sdk-go-v2/aws/ratelimit"
	"github.com/aws/aws-sdk-go-v2/aws/retry"
	"github.com/aws/aws-sdk-go-v2/service/s3"

	"github.com/s3-csi/s3-csi-driver/pkg/backend"
	"github.com/s3-csi/s3-csi-driver/pkg/conc"
	"github.com/s3-csi/s3-csi-driver/pkg/fault"
)

const (
	minPause = 200 * time.Millisecond
	maxPause = 20 * time.Second
	// shortPerLong is how many short requests may be in flight for each long one. They must not wait behind a volume with many
	// objects.
	shortPerLong = 16
	// MaxSends is how often a request is sent.
	MaxSends    = 8
	firstRetry  = 100 * time.Millisecond
	longestWait = 10 * time.Second
)

// Class is a class of requests. Each has slots of its own.
type Class int

const (
	// Long is for the requests of a run that has many.
	Long Class = iota
	// Short is for single listings, which must not wait for a run.
	Short
	classes
)

// Throttle limits how many requests are in flight at a service. When the service throttles, it halves the limit and
// pauses, then slowly raises the limit again. Limit and pause are the same for both classes.
type Throttle struct {
	max int

	mu     sync.Mutex
	limit  int // of long requests
	busy   [classes]int
	good   int           // responses since the limit last changed; a long one counts shortPerLong times
	pause  time.Duration // of the next slow-down
	until  time.Time     // no request is sent before
	change chan struct{} // closed when a waiter may have a chance
}

// New returns a Throttle for up to limit long requests in flight.
func New(limit int) *Throttle {
	return &Throttle{max: limit, limit: limit, pause: minPause, change: make(chan struct{})}
}

// weight is how many short slots a request takes.
func (c Class) weight() int {
	if c == Short {
		return 1
	}
	return shortPerLong
}

// acquire waits for a slot, which release returns.
func (t *Throttle) acquire(ctx context.Context, c Class) error {
	for {
		t.mu.Lock()
		wait := time.Until(t.until)
		if wait <= 0 && t.busy[c]*c.weight() < t.limit*shortPerLong {
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
func (t *Throttle) release(c Class, slow bool) {
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
		if t.good += c.weight(); t.good >= 2*t.limit*shortPerLong {
			t.limit, t.good, t.pause = min(t.max, t.limit+1), 0, max(minPause, t.pause/2)
		}
	}
	close(t.change)
	t.change = make(chan struct{})
}

// Send sends a request when the throttle allows it, and retries while the service throttles or does not respond. The request must not
// use retries of the SDK, which would hide this from the throttle.
func (t *Throttle) Send(ctx context.Context, c Class, request func(context.Context) error) error {
	for attempt := 1; ; attempt++ {
		if err := t.acquire(ctx, c); err != nil {
			return err
		}
		err := request(ctx)
		again := err != nil && Transient(err)
		t.release(c, again)
		if !again || attempt == MaxSends || !Pause(ctx, attempt) {
			return err
		}
	}
}

// Repeat sends a request that must not be carried out twice, and again while the service refuses it because it is busy. A request that was sent and
// not answered is not repeated. It has no slot: it is for single requests.
func Repeat(ctx context.Context, request func(context.Context) error) error {
	for attempt := 1; ; attempt++ {
		err := request(ctx)
		if err == nil || !Transient(err) || backend.MayArrive(err) || attempt == MaxSends || !Pause(ctx, attempt) {
			return err
		}
	}
}

// Patient returns a client for a run, which repeats single requests that have no slot as often as Send does. Requests that are sent with Send need
// buckets.NoRetry.
func Patient(c *s3.Client) *s3.Client {
	return s3.New(c.Options(), func(o *s3.Options) {
		o.Retryer = retry.NewStandard(func(o *retry.StandardOptions) {
			o.MaxAttempts, o.RateLimiter = MaxSends, ratelimit.None
			o.Backoff = retry.BackoffDelayerFunc(func(attempt int, _ error) (time.Duration, error) { return delay(attempt), nil })
			o.Retryables = []retry.IsErrorRetryable{retry.IsErrorRetryableFunc(func(err error) aws.Ternary { return aws.BoolTernary(Transient(err)) })}
		})
	})
}

// Pause waits before another attempt. It returns false if ctx ended.
func Pause(ctx context.Context, attempt int) bool {
	return conc.Sleep(ctx, delay(attempt))
}

func delay(attempt int) time.Duration {
	d := min(longestWait, firstRetry<<attempt)
	return d/2 + rand.N(d/2) //nolint:gosec // jitter
}

// Transient reports whether a request may succeed if it is sent again.
func Transient(err error) bool {
	switch fault.KindOf(backend.Classify(err, "")) {
	case fault.Unavailable, fault.Timeout:
		return true
	}
	return backend.IsConflict(err)
}

// Set holds a Throttle for each backend. All methods may be called concurrently.
type Set struct {
	limit int

	mu        sync.Mutex
	throttles map[string]*Throttle
}

// NewSet returns a Set whose throttles allow up to limit long requests in flight.
func NewSet(limit int) *Set { return &Set{limit: limit, throttles: map[string]*Throttle{}} }

// Of returns the throttle of the backend with that name.
func (s *Set) Of(backend string) *Throttle {
	s.mu.Lock()
	defer s.mu.Unlock()
	t := s.throttles[backend]
	if t == nil {
		t = New(s.limit)
		s.throttles[backend] = t
	}
	return t
}
