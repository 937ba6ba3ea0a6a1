//go:build linux

package host

import "testing"

func TestDirectoryIn_IsOnTheNearestMount(t *testing.T) {
	all := []Mount{
		{Minor: 1, Root: "/", Mountpoint: "/"}, {Minor: 2, Root: "/", Mountpoint: "/run"}, {Minor: 3, Root: "/", Mountpoint: "/run/s3"},
		{Minor: 4, Root: "/", Mountpoint: "/run/s3-csi"}, {Minor: 5, Root: "/sub", Mountpoint: "/run"},
	}
	for path, want := range map[string]Directory{
		"/run/s3-csi/resolv.conf": {0, 4, "/resolv.conf"}, "/run/s3-csix": {0, 5, "/sub/s3-csix"}, "/var": {0, 1, "/var"}, "/run": {0, 5, "/sub"},
	} {
		if d, ok := DirectoryIn(all, path); !ok || d != want {
			t.Errorf("%s: %+v", path, d)
		}
	}
	if _, ok := DirectoryIn(nil, "/run"); ok {
		t.Error("a directory in an empty table")
	}
}
