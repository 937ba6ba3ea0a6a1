//go:build !lane || ordinary

package node

import (
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"

	"github.com/s3-csi/s3-csi-driver/tests/internal/faultproxy"
	"github.com/s3-csi/s3-csi-driver/tests/internal/rig/rigtest"
)

// conditions are the statuses and reasons of a volume's health.
func (e *env) conditions(v *csi.Volume, path string) (all []string, err error) {
	resp, err := e.NodeGetVolumeHealth(rigtest.Context(e.t, 20*time.Second), &csi.NodeGetVolumeHealthRequest{VolumeId: v.GetVolumeId(), VolumePublishPath: path})
	for _, s := range resp.GetVolumeHealth().GetHealthStatuses() {
		all = append(all, s.GetStatus().String()+" "+s.GetReason())
	}
	return all, err
}

func (e *env) awaitConditions(v *csi.Volume, path string, want ...string) {
	e.t.Helper()
	var got []string
	e.await(30*time.Second, "a change of the volume's health", func() bool {
		var err error
		if got, err = e.conditions(v, path); err != nil {
			e.t.Fatal(err)
		}
		return slices.Equal(got, want)
	})
}

func TestVolumeHealth(t *testing.T) {
	t.Parallel()
	eachClient(t, func(t *testing.T, e *env, client string) {
		v := static("health", client)
		_, err := e.conditions(v, "")
		want(t, err, codes.NotFound)
		target := e.publish(v, "t")
		for _, path := range []string{"", target} {
			if got, err := e.conditions(v, path); err != nil || len(got) > 0 {
				t.Errorf("healthy, at %q: %q, %v", path, got, err)
			}
		}
		_, err = e.conditions(v, target+"-2")
		want(t, err, codes.NotFound)
		storage, err := e.NodeGetStorageHealth(rigtest.Context(t, 20*time.Second), &csi.NodeGetStorageHealthRequest{})
		if err != nil || len(storage.GetBackendHealth()) > 0 {
			t.Errorf("%v, %v", storage, err)
		}

		process := e.client(client)
		rigtest.Freeze(t, process.PID)
		e.awaitConditions(v, target, "INACCESSIBLE ClientUnresponsive")
		other := static("fine", client)
		fine := e.publish(other, "fine")
		if got, err := e.conditions(other, fine); err != nil || len(got) > 0 {
			t.Errorf("another volume: %q, %v", got, err)
		}
		e.unpublish(other, fine)
		if err := unix.Kill(process.PID, unix.SIGCONT); err != nil {
			t.Fatal(err)
		}
		e.awaitConditions(v, target)

		rigtest.Kill(t, process)
		e.awaitConditions(v, target, "INACCESSIBLE StaleMount")
		e.unpublish(v, target)
		_, err = e.conditions(v, target)
		want(t, err, codes.NotFound)
		e.awaitNothingLeft(time.Second)
	}, "--heal=false", "--volume-health")
}

// A volume whose backend is away is inaccessible, one that is unpublished while files are uploaded is degraded.
func TestVolumeHealthOfABackendThatIsAwayAndOfADrain(t *testing.T) {
	rigtest.ProcessOnly(t, "the conditions are of the volume's service and uploads")
	t.Parallel()
	e := start(t, "--volume-health")
	v := static("draining", rclone)
	target := e.publish(v, "t")
	e.proxy.Set(faultproxy.Faults{Refuse: true})
	e.awaitConditions(v, target, "INACCESSIBLE BackendUnreachable")
	storage, err := e.NodeGetStorageHealth(rigtest.Context(t, 20*time.Second), &csi.NodeGetStorageHealthRequest{})
	if err != nil || len(storage.GetBackendHealth()) != 1 || storage.GetBackendHealth()[0].GetStatus() != csi.StorageHealthErrorType_STORAGE_UNREACHABLE {
		t.Errorf("%v, %v", storage, err)
	}
	e.proxy.Set(faultproxy.Faults{})
	e.awaitConditions(v, target)

	e.proxy.Set(crawling)
	write(t, filepath.Join(target, "data.bin"), random(3<<20))
	e.awaitBusy(v, target, "draining: ")
	e.awaitConditions(v, "", "DEGRADED Draining")
	e.proxy.Set(faultproxy.Faults{})
	e.unpublish(v, target)
	_, err = e.conditions(v, "")
	want(t, err, codes.NotFound)
	e.NothingLeft(t)
}
