//go:build linux

package host

import (
	"context"
	"errors"
	"fmt"
	"reflect"
	"strings"
	"testing"

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

func TestMountTableIsReadUntilTwoReadsAgree(t *testing.T) {
	table := func(id int) []byte { return fmt.Appendf(nil, "%d 1 0:5 / /t rw - tmpfs t rw\n", id) }
	reads := 0
	settled := func() ([]byte, error) { reads++; return table(min(reads, 4)), nil }
	mounts, err := stableMounts(t.Context(), "t", settled)
	if err != nil || reads != 5 || mounts[0].ID != 4 {
		t.Errorf("%d reads, %+v, %v", reads, mounts, err)
	}
	reads = 0
	if _, err := stableMounts(t.Context(), "t", func() ([]byte, error) { reads++; return table(reads), nil }); !fault.Is(err, fault.Busy) || reads != maxReads {
		t.Errorf("a table that never settles: %d reads, %v", reads, err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := stableMounts(ctx, "t", settled); !errors.Is(err, context.Canceled) {
		t.Errorf("after the context's end: %v", err)
	}
	if _, err := stableMounts(t.Context(), "t", func() ([]byte, error) { return nil, unix.EACCES }); !errors.Is(err, unix.EACCES) {
		t.Errorf("unreadable: %v", err)
	}
}

func TestFdinfoMountID(t *testing.T) {
	for text, want := range map[string]int{"pos:\t0\nflags:\t02\nmnt_id:\t31\nino:\t4\n": 31, "pos: 0\n": 0, "mnt_id:\tx\n": 0, "": 0} {
		if got, ok := fdinfoMountID(text); got != want || ok != (want != 0) {
			t.Errorf("%q: %d %v", text, got, ok)
		}
	}
}
