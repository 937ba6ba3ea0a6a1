//go:build !lane || ordinary

package node

import (
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sys/unix"

	"github.com/s3-csi/s3-csi-driver/pkg/status"
	"github.com/s3-csi/s3-csi-driver/tests/internal/faultproxy"
	"github.com/s3-csi/s3-csi-driver/tests/internal/rig"
	"github.com/s3-csi/s3-csi-driver/tests/internal/rig/rigtest"
)

// ofPod adds the information of a pod, as kubelet does.
func ofPod(namespace, name string) change {
	return func(r *csi.NodePublishVolumeRequest) {
		r.VolumeContext = maps.Clone(r.GetVolumeContext())
		r.VolumeContext["csi.storage.k8s.io/pod.namespace"], r.VolumeContext["csi.storage.k8s.io/pod.name"] = namespace, name
	}
}

// kubeletTarget is the name of a target that looks like kubelet's, with the "mount" that Target appends.
func kubeletTarget(uid, volume string) string {
	return "pods/" + uid + "/volumes/kubernetes.io~csi/" + volume
}

func TestStatus(t *testing.T) {
	t.Parallel()
	eachClient(t, func(t *testing.T, e *env, client string) {
		socket, err := os.Lstat(filepath.Join(e.State, "status.sock"))
		if err != nil || socket.Mode() != os.ModeSocket|0o600 {
			t.Fatalf("the socket: %v, %v", socket, err)
		}
		v := static("status", client)
		uid := "0b1f6f3c-2f0e-4b5e-9d6c-0a4ff4c1f7a1"
		target := e.publish(v, kubeletTarget(uid, "pv-1"), ofPod("team-a", "web-0"))
		m := e.awaitStatus(v, "the helper's status", func(m status.Mount) bool { return m.Memory != nil })
		if m.State != status.Healthy || m.Client.Name != client || m.Client.Version == "" || m.Client.PID != e.client(client).PID || m.Bucket != bucket ||
			m.Prefix != "status/" {
			t.Errorf("%+v", m)
		}
		if m.Memory.UsedBytes < 1<<20 || (m.Memory.LimitBytes != 0) != (e.Launcher == rig.LauncherSystemd) {
			t.Errorf("memory: %+v", m.Memory)
		}
		if m.Session.Source != "driver" || m.Session.State == "" || len(m.Problems) > 0 {
			t.Errorf("session: %+v, problems: %+v", m.Session, m.Problems)
		}
		want := status.Publication{VolumeID: "status", Target: target, PersistentVolume: "pv-1", Pod: status.Pod{Namespace: "team-a", Name: "web-0", UID: uid}}
		if len(m.Publications) != 1 || m.Publications[0] != want {
			t.Errorf("publications: %+v", m.Publications)
		}
		text, _, err := e.status()
		if err != nil || !strings.Contains(text, "team-a/web-0") || !strings.Contains(text, string(status.Healthy)) {
			t.Errorf("%v: %s", err, text)
		}

		e.unpublish(v, target)
		out, _, err := e.status("--output=json")
		if err != nil || !strings.Contains(out, `"mounts": []`) {
			t.Errorf("without mounts: %v, %s", err, out)
		}
		e.Kill()
		if out, _, err := e.status(); err == nil || out != "" {
			t.Errorf("without a driver: %q", out)
		}
	})
}

// The status waits for no client, and shows why one does not serve and when the driver tries again.
func TestStatusOfWhatIsNotWell(t *testing.T) {
	t.Parallel()
	eachClient(t, func(t *testing.T, e *env, client string) {
		v := static("unwell", client)
		target := e.publish(v, "t")
		process := e.client(client)
		rigtest.Freeze(t, process.PID)
		e.askInVain(target)
		m := e.awaitStatus(v, "the state of an unresponsive client", func(m status.Mount) bool {
			return m.State == status.Unresponsive && len(m.Problems) > 0
		})
		if p := m.Problems[0]; p.Reason != status.ReasonUnresponsive || p.Since.IsZero() {
			t.Errorf("%+v", m.Problems)
		}
		if err := unix.Kill(process.PID, unix.SIGCONT); err != nil {
			t.Fatal(err)
		}
		e.awaitStatus(v, "the state of a client that answers again", func(m status.Mount) bool { return m.State == status.Healthy && len(m.Problems) == 0 })

		// A client that crashes again and again is restarted later each time.
		m = e.awaitStatus(v, "the state of a crashed client", func(m status.Mount) bool {
			if m.State == status.Failed && len(m.Problems) > 0 && !m.Problems[0].NextTry.IsZero() {
				return true
			}
			for _, process := range e.Running(programs[client]) {
				_ = unix.Kill(process.PID, unix.SIGKILL) // or it has exited
			}
			return false
		})
		if !slices.Contains([]string{status.ReasonExited, "crash"}, m.Problems[0].Reason) || !m.Problems[0].NextTry.After(m.Problems[0].Since) {
			t.Errorf("%+v", m.Problems)
		}
		e.awaitStatus(v, "the restart", func(m status.Mount) bool { return m.State == status.Healthy })
	}, "--hang-timeout=40s")
}

// The uploads that are left are shown while the client drains.
func TestStatusShowsUploads(t *testing.T) {
	t.Parallel()
	e := start(t)
	v := static("draining", rclone)
	target := e.publish(v, "t")
	e.proxy.Set(faultproxy.Faults{Blackhole: true})
	write(t, filepath.Join(target, "file"), "not uploaded")
	m := e.awaitStatus(v, "an upload", func(m status.Mount) bool { return m.Uploads != nil && m.Uploads.Files == 1 })
	if m.Uploads.Bytes != int64(len("not uploaded")) {
		t.Errorf("%+v", m.Uploads)
	}
	if err := e.tryUnpublish(2*time.Second, v, target); err == nil {
		t.Error("the volume was unpublished before its upload")
	}
	e.awaitStatus(v, "the draining mount", func(m status.Mount) bool { return m.State == status.Draining && m.Uploads.Files == 1 })
	e.proxy.Set(faultproxy.Faults{})
	e.unpublish(v, target)
}
