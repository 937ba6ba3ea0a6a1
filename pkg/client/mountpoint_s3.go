package client

import (
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"

	"github.com/s3-csi/s3-csi-driver/pkg/policy"
	"github.com/s3-csi/s3-csi-driver/pkg/volume"
)

const (
	// mountpointAttempts is how often Mountpoint tries a request (its own default is 10). Its back-off starts at half
	// a second, doubles up to 20 s and is fully jittered, so 8 attempts last 26 s on average and 52 s at most: long
	// enough to outlast throttling, short enough that a mount that cannot reach S3 fails within one publish call.
	mountpointAttempts = 8
	// mountpointMemory is the default memory target in MiB without a limit. Mountpoint's own default is 95 % of the machine,
	// which is too much for more than one mount.
	mountpointMemory = 1024
	// mountpointLeast is Mountpoint's minimum memory target in MiB.
	mountpointLeast = 512
	// mountpointRoom is the minimum difference between memory limit and target in MiB, for the helper and for memory that
	// Mountpoint does not count: the target is not a limit (its doc/CONFIGURATION.md).
	mountpointRoom = 128
	// mountpointMost is the maximum memory target in MiB.
	mountpointMost = 1 << 20
	// mountpointTasks is the minimum number of processes and threads, with those of the helper.
	mountpointTasks = 64
	// mountpointGbps is Mountpoint's default outside of EC2. It is always set, because otherwise Mountpoint asks the instance
	// metadata service.
	mountpointGbps = 10
	// mountpointMaxTTL is Mountpoint's maximum, a hundred years.
	mountpointMaxTTL = 100 * 365 * 24 * 60 * 60
)

// mountpointMinimal is the lifetime of metadata with which Mountpoint looks every file up again.
const mountpointMinimal = "minimal"

const (
	storageClass volume.Pattern = `^[A-Z][A-Z0-9_]{0,63}$`
	kmsKey       volume.Pattern = `^arn:aws[a-z-]{0,16}:kms:[a-z0-9-]{1,32}:[0-9]{12}:key/[A-Za-z0-9-]{1,64}$`
)

// mountpointS3 is Mountpoint for Amazon S3, version 1.24 or newer (github.com/awslabs/mountpoint-s3, doc/CONFIGURATION.md).
//
// Its mount point is the mounted FUSE descriptor. Then it refuses --read-only and --auto-unmount, which are options of the mount.
// It refuses uid and gid 0. On SIGTERM it logs that it unmounts, which it cannot do with a descriptor: it continues to serve
// and exits with 0 when the mount is gone.
func mountpointS3() Client {
	partSize := func(least, most int64, meaning string) OptionType {
		return OptionType{Kind: Integer, Unit: "bytes", Min: least, Max: most, Default: "8388608", Meaning: meaning}
	}
	ttl := func(least int64, byDefault, meaning string) OptionType {
		return OptionType{Kind: Integer, Unit: "seconds", Min: least, Max: mountpointMaxTTL, Words: []string{mountpointMinimal, "indefinite"}, Default: byDefault,
			Meaning: meaning}
	}
	flag := func(byDefault, meaning string) OptionType {
		return OptionType{Kind: Flag, Default: byDefault, Meaning: meaning}
	}
	c := Client{
		Name:       "mountpoint-s3",
		Programs:   []string{"s3-csi-mountpoint", "mount-s3"},
		MinOwner:   1,
		MinMemory:  uint64(mountpointLimitFor(mountpointLeast) * mib),
		MinTasks:   mountpointTasks,
		CallerPIDs: true,
		Queue:      parseQueue,
		Requests:   parseRequests,
		Unstored:   parseUnstored,
		Options: map[string]OptionType{
			"allow-delete":    flag("true, unless the volume is read-only", "Allow deleting files."),
			"allow-overwrite": flag("true, unless the volume is read-only", "Allow replacing existing files (opened with O_TRUNC and written from the start)."),
			"rename": flag("true, unless deletes are not allowed or sse is set", "Allow renaming files. A rename copies the object in S3, verifies "+
				"the copy and deletes the original. The program `mount-s3` lacks this option and renames only in directory buckets of an Availability Zone."),
			"incremental-upload": flag("false", "Upload data while a file is written, and allow appending to files. Only for directory buckets of an Availability "+
				"Zone."),
			"infer-content-type":    flag("false", "Set the Content-Type of new objects from their file names."),
			"requester-pays":        flag("false", "Accept the charges for requests to, and data from, a Requester Pays bucket."),
			"transfer-acceleration": flag("false", "Use S3 Transfer Acceleration, which must be enabled on the bucket. AWS only."),
			"dual-stack":            flag("false", "Use the dual-stack (IPv4 and IPv6) endpoints. AWS only."),
			"debug":                 flag("false", "Log at debug level."),
			"log-metrics":           flag("false", "Log Mountpoint's metrics every five seconds."),
			"bucket-type": {Kind: Enum, Words: []string{"general-purpose", "directory"}, Default: "derived from the bucket's name",
				Meaning: "Type of the bucket behind an access point, if its name does not show the type."},
			"storage-class": {Kind: Text, Pattern: storageClass, Form: "a name of capital letters, digits and _", Default: "the bucket's",
				Meaning: "Storage class of new objects."},
			"sse": {Kind: Enum, Words: []string{"aws:kms", "aws:kms:dsse", "AES256"}, Default: "the bucket's",
				Meaning: "Server-side encryption of new objects."},
			"sse-kms-key-id": {Kind: Text, Pattern: kmsKey, Form: "the ARN of a KMS key (not of an alias)", Default: "the service's default key",
				Meaning: "KMS key of new objects; only with sse aws:kms or aws:kms:dsse."},
			"upload-checksums": {Kind: Enum, Words: []string{"crc32c", "crc64nvme", "off"}, Default: "crc32c",
				Meaning: "Checksum algorithm for uploads. Use off if the service does not support checksums."},
			"metadata-ttl": ttl(1, "minimal; 60 with a cache, `consistency: relaxed` or, without `consistency`, a read-only volume",
				"How long metadata of files and directories is cached."),
			"negative-metadata-ttl": ttl(0, "same as metadata-ttl; 1 where `consistency` or a read-only volume sets metadata-ttl to 60",
				"How long the absence of a file is cached."),
			"max-cache-size": {Kind: Integer, Unit: "MiB", Min: 1, Max: 16 << 20, Default: "no cache",
				Meaning: "Enable a cache of object data of this size in the mount's cache directory, and set metadata-ttl to 60. The volume parameters cache and " +
					"cacheSize do this for any client."},
			"max-threads": {Kind: Integer, Unit: "threads", Min: 1, Max: 256, Default: "16", Meaning: "Number of file system requests served concurrently."},
			"memory-target": {Kind: Integer, Unit: "MiB", Min: mountpointLeast, Max: mountpointMost,
				Default: fmt.Sprintf("derived from the memory limit (%d for 1 GiB); %d without one", mountpointTarget(uint64(gib)), mountpointMemory),
				Meaning: "Memory that Mountpoint tries not to exceed. It also limits the number of files open for writing (512: 47, 1024: 111)."},
			"maximum-throughput-gbps": {Kind: Integer, Unit: "Gbit/s", Min: 1, Max: 10000, Default: strconv.Itoa(mountpointGbps),
				Meaning: "Expected bandwidth, which determines the number of connections."},
			"part-size":       partSize(5*mib, 5*gib, "Part size for reads and writes. Cannot be combined with read-part-size or write-part-size."),
			"read-part-size":  partSize(5*mib, 5*gib, "Part size for reads."),
			"write-part-size": partSize(5*mib, 5*gib, "Part size for writes. A file can have 10,000 parts."),
		},
		Refused:       reserved(),
		rules:         mountpointRules,
		memory:        mountpointFits,
		least:         mountpointLeastLimit,
		access:        mountpointAccess,
		caching:       []string{"max-cache-size"},
		contradiction: mountpointContradiction,
		logging:       []string{"debug", "log-metrics"},
	}
	maps.Copy(c.Refused, map[string]string{
		"expected-bucket-owner": "use the volume parameter expectedBucketOwner",
		"cache-xz":              "a shared cache would expose the volume's data to other users",
		"bind":                  "network interfaces belong to the node, not to a volume",
		"debug-crt":             "its output contains session tokens; use debug",
		"no-log":                "the driver needs the client's output",
		"otlp-endpoint":         "a volume must not choose where data is sent",
		"otlp-export-interval":  "a volume must not choose where data is sent",
		"user-agent-prefix":     "the driver sets it",
		"l":                     "clients write no log files; the helper logs their output",
	})
	c.Command = func(in Invocation) Command { return mountpointCommand(c, in) }
	return c
}

func mountpointCommand(c Client, in Invocation) Command {
	values := placeholders(in)
	values["owner"] = in.ExpectedBucketOwner
	for name, id := range map[string]uint32{"uid": in.UID, "gid": in.GID} {
		if id < c.MinOwner {
			values[name] = ""
		}
	}
	argv := append([]string{in.Binary, "--foreground", "--allow-other"}, fill([]string{"--prefix=${prefix}", "--region=${region}", "--endpoint-url=${endpoint}"},
		values)...)
	if in.PathStyle {
		argv = append(argv, "--force-path-style")
	}
	argv = append(argv, fill([]string{"--ca-bundle=${caFile}", "--expected-bucket-owner=${owner}", "--user-agent-prefix=${userAgent}", "--uid=${uid}",
		"--gid=${gid}", "--dir-mode=${dirMode}", "--file-mode=${fileMode}"}, values)...)

	// Flags that allow changes of data are on by default, and off for read-only mounts.
	changing := []string{"allow-delete", "allow-overwrite", "incremental-upload"}
	for _, name := range changing {
		if !in.ReadOnly && changes(in.Options, name) {
			argv = append(argv, "--"+name)
		}
	}
	argv = append(argv, in.unlessGiven("maximum-throughput-gbps", strconv.Itoa(mountpointGbps))...)
	argv = append(argv, in.unlessGiven("memory-target", strconv.FormatInt(mountpointTarget(in.MemoryLimit), 10))...)
	if o, given := volume.FindOption(in.Options, "rename"); given && !o.On() {
		argv = append(argv, "--no-rename")
	}
	own := slices.Concat(changing, []string{"rename"})
	rest := slices.DeleteFunc(slices.Clone(in.Options), func(o volume.Option) bool { return slices.Contains(own, o.Name) })
	// Mountpoint creates a directory in it and empties that when it starts.
	if _, sized := volume.FindOption(rest, "max-cache-size"); sized {
		argv = append(argv, argument("cache", in.CacheDir))
	} else if in.Cache {
		argv = append(argv, argument("cache", in.CacheDir), argument("max-cache-size", strconv.FormatUint(in.cacheSize()/uint64(mib), 10)))
	}
	argv = append(argv, mountpointTTL(in)...)
	argv = append(argv, authored(c.Options, rest)...)
	argv = append(argv, "--", in.Bucket, fmt.Sprintf("/dev/fd/%d", FuseFD))

	return in.command(argv, environment(in, fmt.Sprintf("AWS_MAX_ATTEMPTS=%d", mountpointAttempts)))
}

// mountpointTTL returns the arguments for how long metadata is cached. If the author sets metadata-ttl, that decides.
//
// With a volume that is read-only for everyone, the mount itself changes nothing, so most files stay as they were listed. A cache has
// the client's own default, which is as long. A file that does not exist is looked up again after a second, because programs wait
// for files to appear; that still saves the second lookup of a file that is created.
func mountpointTTL(in Invocation) []string {
	if _, given := volume.FindOption(in.Options, "metadata-ttl"); given {
		return nil
	}
	_, sized := volume.FindOption(in.Options, "max-cache-size")
	cached := in.Cache || sized
	switch {
	case in.Consistency == volume.ConsistencyCloseToOpen && cached:
		return []string{argument("metadata-ttl", mountpointMinimal)}
	case in.Consistency == volume.ConsistencyRelaxed, in.Consistency == "" && in.ReadOnly && !cached:
		ttl := strconv.Itoa(int(volume.RelaxedTTL.Seconds()))
		return append([]string{argument("metadata-ttl", ttl)}, in.unlessGiven("negative-metadata-ttl", "1")...)
	}
	return nil
}

// mountpointContradiction returns an option that says the opposite of a volume's consistency.
func mountpointContradiction(consistency string, given map[string]string) (name string) {
	ttl, negative := given["metadata-ttl"], given["negative-metadata-ttl"]
	switch consistency {
	case volume.ConsistencyRelaxed:
		if ttl == mountpointMinimal {
			return "metadata-ttl"
		}
	case volume.ConsistencyCloseToOpen:
		if ttl != "" && ttl != mountpointMinimal {
			return "metadata-ttl"
		}
		if negative != "" && negative != mountpointMinimal && negative != "0" {
			return "negative-metadata-ttl"
		}
	}
	return ""
}

// changes reports whether a flag that allows changes of data is on for a writable mount.
func changes(options []volume.Option, name string) bool {
	if o, given := volume.FindOption(options, name); given {
		return o.On()
	}
	return name != "incremental-upload"
}

// mountpointAccess follows Mountpoint's doc/CONFIGURATION.md, "IAM permissions": only unlink and rmdir delete; an overwrite is an
// upload. Renames need a directory bucket, whose policies have no actions on objects.
func mountpointAccess(options []volume.Option) policy.Needs {
	return policy.Needs{Delete: changes(options, "allow-delete")}
}

// mountpointRules refuses combinations that Mountpoint refuses or does not work well with.
func mountpointRules(given map[string]string) (name, problem string) {
	for _, n := range []string{"read-part-size", "write-part-size"} {
		if given[n] != "" && given["part-size"] != "" {
			return n, "cannot be combined with part-size; use read-part-size and write-part-size"
		}
	}
	if given["sse-kms-key-id"] != "" && !strings.HasPrefix(given["sse"], "aws:kms") {
		return "sse-kms-key-id", "needs the option sse with aws:kms or aws:kms:dsse"
	}
	if given["rename"] == "true" && (given["allow-delete"] == "false" || given["sse"] != "") {
		return "rename", "cannot be combined with sse or allow-delete=false, without which files cannot be renamed; remove it"
	}
	_, memory := number(given, mountpointMemory, "memory-target")
	if name, parts, free := mountpointParts(given, memory); parts > free {
		return name, fmt.Sprintf("is too large: a memory-target of %d MiB leaves %d MiB, but one part to read and one to write need %d MiB; raise memory-target",
			memory, free/mib, parts/mib)
	}
	return "", ""
}

// mountpointParts returns the bytes of one part to read and one to write, the option for the larger one, and the bytes that a
// memory target in MiB has for them. Mountpoint reserves an eighth of its memory, and at least 128 MiB; from the rest it
// needs one part to read and one for each file that is open for writing (its doc/CONFIGURATION.md).
func mountpointParts(given map[string]string, memory int64) (name string, parts, free int64) {
	readName, read := number(given, 8*mib, "read-part-size", "part-size")
	name, write := number(given, 8*mib, "write-part-size", "part-size")
	if write < read {
		name = readName
	}
	return name, read + write, memory*mib - max(128*mib, memory*mib/8)
}

// number returns the value and the name of the first option that is set.
func number(given map[string]string, byDefault int64, names ...string) (string, int64) {
	for _, n := range names {
		if v, err := strconv.ParseInt(given[n], 10, 64); err == nil {
			return n, v
		}
	}
	return "", byDefault
}

// mountpointTarget returns the memory target in MiB for a limit in bytes. It leaves a fifth of the limit, and at least
// mountpointRoom.
func mountpointTarget(limit uint64) int64 {
	if limit == 0 {
		return mountpointMemory
	}
	all := int64(min(limit/uint64(mib), 2*mountpointMost))
	return min(max(all-max(mountpointRoom, (all+4)/5), mountpointLeast), mountpointMost)
}

// mountpointLimitFor returns the lowest limit in MiB for a memory target in MiB.
func mountpointLimitFor(target int64) int64 { return max(target+mountpointRoom, (target*5+3)/4) }

// mountpointFits checks a memory limit against the options that use memory.
func mountpointFits(limit uint64, given map[string]string) (problem string) {
	fits := mountpointTarget(limit)
	if _, wants := number(given, 0, "memory-target"); wants != 0 {
		if wants > fits {
			return fmt.Sprintf("is too low for the mount option memory-target=%d; set at least %dMi, or omit the option",
				wants, mountpointLimitFor(wants))
		}
		return ""
	}
	if name, parts, free := mountpointParts(given, fits); parts > free {
		return fmt.Sprintf("is too low for the mount option %s: it allows a memory-target of %d MiB, which leaves %d MiB, but one part to read and one to write "+
			"need %d MiB",
			name, fits, free/mib, parts/mib)
	}
	return ""
}

// mountpointLeastLimit returns the lowest limit in bytes that passes mountpointFits.
func mountpointLeastLimit(given map[string]string) uint64 {
	_, target := number(given, 0, "memory-target")
	if target == 0 {
		_, parts, _ := mountpointParts(given, mountpointLeast)
		room := (parts + mib - 1) / mib
		target = max(mountpointLeast, room+128, (room*8+6)/7)
	}
	return uint64(mountpointLimitFor(target) * mib)
}
