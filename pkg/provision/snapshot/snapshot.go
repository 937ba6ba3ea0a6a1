// Package snapshot makes snapshots of volumes, and finds and lists them. A snapshot is a record and a copy of the volume's objects, below a
// prefix that no volume can have. Deleting it is pkg/provision/remove's.
package snapshot

import (
	"context"
	"fmt"
	"time"

	"github.com/s3-csi/s3-csi-driver/pkg/backend"
	"github.com/s3-csi/s3-csi-driver/pkg/credentials"
	"github.com/s3-csi/s3-csi-driver/pkg/fault"
	"github.com/s3-csi/s3-csi-driver/pkg/policy"
	"github.com/s3-csi/s3-csi-driver/pkg/provision/buckets"
	"github.com/s3-csi/s3-csi-driver/pkg/provision/copier"
	"github.com/s3-csi/s3-csi-driver/pkg/provision/identity"
	"github.com/s3-csi/s3-csi-driver/pkg/provision/records"
	"github.com/s3-csi/s3-csi-driver/pkg/provision/runs"
	"github.com/s3-csi/s3-csi-driver/pkg/volume"
)

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

// Options are the dependencies of a Maker; all are required.
type Options struct {
	Config  backend.Configured // read at each call
	Copies  copier.Services
	Records *records.Store
	Finder  *records.Finder
	Runs    *runs.Queue
	// Delete deletes a snapshot that could not be made.
	Delete func(ctx context.Context, id volume.SnapshotID, who identity.Identity, failure string) error
	// ClockSkew is the maximum difference between the clocks of a service's servers; 0: DefaultClockSkew.
	ClockSkew time.Duration
	// NotVolume refuses a bucket that is itself a volume.
	NotVolume func(ctx context.Context, b buckets.Bucket) error
}

// Maker makes snapshots. All methods may be called concurrently.
type Maker struct{ opts Options }

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
	be, who, err := m.opts.Copies.Identities.Find(r.Source.Backend, r.Keys, r.RoleARN)
	if err != nil {
		return Info{}, err
	}
	keys, err := m.opts.Copies.Identities.Keys(ctx, be, who)
	if err != nil {
		return Info{}, err
	}
	defer func() { m.opts.Copies.Identities.Invalidate(be, who, keys, err) }()
	c := creation{m: m, be: be, who: who, r: r}
	if c.b, err = m.openPlace(ctx, be, keys, r); err != nil {
		return Info{}, err
	}
	if err := m.opts.Runs.Failure(c.runID()); err != nil {
		return Info{}, err
	}
	err = records.Repeat(fmt.Sprintf("the record of snapshot %q in %s", r.Name, c.b), func() (err error) {
		info, err = c.ensure(ctx)
		return err
	})
	return info, err
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
	be, err := m.opts.Config.Config().Backend(r.Source.Backend)
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

// openPlace opens the snapshot's bucket and checks that snapshots can be there.
func (m *Maker) openPlace(ctx context.Context, be backend.Backend, keys credentials.Keys, r Request) (buckets.Bucket, error) {
	name := r.Parameters.ID(r.Source, r.Name, 1).Bucket
	for _, bucket := range []string{name, r.Source.Bucket} {
		if kind, err := volume.ValidateBucketName(bucket); err == nil && kind == volume.BucketDirectory {
			return buckets.Bucket{}, fault.Errorf(fault.Precondition,
				"bucket %s is a directory bucket, which lists keys in no order: it can have no snapshots", bucket)
		}
	}
	b, err := m.opts.Copies.Opener.Open(ctx, be, keys, name, "")
	if fault.Is(err, fault.NotFound) {
		if r.Parameters.BucketName == "" {
			return b, fault.Errorf(fault.NotFound, "there is no volume %s: %w", r.Source, err)
		}
		return b, fault.Errorf(fault.Precondition, "parameters.bucketName: bucket %s must exist: %w", name, err)
	}
	if err != nil {
		return b, err
	}
	if err := m.opts.NotVolume(ctx, b); err != nil {
		return b, err
	}
	_, err = m.opts.Copies.Opener.Conditional(ctx, b)
	return b, err
}

// creation is one CreateSnapshot.
type creation struct {
	m   *Maker
	be  backend.Backend
	who identity.Identity
	b   buckets.Bucket
	r   Request
}

// RunID returns the id of the run that makes a snapshot of that name.
func RunID(id volume.SnapshotID) string {
	return "snapshot " + id.Backend + ":" + id.Bucket + "/" + id.Segment
}

// id returns the id of a generation of the snapshot.
func (c *creation) id(generation int) volume.SnapshotID {
	return c.r.Parameters.ID(c.r.Source, c.r.Name, generation)
}

func (c *creation) runID() string { return RunID(c.id(1)) }

// ensure makes the snapshot, or finds it. ErrChanged: the record must be read again.
func (c *creation) ensure(ctx context.Context) (Info, error) {
	store := c.m.opts.Records
	found, err := store.ReadSnapshot(ctx, c.b, volume.NameSegment(c.r.Name))
	switch {
	case fault.Is(err, fault.NotFound) && !backend.IsNoSuchBucket(err):
		found = records.StoredSnapshot{}
	case err != nil:
		return Info{}, err
	case c.hasFailed(found) && !found.Cut.IsZero() && found.State == records.StateDeleted:
		return Info{}, fault.Errorf(fault.Precondition, "snapshot %s showed the time %s, but could not be copied and was deleted; make one with another name: %s",
			found.SnapshotID, found.Cut.Format(time.RFC3339Nano), found.Failure)
	case c.hasFailed(found) && found.State == records.StateDeleting:
		// The process that deletes it may have been killed, and no caller asks for the deletion of a snapshot that failed.
		if err := c.m.opts.Delete(ctx, c.id(found.Generation), c.who, found.Failure); err != nil {
			return Info{}, fmt.Errorf("%w; the snapshot could not be made: %s", err, found.Failure)
		}
		return Info{}, records.ErrChanged
	}
	next, err := c.decide(found)
	if err == nil && next > 0 {
		found, err = c.begin(ctx, next, found.ETag)
	}
	switch {
	case err != nil:
		return Info{}, err
	case found.State == records.StateReady:
		return infoOf(found.Snapshot)
	}
	work := c.work(c.id(found.Generation))
	if !found.Cut.IsZero() {
		if err := c.m.opts.Runs.Start(work); err != nil {
			return Info{}, err
		}
		return infoOf(found.Snapshot)
	}
	if err := c.m.opts.Runs.Do(ctx, work); err != nil {
		return Info{}, err
	}
	if found, err = store.ReadSnapshot(ctx, c.b, volume.NameSegment(c.r.Name)); err == nil && found.State != records.StateReady {
		err = records.ErrChanged // it has been deleted since
	}
	if err != nil {
		return Info{}, err
	}
	return infoOf(found.Snapshot)
}

// hasFailed reports whether a record is that of a snapshot of this name that could not be made and is being deleted, or is deleted.
func (c *creation) hasFailed(found records.StoredSnapshot) bool {
	return (found.State == records.StateDeleting || found.State == records.StateDeleted) && found.Failure != "" &&
		found.Owner() == c.m.opts.Records.Owner && found.Name == c.r.Name && found.SnapshotID == c.id(found.Generation).String()
}

// decide decides what a record means for the request. next is the generation of a new record, 0: the record is that of the snapshot.
func (c *creation) decide(found records.StoredSnapshot) (next int, err error) {
	name, owner := c.r.Name, c.m.opts.Records.Owner
	switch {
	case found.ETag == "":
		return 1, nil
	case found.State == records.StateDeleted:
		if found.Generation >= volume.MaxGeneration {
			return 0, fault.Errorf(fault.Exhausted, "the snapshot name %q was used %d times in this bucket, which is the limit: choose another name",
				name, found.Generation)
		}
		return found.Generation + 1, nil
	case found.Owner() != owner:
		return 0, fault.Errorf(fault.Exists, "the snapshot name %q is taken in this bucket by %s (%s); this is %s", name, found.Owner(), found.SnapshotID, owner)
	case found.Name != name:
		return 0, fault.Errorf(fault.Exists, "the snapshot names %q and %q have the same place, and the first one uses it (%s): choose another name",
			found.Name, name, found.SnapshotID)
	case found.Source != c.r.Source.String():
		return 0, fault.Errorf(fault.Exists, "snapshot %q exists (%s), of volume %s", name, found.SnapshotID, found.Source)
	case found.ParametersDigest != c.r.Parameters.Digest():
		return 0, fault.Errorf(fault.Exists, "snapshot %q exists (%s) with other parameters", name, found.SnapshotID)
	case found.State == records.StateDeleting:
		return 0, fault.Errorf(fault.Busy, "snapshot %s of that name is being deleted", found.SnapshotID)
	case found.SnapshotID != c.id(found.Generation).String():
		return 0, fault.Errorf(fault.Exists, "the record of snapshot %q in %s names %s: it was not written for this bucket", name, c.b, found.SnapshotID)
	}
	return 0, nil
}

// begin writes the record of a new snapshot.
func (c *creation) begin(ctx context.Context, generation int, etag string) (records.StoredSnapshot, error) {
	if err := c.checkSource(ctx, c.who); err != nil {
		return records.StoredSnapshot{}, err
	}
	s := c.m.opts.Records.NewSnapshot(c.r.Name, c.id(generation), c.r.Source, c.r.Parameters)
	if c.r.Parameters.Consistency == volume.SnapshotTime {
		cut, err := c.cut(ctx)
		if err != nil {
			return records.StoredSnapshot{}, err
		}
		s.State, s.Cut = records.StateCopying, cut
	}
	return c.m.opts.Records.OfSnapshot(c.b, c.id(generation)).Write(ctx, records.StoredSnapshot{Snapshot: s, ETag: etag})
}

// cut returns the time that the snapshot shows. It is over when cut returns, and the source existed then.
func (c *creation) cut(ctx context.Context) (time.Time, error) {
	keys, err := c.m.opts.Copies.Identities.Keys(ctx, c.be, c.who)
	if err != nil {
		return time.Time{}, err
	}
	b, err := c.m.opts.Copies.Opener.Open(ctx, c.be, keys, c.r.Source.Bucket, "")
	if err != nil {
		return time.Time{}, err
	}
	cut, err := buckets.Cut(ctx, b, buckets.Probes, c.m.opts.ClockSkew)
	if err != nil {
		return time.Time{}, fault.Errorf(fault.KindOf(err), "parameters.consistency: a snapshot of one time (%s) of volume %s: %w",
			volume.SnapshotTime, c.r.Source, err)
	}
	return cut, c.checkSource(ctx, c.who)
}

// checkSource returns NotFound unless the source exists and is not being deleted. A static volume exists if anything is in its place.
func (c *creation) checkSource(ctx context.Context, who identity.Identity) error {
	req := records.Request{ID: c.r.Source, Keys: who.Keys, RoleARN: who.Role}
	err := c.m.opts.Finder.Lookup(ctx, req)
	switch {
	case !fault.Is(err, fault.NotFound):
		return err
	case c.r.Parameters.StaticVolumes:
		return c.m.opts.Finder.LookupPlace(ctx, req)
	}
	return fault.Errorf(fault.NotFound, "%w; a static volume needs the parameter staticVolumes of the VolumeSnapshotClass", err)
}

// work returns the run that copies the snapshot.
func (c *creation) work(id volume.SnapshotID) runs.Work {
	making := &making{c: c, id: id}
	progress := &copier.Progress{}
	return runs.Work{
		ID: c.runID(), What: "making snapshot " + id.String(), Who: c.who, Progress: progress,
		Job: func(ctx context.Context, run *runs.Run) error {
			return c.m.opts.Copies.Identities.WhileConfigured(ctx, c.be, func(ctx context.Context) error { return making.newCopy(progress).Make(ctx, run) })
		},
	}
}

// making is one snapshot that is made. It implements copier.Target.
type making struct {
	c  *creation
	id volume.SnapshotID
}

// newCopy returns the copy that is the snapshot.
func (m *making) newCopy(progress *copier.Progress) *copier.Claimed[records.StoredSnapshot] {
	r, id := m.c.r, m.id
	c := &copier.Claimed[records.StoredSnapshot]{
		Services: m.c.m.opts.Copies, Target: m, What: "snapshot " + id.String(), Backend: m.c.be, Leftovers: []string{id.Prefix()},
		Policy: policy.Copy{
			Source: policy.Scope{Bucket: r.Source.Bucket, Prefix: r.Source.Prefix}, Target: policy.Scope{Bucket: id.Bucket, Prefix: id.Prefix()},
			Versions: r.Parameters.Consistency == volume.SnapshotTime,
		},
		Task: copier.Task{
			Target: copier.Place{Prefix: id.Data()}, Manifest: id.Manifest(), Progress: progress,
			Limits: copier.Limits{Objects: r.Parameters.MaxObjects, Bytes: r.Parameters.MaxBytes},
		},
	}
	if c.Policy.Versions {
		c.Scratch = id.Plan()
	}
	return c
}

// Place implements copier.Target.
func (m *making) Place(b buckets.Bucket) records.Place[records.StoredSnapshot] {
	return m.c.m.opts.Records.OfSnapshot(b, m.id)
}

// Status implements copier.Target.
func (m *making) Status(found records.StoredSnapshot, readErr error) (s copier.Status, err error) {
	switch {
	case fault.Is(readErr, fault.NotFound):
		return s, nil
	case readErr != nil:
		return s, readErr
	}
	own := found.SnapshotID == m.id.String()
	s.Erased = (!own || found.State == records.StateDeleting || found.State == records.StateDeleted) && found.OnDelete != volume.OnDeleteRetain
	s.Purged = found.OnDelete == volume.OnDeletePurge
	if own {
		s.Claims = found.Makers
		s.State = map[records.State]copier.State{
			records.StateCutting: copier.Wanted, records.StateCopying: copier.Wanted, records.StateReady: copier.Done,
		}[found.State]
	}
	return s, nil
}

// WithClaims implements copier.Target.
func (m *making) WithClaims(found records.StoredSnapshot, claims []string) records.StoredSnapshot {
	found.Snapshot = found.With(found.State, m.c.m.opts.Records.Now())
	found.Makers = claims
	return found
}

// WithTotals implements copier.Target.
func (m *making) WithTotals(found records.StoredSnapshot, t copier.Totals) records.StoredSnapshot {
	found.Snapshot = found.With(records.StateReady, m.c.m.opts.Records.Now())
	found.Objects, found.Bytes, found.Changed, found.Finished = t.Objects, t.Bytes, t.Changed, found.Updated
	return found
}

// Prepare implements copier.Target. It writes into the record what is to be copied. A snapshot of one time first gets its plan, which later deletions
// and uploads do not change: which versions to copy.
func (m *making) Prepare(ctx context.Context, c *copier.Claimed[records.StoredSnapshot]) (err error) {
	from := copier.Place{Bucket: c.From, Prefix: m.c.r.Source.Prefix}
	planned := !c.Found.Cut.IsZero()
	switch {
	case !planned:
		c.Task.Source = copier.Current{Of: from}
		if c.Found.State == records.StateCutting {
			c.Expected, err = c.Services.Copier.Count(ctx, c.Task.Source, c.Task.Limits)
		}
	case !c.Found.Planned:
		plan := c.Task
		plan.Source, plan.Manifest = copier.Versions{Of: from, At: c.Found.Cut}, m.id.Plan()
		if c.Expected, err = c.Services.Copier.Plan(ctx, plan); err == nil {
			err = buckets.Versioned(ctx, c.From.AsOwn()) // otherwise objects may have been overwritten without a version
		}
	}
	if err != nil {
		return err
	}
	if planned {
		c.Exact = true
		c.Task.Source = copier.Planned{Of: from, Plan: m.id.Plan(), In: c.Task.Target.Bucket, Store: m.c.m.opts.Records}
	}
	if c.Found.State == records.StateCutting || planned && !c.Found.Planned {
		return c.Update(ctx, func(found records.StoredSnapshot) records.StoredSnapshot {
			found.Snapshot = found.With(records.StateCopying, m.c.m.opts.Records.Now())
			found.Objects, found.Bytes, found.Planned = c.Expected.Objects, c.Expected.Bytes, planned
			return found
		})
	}
	c.Expected = copier.Totals{Objects: c.Found.Objects, Bytes: c.Found.Bytes}
	return nil
}

// CheckSource implements copier.Target. A snapshot of one time needs no source any more: its versions are the source.
func (m *making) CheckSource(ctx context.Context, c *copier.Claimed[records.StoredSnapshot]) error {
	if !c.Found.Cut.IsZero() {
		return nil
	}
	return m.c.checkSource(ctx, c.Run.Latest())
}

// Discard implements copier.Target.
func (m *making) Discard(ctx context.Context, who identity.Identity, why error) error {
	return m.c.m.opts.Delete(ctx, m.id, who, backend.Clip(why.Error(), 1000))
}

func infoOf(s records.Snapshot) (Info, error) {
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
