package driver

import (
	"context"
	"fmt"
	"os"
	"os/signal"
	"syscall"
)

// WithSignals returns a context that is cancelled by the first SIGTERM or SIGINT. The second signal immediately calls exit with 128 plus its
// number. stop restores the default handling of signals and releases the resources of WithSignals.
func WithSignals(parent context.Context, exit func(code int)) (ctx context.Context, stop func()) {
	ctx, cancel := context.WithCancelCause(parent)
	signals := make(chan os.Signal, 2)
	signal.Notify(signals, syscall.SIGTERM, syscall.SIGINT)
	quit, done := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(done)
		for first := true; ; first = false {
			select {
			case <-quit:
				return
			case s := <-signals:
				if !first {
					exit(exitCode(s))
					return
				}
				cancel(fmt.Errorf("received %v", s))
			}
		}
	}()
	return ctx, func() {
		signal.Stop(signals)
		close(quit)
		<-done
		cancel(nil)
	}
}

func exitCode(s os.Signal) int {
	if n, ok := s.(syscall.Signal); ok {
		return 128 + int(n)
	}
	return 1
}
