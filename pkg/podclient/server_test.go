package podclient

import (
	"context"
	"errors"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/s3-csi/s3-csi-driver/pkg/fault"
	"github.com/s3-csi/s3-csi-driver/pkg/host"
	"github.com/s3-csi/s3-csi-driver/pkg/mount"
	"github.com/s3-csi/s3-csi-driver/pkg/osfile"
	"github.com/s3-csi/s3-csi-driver/pkg/podvolume"
	"github.com/s3-csi/s3-csi-driver/pkg/status"
)

// kubelet is a directory with a pod, and a driver.
type kubelet struct {
	t   *testing.T
	dir string
	*Server
}

const podUID = "0b9c7f1e-53a4-4f0b-8d1c-7e2a90c4d611"

func newKubelet(t *testing.T) *kubelet {
	t.Helper()
	if os.Getuid() != 0 {
		t.Skip("needs root: it mounts")
	}
	dir, err := os.MkdirTemp("", "k") //nolint:usetesting // paths of sockets are short
	if err != nil {
		t.Fatal(err)
	}
	k := &kubelet{t: t, dir: dir}
	k.restart()
	t.Cleanup(func() {
		for _, place := range []string{k.records.mounts(), dir + "/fusectl"} {
			if err := host.RemoveMountPoint(place); err != nil {
				t.Error(err)
			}
		}
		if err := os.RemoveAll(dir); err != nil {
			t.Error(err)
		}
	})
	for _, d := range []string{
		"volumes/kubernetes.io~csi/data", "volumes/kubernetes.io~csi/more", "volumes/kubernetes.io~empty-dir/e", "plugins/kubernetes.io~empty-dir/e/ready",
	} {
		if err := os.MkdirAll(filepath.Join(dir, "pods", podUID, d), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	return k
}

// restart makes another driver.
func (k *kubelet) restart() {
	k.t.Helper()
	ns := host.Own()
	s, err := New(k.t.Context(), Options{
		Namespace: ns, Connections: host.NewFusectl(ns, k.dir+"/fusectl"), StateDir: k.dir, Resolve: filepath.Clean, TargetRoot: k.dir, HangTimeout: time.Minute,
	})
	if err != nil {
		k.t.Fatal(err)
	}
	k.Server = s
}

// run runs the driver until the returned function is called.
func (k *kubelet) run() (stop func()) {
	ctx, cancel := context.WithCancel(k.t.Context())
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		k.Run(ctx)
	}()
	return func() { cancel(); <-ended }
}

func (k *kubelet) volume(name, socket string) podvolume.Volume {
	target := filepath.Join(k.dir, "pods", podUID, "volumes/kubernetes.io~csi", name, "mount")
	return podvolume.Volume{Target: target, VolumeID: "csi-" + name, EmptyDir: "e", Socket: socket, PodName: "web-0", PodNamespace: "team-a"}
}

func (k *kubelet) publish(v podvolume.Volume) {
	k.t.Helper()
	if err := k.Publish(k.t.Context(), v, nil); err != nil {
		k.t.Fatal(err)
	}
}

func (k *kubelet) unpublish(v podvolume.Volume) {
	k.t.Helper()
	if ok, err := k.Unpublish(context.WithoutCancel(k.t.Context()), v.VolumeID, v.Target); !ok || err != nil {
		k.t.Fatalf("%t, %v", ok, err)
	}
	if _, err := os.Lstat(v.Target); !errors.Is(err, unix.ENOENT) {
		k.t.Errorf("the target is still there: %v", err)
	}
}

// awaitState waits for the state of the only volume's client.
func (k *kubelet) awaitState(want status.State) (c status.PodClient) {
	k.t.Helper()
	for end := time.Now().Add(10 * time.Second); time.Now().Before(end); time.Sleep(5 * time.Millisecond) {
		all, err := k.Reports(k.t.Context())
		if err != nil || len(all) != 1 {
			k.t.Fatalf("%+v, %v", all, err)
		}
		if c = all[0]; c.State == want {
			return c
		}
	}
	k.t.Fatalf("the client is %s, want %s", c.State, want)
	return c
}

func TestServer_ShowsAnEmptyFileSystemUntilAClientConnects(t *testing.T) {
	t.Parallel()
	k := newKubelet(t)
	v := k.volume("data", "s")
	stop := k.run()
	k.publish(v)
	k.publish(v)
	if err := os.Mkdir(v.Target+"/x", 0o755); !errors.Is(err, unix.EROFS) {
		t.Errorf("writing without a client: %v", err)
	}
	if c := k.awaitState(Waiting); c.Pod != (status.Pod{Namespace: "team-a", Name: "web-0", UID: podUID}) || c.Volume != "data" {
		t.Errorf("%+v", c)
	}
	if found, err := k.Health(t.Context(), v.VolumeID, v.Target); err != nil || len(found) != 1 || found[0].Reason != mount.ReasonNoClient {
		t.Errorf("health: %+v, %v", found, err)
	}
	if _, err := k.Stats(t.Context(), v.VolumeID, v.Target); !fault.Is(err, fault.Unavailable) {
		t.Errorf("statistics: %v", err)
	}
	for name, tc := range map[string]struct {
		v    podvolume.Volume
		want fault.Kind
	}{
		"other attributes":  {k.volume("data", "t"), fault.Exists},
		"the same socket":   {k.volume("more", "s"), fault.Invalid},
		"no emptyDir":       {podvolume.Volume{Target: k.volume("more", "").Target, EmptyDir: "none", Socket: "t"}, fault.Precondition},
		"outside the root":  {podvolume.Volume{Target: "/x/pods/" + podUID + "/volumes/kubernetes.io~csi/data/mount"}, fault.Invalid},
		"no pod's target":   {podvolume.Volume{Target: k.dir + "/data"}, fault.Invalid},
		"a refused request": {k.volume("more", "t"), fault.Unsupported},
	} {
		var refused error
		if tc.want == fault.Unsupported {
			refused = fault.Errorf(tc.want, "refused")
		}
		if err := k.Publish(t.Context(), tc.v, refused); !fault.Is(err, tc.want) {
			t.Errorf("%s: %v", name, err)
		}
	}
	// This process is in no pod.
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	if _, err := osfile.ReceiveFuse(ctx, filepath.Join(v.SocketDir(), v.Socket)); err == nil || !strings.Contains(err.Error(), errForeignPeer.Error()) {
		t.Errorf("a program of another pod: %v", err)
	}
	stop()
	k.restart()
	defer k.run()()
	if c := k.awaitState(Waiting); c.LastFailure != nil {
		t.Errorf("after a restart: %+v", c.LastFailure)
	}
	if ok, err := k.Unpublish(t.Context(), "another", v.Target); !ok || !fault.Is(err, fault.Precondition) {
		t.Errorf("another volume: %t, %v", ok, err)
	}
	if _, err := os.Lstat(k.volume("more", "").Target); !errors.Is(err, unix.ENOENT) {
		t.Errorf("the target of a refused volume: %v", err)
	}
	k.unpublish(v)
	k.publish(k.volume("more", "s")) // the socket is free
	k.unpublish(k.volume("more", "s"))
	if ok, err := k.Unpublish(t.Context(), v.VolumeID, v.Target); ok || err != nil {
		t.Errorf("a second time: %t, %v", ok, err)
	}
}

// handOver passes the descriptor of a new client, whose requests it answers with errors until the returned function is called.
func (k *kubelet) handOver(r *reconciler) (exit func()) {
	k.t.Helper()
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		k.t.Fatal(err)
	}
	defer unix.Close(pair[1])
	file := os.NewFile(uintptr(pair[0]), "driver's end")
	defer file.Close()
	conn, err := net.FileConn(file)
	if err != nil {
		k.t.Fatal(err)
	}
	defer conn.Close()
	if err := r.passDescriptor(k.t.Context(), conn.(*net.UnixConn), peer{pid: os.Getpid()}); err != nil { //nolint:forcetypeassert // of a UNIX socket
		k.t.Fatal(err)
	}
	oob := make([]byte, 64)
	_, n, _, _, err := unix.Recvmsg(pair[1], make([]byte, 512), oob, unix.MSG_CMSG_CLOEXEC)
	if err != nil {
		k.t.Fatal(err)
	}
	messages, err := unix.ParseSocketControlMessage(oob[:n])
	if err != nil {
		k.t.Fatal(err)
	}
	fds, err := unix.ParseUnixRights(&messages[0])
	if err != nil {
		k.t.Fatal(err)
	}
	fuse, answered := os.NewFile(uintptr(fds[0]), "fuse"), make(chan struct{})
	go func() {
		defer close(answered)
		answerNothing(fuse)
	}()
	return func() {
		mounts, err := k.ns.Mounts(context.WithoutCancel(k.t.Context()))
		if err != nil {
			k.t.Fatal(err)
		}
		if current, ok := k.records.current(mounts, idOf(r.volume.Target)); ok {
			_ = k.abortConnection(context.WithoutCancel(k.t.Context()), current) // ends the read of the device
		}
		<-answered
		fuse.Close()
	}
}

// served publishes a volume whose client answers every request with an error, until the test ends.
func (k *kubelet) served() *reconciler {
	k.t.Helper()
	v := k.volume("data", "s")
	k.publish(v)
	r := k.active[idOf(v.Target)]
	exit := k.handOver(r)
	k.t.Cleanup(func() {
		exit()
		k.unpublish(v)
	})
	return r
}

// Each client's file system is shown at the target while it serves, and the empty one after that.
func TestReconciler_ShowsEachClientWhileItServes(t *testing.T) {
	t.Parallel()
	k := newKubelet(t)
	v := k.volume("data", "s")
	k.publish(v)
	r := k.active[idOf(v.Target)]
	step := func(want status.State) (shown host.Mount) {
		t.Helper()
		for end := time.Now().Add(10 * time.Second); r.currentProgress().state != want && time.Now().Before(end); time.Sleep(time.Millisecond) {
			r.step(t.Context())
		}
		k.awaitState(want)
		mounts, err := k.ns.Mounts(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		shown, _ = host.TopAt(mounts, v.Target)
		return shown
	}
	empty := step(Waiting)
	for i := range 2 {
		exit := k.handOver(r)
		if c := k.awaitState(status.Starting); c.Handovers != i+1 {
			t.Errorf("%d handovers, want %d", c.Handovers, i+1)
		}
		if shown := step(Serving); shown.Minor == empty.Minor || shown.FSType != "fuse" {
			t.Errorf("client %d serves and is not shown: %+v", i, shown)
		}
		if found, err := k.Health(t.Context(), v.VolumeID, ""); err != nil || len(found) != 0 {
			t.Errorf("health: %+v, %v", found, err)
		}
		exit()
		if shown := step(Exited); shown.Minor != empty.Minor {
			t.Errorf("client %d has exited and is still shown: %+v", i, shown)
		}
	}
	if f := k.awaitState(Exited).LastFailure; f == nil || f.Reason != status.ReasonExited {
		t.Errorf("%+v", f)
	}
	if left, err := filepath.Glob(k.records.mounts() + "/*"); err != nil || len(left) != 1 {
		t.Errorf("file systems left: %q, %v", left, err)
	}
	k.unpublish(v)
}
