package state

import (
	"github.com/s3-csi/s3-csi-driver/pkg/credentials"
	"github.com/s3-csi/s3-csi-driver/pkg/mount"
	"github.com/s3-csi/s3-csi-driver/pkg/volume"
)

// request is for the prefix pvc-1/ of a bucket, with the driver's own credentials.
func request() mount.Request {
	return mount.Request{
		VolumeID: "default:bucket/pvc-1/", Target: "/t", Volume: volume.ID{Backend: "default", Bucket: "bucket", Prefix: "pvc-1/"},
		Source: credentials.SourceDriver,
	}
}
