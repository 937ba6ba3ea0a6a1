//go:build !lane || ordinary

package node

import (
	"context"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/s3-csi/s3-csi-driver/tests/internal/dns"
	"github.com/s3-csi/s3-csi-driver/tests/internal/rig"
)

const (
	service = "minio.storage.svc" // as volumes' backends name it
	domain  = "cluster.test"

	resolvConf = "/etc/resolv.conf"
)

// cluster is a node whose driver is in a container with a resolv.conf that knows the cluster's services, as the host's does not.
type cluster struct {
	*env
	pod, host *dns.Server
	// own is the container's resolv.conf, and hosts the host's in the end, as paths on the host.
	own, hosts string
	enter      []string // a command to run others with on the host
}

// newCluster starts everything but the driver. propagation is that of the host's mounts, where the test has a host of its own.
func newCluster(t *testing.T, propagation string) *cluster {
	t.Helper()
	c := &cluster{env: newEnv(t), hosts: resolvConf}
	c.pod = serveNames(t, map[string]netip.Addr{service + "." + domain + ".": netip.MustParseAddr("127.0.0.1")})
	c.host = serveNames(t, nil)
	_, port, _ := strings.Cut(strings.TrimPrefix(c.Rig.S3.Endpoint, "http://"), ":")
	c.Rig.S3.Endpoint = "http://" + service + ":" + port
	c.own = filepath.Join(c.Dir, "pod-resolv.conf")
	write(t, c.own, c.pod.ResolvConf("x.svc."+domain+" svc."+domain+" "+domain))
	if c.Launcher == rig.LauncherSystemd {
		before := read(t, resolvConf)
		t.Cleanup(func() {
			_ = os.Remove(resolvConf) // it may be a link by now
			write(t, resolvConf, before)
		})
	} else {
		c.enter = []string{"nsenter", "-t", fmt.Sprint(host(t)), "--mount", "--pid"}
		c.Isolation = []string{"--allow-isolated"} // the small host's PID 1 is no init
		// Its /etc and /run are its own.
		upper := filepath.Join(c.Dir, "etc")
		if err := os.Mkdir(upper, 0o755); err != nil {
			t.Fatal(err)
		}
		c.onHost("sh",
			"-ec",
			`mount --make-r`+propagation+` /; mount -t tmpfs tmpfs $0; mkdir $0/upper $0/work; `+
				`mount -t overlay -o lowerdir=/etc,upperdir=$0/upper,workdir=$0/work overlay /etc; mount -t tmpfs -o mode=755 tmpfs /run`, upper)
	}
	c.replaceHosts()
	c.Wrapper = append(c.enter, "unshare", "--mount", "--propagation", "private", "sh", "-ec",
		`mount --bind "$0" /etc/resolv.conf; exec setpriv --pdeathsig KILL "$@"`, c.own)
	return c
}

func serveNames(t *testing.T, names map[string]netip.Addr) *dns.Server {
	t.Helper()
	s, err := dns.Start(names)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := s.Close(); err != nil {
			t.Error(err)
		}
	})
	return s
}

func (c *cluster) onHost(argv ...string) string {
	c.t.Helper()
	out, err := run(c.t, append(c.enter, argv...)...)
	if err != nil {
		c.t.Fatalf("%v: %v\n%s", argv, err, out)
	}
	return out
}

func run(t *testing.T, argv ...string) (string, error) {
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	out, err := exec.CommandContext(ctx, argv[0], argv[1:]...).CombinedOutput()
	return string(out), err
}

// replaceHosts gives the host a resolv.conf as a DHCP client does: a new file replaces the old one.
func (c *cluster) replaceHosts() {
	c.t.Helper()
	c.onHost("sh", "-ec", `echo "nameserver $0" >$1.new; mv $1.new $1`, c.host.Address.String(), c.hosts)
}

// linkHosts makes the host's resolv.conf a link.
func (c *cluster) linkHosts(to string) {
	c.t.Helper()
	c.onHost("sh", "-ec", `mkdir -p "$(dirname $0)"; ln -sf $0 $1`, to, resolvConf)
	c.hosts = to
	c.replaceHosts()
}

// seen is a process's resolv.conf.
func (c *cluster) seen(p rig.Process) string {
	content, _ := run(c.t, "nsenter", "-t", fmt.Sprint(p.PID), "--mount", "cat", resolvConf) // a link leads somewhere there
	return content
}

// byTheCLibrary is an address as programs find it that use the C library, which mount-s3 does: where a client is.
func (c *cluster) byTheCLibrary(p rig.Process, name string) (string, error) {
	out, err := run(c.t, "nsenter", "-t", fmt.Sprint(p.PID), "--mount", "getent", "ahostsv4", name)
	address, _, _ := strings.Cut(out, " ")
	return address, err
}

// clean fails the test if anything of a mount is left on the host. A small host began with the mounts of tests that run beside this one.
func (c *cluster) clean() {
	c.t.Helper()
	for mount := range strings.Lines(c.onHost("cat", "/proc/1/mountinfo")) {
		if strings.Contains(mount, " s3csi:") && strings.Contains(mount, filepath.Base(c.Dir)) {
			c.t.Errorf("left on the host: %s", mount)
		}
	}
	c.NothingLeft(c.t)
}

func TestClientsResolveNamesAsNodeDNSSays(t *testing.T) {
	for _, client := range clients {
		t.Run(client, func(t *testing.T) {
			c := newCluster(t, "private")
			v, target := static("named", client), c.Target("t")

			c.drive("--node-dns=host", "--mount-timeout=10s")
			err := c.tryPublish(time.Minute, v, target)
			unknown := map[string]string{rclone: "no such host", mountpoint: "AWS_IO_DNS"}[client]
			if err == nil || !strings.Contains(err.Error(), unknown) || c.host.Asked(service+".") == 0 {
				t.Errorf("with the host's resolv.conf: %v; its server was asked for the name %d times", err, c.host.Asked(service+"."))
			}
			c.undone(target)
			if c.pod.Asked(service+"."+domain+".") == 0 {
				t.Error("the driver itself did not ask the cluster's server: this test shows nothing")
			}
			c.restart("--node-dns=pod")
			c.publish(v, "t")
			c.onHost("sh", "-c", "echo -n inside > "+target+"/file")
			before := c.client(client)
			if got := c.seen(before); got != read(t, c.own) {
				t.Errorf("the client's resolv.conf:\n%s", got)
			}
			if got, err := c.byTheCLibrary(before, service); err != nil || got != "127.0.0.1" {
				t.Errorf("the C library finds %q, %v", got, err)
			}
			if helper := c.Running("s3-csi-helper"); len(helper) != 1 || c.seen(helper[0]) != read(t, c.own) {
				t.Errorf("helpers: %v", helper)
			}

			// The cluster's DNS moves.
			moved := serveNames(t, map[string]netip.Addr{service + "." + domain + ".": netip.MustParseAddr("127.0.0.1"),
				"new." + domain + ".": netip.MustParseAddr("127.0.0.7")})
			write(t, c.own, moved.ResolvConf(domain))
			c.restart("--node-dns=pod") // which looks at once, and then each minute
			c.await(20*time.Second, "the changed resolv.conf", func() bool { return c.seen(before) == read(t, c.own) })
			if got, err := c.byTheCLibrary(before, "new"); err != nil || got != "127.0.0.7" {
				t.Errorf("after a change the C library finds %q, %v", got, err)
			}

			// The host's file is replaced, which takes off what is mounted on it. No driver looks meanwhile.
			c.Kill()
			c.replaceHosts()
			if got := c.seen(before); !strings.Contains(got, c.host.Address.String()) {
				t.Errorf("the client still sees the following: this test shows nothing\n%s", got)
			}
			c.drive("--node-dns=pod")
			c.await(20*time.Second, "the driver's resolv.conf", func() bool { return c.seen(before) == read(t, c.own) })

			if got := c.onHost("cat", target+"/file"); got != "inside" {
				t.Errorf("the file is %q", got)
			}
			if after := c.client(client); after != before {
				t.Errorf("the client was replaced: %v, %v", before, after)
			}

			// What runs keeps what it was started with.
			c.restart("--node-dns=host")
			c.publish(v, "other")
			if got := c.seen(c.client(client)); got != read(t, c.own) {
				t.Errorf("after a change of the flag the client's resolv.conf:\n%s", got)
			}
			c.unpublish(v, c.Target("other"))
			c.unpublish(v, target)
			c.clean()
			if got := c.Object(t, bucket, "named/file"); got != "inside" {
				t.Errorf("the object is %q", got)
			}
		})
	}
}

// Many hosts' resolv.conf is a link, as a rule to one that systemd-resolved writes.
func TestAResolvConfThatIsALinkIsReplacedWhereItLeads(t *testing.T) {
	for to, kept := range map[string]bool{"/run/systemd/resolve/stub-resolv.conf": true, "/run/systemd/resolve/resolv.conf": true,
		"/run/network/resolv.conf": false} {
		t.Run(filepath.Base(filepath.Dir(to))+" "+filepath.Base(to), func(t *testing.T) {
			c := newCluster(t, "private")
			c.linkHosts(to)
			defer c.onHost("rm", "-rf", filepath.Dir(to))
			// What it answers to "resolve" of nsswitch.conf with.
			services := func() {
				c.onHost("sh", "-ec", "mkdir -p /run/systemd/resolve /run/nscd; touch /run/systemd/resolve/io.systemd.Resolve /run/nscd/socket")
			}
			if kept {
				services()
			}
			defer c.onHost("rm", "-rf", "/run/systemd/resolve", "/run/nscd")
			c.drive("--node-dns=pod")
			v := static("linked", rclone)
			target := c.publish(v, "t")
			client := c.client(rclone)
			want := read(t, c.own)
			if got := c.seen(client); got != want {
				t.Errorf("the client's resolv.conf:\n%s", got)
			}
			if got, err := c.byTheCLibrary(client, service); err != nil || got != "127.0.0.1" {
				t.Errorf("the C library finds %q, %v", got, err)
			}
			if got := c.onHost("cat", resolvConf); !strings.Contains(got, c.host.Address.String()) {
				t.Errorf("the host's resolv.conf:\n%s", got)
			}
			c.Kill()
			c.replaceHosts()
			if got := c.seen(client) == want; got != kept {
				t.Errorf("after the host's was replaced, the client still sees its own: %v, want %v", got, kept)
			}
			c.drive("--node-dns=pod")
			c.await(20*time.Second, "the driver's resolv.conf", func() bool { return c.seen(client) == want })
			if !kept { // services that come later
				services()
				c.restart("--node-dns=pod")
			}
			for _, socket := range []string{"/run/systemd/resolve/io.systemd.Resolve", "/run/nscd/socket"} {
				c.await(20*time.Second, socket+", which answers as the host does, to be hidden", func() bool {
					_, err := os.Lstat(fmt.Sprintf("/proc/%d/root%s", client.PID, socket))
					return os.IsNotExist(err)
				})
			}
			c.unpublish(v, target)
			c.clean()
		})
	}
}

// A helper in a mount namespace of its own must not keep a mount that others make or end while it lives.
func TestHelpersThatResolveNamesByThePodKeepNoMount(t *testing.T) {
	propagations := []string{"shared", "private"}
	if os.Getenv(rig.EnvLauncher) == rig.LauncherSystemd {
		propagations = propagations[:1] // as systemd makes the host's
	}
	for _, propagation := range propagations {
		t.Run(propagation, func(t *testing.T) {
			c := newCluster(t, propagation)
			c.drive("--node-dns=pod")
			// Where mounts do not propagate, a spare would not see the directories of the mount that it is for.
			spared, said := propagation == "shared", "No spare helpers"
			if spared {
				said = "Spare helper ready"
			}
			c.await(20*time.Second, said, func() bool { return strings.Contains(c.Logs(), said) })
			var volumes []*csi.Volume
			for _, name := range []string{"first", "second", "third"} {
				v := static(name, rclone)
				volumes = append(volumes, v)
				c.onHost("sh", "-c", "echo -n content > "+c.publish(v, name)+"/file")
			}
			for left, v := range volumes {
				c.unpublish(v, c.Target(v.GetVolumeId()))
				if lives := c.Running(programs[rclone]); len(lives) != len(volumes)-left-1 {
					t.Errorf("%s is unpublished, and there are %v", v.GetVolumeId(), lives)
				}
				if got := c.Object(t, bucket, v.GetVolumeId()+"/file"); got != "content" {
					t.Errorf("the object of %s is %q", v.GetVolumeId(), got)
				}
			}
			if strings.Contains(c.Logs(), "Spare helper assigned") != spared {
				t.Errorf("a spare helper was used: %v, want %v", !spared, spared)
			}
			c.clean()
		})
	}
}

// On a driver's own host there is no other resolv.conf than the host's.
func TestADriverInNoContainerHasTheHostsResolvConf(t *testing.T) {
	e := start(t, "--node-dns=pod")
	v := static("plain", rclone)
	target := e.publish(v, "t")
	namespace := func(pid any) string {
		link, err := os.Readlink(fmt.Sprintf("/proc/%v/ns/mnt", pid))
		if err != nil {
			t.Fatal(err)
		}
		return link
	}
	if e.Launcher == rig.LauncherProcess && namespace(e.client(rclone).PID) != namespace("self") {
		t.Error("the client is in a mount namespace of its own")
	}
	if _, err := os.Lstat(filepath.Join(e.State, "resolv.conf")); !os.IsNotExist(err) {
		t.Errorf("there is a copy of the resolv.conf: %v", err)
	}
	if !strings.Contains(e.Logs(), "the driver does not run in a container") {
		t.Error("the log does not say that nothing is done")
	}
	e.unpublish(v, target)
	e.NothingLeft(t)
}
