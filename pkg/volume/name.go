package volume

import (
	"crypto/sha256"
	"encoding/base32"
	"regexp"
	"strconv"
	"strings"
)

const (
	maxSegment    = 40 // external-provisioner's "pvc-<uuid>" just fits
	hashLen       = 20 // base32 characters: 100 bits
	shortStartLen = 7  // readable bytes in front of a hashed template value
)

// NameSegment returns the volume's name as a path segment for prefixes and keys of volume records: at most 40 bytes of
// [A-Za-z0-9._-] that start with a letter or a digit. Other names become a readable start, "-" and a hash of the name. So do
// names that look like the result, so that two names have the same segment only if the hashes collide.
func NameSegment(name string) string {
	if isSegment(name, maxSegment) && !looksHashed(name) {
		return name
	}
	return hashed(name, maxSegment-1-hashLen, isSegmentByte)
}

// element returns the last path element of a volume's prefix. Segments do not contain "@", so a later generation of one name
// cannot be the first of another.
func element(segment string, generation int) string {
	if generation > 1 {
		segment += "@" + strconv.Itoa(generation)
	}
	return segment + "/"
}

// isSegment reports whether s is valid as a path segment.
func isSegment(s string, limit int) bool {
	return s != "" && len(s) <= limit && isAlphanumeric(s[0]) && consistsOf(s, isSegmentByte)
}

func consistsOf(s string, allowed func(byte) bool) bool {
	for i := range len(s) {
		if !allowed(s[i]) {
			return false
		}
	}
	return true
}

func isSegmentByte(c byte) bool {
	return isAlphanumeric(c) || c == '.' || c == '_' || c == '-'
}

func isAlphanumeric(c byte) bool {
	return isLower(c) || 'A' <= c && c <= 'Z'
}

// isLower reports whether c is a lower-case letter or a digit.
func isLower(c byte) bool {
	return 'a' <= c && c <= 'z' || '0' <= c && c <= '9'
}

// hashed returns at most start readable bytes of s, "-" and a hash of s.
func hashed(s string, start int, allowed func(byte) bool) string {
	return readable(s, start, allowed) + "-" + hash(s)
}

// readable returns at most limit bytes of s with other bytes replaced by "-". It starts with a letter or a digit ("v" if there is
// none).
func readable(s string, limit int, allowed func(byte) bool) string {
	kept := make([]byte, 0, limit)
	for i := 0; i < len(s) && len(kept) < limit; i++ {
		switch c := s[i]; {
		case allowed(c) && (len(kept) > 0 || isAlphanumeric(c)):
			kept = append(kept, c)
		case len(kept) > 0 && kept[len(kept)-1] != '-':
			kept = append(kept, '-')
		}
	}
	if text := strings.TrimRight(string(kept), "-._"); text != "" {
		return text
	}
	return "v"
}

func hash(s string) string {
	sum := sha256.Sum256([]byte(s))
	return strings.ToLower(base32.StdEncoding.EncodeToString(sum[:])[:hashLen])
}

// looksHashed reports whether s ends like a result of hashed.
func looksHashed(s string) bool {
	at := len(s) - hashLen
	return at >= 2 && s[at-1] == '-' && consistsOf(s[at:], func(c byte) bool { return 'a' <= c && c <= 'z' || '2' <= c && c <= '7' })
}

// Pattern is a regular expression that is compiled on use, because every helper links packages with patterns and uses none of them.
type Pattern string

// MatchString is like regexp.Regexp.MatchString.
func (p Pattern) MatchString(s string) bool { return regexp.MustCompile(string(p)).MatchString(s) }

// FindStringSubmatch is like regexp.Regexp.FindStringSubmatch.
func (p Pattern) FindStringSubmatch(s string) []string {
	return regexp.MustCompile(string(p)).FindStringSubmatch(s)
}
