// Package volume parses and formats ids, names, parameters and contexts of volumes. It does no I/O.
package volume

import "time"

// DefaultBackend is the backend of volumes that do not name one. Unless configured otherwise, it is AWS.
const DefaultBackend = "default"

// RecordPrefix is the prefix of the driver's records in a bucket. No volume is below it.
const RecordPrefix = ".s3-csi"

// MaxGeneration is the highest generation of a name. Volume ids have room for it.
const MaxGeneration = 9999

// The bounds of Attributes.SessionDuration. The maximum is that of GetFederationToken (STS API Reference).
const (
	MinSessionDuration = time.Second
	MaxSessionDuration = 36 * time.Hour
)

// The bounds of Attributes.Linger.
const (
	MinLinger = time.Second
	MaxLinger = 24 * time.Hour
)

// Values of Attributes.Consistency.
const (
	// ConsistencyCloseToOpen shows another writer's changes as soon as the client can.
	ConsistencyCloseToOpen = "close-to-open"
	// ConsistencyRelaxed may show files as a listing showed them up to RelaxedTTL ago.
	ConsistencyRelaxed = "relaxed"
	// RelaxedTTL is how long a client may use what a listing showed with ConsistencyRelaxed.
	RelaxedTTL = 60 * time.Second
)

// Limits of the CSI specification ("Size Limits"), in bytes.
const (
	maxString = 128
	maxMap    = 4096
)

// ID is a parsed volume_id: the place of the volume's data.
type ID struct {
	Backend string
	Bucket  string
	Prefix  string // "" is the whole bucket; otherwise it ends in "/"
}

// OnDelete is what DeleteVolume does with a volume's data.
type OnDelete string

const (
	// OnDeleteDelete removes current objects and unfinished uploads; on a versioned bucket older versions stay.
	OnDeleteDelete OnDelete = "delete"
	// OnDeletePurge also removes versions and delete markers.
	OnDeletePurge OnDelete = "purge"
	// OnDeleteRetain keeps everything.
	OnDeleteRetain OnDelete = "retain"
	// OnDeleteRequireEmpty fails while an object or an unfinished upload is left.
	OnDeleteRequireEmpty OnDelete = "requireEmpty"
)

// Parameters are the parsed parameters of CreateVolume, that is, of a StorageClass.
type Parameters struct {
	Backend          string // never "" after ParseParameters
	BucketName       string // "": each volume has its own bucket
	BucketNamePrefix string // only without BucketName
	Prefix           string // base prefix, expanded; "" or ends in "/"
	Mutable
	// CapacityBytes is the requested size, which is not a parameter; 0 is no size. It is part of the digest, because requests for one name
	// with different sizes are for different volumes.
	CapacityBytes int64
	// Content is where the volume's objects come from, which is not a parameter either. It is part of the digest.
	Content Content
	// MaxObjects and MaxBytes bound a volume that is copied from another one. They are not part of the digest.
	MaxObjects int64
	MaxBytes   int64
	// SnapshotAccess is one of SnapshotAccess…, "" is SnapshotAccessCopy. It is in the digest by Node.Snapshot.
	SnapshotAccess string
	Node           Attributes // for the volume context
	// Claims and Ignored are from settings of other drivers, as in Reading.
	Claims  []Claim
	Ignored []string
}

// Attributes are the settings of a volume for nodes. They are parsed from a volume context, to which CreateVolume writes them. Zero values
// mean "not set". No defaults are applied, because they must not affect the mount key.
type Attributes struct {
	Client      string // "mountpoint-s3", "rclone"; "" is the driver's default
	Credentials string // credentials.Source…; "": secret if the request has keys, else driver
	// RoleARN is the role to assume for the mount's sessions, Scope one of Scope…, SessionDuration the validity of a session. "" and 0 are
	// the defaults of the backend and the service.
	RoleARN         string // a Role
	Scope           string
	SessionDuration time.Duration
	UID, GID        *uint32 // owner of all files
	DirMode         *uint32 // permission bits
	FileMode        *uint32
	ReadOnly        bool // the volume is read-only, regardless of the publication
	// Snapshot is "<name>@<generation>" of a snapshot in the volume's bucket, which the volume shows; "": none. Read replaces it with the place
	// of the snapshot's objects.
	Snapshot string
	Region   string // of a static volume; "": detected
	// ExpectedBucketOwner is sent with every request for the volume's bucket.
	ExpectedBucketOwner string
	// MountOptions are the options in the context (parameter mountOptions), without those of the capability.
	MountOptions []Option
	// Limits of the client and its helper on each node, if the launcher enforces limits; 0 is the node's default.
	MemoryLimit uint64 // bytes
	CPUWeight   uint64 // 1 to 10000
	TasksMax    uint64 // processes and threads
	// Cache enables a read cache on the node's disk. CacheSize is its maximum size, in bytes; 0 is DefaultCacheSize.
	Cache     bool
	CacheSize uint64
	// Consistency is one of Consistency…; "" is the client's default, which may depend on ReadOnly.
	Consistency string
	// Linger is how long the mount may outlive its last publication; 0: not at all. It is not part of the mount spec.
	Linger time.Duration
	// Usage is how often the volume's usage is measured, at its creation. It is not part of the mount spec.
	Usage Usage
}
