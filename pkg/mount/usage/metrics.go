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

func bytesDesc() *prometheus.Desc {
	return prometheus.NewDesc("s3csi_volume_used_bytes",
		"Size of all objects of a volume with the parameter usage, in bytes, when this node last listed it; accuracy is exact, or at-least if the listing was cut.",
		[]string{"volume", "accuracy"}, nil)
}

func objectsDesc() *prometheus.Desc {
	return prometheus.NewDesc("s3csi_volume_objects",
		"Number of objects of a volume with the parameter usage, when this node last listed it; accuracy is exact, or at-least if the listing was cut.",
		[]string{"volume", "accuracy"}, nil)
}

func capacityDesc() *prometheus.Desc {
	return prometheus.NewDesc("s3csi_volume_size_bytes", "Recorded size of a volume with the parameter usage, in bytes, if this node can read it.", []string{"volume"}, nil)
}

func timeDesc() *prometheus.Desc {
	return prometheus.NewDesc("s3csi_volume_usage_timestamp_seconds", "When this node last listed a volume with the parameter usage, in seconds since the epoch.", []string{"volume"}, nil)
}

// Collectors returns the metrics.
func (m *Meter) Collectors() []prometheus.Collector {
	return []prometheus.Collector{m.metrics.measurements, m.metrics.requests, gauges{m}}
}

// SampleCollectors returns the metrics with values, for the document about them.
func SampleCollectors() []prometheus.Collector {
	m := &Meter{metrics: newMetrics(), entries: map[string]*entry{"v": {Usage: sample(), published: true}}}
	m.metrics.measurements.WithLabelValues(resultComplete)
	return m.Collectors()
}

func sample() state.Usage {
	return state.Usage{VolumeID: "v", Setting: volume.Usage(volume.MinUsage), CapacityBytes: 2, Measured: time.Unix(1, 0), Bytes: 1, Objects: 1}
}

type gauges struct{ m *Meter }

// Describe implements prometheus.Collector.
func (g gauges) Describe(ch chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{bytesDesc(), objectsDesc(), capacityDesc(), timeDesc()} {
		ch <- d
	}
}

// Collect implements prometheus.Collector.
func (g gauges) Collect(ch chan<- prometheus.Metric) {
	g.m.mu.Lock()
	defer g.m.mu.Unlock()
	for id, e := range g.m.entries {
		if !e.shown() {
			continue
		}
		accuracy := exact
		if e.AtLeast {
			accuracy = atLeast
		}
		gauge := func(d *prometheus.Desc, v float64, labels ...string) {
			ch <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, v, labels...)
		}
		gauge(bytesDesc(), float64(e.Bytes), id, accuracy)
		gauge(objectsDesc(), float64(e.Objects), id, accuracy)
		gauge(timeDesc(), float64(e.Measured.UnixMilli())/1000, id)
		if e.CapacityBytes > 0 {
			gauge(capacityDesc(), float64(e.CapacityBytes), id)
		}
	}
}
