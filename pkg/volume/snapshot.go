package volume

import (
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"math"
	"strconv"
	"strings"

	"github.com/s3-csi/s3-csi-driver/pkg/fault"
)

// SnapshotsPrefix is the prefix of the records and data of snapshots in a bucket.
const SnapshotsPrefix = RecordPrefix + "/snapshots/"

// SnapshotID is a parsed snapshot_id: the place of the snapshot's record and data.
type SnapshotID struct {
	Backend    string
	Bucket     string
	Segment    string // NameSegment of the snapshot's name
	Generation int
}

// String returns the snapshot_id, "<backend>:<bucket>/<segment>@<generation>". No volume id has this form, because prefixes of volumes end
// in "/".
func (id SnapshotID) String() string {
	return id.Backend + ":" + id.Bucket + "/" + id.element()
}

func (id SnapshotID) element() string { return id.Segment + "@" + strconv.Itoa(id.Generation) }

// Prefix is the prefix of all that belongs to the snapshot, except its record.
func (id SnapshotID) Prefix() string { return SnapshotsPrefix + id.element() + "/" }

// Data is the prefix of the snapshot's objects.
func (id SnapshotID) Data() string { return id.Prefix() + "data/" }

// Manifest is the prefix of the snapshot's manifest segments.
func (id SnapshotID) Manifest() string { return id.Prefix() + "manifest/" }

// Plan is the prefix of the plan of a snapshot as of a time: which versions are to be copied.
func (id SnapshotID) Plan() string { return id.Prefix() + "plan/" }

// User is the key of the object that says that a volume is the snapshot itself, so that the snapshot is not deleted.
func (id SnapshotID) User(v ID) string {
	segment, generation, _ := v.NameSegment()
	return id.Users() + segment + "@" + strconv.Itoa(generation)
}

// Users is the prefix of these objects.
func (id SnapshotID) Users() string { return id.Prefix() + "users/" }

// ParseSnapshotID parses a snapshot_id of this driver. It is strict: it accepts only what String returns. The error is Invalid and names
// snapshot_id.
func ParseSnapshotID(s string) (SnapshotID, error) {
	id, err := parseSnapshotID(s)
	if err != nil {
		return SnapshotID{}, fault.Field("snapshot_id", "%q is not a snapshot id of this driver (<backend>:<bucket>/<name>@<generation>): %w", s, err)
	}
	return id, nil
}

func parseSnapshotID(s string) (SnapshotID, error) {
	if len(s) > maxString {
		return SnapshotID{}, fmt.Errorf("it has %d bytes, the maximum is %d", len(s), maxString)
	}
	backend, place, ok := strings.Cut(s, ":")
	if !ok {
		return SnapshotID{}, errors.New(`it contains no ":"`)
	}
	if err := checkBackendName(backend); err != nil {
		return SnapshotID{}, err
	}
	bucket, name, ok := strings.Cut(place, "/")
	if !ok {
		return SnapshotID{}, errors.New(`it contains no "/"`)
	}
	if err := CheckBucketName(bucket); err != nil {
		return SnapshotID{}, fmt.Errorf("bucket %q %w", bucket, err)
	}
	id, ok := parseSnapshotElement(name)
	if !ok {
		return SnapshotID{}, errors.New(`it does not end in "<name>@<generation>"`)
	}
	id.Backend, id.Bucket = backend, bucket
	return id, nil
}

// parseSnapshotElement parses "<segment>@<generation>".
func parseSnapshotElement(name string) (SnapshotID, bool) {
	segment, suffix, ok := strings.Cut(name, "@")
	generation, err := strconv.Atoi(suffix)
	if !ok || err != nil || generation < 1 || generation > MaxGeneration || strconv.Itoa(generation) != suffix || !isSegment(segment, maxSegment) {
		return SnapshotID{}, false
	}
	return SnapshotID{Segment: segment, Generation: generation}, true
}

// parseSnapshot parses the attribute snapshot.
func parseSnapshot(value, field string) (string, error) {
	if _, ok := parseSnapshotElement(value); !ok {
		return "", fault.Field(field, "%q is not <name>@<generation> of a snapshot", value)
	}
	return value, nil
}

// Values of Parameters.SnapshotAccess.
const (
	// SnapshotAccessCopy copies the snapshot into the new volume.
	SnapshotAccessCopy = "copy"
	// SnapshotAccessDirect makes the volume the snapshot itself, read-only.
	SnapshotAccessDirect = "direct"
)

// ApplyAccess prepares a volume that is a snapshot itself, once Content is set. The error is Invalid.
func (p *Parameters) ApplyAccess() error {
	if p.SnapshotAccess != SnapshotAccessDirect {
		return nil
	}
	id := p.Content.Snapshot
	switch {
	case id == SnapshotID{}:
		return fault.Field("parameters."+keySnapshotAccess, "%s needs a snapshot as the volume's source (in Kubernetes: dataSource)", SnapshotAccessDirect)
	case p.Backend != id.Backend || p.BucketName != id.Bucket:
		return fault.Field("parameters."+keyBucketName, "%q must be the snapshot's bucket, %s, of its backend, %s, with %s: %s", p.BucketName, id.Bucket, id.Backend,
			keySnapshotAccess, SnapshotAccessDirect)
	}
	p.Node.Snapshot, p.Node.ReadOnly = id.element(), true
	return nil
}

// Values of SnapshotParameters.Consistency.
const (
	// SnapshotObject copies each object as it is when its turn comes.
	SnapshotObject = "object"
	// SnapshotTime copies, of each object, the version that was current at one time.
	SnapshotTime = "time"
)

// Defaults of SnapshotParameters, and of Parameters.
const (
	DefaultMaxObjects = 100_000
	DefaultMaxBytes   = 1 << 40
)

// SnapshotParameters are the parsed parameters of CreateSnapshot, that is, of a VolumeSnapshotClass.
type SnapshotParameters struct {
	BucketName  string // "": the source's bucket
	Consistency string
	MaxObjects  int64
	MaxBytes    int64
	OnDelete    OnDelete // delete, purge or retain
	// StaticVolumes allows sources that this driver did not create.
	StaticVolumes bool
}

const (
	keyMaxObjects = "maxObjects"
	keyMaxBytes   = "maxBytes"

	keyStaticVolumes = "staticVolumes"

	keySnapshot       = "snapshot"
	keySnapshotAccess = "snapshotAccess"
)

// SnapshotParameterDocs returns the table of all parameters of a VolumeSnapshotClass, in the order of the documentation.
func SnapshotParameterDocs() []Doc[SnapshotParameters] {
	return []Doc[SnapshotParameters]{
		{keyBucketName, ScopeClass, "the source's bucket; required if the source has its own bucket",
			"The bucket in which snapshots are stored. On the source's backend; the driver's credentials must reach both.", false,
			of(func(p *SnapshotParameters) *string { return &p.BucketName }, parseBucket, nil)},
		{keyConsistency, ScopeClass, "`object`", "[`object`](../explanation/snapshots.md#what-a-snapshot-of-a-volume-in-use-promises): each object is whole, and " +
			"existed at some " +
			"time " +
			"between the start and the end of the copy. [`time`](../explanation/snapshots.md#a-snapshot-of-one-time): all objects are as they were at one time; the " +
			"bucket must " +
			"have versioning.", false,
			oneOf(func(p *SnapshotParameters) *string { return &p.Consistency }, SnapshotObject, SnapshotTime)},
		{keyMaxObjects, ScopeClass, "`100000`", "Maximum number of objects of a snapshot. A larger source is refused.", false,
			of(func(p *SnapshotParameters) *int64 { return &p.MaxObjects }, parseNumber[int64](1, math.MaxInt64), nil)},
		{keyMaxBytes, ScopeClass, "`1Ti`", "Maximum size of a snapshot, in bytes: `500Gi`.", false,
			of(func(p *SnapshotParameters) *int64 { return &p.MaxBytes }, parseBytes[int64](1, 1<<62), nil)},
		{keyOnDelete, ScopeClass, "`delete`", "What DeleteSnapshot does with the data: `delete`, `purge` or `retain`, as for volumes.", false,
			oneOf(func(p *SnapshotParameters) *OnDelete { return &p.OnDelete }, OnDeleteDelete, OnDeletePurge, OnDeleteRetain)},
		{keyStaticVolumes, ScopeClass, "`false`", "`true` allows snapshots of [static volumes](../explanation/snapshots.md#snapshots-of-static-volumes).", false,
			of(func(p *SnapshotParameters) *bool { return &p.StaticVolumes }, parseBool, nil)},
	}
}

// ParseSnapshotParameters parses the parameters of CreateSnapshot. Keys below csi.storage.k8s.io/ are the snapshotter's metadata. Errors are
// Invalid and name the field.
func ParseSnapshotParameters(params map[string]string) (SnapshotParameters, error) {
	p := SnapshotParameters{Consistency: SnapshotObject, MaxObjects: DefaultMaxObjects, MaxBytes: DefaultMaxBytes, OnDelete: OnDeleteDelete}
	given, err := authored(params, "parameters")
	if err != nil {
		return p, err
	}
	all := table[SnapshotParameters]{"a parameter of a VolumeSnapshotClass", SnapshotParameterDocs()}
	return p, all.parse(&p, given, func(key string) string { return "parameters." + key })
}

// ID returns the snapshot's id.
func (p SnapshotParameters) ID(source ID, name string, generation int) SnapshotID {
	bucket := p.BucketName
	if bucket == "" {
		bucket = source.Bucket
	}
	return SnapshotID{Backend: source.Backend, Bucket: bucket, Segment: NameSegment(name), Generation: generation}
}

// CheckPlace refuses a bucket in which ids of snapshots could be too long. The error is Invalid.
func (p SnapshotParameters) CheckPlace(source ID) error {
	id := SnapshotID{Backend: source.Backend, Bucket: p.ID(source, "x", 1).Bucket, Segment: strings.Repeat("x", maxSegment), Generation: MaxGeneration}
	if over := len(id.String()) - maxString; over > 0 {
		return fault.Field("parameters."+keyBucketName,
			"%q and backend name %q together are too long by %d bytes for a snapshot id of %d bytes; name another bucket", id.Bucket, id.Backend, over, maxString)
	}
	return nil
}

// Digest returns a versioned hash of the parameters. Equivalent spellings have the same digest.
func (p SnapshotParameters) Digest() string {
	sum := sha256.Sum256(fmt.Appendf(nil, "%q %q %d %d %q %t", p.BucketName, p.Consistency, p.MaxObjects, p.MaxBytes, p.OnDelete, p.StaticVolumes))
	return "v1:" + hex.EncodeToString(sum[:])
}
