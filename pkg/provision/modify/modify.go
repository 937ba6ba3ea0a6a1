// Package modify changes what is recorded of a volume: the record of a prefix volume, or the tags of a bucket volume. Requests for one
// volume that meet are merged into one write.
package modify

import (
	"context"
	"errors"
	"sync"

	"github.com/s3-csi/s3-csi-driver/pkg/backend"
	"github.com/s3-csi/s3-csi-driver/pkg/credentials"
	"github.com/s3-csi/s3-csi-driver/pkg/fault"
	"github.com/s3-csi/s3-csi-driver/pkg/provision/buckets"
	"github.com/s3-csi/s3-csi-driver/pkg/provision/identity"
	"github.com/s3-csi/s3-csi-driver/pkg/provision/records"
	"github.com/s3-csi/s3-csi-driver/pkg/volume"
)

// Request is a request to change a volume.
type Request struct {
	ID      volume.ID
	Keys    credentials.Keys // of the request's secret; zero: none
	RoleARN string           // of the request's secret; "": none
	Change  Change
}

// Modifier changes volumes. All methods may be called concurrently.
type Modifier struct {
	Identities *identity.Identities
	Opener     *buckets.Opener
	Records    *records.Store
	Service    buckets.Service

	mu     sync.Mutex
	queues map[queueKey]*queue
}

// queueKey is a volume and a digest of the identity that changes it: no request profits from the credentials of another.
type queueKey struct {
	id   volume.ID
	keys string
	role string
}

// Modify applies the change and returns the volume's size in bytes (0: unknown), once both are recorded. It sends no write if everything
// is recorded already.
//
// NotFound: there is no such volume of this driver. OutOfRange: the volume is larger than the limit. Busy: the volume is being created or
// deleted, or other controllers keep changing it.
func (m *Modifier) Modify(ctx context.Context, r Request) (capacity int64, err error) {
	be, who, err := m.Identities.Find(r.ID.Backend, r.Keys, r.RoleARN)
	if err != nil {
		return 0, err
	}
	keys, err := m.Identities.Keys(ctx, be, who)
	if err != nil {
		return 0, err
	}
	defer func() { m.Identities.Invalidate(be, who, keys, err) }()
	key := queueKey{r.ID, m.Identities.Digest(who.Keys), who.Role}
	return m.merge(ctx, key, r.Change, func(ctx context.Context) (place, error) {
		b, err := m.Opener.OpenUncached(ctx, be, keys, r.ID.Bucket)
		if err != nil {
			return nil, err
		}
		if r.ID.Prefix == "" {
			return m.openTags(ctx, b, r.ID)
		}
		return &recordPlace{Modifier: m, b: b, id: r.ID}, nil
	})
}

// errNoVolume is the error for a volume that does not exist, or is being deleted.
func (m *Modifier) errNoVolume(id volume.ID) error {
	return fault.Errorf(fault.NotFound, "there is no volume %s of %s: a static volume has no record that could be changed", id, m.Records.Owner)
}

// place is where the settings of a volume are recorded.
type place interface {
	// read returns the settings. NotFound: there is no such volume.
	read(ctx context.Context) (settings, error)
	// write records the settings if they are still as read returned them; else the error is records.ErrChanged.
	write(ctx context.Context, s settings) error
	// purgeable returns why onDelete cannot become purge; nil: it can.
	purgeable(ctx context.Context) error
	// close must be called at the end.
	close()
}

// recordPlace is the record of a prefix volume.
type recordPlace struct {
	*Modifier
	b     buckets.Bucket
	id    volume.ID
	found records.Stored
}

func (p *recordPlace) read(ctx context.Context) (settings, error) {
	found, err := p.Records.ReadOwn(ctx, p.b, p.id)
	switch {
	case errors.Is(err, records.ErrNotOurs), err == nil && (found.State != records.StateActive || found.VolumeID != p.id.String()):
		return settings{}, p.errNoVolume(p.id)
	case fault.Is(err, fault.NotFound): // there is no bucket
		p.Opener.Invalidate(p.b.Backend, p.id.Bucket)
		return settings{}, err
	case err != nil:
		return settings{}, err
	}
	p.found = found
	usage, err := found.UsageSetting()
	if err != nil {
		return settings{}, err
	}
	return settings{capacity: found.CapacityBytes, onDelete: found.OnDelete, usage: usage}, nil
}

func (p *recordPlace) write(ctx context.Context, s settings) error {
	segment, _, _ := p.id.NameSegment()
	r := p.found.With(records.StateActive, p.Records.Now())
	r.CapacityBytes, r.OnDelete, r.Usage = s.capacity, s.onDelete, s.usage.String()
	b := p.b
	if len(p.found.Options) > 0 {
		var err error
		if b, err = p.Opener.Open(ctx, p.found.For(b.Backend), b.Keys, p.id.Bucket, ""); err != nil {
			return err
		}
	}
	_, err := p.Records.Write(ctx, b, segment, p.found.ETag, r)
	return err
}

// purgeable implements place. In a versioned bucket there may be versions below the prefix from before the volume, which a purge would
// delete. CreateVolume looks for them only if it is to create a volume with purge.
func (p *recordPlace) purgeable(ctx context.Context) error {
	versioning, err := p.Service.Versioning(ctx, p.b.Backend, p.b.Keys, p.b.Info)
	if err != nil {
		return err
	}
	if versioning.Enabled || versioning.Suspended {
		return fault.Field("mutable_parameters.onDelete", "%s has versions, so purge must be set when the volume is created: versions below its prefix may be older than the volume", p.b)
	}
	return p.checkPurge(ctx, p.b, versioning)
}

func (p *recordPlace) close() {}

// checkPurge refuses purge where it could delete nothing.
func (m *Modifier) checkPurge(ctx context.Context, b buckets.Bucket, versioning backend.Versioning) error {
	why, err := buckets.Unpurgeable(ctx, m.Service, b, versioning)
	if err == nil && why != "" {
		err = fault.Field("mutable_parameters.onDelete", "purge cannot work in %s: %s", b, why)
	}
	return err
}
