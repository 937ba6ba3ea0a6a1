// Package volume parses and writes ids, names, parameters and contexts of volumes. It does no I/O.
package volume

import "time"

// DefaultBackend is the backend that volumes use when they name none; it needs no configuration and is AWS.
const DefaultBackend = "default"

// RecordPrefix is the prefix of the driver's records in a bucket. No volume is below it.
const RecordPrefix = ".s3-csi"

// MaxGeneration is the last generation of a name with a prefix of its own. Volume ids have room for it.
const MaxGeneration = 9999

// The bounds of Attributes.SessionDuration. The maximum is that of GetFederationToken (STS API Reference).
const (
	MinSessionDuration = time.Second
	MaxSessionDuration = 36 * time.Hour
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
	// OnDeleteRequireEmpty refuses while an object or an unfinished upload is left.
	OnDeleteRequireEmpty OnDelete = "requireEmpty"
)

// Parameters are the parsed parameters of CreateVolume, that is, of a StorageClass.
type Parameters struct {
	Backend             string // never "" after ParseParameters
	BucketName          string // "": a bucket of its own
	BucketNamePrefix    string // only without BucketName
	Prefix              string // base prefix, expanded; "" or ends in "/"
	OnDelete            OnDelete
	ExpectedBucketOwner string // AWS account id; "" is the caller's own
	// CapacityBytes is not a parameter but the size that the CO asked for, set beside them; 0 is no size. S3 has none, but
	// requests for one name with different sizes ask for different volumes, so it counts in the digest.
	CapacityBytes int64
	Node          Attributes // what goes on into the volume context
	// Claims are what a StorageClass that was written for another driver says of the service, and Ignored what of it means
	// nothing here; see Reading.
	Claims  []Claim
	Ignored []string
}

// Attributes are what a node needs to know about a volume beside where it is: parsed from a volume context, and written
// to one by CreateVolume. Zero values are "not given"; nothing is defaulted here, because defaults must not decide a
// mount key.
type Attributes struct {
	Client      string // "mountpoint-s3", "rclone"; "" is the driver's default
	Credentials string // credentials.Source…; "": secret if the request has keys, else driver
	// RoleARN is the role to take on for the mount's sessions, Scope one of Scope…, SessionDuration how long a session lasts;
	// "" and 0: as the backend's configuration says, and the service.
	RoleARN         string // a Role
	Scope           string
	SessionDuration time.Duration
	UID, GID        *uint32 // owner that files are shown with
	DirMode         *uint32 // permission bits
	FileMode        *uint32
	ReadOnly        bool   // the volume itself is read-only, whatever a publication says
	Region          string // where a static volume's author knew it; "" is found out
	// ExpectedBucketOwner is sent with every request for the volume's bucket.
	ExpectedBucketOwner string
	// MountOptions are those of the context (parameter mountOptions); those of the capability come beside them.
	MountOptions []Option
	// Limits of the client and its helper on each node, where the launcher can set them; 0 is the node's default.
	MemoryLimit uint64 // bytes
	CPUWeight   uint64 // 1 to 10000
	TasksMax    uint64 // processes and threads
	// Cache keeps what is read on the node's disk, CacheSize bounds it, in bytes; 0 is DefaultCacheSize.
	Cache     bool
	CacheSize uint64
}
