//go:build linux

package host

import (
	"context"
	"errors"
	"fmt"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/s3-csi/s3-csi-driver/pkg/fault"
)

func TestParseMounts(t *testing.T) {
	long := strings.Repeat("lowerdir=/x:", 20000)
	for _, tc := range []struct {
		name, line string
		want       Mount
	}{
		{"plain", "36 35 98:1 / /mnt rw,noatime - ext4 /dev/vda rw,errors=continue",
			Mount{36, 35, 98, 1, "/", "/mnt", "rw,noatime", "ext4", "/dev/vda", "rw,errors=continue", nil}},
		{"escapes and propagation", `1 2 0:53 /a\040b /t\134\011\012 ro shared:7 master:3 - fuse s3csi:default:b/p\040q/:k-1 rw,user_id=1`,
			Mount{1, 2, 0, 53, "/a b", "/t\\\t\n", "ro", "fuse", "s3csi:default:b/p q/:k-1", "rw,user_id=1", []string{"shared:7", "master:3"}}},
		{"no source", "1 2 0:5 / /t rw unbindable - tmpfs  rw", Mount{1, 2, 0, 5, "/", "/t", "rw", "tmpfs", "", "rw", []string{"unbindable"}}},
		{"a line too long for the parser", "1 2 0:5 / /t rw - overlay overlay " + long, Mount{1, 2, 0, 5, "/", "/t", "rw", "overlay", "overlay", long[:maxLine-len("1 2 0:5 / /t rw - overlay overlay ")], nil}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			got, err := parseMounts([]byte(tc.line + "\n"))
			if err != nil || len(got) != 1 {
				t.Fatalf("%d mounts, %v", len(got), err)
			}
			if len(got[0].Optional) == 0 {
				got[0].Optional = nil
			}
			if !reflect.DeepEqual(got[0], tc.want) {
				t.Errorf("got  %+v\nwant %+v", got[0], tc.want)
			}
		})
	}
	if _, err := parseMounts([]byte("nonsense\n")); err == nil {
		t.Error("nonsense was parsed")
	}
}

func FuzzParseMounts(f *testing.F) {
	f.Add([]byte("36 35 98:1 / /mnt rw,noatime shared:1 - ext4 /dev/vda rw\n"))
	f.Add([]byte("1 2 0:53 / /a\\040b rw - fuse s3csi:x - rw\n"))
	f.Add([]byte("1 2 0: / / - - - - - -\n"))
	f.Add([]byte(""))
	f.Fuzz(func(t *testing.T, data []byte) {
		mounts, err := parseMounts(data)
		if err == nil && len(mounts) > strings.Count(string(data), "\n")+1 {
			t.Errorf("%d mounts of %q", len(mounts), data)
		}
	})
}

func TestReadOnly(t *testing.T) {
	for _, tc := range []struct {
		options, super string
		want           bool
	}{{"rw,nosuid", "rw", false}, {"ro,nosuid", "rw", true}, {"rw", "ro,user_id=0", true}, {"rw,errors=remount-ro", "rw,root=x", false}} {
		if got := (Mount{Options: tc.options, SuperOptions: tc.super}).ReadOnly(); got != tc.want {
			t.Errorf("%q %q: %v", tc.options, tc.super, got)
		}
	}
}

func TestMountTableIsReadUntilItIsStable(t *testing.T) {
	reads := 0
	settles := func(after int) func() ([]byte, bool, error) {
		reads = 0
		return func() ([]byte, bool, error) {
			reads++
			return fmt.Appendf(nil, "%d 1 0:5 / /t rw - tmpfs t rw\n", reads), reads == after, nil
		}
	}
	mounts, err := stableMounts(t.Context(), "t", settles(4))
	if err != nil || reads != 4 || mounts[0].ID != 4 {
		t.Errorf("%d reads, %+v, %v", reads, mounts, err)
	}
	if _, err := stableMounts(t.Context(), "t", settles(maxReads+1)); !fault.Is(err, fault.Busy) || reads != maxReads {
		t.Errorf("a table that never settles: %d reads, %v", reads, err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := stableMounts(ctx, "t", settles(1)); !errors.Is(err, context.Canceled) {
		t.Errorf("after the context's end: %v", err)
	}
	if _, err := stableMounts(t.Context(), "t", func() ([]byte, bool, error) { return nil, true, unix.EACCES }); !errors.Is(err, unix.EACCES) {
		t.Errorf("unreadable: %v", err)
	}
}

// The kernel reports each change of the table to who has it open, once.
func TestChangesOfTheMountTableAreNoticed(t *testing.T) {
	needMounts(t)
	n := testNamespace(t)
	dir := hostDir(t, n)
	place := mkdir(t, dir, "place")
	do(t, n, "changing mounts", func() error {
		table, err := openTable(unix.AT_FDCWD, threadMountinfo)
		if err != nil {
			return err
		}
		defer table.close()
		look := func(when string, want bool) {
			if _, stable, err := table.read(); err != nil || stable != want {
				t.Errorf("%s: stable %t, %v", when, stable, err)
			}
		}
		look("nothing has changed", true)
		for _, change := range []struct {
			what string
			do   func() error
		}{
			{"a mount", func() error { return unix.Mount("s3csi-test", place, "tmpfs", 0, "") }},
			{"an unmount", func() error { return unix.Unmount(place, 0) }},
			{"a bind mount", func() error { return unix.Mount(dir, place, "", unix.MS_BIND, "") }},
			{"a lazy unmount", func() error { return unix.Unmount(place, unix.MNT_DETACH) }},
		} {
			if err := change.do(); err != nil {
				return fmt.Errorf("%s: %w", change.what, err)
			}
			look("after "+change.what, false)
			look("a moment after "+change.what, true)
		}
		return nil
	})
}

// A table that does not fit into one buffer is complete.
func TestALargeMountTableIsComplete(t *testing.T) {
	needMounts(t)
	n := testNamespace(t)
	dir := hostDir(t, n)
	const count = 3 * tableSize / 100 // a line has more bytes
	do(t, n, "mounting", func() error {
		for i := range count {
			if err := unix.Mount("s3csi-test", mkdir(t, dir, fmt.Sprintf("mount-%d", i)), "tmpfs", 0, "size=4k"); err != nil {
				return err
			}
		}
		return nil
	})
	mounts, err := n.Mounts(within(t, 10*time.Second))
	if err != nil {
		t.Fatal(err)
	}
	mounts = slices.DeleteFunc(slices.Clone(mounts), func(m Mount) bool { return !isBelow(m.Mountpoint, dir) })
	if len(mounts) != count {
		t.Errorf("%d mounts, want %d", len(mounts), count)
	}
}

func TestFdinfoMountID(t *testing.T) {
	for text, want := range map[string]int{"pos:\t0\nflags:\t02\nmnt_id:\t31\nino:\t4\n": 31, "pos: 0\n": 0, "mnt_id:\tx\n": 0, "": 0} {
		if got, ok := fdinfoMountID(text); got != want || ok != (want != 0) {
			t.Errorf("%q: %d %v", text, got, ok)
		}
	}
}
