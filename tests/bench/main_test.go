package bench

import (
	"os"
	"testing"

	"github.com/s3-csi/s3-csi-driver/tests/internal/rig/rigtest"
)

func TestMain(m *testing.M) { os.Exit(rigtest.Main(m)) }
