package main

import (
	"encoding/json"
	"io"
	"sync"
	"time"
)

// The lines on standard output. Whoever supervises the program reads them.
const (
	readyLine       = "s3-csi-ready"
	queuePrefix     = "s3-csi-queue "
	conflictsPrefix = "s3-csi-conflicts "
)

const (
	reportEvery = time.Second     // between two lines that only tell of progress
	flushWait   = 2 * time.Second // for a supervisor that does not read, at the end
)

// reporter writes lines without ever holding up who reports: a reader that is stuck or gone must not keep data from
// being uploaded.
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
			// A reader that is gone is no reason to do anything else.
			_, _ = io.WriteString(w, line+"\n")
		}
	}()
	return r
}

// say reports whether the line was accepted.
func (r *reporter) say(line string) bool {
	select {
	case r.lines <- line:
		return true
	default: // the reader is stuck; the next line is newer anyway
		return false
	}
}

// conflictCount reports how many files this process has put aside because of a conflict. The count must not be lost, so it is
// reported again until the line is accepted.
func (r *reporter) conflictCount(n int64) {
	r.mu.Lock()
	defer r.mu.Unlock()
	now := conflictStatus{Files: n}
	if now == r.conflicts {
		return
	}
	if line, err := json.Marshal(now); err == nil && r.say(conflictsPrefix+string(line)) {
		r.conflicts = now
	}
}

// queue reports the queue: at once when it becomes empty or not empty, else at most once a second, and only changes.
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
		return // it is two numbers
	}
	r.say(queuePrefix + string(line))
}

// close waits for what was said to be written, for a while.
func (r *reporter) close() {
	r.end.Do(func() { close(r.lines) })
	select {
	case <-r.done:
	case <-time.After(flushWait):
	}
}
