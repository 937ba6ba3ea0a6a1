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
	mounter := ForeignDoc{Origin: OriginK8sS3, Name: legacyMounter, Outcome: Mapped,
		Here: "rclone becomes client: rclone. geesefs and s3fs are not available: set client: rclone, which supports the same writes, or client: mountpoint-s3, which streams large files (in an existing PersistentVolume, mountOptions: [client=rclone])"}
	mounter.read = func(c *conversion, k legacyKey) {
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
			c.refuse(k, "%q is not a client of this driver: %s", printable(k.value), mounter.Here)
		}
	}
	return []ForeignDoc{
		{Origin: OriginK8sS3, Name: legacyBucket, Outcome: Mapped, Here: "bucketName in a StorageClass; in a volume it must be the bucket of the handle", read: func(c *conversion, k legacyKey) {
			switch {
			case c.scope == ScopeContext:
				c.bucket = k
			case k.value != "":
				c.put(keyBucketName, k)
			}
		}},
		mounter,
		{Origin: OriginK8sS3, Name: legacyOptions, Outcome: Mapped, Here: "each option is converted according to the table of its mounter; an empty value is ignored", read: readLegacyOptions},
		{Origin: OriginK8sS3, Name: legacyCapacity, Outcome: Same, Here: "no effect, because S3 has no sizes", only: ScopeContext, read: func(*conversion, legacyKey) {}},
	}
}

// k8sS3Secrets are the keys of its secrets.
func k8sS3Secrets() []ForeignDoc {
	return []ForeignDoc{
		{Origin: OriginSecret, Name: credentials.SecretAccessKeyID, Outcome: Same, Here: "the access key"},
		{Origin: OriginSecret, Name: credentials.SecretSecretAccessKey, Outcome: Same, Here: "the secret access key"},
		{Origin: OriginSecret, Name: "endpoint", Outcome: Checked, claim: ClaimEndpoint, Here: "must be the endpoint of the volume's backend, or one of Amazon S3 if the backend is AWS; a secret never decides where keys are sent"},
		{Origin: OriginSecret, Name: "region", Outcome: Checked, claim: ClaimRegion, Here: "must be the region of the volume's backend; ignored with AWS, where the bucket's region is detected"},
		{Origin: OriginSecret, Name: "insecure", Outcome: Checked, claim: ClaimInsecure, Here: "certificates are always verified; true is accepted only if the backend has a caFile or no TLS"},
	}
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
	var rows []ForeignDoc
	add := func(outcome Outcome, here string, names ...string) {
		for _, name := range names {
			rows = append(rows, ForeignDoc{Origin: OriginRclone, Name: name, Outcome: outcome, Here: here})
		}
	}
	attribute := func(name, key, here string, read func(c *conversion, k legacyKey)) {
		rows = append(rows, ForeignDoc{Origin: OriginRclone, Name: name, Outcome: Mapped, Here: here, key: key, read: read})
	}
	option := func(name, ours string) {
		attribute(name, "", "mount option "+ours, func(c *conversion, k legacyKey) { c.option(ours, k) })
	}
	size := func(name, ours string) {
		attribute(name, "", "mount option "+ours, func(c *conversion, k legacyKey) { c.optionOfSize(ours, k) })
	}
	flag := func(name, ours string) {
		attribute(name, "", "mount option "+ours, func(c *conversion, k legacyKey) {
			if !k.hasValue {
				k.value, k.hasValue = "true", true
			}
			c.option(ours, k)
		})
	}
	attribute("uid", keyUID, keyUID, nil)
	attribute("gid", keyGID, keyGID, nil)
	attribute("dir-perms", keyDirMode, keyDirMode, nil)
	attribute("file-perms", keyFileMode, keyFileMode, nil)
	attribute("read-only", keyReadOnly, `readOnly: "true"`, func(c *conversion, k legacyKey) { c.putFlag(keyReadOnly, k) })
	attribute("vfs-cache-mode", "", "full becomes the mount option read-cache; writes is always on; minimal and off are ignored", func(c *conversion, k legacyKey) {
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
	option("dir-cache-time", "dir-cache-time")
	option("vfs-write-back", "write-back")
	option("transfers", "transfers")
	option("s3-storage-class", "storage-class")
	option("s3-server-side-encryption", "sse")
	option("s3-sse-kms-key-id", "sse-kms-key-id")
	size("vfs-cache-max-size", "cache-size")
	size("vfs-read-ahead", "read-ahead")
	size("s3-chunk-size", "part-size")
	flag("use-server-modtime", "server-mtime")
	flag("s3-directory-markers", "directory-markers")
	rows = append(rows, ForeignDoc{Origin: OriginRclone, Name: "s3-force-path-style", Outcome: Checked, claim: ClaimPathStyle,
		Here: "the volume's backend must have addressing: path; ignored with AWS"})
	add(Same, "always on", "allow-other", "allow-non-empty", "daemon", "default-permissions", "s3-no-check-bucket", "s3-env-auth")
	add(Ignored, "the client has a fixed value", "vfs-cache-max-age", "vfs-cache-poll-interval", "vfs-cache-min-free-space", "buffer-size", "attr-timeout", "poll-interval",
		"checkers", "fast-list", "max-read-ahead", "s3-upload-concurrency", "s3-upload-cutoff", "s3-provider", "no-modtime", "no-checksum", "timeout", "contimeout", "retries", "low-level-retries")
	add(Ignored, "the client's output is in the log of the mount's helper; use the mount option debug for more", "log-level", "log-file", "v", "vv", "verbose", "quiet", "stats")
	add(Ignored, "caches are below the driver's --cache-dir", "cache-dir")
	add(Refused, seeMigrating, others)
	return rows
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
	for _, other := range c.options {
		if other.Name == name {
			c.refuse(k, "%s is set twice", k.name)
			return
		}
	}
	c.options = append(c.options, o)
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
