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
	// longestElement is what a volume adds to its base prefix at most.
	longestElement = maxSegment + len("@9999/")
	// maxBucketNamePrefix leaves room for a hashed volume name in the 63 characters of a bucket name.
	maxBucketNamePrefix = 63 - len("v-") - hashLen
	metadataPrefix      = "csi.storage.k8s.io/"
)

// ParseParameters reads the parameters of CreateVolume for the volume of that name. Keys below csi.storage.k8s.io/ are
// the provisioner's metadata; every other key must be a parameter of the table ParameterDocs, or one of k8s-csi-s3 that the
// table ForeignDocs knows. What comes back makes volume ids that ParseID reads, whatever the generation. Errors are Invalid and
// name the field.
func ParseParameters(params map[string]string, name string) (Parameters, error) {
	if err := checkName(name); err != nil {
		return Parameters{}, err
	}
	p := Parameters{Backend: DefaultBackend, OnDelete: OnDeleteDelete}
	given := maps.Clone(params)
	maps.DeleteFunc(given, func(key, _ string) bool { return strings.HasPrefix(key, metadataPrefix) })
	if mapSize(given) > maxMap {
		return Parameters{}, fault.Field("parameters", "have more than %d bytes", maxMap)
	}
	c := newConversion(given, ScopeClass)
	c.keys(k8sS3Parameters())
	if err := c.err(); err != nil {
		return Parameters{}, err
	}
	for _, key := range slices.Sorted(maps.Keys(given)) {
		if err := p.set(key, given[key], c.field(key)); err != nil {
			return Parameters{}, err
		}
	}
	if err := p.Node.addOptions(c.options, "parameters."); err != nil {
		return Parameters{}, err
	}
	p.Claims, p.Ignored = c.claims, c.ignored
	p.ExpectedBucketOwner = p.Node.ExpectedBucketOwner
	if err := p.Node.check("parameters"); err != nil {
		return Parameters{}, err
	}
	if err := p.place(params); err != nil {
		return Parameters{}, err
	}
	if mapSize(p.Context()) > maxMap {
		return Parameters{}, fault.Field("parameters", "make a volume context of more than %d bytes", maxMap)
	}
	return p, nil
}

// checkName refuses what the CSI specification does not allow in a volume's name: control characters other than common white
// space.
func checkName(name string) error {
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

// set reads one parameter; the base prefix is left to place, which needs all of them.
func (p *Parameters) set(key, value, field string) error {
	if !knownIn(key, ScopeClass) {
		return fault.Field(field, "is not a parameter of a StorageClass; %s", suggestion(key, ScopeClass))
	}
	switch key {
	case keyBackend:
		if err := checkBackendName(value); err != nil {
			return fault.Field(field, "%w", err)
		}
		p.Backend = value
	case keyBucketName:
		if value == "" {
			return fault.Field(field, "is empty; leave it out if each volume is to have a bucket of its own")
		}
		if _, err := bucketKind(value); err != nil {
			return fault.Field(field, "%q %w", value, err)
		}
		p.BucketName = value
	case keyBucketNamePrefix:
		if err := checkBucketNamePrefix(value, field); err != nil {
			return err
		}
		p.BucketNamePrefix = value
	case keyOnDelete:
		switch onDelete := OnDelete(value); onDelete {
		case OnDeleteDelete, OnDeletePurge, OnDeleteRetain, OnDeleteRequireEmpty:
			p.OnDelete = onDelete
		default:
			return fault.Field(field, "%q is none of %s, %s, %s, %s", value, OnDeleteDelete, OnDeletePurge, OnDeleteRetain, OnDeleteRequireEmpty)
		}
	case keyPrefix:
	default:
		_, err := p.Node.set(key, value, field)
		return err
	}
	return nil
}

func checkBucketNamePrefix(value, field string) error {
	for i := range len(value) {
		if !isLower(value[i]) && value[i] != '-' {
			return fault.Field(field, `%q may contain only a-z, 0-9 and "-"`, value)
		}
	}
	if strings.HasPrefix(value, "-") {
		return fault.Field(field, "%q starts with a dash", value)
	}
	if over := len(value) - maxBucketNamePrefix; over > 0 {
		return fault.Field(field, "is too long by %d bytes, %d are allowed", over, maxBucketNamePrefix)
	}
	for _, reserved := range []string{"xn--", "sthree-", "amzn-s3-demo-"} {
		if strings.HasPrefix(value, reserved) {
			return fault.Field(field, "%q starts with %q, which Amazon S3 reserves", value, reserved)
		}
	}
	return nil
}

// place checks the parameters that say where volumes go against each other and expands the base prefix.
func (p *Parameters) place(params map[string]string) error {
	prefix := params[keyPrefix]
	if p.BucketName == "" {
		if prefix != "" {
			return fault.Field("parameters."+keyPrefix, "needs bucketName: a volume that is a bucket of its own has no prefix")
		}
		return nil
	}
	if p.BucketNamePrefix != "" {
		return fault.Field("parameters."+keyBucketNamePrefix, "is for volumes with a bucket of their own and cannot stand beside bucketName")
	}
	// The room is that of the longest name, so that a StorageClass works for all names or for none.
	budget := maxString - len(ID{Backend: p.Backend, Bucket: p.BucketName, Prefix: "/"}.String()) + 1 - longestElement
	if budget < 0 {
		return fault.Field("parameters."+keyBucketName, "%q and the backend name %q together are too long by %d bytes for a volume id of %d", p.BucketName, p.Backend, -budget, maxString)
	}
	base, over, err := expandBase(prefix, params, budget)
	if err != nil {
		return fault.Field("parameters."+keyPrefix, "%q %w", prefix, err)
	}
	if over > 0 {
		return fault.Field("parameters."+keyPrefix, "%q is too long by %d bytes: with backend %s and bucket %s, a volume id of %d bytes has room for %d", prefix, over, p.Backend, p.BucketName, maxString, budget)
	}
	p.Prefix = base
	return nil
}

// VolumePrefix is where a volume of that name lies in the bucket BucketName: "<base><segment>/", and
// "<base><segment>@<generation>/" from generation 2 on. It is "" when the volume is a bucket of its own.
func (p Parameters) VolumePrefix(name string, generation int) string {
	if p.BucketName == "" {
		return ""
	}
	return p.Prefix + element(NameSegment(name), generation)
}

// BucketFor is the bucket of the volume of that name: BucketName, or a bucket of its own. A name that cannot end a
// bucket name as it is becomes a readable start and a hash.
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
	// In lower case, because bucket names have no capitals. The hash is of the name itself: names that differ in nothing but
	// case have different buckets.
	bucket := p.BucketNamePrefix + readable(strings.ToLower(name), start, lower) + "-" + hash(name)
	if _, err := bucketKind(bucket); err != nil {
		// The readable start made a reserved name of it.
		bucket = p.BucketNamePrefix + "v-" + hash(name)
	}
	return bucket
}

// ID is the volume id of that name and generation.
func (p Parameters) ID(name string, generation int) ID {
	return ID{Backend: p.Backend, Bucket: p.BucketFor(name), Prefix: p.VolumePrefix(name, generation)}
}

// Digest is a versioned hash of all that decides what the volume is: what the author gave, with templates expanded. Two
// spellings of the same thing ("0755" and "755", a default given or left out) have one digest.
func (p Parameters) Digest() string {
	given := p.Context()
	for key, value := range map[string]string{
		keyBackend:             p.Backend,
		keyBucketName:          p.BucketName,
		keyBucketNamePrefix:    p.BucketNamePrefix,
		keyPrefix:              p.Prefix,
		keyOnDelete:            string(p.OnDelete),
		keyExpectedBucketOwner: p.ExpectedBucketOwner,
	} {
		// What is not given is left out, so that a parameter of a later version changes no digest of today.
		if value != "" {
			given[key] = value
		}
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

// Context is the volume context of a created volume: what a node needs beside the place, which is in the volume id.
// It holds what the author gave and no defaults, so that it stays the same over upgrades.
func (p Parameters) Context() map[string]string { return p.Node.context() }

func mapSize(m map[string]string) int {
	size := 0
	for key, value := range m {
		size += len(key) + len(value)
	}
	return size
}
