package policy

import "slices"

// grants is what a policy allows. Patterns have unescaped wildcards where these are meant.
type grants struct {
	listing  []string // actions that list keys
	prefixes []string // patterns of the prefixes that may be listed; nil: all
	bucket   []string // other actions on the bucket
	objects  []objectGrant
	except   string   // pattern of keys that are excluded although they match; "": none
	kms      []string // actions on KMS keys
	kmsOpen  bool     // to save space, nothing is denied: a key's own policy may allow more
}

// objectGrant allows actions on the objects whose keys match one of the patterns. No action is in two of them.
type objectGrant struct{ actions, keys []string }

// The parts of a policy (IAM User Guide, "IAM JSON policy elements reference"), in the order in which they are written.
type (
	document struct {
		Version   string
		Statement []statement
	}
	statement struct {
		Effect      string
		Action      oneOrMany  `json:",omitempty"`
		NotAction   oneOrMany  `json:",omitempty"`
		Resource    oneOrMany  `json:",omitempty"`
		NotResource oneOrMany  `json:",omitempty"`
		Condition   conditions `json:",omitempty"`
	}
	conditions map[string]map[string]oneOrMany // operator, key, values
	oneOrMany  []string
)

// MarshalJSON writes a single value without brackets, to save space.
func (o oneOrMany) MarshalJSON() ([]byte, error) {
	if len(o) == 1 {
		return encode(o[0])
	}
	return encode([]string(o))
}

const (
	allow = "Allow"
	deny  = "Deny"
)

func when(operator, key string, values ...string) conditions {
	return conditions{operator: {key: values}}
}

// through matches the services that use a KMS key for the session; their names end in a region.
const through = "s3.*"

// statements returns the statements that allow the grants and deny everything else: every other action, the same actions elsewhere, and
// listings of other prefixes or of none.
func (t target) statements(g grants) []statement {
	var list conditions
	if g.prefixes != nil {
		list = when("StringLike", "s3:prefix", g.prefixes...)
	}
	all := []statement{{Effect: allow, Action: g.listing, Resource: t.buckets(), Condition: list}}
	allowed := slices.Clone(g.listing)
	if len(g.bucket) > 0 {
		all = append(all, statement{Effect: allow, Action: g.bucket, Resource: t.buckets()})
		allowed = append(allowed, g.bucket...)
	}
	for _, o := range g.objects {
		all = append(all, statement{Effect: allow, Action: o.actions, Resource: t.objects(o.keys)})
		allowed = append(allowed, o.actions...)
	}
	if len(g.kms) > 0 {
		all = append(all, t.kmsUse(g.kms))
		allowed = append(allowed, g.kms...)
	}
	if !t.plain {
		// Otherwise a bucket policy that names the session could add actions on what is allowed here.
		all = append(all, statement{Effect: deny, NotAction: unique(allowed), Resource: oneOrMany{"*"}})
	}
	reachable := t.buckets()
	switch len(g.objects) {
	case 0:
	case 1:
		reachable = append(reachable, t.objects(g.objects[0].keys)...)
	default:
		reachable = append(reachable, t.objects([]string{"*"})...)
	}
	all = append(all, statement{Effect: deny, Action: oneOrMany{"s3:*"}, NotResource: unique(reachable)})
	for _, o := range g.objects {
		if len(g.objects) > 1 {
			all = append(all, statement{Effect: deny, Action: o.actions, NotResource: t.objects(o.keys)})
		}
	}
	if g.prefixes != nil {
		// An operator with Not holds where the request has no such key (IAM User Guide, "Condition operators").
		all = append(all, statement{Effect: deny, Action: g.listing, Resource: oneOrMany{"*"}, Condition: when("StringNotLike", "s3:prefix", g.prefixes...)})
	}
	if g.except != "" {
		all = append(all,
			statement{Effect: deny, Action: oneOrMany{"s3:*"}, Resource: t.own([]string{g.except})},
			statement{Effect: deny, Action: g.listing, Resource: oneOrMany{"*"}, Condition: when("StringLike", "s3:prefix", g.except)})
	}
	if len(g.kms) > 0 && !g.kmsOpen {
		// S3 uses KMS only for objects that the session may touch.
		all = append(all, statement{Effect: deny, Action: oneOrMany{"kms:*"}, Resource: oneOrMany{"*"}, Condition: when("StringNotLike", "kms:ViaService", through)})
	}
	return append(all, t.guards()...)
}

// kmsUse allows actions on keys that are used through S3 for the bucket's objects: S3 sends KMS the object's ARN, or the bucket's where it
// has an S3 Bucket Key (S3 User Guide, "Encryption context"). The bucket of an access point is unknown.
func (t target) kmsUse(actions []string) statement {
	c := when("StringLike", "kms:ViaService", through)
	if t.accessPoint == "" {
		c["StringLike"]["kms:EncryptionContext:aws:s3:arn"] = oneOrMany{t.bucket, t.bucket + "/*"}
	}
	return statement{Effect: allow, Action: actions, Resource: oneOrMany{"*"}, Condition: c}
}

// unique drops duplicates and keeps the order.
func unique(values []string) []string {
	var kept []string
	for _, v := range values {
		if !slices.Contains(kept, v) {
			kept = append(kept, v)
		}
	}
	return kept
}
