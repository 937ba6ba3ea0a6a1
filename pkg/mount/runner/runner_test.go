package runner

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil"

	"github.com/s3-csi/s3-csi-driver/pkg/backend"
	"github.com/s3-csi/s3-csi-driver/pkg/client"
	"github.com/s3-csi/s3-csi-driver/pkg/credentials"
	"github.com/s3-csi/s3-csi-driver/pkg/helper"
	"github.com/s3-csi/s3-csi-driver/pkg/launcher"
	"github.com/s3-csi/s3-csi-driver/pkg/mount"
	"github.com/s3-csi/s3-csi-driver/pkg/mount/creds"
	"github.com/s3-csi/s3-csi-driver/pkg/mount/mounttest"
	"github.com/s3-csi/s3-csi-driver/pkg/mount/mounttest/parts"
	"github.com/s3-csi/s3-csi-driver/pkg/mount/spares"
	"github.com/s3-csi/s3-csi-driver/pkg/mount/state"
	"github.com/s3-csi/s3-csi-driver/pkg/mount/tracker"
	"github.com/s3-csi/s3-csi-driver/pkg/mount/uids"
)

func newRunner(t *testing.T, l Launcher, b creds.Backends) (*Runner, *parts.Parts) {
	t.Helper()
	p := parts.New(t, b)
	return &Runner{
		Namespace: p.Namespace, Launcher: l, Backend: b.Backend, Clients: p.Clients, Store: p.Store, Sources: p.Sources, Creds: p.Creds, Tracker: p.Tracker,
		Programs: mounttest.Programs("/opt"), Peer: p.Peer, MountTimeout: time.Minute,
	}, p
}

// A removed program, and a changed backend, make a new command line.
func TestUpdateCommand_FollowsProgramAndBackend(t *testing.T) {
	r, p := newRunner(t, &mounttest.UIDs{}, mounttest.S3{Access: errors.New("connection refused")})
	for what, tc := range map[string]struct {
		change func(*state.Mount)
		want   bool
	}{
		"as it was":         {func(*state.Mount) {}, false},
		"no command":        {func(m *state.Mount) { m.Command.Argv = nil }, true},
		"a removed program": {func(m *state.Mount) { m.Command.Argv = []string{"/no/such/program"} }, true},
		"another backend":   {func(m *state.Mount) { m.Backend = "another digest" }, true},
	} {
		m := p.Mount("a", "1", "rclone", nil)
		before := m.Command.Argv
		tc.change(&m)
		if err := r.updateCommand(t.Context(), &m, p.Backend(), &creds.Grant{}); err != nil {
			t.Errorf("%s: %v", what, err)
		}
		if changed := !slices.Equal(m.Command.Argv, before); changed != tc.want || len(m.Command.Argv) == 0 {
			t.Errorf("%s: %q", what, m.Command.Argv)
		}
		if err := p.Store.Remove(t.Context(), m.Name); err != nil {
			t.Fatal(err)
		}
	}
}

// The OOM kill count is for messages: a launcher that does not answer delays no restart for long.
func TestOOMKills_UnresponsiveLauncherDelaysNoRestart(t *testing.T) {
	r, _ := newRunner(t, &mounttest.UIDs{}, mounttest.S3{})
	began := time.Now()
	if n := r.oomKills(t.Context(), state.Mount{OOMKills: 3}); n != 3 || time.Since(began) > 2*oomBound {
		t.Errorf("%d after %s", n, time.Since(began))
	}
}

// units is a launcher that records what it is asked to start.
type units struct {
	mounttest.UIDs
	started []launcher.Unit
}

func (l *units) Start(_ context.Context, u launcher.Unit) error {
	l.started = append(l.started, u)
	return nil
}

// The helper of a mount with its pod's own credentials may reach the agent of EKS Pod Identity; that of any other mount may not.
func TestLaunchHelper_AllowsTheCredentialSource(t *testing.T) {
	for source, want := range map[string]string{credentials.SourceWorkload: "[169.254.170.23]", credentials.SourceSecret: "[]", credentials.SourceDriver: "[]"} {
		l := &units{}
		r, p := newRunner(t, l, mounttest.S3{})
		m := p.Mount("a", "1", "rclone", func(m *state.Mount) { m.Spec.Source = source })
		if err := r.launchHelper(t.Context(), m, backend.Backend{Name: "default"}); err != nil {
			t.Fatal(err)
		}
		if len(l.started) != 1 || fmt.Sprint(l.started[0].Needs) != want {
			t.Errorf("%s: %+v, want the needs %s", source, l.started, want)
		}
	}
}

// reloaded is a config that was reloaded, with another proxy.
type reloaded struct {
	mounttest.S3
	now backend.Backend
}

func (r reloaded) Backend(string) (backend.Backend, error) { return r.now, nil }

func TestCommands_HaveTheSettingsOfTheBackend(t *testing.T) {
	r, p := newRunner(t, &mounttest.UIDs{}, mounttest.S3{})
	m := p.Mount("a", "1", "rclone", nil)
	m.Spec.Options = []string{"debug"}
	cl, err := client.Get("mountpoint-s3")
	if err != nil {
		t.Fatal(err)
	}
	be := backend.Backend{Name: "default", FIPS: true, Requests: backend.Requests{RequesterPays: true, SSE: "AES256"}}
	command, err := r.command(t.Context(), m, service{cl, be, backend.BucketInfo{Name: "b", Region: "us-east-1"}})
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"--debug", "--requester-pays", "--sse=AES256", "--endpoint-url=https://s3-fips.us-east-1.amazonaws.com"} {
		if !slices.Contains(command.Argv, want) {
			t.Errorf("%s is not in %q", want, command.Argv)
		}
	}
}

// A config that is reloaded while a client starts does not give the new proxy's credentials to the old one.
func TestStartClient_SendsTheCredentialsOfTheCommandsProxy(t *testing.T) {
	dir := t.TempDir()
	proxied := func(name string) backend.Backend {
		login, file := filepath.Join(dir, name), filepath.Join(dir, name+".yaml")
		text := fmt.Sprintf("backends: {default: {endpoint: 'http://s3.example', proxy: {url: 'http://%s.example:3128', credentialsFile: '%s'}}}", name, login)
		for path, content := range map[string]string{login: "driver:" + name, file: text} {
			if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
				t.Fatal(err)
			}
		}
		config, err := backend.LoadConfig(file, "", "")
		if err != nil {
			t.Fatal(err)
		}
		return config.Backends()[0]
	}
	before := proxied("before")
	r, p := newRunner(t, &mounttest.UIDs{}, reloaded{now: proxied("after")})
	socket := filepath.Join(dir, "s")
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: socket})
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	got := make(chan string, 1)
	go func() {
		conn, err := l.AcceptUnix()
		if err != nil {
			got <- err.Error()
			return
		}
		defer conn.Close()
		length := make([]byte, 4)
		if _, err := io.ReadFull(conn, length); err != nil {
			got <- err.Error()
			return
		}
		request := make([]byte, binary.BigEndian.Uint32(length))
		_, err = io.ReadFull(conn, request)
		got <- fmt.Sprintln(string(request), err)
	}()
	r.Peer = func(string) *helper.Peer { return helper.NewPeer(helper.Dial(socket)) }
	fuse, err := os.Open(os.DevNull)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := r.startClient(t.Context(), p.Mount("a", "1", "rclone", nil), clientStart{backend: before, fuse: fuse}); err == nil {
		t.Error("a helper that closes its connection was taken for one that answers")
	}
	if request := <-got; !strings.Contains(request, "driver:before") || strings.Contains(request, "driver:after") {
		t.Errorf("the helper was sent %q", request)
	}
}

// countingLauncher is a launcher whose mounts have had an OOM-killed process, and that cannot start helpers.
type countingLauncher struct{ mounttest.UIDs }

func (*countingLauncher) OOMKills(context.Context, string, uint32) (uint64, error) { return 1, nil }

func (*countingLauncher) Start(context.Context, launcher.Unit) error { return errors.New("no helper") }

func TestCauseOf_IsWhatEndedTheClient(t *testing.T) {
	exited := helper.Status{Protocol: 1, State: helper.StateExited, ExitCode: 3, Tail: []string{"no space"}}
	serves := helper.Status{Protocol: 1, State: helper.StateRunning}
	for what, tc := range map[string]struct {
		status *helper.Status
		change func(r *Runner, m *state.Mount)
		reason string
		detail string
	}{
		"crash":          {&exited, nil, tracker.ReasonCrash, "exit status 3: no space"},
		"unmounted":      {&serves, nil, tracker.ReasonSource, "unmounted"},
		"no helper":      {nil, nil, tracker.ReasonHelper, ExitUnknown},
		"unresponsive":   {nil, func(r *Runner, m *state.Mount) { r.Tracker.Mount(m.Name).Killed() }, tracker.ReasonHang, "unresponsive"},
		"OOM":            {nil, func(_ *Runner, m *state.Mount) { m.OOMKills = 0 }, tracker.ReasonOOM, "no limit of its own"},
		"OOM by volume":  {nil, func(_ *Runner, m *state.Mount) { m.OOMKills, m.Spec.MemoryLimit = 0, 64<<20 }, tracker.ReasonOOM, "its volume is 64 MiB"},
		"OOM by default": {nil, func(r *Runner, m *state.Mount) { m.OOMKills, r.Limits.MemoryMax = 0, 8<<30 }, tracker.ReasonOOM, "--memory-limit is 8192 MiB"},
	} {
		t.Run(what, func(t *testing.T) {
			r, p := newRunner(t, &countingLauncher{}, mounttest.S3{})
			m := p.Mount("a", "1", "rclone", func(m *state.Mount) { m.OOMKills = 1 })
			if tc.status != nil {
				(&mounttest.Helper{Status: tc.status}).Serve(t, p.Store.Socket(m.Name))
			}
			if tc.change != nil {
				tc.change(r, &m)
			}
			if got := r.CauseOf(t.Context(), m); got.Reason != tc.reason || !strings.Contains(got.Detail, tc.detail) {
				t.Errorf("%+v", got)
			}
			if tc.status != &exited {
				return
			}
			if err := r.KillClient(t.Context(), m); err != nil {
				t.Errorf("a client that has exited cannot be killed: %v", err)
			}
		})
	}
}

// The status that helpers report now is shown, without waiting for those that do not answer.
func TestRefresh_AsksAllHelpers(t *testing.T) {
	r, p := newRunner(t, &mounttest.UIDs{}, mounttest.S3{})
	answers, gone := p.Mount("a", "1", "rclone", nil), p.Mount("b", "1", "rclone", nil)
	(&mounttest.Helper{Status: &helper.Status{Protocol: 1, State: helper.StateRunning}}).Serve(t, p.Store.Socket(answers.Name))
	for _, m := range []state.Mount{answers, gone} {
		p.Tracker.Mount(m.Name).Set(m.Client, tracker.Healthy)
	}
	r.Refresh(t.Context())
	if p.Tracker.Report(answers.Name).Helper == nil || p.Tracker.Report(gone.Name).Helper != nil {
		t.Error("the status of a helper is missing, or made up")
	}
}

func TestStart_LeavesNothingWhenItFails(t *testing.T) {
	for what, change := range map[string]func(r *Runner, p *StartParams){
		"no helper":            func(*Runner, *StartParams) {},
		"no program":           func(r *Runner, _ *StartParams) { r.Launcher, r.Programs = &mounttest.UIDs{}, noPrograms{} },
		"an unknown client":    func(_ *Runner, p *StartParams) { p.Spec.Client = "none" },
		"a cut client's start": func(r *Runner, _ *StartParams) { r.Launcher = &mounttest.UIDs{} },
	} {
		t.Run(what, func(t *testing.T) {
			r, p := newRunner(t, &countingLauncher{}, mounttest.S3{})
			r.UIDs = &uids.Allocator{Namespace: p.Namespace, Launcher: &mounttest.UIDs{}, Store: p.Store, Range: launcher.UIDRange{First: parts.UID, Last: parts.UID}}
			r.Spares = spares.New(spares.Options{})
			request := mounttest.Request()
			params := StartParams{VolumeID: "v", Spec: mount.NewSpec(request, nil)}
			var err error
			if params.Grant, err = p.Creds.Plan(t.Context(), request, params.Spec); err != nil {
				t.Fatal(err)
			}
			change(r, &params)
			ctx, cancel := context.WithTimeout(t.Context(), 500*time.Millisecond)
			defer cancel()
			if m, err := r.Start(ctx, params); err == nil {
				t.Errorf("it started as %+v", m)
			}
			if names, err := p.Store.Names(t.Context()); err != nil || len(names) > 0 {
				t.Errorf("left: %v, %v", names, err)
			}
		})
	}
}

// noPrograms are programs that cannot run.
type noPrograms struct{}

func (noPrograms) Path(context.Context, client.Client) (string, error) {
	return "", errors.New("no program")
}

// Data of open files is lost with an unresponsive client, unless it only reads or lingers.
func TestKillUnresponsive_CountsLostData(t *testing.T) {
	for what, tc := range map[string]struct {
		change func(*state.Mount)
		lost   float64
	}{
		"writes":     {func(*state.Mount) {}, 1},
		"reads only": {func(m *state.Mount) { m.Spec.ReadOnly = true }, 0},
		"lingers":    {func(m *state.Mount) { m.Linger = &state.Linger{} }, 0},
	} {
		l := &mounttest.UIDs{}
		r, p := newRunner(t, l, mounttest.S3{})
		m := p.Mount("a", "1", "rclone", tc.change)
		if err := r.KillUnresponsive(t.Context(), m, "test"); err != nil || len(l.Killed) != 1 { // it has no helper
			t.Errorf("%s: killed %v, %v", what, l.Killed, err)
		}
		if lost := testutil.ToFloat64(p.Tracker.Metrics.Unflushed.WithLabelValues("rclone")); lost != tc.lost {
			t.Errorf("%s: %v clients lost data", what, lost)
		}
		if !p.Tracker.Mount(m.Name).WasKilled() {
			t.Errorf("%s: its restart would have another cause", what)
		}
	}
}

func TestMemoryLimit_OfARemovedClientIsTheVolumes(t *testing.T) {
	r, _ := newRunner(t, &units{}, mounttest.S3{})
	if limit := r.MemoryLimit(state.Mount{Client: "removed", Spec: mount.Spec{MemoryLimit: 7}}); limit != 7 {
		t.Errorf("the limit is %d", limit)
	}
}
