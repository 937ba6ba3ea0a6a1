package client

import (
	"fmt"
	"maps"
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
	// rcloneDirCacheTime is the program's default of dir-cache-time.
	rcloneDirCacheTime = 10 * time.Second
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
			"cache-size": {Kind: Size, Min: mib, Max: 16 * tib, Default: "1Gi", Meaning: "Amount of uploaded or read data kept in the mount's cache directory. " +
				"Data that is not uploaded yet is always kept and does not count."},
			"read-cache": flag("Also cache data that was only read. The volume parameter cache does this for any client."),
			"dir-cache-time": {Kind: Duration, Min: 0, Max: 24 * time.Hour.Milliseconds(), Default: "10s; 1m with `consistency: relaxed`",
				Meaning: "How long directory listings are cached."},
			"write-back": {Kind: Duration, Min: 100, Max: time.Hour.Milliseconds(), Default: "1s", Meaning: "Delay between closing a file and uploading it."},
			"read-ahead": {Kind: Size, Min: 0, Max: gib, Default: "16Mi", Meaning: "Read-ahead for sequential reads, in memory for each open file."},
			"transfers":  {Kind: Integer, Unit: "files", Min: 1, Max: 64, Default: "4", Meaning: "Number of concurrent uploads."},
			"part-size": {Kind: Size, Min: 5 * mib, Max: 5 * gib, Default: "5Mi", Meaning: "Part size of large files. Each upload holds four parts in memory, " +
				"and a file can have 10,000 parts."},
			"server-mtime": {Kind: Flag, Default: "false; true with `consistency: relaxed`", Meaning: "Show the upload time as the modification time. A listing " +
				"has it, so that the attributes of a file take no request."},
			"directory-markers": flag("Store directories as empty objects, so that empty directories persist."),
			"storage-class": {Kind: Text, Pattern: storageClass, Form: "a name of capital letters, digits and _", Default: "the bucket's",
				Meaning: "Storage class of new objects."},
			"sse": {Kind: Enum, Words: []string{"aws:kms", "AES256"}, Default: "the bucket's", Meaning: "Server-side encryption of new objects."},
			"sse-kms-key-id": {Kind: Text, Pattern: kmsKey, Form: "the ARN of a KMS key (not of an alias)", Default: "the service's default key",
				Meaning: "KMS key of new objects; only with sse aws:kms."},
			"debug": flag("Log at debug level."),
		},
		Refused:   reserved(),
		WriteBack: true,
		Queue:     parseQueue,
		Flushed:   parseFlushed,
		Conflicts: parseConflicts,
		// Files can always be deleted and renamed; a rename is a copy and a delete.
		access:     func([]volume.Option) policy.Needs { return policy.Needs{Delete: true} },
		Quarantine: "lost",
		caching:    []string{"cache-size", "read-cache"},
		contradiction: func(consistency string, given map[string]string) string {
			kept, err := time.ParseDuration(given["dir-cache-time"])
			if err == nil && (consistency == volume.ConsistencyRelaxed && kept < rcloneDirCacheTime ||
				consistency == volume.ConsistencyCloseToOpen && kept > rcloneDirCacheTime) {
				return "dir-cache-time"
			}
			return ""
		},
		logging: []string{"debug"},
	}
	maps.Copy(c.Refused, map[string]string{
		"ca-cert":            "set the CA of the backend in the driver's config file",
		"conditional-writes": "the backend in the driver's config file decides it (singleController)",
		"allow-non-empty":    "the driver sets it for every mount",
		"vfs-cache-max-size": "use the volume parameter cacheSize, or the option cache-size",
		"vfs-cache-mode":     "writes always use the cache; to cache reads, use the volume parameter cache",
		"config":             "rclone reads no configuration file",
	})
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
	values := placeholders(in)
	argv := append([]string{in.Binary}, fill([]string{"--fuse-fd=${fd}", "--bucket=${bucket}", "--prefix=${prefix}", "--region=${region}",
		"--endpoint=${endpoint}"}, values)...)
	if in.PathStyle {
		argv = append(argv, "--path-style")
	}
	argv = append(argv, fill([]string{"--ca-file=${caFile}"}, values)...)
	if in.ReadOnly {
		argv = append(argv, "--read-only")
	}
	argv = append(argv, fill([]string{"--uid=${uid}", "--gid=${gid}", "--dir-mode=${dirMode}", "--file-mode=${fileMode}", "--cache-dir=${cacheDir}"},
		values)...)
	if in.ConditionalWrites {
		argv = append(argv, "--conditional-writes")
	}
	if in.Cache {
		argv = append(argv, in.unlessGiven("read-cache", "true")...)
		argv = append(argv, in.unlessGiven("cache-size", volume.FormatQuantity(in.cacheSize()))...)
	}
	if in.Consistency == volume.ConsistencyRelaxed {
		argv = append(argv, in.unlessGiven("dir-cache-time", volume.RelaxedTTL.String())...)
		argv = append(argv, in.unlessGiven("server-mtime", "true")...)
	}
	argv = append(argv, authored(c.Options, in.Options)...)
	// Without it the program starts itself again, to keep rclone's packages from looking for a configuration.
	// GOGC spares its start all garbage collections. The program goes on with Go's default after the first one.
	env := environment(in, "RCLONE_CONFIG=/dev/null", "GOGC=400")
	if in.MemoryLimit != 0 {
		// A soft limit: near it the garbage collector runs more often, before the process is OOM-killed.
		env = append(env, fmt.Sprintf("GOMEMLIMIT=%d", in.MemoryLimit-min(max(rcloneRoom, in.MemoryLimit/5), in.MemoryLimit/2)))
	}
	return in.command(argv, env)
}
