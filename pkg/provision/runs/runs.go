// Package runs executes work that outlives the call that asked for it, such as copies: one run per id, a limited number at a time. Calls for the
// same id join the run and get its progress.
package runs

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"k8s.io/klog/v2"

	"github.com/s3-csi/s3-csi-driver/pkg/fault"
	"github.com/s3-csi/s3-csi-driver/pkg/provision/identity"
)

const (
	// answerMargin is the time before an RPC's deadline that is reserved for its response.
	answerMargin = 500 * time.Millisecond
	// keptFailures is the number of final failures that are kept for the next call.
	keptFailures = 256
)

// Job is the work of a run.
type Job func(ctx context.Context, r *Run) error

// Run is one piece of work.
type Run struct {
	what     string // "making snapshot x", for messages
	id       string
	job      Job
	progress fmt.Stringer
	done     chan struct{} // closed when err is set
	cancel   context.CancelCauseFunc
	working  context.Context

	mu      sync.Mutex
	who     identity.Identity // of the latest request, because the keys of earlier ones may expire
	waiters int
	err     error
}

// Latest returns the identity of the latest request.
func (r *Run) Latest() identity.Identity {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.who
}

// Queue holds the runs of this process. All methods may be called concurrently.
type Queue struct {
	limit int

	mu       sync.Mutex
	byID     map[string]*Run
	waiting  []*Run
	changed  *sync.Cond // waiting grew, or the context of Run ended
	running  bool
	ended    bool
	failures map[string]error // final ones that no call has got, by id
}

// New returns a Queue that executes up to limit runs at a time. It starts nothing: runs wait for Run.
func New(limit int) *Queue {
	q := &Queue{limit: limit, byID: map[string]*Run{}, failures: map[string]error{}}
	q.changed = sync.NewCond(&q.mu)
	return q
}

// errStopped cancels a run that is no longer wanted.
var errStopped = errors.New("it is no longer wanted")

// Failure returns, once, the final error of a run of that id which ended while no call waited for it.
func (q *Queue) Failure(id string) error {
	q.mu.Lock()
	defer q.mu.Unlock()
	err := q.failures[id]
	delete(q.failures, id)
	return err
}

// Do executes the job, or joins the run of that id, and waits for it until shortly before the caller's deadline: then the error is Busy with
// the progress. The run continues without the caller. what names the work in messages.
func (q *Queue) Do(ctx context.Context, id, what string, who identity.Identity, progress fmt.Stringer, job Job) error {
	r, err := q.join(id, what, who, progress, job)
	if err != nil {
		return err
	}
	defer func() {
		r.mu.Lock()
		defer r.mu.Unlock()
		r.waiters--
	}()
	patience, cancel := Patience(ctx)
	defer cancel()
	select {
	case <-r.done:
		return r.err
	case <-patience.Done():
	}
	return fault.Errorf(fault.Busy, "%s: %s", r.what, q.report(r))
}

// Start is Do without the wait: the job is executed, or a run of that id goes on. Failure returns its final error.
func (q *Queue) Start(id, what string, who identity.Identity, progress fmt.Stringer, job Job) error {
	r, err := q.join(id, what, who, progress, job)
	if err != nil {
		return err
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.waiters--
	return nil
}

// Patience returns a context that ends shortly before ctx does, so that the error of a call that waits still reaches the caller.
func Patience(ctx context.Context) (context.Context, context.CancelFunc) {
	deadline, ok := ctx.Deadline()
	if !ok {
		return context.WithCancel(ctx)
	}
	left := time.Until(deadline)
	return context.WithTimeout(ctx, left-min(answerMargin, left/4))
}

func (q *Queue) join(id, what string, who identity.Identity, progress fmt.Stringer, job Job) (*Run, error) {
	q.mu.Lock()
	defer q.mu.Unlock()
	r := q.byID[id]
	if r == nil {
		if q.ended {
			return nil, fault.Errorf(fault.Busy, "%s: the driver is shutting down; a retry continues", what)
		}
		r = &Run{what: what, id: id, job: job, progress: progress, done: make(chan struct{})}
		r.working, r.cancel = context.WithCancelCause(context.Background())
		q.byID[id] = r
		q.waiting = append(q.waiting, r)
		q.changed.Signal()
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.who = who
	r.waiters++
	return r, nil
}

func (q *Queue) report(r *Run) string {
	q.mu.Lock()
	defer q.mu.Unlock()
	switch ahead := slices.Index(q.waiting, r); {
	case ahead >= 0 && !q.running:
		return "starts when the driver has started"
	case ahead >= 0:
		return fmt.Sprintf("queued behind %d others and those in progress", ahead)
	}
	return "so far " + r.progress.String()
}

// Stop cancels the run of that id, if there is one, and waits until it has ended.
func (q *Queue) Stop(ctx context.Context, id string) error {
	q.mu.Lock()
	r := q.byID[id]
	if r != nil {
		r.cancel(errStopped)
		if i := slices.Index(q.waiting, r); i >= 0 {
			q.waiting = slices.Delete(q.waiting, i, i+1)
			q.finishLocked(r, fault.Errorf(fault.Busy, "%s: %w", r.what, errStopped))
		}
	}
	q.mu.Unlock()
	if r == nil {
		return nil
	}
	patience, cancel := Patience(ctx)
	defer cancel()
	select {
	case <-r.done:
		return nil
	case <-patience.Done():
		return fault.Errorf(fault.Busy, "%s is being stopped, its last requests have no answer yet", r.what)
	}
}

// Run executes the runs until ctx ends. It can be called once.
func (q *Queue) Run(ctx context.Context) error {
	q.mu.Lock()
	if q.running || q.ended {
		q.mu.Unlock()
		return fault.Errorf(fault.Unknown, "Run can be called once only")
	}
	q.running = true
	q.mu.Unlock()
	var workers sync.WaitGroup
	for range q.limit {
		workers.Go(func() {
			for r := q.next(ctx); r != nil; r = q.next(ctx) {
				q.do(ctx, r)
			}
		})
	}
	<-ctx.Done()
	q.mu.Lock()
	q.changed.Broadcast()
	q.mu.Unlock()
	workers.Wait()
	q.mu.Lock()
	defer q.mu.Unlock()
	q.running, q.ended = false, true
	for _, r := range q.waiting {
		q.finishLocked(r, fault.Errorf(fault.Busy, "%s: the driver is shutting down; a retry continues", r.what))
	}
	q.waiting = nil
	return nil
}

// next waits for the next run; nil: ctx ended.
func (q *Queue) next(ctx context.Context) *Run {
	q.mu.Lock()
	defer q.mu.Unlock()
	for len(q.waiting) == 0 && ctx.Err() == nil {
		q.changed.Wait()
	}
	if ctx.Err() != nil {
		return nil
	}
	r := q.waiting[0]
	q.waiting = q.waiting[1:]
	return r
}

func (q *Queue) do(ctx context.Context, r *Run) {
	log := klog.FromContext(ctx).WithValues("run", r.what)
	log.Info("Starting run")
	began := time.Now()
	working, cancel := context.WithCancelCause(klog.NewContext(ctx, log))
	stop := context.AfterFunc(r.working, func() { cancel(context.Cause(r.working)) })
	err := r.job(working, r)
	stop()
	cancel(nil)
	switch {
	case err == nil:
		log.Info("Finished run", "done", r.progress.String(), "took", time.Since(began))
	case r.working.Err() != nil:
		log.Info("Stopped run", "done", r.progress.String())
		err = fault.Errorf(fault.Busy, "%s: %w", r.what, errStopped)
	case ctx.Err() != nil:
		log.Info("Run interrupted by shutdown", "done", r.progress.String())
		err = fault.Errorf(fault.Busy, "%s: stopped because the driver is shutting down; a retry continues; %s", r.what, r.progress)
	default:
		log.Error(err, "Run failed", "done", r.progress.String())
		err = fmt.Errorf("%s (%s): %w", r.what, r.progress, err)
	}
	q.mu.Lock()
	defer q.mu.Unlock()
	q.finishLocked(r, err)
}

func (q *Queue) finishLocked(r *Run, err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if err != nil && r.waiters == 0 && fault.KindOf(err).Permanent() {
		if len(q.failures) >= keptFailures {
			clear(q.failures)
		}
		q.failures[r.id] = err
	}
	r.err = err
	delete(q.byID, r.id)
	close(r.done)
	r.cancel(nil)
}
