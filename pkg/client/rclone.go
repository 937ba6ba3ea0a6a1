package client

import (
	"fmt"
	"strconv"
	"time"

	"github.com/s3-csi/s3-csi-driver/pkg/policy"
	"github.com/s3-csi/s3-csi-driver/pkg/volume"
)

const (
	// rcloneMemory is the minimum memory limit: the program and its helper take about 60 MiB when idle, the upload of a large
	// file four parts of 5 MiB.
	rcloneMemory = uint64(128 * mib)
	// rcloneRoom is the minimum difference between memory limit and Go heap, for the helper.
	rcloneRoom = uint64(32 * mib)
	// rcloneTasks is the minimum number of processes and threads, with those of the helper.
	rcloneTasks = 64
)

// rclone is our own program around rclone's S3 backend and its FUSE server (clients/rclone). It exits only when everything is
// uploaded, and reports its upload queue on its output. Its defaults and limits are repeated here.
func rclone() Client {
	flag := func(meaning string) OptionType {
		return OptionType{Kind: Flag, Default: "false", Meaning: meaning}
	}
	c := Client{
		Name:      "rclone",
		Programs:  []string{"s3-csi-rclone"},
		MinMemory: rcloneMemory,
		MinTasks:  rcloneTasks,
		Options: map[string]OptionType{
			"cache-size":        {Kind: Size, Min: mib, Max: 16 * tib, Default: "1Gi", Meaning: "How much stored or read data stays in the mount's cache directory; data that is not stored yet is kept beyond it."},
			"read-cache":        flag("What is read stays in the cache too. The volume parameter cache does so for every client."),
			"dir-cache-time":    {Kind: Duration, Min: 0, Max: 24 * time.Hour.Milliseconds(), Default: "10s", Meaning: "How long a listing is taken to be true."},
			"write-back":        {Kind: Duration, Min: 100, Max: time.Hour.Milliseconds(), Default: "1s", Meaning: "How long after a file is closed its upload starts."},
			"read-ahead":        {Kind: Size, Min: 0, Max: gib, Default: "16Mi", Meaning: "How far to read ahead of a sequential reader, in memory for each open file."},
			"transfers":         {Kind: Integer, Unit: "files", Min: 1, Max: 64, Default: "4", Meaning: "How many files are stored at a time."},
			"part-size":         {Kind: Size, Min: 5 * mib, Max: 5 * gib, Default: "5Mi", Meaning: "Size of the parts of large files, four in memory for each file that is being stored; a file can have 10,000."},
			"server-mtime":      flag("Files show when they were stored instead of when they were changed: one request less for each file."),
			"directory-markers": flag("Directories are stored as empty objects, so that empty ones last."),
			"storage-class":     {Kind: Text, Pattern: storageClass, Form: "a name of capital letters, digits and _", Default: "the bucket's", Meaning: "Storage class of new objects."},
			"sse":               {Kind: Enum, Words: []string{"aws:kms", "AES256"}, Default: "the bucket's", Meaning: "Server-side encryption of new objects."},
			"sse-kms-key-id":    {Kind: Text, Pattern: kmsKey, Form: "the ARN of a KMS key (not of an alias)", Default: "S3's own key", Meaning: "KMS key of new objects; only with sse aws:kms."},
			"debug":             flag("rclone logs at debug level."),
		},
		Refused: map[string]string{
			"endpoint":           "a volume names a backend; its endpoint is in the driver's config file",
			"region":             "the bucket's region is found out; a static volume can give its attribute region, a backend its own in the driver's config file",
			"path-style":         "a volume names a backend; its addressing is in the driver's config file",
			"force-path-style":   "a volume names a backend; its addressing is in the driver's config file",
			"ca-file":            "a volume names a backend; its CA is in the driver's config file",
			"ca-cert":            "a volume names a backend; its CA is in the driver's config file",
			"read-only":          "use readOnly of the volume or of the pod's volume mount",
			"ro":                 "use readOnly of the volume or of the pod's volume mount",
			"cache-dir":          "the cache directory is the driver's",
			"fuse-fd":            "the driver sets it for every mount",
			"conditional-writes": "it follows from the backend in the driver's config file (singleController)",
			"allow-other":        "the driver sets it for every mount",
			"allow-non-empty":    "the driver sets it for every mount",
			"daemon":             "the driver sets it for every mount",
			"cache":              "use the volume parameters cache and cacheSize",
			"vfs-cache-max-size": "use the volume parameter cacheSize, or cache-size",
			"vfs-cache-mode":     "what is written always goes through the cache; for what is read use the volume parameter cache",
			"config":             "rclone reads no configuration here",
			"log-file":           "clients write no log files; their output goes to the helper",
		},
		WriteBack: true,
		Queue:     parseQueue,
		Conflicts: parseConflicts,
		// Files can always be deleted and renamed; a rename is a copy and a delete.
		access:     func([]volume.Option) policy.Needs { return policy.Needs{Delete: true} },
		Quarantine: "lost",
		caching:    []string{"cache-size", "read-cache"},
		logging:    []string{"debug"},
	}
	refuseCommon(c.Refused)
	c.rules = func(given map[string]string) (name, problem string) {
		if given["sse-kms-key-id"] != "" && given["sse"] != "aws:kms" {
			return "sse-kms-key-id", "needs the option sse with aws:kms"
		}
		return "", ""
	}
	c.Command = func(in Invocation) Command { return rcloneCommand(c, in) }
	return c
}

func rcloneCommand(c Client, in Invocation) Command {
	argv := []string{in.Binary, argument("fuse-fd", strconv.Itoa(FuseFD)), argument("bucket", in.Bucket)}
	argv = append(argv, withValue("prefix", in.Prefix)...)
	argv = append(argv, withValue("region", in.Region)...)
	argv = append(argv, withValue("endpoint", in.Endpoint)...)
	if in.PathStyle {
		argv = append(argv, "--path-style")
	}
	argv = append(argv, withValue("ca-file", in.CAFile)...)
	if in.ReadOnly {
		argv = append(argv, "--read-only")
	}
	argv = append(argv, owner("uid", in.UID, c.MinOwner)...)
	argv = append(argv, owner("gid", in.GID, c.MinOwner)...)
	argv = append(argv, argument("dir-mode", mode(in.DirMode)), argument("file-mode", mode(in.FileMode)))
	argv = append(argv, argument("cache-dir", in.CacheDir))
	if in.ConditionalWrites {
		argv = append(argv, "--conditional-writes")
	}
	if in.Cache {
		for _, o := range []struct{ name, value string }{{"read-cache", "true"}, {"cache-size", volume.FormatQuantity(in.cacheSize())}} {
			if _, given := find(in.Options, o.name); !given {
				argv = append(argv, argument(o.name, o.value))
			}
		}
	}
	argv = append(argv, authored(c.Options, in.Options)...)
	// Without it the program starts itself again, to keep rclone's packages from looking for a configuration.
	env := environment(in, "RCLONE_CONFIG=/dev/null")
	if in.MemoryLimit != 0 {
		// A soft limit: near it the garbage collector runs more often, before the process is OOM-killed.
		env = append(env, fmt.Sprintf("GOMEMLIMIT=%d", in.MemoryLimit-min(max(rcloneRoom, in.MemoryLimit/5), in.MemoryLimit/2)))
	}
	return Command{Argv: argv, Env: env}
}
