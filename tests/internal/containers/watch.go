package containers

import (
	"slices"
	"sync"
	"time"

	"github.com/s3-csi/s3-csi-driver/tests/internal/containers/agent"
)

// Look is how one look of a Watch went.
type Look = agent.Answer

// Watch is a process in a container that looks at a volume every few milliseconds.
type Watch struct {
	c  *Container
	id uint64

	mu    sync.Mutex
	looks []Look
	more  chan struct{} // closed with the next look
}

// Watch reads a file in the container, opening it each time, until the container ends or Stop is called.
func (c *Container) Watch(path string) *Watch {
	c.t.Helper()
	c.mu.Lock()
	defer c.mu.Unlock()
	c.last++
	w := &Watch{c: c, id: c.last, more: make(chan struct{})}
	c.watches[w.id] = w
	if err := c.encoder.Encode(agent.Request{ID: w.id, Op: agent.OpWatch, Path: path}); err != nil {
		c.t.Fatalf("the container takes no requests: %v", err)
	}
	return w
}

func (w *Watch) add(l Look) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.looks = append(w.looks, l)
	close(w.more)
	w.more = make(chan struct{})
}

// Looks are all that have ended so far, the earliest first.
func (w *Watch) Looks() []Look {
	w.mu.Lock()
	defer w.mu.Unlock()
	return slices.Clip(w.looks)
}

// Await waits for a look that began after a moment and pleases, and gives it; ok is false after limit.
func (w *Watch) Await(since time.Time, limit time.Duration, pleases func(Look) bool) (look Look, ok bool) {
	late := time.NewTimer(limit)
	defer late.Stop()
	for seen := 0; ; {
		w.mu.Lock()
		looks, more := w.looks, w.more
		w.mu.Unlock()
		for ; seen < len(looks); seen++ {
			if looks[seen].Began.After(since) && pleases(looks[seen]) {
				return looks[seen], true
			}
		}
		select {
		case <-more:
		case <-late.C:
			return Look{}, false
		case <-w.c.done:
			return Look{}, false
		}
	}
}

// Reads is for Await: a look that read this content.
func Reads(content string) func(Look) bool {
	return func(l Look) bool { return l.OK() && l.Content == content }
}

// Fails is for Await: a look that failed.
func Fails(l Look) bool { return !l.OK() }

// Gap is the longest time from the end of one good look to that of the next: what came in between failed, or hung. Looks that
// fail at the end count up to the last of them; whether it goes on is for Await to tell. Only time in which the machine could
// run counts.
func (w *Watch) Gap() (longest time.Duration) {
	var good Look
	for _, l := range w.Looks() {
		if !good.Ended.IsZero() {
			longest = max(longest, good.End().Until(l.End()))
		}
		if l.OK() {
			good = l
		}
	}
	return longest
}

// Unwanted are the good looks that read something else, such as the container's own file below the mount.
func (w *Watch) Unwanted(content string) (found []Look) {
	for _, l := range w.Looks() {
		if l.OK() && l.Content != content {
			found = append(found, l)
		}
	}
	return found
}

// Stop ends the watch; a look that is under way may still come.
func (w *Watch) Stop() {
	w.c.mu.Lock()
	defer w.c.mu.Unlock()
	_ = w.c.encoder.Encode(agent.Request{ID: w.id, Op: agent.OpStop}) // a container that has ended watches nothing
}
