package runner

import (
	"context"
	"testing"

	"github.com/s3-csi/s3-csi-driver/pkg/fault"
)

func TestStartLimiter_WaitsForASlotOfTheBackend(t *testing.T) {
	var l startLimiter
	var releases []func()
	for range maxStarts {
		release, err := l.acquire(t.Context(), "a")
		if err != nil {
			t.Fatal(err)
		}
		releases = append(releases, release)
	}
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := l.acquire(ended, "a"); !fault.Is(err, fault.Busy) {
		t.Errorf("one more start: %v, want busy", err)
	}
	if release, err := l.acquire(t.Context(), "b"); err != nil {
		t.Errorf("a start of another backend: %v", err)
	} else {
		release()
	}
	releases[0]()
	release, err := l.acquire(t.Context(), "a")
	if err != nil {
		t.Fatalf("after one has ended: %v", err)
	}
	for _, end := range append(releases[1:], release) {
		end()
	}
}
