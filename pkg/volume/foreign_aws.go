package volume

import (
	"errors"
	"fmt"
	"math/big"
	"slices"
	"strconv"
	"strings"

	"github.com/s3-csi/s3-csi-driver/pkg/credentials"
	"github.com/s3-csi/s3-csi-driver/pkg/fault"
)

// awsAttributes are the volume attributes of the AWS Mountpoint S3 CSI driver, version 2 (its docs/CONFIGURATION.md and
// docs/CACHING.md).
func awsAttributes() []ForeignDoc {
	row := func(name string, outcome Outcome, here string) ForeignDoc {
		return ForeignDoc{Origin: OriginAWSAttribute, Name: name, Outcome: outcome, Here: here}
	}
	mapped := func(name, here string, read func(t *translation, w word)) ForeignDoc {
		return ForeignDoc{Origin: OriginAWSAttribute, Name: name, Outcome: Mapped, Here: here, read: read}
	}
	medium := row("cacheEmptyDirMedium", Refused, "with Memory: caches lie on the node's disk; leave it out, and put the driver's --cache-dir on a tmpfs where they may not; empty it means nothing")
	medium.read = func(t *translation, w word) {
		if w.value != "" {
			t.refuse(w, "%s is not taken over: %s", w.name, medium.Here)
		}
	}
	const noPods, noProxy = "clients are no pods", "a volume may not choose where its data goes, and clients use no proxy: leave it out, and give the backend an endpoint that nodes reach without one"
	return []ForeignDoc{
		row(keyBucketName, Same, "the bucket; for an access point its alias (…-s3alias), not its ARN; no S3 URI"),
		mapped("authenticationSource", "driver is credentials: driver, and pod is credentials: workload, with the role that roleARN of the volume or workloadRoleARN of the backend names: the annotation eks.amazonaws.com/role-arn of service accounts cannot be read", awsSource),
		row("stsRegion", Ignored, "sessions are asked for where sts of the backend says"),
		mapped(keyCache, `emptyDir and ephemeral are cache: "true", on the node's disk below the driver's --cache-dir`, awsCache),
		mapped("cacheEmptyDirSizeLimit", "cacheSize, beside cache: emptyDir; else nothing", func(t *translation, w word) { t.cacheLimit = w }),
		medium,
		row("cacheEphemeralStorageClassName", Ignored, "caches lie below the driver's --cache-dir"),
		row("cacheEphemeralStorageResourceRequest", Ignored, "caches lie on the node's disk, where cacheSize bounds them; write cacheSize if 1Gi is not what you want"),
		row("mountpointPodServiceAccountName", Ignored, noPods),
		row("mountpointContainerResourcesRequestsCpu", Ignored, noPods+"; cpuWeight is the share of a mount on a busy node"),
		row("mountpointContainerResourcesRequestsMemory", Ignored, noPods+"; memoryLimit bounds the memory of a mount"),
		row("mountpointContainerResourcesLimitsCpu", Ignored, noPods+"; cpuWeight is the share of a mount on a busy node"),
		mapped("mountpointContainerResourcesLimitsMemory", "memoryLimit", func(t *translation, w word) { t.putBytes(keyMemoryLimit, w) }),
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
	mapped := func(name, key, here string, read func(t *translation, w word)) {
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
	mapped("read-only", keyReadOnly, `readOnly: "true"`, func(t *translation, w word) { t.putFlag(keyReadOnly, w) })
	mapped("cache", keyCache, `cache: "true"; where the cache lies is the driver's matter`, func(t *translation, w word) {
		t.put(keyCache, word{field: w.field, name: w.name, value: "true", hasValue: true})
	})
	mapped("max-cache-size", keyCacheSize, "cacheSize, beside a cache; else the client's option of this name, which turns a cache on", func(t *translation, w word) { t.maxCache = w })
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

func awsSource(t *translation, w word) {
	source := map[string]string{"driver": credentials.SourceDriver, "pod": credentials.SourceWorkload}[w.value]
	switch {
	case source != "":
		w.value = source
		t.put(keyCredentials, w)
	case w.value != "":
		t.refuse(w, "%q is neither driver nor pod; write credentials: %s, %s or %s instead", printable(w.value), credentials.SourceDriver, credentials.SourceSecret, credentials.SourceWorkload)
	}
}

func awsCache(t *translation, w word) {
	switch w.value {
	case "":
		return
	case "emptyDir", "ephemeral":
		w.value = "true"
	}
	t.put(keyCache, w)
}

// finishCache reads the bounds of a cache, which mean something only beside one. The smaller one holds.
func (t *translation) finishCache() {
	limit, most := t.cacheLimit, t.maxCache
	if t.given[keyCache] != "true" {
		if limit.hasValue {
			t.ignore(limit, "there is no cache: emptyDir beside it")
		}
		if most.field == "" {
			return
		}
		o, err := parseOption(most.option())
		if err != nil {
			t.refuse(most, "%s %w", most.name, err)
			return
		}
		t.options = append(t.options, o)
		return
	}
	var bytes uint64
	if limit.hasValue {
		n, err := kubernetesBytes(limit.value)
		if err != nil {
			t.refuse(limit, "%q %w", printable(limit.value), err)
			return
		}
		bytes = n
	}
	if most.field != "" {
		mib, err := strconv.ParseUint(most.value, 10, 24)
		if err != nil || mib == 0 {
			t.refuse(most, "%s needs a number of MiB", most.name)
			return
		}
		if mib <<= 20; bytes == 0 || mib < bytes {
			limit, bytes = most, mib
		}
	}
	if bytes != 0 {
		limit.value, limit.hasValue = FormatQuantity(bytes), true
		t.put(keyCacheSize, limit)
	}
}

// awsDefaults are those of the AWS driver for a volume that was written for it: its client is Mountpoint, whatever the node's
// default is, because its options are that one's; and pods may change nothing that is stored unless the volume says so.
func (r *Reading) awsDefaults() {
	r.Attributes.Client = "mountpoint-s3"
	for _, name := range []string{"allow-delete", "allow-overwrite"} {
		if !slices.ContainsFunc(r.Options, func(o Option) bool { return o.Name == name }) {
			r.Options = append(r.Options, Option{Name: name, Value: "false", HasValue: true})
		}
	}
}

// readFlags reads the mount flags of a static volume. They may be in the AWS driver's spellings: "name value" beside
// "--name value", white space around both, one-letter options.
func readFlags(flags []string, field string) ([]word, error) {
	size := 0
	seen := map[string]int{}
	words := make([]word, 0, len(flags))
	for i, flag := range flags {
		if size += len(flag); size > maxMap {
			return nil, fault.Field(field, "has more than %d bytes", maxMap)
		}
		at := fmt.Sprintf("%s[%d]", field, i)
		w, err := readFlag(flag)
		if err != nil {
			return nil, fault.Field(at, "%q %w", withoutValue(flag), err)
		}
		w.field = at
		if first, ok := seen[w.name]; ok {
			return nil, fault.Field(at, "gives %s again, which is in [%d] already", w.name, first)
		}
		seen[w.name] = i
		words = append(words, w)
	}
	return words, nil
}

// flags takes over the mount flags of a static volume. What no row knows is the client's.
func (t *translation) flags(words []word) {
	rows := slices.Concat(attributeOptions(), awsOptions())
	for _, w := range words {
		if row, ok := rowNamed(rows, w.name); ok && row.Outcome != Passed {
			t.take(row, w)
			continue
		}
		option, err := parseOption(w.option())
		if err != nil {
			t.refuse(w, "%s %w", w.name, err)
			continue
		}
		t.options = append(t.options, option)
	}
}

// option is the word in this driver's spelling.
func (w word) option() string {
	return Option{Name: w.name, Value: w.value, HasValue: w.hasValue}.String()
}

// readFlag reads one mount option as the AWS driver does (its pkg/mountpoint/args.go): what is before the first space or equals
// sign is the name, with or without dashes. Errors continue a sentence about the flag.
func readFlag(flag string) (word, error) {
	if err := checkOptionText(flag); err != nil {
		return word{}, err
	}
	text := strings.Trim(flag, " ")
	end := strings.IndexAny(text, " =")
	if end < 0 {
		end = len(text)
	}
	w := word{name: text[:end]}
	if rest := text[end:]; rest != "" {
		w.value, w.hasValue = strings.Trim(rest[1:], " "), true
		if rest[0] == ' ' && strings.HasPrefix(w.value, "-") {
			return word{}, errors.New("looks like two options; list them one by one")
		}
	}
	if short, ok := strings.CutPrefix(w.name, "-"); ok && len(short) == 1 {
		long, known := map[string]string{"f": "foreground", "d": "debug", "l": "log-directory", "h": "help", "v": "version", "V": "version", "o": "o"}[short]
		if !known {
			return word{}, errors.New("is no option of one letter that Mountpoint has; write its long name")
		}
		w.name = long
	}
	w.name = strings.TrimPrefix(w.name, "--")
	if !isOptionName(w.name) {
		return word{}, errors.New("has no option name of a-z, 0-9 and inner dashes in front")
	}
	return w, nil
}

// putFlag is put for options that are true without a value.
func (t *translation) putFlag(key string, w word) {
	if !w.hasValue {
		w.value, w.hasValue = "true", true
	}
	t.put(key, w)
}

// putBytes is put for amounts as Kubernetes writes them.
func (t *translation) putBytes(key string, w word) {
	bytes, err := kubernetesBytes(w.value)
	if err != nil {
		t.refuse(w, "%q %w", printable(w.value), err)
		return
	}
	w.value = FormatQuantity(bytes)
	t.put(key, w)
}

const kubernetesQuantity Pattern = `^([0-9]{1,15}(?:\.[0-9]{1,9})?)(Ki|Mi|Gi|Ti|k|K|M|G|T)?$`

// kubernetesBytes reads an amount of bytes in the usual forms of a Kubernetes quantity, "1.5Gi" and "500M" among them.
func kubernetesBytes(text string) (uint64, error) {
	m := kubernetesQuantity.FindStringSubmatch(text)
	if m == nil {
		return 0, errors.New("is not an amount of bytes, as 1073741824, 512Mi and 1.5Gi are")
	}
	number, ok := new(big.Rat).SetString(m[1])
	unit, err := ParseQuantity("1" + strings.Replace(m[2], "k", "K", 1))
	if !ok || err != nil {
		return 0, errors.New("is not an amount of bytes")
	}
	number.Mul(number, new(big.Rat).SetUint64(unit))
	whole := new(big.Int).Quo(number.Num(), number.Denom())
	if !whole.IsInt64() || whole.Sign() == 0 {
		return 0, errors.New("is no amount of bytes that can be counted")
	}
	return whole.Uint64(), nil
}
