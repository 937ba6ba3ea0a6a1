package publish

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/s3-csi/s3-csi-driver/pkg/fault"
)

func TestInflight_RetryJoinsTheRunningRequest(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var (
			f       inflight
			wg      sync.WaitGroup
			runs    atomic.Int32
			failure = errors.New("x")
		)
		for range 10 {
			wg.Go(func() {
				err := f.do(t.Context(), "/t", "publish a", func() error {
					runs.Add(1)
					time.Sleep(time.Second)
					return failure
				})
				if !errors.Is(err, failure) {
					t.Errorf("error %v, want the work's", err)
				}
			})
		}
		wg.Wait()
		if runs.Load() != 1 {
			t.Errorf("the work ran %d times", runs.Load())
		}
	})
}

func TestInflight_OtherRequestForATargetIsRefused(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var f inflight
		go func() { _ = f.do(t.Context(), "/t", "publish a", func() error { time.Sleep(time.Second); return nil }) }()
		synctest.Wait()
		if err := f.do(t.Context(), "/t", "publish b", func() error { return nil }); !fault.Is(err, fault.Busy) {
			t.Errorf("error %v, want Busy", err)
		}
		if err := f.do(t.Context(), "/u", "publish b", func() error { return nil }); err != nil {
			t.Errorf("another target is busy too: %v", err)
		}
		f.wait(time.Minute)
	})
}

func TestInflight_RetryAfterATimeoutJoinsTheRequest(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var (
			f    inflight
			runs atomic.Int32
		)
		work := func() error { runs.Add(1); time.Sleep(time.Minute); return nil }
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		if err := f.do(ctx, "/t", "publish a", work); !fault.Is(err, fault.Timeout) {
			t.Errorf("error %v, want Timeout", err)
		}
		if err := f.do(t.Context(), "/t", "publish a", work); err != nil || runs.Load() != 1 {
			t.Errorf("error %v after %d runs", err, runs.Load())
		}
		f.wait(time.Second)
		if len(f.byTarget) != 0 {
			t.Error("a finished request is kept")
		}
	})
}
