// Package remove deletes volumes as their records or tags say, and looks them up. Deletions run in the background, outlive the call
// that asked for them, and continue from whatever state an earlier attempt, of any process, left a volume in.
package remove

import (
	"context"
	"errors"
	"sync"

	"github.com/s3-csi/s3-csi-driver/pkg/backend"
	"github.com/s3-csi/s3-csi-driver/pkg/credentials"
	"github.com/s3-csi/s3-csi-driver/pkg/fault"
	"github.com/s3-csi/s3-csi-driver/pkg/provision/buckets"
	"github.com/s3-csi/s3-csi-driver/pkg/provision/erase"
	"github.com/s3-csi/s3-csi-driver/pkg/provision/identity"
	"github.com/s3-csi/s3-csi-driver/pkg/provision/records"
	"github.com/s3-csi/s3-csi-driver/pkg/volume"
)

// Request names a volume to delete or look up.
type Request struct {
	ID      volume.ID
	Keys    credentials.Keys // of the request's secret; zero: none
	RoleARN string           // of the request's secret; "": none
}

// Options are what a Remover works with; all are required.
type Options struct {
	Config     backend.Configured // asked at each call
	Identities *identity.Identities
	Clients    *backend.Clients
	Opener     *buckets.Opener
	Records    *records.Store
	Eraser     Eraser
	Runs       int // how many deletions run at once
}

// Eraser removes everything below a prefix; *erase.Eraser does.
type Eraser interface {
	Erase(ctx context.Context, t erase.Task) error
}

// Remover deletes volumes and looks them up. All methods may be called concurrently.
type Remover struct {
	Options
	queue *queue
}

// New starts nothing: deletions wait for Run.
func New(o Options) *Remover { return &Remover{Options: o, queue: newQueue(o.Runs)} }

// Run does the deletions until ctx ends. What is not finished then stays as it is in S3, and the next DeleteVolume of any process
// continues it. Run can be called once.
func (r *Remover) Run(ctx context.Context) error { return r.queue.run(ctx) }

// Delete deletes the volume as its record or its bucket's tags say (volume.OnDelete). nil: it is gone, or never was. While the
// deletion is in progress the answer is Busy with the progress so far; it continues without the caller, and calls for the same
// volume join it. The work is done by Run: before that has started, the answer is Busy too.
func (r *Remover) Delete(ctx context.Context, req Request) (err error) {
	be, who, err := r.Identities.Find(req.ID.Backend, req.Keys, req.RoleARN)
	if err != nil {
		return err
	}
	if d := r.queue.join(req.ID.String(), who); d != nil {
		return r.queue.wait(ctx, d)
	}
	keys, err := r.Identities.Keys(ctx, be, who)
	if err != nil {
		return err
	}
	defer func() { r.Identities.Invalidate(be, who, keys, err) }()
	find, job := r.findPrefix, r.deletePrefix
	if req.ID.Prefix == "" {
		find, job = r.findBucket, r.deleteBucket
	}
	// What needs no work is answered at once, however many deletions are in progress.
	state, err := find(ctx, be, keys, req.ID)
	if err != nil || state == records.StateGone {
		return err
	}
	d, err := r.queue.start(req.ID.String(), who, func(ctx context.Context, d *deletion) error {
		return r.whileConfigured(ctx, be, func(ctx context.Context) error { return job(ctx, be, d, req.ID) })
	})
	if err != nil {
		return err
	}
	return r.queue.wait(ctx, d)
}

// Lookup reports NotFound unless this driver's volume of that id is there; one that is being deleted is not.
func (r *Remover) Lookup(ctx context.Context, req Request) (err error) {
	be, who, err := r.Identities.Find(req.ID.Backend, req.Keys, req.RoleARN)
	if err != nil {
		return err
	}
	keys, err := r.Identities.Keys(ctx, be, who)
	if err != nil {
		return err
	}
	defer func() { r.Identities.Invalidate(be, who, keys, err) }()
	find := r.lookPrefix
	if req.ID.Prefix == "" {
		find = r.lookBucket
	}
	return find(ctx, be, keys, req.ID)
}

// errReconfigured ends work on a backend that the config file describes differently by now.
var errReconfigured = errors.New("the config file has changed for this backend")

// whileConfigured works with a backend as long as its config does not change, and returns Busy otherwise: the next DeleteVolume
// looks where the volume is now, and what was found elsewhere proves nothing about it.
func (r *Remover) whileConfigured(ctx context.Context, be backend.Backend, work func(context.Context) error) error {
	revision := be.Revision()
	same := func() bool {
		now, err := r.Config.Config().Backend(be.Name)
		return err == nil && now.Revision() == revision
	}
	working, stop := context.WithCancelCause(ctx)
	var watcher sync.WaitGroup
	watcher.Go(func() {
		for {
			changed := r.Config.Changed()
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
