package identity

import (
	"context"
	"errors"
	"sync"

	"github.com/s3-csi/s3-csi-driver/pkg/backend"
	"github.com/s3-csi/s3-csi-driver/pkg/fault"
)

// errReconfigured cancels work on a backend whose configuration has changed.
var errReconfigured = errors.New("the config file has changed for this backend")

// WhileConfigured runs work on a backend and returns Busy if the backend's configuration changes meanwhile, because results from the old
// endpoint prove nothing about the new one. The next DeleteVolume uses the new configuration.
func (i *Identities) WhileConfigured(ctx context.Context, be backend.Backend, work func(context.Context) error) error {
	revision := be.Revision()
	same := func() bool {
		now, err := i.config.Config().Backend(be.Name)
		return err == nil && now.Revision() == revision
	}
	working, stop := context.WithCancelCause(ctx)
	var watcher sync.WaitGroup
	watcher.Go(func() {
		for {
			changed := i.config.Changed()
			if !same() {
				stop(errReconfigured)
				return
			}
			select {
			case <-changed:
			case <-working.Done():
				return
			}
		}
	})
	err := work(working)
	stop(nil)
	watcher.Wait()
	if ctx.Err() == nil && !same() {
		return fault.Errorf(fault.Busy, "%s: %w; a retry uses the new settings", be, errReconfigured)
	}
	return err
}
