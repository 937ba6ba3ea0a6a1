package supervisor

import (
	"context"
	"time"

	"github.com/s3-csi/s3-csi-driver/pkg/fault"
	"github.com/s3-csi/s3-csi-driver/pkg/mount"
	"github.com/s3-csi/s3-csi-driver/pkg/mount/drain"
	"github.com/s3-csi/s3-csi-driver/pkg/mount/state"
	"github.com/s3-csi/s3-csi-driver/pkg/mount/tracker"
	"github.com/s3-csi/s3-csi-driver/pkg/namedlock"
)

// keyLocks are the locks of mount keys: one generation of a mount comes after the other.
type keyLocks struct {
	namedlock.Locks
	store   *state.Store
	tracker *tracker.Tracker
}

// lock locks a mount key.
func (l *keyLocks) lock(ctx context.Context, key string) (unlock func(), err error) {
	unlock, err = l.Lock(ctx, key)
	if err != nil {
		return nil, fault.Errorf(fault.Busy, "the mount of this volume is being started or stopped: %w", err)
	}
	return unlock, nil
}

// lockToStop locks the key of a mount. If the mount is being stopped by another call, the error reports what is left to store.
func (l *keyLocks) lockToStop(ctx context.Context, name string) (unlock func(), err error) {
	unlock, err = l.Lock(ctx, mount.KeyOf(name))
	if err == nil {
		return unlock, nil
	}
	rctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Second)
	defer cancel()
	if m, rerr := l.store.MountOrRemains(rctx, name); rerr == nil && m.Phase == state.Ending {
		return nil, drain.InProgress(m, drain.WithQueue(l.tracker.Mount(name).Queue(), err))
	}
	return nil, fault.Errorf(fault.Busy, "the mount is being started or stopped: %w", err)
}
