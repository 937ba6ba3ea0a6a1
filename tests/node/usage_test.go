//go:build !lane || ordinary

package node

import (
	"fmt"
	"net/http"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/s3-csi/s3-csi-driver/tests/internal/faultproxy"
	"github.com/s3-csi/s3-csi-driver/tests/internal/rig/rigtest"
)

// shows reports whether the driver has a metric with that value.
func (e *env) shows(line string) bool {
	e.t.Helper()
	return strings.Contains("\n"+rigtest.Get(e.t, e.Driver, "/metrics"), "\n"+line+"\n")
}

func (e *env) awaitMetric(line string) {
	e.t.Helper()
	e.await(time.Minute, line, func() bool { return e.shows(line) })
}

// usageOf are the statistics of a volume by their unit.
func (e *env) usageOf(v *csi.Volume, target string) map[csi.VolumeUsage_Unit]*csi.VolumeUsage {
	e.t.Helper()
	resp, err := e.stats(10*time.Second, v, target)
	if err != nil {
		e.t.Fatal(err)
	}
	units := map[csi.VolumeUsage_Unit]*csi.VolumeUsage{}
	for _, u := range resp.GetUsage() {
		units[u.GetUnit()] = u
	}
	return units
}

// measurements counts the listings of measurements: those of clients have a delimiter, those of checks a maximum.
func (e *env) measurements() *atomic.Int64 {
	var n atomic.Int64
	e.proxy.Set(faultproxy.Faults{Match: func(r *http.Request) bool {
		if q := r.URL.Query(); r.Method == http.MethodGet && q.Has("list-type") && !q.Has("delimiter") && !q.Has("max-keys") {
			n.Add(1)
		}
		return false
	}})
	return &n
}

// create makes a volume of that size with a driver in mode all.
func (e *env) create(name, client string, size int64, pairs ...string) *csi.Volume {
	e.t.Helper()
	req := rigtest.CreateRequest(name, append(pairs, "client", client)...)
	if req.GetParameters()["bucketName"] == "" { // one of its own
		delete(req.GetParameters(), "bucketName")
	}
	req.CapacityRange = &csi.CapacityRange{RequiredBytes: size}
	resp, err := e.CreateVolume(rigtest.Context(e.t, time.Minute), req)
	if err != nil {
		e.t.Fatal(err)
	}
	return resp.GetVolume()
}

func TestUsageIsReportedAgainstTheRecordedSize(t *testing.T) {
	rigtest.ProcessOnly(t, "the driver lists the volume itself")
	t.Parallel()
	for _, kind := range []string{"prefix", "bucket", "static"} {
		t.Run(kind, func(t *testing.T) {
			e := newEnv(t)
			e.Driver = e.Drive(t, "all")
			name, in, size := "measured-"+kind, bucket, int64(4000)
			v := static(name, rclone, "usage", "6h")
			switch kind {
			case "prefix":
				v = e.create(name, rclone, 1000, "usage", "6h")
			case "bucket":
				v = e.create(name, rclone, 1000, "usage", "6h", "bucketName", "")
				in = strings.TrimPrefix(v.GetVolumeId(), "default:")
			}
			if kind != "static" {
				// The size at the time of the measurement counts, not that at the creation.
				resp, err := e.ControllerExpandVolume(rigtest.Context(t, time.Minute), &csi.ControllerExpandVolumeRequest{VolumeId: v.GetVolumeId(),
					CapacityRange: &csi.CapacityRange{RequiredBytes: size}})
				if err != nil || resp.GetCapacityBytes() != size {
					t.Fatalf("%v, %v", resp, err)
				}
			}
			below := name + "/"
			if kind == "bucket" {
				below = ""
				e.Put(t, in, ".s3-csi/of-the-driver", strings.Repeat("x", 5000))
			} else {
				e.Put(t, in, name+"-beside/other", strings.Repeat("x", 5000))
			}
			for key, bytes := range map[string]int{"a": 100, "dir/b": 1000, "dir/deep/c&d ü": 34, "empty": 0} {
				e.Put(t, in, below+key, strings.Repeat("x", bytes))
			}
			target := e.publish(v, "t")
			e.awaitMetric(`s3csi_usage_measurements_total{result="complete"} 1`)
			got := e.usageOf(v, target)
			if u := got[csi.VolumeUsage_INODES]; u.GetUsed() != 4 || u.GetTotal() < 4 || u.GetAvailable() != u.GetTotal()-4 {
				t.Errorf("objects: %v", u)
			}
			u := got[csi.VolumeUsage_BYTES]
			if u.GetUsed() != 1134 || u.GetAvailable() != u.GetTotal()-1134 || (u.GetTotal() == size) != (kind != "static") {
				t.Errorf("bytes: %v", u)
			}
			for line, want := range map[string]bool{
				fmt.Sprintf(`s3csi_volume_used_bytes{accuracy="exact",volume=%q} 1134`, v.GetVolumeId()): true,
				fmt.Sprintf(`s3csi_volume_objects{accuracy="exact",volume=%q} 4`, v.GetVolumeId()):       true,
				fmt.Sprintf(`s3csi_volume_size_bytes{volume=%q} 4000`, v.GetVolumeId()):                  kind != "static",
			} {
				if e.shows(line) != want {
					t.Errorf("metric %s: %t", line, !want)
				}
			}
			// Nothing is enforced.
			write(t, target+"/more", strings.Repeat("x", 10000))
			e.unpublish(v, target)
			e.NothingLeft(t)
		})
	}
}

func TestUsageIsListedBoundedAndOncePerInterval(t *testing.T) {
	rigtest.ProcessOnly(t, "the driver lists the volume itself")
	t.Parallel()
	e := newEnv(t)
	listed := e.measurements()
	for i := range 1100 {
		e.Put(t, bucket, fmt.Sprintf("many/%04d", i), "x")
	}
	e.Put(t, bucket, "few/a", "xyz")
	many, few, without := static("many", rclone, "usage", "10m"), static("few", rclone, "usage", "10m"), static("without", rclone)
	e.drive("--usage-max-requests=1")
	publishAll := func() (targets []string) {
		for _, v := range []*csi.Volume{many, few, without} {
			targets = append(targets, e.publish(v, v.GetVolumeId()))
		}
		return targets
	}
	targets := publishAll()
	e.awaitMetric(`s3csi_usage_measurements_total{result="cut"} 1`)
	e.awaitMetric(`s3csi_usage_measurements_total{result="complete"} 1`)
	for line := range strings.Lines(`s3csi_volume_objects{accuracy="at-least",volume="many"} 1000
s3csi_volume_objects{accuracy="exact",volume="few"} 1
s3csi_usage_list_requests_total 2
`) {
		if !e.shows(strings.TrimSpace(line)) {
			t.Errorf("no metric %s", line)
		}
	}
	if u := e.usageOf(many, targets[0])[csi.VolumeUsage_INODES]; u.GetUsed() >= 1000 && u.GetUsed() < 1100 {
		t.Errorf("a listing that was cut is reported: %v", u)
	}
	if u := e.usageOf(few, targets[1])[csi.VolumeUsage_BYTES]; u.GetUsed() != 3 {
		t.Errorf("bytes: %v", u)
	}
	// kubelet republishes, pods come and go, drivers restart: within the interval, nothing is listed again.
	for range 5 {
		publishAll()
	}
	e.unpublish(few, targets[1])
	publishAll()
	e.restart()
	publishAll()
	e.Put(t, bucket, "last/a", "x")
	last := static("last", rclone, "usage", "10m")
	e.publish(last, "last") // when this one has been measured, the others would have been
	e.awaitMetric(`s3csi_usage_measurements_total{result="complete"} 1`)
	if u := e.usageOf(few, targets[1])[csi.VolumeUsage_BYTES]; u.GetUsed() != 3 {
		t.Errorf("bytes after a restart: %v", u)
	}
	if got := listed.Load(); got != 3 {
		t.Errorf("%d listings of three volumes", got)
	}
}
