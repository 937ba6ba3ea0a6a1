package e2e

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"slices"
	"strings"
	"testing"
)

// driverPod is the driver's on the node.
func driverPod(t testing.TB) object {
	t.Helper()
	var pods []object
	eventually(t, "the driver's pod", func() error {
		pods = slices.DeleteFunc(list(t, "pods", driverNamespace, "-l", "app.kubernetes.io/component=node"),
			func(o object) bool { return o.Metadata.DeletionTimestamp != "" })
		if len(pods) != 1 {
			return fmt.Errorf("there are %d", len(pods))
		}
		return nil
	})
	return pods[0]
}

// replaced does something to the driver and waits until another pod of it, or a restart of its container, is ready.
func replaced(t testing.TB, do func()) {
	t.Helper()
	life := func(o object) string {
		for _, c := range o.Status.ContainerStatuses {
			if c.Name == "s3-csi-driver" {
				return c.ContainerID
			}
		}
		return ""
	}
	before := life(driverPod(t))
	do()
	eventually(t, "another driver", func() error {
		if o := driverPod(t); life(o) == before || life(o) == "" || !o.ready() {
			return fmt.Errorf("it was %s and is %s, ready %t", before, life(o), o.ready())
		}
		return nil
	})
}

// buildImage makes an image of the programs in a directory, as make image does, and returns its archive.
func buildImage(ctx context.Context, name, bin string) (archive string, err error) {
	cmd := exec.CommandContext(ctx, root+"/hack/image", name, bin, runtime.GOARCH)
	cmd.Env = slices.DeleteFunc(os.Environ(), func(v string) bool { return strings.HasPrefix(v, "VERSION=") }) // it is the name's
	if out, err := cmd.CombinedOutput(); err != nil {
		return "", fmt.Errorf("building the image %s: %w\n%s", name, err, out)
	}
	return driverArchive(bin), nil
}

// deploy brings the driver to what the chart makes of the settings.
func deploy(t testing.TB, settings ...string) {
	t.Helper()
	if err := world.upgrade(context.Background(), "upgrade", settings...); err != nil {
		t.Fatal(err)
	}
}

// restart restarts a part of the node and waits until the node is ready again.
func restart(t testing.TB, unit string) {
	t.Helper()
	onNode(t, "/usr/bin/systemctl", "restart", unit)
	if err := world.Ready(t.Context()); err != nil {
		t.Fatal(err)
	}
}

// image is the driver's.
func image(t testing.TB, pod object) string {
	t.Helper()
	return kubectl(t, "get", "pod", "-n", driverNamespace, pod.Metadata.Name, "-o", `jsonpath={.spec.containers[?(@.name=="s3-csi-driver")].image}`)
}
