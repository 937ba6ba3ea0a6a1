package runner

import (
	"context"
	"testing"
	"testing/synctest"

	"github.com/s3-csi/s3-csi-driver/pkg/fault"
)

func TestStartLimiter_WaitsForASlotOfTheBackend(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var l startLimiter
		var releases []func()
		for range maxStarts {
			release, err := l.acquire(t.Context(), "a")
			if err != nil {
				t.Fatal(err)
			}
			releases = append(releases, release)
		}
		ctx, cancel := context.WithCancel(t.Context())
		begin := func(ctx context.Context) <-chan error {
			ended := make(chan error, 1)
			go func() {
				release, err := l.acquire(ctx, "a")
				if err == nil {
					release()
				}
				ended <- err
			}()
			synctest.Wait()
			return ended
		}
		abandoned, next := begin(ctx), begin(t.Context())
		if len(abandoned)+len(next) > 0 {
			t.Fatal("more starts than slots do not wait")
		}
		if release, err := l.acquire(t.Context(), "b"); err != nil {
			t.Errorf("a start of another backend: %v", err)
		} else {
			release()
		}
		cancel()
		if err := <-abandoned; !fault.Is(err, fault.Busy) {
			t.Errorf("a start whose call has ended: %v, want busy", err)
		}
		releases[0]()
		if err := <-next; err != nil {
			t.Errorf("after one has ended: %v", err)
		}
		for _, end := range releases[1:] {
			end()
		}
	})
}
