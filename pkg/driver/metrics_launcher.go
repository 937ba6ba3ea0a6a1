package driver

import (
	"strconv"

	"github.com/prometheus/client_golang/prometheus"
)

// LauncherInfo describes the launcher of this node, for metrics.
type LauncherInfo struct {
	Launcher       string   // LauncherSystemd or LauncherProcess
	SystemdVersion string   // "" with launcher process
	Sandbox        string   // what keeps clients from the host's files: "landlock", "unit" or "none"
	Landlock       int      // version of Landlock; 0: none
	Missing        []string // what the sandbox lacks on this host: properties of units, seccomp
}

// ShowLauncher registers the launcher's metrics. info is called at every scrape.
func (m *Metrics) ShowLauncher(info func() LauncherInfo) error {
	return m.registry.Register(&launcherCollector{
		info: info,
		launcher: prometheus.NewDesc("s3csi_launcher_info", "Always 1; the labels have the launcher of this node and, for launcher systemd, the version of systemd.",
			[]string{"launcher", "systemd_version"}, nil),
		sandbox: prometheus.NewDesc("s3csi_sandbox_info", "Always 1; the labels have what restricts new mounts' access to the host's files (landlock, unit: the mount namespace of a systemd unit, none) and the version of Landlock.",
			[]string{"sandbox", "landlock_abi"}, nil),
		missing: prometheus.NewDesc("s3csi_sandbox_missing", "1 for each sandbox property of systemd units that this host does not support, and for seccomp if system calls are not filtered; the reason is in the driver's log.",
			[]string{"property"}, nil),
	})
}

type launcherCollector struct {
	info                       func() LauncherInfo
	launcher, sandbox, missing *prometheus.Desc
}

// Describe implements prometheus.Collector.
func (c *launcherCollector) Describe(to chan<- *prometheus.Desc) {
	to <- c.launcher
	to <- c.sandbox
	to <- c.missing
}

// Collect implements prometheus.Collector.
func (c *launcherCollector) Collect(to chan<- prometheus.Metric) {
	info := c.info()
	to <- prometheus.MustNewConstMetric(c.launcher, prometheus.GaugeValue, 1, info.Launcher, info.SystemdVersion)
	to <- prometheus.MustNewConstMetric(c.sandbox, prometheus.GaugeValue, 1, info.Sandbox, strconv.Itoa(info.Landlock))
	for _, property := range info.Missing {
		to <- prometheus.MustNewConstMetric(c.missing, prometheus.GaugeValue, 1, property)
	}
}
