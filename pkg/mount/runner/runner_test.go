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

	"github.com/s3-csi/s3-csi-driver/pkg/backend"
	"github.com/s3-csi/s3-csi-driver/pkg/client"
	"github.com/s3-csi/s3-csi-driver/pkg/credentials"
	"github.com/s3-csi/s3-csi-driver/pkg/helper"
	"github.com/s3-csi/s3-csi-driver/pkg/launcher"
	"github.com/s3-csi/s3-csi-driver/pkg/mount/creds"
	"github.com/s3-csi/s3-csi-driver/pkg/mount/mounttest"
	"github.com/s3-csi/s3-csi-driver/pkg/mount/mounttest/parts"
	"github.com/s3-csi/s3-csi-driver/pkg/mount/state"
)

func newRunner(t *testing.T, l Launcher, b creds.Backends) (*Runner, *parts.Parts) {
	t.Helper()
	p := parts.New(t, b)
	return New(Options{
		Namespace: p.Namespace, Launcher: l, Backends: b, Clients: p.Clients, Store: p.Store, Sources: p.Sources, Creds: p.Creds, Tracker: p.Tracker,
		Programs: mounttest.Programs("/opt"), Peer: p.Peer, UIDs: launcher.UIDRange{First: parts.UID, Last: parts.UID + 1}, MountTimeout: time.Minute,
	}), p
}

// A removed program, and a changed backend, make a new command line.
func TestCommandsAreUpdated(t *testing.T) {
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
		if err := r.commands.update(t.Context(), &m, p.Backend(), &creds.Grant{}); err != nil {
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
func TestUnresponsiveLauncherDelaysNoRestart(t *testing.T) {
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
func TestHelpersMayReachTheirCredentialSource(t *testing.T) {
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
	command, err := r.commands.command(t.Context(), m, cl, be, backend.BucketInfo{Name: "b", Region: "us-east-1"})
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
func TestAClientGetsTheCredentialsOfTheProxyInItsCommand(t *testing.T) {
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
	if _, err := r.startClient(t.Context(), p.Mount("a", "1", "rclone", nil), before, helper.StartRequest{}, fuse); err == nil {
		t.Error("a helper that closes its connection was taken for one that answers")
	}
	if request := <-got; !strings.Contains(request, "driver:before") || strings.Contains(request, "driver:after") {
		t.Errorf("the helper was sent %q", request)
	}
}
