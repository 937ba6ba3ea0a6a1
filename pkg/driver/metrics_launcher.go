package driver

import "github.com/prometheus/client_golang/prometheus"

// LauncherInfo is how helpers come to life on this node, for metrics.
type LauncherInfo struct {
	Launcher       string   // LauncherSystemd or LauncherProcess
	SystemdVersion string   // "" where systemd is not the launcher
	Missing        []string // the properties of units' sandbox that the host's systemd does not put up
}

// ShowLauncher adds the launcher to the metrics. info is called at each reading.
func (m *Metrics) ShowLauncher(info func() LauncherInfo) error {
	return m.registry.Register(&launcherCollector{
		info: info,
		launcher: prometheus.NewDesc("s3csi_launcher_info", "Always 1; the labels say how helpers come to life on this node, and the version of systemd where it is that.",
			[]string{"launcher", "systemd_version"}, nil),
		missing: prometheus.NewDesc("s3csi_sandbox_missing", "1 for each property of the sandbox of systemd units that this host does not put up; the driver's log says why.",
			[]string{"property"}, nil),
	})
}

type launcherCollector struct {
	info              func() LauncherInfo
	launcher, missing *prometheus.Desc
}

// Describe implements prometheus.Collector.
func (c *launcherCollector) Describe(to chan<- *prometheus.Desc) {
	to <- c.launcher
	to <- c.missing
}

// Collect implements prometheus.Collector.
func (c *launcherCollector) Collect(to chan<- prometheus.Metric) {
	info := c.info()
	to <- prometheus.MustNewConstMetric(c.launcher, prometheus.GaugeValue, 1, info.Launcher, info.SystemdVersion)
	for _, property := range info.Missing {
		to <- prometheus.MustNewConstMetric(c.missing, prometheus.GaugeValue, 1, property)
	}
}
