package driver

import (
	"context"
	"fmt"
	"os"
	"os/signal"
	"syscall"
)

// WithSignals is a context that the first SIGTERM or SIGINT ends. The second one calls exit with 128 plus its number, at
// once: an operator who asks twice does not want to wait. stop gives the signals their default effect back and ends what
// WithSignals started.
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
