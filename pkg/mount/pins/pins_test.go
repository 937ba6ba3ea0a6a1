package pins

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/s3-csi/s3-csi-driver/pkg/host"
	"github.com/s3-csi/s3-csi-driver/pkg/mount"
)

// Any process can choose the name of a mount: only file systems that a mount of the driver's own pins are known.
func TestKnownFileSystems(t *testing.T) {
	name, former, other := strings.Repeat("a", 24)+"-2", strings.Repeat("a", 24)+"-1", strings.Repeat("b", 24)+"-3"
	p := New(nil, "/run/s3-csi/sources")
	known := p.Known([]host.Mount{
		{Mountpoint: "/run/s3-csi/sources/" + name, Minor: 50, Source: mount.SourceName("v", name), FSType: "fuse"},
		{Mountpoint: p.Dir(name, 49), Minor: 49, Source: mount.SourceName("v", name), FSType: "fuse"},
		{Mountpoint: "/run/s3-csi/sources/" + former, Minor: 48, Source: mount.SourceName("v", former), FSType: "fuse"},
		{Mountpoint: "/target", Minor: 47, Source: mount.SourceName("v", name), FSType: "fuse"},
		{Mountpoint: "/no target", Minor: 46, Source: mount.SourceName("v", name), FSType: "fuse"},
		{Mountpoint: p.Dir(other, 45), Minor: 45, Source: mount.SourceName("v", other), FSType: "fuse"},
		{Mountpoint: p.Dir(name, 44), Minor: 44, Source: mount.SourceName("v", name), FSType: "tmpfs"},
	}, []string{name, former}, map[string]bool{"/target": true})
	for minor, want := range map[uint32]bool{50: true, 49: true, 48: true, 47: true, 46: false, 45: false, 44: false} {
		if known.Has(host.Mount{Minor: minor}) != want {
			t.Errorf("device 0:%d: %t", minor, !want)
		}
	}
	if known.Has(host.Mount{Major: 8, Minor: 50}) {
		t.Error("a disk counts as a FUSE file system")
	}
}

// A crash between unmounting a pin and removing its directory leaves the directory.
func TestDirectoriesOfUnmountedPinsAreRemovedWithTheMount(t *testing.T) {
	p := New(host.Own(), t.TempDir())
	name, other := strings.Repeat("a", 24)+"-2", strings.Repeat("a", 24)+"-21"
	for _, dir := range []string{p.Dir(name, 49), p.Dir(name, 50), p.Dir(other, 49), filepath.Join(p.sources, name)} {
		if err := os.Mkdir(dir, 0o700); err != nil {
			t.Fatal(err)
		}
	}
	if err := p.UnpinAll(t.Context(), name); err != nil {
		t.Fatal(err)
	}
	left, err := filepath.Glob(p.sources + "/*")
	if want := []string{filepath.Join(p.sources, name), p.Dir(other, 49)}; err != nil || !slices.Equal(left, want) {
		t.Errorf("left: %q, want %q; %v", left, want, err)
	}
}
