package driver

import (
	"errors"
	"fmt"
	"math"
	"net"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"
)

// UIDRange is a range of user ids of the host, both ends included. It is a pflag.Value.
type UIDRange struct{ First, Last uint32 }

const (
	firstUID = 1000  // lower ids are system users on every Linux distribution
	nobody   = 65534 // shared by all ids without a mapping
)

// String returns the form that Set reads.
func (r *UIDRange) String() string { return fmt.Sprintf("%d-%d", r.First, r.Last) }

// Type returns the name of the value in help texts.
func (r *UIDRange) Type() string { return "first-last" }

// Set reads "first-last".
func (r *UIDRange) Set(s string) error {
	a, b, ok := strings.Cut(s, "-")
	first, errFirst := strconv.ParseUint(a, 10, 32)
	last, errLast := strconv.ParseUint(b, 10, 32)
	switch {
	case !ok || errFirst != nil || errLast != nil:
		return errors.New("want two user ids, such as 2000000-2065535")
	case first < firstUID:
		return fmt.Errorf("ids below %d are system users", firstUID)
	case last < first:
		return errors.New("the last id is smaller than the first")
	case first <= nobody && nobody <= last:
		return fmt.Errorf("the range contains %d, the overflow uid \"nobody\"", nobody)
	case last == math.MaxUint32:
		return fmt.Errorf("%d is not a user id: in Linux it means \"unchanged\"", uint32(math.MaxUint32))
	}
	*r = UIDRange{First: uint32(first), Last: uint32(last)}
	return nil
}

// optional accepts an empty value and checks others.
func optional(check func(string) error, value string) error {
	if value == "" {
		return nil
	}
	return check(value)
}

// wrongIf returns an error with the text if a value is wrong.
func wrongIf(wrong bool, format string, args ...any) error {
	if wrong {
		return fmt.Errorf(format, args...)
	}
	return nil
}

func checkAbsolute(path string) error {
	switch {
	case !filepath.IsAbs(path):
		return fmt.Errorf("%q is not an absolute path", path)
	case strings.ContainsRune(path, 0):
		return fmt.Errorf("%q contains a zero byte", path)
	case filepath.Clean(path) != path:
		return fmt.Errorf("write %q as %q", path, filepath.Clean(path))
	}
	return nil
}

func checkHostPort(s string) error {
	_, port, err := net.SplitHostPort(s)
	if err != nil {
		return fmt.Errorf("want host:port or :port: %w", err)
	}
	if _, err := strconv.ParseUint(port, 10, 16); err != nil {
		return fmt.Errorf("%q is not a port number", port)
	}
	return nil
}

func checkOneOf(value string, known []string) error {
	if slices.Contains(known, value) {
		return nil
	}
	return fmt.Errorf("%q must be one of: %s", value, strings.Join(known, ", "))
}

func checkRange[T int | time.Duration](value, low, high T) error {
	if value < low || value > high {
		return fmt.Errorf("%v is not between %v and %v", value, low, high)
	}
	return nil
}

// checkDriverName checks a name against the CSI specification of GetPluginInfoResponse.name.
func checkDriverName(name string) error {
	switch {
	case name == "":
		return errors.New("is empty")
	case len(name) > 63:
		return fmt.Errorf("%q has %d characters, the maximum is 63", name, len(name))
	case !isAlphanumeric(name[0]) || !isAlphanumeric(name[len(name)-1]):
		return fmt.Errorf("%q must start and end with a letter or digit", name)
	}
	return checkAlphabet(name, "-.")
}

func checkClusterID(id string) error {
	if len(id) > 63 {
		return fmt.Errorf("%q has %d characters, the maximum is 63", id, len(id))
	}
	return checkAlphabet(id, "-._")
}

func checkAlphabet(s, punctuation string) error {
	for i := range len(s) {
		if !isAlphanumeric(s[i]) && !strings.ContainsRune(punctuation, rune(s[i])) {
			return fmt.Errorf("%q contains %q: only letters, digits and %q are allowed", s, s[i], punctuation)
		}
	}
	return nil
}

func isAlphanumeric(c byte) bool {
	return c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z' || c >= '0' && c <= '9'
}

// checkNodeID checks an id against the CSI specification of NodeGetInfoResponse.node_id.
func checkNodeID(id string) error {
	if len(id) > 256 {
		return fmt.Errorf("has %d bytes, the maximum is 256", len(id))
	}
	if strings.ContainsFunc(id, func(r rune) bool { return r <= ' ' || r == 0x7f }) {
		return fmt.Errorf("%q contains white space or a control character", id)
	}
	return nil
}
