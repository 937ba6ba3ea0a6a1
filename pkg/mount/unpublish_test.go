package mount

import (
	"os"
	"path/filepath"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/s3-csi/s3-csi-driver/pkg/host"
)

// A mount may be replaced while its last publication goes. Its successor has the publication then, and may show at the target
// again: it ends too.
func TestAMountIsReplacedWhileItsLastPublicationGoes(t *testing.T) {
	m := newTestManager(t, &uids{}, s3{})
	old := mountOf(t, m, "a", "1", "mountpoint-s3")
	m.TargetRoot, m.DrainTimeout = t.TempDir(), 20*time.Second
	target := filepath.Join(m.TargetRoot, "target")
	if err := os.Mkdir(target, 0o755); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = unix.Unmount(target, unix.MNT_DETACH) }) // where the test failed
	mountAt(t, old, target)
	if err := m.store.writePublication(publication{Target: target, VolumeID: "v", Mount: old.Name}); err != nil {
		t.Fatal(err)
	}

	replaced, err := m.keys.Lock(t.Context(), old.Key)
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan error, 1)
	go func() { done <- m.Unpublish(t.Context(), "v", target) }()
	for end := time.Now().Add(10 * time.Second); ; time.Sleep(time.Millisecond) {
		at, err := host.Look(target)
		if err == nil && !at.Mountpoint {
			break
		}
		if len(done) > 0 || time.Now().After(end) {
			t.Fatalf("the target still shows the mount: %v, %v", err, <-done)
		}
	}
	fresh := mountOf(t, m, "a", "2", "mountpoint-s3")
	fresh.Former = []string{old.Name}
	if err := m.store.writeRecord(fresh); err != nil {
		t.Fatal(err)
	}
	if err := m.store.succeed(fresh); err != nil {
		t.Fatal(err)
	}
	mountAt(t, fresh, target)
	replaced()

	if err := <-done; err != nil {
		t.Fatal(err)
	}
	if names, err := m.store.names(); err != nil || len(names) > 0 {
		t.Errorf("left: %v, %v", names, err)
	}
	if pubs, err := m.store.allPublications(); err != nil || len(pubs) > 0 {
		t.Errorf("publications left: %v, %v", pubs, err)
	}
}
