package modify

import (
	"context"
	"maps"
	"time"

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

// tagsPlace is the tags of a bucket volume.
//
// S3 cannot write tags under a condition, so another controller's write may replace this one's. Therefore tags are read again after a
// pause, and the change is repeated if it was lost.
type tagsPlace struct {
	*Modifier
	b       buckets.Bucket
	id      volume.ID
	release func()
	found   records.Tags
	at      time.Time // of the read
}

func (m *Modifier) openTags(ctx context.Context, b buckets.Bucket, id volume.ID) (place, error) {
	ctx, cancel := context.WithTimeout(ctx, lockBound)
	defer cancel()
	release, err := m.Opener.Lock(ctx, b.Backend, id.Bucket)
	if err != nil {
		return nil, fault.Errorf(fault.Busy, "bucket %s: another call is creating or deleting it: %w", id.Bucket, err)
	}
	return &tagsPlace{Modifier: m, b: b, id: id, release: release}, nil
}

func (p *tagsPlace) close() { p.release() }

func (p *tagsPlace) read(ctx context.Context) (settings, error) {
	have, err := records.ReadTags(ctx, p.b.Client, p.id.Bucket)
	p.at = time.Now()
	switch {
	case fault.Is(err, fault.NotFound):
		p.Opener.Invalidate(p.b.Backend, p.id.Bucket)
		return settings{}, err
	case err != nil:
		return settings{}, err
	case !have.Of(p.Records.Owner, p.id) || have[records.TagState] != string(records.StateActive):
		return settings{}, p.errNoVolume(p.id)
	}
	p.found = have
	return settings{capacity: have.Capacity(), onDelete: volume.OnDelete(have[records.TagOnDelete]), usage: have.Usage(), tags: have}, nil
}

func (p *tagsPlace) write(ctx context.Context, s settings) error {
	if time.Since(p.at) > writeBound {
		return records.ErrChanged // read again
	}
	want := maps.Clone(s.tags)
	want.SetCapacity(s.capacity)
	want.SetUsage(s.usage)
	if s.onDelete != "" {
		want[records.TagOnDelete] = string(s.onDelete)
	}
	if err := records.WriteTags(ctx, p.b.Client, p.id.Bucket, want); err != nil {
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
	case !lost(p.found, want, have):
		return nil
	}
	return records.ErrChanged
}

// purgeable implements place. All versions in the bucket are the volume's.
func (p *tagsPlace) purgeable(ctx context.Context) error {
	versioning, err := p.Service.Versioning(ctx, p.b.Backend, p.b.Keys, p.b.Info)
	if err != nil {
		return err
	}
	return p.checkPurge(ctx, p.b, versioning)
}

// lost reports whether a change of tags from old to want is missing in what was read afterwards.
func lost(old, want, have records.Tags) bool {
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
