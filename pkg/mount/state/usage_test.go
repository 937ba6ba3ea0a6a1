package state

import (
	"os"
	"reflect"
	"testing"
	"time"

	"github.com/s3-csi/s3-csi-driver/pkg/volume"
)

// A record of usage that is damaged is as good as none.
func TestRecordsOfUsage(t *testing.T) {
	f := newFiles(t)
	want := Usage{VolumeID: "default:bucket/v/", Setting: volume.UsageOff, CapacityBytes: 1, Read: time.Unix(1, 0).UTC(), Measured: time.Unix(2, 0).UTC(), Bytes: 3, Objects: 4, AtLeast: true, NotBefore: time.Unix(5, 0).UTC(), Retry: time.Unix(6, 0).UTC(), Failures: 7}
	if err := writeJSON(f.usageFile(want.VolumeID), want); err != nil {
		t.Fatal(err)
	}
	for file, content := range map[string]string{f.usageFile("damaged"): "{", f.usageFile("other") + ".tmp": "{}"} {
		if err := os.WriteFile(file, []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if got, err := f.usages(); err != nil || !reflect.DeepEqual(got, []Usage{want}) {
		t.Errorf("%+v, %v", got, err)
	}
	if err := f.clearTemporaries(); err != nil {
		t.Fatal(err)
	}
	if entries, err := os.ReadDir(f.usageDir()); err != nil || len(entries) != 2 {
		t.Errorf("%v, %v", entries, err)
	}
}
