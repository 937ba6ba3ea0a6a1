// Package provision creates, changes and deletes volumes and snapshots on S3 for the controller. It wires the packages below it and does not depend on CSI.
//
// A volume is a prefix of a bucket, proven by a volume record, or a whole bucket, proven by its tags. All state is in S3, so
// any process of the same driver and cluster can finish what another one started. Every error has a pkg/fault kind; an unknown outcome is
// Busy, Timeout or Unavailable, which are not final.
package provision

import (
	"cmp"
	"context"
	"errors"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/s3-csi/s3-csi-driver/pkg/backend"
	"github.com/s3-csi/s3-csi-driver/pkg/fault"
	"github.com/s3-csi/s3-csi-driver/pkg/provision/buckets"
	"github.com/s3-csi/s3-csi-driver/pkg/provision/copier"
	"github.com/s3-csi/s3-csi-driver/pkg/provision/create"
	"github.com/s3-csi/s3-csi-driver/pkg/provision/erase"
	"github.com/s3-csi/s3-csi-driver/pkg/provision/fill"
	"github.com/s3-csi/s3-csi-driver/pkg/provision/identity"
	"github.com/s3-csi/s3-csi-driver/pkg/provision/list"
	"github.com/s3-csi/s3-csi-driver/pkg/provision/modify"
	"github.com/s3-csi/s3-csi-driver/pkg/provision/proofs"
	"github.com/s3-csi/s3-csi-driver/pkg/provision/records"
	"github.com/s3-csi/s3-csi-driver/pkg/provision/remove"
	"github.com/s3-csi/s3-csi-driver/pkg/provision/runs"
	"github.com/s3-csi/s3-csi-driver/pkg/provision/snapshot"
	"github.com/s3-csi/s3-csi-driver/pkg/volume"
)

// Defaults of Options.
const (
	DefaultRuns    = 4
	DefaultWorkers = 8
	// DefaultCopies is how many snapshots and volumes are copied at once, DefaultCopyWorkers how many requests of copies are in flight per
	// backend.
	DefaultCopies      = 4
	DefaultCopyWorkers = 16
)

// Options are the dependencies and settings of a Provisioner.
type Options struct {
	Config  backend.Configured // required; read at each call
	Clients *backend.Clients   // required
	Buckets *backend.Buckets   // required
	// Sessions makes the sessions of roles and of deletions; required.
	Sessions identity.Sessions
	// DriverName and ClusterID are the owner in records and tags. Two clusters that share a bucket and have the same
	// of both would delete each other's volumes. ClusterID may be empty.
	DriverName string
	ClusterID  string
	// Now is the clock; nil is time.Now.
	Now func() time.Time
	// Runs is how many volumes are erased at once, Workers how many requests they have in flight per backend; 0: the default.
	// Deletions of empty volumes are not limited by them.
	Runs    int
	Workers int
	// CopyWorkers is how many requests of copies are in flight per backend; 0: the default.
	CopyWorkers int
	// CopyLag is how long a copy that another process continues, or that must stop, may still write; 0: copier.Lag. CopyCheckEvery is
	// copier.Options.CheckEvery.
	CopyLag, CopyCheckEvery time.Duration
	// ClockSkew is snapshot.Options.ClockSkew.
	ClockSkew time.Duration
	// CopyThreshold is the size above which an object is copied in parts; 0: the default.
	CopyThreshold int64
}

// Provisioner creates, changes and deletes volumes. All methods may be called concurrently.
type Provisioner struct {
	*records.Finder  // Lookup and LookupPlace
	*list.Lister     // CanList, List, Get and Inventory
	*modify.Modifier // Modify
	creator          *create.Creator
	remover          *remove.Remover
	snapshots        *snapshot.Maker
	fills            *fill.Filler
	copies           *runs.Queue
	copier           *copier.Copier
}

// Create creates a volume, or returns it if it exists with the same parameters. See create.Creator. If the volume has content, the error is Busy
// until it is complete.
func (p *Provisioner) Create(ctx context.Context, r CreateRequest) (volume.ID, error) {
	if r.Parameters.Content == (volume.Content{}) {
		return p.creator.Create(ctx, r)
	}
	if err := p.fills.Failure(r.Name, r.Parameters); err != nil {
		return volume.ID{}, err
	}
	f := fill.Request{Parameters: r.Parameters, Options: r.Options}
	r.Check = func(ctx context.Context, a identity.Access) error { return p.fills.Check(ctx, a, f) }
	r.Fill = func(ctx context.Context, a identity.Access, id volume.ID) error {
		f.ID = id
		return p.fills.Fill(ctx, a, f)
	}
	id, err := p.creator.Create(ctx, r)
	if deleting := (*create.DeletingError)(nil); errors.As(err, &deleting) {
		// It may be a volume that could not be filled. The process that deletes it may have been killed, and no caller asks for its deletion.
		return volume.ID{}, p.resumeDeletion(ctx, r, deleting.VolumeID, err)
	}
	return id, err
}

// resumeDeletion continues the deletion of an earlier volume of the request's name, and returns why, or a failure.
func (p *Provisioner) resumeDeletion(ctx context.Context, r CreateRequest, volumeID string, why error) error {
	id, err := volume.ParseID(volumeID)
	if err != nil || id.Backend != r.Parameters.Backend || id.Bucket != r.Parameters.BucketFor(r.Name) {
		return why
	}
	if err := p.remover.DeleteUnfilled(ctx, DeleteRequest{ID: id, Keys: r.Keys, RoleARN: r.RoleARN}); err != nil {
		return err
	}
	return why
}

// Delete stops filling the volume, and deletes it. See remove.Remover.
func (p *Provisioner) Delete(ctx context.Context, r DeleteRequest) error {
	if err := p.copies.Stop(ctx, fill.RunID(r.ID)); err != nil {
		return err
	}
	return p.remover.Delete(ctx, r)
}

// Run executes deletions and copies until ctx ends. The next call of any process continues unfinished ones. Run can be called once.
func (p *Provisioner) Run(ctx context.Context) error {
	g, ctx := errgroup.WithContext(ctx)
	defer context.AfterFunc(ctx, p.copier.End)()
	g.Go(func() error { return p.remover.Run(ctx) })
	g.Go(func() error { return p.copies.Run(ctx) })
	return g.Wait()
}

// CreateSnapshot makes a snapshot. See snapshot.Maker.
func (p *Provisioner) CreateSnapshot(ctx context.Context, r SnapshotRequest) (Snapshot, error) {
	return p.snapshots.Create(ctx, r)
}

// DeleteSnapshot stops making the snapshot, and deletes it. See remove.Remover.
func (p *Provisioner) DeleteSnapshot(ctx context.Context, r DeleteSnapshotRequest) error {
	if err := p.copies.Stop(ctx, snapshot.RunID(r.ID)); err != nil {
		return err
	}
	return p.remover.DeleteSnapshot(ctx, r)
}

// GetSnapshot returns a snapshot; NotFound: there is none.
func (p *Provisioner) GetSnapshot(ctx context.Context, id volume.SnapshotID, secret Secret) (Snapshot, error) {
	return p.snapshots.Get(ctx, id, secret)
}

// ListSnapshots lists snapshots. See snapshot.Maker.
func (p *Provisioner) ListSnapshots(ctx context.Context, r ListSnapshotsRequest) (list []Snapshot, next string, err error) {
	return p.snapshots.List(ctx, r)
}

// Snapshot describes a snapshot.
type Snapshot = snapshot.Info

// SnapshotRequest is a request to make a snapshot.
type SnapshotRequest = snapshot.Request

// DeleteSnapshotRequest is a request to delete a snapshot.
type DeleteSnapshotRequest = remove.SnapshotRequest

// ListSnapshotsRequest is a request to list snapshots.
type ListSnapshotsRequest = snapshot.ListRequest

// Secret holds the credentials of a request's secret; zero: the driver's own are used.
type Secret = snapshot.Credentials

// Volume is what is recorded of a volume.
type Volume = list.Volume

// CreateRequest is a request to create a volume.
type CreateRequest = create.Request

// DeleteRequest is a request to delete a volume.
type DeleteRequest = records.Request

// ModifyRequest is a request to change a volume.
type ModifyRequest = modify.Request

// Change is what a ModifyRequest changes.
type Change = modify.Change

// LookupRequest is a request to check that a volume exists.
type LookupRequest = records.Request

// New returns a Provisioner. It starts nothing: deletions wait for Run.
func New(o Options) (*Provisioner, error) {
	switch {
	case o.Config == nil || o.Clients == nil || o.Buckets == nil || o.Sessions == nil:
		return nil, fault.Errorf(fault.Invalid, "a Provisioner needs Config, Clients, Buckets and Sessions")
	case o.Runs < 0 || o.Workers < 0 || o.CopyWorkers < 0:
		return nil, fault.Errorf(fault.Invalid, "negative numbers of runs (%d) or workers (%d, %d)", o.Runs, o.Workers, o.CopyWorkers)
	}
	who := records.Owner{Driver: o.DriverName, Cluster: o.ClusterID}
	if err := who.Check(); err != nil {
		return nil, err
	}
	if o.Now == nil {
		o.Now = time.Now
	}
	if o.Runs == 0 {
		o.Runs = DefaultRuns
	}
	if o.Workers == 0 {
		o.Workers = DefaultWorkers
	}
	if o.CopyWorkers == 0 {
		o.CopyWorkers = DefaultCopyWorkers
	}
	identities, err := identity.New(o.Config, o.Sessions, o.Now)
	if err != nil {
		return nil, err
	}
	opener := buckets.NewOpener(o.Clients, o.Buckets, o.Now)
	store := records.NewStore(who, opener, o.Now)
	claims := runs.NewClaims(cmp.Or(o.CopyLag, copier.Lag))
	eraser := erase.New(opener, o.Workers)
	finder := &records.Finder{Identities: identities, Opener: opener, Records: store}
	p := &Provisioner{
		Finder: finder,
		creator: &create.Creator{
			Identities: identities, Clients: o.Clients, Service: o.Buckets, Opener: opener, Records: store,
			Proofs: proofs.New(identities, o.Clients, o.Buckets, o.Now),
		},
		remover: remove.New(remove.Remover{
			Identities: identities, Clients: o.Clients, Opener: opener, Records: store, Eraser: eraser, Claims: claims,
		}, o.Runs),
		Lister:   &list.Lister{Config: o.Config, Identities: identities, Clients: o.Clients, Opener: opener, Records: store},
		Modifier: &modify.Modifier{Identities: identities, Opener: opener, Records: store, Service: o.Buckets},
		copies:   runs.New(DefaultCopies),
		copier:   copier.New(copier.Options{Store: store, Uploads: opener, Workers: o.CopyWorkers, Threshold: o.CopyThreshold, CheckEvery: o.CopyCheckEvery}),
	}
	copies := copier.Services{Identities: identities, Clients: o.Clients, Opener: opener, Copier: p.copier, Eraser: eraser, Claims: claims}
	p.snapshots = snapshot.New(snapshot.Options{
		Config: o.Config, Copies: copies, Records: store, Finder: finder, Runs: p.copies, ClockSkew: o.ClockSkew, NotVolume: p.creator.NotBucketVolume,
		Delete: func(ctx context.Context, id volume.SnapshotID, who identity.Identity, failure string) error {
			return p.remover.DeleteSnapshot(ctx, remove.SnapshotRequest{ID: id, Keys: who.Keys, RoleARN: who.Role, Failure: failure})
		},
	})
	p.fills = fill.New(fill.Options{
		Copies: copies, Records: store, Runs: p.copies, Snapshots: p.snapshots,
		Delete: func(ctx context.Context, id volume.ID, who identity.Identity) error {
			return p.remover.DeleteUnfilled(ctx, DeleteRequest{ID: id, Keys: who.Keys, RoleARN: who.Role})
		},
	})
	return p, nil
}
