package usage

import (
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/s3-csi/s3-csi-driver/pkg/mount/state"
	"github.com/s3-csi/s3-csi-driver/pkg/volume"
)

// The results of measurements.
const (
	resultComplete = "complete"
	resultCut      = "cut"
	resultFailed   = "failed"
)

// The values of the label accuracy.
const (
	exact   = "exact"
	atLeast = "at-least"
)

type metrics struct {
	measurements *prometheus.CounterVec
	requests     prometheus.Counter
}

func newMetrics() metrics {
	return metrics{
		measurements: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "s3csi_usage_measurements_total",
			Help: "Measurements of the usage of volumes, by result: complete, cut (the listing reached its limit), failed (it is tried again).",
		}, []string{"result"}),
		requests: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "s3csi_usage_list_requests_total",
			Help: "Pages that were listed to measure the usage of volumes.",
		}),
	}
}

// descs are the descriptions of a volume's gauges.
func descs() (bytes, objects, capacity, listed *prometheus.Desc) {
	const accuracy = "when this node last listed it; accuracy is exact, or at-least if the listing was cut."
	desc := func(name, help string, labels ...string) *prometheus.Desc {
		return prometheus.NewDesc(name, help, append([]string{"volume"}, labels...), nil)
	}
	return desc("s3csi_volume_used_bytes", "Size of all objects of a volume with the parameter usage, in bytes, "+accuracy, "accuracy"),
		desc("s3csi_volume_objects", "Number of objects of a volume with the parameter usage, "+accuracy, "accuracy"),
		desc("s3csi_volume_size_bytes", "Recorded size of a volume with the parameter usage, in bytes, if this node can read it."),
		desc("s3csi_volume_usage_timestamp_seconds", "When this node last listed a volume with the parameter usage, in seconds since the epoch.")
}

// Collectors returns the metrics.
func (m *Meter) Collectors() []prometheus.Collector {
	return []prometheus.Collector{m.metrics.measurements, m.metrics.requests, gauges{m}}
}

// SampleCollectors returns the metrics with values, for the document about them.
func SampleCollectors() []prometheus.Collector {
	sample := state.Usage{VolumeID: "v", Setting: volume.Usage(volume.MinUsage), CapacityBytes: 2, Measured: time.Unix(1, 0), Bytes: 1, Objects: 1}
	m := &Meter{metrics: newMetrics(), entries: map[string]*entry{"v": {usage: sample, published: true}}}
	m.metrics.measurements.WithLabelValues(resultComplete)
	return m.Collectors()
}

type gauges struct{ m *Meter }

// Describe implements prometheus.Collector.
func (g gauges) Describe(ch chan<- *prometheus.Desc) {
	bytes, objects, capacity, listed := descs()
	for _, d := range []*prometheus.Desc{bytes, objects, capacity, listed} {
		ch <- d
	}
}

// Collect implements prometheus.Collector.
func (g gauges) Collect(ch chan<- prometheus.Metric) {
	g.m.mu.Lock()
	defer g.m.mu.Unlock()
	bytes, objects, capacity, listed := descs()
	for id, e := range g.m.entries {
		if !e.shown() {
			continue
		}
		accuracy := exact
		if e.usage.AtLeast {
			accuracy = atLeast
		}
		gauge := func(d *prometheus.Desc, v float64, labels ...string) {
			ch <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, v, labels...)
		}
		gauge(bytes, float64(e.usage.Bytes), id, accuracy)
		gauge(objects, float64(e.usage.Objects), id, accuracy)
		gauge(listed, float64(e.usage.Measured.UnixMilli())/1000, id)
		if e.usage.CapacityBytes > 0 {
			gauge(capacity, float64(e.usage.CapacityBytes), id)
		}
	}
}
