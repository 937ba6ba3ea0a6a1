package runs

import (
	"context"
	"crypto/rand"
	"slices"
	"strings"
	"sync"
	"time"
)

// A run that writes objects has a claim. It writes the claim at the end of the list in the record of what it makes before it writes anything else,
// and stops when another claim follows. So one run at a time works on what a record describes, and the list shows which runs may still write.
// A run that ends takes its claim out of the list. If it cannot, because its process was killed, the others wait.

const (
	// leastYield is the least time for which another run is left alone.
	leastYield = 10 * time.Second
	// maxClaims is the maximum number of claims in a record. Only processes that are killed again and again leave that many.
	maxClaims = 16
	// minPoll and maxPoll bound the time between two looks at a record.
	minPoll = 5 * time.Millisecond
	maxPoll = 2 * time.Second
)

// Claim is the claim of one run.
type Claim struct {
	ID string
	of *Claims

	mu         sync.Mutex
	unanswered time.Time // when a request ended without an answer; zero: all were answered
}

// Unanswered is called when a request of the run ended without an answer, so that the service may still carry it out.
func (c *Claim) Unanswered() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.unanswered = time.Now()
}

// End is called when the run writes no more and all its requests have ended.
func (c *Claim) End() {
	c.mu.Lock()
	unanswered := c.unanswered
	c.mu.Unlock()
	c.of.mu.Lock()
	defer c.of.mu.Unlock()
	delete(c.of.running, c.ID)
	if !unanswered.IsZero() {
		c.of.last[c.ID] = unanswered
	}
}

// Add returns the list of a record in which this claim follows those that may still write.
func (c *Claim) Add(list []string) []string {
	list = append(c.of.Open(list), c.ID)
	return list[max(0, len(list)-maxClaims):]
}

// Others returns those of a list whose runs may still write, without this claim.
func (c *Claim) Others(list []string) []string {
	return slices.DeleteFunc(c.of.Open(list), func(id string) bool { return id == c.ID })
}

// Is reports whether the claim is the last one of a list, so that its run may write.
func (c *Claim) Is(list []string) bool { return Last(list) == c.ID }

// Last returns the claim of the run that works on what a record with that list describes; "": there is none.
func Last(list []string) string {
	if len(list) == 0 {
		return ""
	}
	return list[len(list)-1]
}

// Claims are the claims of this process, and what it knows of others. All methods may be called concurrently.
type Claims struct {
	lag     time.Duration
	process string // the claims of this process begin with it

	mu      sync.Mutex
	running map[string]bool
	last    map[string]time.Time // no request of these runs is younger
	lost    map[string]time.Time // when this process lost its claim, by the other one's
}

// NewClaims returns the Claims of a process. lag is how long a request that was sent, or a run that has not noticed that another one took over,
// may still write.
func NewClaims(lag time.Duration) *Claims {
	return &Claims{lag: lag, process: rand.Text() + "-", running: map[string]bool{}, last: map[string]time.Time{}, lost: map[string]time.Time{}}
}

// New returns the claim of a run that begins. It must be ended.
func (c *Claims) New() *Claim {
	claim := &Claim{ID: c.process + rand.Text()[:8], of: c}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.running[claim.ID] = true
	return claim
}

// Open returns those of a list whose runs may still write.
func (c *Claims) Open(list []string) []string {
	c.mu.Lock()
	defer c.mu.Unlock()
	return slices.DeleteFunc(slices.Clone(list), func(id string) bool {
		last, known := c.last[id]
		switch {
		case c.running[id]:
			return false
		case known:
			return time.Since(last) >= c.lag
		}
		return strings.HasPrefix(id, c.process)
	})
}

// Revoke is called when a record shows that the runs with these claims must stop, which they notice within the lag.
func (c *Claims) Revoke(list []string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.forgetLocked(c.last, max(2*c.lag, time.Hour))
	for _, id := range list {
		if _, known := c.last[id]; !known && !strings.HasPrefix(id, c.process) {
			c.last[id] = time.Now()
		}
	}
}

func (c *Claims) forgetLocked(m map[string]time.Time, age time.Duration) {
	for id, at := range m {
		if time.Since(at) >= age {
			delete(m, id)
		}
	}
}

// Outwait waits until the runs with the claims that read returns may no longer write. The record says that they must stop.
func (c *Claims) Outwait(ctx context.Context, read func(context.Context) ([]string, error)) error {
	for {
		list, err := read(ctx)
		if err != nil {
			return err
		}
		c.Revoke(list)
		if len(c.Open(list)) == 0 {
			return nil
		}
		t := time.NewTimer(min(max(c.lag/64, minPoll), maxPoll))
		select {
		case <-t.C:
		case <-ctx.Done():
			t.Stop()
			return context.Cause(ctx)
		}
	}
}

// yield is how long another run is left alone: it waits for the lag and finishes.
func (c *Claims) yield() time.Duration { return max(2*c.lag, leastYield) }

// LostTo is called when a run of this process finds the claim of another one. Two processes that are both asked for the same work would
// otherwise take over from each other, and never finish.
func (c *Claims) LostTo(other string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.forgetLocked(c.lost, c.yield())
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
