package volume

import "strings"

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
