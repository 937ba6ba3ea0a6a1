// Package mount makes volumes appear at target paths and takes them away again.
//
// A mount is one FUSE process and its mount point, the source; publications are bind mounts of it. The Manager keeps no
// state of its own: what it must know is in the state directory, in the kernel's mount table and with the helpers, so a
// new driver goes on where a dead one stopped.
package mount

import (
	"crypto/sha256"
	"encoding/base32"
	"encoding/json"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/s3-csi/s3-csi-driver/pkg/credentials"
	"github.com/s3-csi/s3-csi-driver/pkg/host"
	"github.com/s3-csi/s3-csi-driver/pkg/volume"
)

// specSchema is the version of Spec's encoding. It changes every mount key, so it changes only when a field changes its
// meaning.
const specSchema = 1

// Spec is all that an author gave and that decides what a FUSE process does. It holds no defaults, program versions or
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
	// Source is where the credentials come from, and Identity an opaque name of whose they are: two identities never
	// share a mount, and nobody can join a mount by naming an access key whose secret they do not have.
	Source   string `json:"source"`
	Identity string `json:"identity,omitempty"`
	// RoleARN is the volume's, with the pod's names in it; Scope and SessionDuration are the volume's.
	RoleARN         string        `json:"roleARN,omitempty"`
	Scope           string        `json:"scope,omitempty"`
	SessionDuration time.Duration `json:"sessionDuration,omitempty"`
}

// newSpec makes the spec of a request, whose role is expanded. salt is the node's, for the identity.
func newSpec(r Request, salt []byte) Spec {
	s := Spec{
		Schema: specSchema, Backend: r.Volume.Backend, Bucket: r.Volume.Bucket, Prefix: r.Volume.Prefix,
		Client: r.Attributes.Client, ReadOnly: r.Attributes.ReadOnly,
		UID: r.Attributes.UID, GID: r.Attributes.GID, DirMode: r.Attributes.DirMode, FileMode: r.Attributes.FileMode,
		MountGroup: r.MountGroup, SELinuxContext: r.SELinuxContext,
		Region: r.Attributes.Region, ExpectedBucketOwner: r.Attributes.ExpectedBucketOwner,
		MemoryLimit: r.Attributes.MemoryLimit, CPUWeight: r.Attributes.CPUWeight, TasksMax: r.Attributes.TasksMax,
		Cache: r.Attributes.Cache, CacheSize: r.Attributes.CacheSize,
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

// rotatedFrom tells whether two specs differ in nothing but whose secret it is.
func (s Spec) rotatedFrom(o Spec) bool {
	if s.Source != credentials.SourceSecret || s.Identity == o.Identity {
		return false
	}
	s.Identity = o.Identity
	return s.encode() == o.encode()
}

// options are the author's, parsed once more: they were checked when the spec was made.
func (s Spec) options() ([]volume.Option, error) {
	return volume.ParseMountOptions(s.Options, "options")
}

// encode is the canonical form: Go's encoder writes struct fields in order, so equal specs have equal encodings.
func (s Spec) encode() string {
	b, err := json.Marshal(s)
	if err != nil {
		panic(fmt.Sprintf("a mount spec cannot fail to encode: %v", err)) // plain strings, numbers and booleans only
	}
	return string(b)
}

// Key names what a FUSE process does: mounts with equal specs have equal keys. 24 characters of a file name's safe set.
func (s Spec) Key() string {
	sum := sha256.Sum256([]byte(s.encode()))
	return strings.ToLower(base32.StdEncoding.WithPadding(base32.NoPadding).EncodeToString(sum[:15]))
}

// sourceName is what the mount table shows for a mount: whose it is and which life of it.
func sourceName(volumeID, name string) string {
	safe := strings.Map(func(r rune) rune {
		if r > ' ' && r < 0x7f && r != ',' && r != '\\' {
			return r
		}
		return '_'
	}, volumeID)
	return sourcePrefix + safe + ":" + name
}

const sourcePrefix = "s3csi:"

// nameOfSource reads the mount's name back from the mount table's source; ok is false for mounts of others.
func nameOfSource(source string) (name string, ok bool) {
	if !strings.HasPrefix(source, sourcePrefix) {
		return "", false
	}
	name = source[strings.LastIndexByte(source, ':')+1:]
	return name, validName(name)
}

// servedBy is the uid of the client that serves a mount of ours, as the mount table shows it.
func servedBy(mnt host.Mount) (uid uint32, ok bool) {
	if _, ours := nameOfSource(mnt.Source); !ours {
		return 0, false
	}
	for option := range strings.SplitSeq(mnt.SuperOptions, ",") {
		if value, found := strings.CutPrefix(option, "user_id="); found {
			n, err := strconv.ParseUint(value, 10, 32)
			return uint32(n), err == nil
		}
	}
	return 0, false
}

// validName tells whether a name has the form <key>-<generation>; names come back from the kernel's table and from file
// names, and become paths.
func validName(name string) bool {
	key, generation, ok := strings.Cut(name, "-")
	if !ok || len(key) != 24 || len(generation) == 0 || len(generation) > 19 {
		return false
	}
	for _, c := range key {
		if (c < 'a' || c > 'z') && (c < '2' || c > '7') {
			return false
		}
	}
	for _, c := range generation {
		if c < '0' || c > '9' {
			return false
		}
	}
	return true
}
