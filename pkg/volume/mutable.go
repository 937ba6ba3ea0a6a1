package volume

import (
	"maps"
	"slices"
	"strings"

	"github.com/s3-csi/s3-csi-driver/pkg/fault"
)

const (
	// maxTags leaves room for the driver's own tags among the 50 of a bucket.
	maxTags = 35
	// The limits of a tag, in characters (https://docs.aws.amazon.com/AmazonS3/latest/userguide/CostAllocTagging.html).
	maxTagKey   = 128
	maxTagValue = 256
)

// Mutable are the settings of a volume that can be changed after its creation, by a VolumeAttributesClass. Zero values change nothing.
type Mutable struct {
	OnDelete OnDelete
	Tags     map[string]string // of a bucket volume; an empty value removes the tag
	Usage    Usage
}

// ParseMutable parses mutable_parameters. Keys below csi.storage.k8s.io/ are the metadata of external-resizer. Errors are Invalid, and
// name every key that is unknown or immutable.
func ParseMutable(params map[string]string) (Mutable, error) {
	const field = "mutable_parameters"
	given, err := authored(params, field)
	if err != nil {
		return Mutable{}, err
	}
	all := parameters(ScopeClass)
	var unknown, fixed, problems []string
	for _, key := range slices.Sorted(maps.Keys(given)) {
		switch doc, known := all.row(key); {
		case !known:
			unknown = append(unknown, key)
		case !doc.Mutable:
			fixed = append(fixed, key)
		}
	}
	if unknown != nil {
		problems = append(problems, "unknown: "+strings.Join(unknown, ", "))
	}
	if fixed != nil {
		problems = append(problems, "fixed at creation: "+strings.Join(fixed, ", "))
	}
	if problems != nil {
		all.rows = slices.DeleteFunc(all.rows, func(doc ParameterDoc) bool { return !doc.Mutable })
		return Mutable{}, fault.Field(field, "%s; those that can be changed are %s", strings.Join(problems, "; "), strings.Join(all.names(), ", "))
	}
	var p Parameters
	err = all.parse(&p, given, func(key string) string { return field + "." + key })
	return p.Mutable, err
}

// parseTags parses "key=value,key=value". The characters are those that every service accepts in tags.
func parseTags(value, field string) (map[string]string, error) {
	tags := map[string]string{}
	for pair := range strings.SplitSeq(value, ",") {
		key, text, ok := strings.Cut(strings.TrimSpace(pair), "=")
		if !ok || key == "" {
			return nil, fault.Field(field, `%q is not a list of tags such as "team=data,cost-centre=42"`, value)
		}
		lower := strings.ToLower(key)
		switch {
		case strings.HasPrefix(lower, "aws:") || strings.HasPrefix(lower, "s3.csi/"):
			return nil, fault.Field(field, "the tag %q is reserved", key)
		case len(key) > maxTagKey || len(text) > maxTagValue:
			return nil, fault.Field(field, "the tag %q is too long: its key may have %d characters, its value %d", key, maxTagKey, maxTagValue)
		case strings.ContainsFunc(key+text, func(r rune) bool { return !isTagRune(r) }) || strings.TrimSpace(key) != key || strings.TrimSpace(text) != text:
			return nil, fault.Field(field, "the tag %q may contain only letters, digits, inner spaces and + - = . _ : / @", key)
		}
		if _, twice := tags[key]; twice {
			return nil, fault.Field(field, "the tag %q is there twice", key)
		}
		tags[key] = text
	}
	if len(tags) > maxTags {
		return nil, fault.Field(field, "are %d tags, the maximum is %d", len(tags), maxTags)
	}
	return tags, nil
}

func isTagRune(r rune) bool {
	return 'a' <= r && r <= 'z' || 'A' <= r && r <= 'Z' || '0' <= r && r <= '9' || strings.ContainsRune(" +-=._:/@", r)
}

// formatTags is the inverse of parseTags, in the order of the keys.
func formatTags(tags map[string]string) string {
	var pairs []string
	for _, key := range slices.Sorted(maps.Keys(tags)) {
		pairs = append(pairs, key+"="+tags[key])
	}
	return strings.Join(pairs, ",")
}
