//go:build linux

// Package mountpoint checks that the program of the client mountpoint-s3 does what the driver needs: s3-csi-mountpoint of this
// repository or, where MOUNT_S3 names it, AWS's mount-s3.
package mountpoint

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
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

	"github.com/aws/aws-sdk-go-v2/aws"
	awscredentials "github.com/aws/aws-sdk-go-v2/credentials"
	"github.com/aws/aws-sdk-go-v2/service/s3"
	"golang.org/x/sys/unix"

	"github.com/s3-csi/s3-csi-driver/pkg/client"
	"github.com/s3-csi/s3-csi-driver/pkg/credentials"
	"github.com/s3-csi/s3-csi-driver/pkg/host"
	"github.com/s3-csi/s3-csi-driver/pkg/volume"
	"github.com/s3-csi/s3-csi-driver/tests/internal/isolate"
	"github.com/s3-csi/s3-csi-driver/tests/internal/rig"
	"github.com/s3-csi/s3-csi-driver/tests/internal/s3server"
)

const (
	// clientUID is the user of the client, as the driver gives one to every mount.
	clientUID = 64123
	bucket    = "bucket"
	// authorization is the token of the credentials endpoint.
	authorization = "the-token"
	exitTimeout   = 90 * time.Second
)

func TestMain(m *testing.M) { os.Exit(isolate.Main(m.Run)) }

// program returns a path of the program under test that every user can execute.
func program(t *testing.T) string {
	t.Helper()
	path := os.Getenv(rig.EnvMountpoint)
	if path == "" {
		bin := os.Getenv(rig.EnvBin)
		if bin == "" {
			t.Skipf("needs the client's program: set %s to it, or %s to a directory with %s (make mountpoint)", rig.EnvMountpoint, rig.EnvBin, rig.OwnMountpoint)
		}
		path = filepath.Join(bin, rig.OwnMountpoint)
	}
	if _, err := os.Stat(path); errors.Is(err, os.ErrNotExist) {
		t.Skipf("needs the client's program: there is no %s; run make mountpoint", path)
	}
	name := filepath.Join(openDir(t), filepath.Base(path))
	if err := rig.CopyProgram(path, name); err != nil {
		t.Fatal(err)
	}
	return name
}

// isOwn reports whether the program under test is that of this repository.
func isOwn() bool {
	path := os.Getenv(rig.EnvMountpoint)
	return path == "" || filepath.Base(path) == rig.OwnMountpoint
}

// own skips a test of what only the program of this repository does.
func own(t *testing.T) {
	t.Helper()
	if !isOwn() {
		t.Skipf("only %s does this", rig.OwnMountpoint)
	}
}

// needFuse skips a test where nothing can be mounted.
func needFuse(t *testing.T) {
	t.Helper()
	if err := rig.Usable(); err != nil {
		t.Skip(err)
	}
}

// openDir returns a new directory that every user can pass.
func openDir(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	if err := os.Chmod(filepath.Dir(dir), 0o755); err != nil {
		t.Fatal(err)
	}
	return dir
}

// endpoint is a credentials endpoint as a mount's helper serves it.
type endpoint struct {
	*httptest.Server
	asked atomic.Int32
}

func newEndpoint(t *testing.T, keys credentials.Keys) *endpoint {
	t.Helper()
	e := &endpoint{}
	e.Server = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Header.Get("Authorization") != authorization {
			http.Error(w, "wrong token", http.StatusForbidden)
			return
		}
		e.asked.Add(1)
		_ = json.NewEncoder(w).Encode(map[string]string{
			"AccessKeyId": keys.AccessKeyID, "SecretAccessKey": keys.SecretAccessKey, "Token": "",
			"Expiration": time.Now().Add(15 * time.Minute).UTC().Format(time.RFC3339),
		})
	}))
	t.Cleanup(e.Close)
	return e
}

// bench is an S3 server with a bucket, and a credentials endpoint with its keys.
type bench struct {
	server *s3server.Server
	s3     *s3.Client
	keys   *endpoint
}

func newBench(t *testing.T) *bench {
	t.Helper()
	needFuse(t)
	server, err := s3server.Start(t.Context(), s3server.Options{Dir: t.TempDir()})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = server.Stop() })
	keys := server.Keys()
	b := &bench{server: server, keys: newEndpoint(t, keys), s3: s3.New(s3.Options{
		BaseEndpoint: aws.String(server.Endpoint()), Region: server.Region(), UsePathStyle: true,
		Credentials: awscredentials.NewStaticCredentialsProvider(keys.AccessKeyID, keys.SecretAccessKey, ""),
	})}
	if _, err := b.s3.CreateBucket(t.Context(), &s3.CreateBucketInput{Bucket: aws.String(bucket)}); err != nil {
		t.Fatal(err)
	}
	return b
}

// newOwnBench is newBench for a test of what only the program of this repository does.
func newOwnBench(t *testing.T) *bench {
	t.Helper()
	own(t)
	return newBench(t)
}

func (b *bench) put(t *testing.T, key, content string) {
	t.Helper()
	if _, err := b.s3.PutObject(t.Context(), &s3.PutObjectInput{Bucket: aws.String(bucket), Key: &key, Body: strings.NewReader(content)}); err != nil {
		t.Fatal(err)
	}
}

// get returns an object's content; ok is false if there is none.
func (b *bench) get(t *testing.T, key string) (content []byte, ok bool) {
	t.Helper()
	out, err := b.s3.GetObject(t.Context(), &s3.GetObjectInput{Bucket: aws.String(bucket), Key: &key})
	var status interface{ HTTPStatusCode() int }
	if errors.As(err, &status) && status.HTTPStatusCode() == http.StatusNotFound {
		return nil, false
	}
	if err != nil {
		t.Fatal(err)
	}
	defer out.Body.Close()
	content, err = io.ReadAll(out.Body)
	if err != nil {
		t.Fatal(err)
	}
	return content, true
}

// invocation returns what the driver starts the client with.
func (b *bench) invocation(t *testing.T) client.Invocation {
	t.Helper()
	return invocation(t, b.server.Endpoint(), b.server.Region())
}

func invocation(t *testing.T, endpoint, region string) client.Invocation {
	t.Helper()
	in := client.Invocation{
		Binary: program(t), Bucket: bucket, Prefix: "volume/", Region: region, Endpoint: endpoint, PathStyle: true,
		UID: 1234, GID: 5678, DirMode: 0o750, FileMode: 0o640, UserAgent: "s3-csi-driver/test", StateDir: openDir(t), CacheDir: openDir(t),
	}
	for _, dir := range []string{in.StateDir, in.CacheDir} {
		if err := os.Chown(dir, clientUID, clientUID); err != nil {
			t.Fatal(err)
		}
	}
	return in
}

// options checks mount options as the driver does.
func options(t *testing.T, texts ...string) []volume.Option {
	t.Helper()
	parsed, err := volume.ParseMountOptions(texts, "mountOptions")
	if err != nil {
		t.Fatal(err)
	}
	if err := mountpointS3(t).Check(parsed, "mountOptions"); err != nil {
		t.Fatal(err)
	}
	return parsed
}

func mountpointS3(t *testing.T) client.Client {
	t.Helper()
	c, err := client.Get("mountpoint-s3")
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// command returns the client's process, with the FUSE descriptor at its number. Without keys, it has no credentials endpoint.
func command(t *testing.T, in client.Invocation, keys *endpoint, fuse *os.File) *exec.Cmd {
	t.Helper()
	c := mountpointS3(t).Command(in)
	cmd := &exec.Cmd{Path: c.Argv[0], Args: c.Argv, ExtraFiles: []*os.File{fuse}}
	cmd.Env = c.Env
	if keys != nil {
		cmd.Env = append(cmd.Env, "AWS_CONTAINER_CREDENTIALS_FULL_URI="+keys.URL+"/credentials", "AWS_CONTAINER_AUTHORIZATION_TOKEN="+authorization)
	}
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: clientUID, Gid: clientUID}}
	return cmd
}

// mounted is a client that serves a mount.
type mounted struct {
	dir            string
	cmd            *exec.Cmd
	stdout, stderr bytes.Buffer
	exited         chan struct{}
}

// mount starts a client as the driver does, and returns when the root of its mount can be read or the client has exited. change
// may change the process before it is started.
func mount(t *testing.T, in client.Invocation, keys *endpoint, change func(*exec.Cmd)) *mounted {
	t.Helper()
	needFuse(t)
	m := &mounted{dir: t.TempDir(), exited: make(chan struct{})}
	fuse, err := host.OpenFuse()
	if err != nil {
		t.Fatal(err)
	}
	dir, err := os.Open(m.dir)
	if err != nil {
		t.Fatal(err)
	}
	defer dir.Close()
	if err := host.MountFuse(fuse, dir, host.FuseMount{Source: "s3csi:test", UID: clientUID, GID: clientUID, ReadOnly: in.ReadOnly}); err != nil {
		t.Fatal(err)
	}
	m.cmd = command(t, in, keys, fuse)
	m.cmd.Stdout, m.cmd.Stderr = &m.stdout, &m.stderr
	if change != nil {
		change(m.cmd)
	}
	err = m.cmd.Start()
	fuse.Close()
	t.Cleanup(func() {
		if m.cmd.Process != nil {
			_ = m.cmd.Process.Kill()
			<-m.exited
		}
		_ = unix.Unmount(m.dir, unix.MNT_DETACH)
		if t.Failed() {
			t.Logf("standard error:\n%s", m.stderr.String())
		}
	})
	if err != nil {
		t.Fatal(err)
	}
	go func() {
		defer close(m.exited)
		_ = m.cmd.Wait()
	}()
	if _, err := os.ReadDir(m.dir); err != nil {
		t.Fatalf("the root cannot be read: %v; exit code %d", err, m.exitCode(t))
	}
	return m
}

func (m *mounted) at(name string) string { return filepath.Join(m.dir, name) }

// exitCode waits until the client exits.
func (m *mounted) exitCode(t *testing.T) int {
	t.Helper()
	select {
	case <-m.exited:
		return m.cmd.ProcessState.ExitCode()
	case <-time.After(exitTimeout):
		t.Fatal("the client did not exit")
		return -1
	}
}

// unmount fails the test if the client does not exit cleanly.
func (m *mounted) unmount(t *testing.T) {
	t.Helper()
	if err := unix.Unmount(m.dir, 0); err != nil {
		t.Fatal(err)
	}
	if code := m.exitCode(t); code != 0 {
		t.Errorf("exit code %d after umount, want 0", code)
	}
}

func want(t *testing.T, what string, got error, errno syscall.Errno) {
	t.Helper()
	if errno == 0 && got != nil || errno != 0 && !errors.Is(got, errno) {
		t.Errorf("%s: %v, want %v", what, got, errno)
	}
}

func overwrite(path, content string) error { return os.WriteFile(path, []byte(content), 0o600) }

func proc(pid int, file string) string { return fmt.Sprintf("/proc/%d/%s", pid, file) }
