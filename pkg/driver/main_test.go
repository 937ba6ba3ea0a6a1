package driver

import (
	"context"
	"fmt"
	"os"
	"testing"
	"time"

	"go.uber.org/goleak"
	"k8s.io/klog/v2"
)

// childVariable makes the test binary a driver: tests of signals need a process of their own.
const childVariable = "S3CSI_TEST_CHILD_ENDPOINT"

func TestMain(m *testing.M) {
	if endpoint := os.Getenv(childVariable); endpoint != "" {
		os.Exit(child(endpoint))
	}
	goleak.VerifyTestMain(m)
}

// child serves a node whose publications never end until their request does.
func child(endpoint string) int {
	if err := SetupLogging(CommonOptions{LoggingFormat: os.Getenv("S3CSI_TEST_CHILD_FORMAT"), Verbosity: 5}); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 3
	}
	ctx, stop := WithSignals(context.Background(), os.Exit)
	defer stop()
	m := newFakeMounter()
	m.block = make(chan struct{})
	cfg := testConfig(endpoint, m)
	cfg.ShutdownTimeout = time.Minute
	if err := cfg.Serve(ctx); err != nil {
		klog.Background().Error(err, "ended")
		return 1
	}
	return 0
}

// testConfig is a whole driver on fakes.
func testConfig(endpoint string, m *fakeMounter) Config {
	metrics := NewMetrics("s3.csi.driver", "v0.0.0-test")
	controller := NewController(newFakeProvisioner(), newFakeSnapshots(), fakeBackends{})
	node := NewNode(m, "s3.csi.driver", NodeOptions{NodeID: "node-1"})
	health := &Health{}
	return Config{
		Endpoint: endpoint, ShutdownTimeout: 5 * time.Second, Metrics: metrics, Health: health,
		Identity: NewIdentity("s3.csi.driver", "v0.0.0-test", health), Controller: controller, Node: node,
	}
}
