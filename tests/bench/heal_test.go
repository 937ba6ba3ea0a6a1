package bench

import (
	"fmt"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/s3-csi/s3-csi-driver/tests/internal/rig"
	"github.com/s3-csi/s3-csi-driver/tests/internal/rig/rigtest"
)

// BenchmarkHeal kills a mount's client and waits until the root of the volume can be read again at its target: the kernel answers a
// stat(2) from its cache, without a client.
//
// heal-ms and bare-ms are medians; bare-ms is the start of a bare client, which is the minimum. heal/bare is their quotient.
func BenchmarkHeal(b *testing.B) { eachClient(b, measureHeal) }

func measureHeal(b *testing.B, client string) {
	const (
		rounds = 21
		settle = 200 * time.Millisecond // for the spare helper that is started after a publication
	)
	n, d := setup(b, client)
	target := n.Target("pod")
	_, byHand := ways(b, n, d, volume(b, n, "heal"), target)

	var healed, started []float64
	inTurns(rounds, func(i int) {
		v := volume(b, n, fmt.Sprintf("heal-%d", i)) // a new volume: restarts of one are delayed by the backoff
		rigtest.Publish(b, d, v, target)
		clients := n.Running(rig.Programs()[client])
		if len(clients) != 1 {
			b.Fatalf("want one client: %v", n.Processes())
		}
		time.Sleep(settle)
		healed = append(healed, took(b, func() error {
			if err := unix.Kill(clients[0].PID, unix.SIGKILL); err != nil {
				return err
			}
			for end := time.Now().Add(time.Minute); ; time.Sleep(time.Millisecond) {
				if err := readRoot(target); err == nil || time.Now().After(end) {
					return err
				}
			}
		}))
		rigtest.Unpublish(b, d, v, target)
	}, func(int) {
		started = append(started, took(b, byHand.start))
		must(b, byHand.stop())
	})
	n.NothingLeft(b)
	b.Logf("heal %s ms, bare %s ms", span(healed), span(started))
	b.ReportMetric(median(healed), "heal-ms")
	b.ReportMetric(median(started), "bare-ms")
	b.ReportMetric(median(healed)/median(started), "heal/bare")
}
