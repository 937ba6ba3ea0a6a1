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

// isSame reports whether what a request can change is the same in both.
func isSame(a, b records.Stored) bool {
	return a.CapacityBytes == b.CapacityBytes && a.OnDelete == b.OnDelete && a.Usage == b.Usage && maps.Equal(a.Tags, b.Tags)
}

// apply returns the record or tags after the change. checkPurge returns why the volume cannot be purged.
func (c Change) apply(ctx context.Context, s records.Stored, checkPurge func(context.Context) error) (records.Stored, error) {
	s.CapacityBytes = max(s.CapacityBytes, c.Required)
	if c.Limit > 0 && s.CapacityBytes > c.Limit {
		return s, fault.Errorf(fault.OutOfRange, "the volume has %d bytes, which is more than the limit of %d: volumes do not shrink", s.CapacityBytes, c.Limit)
	}
	if c.Set.Usage != 0 && s.Usage == "" && c.Set.Usage != volume.UsageOff {
		return s, fault.Field("mutable_parameters.usage",
			"the volume was created without usage, so nodes do not read how often to measure it; create volumes with usage: off to set an interval later")
	}
	if c.Set.OnDelete == volume.OnDeletePurge && s.OnDelete != volume.OnDeletePurge {
		if err := checkPurge(ctx); err != nil {
			return s, err
		}
	}
	if c.Set.OnDelete != "" {
		s.OnDelete = c.Set.OnDelete
	}
	if c.Set.Usage != 0 && s.Usage != "" {
		s.Usage = c.Set.Usage.String()
	}
	if len(c.Set.Tags) == 0 {
		return s, nil
	}
	if s.Tags == nil {
		return s, fault.Field("mutable_parameters.tags", "the volume is a prefix of a bucket, and only volumes with their own bucket have tags")
	}
	s.Tags = maps.Clone(s.Tags)
	s.Tags.SetOthers(c.Set.Tags)
	if len(s.Tags) > maxTags {
		return s, fault.Field("mutable_parameters.tags", "the bucket would have %d tags, the maximum is %d", len(s.Tags), maxTags)
	}
	return s, nil
}
