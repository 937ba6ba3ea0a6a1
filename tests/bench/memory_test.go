package bench

import (
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/s3-csi/s3-csi-driver/tests/rig/rigtest"
)

// BenchmarkMemory publishes 50 volumes, each with a mount of its own, and looks at the memory of what then runs, a while
// after the last publication.
//
// helper-MB and client-MB are medians of the private memory of a mount's two processes: the pages that nobody else has
// (Private_Clean and Private_Dirty of smaps_rollup, proc_pid_smaps_rollup(5)), which is what one more mount costs, because
// programs' code is shared by all. driver-MB is the driver's resident memory (VmRSS) with all 50 and idle-driver-MB before
// the first. MB are 10^6 bytes.
func BenchmarkMemory(b *testing.B) {
	const (
		mounts = 50
		settle = 10 * time.Second
	)
	n, d := setup(b)
	idle := sizes(b, filepath.Join("/proc", strconv.Itoa(d.PID()), "status"), "VmRSS")
	volumes := map[string]*csi.Volume{}
	for i := range mounts {
		name := fmt.Sprintf("memory-%d", i)
		target := n.Target(name)
		volumes[target] = volume(b, n, name)
		rigtest.Publish(b, d, volumes[target], target)
	}
	time.Sleep(settle)
	private := map[string][]float64{}
	for _, pid := range pidsOf(b, n.FirstUID, n.LastUID) {
		comm, err := os.ReadFile(filepath.Join("/proc", pid, "comm"))
		must(b, err)
		name := strings.TrimSpace(string(comm))
		private[name] = append(private[name], sizes(b, filepath.Join("/proc", pid, "smaps_rollup"), "Private_Clean", "Private_Dirty"))
	}
	driver := sizes(b, filepath.Join("/proc", strconv.Itoa(d.PID()), "status"), "VmRSS")
	helpers, clients := private["s3-csi-helper"], private["s3-csi-rclone"]
	if len(helpers) != mounts || len(clients) != mounts {
		b.Fatalf("%d helpers and %d clients run for %d mounts: %v", len(helpers), len(clients), mounts, private)
	}
	for target, v := range volumes {
		rigtest.Unpublish(b, d, v, target)
	}
	n.NothingLeft(b)
	b.Logf("helper %s MB, client %s MB", span(helpers), span(clients))
	b.ReportMetric(median(helpers), "helper-MB")
	b.ReportMetric(median(clients), "client-MB")
	b.ReportMetric(driver, "driver-MB")
	b.ReportMetric(idle, "idle-driver-MB")
}

// pidsOf are the processes of user ids.
func pidsOf(b *testing.B, first, last int) []string {
	b.Helper()
	dirs, err := filepath.Glob("/proc/[0-9]*")
	must(b, err)
	var pids []string
	for _, dir := range dirs {
		status, _ := os.ReadFile(filepath.Join(dir, "status")) // others come and go
		for line := range strings.Lines(string(status)) {
			fields := strings.Fields(line)
			if len(fields) < 2 || fields[0] != "Uid:" {
				continue
			}
			if uid, err := strconv.Atoi(fields[1]); err == nil && uid >= first && uid <= last {
				pids = append(pids, filepath.Base(dir))
			}
		}
	}
	return pids
}

// sizes is the sum of the lines "Name:  123 kB" of a file in /proc, in 10^6 bytes.
func sizes(b *testing.B, file string, names ...string) float64 {
	b.Helper()
	text, err := os.ReadFile(file)
	must(b, err)
	sum, found := 0.0, 0
	for line := range strings.Lines(string(text)) {
		for _, name := range names {
			var kib float64
			if _, err := fmt.Sscanf(line, name+": %f kB", &kib); err == nil {
				sum += kib * 1024 / 1e6
				found++
			}
		}
	}
	if found != len(names) {
		b.Fatalf("%s: want lines of %v", file, names)
	}
	return sum
}
