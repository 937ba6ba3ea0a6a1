package state

import (
	"testing"

	"github.com/s3-csi/s3-csi-driver/pkg/credentials"
	"github.com/s3-csi/s3-csi-driver/pkg/mount"
)

// A mount that was rotated can be joined with the new secret, and not with the old one.
func TestJoinable_RotatedMountNeedsTheNewSecret(t *testing.T) {
	old, now := mount.Spec{Source: credentials.SourceSecret, Identity: "old"}, mount.Spec{Source: credentials.SourceSecret, Identity: "new"}
	for what, tc := range map[string]struct {
		rec      Mount
		old, now bool
	}{
		"as it was made":   {Mount{Spec: old}, true, true}, // its key is of the one spec only
		"rotated":          {Mount{Spec: old, Rotated: "new"}, false, true},
		"being rotated":    {Mount{Spec: old, Rotated: "new", Rotating: true}, false, false},
		"rotated back":     {Mount{Spec: old, Rotated: "old"}, true, false},
		"left by everyone": {Mount{Spec: old, Superseded: true}, false, false},
	} {
		if got := tc.rec.Joinable(old); got != tc.old {
			t.Errorf("%s: the old secret: %t", what, got)
		}
		if got := tc.rec.Joinable(now); got != tc.now {
			t.Errorf("%s: the new secret: %t", what, got)
		}
	}
}
