package systemd_test

import (
	"context"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/aws/aws-sdk-go-v2/aws"
	awscredentials "github.com/aws/aws-sdk-go-v2/credentials"
	"github.com/aws/aws-sdk-go-v2/service/s3"
	"golang.org/x/sys/unix"

	"github.com/s3-csi/s3-csi-driver/pkg/backend"
	"github.com/s3-csi/s3-csi-driver/pkg/client"
	"github.com/s3-csi/s3-csi-driver/pkg/credentials"
	"github.com/s3-csi/s3-csi-driver/pkg/host"
	"github.com/s3-csi/s3-csi-driver/pkg/launcher"
	"github.com/s3-csi/s3-csi-driver/pkg/mount"
	mountnode "github.com/s3-csi/s3-csi-driver/pkg/node"
	"github.com/s3-csi/s3-csi-driver/pkg/session"
	"github.com/s3-csi/s3-csi-driver/pkg/volume"
	"github.com/s3-csi/s3-csi-driver/tests/s3server"
)

const bucket = "volumes"

// node is a node of the driver on the host, and an S3 server.
type node struct {
	*mountnode.Node
	t      *testing.T
	l      *launcher.Systemd
	s3     *s3.Client
	secret string
	dir    string
}

// caching gives units their cache directories.
type caching struct {
	*launcher.Systemd
	dir string
}

func (c caching) Start(ctx context.Context, u launcher.Unit) error {
	u.CacheDir = filepath.Join(c.dir, u.Name)
	return c.Systemd.Start(ctx, u)
}

// backends is S3 as the manager sees it.
type backends struct {
	*backend.Config
	*backend.Buckets
}

// asTheyAre are keys that no session is made from.
type asTheyAre credentials.Keys

func (k asTheyAre) Plan(context.Context, session.Request) (credentials.Order, error) {
	return credentials.Order{Kind: credentials.AsIs, Keys: credentials.Keys(k)}, nil
}

func (k asTheyAre) Make(context.Context, credentials.Order) (credentials.Keys, error) {
	return credentials.Keys(k), nil
}

func newNode(t *testing.T) *node {
	t.Helper()
	n := &node{t: t, l: newLauncher(t)}
	for _, file := range []string{rclone, "/dev/fuse"} {
		if _, err := os.Stat(file); err != nil {
			t.Skipf("needs the built client and FUSE (make test): %v", err)
		}
	}
	number := units.Add(1)
	n.dir = fmt.Sprintf("/var/lib/s3csi-node-%d", number)
	for _, d := range []string{"cache", "s3", "targets"} {
		if err := os.MkdirAll(filepath.Join(n.dir, d), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	server, err := s3server.Start(bounded(t), s3server.Options{Dir: filepath.Join(n.dir, "s3")})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := server.Stop(); err != nil {
			t.Error(err)
		}
	})
	keys := server.Keys()
	n.secret = keys.SecretAccessKey
	n.s3 = s3.New(s3.Options{
		BaseEndpoint: aws.String(server.Endpoint()), Region: server.Region(), UsePathStyle: true,
		Credentials: awscredentials.NewStaticCredentialsProvider(keys.AccessKeyID, keys.SecretAccessKey, ""),
	})
	if _, err := n.s3.CreateBucket(bounded(t), &s3.CreateBucketInput{Bucket: aws.String(bucket)}); err != nil {
		t.Fatal(err)
	}
	n.manage(server)
	return n
}

// manage starts the manager.
func (n *node) manage(server *s3server.Server) {
	n.t.Helper()
	config, err := backend.DefaultConfig(server.Region(), server.Endpoint())
	if err != nil {
		n.t.Fatal(err)
	}
	clients, err := backend.NewClients(config, backend.WithVersion("test"))
	if err != nil {
		n.t.Fatal(err)
	}
	n.t.Cleanup(clients.Close)
	buckets, err := backend.NewBuckets(clients, time.Now)
	if err != nil {
		n.t.Fatal(err)
	}
	ns, err := host.NewNamespace()
	if err != nil {
		n.t.Fatal(err)
	}
	first := uint32(firstUID + 5000)
	n.Node, err = mountnode.New(bounded(n.t), mountnode.Options{
		Namespace: ns, Launcher: caching{n.l, filepath.Join(n.dir, "cache")}, Backends: backends{config, buckets}, Sessions: asTheyAre(server.Keys()), Client: client.Get,
		StateDir: "/run/" + filepath.Base(n.dir), CacheDir: filepath.Join(n.dir, "cache"), ClientDir: built, DefaultClient: "rclone",
		UIDs: launcher.UIDRange{First: first, Last: first + 999}, MountTimeout: 30 * time.Second, DrainTimeout: 30 * time.Second, Version: "test",
	})
	if err != nil {
		n.t.Fatal(err)
	}
}

func (n *node) request(name string) mount.Request {
	return mount.Request{
		VolumeID: name, Target: filepath.Join(n.dir, "targets", name), Volume: volume.ID{Backend: volume.DefaultBackend, Bucket: bucket, Prefix: name + "/"},
		Source: credentials.SourceDriver, Identity: "driver",
	}
}

func (n *node) publish(name string) (target string) {
	n.t.Helper()
	r := n.request(name)
	if err := n.Publish(bounded(n.t), r, nil); err != nil {
		for _, u := range n.units() {
			n.t.Logf("%+v:\n%s", u, (&unit{t: n.t, Unit: launcher.Unit{Name: u.Name}}).journal())
		}
		n.t.Fatal(err)
	}
	return r.Target
}

func (n *node) unpublish(name string) {
	n.t.Helper()
	if err := n.Unpublish(bounded(n.t), name, filepath.Join(n.dir, "targets", name)); err != nil {
		n.t.Fatal(err)
	}
}

func (n *node) units() []launcher.UnitInfo {
	n.t.Helper()
	list, err := n.l.List(bounded(n.t))
	if err != nil {
		n.t.Fatal(err)
	}
	return list
}

// nothingLeft fails the test if anything of a mount is on the host.
func (n *node) nothingLeft() {
	n.t.Helper()
	await(n.t, "the last unit's end", func() bool { return len(n.units()) == 0 })
	tables, err := filepath.Glob("/proc/[0-9]*/mountinfo")
	if err != nil {
		n.t.Fatal(err)
	}
	for _, table := range tables {
		if body, err := os.ReadFile(table); err == nil && strings.Contains(string(body), "s3csi:") {
			n.t.Errorf("mounts are left in %s", table)
		}
	}
	for _, dir := range []string{"/run/" + filepath.Base(n.dir) + "/mounts", filepath.Join(n.dir, "cache")} {
		entries, err := os.ReadDir(dir)
		if entries = slices.DeleteFunc(entries, func(e os.DirEntry) bool { return e.Name() == "salt" }); err != nil || len(entries) > 0 { // that is the node's
			n.t.Errorf("%s has %v (%v)", dir, entries, err)
		}
	}
}

func (n *node) write(path, content string) {
	n.t.Helper()
	if err := os.WriteFile(path, []byte(content), 0o644); err != nil {
		n.t.Fatal(err)
	}
}

func (n *node) object(key string) string {
	n.t.Helper()
	out, err := n.s3.GetObject(bounded(n.t), &s3.GetObjectInput{Bucket: aws.String(bucket), Key: &key})
	if err != nil {
		n.t.Fatal(err)
	}
	defer out.Body.Close()
	body, err := io.ReadAll(out.Body)
	if err != nil {
		n.t.Fatal(err)
	}
	return string(body)
}

// copies are the mounts of a source in the mount namespace of a process.
func copies(t *testing.T, pid int, source string) (found []string) {
	t.Helper()
	body, err := os.ReadFile(fmt.Sprintf("/proc/%d/mountinfo", pid))
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(body)) {
		if strings.Contains(line, " s3csi:"+source+":") {
			found = append(found, strings.Fields(line)[4])
		}
	}
	return found
}

// pidOf is the helper of the only unit that is not among the known.
func (n *node) pidOf(known ...string) (name string, pid int) {
	n.t.Helper()
	for _, u := range n.units() {
		if !strings.Contains(strings.Join(known, " "), u.Name) {
			if _, err := fmt.Sscan(show(n.t, "s3csi-"+u.Name+".service", "MainPID"), &pid); err != nil {
				n.t.Fatal(err)
			}
			return u.Name, pid
		}
	}
	n.t.Fatal("there is no such unit")
	return "", 0
}

func TestVolumeLivesInAUnit(t *testing.T) {
	n := newNode(t)
	target := n.publish("first")
	n.write(target+"/file", "content")
	if u := n.units(); len(u) != 1 || u[0].Active != "active" {
		t.Errorf("units: %+v", u)
	}
	name, _ := n.pidOf()
	if d := show(t, "s3csi-"+name+".service", "Description"); !strings.Contains(d, "first") || !strings.Contains(d, "rclone") {
		t.Errorf("described as %q", d)
	}
	for what, text := range map[string]string{"show": systemctl(t, "show", "--all", "s3csi-"+name+".service"), "journal": (&unit{t: t, Unit: launcher.Unit{Name: name}}).journal()} {
		if strings.Contains(text, n.secret) {
			t.Errorf("%s holds the secret key", what)
		}
	}
	n.unpublish("first")
	if got := n.object("first/file"); got != "content" {
		t.Errorf("the object is %q", got)
	}
	n.nothingLeft()
}

// TestNoServiceHoldsAMount ends mounts of which services have copies: units of other mounts, and services of the host that
// have nothing to do with volumes. On the second host nothing propagates, so that units must do without a namespace there.
func TestNoServiceHoldsAMount(t *testing.T) {
	for what, propagation := range map[string]uintptr{"shared root": unix.MS_SHARED, "private root": unix.MS_PRIVATE} {
		t.Run(what, func(t *testing.T) {
			n := newNode(t)
			if err := unix.Mount("", "/", "", propagation, ""); err != nil {
				t.Fatal(err)
			}
			defer func() { _ = unix.Mount("", "/", "", unix.MS_SHARED, "") }()
			first := n.publish("first")
			n.write(first+"/file", "content")
			firstName, _ := n.pidOf()
			n.publish("second")
			_, second := n.pidOf(firstName)
			stranger := 0
			if propagation == unix.MS_SHARED {
				systemctl(t, "reset-failed")
				if out, err := exec.Command("systemd-run", "--unit=stranger", "-p", "Type=exec", "-p", "ProtectSystem=strict", "/bin/sleep", "1000").CombinedOutput(); err != nil {
					t.Fatalf("%v %s", err, out)
				}
				defer systemctl(t, "stop", "stranger")
				_, _ = fmt.Sscan(show(t, "stranger", "MainPID"), &stranger)
				for who, pid := range map[string]int{"the second unit": second, "the stranger": stranger} {
					if len(copies(t, pid, "first")) == 0 {
						t.Errorf("%s holds nothing of the first mount: this test shows nothing", who)
					}
				}
			}
			if missing := strings.Contains(strings.Join(n.l.Sandbox().Missing, ";"), "ProtectSystem (the host's / is not a shared mount)"); missing != (propagation == unix.MS_PRIVATE) {
				t.Errorf("sandbox: %+v", n.l.Sandbox())
			}
			n.unpublish("first")
			if got := n.object("first/file"); got != "content" {
				t.Errorf("the object is %q", got)
			}
			n.unpublish("second")
			n.nothingLeft()
		})
	}
}

// TestHungClientKeepsNoUnitFromStarting stops a client whose mount is in the namespace that a new unit's is copied from.
func TestHungClientKeepsNoUnitFromStarting(t *testing.T) {
	n := newNode(t)
	n.publish("hung")
	name, pid := n.pidOf()
	var frozen []int
	lists, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/children", pid))
	if err != nil {
		t.Fatal(err)
	}
	for _, list := range lists {
		body, err := os.ReadFile(list)
		if err != nil {
			t.Fatal(err)
		}
		for child := range strings.FieldsSeq(string(body)) {
			var c int
			_, _ = fmt.Sscan(child, &c)
			kill(t, c, unix.SIGSTOP)
			frozen = append(frozen, c)
		}
	}
	if len(frozen) == 0 {
		t.Fatalf("helper %s has no client", name)
	}
	began := time.Now()
	target := n.publish("other")
	took := time.Since(began)
	n.write(target+"/file", "content")
	n.unpublish("other")
	for _, c := range frozen {
		kill(t, c, unix.SIGCONT)
	}
	if took > 10*time.Second {
		t.Errorf("it took %s", took)
	}
	n.unpublish("hung")
	n.nothingLeft()
}
