package mount

import (
	"github.com/s3-csi/s3-csi-driver/pkg/credentials"
	"github.com/s3-csi/s3-csi-driver/pkg/volume"
)

// Request is a parsed NodePublishVolumeRequest.
type Request struct {
	VolumeID       string
	Target         string             // target_path
	Volume         volume.ID          // where the data is
	Attributes     volume.Attributes  // from the volume context
	Options        []volume.Option    // of the context, then of the capability
	ReadOnly       bool               // this publication is read-only
	SingleWriter   bool               // at most one publication of this volume on the node
	MountGroup     *uint32            // VOLUME_MOUNT_GROUP
	SELinuxContext string             // for mount(2)
	Source         string             // credentials.Source…
	Keys           credentials.Keys   // of SourceSecret
	SecretRoleARN  string             // the role that the secret names; "": none
	Tokens         credentials.Tokens // of SourceWorkload
	PodNamespace   string             // of the pod that it is for; "": unknown
	ServiceAccount string             // of that pod; "": unknown
	Ephemeral      bool               // an inline volume of the pod, which never gets the driver's own credentials
	Identity       string             // for people: "driver", "secret:<access key id>", "workload:<namespace>/<service account>"
	Claims         []volume.Claim     // what the author says about the service; checked against the backend
	Ignored        []string           // what the author wrote for another driver and is ignored here, for the log
}

// Stats is the usage of a volume, as its file system reports it. S3 is unbounded, so totals are made up by the client.
type Stats struct {
	TotalBytes, UsedBytes, AvailableBytes int64
	Inodes, InodesUsed, InodesFree        int64
}
