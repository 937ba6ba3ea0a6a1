//go:build linux

package host

import "testing"

// A copy on a slave of a mount of the host is unmounted with it. A copy that a container has for itself stays.
func TestLastingAfter(t *testing.T) {
	host := hostView{ids: map[int]bool{1: true}, peers: map[string]bool{"7": true}}
	parent := func(optional ...string) Mount { return Mount{ID: 20, Mountpoint: "/sources", Optional: optional} }
	stale := Mount{ID: 21, Parent: 20, Minor: 99, Mountpoint: "/sources/a"}
	for name, tc := range map[string]struct {
		parent Mount
		stays  bool
	}{
		"on a private mount":               {parent(), true},
		"on a peer":                        {parent("shared:7"), false},
		"on a slave":                       {parent("master:7"), false},
		"on a slave that is shared itself": {parent("shared:8", "master:7"), false},
		"on a slave of something else":     {parent("shared:8", "master:9"), true},
	} {
		got := host.lastingAfter([]Mount{tc.parent, stale}, func(m Mount) bool { return m.Minor == 99 })
		if (len(got) == 1) != tc.stays {
			t.Errorf("%s: %v", name, got)
		}
	}
}
