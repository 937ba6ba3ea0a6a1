package mount

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/s3-csi/s3-csi-driver/pkg/host"
)

// What comes when nobody waits for it any more is dropped, and never seen half-made.
func TestWhatComesTooLateIsDropped(t *testing.T) {
	dropped, goOn := make(chan int, 1), make(chan struct{})
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Millisecond)
	defer cancel()
	late := func() (int, error) { <-goOn; return 7, nil }
	if v, err := inHost(ctx, host.Own(), "coming late", func(v int) { dropped <- v }, late); v != 0 || !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("%d, %v", v, err)
	}
	close(goOn)
	if v := <-dropped; v != 7 {
		t.Errorf("dropped %d", v)
	}
	if v, err := inHost(t.Context(), host.Own(), "coming", func(v int) { dropped <- v }, late); v != 7 || err != nil || len(dropped) > 0 {
		t.Errorf("%d, %v, %d dropped", v, err, len(dropped))
	}
}
