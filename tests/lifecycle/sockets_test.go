package lifecycle_test

import (
	"os"
	"syscall"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/s3-csi/s3-csi-driver/tests/internal/rig/rigtest"
)

func TestSocket_IsTakenOverOnlyFromADriverThatExited(t *testing.T) {
	t.Parallel()
	endpoint, path := socket(t)
	start := func() *process { return launch(t, nil, "controller", "--endpoint="+endpoint) }
	first := start()
	first.ready(t, dial(t, endpoint))
	info, err := os.Stat(path)
	if err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("socket: %v, %v, want mode 0600", info.Mode(), err)
	}
	second := start()
	if code := second.exit(t); code == 0 {
		t.Error("the second driver's exit code is 0")
	}
	contains(t, second.stderr.String(), path, "stop that driver first")
	if _, err := dial(t, endpoint).GetPluginInfo(rigtest.Context(t, patience), &csi.GetPluginInfoRequest{}); err != nil {
		t.Errorf("the first driver cannot be reached any more: %v", err)
	}
	first.signal(t, syscall.SIGKILL)
	first.exit(t)
	if !exists(path) {
		t.Fatal("a killed driver leaves no socket: this test proves nothing")
	}
	next := start()
	next.ready(t, dial(t, endpoint))
	next.signal(t, syscall.SIGTERM)
	if code := next.exit(t); code != 0 || exists(path) {
		t.Errorf("exit code %d, socket left: %t", code, exists(path))
	}
}
