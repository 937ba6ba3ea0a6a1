package status

import (
	"context"
	"slices"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"k8s.io/klog/v2"

	"github.com/s3-csi/s3-csi-driver/pkg/client"
)

// refreshBound limits how long one scrape waits for helpers; of those that have not answered, the metrics have what they reported before.
const refreshBound = 3 * time.Second

// operation returns the value of the label operation. A client is not trusted with names of its own, each of which would be another
// time series.
func operation(name string) string {
	if slices.Contains([]string{
		"AbortMultipartUpload", "CompleteMultipartUpload", "CopyObject", "CreateMultipartUpload", "DeleteObject", "GetObject", "HeadBucket", "HeadObject",
		"ListObjectsV2", "ListParts", "PutObject", "RenameObject", "UploadPart", "UploadPartCopy",
	}, name) {
		return name
	}
	return "Other"
}

// latencies are the upper bounds of client.Operation.Latencies, in seconds.
func latencies() []float64 { return []float64{.005, .025, .1, .25, 1, 5, 15, 60} }

// VolumeMetrics are metrics of single volumes (--volume-metrics), of what Collect returns.
type VolumeMetrics struct {
	Collector *Collector
	// Refresh asks the helpers for their status, within ctx.
	Refresh func(ctx context.Context)
}

// Describe implements prometheus.Collector.
func (v VolumeMetrics) Describe(ch chan<- *prometheus.Desc) {
	prometheus.DescribeByCollect(sample{}, ch)
}

// Collect implements prometheus.Collector.
func (v VolumeMetrics) Collect(ch chan<- prometheus.Metric) {
	refresh, cancel := context.WithTimeout(context.Background(), refreshBound)
	v.Refresh(refresh)
	cancel()
	ctx, cancel := context.WithTimeout(context.Background(), collectBound)
	defer cancel()
	document, err := v.Collector.Collect(ctx)
	if err != nil {
		klog.FromContext(ctx).Error(err, "Cannot collect the metrics of volumes")
		return
	}
	for i := range document.Mounts {
		document.Mounts[i].send(ch)
	}
}

// label is a label of a metric, beside the volume and the mount.
type label struct{ name, value string }

// send sends the metrics of a mount that are known.
func (m *Mount) send(ch chan<- prometheus.Metric) {
	desc := func(name, help string, labels []label) (d *prometheus.Desc, values []string) {
		names, values := []string{"volume", "mount"}, []string{m.VolumeID, m.Name}
		for _, l := range labels {
			names, values = append(names, l.name), append(values, l.value)
		}
		return prometheus.NewDesc("s3csi_volume_"+name, help, names, nil), values
	}
	gauge := func(value float64, name, help string, labels ...label) {
		d, values := desc(name, help, labels)
		ch <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, value, values...)
	}
	counter := func(value int, name, help string, labels ...label) {
		d, values := desc(name, help, labels)
		ch <- prometheus.MustNewConstMetric(d, prometheus.CounterValue, float64(value), values...)
	}
	persistentVolume := ""
	if names := m.volumes(); len(names) > 0 {
		persistentVolume = slices.Min(names) // the same one whichever pods come and go
	}
	gauge(1, "mount_info",
		"Always 1; the labels have the PersistentVolume of a mount, its client, bucket and prefix, and the version of the driver that its programs came with.",
		label{"persistentvolume", persistentVolume}, label{"client", m.Client.Name}, label{"bucket", m.Bucket}, label{"prefix", m.Prefix},
		label{"version", m.Client.Version})
	gauge(1, "mount_state", "Always 1; the label has the state of a mount, as s3csi_mounts has it, or starting or unknown.", label{"state", string(m.State)})
	if !m.Session.Expires.IsZero() {
		gauge(float64(m.Session.Expires.Unix()), "session_expiry_timestamp_seconds", "When the session of a mount expires, in seconds since the epoch.")
	}
	if m.Memory != nil {
		gauge(float64(m.Memory.UsedBytes), "memory_bytes", "Resident memory of a mount's client and helper, in bytes.")
		if m.Memory.LimitBytes > 0 {
			gauge(float64(m.Memory.LimitBytes), "memory_limit_bytes", "Memory limit of a mount, in bytes, where the launcher enforces one.")
		}
	}
	if m.Uploads != nil {
		gauge(float64(m.Uploads.Files), "uploads", "Files that are closed and not uploaded yet, and uploads in progress.")
		gauge(float64(m.Uploads.Bytes), "upload_bytes", "Size of the files in s3csi_volume_uploads, in bytes.")
	}
	counter(m.Conflicts, "conflicts_total", "Files not uploaded because another writer had changed the object.")
	counter(m.Unstored, "unstored_total", "Files whose data was lost because the client could not store it after they were closed.")
	if m.requests == nil {
		return
	}
	const reported = "; of clients that report it (mountpoint-s3)."
	counter(int(m.requests.Read), "read_bytes_total", "Bytes of objects that the client read"+reported)
	counter(int(m.requests.Written), "written_bytes_total", "Bytes of files that the client wrote"+reported)
	for name, o := range byOperation(m.requests.Operations) {
		of := label{"operation", name}
		counter(int(o.Errors), "request_errors_total",
			"Requests to S3 that failed, by operation, without those for missing objects and unmet conditions"+reported, of)
		counter(int(o.Throttles), "request_throttles_total", "Requests to S3 that the service answered with 429 or 503, by operation"+reported, of)
		buckets, count := map[float64]uint64{}, uint64(0)
		for i, bound := range latencies() {
			count += uint64(o.Latencies[i])
			buckets[bound] = count
		}
		count += uint64(o.Latencies[len(o.Latencies)-1])
		d, values := desc("request_duration_seconds", "Duration of requests to S3 by operation, in seconds"+reported, []label{of})
		ch <- prometheus.MustNewConstHistogram(d, count, float64(o.Milliseconds)/1000, buckets, values...)
	}
}

// byOperation returns the counts by the values of the label operation.
func byOperation(reported map[string]client.Operation) map[string]client.Operation {
	all := map[string]client.Operation{}
	for name, o := range reported {
		sum := all[operation(name)]
		sum.Errors += o.Errors
		sum.Throttles += o.Throttles
		sum.Milliseconds += o.Milliseconds
		for i, n := range o.Latencies {
			sum.Latencies[i] += n
		}
		all[operation(name)] = sum
	}
	return all
}

// SampleCollectors returns the metrics with one value each, for the page that documents them.
func SampleCollectors() []prometheus.Collector {
	return []prometheus.Collector{sample{}}
}

type sample struct{}

func (sample) Describe(ch chan<- *prometheus.Desc) { VolumeMetrics{}.Describe(ch) }

func (sample) Collect(ch chan<- prometheus.Metric) {
	(&Mount{
		Session: Session{Expires: time.Unix(1, 0)}, Memory: &Memory{LimitBytes: 1}, Uploads: &Uploads{},
		requests: &client.Requests{Operations: map[string]client.Operation{"GetObject": {}}},
	}).send(ch)
}
