package volume

import (
	"errors"
	"strings"
)

// Keys of k8s-csi-s3.
const (
	legacyBucket   = "bucket"
	legacyCapacity = "capacity"
	legacyMounter  = "mounter"
	legacyOptions  = "options"
)

// k8sS3Parameters are what k8s-csi-s3 reads of a StorageClass, and leaves in the volume contexts of its volumes.
func k8sS3Parameters() []ForeignDoc {
	mounter := ForeignDoc{Origin: OriginK8sS3, Name: legacyMounter, Outcome: Mapped,
		Here: "rclone is client: rclone. There is no client geesefs or s3fs: write client: rclone, which writes files as freely as they do, or client: mountpoint-s3, which streams large ones (for a PersistentVolume that exists, mountOptions: [client=rclone])"}
	mounter.read = func(c *conversion, k legacyKey) {
		if c.chosen {
			c.ignore(k, "the mount option client stands in its place")
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
		{Origin: OriginK8sS3, Name: legacyBucket, Outcome: Mapped, Here: "bucketName of a StorageClass; of a volume it has to be the bucket of the handle", read: func(c *conversion, k legacyKey) {
			switch {
			case c.scope == ScopeContext:
				c.bucket = k
			case k.value != "":
				c.put(keyBucketName, k)
			}
		}},
		mounter,
		{Origin: OriginK8sS3, Name: legacyOptions, Outcome: Mapped, Here: "one by one, as the tables of the mounters' options say; empty it means nothing", read: readLegacyOptions},
		{Origin: OriginK8sS3, Name: legacyCapacity, Outcome: Same, Here: "nothing: S3 has no sizes", only: ScopeContext, read: func(*conversion, legacyKey) {}},
	}
}

// k8sS3Secrets are the keys of its secrets.
func k8sS3Secrets() []ForeignDoc {
	return []ForeignDoc{
		{Origin: OriginSecret, Name: "accessKeyID", Outcome: Same, Here: "the access key"},
		{Origin: OriginSecret, Name: "secretAccessKey", Outcome: Same, Here: "the secret of the access key"},
		{Origin: OriginSecret, Name: "endpoint", Outcome: Checked, claim: ClaimEndpoint, Here: "it has to be the endpoint of the volume's backend, or any of Amazon S3's own where that is AWS: keys never go where a secret says"},
		{Origin: OriginSecret, Name: "region", Outcome: Checked, claim: ClaimRegion, Here: "it has to be the region of the volume's backend; with AWS it means nothing, the bucket's own is found out"},
		{Origin: OriginSecret, Name: "insecure", Outcome: Checked, claim: ClaimInsecure, Here: "certificates are always checked: true has to stand beside a backend with a caFile, or without TLS"},
	}
}

// splitLegacyOptions splits the options of k8s-csi-s3: words between white space, of which double quotes can hold some.
// Options begin with a dash; what follows one without is its value. Those of s3fs, "-o name=value,name", come one by one.
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
			c.ignore(k, "the mount option client stands in their place: write mountOptions for that client")
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

// seeMigrating is the advice for options that are only refused: the page says for each of them what to write instead.
const seeMigrating = "see docs/migrating.md#options-that-are-refused"

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
	attribute("vfs-cache-mode", "", "full is the mount option read-cache; writes is so with every mount; of minimal and off the node's log says that they mean nothing", func(c *conversion, k legacyKey) {
		switch k.value {
		case "full":
			c.option("read-cache", legacyKey{field: k.field, name: k.name, value: "true", hasValue: true})
		case "writes":
		default:
			c.ignore(k, "what is written always goes through a cache on the node's disk")
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
		Here: "addressing of the volume's backend has to be path; with AWS it means nothing"})
	add(Same, "so with every mount", "allow-other", "allow-non-empty", "daemon", "default-permissions", "s3-no-check-bucket", "s3-env-auth")
	add(Ignored, "the client has a value of its own", "vfs-cache-max-age", "vfs-cache-poll-interval", "vfs-cache-min-free-space", "buffer-size", "attr-timeout", "poll-interval",
		"checkers", "fast-list", "max-read-ahead", "s3-upload-concurrency", "s3-upload-cutoff", "s3-provider", "no-modtime", "no-checksum", "timeout", "contimeout", "retries", "low-level-retries")
	add(Ignored, "the client's output is in the log of the mount's helper; the mount option debug says more", "log-level", "log-file", "v", "vv", "verbose", "quiet", "stats")
	add(Ignored, "caches lie below the driver's --cache-dir", "cache-dir")
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
			c.refuse(k, "%s is given twice", k.name)
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

// otherMounterOptions refuses the options of geesefs and s3fs, which are not clients here. The page has what to write instead.
func otherMounterOptions() []ForeignDoc {
	return []ForeignDoc{{Origin: OriginOtherMounter, Name: others, Outcome: Refused, Here: seeMigrating}}
}
