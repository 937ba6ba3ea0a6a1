package runner

import (
	"context"
	"sync"
	"time"

	"k8s.io/klog/v2"
)

// timelineLevel is the verbosity at which timelines are logged.
const timelineLevel = 4

// timeline records when the steps of a start were done. A nil timeline records nothing.
type timeline struct {
	began time.Time
	mu    sync.Mutex
	steps []any // names and times since began, for a log line
}

// newTimeline returns a timeline that begins now, or nil if it would not be logged.
func newTimeline(ctx context.Context) *timeline {
	if !klog.FromContext(ctx).V(timelineLevel).Enabled() {
		return nil
	}
	return &timeline{began: time.Now()}
}

// done records that a step was done.
func (t *timeline) done(step string) {
	if t == nil {
		return
	}
	took := time.Since(t.began).Round(10 * time.Microsecond)
	t.mu.Lock()
	defer t.mu.Unlock()
	t.steps = append(t.steps, step, took)
}

// log logs the times of the steps since the beginning.
func (t *timeline) log(ctx context.Context, mount string) {
	if t == nil {
		return
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	klog.FromContext(ctx).V(timelineLevel).Info("Timeline of the start", append([]any{"mount", mount}, t.steps...)...)
}
