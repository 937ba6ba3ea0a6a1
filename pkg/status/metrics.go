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

type volumeMetric struct {
	desc *prometheus.Desc
	kind prometheus.ValueType
}

func newVolumeMetric(kind prometheus.ValueType, name, help string, labels ...string) volumeMetric {
	return volumeMetric{prometheus.NewDesc("s3csi_volume_"+name, help, append([]string{"volume", "mount"}, labels...), nil), kind}
}

type volumeDescs struct {
	info, state                                              volumeMetric
	sessionExpiry, memory, memoryLimit                       volumeMetric
	uploads, uploadBytes, conflicts, unstored, read, written volumeMetric
	errors, throttles                                        volumeMetric
	duration                                                 *prometheus.Desc
}

func newVolumeDescs() volumeDescs {
	gauge, counter := prometheus.GaugeValue, prometheus.CounterValue
	return volumeDescs{
		info: newVolumeMetric(gauge, "mount_info",
			"Always 1; the labels have the PersistentVolume of a mount, its client, bucket and prefix, and the version of the driver that its programs came with.",
			"persistentvolume", "client", "bucket", "prefix", "version"),
		state:         newVolumeMetric(gauge, "mount_state", "Always 1; the label has the state of a mount, as s3csi_mounts has it, or starting or unknown.", "state"),
		sessionExpiry: newVolumeMetric(gauge, "session_expiry_timestamp_seconds", "When the session of a mount expires, in seconds since the epoch."),
		memory:        newVolumeMetric(gauge, "memory_bytes", "Resident memory of a mount's client and helper, in bytes."),
		memoryLimit:   newVolumeMetric(gauge, "memory_limit_bytes", "Memory limit of a mount, in bytes, where the launcher enforces one."),
		uploads:       newVolumeMetric(gauge, "uploads", "Files that are closed and not uploaded yet, and uploads in progress."),
		uploadBytes:   newVolumeMetric(gauge, "upload_bytes", "Size of the files in s3csi_volume_uploads, in bytes."),
		conflicts:     newVolumeMetric(counter, "conflicts_total", "Files not uploaded because another writer had changed the object."),
		unstored:      newVolumeMetric(counter, "unstored_total", "Files whose data was lost because the client could not store it after they were closed."),
		read:          newVolumeMetric(counter, "read_bytes_total", "Bytes of objects that the client read; of clients that report it (mountpoint-s3)."),
		written:       newVolumeMetric(counter, "written_bytes_total", "Bytes of files that the client wrote; of clients that report it (mountpoint-s3)."),
		errors: newVolumeMetric(counter, "request_errors_total",
			"Requests to S3 that failed, by operation, without those for missing objects and unmet conditions; of clients that report it (mountpoint-s3).", "operation"),
		throttles: newVolumeMetric(counter, "request_throttles_total",
			"Requests to S3 that the service answered with 429 or 503, by operation; of clients that report it (mountpoint-s3).", "operation"),
		duration: newVolumeMetric(counter, "request_duration_seconds",
			"Duration of requests to S3 by operation, in seconds; of clients that report it (mountpoint-s3).", "operation").desc,
	}
}

// Describe implements prometheus.Collector.
func (v VolumeMetrics) Describe(ch chan<- *prometheus.Desc) {
	d := newVolumeDescs()
	for _, m := range []volumeMetric{
		d.info, d.state, d.sessionExpiry, d.memory, d.memoryLimit, d.uploads, d.uploadBytes, d.conflicts, d.unstored, d.read, d.written, d.errors, d.throttles,
	} {
		ch <- m.desc
	}
	ch <- d.duration
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
	d := newVolumeDescs()
	for i := range document.Mounts {
		d.send(ch, &document.Mounts[i])
	}
}

func (d volumeDescs) send(ch chan<- prometheus.Metric, m *Mount) {
	send := func(metric volumeMetric, value float64, labels ...string) {
		ch <- prometheus.MustNewConstMetric(metric.desc, metric.kind, value, append([]string{m.VolumeID, m.Name}, labels...)...)
	}
	persistentVolume := ""
	if names := m.volumes(); len(names) > 0 {
		persistentVolume = slices.Min(names) // the same one whichever pods come and go
	}
	send(d.info, 1, persistentVolume, m.Client.Name, m.Bucket, m.Prefix, m.Client.Version)
	send(d.state, 1, string(m.State))
	if !m.Session.Expires.IsZero() {
		send(d.sessionExpiry, float64(m.Session.Expires.Unix()))
	}
	if m.Memory != nil {
		send(d.memory, float64(m.Memory.UsedBytes))
		if m.Memory.LimitBytes > 0 {
			send(d.memoryLimit, float64(m.Memory.LimitBytes))
		}
	}
	if m.Uploads != nil {
		send(d.uploads, float64(m.Uploads.Files))
		send(d.uploadBytes, float64(m.Uploads.Bytes))
	}
	send(d.conflicts, float64(m.Conflicts))
	send(d.unstored, float64(m.Unstored))
	if m.requests == nil {
		return
	}
	send(d.read, float64(m.requests.Read))
	send(d.written, float64(m.requests.Written))
	for name, o := range byOperation(m.requests.Operations) {
		send(d.errors, float64(o.Errors), name)
		send(d.throttles, float64(o.Throttles), name)
		buckets, count := map[float64]uint64{}, uint64(0)
		for i, bound := range latencies() {
			count += uint64(o.Latencies[i])
			buckets[bound] = count
		}
		count += uint64(o.Latencies[len(o.Latencies)-1])
		ch <- prometheus.MustNewConstHistogram(d.duration, count, float64(o.Milliseconds)/1000, buckets, m.VolumeID, m.Name, name)
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
	newVolumeDescs().send(ch, &Mount{
		Session: Session{Expires: time.Unix(1, 0)}, Memory: &Memory{LimitBytes: 1}, Uploads: &Uploads{},
		requests: &client.Requests{Operations: map[string]client.Operation{"GetObject": {}}},
	})
}
