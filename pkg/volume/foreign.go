package volume

import (
	"fmt"
	"strings"

	"github.com/s3-csi/s3-csi-driver/pkg/fault"
)

// AWSDriverName is the name of the AWS Mountpoint S3 CSI driver. Under that name, a static volume that names no client is one
// of that driver's, with its defaults.
const AWSDriverName = "s3.csi.aws.com"

// Origin is whose word a row of ForeignDocs explains.
type Origin string

// The origins, in the order of the table.
const (
	OriginAWSAttribute Origin = "volume attribute of " + AWSDriverName
	OriginAWSOption    Origin = "mount option of " + AWSDriverName
	OriginOption       Origin = "mount option that stands for an attribute"
	OriginK8sS3        Origin = "StorageClass parameter and volume attribute of k8s-csi-s3"
	OriginSecret       Origin = "key of a secret of k8s-csi-s3"
	OriginRclone       Origin = "options of k8s-csi-s3, mounter rclone"
	OriginGeeseFS      Origin = "options of k8s-csi-s3, mounter geesefs"
	OriginS3FS         Origin = "options of k8s-csi-s3, mounter s3fs"
)

// Outcome is what becomes of another driver's word.
type Outcome string

const (
	// Same means here what it means there, or is so with every mount.
	Same Outcome = "same"
	// Passed is the client's option of that name, which decides about its value.
	Passed Outcome = "passed"
	// Mapped becomes what the row says.
	Mapped Outcome = "mapped"
	// Checked decides nothing: it has to be what the backend says.
	Checked Outcome = "checked"
	// Ignored means nothing here; the node's log says so.
	Ignored Outcome = "ignored"
	// Refused is an error, which says what the row says.
	Refused Outcome = "refused"
)

// ForeignDoc is one row of the table of other drivers' words.
type ForeignDoc struct {
	Origin  Origin
	Name    string
	Outcome Outcome
	Here    string // what it is here, or what to write instead: for errors and logs, too

	only  Scope     // where it can stand; "": wherever its origin says
	key   string    // of a Mapped one: the attribute that it becomes
	claim ClaimKind // of a Checked one
	// read is for what needs more than that.
	read func(t *translation, w word)
}

// others is the Name of a row for all that no other row names.
const others = "others"

// ForeignDocs is the table of other drivers' words. The parsers work by it, and docs/migrating.md is rendered from it.
func ForeignDocs() []ForeignDoc {
	var table []ForeignDoc
	for _, rows := range [][]ForeignDoc{awsAttributes(), awsOptions(), attributeOptions(), k8sS3Parameters(), k8sS3Secrets(), rcloneOptions(), geesefsOptions(), s3fsOptions()} {
		table = append(table, rows...)
	}
	return table
}

// rowNamed gives the row of that name, or the one for others.
func rowNamed(rows []ForeignDoc, name string) (ForeignDoc, bool) {
	for _, row := range rows {
		if row.Name == name {
			return row, true
		}
	}
	for _, row := range rows {
		if row.Name == others {
			return row, true
		}
	}
	return ForeignDoc{}, false
}

// ClaimKind is what a Claim is about.
type ClaimKind string

// The kinds.
const (
	ClaimEndpoint  ClaimKind = "endpoint"  // URL of the service
	ClaimRegion    ClaimKind = "region"    // to sign requests for
	ClaimPathStyle ClaimKind = "pathStyle" // the bucket is in the path
	ClaimInsecure  ClaimKind = "insecure"  // "true": certificates are not checked
)

// Claim is what a volume's author says of the service. It never decides where requests and credentials go: whoever uses the
// volume has to hold it against the backend.
type Claim struct {
	Kind  ClaimKind
	Field string // for errors
	Value string
}

// SecretClaims are those of a CSI secret, as k8s-csi-s3 has them beside the keys.
func SecretClaims(secrets map[string]string) []Claim {
	var claims []Claim
	for _, row := range k8sS3Secrets() {
		if value := secrets[row.Name]; row.Outcome == Checked && value != "" {
			claims = append(claims, Claim{Kind: row.claim, Field: "secrets." + row.Name, Value: value})
		}
	}
	return claims
}

// word is one thing that an author wrote for another driver.
type word struct {
	field    string // for errors
	name     string
	value    string
	hasValue bool
}

// translation is what an author wrote, on its way into this driver's words.
type translation struct {
	given map[string]string // by the names of attributes or parameters of this driver
	from  map[string]string // the field of what an author wrote in other words, by those names
	scope Scope

	mounter string // k8s-csi-s3's
	legacy  bool   // the context is one of k8s-csi-s3
	chosen  bool   // a mount option names the client, in the place of k8s-csi-s3's

	// What has to be seen together, or with the volume's place: k8s-csi-s3's bucket of a volume context, and the bounds of the
	// AWS driver's cache.
	bucket, cacheLimit, maxCache word

	options []Option // for the client
	claims  []Claim
	ignored []string // for the log
	refused []refusal
}

// refusal is an objection to what an author wrote.
type refusal struct {
	field string
	err   error
}

func newTranslation(given map[string]string, scope Scope) *translation {
	t := &translation{given: given, from: map[string]string{}, scope: scope, mounter: given[legacyMounter]}
	for _, row := range k8sS3Parameters() {
		if _, ok := given[row.Name]; ok {
			t.legacy = true
		}
	}
	return t
}

// root is what fields begin with.
func (t *translation) root() string {
	if t.scope == ScopeClass {
		return "parameters."
	}
	return "volume_context."
}

// field names an attribute in errors as its author wrote it.
func (t *translation) field(key string) string {
	if from, ok := t.from[key]; ok {
		return from
	}
	return t.root() + printable(key)
}

// keys reads the attributes or parameters that rows know, and takes them out of what is given.
func (t *translation) keys(rows []ForeignDoc) {
	for _, row := range rows {
		value, ok := t.given[row.Name]
		if !ok || row.Outcome == Same && row.read == nil || row.only != "" && row.only != t.scope {
			continue
		}
		// First, because some have a name of this driver's for what they become.
		delete(t.given, row.Name)
		t.take(row, word{field: t.root() + row.Name, name: row.Name, value: value, hasValue: true})
	}
}

func (t *translation) take(row ForeignDoc, w word) {
	switch {
	case row.read != nil:
		row.read(t, w)
	case row.Outcome == Mapped:
		t.put(row.key, w)
	case row.Outcome == Checked:
		t.claims = append(t.claims, Claim{Kind: row.claim, Field: w.field, Value: w.value})
	case row.Outcome == Ignored:
		t.ignore(w, row.Here)
	case row.Outcome == Refused:
		t.refuse(w, "%s is not taken over: %s", w.name, row.Here)
	}
}

// put says in this driver's words what w says.
func (t *translation) put(key string, w word) {
	if !w.hasValue {
		t.refuse(w, "%s needs a value", w.name)
		return
	}
	value := w.value
	if key == keyPrefix {
		value = withSlash(value)
	}
	if have, ok := t.given[key]; ok && have != value && (key != keyPrefix || withSlash(have) != value) {
		t.refuse(w, "%s contradicts %s, which the volume has, too: remove one of them", w.name, key)
		return
	}
	t.given[key], t.from[key] = value, w.field
}

// ignore makes a note for the log. It shows no value.
func (t *translation) ignore(w word, here string) {
	t.ignored = append(t.ignored, fmt.Sprintf("%s: %s: %s", w.field, w.name, here))
}

func (t *translation) refuse(w word, format string, args ...any) {
	t.refused = append(t.refused, refusal{w.field, fmt.Errorf(format, args...)})
}

// err is all that was refused in one error, so that an author has to write things anew only once.
func (t *translation) err() error {
	if len(t.refused) == 0 {
		return nil
	}
	first := t.refused[0].field
	texts := make([]string, len(t.refused))
	for i, r := range t.refused {
		texts[i] = r.err.Error()
		if r.field != first {
			texts[i] = r.field + ": " + texts[i]
		}
	}
	return fault.Field(first, "%s", strings.Join(texts, "; "))
}
