package volume

import (
	"maps"
	"slices"
	"strings"
	"unicode/utf8"

	"github.com/s3-csi/s3-csi-driver/pkg/fault"
)

// ignored tells the keys that the container orchestrator adds to a volume context. They say nothing about the volume;
// what of them the driver needs it reads elsewhere.
func ignored(key string) bool {
	return strings.HasPrefix(key, metadataPrefix) || key == "storage.kubernetes.io/csiProvisionerIdentity"
}

// Given is what a node is given of a volume.
type Given struct {
	Handle  string
	Context map[string]string
	// Flags are the capability's mount flags, and FlagsField is what they are called in errors.
	Flags      []string
	FlagsField string
	// DriverName is the name of this driver.
	DriverName string
}

// Reading is a volume as a node gets it, in this driver's words.
type Reading struct {
	ID         ID
	Attributes Attributes
	Options    []Option // for the client: those of the context, then those of the flags
	// Claims are what the author says of the service. Whoever mounts the volume has to hold them against its backend.
	Claims []Claim
	// Ignored are what means nothing here, and why, for the log. They hold no values.
	Ignored []string
}

// Read reads a volume as a node gets it. The place comes from the handle if it is a volume id of this driver; a context that
// says otherwise is refused. Else it comes from the context (a static volume: bucketName, and prefix, backend), or, where that
// names no bucket, from the handle of k8s-csi-s3. What other drivers call otherwise is read by the table ForeignDocs: attributes
// always, mount flags where the handle is not a volume id of this driver. Unknown keys are refused, except those that the
// orchestrator adds. Errors are Invalid and name the field.
func Read(g Given) (Reading, error) {
	if err := checkHandle(g.Handle); err != nil {
		return Reading{}, err
	}
	given := maps.Clone(g.Context)
	maps.DeleteFunc(given, func(key, _ string) bool { return ignored(key) })
	if mapSize(given) > maxMap {
		return Reading{}, fault.Field("volume_context", "has more than %d bytes", maxMap)
	}
	if given == nil {
		given = map[string]string{}
	}
	own, ownErr := ParseID(g.Handle)
	t := newTranslation(given, ScopeContext)
	legacy, err := t.all(g, ownErr != nil)
	if err != nil {
		return Reading{}, err
	}
	r := Reading{Claims: t.claims, Ignored: t.ignored}
	_, named := t.given[keyBucketName]
	if r.ID, err = t.locate(g.Handle, own, ownErr); err != nil {
		return Reading{}, err
	}
	if r.Attributes, err = t.attributes(legacy); err != nil {
		return Reading{}, err
	}
	r.Options = slices.Concat(r.Attributes.MountOptions, t.options)
	if g.DriverName == AWSDriverName && ownErr != nil && named && !t.legacy && r.Attributes.Client == "" {
		r.awsDefaults()
	}
	return r, nil
}

// all translates the context and, of a static volume, the flags. legacy are options for the client that the context held in
// other words.
func (t *translation) all(g Given, static bool) (legacy []Option, err error) {
	var words []word
	if static {
		if words, err = readFlags(g.Flags, g.FlagsField); err != nil {
			return nil, err
		}
		t.chosen = slices.ContainsFunc(words, func(w word) bool { return w.name == keyClient })
	}
	t.keys(awsAttributes())
	t.keys(k8sS3Parameters())
	legacy, t.options = t.options, nil
	if static {
		t.flags(words)
	} else if t.options, err = ParseMountOptions(g.Flags, g.FlagsField); err != nil {
		return nil, err
	}
	t.finishCache()
	return legacy, t.err()
}

// ParseContext is Read without mount flags.
func ParseContext(handle string, context map[string]string) (ID, Attributes, error) {
	r, err := Read(Given{Handle: handle, Context: context})
	return r.ID, r.Attributes, err
}

// checkHandle refuses what the CSI specification does not allow in a volume_id.
func checkHandle(handle string) error {
	switch {
	case handle == "":
		return fault.Field("volume_id", "is missing")
	case len(handle) > maxString:
		return fault.Field("volume_id", "has %d bytes, %d at most are allowed", len(handle), maxString)
	case !utf8.ValidString(handle) || strings.ContainsFunc(handle, isBreak):
		return fault.Field("volume_id", "%q holds a control character or is not UTF-8", handle)
	}
	return nil
}

// locate finds the place and takes the keys that it read out of what is given.
func (t *translation) locate(handle string, own ID, ownErr error) (id ID, err error) {
	_, named := t.given[keyBucketName]
	switch {
	case ownErr == nil:
		id, err = t.ownPlace(own)
	case named:
		id, err = t.staticPlace()
	case strings.Contains(handle, ":"):
		err = ownErr
	default:
		id, err = t.legacyPlace(handle)
	}
	if err == nil && t.bucket.value != "" && t.bucket.value != id.Bucket {
		err = fault.Field(t.bucket.field, "%q is not the bucket of the volume, %q", t.bucket.value, id.Bucket)
	}
	return id, err
}

// ownPlace holds the context against the volume id, which alone decides.
func (t *translation) ownPlace(id ID) (ID, error) {
	said := map[string]string{keyBackend: id.Backend, keyBucketName: id.Bucket, keyPrefix: id.Prefix}
	for _, key := range slices.Sorted(maps.Keys(said)) {
		value, ok := t.given[key]
		if key == keyPrefix {
			value = withSlash(value)
		}
		if ok && value != said[key] {
			return ID{}, fault.Field(t.field(key), "%q is not what the volume id %q says (%q); correct it, or give a static volume a handle without \":\"", t.given[key], id, said[key])
		}
		delete(t.given, key)
	}
	return id, nil
}

func (t *translation) staticPlace() (ID, error) {
	id := ID{Bucket: t.given[keyBucketName], Prefix: withSlash(t.given[keyPrefix])}
	var err error
	if id.Backend, err = t.backend(); err != nil {
		return ID{}, err
	}
	if _, err := bucketKind(id.Bucket); err != nil {
		return ID{}, fault.Field(t.field(keyBucketName), "%q %w", id.Bucket, err)
	}
	if id.Prefix != "" {
		if err := checkPrefix(id.Prefix); err != nil {
			return ID{}, fault.Field(t.field(keyPrefix), "%q %w", t.given[keyPrefix], err)
		}
	}
	delete(t.given, keyBucketName)
	delete(t.given, keyPrefix)
	return id, nil
}

// backend reads the backend of a volume whose handle names none.
func (t *translation) backend() (string, error) {
	name, ok := t.given[keyBackend]
	delete(t.given, keyBackend)
	if !ok {
		return DefaultBackend, nil
	}
	if err := checkBackendName(name); err != nil {
		return "", fault.Field(t.field(keyBackend), "%w", err)
	}
	return name, nil
}

func withSlash(prefix string) string {
	if prefix == "" || strings.HasSuffix(prefix, "/") {
		return prefix
	}
	return prefix + "/"
}

// legacyPlace reads a volume of k8s-csi-s3. A bare word is taken for a bucket only if it looks like a handle of that
// driver or the context does: a static volume whose author forgot bucketName must not end up in a stranger's bucket.
func (t *translation) legacyPlace(handle string) (ID, error) {
	if !t.legacy && !LooksForeign(handle) {
		return ID{}, fault.Field("volume_context."+keyBucketName, "is missing, and the handle %q does not say where the volume is", handle)
	}
	if _, ok := t.given[keyPrefix]; ok {
		return ID{}, fault.Field(t.field(keyPrefix), "needs bucketName beside it")
	}
	id, err := legacyID(handle)
	if err != nil {
		return ID{}, fault.Field("volume_id", "%q says neither alone nor with bucketName in the volume context where the volume is: %w", handle, err)
	}
	id.Backend, err = t.backend()
	return id, err
}

// attributes reads the keys that locate left. more are options for the client that stood in the context in other words.
func (t *translation) attributes(more []Option) (Attributes, error) {
	var a Attributes
	for _, key := range slices.Sorted(maps.Keys(t.given)) {
		field := t.field(key)
		handled, err := a.set(key, t.given[key], field)
		if err != nil {
			return Attributes{}, err
		}
		if !handled {
			return Attributes{}, fault.Field(field, "is not a key of a volume context; %s", suggestion(key, ScopeContext))
		}
	}
	if err := a.addOptions(more, "volume_context."); err != nil {
		return Attributes{}, err
	}
	if err := a.check("volume_context"); err != nil {
		return Attributes{}, err
	}
	return a, nil
}

// addOptions adds options that stood beside mountOptions in other words.
func (a *Attributes) addOptions(more []Option, root string) error {
	for _, o := range more {
		if slices.ContainsFunc(a.MountOptions, func(other Option) bool { return other.Name == o.Name }) {
			return fault.Field(root+keyMountOptions, "gives %s, which %s gives, too; remove one", o.Name, legacyOptions)
		}
	}
	a.MountOptions = slices.Concat(a.MountOptions, more)
	return nil
}
