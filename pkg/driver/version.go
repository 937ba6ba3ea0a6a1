package driver

import "runtime/debug"

// VersionFrom returns the driver's version: the one set by the linker, else the one in the Go build info, which has the commit.
func VersionFrom(stamped string, info *debug.BuildInfo) string {
	switch {
	case stamped != "":
		return stamped
	case info == nil:
		return "unknown"
	case info.Main.Version == "" || info.Main.Version == "(devel)":
		return "devel"
	}
	return info.Main.Version
}
