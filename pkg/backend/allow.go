package backend

import (
	"errors"
	"fmt"
	"regexp"
	"strings"

	"github.com/s3-csi/s3-csi-driver/pkg/credentials"
	"github.com/s3-csi/s3-csi-driver/pkg/fault"
)

// Allow is an operator's list of rules. A use must match one of them. It is immutable.
type Allow struct{ rules []rule }

// rule matches a use if each value that it restricts matches one of its patterns.
type rule struct {
	Namespaces []string `json:"namespaces"`
	Buckets    []string `json:"buckets"`
	Roles      []string `json:"roles"`
	Sources    []string `json:"sources"`
}

// Use is one use of a backend: a publication, or the creation of a volume.
type Use struct {
	Namespace string // the pod's or the claim's; "": unknown
	Bucket    string
	RoleARN   string // of the session; "": keys without a role
	Source    string // credentials.Source…
	// Creation of a volume: an empty role or source is not yet known and not checked. Publications are checked again.
	Creation bool
}

// Allows refuses a use that the operator's rules do not allow. The error is Denied and names the closest rule.
func (b Backend) Allows(u Use) error {
	if b.Allow == nil {
		return nil
	}
	var nearest []string
	at := 0
	for i, r := range b.Allow.rules {
		lacks := r.lacks(u)
		if len(lacks) == 0 {
			return nil
		}
		if nearest == nil || len(lacks) < len(nearest) {
			nearest, at = lacks, i
		}
	}
	return fault.See("docs/reference/configuration.md#rules", fault.Errorf(fault.Denied, "the operator's rules (allow of %s in the driver's config file) do not "+
		"allow "+
		"%s: the closest rule, backends.%s.allow[%d], lacks %s; extend it or add a rule", b, u, b.Name, at, strings.Join(nearest, " and ")))
}

// String describes the use in messages.
func (u Use) String() string {
	s := "bucket " + u.Bucket
	if u.Namespace == "" {
		s += " for an unknown namespace (needs podInfoOnMount: true in the CSIDriver object and --extra-create-metadata of external-provisioner)"
	} else {
		s += " for namespace " + u.Namespace
	}
	if u.Source != "" {
		s += " with credentials: " + u.Source
	}
	if u.RoleARN != "" {
		s += " and role " + u.RoleARN
	} else if !u.Creation {
		s += " and no role"
	}
	return s
}

// lacks returns the values of the use that the rule does not match.
func (r rule) lacks(u Use) (lacks []string) {
	for _, c := range []struct {
		key, value string
		patterns   []string
		later      bool
	}{
		{"namespaces", u.Namespace, r.Namespaces, false},
		{"buckets", u.Bucket, r.Buckets, false},
		{"roles", u.RoleARN, r.Roles, u.Creation},
		{"sources", u.Source, r.Sources, u.Creation},
	} {
		if len(c.patterns) == 0 || c.value == "" && c.later || MatchesAny(c.patterns, c.value) {
			continue
		}
		lacks = append(lacks, fmt.Sprintf("%q in %s", c.value, c.key))
	}
	return lacks
}

// MatchesAny reports whether a value matches one of the patterns, in which * stands for any text.
func MatchesAny(patterns []string, value string) bool {
	for _, p := range patterns {
		if p == "*" || value != "" && matches(p, value) {
			return true
		}
	}
	return false
}

// matches reports whether the pattern, in which * stands for any text, matches the whole value.
func matches(pattern, value string) bool {
	return regexp.MustCompile("(?s)^" + strings.ReplaceAll(regexp.QuoteMeta(pattern), `\*`, ".*") + "$").MatchString(value)
}

// newAllow checks the file's rules. No rules are nil.
func newAllow(rules []rule, place string) (*Allow, error) {
	if len(rules) == 0 {
		return nil, nil
	}
	for i, r := range rules {
		at := fmt.Sprintf("%s[%d]", place, i)
		if len(r.Namespaces)+len(r.Buckets)+len(r.Roles)+len(r.Sources) == 0 {
			return nil, fault.Field(at, "restricts nothing, so it would allow everything; add namespaces, buckets, roles or sources, or omit allow")
		}
		for _, list := range []struct {
			key   string
			items []string
			chars string
		}{
			{"namespaces", r.Namespaces, "-"}, {"buckets", r.Buckets, "-._:/"}, {"roles", r.Roles, ":/+=,.@-_"}, {"sources", r.Sources, ""},
		} {
			for _, item := range list.items {
				if err := checkPattern(item, list.chars); err != nil {
					return nil, fault.Field(at+"."+list.key, "%q %w", Clip(item, 100), err)
				}
			}
		}
		for _, s := range r.Sources {
			if err := oneOf(at+".sources", s, credentials.SourceDriver, credentials.SourceSecret, credentials.SourceWorkload); err != nil {
				return nil, err
			}
		}
	}
	return &Allow{rules}, nil
}

// checkPattern refuses patterns of other syntaxes and those that no value can match.
func checkPattern(p, chars string) error {
	if len(p) > 2048 {
		return errors.New("is too long")
	}
	for _, c := range p {
		if c != '*' && (c < '0' || c > '9') && (c < 'A' || c > 'Z') && (c < 'a' || c > 'z') && !strings.ContainsRune(chars, c) {
			return fmt.Errorf("contains %q; only * is a wildcard, and other characters must be valid in the name", c)
		}
	}
	return nil
}
