package driver

import (
	"context"
	"net/http"
	"runtime"
	"time"

	csimetrics "github.com/kubernetes-csi/csi-lib-utils/metrics"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"google.golang.org/grpc"
)

// Metrics holds all metrics of /metrics: csi_plugin_operations_seconds, which every CSI plugin has, and a registry for the others.
type Metrics struct {
	csi      csimetrics.CSIMetricsManager
	registry *prometheus.Registry
}

// NewMetrics returns the metrics, with those of the process and the Go runtime.
func NewMetrics(driverName, version string) *Metrics {
	m := &Metrics{
		// The process collector also has the start time, and a duplicate would make every scrape fail.
		csi: csimetrics.NewCSIMetricsManagerWithOptions(driverName,
			csimetrics.WithSubsystem(csimetrics.SubsystemPlugin), csimetrics.WithProcessStartTime(false)),
		registry: prometheus.NewRegistry(),
	}
	info := prometheus.NewGauge(prometheus.GaugeOpts{
		Name:        "s3csi_build_info",
		Help:        "Always 1; the labels have the driver's name and version, and the version of Go.",
		ConstLabels: prometheus.Labels{"version": version, "go_version": runtime.Version(), "driver_name": driverName},
	})
	info.Set(1)
	m.registry.MustRegister(info, collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	m.csi.WithAdditionalRegistry(m.registry)
	return m
}

// Registerer returns the registry for metrics of other packages.
func (m *Metrics) Registerer() prometheus.Registerer { return m.registry }

// Gatherer returns a gatherer of all metrics.
func (m *Metrics) Gatherer() prometheus.Gatherer {
	return prometheus.Gatherers{m.csi.GetRegistry(), m.registry}
}

func (m *Metrics) addTo(mux *http.ServeMux) { m.csi.RegisterToServer(mux, "/metrics") }

// intercept records the duration and the code of a request. It is a copy of the interceptor of connection.ExtendedCSIMetricsManager,
// because that package links OpenTelemetry's gRPC instrumentation.
func (m *Metrics) intercept(ctx context.Context, req any, info *grpc.UnaryServerInfo, handler grpc.UnaryHandler) (any, error) {
	start := time.Now()
	resp, err := handler(ctx, req)
	m.csi.RecordMetrics(info.FullMethod, err, time.Since(start))
	return resp, err
}
