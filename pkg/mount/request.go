package mount

import (
	"context"
	"time"

	"github.com/s3-csi/s3-csi-driver/pkg/backend"
	"github.com/s3-csi/s3-csi-driver/pkg/client"
	"github.com/s3-csi/s3-csi-driver/pkg/credentials"
	"github.com/s3-csi/s3-csi-driver/pkg/host"
	"github.com/s3-csi/s3-csi-driver/pkg/launcher"
	"github.com/s3-csi/s3-csi-driver/pkg/session"
	"github.com/s3-csi/s3-csi-driver/pkg/volume"
)

// Request is one publication to make: a NodePublishVolume, parsed.
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
	PodNamespace   string             // of the pod that it is for; "": not told
	ServiceAccount string             // of that pod; "": not told
	Ephemeral      bool               // an inline volume of the pod, which never gets the driver's own credentials
	Identity       string             // for people: "driver", "secret:<access key id>", "workload:<namespace>/<service account>"
	Claims         []volume.Claim     // what its author says of the service: has to be what the backend says
	Ignored        []string           // what its author wrote for another driver and means nothing here, for the log
}

// Stats is what NodeGetVolumeStats reports.
type Stats struct {
	TotalBytes, UsedBytes, AvailableBytes int64
	Inodes, InodesUsed, InodesFree        int64
}

// Launcher brings helpers to life. A mount's uid is its own, so a uid names all its processes.
type Launcher interface {
	Start(ctx context.Context, u launcher.Unit) error
	// Free tells whether a uid that no mount has can be given to one: nobody's processes have it.
	Free(ctx context.Context, uid uint32) (bool, error)
	// Alive tells whether a process of that uid is there.
	Alive(ctx context.Context, uid uint32) (bool, error)
	// Kill ends them and returns when they are gone.
	Kill(ctx context.Context, uid uint32) error
	// List lists what was started and is there, whether it lives or not.
	List(ctx context.Context) ([]launcher.UnitInfo, error)
	// OOMKills counts a mount's processes that the kernel has killed for want of memory.
	OOMKills(ctx context.Context, name string, uid uint32) (uint64, error)
}

// Backends is what the manager asks of the S3 services.
type Backends interface {
	Backend(name string) (backend.Backend, error)
	// CheckClaims is fault.Precondition where the backend of that name is not what a volume's author says that it is.
	CheckClaims(name string, claims []volume.Claim) error
	// Changed is closed when Backend begins to answer something else.
	Changed() <-chan struct{}
	// CheckAccess proves that the keys can do below the prefix what a client will do, and tells the bucket's region and
	// owner, of which "" is not known.
	CheckAccess(ctx context.Context, be backend.Backend, keys credentials.Keys, bucket, prefix, region, owner string) (backend.BucketInfo, error)
	// ProveScope proves that a session reaches no further than its prefix. class names the identity that it is made of: what is
	// proven once is remembered for it.
	ProveScope(ctx context.Context, be backend.Backend, keys credentials.Keys, class, bucket, prefix, region, owner string) error
}

// Sessions is what clients' credentials come from.
type Sessions interface {
	// Plan decides what a mount's sessions are made from. It asks nobody but the process's own credential chain.
	Plan(ctx context.Context, r session.Request) (credentials.Order, error)
	// Make asks the token service for a session. The keys of an order that says AsIs are its own.
	Make(ctx context.Context, o credentials.Order) (credentials.Keys, error)
}

// UIDRange is the range of user ids that mounts get, both ends included.
type UIDRange struct{ First, Last uint32 }

// Options are what a Manager is made of.
type Options struct {
	Namespace     *host.Namespace
	Launcher      Launcher
	Backends      Backends
	Sessions      Sessions
	Client        func(name string) (client.Client, error) // client.Get
	StateDir      string                                   // on a tmpfs: gone with a reboot, as the mounts are
	CacheDir      string                                   // on a disk
	ClientDir     string                                   // the client programs
	DefaultClient string
	TargetRoot    string // targets must lie below it; "": anywhere
	UIDs          UIDRange
	MountTimeout  time.Duration // for a cold start
	DrainTimeout  time.Duration // for an unpublish whose caller gave no deadline
	Version       string        // the driver's
	// Limits are what a mount may use whose volume does not say; 0: as much as it likes. The launcher may be one that cannot
	// enforce them.
	Limits launcher.Limits
	// Heal puts living mounts in the place of dead ones, also in containers.
	Heal bool
	// HangTimeout is after how long without an answer a mount's connection is aborted; 0: never.
	HangTimeout time.Duration
	// CleanPrograms removes installed programs that no process runs, except those in the directories used; nil: none are
	// installed.
	CleanPrograms func(ctx context.Context, used []string) error
}
