// Package fill copies the content of a snapshot or a volume into a new volume, whose record says filling until everything is there and
// verified.
package fill

import (
	"context"
	"errors"
	"strings"

	"github.com/s3-csi/s3-csi-driver/pkg/backend"
	"github.com/s3-csi/s3-csi-driver/pkg/fault"
	"github.com/s3-csi/s3-csi-driver/pkg/policy"
	"github.com/s3-csi/s3-csi-driver/pkg/provision/buckets"
	"github.com/s3-csi/s3-csi-driver/pkg/provision/copier"
	"github.com/s3-csi/s3-csi-driver/pkg/provision/identity"
	"github.com/s3-csi/s3-csi-driver/pkg/provision/records"
	"github.com/s3-csi/s3-csi-driver/pkg/provision/runs"
	"github.com/s3-csi/s3-csi-driver/pkg/provision/snapshot"
	"github.com/s3-csi/s3-csi-driver/pkg/volume"
)

// Request is a request to fill a volume.
type Request struct {
	ID         volume.ID
	Parameters volume.Parameters // with Content
	Options    []volume.Option   // the volume's mount options
}

// Options are the dependencies of a Filler; all are required.
type Options struct {
	Copies    copier.Services
	Records   *records.Store
	Runs      *runs.Queue
	Snapshots *snapshot.Maker
	// Delete deletes a volume whose content is not complete.
	Delete func(ctx context.Context, id volume.ID, who identity.Identity) error
}

// Filler fills volumes. All methods may be called concurrently.
type Filler struct{ opts Options }

// New returns a Filler. It starts nothing.
func New(o Options) *Filler { return &Filler{o} }

// RunID returns the id of the run that fills a volume, which is the same for all generations of its name.
func RunID(id volume.ID) string {
	if _, generation, ok := id.NameSegment(); ok && generation > 1 {
		id.Prefix = id.Prefix[:strings.LastIndexByte(id.Prefix, '@')] + "/"
	}
	return "fill " + id.String()
}

// Failure returns, once, why the volume of that request could not be filled, if no call has got that error.
func (f *Filler) Failure(name string, p volume.Parameters) error {
	return f.opts.Runs.Failure(RunID(p.ID(name, 1)))
}

// Check refuses a volume whose content is not there, does not fit or cannot be copied to it. It is for the time before the volume exists.
func (f *Filler) Check(ctx context.Context, a identity.Access, r Request) error {
	content := r.Parameters.Content
	if content.Backend() != r.Parameters.Backend {
		return fault.Field("volume_content_source", "%s is on another backend than the volume, %q: content is copied within a backend only",
			content, r.Parameters.Backend)
	}
	b, err := f.opts.Copies.Opener.OpenUncached(ctx, a.Backend, a.Keys, sourceOf(content).Bucket)
	var info snapshot.Info
	if err == nil {
		info, err = f.readSource(ctx, b, content)
	}
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

// sourceOf returns where the content is.
func sourceOf(content volume.Content) policy.Scope {
	if content.Volume != (volume.ID{}) {
		return policy.Scope{Bucket: content.Volume.Bucket, Prefix: content.Volume.Prefix}
	}
	return policy.Scope{Bucket: content.Snapshot.Bucket, Prefix: content.Snapshot.Data()}
}

// readSource returns what is known of the source, whose bucket is b. NotFound: it does not exist or is being deleted.
func (f *Filler) readSource(ctx context.Context, b buckets.Bucket, content volume.Content) (info snapshot.Info, err error) {
	if content.Volume != (volume.ID{}) {
		_, err = f.opts.Records.ReadActive(ctx, b, content.Volume)
		return info, err
	}
	info, err = f.opts.Snapshots.Read(ctx, b, content.Snapshot)
	if err == nil && !info.Ready {
		err = fault.Errorf(fault.Busy, "snapshot %s is not ready yet", content.Snapshot)
	}
	return info, err
}

// Fill fills a volume whose record says filling, and returns nil if it is filled. Until then it returns Busy with the progress. The copy
// continues without the caller, and calls for the same volume join it. After an error that is final nothing is left of the volume but a
// tombstone.
func (f *Filler) Fill(ctx context.Context, a identity.Access, r Request) error {
	be := a.Backend.For(r.Options)
	b, err := f.opts.Copies.Opener.Open(ctx, be, a.Keys, r.ID.Bucket, "")
	if err != nil {
		return err
	}
	v := &filling{f: f, r: r}
	switch s, err := v.Status(v.Place(b).Read(ctx)); {
	case err != nil || s.State == copier.Done:
		return err
	case s.State == copier.Over:
		return fault.Errorf(fault.Busy, "volume %s: %w", r.ID, copier.ErrOver)
	case r.Parameters.Node.Snapshot != "":
		return v.pinSnapshot(ctx, b, a.Who)
	}
	c := v.newCopy(be)
	return f.opts.Runs.Do(ctx, runs.Work{
		ID: RunID(r.ID), What: "filling volume " + r.ID.String(), Who: a.Who, Progress: c.Task.Progress,
		Job: func(ctx context.Context, run *runs.Run) error {
			return f.opts.Copies.Identities.WhileConfigured(ctx, a.Backend, func(ctx context.Context) error { return c.Make(ctx, run) })
		},
	})
}

// filling is one volume that is filled. It implements copier.Target.
type filling struct {
	f *Filler
	r Request
}

// newCopy returns the copy that fills the volume.
func (v *filling) newCopy(be backend.Backend) *copier.Claimed[records.Stored] {
	id, source := v.r.ID, sourceOf(v.r.Parameters.Content)
	c := &copier.Claimed[records.Stored]{
		Services: v.f.opts.Copies, Target: v, What: "volume " + id.String(), Backend: be, Scratch: id.FillManifest(),
		Policy: policy.Copy{Source: source, Target: policy.Scope{Bucket: id.Bucket, Prefix: id.Prefix}},
		Task:   copier.Task{Target: copier.Place{Prefix: id.Prefix}, Manifest: id.FillManifest(), Progress: &copier.Progress{}, Keep: true},
	}
	if id.Prefix != "" { // A bucket's name has no generations, so what is in a bucket is left to the process that deletes it.
		c.Leftovers = []string{id.Prefix, id.FillManifest()}
	}
	return c
}

// Place implements copier.Target.
func (v *filling) Place(b buckets.Bucket) records.Place[records.Stored] {
	return v.f.opts.Records.OfVolume(b, v.r.ID)
}

// Status implements copier.Target.
func (v *filling) Status(found records.Stored, readErr error) (s copier.Status, err error) {
	switch {
	case errors.Is(readErr, records.ErrNotOurs):
		return s, nil
	case readErr != nil:
		return s, readErr
	}
	own, onDelete := found.VolumeID == v.r.ID.String(), found.OnDelete
	if !own { // the record of the next generation says nothing about what happened to this one
		onDelete = v.r.Parameters.OnDelete
	}
	s.Erased = (!own || found.State == records.StateDeleting || found.State == records.StateDeleted) && onDelete != volume.OnDeleteRetain
	s.Purged = onDelete == volume.OnDeletePurge
	if own {
		s.Claims = found.Fillers
		s.State = map[records.State]copier.State{records.StateFilling: copier.Wanted, records.StateActive: copier.Done}[found.State]
	}
	return s, nil
}

// WithClaims implements copier.Target.
func (v *filling) WithClaims(found records.Stored, claims []string) records.Stored {
	found.Record = found.With(found.State, v.f.opts.Records.Now())
	found.Fillers = claims
	return found
}

// WithTotals implements copier.Target.
func (v *filling) WithTotals(found records.Stored, _ copier.Totals) records.Stored {
	found.Record = found.With(records.StateActive, v.f.opts.Records.Now())
	return found
}

// Prepare implements copier.Target.
func (v *filling) Prepare(ctx context.Context, c *copier.Claimed[records.Stored]) error {
	content := v.r.Parameters.Content
	info, err := v.f.readSource(ctx, c.From.AsOwn(), content)
	if err != nil {
		return err
	}
	from := copier.Place{Bucket: c.From, Prefix: sourceOf(content).Prefix}
	if content.Volume == (volume.ID{}) {
		c.Task.Source = copier.Copied{Of: from, Manifest: content.Snapshot.Manifest(), Store: v.f.opts.Records}
		c.Expected, c.Exact = copier.Totals{Objects: info.Objects, Bytes: info.Bytes}, true
		return nil
	}
	c.Task.Limits = copier.Limits{Objects: v.r.Parameters.MaxObjects, Bytes: v.r.Parameters.MaxBytes}
	c.Task.Source = copier.Current{Of: from}
	c.Expected, err = c.Services.Copier.Count(ctx, c.Task.Source, c.Task.Limits)
	return err
}

// CheckSource implements copier.Target.
func (v *filling) CheckSource(ctx context.Context, c *copier.Claimed[records.Stored]) error {
	_, err := v.f.readSource(ctx, c.From.AsOwn(), v.r.Parameters.Content)
	return err
}

// Discard implements copier.Target.
func (v *filling) Discard(ctx context.Context, who identity.Identity, _ error) error {
	return v.f.opts.Delete(ctx, v.r.ID, who)
}

// pinSnapshot makes a volume that is the snapshot itself: it writes the object that keeps the snapshot from being deleted, checks that the
// snapshot is still there, and writes the state active. A deletion of the snapshot does the opposite: it writes its state first, then looks for such
// objects. So one of the two sees the other.
func (v *filling) pinSnapshot(ctx context.Context, b buckets.Bucket, who identity.Identity) error {
	content := v.r.Parameters.Content
	_, err := v.f.opts.Records.Put(ctx, b, content.Snapshot.User(v.r.ID), "", []byte(v.r.ID.String()+"\n"))
	if err != nil && !errors.Is(err, records.ErrChanged) {
		return err
	}
	if _, err = v.f.readSource(ctx, b, content); err == nil { // the snapshot is in the volume's bucket
		c := v.newCopy(b.Backend)
		c.Task.Target.Bucket = b
		return c.Finish(ctx, copier.Totals{})
	}
	if fault.KindOf(err).Permanent() {
		if deleteErr := v.Discard(ctx, who, err); deleteErr != nil {
			return fault.Errorf(fault.Busy, "%w; deleting the volume's record: %w", err, deleteErr)
		}
	}
	return err
}
