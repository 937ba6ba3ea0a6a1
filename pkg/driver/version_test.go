package driver

import (
	"runtime/debug"
	"testing"
)

func TestVersion(t *testing.T) {
	vcs := []debug.BuildSetting{{Key: "vcs.revision", Value: "0123456789abcdef0123"}, {Key: "vcs.modified", Value: "true"}}
	for _, tt := range []struct {
		stamped string
		info    *debug.BuildInfo
		want    string
	}{
		{"v1.2.3", &debug.BuildInfo{}, "v1.2.3"},
		{"", nil, "unknown"},
		{"", &debug.BuildInfo{}, "devel"},
		{"", &debug.BuildInfo{Main: debug.Module{Version: "(devel)"}, Settings: vcs}, "devel+0123456789ab.dirty"},
		{"", &debug.BuildInfo{Main: debug.Module{Version: "v1.0.0"}}, "v1.0.0"},
		{"", &debug.BuildInfo{Main: debug.Module{Version: "v0.0.0-20260101000000-0123456789ab"}, Settings: vcs}, "v0.0.0-20260101000000-0123456789ab"},
	} {
		if got := VersionFrom(tt.stamped, tt.info); got != tt.want {
			t.Errorf("%q, %+v: %q, want %q", tt.stamped, tt.info, got, tt.want)
		}
	}
}
