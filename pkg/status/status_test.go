package status

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/s3-csi/s3-csi-driver/pkg/client"
	"github.com/s3-csi/s3-csi-driver/pkg/fault"
	"github.com/s3-csi/s3-csi-driver/pkg/helper"
	"github.com/s3-csi/s3-csi-driver/pkg/host"
	"github.com/s3-csi/s3-csi-driver/pkg/mount"
	"github.com/s3-csi/s3-csi-driver/pkg/mount/state"
	"github.com/s3-csi/s3-csi-driver/pkg/mount/tracker"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

var now = time.Date(2027, 3, 1, 12, 0, 0, 0, time.UTC)

type records struct {
	mounts []state.Mount
	pubs   []state.Publication
	inPods []PodClient
}

func (r records) Mounts(context.Context) ([]state.Mount, error)    { return r.mounts, nil }
func (r records) Reports(context.Context) ([]PodClient, error)     { return r.inPods, nil }
func (r records) All(context.Context) ([]state.Publication, error) { return r.pubs, nil }

type reports map[string]tracker.Report

func (r reports) Report(name string) tracker.Report { return r[name] }

func collector(r records, of reports) *Collector {
	return &Collector{
		Driver: Driver{"s3.csi.driver", "v1", "node-1"}, Launcher: "systemd", Notes: func() []string { return []string{"a note"} },
		Mounts: r, Publications: r, Tracked: of, PodClients: r,
		Memory: func(pid int, uid uint32) (uint64, error) {
			if pid == 0 || uid != 7 {
				return 0, errors.New("no process")
			}
			return uint64(pid) << 20, nil
		},
		CacheDir: "/cache", CacheFree: func(context.Context) (uint64, error) { return 1 << 30, nil },
		MemoryLimit: func(state.Mount) uint64 { return 1 << 30 }, Remedy: func(state.Mount) string { return "do something" },
		Now: func() time.Time { return now },
	}
}

func collect(t *testing.T, r records, of reports) Document {
	t.Helper()
	d, err := collector(r, of).Collect(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	return d
}

func record(name string) state.Mount {
	return state.Mount{Name: name, Phase: state.Running, VolumeID: "default:b/" + name, Client: "rclone", UID: 7,
		Spec: mount.Spec{Backend: "default", Bucket: "b", Prefix: name + "/", Source: "secret"}}
}

func TestDocument_StatesOfMounts(t *testing.T) {
	starting, ending, lingers := record("starting"), record("ending"), record("lingers")
	starting.Phase, ending.Phase = state.Starting, state.Ending
	lingers.Linger = &state.Linger{Until: now.Add(time.Minute)}
	r := records{mounts: []state.Mount{record("well"), record("failed"), record("exited"), record("stuck"), record("new"), starting, ending, lingers}}
	of := reports{
		"well": {State: tracker.Healthy},
		"failed": {State: tracker.Failed, Since: now.Add(-time.Minute), Exit: tracker.Cause{Reason: tracker.ReasonOOM, Detail: "OOM-killed"},
			Problem: "no credentials", NextTry: now.Add(time.Second)},
		"exited":   {State: tracker.Failed, Helper: &helper.Status{State: helper.StateExited, ExitCode: 3}},
		"stuck":    {State: tracker.Unresponsive, Since: now.Add(-time.Minute)},
		"starting": {State: tracker.Healthy},
	}
	want := map[string]State{"well": Healthy, "failed": Failed, "exited": Failed, "stuck": Unresponsive, "new": Unknown, "starting": Starting,
		"ending": Draining, "lingers": Lingering}
	for _, m := range collect(t, r, of).Mounts {
		if m.State != want[m.Name] {
			t.Errorf("%s is %s, want %s", m.Name, m.State, want[m.Name])
		}
		switch m.Name {
		case "failed":
			if len(m.Problems) != 1 || m.Problems[0].Reason != tracker.ReasonOOM || !m.Problems[0].NextTry.Equal(now.Add(time.Second)) ||
				!strings.Contains(m.Problems[0].Message, "no credentials") {
				t.Errorf("%+v", m.Problems)
			}
		case "exited":
			if len(m.Problems) != 1 || m.Problems[0].Reason != ReasonExited || !strings.Contains(m.Problems[0].Message, "exit status 3") {
				t.Errorf("%+v", m.Problems)
			}
		case "stuck":
			if len(m.Problems) != 1 || m.Problems[0].Reason != ReasonUnresponsive {
				t.Errorf("%+v", m.Problems)
			}
		default:
			if len(m.Problems) > 0 {
				t.Errorf("%s: %+v", m.Name, m.Problems)
			}
		}
	}
}

func TestDocument_SessionsMemoryAndUploads(t *testing.T) {
	expires, failing := now.Add(41*time.Minute), now.Add(-3*time.Minute)
	h := helper.Status{Version: "v0.9", PID: 3, ClientPID: 5, Starts: 2, Conflicts: 1, Tail: []string{"the last line"},
		Queue: &client.Queue{Uploads: 3, Bytes: 1 << 30},
		Session: &helper.SessionStatus{Expires: expires, Error: "403 AccessDenied", Kind: "denied", FailedSince: failing, Next: now.Add(time.Minute),
			OrderDigest: "x"}}
	d := collect(t, records{mounts: []state.Mount{record("m")}}, reports{"m": {State: tracker.Healthy, Helper: &h, SessionState: tracker.SessionFailing}})
	m := d.Mounts[0]
	if *m.Memory != (Memory{8 << 20, 1 << 30}) || *m.Uploads != (Uploads{3, 1 << 30}) || m.Client.Version != "v0.9" {
		t.Errorf("%+v %+v %+v", m.Memory, m.Uploads, m.Client)
	}
	if m.Session.RemainingSeconds != 41*60 || m.Session.State != tracker.SessionFailing {
		t.Errorf("%+v", m.Session)
	}
	if len(m.Problems) != 2 || m.Problems[0].Reason != ReasonSession || !m.Problems[0].Since.Equal(failing) || m.Problems[0].NextTry.IsZero() ||
		m.Problems[1].Reason != ReasonConflicts {
		t.Errorf("%+v", m.Problems)
	}
	var b bytes.Buffer
	if err := d.Text(&b, true); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"node-1", "note: a note", "| the last line", "8.0MiB/1Gi", "3, 1.0GiB", "failing, 41m00s left",
		"session: 403 AccessDenied; do something; since 3m00s; next try in 1m00s"} {
		if !strings.Contains(b.String(), want) {
			t.Errorf("the text does not have %q:\n%s", want, b.String())
		}
	}
}

// The driver learns of the exit of a helper and its client in its next pass, which may be a minute away.
func TestDocument_MountWithoutProcessesHasFailed(t *testing.T) {
	h := helper.Status{PID: 0, ClientPID: 0, State: helper.StateRunning}
	d := collect(t, records{mounts: []state.Mount{record("m")}}, reports{"m": {State: tracker.Healthy, Helper: &h}})
	if m := d.Mounts[0]; m.State != Failed || len(m.Problems) != 1 || m.Problems[0].Reason != ReasonExited {
		t.Errorf("%+v", m)
	}
}

func TestDocument_NotesFullCacheDisk(t *testing.T) {
	c := collector(records{}, nil)
	for free, want := range map[uint64]bool{lowCache - 1: true, lowCache: false} {
		c.CacheFree = func(context.Context) (uint64, error) { return free, nil }
		d, err := c.Collect(t.Context())
		if err != nil || strings.Contains(strings.Join(d.Notes, " "), "--cache-dir (/cache) is full") != want {
			t.Errorf("%d bytes are free: %q, %v", free, d.Notes, err)
		}
	}
	c.CacheFree = func(context.Context) (uint64, error) { return 0, errors.New("the disk does not answer") }
	if d, err := c.Collect(t.Context()); err != nil || len(d.Notes) != 1 {
		t.Errorf("%q, %v", d.Notes, err)
	}
}

func TestDocument_PublicationsNamePodsAndVolumes(t *testing.T) {
	inline := "csi-" + strings.Repeat("a", 64)
	target := func(uid, volume string) string {
		return "/var/lib/kubelet/pods/" + uid + "/volumes/kubernetes.io~csi/" + volume + "/mount"
	}
	r := records{
		mounts: []state.Mount{record("m")},
		pubs: []state.Publication{
			{Target: target("u1", "pv-1"), VolumeID: "v", Mount: "m", Pod: state.Pod{Namespace: "team-a", Name: "web-0"}},
			{Target: target("u2", "data"), VolumeID: inline, Mount: "m"},
			{Target: "/opt/nomad/client/csi/x", VolumeID: "v", Mount: "m", ReadOnly: true},
			{Target: "/elsewhere", VolumeID: "w", Mount: "gone"},
		},
	}
	d := collect(t, r, nil)
	if len(d.Mounts) != 2 {
		t.Fatalf("%+v", d.Mounts)
	}
	if empty := collect(t, records{mounts: []state.Mount{record("m")}}, nil); empty.Mounts[0].Publications == nil {
		t.Error("a mount without publications has null instead of a list of them")
	}
	want := []Publication{
		{VolumeID: "v", Target: "/opt/nomad/client/csi/x", ReadOnly: true},
		{VolumeID: "v", Target: target("u1", "pv-1"), PersistentVolume: "pv-1", Pod: Pod{"team-a", "web-0", "u1"}},
		{VolumeID: inline, Target: target("u2", "data"), Pod: Pod{UID: "u2"}},
	}
	for i, p := range d.Mounts[0].Publications {
		if p != want[i] {
			t.Errorf("%+v, want %+v", p, want[i])
		}
	}
	for pod, want := range map[string]int{"team-a/web-0": 1, "team-b/web-0": 0, "web-0": 0} {
		var b bytes.Buffer
		if of := d.Of(pod); len(of.Mounts) != want || of.Mounts == nil || of.Names(&b) != nil || (b.String() == "m\n") != (want == 1) {
			t.Errorf("mounts of %s: %+v, %q", pod, of.Mounts, b.String())
		}
	}
	if m := d.Mounts[1]; m.Name != "gone" || m.State != Failed || m.Problems[0].Reason != ReasonMissing {
		t.Errorf("%+v", m)
	}
}

func TestParse_RefusesOtherVersions(t *testing.T) {
	if _, err := Parse([]byte(`{"version": "v2"}`)); !fault.Is(err, fault.Unsupported) {
		t.Error(err)
	}
	if _, err := Parse([]byte(`no JSON`)); err == nil {
		t.Error("it was parsed")
	}
	if d, err := Parse([]byte(`{"version": "v1", "later": true, "mounts": [{"name": "m", "state": "later"}]}`)); err != nil || len(d.Mounts) != 1 {
		t.Error(d, err)
	}
}

func TestServer_SocketIsPrivateAndReplaced(t *testing.T) {
	socket := filepath.Join(t.TempDir(), "s")
	if _, err := Fetch(t.Context(), host.Own(), socket); !fault.Is(err, fault.Unavailable) {
		t.Errorf("without a driver: %v", err)
	}
	left, err := net.ListenUnix("unix", &net.UnixAddr{Name: socket})
	if err != nil {
		t.Fatal(err)
	}
	left.SetUnlinkOnClose(false)
	left.Close()
	if _, err := Fetch(t.Context(), host.Own(), socket); !fault.Is(err, fault.Unavailable) {
		t.Errorf("of a driver that is gone: %v", err)
	}
	fail := make(chan error, 2)
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		Server{host.Own(), socket, func(context.Context) (Document, error) {
			return Document{Version: Version, Mounts: []Mount{}}, <-fail
		}}.Run(ctx)
	}()
	var document []byte
	fail <- nil
	for document == nil {
		if document, err = Fetch(t.Context(), host.Own(), socket); err != nil && !fault.Is(err, fault.Unavailable) {
			t.Fatal(err)
		}
	}
	var d Document
	if err := json.Unmarshal(document, &d); err != nil || d.Version != Version {
		t.Errorf("%s, %v", document, err)
	}
	if fi, err := os.Lstat(socket); err != nil || fi.Mode().Perm() != 0o600 {
		t.Errorf("%v, %v", fi, err)
	}
	fail <- errors.New("the directory does not answer")
	if _, err := Fetch(t.Context(), host.Own(), socket); !fault.Is(err, fault.Unavailable) {
		t.Errorf("a failure: %v", err)
	}
	cancel()
	<-ended
}

func TestDocument_ClientsInPods(t *testing.T) {
	failure := Problem{ReasonUnresponsive, "the client does not answer", now.Add(-time.Minute), now.Add(30 * time.Second)}
	d := collect(t, records{inPods: []PodClient{
		{
			VolumeID: "csi-1", Pod: Pod{"team-a", "web-0", "u1"}, Volume: "data", EmptyDir: "fd", Socket: "s.sock",
			State: Unresponsive, Since: now.Add(-time.Hour), Handovers: 3, LastFailure: &failure,
		},
		{VolumeID: "csi-2", Pod: Pod{UID: "u2"}, EmptyDir: "fd", Socket: "s.sock", State: "waiting"},
	}}, nil)
	if len(d.PodClients) != 2 || d.PodClients[0].VolumeID != "csi-2" {
		t.Fatalf("not sorted: %+v", d.PodClients)
	}
	var b bytes.Buffer
	if err := d.Text(&b, false); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"team-a/web-0", "uid u2", "fd/s.sock", "unresponsive 1h00m",
		"last failure: unresponsive: the client does not answer; 1m00s ago; next try in 30s"} {
		if !strings.Contains(b.String(), want) {
			t.Errorf("the text does not have %q:\n%s", want, b.String())
		}
	}
	if of := d.Of("team-a/web-0"); len(of.PodClients) != 1 || of.PodClients[0].VolumeID != "csi-1" || len(d.PodClients) != 2 {
		t.Errorf("%+v of %+v", of.PodClients, d.PodClients)
	}
}
