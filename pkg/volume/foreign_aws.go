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
	const (
		noMedium = "value Memory: caches are on the node's disk; remove it, or have the driver's --cache-dir on a tmpfs; an empty value is ignored"
		noPods   = "clients do not run in pods"
		noCPU    = noPods + "; cpuWeight sets a mount's share of the CPU on a busy node"
		noProxy  = "a volume cannot decide where its data is sent; remove it, and set proxy of the backend in the driver's config file"
	)
	t := foreignRows{origin: OriginAWSAttribute}
	t.all(Same, "the bucket; for an access point its alias (…-s3alias), not its ARN; not an S3 URI", keyBucketName)
	t.mapped("authenticationSource", "driver becomes credentials: driver, pod becomes credentials: workload with roleARN of the volume or "+
		"workloadRoleARN of the backend; the annotation eks.amazonaws.com/role-arn of service accounts is not read", awsSource)
	t.all(Ignored, "the backend's sts decides the region of STS", "stsRegion")
	t.mapped(keyCache, `emptyDir and ephemeral become cache: "true", on the node's disk below the driver's --cache-dir`, awsCache)
	t.mapped("cacheEmptyDirSizeLimit", "cacheSize, with cache: emptyDir; otherwise ignored", func(c *conversion, k legacyKey) { c.cacheLimit = k })
	t.add(ForeignDoc{Name: "cacheEmptyDirMedium", Outcome: Refused, Here: noMedium, read: func(c *conversion, k legacyKey) {
		if k.value != "" {
			c.refuse(k, "%s is not supported: %s", k.name, noMedium)
		}
	}})
	t.all(Ignored, "caches are below the driver's --cache-dir", "cacheEphemeralStorageClassName")
	t.all(Ignored, "caches are on the node's disk and limited by cacheSize; set cacheSize if the default of 1Gi does not fit",
		"cacheEphemeralStorageResourceRequest")
	t.all(Ignored, noPods, "mountpointPodServiceAccountName")
	t.all(Ignored, noCPU, "mountpointContainerResourcesRequestsCpu")
	t.all(Ignored, noPods+"; memoryLimit limits the memory of a mount", "mountpointContainerResourcesRequestsMemory")
	t.all(Ignored, noCPU, "mountpointContainerResourcesLimitsCpu")
	t.mapped("mountpointContainerResourcesLimitsMemory", "memoryLimit", func(c *conversion, k legacyKey) { c.putBytes(keyMemoryLimit, k) })
	t.all(Refused, noProxy, "mountpointEnv.HTTPS_PROXY", "mountpointEnv.NO_PROXY")
	return t.rows
}

// attributeOptions are mount options of static volumes that set attributes of this driver, because in Kubernetes the mount options of a
// PersistentVolume can be changed, but not its attributes.
func attributeOptions() []ForeignDoc {
	t := foreignRows{origin: OriginOption}
	t.add(ForeignDoc{Name: "client", Outcome: Mapped, key: keyClient,
		Here: "client; replaces mounter and options of k8s-csi-s3, which are then ignored"})
	t.renamed("backend", keyBackend)
	t.renamed("role-arn", keyRoleARN)
	return t.rows
}

// awsOptions are the options of Mountpoint's command line, version 1.24 (its mountpoint-s3/src/cli.rs), and the conversions of mount
// options by the AWS driver (its pkg/mountpoint/args.go).
func awsOptions() []ForeignDoc {
	const (
		passed  = "the client's option of this name"
		changes = passed + "; if the driver's name is " + AWSDriverName + " and the volume names no client, the default is false, as in the AWS driver"
		keys    = "the volume's credentials decide how requests are signed; remove it, and set credentials (and a secret, or roleARN)"
	)
	t := foreignRows{origin: OriginAWSOption}
	t.mapped("prefix", keyPrefix, func(c *conversion, k legacyKey) {
		if strings.Contains(k.value, ",") {
			c.refuse(k, "prefix contains a comma; list each option separately, or set the attribute prefix to a prefix with a comma")
			return
		}
		c.put(keyPrefix, k)
	})
	t.renamed("region", keyRegion)
	t.renamed("uid", keyUID)
	t.renamed("gid", keyGID)
	t.renamed("dir-mode", keyDirMode)
	t.renamed("file-mode", keyFileMode)
	t.renamed("expected-bucket-owner", keyExpectedBucketOwner)
	t.mapped("read-only", `readOnly: "true"`, readOnlyFlag)
	t.mapped("cache", `cache: "true"; the driver chooses the directory`, func(c *conversion, k legacyKey) {
		if !k.hasValue || strings.HasPrefix(k.value, "/") {
			k.value, k.hasValue = "true", true
		}
		c.put(keyCache, k)
	})
	t.mapped("max-cache-size", "cacheSize, with a cache; otherwise the client's option of this name, which enables a cache",
		func(c *conversion, k legacyKey) { c.maxCache = k })
	t.checked("endpoint-url", ClaimEndpoint, "must be the endpoint of the volume's backend, or one of Amazon S3 if the backend is AWS; for another service, "+
		"declare a backend in the driver's config file and set backend to its name")
	t.checked("force-path-style", ClaimPathStyle, "the volume's backend must have addressing: path; ignored with AWS")
	t.all(Passed, changes, "allow-delete", "allow-overwrite")
	t.all(Passed, passed, "incremental-upload", "infer-content-type", "requester-pays", "transfer-acceleration", "dual-stack", "bucket-type", "storage-class",
		"sse", "sse-kms-key-id", "upload-checksums", "metadata-ttl", "negative-metadata-ttl", "max-threads", "memory-target", "maximum-throughput-gbps",
		"part-size", "read-part-size", "write-part-size", "debug", "log-metrics")
	t.all(Same, "always on", "allow-other", "foreground")
	t.all(Same, "no effect, as in the AWS driver", "help", "version")
	t.all(Ignored, "every user in a pod can access the mount, within dirMode and fileMode", "allow-root")
	t.all(Ignored, "the driver unmounts", "auto-unmount")
	t.all(Ignored, "the driver sets the number of retries", "aws-max-attempts")
	t.all(Ignored, "clients write no log files; their output is in the log of the mount's helper", "log-directory", "no-log")
	t.all(Ignored, "its output would contain session tokens; use debug instead", "debug-crt")
	t.all(Ignored, "the driver sets it", "user-agent-prefix")
	t.all(Refused, keys, "profile", "no-sign-request")
	t.all(Refused, "put the certificates into caFile of the volume's backend", "ca-bundle")
	t.all(Refused, `a shared cache would expose the volume's content to others; set cache: "true" and cacheSize`, "cache-xz")
	t.all(Refused, "a volume cannot choose network interfaces of the node; remove it", "bind")
	t.all(Refused, "a volume cannot decide where data is sent; remove it; the driver's metrics are in docs/reference/metrics.md", "otlp-endpoint",
		"otlp-export-interval")
	t.all(Refused, "list each option separately and under its own name", "o")
	return t.rows
}

// readOnlyFlag sets readOnly, which is true without a value.
func readOnlyFlag(c *conversion, k legacyKey) {
	if !k.hasValue {
		k.value, k.hasValue = "true", true
	}
	c.put(keyReadOnly, k)
}

func awsSource(c *conversion, k legacyKey) {
	source := map[string]string{"driver": credentials.SourceDriver, "pod": credentials.SourceWorkload}[k.value]
	switch {
	case source != "":
		k.value = source
		c.put(keyCredentials, k)
	case k.value != "":
		c.refuse(k, "%q is neither driver nor pod; set credentials to %s, %s or %s instead", printable(k.value), credentials.SourceDriver,
			credentials.SourceSecret, credentials.SourceWorkload)
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
			c.ignore(limit, "has no effect without cache: emptyDir")
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
		if _, given := FindOption(r.Options, name); !given {
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
		written := strings.Trim(rest[1:], " ")
		switch value, err := unquote(written); {
		case err != nil:
			return legacyKey{}, err
		case rest[0] == ' ' && strings.HasPrefix(written, "-"):
			return legacyKey{}, errors.New("looks like two options; list them one by one")
		case rest[0] == ' ' && strings.HasPrefix(written, "="):
			return legacyKey{}, errors.New("contains a space before the equals sign")
		default:
			k.value, k.hasValue = value, true
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
	return k, checkOptionName(k.name)
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
