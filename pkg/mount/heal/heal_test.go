package heal

import (
	"testing"

	"github.com/s3-csi/s3-csi-driver/pkg/fault"
	"github.com/s3-csi/s3-csi-driver/pkg/mount/mounttest"
	"github.com/s3-csi/s3-csi-driver/pkg/mount/mounttest/parts"
)

// A heal that failed for a transient reason is repeated, although the host shows nothing stale any more.
func TestFailedHealIsRepeated(t *testing.T) {
	p := parts.New(t, mounttest.S3{})
	h := New(true, p.Namespace, p.Store, p.Pins, p.Tracker)
	m := p.Mount("a", "1", "rclone", nil)
	p.Tracker.Mount(m.Name).NeedsHealing()
	if err := h.HealOnce(t.Context(), m, true); err == nil {
		t.Fatal("healed without a file system")
	}
	if err := h.HealOnce(t.Context(), m, false); err == nil {
		t.Error("it is not repeated")
	}
	for kind, want := range map[fault.Kind]bool{fault.NotFound: false, fault.Precondition: false, fault.Unsupported: false, fault.Timeout: true, fault.Unknown: true} {
		if got := IsTransient(fault.Errorf(kind, "x")); got != want {
			t.Errorf("%s: %t", kind, got)
		}
	}
}
