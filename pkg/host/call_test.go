//go:build linux

package host

import (
	"context"
	"errors"
	"testing"
)

// A result that comes after the caller has given up is dropped.
func TestLateResultsAreDropped(t *testing.T) {
	dropped, goOn := make(chan int, 1), make(chan struct{})
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	late := func() (int, error) { cancel(); <-goOn; return 7, nil }
	if v, err := Call(ctx, Own(), "coming late", func(v int) { dropped <- v }, late); v != 0 || !errors.Is(err, context.Canceled) {
		t.Errorf("%d, %v", v, err)
	}
	close(goOn)
	if v := <-dropped; v != 7 {
		t.Errorf("dropped %d", v)
	}
	if v, err := Call(t.Context(), Own(), "coming", func(v int) { dropped <- v }, late); v != 7 || err != nil || len(dropped) > 0 {
		t.Errorf("%d, %v, %d dropped", v, err, len(dropped))
	}
}
