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
		{"a long field", "1 2 0:5 / /t rw - overlay overlay " + long, Mount{1, 2, 0, 5, "/", "/t", "rw", "overlay", "overlay", long[:maxField] + "\x00", nil}},
		{"a long field before others", "1 2 0:5 /" + long + " /t ro - ext4 /dev/vda rw",
			Mount{1, 2, 0, 5, ("/" + long)[:maxField] + "\x00", "/t", "ro", "ext4", "/dev/vda", "rw", nil}},
		{"the longest path", "1 2 0:5 /" + long[:maxField-1] + " /t ro - ext4 /dev/vda rw",
			Mount{1, 2, 0, 5, "/" + long[:maxField-1], "/t", "ro", "ext4", "/dev/vda", "rw", nil}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			for _, size := range []int{1, 7, 1 << 20} { // of the parts that the kernel returns
				p := parse([]byte("not a mount\n"+tc.line+"\n\n"), size)
				if p.skipped != 2 || p.sample != "not a mount" || len(p.mounts) != 1 || !reflect.DeepEqual(p.mounts[0], tc.want) {
					t.Errorf("in parts of %d: skipped %d (%q)\ngot  %+v\nwant %+v", size, p.skipped, p.sample, p.mounts, tc.want)
				}
			}
		})
	}
}

// parse parses a table that comes in parts of a size.
func parse(data []byte, size int) (p tableParser) {
	for part := range slices.Chunk(data, size) {
		p.add(part)
	}
	return p
}

func FuzzMountTable(f *testing.F) {
	f.Add([]byte("36 35 98:1 / /mnt rw,noatime shared:1 - ext4 /dev/vda rw\n"))
	f.Add([]byte("1 2 0:53 / /a\\040b rw - fuse s3csi:x - rw\n"))
	f.Add([]byte("1 2 0: / / - - - - - -\n"))
	f.Add([]byte("1 2 0:5 /\\000\\377\\400\\8\\04 /a\x00b rw shared:1 master:2 propagate_from:3 unbindable - t s rw\n"))
	f.Add([]byte("1 2 0:5 / /t rw - t  \n1 2 0:5 / /t rw - t\n1 2 0:5 / /t - rw t t\n"))
	f.Add([]byte("1 2 0:5 /" + strings.Repeat("d/", 40<<10) + " /t rw - ext4 /dev/vda rw\n2 1 0:6 / /u rw - tmpfs t rw\n"))
	f.Add([]byte(strings.Repeat(" ", 1000) + "\n" + strings.Repeat("1", 1000)))
	f.Add([]byte(""))
	f.Fuzz(func(t *testing.T, data []byte) {
		p := parse(data, len(data)+1)
		if len(p.mounts)+p.skipped != strings.Count(string(data), "\n") {
			t.Errorf("%d mounts and %d other lines of %q", len(p.mounts), p.skipped, data)
		}
		for _, m := range p.mounts {
			for _, field := range append(m.Optional, m.Root, m.Mountpoint, m.Options, m.FSType, m.Source, m.SuperOptions) {
				if len(field) > maxField+1 {
					t.Errorf("too long: %+v", m)
				}
			}
		}
		if parts := parse(data, 3); !reflect.DeepEqual(parts.mounts, p.mounts) || parts.skipped != p.skipped {
			t.Errorf("other mounts in parts: %+v, %+v", parts.mounts, p.mounts)
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
	settles := func(after int) func(context.Context, *tableParser) (bool, error) {
		reads = 0
		return func(_ context.Context, p *tableParser) (bool, error) {
			reads++
			p.mounts = []Mount{{ID: reads}}
			return reads == after, nil
		}
	}
	file := tableFile{path: "t"}
	table, err := file.parseStable(t.Context(), settles(4))
	if err != nil || reads != 4 || table.mounts[0].ID != 4 {
		t.Errorf("%d reads, %+v, %v", reads, table.mounts, err)
	}
	if _, err := file.parseStable(t.Context(), settles(maxReads+1)); !fault.Is(err, fault.Busy) || reads != maxReads {
		t.Errorf("a table that never settles: %d reads, %v", reads, err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := file.parseStable(ctx, settles(1)); !errors.Is(err, context.Canceled) {
		t.Errorf("after the context's end: %v", err)
	}
	if _, err := file.parseStable(t.Context(), func(context.Context, *tableParser) (bool, error) { return true, unix.EACCES }); !errors.Is(err, unix.EACCES) {
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
		table, err := tableFile{path: threadMountinfo}.open()
		if err != nil {
			return err
		}
		defer table.close()
		look := func(when string, want bool) {
			if stable, err := table.read(t.Context(), &tableParser{}); err != nil || stable != want {
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

func TestKnownMounts_AreReadAgainOnlyAfterAChange(t *testing.T) {
	needMounts(t)
	n := testNamespace(t)
	t.Cleanup(n.known.table.close)
	place := mkdir(t, hostDir(t, n), "place")
	for _, change := range []func() error{
		func() error { return nil },
		func() error { return unix.Mount("s3csi-test", place, "tmpfs", 0, "") },
		func() error { return unix.Unmount(place, 0) },
	} {
		do(t, n, "changing mounts", change)
		before := n.Reads()
		for range 100 {
			known, err := n.KnownMounts(within(t, 10*time.Second))
			if err != nil {
				t.Fatal(err)
			}
			if all, err := readMounts(t.Context(), n.mountinfo); err != nil || !reflect.DeepEqual(known, all) {
				t.Fatalf("%+v\nwant %+v, %v", known, all, err)
			}
		}
		if reads := n.Reads() - before; reads != 1 {
			t.Errorf("%d reads after one change", reads)
		}
	}
}

// A table that does not fit into one buffer is complete.
func TestALargeMountTableIsComplete(t *testing.T) {
	needMounts(t)
	n := testNamespace(t)
	dir := hostDir(t, n)
	const count = 3 * readSize / 100 // a line has more bytes
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
