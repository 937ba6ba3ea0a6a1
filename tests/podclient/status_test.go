package podclient

import (
	"encoding/json"
	"fmt"
	"os/exec"
	"strings"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sys/unix"

	"github.com/s3-csi/s3-csi-driver/pkg/mount"
	"github.com/s3-csi/s3-csi-driver/pkg/podclient"
	"github.com/s3-csi/s3-csi-driver/pkg/status"
	"github.com/s3-csi/s3-csi-driver/tests/internal/rig/rigtest"
)

// show runs s3-csi-driver status.
func (e *env) show(t testing.TB, args ...string) string {
	t.Helper()
	out, err := exec.CommandContext(rigtest.Context(t, eventually), e.Program, append([]string{"status", "--state-dir=" + e.State}, args...)...).CombinedOutput()
	if err != nil {
		t.Fatalf("status: %v: %s", err, out)
	}
	return string(out)
}

// shown is what status shows of the pod's client; ok is false if it shows none.
func (p *pod) shown(t testing.TB) (c status.PodClient, ok bool) {
	t.Helper()
	var d status.Document
	if err := json.Unmarshal([]byte(p.show(t, "--output=json")), &d); err != nil {
		t.Fatal(err)
	}
	for _, c := range d.PodClients {
		if c.Target == p.target {
			return c, true
		}
	}
	return c, false
}

// awaitState waits until status, metrics and volume health show a state.
func (p *pod) awaitState(t testing.TB, want status.State, reasons ...string) (c status.PodClient) {
	t.Helper()
	rigtest.Await(t, eventually, "the client in state "+string(want), func() bool {
		c, _ = p.shown(t)
		return c.State == want
	})
	p.awaitMetric(t, fmt.Sprintf(`s3csi_pod_clients{state=%q} 1`, want))
	resp, err := ask(t, p.NodeGetVolumeHealth, &csi.NodeGetVolumeHealthRequest{VolumeId: p.handle(), VolumePublishPath: p.target})
	if err != nil {
		t.Fatal(err)
	}
	found := resp.GetVolumeHealth().GetHealthStatuses()
	if len(found) != len(reasons) || len(found) == 1 && (found[0].GetReason() != reasons[0] || found[0].GetStatus() != csi.VolumeHealthErrorType_INACCESSIBLE) {
		t.Errorf("%s: the volume's health is %v, want %q", want, found, reasons)
	}
	return c
}

func (p *pod) awaitMetric(t testing.TB, line string) {
	t.Helper()
	rigtest.Await(t, eventually, line, func() bool { return strings.Contains("\n"+rigtest.Get(t, p.Driver, "/metrics"), "\n"+line+"\n") })
}

// Status, metrics and volume health show what a pod's client does, also when a driver was restarted.
func TestClientsAreVisible(t *testing.T) {
	t.Parallel()
	e := start(t, "--hang-timeout=2s", "--volume-health")
	e.Put(t, bucket, "file", "content")
	p := e.pod(t, podUID)
	p.publish()
	c := p.awaitState(t, podclient.Waiting, mount.ReasonNoClient)
	if c.Pod != (status.Pod{Namespace: "n", Name: "p", UID: podUID}) || c.Volume != "data" || c.EmptyDir != emptyDir || c.Socket != socket || c.Since.IsZero() ||
		c.LastFailure != nil {
		t.Errorf("%+v", c)
	}
	refused := p.connectFrom(otherUID)
	rigtest.Await(t, eventually, "a program of another pod to be refused", func() bool { return ended(refused) })
	p.awaitMetric(t, `s3csi_pod_client_handovers_total{result="refused"} 1`)
	if c = p.awaitState(t, podclient.Waiting, mount.ReasonNoClient); c.LastFailure == nil || c.LastFailure.Reason != podclient.ReasonRefused || c.Handovers != 0 {
		t.Errorf("%+v, %+v", c, c.LastFailure)
	}
	client := p.serve()
	if c = p.awaitState(t, podclient.Serving); c.Handovers == 0 {
		t.Errorf("%+v", c)
	}
	before := c
	e.Kill()
	e.drive()
	if c = p.awaitState(t, podclient.Serving); c.Handovers != 0 || c.Since.Before(before.Since) || c.Pod != before.Pod {
		t.Errorf("after a restart of the driver: %+v", c)
	}
	if err := unix.Kill(-client.Process.Pid, unix.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	if c = p.awaitState(t, podclient.Exited, mount.ReasonStale); c.LastFailure == nil || c.LastFailure.Reason != status.ReasonUnresponsive {
		t.Errorf("%+v, %+v", c, c.LastFailure)
	}
	p.awaitMetric(t, `s3csi_pod_client_exits_total{reason="hang"} 1`)
	client.kill()
	client = p.serve()
	if c = p.awaitState(t, podclient.Serving); c.LastFailure == nil {
		t.Error("the failure is forgotten")
	}
	client.kill()
	if c = p.awaitState(t, podclient.Exited, mount.ReasonStale); c.LastFailure == nil || c.LastFailure.Reason != status.ReasonExited ||
		time.Since(c.LastFailure.Since) > time.Since(c.Since)+time.Second {
		t.Errorf("%+v, %+v", c, c.LastFailure)
	}
	p.awaitMetric(t, `s3csi_pod_client_exits_total{reason="exit"} 1`)
	if text := p.show(t, "--pod=n/p"); !strings.Contains(text, "n/p") || !strings.Contains(text, emptyDir+"/"+socket) || !strings.Contains(text, "exited") {
		t.Errorf("the text is\n%s", text)
	}
	if text := p.show(t, "--pod=n/other"); strings.Contains(text, socket) {
		t.Errorf("the text of another pod is\n%s", text)
	}
	p.unpublish()
	p.NothingLeft(t)
	if c, ok := p.shown(t); ok {
		t.Errorf("after unpublish: %+v", c)
	}
	p.awaitMetric(t, `s3csi_pod_clients{state="exited"} 0`)
}
