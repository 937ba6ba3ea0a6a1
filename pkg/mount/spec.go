// Package mount defines what a mount is: its specification, its key and its names. It does no I/O.
//
// A mount is one FUSE process and its mount point, the source. Publications are bind mounts of the source. Publications with
// equal specifications share a mount.
package mount

import (
	"crypto/sha256"
	"encoding/base32"
	"encoding/json"
	"fmt"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/s3-csi/s3-csi-driver/pkg/credentials"
	"github.com/s3-csi/s3-csi-driver/pkg/volume"
)

// specSchema is the version of Spec's encoding. It changes every mount key, so it changes only when a field changes its
// meaning.
const specSchema = 1

// Spec is the part of a volume's settings that determines what its FUSE process does. It holds no defaults, program versions or
// resolved endpoints, so that an upgrade of the driver changes no key.
type Spec struct {
	Schema              int      `json:"schema"`
	Backend             string   `json:"backend"`
	Bucket              string   `json:"bucket"`
	Prefix              string   `json:"prefix,omitempty"`
	Client              string   `json:"client,omitempty"`
	Options             []string `json:"options,omitempty"` // "name" or "name=value", in the author's order
	ReadOnly            bool     `json:"readOnly,omitempty"`
	UID                 *uint32  `json:"uid,omitempty"`
	GID                 *uint32  `json:"gid,omitempty"`
	DirMode             *uint32  `json:"dirMode,omitempty"`
	FileMode            *uint32  `json:"fileMode,omitempty"`
	MountGroup          *uint32  `json:"mountGroup,omitempty"`
	SELinuxContext      string   `json:"seLinuxContext,omitempty"`
	Region              string   `json:"region,omitempty"`
	ExpectedBucketOwner string   `json:"expectedBucketOwner,omitempty"`
	MemoryLimit         uint64   `json:"memoryLimit,omitempty"` // bytes
	CPUWeight           uint64   `json:"cpuWeight,omitempty"`
	TasksMax            uint64   `json:"tasksMax,omitempty"`
	Cache               bool     `json:"cache,omitempty"`
	CacheSize           uint64   `json:"cacheSize,omitempty"` // bytes
	Consistency         string   `json:"consistency,omitempty"`
	// Source is where the credentials come from, and Identity an opaque name of whose they are: two identities never
	// share a mount, so an access key ID without its secret is not enough to join one.
	Source   string `json:"source"`
	Identity string `json:"identity,omitempty"`
	// RoleARN is the volume's, with the pod's names in it; Scope and SessionDuration are the volume's.
	RoleARN         string        `json:"roleARN,omitempty"`
	Scope           string        `json:"scope,omitempty"`
	SessionDuration time.Duration `json:"sessionDuration,omitempty"`
}

// NewSpec makes the spec of a request, whose role is expanded. salt is the node's, for the identity.
func NewSpec(r Request, salt []byte) Spec {
	s := Spec{
		Schema: specSchema, Backend: r.Volume.Backend, Bucket: r.Volume.Bucket, Prefix: r.Volume.Prefix,
		Client: r.Attributes.Client, ReadOnly: r.Attributes.ReadOnly,
		UID: r.Attributes.UID, GID: r.Attributes.GID, DirMode: r.Attributes.DirMode, FileMode: r.Attributes.FileMode,
		MountGroup: r.MountGroup, SELinuxContext: r.SELinuxContext,
		Region: r.Attributes.Region, ExpectedBucketOwner: r.Attributes.ExpectedBucketOwner,
		MemoryLimit: r.Attributes.MemoryLimit, CPUWeight: r.Attributes.CPUWeight, TasksMax: r.Attributes.TasksMax,
		Cache: r.Attributes.Cache, CacheSize: r.Attributes.CacheSize, Consistency: r.Attributes.Consistency,
		Source: r.Source, RoleARN: r.Attributes.RoleARN, Scope: r.Attributes.Scope, SessionDuration: r.Attributes.SessionDuration,
	}
	for _, o := range r.Options {
		s.Options = append(s.Options, o.String())
	}
	switch r.Source {
	case credentials.SourceSecret:
		s.Identity = r.Keys.Digest(salt)
		if r.SecretRoleARN != "" {
			s.Identity += " " + r.SecretRoleARN
		}
	case credentials.SourceWorkload:
		s.Identity = r.PodNamespace + "/" + r.ServiceAccount
	}
	return s
}

// RotatedFrom reports whether two specs differ only in the secret's identity.
func (s Spec) RotatedFrom(o Spec) bool {
	if s.Source != credentials.SourceSecret || s.Identity == o.Identity {
		return false
	}
	s.Identity = o.Identity
	return s.Encode() == o.Encode()
}

// ParseOptions parses the author's options again: they were checked when the spec was made.
func (s Spec) ParseOptions() ([]volume.Option, error) {
	return volume.ParseMountOptions(s.Options, "options")
}

// Encode is the canonical form: Go's encoder writes struct fields in order, so equal specs have equal encodings.
func (s Spec) Encode() string {
	b, err := json.Marshal(s)
	if err != nil {
		panic(fmt.Sprintf("a mount spec cannot fail to encode: %v", err)) // plain strings, numbers and booleans only
	}
	return string(b)
}

// Key returns a hash of the spec: mounts with equal specs have equal keys. It has 24 characters that are safe in file names.
func (s Spec) Key() string {
	sum := sha256.Sum256([]byte(s.Encode()))
	return strings.ToLower(base32.StdEncoding.WithPadding(base32.NoPadding).EncodeToString(sum[:15]))
}

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
	PodName        string             // of that pod, for people; "": unknown
	ServiceAccount string             // of that pod; "": unknown
	Ephemeral      bool               // an inline volume of the pod, which never gets the driver's own credentials
	Identity       string             // for people: "driver", "secret:<access key id>", "workload:<namespace>/<service account>"
	Claims         []volume.Claim     // the author's statements about the service; checked against the backend
	Ignored        []string           // settings for another driver that are ignored here, for the log
}

// RecordPlace is where a volume's record is: an object, or the tags of its bucket. The zero value is none.
type RecordPlace struct {
	Key  string
	Tags bool
}

// Stats is the usage of a volume, as its file system reports it. S3 is unbounded, so the client reports fictitious totals.
type Stats struct {
	TotalBytes, UsedBytes, AvailableBytes int64
	Inodes, InodesUsed, InodesFree        int64
}

// StatsOf returns the statistics in the answer of a file system.
func StatsOf(st unix.Statfs_t) Stats {
	bytes := func(blocks uint64) int64 { return saturate(blocks, uint64(st.Frsize)) }
	return Stats{
		TotalBytes: bytes(st.Blocks), UsedBytes: bytes(st.Blocks - min(st.Blocks, st.Bfree)), AvailableBytes: bytes(st.Bavail),
		Inodes: saturate(st.Files, 1), InodesUsed: saturate(st.Files-min(st.Files, st.Ffree), 1), InodesFree: saturate(st.Ffree, 1),
	}
}

// saturate multiplies within an int64: clients of object stores report up to 2^63 blocks.
func saturate(n, size uint64) int64 {
	const limit = uint64(1<<63 - 1)
	if size == 0 || n > limit/size {
		return int64(limit)
	}
	return int64(n * size)
}

// Usage is what a listing of a volume found. CapacityBytes is its recorded size, 0 if that is unknown.
type Usage struct{ Bytes, Objects, CapacityBytes int64 }

// With returns the statistics with what a listing found, and with the volume's recorded size in place of the file system's.
func (s Stats) With(u Usage) Stats {
	if u.CapacityBytes > 0 {
		s.TotalBytes = u.CapacityBytes
	}
	s.UsedBytes, s.AvailableBytes = u.Bytes, max(0, s.TotalBytes-u.Bytes)
	s.InodesUsed, s.InodesFree = u.Objects, max(0, s.Inodes-u.Objects)
	return s
}
