// Package runs executes work that outlives the call that asked for it, such as copies and deletions: one run per id, a limited number at a time. Calls
// for the same id join the run and get its progress.
package runs

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"k8s.io/klog/v2"

	"github.com/s3-csi/s3-csi-driver/pkg/fault"
	"github.com/s3-csi/s3-csi-driver/pkg/provision/identity"
)

const (
	// answerMargin is the time before an RPC's deadline that is reserved for its response.
	answerMargin = 500 * time.Millisecond
	// keptFailures is the number of runs whose last failure is kept for later calls.
	keptFailures = 256
)

// Work is what a run does.
type Work struct {
	ID       string // calls for the same id join one run
	What     string // "making snapshot x", for messages
	Who      identity.Identity
	Progress fmt.Stringer
	// Job does the work. After ErrNextLane it is called again in the next lane.
	Job func(ctx context.Context, r *Run) error
}

// ErrNextLane is returned by a job that needs the next lane, which executes fewer runs at a time.
var ErrNextLane = errors.New("the work needs the next lane")

// Run is one piece of work. The lock of its queue guards all but done and queue.
type Run struct {
	queue *Queue
	done  chan struct{} // closed when err is set

	work    Work // with the identity of the latest request, because the keys of earlier ones may expire
	lane    int
	started time.Time       // in this lane
	working context.Context // while the job is executed
	cancel  context.CancelCauseFunc
	waiters int
	ended   bool
	err     error
}

// Latest returns the identity of the latest request.
func (r *Run) Latest() identity.Identity {
	r.queue.mu.Lock()
	defer r.queue.mu.Unlock()
	return r.work.Who
}

// Lane returns the number of the lane in which the job is executed; the first one is 0.
func (r *Run) Lane() int {
	r.queue.mu.Lock()
	defer r.queue.mu.Unlock()
	return r.lane
}

// Queue holds the runs of this process. All methods may be called concurrently.
type Queue struct {
	mu       sync.Mutex
	byID     map[string]*Run
	lanes    []*lane
	running  bool
	ended    bool
	failures map[string]failure // of the last run of an id
}

// lane holds runs that wait for one of a limited number of workers. The queue's lock guards it.
type lane struct {
	limit   int
	waiting []*Run
	changed *sync.Cond // waiting grew, or the context of Queue.Run ended
}

func (l *lane) add(r *Run) {
	l.waiting = append(l.waiting, r)
	l.changed.Signal()
}

// failure is the error of a run. unseen is set if it is final and no call has got it.
type failure struct {
	err    error
	unseen bool
}

// New returns a Queue with a lane for each limit, which executes up to that many runs at a time. It starts nothing: runs wait for Run.
func New(limits ...int) *Queue {
	q := &Queue{byID: map[string]*Run{}, failures: map[string]failure{}}
	for _, limit := range limits {
		q.lanes = append(q.lanes, &lane{limit: limit, changed: sync.NewCond(&q.mu)})
	}
	return q
}

// errStopped cancels a run that is no longer wanted.
var errStopped = errors.New("it is no longer wanted")

// Failure returns, once, the final error of a run of that id which ended while no call waited for it.
func (q *Queue) Failure(id string) error {
	q.mu.Lock()
	defer q.mu.Unlock()
	f := q.failures[id]
	if !f.unseen {
		return nil
	}
	delete(q.failures, id)
	return f.err
}

// Join waits for the run of that id, if there is one, as Do does.
func (q *Queue) Join(ctx context.Context, id string, who identity.Identity) (joined bool, err error) {
	q.mu.Lock()
	r := q.byID[id]
	if r == nil {
		q.mu.Unlock()
		return false, nil
	}
	r.work.Who = who
	r.waiters++
	q.mu.Unlock()
	return true, q.wait(ctx, r)
}

// Do executes the work, or joins the run of that id, and waits for it until shortly before the caller's deadline: then the error is Busy with
// the progress. The run continues without the caller.
func (q *Queue) Do(ctx context.Context, w Work) error {
	r, err := q.startOrJoin(w)
	if err != nil {
		return err
	}
	return q.wait(ctx, r)
}

// Start is Do without the wait: the work is executed, or a run of that id goes on. Failure returns its final error.
func (q *Queue) Start(w Work) error {
	r, err := q.startOrJoin(w)
	if err != nil {
		return err
	}
	q.mu.Lock()
	defer q.mu.Unlock()
	r.waiters--
	return nil
}

func (q *Queue) startOrJoin(w Work) (*Run, error) {
	q.mu.Lock()
	defer q.mu.Unlock()
	r := q.byID[w.ID]
	if r == nil {
		if q.ended {
			return nil, errShutDown(w)
		}
		r = &Run{queue: q, work: w, done: make(chan struct{})}
		q.byID[w.ID] = r
		q.lanes[0].add(r)
	}
	r.work.Who = w.Who
	r.waiters++
	return r, nil
}

func errShutDown(w Work) error {
	return fault.Errorf(fault.Busy, "%s: the driver is shutting down; a retry continues", w.What)
}

// wait waits for a run, whose waiters count this call.
func (q *Queue) wait(ctx context.Context, r *Run) error {
	patience, cancel := patienceOf(ctx)
	defer cancel()
	select {
	case <-r.done:
	case <-patience.Done():
	}
	q.mu.Lock()
	defer q.mu.Unlock()
	r.waiters--
	if r.ended {
		return r.err
	}
	return fault.Errorf(fault.Busy, "%s: %s", r.work.What, q.reportLocked(r))
}

// patienceOf returns a context that ends shortly before ctx does, so that the error of a call that waits still reaches the caller.
func patienceOf(ctx context.Context) (context.Context, context.CancelFunc) {
	deadline, ok := ctx.Deadline()
	if !ok {
		return context.WithCancel(ctx)
	}
	left := time.Until(deadline)
	return context.WithTimeout(ctx, left-min(answerMargin, left/4))
}

func (q *Queue) reportLocked(r *Run) (s string) {
	switch ahead := slices.Index(q.lanes[r.lane].waiting, r); {
	case ahead >= 0 && !q.running:
		s = "starts when the driver has started"
	case ahead >= 0:
		s = fmt.Sprintf("queued behind %d others and those in progress", ahead)
	default:
		s = fmt.Sprintf("so far %s (%s)", r.work.Progress, time.Since(r.started).Truncate(time.Second))
	}
	if f := q.failures[r.work.ID]; f.err != nil {
		s += "; the previous attempt failed: " + strings.TrimSpace(f.err.Error())
	}
	return s
}

// Stop cancels the run of that id, if there is one, and waits until it has ended.
func (q *Queue) Stop(ctx context.Context, id string) error {
	q.mu.Lock()
	r := q.byID[id]
	if r != nil {
		waiting := &q.lanes[r.lane].waiting
		if i := slices.Index(*waiting, r); i >= 0 {
			*waiting = slices.Delete(*waiting, i, i+1)
			q.finishLocked(r, fault.Errorf(fault.Busy, "%s: %w", r.work.What, errStopped))
		} else {
			r.cancel(errStopped)
		}
	}
	q.mu.Unlock()
	if r == nil {
		return nil
	}
	patience, cancel := patienceOf(ctx)
	defer cancel()
	select {
	case <-r.done:
		return nil
	case <-patience.Done():
		return fault.Errorf(fault.Busy, "%s is being stopped, its last requests have no answer yet", r.work.What)
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
	for _, l := range q.lanes {
		for range l.limit {
			workers.Go(func() {
				for r := q.next(ctx, l); r != nil; r = q.next(ctx, l) {
					q.execute(ctx, r)
				}
			})
		}
	}
	<-ctx.Done()
	q.mu.Lock()
	for _, l := range q.lanes {
		l.changed.Broadcast()
	}
	q.mu.Unlock()
	workers.Wait()
	q.mu.Lock()
	defer q.mu.Unlock()
	q.running, q.ended = false, true
	for _, l := range q.lanes {
		for _, r := range l.waiting {
			q.finishLocked(r, errShutDown(r.work))
		}
		l.waiting = nil
	}
	return nil
}

// next waits for the next run of a lane; nil: ctx ended.
func (q *Queue) next(ctx context.Context, l *lane) *Run {
	q.mu.Lock()
	defer q.mu.Unlock()
	for len(l.waiting) == 0 && ctx.Err() == nil {
		l.changed.Wait()
	}
	if ctx.Err() != nil {
		return nil
	}
	r := l.waiting[0]
	l.waiting = l.waiting[1:]
	r.started = time.Now()
	r.working, r.cancel = context.WithCancelCause(ctx)
	return r
}

func (q *Queue) execute(ctx context.Context, r *Run) {
	defer r.cancel(nil)
	what, progress := r.work.What, r.work.Progress
	log := klog.FromContext(ctx).WithValues("run", what)
	log.Info("Starting run", "lane", r.Lane())
	err := r.work.Job(klog.NewContext(r.working, log), r)
	q.mu.Lock()
	defer q.mu.Unlock()
	stopped := errors.Is(context.Cause(r.working), errStopped)
	switch {
	case err == nil:
		log.Info("Finished run", "done", progress.String(), "took", time.Since(r.started))
	case stopped:
		log.Info("Stopped run", "done", progress.String())
		err = fault.Errorf(fault.Busy, "%s: %w", what, errStopped)
	case errors.Is(err, ErrNextLane):
		r.lane++
		q.lanes[r.lane].add(r)
		return
	case ctx.Err() != nil:
		log.Info("Run interrupted by shutdown", "done", progress.String())
		err = fault.Errorf(fault.Busy, "%s: stopped because the driver is shutting down; a retry continues; %s", what, progress)
	default:
		log.Error(err, "Run failed", "done", progress.String())
		err = fmt.Errorf("%s (%s): %w", what, progress, err)
	}
	q.finishLocked(r, err)
}

func (q *Queue) finishLocked(r *Run, err error) {
	id := r.work.ID
	delete(q.failures, id)
	if err != nil && !errors.Is(err, errStopped) {
		if len(q.failures) >= keptFailures {
			clear(q.failures)
		}
		q.failures[id] = failure{err, r.waiters == 0 && fault.KindOf(err).Permanent()}
	}
	delete(q.byID, id)
	r.ended, r.err = true, err
	close(r.done)
}
