package provision

import (
	"context"
	"fmt"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"k8s.io/klog/v2"

	"github.com/s3-csi/s3-csi-driver/pkg/fault"
)

const (
	// answerMargin is what is left of an RPC's time to bring its answer home.
	answerMargin = 500 * time.Millisecond
	// keptFailures is how many volumes' last failures are remembered, for answers to those who wait for the next attempt.
	keptFailures = 256
)

// progress counts what a deletion has done.
type progress struct {
	objects atomic.Int64 // or versions and delete markers, removed
	uploads atomic.Int64 // aborted
	refused atomic.Int64 // objects that the service refused to delete, in this pass
}

func (p *progress) String() string {
	s := count(int(p.objects.Load()), "object") + " removed"
	if n := p.uploads.Load(); n > 0 {
		s += ", " + count(int(n), "unfinished upload") + " aborted"
	}
	if n := p.refused.Load(); n > 0 {
		s += ", " + count(int(n), "object") + " refused by the service"
	}
	return s
}

// count is "1,234 objects".
func count(n int, what string) string {
	digits := strconv.Itoa(n)
	for i := len(digits) - 3; i > 0; i -= 3 {
		digits = digits[:i] + "," + digits[i:]
	}
	if n != 1 {
		what += "s"
	}
	return digits + " " + what
}

// run is one volume's deletion in this process.
type run struct {
	id       string
	job      func(context.Context, *run) error
	progress progress
	done     chan struct{} // closed when err is set

	mu      sync.Mutex
	who     identity  // of the latest request: the first one's keys may expire
	started time.Time // zero: it waits for its turn
	err     error
}

func (r *run) latest() identity {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.who
}

// runs are the deletions of this process: one per volume, some at a time.
type runs struct {
	limit int

	mu       sync.Mutex
	byID     map[string]*run
	queue    []*run
	wake     chan struct{} // closed when the queue or ended changed
	running  bool
	ended    bool
	failures map[string]string // by volume id
}

func newRuns(limit int) *runs {
	return &runs{limit: limit, byID: map[string]*run{}, wake: make(chan struct{}), failures: map[string]string{}}
}

// join gives the run of that volume that is under way or waiting, or nil.
func (rs *runs) join(id string, who identity) *run {
	rs.mu.Lock()
	defer rs.mu.Unlock()
	return rs.joinLocked(id, who)
}

func (rs *runs) joinLocked(id string, who identity) *run {
	r := rs.byID[id]
	if r != nil {
		r.mu.Lock()
		r.who = who
		r.mu.Unlock()
	}
	return r
}

// start queues a run for that volume, or joins the one that is there.
func (rs *runs) start(id string, who identity, job func(context.Context, *run) error) (*run, error) {
	rs.mu.Lock()
	defer rs.mu.Unlock()
	if r := rs.joinLocked(id, who); r != nil {
		return r, nil
	}
	if rs.ended {
		return nil, fault.Errorf(fault.Busy, "deleting volume %s: the driver is shutting down, the next one goes on", id)
	}
	r := &run{id: id, job: job, who: who, done: make(chan struct{})}
	rs.byID[id] = r
	rs.queue = append(rs.queue, r)
	rs.wakeLocked()
	return r, nil
}

func (rs *runs) wakeLocked() {
	close(rs.wake)
	rs.wake = make(chan struct{})
}

// wait waits for the run's end as long as the caller's time allows.
func (rs *runs) wait(ctx context.Context, r *run) error {
	patience := ctx
	if deadline, ok := ctx.Deadline(); ok {
		left := time.Until(deadline)
		var cancel context.CancelFunc
		patience, cancel = context.WithTimeout(ctx, left-min(answerMargin, left/4))
		defer cancel()
	}
	select {
	case <-r.done:
		return r.err
	case <-patience.Done():
	}
	return fault.Errorf(fault.Busy, "%s", rs.report(r))
}

// report says how far a run is.
func (rs *runs) report(r *run) string {
	rs.mu.Lock()
	ahead, waiting := 0, false
	for i, q := range rs.queue {
		if q == r {
			ahead, waiting = i, true
		}
	}
	running, failure := rs.running, rs.failures[r.id]
	rs.mu.Unlock()
	s := "deleting volume " + r.id + ": "
	switch {
	case waiting && !running:
		s += "it begins when the driver has started"
	case waiting:
		s += fmt.Sprintf("waiting for its turn behind %s and those under way", count(ahead, "other deletion"))
	default:
		r.mu.Lock()
		since := time.Since(r.started)
		r.mu.Unlock()
		s += "so far " + r.progress.String() + " (" + since.Truncate(time.Second).String() + ")"
	}
	if failure != "" {
		s += "; the attempt before this one failed: " + failure
	}
	return s
}

// run works until ctx ends.
func (rs *runs) run(ctx context.Context) error {
	rs.mu.Lock()
	if rs.running || rs.ended {
		rs.mu.Unlock()
		return fault.Errorf(fault.Unknown, "Run was called twice")
	}
	rs.running = true
	rs.mu.Unlock()
	var workers sync.WaitGroup
	for range rs.limit {
		workers.Go(func() {
			for r := rs.next(ctx); r != nil; r = rs.next(ctx) {
				rs.do(ctx, r)
			}
		})
	}
	<-ctx.Done()
	workers.Wait()
	rs.mu.Lock()
	defer rs.mu.Unlock()
	rs.running, rs.ended = false, true
	for _, r := range rs.queue {
		rs.finishLocked(r, fault.Errorf(fault.Busy, "deleting volume %s: the driver is shutting down, the next one goes on", r.id))
	}
	rs.queue = nil
	return nil
}

// next waits for a run to do; nil: ctx ended.
func (rs *runs) next(ctx context.Context) *run {
	for {
		rs.mu.Lock()
		if ctx.Err() != nil {
			rs.mu.Unlock()
			return nil
		}
		if len(rs.queue) > 0 {
			r := rs.queue[0]
			rs.queue = rs.queue[1:]
			r.mu.Lock()
			r.started = time.Now()
			r.mu.Unlock()
			rs.mu.Unlock()
			return r
		}
		wake := rs.wake
		rs.mu.Unlock()
		select {
		case <-wake:
		case <-ctx.Done():
		}
	}
}

func (rs *runs) do(ctx context.Context, r *run) {
	log := klog.FromContext(ctx).WithValues("volume", r.id)
	log.Info("Deleting a volume")
	err := r.job(klog.NewContext(ctx, log), r)
	switch {
	case err == nil:
		log.Info("Deleted a volume", "done", r.progress.String(), "took", time.Since(r.started))
	case ctx.Err() != nil:
		log.Info("The deletion of a volume stops because the driver does; the next DeleteVolume goes on", "done", r.progress.String())
		err = fault.Errorf(fault.Busy, "deleting volume %s: stopped because the driver is shutting down, the next one goes on; %s", r.id, &r.progress)
	default:
		log.Error(err, "The deletion of a volume failed; the next DeleteVolume tries again", "done", r.progress.String())
		err = fmt.Errorf("deleting volume %s (%s): %w", r.id, &r.progress, err)
	}
	rs.mu.Lock()
	defer rs.mu.Unlock()
	delete(rs.failures, r.id)
	if err != nil && ctx.Err() == nil {
		if len(rs.failures) >= keptFailures {
			clear(rs.failures)
		}
		rs.failures[r.id] = strings.TrimSpace(err.Error())
	}
	rs.finishLocked(r, err)
}

func (rs *runs) finishLocked(r *run, err error) {
	r.err = err
	delete(rs.byID, r.id)
	close(r.done)
}
