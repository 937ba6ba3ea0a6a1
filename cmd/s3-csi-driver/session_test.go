package main

import (
	"context"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/s3-csi/s3-csi-driver/pkg/client"
	"github.com/s3-csi/s3-csi-driver/pkg/credentials"
	"github.com/s3-csi/s3-csi-driver/pkg/fault"
	"github.com/s3-csi/s3-csi-driver/pkg/helper"
	"github.com/s3-csi/s3-csi-driver/pkg/helper/helpertest"
)

// sessionLife is how long the sessions of the tests' token service live.
const sessionLife = 6 * time.Second

// tokenService answers AssumeRoleWithWebIdentity (STS API Reference), by a clock of its own.
type tokenService struct {
	down  atomic.Bool
	skew  time.Duration
	asked atomic.Int64
}

func (s *tokenService) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	n := s.asked.Add(1)
	now := time.Now().Add(s.skew).UTC()
	w.Header().Set("Date", now.Format(http.TimeFormat))
	w.Header().Set("Content-Type", "text/xml")
	if s.down.Load() {
		w.WriteHeader(http.StatusForbidden)
		fmt.Fprint(w, `<ErrorResponse><Error><Type>Sender</Type><Code>AccessDenied</Code><Message>not today</Message></Error></ErrorResponse>`)
		return
	}
	if err := r.ParseForm(); err != nil || r.Form.Get("Action") != "AssumeRoleWithWebIdentity" || r.Form.Get("WebIdentityToken") != "canary-token" ||
		r.Form.Get("Policy") != `{"Version":"2012-10-17"}` {
		http.Error(w, "what is this?", http.StatusBadRequest)
		return
	}
	fmt.Fprintf(w, `<AssumeRoleWithWebIdentityResponse xmlns="https://sts.amazonaws.com/doc/2011-06-15/"><AssumeRoleWithWebIdentityResult><Credentials>`+
		`<AccessKeyId>ASIAMADE%d</AccessKeyId><SecretAccessKey>canary-made-secret</SecretAccessKey><SessionToken>canary-made-token</SessionToken>`+
		`<Expiration>%s</Expiration>`+
		`</Credentials></AssumeRoleWithWebIdentityResult><ResponseMetadata><RequestId>x</RequestId></ResponseMetadata></AssumeRoleWithWebIdentityResponse>`,
		n, now.Add(sessionLife).Format(time.RFC3339))
}

// An unprivileged helper renews its client's sessions with the driver's program and without a driver that runs, whatever the
// token service's clock says.
func TestHelper_RenewsSessionsWithTheDriver(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("needs root, to start a helper as its own user")
	}
	fuse, err := os.OpenFile("/dev/fuse", os.O_RDWR, 0)
	if err != nil {
		t.Skipf("needs /dev/fuse: %v", err)
	}
	t.Cleanup(func() { _ = fuse.Close() })
	for name, skew := range map[string]time.Duration{"clocks agree": 0, "its clock is fast": 20 * time.Minute, "its clock is slow": -20 * time.Minute} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			service := &tokenService{skew: skew}
			server := httptest.NewServer(service)
			t.Cleanup(server.Close)
			peer, log := startHelper(t)
			order := credentials.Order{
				Kind: credentials.WebIdentity, Token: "canary-token", RoleARN: "arn:aws:iam::123456789012:role/r", Name: "test", Policy: `{"Version":"2012-10-17"}`,
				Duration: sessionLife, STS: credentials.STSService{Endpoint: server.URL, Region: "us-east-1"},
			}
			ctx, cancel := context.WithTimeout(t.Context(), 40*time.Second)
			defer cancel()
			req := helper.StartRequest{Client: "rclone", Command: client.Command{Argv: []string{"/bin/sleep", "1000"}}, Order: order}
			if _, err := peer.Start(ctx, req, fuse); err != nil {
				t.Fatal(err)
			}
			await := func(what string, ok func(s *helper.SessionStatus) bool) *helper.SessionStatus {
				t.Helper()
				for since := uint64(0); ; {
					s, err := peer.WaitStatus(ctx, since)
					if err != nil {
						t.Fatalf("waiting for %s: %v\n%s", what, err, contents(t, log))
					}
					if since = s.Revision; ok(s.Session) {
						return s.Session
					}
				}
			}
			s := await("renewals", func(s *helper.SessionStatus) bool { return s.Renewals >= 2 })
			if left := time.Until(s.Expires); s.Failures != 0 || s.Over || left < 0 || left > sessionLife+2*time.Second || !s.Has(order) {
				t.Errorf("%+v: %s are left", s, left)
			}
			service.down.Store(true)
			s = await("a refusal", func(s *helper.SessionStatus) bool { return s.Failures > 0 })
			if !fault.Is(s.Fault(), fault.Denied) || !strings.Contains(s.Error, "not today") {
				t.Errorf("%+v", s)
			}
			service.down.Store(false)
			if err := peer.Renew(ctx, credentials.Keys{}, order); err != nil {
				t.Error(err)
			}
			await("recovery", func(s *helper.SessionStatus) bool { return s.Error == "" && !s.Over })
			if text := contents(t, log); strings.Contains(text, "canary") {
				t.Errorf("a secret is in the log:\n%s", text)
			}
		})
	}
}

// startHelper starts this test binary as a helper with a uid of its own.
func startHelper(t *testing.T) (peer *helper.Peer, log string) {
	t.Helper()
	const uid = 2300011
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	dir, err := os.MkdirTemp("", "helper") //nolint:usetesting // of which others cannot pass the parent
	must(err)
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	must(os.Chmod(dir, 0o755))
	state, program := filepath.Join(dir, "state"), filepath.Join(dir, helper.ExchangeProgram)
	must(os.Mkdir(state, 0o700))
	must(os.Chown(state, uid, uid))
	helpertest.Copy(t, program, 0o711) // as it is installed on hosts
	socket, err := helper.Listen(filepath.Join(dir, "sock"))
	must(err)
	defer socket.Close()
	log = filepath.Join(dir, "log")
	out, err := os.OpenFile(log, os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o600)
	must(err)
	defer out.Close()
	cmd := exec.CommandContext(context.WithoutCancel(t.Context()), program, "helper", "--name", "test", "--state-dir", state)
	cmd.Env, cmd.Stdin, cmd.Stdout, cmd.Stderr = []string{asHelper + "=1"}, socket, out, out
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true, Credential: &syscall.Credential{Uid: uid, Gid: uid}}
	must(cmd.Start())
	peer = helper.NewPeer(helper.Dial(filepath.Join(dir, "sock")))
	t.Cleanup(func() {
		_, _ = peer.Quit(context.Background())
		if err := cmd.Wait(); err != nil {
			t.Errorf("the helper: %v\n%s", err, contents(t, log))
		}
	})
	return peer, log
}

func contents(t *testing.T, path string) string {
	t.Helper()
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}
