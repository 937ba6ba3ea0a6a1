package modify

import (
	"context"
	"maps"

	"github.com/s3-csi/s3-csi-driver/pkg/fault"
	"github.com/s3-csi/s3-csi-driver/pkg/provision/records"
	"github.com/s3-csi/s3-csi-driver/pkg/volume"
)

// Change is what a request changes. Zero fields change nothing.
type Change struct {
	// Required is the size in bytes that the volume must have at least, Limit the one that it must not exceed; 0: none.
	Required, Limit int64
	// Set is what a VolumeAttributesClass sets.
	Set volume.Mutable
}

// maxTags is the maximum number of tags of a bucket (https://docs.aws.amazon.com/AmazonS3/latest/userguide/CostAllocTagging.html).
const maxTags = 50

// settings are what a request can change of a volume.
type settings struct {
	capacity int64 // in bytes; 0: unknown
	onDelete volume.OnDelete
	usage    volume.Usage
	tags     records.Tags // all of a bucket volume; nil: a prefix volume
}

// equal reports whether both are the same.
func (s settings) equal(other settings) bool {
	return s.capacity == other.capacity && s.onDelete == other.onDelete && s.usage == other.usage && maps.Equal(s.tags, other.tags)
}

// apply returns the settings after the change. purgeable returns why the volume cannot be purged.
func (c Change) apply(ctx context.Context, s settings, purgeable func(context.Context) error) (settings, error) {
	s.capacity = max(s.capacity, c.Required)
	if c.Limit > 0 && s.capacity > c.Limit {
		return s, fault.Errorf(fault.OutOfRange, "the volume has %d bytes, which is more than the limit of %d: volumes do not shrink", s.capacity, c.Limit)
	}
	if c.Set.Usage != 0 && s.usage == 0 && c.Set.Usage != volume.UsageOff {
		return s, fault.Field("mutable_parameters.usage", "the volume was created without usage, so nodes do not read how often to measure it; create volumes with usage: off to set an interval later")
	}
	if c.Set.OnDelete == volume.OnDeletePurge && s.onDelete != volume.OnDeletePurge {
		if err := purgeable(ctx); err != nil {
			return s, err
		}
	}
	if c.Set.OnDelete != "" {
		s.onDelete = c.Set.OnDelete
	}
	if c.Set.Usage != 0 && s.usage != 0 {
		s.usage = c.Set.Usage
	}
	if len(c.Set.Tags) == 0 {
		return s, nil
	}
	if s.tags == nil {
		return s, fault.Field("mutable_parameters.tags", "the volume is a prefix of a bucket, and only volumes with their own bucket have tags")
	}
	s.tags = maps.Clone(s.tags)
	s.tags.SetOthers(c.Set.Tags)
	if len(s.tags) > maxTags {
		return s, fault.Field("mutable_parameters.tags", "the bucket would have %d tags, the maximum is %d", len(s.tags), maxTags)
	}
	return s, nil
}
