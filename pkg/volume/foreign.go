package volume

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	"github.com/s3-csi/s3-csi-driver/pkg/credentials"
	"github.com/s3-csi/s3-csi-driver/pkg/fault"
)

// AWSDriverName is the name of the AWS Mountpoint S3 CSI driver. With that name, a static volume without a client has
// that driver's defaults.
const AWSDriverName = "s3.csi.aws.com"

// Origin is where the setting of a row of ForeignDocs comes from.
type Origin string

// The origins, in the order of the table.
const (
	OriginAWSAttribute Origin = "volume attribute of " + AWSDriverName
	OriginAWSOption    Origin = "mount option of " + AWSDriverName
	OriginOption       Origin = "mount option that sets an attribute"
	OriginK8sS3        Origin = "StorageClass parameter and volume attribute of k8s-csi-s3"
	OriginSecret       Origin = "key of a secret of k8s-csi-s3"
	OriginRclone       Origin = "options of k8s-csi-s3, mounter rclone"
	OriginOtherMounter Origin = "options of k8s-csi-s3, mounters geesefs and s3fs"
)

// Outcome is what happens to a setting of another driver.
type Outcome string

const (
	// Same has the same meaning here, or is always on.
	Same Outcome = "same"
	// Passed is the client's option of that name, which checks the value.
	Passed Outcome = "passed"
	// Mapped is converted as the row says.
	Mapped Outcome = "mapped"
	// Checked must match the backend.
	Checked Outcome = "checked"
	// Ignored has no effect, which is logged on the node.
	Ignored Outcome = "ignored"
	// Refused is an error with the advice of the row.
	Refused Outcome = "refused"
)

// ForeignDoc is one row of the table of other drivers' settings.
type ForeignDoc struct {
	Origin  Origin
	Name    string
	Outcome Outcome
	Here    string // what it becomes, or what to write instead; also for errors and logs

	only  Scope     // where it is allowed; "": everywhere
	key   string    // of a Mapped one: the attribute
	claim ClaimKind // of a Checked one
	// read handles the setting if the fields above are not enough.
	read func(c *conversion, k legacyKey)
}

// others is the Name of a row for settings without a row of their own.
const others = "others"

// ForeignDocs returns the table of other drivers' settings. The parsers use it, and the tables of
// docs/reference/migrating-settings.md is rendered from it.
func ForeignDocs() []ForeignDoc {
	return slices.Concat(awsAttributes(), awsOptions(), attributeOptions(), k8sS3Parameters(), k8sS3Secrets(), rcloneOptions(), otherMounterOptions())
}

// foreignRows builds the rows of one origin.
type foreignRows struct {
	origin Origin
	rows   []ForeignDoc
}

func (r *foreignRows) add(row ForeignDoc) {
	row.Origin = r.origin
	r.rows = append(r.rows, row)
}

// all adds rows that differ in their names only.
func (r *foreignRows) all(outcome Outcome, here string, names ...string) {
	for _, name := range names {
		r.add(ForeignDoc{Name: name, Outcome: outcome, Here: here})
	}
}

// renamed adds an option that is an attribute with another name.
func (r *foreignRows) renamed(name, key string) {
	r.add(ForeignDoc{Name: name, Outcome: Mapped, Here: key, key: key})
}

// mapped adds a setting that read converts.
func (r *foreignRows) mapped(name, here string, read func(c *conversion, k legacyKey)) {
	r.add(ForeignDoc{Name: name, Outcome: Mapped, Here: here, read: read})
}

// checked adds a setting that is a claim about the service.
func (r *foreignRows) checked(name string, claim ClaimKind, here string) {
	r.add(ForeignDoc{Name: name, Outcome: Checked, Here: here, claim: claim})
}

// rowNamed returns the row of that name, or the one for others, which is the last.
func rowNamed(rows []ForeignDoc, name string) (ForeignDoc, bool) {
	i := slices.IndexFunc(rows, func(row ForeignDoc) bool { return row.Name == name || row.Name == others })
	if i < 0 {
		return ForeignDoc{}, false
	}
	return rows[i], true
}

// ClaimKind is the subject of a Claim.
type ClaimKind string

// The kinds.
const (
	ClaimEndpoint  ClaimKind = "endpoint"  // URL of the service
	ClaimRegion    ClaimKind = "region"    // for signing requests
	ClaimPathStyle ClaimKind = "pathStyle" // the bucket is in the path
	ClaimInsecure  ClaimKind = "insecure"  // "true": certificates are not verified
)

// Claim is a statement of a volume's author about the service. It never decides where requests and credentials go; it must be
// checked against the backend.
type Claim struct {
	Kind  ClaimKind
	Field string // for errors
	Value string
}

// SecretKeys returns the keys that a secret may have.
func SecretKeys() []string {
	keys := []string{credentials.SecretSessionToken, credentials.SecretRoleARN}
	for _, row := range k8sS3Secrets() {
		keys = append(keys, row.Name)
	}
	slices.Sort(keys)
	return keys
}

// SecretClaims returns the claims in a secret of k8s-csi-s3.
func SecretClaims(secrets map[string]string) []Claim {
	var claims []Claim
	for _, row := range k8sS3Secrets() {
		if value := secrets[row.Name]; row.Outcome == Checked && value != "" {
			claims = append(claims, Claim{Kind: row.claim, Field: "secrets." + row.Name, Value: value})
		}
	}
	return claims
}

// legacyKey is one setting for another driver.
type legacyKey struct {
	field    string // for errors
	name     string
	value    string
	hasValue bool
}

// conversion converts a volume's settings to this driver's.
type conversion struct {
	given map[string]string // by attribute or parameter of this driver
	from  map[string]string // the original field of converted settings, by attribute
	scope Scope

	mounter string // k8s-csi-s3's
	legacy  bool   // the context is from k8s-csi-s3
	chosen  bool   // a mount option names the client and overrides k8s-csi-s3's mounter

	// Settings that depend on others: k8s-csi-s3's bucket of a volume context, and the bounds of the AWS driver's cache.
	bucket, cacheLimit, maxCache legacyKey

	options []Option // for the client
	claims  []Claim
	ignored []string // for the log

	refused   []string // the texts of errors
	refusedAt string   // the field of the first one
}

func newConversion(given map[string]string, scope Scope) *conversion {
	c := &conversion{given: given, from: map[string]string{}, scope: scope, mounter: given[legacyMounter]}
	for _, row := range k8sS3Parameters() {
		if _, ok := given[row.Name]; ok {
			c.legacy = true
		}
	}
	return c
}

// root returns the prefix of fields in errors.
func (c *conversion) root() string {
	if c.scope == ScopeClass {
		return "parameters."
	}
	return "volume_context."
}

// field returns the name of an attribute as its author wrote it, for errors.
func (c *conversion) field(key string) string {
	if from, ok := c.from[key]; ok {
		return from
	}
	return c.root() + printable(key)
}

// keys converts the attributes or parameters that have rows, and removes the originals.
func (c *conversion) keys(rows []ForeignDoc) {
	for _, row := range rows {
		value, ok := c.given[row.Name]
		if !ok || row.Outcome == Same && row.read == nil || row.only != "" && row.only != c.scope {
			continue
		}
		// First, because the converted setting may have the same name.
		delete(c.given, row.Name)
		c.take(row, legacyKey{field: c.root() + row.Name, name: row.Name, value: value, hasValue: true})
	}
}

func (c *conversion) take(row ForeignDoc, k legacyKey) {
	switch {
	case row.read != nil:
		row.read(c, k)
	case row.Outcome == Same && k.hasValue && k.value != "true":
		c.refuse(k, "%s with a value other than true is not supported: %s", k.name, row.Here)
	case row.Outcome == Mapped:
		c.put(row.key, k)
	case row.Outcome == Checked:
		c.claims = append(c.claims, Claim{Kind: row.claim, Field: k.field, Value: k.value})
	case row.Outcome == Ignored:
		c.ignore(k, row.Here)
	case row.Outcome == Refused:
		c.refuse(k, "%s is not supported: %s", k.name, row.Here)
	}
}

// put sets the attribute key to the value of k.
func (c *conversion) put(key string, k legacyKey) {
	if !k.hasValue {
		c.refuse(k, "%s needs a value", k.name)
		return
	}
	value := k.value
	if key == keyPrefix {
		value = withSlash(value)
	}
	if have, ok := c.given[key]; ok && have != value && (key != keyPrefix || withSlash(have) != value) {
		c.refuse(k, "%s contradicts %s; remove one of them", k.name, key)
		return
	}
	c.given[key], c.from[key] = value, k.field
}

// ignore adds a note for the log, without the value.
func (c *conversion) ignore(k legacyKey, here string) {
	c.ignored = append(c.ignored, fmt.Sprintf("%s: %s: %s", k.field, k.name, here))
}

// refuse adds an error, so that an author can correct all at once.
func (c *conversion) refuse(k legacyKey, format string, args ...any) {
	text := fmt.Errorf(format, args...).Error()
	if c.refusedAt = cmp.Or(c.refusedAt, k.field); c.refusedAt != k.field {
		text = k.field + ": " + text
	}
	c.refused = append(c.refused, text)
}

// err returns all refusals in one error.
func (c *conversion) err() error {
	if len(c.refused) == 0 {
		return nil
	}
	return fault.Field(c.refusedAt, "%s", strings.Join(c.refused, "; "))
}
