package status

import (
	"context"
	"errors"
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus/testutil"

	"github.com/s3-csi/s3-csi-driver/pkg/client"
	"github.com/s3-csi/s3-csi-driver/pkg/helper"
	"github.com/s3-csi/s3-csi-driver/pkg/mount/state"
	"github.com/s3-csi/s3-csi-driver/pkg/mount/tracker"
)

func TestVolumeMetrics(t *testing.T) {
	of := reports{}
	r := records{
		mounts: []state.Mount{record("m")},
		pubs: []state.Publication{
			{VolumeID: "default:b/m", Mount: "m", Target: "/var/lib/kubelet/pods/u1/volumes/kubernetes.io~csi/pv-2/mount"},
			{VolumeID: "default:b/m", Mount: "m", Target: "/var/lib/kubelet/pods/u2/volumes/kubernetes.io~csi/pv-1/mount"},
		},
	}
	metrics := VolumeMetrics{
		Collector: collector(r, of),
		Refresh: func(context.Context) { // what is shown is what it brings
			of["m"] = tracker.Report{State: tracker.Healthy, Helper: &helper.Status{
				PID: 1, ClientPID: 2, Version: "v1", Queue: &client.Queue{Uploads: 3, Bytes: 4}, Conflicts: 5, Unstored: &client.Unstored{Files: 8},
				Session: &helper.SessionStatus{Expires: now},
				Requests: &client.Requests{Read: 6, Written: 7, Operations: map[string]client.Operation{
					"GetObject": {Requests: 4, Errors: 2, Throttles: 1, Milliseconds: 61500, Latencies: [9]int64{1, 0, 1, 0, 1, 0, 0, 0, 1}},
					"Invented":  {Requests: 1, Errors: 1, Latencies: [9]int64{1}},
					"Another":   {Requests: 2, Errors: 2, Latencies: [9]int64{2}},
				}},
			}}
		},
	}
	const want = `
# HELP s3csi_volume_mount_info Always 1; the labels have the PersistentVolume of a mount, its client, ` +
		`bucket and prefix, and the version of the driver that its programs came with.
# TYPE s3csi_volume_mount_info gauge
s3csi_volume_mount_info{bucket="b",client="rclone",mount="m",persistentvolume="pv-1",prefix="m/",version="v1",volume="default:b/m"} 1
# HELP s3csi_volume_mount_state Always 1; the label has the state of a mount, as s3csi_mounts has it, or starting or unknown.
# TYPE s3csi_volume_mount_state gauge
s3csi_volume_mount_state{mount="m",state="healthy",volume="default:b/m"} 1
# HELP s3csi_volume_memory_bytes Resident memory of a mount's client and helper, in bytes.
# TYPE s3csi_volume_memory_bytes gauge
s3csi_volume_memory_bytes{mount="m",volume="default:b/m"} 3.145728e+06
# HELP s3csi_volume_memory_limit_bytes Memory limit of a mount, in bytes, where the launcher enforces one.
# TYPE s3csi_volume_memory_limit_bytes gauge
s3csi_volume_memory_limit_bytes{mount="m",volume="default:b/m"} 1.073741824e+09
# HELP s3csi_volume_session_expiry_timestamp_seconds When the session of a mount expires, in seconds since the epoch.
# TYPE s3csi_volume_session_expiry_timestamp_seconds gauge
s3csi_volume_session_expiry_timestamp_seconds{mount="m",volume="default:b/m"} 1.8039024e+09
# HELP s3csi_volume_uploads Files that are closed and not uploaded yet, and uploads in progress.
# TYPE s3csi_volume_uploads gauge
s3csi_volume_uploads{mount="m",volume="default:b/m"} 3
# HELP s3csi_volume_upload_bytes Size of the files in s3csi_volume_uploads, in bytes.
# TYPE s3csi_volume_upload_bytes gauge
s3csi_volume_upload_bytes{mount="m",volume="default:b/m"} 4
# HELP s3csi_volume_conflicts_total Files not uploaded because another writer had changed the object.
# TYPE s3csi_volume_conflicts_total counter
s3csi_volume_conflicts_total{mount="m",volume="default:b/m"} 5
# HELP s3csi_volume_unstored_total Files whose data was lost because the client could not store it after they were closed.
# TYPE s3csi_volume_unstored_total counter
s3csi_volume_unstored_total{mount="m",volume="default:b/m"} 8
# HELP s3csi_volume_read_bytes_total Bytes of objects that the client read; of clients that report it (mountpoint-s3).
# TYPE s3csi_volume_read_bytes_total counter
s3csi_volume_read_bytes_total{mount="m",volume="default:b/m"} 6
# HELP s3csi_volume_written_bytes_total Bytes of files that the client wrote; of clients that report it (mountpoint-s3).
# TYPE s3csi_volume_written_bytes_total counter
s3csi_volume_written_bytes_total{mount="m",volume="default:b/m"} 7
# HELP s3csi_volume_request_errors_total Requests to S3 that failed, by operation, without those ` +
		`for missing objects and unmet conditions; of clients that report it (mountpoint-s3).
# TYPE s3csi_volume_request_errors_total counter
s3csi_volume_request_errors_total{mount="m",operation="GetObject",volume="default:b/m"} 2
s3csi_volume_request_errors_total{mount="m",operation="Other",volume="default:b/m"} 3
# HELP s3csi_volume_request_throttles_total Requests to S3 that the service answered with 429 or 503, by operation; of clients that report it (mountpoint-s3).
# TYPE s3csi_volume_request_throttles_total counter
s3csi_volume_request_throttles_total{mount="m",operation="GetObject",volume="default:b/m"} 1
s3csi_volume_request_throttles_total{mount="m",operation="Other",volume="default:b/m"} 0
# HELP s3csi_volume_request_duration_seconds Duration of requests to S3 by operation, in seconds; of clients that report it (mountpoint-s3).
# TYPE s3csi_volume_request_duration_seconds histogram
s3csi_volume_request_duration_seconds_bucket{mount="m",operation="GetObject",volume="default:b/m",le="0.005"} 1
s3csi_volume_request_duration_seconds_bucket{mount="m",operation="GetObject",volume="default:b/m",le="0.025"} 1
s3csi_volume_request_duration_seconds_bucket{mount="m",operation="GetObject",volume="default:b/m",le="0.1"} 2
s3csi_volume_request_duration_seconds_bucket{mount="m",operation="GetObject",volume="default:b/m",le="0.25"} 2
s3csi_volume_request_duration_seconds_bucket{mount="m",operation="GetObject",volume="default:b/m",le="1"} 3
s3csi_volume_request_duration_seconds_bucket{mount="m",operation="GetObject",volume="default:b/m",le="5"} 3
s3csi_volume_request_duration_seconds_bucket{mount="m",operation="GetObject",volume="default:b/m",le="15"} 3
s3csi_volume_request_duration_seconds_bucket{mount="m",operation="GetObject",volume="default:b/m",le="60"} 3
s3csi_volume_request_duration_seconds_bucket{mount="m",operation="GetObject",volume="default:b/m",le="+Inf"} 4
s3csi_volume_request_duration_seconds_sum{mount="m",operation="GetObject",volume="default:b/m"} 61.5
s3csi_volume_request_duration_seconds_count{mount="m",operation="GetObject",volume="default:b/m"} 4
s3csi_volume_request_duration_seconds_bucket{mount="m",operation="Other",volume="default:b/m",le="0.005"} 3
s3csi_volume_request_duration_seconds_bucket{mount="m",operation="Other",volume="default:b/m",le="0.025"} 3
s3csi_volume_request_duration_seconds_bucket{mount="m",operation="Other",volume="default:b/m",le="0.1"} 3
s3csi_volume_request_duration_seconds_bucket{mount="m",operation="Other",volume="default:b/m",le="0.25"} 3
s3csi_volume_request_duration_seconds_bucket{mount="m",operation="Other",volume="default:b/m",le="1"} 3
s3csi_volume_request_duration_seconds_bucket{mount="m",operation="Other",volume="default:b/m",le="5"} 3
s3csi_volume_request_duration_seconds_bucket{mount="m",operation="Other",volume="default:b/m",le="15"} 3
s3csi_volume_request_duration_seconds_bucket{mount="m",operation="Other",volume="default:b/m",le="60"} 3
s3csi_volume_request_duration_seconds_bucket{mount="m",operation="Other",volume="default:b/m",le="+Inf"} 3
s3csi_volume_request_duration_seconds_sum{mount="m",operation="Other",volume="default:b/m"} 0
s3csi_volume_request_duration_seconds_count{mount="m",operation="Other",volume="default:b/m"} 3
`
	if err := testutil.CollectAndCompare(metrics, strings.NewReader(want)); err != nil {
		t.Error(err)
	}
}

// bounded are records that cannot be read after the end of a context.
type bounded struct{ records }

func (b bounded) Mounts(ctx context.Context) ([]state.Mount, error) {
	return b.mounts, errors.Join(ctx.Err())
}

func TestVolumeMetrics_DoNotWaitForHelpers(t *testing.T) {
	c := collector(records{}, reports{})
	c.Mounts = bounded{records{mounts: []state.Mount{record("m")}}}
	metrics := VolumeMetrics{Collector: c, Refresh: func(ctx context.Context) { <-ctx.Done() }}
	if n := testutil.CollectAndCount(metrics, "s3csi_volume_mount_info"); n != 1 {
		t.Errorf("%d mounts are shown", n)
	}
}
