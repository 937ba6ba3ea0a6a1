package podclient

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"github.com/s3-csi/s3-csi-driver/tests/internal/fuseclients"
	"github.com/s3-csi/s3-csi-driver/tests/internal/output"
	"github.com/s3-csi/s3-csi-driver/tests/internal/rig"
	"github.com/s3-csi/s3-csi-driver/tests/internal/rig/rigtest"
)

// sshUID is the user daemon of the package base-passwd.
const sshUID = 1

// foreign is a FUSE client in a pod: its command for a mount point, and its service.
type foreign struct {
	env     []string
	command func(mountpoint string) []string
	stored  func(name string) (string, error)
}

// Every FUSE client of the documentation's table serves a pod, in the ways that it has there.
func TestForeignClients(t *testing.T) {
	t.Parallel()
	e := start(t)
	t.Run("clients", func(t *testing.T) { everyForeignClient(t, e) })
	e.AwaitNothingLeft(t, eventually)
}

// foreignClient is a client and its way in the documentation's table.
type foreignClient struct {
	fuseclients.Case
	of func(t testing.TB, e *env) foreign
}

func foreignClients(t testing.TB) []foreignClient {
	t.Helper()
	return []foreignClient{
		{fuseclients.Get(t, "s3-csi-mountpoint", fuseclients.InAPod, fuseclients.Starter), mountpoint},
		{fuseclients.Get(t, "s3-csi-mountpoint", fuseclients.InAPod, fuseclients.Fusermount), mountpoint},
		{fuseclients.Get(t, "rclone mount2", fuseclients.InAPod, fuseclients.Starter), rcloneOf("mount2")},
		{fuseclients.Get(t, "rclone mount", fuseclients.InAPod, fuseclients.Fusermount), rcloneOf("mount")},
		{fuseclients.Get(t, "s3fs", fuseclients.InAPod, fuseclients.Fusermount), s3fs},
		{fuseclients.Get(t, "sshfs", fuseclients.InAPod, fuseclients.Starter), sshfs},
		{fuseclients.Get(t, "sshfs", fuseclients.InAPod, fuseclients.Fusermount), sshfs},
		{fuseclients.Get(t, "gcsfuse", fuseclients.InAPod, fuseclients.Starter), gcsfuse},
		{fuseclients.Get(t, "gcsfuse", fuseclients.InAPod, fuseclients.Fusermount), gcsfuse},
	}
}

func everyForeignClient(t *testing.T, e *env) {
	t.Helper()
	for i, tc := range foreignClients(t) {
		uid := fmt.Sprintf("%08d%s", i, podUID[8:])
		t.Run(tc.Client+" "+strconv.Itoa(i), func(t *testing.T) {
			t.Parallel()
			f := tc.of(t, e)
			p := e.pod(t, uid)
			p.publish()
			var c *process
			serve := func() {
				c = p.foreign(t, tc.Way, f)
				rigtest.Await(t, eventually, "the client to serve or to exit", func() bool { return p.shows("content") || ended(c) })
				if ended(c) {
					t.Fatal("the client exited")
				}
			}
			serve()
			tc.Use(t, fuseclients.Volume{Dir: p.target, Stored: f.stored, Restart: func() {
				c.kill()
				serve()
			}})
			p.unpublish()
			rigtest.Await(t, eventually, "the client to end with its connection", func() bool { return ended(c) })
		})
	}
}

// foreign starts a client as in an image where s3-csi-fusermount has replaced the programs of the packages fuse and fuse3, and without
// /dev/fuse.
func (p *pod) foreign(t testing.TB, way string, f foreign) *process {
	t.Helper()
	none := filepath.Join(p.dir, "none")
	if err := os.WriteFile(none, nil, 0); err != nil {
		t.Fatal(err)
	}
	image := fmt.Sprintf("mount --bind %s /dev/fuse", none)
	env := f.env
	if way == fuseclients.Starter {
		args := append([]string{p.program("s3-csi-fuse-starter"), "--fd-passing-socket-path", p.shortSocket(), "--"}, f.command("/dev/fd/3")...)
		return p.runIn(t, p.uid, image, env, args...)
	}
	bin, decoy := filepath.Join(p.dir, "bin"), filepath.Join(p.dir, "decoy")
	for _, dir := range []string{bin, decoy} {
		if err := os.MkdirAll(dir, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	for _, name := range []string{"fusermount3", "fusermount"} {
		if err := os.Symlink(p.program("s3-csi-fusermount"), filepath.Join(bin, name)); err != nil && !errors.Is(err, os.ErrExist) {
			t.Fatal(err)
		}
		image += fmt.Sprintf("\nif [ -e /usr/bin/%[1]s ]; then mount --bind %[2]s/%[1]s /usr/bin/%[1]s; fi", name, bin)
		image += fmt.Sprintf("\nif [ -e /bin/%[1]s ]; then mount --bind %[2]s/%[1]s /bin/%[1]s; fi", name, bin)
	}
	if err := os.Chown(decoy, clientUID, clientUID); err != nil {
		t.Fatal(err)
	}
	env = append([]string{"PATH=" + bin + ":/usr/bin:/bin", "FUSERMOUNT3PROXY_FDPASSING_SOCKPATH=" + p.shortSocket()}, env...)
	return p.runIn(t, p.uid, image, env, f.command(decoy)...)
}

func rcloneOf(command string) func(t testing.TB, e *env) foreign {
	return func(t testing.TB, e *env) foreign {
		t.Helper()
		prefix := command + "/"
		e.Put(t, bucket, prefix+"file", "content")
		return foreign{e.s3(), func(mountpoint string) []string {
			args := e.rclone(t, command, mountpoint)
			args[2] += "/" + prefix
			return args
		}, e.Stored(t, bucket, prefix)}
	}
}

func mountpoint(t testing.TB, e *env) foreign {
	t.Helper()
	rigtest.NeedClient(t, "mountpoint-s3")
	prefix := filepath.Base(t.Name()) + "/"
	e.Put(t, bucket, prefix+"file", "content")
	return foreign{e.s3(), func(mountpoint string) []string {
		args := []string{
			e.program(rig.OwnMountpoint), bucket, mountpoint, "--prefix=" + prefix, "--endpoint-url=" + e.Rig.S3.Endpoint, "--region=" + e.Rig.S3.Region,
			"--force-path-style", "--allow-other", "--allow-delete",
		}
		if !strings.HasPrefix(mountpoint, "/dev/fd/") {
			args = append(args, "--auto-unmount")
		}
		return args
	}, e.Stored(t, bucket, prefix)}
}

func s3fs(t testing.TB, e *env) foreign {
	t.Helper()
	program := e.debian(t, "s3fs", "s3fs")
	// s3fs takes a directory for one only if it has an object.
	e.Put(t, bucket, "s3fs/", "")
	e.Put(t, bucket, "s3fs/file", "content")
	return foreign{e.s3(), func(mountpoint string) []string {
		return []string{
			program, "-f", "-oallow_other", "-oauto_unmount", "-ourl=" + e.Rig.S3.Endpoint, "-oendpoint=" + e.Rig.S3.Region, "-oumask=0000",
			"-ouse_path_request_style", bucket + ":/s3fs", mountpoint,
		}
	}, e.Stored(t, bucket, "s3fs/")}
}

// sshfs serves a directory of this machine through OpenSSH's server, which needs neither root nor its system service.
func sshfs(t testing.TB, e *env) foreign {
	t.Helper()
	program, sshd, keygen := e.debian(t, "sshfs", "sshfs"), e.debian(t, "/usr/sbin/sshd", "openssh-server"), e.debian(t, "ssh-keygen", "openssh-client")
	dir, err := os.MkdirTemp(e.Dir, "ssh-") //nolint:usetesting // other users may pass through it
	if err != nil {
		t.Fatal(err)
	}
	data := filepath.Join(dir, "data")
	if err := errors.Join(os.Chmod(dir, 0o755), os.Mkdir(data, 0o755)); err != nil {
		t.Fatal(err)
	}
	for _, key := range []string{"host", "user"} {
		if out, err := exec.CommandContext(t.Context(), keygen, "-q", "-t", "ed25519", "-N", "", "-C", key, "-f",
			filepath.Join(dir, key)).CombinedOutput(); err != nil {
			t.Fatalf("ssh-keygen: %v: %s", err, out)
		}
	}
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	port := listener.Addr().(*net.TCPAddr).Port
	host, err := os.ReadFile(filepath.Join(dir, "host.pub"))
	if err != nil {
		t.Fatal(err)
	}
	for name, text := range map[string]string{
		"data/file":   "content",
		"known_hosts": fmt.Sprintf("[127.0.0.1]:%d %s", port, host),
		"sshd_config": fmt.Sprintf("HostKey %[1]s/host\nAuthorizedKeysFile %[1]s/user.pub\nAuthenticationMethods publickey\nUsePAM no\nStrictModes no\nPidFile "+
			"none\nSubsystem sftp internal-sftp\n", dir),
		"ssh_config": fmt.Sprintf("Host data\nHostName 127.0.0.1\nPort %d\nUser daemon\nIdentityFile %[2]s/user\nIdentitiesOnly yes\nUserKnownHostsFile "+
			"%[2]s/known_hosts\nStrictHostKeyChecking yes\nBatchMode yes\n",
			port, dir),
	} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	for name, owner := range map[string]int{"data": sshUID, "data/file": sshUID, "host": sshUID, "user": clientUID} {
		if err := os.Chown(filepath.Join(dir, name), owner, owner); err != nil {
			t.Fatal(err)
		}
	}
	serveSSH(t, listener, sshd, "-i", "-e", "-f", filepath.Join(dir, "sshd_config"))
	return foreign{nil, func(mountpoint string) []string {
		return []string{program, "-f", "-F", filepath.Join(dir, "ssh_config"), "-o", "allow_other", "-o", "auto_unmount", "data:" + data, mountpoint}
	}, func(name string) (string, error) {
		b, err := os.ReadFile(filepath.Join(data, name))
		return string(b), err
	}}
}

// serveSSH starts a server for each connection, as inetd does, as the user daemon: systemd reports the user nobody as locked, which sshd refuses.
func serveSSH(t testing.TB, listener net.Listener, sshd ...string) {
	t.Helper()
	ctx, cancel := context.WithCancel(context.WithoutCancel(t.Context()))
	var log output.Buffer
	done := make(chan struct{})
	go func() {
		defer close(done)
		for {
			conn, err := listener.Accept()
			if err != nil {
				return
			}
			file, err := conn.(*net.TCPConn).File()
			if err == nil {
				cmd := exec.CommandContext(ctx, "setpriv", append([]string{"--reuid=daemon", "--regid=daemon", "--clear-groups"}, sshd...)...)
				cmd.Stdin, cmd.Stdout, cmd.Stderr = file, file, &log
				if err = cmd.Start(); err == nil {
					go func() { _ = cmd.Wait() }()
				}
				file.Close()
			}
			conn.Close()
			if err != nil {
				fmt.Fprintln(&log, err)
			}
		}
	}()
	t.Cleanup(func() {
		listener.Close()
		<-done
		cancel()
		if t.Failed() {
			t.Logf("output of sshd: %s", log.String())
		}
	})
}

// debian is the path of a program of a package, which make setup installs.
func (e *env) debian(t testing.TB, program, pkg string) string {
	t.Helper()
	path, err := exec.LookPath(program)
	if err != nil {
		t.Skipf("needs %s of the package %s: make setup installs it: %v", program, pkg, err)
	}
	return path
}
