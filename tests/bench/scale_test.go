package bench

import (
	"cmp"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"

	"github.com/s3-csi/s3-csi-driver/tests/internal/rig"
	"github.com/s3-csi/s3-csi-driver/tests/internal/rig/rigtest"
)

// BenchmarkScale measures what mounts that no process uses cost the driver, with 100 and 300 of them, or with the numbers in
// S3CSI_SCALE ("100,300,990"; a rig has 1,000 user ids). Their client is rclone, or S3CSI_SCALE_CLIENT. With S3CSI_SCALE_DNS=pod, the
// driver has another resolv.conf than the host, as in a container, and helpers use it, as with the chart.
//
// publish-s and unpublish-s are how long it takes to publish and unpublish all, eight at a time.
// cpu-s/min is the driver's processor time per minute and pass-ms the mean duration of a reconcile pass, both over a window of
// S3CSI_SCALE_WINDOW (two minutes, which have two passes). RSS-MB is the driver's resident memory at its end, peak-MB the highest
// since the driver started, threads the number of its threads. mounts-MB is the kernel's memory for the mounts of all mount namespaces
// of the machine. Then the driver is restarted: ready-ms is the time until it reports
// that it is ready, answer-ms the time from its start until a NodePublishVolume of a volume that is published already has
// returned, and first-pass-s the duration of its first pass. heal-s is how long it takes until ten roots can be read again whose
// clients were killed at once. MB are 10^6 bytes.
func BenchmarkScale(b *testing.B) {
	counts := os.Getenv("S3CSI_SCALE")
	if counts == "" {
		counts = "100,300"
	}
	for text := range strings.SplitSeq(counts, ",") {
		count, err := strconv.Atoi(text)
		must(b, err)
		b.Run(text, func(b *testing.B) { scale(b, count) })
	}
}

func scale(b *testing.B, count int) {
	const (
		width  = 8 // publications at a time
		settle = 10 * time.Second
	)
	window := 2 * time.Minute
	if text := os.Getenv("S3CSI_SCALE_WINDOW"); text != "" {
		var err error
		window, err = time.ParseDuration(text)
		must(b, err)
	}
	client := cmp.Or(os.Getenv("S3CSI_SCALE_CLIENT"), rigtest.Client)
	n := newNode(b, client)
	dns := cmp.Or(os.Getenv("S3CSI_SCALE_DNS"), "host")
	if dns == "pod" {
		withResolvConf(b, n)
	}
	start := func() *rig.Driver { return drive(b, n, client, "--node-dns="+dns) }
	d := start()
	volumes, targets := make([]*csi.Volume, count), make([]string, count)
	each := func(do func(i int) error) {
		var g errgroup.Group
		g.SetLimit(width)
		for i := range count {
			g.Go(func() error { return do(i) })
		}
		must(b, g.Wait())
	}
	for i := range count {
		name := fmt.Sprintf("scale-%d", i)
		volumes[i], targets[i] = volume(b, n, name), n.Target(name)
	}
	publish := func(i int) error {
		_, err := d.NodePublishVolume(b.Context(), rigtest.PublishRequest(volumes[i], targets[i]))
		return err
	}
	b.ReportMetric(took(b, func() error { each(publish); return nil })/1000, "publish-s")
	time.Sleep(settle)

	pid := strconv.Itoa(d.PID())
	status := filepath.Join("/proc", pid, "status")
	passes, lasted := reconciled(b, d)
	cpu, began := cpuSeconds(b, d.PID()), time.Now()
	time.Sleep(window)
	b.ReportMetric((cpuSeconds(b, d.PID())-cpu)/time.Since(began).Minutes(), "cpu-s/min")
	passesNow, lastedNow := reconciled(b, d)
	if passesNow > passes {
		b.ReportMetric((lastedNow-lasted)/(passesNow-passes)*1000, "pass-ms")
	}
	b.ReportMetric(sizes(b, status, "VmRSS"), "RSS-MB")
	b.ReportMetric(sizes(b, status, "VmHWM"), "peak-MB")
	threads, err := os.ReadDir(filepath.Join("/proc", pid, "task"))
	must(b, err)
	b.ReportMetric(float64(len(threads)), "threads")
	b.ReportMetric(kernelMounts(b), "mounts-MB")

	began = time.Now()
	healed := killClients(b, n, client, targets, 10)
	b.ReportMetric(healed.Sub(began).Seconds(), "heal-s")

	_, err = d.Stop(b.Context())
	must(b, err)
	began = time.Now()
	d = start()
	b.ReportMetric(milliseconds(time.Since(began)), "ready-ms")
	must(b, publish(0))
	b.ReportMetric(milliseconds(time.Since(began)), "answer-ms")
	rigtest.Await(b, 10*time.Minute, "the first pass", func() bool {
		passes, lasted = reconciled(b, d)
		return passes > 0
	})
	b.ReportMetric(lasted, "first-pass-s")

	b.ReportMetric(took(b, func() error {
		each(func(i int) error {
			_, err := d.NodeUnpublishVolume(b.Context(), &csi.NodeUnpublishVolumeRequest{VolumeId: volumes[i].GetVolumeId(), TargetPath: targets[i]})
			return err
		})
		return nil
	})/1000, "unpublish-s")
	n.NothingLeft(b)
}

// killClients kills some clients, and returns when all roots can be read again.
func killClients(b *testing.B, n *rigtest.Node, client string, targets []string, count int) time.Time {
	b.Helper()
	running := n.Running(rig.Programs()[client])
	if len(running) != len(targets) {
		b.Fatalf("want %d clients, %d run", len(targets), len(running))
	}
	for _, p := range running[:count] {
		must(b, unix.Kill(p.PID, unix.SIGKILL))
	}
	left := slices.Clone(targets)
	rigtest.Await(b, 5*time.Minute, "the heals", func() bool {
		if slices.ContainsFunc(running[:count], func(p rig.Process) bool { return unix.Kill(p.PID, 0) == nil }) {
			return false
		}
		left = slices.DeleteFunc(left, func(target string) bool { return readRoot(target) == nil })
		return len(left) == 0
	})
	return time.Now()
}

// reconciled is the number of reconcile passes of a driver so far, and their duration in seconds.
func reconciled(b *testing.B, d *rig.Driver) (passes, took float64) {
	b.Helper()
	for line := range strings.Lines(rigtest.Get(b, d, "/metrics")) {
		_, _ = fmt.Sscanf(line, "s3csi_reconcile_duration_seconds_count %f", &passes)
		_, _ = fmt.Sscanf(line, "s3csi_reconcile_duration_seconds_sum %f", &took)
	}
	return passes, took
}

// withResolvConf gives the driver a mount namespace with a resolv.conf of its own, as a container has.
func withResolvConf(b *testing.B, n *rigtest.Node) {
	b.Helper()
	own := filepath.Join(n.Dir, "pod-resolv.conf")
	must(b, os.WriteFile(own, []byte("nameserver 127.0.0.1\n"), 0o644))
	n.Wrapper = []string{"unshare", "--mount", "--propagation", "private", "sh", "-ec", `mount --bind "$0" /etc/resolv.conf; exec setpriv --pdeathsig KILL "$@"`,
		own}
}

// kernelMounts returns how many MB the kernel's objects of mounts take.
func kernelMounts(b *testing.B) float64 {
	b.Helper()
	slabs, err := os.ReadFile("/proc/slabinfo")
	must(b, err)
	for line := range strings.Lines(string(slabs)) {
		if f := strings.Fields(line); len(f) > 3 && f[0] == "mnt_cache" {
			count, cerr := strconv.ParseFloat(f[1], 64)
			size, serr := strconv.ParseFloat(f[3], 64)
			must(b, errors.Join(cerr, serr))
			return count * size / 1e6
		}
	}
	b.Fatal("/proc/slabinfo has no mnt_cache")
	return 0
}
