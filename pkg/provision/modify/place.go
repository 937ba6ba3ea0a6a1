package modify

import (
	"context"
	"time"

	"github.com/s3-csi/s3-csi-driver/pkg/backend"
	"github.com/s3-csi/s3-csi-driver/pkg/conc"
	"github.com/s3-csi/s3-csi-driver/pkg/fault"
	"github.com/s3-csi/s3-csi-driver/pkg/provision/buckets"
	"github.com/s3-csi/s3-csi-driver/pkg/provision/records"
	"github.com/s3-csi/s3-csi-driver/pkg/volume"
)

const (
	// lockBound is how long a change waits for a creation or deletion of the bucket in this process.
	lockBound = 5 * time.Second
	// settleTime is how long after a write of tags they are read again. It is longer than the time between a controller's read and its
	// write (writeBound).
	settleTime = 500 * time.Millisecond
	// writeBound is how old a read of tags may be when the write that depends on it is sent.
	writeBound = settleTime / 2
)

// place is where the settings of a volume are recorded: its record, or its bucket's tags.
//
// S3 cannot write tags under a condition, so another controller's write may replace this one's. Therefore tags are read again after a
// pause, and the change is repeated if it was lost.
type place struct {
	records *records.Store
	opener  *buckets.Opener
	service buckets.Service
	b       buckets.Bucket
	id      volume.ID
	found   records.Stored
	at      time.Time // of the read
}

func (p *place) isTags() bool { return p.id.Prefix == "" }

// lock keeps this process from creating or deleting the volume's bucket.
func (p *place) lock(ctx context.Context) (release func(), err error) {
	if !p.isTags() {
		return func() {}, nil
	}
	ctx, cancel := context.WithTimeout(ctx, lockBound)
	defer cancel()
	if release, err = p.opener.Lock(ctx, p.b.Backend, p.id.Bucket); err != nil {
		return nil, fault.Errorf(fault.Busy, "bucket %s: another call is creating or deleting it: %w", p.id.Bucket, err)
	}
	return release, nil
}

// read returns what is recorded. NotFound: there is no such volume.
func (p *place) read(ctx context.Context) (found records.Stored, err error) {
	p.found, err = p.records.ReadActive(ctx, p.b, p.id)
	p.at = time.Now()
	if fault.Is(err, fault.NotFound) && !backend.IsNoSuchBucket(err) {
		err = fault.Errorf(fault.NotFound, "%w: a static volume has no record that could be changed", err)
	}
	return p.found, err
}

// write records the settings if they are still as read returned them; else the error is records.ErrChanged.
func (p *place) write(ctx context.Context, next records.Stored) error {
	next.Record = next.With(records.StateActive, p.records.Now())
	if p.isTags() {
		return p.writeTags(ctx, next)
	}
	b := p.b
	if len(p.found.Options) > 0 {
		var err error
		if b, err = p.opener.Open(ctx, p.found.For(b.Backend), b.Keys, p.id.Bucket, ""); err != nil {
			return err
		}
	}
	_, err := p.records.OfVolume(b, p.id).Write(ctx, next)
	return err
}

func (p *place) writeTags(ctx context.Context, next records.Stored) error {
	if time.Since(p.at) > writeBound {
		return records.ErrChanged // read again
	}
	written, err := p.records.OfVolume(p.b, p.id).Write(ctx, next)
	if err != nil {
		if buckets.Indeterminate(err) {
			return buckets.UnknownOutcome(ctx, err)
		}
		return err
	}
	if !conc.Sleep(ctx, settleTime) {
		return fault.Errorf(fault.Timeout, "waiting to read the tags of %s again: %w", p.b, context.Cause(ctx))
	}
	have, err := records.ReadTags(ctx, p.b.Client, p.id.Bucket)
	switch {
	case err != nil:
		return fault.Errorf(fault.Busy, "the tags of %s were written, and reading them again failed: %w", p.b, err)
	case isLost(p.found.Tags, written.Tags, have):
		return records.ErrChanged
	}
	return nil
}

// checkPurge returns why onDelete cannot become purge; nil: it can. In a versioned bucket there may be versions below the prefix from before
// the volume, which a purge would delete. CreateVolume looks for them only if it is to create a volume with purge. All versions in a bucket
// that is the volume are the volume's.
func (p *place) checkPurge(ctx context.Context) error {
	versioning, err := p.service.Versioning(ctx, p.b.Backend, p.b.Keys, p.b.Info)
	if err != nil {
		return err
	}
	if !p.isTags() && (versioning.Enabled || versioning.Suspended) {
		return fault.Field("mutable_parameters.onDelete",
			"%s has versions, so purge must be set when the volume is created: versions below its prefix may be older than the volume", p.b)
	}
	why, err := buckets.Unpurgeable(ctx, p.service, p.b, versioning)
	if err == nil && why != "" {
		err = fault.Field("mutable_parameters.onDelete", "purge cannot work in %s: %s", p.b, why)
	}
	return err
}

// isLost reports whether a change of tags from old to want is missing in what was read afterwards.
func isLost(old, want, have records.Tags) bool {
	for k, v := range want {
		if old[k] != v && have[k] != v && !(k == records.TagCapacity && have.Capacity() > want.Capacity()) {
			return true
		}
	}
	for k := range old {
		_, wanted := want[k]
		if _, there := have[k]; !wanted && there {
			return true
		}
	}
	return false
}
