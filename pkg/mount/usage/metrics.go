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

// newGauges returns the metrics that are read from the entries of volumes.
func newGauges() (bytes, objects, size, measured *prometheus.GaugeVec) {
	gauge := func(name, help string, labels ...string) *prometheus.GaugeVec {
		return prometheus.NewGaugeVec(prometheus.GaugeOpts{Name: name, Help: help}, labels)
	}
	const accuracy = "when this node last listed it; accuracy is exact, or at-least if the listing was cut."
	bytes = gauge("s3csi_volume_used_bytes", "Size of all objects of a volume with the parameter usage, in bytes, "+accuracy, "volume", "accuracy")
	objects = gauge("s3csi_volume_objects", "Number of objects of a volume with the parameter usage, "+accuracy, "volume", "accuracy")
	size = gauge("s3csi_volume_size_bytes", "Recorded size of a volume with the parameter usage, in bytes, if this node can read it.", "volume")
	measured = gauge("s3csi_volume_usage_timestamp_seconds",
		"When this node last listed a volume with the parameter usage, in seconds since the epoch.", "volume")
	return bytes, objects, size, measured
}

// Collectors returns the metrics.
func (m *Meter) Collectors() []prometheus.Collector {
	return []prometheus.Collector{m.metrics.measurements, m.metrics.requests, gauges{m}}
}

// SampleCollectors returns the metrics with values, for the document about them.
func SampleCollectors() []prometheus.Collector {
	m := &Meter{metrics: newMetrics(), entries: map[string]*entry{"v": {known: sample(), published: true}}}
	m.metrics.measurements.WithLabelValues(resultComplete)
	return m.Collectors()
}

func sample() state.Usage {
	return state.Usage{VolumeID: "v", Setting: volume.Usage(volume.MinUsage), CapacityBytes: 2, Measured: time.Unix(1, 0), Bytes: 1, Objects: 1}
}

type gauges struct{ m *Meter }

// Describe implements prometheus.Collector.
func (g gauges) Describe(ch chan<- *prometheus.Desc) {
	bytes, objects, size, measured := newGauges()
	for _, v := range []*prometheus.GaugeVec{bytes, objects, size, measured} {
		v.Describe(ch)
	}
}

// Collect implements prometheus.Collector.
func (g gauges) Collect(ch chan<- prometheus.Metric) {
	bytes, objects, size, measured := newGauges()
	g.m.mu.Lock()
	for id, e := range g.m.entries {
		if !e.shown() {
			continue
		}
		accuracy := exact
		if e.known.AtLeast {
			accuracy = atLeast
		}
		bytes.WithLabelValues(id, accuracy).Set(float64(e.known.Bytes))
		objects.WithLabelValues(id, accuracy).Set(float64(e.known.Objects))
		measured.WithLabelValues(id).Set(float64(e.known.Measured.UnixMilli()) / 1000)
		if e.known.CapacityBytes > 0 {
			size.WithLabelValues(id).Set(float64(e.known.CapacityBytes))
		}
	}
	g.m.mu.Unlock()
	for _, v := range []*prometheus.GaugeVec{bytes, objects, size, measured} {
		v.Collect(ch)
	}
}
