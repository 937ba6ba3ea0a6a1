package heal

import (
	"errors"
	"fmt"
	"os"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
	"k8s.io/klog/v2"
	"k8s.io/klog/v2/ktesting"

	"github.com/s3-csi/s3-csi-driver/pkg/fault"
	"github.com/s3-csi/s3-csi-driver/pkg/host"
	"github.com/s3-csi/s3-csi-driver/pkg/mount/mounttest"
	"github.com/s3-csi/s3-csi-driver/pkg/mount/mounttest/parts"
	"github.com/s3-csi/s3-csi-driver/pkg/mount/state"
)

func testHealer(p *parts.Parts) *Healer {
	return &Healer{Enabled: true, Namespace: p.Namespace, Store: p.Store, Pins: p.Pins, Tracker: p.Tracker}
}

// A heal that failed for a transient reason is repeated, although the host shows nothing stale any more.
func TestFailedHealIsRepeated(t *testing.T) {
	p := parts.New(t, mounttest.S3{})
	h := testHealer(p)
	m := p.Mount("a", "1", "rclone", nil)
	p.Tracker.Mount(m.Name).MarkHealed()
	if err := h.Heal(t.Context(), m); err == nil {
		t.Fatal("healed without a file system")
	}
	if err := h.HealOnce(t.Context(), m); err == nil {
		t.Error("it is not repeated")
	}
	transient := map[fault.Kind]bool{fault.NotFound: false, fault.Precondition: false, fault.Unsupported: false, fault.Timeout: true, fault.Unknown: true}
	for kind, want := range transient {
		if got := IsTransient(fault.Errorf(kind, "x")); got != want {
			t.Errorf("%s: %t", kind, got)
		}
	}
}

// A container can have any number of copies of a mount. They are one line in the log.
func TestHeal_LogsOneLineForManyMounts(t *testing.T) {
	p := parts.New(t, mounttest.S3{})
	h := testHealer(p)
	logger := ktesting.NewLogger(t, ktesting.NewConfig(ktesting.BufferLogs(true)))
	ctx := klog.NewContext(t.Context(), logger)
	all := make([]host.Swapped, 4000)
	for i := range all {
		all[i] = host.Swapped{Mountpoint: fmt.Sprintf("/data-%d", i), PID: 7, Root: "/"}
	}
	if replaced, failures := h.countResults(ctx, p.Mount("a", "1", "rclone", nil), all); replaced != len(all) || len(failures) != 0 {
		t.Errorf("%d replaced, %d failures", replaced, len(failures))
	}
	sink, _ := logger.GetSink().(ktesting.Underlier)
	if text := sink.GetBuffer().String(); strings.Count(text, "\n") != 1 || len(text) > 1000 {
		t.Errorf("%d lines: %.1000q", strings.Count(text, "\n"), text)
	}
}

// place makes a directory that shows a mount's file system.
func place(t *testing.T, source, dir string) string {
	t.Helper()
	if err := os.MkdirAll(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := unix.Mount(source, dir, "", unix.MS_BIND, ""); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = unix.Unmount(dir, unix.MNT_DETACH) })
	return dir
}

func TestHeal_ReplacesFormerFileSystemsAtTargetsAndSubpaths(t *testing.T) {
	p := parts.New(t, mounttest.S3{})
	h := testHealer(p)
	m, next := p.Mount("a", "1", "rclone", nil), p.Mount("b", "2", "rclone", nil)
	pod := t.TempDir() + "/pods/" + podUID
	source := p.Store.SourceDir(m.Name)
	p.HangAt(m, source)
	target, subpath := place(t, source, pod+"/volumes/kubernetes.io~csi/pv/mount"), place(t, source, pod+"/volume-subpaths/pv/app/0")
	pub := state.Publication{Target: target, VolumeID: m.VolumeID, Mount: m.Name}
	p.Publish(pub)
	restart := func() {
		t.Helper()
		mounts, err := p.Namespace.Mounts(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		former, _ := host.TopAt(mounts, source)
		if err := errors.Join(p.Pins.Pin(t.Context(), m.Name, mounts, former), unix.Unmount(source, unix.MNT_DETACH)); err != nil {
			t.Fatal(err)
		}
		p.HangAt(m, source)
		if err := h.CheckTarget(t.Context(), m, target); !fault.Is(err, fault.Unavailable) {
			t.Fatalf("a stale target: %v", err)
		}
	}
	shown := func(of state.Mount) {
		t.Helper()
		for _, at := range []string{target, subpath} {
			if err := h.CheckTarget(t.Context(), of, at); err != nil {
				t.Error(err)
			}
		}
	}
	restart()
	if !h.Unhealed(m) {
		t.Error("a new driver takes the mount for healed")
	}
	if err := h.HealOnce(t.Context(), m); err != nil {
		t.Fatal(err)
	}
	shown(m)
	if err := h.HealOnce(t.Context(), m); err != nil || h.Unhealed(m) {
		t.Errorf("healed already: %v", err)
	}
	restart()
	if done, err := h.ReplaceTarget(t.Context(), m, target, false); !done || err != nil {
		t.Errorf("replaced: %t, %v", done, err)
	}
	if err := h.Heal(t.Context(), m); err != nil {
		t.Error(err)
	}
	shown(m)
	// The publication is moved to another mount.
	p.HangAt(next, p.Store.SourceDir(next.Name))
	pub.Mount, pub.MovedFrom = next.Name, []string{m.Name}
	p.Publish(pub)
	if err := h.Heal(t.Context(), next); err != nil {
		t.Error(err)
	}
	shown(next)
	mounts, err := p.Namespace.Mounts(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if left := p.Pins.Names(mounts); len(left) != 0 {
		t.Errorf("pins are left of %v", left)
	}
}
