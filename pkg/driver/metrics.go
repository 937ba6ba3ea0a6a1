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

// Metrics is everything that /metrics shows: csi_plugin_operations_seconds as every CSI plugin has it, and a registry for
// the rest.
type Metrics struct {
	csi      csimetrics.CSIMetricsManager
	registry *prometheus.Registry
}

// NewMetrics makes the registry with the process's own metrics.
func NewMetrics(driverName, version string) (*Metrics, error) {
	m := &Metrics{
		// The process collector has the start time already; twice would be an error when it is read.
		csi: csimetrics.NewCSIMetricsManagerWithOptions(driverName,
			csimetrics.WithSubsystem(csimetrics.SubsystemPlugin), csimetrics.WithProcessStartTime(false)),
		registry: prometheus.NewRegistry(),
	}
	info := prometheus.NewGauge(prometheus.GaugeOpts{
		Name:        "s3csi_build_info",
		Help:        "Always 1; the labels say which driver this is.",
		ConstLabels: prometheus.Labels{"version": version, "go_version": runtime.Version(), "driver_name": driverName},
	})
	info.Set(1)
	for _, c := range []prometheus.Collector{
		info,
		collectors.NewGoCollector(),
		collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}),
	} {
		if err := m.registry.Register(c); err != nil {
			return nil, err
		}
	}
	m.csi.WithAdditionalRegistry(m.registry)
	return m, nil
}

// Registerer is where other packages put their metrics.
func (m *Metrics) Registerer() prometheus.Registerer { return m.registry }

// Gatherer reads every metric.
func (m *Metrics) Gatherer() prometheus.Gatherer {
	return prometheus.Gatherers{m.csi.GetRegistry(), m.registry}
}

func (m *Metrics) addTo(mux *http.ServeMux) { m.csi.RegisterToServer(mux, "/metrics") }

// intercept is connection.ExtendedCSIMetricsManager's server interceptor; that package would link OpenTelemetry's gRPC
// instrumentation for these four lines.
func (m *Metrics) intercept(ctx context.Context, req any, info *grpc.UnaryServerInfo, handler grpc.UnaryHandler) (any, error) {
	start := time.Now()
	resp, err := handler(ctx, req)
	m.csi.RecordMetrics(info.FullMethod, err, time.Since(start))
	return resp, err
}
