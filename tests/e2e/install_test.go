//go:build !lane || shared

package e2e

import (
	"testing"
)

func TestExpected(t *testing.T) {
	t.Parallel()
	for said, want := range map[string]bool{
		"\nname   state\na  healthy  1\n": true, "name state\na healthy 1": true, "name state\na stale 1": false, "name state\na healthy 1\nb healthy 2": false,
		"": false,
	} {
		if expected("name state\n… healthy 1\n").MatchString(said) != want {
			t.Errorf("%q: want %t", said, want)
		}
	}
}
