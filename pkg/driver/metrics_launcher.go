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
	return m.registry.Register(launcherCollector(info))
}

type launcherCollector func() LauncherInfo

// Describe implements prometheus.Collector.
func (launcherCollector) Describe(to chan<- *prometheus.Desc) {
	prometheus.DescribeByCollect(launcherCollector(func() LauncherInfo { return LauncherInfo{Missing: []string{""}} }), to)
}

// Collect implements prometheus.Collector.
func (c launcherCollector) Collect(to chan<- prometheus.Metric) {
	show := func(name, help string, labels []string, values ...string) {
		to <- prometheus.MustNewConstMetric(prometheus.NewDesc(name, help, labels, nil), prometheus.GaugeValue, 1, values...)
	}
	info := c()
	show("s3csi_launcher_info", "Always 1; the labels have the launcher of this node and, for launcher systemd, the version of systemd.",
		[]string{"launcher", "systemd_version"}, info.Launcher, info.SystemdVersion)
	show("s3csi_sandbox_info", "Always 1; the labels have what restricts new mounts' access to the host's files "+
		"(landlock, unit: the mount namespace of a systemd unit, none) and the version of Landlock.",
		[]string{"sandbox", "landlock_abi"}, info.Sandbox, strconv.Itoa(info.Landlock))
	for _, property := range info.Missing {
		show("s3csi_sandbox_missing", "1 for each sandbox property of systemd units that this host does not support, "+
			"and for seccomp if system calls are not filtered; the reason is in the driver's log.", []string{"property"}, property)
	}
}
