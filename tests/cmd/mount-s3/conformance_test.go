//go:build linux

package main

import (
	"bytes"
	"context"
	"crypto/rand"
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
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/aws/aws-sdk-go-v2/aws"
	awscredentials "github.com/aws/aws-sdk-go-v2/credentials"
	"github.com/aws/aws-sdk-go-v2/service/s3"
	"golang.org/x/sys/unix"

	"github.com/s3-csi/s3-csi-driver/pkg/client"
	"github.com/s3-csi/s3-csi-driver/pkg/host"
	"github.com/s3-csi/s3-csi-driver/pkg/volume"
	"github.com/s3-csi/s3-csi-driver/tests/isolate"
	"github.com/s3-csi/s3-csi-driver/tests/s3server"
)

// The tests in this file hold for the stand-in and for the program that it stands in for. MOUNT_S3=/path/to/mount-s3
// runs them against the real one.
const (
	envProgram = "MOUNT_S3"
	envStandIn = "S3_CSI_TEST_STANDIN"
	clientUID  = 64123
)

func TestMain(m *testing.M) {
	if os.Getenv(envStandIn) != "" {
		main()
		os.Exit(0)
	}
	os.Exit(isolate.Main(m.Run))
}

// program is a path that any user can run, and what its environment needs.
func program(t *testing.T) (path string, env []string) {
	t.Helper()
	if path := os.Getenv(envProgram); path != "" {
		return path, nil
	}
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	dir := openDir(t)
	path = filepath.Join(dir, "mount-s3")
	data, err := os.ReadFile(self)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, data, 0o755); err != nil {
		t.Fatal(err)
	}
	return path, []string{envStandIn + "=1"}
}

// openDir is a directory that every user can pass.
func openDir(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	if err := os.Chmod(filepath.Dir(dir), 0o755); err != nil {
		t.Fatal(err)
	}
	return dir
}

func TestTheCommandLineIsRefusedWithTheSameCodesAsTheRealOnes(t *testing.T) {
	path, env := program(t)
	tests := []struct {
		argv string
		code int
		want string // in the output
	}{
		{"", 2, "required"},
		{"bucket", 2, "required"},
		{"bucket d e", 2, "unexpected argument"},
		{"--bogus bucket d", 2, "unexpected argument '--bogus'"},
		{"--read-onl bucket d", 2, "unexpected argument"},
		{"--prefix=x bucket d", 2, "must end in '/'"},
		{"--region bucket d", 2, ""},
		{"--region -x bucket d", 2, ""},
		{"--debug --debug bucket d", 2, "multiple times"},
		{"--max-threads=1 --max-threads=2 bucket d", 2, "multiple times"},
		{"--debug=true bucket d", 2, "unexpected value"},
		{"--uid=0 bucket d", 2, "invalid value"},
		{"--gid=4294967296 bucket d", 2, "invalid value"},
		{"--max-threads=0 bucket d", 2, "invalid value"},
		{"--memory-target=511 bucket d", 2, "invalid value"},
		{"--dir-mode=0999 bucket d", 2, "octal"},
		{"--file-mode=1777 bucket d", 2, "permissions"},
		{"--metadata-ttl=soon bucket d", 2, "TTL"},
		{"--sse=foo bucket d", 2, "possible values"},
		{"--upload-checksums=md5 bucket d", 2, "possible values"},
		{"--sse-kms-key-id=arn:aws:kms:x:1:key/1 bucket d", 2, "--sse"},
		{"--sse=aws:kms --sse-kms-key-id=alias/x bucket d", 2, "ARN"},
		{"--max-cache-size=5 bucket d", 2, "--cache"},
		{"--cache=/tmp --max-cache-size=x bucket d", 2, "invalid value"},
		{"--cache=/tmp --max-cache-size=-1 bucket d", 2, ""},
		{"--cache= bucket d", 2, "a value is required"},
		{"--otlp-export-interval=5 bucket d", 2, "--otlp-endpoint"},
		{"--ca-bundle= bucket d", 2, "a value is required"},
		{"--part-size=9000000 --read-part-size=9000000 bucket d", 2, "cannot be used with"},
		{"--allow-root --allow-other bucket d", 2, "cannot be used with"},
		{"--no-log --debug bucket d", 2, "cannot be used with"},
		{"-fz bucket d", 2, "unexpected argument '-z'"},
		{"ab d", 2, "3-255"},
		{"buck/et d", 2, "valid name"},
		{"s3://bucket/x d", 2, "must end in '/'"},
		{"--foreground --prefix=a/ s3://bucket/x/ /dev/fd/3", 1, "not allowed with S3 URI"},
		{"--foreground --read-only bucket /dev/fd/3", 1, "--read-only"},
		{"--foreground --auto-unmount bucket /dev/fd/3", 1, "--auto-unmount"},
		{"--foreground --sse=AES256 --sse-kms-key-id=arn:aws:kms:x:1:key/1 bucket /dev/fd/3", 1, ""},
		{"--foreground -- bucket /dev/fd/97", 1, "not a valid file descriptor"},
		{"--foreground bucket /dev/fd/3", 1, "/dev/fuse file descriptor but got /dev/null"},
		{"-fd bucket /no/such/directory", 1, ""},
		{"--help", 0, "Usage: mount-s3"},
		{"--version", 0, "1.24"},
	}
	for _, tt := range tests {
		t.Run(tt.argv, func(t *testing.T) {
			device := os.DevNull
			if strings.HasPrefix(tt.want, "--") { // it looks at the descriptor first
				if device = host.FuseDevice; os.Getuid() != 0 {
					t.Skip("opening /dev/fuse needs root")
				}
			}
			file, err := os.OpenFile(device, os.O_RDWR, 0)
			if err != nil {
				t.Skipf("there is no %s here: %v", device, err)
			}
			defer file.Close()
			ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
			defer cancel()
			cmd := exec.CommandContext(ctx, path, strings.Fields(tt.argv)...)
			cmd.Env = append([]string{"AWS_EC2_METADATA_DISABLED=true"}, env...)
			cmd.ExtraFiles = []*os.File{file}
			out, _ := cmd.CombinedOutput()
			if code := cmd.ProcessState.ExitCode(); code != tt.code || !strings.Contains(string(out), tt.want) {
				t.Errorf("exit code %d, want %d and %q in\n%s", code, tt.code, tt.want, out)
			}
		})
	}
}

// bench is a server with a bucket, and a credentials endpoint as a helper serves it.
type bench struct {
	server *s3server.Server
	s3     *s3.Client
	tokens *httptest.Server
	asked  atomic.Int32
}

const authorization = "the-token"

func newBench(t *testing.T) *bench {
	t.Helper()
	if os.Getuid() != 0 {
		t.Skip("mounting needs root")
	}
	if _, err := os.Stat(host.FuseDevice); err != nil {
		t.Skip("there is no /dev/fuse here")
	}
	server, err := s3server.Start(t.Context(), s3server.Options{Dir: t.TempDir()})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = server.Stop() })
	keys := server.Keys()
	b := &bench{server: server, s3: s3.New(s3.Options{
		BaseEndpoint: aws.String(server.Endpoint()), Region: server.Region(), UsePathStyle: true,
		Credentials: awscredentials.NewStaticCredentialsProvider(keys.AccessKeyID, keys.SecretAccessKey, ""),
	})}
	b.tokens = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Header.Get("Authorization") != authorization {
			http.Error(w, "wrong token", http.StatusForbidden)
			return
		}
		b.asked.Add(1)
		_ = json.NewEncoder(w).Encode(map[string]string{
			"AccessKeyId": keys.AccessKeyID, "SecretAccessKey": keys.SecretAccessKey, "Token": "",
			"Expiration": time.Now().Add(15 * time.Minute).UTC().Format(time.RFC3339),
		})
	}))
	t.Cleanup(b.tokens.Close)
	if _, err := b.s3.CreateBucket(t.Context(), &s3.CreateBucketInput{Bucket: aws.String("bucket")}); err != nil {
		t.Fatal(err)
	}
	return b
}

func (b *bench) put(t *testing.T, key, content string) {
	t.Helper()
	if _, err := b.s3.PutObject(t.Context(), &s3.PutObjectInput{Bucket: aws.String("bucket"), Key: &key, Body: strings.NewReader(content)}); err != nil {
		t.Fatal(err)
	}
}

// get is an object's content; ok is false when there is none.
func (b *bench) get(t *testing.T, key string) (content []byte, ok bool) {
	t.Helper()
	out, err := b.s3.GetObject(t.Context(), &s3.GetObjectInput{Bucket: aws.String("bucket"), Key: &key})
	if absent(err) {
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

// mounted is a client that was started as the driver starts it.
type mounted struct {
	dir    string
	cmd    *exec.Cmd
	output bytes.Buffer
	ended  chan struct{}
	took   time.Duration // from start until the root could be read
}

func (b *bench) mount(t *testing.T, change func(*client.Invocation), options ...string) *mounted {
	t.Helper()
	path, env := program(t)
	c, err := client.Get("mountpoint-s3")
	if err != nil {
		t.Fatal(err)
	}
	in := client.Invocation{
		Binary: path, Bucket: "bucket", Prefix: "volume/", Region: b.server.Region(), Endpoint: b.server.Endpoint(), PathStyle: true,
		UID: 1234, GID: 5678, DirMode: 0o750, FileMode: 0o640, UserAgent: "s3-csi-driver/test", StateDir: openDir(t), CacheDir: openDir(t),
	}
	if in.Options, err = volume.ParseMountOptions(options, "mountOptions"); err != nil {
		t.Fatal(err)
	}
	if err := c.Check(in.Options, "mountOptions"); err != nil {
		t.Fatal(err)
	}
	if change != nil {
		change(&in)
	}
	for _, dir := range []string{in.StateDir, in.CacheDir} {
		if err := os.Chown(dir, clientUID, clientUID); err != nil {
			t.Fatal(err)
		}
	}
	command := c.Command(in)

	m := &mounted{dir: t.TempDir(), ended: make(chan struct{})}
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
	t.Cleanup(func() {
		if m.cmd.Process != nil {
			_ = m.cmd.Process.Kill()
			<-m.ended
		}
		_ = unix.Unmount(m.dir, unix.MNT_DETACH)
		if t.Failed() {
			t.Logf("output:\n%s", m.output.String())
		}
	})

	m.cmd = &exec.Cmd{Path: command.Argv[0], Args: command.Argv, ExtraFiles: []*os.File{fuse}, Stdout: &m.output, Stderr: &m.output}
	m.cmd.Env = append(append(command.Env, env...),
		"AWS_CONTAINER_CREDENTIALS_FULL_URI="+b.tokens.URL+"/credentials", "AWS_CONTAINER_AUTHORIZATION_TOKEN="+authorization)
	m.cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: clientUID, Gid: clientUID}}
	started := time.Now()
	if err := m.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	fuse.Close()
	go func() {
		defer close(m.ended)
		_ = m.cmd.Wait()
	}()
	if _, err := os.ReadDir(m.dir); err == nil {
		m.took = time.Since(started)
	}
	return m
}

// exit waits for the client's end.
func (m *mounted) exit(t *testing.T) int {
	t.Helper()
	select {
	case <-m.ended:
		return m.cmd.ProcessState.ExitCode()
	case <-time.After(90 * time.Second):
		t.Fatal("the client did not end")
		return -1
	}
}

func (m *mounted) unmount(t *testing.T) {
	t.Helper()
	if err := unix.Unmount(m.dir, 0); err != nil {
		t.Fatal(err)
	}
	if code := m.exit(t); code != 0 {
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

func TestAMountDoesWhatTheDriverNeeds(t *testing.T) {
	b := newBench(t)
	b.put(t, "volume/there/old.txt", "old")
	b.put(t, "elsewhere/x", "not ours")
	m := b.mount(t, nil)
	at := func(name string) string { return filepath.Join(m.dir, name) }
	if m.took == 0 {
		t.Fatalf("the root cannot be read: exit code %d", m.exit(t))
	}
	t.Logf("root read after %v", m.took)
	if status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", m.cmd.Process.Pid)); err == nil {
		for line := range strings.Lines(string(status)) {
			if strings.HasPrefix(line, "VmRSS") || strings.HasPrefix(line, "RssAnon") {
				t.Log(strings.TrimSpace(line))
			}
		}
	}

	// Places and owners.
	names := func(dir string) []string {
		entries, err := os.ReadDir(dir)
		if err != nil {
			t.Fatal(err)
		}
		var names []string
		for _, e := range entries {
			names = append(names, e.Name())
		}
		return names
	}
	if got := names(m.dir); !slices.Equal(got, []string{"there"}) {
		t.Errorf("the root holds %q", got)
	}
	var st unix.Stat_t
	if err := unix.Stat(at("there/old.txt"), &st); err != nil || st.Uid != 1234 || st.Gid != 5678 || st.Mode != unix.S_IFREG|0o640 || st.Size != 3 {
		t.Errorf("a file is %o %d:%d, %d bytes, %v", st.Mode, st.Uid, st.Gid, st.Size, err)
	}
	if err := unix.Stat(at("there"), &st); err != nil || st.Uid != 1234 || st.Mode != unix.S_IFDIR|0o750 {
		t.Errorf("a directory is %o %d:%d, %v", st.Mode, st.Uid, st.Gid, err)
	}
	_, err := os.Stat(at("missing"))
	want(t, "stat of what is missing", err, syscall.ENOENT)

	// New files are stored when close returns, large ones too.
	large := make([]byte, 20<<20+123)
	_, _ = rand.Read(large)
	for name, content := range map[string][]byte{"new.txt": []byte("new"), "large": large, "empty": nil} {
		want(t, "write of "+name, os.WriteFile(at(name), content, 0o600), 0)
		got, ok := b.get(t, "volume/"+name)
		for end := time.Now().Add(5 * time.Second); name == "empty" && !ok && time.Now().Before(end); got, ok = b.get(t, "volume/"+name) {
			time.Sleep(10 * time.Millisecond) // stored after the close
		}
		if !ok || !bytes.Equal(got, content) {
			t.Errorf("%s is stored with %d bytes, %v", name, len(got), ok)
		}
		got, err := os.ReadFile(at(name))
		if err != nil || !bytes.Equal(got, content) {
			t.Errorf("%s is read with %d bytes, %v", name, len(got), err)
		}
	}
	f, err := os.Open(at("large"))
	if err != nil {
		t.Fatal(err)
	}
	part := make([]byte, 1000)
	if _, err := f.ReadAt(part, 15<<20); err != nil || !bytes.Equal(part, large[15<<20:15<<20+1000]) {
		t.Errorf("a read in the middle is wrong: %v", err)
	}
	want(t, "replacing a file that is being read", overwrite(at("large"), "x"), syscall.EPERM)
	f.Close()

	// Replacing and removing are on by default.
	want(t, "overwrite", overwrite(at("new.txt"), "newer"), 0)
	if got, _ := b.get(t, "volume/new.txt"); string(got) != "newer" {
		t.Errorf("the replaced object holds %q", got)
	}
	want(t, "remove", os.Remove(at("there/old.txt")), 0)
	if _, ok := b.get(t, "volume/there/old.txt"); ok {
		t.Error("the removed object is there")
	}

	// One writer, with nothing to see before the end.
	w, err := os.OpenFile(at("slow"), os.O_CREATE|os.O_WRONLY|os.O_EXCL, 0o600)
	if err != nil {
		t.Fatal(err)
	}
	_, err = w.WriteString("12345")
	want(t, "write", err, 0)
	_, err = os.Open(at("slow"))
	want(t, "open of a file that is being written", err, syscall.EPERM)
	want(t, "removing it", os.Remove(at("slow")), syscall.EPERM)
	if _, ok := b.get(t, "volume/slow"); ok {
		t.Error("the object is there before the close")
	}
	want(t, "close", w.Close(), 0)

	// A write out of order is the end of the file.
	if w, err = os.Create(at("gap")); err != nil {
		t.Fatal(err)
	}
	_, err = w.WriteString("12345")
	want(t, "write", err, 0)
	_, err = w.WriteAt([]byte("x"), 100)
	want(t, "write with a gap", err, syscall.EINVAL)
	_, err = os.Stat(at("gap"))
	want(t, "stat after it", err, syscall.ENOENT)
	want(t, "close after it", w.Close(), syscall.EINVAL)

	// What S3 cannot do.
	_, err = os.OpenFile(at("new.txt"), os.O_WRONLY|os.O_APPEND, 0)
	want(t, "append", err, syscall.EPERM)
	want(t, "symlink", os.Symlink("a", at("link")), syscall.EPERM)
	want(t, "chmod", os.Chmod(at("new.txt"), 0o600), syscall.EPERM)

	// Directories are local until something is in them.
	want(t, "mkdir", os.Mkdir(at("d"), 0o700), 0)
	want(t, "mkdir again", os.Mkdir(at("d"), 0o700), syscall.EEXIST)
	want(t, "rmdir", os.Remove(at("d")), 0)
	want(t, "mkdir", os.MkdirAll(at("d/e"), 0o700), 0)
	want(t, "write below it", overwrite(at("d/e/f"), "f"), 0)
	want(t, "rmdir of one with a file", unix.Rmdir(at("d/e")), syscall.EPERM)
	if _, ok := b.get(t, "volume/d/e/f"); !ok {
		t.Error("the file below a new directory is not stored")
	}
	if got := names(m.dir); !slices.Equal(got, []string{"d", "empty", "large", "new.txt", "slow"}) {
		t.Errorf("the root holds %q", got)
	}

	// A shell opens what another process writes; the file is stored when the last of them closes it.
	if out, err := exec.Command("sh", "-c", "(echo one; echo two) > "+at("shell")).CombinedOutput(); err != nil {
		t.Errorf("sh: %v: %s", err, out)
	}
	if got, err := os.ReadFile(at("shell")); err != nil || string(got) != "one\ntwo\n" {
		t.Errorf("the shell's file holds %q, %v", got, err)
	}

	m.unmount(t)
	if ready := "prefix volume/ of bucket bucket is mounted at /dev/fd/3\n"; !strings.Contains(m.output.String(), ready) {
		t.Errorf("the output does not hold %q", ready)
	}
	if b.asked.Load() == 0 {
		t.Error("the credentials endpoint was not asked")
	}
	if got, _ := b.get(t, "elsewhere/x"); string(got) != "not ours" {
		t.Error("something outside of the prefix changed")
	}
	t.Logf("%d questions to the credentials endpoint", b.asked.Load())
}

func TestOptionsTurnChangesOff(t *testing.T) {
	b := newBench(t)
	b.put(t, "volume/f", "f")
	m := b.mount(t, nil, "allow-delete=false", "--allow-overwrite=false", "--metadata-ttl 1", "memory-target=512", "max-cache-size=100")
	want(t, "remove", os.Remove(filepath.Join(m.dir, "f")), syscall.EPERM)
	want(t, "overwrite", overwrite(filepath.Join(m.dir, "f"), "x"), syscall.EPERM)
	want(t, "write of a new file", overwrite(filepath.Join(m.dir, "g"), "g"), 0)
	m.unmount(t)
	if got, _ := b.get(t, "volume/f"); string(got) != "f" {
		t.Errorf("the object holds %q", got)
	}
}

func TestACacheIsInItsDirectoryWhileTheMountLasts(t *testing.T) {
	b := newBench(t)
	b.put(t, "volume/f", strings.Repeat("f", 3<<20))
	var dir string
	m := b.mount(t, func(in *client.Invocation) {
		in.Cache, in.CacheSize, in.MemoryLimit = true, 64<<20, 640<<20
		dir = filepath.Join(in.CacheDir, "mountpoint-cache")
		// What a process that was killed has left is none of the next one's.
		if err := os.Mkdir(dir, 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(dir, "left"), nil, 0o600); err != nil {
			t.Fatal(err)
		}
		if err := os.Chown(dir, clientUID, clientUID); err != nil {
			t.Fatal(err)
		}
	})
	for range 2 {
		if got, err := os.ReadFile(filepath.Join(m.dir, "f")); err != nil || len(got) != 3<<20 {
			t.Errorf("read %d bytes, %v", len(got), err)
		}
	}
	if fi, err := os.Stat(dir); err != nil || fi.Mode().Perm() != 0o700 {
		t.Errorf("the cache's directory is %v, %v", fi, err)
	}
	_, err := os.Stat(filepath.Join(dir, "left"))
	want(t, "what was left in the cache", err, syscall.ENOENT)
	// Names are believed for a minute.
	_, err = os.Stat(filepath.Join(m.dir, "g"))
	want(t, "stat of what is missing", err, syscall.ENOENT)
	want(t, "write", overwrite(filepath.Join(m.dir, "g"), "g"), 0)
	m.unmount(t)
	_, err = os.Stat(dir)
	want(t, "the cache after the mount", err, syscall.ENOENT)
}

func TestAReadOnlyMountReads(t *testing.T) {
	b := newBench(t)
	b.put(t, "volume/f", "f")
	m := b.mount(t, func(in *client.Invocation) { in.ReadOnly = true })
	if got, err := os.ReadFile(filepath.Join(m.dir, "f")); string(got) != "f" {
		t.Errorf("read %q, %v", got, err)
	}
	want(t, "write", overwrite(filepath.Join(m.dir, "g"), "g"), syscall.EROFS)
	m.unmount(t)
}

func TestAWholeBucketIsMounted(t *testing.T) {
	b := newBench(t)
	b.put(t, "a/b", "b")
	m := b.mount(t, func(in *client.Invocation) { in.Prefix = "" })
	if got, err := os.ReadFile(filepath.Join(m.dir, "a/b")); string(got) != "b" {
		t.Errorf("read %q, %v", got, err)
	}
	m.unmount(t)
	if ready := "bucket bucket is mounted at /dev/fd/3\n"; !strings.Contains(m.output.String(), ready) {
		t.Errorf("the output does not hold %q", ready)
	}
}

func TestAClientThatCannotServeSaysWhyAndEnds(t *testing.T) {
	b := newBench(t)
	file := filepath.Join(openDir(t), "file")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	for name, tt := range map[string]struct {
		change func(*client.Invocation)
		want   string
	}{
		"no such bucket":     {func(in *client.Invocation) { in.Bucket = "no-such-bucket" }, "initial ListObjectsV2 failed"},
		"nobody listens":     {func(in *client.Invocation) { in.Endpoint = "http://127.0.0.1:1" }, "initial ListObjectsV2 failed"},
		"no such CA bundle":  {func(in *client.Invocation) { in.Endpoint = "https://127.0.0.1:1"; in.CAFile = "/no/such/file" }, "S3 client"},
		"no cache directory": {func(in *client.Invocation) { in.CacheDir, in.Cache = file, true }, "failed to create cache directory"},
	} {
		t.Run(name, func(t *testing.T) {
			started := time.Now()
			m := b.mount(t, tt.change)
			if code := m.exit(t); code != 1 || !strings.Contains(m.output.String(), tt.want) {
				t.Errorf("exit code %d, want 1 and %q", code, tt.want)
			}
			t.Logf("ended after %v", time.Since(started))
		})
	}
}

// The program says that it unmounts, but a descriptor gives it nothing to unmount.
func TestSIGTERMDoesNotEndAClientBeforeItsMount(t *testing.T) {
	b := newBench(t)
	b.put(t, "volume/f", "f")
	m := b.mount(t, nil)
	if err := m.cmd.Process.Signal(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	select {
	case <-m.ended:
		t.Fatalf("it ended with code %d", m.cmd.ProcessState.ExitCode())
	case <-time.After(2 * time.Second):
	}
	want(t, "write after SIGTERM", overwrite(filepath.Join(m.dir, "g"), "g"), 0)
	if got, err := os.ReadFile(filepath.Join(m.dir, "f")); string(got) != "f" {
		t.Errorf("read %q, %v", got, err)
	}
	if got, _ := b.get(t, "volume/g"); string(got) != "g" {
		t.Errorf("the object holds %q", got)
	}
	m.unmount(t)
}
