package main

import (
	"encoding/json"
	"io"
	"sync"
	"time"
)

// The lines on standard output, which the supervisor reads.
const (
	readyLine       = "s3-csi-ready"
	queuePrefix     = "s3-csi-queue "
	conflictsPrefix = "s3-csi-conflicts "
	flushedPrefix   = "s3-csi-flushed "
)

const (
	reportEvery = time.Second     // between two lines that only report progress
	flushWait   = 2 * time.Second // at exit, for a supervisor that does not read
)

// reporter writes lines without blocking its callers: a supervisor that does not read must not delay uploads.
type reporter struct {
	lines chan string
	done  chan struct{}
	end   sync.Once

	mu        sync.Mutex
	last      queueStatus
	at        time.Time
	conflicts conflictStatus // reported last
}

func newReporter(w io.Writer) *reporter {
	r := &reporter{lines: make(chan string, 16), done: make(chan struct{})}
	go func() {
		defer close(r.done)
		for line := range r.lines {
			// Uploads continue if the supervisor has exited.
			_, _ = io.WriteString(w, line+"\n")
		}
	}()
	return r
}

// send reports whether the line was accepted.
func (r *reporter) send(line string) bool {
	select {
	case r.lines <- line:
		return true
	default: // the supervisor does not read
		return false
	}
}

// conflictCount reports the number of files that this process has quarantined because of a conflict. It is reported again until the
// line is accepted.
func (r *reporter) conflictCount(n int64) {
	r.mu.Lock()
	defer r.mu.Unlock()
	now := conflictStatus{Files: n}
	if now == r.conflicts {
		return
	}
	if line, err := json.Marshal(now); err == nil && r.send(conflictsPrefix+string(line)) {
		r.conflicts = now
	}
}

// flushStatus is the result of a flush.
type flushStatus struct {
	Unsent int `json:"unsent"` // changed files in no upload queue
}

// flushed reports that a flush has finished, and whether the line was accepted.
func (r *reporter) flushed(unsent int) bool {
	line, err := json.Marshal(flushStatus{unsent})
	return err == nil && r.send(flushedPrefix+string(line))
}

// queue reports a changed queue: at once if it became empty or non-empty, otherwise at most once a second.
func (r *reporter) queue(now time.Time, q queueStatus) {
	r.mu.Lock()
	defer r.mu.Unlock()
	edge := (q.Uploads == 0) != (r.last.Uploads == 0)
	if q == r.last || (!edge && now.Sub(r.at) < reportEvery) {
		return
	}
	r.last, r.at = q, now
	line, err := json.Marshal(q)
	if err != nil {
		return // cannot happen: it is two numbers
	}
	r.send(queuePrefix + string(line))
}

// close waits up to flushWait until all lines are written.
func (r *reporter) close() {
	r.end.Do(func() { close(r.lines) })
	select {
	case <-r.done:
	case <-time.After(flushWait):
	}
}
