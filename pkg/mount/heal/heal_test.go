package heal

import (
	"fmt"
	"strings"
	"testing"

	"k8s.io/klog/v2"
	"k8s.io/klog/v2/ktesting"

	"github.com/s3-csi/s3-csi-driver/pkg/fault"
	"github.com/s3-csi/s3-csi-driver/pkg/host"
	"github.com/s3-csi/s3-csi-driver/pkg/mount/mounttest"
	"github.com/s3-csi/s3-csi-driver/pkg/mount/mounttest/parts"
)

// A heal that failed for a transient reason is repeated, although the host shows nothing stale any more.
func TestFailedHealIsRepeated(t *testing.T) {
	p := parts.New(t, mounttest.S3{})
	h := New(true, p.Namespace, p.Store, p.Pins, p.Tracker)
	m := p.Mount("a", "1", "rclone", nil)
	p.Tracker.Mount(m.Name).MarkHealed()
	if err := h.Heal(t.Context(), m); err == nil {
		t.Fatal("healed without a file system")
	}
	if err := h.HealOnce(t.Context(), m); err == nil {
		t.Error("it is not repeated")
	}
	for kind, want := range map[fault.Kind]bool{fault.NotFound: false, fault.Precondition: false, fault.Unsupported: false, fault.Timeout: true, fault.Unknown: true} {
		if got := IsTransient(fault.Errorf(kind, "x")); got != want {
			t.Errorf("%s: %t", kind, got)
		}
	}
}

// A container can have any number of copies of a mount. They are one line in the log.
func TestHeal_LogsOneLineForManyMounts(t *testing.T) {
	p := parts.New(t, mounttest.S3{})
	h := New(true, p.Namespace, p.Store, p.Pins, p.Tracker)
	logger := ktesting.NewLogger(t, ktesting.NewConfig(ktesting.BufferLogs(true)))
	ctx := klog.NewContext(t.Context(), logger)
	all := make([]host.Swapped, 4000)
	for i := range all {
		all[i] = host.Swapped{Mountpoint: fmt.Sprintf("/data-%d", i), PID: 7, Root: "/"}
	}
	if replaced, failures := h.count(ctx, p.Mount("a", "1", "rclone", nil), all); replaced != len(all) || len(failures) != 0 {
		t.Errorf("%d replaced, %d failures", replaced, len(failures))
	}
	sink, _ := logger.GetSink().(ktesting.Underlier)
	if text := sink.GetBuffer().String(); strings.Count(text, "\n") != 1 || len(text) > 1000 {
		t.Errorf("%d lines: %.1000q", strings.Count(text, "\n"), text)
	}
}
