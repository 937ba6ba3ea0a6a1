package runner

import (
	"context"

	"golang.org/x/sync/errgroup"
	"k8s.io/klog/v2"
)

// refreshing is how many helpers Refresh asks at a time.
const refreshing = 16

// Refresh notes the current status of all helpers in the tracker, as far as they answer before ctx ends.
func (r *Runner) Refresh(ctx context.Context) {
	names, err := r.Store.Names(ctx)
	if err != nil {
		klog.FromContext(ctx).Error(err, "Cannot list mounts")
		return
	}
	var asked errgroup.Group
	asked.SetLimit(refreshing)
	for _, name := range names {
		asked.Go(func() error {
			ctx, cancel := context.WithTimeout(ctx, helperBound)
			defer cancel()
			if status, err := r.Peer(name).Status(ctx); err == nil {
				r.Tracker.Reported(name, status)
			}
			return nil
		})
	}
	_ = asked.Wait()
}
