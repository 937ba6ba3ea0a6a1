// Package image holds the container image, as make image builds it, against what users and nodes expect of it.
package image

import (
	"archive/tar"
	"bufio"
	"bytes"
	"compress/gzip"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/s3-csi/s3-csi-driver/pkg/host"
	"github.com/s3-csi/s3-csi-driver/tests/internal/dns"
	"github.com/s3-csi/s3-csi-driver/tests/internal/isolate"
	"github.com/s3-csi/s3-csi-driver/tests/internal/rig"
)

const (
	programDir   = "usr/local/bin"
	certificates = "etc/ssl/certs/ca-certificates.crt"
	// patience is how long a program may take to do what it does at once.
	patience = 30 * time.Second
)

var programs = []string{"s3-csi-driver", "s3-csi-fuse-starter", "s3-csi-fusermount", "s3-csi-helper", "s3-csi-mountpoint", "s3-csi-rclone"}

func TestMain(m *testing.M) { os.Exit(isolate.Main(m.Run)) }

// build makes the image and returns the directory of the archive.
func build(t *testing.T) string {
	t.Helper()
	bin := os.Getenv(rig.EnvBin)
	if bin == "" {
		t.Skipf("needs the built programs: run make test, or set %s to their directory", rig.EnvBin)
	}
	if _, err := exec.LookPath("buildah"); err != nil {
		t.Skip("needs buildah: make setup installs it")
	}
	dir := t.TempDir()
	for _, name := range programs {
		path := filepath.Join(bin, name)
		if _, err := os.Stat(path); err != nil {
			t.Skipf("needs %s: make builds it, where Rust is installed", path)
		}
		if err := os.Symlink(path, filepath.Join(dir, name)); err != nil {
			t.Fatal(err)
		}
	}
	cmd := exec.CommandContext(t.Context(), "../../hack/image", "registry.test/s3-csi-driver:v1.2.3", dir, runtime.GOARCH)
	cmd.Env = slices.DeleteFunc(os.Environ(), func(v string) bool { return strings.HasPrefix(v, "VERSION=") })
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	return filepath.Join(dir, "image", runtime.GOARCH+".tar")
}

// archive has the files of an OCI image layout (image-layout.md of the OCI image specification).
type archive map[string][]byte

func open(t *testing.T, path string) archive {
	t.Helper()
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	files := archive{}
	for r := tar.NewReader(f); ; {
		h, err := r.Next()
		if errors.Is(err, io.EOF) {
			return files
		}
		if err == nil {
			files[h.Name], err = io.ReadAll(r)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
}

func (a archive) read(t *testing.T, name string, to any) {
	t.Helper()
	if err := json.Unmarshal(a[name], to); err != nil {
		t.Fatalf("%s: %v", name, err)
	}
}

func blob(digest string) string { return "blobs/" + strings.Replace(digest, ":", "/", 1) }

type descriptor struct{ Digest string }

// manifest is the image's one manifest.
func (a archive) manifest(t *testing.T) (digest string, m struct {
	Config descriptor
	Layers []descriptor
}) {
	t.Helper()
	var index struct{ Manifests []descriptor }
	a.read(t, "index.json", &index)
	if len(index.Manifests) != 1 {
		t.Fatalf("the archive has %d images", len(index.Manifests))
	}
	a.read(t, blob(index.Manifests[0].Digest), &m)
	return index.Manifests[0].Digest, m
}

// unpack writes the layers' files to a directory and returns their modes.
func (a archive) unpack(t *testing.T, dir string) map[string]int64 {
	t.Helper()
	_, m := a.manifest(t)
	modes := map[string]int64{}
	for _, layer := range m.Layers {
		zipped, err := gzip.NewReader(bytes.NewReader(a[blob(layer.Digest)]))
		if err != nil {
			t.Fatal(err)
		}
		for r := tar.NewReader(zipped); ; {
			h, err := r.Next()
			if errors.Is(err, io.EOF) {
				break
			}
			if err != nil {
				t.Fatal(err)
			}
			path := filepath.Join(dir, h.Name)
			switch h.Typeflag {
			case tar.TypeDir:
				err = os.MkdirAll(path, 0o755)
			case tar.TypeReg:
				var content []byte
				if content, err = io.ReadAll(r); err == nil {
					err = os.WriteFile(path, content, 0o600)
				}
			default:
				t.Errorf("%s is no file and no directory", h.Name)
			}
			if err = errors.Join(err, os.Chmod(path, os.FileMode(h.Mode)&os.ModePerm)); err != nil {
				t.Fatal(err)
			}
			if h.Uid != 0 || h.Gid != 0 {
				t.Errorf("%s belongs to %d:%d", h.Name, h.Uid, h.Gid)
			}
			modes[strings.TrimSuffix(h.Name, "/")] = h.Mode & 0o7777
		}
	}
	return modes
}

func TestTheImage(t *testing.T) {
	path := build(t)
	a := open(t, path)
	t.Run("it can be published", func(t *testing.T) { testRelease(t, path) })
	t.Run("its layout", func(t *testing.T) { testLayout(t, a) })
	t.Run("programs need nothing of the host", func(t *testing.T) { testPrograms(t, a) })
	t.Run("clients resolve names without a C library", func(t *testing.T) { testNames(t, a) })
}

func testLayout(t *testing.T, a archive) {
	digest, m := a.manifest(t)
	if other, _ := open(t, build(t)).manifest(t); other != digest {
		t.Errorf("the same programs make another image: %s, %s", digest, other)
	}
	var config struct {
		Architecture, OS string
		Config           struct {
			Entrypoint []string
			User       string
			Labels     map[string]string
		}
	}
	a.read(t, blob(m.Config.Digest), &config)
	if config.Architecture != runtime.GOARCH || config.OS != "linux" || !slices.Equal(config.Config.Entrypoint, []string{"/" + programDir + "/s3-csi-driver"}) {
		t.Errorf("it is for %s/%s and starts %q", config.OS, config.Architecture, config.Config.Entrypoint)
	}
	const label = "org.opencontainers.image."
	if l := config.Config.Labels; l[label+"version"] != "v1.2.3" || l[label+"title"] != "s3-csi-driver" || l[label+"licenses"] == "" ||
		l[label+"revision"] == "" || l[label+"source"] == "" {
		t.Errorf("its labels are %q", l)
	}
	root := t.TempDir()
	modes := a.unpack(t, root)
	want := map[string]int64{"LICENSE": 0o644, certificates: 0o644, "tmp": 0o1777}
	for _, name := range programs {
		want[programDir+"/"+name] = 0o755
	}
	for name, mode := range want {
		if modes[name] != mode {
			t.Errorf("%s has the mode %o, want %o", name, modes[name], mode)
		}
		delete(modes, name)
	}
	for name, mode := range modes {
		if fi, err := os.Stat(filepath.Join(root, name)); err != nil || !fi.IsDir() || mode != 0o755 {
			t.Errorf("there is %s with the mode %o, too: %v", name, mode, err)
		}
	}
}

// empty makes a root that has the image's programs and certificates, /dev/null, /dev/urandom (which the AWS runtime does not do without),
// /proc and a resolv.conf, and no library or loader.
func empty(t *testing.T, a archive, resolv string) string {
	t.Helper()
	if os.Getuid() != 0 {
		t.Skip("needs root: the programs run in a root of their own")
	}
	root, err := os.MkdirTemp("", "root") //nolint:usetesting // other users cannot pass the directory of a t.TempDir
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := errors.Join(unix.Unmount(filepath.Join(root, "proc"), unix.MNT_DETACH), os.RemoveAll(root)); err != nil {
			t.Error(err)
		}
	})
	a.unpack(t, root)
	for _, dir := range []string{"dev", "proc"} {
		if err := os.Mkdir(filepath.Join(root, dir), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	for name, minor := range map[string]uint32{"null": 3, "urandom": 9} { // of the memory devices
		path := filepath.Join(root, "dev", name)
		if err := errors.Join(unix.Mknod(path, unix.S_IFCHR, int(unix.Mkdev(1, minor))), os.Chmod(path, 0o666)); err != nil {
			t.Fatal(err)
		}
	}
	err = errors.Join(os.Chmod(root, 0o755), unix.Mount("proc", filepath.Join(root, "proc"), "proc", 0, ""),
		os.WriteFile(filepath.Join(root, "etc/resolv.conf"), []byte(resolv), 0o644))
	if err != nil {
		t.Fatal(err)
	}
	return root
}

// command is a program in the root, as a user without rights.
func command(ctx context.Context, root, name string, args ...string) *exec.Cmd {
	cmd := exec.CommandContext(ctx, "/"+programDir+"/"+name, args...)
	cmd.Dir, cmd.Env = "/", []string{"AWS_EC2_METADATA_DISABLED=true"}
	cmd.SysProcAttr = &syscall.SysProcAttr{Chroot: root, Credential: &syscall.Credential{Uid: 65534, Gid: 65534}}
	return cmd
}

func testPrograms(t *testing.T, a archive) {
	root := empty(t, a, "")
	for _, name := range programs {
		ctx, cancel := context.WithTimeout(t.Context(), patience)
		out, err := command(ctx, root, name, "--version").CombinedOutput()
		cancel()
		if err != nil || len(out) == 0 {
			t.Errorf("%s: %v %s", name, err, out)
		}
	}
}

// Clients find their service by the name server of the host's resolv.conf.
func testNames(t *testing.T, a archive) {
	const name = "s3.service.test"
	for _, tc := range []struct {
		program string
		args    func(endpoint string) []string
	}{
		{"s3-csi-mountpoint", func(e string) []string {
			return []string{"--foreground", "--region=us-east-1", "--endpoint-url=" + e, "--force-path-style", "bucket", "/dev/fd/3"}
		}},
		{"s3-csi-rclone", func(e string) []string {
			return []string{"--fuse-fd=3", "--bucket=bucket", "--region=us-east-1", "--endpoint=" + e, "--path-style", "--cache-dir=/tmp"}
		}},
	} {
		t.Run(tc.program, func(t *testing.T) {
			names, err := dns.Start(map[string]netip.Addr{name + ".": netip.MustParseAddr("127.0.0.1")})
			if err != nil {
				t.Fatal(err)
			}
			defer names.Close()
			service, err := net.Listen("tcp4", "127.0.0.1:0")
			if err != nil {
				t.Fatal(err)
			}
			defer service.Close()
			root := empty(t, a, names.ResolvConf("test"))
			fuse, dir := mountFuse(t)
			ctx, cancel := context.WithTimeout(t.Context(), patience)
			defer cancel()
			port := service.Addr().(*net.TCPAddr).Port
			cmd := command(ctx, root, tc.program, tc.args(fmt.Sprintf("http://%s:%d", name, port))...)
			cmd.Env = append(cmd.Env, "AWS_ACCESS_KEY_ID=key", "AWS_SECRET_ACCESS_KEY=secret", "HOME=/tmp")
			cmd.ExtraFiles = []*os.File{fuse}
			var said bytes.Buffer
			cmd.Stdout, cmd.Stderr = &said, &said
			if err := cmd.Start(); err != nil {
				t.Fatal(err)
			}
			fuse.Close()                           // the connection ends with the client
			go func() { _, _ = os.ReadDir(dir) }() // a client may wait for its first user
			asked := make(chan string, 1)
			go func() {
				conn, err := service.Accept()
				if err != nil {
					close(asked)
					return
				}
				defer conn.Close()
				line, _ := bufio.NewReader(conn).ReadString('\n')
				asked <- line
			}()
			select {
			case line := <-asked:
				if !strings.Contains(line, "/bucket") {
					t.Errorf("it asks %q", line)
				}
			case <-ctx.Done():
				t.Errorf("it did not find its service; the name server was asked %d times", names.Asked(name+"."))
			}
			_ = cmd.Process.Kill()
			_ = cmd.Wait()
			if t.Failed() {
				t.Logf("it said: %s", said.String())
			}
		})
	}
}

func mountFuse(t *testing.T) (fuse *os.File, path string) {
	t.Helper()
	fuse, err := host.OpenFuse()
	if err != nil {
		t.Skip(err)
	}
	path = t.TempDir()
	dir, err := host.OpenDir(path)
	if err != nil {
		t.Fatal(err)
	}
	defer dir.Close()
	if err := host.MountFuse(fuse, dir, host.FuseMount{Source: "image-test", UID: 65534, GID: 65534}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := unix.Unmount(path, unix.MNT_DETACH); err != nil {
			t.Error(err)
		}
	})
	return fuse, path
}
