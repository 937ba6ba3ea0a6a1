package fill

import (
	"testing"

	"github.com/s3-csi/s3-csi-driver/pkg/volume"
)

func TestRunID_IsTheSameForAllGenerationsOfAName(t *testing.T) {
	for prefix, want := range map[string]string{"v/": "fill b:bucket/v/", "v@2/": "fill b:bucket/v/", "base/v@17/": "fill b:bucket/base/v/", "": "fill b:bucket"} {
		if got := RunID(volume.ID{Backend: "b", Bucket: "bucket", Prefix: prefix}); got != want {
			t.Errorf("%q: %q, want %q", prefix, got, want)
		}
	}
}
