package driver

import (
	"runtime/debug"
	"testing"
)

func TestVersion(t *testing.T) {
	for _, tt := range []struct {
		stamped string
		info    *debug.BuildInfo
		want    string
	}{
		{"v1.2.3", &debug.BuildInfo{}, "v1.2.3"},
		{"", nil, "unknown"},
		{"", &debug.BuildInfo{}, "devel"},
		{"", &debug.BuildInfo{Main: debug.Module{Version: "v1.0.0"}}, "v1.0.0"},
	} {
		if got := VersionFrom(tt.stamped, tt.info); got != tt.want {
			t.Errorf("%q, %+v: %q, want %q", tt.stamped, tt.info, got, tt.want)
		}
	}
}
