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
	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"

	"github.com/s3-csi/s3-csi-driver/pkg/client"
	"github.com/s3-csi/s3-csi-driver/tests/rig/rigtest"
)

// BenchmarkStorm publishes 100 volumes at once, each with a mount of its own, as a node does that comes up with all its
// pods, and starts 100 bare clients at once.
//
// storm-s and bare-s are medians of the time until the last root has been read, storm/bare is their quotient. helper-MB,
// client-MB and driver-MB are as BenchmarkMemory's, a while after; helper-share-MB and client-share-MB are proportional
// (Pss). The -cpu-s are what the storm took of the processors, by the driver, by all helpers and by all clients. No
// publication may fail.
func BenchmarkStorm(b *testing.B) {
	const (
		mounts = 100
		rounds = 3
		settle = 5 * time.Second
	)
	n, d := setup(b)
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

	var published, bare []float64
	before := cpuSeconds(b, strconv.Itoa(d.PID()))
	for round := range rounds {
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
			b.ReportMetric(sizes(b, filepath.Join("/proc", strconv.Itoa(d.PID()), "status"), "VmRSS"), "driver-MB")
			b.ReportMetric(cpuSeconds(b, strconv.Itoa(d.PID()))-before, "driver-cpu-s")
			var helpers, clients float64
			for _, pid := range pidsOf(b, n.FirstUID, n.LastUID) {
				comm, err := os.ReadFile(filepath.Join("/proc", pid, "comm"))
				must(b, err)
				if strings.TrimSpace(string(comm)) == "s3-csi-helper" {
					helpers += cpuSeconds(b, pid)
				} else {
					clients += cpuSeconds(b, pid)
				}
			}
			b.ReportMetric(helpers, "helpers-cpu-s")
			b.ReportMetric(clients, "clients-cpu-s")
			reportMemory(b, n, mounts)
		}
		must(b, all(mounts, func(i int) error {
			_, err := d.NodeUnpublishVolume(b.Context(), &csi.NodeUnpublishVolumeRequest{VolumeId: volumes[i].GetVolumeId(), TargetPath: targets[i]})
			return err
		}))
		bare = append(bare, took(b, func() error { return all(mounts, func(i int) error { return bares[i].start() }) })/1000)
		must(b, all(mounts, func(i int) error { return bares[i].stop() }))
	}
	n.NothingLeft(b)
	b.Logf("storm %s s, bare %s s", span(published), span(bare))
	b.ReportMetric(median(published), "storm-s")
	b.ReportMetric(median(bare), "bare-s")
	b.ReportMetric(median(published)/median(bare), "storm/bare")
}

// cpuSeconds is the processor time that a process has used, in seconds.
func cpuSeconds(b *testing.B, pid string) float64 {
	b.Helper()
	text, err := os.ReadFile(filepath.Join("/proc", pid, "stat"))
	must(b, err)
	fields := strings.Fields(string(text[strings.LastIndexByte(string(text), ')')+1:]))
	user, err := strconv.ParseFloat(fields[11], 64)
	must(b, err)
	system, err := strconv.ParseFloat(fields[12], 64)
	must(b, err)
	return (user + system) / 100 // USER_HZ, proc_pid_stat(5)
}

// ofVolume is the command for another volume of the storm than the first.
func ofVolume(c client.Command, i int) (other client.Command) {
	for _, a := range c.Argv {
		other.Argv = append(other.Argv, strings.ReplaceAll(a, "storm-0/", fmt.Sprintf("storm-%d/", i)))
	}
	other.Env = c.Env
	return other
}

// all does it all at once.
func all(count int, do func(i int) error) error {
	var g errgroup.Group
	for i := range count {
		g.Go(func() error { return do(i) })
	}
	return g.Wait()
}

func reportMemory(b *testing.B, n *rigtest.Node, mounts int) {
	b.Helper()
	private, share := map[string][]float64{}, map[string][]float64{}
	for _, pid := range pidsOf(b, n.FirstUID, n.LastUID) {
		comm, err := os.ReadFile(filepath.Join("/proc", pid, "comm"))
		must(b, err)
		name, rollup := strings.TrimSpace(string(comm)), filepath.Join("/proc", pid, "smaps_rollup")
		private[name] = append(private[name], sizes(b, rollup, "Private_Clean", "Private_Dirty"))
		share[name] = append(share[name], sizes(b, rollup, "Pss"))
	}
	if len(private["s3-csi-helper"]) != mounts {
		b.Errorf("%d helpers run for %d mounts", len(private["s3-csi-helper"]), mounts)
	}
	for label, name := range map[string]string{"helper": "s3-csi-helper", "client": "s3-csi-rclone"} {
		b.Logf("%s: private %s MB, proportional %s MB", label, span(private[name]), span(share[name]))
		b.ReportMetric(median(private[name]), label+"-MB")
		b.ReportMetric(median(share[name]), label+"-share-MB")
	}
}

// BenchmarkHeal kills a mount's client and waits until its target can be read again.
//
// heal-ms is the median, bare-ms that of a bare client's start, which is the least that healing takes.
func BenchmarkHeal(b *testing.B) {
	const rounds = 21
	n, d := setup(b)
	var healed, started []float64
	var byHand *bare
	inTurns(rounds, func(i int) {
		v := volume(b, n, fmt.Sprintf("heal-%d", i)) // one of its own: deaths in a row are slowed down
		target := n.Target("pod")
		rigtest.Publish(b, d, v, target)
		if byHand == nil {
			byHand = newBare(b, n)
		}
		client := 0
		for _, pid := range pidsOf(b, n.FirstUID, n.LastUID) {
			if comm, _ := os.ReadFile(filepath.Join("/proc", pid, "comm")); strings.TrimSpace(string(comm)) == "s3-csi-rclone" {
				client, _ = strconv.Atoi(pid)
			}
		}
		healed = append(healed, took(b, func() error {
			if err := unix.Kill(client, unix.SIGKILL); err != nil {
				return err
			}
			for end := time.Now().Add(time.Minute); ; time.Sleep(time.Millisecond) {
				if _, err := os.Stat(filepath.Join(target, "object")); err == nil || time.Now().After(end) {
					return err
				}
			}
		}))
		rigtest.Unpublish(b, d, v, target)
	}, func(int) {
		if byHand == nil {
			return
		}
		started = append(started, took(b, byHand.start))
		must(b, byHand.stop())
	})
	n.NothingLeft(b)
	b.Logf("heal %s ms, bare %s ms", span(healed), span(started))
	b.ReportMetric(median(healed), "heal-ms")
	b.ReportMetric(median(started), "bare-ms")
	b.ReportMetric(median(healed)/median(started), "heal/bare")
}
