package faults

import (
	"os"
	"testing"

	"github.com/s3-csi/s3-csi-driver/tests/internal/rig"
	"github.com/s3-csi/s3-csi-driver/tests/internal/rig/rigtest"
	"github.com/s3-csi/s3-csi-driver/tests/internal/systemd"
)

// The clients, by the names that volumes give them, and the names of their processes.
const (
	rclone     = "rclone"
	mountpoint = "mountpoint-s3"
)

var (
	clients  = []string{rclone, mountpoint}
	programs = rig.Programs()
)

const (
	helperProgram = "s3-csi-helper"
	bucket        = rigtest.Bucket
)

// The suite holds for every launcher; see rigtest.Main.
func TestMain(m *testing.M) {
	systemd.Init()
	os.Exit(rigtest.Main(m))
}
