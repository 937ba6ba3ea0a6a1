package volume

import (
	"crypto/sha256"
	"encoding/base32"
	"strconv"
	"strings"
)

const (
	maxSegment    = 40 // external-provisioner's "pvc-<uuid>" just fits
	hashLen       = 20 // base32 characters: 100 bits
	shortStartLen = 7  // readable bytes in front of a hashed template value
)

// NameSegment is the volume's name as one path segment, for prefixes and for the keys of volume records: at most 40
// bytes of [A-Za-z0-9._-] that begin with a letter or a digit. A name that is that already is its own segment. Any other
// becomes a readable start, "-" and a hash of the whole name. A name that looks like such a result is hashed as well, so
// that no two names share a segment short of a collision of the hash.
func NameSegment(name string) string {
	if isSegment(name, maxSegment) && !looksHashed(name) {
		return name
	}
	return hashed(name, maxSegment-1-hashLen, isSegmentByte)
}

// element is the last path element of a volume's prefix. The separator "@" is in no segment, so that no name's later
// generation is another name's first.
func element(segment string, generation int) string {
	if generation > 1 {
		segment += "@" + strconv.Itoa(generation)
	}
	return segment + "/"
}

// isSegment tells whether s can stand in a prefix as it is.
func isSegment(s string, limit int) bool {
	if s == "" || len(s) > limit || !isAlphanumeric(s[0]) {
		return false
	}
	for i := range len(s) {
		if !isSegmentByte(s[i]) {
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

// isLower tells lower-case letters and digits.
func isLower(c byte) bool {
	return 'a' <= c && c <= 'z' || '0' <= c && c <= '9'
}

// hashed is at most start readable bytes of s, "-" and a hash of s.
func hashed(s string, start int, allowed func(byte) bool) string {
	return readable(s, start, allowed) + "-" + hash(s)
}

// readable is at most limit bytes of s in which bytes that are not allowed became "-". It begins with a letter or a digit
// ("v" if s has nothing to offer).
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

// looksHashed tells whether s ends like the results of hashed do.
func looksHashed(s string) bool {
	at := len(s) - hashLen
	if at < 2 || s[at-1] != '-' {
		return false
	}
	for i := at; i < len(s); i++ {
		if !('a' <= s[i] && s[i] <= 'z' || '2' <= s[i] && s[i] <= '7') {
			return false
		}
	}
	return true
}
