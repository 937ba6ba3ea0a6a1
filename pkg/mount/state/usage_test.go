package state

import (
	"os"
	"reflect"
	"testing"
	"time"

	"github.com/s3-csi/s3-csi-driver/pkg/volume"
)

// A record of usage that is damaged is as good as none.
func TestUsages_DamagedRecordIsIgnored(t *testing.T) {
	f := testStore(t)
	at := func(second int64) time.Time { return time.Unix(second, 0).UTC() }
	want := Usage{
		VolumeID: "default:bucket/v/", Setting: volume.UsageOff, CapacityBytes: 1, Read: at(1), Measured: at(2), Bytes: 3, Objects: 4, AtLeast: true,
		NotBefore: at(5), Retry: at(6), Failures: 7,
	}
	if err := f.Usages.Write(t.Context(), want); err != nil {
		t.Fatal(err)
	}
	for file, content := range map[string]string{f.Dir + "/" + hashed(usageDir, "damaged"): "{", f.Dir + "/" + hashed(usageDir, "other") + ".tmp": "{}"} {
		if err := os.WriteFile(file, []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if got, err := f.Usages.All(t.Context()); err != nil || !reflect.DeepEqual(got, []Usage{want}) {
		t.Errorf("%+v, %v", got, err)
	}
	if err := f.clearTemporaries(); err != nil {
		t.Fatal(err)
	}
	if entries, err := os.ReadDir(f.usageDir()); err != nil || len(entries) != 2 {
		t.Errorf("%v, %v", entries, err)
	}
}
