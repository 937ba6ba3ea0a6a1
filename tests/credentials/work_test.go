package credentials

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/s3-csi/s3-csi-driver/tests/internal/rig/rigtest"
)

// prepared is how many objects a worker finds to read, one after the other, so that none comes from a cache.
const prepared = 300

// worker reads and writes in a mount all the time.
type worker struct {
	root    string
	stop    chan struct{}
	done    chan error // the first failure, or nil
	written atomic.Int64
}

// work begins to work in a directory that was prepared.
func (e *env) work(root string) *worker {
	w := &worker{root: root, stop: make(chan struct{}), done: make(chan error, 1)}
	go func() { w.done <- w.run() }()
	return w
}

// prepare stores what a worker reads, below that path of the bucket.
func (e *env) prepare(name string) {
	e.t.Helper()
	for i := range prepared {
		e.Put(e.t, bucket, fmt.Sprintf("%s/read/%d", name, i), fmt.Sprint(i))
	}
}

func (w *worker) run() error {
	for i := 0; ; i++ {
		select {
		case <-w.stop:
			return nil
		case <-time.After(20 * time.Millisecond):
		}
		if err := os.WriteFile(filepath.Join(w.root, fmt.Sprintf("written-%d", i)), []byte(fmt.Sprint(i)), 0o644); err != nil {
			return fmt.Errorf("round %d: %w", i, err)
		}
		w.written.Add(1)
		b, err := os.ReadFile(filepath.Join(w.root, "read", fmt.Sprint(i%prepared)))
		if err == nil && string(b) != fmt.Sprint(i%prepared) {
			err = fmt.Errorf("it reads %q", b)
		}
		if err != nil {
			return fmt.Errorf("round %d: reading: %w", i, err)
		}
	}
}

// end stops the worker, which must have had no error.
func (w *worker) end(t testing.TB) {
	t.Helper()
	close(w.stop)
	if err := <-w.done; err != nil {
		t.Errorf("working in %s: %v", w.root, err)
	}
}

// stored checks that all that the worker has written is in the bucket.
func (w *worker) stored(t testing.TB, s *rigtest.Server, name string) {
	t.Helper()
	keys := map[string]bool{}
	for _, k := range s.Keys(t, bucket, name+"/written-") {
		keys[k] = true
	}
	missing := 0
	for i := range int(w.written.Load()) {
		if !keys[fmt.Sprintf("%s/written-%d", name, i)] {
			missing++
		}
	}
	if missing > 0 {
		t.Errorf("%s: %d of %d files are not stored", name, missing, w.written.Load())
	}
}

// more returns a function that reports whether n more sessions of each name prefix have been made since the call.
func (e *env) more(n int, names ...string) func() bool {
	count := func(begin string) (made int) {
		for _, name := range e.named() {
			if strings.HasPrefix(name, begin) {
				made++
			}
		}
		return made
	}
	var before []int
	for _, begin := range names {
		before = append(before, count(begin))
	}
	return func() bool {
		for i, begin := range names {
			if count(begin) < before[i]+n {
				return false
			}
		}
		return true
	}
}

// The beginnings of sessions' names: of pods, and of mounts with other credentials.
const (
	ofPods   = namespace + "." + account + "."
	ofMounts = "s3csi."
)
