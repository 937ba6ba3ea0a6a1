package main

import (
	"os"
	"runtime"
	"runtime/debug"
	"runtime/metrics"
	"strings"
	"testing"
	"time"
)

func gcPercent() uint64 {
	sample := []metrics.Sample{{Name: "/gc/gogc:percent"}}
	metrics.Read(sample)
	return sample[0].Value.Uint64()
}

func TestTheFirstCollectionRestoresGosDefault(t *testing.T) {
	t.Setenv("GOGC", startGC)
	before := debug.SetGCPercent(400)
	t.Cleanup(func() { debug.SetGCPercent(before) })
	collectAsUsualLater()
	if got := gcPercent(); got != 400 {
		t.Fatalf("GOGC is %d before any collection", got)
	}
	runtime.GC()
	for end := time.Now().Add(10 * time.Second); gcPercent() != usualGC; time.Sleep(time.Millisecond) { // cleanups run a moment later
		if time.Now().After(end) {
			t.Fatalf("GOGC is %d after a collection, want %d", gcPercent(), usualGC)
		}
	}
}

// With the driver's environment, a start needs no collection.
func TestAStartCollectsNothing(t *testing.T) {
	s := startS3(t)
	m := startMount(t, mountOptions{s3: s, prefix: "vol/", env: []string{"GOGC=" + startGC, "GODEBUG=gctrace=1"}})
	_, err := os.ReadDir(m.dir)
	check(t, err)
	if strings.Contains(m.log(), "gc 1 @") {
		t.Errorf("the heap was collected:\n%s", m.log())
	}
}
