package bench

import (
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/s3-csi/s3-csi-driver/tests/internal/rig"
	"github.com/s3-csi/s3-csi-driver/tests/internal/rig/rigtest"
	"github.com/s3-csi/s3-csi-driver/tests/internal/s3server"
)

const everything = `{"Version":"2012-10-17","Statement":[{"Effect":"Allow","Action":"*","Resource":"*"}]}`

// setupSessions is setup with a token service, and the secret of a user whose keys it makes sessions with.
func setupSessions(b *testing.B, client string) (*rigtest.Node, *rig.Driver, map[string]string) {
	b.Helper()
	n := newNode(b, client)
	user, err := n.AddUser(b.Context(), "alice", everything)
	if err != nil {
		b.Fatal(err)
	}
	config := filepath.Join(n.Dir, "config.yaml")
	file := fmt.Sprintf("backends: {default: {sts: {endpoint: %q, kinds: [federationToken]}}}\n", n.STS())
	if err := os.WriteFile(config, []byte(file), 0o644); err != nil {
		b.Fatal(err)
	}
	d := drive(b, n, client, "--config="+config)
	return n, d, map[string]string{"accessKeyID": user.AccessKeyID, "secretAccessKey": user.SecretAccessKey}
}

// publishWith publishes a volume with a secret and more in its context, until its directory has been read.
func publishWith(b *testing.B, d *rig.Driver, v *csi.Volume, target string, secret, more map[string]string) error {
	b.Helper()
	r := rigtest.PublishRequest(v, target)
	r.VolumeContext, r.Secrets = maps.Clone(v.GetVolumeContext()), secret
	maps.Copy(r.VolumeContext, more)
	if _, err := d.NodePublishVolume(rigtest.Context(b, time.Minute), r); err != nil {
		return err
	}
	return readRoot(target)
}

// BenchmarkSessionPublish compares NodePublishVolume of a mount with a session of its own, which is made beside the start of its
// client, with that of one that works with the secret's keys as they are. The token service answers at once, or within 50 ms as one in
// the same region does.
//
// session-ms and keys-ms are medians; session/keys is their quotient.
func BenchmarkSessionPublish(b *testing.B) { eachClient(b, measureSessionPublish) }

func measureSessionPublish(b *testing.B, client string) {
	for name, delay := range map[string]time.Duration{"at once": 0, "in 50ms": 50 * time.Millisecond} {
		b.Run(name, func(b *testing.B) {
			const rounds = 15
			n, d, secret := setupSessions(b, client)
			if err := n.SetSTS(b.Context(), s3server.STS{Delay: delay}); err != nil {
				b.Fatal(err)
			}
			v := volume(b, n, "sessions")
			target := n.Target("pod")
			var session, keys []float64
			once := func(times *[]float64, scope string) func(int) {
				return func(int) {
					*times = append(*times, took(b, func() error {
						return publishWith(b, d, v, target, secret, map[string]string{"scope": scope})
					}))
					rigtest.Unpublish(b, d, v, target)
				}
			}
			// What is found out once for all, as that policies are enforced, is not what is measured.
			once(new([]float64), "required")(0)
			inTurns(rounds, once(&session, "required"), once(&keys, "off"))
			n.NothingLeft(b)
			b.Logf("with a session %s ms, with keys %s ms", span(session), span(keys))
			b.ReportMetric(median(session), "session-ms")
			b.ReportMetric(median(keys), "keys-ms")
			b.ReportMetric(median(session)/median(keys), "session/keys")
		})
	}
}

// BenchmarkSessionCalls counts the requests of one mount to the token service with short sessions, and reports them per session,
// which by default lasts an hour. They are the driver's, so there is no difference between the clients.
func BenchmarkSessionCalls(b *testing.B) {
	const lasts, hours = 2 * time.Second, 10
	n, d, secret := setupSessions(b, rigtest.Client)
	v := volume(b, n, "calls")
	target := n.Target("pod")
	calls := func() int {
		asked, err := n.STSCalls(b.Context())
		if err != nil {
			b.Fatal(err)
		}
		total := 0
		for _, made := range asked.Calls {
			total += made
		}
		return total
	}
	more := map[string]string{"scope": "required", "sessionDuration": lasts.String()}
	before := calls()
	if err := publishWith(b, d, v, target, secret, more); err != nil {
		b.Fatal(err)
	}
	atFirst := calls() - before
	began, before := time.Now(), calls()
	for time.Since(began) < hours*lasts {
		if err := publishWith(b, d, v, target, secret, more); err != nil { // as kubelet does again and again
			b.Fatal(err)
		}
		time.Sleep(lasts / 10)
	}
	per := float64(calls()-before) / (float64(time.Since(began)) / float64(lasts))
	rigtest.Unpublish(b, d, v, target)
	n.NothingLeft(b)
	b.ReportMetric(float64(atFirst), "calls/publish")
	b.ReportMetric(per, "calls/mount/hour")
}
