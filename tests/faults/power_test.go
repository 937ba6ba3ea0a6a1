package faults

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc"

	"github.com/s3-csi/s3-csi-driver/pkg/launcher"
	"github.com/s3-csi/s3-csi-driver/tests/internal/faultproxy"
	"github.com/s3-csi/s3-csi-driver/tests/internal/ports"
	"github.com/s3-csi/s3-csi-driver/tests/internal/rig"
	"github.com/s3-csi/s3-csi-driver/tests/internal/rig/rigtest"
	"github.com/s3-csi/s3-csi-driver/tests/internal/s3server"
	"github.com/s3-csi/s3-csi-driver/tests/internal/systemd"
)

// Paths on the host.
const (
	hostBin   = "/opt/s3csi-built"
	hostState = "/run/s3csi"
	hostCache = "/var/lib/kept/cache"
)

// computer is a host with a driver that can be switched off, and an S3 service that goes on without it.
type computer struct {
	*systemd.Instance
	t      *testing.T
	server *rigtest.Server
	proxy  *faultproxy.Proxy
	node   csi.NodeClient
	conn   *grpc.ClientConn
}

func newComputer(t *testing.T) *computer {
	t.Helper()
	rigtest.ProcessOnly(t, "it boots hosts of its own")
	bin := rigtest.Bin(t)
	if err := rig.Usable(); err != nil {
		t.Skip(err)
	}
	systemd.Need(t)
	c := &computer{t: t, server: rigtest.StartServer(t, s3server.Options{})}
	var err error
	if c.Instance, err = systemd.NewInstance(systemd.Options{Binds: map[string]string{hostBin: bin, hostCache: t.TempDir()}}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := c.Close(); err != nil {
			t.Errorf("taking the host away: %v", err)
		}
	})
	c.proxy = rigtest.Proxy(t, c.server.Endpoint())
	return c
}

// run runs a command on the host and gives its output.
func (c *computer) run(argv ...string) string {
	c.t.Helper()
	out, err := c.Output(argv...)
	if err != nil {
		c.t.Fatalf("%s: %v\n%s", strings.Join(argv, " "), err, out)
	}
	return out
}

// start boots the host and starts the driver there, in the slice of all containers.
func (c *computer) start() {
	c.t.Helper()
	if err := c.Boot(); err != nil {
		c.t.Fatal(err)
	}
	addr, err := ports.Free()
	if err != nil {
		c.t.Fatal(err)
	}
	endpoint := "tcp://" + addr
	keys := c.server.Process.Keys()
	c.run("systemd-run", "--quiet", "--unit=driver", "--slice=kubepods.slice",
		"--setenv=AWS_ENDPOINT_URL="+c.proxy.Endpoint(), "--setenv=AWS_REGION="+c.server.Region(), "--setenv=AWS_EC2_METADATA_DISABLED=true",
		"--setenv=AWS_ACCESS_KEY_ID="+keys.AccessKeyID, "--setenv=AWS_SECRET_ACCESS_KEY="+keys.SecretAccessKey,
		filepath.Join(hostBin, "s3-csi-driver"), "node", "--endpoint="+endpoint, "--node-id=node-1", "--launcher=systemd",
		"--state-dir="+hostState, "--cache-dir="+hostCache, "--client-dir="+hostBin, "--host-dir=/opt/s3csi", "--default-client="+rclone)
	if c.conn, err = rig.Dial(endpoint); err != nil {
		c.t.Fatal(err)
	}
	c.t.Cleanup(func() { _ = c.conn.Close() })
	c.node = csi.NewNodeClient(c.conn)
	rigtest.Await(c.t, 30*time.Second, "the driver on the host", func() bool {
		ctx, cancel := context.WithTimeout(c.t.Context(), time.Second)
		defer cancel()
		_, err := csi.NewIdentityClient(c.conn).Probe(ctx, &csi.ProbeRequest{})
		return err == nil
	})
}

// off switches the host off, at once or as its administrator does within that time, and tells how long that took.
func (c *computer) off(within time.Duration) time.Duration {
	c.t.Helper()
	began := time.Now()
	if err := c.PowerOff(within); err != nil {
		c.t.Fatal(err)
	}
	_ = c.conn.Close()
	return time.Since(began)
}

// publish publishes a volume and gives its target, from outside.
func (c *computer) publish(name string) (target string) {
	c.t.Helper()
	target = "/var/lib/targets/" + name + "/mount"
	if err := os.MkdirAll(c.Path(filepath.Dir(target)), 0o755); err != nil {
		c.t.Fatal(err)
	}
	if _, err := c.node.NodePublishVolume(rigtest.Context(c.t, time.Minute), rigtest.PublishRequest(volume(name, rclone), target)); err != nil {
		c.t.Fatalf("%v\n%s", err, c.run("journalctl", "--no-pager", "-o", "cat", "-u", "driver"))
	}
	return target
}

// patience is for how long units may store what they have when the host is shut down, as an administrator can set it.
func (c *computer) patience(seconds int) {
	c.t.Helper()
	dir := c.Path("/run/systemd/system/s3csi-.service.d")
	if err := os.MkdirAll(dir, 0o755); err != nil {
		c.t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, "patience.conf"), fmt.Appendf(nil, "[Service]\nTimeoutStopSec=%ds\n", seconds), 0o644); err != nil {
		c.t.Fatal(err)
	}
	c.run("systemctl", "daemon-reload")
}

// stored reports whether an object is there and whole.
func (c *computer) stored(key string, content []byte) bool {
	c.t.Helper()
	return len(c.server.Keys(c.t, bucket, key)) > 0 && c.server.Object(c.t, bucket, key) == string(content)
}

// left lists what the driver keeps of mounts on the disk.
func (c *computer) left() (left []string) {
	entries, err := os.ReadDir(c.Path(hostCache))
	if err != nil {
		c.t.Fatal(err)
	}
	for _, e := range entries {
		if e.Name() != "salt" && e.Name() != "lock" && !strings.HasPrefix(e.Name(), "spare-") { // helpers that wait for mounts
			left = append(left, e.Name())
		}
	}
	return left
}

// A host that is shut down ends its containers first, and then waits for what they have written last.
func TestShutdownWaitsForUploads(t *testing.T) {
	c := newComputer(t)
	c.start()
	target := c.publish("calm")
	// A container that has something to say at its end.
	c.run("systemd-run", "--quiet", "--unit=pod", "--slice=kubepods.slice", "--property=Type=notify", "--property=NotifyAccess=all", "sh", "-c",
		fmt.Sprintf(`trap 'sleep 1; echo last > %s/last; exit 0' TERM; systemd-notify --ready; while :; do sleep 0.1; done`, target))
	content := bytes.Repeat([]byte("0123456789abcdef"), 1<<19) // 8 MiB
	c.proxy.Set(faultproxy.Faults{Bandwidth: 2 << 20})
	if err := os.WriteFile(c.Path(target+"/data"), content, 0o644); err != nil {
		t.Fatal(err)
	}
	took := c.off(4 * time.Minute)
	for key, want := range map[string][]byte{"calm/data": content, "calm/last": []byte("last\n")} {
		if !c.stored(key, want) {
			t.Errorf("%s is not stored after the shutdown, which took %s", key, took)
		}
	}
	if took < 3*time.Second {
		t.Errorf("the shutdown took %s: the upload cannot have been under way, so this test proves nothing", took)
	}
	// At its end systemd writes back everything that this machine has not written yet, which may be a lot.
	if took >= launcher.DefaultStopTimeout-10*time.Second {
		t.Errorf("the shutdown took %s: it waits for more than the upload", took)
	}
	c.proxy.Set(faultproxy.Faults{})
	c.start()
	rigtest.Await(t, 30*time.Second, "nothing to be left of the mount", func() bool { return len(c.left()) == 0 })
}

// What was closed and not stored when the power went is stored after the next boot, without a call.
func TestWhatAPowerCutKeptFromBeingStoredIsStoredLater(t *testing.T) {
	for _, how := range []string{"cut", "shutdown without S3"} {
		t.Run(how, func(t *testing.T) {
			c := newComputer(t)
			c.start()
			c.patience(3)
			target := c.publish("cut")
			content := bytes.Repeat([]byte("0123456789abcdef"), 1<<17)
			c.proxy.Set(faultproxy.Faults{Refuse: true})
			for name, b := range map[string][]byte{"big": content, "small": []byte("small")} {
				if err := os.WriteFile(c.Path(filepath.Join(target, name)), b, 0o644); err != nil {
					t.Fatal(err)
				}
			}
			c.run("sync") // the disk is not what is tested
			if how == "cut" {
				c.off(0)
			} else if took := c.off(time.Minute); took < 3*time.Second {
				t.Errorf("the shutdown took %s: it did not wait for the upload at all", took)
			}
			if keys := c.server.Keys(t, bucket, "cut/"); len(keys) > 0 {
				t.Fatalf("%s is stored already: this test proves nothing", strings.Join(keys, ", "))
			}
			c.proxy.Set(faultproxy.Faults{})
			c.start()
			rigtest.Await(t, 40*time.Second, "the files to be stored", func() bool { return c.stored("cut/big", content) && c.stored("cut/small", []byte("small")) })
			rigtest.Await(t, 30*time.Second, "nothing to be left of the mount", func() bool { return len(c.left()) == 0 })
			target = c.publish("cut")
			if b, err := os.ReadFile(c.Path(filepath.Join(target, "small"))); err != nil || string(b) != "small" {
				t.Errorf("the volume reads %q, %v", b, err)
			}
		})
	}
}
