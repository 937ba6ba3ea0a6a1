package runner

import (
	"context"
	"errors"
	"sync"
	"time"

	"k8s.io/klog/v2"

	"github.com/s3-csi/s3-csi-driver/pkg/backend"
	"github.com/s3-csi/s3-csi-driver/pkg/fault"
	"github.com/s3-csi/s3-csi-driver/pkg/mount/creds"
)

// errElsewhere means that a client was started for another region or owner of the bucket than the trial found.
var errElsewhere = errors.New("the bucket has another region or owner than expected")

// timelineLevel is the verbosity at which timelines are logged.
const timelineLevel = 4

// timeline records when the steps of a start were done.
type timeline struct {
	began time.Time
	mu    sync.Mutex
	steps []any // names and times since began, for a log line
}

// done records that a step was done.
func (t *timeline) done(step string) {
	took := time.Since(t.began).Round(10 * time.Microsecond)
	t.mu.Lock()
	defer t.mu.Unlock()
	t.steps = append(t.steps, step, took)
}

// log logs the times of the steps since the beginning.
func (t *timeline) log(ctx context.Context, mount string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	klog.FromContext(ctx).V(timelineLevel).Info("Timeline of the start", append([]any{"mount", mount}, t.steps...)...)
}

// trial makes and proves the credentials of a new mount, beside everything that does not need them.
type trial struct {
	expected backend.BucketInfo // what it will probably find
	known    bool               // expected is known
	cancel   context.CancelFunc
	steps    timeline
	done     chan struct{} // closed when the following is valid
	err      error
	grant    *creds.Grant
}

// beginTrial begins a trial, which has the grant until it is done. The context that it returns ends with ctx, with the trial's end, and
// when the credentials are refused.
func (r *Runner) beginTrial(ctx context.Context, p StartParams, be backend.Backend) (*trial, context.Context) {
	t := &trial{grant: p.Grant, done: make(chan struct{}), steps: timeline{began: time.Now()}}
	t.expected, t.known = r.Creds.Expect(p.Grant, be, p.Spec)
	ctx, t.cancel = context.WithCancel(ctx)
	up, refuse := context.WithCancel(ctx)
	go func() {
		if t.err = r.Creds.Prove(ctx, p.Grant, be, p.Spec); t.err != nil {
			close(t.done) // before up ends, because the trial's error explains what fails then
			refuse()
			return
		}
		t.steps.done("proven")
		close(t.done)
	}()
	return t, up
}

// end cancels the trial and waits for its end.
func (t *trial) end() {
	t.cancel()
	<-t.done
}

// wait waits for the end of the trial and returns its error.
func (t *trial) wait(ctx context.Context) error {
	select {
	case <-t.done:
		return t.err
	case <-ctx.Done():
		return fault.Errorf(fault.Timeout, "the credentials are still being tried: %w", context.Cause(ctx))
	}
}

// expect returns the bucket to start the client for. It waits for the trial if the bucket cannot be told before.
func (t *trial) expect(ctx context.Context) (backend.BucketInfo, error) {
	if t.known {
		select {
		case <-t.done: // which may have found another
		default:
			return t.expected, nil
		}
	}
	if err := t.wait(ctx); err != nil {
		return backend.BucketInfo{}, err
	}
	return t.grant.Bucket(), nil
}

// explain returns the error of a start: that of the trial, if the trial has failed, because the others follow from it. If the start
// failed by itself, the trial is not waited for. If ctx has ended, so has the trial; its error is the more useful one.
func (t *trial) explain(ctx context.Context, err error) error {
	if err == nil {
		return nil
	}
	if ctx.Err() != nil {
		<-t.done
	}
	select {
	case <-t.done:
		if t.err != nil {
			return t.err
		}
	default:
	}
	return err
}
