package faults

import (
	"bytes"
	"context"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/s3-csi/s3-csi-driver/tests/internal/faultproxy"
	"github.com/s3-csi/s3-csi-driver/tests/internal/rig"
	"github.com/s3-csi/s3-csi-driver/tests/internal/rig/rigtest"
)

// uploading is a node with a volume of which a file is being stored, slowly.
type uploading struct {
	*rigtest.Node
	t       *testing.T
	proxy   *faultproxy.Proxy
	driver  *rig.Driver
	volume  *csi.Volume
	target  string
	content []byte
}

// upload makes one; start starts its first driver. The upload takes longer than what is done meanwhile on any machine, until
// hurry: some 24 seconds.
func upload(t *testing.T, start func(n *rigtest.Node) *rig.Driver) *uploading {
	t.Helper()
	u := &uploading{Node: rigtest.New(t), t: t, volume: volume("slow", rclone), content: bytes.Repeat([]byte("0123456789abcdef"), 6<<20/16)}
	u.proxy = rigtest.Proxy(t, u.Process.Endpoint())
	u.Rig.S3.Endpoint = u.proxy.Endpoint()
	u.driver = start(u.Node)
	u.target = u.Target("slow")
	rigtest.Publish(t, u.driver, u.volume, u.target)
	var begun atomic.Bool
	u.proxy.Set(faultproxy.Faults{Bandwidth: 256 << 10, Match: func(r *http.Request) bool {
		if r.Method == http.MethodPut && strings.HasSuffix(r.URL.Path, "/slow/big") {
			begun.Store(true)
		}
		return false
	}})
	for name, b := range map[string][]byte{"big": u.content, "small": []byte("small")} {
		if err := os.WriteFile(filepath.Join(u.target, name), b, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	rigtest.Await(t, 10*time.Second, "the upload to begin", begun.Load)
	return u
}

// hurry has what is left of the upload take three seconds at most.
func (u *uploading) hurry() { u.proxy.Set(faultproxy.Faults{Bandwidth: 2 << 20}) }

func drive(t *testing.T) func(*rigtest.Node) *rig.Driver {
	return func(n *rigtest.Node) *rig.Driver { return n.Drive(t, "node") }
}

// under fails the test if the upload is over already.
func (u *uploading) under() {
	u.t.Helper()
	if keys := u.Keys(u.t, bucket, "slow/big"); len(keys) > 0 {
		u.t.Fatal("the upload is over already: this test proves nothing")
	}
}

// stored fails the test unless everything is.
func (u *uploading) stored() {
	u.t.Helper()
	for name, want := range map[string][]byte{"big": u.content, "small": []byte("small")} {
		if keys := u.Keys(u.t, bucket, "slow/"+name); len(keys) == 0 {
			u.t.Errorf("%s is lost", name)
		} else if got := u.Object(u.t, bucket, "slow/"+name); got != string(want) {
			u.t.Errorf("%s has %d bytes of %d", name, len(got), len(want))
		}
	}
}

// unpublish tries until it succeeds, and calls between after each failure.
func (u *uploading) unpublish(callBound time.Duration, between func()) (tries int) {
	u.t.Helper()
	for end := time.Now().Add(time.Minute); ; tries++ {
		ctx, cancel := context.WithTimeout(u.t.Context(), callBound)
		_, err := u.driver.NodeUnpublishVolume(ctx, &csi.NodeUnpublishVolumeRequest{VolumeId: u.volume.GetVolumeId(), TargetPath: u.target})
		cancel()
		if err == nil {
			return tries
		}
		if time.Now().After(end) {
			u.t.Fatal(err)
		}
		between()
	}
}

// The driver is upgraded, and then goes back, in the middle of an upload.
func TestAnUpgradeDuringAnUploadLosesNothing(t *testing.T) {
	for _, back := range []bool{false, true} {
		name := map[bool]string{false: "upgrade", true: "rollback"}[back]
		t.Run(name, func(t *testing.T) {
			var older, newer string
			as := func(n *rigtest.Node, old bool) *rig.Driver {
				n.Program = newer
				if old {
					n.Program = older
				}
				return n.Drive(t, "node")
			}
			u := upload(t, func(n *rigtest.Node) *rig.Driver {
				var err error
				if older, err = n.InstallDriver(filepath.Join(rigtest.Bin(t), "test", "old")); err != nil {
					t.Fatalf("an older driver (make test-parts builds it): %v", err)
				}
				newer = n.Program
				return as(n, !back)
			})
			u.under()
			u.driver.Kill()
			u.driver = as(u.Node, back)
			u.under()
			u.hurry()
			u.unpublish(time.Second, func() {})
			u.stored()
			u.AwaitNothingLeft(t, clearBound)
		})
	}
}

// What a unit had to store when it was stopped, and killed because that took too long, is stored by the unpublish.
func TestAStoppedUnitLosesNothing(t *testing.T) {
	if os.Getenv(rig.EnvLauncher) != rig.LauncherSystemd {
		t.Skip("needs units of systemd: run with " + rig.EnvLauncher + "=" + rig.LauncherSystemd)
	}
	u := upload(t, drive(t))
	mounts, err := os.ReadDir(filepath.Join(u.State, "mounts"))
	if err != nil || len(mounts) != 1 {
		t.Fatalf("mounts: %v %v", mounts, err)
	}
	unit, err := u.UnitOf(mounts[0].Name())
	if err != nil {
		t.Fatal(err)
	}
	for _, signal := range []string{"TERM", "KILL"} { // as after its patience
		u.under()
		if _, err := rig.Systemctl("kill", "--kill-whom=all", "--signal="+signal, unit); err != nil {
			t.Fatal(err)
		}
	}
	u.hurry()
	u.unpublish(2*time.Second, func() {})
	u.stored()
	u.AwaitNothingLeft(t, clearBound)
}
