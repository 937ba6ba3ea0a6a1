package volume

import (
	"errors"
	"fmt"
	"math/big"
	"slices"
	"strconv"
	"strings"

	"github.com/s3-csi/s3-csi-driver/pkg/credentials"
)

// awsAttributes are the volume attributes of the AWS Mountpoint S3 CSI driver, version 2 (its docs/CONFIGURATION.md and
// docs/CACHING.md).
func awsAttributes() []ForeignDoc {
	row := func(name string, outcome Outcome, here string) ForeignDoc {
		return ForeignDoc{Origin: OriginAWSAttribute, Name: name, Outcome: outcome, Here: here}
	}
	mapped := func(name, here string, read func(c *conversion, k legacyKey)) ForeignDoc {
		return ForeignDoc{Origin: OriginAWSAttribute, Name: name, Outcome: Mapped, Here: here, read: read}
	}
	medium := row("cacheEmptyDirMedium", Refused, "with Memory: caches lie on the node's disk; leave it out, and put the driver's --cache-dir on a tmpfs where they may not; empty it means nothing")
	medium.read = func(c *conversion, k legacyKey) {
		if k.value != "" {
			c.refuse(k, "%s is not supported: %s", k.name, medium.Here)
		}
	}
	const noPods, noProxy = "clients are no pods", "a volume may not choose where its data goes, and clients use no proxy: leave it out, and give the backend an endpoint that nodes reach without one"
	return []ForeignDoc{
		row(keyBucketName, Same, "the bucket; for an access point its alias (…-s3alias), not its ARN; no S3 URI"),
		mapped("authenticationSource", "driver is credentials: driver, and pod is credentials: workload, with the role that roleARN of the volume or workloadRoleARN of the backend names: the annotation eks.amazonaws.com/role-arn of service accounts cannot be read", awsSource),
		row("stsRegion", Ignored, "sessions are asked for where sts of the backend says"),
		mapped(keyCache, `emptyDir and ephemeral are cache: "true", on the node's disk below the driver's --cache-dir`, awsCache),
		mapped("cacheEmptyDirSizeLimit", "cacheSize, beside cache: emptyDir; else nothing", func(c *conversion, k legacyKey) { c.cacheLimit = k }),
		medium,
		row("cacheEphemeralStorageClassName", Ignored, "caches lie below the driver's --cache-dir"),
		row("cacheEphemeralStorageResourceRequest", Ignored, "caches lie on the node's disk, where cacheSize bounds them; write cacheSize if 1Gi is not what you want"),
		row("mountpointPodServiceAccountName", Ignored, noPods),
		row("mountpointContainerResourcesRequestsCpu", Ignored, noPods+"; cpuWeight is the share of a mount on a busy node"),
		row("mountpointContainerResourcesRequestsMemory", Ignored, noPods+"; memoryLimit bounds the memory of a mount"),
		row("mountpointContainerResourcesLimitsCpu", Ignored, noPods+"; cpuWeight is the share of a mount on a busy node"),
		mapped("mountpointContainerResourcesLimitsMemory", "memoryLimit", func(c *conversion, k legacyKey) { c.putBytes(keyMemoryLimit, k) }),
		row("mountpointEnv.HTTPS_PROXY", Refused, noProxy),
		row("mountpointEnv.NO_PROXY", Refused, noProxy),
	}
}

// attributeOptions are mount options of static volumes that stand for attributes of this driver: Kubernetes lets the mount options
// of a PersistentVolume be changed, and its attributes not.
func attributeOptions() []ForeignDoc {
	return []ForeignDoc{
		{Origin: OriginOption, Name: "client", Outcome: Mapped, Here: "client; in the place of mounter and options of k8s-csi-s3, which are ignored beside it", key: keyClient},
		{Origin: OriginOption, Name: "backend", Outcome: Mapped, Here: "backend", key: keyBackend},
		{Origin: OriginOption, Name: "role-arn", Outcome: Mapped, Here: "roleARN", key: keyRoleARN},
	}
}

// awsOptions are the options of Mountpoint's command line, version 1.24 (its mountpoint-s3/src/cli.rs), and what the AWS driver
// makes of its own accord of mount options (its pkg/mountpoint/args.go).
func awsOptions() []ForeignDoc {
	var rows []ForeignDoc
	add := func(outcome Outcome, here string, names ...string) {
		for _, name := range names {
			rows = append(rows, ForeignDoc{Origin: OriginAWSOption, Name: name, Outcome: outcome, Here: here})
		}
	}
	mapped := func(name, key, here string, read func(c *conversion, k legacyKey)) {
		if here == "" {
			here = key
		}
		rows = append(rows, ForeignDoc{Origin: OriginAWSOption, Name: name, Outcome: Mapped, Here: here, key: key, read: read})
	}
	checked := func(name string, claim ClaimKind, here string) {
		rows = append(rows, ForeignDoc{Origin: OriginAWSOption, Name: name, Outcome: Checked, Here: here, claim: claim})
	}
	mapped("prefix", keyPrefix, "", nil)
	mapped("region", keyRegion, "", nil)
	mapped("uid", keyUID, "", nil)
	mapped("gid", keyGID, "", nil)
	mapped("dir-mode", keyDirMode, "", nil)
	mapped("file-mode", keyFileMode, "", nil)
	mapped("expected-bucket-owner", keyExpectedBucketOwner, "", nil)
	mapped("read-only", keyReadOnly, `readOnly: "true"`, func(c *conversion, k legacyKey) { c.putFlag(keyReadOnly, k) })
	mapped("cache", keyCache, `cache: "true"; where the cache lies is the driver's matter`, func(c *conversion, k legacyKey) {
		c.put(keyCache, legacyKey{field: k.field, name: k.name, value: "true", hasValue: true})
	})
	mapped("max-cache-size", keyCacheSize, "cacheSize, beside a cache; else the client's option of this name, which turns a cache on", func(c *conversion, k legacyKey) { c.maxCache = k })
	checked("endpoint-url", ClaimEndpoint, "it has to be the endpoint of the volume's backend, or any of Amazon S3's own where that is AWS: declare another service as a backend in the driver's config file, and name it with backend")
	checked("force-path-style", ClaimPathStyle, "addressing of the volume's backend has to be path; with AWS it means nothing")
	const changes = "the client's option of this name; when the driver is called " + AWSDriverName + " and the volume names no client it is off unless given, as there"
	add(Passed, changes, "allow-delete", "allow-overwrite")
	add(Passed, "the client's option of this name", "incremental-upload", "infer-content-type", "requester-pays", "transfer-acceleration", "dual-stack", "bucket-type",
		"storage-class", "sse", "sse-kms-key-id", "upload-checksums", "metadata-ttl", "negative-metadata-ttl", "max-threads", "memory-target", "maximum-throughput-gbps",
		"part-size", "read-part-size", "write-part-size", "debug", "log-metrics")
	add(Same, "so with every mount", "allow-other", "foreground")
	add(Same, "nothing, as there", "help", "version")
	add(Ignored, "every user in a pod may use the mount, as dirMode and fileMode say", "allow-root")
	add(Ignored, "the driver unmounts", "auto-unmount")
	add(Ignored, "the driver sets how often requests are tried", "aws-max-attempts")
	add(Ignored, "clients write no log files: their output is in the log of the mount's helper", "log-directory", "no-log")
	add(Ignored, "its output would show session tokens; debug says what the client does", "debug-crt")
	add(Ignored, "the driver sets it", "user-agent-prefix")
	const keys = "requests are signed with what credentials of the volume names: leave it out, and write credentials (and a secret, or roleARN)"
	add(Refused, keys, "profile", "no-sign-request")
	add(Refused, "write the certificates into caFile of the volume's backend", "ca-bundle")
	add(Refused, `a shared cache would put the volume's content where others can read it: write cache: "true" and cacheSize`, "cache-xz")
	add(Refused, "network interfaces belong to the node: leave it out", "bind")
	add(Refused, "a volume may not choose where data is sent: leave it out; the driver's metrics are in docs/metrics.md", "otlp-endpoint", "otlp-export-interval")
	add(Refused, "write each option by itself and under its own name", "o")
	return rows
}

func awsSource(c *conversion, k legacyKey) {
	source := map[string]string{"driver": credentials.SourceDriver, "pod": credentials.SourceWorkload}[k.value]
	switch {
	case source != "":
		k.value = source
		c.put(keyCredentials, k)
	case k.value != "":
		c.refuse(k, "%q is neither driver nor pod; write credentials: %s, %s or %s instead", printable(k.value), credentials.SourceDriver, credentials.SourceSecret, credentials.SourceWorkload)
	}
}

func awsCache(c *conversion, k legacyKey) {
	switch k.value {
	case "":
		return
	case "emptyDir", "ephemeral":
		k.value = "true"
	}
	c.put(keyCache, k)
}

// finishCache applies the bounds of a cache, if there is one. The smaller bound wins.
func (c *conversion) finishCache() {
	limit, most := c.cacheLimit, c.maxCache
	if c.given[keyCache] != "true" {
		if limit.hasValue {
			c.ignore(limit, "there is no cache: emptyDir beside it")
		}
		if most.field == "" {
			return
		}
		o, err := parseOption(most.option())
		if err != nil {
			c.refuse(most, "%s %w", most.name, err)
			return
		}
		c.options = append(c.options, o)
		return
	}
	var bytes uint64
	if limit.hasValue {
		n, err := kubernetesBytes(limit.value)
		if err != nil {
			c.refuse(limit, "%q %w", printable(limit.value), err)
			return
		}
		bytes = n
	}
	if most.field != "" {
		mib, err := strconv.ParseUint(most.value, 10, 24)
		if err != nil || mib == 0 {
			c.refuse(most, "%s needs a number of MiB", most.name)
			return
		}
		if mib <<= 20; bytes == 0 || mib < bytes {
			limit, bytes = most, mib
		}
	}
	if bytes != 0 {
		limit.value, limit.hasValue = FormatQuantity(bytes), true
		c.put(keyCacheSize, limit)
	}
}

// awsDefaults applies the defaults of the AWS driver: the client is Mountpoint, and objects cannot be changed unless the volume
// allows it.
func (r *Reading) awsDefaults() {
	r.Attributes.Client = "mountpoint-s3"
	for _, name := range []string{"allow-delete", "allow-overwrite"} {
		if !slices.ContainsFunc(r.Options, func(o Option) bool { return o.Name == name }) {
			r.Options = append(r.Options, Option{Name: name, Value: "false", HasValue: true})
		}
	}
}

// readFlags parses the mount flags of a static volume, also in the AWS driver's spellings: "name value", "--name value", white
// space around both, one-letter options.
func readFlags(flags []string, field string) ([]legacyKey, error) {
	words, err := parseFlags(flags, field, readFlag, func(k legacyKey) string { return k.name })
	for i := range words {
		words[i].field = fmt.Sprintf("%s[%d]", field, i)
	}
	return words, err
}

// flags converts the mount flags of a static volume. Flags without a row are options of the client.
func (c *conversion) flags(words []legacyKey) {
	rows := slices.Concat(attributeOptions(), awsOptions())
	for _, k := range words {
		if row, ok := rowNamed(rows, k.name); ok && row.Outcome != Passed {
			c.take(row, k)
			continue
		}
		option, err := parseOption(k.option())
		if err != nil {
			c.refuse(k, "%s %w", k.name, err)
			continue
		}
		c.options = append(c.options, option)
	}
}

// option returns the key in this driver's spelling.
func (k legacyKey) option() string {
	return Option{Name: k.name, Value: k.value, HasValue: k.hasValue}.String()
}

// readFlag parses one mount option like the AWS driver (its pkg/mountpoint/args.go): the name, with or without dashes, ends at the
// first space or equals sign. Errors continue a sentence about the flag.
func readFlag(flag string) (legacyKey, error) {
	if err := checkOptionText(flag); err != nil {
		return legacyKey{}, err
	}
	text := strings.Trim(flag, " ")
	end := strings.IndexAny(text, " =")
	if end < 0 {
		end = len(text)
	}
	k := legacyKey{name: text[:end]}
	if rest := text[end:]; rest != "" {
		k.value, k.hasValue = strings.Trim(rest[1:], " "), true
		if rest[0] == ' ' && strings.HasPrefix(k.value, "-") {
			return legacyKey{}, errors.New("looks like two options; list them one by one")
		}
	}
	if short, ok := strings.CutPrefix(k.name, "-"); ok && len(short) == 1 {
		long, known := map[string]string{"f": "foreground", "d": "debug", "l": "log-directory", "h": "help", "v": "version", "V": "version", "o": "o"}[short]
		if !known {
			return legacyKey{}, errors.New("is not a short option of Mountpoint; use the long name")
		}
		k.name = long
	}
	k.name = strings.TrimPrefix(k.name, "--")
	if !isOptionName(k.name) {
		return legacyKey{}, errors.New("does not start with an option name of a-z, 0-9 and inner dashes")
	}
	return k, nil
}

// putFlag is put for options that are true without a value.
func (c *conversion) putFlag(key string, k legacyKey) {
	if !k.hasValue {
		k.value, k.hasValue = "true", true
	}
	c.put(key, k)
}

// putBytes is put for quantities of Kubernetes.
func (c *conversion) putBytes(key string, k legacyKey) {
	bytes, err := kubernetesBytes(k.value)
	if err != nil {
		c.refuse(k, "%q %w", printable(k.value), err)
		return
	}
	k.value = FormatQuantity(bytes)
	c.put(key, k)
}

const kubernetesQuantity Pattern = `^([0-9]{1,15}(?:\.[0-9]{1,9})?)(Ki|Mi|Gi|Ti|k|K|M|G|T)?$`

// kubernetesBytes parses an amount of bytes in the usual forms of a Kubernetes quantity, such as "1.5Gi" and "500M".
func kubernetesBytes(text string) (uint64, error) {
	m := kubernetesQuantity.FindStringSubmatch(text)
	if m == nil {
		return 0, errors.New("is not an amount of bytes such as 1073741824, 512Mi or 1.5Gi")
	}
	number, ok := new(big.Rat).SetString(m[1])
	unit, err := ParseQuantity("1" + strings.Replace(m[2], "k", "K", 1))
	if !ok || err != nil {
		return 0, errors.New("is not an amount of bytes")
	}
	number.Mul(number, new(big.Rat).SetUint64(unit))
	whole := new(big.Int).Quo(number.Num(), number.Denom())
	if !whole.IsInt64() || whole.Sign() == 0 {
		return 0, errors.New("is out of range")
	}
	return whole.Uint64(), nil
}
