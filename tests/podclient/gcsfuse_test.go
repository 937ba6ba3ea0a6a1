package podclient

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"io/fs"
	"net"
	"net/http"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/s3-csi/s3-csi-driver/tests/internal/output"
	"github.com/s3-csi/s3-csi-driver/tests/internal/ports"
	"github.com/s3-csi/s3-csi-driver/tests/internal/rig"
	"github.com/s3-csi/s3-csi-driver/tests/internal/rig/rigtest"
)

// gcsfuse serves a bucket of an emulator of Google Cloud Storage.
func gcsfuse(t testing.TB, e *env) foreign {
	t.Helper()
	program := e.copied(t, ofGCS(t, "gcsfuse"))
	service := emulateGCS(t)
	service.put(t, "file", "content")
	return foreign{nil, func(mountpoint string) []string {
		return []string{
			program, "--foreground", "--anonymous-access", "--custom-endpoint=" + service.url + "/storage/v1/", "-o", "allow_other", "--implicit-dirs",
			"--file-mode=666", "--dir-mode=777", "--enable-atomic-rename-object=false", // a request that the emulator does not know
			bucket, mountpoint,
		}
	}, service.stored}
}

// ofGCS is the path of a program that make test-parts builds.
func ofGCS(t testing.TB, name string) string {
	t.Helper()
	cache := os.Getenv("S3CSI_CACHE")
	path := filepath.Join(cache, "bin", "gcs", name)
	if _, err := os.Stat(path); cache == "" || err != nil {
		t.Skipf("needs %s, which make test-parts builds: set S3CSI_CACHE: %v", name, err)
	}
	return path
}

// copied is a copy of a program that every user may execute.
func (e *env) copied(t testing.TB, path string) string {
	t.Helper()
	program, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	dir, err := os.MkdirTemp(e.Dir, "program-") //nolint:usetesting // other users may pass through it
	if err != nil {
		t.Fatal(err)
	}
	own := filepath.Join(dir, filepath.Base(path))
	if err := os.Chmod(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := rig.WriteProgram(own, program); err != nil {
		t.Fatal(err)
	}
	return own
}

// gcs is an emulator of Google Cloud Storage with the bucket.
type gcs struct{ url string }

// emulateGCS starts an emulator, which keeps everything in memory.
func emulateGCS(t testing.TB) gcs {
	t.Helper()
	program := ofGCS(t, "fake-gcs-server")
	addr, err := ports.Free()
	if err != nil {
		t.Fatal(err)
	}
	_, port, err := net.SplitHostPort(addr)
	if err != nil {
		t.Fatal(err)
	}
	host := "localhost:" + port // by which gcsfuse recognizes an emulator
	g := gcs{"http://" + host}
	var log output.Buffer
	ctx, cancel := context.WithCancel(context.WithoutCancel(t.Context()))
	cmd := exec.CommandContext(ctx, program, "-scheme=http", "-host=127.0.0.1", "-port="+port, "-backend=memory", "-public-host="+host, "-external-url="+g.url)
	cmd.Stdout, cmd.Stderr = &log, &log
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		cancel()
		_ = cmd.Wait()
		if t.Failed() {
			t.Logf("output of fake-gcs-server: %s", log.String())
		}
	})
	rigtest.Await(t, eventually, "the emulator", func() bool {
		status, _, err := g.do(http.MethodGet, "/_internal/healthcheck", "", nil)
		return err == nil && status == http.StatusOK
	})
	g.must(t, "/storage/v1/b?project=test", "application/json", fmt.Appendf(nil, `{"name":%q}`, bucket))
	return g
}

func (g gcs) put(t testing.TB, name, content string) {
	t.Helper()
	g.must(t, "/upload/storage/v1/b/"+bucket+"/o?uploadType=media&name="+url.QueryEscape(name), "application/octet-stream", []byte(content))
}

// stored reads an object (JSON API, objects.get).
func (g gcs) stored(name string) (string, error) {
	status, body, err := g.do(http.MethodGet, "/storage/v1/b/"+bucket+"/o/"+url.PathEscape(name)+"?alt=media", "", nil)
	switch {
	case err != nil:
		return "", err
	case status == http.StatusNotFound:
		return "", fmt.Errorf("object %s: %w", name, fs.ErrNotExist)
	case status != http.StatusOK:
		return "", fmt.Errorf("object %s: status %d: %s", name, status, body)
	}
	return string(body), nil
}

func (g gcs) must(t testing.TB, path, kind string, body []byte) {
	t.Helper()
	if status, answer, err := g.do(http.MethodPost, path, kind, body); err != nil || status != http.StatusOK {
		t.Fatalf("%s: status %d, %v: %s", path, status, err, answer)
	}
}

func (g gcs) do(method, path, kind string, body []byte) (status int, answer []byte, err error) {
	ctx, cancel := context.WithTimeout(context.Background(), eventually)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, method, g.url+path, bytes.NewReader(body))
	if err != nil {
		return 0, nil, err
	}
	req.Close = true
	if kind != "" {
		req.Header.Set("Content-Type", kind)
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return 0, nil, err
	}
	defer resp.Body.Close()
	answer, err = io.ReadAll(resp.Body)
	return resp.StatusCode, answer, err
}
