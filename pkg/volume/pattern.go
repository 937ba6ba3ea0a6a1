package volume

import "regexp"

// Pattern is a regular expression that is compiled when it is used: every mount's helper links packages that hold some, and uses
// none.
type Pattern string

// MatchString is that of package regexp.
func (p Pattern) MatchString(s string) bool { return regexp.MustCompile(string(p)).MatchString(s) }

// FindStringSubmatch is that of package regexp.
func (p Pattern) FindStringSubmatch(s string) []string {
	return regexp.MustCompile(string(p)).FindStringSubmatch(s)
}
