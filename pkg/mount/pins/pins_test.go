package pins

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

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

func TestPins_KeepFileSystemsWhileACopyShows(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("needs root: it mounts")
	}
	p := New(host.Own(), t.TempDir())
	name, places := strings.Repeat("a", 24)+"-2", t.TempDir()
	t.Cleanup(func() {
		mounts, _ := p.ns.Mounts(context.WithoutCancel(t.Context()))
		for _, mnt := range slices.Backward(mounts) {
			if strings.HasPrefix(mnt.Mountpoint, p.sources+"/") || strings.HasPrefix(mnt.Mountpoint, places+"/") {
				_ = host.Detach(mnt.Mountpoint)
			}
		}
	})
	table := func() []host.Mount {
		t.Helper()
		mounts, err := p.ns.Mounts(context.WithoutCancel(t.Context()))
		if err != nil {
			t.Fatal(err)
		}
		return mounts
	}
	pinned := func() int { return len(p.List(table(), name)) }
	for i := range maxPins + 1 {
		place := fmt.Sprintf("%s/%d", places, i)
		if err := os.Mkdir(place, 0o755); err != nil {
			t.Fatal(err)
		}
		if err := unix.Mount("tmpfs", place, "tmpfs", 0, ""); err != nil {
			t.Fatal(err)
		}
		for range 2 {
			mounts := table()
			from, _ := host.TopAt(mounts, place)
			if err := p.Pin(t.Context(), name, mounts, from); err != nil {
				t.Fatal(err)
			}
		}
		if want := min(i+1, maxPins); pinned() != want {
			t.Errorf("%d pins, want %d", pinned(), want)
		}
	}
	if err := p.Release(t.Context(), name); err != nil || pinned() != maxPins || !p.Names(table())[name] {
		t.Errorf("%d pins of file systems that show elsewhere, %v", pinned(), err)
	}
	if err := host.Detach(places + "/3"); err != nil {
		t.Fatal(err)
	}
	if err := p.Release(t.Context(), name); err != nil || pinned() != maxPins-1 {
		t.Errorf("%d pins after a file system was unmounted elsewhere, %v", pinned(), err)
	}
	for _, gone := range []bool{false, true} {
		err := p.Clear(t.Context(), func(context.Context, string) bool { return gone })
		if err != nil || (pinned() == 0) != gone {
			t.Errorf("%d pins of a mount that is gone: %t, %v", pinned(), gone, err)
		}
	}
}
