//go:build !lane || ordinary

package node

import (
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/s3-csi/s3-csi-driver/pkg/check"
	"github.com/s3-csi/s3-csi-driver/tests/internal/faultproxy"
	"github.com/s3-csi/s3-csi-driver/tests/internal/rig/rigtest"
)

// A program that takes the descriptor and never answers ends as a failed row within the bound.
func TestACheckOfAClientThatNeverAnswers(t *testing.T) {
	t.Parallel()
	const hostile = "silent"
	e := newEnv(t)
	config := fmt.Sprintf(`
backends:
  default: {endpoint: %q, region: %q, addressing: path}
clients:
  %s: {program: silent, fuse: argument, args: ["--unset=${prefix}", /usr/bin/sleep, "3600${fd}"], drain: exits, cache: none}
`, e.Rig.S3.Endpoint, e.Rig.S3.Region, hostile)
	began := time.Now()
	s, code := e.report(e.checkClient(hostile, e.declared("env", hostile, config), "--step-timeout=2s"))
	if row := s.Rows[0]; code != 1 || row.Check != "clientMount" || row.Result != check.No || !strings.Contains(row.Why, "did not answer within 2s") {
		t.Errorf("exit code %d, %+v", code, s.Rows)
	}
	if took := time.Since(began); took > time.Minute {
		t.Errorf("it took %s", took)
	}
	if len(s.Notes) > 0 {
		t.Errorf("%q", s.Notes)
	}
}

// A client that stops answering in the middle ends as a failed row, too, and is killed.
func TestACheckOfAClientThatStopsAnswering(t *testing.T) {
	t.Parallel()
	e := newEnv(t)
	cmd := e.checkClient(rclone, "--step-timeout=2s")
	go func() {
		for e.t.Context().Err() == nil {
			if all := e.Running(programs[rclone]); len(all) == 1 && len(e.Keys(t, bucket, "checked/")) > 0 {
				_ = unix.Kill(all[0].PID, unix.SIGSTOP)
				return
			}
			time.Sleep(10 * time.Millisecond)
		}
	}()
	s, code := e.report(cmd)
	failed := slices.IndexFunc(s.Rows, func(r check.Row) bool { return r.Needed && r.Result == check.No })
	if code != 1 || failed < 0 {
		t.Errorf("exit code %d, %+v", code, s.Rows)
	}
	t.Logf("%+v", s.Rows)
}

// An interrupted check removes everything, too.
func TestAnInterruptedCheckOfAClient(t *testing.T) {
	t.Parallel()
	e := newEnv(t)
	cmd := e.checkClient(rclone)
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	e.await(eventually, "the first object of the client", func() bool {
		return slices.ContainsFunc(e.Keys(t, bucket, "checked/"), func(key string) bool { return strings.HasSuffix(key, "/small") })
	})
	if err := cmd.Process.Signal(os.Interrupt); err != nil {
		t.Fatal(err)
	}
	var r check.Report
	if err := json.NewDecoder(stdout).Decode(&r); err != nil {
		t.Error(err)
	}
	_ = cmd.Wait()
	if code := cmd.ProcessState.ExitCode(); code != 1 || r.OK {
		t.Errorf("exit code %d, %+v", code, r)
	}
	e.nothingOfACheck()
}

// The check names the setting of a service that refuses the client's checksums, and uses the volume's options.
func TestCheckOfAClient_NamesTheSettingThatHelps(t *testing.T) {
	t.Parallel()
	trailers := func(r *http.Request) bool { return r.Header.Get("X-Amz-Trailer") != "" }
	refuse := faultproxy.Refusing(faultproxy.Of("PutObject", "UploadPart").When(trailers), 501, "NotImplemented")
	for name, tc := range map[string]struct {
		quirk   faultproxy.Quirk
		options string
		failed  []string // rows with "no!" that must be there
		setting string
	}{
		"checksums are refused": {refuse, "", []string{"checksums", "clientWrite", "clientLarge"}, "upload-checksums=off"},
		"checksums are off":     {refuse, "upload-checksums=off", nil, ""},
		"ranges are ignored":    {faultproxy.Forgetting("Range"), "", []string{"ranges"}, ""},
		"copies are refused":    {faultproxy.Refusing(faultproxy.Of("CopyObject"), 501, "NotImplemented"), "", []string{"copies"}, ""},
		"multipart uploads are refused": {faultproxy.Refusing(faultproxy.Of("CreateMultipartUpload"), 403, "AccessDenied"), "", []string{"multipart", "clientLarge"},
			""},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			e := newEnv(t)
			p := rigtest.Proxy(t, e.Rig.S3.Endpoint)
			p.Set(faultproxy.Faults{Quirk: tc.quirk})
			config := filepath.Join(t.TempDir(), "config.yaml")
			text := fmt.Sprintf("backends:\n  default: {endpoint: %q, region: %q, addressing: path}\n", p.Endpoint(), e.Rig.S3.Region)
			write(t, config, text)
			r, code := e.reports(e.checkClient(mountpoint, "--config="+config, "--mount-options="+tc.options))
			found, setting := map[string]bool{}, ""
			for _, row := range slices.Concat(r.Sections[0].Rows, r.Sections[1].Rows) {
				if row.Needed && row.Result == check.No {
					found[row.Check] = true
					setting += row.Setting
				}
				t.Logf("%+v", row)
			}
			for _, want := range tc.failed {
				if !found[want] {
					t.Errorf("%s did not fail", want)
				}
			}
			if ok := len(tc.failed) == 0; r.OK != ok || (code == 0) != ok || setting != tc.setting {
				t.Errorf("ok %t, exit code %d, setting %q", r.OK, code, setting)
			}
		})
	}
}
