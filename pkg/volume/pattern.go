package volume

import (
	"regexp"
	"sync"
)

// pattern compiles a regular expression when it is first used: every mount's helper links this package, and uses none.
func pattern(text string) func() *regexp.Regexp {
	return sync.OnceValue(func() *regexp.Regexp { return regexp.MustCompile(text) })
}
