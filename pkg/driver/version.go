package driver

import (
	"runtime/debug"
	"strings"
)

// VersionFrom returns the driver's version: the one set by the linker, else the one in the Go build info.
func VersionFrom(stamped string, info *debug.BuildInfo) string {
	if stamped != "" {
		return stamped
	}
	if info == nil {
		return "unknown"
	}
	version := info.Main.Version
	if version == "" || version == "(devel)" {
		version = "devel"
	}
	revision, dirty := "", ""
	for _, s := range info.Settings {
		switch {
		case s.Key == "vcs.revision":
			revision = s.Value[:min(12, len(s.Value))]
		case s.Key == "vcs.modified" && s.Value == "true":
			dirty = ".dirty"
		}
	}
	if revision != "" && !strings.Contains(version, revision) {
		version += "+" + revision + dirty
	}
	return version
}
