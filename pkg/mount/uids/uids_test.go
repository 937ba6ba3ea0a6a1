package uids

import (
	"slices"
	"testing"

	"github.com/s3-csi/s3-csi-driver/pkg/launcher"
	"github.com/s3-csi/s3-csi-driver/pkg/mount"
	"github.com/s3-csi/s3-csi-driver/pkg/mount/mounttest"
	"github.com/s3-csi/s3-csi-driver/pkg/mount/mounttest/parts"
	"github.com/s3-csi/s3-csi-driver/pkg/mount/state"
)

// A new mount of the same volume tends to get the same uid. While the processes of the former one are being killed it gets another:
// the new client would be killed, too.
func TestKillOrphans_QuarantinedUIDIsNotAllocated(t *testing.T) {
	l := &mounttest.UIDs{Live: map[uint32]bool{}}
	p := parts.New(t, mounttest.S3{})
	const first = parts.UID + 100 // tests of other packages have mounts with parts.UID, which are not orphaned
	a := &Allocator{Namespace: p.Namespace, Launcher: l, Store: p.Store, Range: launcher.UIDRange{First: first, Last: first + 1}}
	spec := mount.Spec{Bucket: "b"}
	usual, err := a.freeUID(spec.Key(), nil)
	if err != nil {
		t.Fatal(err)
	}
	l.Live[usual] = true
	given := state.Mount{VolumeID: "v", Spec: spec}
	again := given
	l.OnKill = func(uint32) {
		if err := a.reserveMount(t.Context(), &given, nil); err != nil {
			t.Error(err)
		}
	}
	if err := a.KillOrphans(t.Context()); err != nil {
		t.Fatal(err)
	}
	if !slices.Equal(l.Killed, []uint32{usual}) || given.UID == usual || given.UID == 0 {
		t.Fatalf("killed: %v; meanwhile a mount got uid %d", l.Killed, given.UID)
	}
	if err := p.Store.Remove(t.Context(), given.Name); err != nil {
		t.Fatal(err)
	}
	if err := a.reserveMount(t.Context(), &again, nil); err != nil || again.UID != usual {
		t.Errorf("afterwards it gets %d, %v", again.UID, err)
	}
}
