// Package fill copies the content of a snapshot or a volume into a new volume, whose record says filling until everything is there and
// verified.
package fill

import (
	"context"
	"errors"
	"slices"
	"strings"
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
	"github.com/s3-csi/s3-csi-driver/pkg/provision/snapshot"
	"github.com/s3-csi/s3-csi-driver/pkg/volume"
)

// maxRaces is how often a decision is repeated because a record changed meanwhile.
const maxRaces = 4

// Request is a request to fill a volume.
type Request struct {
	ID         volume.ID
	Parameters volume.Parameters // with Content
	Options    []volume.Option   // the volume's mount options
	Keys       credentials.Keys  // of the request's secret; zero: none
	RoleARN    string            // of the request's secret; "": none
}

// Volumes looks volumes up and deletes them; *remove.Remover implements it.
type Volumes interface {
	Lookup(ctx context.Context, r remove.Request) error
	Delete(ctx context.Context, r remove.Request) error
	WhileConfigured(ctx context.Context, be backend.Backend, work func(context.Context) error) error
}

// Snapshots finds snapshots; *snapshot.Maker implements it.
type Snapshots interface {
	Get(ctx context.Context, id volume.SnapshotID, secret snapshot.Credentials) (snapshot.Info, error)
}

// Options are the dependencies of a Filler; all are required.
type Options struct {
	Identities *identity.Identities
	Clients    *backend.Clients
	Opener     *buckets.Opener
	Records    *records.Store
	Copier     *copier.Copier
	Eraser     *erase.Eraser
	Runs       *runs.Queue
	Volumes    Volumes
	Snapshots  Snapshots
	Claims     *runs.Claims
}

// Filler fills volumes. All methods may be called concurrently.
type Filler struct{ Options }

// New returns a Filler. It starts nothing.
func New(o Options) *Filler {
	return &Filler{o}
}

// RunID returns the id of the run that fills a volume, which is the same for all generations of its name.
func RunID(id volume.ID) string {
	if _, generation, ok := id.NameSegment(); ok && generation > 1 {
		id.Prefix = id.Prefix[:strings.LastIndexByte(id.Prefix, '@')] + "/"
	}
	return "fill " + id.String()
}

// Failure returns, once, why the volume of that request could not be filled, if no call has got that error.
func (f *Filler) Failure(name string, p volume.Parameters) error {
	return f.Runs.Failure(RunID(p.ID(name, 1)))
}

// Check refuses a volume whose content is not there, does not fit or cannot be copied to it. It is for the time before the volume exists.
func (f *Filler) Check(ctx context.Context, r Request) error {
	content := r.Parameters.Content
	if content.Backend() != r.Parameters.Backend {
		return fault.Field("volume_content_source", "%s is on another backend than the volume, %q: content is copied within a backend only", content, r.Parameters.Backend)
	}
	info, err := f.source(ctx, content, identity.Identity{Keys: r.Keys, Role: r.RoleARN})
	if backend.IsNoSuchBucket(err) { // the caller must not take it for the volume's bucket
		return fault.Errorf(fault.NotFound, "there is no %s: its bucket does not exist", content)
	}
	if err != nil {
		return err
	}
	if capacity := r.Parameters.CapacityBytes; capacity > 0 && info.Bytes > capacity {
		return fault.Errorf(fault.OutOfRange, "capacity_range: %d bytes are less than the %d bytes of %s", capacity, info.Bytes, content)
	}
	return nil
}

// source returns what is known of the source; NotFound: it does not exist or is being deleted.
func (f *Filler) source(ctx context.Context, content volume.Content, who identity.Identity) (info snapshot.Info, err error) {
	if content.Volume != (volume.ID{}) {
		return info, f.Volumes.Lookup(ctx, remove.Request{ID: content.Volume, Keys: who.Keys, RoleARN: who.Role})
	}
	info, err = f.Snapshots.Get(ctx, content.Snapshot, snapshot.Credentials{Keys: who.Keys, RoleARN: who.Role})
	if err == nil && !info.Ready {
		err = fault.Errorf(fault.Busy, "snapshot %s is not ready yet", content.Snapshot)
	}
	return info, err
}

// Fill fills a volume whose record says filling, and returns nil if it is filled. Until then it returns Busy with the progress. The copy
// continues without the caller, and calls for the same volume join it. After an error that is final nothing is left of the volume but a
// tombstone.
func (f *Filler) Fill(ctx context.Context, r Request) (err error) {
	be, who, err := f.Identities.Find(r.ID.Backend, r.Keys, r.RoleARN)
	if err != nil {
		return err
	}
	configured := be
	be = be.For(r.Options)
	keys, err := f.Identities.Keys(ctx, be, who)
	if err != nil {
		return err
	}
	defer func() { f.Identities.Invalidate(be, who, keys, err) }()
	b, err := f.Opener.Open(ctx, be, keys, r.ID.Bucket, "")
	if err != nil {
		return err
	}
	v := filling{Filler: f, be: be, r: r}
	if s, err := v.status(ctx, b); err != nil || s.state == records.StateActive {
		return err
	}
	if r.Parameters.Node.Snapshot != "" {
		return v.pin(ctx, b)
	}
	progress := &copier.Progress{}
	job := func(ctx context.Context, run *runs.Run) error {
		own := v
		own.claim = f.Claims.New()
		defer own.claim.End()
		return f.Volumes.WhileConfigured(ctx, configured, func(ctx context.Context) error { return own.run(ctx, run, progress) })
	}
	return f.Runs.Do(ctx, runs.Work{ID: RunID(r.ID), What: "filling volume " + r.ID.String(), Who: who, Progress: progress, Job: job})
}

// filling is one volume that is filled.
type filling struct {
	*Filler
	be backend.Backend
	r  Request
	// claim is that of the run, in the volume's record or tags. nil: the volume is a snapshot itself.
	claim *runs.Claim
}

// errOver means that the record no longer asks for the copy.
var errOver = errors.New("the record no longer says that the volume is being filled")

// errDone means that another process has filled the volume. From then on it is its users'.
var errDone = errors.New("the volume is filled")

// errTaken means that another process fills the volume now.
var errTaken = errors.New("another controller has begun to fill the volume")

// status is what the record or the tags of a volume say.
type status struct {
	state   records.State
	fillers []string
	tags    records.Tags // of a bucket volume
}

// status returns the status of the volume, whose state is active or filling. The error is Busy for any other.
func (v *filling) status(ctx context.Context, b buckets.Bucket) (s status, err error) {
	if v.r.ID.Prefix != "" {
		found, err := v.Records.ReadOwn(ctx, b, v.r.ID)
		if err == nil && found.VolumeID == v.r.ID.String() {
			s = status{state: found.State, fillers: found.Fillers}
		} else if err != nil && !errors.Is(err, records.ErrNotOurs) {
			return s, err
		}
	} else {
		have, err := records.ReadTags(ctx, b.Client, v.r.ID.Bucket)
		if err != nil {
			return s, err
		}
		if have.Of(v.Records.Owner, v.r.ID) {
			s = status{records.State(have[records.TagState]), have.Fillers(), have}
		}
	}
	if s.state != records.StateActive && s.state != records.StateFilling {
		return s, v.over()
	}
	return s, nil
}

func (v *filling) over() error { return fault.Errorf(fault.Busy, "volume %s: %w", v.r.ID, errOver) }

// still returns an error unless this run is the one that fills the volume.
func (v *filling) still(ctx context.Context, b buckets.Bucket) error {
	_, err := v.own(ctx, b)
	return err
}

// own returns the volume's status, with an error unless this run is the one that fills the volume.
func (v *filling) own(ctx context.Context, b buckets.Bucket) (status, error) {
	s, err := v.status(ctx, b)
	switch {
	case err != nil:
		return s, err
	case s.state == records.StateActive:
		return s, errDone
	case !v.claim.Is(s.fillers):
		return s, v.taken(s.fillers)
	}
	return s, nil
}

// taken returns the error for a volume that another run fills.
func (v *filling) taken(fillers []string) error {
	v.Claims.LostTo(runs.Last(fillers))
	return fault.Errorf(fault.Busy, "volume %s: %w", v.r.ID, errTaken)
}

// take makes this run the one that fills the volume.
func (v *filling) take(ctx context.Context, b buckets.Bucket) error {
	if v.r.ID.Prefix == "" {
		return v.takeBucket(ctx, b)
	}
	segment, _, _ := v.r.ID.NameSegment()
	for range maxRaces {
		found, err := v.Records.ReadOwn(ctx, b, v.r.ID)
		switch {
		case err != nil && !errors.Is(err, records.ErrNotOurs):
			return err
		case err != nil, found.VolumeID != v.r.ID.String(), found.State != records.StateActive && found.State != records.StateFilling:
			return v.over()
		case found.State == records.StateActive:
			return errDone
		case !v.Claims.MayTakeOver(runs.Last(found.Fillers)):
			return v.taken(found.Fillers)
		}
		next := found.With(found.State, v.Records.Now())
		next.Fillers = v.claim.Add(found.Fillers)
		if err = v.write(ctx, b, segment, found.ETag, next); !errors.Is(err, records.ErrChanged) {
			if err == nil {
				v.Claims.Revoke(found.Fillers)
			}
			return err
		}
	}
	return v.changing()
}

// write writes the volume's record. A write that is broken off would arrive later where the service has no conditions.
func (v *filling) write(ctx context.Context, b buckets.Bucket, segment, etag string, r records.Record) error {
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	ctx, cancel := v.Copier.Whole(ctx)
	defer cancel()
	_, err := v.Records.Write(ctx, b, segment, etag, r)
	return err
}

// outwait waits until no other run can write to the volume any more.
func (v *filling) outwait(ctx context.Context, b buckets.Bucket) error {
	return v.Claims.Outwait(ctx, func(ctx context.Context) ([]string, error) {
		s, err := v.own(ctx, b)
		return v.claim.Others(s.fillers), err
	})
}

// releaseBound is how long release takes at most.
const releaseBound = time.Second

// release takes the claim of this run, which has ended, out of the record, so that no other process waits for it. If that fails, they wait. Writes of
// tags are not conditional, so that the claim of a bucket volume stays.
func (v *filling) release(ctx context.Context, b buckets.Bucket) {
	if v.r.ID.Prefix == "" {
		return
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), releaseBound)
	defer cancel()
	segment, _, _ := v.r.ID.NameSegment()
	for range maxRaces {
		found, err := v.Records.ReadOwn(ctx, b, v.r.ID)
		next := found.With(found.State, v.Records.Now())
		next.Fillers = v.Claims.Open(found.Fillers)
		switch {
		case err != nil, found.VolumeID != v.r.ID.String(), slices.Contains(next.Fillers, v.claim.ID), !slices.Contains(found.Fillers, v.claim.ID):
		default:
			_, err = v.Records.Write(ctx, b, segment, found.ETag, next)
		}
		if !errors.Is(err, records.ErrChanged) {
			if err != nil && !errors.Is(err, records.ErrNotOurs) {
				klog.FromContext(ctx).Info("Could not release the claim of a volume, another controller waits for it", "volume", v.r.ID.String(), "reason", err)
			}
			return
		}
	}
}

func (v *filling) changing() error {
	return fault.Errorf(fault.Busy, "the record of volume %s keeps changing: another controller uses it", v.r.ID)
}

// takeBucket is take for a bucket volume. Writes of tags are not conditional: of two processes, the one whose claim is overwritten finds that
// out with its next check.
func (v *filling) takeBucket(ctx context.Context, b buckets.Bucket) error {
	release, err := v.Opener.Lock(ctx, v.be, v.r.ID.Bucket)
	if err != nil {
		return err
	}
	defer release()
	s, err := v.status(ctx, b)
	switch {
	case err != nil:
		return err
	case s.state == records.StateActive:
		return errDone
	case !v.Claims.MayTakeOver(runs.Last(s.fillers)):
		return v.taken(s.fillers)
	}
	s.tags.SetFillers(v.claim.Add(s.fillers))
	if err = records.SetState(ctx, b, s.tags, records.StateFilling); err == nil {
		v.Claims.Revoke(s.fillers)
	}
	return err
}

// pin makes a volume that is the snapshot itself: it writes the object that keeps the snapshot from being deleted, checks that the
// snapshot is still there, and writes the state active. A deletion of the snapshot does the opposite: it writes its state first, then looks for such
// objects. So one of the two sees the other.
func (v *filling) pin(ctx context.Context, b buckets.Bucket) error {
	id := v.r.Parameters.Content.Snapshot
	_, err := v.Records.Put(ctx, b, id.User(v.r.ID), "", []byte(v.r.ID.String()+"\n"))
	if err != nil && !errors.Is(err, records.ErrChanged) {
		return err
	}
	if _, err = v.source(ctx, v.r.Parameters.Content, identity.Identity{Keys: v.r.Keys, Role: v.r.RoleARN}); err == nil {
		return v.finish(ctx, b)
	}
	if fault.KindOf(err).Permanent() {
		if deleteErr := v.Volumes.Delete(ctx, remove.Request{ID: v.r.ID, Keys: v.r.Keys, RoleARN: v.r.RoleARN, Unfilled: true}); deleteErr != nil {
			return fault.Errorf(fault.Busy, "%w; deleting the volume's record: %w", err, deleteErr)
		}
	}
	return err
}

// run fills the volume, from whatever an earlier run left:
//
//  1. write into the record that this run fills the volume, so that any other run stops
//  2. count the objects of a source that has no counts, and refuse those above the limits
//  3. copy them and verify the copy
//  4. wait until other runs that were stopped can write no more
//  5. write the state active
//  6. remove the manifest
//
// If it fails for good, it waits as in step 4 and deletes the volume. Otherwise another run continues, which need not wait for this one.
func (v *filling) run(ctx context.Context, run *runs.Run, progress *copier.Progress) error {
	id, content := v.r.ID, v.r.Parameters.Content
	source := policy.Scope{Bucket: content.Volume.Bucket, Prefix: content.Volume.Prefix}
	if content.Volume == (volume.ID{}) {
		source = policy.Scope{Bucket: content.Snapshot.Bucket, Prefix: content.Snapshot.Data()}
	}
	from, to, err := snapshot.OpenCopy(ctx, snapshot.CopyOptions{Identities: v.Identities, Clients: v.Clients, Opener: v.Opener}, v.be, run, "volume "+id.String(), source, policy.Scope{Bucket: id.Bucket, Prefix: id.Prefix}, false)
	if err != nil {
		return v.discard(ctx, run, err)
	}
	err = v.fill(ctx, run, from, to, progress)
	v.claim.End()
	switch {
	case err == nil, errors.Is(err, errDone):
		return nil
	case errors.Is(err, errOver) && ctx.Err() == nil:
		err = v.sweep(ctx, to, err)
		fallthrough
	case !fault.KindOf(err).Permanent(), ctx.Err() != nil:
		v.release(ctx, to.AsOwn())
		return err
	}
	if outwaitErr := v.outwait(ctx, to.AsOwn()); outwaitErr != nil {
		return fault.Errorf(fault.Busy, "%w; before deleting what was copied: %w", err, outwaitErr)
	}
	return v.discard(ctx, run, err)
}

// discard deletes the volume if the error is final, and returns the error.
func (v *filling) discard(ctx context.Context, run *runs.Run, why error) error {
	if !fault.KindOf(why).Permanent() || ctx.Err() != nil {
		return why
	}
	who := run.Latest()
	if deleteErr := v.Volumes.Delete(ctx, remove.Request{ID: v.r.ID, Keys: who.Keys, RoleARN: who.Role, Unfilled: true}); deleteErr != nil {
		return fault.Errorf(fault.Busy, "%w; deleting what was copied: %w", why, deleteErr)
	}
	return why
}

// sweep erases what this run may have copied after another process had erased the volume. A bucket's name has no generations, so what is in a
// bucket is left to the process that deletes it.
func (v *filling) sweep(ctx context.Context, to buckets.Bucket, why error) error {
	if v.r.ID.Prefix == "" {
		return why
	}
	found, err := v.Records.ReadOwn(ctx, to.AsOwn(), v.r.ID)
	if err == nil && (found.VolumeID != v.r.ID.String() || found.State == records.StateDeleting || found.State == records.StateDeleted) {
		for _, prefix := range []string{v.r.ID.Prefix, v.r.ID.FillManifest()} {
			if err = v.Eraser.Erase(ctx, erase.Task{Bucket: to.AsOwn(), Prefix: prefix, Progress: &erase.Progress{}}); err != nil {
				break
			}
		}
	}
	if err != nil && !errors.Is(err, records.ErrNotOurs) {
		return fault.Errorf(fault.Busy, "%w; removing what was copied: %w", why, err)
	}
	return why
}

func (v *filling) fill(ctx context.Context, run *runs.Run, from, to buckets.Bucket, progress *copier.Progress) error {
	if err := v.take(ctx, to.AsOwn()); err != nil {
		return err
	}
	content := v.r.Parameters.Content
	info, err := v.source(ctx, content, run.Latest())
	if err != nil {
		return err
	}
	expected := copier.Totals{Objects: info.Objects, Bytes: info.Bytes}
	task := copier.Task{
		Target: copier.Place{Bucket: to, Prefix: v.r.ID.Prefix}, Manifest: v.r.ID.FillManifest(), Progress: progress, Keep: true, Unanswered: v.claim.Unanswered,
	}
	if content.Volume != (volume.ID{}) {
		task.Source = copier.Current{Of: copier.Place{Bucket: from, Prefix: content.Volume.Prefix}}
		task.Limits = copier.Limits{Objects: v.r.Parameters.MaxObjects, Bytes: v.r.Parameters.MaxBytes}
		if expected, task.Source, err = v.Copier.Count(ctx, task.Source, task.Limits); err != nil {
			return err
		}
	} else {
		task.Source = copier.Copied{Of: copier.Place{Bucket: from, Prefix: content.Snapshot.Data()}, Manifest: content.Snapshot.Manifest(), Store: v.Records}
	}
	progress.Expect(expected)
	task.Still = func(ctx context.Context) error {
		if err := v.still(ctx, to.AsOwn()); err != nil {
			return err
		}
		_, err := v.source(ctx, content, run.Latest())
		if fault.Is(err, fault.NotFound) {
			err = fault.Errorf(fault.NotFound, "the source was deleted while the volume was filled: %w", err)
		}
		return err
	}
	totals, err := v.Copier.Copy(ctx, task)
	if err != nil {
		return err
	}
	if content.Volume == (volume.ID{}) && (totals.Objects != expected.Objects || totals.Bytes != expected.Bytes) {
		return fault.Errorf(fault.Precondition, "%s has %d objects and %d bytes, of which %d and %d are left: another program deleted some", content, expected.Objects, expected.Bytes, totals.Objects, totals.Bytes)
	}
	if err := v.outwait(ctx, to.AsOwn()); err != nil {
		return err
	}
	if err := v.finish(ctx, to.AsOwn()); err != nil {
		return err
	}
	if err := v.Eraser.Erase(ctx, erase.Task{Bucket: to.AsOwn(), Prefix: v.r.ID.FillManifest(), Progress: &erase.Progress{}}); err != nil {
		klog.FromContext(ctx).Error(err, "Removing manifest failed", "volume", v.r.ID.String()) // the volume's deletion removes it
	}
	return nil
}

// finish writes the state active.
func (v *filling) finish(ctx context.Context, b buckets.Bucket) error {
	if v.r.ID.Prefix == "" {
		return v.finishBucket(ctx, b)
	}
	segment, _, _ := v.r.ID.NameSegment()
	for range maxRaces {
		found, err := v.Records.ReadOwn(ctx, b, v.r.ID)
		switch {
		case err != nil:
			return err
		case found.VolumeID == v.r.ID.String() && found.State == records.StateActive:
			return nil
		case found.VolumeID != v.r.ID.String() || found.State != records.StateFilling:
			return v.over()
		case v.claim != nil && !v.claim.Is(found.Fillers):
			return v.taken(found.Fillers)
		}
		err = v.write(ctx, b, segment, found.ETag, found.With(records.StateActive, v.Records.Now()))
		if !errors.Is(err, records.ErrChanged) {
			return err
		}
	}
	return v.changing()
}

// finishBucket writes the state active in the tags. Writes of tags are not conditional, so a lock keeps this process from deleting the bucket at
// the same time, and the tags are those of the check.
func (v *filling) finishBucket(ctx context.Context, b buckets.Bucket) error {
	release, err := v.Opener.Lock(ctx, v.be, v.r.ID.Bucket)
	if err != nil {
		return err
	}
	defer release()
	s, err := v.own(ctx, b)
	switch {
	case errors.Is(err, errDone):
		return nil
	case err != nil:
		return err
	}
	return records.SetState(ctx, b, s.tags, records.StateActive)
}
