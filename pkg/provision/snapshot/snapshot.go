// Package snapshot makes snapshots of volumes, and finds and lists them. A snapshot is a record and a copy of the volume's objects, below a
// prefix that no volume can have. Deleting it is pkg/provision/remove's.
package snapshot

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"k8s.io/klog/v2"

	"github.com/s3-csi/s3-csi-driver/pkg/backend"
	"github.com/s3-csi/s3-csi-driver/pkg/credentials"
	"github.com/s3-csi/s3-csi-driver/pkg/fault"
	"github.com/s3-csi/s3-csi-driver/pkg/policy"
	"github.com/s3-csi/s3-csi-driver/pkg/provision/buckets"
	"github.com/s3-csi/s3-csi-driver/pkg/provision/copier"
	"github.com/s3-csi/s3-csi-driver/pkg/provision/erase"
	"github.com/s3-csi/s3-csi-driver/pkg/provision/identity"
	"github.com/s3-csi/s3-csi-driver/pkg/provision/records"
	"github.com/s3-csi/s3-csi-driver/pkg/provision/remove"
	"github.com/s3-csi/s3-csi-driver/pkg/provision/runs"
	"github.com/s3-csi/s3-csi-driver/pkg/volume"
)

// maxRaces is how often a decision is repeated because a record changed meanwhile.
const maxRaces = 4

// Request is a request to make a snapshot.
type Request struct {
	Name       string // as the CO gave it
	Namespace  string // of the snapshot, if the CO passes it; it only decides whether the operator's rules allow the bucket
	Source     volume.ID
	Parameters volume.SnapshotParameters
	Keys       credentials.Keys // of the request's secret; zero: none
	RoleARN    string           // of the request's secret; "": none
}

// Info describes a snapshot.
type Info struct {
	ID      volume.SnapshotID
	Source  string // volume id
	Objects int64
	Bytes   int64
	Cut     time.Time
	Ready   bool
}

// Volumes looks volumes up and deletes snapshots; *remove.Remover implements it.
type Volumes interface {
	Lookup(ctx context.Context, r remove.Request) error
	LookupPlace(ctx context.Context, r remove.Request) error
	DeleteSnapshot(ctx context.Context, r remove.SnapshotRequest) error
	WhileConfigured(ctx context.Context, be backend.Backend, work func(context.Context) error) error
}

// Options are the dependencies of a Maker; all are required.
type Options struct {
	Config     backend.Configured // read at each call
	Identities *identity.Identities
	Clients    *backend.Clients
	Opener     *buckets.Opener
	Records    *records.Store
	Copier     *copier.Copier
	Eraser     *erase.Eraser
	Runs       *runs.Queue
	Volumes    Volumes
	// ClockSkew is the maximum difference between the clocks of a service's servers; 0: DefaultClockSkew.
	ClockSkew time.Duration
	Claims    *runs.Claims
	// NotVolume refuses a bucket that is itself a volume.
	NotVolume func(ctx context.Context, b buckets.Bucket) error
}

// Maker makes snapshots. All methods may be called concurrently.
type Maker struct{ Options }

// DefaultClockSkew is the default of Options.ClockSkew. A snapshot with consistency: time takes up to two seconds longer for each second of it.
const DefaultClockSkew = time.Second

// New returns a Maker. It starts nothing.
func New(o Options) *Maker {
	if o.ClockSkew == 0 {
		o.ClockSkew = DefaultClockSkew
	}
	return &Maker{o}
}

// Create makes the snapshot of that name, or returns it if it exists with the same source and parameters. Until all is copied and verified, it
// returns Busy with the progress. The copy continues without the caller, and calls for the same snapshot join it. A snapshot with
// consistency: time is returned before it is ready, once its time is over.
//
// Exists: the name is used otherwise. NotFound: there is no source, or it was deleted meanwhile. OutOfRange: the source is above the limits.
// After such an error nothing is left of the snapshot but a tombstone. If a snapshot was returned before, the tombstone makes the error last.
func (m *Maker) Create(ctx context.Context, r Request) (info Info, err error) {
	if err := m.admit(r); err != nil {
		return Info{}, err
	}
	be, who, err := m.Identities.Find(r.Source.Backend, r.Keys, r.RoleARN)
	if err != nil {
		return Info{}, err
	}
	keys, err := m.Identities.Keys(ctx, be, who)
	if err != nil {
		return Info{}, err
	}
	defer func() { m.Identities.Invalidate(be, who, keys, err) }()
	c := creation{Maker: m, be: be, who: who, r: r}
	if c.b, err = m.place(ctx, be, keys, r); err != nil {
		return Info{}, err
	}
	if err := m.Runs.Failure(c.runID()); err != nil {
		return Info{}, err
	}
	return c.run(ctx)
}

// admit refuses what no answer of a service can change.
func (m *Maker) admit(r Request) error {
	if r.Source.Prefix == "" && r.Parameters.StaticVolumes && (r.Parameters.BucketName == "" || r.Parameters.BucketName == r.Source.Bucket) {
		return fault.Field("parameters.bucketName", "must name another bucket than that of volume %s, which is the whole bucket", r.Source)
	}
	if r.Source.Prefix == "" && r.Parameters.BucketName == "" {
		return fault.Field("parameters.bucketName", "is missing: volume %s is a bucket, which is deleted with its volume; name a bucket for its snapshots", r.Source)
	}
	if err := r.Parameters.CheckPlace(r.Source); err != nil {
		return err
	}
	be, err := m.Config.Config().Backend(r.Source.Backend)
	if err != nil {
		return err
	}
	places := []string{r.Parameters.ID(r.Source, r.Name, 1).Bucket}
	if r.Parameters.StaticVolumes { // no creation has checked the source's
		places = append(places, r.Source.Bucket)
	}
	for _, bucket := range places {
		if err := be.Allows(backend.Use{Namespace: r.Namespace, Bucket: bucket, Creation: true}); err != nil {
			return err
		}
	}
	return nil
}

// place opens the snapshot's bucket and checks that snapshots can be there.
func (m *Maker) place(ctx context.Context, be backend.Backend, keys credentials.Keys, r Request) (buckets.Bucket, error) {
	name := r.Parameters.ID(r.Source, r.Name, 1).Bucket
	for _, bucket := range []string{name, r.Source.Bucket} {
		if kind, err := volume.ValidateBucketName(bucket); err == nil && kind == volume.BucketDirectory {
			return buckets.Bucket{}, fault.Errorf(fault.Precondition, "bucket %s is a directory bucket, which lists keys in no order: it can have no snapshots", bucket)
		}
	}
	b, err := m.Opener.Open(ctx, be, keys, name, "")
	if fault.Is(err, fault.NotFound) {
		if r.Parameters.BucketName == "" {
			return b, fault.Errorf(fault.NotFound, "there is no volume %s: %w", r.Source, err)
		}
		return b, fault.Errorf(fault.Precondition, "parameters.bucketName: bucket %s must exist: %w", name, err)
	}
	if err != nil {
		return b, err
	}
	if err := m.NotVolume(ctx, b); err != nil {
		return b, err
	}
	_, err = m.Opener.Conditional(ctx, b)
	return b, err
}

// creation is one CreateSnapshot.
type creation struct {
	*Maker
	be  backend.Backend
	who identity.Identity
	b   buckets.Bucket
	r   Request
	// claim is that of the run, in the snapshot's record.
	claim *runs.Claim
}

// RunID returns the id of the run that makes a snapshot of that name.
func RunID(id volume.SnapshotID) string {
	return "snapshot " + id.Backend + ":" + id.Bucket + "/" + id.Segment
}

func (c *creation) runID() string { return RunID(c.r.Parameters.ID(c.r.Source, c.r.Name, 1)) }

func (c *creation) run(ctx context.Context) (Info, error) {
	for range maxRaces {
		found, err := c.Records.ReadSnapshot(ctx, c.b, volume.NameSegment(c.r.Name))
		switch {
		case fault.Is(err, fault.NotFound) && !backend.IsNoSuchBucket(err):
			found = records.StoredSnapshot{}
		case err != nil:
			return Info{}, err
		}
		if c.failed(found) && !found.Cut.IsZero() && found.State == records.StateDeleted {
			return Info{}, fault.Errorf(fault.Precondition, "snapshot %s showed the time %s, but could not be copied and was deleted; make one with another name: %s", found.SnapshotID, found.Cut.Format(time.RFC3339Nano), found.Failure)
		}
		if c.failed(found) && found.State == records.StateDeleting {
			// The process that deletes it may have been killed, and no caller asks for the deletion of a snapshot that failed.
			if err := c.discard(ctx, c.who, c.r.Parameters.ID(c.r.Source, c.r.Name, found.Generation), found.Failure); err != nil {
				return Info{}, fmt.Errorf("%w; the snapshot could not be made: %s", err, found.Failure)
			}
			continue
		}
		next, err := c.decide(found)
		if err != nil {
			return Info{}, err
		}
		if next > 0 {
			if found, err = c.begin(ctx, next, found.ETag); errors.Is(err, records.ErrChanged) {
				continue
			} else if err != nil {
				return Info{}, err
			}
		}
		switch {
		case found.State == records.StateReady:
		case !found.Cut.IsZero():
			if err := c.start(found); err != nil {
				return Info{}, err
			}
		default:
			if found, err = c.copy(ctx, found); err != nil {
				return Info{}, err
			}
			if found.State != records.StateReady {
				continue // it has been deleted since
			}
		}
		return c.info(found.Snapshot)
	}
	return Info{}, fault.Errorf(fault.Busy, "the record of snapshot %q in %s keeps changing: other controllers use the same name", c.r.Name, c.b)
}

// failed reports whether a record is that of a snapshot of this name that could not be made and is being deleted, or is deleted.
func (c *creation) failed(found records.StoredSnapshot) bool {
	return (found.State == records.StateDeleting || found.State == records.StateDeleted) && found.Failure != "" && found.Owner() == c.Records.Owner && found.Name == c.r.Name &&
		found.SnapshotID == c.r.Parameters.ID(c.r.Source, c.r.Name, found.Generation).String()
}

// discard deletes a snapshot that could not be made.
func (c *creation) discard(ctx context.Context, who identity.Identity, id volume.SnapshotID, failure string) error {
	return c.Volumes.DeleteSnapshot(ctx, remove.SnapshotRequest{ID: id, Keys: who.Keys, RoleARN: who.Role, Failure: failure})
}

// decide decides what a record means for the request. next is the generation of a new record, 0: the record is that of the snapshot.
func (c *creation) decide(found records.StoredSnapshot) (next int, err error) {
	switch {
	case found.ETag == "":
		return 1, nil
	case found.State == records.StateDeleted:
		if found.Generation >= volume.MaxGeneration {
			return 0, fault.Errorf(fault.Exhausted, "the snapshot name %q was used %d times in this bucket, which is the limit: choose another name", c.r.Name, found.Generation)
		}
		return found.Generation + 1, nil
	case found.Owner() != c.Records.Owner:
		return 0, fault.Errorf(fault.Exists, "the snapshot name %q is taken in this bucket by %s (%s); this is %s", c.r.Name, found.Owner(), found.SnapshotID, c.Records.Owner)
	case found.Name != c.r.Name:
		return 0, fault.Errorf(fault.Exists, "the snapshot names %q and %q have the same place, and the first one uses it (%s): choose another name", found.Name, c.r.Name, found.SnapshotID)
	case found.Source != c.r.Source.String():
		return 0, fault.Errorf(fault.Exists, "snapshot %q exists (%s), of volume %s", c.r.Name, found.SnapshotID, found.Source)
	case found.ParametersDigest != c.r.Parameters.Digest():
		return 0, fault.Errorf(fault.Exists, "snapshot %q exists (%s) with other parameters", c.r.Name, found.SnapshotID)
	case found.State == records.StateDeleting:
		return 0, fault.Errorf(fault.Busy, "snapshot %s of that name is being deleted", found.SnapshotID)
	case found.SnapshotID != c.r.Parameters.ID(c.r.Source, c.r.Name, found.Generation).String():
		return 0, fault.Errorf(fault.Exists, "the record of snapshot %q in %s names %s: it was not written for this bucket", c.r.Name, c.b, found.SnapshotID)
	}
	return 0, nil
}

// begin writes the record of a new snapshot.
func (c *creation) begin(ctx context.Context, generation int, etag string) (records.StoredSnapshot, error) {
	if err := c.source(ctx, c.who); err != nil {
		return records.StoredSnapshot{}, err
	}
	s := records.NewSnapshot(c.Records.Owner, c.r.Name, c.r.Parameters.ID(c.r.Source, c.r.Name, generation), c.r.Source, c.r.Parameters, c.Records.Now())
	if c.r.Parameters.Consistency == volume.SnapshotTime {
		cut, err := c.cut(ctx)
		if err != nil {
			return records.StoredSnapshot{}, err
		}
		s.State, s.Cut = records.StateCopying, cut
	}
	etag, err := c.Records.WriteSnapshot(ctx, c.b, etag, s)
	return records.StoredSnapshot{Snapshot: s, ETag: etag}, err
}

// cut returns the time that the snapshot shows. It is over when cut returns, and the source existed then.
func (c *creation) cut(ctx context.Context) (time.Time, error) {
	keys, err := c.Identities.Keys(ctx, c.be, c.who)
	if err != nil {
		return time.Time{}, err
	}
	b, err := c.Opener.Open(ctx, c.be, keys, c.r.Source.Bucket, "")
	if err != nil {
		return time.Time{}, err
	}
	cut, err := buckets.Cut(ctx, b, records.CutsPrefix, c.ClockSkew)
	if err != nil {
		return time.Time{}, fault.Errorf(fault.KindOf(err), "parameters.consistency: a snapshot of one time (%s) of volume %s: %w", volume.SnapshotTime, c.r.Source, err)
	}
	return cut, c.source(ctx, c.who)
}

// source returns NotFound unless the source exists and is not being deleted. A static volume exists if anything is in its place.
func (c *creation) source(ctx context.Context, who identity.Identity) error {
	req := remove.Request{ID: c.r.Source, Keys: who.Keys, RoleARN: who.Role}
	err := c.Volumes.Lookup(ctx, req)
	switch {
	case !fault.Is(err, fault.NotFound):
		return err
	case c.r.Parameters.StaticVolumes:
		return c.Volumes.LookupPlace(ctx, req)
	}
	return fault.Errorf(fault.NotFound, "%w; a static volume needs the parameter staticVolumes of the VolumeSnapshotClass", err)
}

// copy executes or joins the run that copies the snapshot, and returns the record when it is ready.
func (c *creation) copy(ctx context.Context, found records.StoredSnapshot) (records.StoredSnapshot, error) {
	id := c.r.Parameters.ID(c.r.Source, c.r.Name, found.Generation)
	if err := c.Runs.Do(ctx, c.work(id)); err != nil {
		return found, err
	}
	return c.Records.ReadSnapshot(ctx, c.b, id.Segment)
}

// start executes the run that copies the snapshot, or lets it go on.
func (c *creation) start(found records.StoredSnapshot) error {
	id := c.r.Parameters.ID(c.r.Source, c.r.Name, found.Generation)
	return c.Runs.Start(c.work(id))
}

func (c *creation) work(id volume.SnapshotID) runs.Work {
	progress := &copier.Progress{}
	job := func(ctx context.Context, r *runs.Run) error {
		own := *c
		own.claim = own.Claims.New()
		defer own.claim.End()
		return own.Volumes.WhileConfigured(ctx, own.be, func(ctx context.Context) error { return own.make(ctx, r, id, progress) })
	}
	return runs.Work{ID: c.runID(), What: "making snapshot " + id.String(), Who: c.who, Progress: progress, Job: job}
}

// errOver means that the record no longer asks for the copy.
var errOver = errors.New("the record no longer says that the snapshot is being made")

// errDone means that another process has made the snapshot.
var errDone = errors.New("the snapshot is made")

// errTaken means that another process makes the snapshot now.
var errTaken = errors.New("another controller has begun to make the snapshot")

// make makes the snapshot, from whatever an earlier run left:
//
//  1. write into the record that this run makes the snapshot, so that any other run stops
//  2. count the source's objects, and refuse those above the limits; of a snapshot of one time, write the plan: which versions to copy
//  3. copy them and verify the copy
//  4. if other runs were stopped, wait until they can write no more, and verify the copy again
//  5. write the state ready
//
// If it fails for good, it deletes what there is of the snapshot. Otherwise another run continues, which need not wait for this one.
func (c *creation) make(ctx context.Context, r *runs.Run, id volume.SnapshotID, progress *copier.Progress) error {
	sides, err := c.open(ctx, r, id)
	if err != nil {
		return c.giveUp(ctx, r, id, err)
	}
	err = c.makeIn(ctx, r, id, sides, progress)
	c.claim.End()
	switch {
	case err == nil, errors.Is(err, errDone):
		return nil
	case errors.Is(err, errOver) && ctx.Err() == nil:
		err = c.sweep(ctx, sides, id, err)
		fallthrough
	case !fault.KindOf(err).Permanent(), ctx.Err() != nil:
		c.release(ctx, sides.target.AsOwn(), id)
		return err
	}
	return c.giveUp(ctx, r, id, err)
}

// giveUp deletes the snapshot if the error is final, and returns the error.
func (c *creation) giveUp(ctx context.Context, r *runs.Run, id volume.SnapshotID, why error) error {
	if !fault.KindOf(why).Permanent() || ctx.Err() != nil {
		return why
	}
	if discardErr := c.discard(ctx, r.Latest(), id, backend.Clip(why.Error(), 1000)); discardErr != nil {
		return fault.Errorf(fault.Busy, "%w; deleting what was copied: %w", why, discardErr)
	}
	return why
}

// sweep erases what this run may have copied after another process had erased the snapshot.
func (c *creation) sweep(ctx context.Context, sides sides, id volume.SnapshotID, why error) error {
	found, err := c.Records.ReadSnapshot(ctx, sides.target.AsOwn(), id.Segment)
	if err == nil && (found.SnapshotID != id.String() || found.State == records.StateDeleting || found.State == records.StateDeleted) && found.OnDelete != volume.OnDeleteRetain {
		err = c.Eraser.Erase(ctx, erase.Task{Bucket: sides.target.AsOwn(), Prefix: id.Prefix(), Versions: found.OnDelete == volume.OnDeletePurge, Progress: &erase.Progress{}})
	}
	if err != nil && !fault.Is(err, fault.NotFound) {
		return fault.Errorf(fault.Busy, "%w; removing what was copied: %w", why, err)
	}
	return why
}

func (c *creation) makeIn(ctx context.Context, r *runs.Run, id volume.SnapshotID, s sides, progress *copier.Progress) error {
	own := s.target.AsOwn()
	found, err := c.take(ctx, own, id)
	if err != nil {
		return err
	}
	task := copier.Task{
		Target: copier.Place{Bucket: s.target, Prefix: id.Data()}, Manifest: id.Manifest(), Limits: copier.Limits{Objects: c.r.Parameters.MaxObjects, Bytes: c.r.Parameters.MaxBytes},
		Progress: progress, Still: func(ctx context.Context) error { return c.still(ctx, r, own, id) }, Unanswered: c.claim.Unanswered,
	}
	if found.Cut.IsZero() {
		err = c.count(ctx, &task, &found, s, id)
	} else {
		err = c.plan(ctx, &task, &found, s, id)
	}
	if err != nil {
		return err
	}
	progress.Expect(copier.Totals{Objects: found.Objects, Bytes: found.Bytes})
	totals, err := c.Copier.Copy(ctx, task)
	if err == nil && len(found.Makers) > 1 {
		if err = c.outwait(ctx, own, id); err == nil {
			totals, err = c.Copier.Copy(ctx, task) // all is copied: this compares, and removes what came late
		}
	}
	if err != nil {
		return err
	}
	if !found.Cut.IsZero() && (totals.Objects != found.Objects || totals.Bytes != found.Bytes) {
		return fault.Errorf(fault.Precondition, "snapshot %s has %d objects and %d bytes, its plan %d and %d: another program changed one of them", id, totals.Objects, totals.Bytes, found.Objects, found.Bytes)
	}
	if err := c.finish(ctx, own, id, totals); err != nil || found.Cut.IsZero() {
		return err
	}
	if err := c.Eraser.Erase(ctx, erase.Task{Bucket: own, Prefix: id.Plan(), Progress: &erase.Progress{}}); err != nil {
		klog.FromContext(ctx).Error(err, "Removing plan failed", "snapshot", id.String()) // the snapshot's deletion removes it
	}
	return nil
}

// write writes the snapshot's record. A write that is broken off would arrive later where the service has no conditions.
func (c *creation) write(ctx context.Context, own buckets.Bucket, etag string, s records.Snapshot) (newETag string, err error) {
	if ctx.Err() != nil {
		return "", context.Cause(ctx)
	}
	ctx, cancel := c.Copier.Whole(ctx)
	defer cancel()
	return c.Records.WriteSnapshot(ctx, own, etag, s)
}

// outwait waits until no other run can write an object of the snapshot any more.
func (c *creation) outwait(ctx context.Context, own buckets.Bucket, id volume.SnapshotID) error {
	return c.Claims.Outwait(ctx, func(ctx context.Context) ([]string, error) {
		found, err := c.mine(ctx, own, id)
		return c.claim.Others(found.Makers), err
	})
}

// releaseBound is how long release takes at most.
const releaseBound = time.Second

// release takes the claim of this run, which has ended, out of the record, so that no other process waits for it. If that fails, they wait.
func (c *creation) release(ctx context.Context, own buckets.Bucket, id volume.SnapshotID) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), releaseBound)
	defer cancel()
	for range maxRaces {
		found, err := c.Records.ReadSnapshot(ctx, own, id.Segment)
		next := found.With(found.State, c.Records.Now())
		next.Makers = c.Claims.Open(found.Makers)
		switch {
		case err != nil, found.SnapshotID != id.String(), slices.Contains(next.Makers, c.claim.ID), !slices.Contains(found.Makers, c.claim.ID):
		default:
			_, err = c.Records.WriteSnapshot(ctx, own, found.ETag, next)
		}
		if !errors.Is(err, records.ErrChanged) {
			if err != nil {
				klog.FromContext(ctx).Info("Could not release the claim of a snapshot, another controller waits for it", "snapshot", id.String(), "reason", err)
			}
			return
		}
	}
}

// take makes this run the one that makes the snapshot, and returns the record.
func (c *creation) take(ctx context.Context, own buckets.Bucket, id volume.SnapshotID) (records.StoredSnapshot, error) {
	for range maxRaces {
		found, err := c.Records.ReadSnapshot(ctx, own, id.Segment)
		switch {
		case err != nil:
			return found, err
		case found.SnapshotID == id.String() && found.State == records.StateReady:
			return found, errDone
		case !isMade(found, id):
			return found, fault.Errorf(fault.Busy, "snapshot %s: %w", id, errOver)
		case !c.Claims.MayTakeOver(runs.Last(found.Makers)):
			return found, c.taken(id, found.Makers)
		}
		others := found.Makers
		found.Snapshot = found.With(found.State, c.Records.Now())
		found.Makers = c.claim.Add(others)
		found.ETag, err = c.write(ctx, own, found.ETag, found.Snapshot)
		if err == nil {
			c.Claims.Revoke(others)
		}
		if err == nil && found.ETag == "" {
			found, err = c.Records.ReadSnapshot(ctx, own, id.Segment)
		}
		if errors.Is(err, records.ErrChanged) {
			continue
		}
		return found, err
	}
	return records.StoredSnapshot{}, c.changing(id)
}

// taken returns the error for a snapshot that another run makes.
func (c *creation) taken(id volume.SnapshotID, makers []string) error {
	c.Claims.LostTo(runs.Last(makers))
	return fault.Errorf(fault.Busy, "snapshot %s: %w", id, errTaken)
}

func (c *creation) changing(id volume.SnapshotID) error {
	return fault.Errorf(fault.Busy, "the record of snapshot %s keeps changing: another controller uses it", id)
}

// count makes the task one that copies the current objects, and writes into the record how many there are.
func (c *creation) count(ctx context.Context, task *copier.Task, found *records.StoredSnapshot, s sides, id volume.SnapshotID) error {
	task.Source = copier.Current{Of: copier.Place{Bucket: s.source, Prefix: c.r.Source.Prefix}}
	if found.State != records.StateCutting {
		return nil
	}
	expected, source, err := c.Copier.Count(ctx, task.Source, task.Limits)
	if err != nil {
		return err
	}
	task.Source = source
	return c.expect(ctx, found, s, id, expected, false)
}

// plan makes the task one that copies the versions of the cut. First it writes the plan, which later deletions and uploads do not change.
func (c *creation) plan(ctx context.Context, task *copier.Task, found *records.StoredSnapshot, s sides, id volume.SnapshotID) error {
	from := copier.Place{Bucket: s.source, Prefix: c.r.Source.Prefix}
	task.Source = copier.Planned{Of: from, Plan: id.Plan(), In: s.target, Store: c.Records}
	if found.Planned {
		return nil
	}
	planning := *task
	planning.Source, planning.Manifest = copier.Versions{Of: from, At: found.Cut}, id.Plan()
	expected, err := c.Copier.Plan(ctx, planning)
	if err != nil {
		return err
	}
	// Otherwise objects may have been overwritten without a version.
	if err := buckets.Versioned(ctx, s.source.AsOwn()); err != nil {
		return err
	}
	return c.expect(ctx, found, s, id, expected, true)
}

// expect writes into the record what is to be copied.
func (c *creation) expect(ctx context.Context, found *records.StoredSnapshot, s sides, id volume.SnapshotID, expected copier.Totals, planned bool) error {
	own := s.target.AsOwn()
	for range maxRaces {
		next := found.With(records.StateCopying, c.Records.Now())
		next.Objects, next.Bytes, next.Planned = expected.Objects, expected.Bytes, planned
		_, err := c.write(ctx, own, found.ETag, next)
		if !errors.Is(err, records.ErrChanged) {
			found.Snapshot = next
			return err
		}
		if *found, err = c.mine(ctx, own, id); err != nil {
			return err
		}
	}
	return c.changing(id)
}

// isMade reports whether a record asks for the copy of that snapshot.
func isMade(found records.StoredSnapshot, id volume.SnapshotID) bool {
	return found.SnapshotID == id.String() && (found.State == records.StateCutting || found.State == records.StateCopying)
}

// mine returns the record, or an error unless this run is the one that makes the snapshot.
func (c *creation) mine(ctx context.Context, own buckets.Bucket, id volume.SnapshotID) (records.StoredSnapshot, error) {
	found, err := c.Records.ReadSnapshot(ctx, own, id.Segment)
	switch {
	case fault.Is(err, fault.NotFound):
		err = fault.Errorf(fault.Busy, "snapshot %s: %w: %w", id, errOver, err)
	case err != nil:
	case found.SnapshotID == id.String() && found.State == records.StateReady:
		err = errDone
	case !isMade(found, id):
		err = fault.Errorf(fault.Busy, "snapshot %s: %w", id, errOver)
	case !c.claim.Is(found.Makers):
		err = c.taken(id, found.Makers)
	}
	return found, err
}

// still returns an error if the snapshot is no longer being made, or its source is deleted. A snapshot of one time needs no source any more.
func (c *creation) still(ctx context.Context, r *runs.Run, own buckets.Bucket, id volume.SnapshotID) error {
	found, err := c.mine(ctx, own, id)
	if err != nil {
		return err
	}
	if !found.Cut.IsZero() {
		return nil // its versions are the source
	}
	if err := c.source(ctx, r.Latest()); err != nil {
		if fault.Is(err, fault.NotFound) {
			return fault.Errorf(fault.NotFound, "the source was deleted while the snapshot was made: %w", err)
		}
		return err
	}
	return nil
}

// finish writes the state ready.
func (c *creation) finish(ctx context.Context, own buckets.Bucket, id volume.SnapshotID, totals copier.Totals) error {
	for range maxRaces {
		found, err := c.mine(ctx, own, id)
		if err != nil {
			return err
		}
		ready := found.With(records.StateReady, c.Records.Now())
		ready.Objects, ready.Bytes, ready.Changed, ready.Finished = totals.Objects, totals.Bytes, totals.Changed, ready.Updated
		_, err = c.write(ctx, own, found.ETag, ready)
		if !errors.Is(err, records.ErrChanged) {
			return err
		}
	}
	return c.changing(id)
}

// sides are the buckets of a copy, whose clients have the sessions of the copy, if any can be made.
type sides struct{ source, target buckets.Bucket }

// open opens both buckets.
func (c *creation) open(ctx context.Context, r *runs.Run, id volume.SnapshotID) (sides, error) {
	source := policy.Scope{Bucket: c.r.Source.Bucket, Prefix: c.r.Source.Prefix}
	target := policy.Scope{Bucket: id.Bucket, Prefix: id.Prefix()}
	from, to, err := OpenCopy(ctx, c.Options.copyOptions(), c.be, r, "snapshot "+id.String(), source, target, c.r.Parameters.Consistency == volume.SnapshotTime)
	return sides{from, to}, err
}

func (o Options) copyOptions() CopyOptions { return CopyOptions{o.Identities, o.Clients, o.Opener} }

func (c *creation) info(s records.Snapshot) (Info, error) {
	id, err := volume.ParseSnapshotID(s.SnapshotID)
	if err != nil {
		return Info{}, err
	}
	info := Info{ID: id, Source: s.Source, Objects: s.Objects, Bytes: s.Bytes, Cut: s.Cut, Ready: s.State == records.StateReady}
	if s.Cut.IsZero() {
		info.Cut = s.Finished
	}
	return info, nil
}
