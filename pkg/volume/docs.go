package volume

import (
	"slices"
	"strings"
)

// Scope is where a parameter may be given.
type Scope string

const (
	// ScopeClass is the parameters of a StorageClass.
	ScopeClass Scope = "StorageClass"
	// ScopeContext is the volume attributes of a static PersistentVolume (volume_context).
	ScopeContext Scope = "static volume"
	// ScopeBoth is both.
	ScopeBoth Scope = "both"
)

// ParameterDoc is one row of the table of parameters.
type ParameterDoc struct {
	Name    string
	Scope   Scope
	Default string // what holds when it is not given
	Meaning string // one or two sentences in Markdown
}

// ParameterDocs is the table of all parameters, in the order in which to explain them. The parsers know the names from
// it, and docs/parameters.md is rendered from it.
func ParameterDocs() []ParameterDoc {
	return []ParameterDoc{
		{keyBackend, ScopeBoth, "`default`", "Name of the S3 service in the driver's config file. It becomes part of the volume id."},
		{keyBucketName, ScopeBoth, "StorageClass: a bucket of its own for each volume; static volume: required", "The bucket: a general purpose, account-regional or directory bucket, or an access point under its alias. With it, each volume of a StorageClass is a prefix in this bucket."},
		{keyBucketNamePrefix, ScopeClass, "empty", "How the names of buckets begin that are made for volumes; only without `bucketName`. At most 41 of a-z, 0-9 and `-`."},
		{keyPrefix, ScopeBoth, "empty: the bucket's root", "StorageClass: the base prefix that volumes are made below; may use `${pvc.namespace}`, `${pvc.name}`, `${pv.name}`. Static volume: the prefix that is the volume. A missing last slash is added."},
		{keyOnDelete, ScopeClass, "`delete`", "What DeleteVolume does with the data: `delete` removes current objects and unfinished uploads (on a versioned bucket older versions stay), `purge` also removes versions and delete markers, `retain` keeps everything, `requireEmpty` refuses while anything is left."},
		{keyExpectedBucketOwner, ScopeBoth, "the caller's own account where the backend can tell it", "AWS account id, 12 digits, that must own the bucket."},
		{keyRegion, ScopeContext, "found out", "The bucket's region."},
		{keyClient, ScopeBoth, "the driver's default client", "The FUSE client: `mountpoint-s3` or `rclone`."},
		{keyCredentials, ScopeBoth, "`secret` if the request has a secret with keys, else `driver`", "Where the mount's credentials come from: `driver` (what the driver process itself has), `secret` (the CSI secret) or `workload` (the token of the pod's service account, which is exchanged for a session)."},
		{keyRoleARN, ScopeBoth, "`workload`: the backend's `workloadRoleARN`; `secret`: the secret's `roleARN`; else none", "ARN of the role to take on for the mount's sessions. May use `${pod.namespace}` and `${pod.serviceAccountName}` in the role's path and name."},
		{keyScope, ScopeBoth, "the backend's `scope`", "Whether the mount's session reaches nothing but its volume: `required` (or the volume is not mounted), `auto` (where the backend's configuration says that the service can) or `off` (the credentials as they are). A volume can ask for more than its backend says, not for less."},
		{keySessionDuration, ScopeBoth, "the service's default, an hour on AWS", "How long a session lasts before the next one is made: `15m`, `1h`, `12h`, from 1s to 36h. AWS allows no less than 15m, and no more than the role says."},
		{keyUID, ScopeBoth, "the mount's own user", "Numeric user id that files are shown with."},
		{keyGID, ScopeBoth, "the pod's fsGroup, else the mount's own group", "Numeric group id that files are shown with."},
		{keyDirMode, ScopeBoth, "`0777`; with an fsGroup `0770`", "Permission bits of directories, octal, 0 to 0777."},
		{keyFileMode, ScopeBoth, "`0666`; with an fsGroup `0660`", "Permission bits of files, octal, 0 to 0777."},
		{keyReadOnly, ScopeBoth, "`false`", "`true` makes the volume read-only for every publication."},
		{keyMemoryLimit, ScopeBoth, "the node's `--memory-limit`", "Memory of the client and its helper, bytes: `1Gi`, `800M`. Beyond it the kernel ends the client. At least 16Mi and what the client needs. **See below.**"},
		{keyCPUWeight, ScopeBoth, "the node's `--cpu-weight`", "Share of CPU time when the node is busy, 1 to 10000; other processes have 100."},
		{keyTasksMax, ScopeBoth, "the node's `--tasks-max`", "How many processes and threads the client and its helper may be, 32 to 4194304."},
		{keyCache, ScopeBoth, "`false`", "`true` keeps what is read in a cache on the node's disk, one for each mount, gone with it."},
		{keyCacheSize, ScopeBoth, "`1Gi`", "How much the cache holds, bytes: `10Gi`, from 1Mi to 16Ti. Only with `cache`."},
		{keyMountOptions, ScopeBoth, "none", "Options for the client, comma-separated: `allow-delete,max-threads=8`. Which ones a client takes is its allowlist. The `mountOptions` of a StorageClass or PersistentVolume come beside them."},
	}
}

// names are the parameters that may be given in scope.
func names(scope Scope) []string {
	var list []string
	for _, doc := range ParameterDocs() {
		if doc.Scope == scope || doc.Scope == ScopeBoth {
			list = append(list, doc.Name)
		}
	}
	return list
}

func knownIn(name string, scope Scope) bool { return slices.Contains(names(scope), name) }

// suggestion tells what the author of an unknown parameter may have meant.
func suggestion(name string, scope Scope) string {
	meant := map[string]string{
		"authenticationSource": keyCredentials,
		"role":                 keyRoleARN,
		"iamRole":              keyRoleARN,
	}
	nearest, ok := meant[name]
	if !ok {
		nearest, _ = Nearest(name, names(scope))
	}
	return "the nearest is " + nearest + " (all: " + strings.Join(names(scope), ", ") + ")"
}

// Nearest returns the known name that takes the fewest edits from name, and their number, in the first 64 bytes and regardless
// of case.
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
