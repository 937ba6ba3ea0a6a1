package volume

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"unicode"
	"unicode/utf8"
)

// checkPrefix refuses prefixes that are invalid for volumes of any origin. prefix is not empty and ends in "/". Errors continue a
// sentence about the prefix.
func checkPrefix(prefix string) error {
	switch {
	case !utf8.ValidString(prefix):
		return errors.New("is not UTF-8")
	case strings.HasPrefix(prefix, "/"):
		return errors.New(`starts with "/"`)
	case strings.Contains(prefix, "//"):
		return errors.New(`contains "//"`)
	case len(prefix) >= maxKey:
		return fmt.Errorf("has %d bytes, which leaves no room for names in keys of %d", len(prefix), maxKey)
	case strings.HasPrefix(prefix, RecordPrefix):
		return fmt.Errorf("starts with %q, where the driver keeps its records", RecordPrefix)
	}
	for _, r := range prefix {
		if isBreak(r) {
			return fmt.Errorf("contains the control character %U", r)
		}
	}
	for segment := range strings.SplitSeq(prefix, "/") {
		if segment == "." || segment == ".." {
			return fmt.Errorf("contains the path segment %q", segment)
		}
	}
	return nil
}

// maxKey is the maximum length of an object's key, in bytes (Amazon S3 User Guide, "Naming Amazon S3 objects").
const maxKey = 1024

// checkQuotes refuses a prefix in quotes, which were meant for YAML or a shell.
func checkQuotes(prefix string) error {
	if bare := strings.Trim(prefix, "\"'"); len(prefix) > len(bare)+1 && prefix[0] == prefix[len(prefix)-1] {
		return errors.New(`begins and ends with a quote; remove the quotes, or end it with "/" if they are part of the keys`)
	}
	return nil
}

// isBreak reports whether r is a control character or another character that breaks log lines.
func isBreak(r rune) bool { return unicode.IsControl(r) || r == '\u2028' || r == '\u2029' }

// checkBaseLiteral refuses characters that a base prefix must not contain in addition to checkPrefix: the separator of generations,
// wildcards and variables of session policies, and invisible characters.
func checkBaseLiteral(text string) error {
	if !utf8.ValidString(text) {
		return errors.New("is not UTF-8")
	}
	for _, r := range text {
		switch {
		case r == '@':
			return errors.New(`contains "@", which separates a volume's name from its generation`)
		case strings.ContainsRune("*?$\"\\`", r):
			return fmt.Errorf("contains %q, which a session policy cannot express safely", r)
		case !unicode.IsPrint(r):
			return fmt.Errorf("contains %U, which is a control or invisible character", r)
		}
	}
	return nil
}

// metadataKeys are the templates of a base prefix, and the keys under which external-provisioner passes their values
// when it runs with --extra-create-metadata.
func metadataKeys() map[string]string {
	return map[string]string{
		"pvc.namespace": "csi.storage.k8s.io/pvc/namespace",
		"pvc.name":      "csi.storage.k8s.io/pvc/name",
		"pv.name":       "csi.storage.k8s.io/pv/name",
	}
}

// piece is a part of a base prefix: literal text, or the value of a template.
type piece struct {
	text     string
	template string // "" for literal text
}

// splitTemplate splits a base prefix and looks up the values of its templates.
func splitTemplate(prefix string, params map[string]string) ([]piece, error) {
	var pieces []piece
	for prefix != "" {
		literal, rest, found := strings.Cut(prefix, "${")
		if err := checkBaseLiteral(literal); err != nil {
			return nil, err
		}
		pieces = append(pieces, piece{text: literal})
		if !found {
			break
		}
		name, rest, closed := strings.Cut(rest, "}")
		if !closed {
			return nil, errors.New(`contains "${" without "}"`)
		}
		keys := metadataKeys()
		key, known := keys[name]
		if !known {
			return nil, fmt.Errorf("contains the unknown template ${%s}; there are ${%s}", printable(name), strings.Join(slices.Sorted(maps.Keys(keys)), "}, ${"))
		}
		value := params[key]
		if value == "" {
			return nil, fmt.Errorf("contains ${%s}, but the request has no %s: external-provisioner must run with --extra-create-metadata", name, key)
		}
		pieces = append(pieces, piece{text: value, template: name})
		prefix = rest
	}
	return pieces, nil
}

// expandBase returns the expanded base prefix, with its last slash, of at most budget bytes. Template values that are not valid in a
// prefix are hashed. If the result is too long, long values are hashed as well, the namespace last. over is the number of
// bytes by which it is still too long.
func expandBase(prefix string, params map[string]string, budget int) (base string, over int, err error) {
	if prefix == "" {
		return "", 0, nil
	}
	if strings.TrimSpace(prefix) != prefix {
		return "", 0, errors.New("starts or ends with white space")
	}
	if err := checkQuotes(prefix); err != nil {
		return "", 0, err
	}
	pieces, err := splitTemplate(prefix, params)
	if err != nil {
		return "", 0, err
	}
	const longest = 63 // a DNS label, which namespaces are
	for i, p := range pieces {
		if p.template != "" && (!isSegment(p.text, longest) || looksHashed(p.text)) {
			pieces[i].text = hashed(p.text, shortStartLen, isSegmentByte)
		}
	}
	for _, template := range []string{"pv.name", "pvc.name", "pvc.namespace"} {
		if len(join(pieces)) <= budget {
			break
		}
		for i, p := range pieces {
			if p.template == template && !looksHashed(p.text) && len(p.text) > shortStartLen+1+hashLen {
				pieces[i].text = hashed(p.text, shortStartLen, isSegmentByte)
			}
		}
	}
	base = join(pieces)
	if err := checkPrefix(base); err != nil {
		return "", 0, err
	}
	return base, max(0, len(base)-budget), nil
}

// join returns the prefix of the pieces, with its last slash.
func join(pieces []piece) string {
	var b strings.Builder
	for _, p := range pieces {
		b.WriteString(p.text)
	}
	if s := b.String(); s == "" || strings.HasSuffix(s, "/") {
		return s
	}
	return b.String() + "/"
}

// printable returns an author's text for an error, on one line and of limited length.
func printable(s string) string {
	if len(s) > 64 {
		s = s[:64] + "…"
	}
	return strings.Map(func(r rune) rune {
		if !unicode.IsPrint(r) {
			return '?'
		}
		return r
	}, s)
}
