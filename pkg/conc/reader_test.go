package conc

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
)

// A caller that arrives during a read shares the next one with the others, and never gets the result of the one that runs.
func TestReader_CallersShareTheNextRead(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var r Reader[int64]
		var reads atomic.Int64
		release := make(chan struct{})
		read := func(context.Context) (int64, error) {
			n := reads.Add(1)
			if n == 1 {
				<-release
			}
			return n, nil
		}
		var wg sync.WaitGroup
		call := func(want int64) {
			wg.Go(func() {
				if got, err := r.Read(t.Context(), read); got != want || err != nil {
					t.Errorf("got the result of read %d, want %d (%v)", got, want, err)
				}
			})
		}
		call(1)
		synctest.Wait()
		for range 100 {
			call(2)
		}
		synctest.Wait()
		close(release)
		wg.Wait()
		if got, err := r.Read(t.Context(), read); got != 3 || err != nil {
			t.Errorf("a later caller got the result of read %d (%v)", got, err)
		}
	})
}

// A caller whose context ends gets its cause. The read continues for the others.
func TestReader_ReadOutlivesItsFirstCaller(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var r Reader[string]
		release := make(chan struct{})
		read := func(ctx context.Context) (string, error) {
			<-release
			return "read", ctx.Err()
		}
		cause := errors.New("given up")
		ctx, cancel := context.WithCancelCause(t.Context())
		var wg sync.WaitGroup
		wg.Go(func() {
			if _, err := r.Read(ctx, read); !errors.Is(err, cause) {
				t.Error(err)
			}
		})
		synctest.Wait()
		cancel(cause)
		wg.Wait()
		wg.Go(func() {
			if got, err := r.Read(t.Context(), read); got != "read" || err != nil {
				t.Error(got, err)
			}
		})
		synctest.Wait()
		close(release)
		wg.Wait()
	})
}
