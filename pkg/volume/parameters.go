package volume

import (
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"maps"
	"slices"
	"strconv"
	"strings"
	"unicode"
	"unicode/utf8"

	"github.com/s3-csi/s3-csi-driver/pkg/fault"
)

const (
	// longestElement is the maximum length of a volume's path element below its base prefix.
	longestElement = maxSegment + len("@9999/")
	// maxBucketNamePrefix leaves room for a hashed volume name in the 63 characters of a bucket name.
	maxBucketNamePrefix = 63 - len("v-") - hashLen
	metadataPrefix      = "csi.storage.k8s.io/"
)

// ParseParameters parses the parameters of CreateVolume for the volume of that name. Keys below csi.storage.k8s.io/ are the provisioner's
// metadata. Every other key must be in the table ParameterDocs, or be one of k8s-csi-s3 in the table ForeignDocs. Volume ids of the result
// are valid for every generation. Errors are Invalid and name the field.
func ParseParameters(params map[string]string, name string) (Parameters, error) {
	if err := CheckName(name); err != nil {
		return Parameters{}, err
	}
	p := Parameters{Backend: DefaultBackend, Mutable: Mutable{OnDelete: OnDeleteDelete}, MaxObjects: DefaultMaxObjects, MaxBytes: DefaultMaxBytes}
	given, err := authored(params, "parameters")
	if err != nil {
		return Parameters{}, err
	}
	c := newConversion(given, ScopeClass)
	c.keys(k8sS3Parameters())
	if err := c.err(); err != nil {
		return Parameters{}, err
	}
	if err := parameters(ScopeClass).parse(&p, given, c.field); err != nil {
		return Parameters{}, err
	}
	if err := p.Node.addOptions(c.options, "parameters."); err != nil {
		return Parameters{}, err
	}
	p.Claims, p.Ignored = c.claims, c.ignored
	p.Node.Usage = p.Usage
	if err := p.Node.check("parameters"); err != nil {
		return Parameters{}, err
	}
	if err := p.place(params); err != nil {
		return Parameters{}, err
	}
	if mapSize(p.Context()) > maxMap {
		return Parameters{}, fault.Field("parameters", "would produce a volume context of more than %d bytes", maxMap)
	}
	return p, nil
}

// CheckName refuses what the CSI specification does not allow in the name of a volume or snapshot: control characters other than common white
// space.
func CheckName(name string) error {
	switch {
	case name == "":
		return fault.Field("name", "is missing")
	case len(name) > maxString:
		return fault.Field("name", "has %d bytes, the maximum is %d", len(name), maxString)
	case !utf8.ValidString(name):
		return fault.Field("name", "is not UTF-8")
	case strings.ContainsFunc(name, func(r rune) bool { return unicode.IsControl(r) && !strings.ContainsRune("\t\n\r", r) }):
		return fault.Field("name", "%q contains a control character", name)
	}
	return nil
}

func parseBackend(value, field string) (string, error) {
	if err := checkBackendName(value); err != nil {
		return "", fault.Field(field, "%w", err)
	}
	return value, nil
}

func parseBucket(value, field string) (string, error) {
	if value == "" {
		return "", fault.Field(field, "is empty; name a bucket or remove it")
	}
	if err := CheckBucketName(value); err != nil {
		return "", fault.Field(field, "%q %w", value, err)
	}
	return value, nil
}

// parseBase does not expand the base prefix, which place does.
func parseBase(value, _ string) (string, error) { return value, nil }

func parseBucketNamePrefix(value, field string) (string, error) {
	if !consistsOf(value, func(c byte) bool { return isLower(c) || c == '-' }) {
		return "", fault.Field(field, `%q may contain only a-z, 0-9 and "-"`, value)
	}
	if strings.HasPrefix(value, "-") {
		return "", fault.Field(field, "%q starts with a dash", value)
	}
	if over := len(value) - maxBucketNamePrefix; over > 0 {
		return "", fault.Field(field, "is too long by %d bytes, the maximum is %d", over, maxBucketNamePrefix)
	}
	if err := notReserved(value); err != nil {
		return "", fault.Field(field, "%q %w", value, err)
	}
	return value, nil
}

// place checks the combination of bucket and prefix parameters, and expands the base prefix.
func (p *Parameters) place(params map[string]string) error {
	prefix := params[keyPrefix]
	if p.BucketName == "" {
		if prefix != "" {
			return fault.Field("parameters."+keyPrefix, "requires bucketName, because volumes with their own bucket have no prefix")
		}
		return nil
	}
	if len(p.Tags) > 0 {
		return fault.Field("parameters."+keyTags, "cannot be combined with bucketName; they are the tags of volumes with their own bucket")
	}
	if p.BucketNamePrefix != "" {
		return fault.Field("parameters."+keyBucketNamePrefix, "cannot be combined with bucketName; it is for volumes with their own bucket")
	}
	// The budget assumes the longest name, so that a StorageClass is valid for all names or for none.
	budget := maxString - len(ID{Backend: p.Backend, Bucket: p.BucketName, Prefix: "/"}.String()) + 1 - longestElement
	if budget < 0 {
		return fault.Field("parameters."+keyBucketName, "%q and backend name %q together are too long by %d bytes for a volume id of %d bytes",
			p.BucketName, p.Backend, -budget, maxString)
	}
	base, over, err := expandBase(prefix, params, budget)
	if err != nil {
		return fault.Field("parameters."+keyPrefix, "%q %w", prefix, err)
	}
	if over > 0 {
		return fault.Field("parameters."+keyPrefix, "%q is too long by %d bytes: with backend %s and bucket %s, a volume id of %d bytes has room for %d",
			prefix, over, p.Backend, p.BucketName, maxString, budget)
	}
	p.Prefix = base
	return nil
}

// VolumePrefix returns the volume's prefix in the bucket BucketName: "<base><segment>/", and "<base><segment>@<generation>/" from
// generation 2 on. It is "" if the volume has its own bucket.
func (p Parameters) VolumePrefix(name string, generation int) string {
	if p.BucketName == "" {
		return ""
	}
	return p.Prefix + element(NameSegment(name), generation)
}

// BucketFor returns the volume's bucket: BucketName, or a name for its own bucket. If the volume's name is not valid in a bucket name, it is
// replaced by a readable start and a hash.
func (p Parameters) BucketFor(name string) string {
	if p.BucketName != "" {
		return p.BucketName
	}
	plain := p.BucketNamePrefix + name
	if kind, err := bucketKind(plain); err == nil && kind == BucketGeneralPurpose && !strings.Contains(name, ".") && !looksHashed(name) {
		return plain
	}
	lower := func(c byte) bool { return isLower(c) || c == '-' }
	start := min(maxSegment, 63-len(p.BucketNamePrefix)) - 1 - hashLen
	// Bucket names are in lower case. The hash is of the original name, so that names that differ only in case have different buckets.
	bucket := p.BucketNamePrefix + readable(strings.ToLower(name), start, lower) + "-" + hash(name)
	if _, err := bucketKind(bucket); err != nil {
		// With the readable start, the name is reserved.
		bucket = p.BucketNamePrefix + "v-" + hash(name)
	}
	return bucket
}

// ID returns the volume id of that name and generation.
func (p Parameters) ID(name string, generation int) ID {
	return ID{Backend: p.Backend, Bucket: p.BucketFor(name), Prefix: p.VolumePrefix(name, generation)}
}

// Digest returns a versioned hash of the parameters that define the volume, with templates expanded. Equivalent spellings ("0755" and "755",
// an explicit or omitted default) have the same digest.
func (p Parameters) Digest() string {
	given := map[string]string{}
	for _, doc := range ParameterDocs() {
		// Unset parameters are omitted, so that parameters of later versions do not change existing digests.
		if value := doc.codec.get(&p); value != "" {
			given[doc.Name] = value
		}
	}
	if content := p.Content.String(); content != "" {
		given["contentSource"] = content
	}
	if p.CapacityBytes != 0 {
		given["capacityBytes"] = strconv.FormatInt(p.CapacityBytes, 10)
	}
	h := sha256.New()
	write := func(s string) {
		h.Write(binary.BigEndian.AppendUint32(nil, uint32(len(s))))
		h.Write([]byte(s))
	}
	for _, key := range slices.Sorted(maps.Keys(given)) {
		write(key)
		write(given[key])
	}
	return "v1:" + hex.EncodeToString(h.Sum(nil))
}

// Context returns the volume context of a created volume: what a node needs in addition to the volume id. It contains no defaults, so that
// upgrades do not change it.
func (p Parameters) Context() map[string]string { return p.Node.context() }

func mapSize(m map[string]string) int {
	size := 0
	for key, value := range m {
		size += len(key) + len(value)
	}
	return size
}
