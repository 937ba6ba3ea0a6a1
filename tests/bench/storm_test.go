package bench

import (
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

	"github.com/s3-csi/s3-csi-driver/pkg/client"
	"github.com/s3-csi/s3-csi-driver/tests/internal/rig"
	"github.com/s3-csi/s3-csi-driver/tests/internal/rig/rigtest"
)

// BenchmarkStorm publishes 100 volumes at once, each with its own mount, as on a node that starts with all its pods, and
// starts 100 bare clients at once.
//
// storm-s and bare-s are medians of the time until the last root has been read, storm/bare is their quotient. The memory some
// seconds after is reported as by BenchmarkMemory. The -cpu-s are the processor time that the first storm took, by the driver, by
// all helpers, by all clients, by systemd and its services, and by all bare clients. No publication may fail.
func BenchmarkStorm(b *testing.B) { eachClient(b, measureStorm) }

func measureStorm(b *testing.B, client string) {
	const (
		mounts = 100
		rounds = 3
		settle = 5 * time.Second
	)
	n, d := setup(b, client)
	volumes := make([]*csi.Volume, mounts)
	targets := make([]string, mounts)
	for i := range mounts {
		name := fmt.Sprintf("storm-%d", i)
		volumes[i], targets[i] = volume(b, n, name), n.Target(name)
	}
	rigtest.Publish(b, d, volumes[0], targets[0])
	template := newBare(b, n).template
	rigtest.Unpublish(b, d, volumes[0], targets[0])
	bares := make([]*bare, mounts)
	for i := range mounts {
		bares[i] = bareOf(b, n, ofVolume(template, i), i)
	}

	var published, started []float64
	inTurns(rounds, func(round int) {
		before, systemd := cpuSeconds(b, d.PID()), systemdSeconds(b, n)
		published = append(published, took(b, func() error {
			return all(mounts, func(i int) error {
				if _, err := d.NodePublishVolume(b.Context(), rigtest.PublishRequest(volumes[i], targets[i])); err != nil {
					return err
				}
				return readRoot(targets[i])
			})
		})/1000)
		if round == 0 {
			time.Sleep(settle)
			b.ReportMetric(cpuSeconds(b, d.PID())-before, "driver-cpu-s")
			b.ReportMetric(systemdSeconds(b, n)-systemd, "systemd-cpu-s")
			var helpers, clients float64
			for _, p := range n.Running("") {
				if p.Name == helperProgram {
					helpers += cpuSeconds(b, p.PID)
				} else {
					clients += cpuSeconds(b, p.PID)
				}
			}
			b.ReportMetric(helpers, "helpers-cpu-s")
			b.ReportMetric(clients, "clients-cpu-s")
			reportMemory(b, n, d, client, mounts)
		}
		must(b, all(mounts, func(i int) error {
			_, err := d.NodeUnpublishVolume(b.Context(), &csi.NodeUnpublishVolumeRequest{VolumeId: volumes[i].GetVolumeId(), TargetPath: targets[i]})
			return err
		}))
	}, func(round int) {
		started = append(started, took(b, func() error { return all(mounts, func(i int) error { return bares[i].start() }) })/1000)
		if round == 0 {
			time.Sleep(settle)
			used := 0.0
			for _, c := range bares {
				used += cpuSeconds(b, c.process.Pid)
			}
			b.ReportMetric(used, "bare-cpu-s")
		}
		must(b, all(mounts, func(i int) error { return bares[i].stop() }))
	})
	n.NothingLeft(b)
	b.Logf("storm %s s, bare %s s", span(published), span(started))
	b.ReportMetric(median(published), "storm-s")
	b.ReportMetric(median(started), "bare-s")
	b.ReportMetric(median(published)/median(started), "storm/bare")
}

// cpuSeconds is the processor time that a process has used, in seconds, from its CPU clock (clock_getcpuclockid(3)): a helper uses less
// than one tick of proc_pid_stat(5).
func cpuSeconds(b *testing.B, pid int) float64 {
	b.Helper()
	const cpuClock = 2 // CPUCLOCK_SCHED
	var used unix.Timespec
	must(b, unix.ClockGettime(int32(^pid<<3|cpuClock), &used))
	return float64(used.Nano()) / 1e9
}

// systemdSeconds is the processor time that systemd and the services beside it have used, in seconds, 0 if they are not there.
func systemdSeconds(b *testing.B, n *rigtest.Node) (used float64) {
	b.Helper()
	if n.Launcher != rig.LauncherSystemd {
		return 0
	}
	for _, pid := range pidsOf(b, "systemd", "systemd-journal", "dbus-daemon", "dbus-broker") {
		used += cpuSeconds(b, pid)
	}
	return used
}

// pidsOf are the processes of these names (proc_pid_comm(5)).
func pidsOf(b *testing.B, names ...string) (pids []int) {
	b.Helper()
	all, err := filepath.Glob("/proc/[0-9]*/comm")
	must(b, err)
	for _, file := range all {
		comm, err := os.ReadFile(file)
		if err != nil || !slices.Contains(names, strings.TrimSpace(string(comm))) {
			continue // one that has exited
		}
		pid, err := strconv.Atoi(filepath.Base(filepath.Dir(file)))
		must(b, err)
		pids = append(pids, pid)
	}
	return pids
}

// ofVolume is the command for another volume of the storm than the first.
func ofVolume(c client.Command, i int) (other client.Command) {
	for _, a := range c.Argv {
		other.Argv = append(other.Argv, strings.ReplaceAll(a, "storm-0/", fmt.Sprintf("storm-%d/", i)))
	}
	other.Env = c.Env
	return other
}

// all calls do for each number below count, all at once.
func all(count int, do func(i int) error) error {
	var g errgroup.Group
	for i := range count {
		g.Go(func() error { return do(i) })
	}
	return g.Wait()
}
