//go:build !lane || ordinary

package node

import (
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"github.com/s3-csi/s3-csi-driver/tests/internal/rig/rigtest"
)

// Volumes that name no client get their backend's, and only without one the driver's.
func TestABackendHasADefaultClient(t *testing.T) {
	rigtest.ProcessOnly(t, "the client is chosen before anything is started")
	t.Parallel()
	e := newEnv(t)
	config := filepath.Join(e.Dir, "config.yaml")
	backend := func(name, more string) string {
		return fmt.Sprintf("  %s:\n    endpoint: %s\n    region: %s\n    addressing: path\n%s", name, e.proxy.Endpoint(), e.Rig.S3.Region, more)
	}
	text := "backends:\n" + backend("default", "") + backend("own", "    defaultClient: "+mountpoint+"\n")
	write(t, config, text)
	e.drive("--config=" + config) // --default-client=rclone
	for name, client := range map[string]string{"default": rclone, "own": mountpoint} {
		v := static("of-"+name, "", "backend", name)
		delete(v.VolumeContext, "client")
		target := e.publish(v, "of-"+name)
		if err := os.WriteFile(filepath.Join(target, "file"), []byte(name), 0o644); err != nil {
			t.Errorf("%s: %v", name, err)
		}
		e.client(client)
		e.unpublish(v, target)
	}
}
