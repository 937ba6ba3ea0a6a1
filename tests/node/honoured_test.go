//go:build !lane || ordinary

package node

import (
	"fmt"
	"path/filepath"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"

	"github.com/s3-csi/s3-csi-driver/tests/internal/rig/rigtest"
)

// Both clients show the ids and modes that were asked for, at the limits of their ranges.
func TestIdentities_AtTheirLimitsAreShown(t *testing.T) {
	rigtest.ProcessOnly(t, "owners are options of the mount")
	t.Parallel()
	eachClient(t, func(t *testing.T, e *env, client string) {
		e.Put(t, bucket, "limits/dir/file", "x")
		for _, tt := range []struct {
			attributes []string
			change     change
			dir, file  string // "%d" is the mount's own uid
		}{
			{[]string{"uid", "4294967294", "gid", "4294967294", "dirMode", "0777", "fileMode", "0777"}, nil, "4294967294:4294967294 0777", "4294967294:4294967294 0777"},
			{[]string{"uid", "65534", "gid", "1", "dirMode", "0111", "fileMode", "0"}, nil, "65534:1 0111", "65534:1 0000"},
			{[]string{"uid", "2147483648", "gid", "2147483647", "dirMode", "0"}, nil, "2147483648:2147483647 0000", "2147483648:2147483647 0666"},
			{nil, group("4294967294"), "%d:4294967294 0770", "%d:4294967294 0660"},
			{nil, group("65534"), "%d:65534 0770", "%d:65534 0660"},
			{nil, flags(`uid="1000"`, "--gid 5", "dir-mode=750", "file-mode '0640'"), "1000:5 0750", "1000:5 0640"},
		} {
			v := static("limits", client, tt.attributes...)
			changes := []change{}
			if tt.change != nil {
				changes = append(changes, tt.change)
			}
			target := e.publish(v, "t", changes...)
			uid := e.client(client).UID
			for path, want := range map[string]string{"": tt.dir, "dir": tt.dir, "dir/file": tt.file} {
				if want[0] == '%' {
					want = fmt.Sprintf(want, uid)
				}
				if got := look(t, filepath.Join(target, path)); got != want {
					t.Errorf("%v: %q is shown as %s, want %s", tt.attributes, path, got, want)
				}
			}
			e.unpublish(v, target)
		}
		v := static("limits", client)
		if client == mountpoint {
			want(t, e.tryPublish(10*time.Second, v, e.Target("t"), group("0")), codes.InvalidArgument, "volume_mount_group")
			e.undone(e.Target("t"))
		} else {
			target := e.publish(v, "t", group("0"))
			if got, want := look(t, target), fmt.Sprintf("%d:0 0770", e.client(client).UID); got != want {
				t.Errorf("group 0: %s, want %s", got, want)
			}
			e.unpublish(v, target)
		}
		e.NothingLeft(t)
	})
}

// A prefix is the one that was meant, with both clients: quotes around it are none of the keys', other characters are.
func TestPrefixes_AreShownAsMeant(t *testing.T) {
	rigtest.ProcessOnly(t, "requests are read before anything is started")
	t.Parallel()
	eachClient(t, func(t *testing.T, e *env, client string) {
		for i, prefix := range []string{"hello world/", "-o x/", `it's a "test"/`, "100%/a+b/", "größe/日本/", "a&b=c?d#e/", "~*/", `back\slash/`} {
			e.Put(t, bucket, prefix+"file", prefix)
			for _, publish := range []func() (*csi.Volume, []change){
				func() (*csi.Volume, []change) {
					return &csi.Volume{VolumeId: fmt.Sprintf("prefix-%d", i), VolumeContext: map[string]string{"bucketName": bucket, "client": client, "prefix": prefix}}, nil
				},
				func() (*csi.Volume, []change) {
					return &csi.Volume{VolumeId: fmt.Sprintf("flag-%d", i), VolumeContext: map[string]string{"bucketName": bucket, "client": client}},
						[]change{flags(`prefix "` + prefix + `"`)}
				},
			} {
				v, changes := publish()
				if len(changes) > 0 && prefix[0] == 'i' {
					continue // has quotes of its own, and is an attribute only
				}
				target := e.publish(v, "t", changes...)
				if got := read(t, filepath.Join(target, "file")); got != prefix {
					t.Errorf("%s: the prefix %q shows the file of %q", v.GetVolumeId(), prefix, got)
				}
				e.unpublish(v, target)
			}
		}
		for _, flag := range []string{`prefix "hello`, "prefix =hello/", "prefix hello/,debug", `prefix hello\ world/`} {
			v := &csi.Volume{VolumeId: "refused", VolumeContext: map[string]string{"bucketName": bucket, "client": client}}
			want(t, e.tryPublish(10*time.Second, v, e.Target("t"), flags(flag)), codes.InvalidArgument, "mount_flags[0]")
		}
		e.NothingLeft(t)
	})
}
