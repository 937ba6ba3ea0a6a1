package client

import "regexp"

// pattern is a regular expression that is compiled when it is used: every mount's helper links this package, and uses none.
type pattern string

// MatchString is that of package regexp.
func (p pattern) MatchString(s string) bool { return regexp.MustCompile(string(p)).MatchString(s) }

// FindStringSubmatch is that of package regexp.
func (p pattern) FindStringSubmatch(s string) []string {
	return regexp.MustCompile(string(p)).FindStringSubmatch(s)
}
