// Package remove deletes volumes and snapshots according to their records or tags. Deletions run in the background, independent of the
// call that started them, and continue what an earlier attempt of any process left unfinished.
package remove

import (
	"context"
	"sync/atomic"

	"github.com/s3-csi/s3-csi-driver/pkg/backend"
	"github.com/s3-csi/s3-csi-driver/pkg/credentials"
	"github.com/s3-csi/s3-csi-driver/pkg/provision/buckets"
	"github.com/s3-csi/s3-csi-driver/pkg/provision/erase"
	"github.com/s3-csi/s3-csi-driver/pkg/provision/identity"
	"github.com/s3-csi/s3-csi-driver/pkg/provision/records"
	"github.com/s3-csi/s3-csi-driver/pkg/provision/runs"
)

// Remover deletes volumes and snapshots. All methods may be called concurrently.
type Remover struct {
	Identities *identity.Identities
	Clients    *backend.Clients
	Opener     *buckets.Opener
	Records    *records.Store
	Eraser     *erase.Eraser
	Claims     *runs.Claims
	// queue has a lane in which each deletion begins, which is short: most deletions are of empty volumes and end there. Those with something to erase
	// go to the second lane, where they wait for a worker.
	queue *runs.Queue
}

// maxChecks is how many deletions run at once until they need a worker. It bounds the memory of their requests.
const maxChecks = 64

// New returns a Remover with those dependencies, which erases up to limit volumes at once. It starts nothing: deletions wait for Run.
func New(r Remover, limit int) *Remover {
	r.queue = runs.New(maxChecks, limit)
	return &r
}

// Run executes deletions until ctx ends. The next DeleteVolume of any process continues unfinished ones. Run can be called once.
func (r *Remover) Run(ctx context.Context) error { return r.queue.Run(ctx) }

// job deletes one volume or snapshot.
type job func(ctx context.Context, d *deletion) error

// deletion is the deletion of one volume or snapshot in this process.
type deletion struct {
	run      *runs.Run
	progress erase.Progress
	waits    atomic.Bool       // for copies that may still write, see Remover.outwait
	unfilled bool              // the volume is deleted only if its content is not complete
	planned  bool              // scoped is final
	scoped   backend.KeySource // sessions of the deletion; nil: none
}

// String returns the progress.
func (d *deletion) String() string {
	s := d.progress.String()
	if d.waits.Load() {
		s += "; waiting until a copy that was in progress has ended, for two minutes if its controller does not answer"
	}
	return s
}

// hasWorker reports whether the deletion is one of the limited number that may erase data.
func (d *deletion) hasWorker() bool { return d.run.Lane() > 0 }

// Delete deletes the volume according to its record or its bucket's tags (volume.OnDelete). It returns nil if the volume is deleted or never
// existed. While the deletion is queued or in progress, it returns Busy with the progress. The deletion continues without the caller, and
// calls for the same volume join it. Run executes the deletions.
func (r *Remover) Delete(ctx context.Context, q records.Request) error {
	return r.deleteVolume(ctx, q, &deletion{})
}

// DeleteUnfilled is Delete for a volume whose content could not be completed. Busy: it is complete.
func (r *Remover) DeleteUnfilled(ctx context.Context, q records.Request) error {
	return r.deleteVolume(ctx, q, &deletion{unfilled: true})
}

func (r *Remover) deleteVolume(ctx context.Context, q records.Request, d *deletion) error {
	return r.delete(ctx, request{"volume " + q.ID.String(), q.ID.Backend, q.Keys, q.RoleARN}, d, volumeDeletion{remover: r, id: q.ID}.find)
}

// request asks for a deletion.
type request struct {
	what, backend string // what is the name of the volume or snapshot
	keys          credentials.Keys
	role          string
}

// delete executes or joins a deletion. find returns what deletes the volume or snapshot, or nil if there is nothing to delete; its error is a refusal.
func (r *Remover) delete(ctx context.Context, q request, d *deletion, find func(context.Context, identity.Access) (job, error)) (err error) {
	be, who, err := r.Identities.Find(q.backend, q.keys, q.role)
	if err != nil {
		return err
	}
	if joined, err := r.queue.Join(ctx, q.what, who); joined {
		return err
	}
	keys, err := r.Identities.Keys(ctx, be, who)
	if err != nil {
		return err
	}
	defer func() { r.Identities.Invalidate(be, who, keys, err) }()
	carryOut, err := find(ctx, identity.Access{Backend: be, Who: who, Keys: keys})
	if err != nil || carryOut == nil {
		return err
	}
	return r.queue.Do(ctx, runs.Work{ID: q.what, What: "deleting " + q.what, Who: who, Progress: d, Job: func(ctx context.Context, run *runs.Run) error {
		d.run = run
		return r.Identities.WhileConfigured(ctx, be, func(ctx context.Context) error { return carryOut(ctx, d) })
	}})
}

// erase erases what is below a prefix. A deletion that has no worker may only find that there is nothing to erase; otherwise the
// error is runs.ErrNextLane.
func (r *Remover) erase(ctx context.Context, d *deletion, t erase.Task) error {
	if d.hasWorker() {
		return r.Eraser.Erase(ctx, t)
	}
	left, err := r.Eraser.Look(ctx, t)
	if err == nil && !left.Empty() {
		return runs.ErrNextLane
	}
	return err
}

// outwait waits until no run that copies into the volume or snapshot may still write. The record says deleting, which the runs notice, and read
// returns the claims that are left in it.
func (r *Remover) outwait(ctx context.Context, d *deletion, read func(context.Context) ([]string, error)) error {
	d.waits.Store(true)
	defer d.waits.Store(false)
	return r.Claims.Outwait(ctx, read)
}
