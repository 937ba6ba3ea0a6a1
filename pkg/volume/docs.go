package volume

import (
	"maps"
	"math"
	"slices"
	"strings"
	"time"

	"github.com/s3-csi/s3-csi-driver/pkg/credentials"
	"github.com/s3-csi/s3-csi-driver/pkg/fault"
)

// Scope is where a parameter is allowed.
type Scope string

const (
	// ScopeClass is for parameters of a StorageClass.
	ScopeClass Scope = "StorageClass"
	// ScopeContext is for volume attributes of a static PersistentVolume (volume_context).
	ScopeContext Scope = "static volume"
	// ScopeBoth is for both.
	ScopeBoth Scope = "both"
)

// Doc is one row of a table of parameters.
type Doc[P any] struct {
	Name    string
	Scope   Scope
	Default string // the default, in Markdown
	Meaning string // one or two sentences in Markdown
	Mutable bool   // a VolumeAttributesClass can have it, and change it after creation
	codec   codec[P]
}

// ParameterDoc is a parameter of volumes.
type ParameterDoc = Doc[Parameters]

// ParameterDocs returns the table of all parameters, in the order of the documentation. The parsers take the names from it, and
// docs/reference/parameters.md is rendered from it.
func ParameterDocs() []ParameterDoc {
	return []ParameterDoc{
		{keyBackend, ScopeBoth, "`default`", "Name of the S3 service in the driver's config file. It becomes part of the volume id.", false,
			of(func(p *Parameters) *string { return &p.Backend }, parseBackend, text)},
		{keyBucketName, ScopeBoth, "StorageClass: each volume gets its own bucket; static volume: required",
			"A general purpose, account-regional or directory bucket, or the alias of an access point. In a StorageClass, each volume is then a prefix of this bucket.",
			false, of(func(p *Parameters) *string { return &p.BucketName }, parseBucket, text)},
		{keyBucketNamePrefix, ScopeClass, "empty", "Prefix of the names of buckets that are created for volumes; only without `bucketName`. At most 41 of a-z, " +
			"0-9 and `-`.", false, of(func(p *Parameters) *string { return &p.BucketNamePrefix }, parseBucketNamePrefix, text)},
		{keyPrefix, ScopeBoth, "empty: the bucket's root", "StorageClass: base prefix of the volumes; may use `${pvc.namespace}`, `${pvc.name}`, `${pv.name}`. " +
			"Static volume: prefix of the volume. A missing slash at the end is added.", false, of(func(p *Parameters) *string { return &p.Prefix }, parseBase, text)},
		{keyOnDelete, ScopeClass, "`delete`", "What DeleteVolume does with the data: `delete` removes current objects and unfinished uploads (on a versioned " +
			"bucket older versions stay), `purge` also removes versions and delete markers, `retain` keeps everything, `requireEmpty` fails while the volume is not " +
			"empty.", true, oneOf(func(p *Parameters) *OnDelete { return &p.OnDelete }, OnDeleteDelete, OnDeletePurge, OnDeleteRetain, OnDeleteRequireEmpty)},
		{keyTags, ScopeClass, "none", "Tags of the bucket: `team=data,cost-centre=42`; only without `bucketName`. A VolumeAttributesClass changes only the tags " +
			"that it names; `team=` removes one.", true,
			codec[Parameters]{func(p *Parameters, value, field string) (err error) {
				p.Tags, err = parseTags(value, field)
				return err
			}, func(p *Parameters) string { return formatTags(p.Tags) }}},
		{keyMaxObjects, ScopeClass, "`100000`", "Maximum number of objects that a clone copies. A larger source is refused.", false,
			of(func(p *Parameters) *int64 { return &p.MaxObjects }, parseNumber[int64](1, math.MaxInt64), nil)},
		{keyMaxBytes, ScopeClass, "`1Ti`", "Maximum number of bytes that a clone copies: `500Gi`.", false,
			of(func(p *Parameters) *int64 { return &p.MaxBytes }, parseBytes[int64](1, 1<<62), nil)},
		{keySnapshotAccess, ScopeClass, "`copy`", "`copy` copies the objects of a snapshot into the volume. `direct` makes the volume [the snapshot " +
			"itself](../explanation/snapshots.md#read-a-snapshot-without-a-copy), read-only.", false, of(func(p *Parameters) *string { return &p.SnapshotAccess },
			parseOneOf(SnapshotAccessCopy, SnapshotAccessDirect), nil)},
		{keySnapshot, ScopeContext, "none", "A snapshot in the bucket, `<name>@<generation>`, which the volume shows read-only. Not with `prefix`.", false,
			of(func(p *Parameters) *string { return &p.Node.Snapshot }, parseSnapshot, text)},
		{keyExpectedBucketOwner, ScopeBoth, "the caller's own account, if the backend can determine it", "AWS account id, 12 digits, that must own the bucket.",
			false, of(func(p *Parameters) *string { return &p.Node.ExpectedBucketOwner }, parseAccount, text)},
		{keyRegion, ScopeContext, "detected", "The bucket's region.", false, of(func(p *Parameters) *string { return &p.Node.Region }, parseRegion, text)},
		{keyClient, ScopeBoth, "the default client of the backend, else of the driver", "The FUSE client: `mountpoint-s3` or `rclone`.", false,
			of(func(p *Parameters) *string { return &p.Node.Client }, parseClient, text)},
		{keyCredentials, ScopeBoth, "`secret` if the request has a secret with keys, else `driver`",
			"[Source](../explanation/credentials.md#sources) of the mount's credentials: `driver` (the driver's own), `secret` (the CSI secret) or `workload` (the " +
				"token of the " +
				"pod's service account).", false, oneOf(func(p *Parameters) *string { return &p.Node.Credentials }, credentials.SourceDriver, credentials.SourceSecret,
				credentials.SourceWorkload)},
		{keyRoleARN, ScopeBoth, "`workload`: the backend's `workloadRoleARN`; `secret`: the secret's `roleARN`; else none",
			"[Role](../explanation/credentials.md#roles) of the mount's sessions; may use `${pod.namespace}` and " +
				"`${pod.serviceAccountName}`.", false, of(func(p *Parameters) *string { return &p.Node.RoleARN }, parseRole, text)},
		{keyScope, ScopeBoth, "the backend's `scope`", "Whether the mount's session is [limited to its volume](../explanation/credentials.md#scope): `required`, " +
			"`auto` or " +
			"`off`. A volume can be stricter than its backend, not less strict.", false, oneOf(func(p *Parameters) *string { return &p.Node.Scope }, ScopeRequired,
			ScopeAuto, ScopeOff)},
		{keySessionDuration, ScopeBoth, "the service's default, an hour on AWS",
			"Validity of a session, from 1s to 36h: `15m`, `1h`, `12h`. The minimum of AWS is 15m, its maximum is that of the " +
				"role.", false, of(func(p *Parameters) *time.Duration { return &p.Node.SessionDuration }, parseDuration(MinSessionDuration, MaxSessionDuration, "1h"),
				time.Duration.String)},
		{keyUID, ScopeBoth, "the mount's own user", "Numeric user id of all files.", false, of(func(p *Parameters) **uint32 { return &p.Node.UID }, ParseOwner,
			identity)},
		{keyGID, ScopeBoth, "the pod's fsGroup, else the mount's own group", "Numeric group id of all files.", false,
			of(func(p *Parameters) **uint32 { return &p.Node.GID }, ParseOwner, identity)},
		{keyDirMode, ScopeBoth, "`0777`; with an fsGroup `0770`", "Permission bits of directories, octal, 0 to 0777.", false,
			of(func(p *Parameters) **uint32 { return &p.Node.DirMode }, parseMode, octal)},
		{keyFileMode, ScopeBoth, "`0666`; with an fsGroup `0660`", "Permission bits of files, octal, 0 to 0777.", false,
			of(func(p *Parameters) **uint32 { return &p.Node.FileMode }, parseMode, octal)},
		{keyReadOnly, ScopeBoth, "`false`", "`true` makes the volume read-only for every publication.", false,
			of(func(p *Parameters) *bool { return &p.Node.ReadOnly }, parseBool, yes)},
		{keyMemoryLimit, ScopeBoth, "the node's `--memory-limit`",
			"Memory limit of the client and its helper, in bytes: `1Gi`, `800M`. At least the [minimum of the " +
				"client](#limits).", false, of(func(p *Parameters) *uint64 { return &p.Node.MemoryLimit }, parseBytes[uint64](MinMemoryLimit, 0), FormatQuantity)},
		{keyCPUWeight, ScopeBoth, "the node's `--cpu-weight`", "Share of CPU time when the node is busy, 1 to 10000; other processes have 100.", false,
			of(func(p *Parameters) *uint64 { return &p.Node.CPUWeight }, parseNumber[uint64](1, MaxCPUWeight), number)},
		{keyTasksMax, ScopeBoth, "the node's `--tasks-max`", "Maximum number of processes and threads of the client and its helper, 32 to 4194304.", false,
			of(func(p *Parameters) *uint64 { return &p.Node.TasksMax }, parseNumber[uint64](MinTasksMax, MaxTasksMax), number)},
		{keyCache, ScopeBoth, "`false`", "`true` [caches](#cache) read data on the node's disk.", false,
			of(func(p *Parameters) *bool { return &p.Node.Cache }, parseBool, yes)},
		{keyCacheSize, ScopeBoth, "`1Gi`", "Maximum size of the cache, in bytes: `10Gi`, from 1Mi to 16Ti. Only with `cache`.", false,
			of(func(p *Parameters) *uint64 { return &p.Node.CacheSize }, parseBytes[uint64](MinCacheSize, MaxCacheSize), FormatQuantity)},
		{keyConsistency, ScopeBoth, "`mountpoint-s3`: `relaxed` with `readOnly` and without `cache`, else `close-to-open`; `rclone`: `close-to-open`",
			"`relaxed` uses what a listing showed of files for up to 60 seconds. `close-to-open` shows other writers' changes as soon as the client can. " +
				"[Details](#consistency).", false, oneOf(func(p *Parameters) *string { return &p.Node.Consistency }, ConsistencyCloseToOpen, ConsistencyRelaxed)},
		{keyLinger, ScopeBoth, "not at all", "How long [client and cache stay](../explanation/sessions.md#warm-volumes) after the volume's last pod on a node has " +
			"gone, from 1s " +
			"to 24h: `10m`.", false, of(func(p *Parameters) *time.Duration { return &p.Node.Linger }, parseDuration(MinLinger, MaxLinger, "10m"), time.Duration.String)},
		{keyUsage, ScopeBoth, "not at all", "How often a node lists the volume to [measure](../how-to/usage.md) its bytes and objects, from 10m to 168h: `6h`. " +
			"`off`: not " +
			"before a VolumeAttributesClass sets an interval.", true, of(func(p *Parameters) *Usage { return &p.Usage }, parseUsage, Usage.String)},
		{keyMountOptions, ScopeBoth, "none", "[Options](client-options.md) of the client, comma-separated: `allow-delete,max-threads=8`, beside `mountOptions` of " +
			"class or PersistentVolume.", false,
			codec[Parameters]{func(p *Parameters, value, field string) (err error) {
				p.Node.MountOptions, err = ParseMountOptions(splitOptionList(value), field)
				return err
			}, func(p *Parameters) string { return joinOptionList(p.Node.MountOptions) }}},
	}
}

// table is a table of parameters. what describes one of them in errors.
type table[P any] struct {
	what string
	rows []Doc[P]
}

// parameters is the table of what is allowed in scope.
func parameters(scope Scope) table[Parameters] {
	what := "a parameter of volumes (in Kubernetes: of a StorageClass)"
	if scope == ScopeContext {
		what = "a key of a volume context"
	}
	return table[Parameters]{what, slices.DeleteFunc(ParameterDocs(), func(doc ParameterDoc) bool { return doc.Scope != scope && doc.Scope != ScopeBoth })}
}

func (t table[P]) names() []string {
	list := make([]string, len(t.rows))
	for i, row := range t.rows {
		list[i] = row.Name
	}
	return list
}

func (t table[P]) row(name string) (Doc[P], bool) {
	i := slices.Index(t.names(), name)
	if i < 0 {
		return Doc[P]{}, false
	}
	return t.rows[i], true
}

// parse sets what is given, in the order of the keys. field returns the name of a key in errors.
func (t table[P]) parse(p *P, given map[string]string, field func(key string) string) error {
	for _, key := range slices.Sorted(maps.Keys(given)) {
		row, known := t.row(key)
		if !known {
			return fault.Field(field(key), "is not %s; %s", t.what, t.suggestion(key))
		}
		if err := row.codec.set(p, given[key], field(key)); err != nil {
			return err
		}
	}
	return nil
}

// authored returns what the author wrote, without the orchestrator's additions.
func authored(params map[string]string, field string) (map[string]string, error) {
	given := maps.Clone(params)
	maps.DeleteFunc(given, func(key, _ string) bool { return orchestrated(key) })
	if mapSize(given) > maxMap {
		return nil, fault.Field(field, "has more than %d bytes", maxMap)
	}
	return given, nil
}

// suggestion returns the most similar parameter and a list of all.
func (t table[P]) suggestion(name string) string {
	if strings.HasPrefix(name, metadataPrefix) {
		return "the provisioner reads it in a class; a PersistentVolume names its secret in nodePublishSecretRef"
	}
	meant := map[string]string{
		"authenticationSource": keyCredentials,
		"role":                 keyRoleARN,
		"iamRole":              keyRoleARN,
	}
	nearest, ok := meant[name]
	if !ok {
		nearest, _ = Nearest(name, t.names())
	}
	return "the nearest is " + nearest + " (all: " + strings.Join(t.names(), ", ") + ")"
}

// Nearest returns the known name with the smallest edit distance from name, and that distance. It compares the first 64 bytes and ignores
// case.
func Nearest(name string, known []string) (nearest string, edits int) {
	edits = len(name) + 100
	for _, k := range known {
		if d := distance(strings.ToLower(name), strings.ToLower(k)); d < edits {
			nearest, edits = k, d
		}
	}
	return nearest, edits
}

// distance is the Levenshtein distance in bytes, of the first 64 of each.
func distance(a, b string) int {
	a, b = a[:min(len(a), 64)], b[:min(len(b), 64)]
	row := make([]int, len(b)+1)
	for j := range row {
		row[j] = j
	}
	for i := range len(a) {
		diagonal := row[0]
		row[0] = i + 1
		for j := range len(b) {
			cost := diagonal
			if a[i] != b[j] {
				cost = 1 + min(diagonal, row[j], row[j+1])
			}
			diagonal, row[j+1] = row[j+1], cost
		}
	}
	return row[len(b)]
}
