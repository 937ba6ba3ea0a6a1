package volume

import (
	"errors"
	"maps"
	"slices"
	"strings"
	"unicode/utf8"

	"github.com/s3-csi/s3-csi-driver/pkg/fault"
)

// orchestrated reports whether the container orchestrator adds the key to contexts and parameters. Such keys are not about the volume. The names
// of secrets are not among them: the provisioner removes them from parameters, so here no secret would be read.
func orchestrated(key string) bool {
	return strings.HasPrefix(key, metadataPrefix) && !strings.HasSuffix(key, "-secret-name") && !strings.HasSuffix(key, "-secret-namespace") ||
		key == "storage.kubernetes.io/csiProvisionerIdentity"
}

// Given is a volume in a request to a node.
type Given struct {
	Handle  string
	Context map[string]string
	// Flags are the capability's mount flags, FlagsField is their name in errors.
	Flags      []string
	FlagsField string
	// DriverName is the name of this driver.
	DriverName string
}

// Reading is a parsed volume, after the conversion from other drivers.
type Reading struct {
	ID         ID
	Attributes Attributes
	Options    []Option // for the client: those of the context, then those of the flags
	// Claims are what the author says about the service. They must be checked against the volume's backend.
	Claims []Claim
	// Ignored names the settings that have no effect, with the reason, for the log. It shows no values.
	Ignored []string
}

// Read parses a volume. Its place comes from
//
//   - the handle, if that is a volume id of this driver; a context that differs is refused,
//   - otherwise the context of a static volume (bucketName, prefix, backend),
//   - or, without bucketName, the handle of k8s-csi-s3.
//
// Settings of other drivers are converted by the table ForeignDocs: attributes always, mount flags unless the handle is a volume
// id of this driver. Unknown keys are refused, except those that the orchestrator adds. Errors are Invalid and name the field.
func Read(g Given) (Reading, error) {
	if err := checkHandle(g.Handle); err != nil {
		return Reading{}, err
	}
	given, err := authored(g.Context, "volume_context")
	if err != nil {
		return Reading{}, err
	}
	if given == nil {
		given = map[string]string{}
	}
	own, ownErr := ParseID(g.Handle)
	c := newConversion(given, ScopeContext)
	legacy, err := c.all(g, ownErr != nil)
	if err != nil {
		return Reading{}, err
	}
	r := Reading{Claims: c.claims, Ignored: c.ignored}
	_, named := c.given[keyBucketName]
	if r.ID, err = c.locate(g.Handle, own, ownErr); err != nil {
		return Reading{}, err
	}
	if r.Attributes, err = c.attributes(legacy); err != nil {
		return Reading{}, err
	}
	if s := r.Attributes.Snapshot; s != "" {
		if ownErr != nil && r.ID.Prefix != "" {
			return Reading{}, fault.Field("volume_context."+keySnapshot, "cannot be combined with a prefix")
		}
		id, _ := parseSnapshotElement(s)
		r.ID.Prefix, r.Attributes.Snapshot, r.Attributes.ReadOnly = id.Data(), "", true
	}
	r.Options = slices.Concat(r.Attributes.MountOptions, c.options)
	if g.DriverName == AWSDriverName && ownErr != nil && named && !c.legacy && r.Attributes.Client == "" {
		r.awsDefaults()
	}
	return r, nil
}

// all converts the context and, for a static volume, the flags. legacy are options for the client that were converted from the
// context.
func (c *conversion) all(g Given, static bool) (legacy []Option, err error) {
	var words []legacyKey
	if static {
		if words, err = readFlags(g.Flags, g.FlagsField); err != nil {
			return nil, err
		}
		c.chosen = slices.ContainsFunc(words, func(k legacyKey) bool { return k.name == keyClient })
	}
	c.keys(awsAttributes())
	c.keys(k8sS3Parameters())
	legacy, c.options = c.options, nil
	if static {
		c.flags(words)
	} else if c.options, err = ParseMountOptions(g.Flags, g.FlagsField); err != nil {
		return nil, err
	}
	c.finishCache()
	return legacy, c.err()
}

// checkHandle checks a volume_id against the CSI specification.
func checkHandle(handle string) error {
	switch {
	case handle == "":
		return fault.Field("volume_id", "is missing")
	case len(handle) > maxString:
		return fault.Field("volume_id", "has %d bytes, the maximum is %d", len(handle), maxString)
	case !utf8.ValidString(handle) || strings.ContainsFunc(handle, isBreak):
		return fault.Field("volume_id", "%q contains a control character or is not UTF-8", handle)
	}
	return nil
}

// locate returns the volume's place and removes the keys that it used.
func (c *conversion) locate(handle string, own ID, ownErr error) (id ID, err error) {
	_, named := c.given[keyBucketName]
	switch {
	case ownErr == nil:
		id, err = c.ownPlace(own)
	case named:
		id, err = c.staticPlace()
	case strings.Contains(handle, ":"):
		err = ownErr
	default:
		id, err = c.legacyPlace(handle)
	}
	if err == nil && c.bucket.value != "" && c.bucket.value != id.Bucket {
		err = fault.Field(c.bucket.field, "%q is not the bucket of the volume, %q", c.bucket.value, id.Bucket)
	}
	return id, err
}

// ownPlace checks the context against the volume id, which decides.
func (c *conversion) ownPlace(id ID) (ID, error) {
	said := map[string]string{keyBackend: id.Backend, keyBucketName: id.Bucket, keyPrefix: id.Prefix}
	for _, key := range slices.Sorted(maps.Keys(said)) {
		value, ok := c.given[key]
		if key == keyPrefix {
			value = withSlash(value)
		}
		if ok && value != said[key] {
			return ID{}, fault.Field(c.field(key), "%q differs from the volume id %q (%q); correct it, or use a handle without \":\" for a static volume",
				c.given[key], id, said[key])
		}
		delete(c.given, key)
	}
	return id, nil
}

func (c *conversion) staticPlace() (ID, error) {
	id := ID{Bucket: c.given[keyBucketName], Prefix: withSlash(c.given[keyPrefix])}
	var err error
	if id.Backend, err = c.backend(); err != nil {
		return ID{}, err
	}
	if err := CheckBucketName(id.Bucket); err != nil {
		return ID{}, fault.Field(c.field(keyBucketName), "%q %w", id.Bucket, err)
	}
	if id.Prefix != "" {
		if err := errors.Join(checkQuotes(c.given[keyPrefix]), checkPrefix(id.Prefix)); err != nil {
			return ID{}, fault.Field(c.field(keyPrefix), "%q %w", c.given[keyPrefix], err)
		}
	}
	delete(c.given, keyBucketName)
	delete(c.given, keyPrefix)
	return id, nil
}

// backend returns the backend of a volume whose handle does not name one.
func (c *conversion) backend() (string, error) {
	name, ok := c.given[keyBackend]
	delete(c.given, keyBackend)
	if !ok {
		return DefaultBackend, nil
	}
	if err := checkBackendName(name); err != nil {
		return "", fault.Field(c.field(keyBackend), "%w", err)
	}
	return name, nil
}

func withSlash(prefix string) string {
	if prefix == "" || strings.HasSuffix(prefix, "/") {
		return prefix
	}
	return prefix + "/"
}

// legacyPlace returns the place of a volume of k8s-csi-s3. A handle counts as a bucket only if it or the context looks like that
// driver's: a static volume without bucketName must not use an unrelated bucket.
func (c *conversion) legacyPlace(handle string) (ID, error) {
	if !c.legacy && !LooksForeign(handle) {
		return ID{}, fault.Field("volume_context."+keyBucketName, "is missing, and the handle %q does not name the bucket", handle)
	}
	if _, ok := c.given[keyPrefix]; ok {
		return ID{}, fault.Field(c.field(keyPrefix), "needs bucketName")
	}
	id, err := legacyID(handle)
	if err != nil {
		return ID{}, fault.Field("volume_id", "%q does not name the bucket, and the volume context has no bucketName: %w", handle, err)
	}
	id.Backend, err = c.backend()
	return id, err
}

// attributes parses the remaining keys. more are options for the client that were converted from the context.
func (c *conversion) attributes(more []Option) (Attributes, error) {
	var p Parameters
	if err := parameters(ScopeContext).parse(&p, c.given, c.field); err != nil {
		return Attributes{}, err
	}
	a := p.Node
	a.Usage = p.Usage
	if err := a.addOptions(more, "volume_context."); err != nil {
		return Attributes{}, err
	}
	return a, a.check("volume_context")
}

// addOptions adds options that were converted from other keys.
func (a *Attributes) addOptions(more []Option, root string) error {
	for _, o := range more {
		if _, twice := FindOption(a.MountOptions, o.Name); twice {
			return fault.Field(root+keyMountOptions, "sets %s, which %s also sets; remove one of them", o.Name, legacyOptions)
		}
	}
	a.MountOptions = slices.Concat(a.MountOptions, more)
	return nil
}
