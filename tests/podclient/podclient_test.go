package podclient

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"sigs.k8s.io/yaml"

	"github.com/s3-csi/s3-csi-driver/tests/internal/containers"
	"github.com/s3-csi/s3-csi-driver/tests/internal/hostile"
	"github.com/s3-csi/s3-csi-driver/tests/internal/rig/rigtest"
)

func reads(t testing.TB, c *containers.Container, path, content string) {
	t.Helper()
	rigtest.Await(t, eventually, path+" in a container to read "+content, func() bool {
		got, err := c.Read(t.Context(), path)
		return err == nil && got == content
	})
}

// Containers that start before their pod's client see its files when it serves, with and without propagation, also after the client's
// container and the driver were restarted.
func TestAPodWithItsOwnClient(t *testing.T) {
	t.Parallel()
	containers.Need(t)
	e := start(t)
	e.Put(t, bucket, "file", "content")
	e.Put(t, bucket, "sub/file", "in sub")
	p := e.pod(t, podUID)
	p.publish()
	if err := p.look(); err != nil {
		t.Fatalf("without a client: %v", err)
	}
	if err := os.Mkdir(filepath.Join(p.target, "sub"), 0o755); !errors.Is(err, unix.EROFS) {
		t.Errorf("what is written before a client serves would be lost: %v", err)
	}
	if _, err := ask(t, p.NodeGetVolumeStats, &csi.NodeGetVolumeStatsRequest{VolumeId: p.handle(), VolumePath: p.target}); status.Code(err) != codes.Unavailable {
		t.Errorf("statistics without a client: %v", err)
	}
	pod := containers.Start(t, containers.Options{PodUID: podUID, Mounts: []containers.Mount{
		{Source: p.target, Target: "/data"}, {Source: p.target, Target: "/read-only", ReadOnly: true}, {Source: p.target, Target: "/slave", Propagation: "rslave"},
	}})
	other := containers.Start(t, containers.Options{PodUID: otherUID, Mounts: []containers.Mount{{Source: p.target, Target: "/data"}}})
	mounts := func() string {
		table, err := os.ReadFile(fmt.Sprintf("/proc/%d/mountinfo", pod.PID))
		if err != nil {
			t.Fatal(err)
		}
		return string(table)
	}
	if strings.Contains(mounts(), " - fuse ") {
		t.Error("containers that wait for a mount of type fuse would not wait for the client")
	}

	client := p.client()
	for _, dir := range []string{"/data", "/read-only", "/slave"} {
		reads(t, pod, dir+"/file", "content")
	}
	if names, err := other.List(t.Context(), "/data"); err != nil || len(names) != 0 {
		t.Errorf("another pod sees %q, %v", names, err)
	}
	if n := strings.Count(mounts(), " - fuse "); n != 3 {
		t.Errorf("%d mounts of type fuse in the container:\n%s", n, mounts())
	}
	if err := pod.Write(t.Context(), "/data/new", "written"); err != nil {
		t.Error(err)
	}
	if err := pod.Write(t.Context(), "/read-only/no", "x"); err == nil {
		t.Error("a read-only mount became writable")
	}
	if got := e.Object(t, bucket, "new"); got != "written" {
		t.Errorf("the object is %q", got)
	}
	if s, err := ask(t, p.NodeGetVolumeStats, &csi.NodeGetVolumeStatsRequest{VolumeId: p.handle(), VolumePath: p.target}); err != nil || len(s.GetUsage()) == 0 {
		t.Errorf("statistics: %v, %v", s, err)
	}
	second := p.connectFrom(podUID)
	<-second.done
	if !strings.Contains(second.output.String(), "another process of the pod has the volume's descriptor") {
		t.Errorf("a second client: %s", second.output.String())
	}

	// The client exits: what runs gets errors, which no program takes for an empty volume, and what starts can start.
	client.kill()
	rigtest.Await(t, eventually, "the target to be empty", func() bool {
		entries, err := os.ReadDir(p.target)
		return err == nil && len(entries) == 0
	})
	if _, err := pod.List(t.Context(), "/data"); err == nil {
		t.Error("a running container sees an empty volume after its client has exited")
	}
	late := containers.Start(t, containers.Options{PodUID: podUID, Mounts: []containers.Mount{{Source: p.target, Target: "/data"}}})
	client = p.client()
	for _, c := range []*containers.Container{pod, late} {
		reads(t, c, "/data/file", "content")
	}
	reads(t, pod, "/slave/file", "content")

	// The driver is killed: the client goes on, and one that starts meanwhile waits for the next driver.
	e.Kill()
	if err := pod.Write(t.Context(), "/data/new", "without a driver"); err != nil {
		t.Error(err)
	}
	e.drive()
	p.publish()
	reads(t, pod, "/data/new", "without a driver")
	e.Kill()
	client.kill()
	client = p.client()
	e.drive()
	for _, c := range []*containers.Container{pod, late} {
		reads(t, c, "/data/file", "content")
	}
	rigtest.Await(t, eventually, "the file systems of former clients to be unmounted", func() bool { // after all mounts have been replaced
		left, err := filepath.Glob(filepath.Join(e.State, "podclients/mounts/*.*"))
		return err == nil && len(left) <= 3
	})
	for _, c := range []*containers.Container{pod, late, other} {
		if err := c.Stop(); err != nil {
			t.Error(err)
		}
	}
	p.unpublish()
	p.NothingLeft(t)
	rigtest.Await(t, eventually, "the client to end with its connection", func() bool { return ended(client) })
}

// The client of examples/pod-clients.yaml works as it is there, but for the paths and the service of this machine.
func TestTheExample(t *testing.T) {
	t.Parallel()
	e := start(t)
	rigtest.NeedClient(t, "mountpoint-s3")
	e.Put(t, bucket, "genomes/file", "content")
	text, err := os.ReadFile("../../examples/pod-clients.yaml")
	if err != nil {
		t.Fatal(err)
	}
	_, text, _ = bytes.Cut(text, []byte("\n---\n"))
	var o struct {
		Spec struct {
			InitContainers []struct {
				Command []string `json:"command"`
			} `json:"initContainers"`
		} `json:"spec"`
	}
	if err := yaml.Unmarshal(text, &o); err != nil || len(o.Spec.InitContainers) != 1 {
		t.Fatalf("%+v, %v", o, err)
	}
	p := e.pod(t, podUID)
	p.publish()
	var args []string
	for _, arg := range o.Spec.InitContainers[0].Command {
		for old, now := range map[string]string{"/usr/local/bin/s3-csi-": e.Clients + "/s3-csi-", "/fuse-fd-passing/data.sock": p.shortSocket(),
			"us-west-2": e.Rig.S3.Region} {
			arg = strings.ReplaceAll(arg, old, now)
		}
		if arg == "reference" {
			arg = bucket
		}
		args = append(args, arg)
	}
	p.run(t, podUID, p.s3(), append(args, "--endpoint-url="+e.Rig.S3.Endpoint, "--force-path-style")...)
	rigtest.Await(t, eventually, "the client", func() bool { return p.shows("content") })
	p.unpublish()
	p.NothingLeft(t)
}

// Only processes of the pod get the descriptor, even if others can reach the socket.
func TestForeignPeersAreRefused(t *testing.T) {
	t.Parallel()
	e := start(t)
	e.Put(t, bucket, "file", "content")
	p := e.pod(t, podUID)
	p.publish()
	for _, uid := range []string{otherUID, ""} {
		foreign := p.connectFrom(uid)
		<-foreign.done
		if !strings.Contains(foreign.output.String(), "not a process of the volume's pod") {
			t.Errorf("a process of pod %q: %s", uid, foreign.output.String())
		}
	}
	p.client()
	rigtest.Await(t, eventually, "the pod's own client", func() bool { return p.shows("content") })
	p.unpublish()
	p.NothingLeft(t)
}

// A pod's containers can do what they like to the emptyDir volume. It never leads out of it.
func TestTheSocketIsMadeAgain(t *testing.T) {
	t.Parallel()
	e := start(t)
	e.Put(t, bucket, "file", "content")
	p := e.pod(t, podUID)
	outside := filepath.Join(e.Dir, "outside")
	if err := os.WriteFile(outside, []byte("x"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink(outside, p.socket); err != nil {
		t.Fatal(err)
	}
	p.publish()
	unchanged := func() {
		t.Helper()
		info, err := os.Stat(outside)
		if b, rerr := os.ReadFile(outside); err != nil || rerr != nil || info.Mode().Perm() != 0o600 || !bytes.Equal(b, []byte("x")) {
			t.Errorf("a file outside was changed: %v, %v", info, errors.Join(err, rerr))
		}
	}
	unchanged()
	if err := errors.Join(os.Remove(p.socket), os.Symlink(outside, p.socket)); err != nil {
		t.Fatal(err)
	}
	p.publish()
	p.client()
	rigtest.Await(t, eventually, "a client over the new socket", func() bool { return p.shows("content") })
	unchanged()
	p.unpublish()
	p.NothingLeft(t)
}

// Whatever the state, unpublish is quick, leaves nothing, and can be repeated.
func TestUnpublishInEachState(t *testing.T) {
	t.Parallel()
	e := start(t)
	e.Put(t, bucket, "file", "content")
	states := map[string]func(p *pod){
		"no client": func(*pod) {},
		"serving": func(p *pod) {
			p.client()
			rigtest.Await(p.t, eventually, "the client", func() bool { return p.shows("content") })
		},
		"client exited": func(p *pod) {
			c := p.client()
			rigtest.Await(p.t, eventually, "the client", func() bool { return p.shows("content") })
			c.kill()
		},
		"file open": func(p *pod) {
			p.client()
			rigtest.Await(p.t, eventually, "the client", func() bool { return p.shows("content") })
			f, err := os.Open(filepath.Join(p.target, "file"))
			if err != nil {
				p.t.Fatal(err)
			}
			p.t.Cleanup(func() { _ = f.Close() })
		},
		"emptyDir gone": func(p *pod) {
			if err := os.RemoveAll(filepath.Dir(p.socket)); err != nil {
				p.t.Fatal(err)
			}
		},
		"after a restart, serving": func(p *pod) {
			p.client()
			rigtest.Await(p.t, eventually, "the client", func() bool { return p.shows("content") })
			e.Kill()
			e.drive()
			p.env = e
		},
		neverReads:           func(p *pod) { p.hostile(neverReads) },
		hostile.NeverAnswers: func(p *pod) { p.hostile(hostile.NeverAnswers) },
	}
	for i, name := range slices.Sorted(func(yield func(string) bool) {
		for name := range states {
			if !yield(name) {
				return
			}
		}
	}) {
		t.Run(name, func(t *testing.T) {
			p := e.pod(t, fmt.Sprintf("%08d%s", i, podUID[8:]))
			p.publish()
			states[name](p)
			p.unpublish()
			p.unpublish()
			p.NothingLeft(t)
		})
	}
}

// What is published stays when pod clients are turned off, and nothing else is published.
func TestPodClients_TurnedOff(t *testing.T) {
	t.Parallel()
	e := start(t)
	p := e.pod(t, podUID)
	p.publish()
	e.Kill()
	e.flags = append(e.flags, "--pod-clients=false")
	e.drive()
	p.publish()
	p.unpublish()
	if err := p.tryPublish(nil); status.Code(err) != codes.InvalidArgument || !strings.Contains(err.Error(), "not enabled") {
		t.Errorf("turned off: %v", err)
	}
	p.NothingLeft(t)
}

// Without its emptyDir volume, the pod's events have the reason, and nothing is left.
func TestMissingEmptyDir(t *testing.T) {
	t.Parallel()
	e := start(t)
	p := e.pod(t, podUID)
	if err := errors.Join(os.Remove(p.ready()), os.RemoveAll(filepath.Dir(p.socket))); err != nil {
		t.Fatal(err)
	}
	if err := p.tryPublish(nil); status.Code(err) != codes.FailedPrecondition || !strings.Contains(err.Error(), emptyDir) {
		t.Errorf("%v", err)
	}
	p.NothingLeft(t)
	done := make(chan error, 1)
	go func() { done <- p.tryPublish(nil) }() // kubelet makes both at the same time
	rigtest.Await(t, eventually, "the publish to have begun", func() bool { _, err := os.Stat(p.target); return err == nil })
	p.makeEmptyDir()
	if err := <-done; err != nil {
		t.Error(err)
	}
	p.unpublish()
	p.NothingLeft(t)
}

// While no driver runs, everything is unmounted. A volume whose pod's directory was removed is removed, the others are published again.
func TestPodsThatAreGone(t *testing.T) {
	t.Parallel()
	e := start(t)
	e.Put(t, bucket, "file", "content")
	gone, stays := e.pod(t, podUID), e.pod(t, otherUID)
	gone.publish()
	stays.publish()
	e.Kill()
	mounts, err := filepath.Glob(filepath.Join(e.State, "podclients/mounts/*.*"))
	if err != nil || len(mounts) != 2 {
		t.Fatalf("%q, %v", mounts, err)
	}
	for _, dir := range append(mounts, gone.target, stays.target) {
		if err := unix.Unmount(dir, unix.UMOUNT_NOFOLLOW); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.RemoveAll(gone.dir); err != nil {
		t.Fatal(err)
	}
	e.drive()
	stays.env = e
	rigtest.Await(t, eventually, "the record of the volume whose pod is gone to be removed", func() bool {
		records, err := filepath.Glob(filepath.Join(e.State, "podclients/*.json"))
		return err == nil && len(records) == 1
	})
	stays.publish()
	stays.serve()
	stays.unpublish()
	stays.NothingLeft(t)
}

// A target that another mount hides cannot be unmounted. The request fails at once, and succeeds when it can be.
func TestHiddenTarget(t *testing.T) {
	t.Parallel()
	e := start(t)
	p := e.pod(t, podUID)
	p.publish()
	dir := filepath.Join(p.dir, "volumes")
	if err := unix.Mount(dir, dir, "", unix.MS_BIND, ""); err != nil { // without the mounts below
		t.Fatal(err)
	}
	_, err := ask(t, p.NodeUnpublishVolume, &csi.NodeUnpublishVolumeRequest{VolumeId: p.handle(), TargetPath: p.target})
	if status.Code(err) != codes.FailedPrecondition || !strings.Contains(err.Error(), p.target) {
		t.Errorf("%v", err)
	}
	if err := unix.Unmount(dir, unix.UMOUNT_NOFOLLOW); err != nil {
		t.Fatal(err)
	}
	p.unpublish()
	p.NothingLeft(t)
}
