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

	"github.com/s3-csi/s3-csi-driver/tests/internal/rig"
	"github.com/s3-csi/s3-csi-driver/tests/internal/rig/rigtest"
)

// helperProgram is the process of a mount beside its client.
const helperProgram = "s3-csi-helper"

// BenchmarkMemory publishes 50 volumes, each with its own mount, and reads the memory of the processes some seconds after the last
// publication.
//
// helper-MB and client-MB are medians of the private memory of a mount's two processes: Private_Clean and Private_Dirty of
// smaps_rollup (proc_pid_smaps_rollup(5)). That is the cost of one more mount, because all processes of a program share its
// code. helper-share-MB and client-share-MB are proportional (Pss). driver-MB is the driver's resident memory (VmRSS) with all 50
// mounts, and idle-driver-MB before the first. MB are 10^6 bytes.
func BenchmarkMemory(b *testing.B) { eachClient(b, measureMemory) }

func measureMemory(b *testing.B, client string) {
	const (
		mounts = 50
		settle = 5 * time.Second
	)
	n, d := setup(b, client)
	idle := resident(b, d)
	volumes := map[string]*csi.Volume{}
	for i := range mounts {
		name := fmt.Sprintf("memory-%d", i)
		target := n.Target(name)
		volumes[target] = volume(b, n, name)
		rigtest.Publish(b, d, volumes[target], target)
	}
	time.Sleep(settle)
	reportMemory(b, n, d, client, mounts)
	for target, v := range volumes {
		rigtest.Unpublish(b, d, v, target)
	}
	n.NothingLeft(b)
	b.ReportMetric(idle, "idle-driver-MB")
}

// reportMemory reports the memory of the driver, of the helpers and of the clients, of which each mount must have one.
func reportMemory(b *testing.B, n *rigtest.Node, d *rig.Driver, client string, mounts int) {
	b.Helper()
	for label, program := range map[string]string{"helper": helperProgram, "client": rig.Programs()[client]} {
		var private, share []float64
		for _, p := range n.Running(program) {
			rollup := proc(p.PID, "smaps_rollup")
			private = append(private, sizes(b, rollup, "Private_Clean", "Private_Dirty"))
			share = append(share, sizes(b, rollup, "Pss"))
		}
		if len(private) != mounts {
			b.Fatalf("%d processes of %s run for %d mounts: %v", len(private), program, mounts, n.Processes())
		}
		b.Logf("%s: private %s MB, proportional %s MB", label, span(private), span(share))
		b.ReportMetric(median(private), label+"-MB")
		b.ReportMetric(median(share), label+"-share-MB")
	}
	b.ReportMetric(resident(b, d), "driver-MB")
}

// resident is the driver's resident memory in 10^6 bytes.
func resident(b *testing.B, d *rig.Driver) float64 {
	b.Helper()
	return sizes(b, proc(d.PID(), "status"), "VmRSS")
}

// proc is the path of a file of a process in /proc.
func proc(pid int, file string) string { return filepath.Join("/proc", strconv.Itoa(pid), file) }

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
