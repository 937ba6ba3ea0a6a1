package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/aws/aws-sdk-go-v2/aws"
	"github.com/aws/aws-sdk-go-v2/credentials"
	"github.com/aws/aws-sdk-go-v2/service/s3"
	"golang.org/x/sys/unix"
)

// The program runs as this unprivileged user.
const clientUID = 65534

const (
	testBucket = "test-bucket"
	rootKey    = "AKIAROOTROOTROOTROOT"
	rootSecret = "root-secret-root-secret-root-secret"
)

// parts are the programs of the mount tests, which are built once.
type parts struct {
	dir      string // reachable by every uid
	program  string
	s3server string
	skip     string // why mount tests cannot run
}

var built parts

func TestMain(m *testing.M) {
	code := func() int {
		dir, err := os.MkdirTemp("", "s3-csi-rclone")
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			return 1
		}
		defer os.RemoveAll(dir)
		if err := os.Chmod(dir, 0o755); err != nil {
			fmt.Fprintln(os.Stderr, err)
			return 1
		}
		built = build(dir)
		return m.Run()
	}()
	os.Exit(code)
}

func build(dir string) parts {
	p := parts{dir: dir, program: filepath.Join(dir, "s3-csi-rclone"), s3server: os.Getenv("S3SERVER_BIN")}
	if os.Geteuid() != 0 {
		p.skip = "mounting needs root"
		return p
	}
	if f, err := os.OpenFile("/dev/fuse", os.O_RDWR, 0); err != nil {
		p.skip = "mounting needs /dev/fuse: " + err.Error()
		return p
	} else {
		f.Close()
	}
	cmd := exec.Command("go", "build", "-trimpath", "-o", p.program, ".")
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := cmd.CombinedOutput(); err != nil {
		p.skip = fmt.Sprintf("the program does not build: %v\n%s", err, out)
		return p
	}
	if p.s3server == "" {
		p.s3server = filepath.Join(dir, "s3server")
		cmd := exec.Command("go", "build", "-trimpath", "-o", p.s3server, "./cmd/s3server")
		cmd.Dir = filepath.Join("..", "..", "tests")
		if out, err := cmd.CombinedOutput(); err != nil {
			p.skip = fmt.Sprintf("the S3 server in tests/ does not build: %v\n%s", err, out)
		}
	}
	return p
}

// s3d is an S3 server in a separate process.
type s3d struct {
	t        *testing.T
	endpoint string
	in       io.Writer
	out      *bufio.Reader
}

func startS3(t *testing.T) *s3d {
	t.Helper()
	if built.skip != "" {
		t.Skip(built.skip)
	}
	cmd := exec.Command(built.s3server, "--control", "--dir", t.TempDir())
	cmd.Env = append(os.Environ(), "S3SERVER_ROOT_ACCESS_KEY="+rootKey, "S3SERVER_ROOT_SECRET_KEY="+rootSecret)
	var said bytes.Buffer
	cmd.Stderr = &said
	in, err := cmd.StdinPipe()
	check(t, err)
	stdout, err := cmd.StdoutPipe()
	check(t, err)
	check(t, cmd.Start())
	t.Cleanup(func() {
		in.Close()
		_ = cmd.Wait()
	})
	s := &s3d{t: t, in: in, out: bufio.NewReader(stdout)}
	line, err := s.out.ReadString('\n')
	if err != nil {
		in.Close()
		t.Fatalf("the S3 server does not start: %v\n%s", errors.Join(err, cmd.Wait()), said.String())
	}
	s.endpoint = strings.TrimSpace(line)
	_, err = s.client().CreateBucket(t.Context(), &s3.CreateBucketInput{Bucket: aws.String(testBucket)})
	check(t, err)
	return s
}

// control sends the server a request for a user or a policy.
func (s *s3d) control(op, name, policy string) keys {
	s.t.Helper()
	check(s.t, json.NewEncoder(s.in).Encode(map[string]string{"op": op, "name": name, "policy": policy}))
	line, err := s.out.ReadBytes('\n')
	check(s.t, err)
	var rep struct{ AccessKeyID, SecretAccessKey, Error string }
	check(s.t, json.Unmarshal(line, &rep))
	if rep.Error != "" {
		s.t.Fatal(rep.Error)
	}
	return keys{rep.AccessKeyID, rep.SecretAccessKey}
}

func (s *s3d) client() *s3.Client {
	return s3.New(s3.Options{
		BaseEndpoint: aws.String(s.endpoint), Region: "us-east-1", UsePathStyle: true,
		Credentials: credentials.NewStaticCredentialsProvider(rootKey, rootSecret, ""),
	})
}

func (s *s3d) put(key, body string) {
	s.t.Helper()
	_, err := s.client().PutObject(s.t.Context(), &s3.PutObjectInput{Bucket: aws.String(testBucket), Key: &key, Body: strings.NewReader(body)})
	check(s.t, err)
}

// get returns an object's content; ok is false if there is no object.
func (s *s3d) get(key string) (body []byte, ok bool) {
	s.t.Helper()
	out, err := s.client().GetObject(context.Background(), &s3.GetObjectInput{Bucket: aws.String(testBucket), Key: &key})
	if err != nil {
		if strings.Contains(err.Error(), "NoSuchKey") {
			return nil, false
		}
		s.t.Fatal(err)
	}
	defer out.Body.Close()
	body, err = io.ReadAll(out.Body)
	check(s.t, err)
	return body, true
}

func (s *s3d) want(key string, body []byte) {
	s.t.Helper()
	got, ok := s.get(key)
	if !ok {
		s.t.Errorf("%s is not stored", key)
	} else if !bytes.Equal(got, body) {
		s.t.Errorf("%s holds %d bytes that differ from the %d written", key, len(got), len(body))
	}
}

// keys are credentials from a container-credentials endpoint, as in production.
type keys struct{ id, secret string }

func credentialsServer(t *testing.T, k keys) *httptest.Server {
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Header.Get("Authorization") != "the-token" {
			http.Error(w, "wrong token", http.StatusForbidden)
			return
		}
		_ = json.NewEncoder(w).Encode(map[string]string{
			"AccessKeyId": k.id, "SecretAccessKey": k.secret, "Token": "",
			"Expiration": time.Now().Add(15 * time.Minute).UTC().Format(time.RFC3339),
		})
	}))
	t.Cleanup(srv.Close)
	return srv
}

// mount is a running program and its file system.
type mount struct {
	t     *testing.T
	dir   string
	cache string
	cmd   *exec.Cmd
	done  chan struct{}
	start time.Time
	ready time.Duration

	mu        sync.Mutex
	queue     []queueStatus
	conflicts int64
	flushes   []flushStatus
	stderr    bytes.Buffer
}

type mountOptions struct {
	s3     *s3d
	url    string // "" is the server's
	keys   keys   // zero: root's
	prefix string
	cache  string // "" is a new one
	args   []string
	env    []string
}

func startMount(t *testing.T, o mountOptions) *mount {
	t.Helper()
	dir, err := os.MkdirTemp(built.dir, "mount") //nolint:usetesting // its parents let other users pass
	check(t, err)
	check(t, os.Chmod(dir, 0o755))
	m := &mount{t: t, dir: filepath.Join(dir, "mnt"), cache: o.cache, done: make(chan struct{})}
	check(t, os.Mkdir(m.dir, 0o755))
	if m.cache == "" {
		m.cache = filepath.Join(dir, "cache")
		check(t, os.Mkdir(m.cache, 0o700))
		check(t, os.Chown(m.cache, clientUID, clientUID))
	}
	if o.keys == (keys{}) {
		o.keys = keys{rootKey, rootSecret}
	}
	if o.url == "" {
		o.url = o.s3.endpoint
	}
	fuseFile, err := os.OpenFile("/dev/fuse", os.O_RDWR, 0)
	check(t, err)
	data := fmt.Sprintf("fd=%d,rootmode=40000,user_id=%d,group_id=%d,allow_other,default_permissions,max_read=1048576", fuseFile.Fd(), clientUID, clientUID)
	check(t, unix.Mount("s3csi:test", m.dir, "fuse", unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOATIME, data))

	m.cmd = exec.Command(built.program, append([]string{
		"--bucket=" + testBucket, "--prefix=" + o.prefix, "--endpoint=" + o.url, "--region=us-east-1", "--path-style",
		"--cache-dir=" + m.cache, "--fuse-fd=3", "--uid=1001", "--gid=1002", "--dir-mode=0750", "--file-mode=0640", "--low-level-retries=1",
	}, o.args...)...)
	m.cmd.ExtraFiles = []*os.File{fuseFile}
	m.cmd.Env = append([]string{
		"AWS_CONTAINER_CREDENTIALS_FULL_URI=" + credentialsServer(t, o.keys).URL, "AWS_CONTAINER_AUTHORIZATION_TOKEN=the-token",
		"AWS_CONFIG_FILE=/dev/null", "AWS_SHARED_CREDENTIALS_FILE=/dev/null", "AWS_EC2_METADATA_DISABLED=true",
		"RCLONE_CONFIG=/dev/null", "HOME=/nonexistent",
	}, o.env...)
	m.cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: clientUID, Gid: clientUID, NoSetGroups: false}}
	m.cmd.Stderr = &lockedWriter{m: m}
	stdout, err := m.cmd.StdoutPipe()
	check(t, err)
	m.start = time.Now()
	check(t, m.cmd.Start())
	check(t, fuseFile.Close()) // otherwise the connection outlives the program
	ready := make(chan struct{})
	read := make(chan struct{})
	go func() {
		defer close(read)
		m.read(stdout, ready)
	}()
	go func() {
		<-read
		_ = m.cmd.Wait()
		close(m.done)
	}()
	t.Cleanup(m.cleanup)
	select {
	case <-ready:
	case <-m.done:
		t.Fatalf("the program ended: %v\n%s", m.cmd.ProcessState, m.log())
	case <-time.After(30 * time.Second):
		t.Fatalf("the program is not ready\n%s", m.log())
	}
	return m
}

type lockedWriter struct{ m *mount }

func (w *lockedWriter) Write(p []byte) (int, error) {
	w.m.mu.Lock()
	defer w.m.mu.Unlock()
	return w.m.stderr.Write(p)
}

func (m *mount) read(stdout io.Reader, ready chan<- struct{}) {
	lines := bufio.NewScanner(stdout)
	for lines.Scan() {
		line := lines.Text()
		if line == readyLine {
			m.ready = time.Since(m.start)
			close(ready)
			continue
		}
		if rest, ok := strings.CutPrefix(line, conflictsPrefix); ok {
			var c conflictStatus
			if err := json.Unmarshal([]byte(rest), &c); err != nil {
				m.t.Errorf("conflicts: %q: %v", line, err)
			}
			m.mu.Lock()
			m.conflicts = c.Files
			m.mu.Unlock()
			continue
		}
		if rest, ok := strings.CutPrefix(line, flushedPrefix); ok {
			var f flushStatus
			if err := json.Unmarshal([]byte(rest), &f); err != nil {
				m.t.Errorf("flush: %q: %v", line, err)
			}
			m.mu.Lock()
			m.flushes = append(m.flushes, f)
			m.mu.Unlock()
			continue
		}
		rest, ok := strings.CutPrefix(line, queuePrefix)
		var q queueStatus
		if !ok || json.Unmarshal([]byte(rest), &q) != nil {
			m.t.Errorf("unexpected line on standard output: %q", line)
			continue
		}
		m.mu.Lock()
		m.queue = append(m.queue, q)
		m.mu.Unlock()
	}
}

func (m *mount) log() string {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.stderr.String()
}

func (m *mount) reports() []queueStatus {
	m.mu.Lock()
	defer m.mu.Unlock()
	return append([]queueStatus(nil), m.queue...)
}

// flush asks the program for a flush and returns its report.
func (m *mount) flush() flushStatus {
	m.t.Helper()
	reported := func() []flushStatus {
		m.mu.Lock()
		defer m.mu.Unlock()
		return slices.Clone(m.flushes)
	}
	before := len(reported())
	check(m.t, m.cmd.Process.Signal(syscall.SIGTERM))
	for end := time.Now().Add(30 * time.Second); time.Now().Before(end); time.Sleep(10 * time.Millisecond) {
		if all := reported(); len(all) > before {
			return all[before]
		}
	}
	m.t.Fatal("no flush is reported")
	return flushStatus{}
}

// conflictCount returns the number of files that the program reports as quarantined.
func (m *mount) conflictCount() int64 {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.conflicts
}

func (m *mount) cleanup() {
	_ = unix.Unmount(m.dir, unix.MNT_DETACH)
	select {
	case <-m.done:
	case <-time.After(10 * time.Second):
		_ = m.cmd.Process.Kill()
		<-m.done
	}
	if m.t.Failed() {
		m.t.Logf("%s's log:\n%s", m.dir, m.log())
	}
}

// unmount calls umount(2), and retries while the kernel uses the file system.
func (m *mount) unmount() {
	m.t.Helper()
	var err error
	for range 100 {
		if err = unix.Unmount(m.dir, 0); !errors.Is(err, unix.EBUSY) {
			break
		}
		time.Sleep(20 * time.Millisecond)
	}
	check(m.t, err)
}

// kill kills the program and unmounts its file system.
func (m *mount) kill() {
	m.t.Helper()
	check(m.t, m.cmd.Process.Kill())
	<-m.done
	_ = unix.Unmount(m.dir, unix.MNT_DETACH)
}

// ended waits for the exit and reports whether the exit code was 0.
func (m *mount) ended(within time.Duration) (exited, ok bool) {
	select {
	case <-m.done:
		return true, m.cmd.ProcessState.Success()
	case <-time.After(within):
		return false, false
	}
}

// finish unmounts, and fails the test unless the program exits with 0.
func (m *mount) finish() {
	m.t.Helper()
	m.unmount()
	if exited, ok := m.ended(60 * time.Second); !exited || !ok {
		m.t.Fatalf("after the unmount: ended %v, with 0 %v", exited, ok)
	}
}

func (m *mount) path(name string) string { return filepath.Join(m.dir, name) }

func check(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// payload returns non-repeating data.
func payload(n int, seed byte) []byte {
	b := make([]byte, n)
	x := uint32(seed) + 1
	for i := range b {
		x = x*1664525 + 1013904223
		b[i] = byte(x >> 24)
	}
	return b
}
