package remove

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"k8s.io/klog/v2"

	"github.com/s3-csi/s3-csi-driver/pkg/backend"
	"github.com/s3-csi/s3-csi-driver/pkg/fault"
	"github.com/s3-csi/s3-csi-driver/pkg/provision/erase"
	"github.com/s3-csi/s3-csi-driver/pkg/provision/identity"
	"github.com/s3-csi/s3-csi-driver/pkg/provision/runs"
)

const (
	// keptFailures is the number of volumes whose last failure is kept, for calls that wait for the next attempt.
	keptFailures = 256
	// maxChecks is how many deletions run at once until they need a worker. It bounds the memory of their requests.
	maxChecks = 64
)

// errNeedsWorker means that there is something to erase, which a deletion may do only with a worker.
var errNeedsWorker = errors.New("the deletion needs a worker")

// job deletes one volume. After errNeedsWorker it is called again, with d.hasWorker.
type job func(ctx context.Context, d *deletion) error

// deletion is one volume's deletion in this process.
type deletion struct {
	id       string
	job      job
	progress erase.Progress
	waits    atomic.Bool   // for runs that may still write, see Remover.outwait
	done     chan struct{} // closed when err is set

	// Of the job:
	unfilled  bool              // the volume is deleted only if its content is not complete
	hasWorker bool              // it is one of the limited number that may erase data
	planned   bool              // scoped is final
	scoped    backend.KeySource // sessions of the deletion; nil: none

	mu      sync.Mutex
	who     identity.Identity // of the latest request, because the keys of earlier ones may expire
	started time.Time         // zero: queued
	err     error
}

// snapshotMark marks the ids of deletions of snapshots.
const snapshotMark = "snapshot "

// what names the volume or snapshot in messages.
func (d *deletion) what() string {
	if strings.HasPrefix(d.id, snapshotMark) {
		return d.id
	}
	return "volume " + d.id
}

func (d *deletion) latest() identity.Identity {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.who
}

// queue holds the deletions of this process, one per volume. Each begins in the first lane, which is short: most deletions are of empty
// volumes and end there. Those with something to erase go to the second lane, where they wait for a worker.
type queue struct {
	mu       sync.Mutex
	byID     map[string]*deletion
	checks   lane
	erasures lane
	running  bool
	ended    bool
	failures map[string]string // by volume id
}

// lane holds deletions that wait to run. The queue's lock guards it.
type lane struct {
	limit   int // how many run concurrently
	waiting []*deletion
	changed *sync.Cond // waiting grew, or the context of run ended
}

func newQueue(workers int) *queue {
	q := &queue{byID: map[string]*deletion{}, failures: map[string]string{}}
	q.checks = lane{limit: maxChecks, changed: sync.NewCond(&q.mu)}
	q.erasures = lane{limit: workers, changed: sync.NewCond(&q.mu)}
	return q
}

func (l *lane) add(d *deletion) {
	l.waiting = append(l.waiting, d)
	l.changed.Signal()
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
func (q *queue) start(id string, who identity.Identity, job job) (*deletion, error) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if d := q.joinLocked(id, who); d != nil {
		return d, nil
	}
	if q.ended {
		return nil, fault.Errorf(fault.Busy, "deleting %s: the driver is shutting down; the next attempt continues", (&deletion{id: id}).what())
	}
	d := &deletion{id: id, job: job, who: who, done: make(chan struct{})}
	q.byID[id] = d
	q.checks.add(d)
	return d, nil
}

// wait waits for the deletion until shortly before the caller's deadline.
func (q *queue) wait(ctx context.Context, d *deletion) error {
	patience, cancel := runs.Patience(ctx)
	defer cancel()
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
	ahead := max(slices.Index(q.checks.waiting, d), slices.Index(q.erasures.waiting, d))
	waiting := ahead >= 0
	running, failure := q.running, q.failures[d.id]
	q.mu.Unlock()
	s := "deleting " + d.what() + ": "
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
	if d.waits.Load() {
		s += "; waiting until a copy that was in progress has ended, for two minutes if its controller does not answer"
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
	for _, l := range []*lane{&q.checks, &q.erasures} {
		for range l.limit {
			workers.Go(func() {
				for d := q.next(ctx, l); d != nil; d = q.next(ctx, l) {
					q.do(ctx, d)
				}
			})
		}
	}
	<-ctx.Done()
	q.mu.Lock()
	q.checks.changed.Broadcast()
	q.erasures.changed.Broadcast()
	q.mu.Unlock()
	workers.Wait()
	q.mu.Lock()
	defer q.mu.Unlock()
	q.running, q.ended = false, true
	for _, d := range slices.Concat(q.checks.waiting, q.erasures.waiting) {
		q.finishLocked(d, fault.Errorf(fault.Busy, "deleting %s: the driver is shutting down; the next attempt continues", d.what()))
	}
	q.checks.waiting, q.erasures.waiting = nil, nil
	return nil
}

// next waits for the next deletion of a lane; nil: ctx ended.
func (q *queue) next(ctx context.Context, l *lane) *deletion {
	q.mu.Lock()
	defer q.mu.Unlock()
	for len(l.waiting) == 0 && ctx.Err() == nil {
		l.changed.Wait()
	}
	if ctx.Err() != nil {
		return nil
	}
	d := l.waiting[0]
	l.waiting = l.waiting[1:]
	d.mu.Lock()
	defer d.mu.Unlock()
	d.started = time.Now()
	return d
}

func (q *queue) do(ctx context.Context, d *deletion) {
	log := klog.FromContext(ctx).WithValues("volume", d.id)
	if d.hasWorker {
		log.Info("Erasing volume")
	} else {
		log.Info("Deleting volume")
	}
	err := d.job(klog.NewContext(ctx, log), d)
	if errors.Is(err, errNeedsWorker) {
		q.mu.Lock()
		defer q.mu.Unlock()
		d.hasWorker = true
		q.erasures.add(d)
		return
	}
	switch {
	case err == nil:
		log.Info("Deleted volume", "done", d.progress.String(), "took", time.Since(d.started))
	case ctx.Err() != nil:
		log.Info("Deletion interrupted by shutdown", "done", d.progress.String())
		err = fault.Errorf(fault.Busy, "deleting %s: stopped because the driver is shutting down; the next attempt continues; %s", d.what(), &d.progress)
	default:
		log.Error(err, "Deletion failed", "done", d.progress.String())
		err = fmt.Errorf("deleting %s (%s): %w", d.what(), &d.progress, err)
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
