package runs

import (
	"context"
	"crypto/rand"
	"sync"
	"time"
)

// Claim lets one run at a time work on what a record in S3 describes. Each run writes an id of its own into the record, and stops when it finds
// another one there.
type Claim struct {
	ID string
	// tookOver is when this run took over from another one; zero: it did not.
	tookOver time.Time
}

// NewClaim returns the claim of a new run.
func NewClaim() *Claim { return &Claim{ID: rand.Text()} }

// TookOver is called when the claim is in the record and another one was before.
func (c *Claim) TookOver() { c.tookOver = time.Now() }

// IsTakeOver reports whether TookOver was called.
func (c *Claim) IsTakeOver() bool { return !c.tookOver.IsZero() }

// Outwait waits until a run from which this one took over can write no more, which is lag after the take-over: otherwise its objects would come
// after this run has compared or removed them.
func (c *Claim) Outwait(ctx context.Context, lag time.Duration) error {
	if !c.IsTakeOver() {
		return nil
	}
	t := time.NewTimer(time.Until(c.tookOver.Add(lag)))
	defer t.Stop()
	select {
	case <-t.C:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// leastYield is the least time for which a run is left alone, even if Outwait waits for less.
const leastYield = 10 * time.Second

// Claims remembers which runs of other processes took over from runs of this one. Two processes that are both asked for the same work would
// otherwise take over from each other, and never finish. All methods may be called concurrently.
type Claims struct {
	lag time.Duration

	mu   sync.Mutex
	lost map[string]time.Time // when this process lost its claim, by the other one's
}

// NewClaims returns Claims of runs that wait for lag after a take-over.
func NewClaims(lag time.Duration) *Claims {
	return &Claims{lag: lag, lost: map[string]time.Time{}}
}

// yield is how long another run is left alone: it waits for lag and finishes.
func (c *Claims) yield() time.Duration { return max(2*c.lag, leastYield) }

// LostTo is called when a run of this process finds the claim of another one.
func (c *Claims) LostTo(other string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for id, at := range c.lost {
		if time.Since(at) >= c.yield() {
			delete(c.lost, id)
		}
	}
	if _, known := c.lost[other]; !known {
		c.lost[other] = time.Now()
	}
}

// MayTakeOver reports whether a run of this process may take over from the one with that claim.
func (c *Claims) MayTakeOver(other string) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	at, lost := c.lost[other]
	return !lost || time.Since(at) >= c.yield()
}
