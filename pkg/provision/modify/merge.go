package modify

import (
	"context"
	"errors"
	"slices"
	"time"

	"github.com/s3-csi/s3-csi-driver/pkg/fault"
	"github.com/s3-csi/s3-csi-driver/pkg/provision/records"
)

// roundBound is the timeout of one round, which does not depend on the requests' contexts: no request fails because another one was cancelled.
const roundBound = time.Minute

// queue holds the requests for one volume. One of them at a time makes a round for all.
type queue struct {
	turn    chan struct{} // holds one token
	waiting []*pending
	users   int
}

// pending is a request that waits for its result.
type pending struct {
	change Change
	// early is set if the request arrived before the last read began: only such a read may show that there is nothing to write.
	early    bool
	done     chan struct{} // closed with the result
	capacity int64
	err      error
}

func (p *pending) finish(capacity int64, err error) {
	p.capacity, p.err = capacity, err
	close(p.done)
}

// merge applies a change together with all others for the same key that arrive before the write. open is called with the context of the
// round.
func (m *Modifier) merge(ctx context.Context, key queueKey, c Change, open func(context.Context) (*place, error)) (int64, error) {
	p := &pending{change: c, done: make(chan struct{})}
	q := m.join(key, p)
	defer m.leave(key, q, p)
	for {
		select {
		case <-p.done:
			return p.capacity, p.err
		case <-ctx.Done():
			return 0, fault.Errorf(fault.Timeout, "waiting for a change of volume %s: %w", key.id, context.Cause(ctx))
		case <-q.turn:
		}
		select {
		case <-p.done: // an earlier round included it
		default:
			m.round(ctx, q, open)
		}
		q.turn <- struct{}{}
	}
}

func (m *Modifier) join(key queueKey, p *pending) *queue {
	m.mu.Lock()
	defer m.mu.Unlock()
	q := m.queues[key]
	if q == nil {
		if m.queues == nil {
			m.queues = map[queueKey]*queue{}
		}
		q = &queue{turn: make(chan struct{}, 1)}
		q.turn <- struct{}{}
		m.queues[key] = q
	}
	q.users++
	q.waiting = append(q.waiting, p)
	return q
}

func (m *Modifier) leave(key queueKey, q *queue, p *pending) {
	m.mu.Lock()
	defer m.mu.Unlock()
	q.waiting = slices.DeleteFunc(q.waiting, func(other *pending) bool { return other == p })
	if q.users--; q.users == 0 {
		delete(m.queues, key)
	}
}

// round answers requests:
//
//  1. read what is recorded
//  2. take all requests that have arrived by then, and apply their changes in their order; a change that is refused leaves the others
//  3. write the result once, if anything changes
func (m *Modifier) round(ctx context.Context, q *queue, open func(context.Context) (*place, error)) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), roundBound)
	defer cancel()
	at, err := open(ctx)
	var release func()
	if err == nil {
		release, err = at.lock(ctx)
	}
	if err != nil {
		fail(m.take(q), err)
		return
	}
	defer release()
	err = records.Repeat("the record of volume "+at.id.String(), func() error { return m.try(ctx, q, at) })
	if err != nil {
		fail(m.take(q), err)
	}
}

// try makes one attempt of a round. ErrChanged: the requests wait for another one.
func (m *Modifier) try(ctx context.Context, q *queue, at *place) error {
	m.mark(q)
	old, err := at.read(ctx)
	if err != nil {
		return err
	}
	batch := m.take(q)
	results := make([]outcome, len(batch))
	next := old
	for i, p := range batch {
		after, err := p.change.apply(ctx, next, at.checkPurge)
		if err == nil {
			next = after
		}
		results[i] = outcome{next.CapacityBytes, err}
	}
	if isSame(next, old) {
		m.answerEarly(q, batch, results)
		return nil
	}
	err = at.write(ctx, next)
	if errors.Is(err, records.ErrChanged) {
		m.putBack(q, batch)
		return err
	}
	for i, p := range batch {
		if results[i].err == nil {
			results[i].err = err
		}
		p.finish(results[i].capacity, results[i].err)
	}
	return nil
}

type outcome struct {
	capacity int64
	err      error
}

func fail(batch []*pending, err error) {
	for _, p := range batch {
		p.finish(0, err)
	}
}

// mark marks the waiting requests as early.
func (m *Modifier) mark(q *queue) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, p := range q.waiting {
		p.early = true
	}
}

func (m *Modifier) take(q *queue) []*pending {
	m.mu.Lock()
	defer m.mu.Unlock()
	batch := q.waiting
	q.waiting = nil
	return batch
}

func (m *Modifier) putBack(q *queue, batch []*pending) {
	m.mu.Lock()
	defer m.mu.Unlock()
	q.waiting = append(batch, q.waiting...)
}

// answerEarly answers the early requests, and leaves the others for the next round.
func (m *Modifier) answerEarly(q *queue, batch []*pending, results []outcome) {
	var late []*pending
	for i, p := range batch {
		if p.early {
			p.finish(results[i].capacity, results[i].err)
		} else {
			late = append(late, p)
		}
	}
	m.putBack(q, late)
}
