//go:build !lane || ordinary

package credentials

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/s3-csi/s3-csi-driver/tests/internal/faultproxy"
	"github.com/s3-csi/s3-csi-driver/tests/internal/rig/rigtest"
	"github.com/s3-csi/s3-csi-driver/tests/internal/s3server"
)

// Work in a mount continues while its session is renewed, the token service is unavailable, its clock is minutes off, or the driver
// is down for longer than a session is valid.
func TestSessionsAreRenewedUnderWork(t *testing.T) {
	e := start(t)
	const lasts = 6 * time.Second
	e.sts(s3server.STS{ClockOffset: 7 * time.Minute})
	var workers []*worker
	var targets []string
	names := []string{"work-rclone", "work-mountpoint"}
	e.prepare(names[0])
	e.prepare(names[1])
	v := volume(names[0], rclone, "sessionDuration", lasts.String())
	targets = append(targets, e.publish(v, "a", e.workload(true)))
	v2 := volume(names[1], mountpoint, "sessionDuration", lasts.String())
	targets = append(targets, e.publish(v2, "b", e.own()))
	for i := range names {
		workers = append(workers, e.work(targets[i]))
	}
	e.await(4*lasts, "renewals", e.more(2, ofPods, ofMounts))
	e.sts(s3server.STS{Fault: s3server.FaultDown})
	time.Sleep(lasts / 6) // the service is away for that long: it is what is tried, not waited for
	e.sts(s3server.STS{ClockOffset: -7 * time.Minute})
	e.await(4*lasts, "renewals after the outage", e.more(2, ofPods, ofMounts))
	e.Kill()
	dead := time.Now()
	e.await(4*lasts, "renewals without a driver", e.more(3, ofPods, ofMounts))
	time.Sleep(time.Until(dead.Add(lasts))) // at least as long as a session
	e.drive()
	e.await(20*time.Second, "the driver to see the sessions", func() bool {
		return e.sessions(rclone, "valid", 1) && e.sessions(mountpoint, "valid", 1)
	})
	for i, target := range targets {
		vol, from := v, e.workload(true)
		if i == 1 {
			vol, from = v2, e.own()
		}
		if err := e.tryPublish(vol, target, from); err != nil {
			t.Errorf("publishing again: %v", err)
		}
	}
	for _, w := range workers {
		w.end(t)
	}
	e.unpublish(v, targets[0])
	e.unpublish(v2, targets[1])
	for i, w := range workers {
		w.stored(t, e.Server, names[i])
	}
	e.NothingLeft(t)
	// The names of the sessions tell whose they are.
	for _, name := range e.named() {
		if !strings.HasPrefix(name, ofPods) && !strings.HasPrefix(name, ofMounts) {
			t.Errorf("a session is named %q", name)
		}
	}
}

// What was written and closed is stored when the pod is gone for longer than a session lasts, also with no driver in between.
func TestADrainOutlastsItsSession(t *testing.T) {
	e := start(t)
	v := volume("drain", rclone, "sessionDuration", short.String())
	target := e.publish(v, "t", e.workload(true))
	content := strings.Repeat("0123456789abcdef", 32<<16) // 32 MiB
	e.proxy.Set(faultproxy.Faults{Bandwidth: 1 << 20})
	if err := os.WriteFile(filepath.Join(target, "data"), []byte(content), 0o644); err != nil {
		t.Fatal(err)
	}
	renewed := e.more(3, ofPods) // the first may come at once, and from that to the third it takes as long as a session lasts
	_, err := e.NodeUnpublishVolume(rigtest.Context(t, 4*time.Second), &csi.NodeUnpublishVolumeRequest{VolumeId: v.GetVolumeId(), TargetPath: target})
	if status.Code(err) != codes.Aborted {
		t.Fatalf("unpublishing while there is something to store: %v", err)
	}
	e.Kill()
	e.await(20*short, "renewals while it drains, without a driver", renewed)
	e.proxy.Set(faultproxy.Faults{})
	e.drive()
	e.unpublish(v, target)
	if got := e.Object(t, bucket, "drain/data"); got != content {
		t.Errorf("the object has %d bytes, %d were written", len(got), len(content))
	}
	e.NothingLeft(t)
}

// An expired session shows in the metric, the log and the next publication, and is renewed when that is possible again.
func TestAnExpiredSessionIsAClearState(t *testing.T) {
	e := start(t, "--volume-health")
	told := func() int { return strings.Count(e.Logs(), "Session expired") }
	for _, tt := range []struct{ fault, word, reason string }{
		{s3server.FaultDown, "connection refused", "BackendUnreachable"}, {s3server.FaultRefuse, "AccessDenied", "CredentialsRefused"},
	} {
		t.Run(tt.fault, func(t *testing.T) {
			e.t = t
			name := "expired-" + tt.fault
			e.sts(s3server.STS{})
			v := volume(name, rclone, "sessionDuration", short.String())
			same := tokens(e, time.Hour)
			from := source{"workload, the same token again", func(r *csi.NodePublishVolumeRequest) {
				e.workload(true).bring(r)
				r.Secrets[tokensKey] = same
			}}
			e.Put(t, bucket, name+"/file", "x")
			e.Put(t, bucket, name+"/file2", "x")
			target := e.publish(v, name, from)
			if _, err := os.ReadFile(filepath.Join(target, "file")); err != nil {
				t.Fatal(err)
			}
			before := told()
			e.sts(s3server.STS{Fault: tt.fault})
			e.await(30*time.Second, "the metric to say that the session is over", func() bool {
				return e.sessions(rclone, "expired", 1)
			})
			read := make(chan error, 1)
			go func() { // rclone tries for minutes: it fails, or is there again with the session
				_, err := os.ReadFile(filepath.Join(target, "file2"))
				read <- err
			}()
			// The target stays as it was, so the code is one that kubelet tries again after.
			e.await(20*time.Second, "a publication that is told UNAVAILABLE, that the session is over, and "+tt.word, func() bool {
				err := e.tryPublish(v, target, from)
				if err == nil {
					return false // what was answered just before the fault was one more session
				}
				if status.Code(err) != codes.Unavailable || !strings.Contains(err.Error(), "expired at") {
					t.Fatalf("publishing again: %v", err)
				}
				return strings.Contains(err.Error(), tt.word) // not before an attempt has failed
			})
			e.await(10*time.Second, "the volume's health to say that the session is over, and why", func() bool {
				resp, err := e.NodeGetVolumeHealth(rigtest.Context(t, 10*time.Second), &csi.NodeGetVolumeHealthRequest{VolumeId: v.GetVolumeId(),
					VolumePublishPath: target})
				if err != nil {
					t.Fatal(err)
				}
				reasons := map[string]csi.VolumeHealthErrorType{}
				for _, s := range resp.GetVolumeHealth().GetHealthStatuses() {
					reasons[s.GetReason()] = s.GetStatus()
				}
				_, why := reasons[tt.reason]
				return why && reasons["CredentialsExpired"] == csi.VolumeHealthErrorType_INACCESSIBLE
			})
			e.await(10*time.Second, "the log to say it", func() bool { return told() > before })
			if n := told() - before; n > 2 {
				t.Errorf("the log says it %d times", n)
			}
			e.sts(s3server.STS{})
			if tt.fault == s3server.FaultRefuse { // what was refused is tried again at once with the pod's next token
				e.publish(v, name, e.workload(true))
			}
			e.await(30*time.Second, "the metric to say that there is a session again", func() bool {
				return e.sessions(rclone, "valid", 1)
			})
			e.await(20*time.Second, "the mount to read again", func() bool {
				b, err := os.ReadFile(filepath.Join(target, "file2"))
				return err == nil && string(b) == "x"
			})
			if err := <-read; err != nil {
				t.Logf("what was read without a session: %v", err)
			}
			e.unpublish(v, target)
			e.NothingLeft(t)
		})
	}
	e.t = t
	if said := e.states(); strings.Contains(said, `failures_total{client="rclone"} 0`) || !strings.Contains(said, "failures_total") {
		t.Errorf("metrics: %s", said)
	}
}
