package systemd_test

import (
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/s3-csi/s3-csi-driver/pkg/check"
	"github.com/s3-csi/s3-csi-driver/tests/internal/dns"
	"github.com/s3-csi/s3-csi-driver/tests/internal/rig/rigtest"
)

const (
	resolvConf = "/etc/resolv.conf"
	service    = "minio.storage.svc"
)

// newCluster is a node whose driver is in a container with a resolv.conf that knows the name of the S3 server. The host's knows
// none.
func newCluster(t *testing.T) *rigtest.Node {
	t.Helper()
	n := newRig(t)
	serve := func(names map[string]netip.Addr) *dns.Server {
		s, err := dns.Start(names)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = s.Close() })
		return s
	}
	pod, host := serve(map[string]netip.Addr{service + ".cluster.test.": netip.MustParseAddr("127.0.0.1")}), serve(nil)
	own := n.Dir + "/pod-resolv.conf"
	before, err := os.ReadFile(resolvConf)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.WriteFile(resolvConf, before, 0o644) })
	for file, content := range map[string]string{own: pod.ResolvConf("cluster.test"), resolvConf: host.ResolvConf("host.test")} {
		if err := os.WriteFile(file, []byte(content), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	n.Rig.S3.Endpoint = strings.Replace(n.Rig.S3.Endpoint, "127.0.0.1", service, 1)
	container(n)
	n.Wrapper = append(n.Wrapper, "sh", "-ec", `mount --bind "$0" `+resolvConf+`; exec "$@"`, own)
	return n
}

// TestACheckLooksNamesUpAsHelpersWill compares what the check says of DNS with what becomes of a volume.
func TestACheckLooksNamesUpAsHelpersWill(t *testing.T) {
	for _, c := range []struct {
		dns, launcher string
		private       bool // the host's /
		noLandlock    bool
		want          check.Result
		why           string
	}{
		{"host", "systemd", false, false, check.No, "as the host does"},
		{"host", "process", false, false, check.No, "as the host does"},
		{"pod", "systemd", false, false, check.Yes, "as the driver's container does"},
		{"pod", "process", false, false, check.Yes, "as the driver's container does"},
		{"pod", "systemd", true, false, check.Yes, "as the driver's container does"},
		{"pod", "systemd", false, true, check.Yes, "as the driver's container does"},
		{"pod", "systemd", true, true, check.No, "despite --node-dns=pod: the host's / is not a shared mount"},
	} {
		name := c.dns + ", " + c.launcher
		if c.private {
			name += ", a private root"
		}
		if c.noLandlock {
			name += ", no Landlock"
		}
		t.Run(name, func(t *testing.T) {
			n := newCluster(t)
			n.Launcher = c.launcher
			if c.noLandlock {
				n.Wrapper = append(withoutLandlock(), n.Wrapper...)
			} else {
				needsLandlock(t)
			}
			if c.private {
				if err := unix.Mount("", "/", "", unix.MS_PRIVATE, ""); err != nil {
					t.Fatal(err)
				}
				defer func() { _ = unix.Mount("", "/", "", unix.MS_SHARED, "") }()
			}
			row := checkNode(t, n, "--node-dns="+c.dns, "--launcher="+c.launcher)["dns.default"]
			if row.Result != c.want || !row.Needed || !strings.Contains(row.Why, c.why) || (row.Advice == "") != (c.want == check.Yes) {
				t.Errorf("%+v", row)
			}
			d := n.Drive(t, "node", "--node-dns="+c.dns, "--host-dir="+n.HostDir, "--mount-timeout=10s")
			v, target := static("named"), n.Target("a")
			_, err := d.NodePublishVolume(bounded(t), rigtest.PublishRequest(v, target))
			switch {
			case (err == nil) != (c.want == check.Yes):
				t.Errorf("the check says %s, and the volume: %v", c.want, err)
			case err == nil:
				rigtest.Unpublish(t, d, v, target)
			case !strings.Contains(err.Error(), "no such host"):
				t.Error(err)
			}
			ready, metrics := rigtest.Get(t, d, "/readyz"), rigtest.Get(t, d, "/metrics")
			lacks := c.private && c.noLandlock
			if strings.Contains(ready, "note: --node-dns=pod has no effect") != lacks {
				t.Errorf("/readyz:\n%s", ready)
			}
			if strings.Contains(metrics, `s3csi_sandbox_missing{property="BindReadOnlyPaths"} 1`) != lacks {
				t.Errorf("/metrics:\n%s", metrics)
			}
			n.NothingLeft(t)
		})
	}
}

// TestHelpersThatResolveNamesByThePodShareAMountNamespace counts the mount namespaces of a driver's helpers and their clients, before and
// after a restart of the driver. On a host where nothing propagates, each helper has its own.
func TestHelpersThatResolveNamesByThePodShareAMountNamespace(t *testing.T) {
	needsLandlock(t)
	for _, private := range []bool{false, true} {
		t.Run(map[bool]string{false: "shared root", true: "private root"}[private], func(t *testing.T) {
			n := newCluster(t)
			if private {
				if err := unix.Mount("", "/", "", unix.MS_PRIVATE, ""); err != nil {
					t.Fatal(err)
				}
				defer func() { _ = unix.Mount("", "/", "", unix.MS_SHARED, "") }()
			}
			flags := []string{"--node-dns=pod", "--host-dir=" + n.HostDir}
			d := n.Drive(t, "node", flags...)
			for _, name := range []string{"one", "two", "three"} {
				if name == "three" {
					d.Kill()
					d = n.Drive(t, "node", flags...)
				}
				v, target := static(name), n.Target(name)
				rigtest.Publish(t, d, v, target)
				defer func() { rigtest.Unpublish(t, d, v, target) }()
			}
			seen, running := map[string]bool{}, n.Running(filepath.Base(rclone)) // where their helpers are; a spare's unit gets its volume's name later
			for _, client := range running {
				seen[namespace(t, client.PID)] = true
			}
			want := 2 // the second driver made another
			if private {
				want = 3
			}
			if len(running) != 3 || len(seen) != want || seen[namespace(t, 1)] {
				t.Errorf("%d clients are in the mount namespaces %v, that of the host is %s", len(running), seen, namespace(t, 1))
			}
		})
	}
}
