package volume

import (
	"errors"
	"strings"

	"github.com/s3-csi/s3-csi-driver/pkg/credentials"
)

// Keys of k8s-csi-s3.
const (
	legacyBucket   = "bucket"
	legacyCapacity = "capacity"
	legacyMounter  = "mounter"
	legacyOptions  = "options"
)

// k8sS3Parameters are the StorageClass parameters of k8s-csi-s3. It copies them to the volume contexts of its volumes.
func k8sS3Parameters() []ForeignDoc {
	t := foreignRows{origin: OriginK8sS3}
	t.mapped(legacyBucket, "bucketName in a StorageClass; in a volume it must be the bucket of the handle", func(c *conversion, k legacyKey) {
		switch {
		case c.scope == ScopeContext:
			c.bucket = k
		case k.value != "":
			c.put(keyBucketName, k)
		}
	})
	t.mapped(legacyMounter, mounterHere, readMounter)
	t.mapped(legacyOptions, "each option is converted according to the table of its mounter; an empty value is ignored", readLegacyOptions)
	t.add(ForeignDoc{Name: legacyCapacity, Outcome: Same, Here: "no effect, because S3 has no sizes", only: ScopeContext, read: func(*conversion, legacyKey) {}})
	return t.rows
}

const mounterHere = "rclone becomes client: rclone. geesefs and s3fs are not available: set client: rclone, which supports the same writes, or " +
	"client: mountpoint-s3, which streams large files (in an existing PersistentVolume, mountOptions: [client=rclone])"

func readMounter(c *conversion, k legacyKey) {
	if c.chosen {
		c.ignore(k, "replaced by the mount option client")
		return
	}
	switch k.value {
	case "":
	case "rclone", "mountpoint-s3":
		c.put(keyClient, k)
	case "mountpoint":
		k.value = "mountpoint-s3"
		c.put(keyClient, k)
	default:
		c.refuse(k, "%q is not a client of this driver: %s", printable(k.value), mounterHere)
	}
}

// k8sS3Secrets are the keys of its secrets.
func k8sS3Secrets() []ForeignDoc {
	t := foreignRows{origin: OriginSecret}
	t.all(Same, "the access key", credentials.SecretAccessKeyID)
	t.all(Same, "the secret access key", credentials.SecretSecretAccessKey)
	t.checked("endpoint", ClaimEndpoint, "must be the endpoint of the volume's backend, or one of Amazon S3 if the backend is AWS; a secret never decides "+
		"where keys are sent")
	t.checked("region", ClaimRegion, "must be the region of the volume's backend; ignored with AWS, where the bucket's region is detected")
	t.checked("insecure", ClaimInsecure, "certificates are always verified; true is accepted only if the backend has a caFile or no TLS")
	return t.rows
}

// splitLegacyOptions splits the options of k8s-csi-s3: words that are separated by white space, which double quotes can contain. A word with
// a dash is an option, the following word without a dash is its value. Options of s3fs, "-o name=value,name", are split at commas.
func splitLegacyOptions(text string) []legacyKey {
	var words []legacyKey
	afterO := false
	for _, w := range splitQuoted(text) {
		switch last := len(words) - 1; {
		case w == "-o":
			afterO = true
			continue
		case afterO:
			for part := range strings.SplitSeq(w, ",") {
				name, value, has := strings.Cut(part, "=")
				words = append(words, legacyKey{name: name, value: value, hasValue: has})
			}
		case strings.HasPrefix(w, "-"):
			name, value, has := strings.Cut(strings.TrimLeft(w, "-"), "=")
			words = append(words, legacyKey{name: name, value: value, hasValue: has})
		case last >= 0 && !words[last].hasValue:
			words[last].value, words[last].hasValue = w, true
		default:
			words = append(words, legacyKey{name: w})
		}
		afterO = false
	}
	return words
}

func splitQuoted(text string) []string {
	var (
		words          []string
		b              strings.Builder
		inside, quoted bool // a word; double quotes
		escaped        bool
	)
	for _, r := range text {
		switch {
		case escaped:
			b.WriteRune(r)
			escaped = false
		case quoted && r == '\\':
			escaped = true
		case r == '"':
			quoted, inside = !quoted, true
		case !quoted && strings.ContainsRune(" \t\n\v\f\r", r):
			if inside {
				words = append(words, b.String())
				b.Reset()
			}
			inside = false
		default:
			b.WriteRune(r)
			inside = true
		}
	}
	if inside {
		words = append(words, b.String())
	}
	return words
}

// readLegacyOptions reads options by the table of the volume's mounter.
func readLegacyOptions(c *conversion, k legacyKey) {
	if c.chosen {
		if k.value != "" {
			c.ignore(k, "replaced by the mount option client; set mountOptions for that client")
		}
		return
	}
	rows := otherMounterOptions() // k8s-csi-s3 uses geesefs if no mounter is named
	if c.mounter == "rclone" {
		rows = rcloneOptions()
	}
	for _, l := range splitLegacyOptions(k.value) {
		if row, ok := rowNamed(rows, l.name); ok {
			l.field, l.name = k.field, printable(l.name)
			c.take(row, l)
		}
	}
}

// seeMigrating is the advice for refused options: the page lists the replacement of each.
const seeMigrating = "see docs/reference/migrating-settings.md#options-that-are-refused"

// rcloneOptions are those of rclone's mount (its cmd/mountlib, vfs/vfscommon and backend/s3) that volumes of k8s-csi-s3 are likely
// to have.
func rcloneOptions() []ForeignDoc {
	t := foreignRows{origin: OriginRclone}
	convert := func(name, ours string, convert func(c *conversion, name string, k legacyKey)) {
		t.mapped(name, "mount option "+ours, func(c *conversion, k legacyKey) { convert(c, ours, k) })
	}
	t.renamed("uid", keyUID)
	t.renamed("gid", keyGID)
	t.renamed("dir-perms", keyDirMode)
	t.renamed("file-perms", keyFileMode)
	t.mapped("read-only", `readOnly: "true"`, readOnlyFlag)
	t.mapped("vfs-cache-mode", "full becomes the mount option read-cache; writes is always on; minimal and off are ignored", func(c *conversion, k legacyKey) {
		switch k.value {
		case "full":
			c.option("read-cache", legacyKey{field: k.field, name: k.name, value: "true", hasValue: true})
		case "writes":
		case "minimal", "off":
			c.ignore(k, "writes always go through a cache on the node's disk")
		default:
			c.refuse(k, "%s is not off, minimal, writes or full", k.name)
		}
	})
	convert("dir-cache-time", "dir-cache-time", (*conversion).option)
	convert("vfs-write-back", "write-back", (*conversion).option)
	convert("transfers", "transfers", (*conversion).option)
	convert("s3-storage-class", "storage-class", (*conversion).option)
	convert("s3-server-side-encryption", "sse", (*conversion).option)
	convert("s3-sse-kms-key-id", "sse-kms-key-id", (*conversion).option)
	convert("vfs-cache-max-size", "cache-size", (*conversion).optionOfSize)
	convert("vfs-read-ahead", "read-ahead", (*conversion).optionOfSize)
	convert("s3-chunk-size", "part-size", (*conversion).optionOfSize)
	convert("use-server-modtime", "server-mtime", (*conversion).optionOfFlag)
	convert("s3-directory-markers", "directory-markers", (*conversion).optionOfFlag)
	t.checked("s3-force-path-style", ClaimPathStyle, "the volume's backend must have addressing: path; ignored with AWS")
	t.all(Same, "always on", "allow-other", "allow-non-empty", "daemon", "default-permissions", "s3-no-check-bucket", "s3-env-auth")
	t.all(Ignored, "the client has a fixed value", "vfs-cache-max-age", "vfs-cache-poll-interval", "vfs-cache-min-free-space", "buffer-size", "attr-timeout",
		"poll-interval", "checkers", "fast-list", "max-read-ahead", "s3-upload-concurrency", "s3-upload-cutoff", "s3-provider", "no-modtime", "no-checksum",
		"timeout", "contimeout", "retries", "low-level-retries")
	t.all(Ignored, "the client's output is in the log of the mount's helper; use the mount option debug for more", "log-level", "log-file", "v", "vv",
		"verbose", "quiet", "stats")
	t.all(Ignored, "caches are below the driver's --cache-dir", "cache-dir")
	t.all(Refused, seeMigrating, others)
	return t.rows
}

// option adds an option for the client.
func (c *conversion) option(name string, k legacyKey) {
	if !k.hasValue {
		c.refuse(k, "%s needs a value", k.name)
		return
	}
	o, err := parseOption(name + "=" + k.value)
	if err == nil && strings.Contains(o.Value, ",") {
		err = errors.New("contains a comma in its value")
	}
	if err != nil {
		c.refuse(k, "%s %w", k.name, err)
		return
	}
	if _, twice := FindOption(c.options, name); twice {
		c.refuse(k, "%s is set twice", k.name)
		return
	}
	c.options = append(c.options, o)
}

// optionOfFlag is option for flags, which are true without a value.
func (c *conversion) optionOfFlag(name string, k legacyKey) {
	if !k.hasValue {
		k.value, k.hasValue = "true", true
	}
	c.option(name, k)
}

const rcloneSize Pattern = `^([1-9][0-9]{0,11})([KMGT]?)(i?B?)$`

// optionOfSize is option for sizes of rclone: powers of 1024, and KiB without a unit.
func (c *conversion) optionOfSize(name string, k legacyKey) {
	m := rcloneSize.FindStringSubmatch(k.value)
	if m == nil || m[2] == "" && m[3] != "" {
		c.refuse(k, "%s needs an amount such as 512Mi or 10Gi", k.name)
		return
	}
	unit := m[2]
	if unit == "" {
		unit = "K"
	}
	k.value = m[1] + unit + "i"
	c.option(name, k)
}

// otherMounterOptions refuses the options of geesefs and s3fs, which are not clients of this driver.
func otherMounterOptions() []ForeignDoc {
	return []ForeignDoc{{Origin: OriginOtherMounter, Name: others, Outcome: Refused, Here: seeMigrating}}
}
