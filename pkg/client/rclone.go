package client

import (
	"encoding/json"
	"strconv"
	"strings"

	"github.com/s3-csi/s3-csi-driver/pkg/volume"
)

// rcloneCacheSize is the cache of a mount in bytes where the author gives none.
const rcloneCacheSize = 4 * gib

// rclone is our own small program around rclone's S3 backend and its FUSE server (clients/rclone). It exits only when
// everything that was written is stored, and says on its output what is left.
func rclone() Client {
	c := Client{
		Name:   "rclone",
		Binary: "s3-csi-rclone",
		Options: map[string]OptionType{
			"cache-size": {Kind: Size, Min: 64 * mib, Max: 16 * tib, Default: formatSize(rcloneCacheSize), Meaning: "How much file content the mount's cache directory may hold; files that are not stored yet are kept beyond it."},
		},
		Refused: map[string]string{
			"endpoint":         "a volume names a backend; its endpoint is in the driver's config file",
			"region":           "the bucket's region is found out; a static volume can give its attribute region, a backend its own in the driver's config file",
			"path-style":       "a volume names a backend; its addressing is in the driver's config file",
			"force-path-style": "a volume names a backend; its addressing is in the driver's config file",
			"ca-file":          "a volume names a backend; its CA is in the driver's config file",
			"ca-cert":          "a volume names a backend; its CA is in the driver's config file",
			"read-only":        "use readOnly of the volume or of the pod's volume mount",
			"ro":               "use readOnly of the volume or of the pod's volume mount",
			"cache-dir":        "the cache directory is the driver's",
			"fuse-fd":          "the driver sets it for every mount",
			"allow-other":      "the driver sets it for every mount",
			"allow-non-empty":  "the driver sets it for every mount",
			"daemon":           "the driver sets it for every mount",
			"config":           "rclone reads no configuration here",
			"log-file":         "clients write no log files; their output goes to the helper",
		},
		Queue: parseQueue,
	}
	refuseCommon(c.Refused)
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
	if _, given := find(in.Options, "cache-size"); !given {
		argv = append(argv, argument("cache-size", strconv.FormatInt(rcloneCacheSize, 10)))
	}
	argv = append(argv, authored(c.Options, inBytes(c.Options, in.Options))...)
	return Command{Argv: argv, Env: environment(in)}
}

// inBytes gives sizes as plain numbers, so that the program needs no units of its own.
func inBytes(types map[string]OptionType, options []volume.Option) []volume.Option {
	out := make([]volume.Option, len(options))
	for i, o := range options {
		if types[o.Name].Kind == Size {
			if n, ok := parseSize(o.Value); ok {
				o.Value = strconv.FormatInt(n, 10)
			}
		}
		out[i] = o
	}
	return out
}

// queueLine starts a line that tells the queue.
const queueLine = "s3-csi-queue "

// parseQueue reads "s3-csi-queue " and the JSON of a Queue in exactly the form that encoding/json gives it. A line that
// is anything else, such as a file name in a log message, is no report.
func parseQueue(line string) (Queue, bool) {
	text, ok := strings.CutPrefix(strings.TrimRight(line, "\r\n"), queueLine)
	if !ok || len(text) > 128 {
		return Queue{}, false
	}
	var q Queue
	if err := json.Unmarshal([]byte(text), &q); err != nil || q.Uploads < 0 || q.Bytes < 0 {
		return Queue{}, false
	}
	if canonical, err := json.Marshal(q); err != nil || string(canonical) != text {
		return Queue{}, false
	}
	return q, true
}
