package remove

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"k8s.io/klog/v2"

	"github.com/s3-csi/s3-csi-driver/pkg/fault"
	"github.com/s3-csi/s3-csi-driver/pkg/provision/erase"
	"github.com/s3-csi/s3-csi-driver/pkg/provision/identity"
)

const (
	// answerMargin is the time before an RPC's deadline that is reserved for its response.
	answerMargin = 500 * time.Millisecond
	// keptFailures is the number of volumes whose last failure is kept, for calls that wait for the next attempt.
	keptFailures = 256
)

// deletion is one volume's deletion in this process.
type deletion struct {
	id       string
	job      func(context.Context, *deletion) error
	progress erase.Progress
	done     chan struct{} // closed when err is set

	mu      sync.Mutex
	who     identity.Identity // of the latest request, because the keys of earlier ones may expire
	started time.Time         // zero: queued
	err     error
}

func (d *deletion) latest() identity.Identity {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.who
}

// queue holds the deletions of this process, one per volume. Run limits how many run concurrently.
type queue struct {
	limit int

	mu       sync.Mutex
	byID     map[string]*deletion
	waiting  []*deletion
	changed  *sync.Cond // waiting grew, or the context of run ended
	running  bool
	ended    bool
	failures map[string]string // by volume id
}

func newQueue(limit int) *queue {
	q := &queue{limit: limit, byID: map[string]*deletion{}, failures: map[string]string{}}
	q.changed = sync.NewCond(&q.mu)
	return q
}

// join returns the deletion of that volume that is in progress or waiting, or nil.
func (q *queue) join(id string, who identity.Identity) *deletion {
	q.mu.Lock()
	defer q.mu.Unlock()
	return q.joinLocked(id, who)
}

func (q *queue) joinLocked(id string, who identity.Identity) *deletion {
	d := q.byID[id]
	if d != nil {
		d.mu.Lock()
		d.who = who
		d.mu.Unlock()
	}
	return d
}

// start queues a deletion of that volume, or joins the existing one.
func (q *queue) start(id string, who identity.Identity, job func(context.Context, *deletion) error) (*deletion, error) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if d := q.joinLocked(id, who); d != nil {
		return d, nil
	}
	if q.ended {
		return nil, fault.Errorf(fault.Busy, "deleting volume %s: the driver is shutting down; the next DeleteVolume continues", id)
	}
	d := &deletion{id: id, job: job, who: who, done: make(chan struct{})}
	q.byID[id] = d
	q.waiting = append(q.waiting, d)
	q.changed.Signal()
	return d, nil
}

// wait waits for the deletion until shortly before the caller's deadline.
func (q *queue) wait(ctx context.Context, d *deletion) error {
	patience := ctx
	if deadline, ok := ctx.Deadline(); ok {
		left := time.Until(deadline)
		var cancel context.CancelFunc
		patience, cancel = context.WithTimeout(ctx, left-min(answerMargin, left/4))
		defer cancel()
	}
	select {
	case <-d.done:
		return d.err
	case <-patience.Done():
	}
	return fault.Errorf(fault.Busy, "%s", q.report(d))
}

// report returns the progress of a deletion.
func (q *queue) report(d *deletion) string {
	q.mu.Lock()
	ahead := slices.Index(q.waiting, d)
	waiting := ahead >= 0
	running, failure := q.running, q.failures[d.id]
	q.mu.Unlock()
	s := "deleting volume " + d.id + ": "
	switch {
	case waiting && !running:
		s += "starts when the driver has started"
	case waiting:
		s += fmt.Sprintf("queued behind %s and those in progress", erase.Count(ahead, "other deletion"))
	default:
		d.mu.Lock()
		since := time.Since(d.started)
		d.mu.Unlock()
		s += "so far " + d.progress.String() + " (" + since.Truncate(time.Second).String() + ")"
	}
	if failure != "" {
		s += "; the previous attempt failed: " + failure
	}
	return s
}

// run executes the deletions until ctx ends.
func (q *queue) run(ctx context.Context) error {
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
			for d := q.next(ctx); d != nil; d = q.next(ctx) {
				q.do(ctx, d)
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
	for _, d := range q.waiting {
		q.finishLocked(d, fault.Errorf(fault.Busy, "deleting volume %s: the driver is shutting down; the next DeleteVolume continues", d.id))
	}
	q.waiting = nil
	return nil
}

// next waits for the next deletion; nil: ctx ended.
func (q *queue) next(ctx context.Context) *deletion {
	q.mu.Lock()
	defer q.mu.Unlock()
	for len(q.waiting) == 0 && ctx.Err() == nil {
		q.changed.Wait()
	}
	if ctx.Err() != nil {
		return nil
	}
	d := q.waiting[0]
	q.waiting = q.waiting[1:]
	d.mu.Lock()
	defer d.mu.Unlock()
	d.started = time.Now()
	return d
}

func (q *queue) do(ctx context.Context, d *deletion) {
	log := klog.FromContext(ctx).WithValues("volume", d.id)
	log.Info("Deleting volume")
	err := d.job(klog.NewContext(ctx, log), d)
	switch {
	case err == nil:
		log.Info("Deleted volume", "done", d.progress.String(), "took", time.Since(d.started))
	case ctx.Err() != nil:
		log.Info("Deletion interrupted by shutdown", "done", d.progress.String())
		err = fault.Errorf(fault.Busy, "deleting volume %s: stopped because the driver is shutting down; the next DeleteVolume continues; %s", d.id, &d.progress)
	default:
		log.Error(err, "Deletion failed", "done", d.progress.String())
		err = fmt.Errorf("deleting volume %s (%s): %w", d.id, &d.progress, err)
	}
	q.mu.Lock()
	defer q.mu.Unlock()
	delete(q.failures, d.id)
	if err != nil && ctx.Err() == nil {
		if len(q.failures) >= keptFailures {
			clear(q.failures)
		}
		q.failures[d.id] = strings.TrimSpace(err.Error())
	}
	q.finishLocked(d, err)
}

func (q *queue) finishLocked(d *deletion, err error) {
	d.err = err
	delete(q.byID, d.id)
	close(d.done)
}
