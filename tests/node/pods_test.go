//go:build !lane || ordinary

package node

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/s3-csi/s3-csi-driver/tests/internal/containers"
	"github.com/s3-csi/s3-csi-driver/tests/internal/pressure"
	"github.com/s3-csi/s3-csi-driver/tests/internal/rig/rigtest"
)

// tryContainer starts a container, as a kubelet does that tries again: why tells why not.
func tryContainer(t *testing.T, o containers.Options) (c *containers.Container, why string) {
	t.Helper()
	r := &refusal{TB: t}
	defer func() {
		if p := recover(); p != nil {
			if _, ok := p.(refused); !ok {
				panic(p)
			}
			why = r.why
		}
	}()
	return containers.Start(r, o), ""
}

// subpath is kubelet's bind of a directory of a pod's volume.
func (e *env) subpath(uid, volume, dir string) string {
	e.t.Helper()
	subpath := filepath.Join(e.Dir, "targets", "pods", uid, "volume-subpaths", volume, "app", "0")
	if err := os.MkdirAll(subpath, 0o755); err != nil {
		e.t.Fatal(err)
	}
	if err := unix.Mount(filepath.Join(e.podTarget(uid, volume), dir), subpath, "", unix.MS_BIND, ""); err != nil {
		e.t.Fatal(err)
	}
	e.t.Cleanup(func() { _ = unix.Unmount(subpath, unix.MNT_DETACH) }) // where the test ends early
	return subpath
}

// reads waits until a file in a container reads so.
func reads(t *testing.T, c *containers.Container, limit time.Duration, path, content string) {
	t.Helper()
	var got string
	var err error
	for began := pressure.Now(); began.Since() <= limit; time.Sleep(10 * time.Millisecond) {
		if got, err = c.Read(t.Context(), path); err == nil && got == content {
			return
		}
	}
	t.Errorf("for %s %s reads %q, %v", limit, path, got, err)
}

// An agent that holds a private copy of the host's root keeps neither the stale connection nor, at the end, the
// healthy one.
func TestAnAgentWithACopyOfTheHostKeepsNothing(t *testing.T) {
	eachClient(t, func(t *testing.T, e *env, client string) {
		e.Put(t, bucket, "copied/file", "content")
		v := static("copied", client)
		target := e.podTarget(podUID, "pv")
		e.publishAt(v, target)
		ctl := t.TempDir()
		if err := unix.Mount("fusectl", ctl, "fusectl", 0, ""); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = unix.Unmount(ctl, unix.MNT_DETACH) })
		agent := container(t)
		before := ours(t, agent, "copied")
		if len(before) != 2 {
			t.Fatalf("the agent has %d copies of the mount", len(before))
		}
		dead := filepath.Join(ctl, strconv.Itoa(before[0].Minor))
		if _, err := os.Stat(dead); err != nil {
			t.Fatal(err)
		}
		rigtest.Kill(e.t, e.client(client))
		e.awaitRead(eventually, filepath.Join(target, "file"), "content")
		e.await(5*time.Second, "the agent's dead copies to be detached", func() bool { return len(ours(t, agent, "copied")) == 0 })
		for _, now := range mountsAt(t, target) {
			if now.Minor == before[0].Minor { // the number was given out again at once
				dead = ""
			}
		}
		if dead != "" { // the kernel takes a detached mount apart a little later
			e.await(5*time.Second, "the end of the dead connection", func() bool { _, err := os.Stat(dead); return errors.Is(err, os.ErrNotExist) })
		}
		late := container(t)
		if n := len(ours(t, late, "copied")); n != 2 {
			t.Errorf("a later agent has %d copies", n)
		}
		began := pressure.Now()
		e.unpublish(v, target)
		if took := began.Since(); took > 5*time.Second {
			t.Errorf("the unpublication took %s", took)
		}
		if n := len(ours(t, late, "copied")); n != 0 {
			t.Errorf("the later agent still has %d copies", n)
		}
		e.awaitNothingLeft(5 * time.Second)
	})
}

// In a container with a user namespace of its own what can be written to heals. What is mounted read-only there cannot be
// replaced without its becoming writable: it stays stale until the container is started again.
func TestAContainerInAUserNamespaceHealsWhatItMayWriteTo(t *testing.T) {
	t.Parallel()
	containers.Need(t)
	rigtest.ProcessOnly(t, "the tests' host with a systemd has no whole /proc, without which the kernel refuses to mount one in a user namespace")
	eachClient(t, func(t *testing.T, e *env, client string) {
		e.Put(t, bucket, "lesser/file", "content")
		v := static("lesser", client)
		target := e.podTarget(podUID, "pv")
		e.publishAt(v, target)
		options := containers.Options{PodUID: podUID, UserNamespace: true, Mounts: []containers.Mount{{Source: target, Target: "/data"},
			{Source: target, Target: "/ro", ReadOnly: true}}}
		pod := containers.Start(t, options)
		for _, path := range []string{"/data/file", "/ro/file"} {
			reads(t, pod, eventually, path, "content")
		}
		rigtest.Kill(e.t, e.client(client))
		reads(t, pod, eventually, "/data/file", "content")
		if err := pod.Write(t.Context(), "/data/new", "from the container"); err != nil {
			t.Error(err)
		}
		e.logged("Stale mount not replaced", "at /ro ", "read-only mount in a user namespace", "restart the")
		if _, err := pod.Read(t.Context(), "/ro/file"); !errors.Is(err, unix.ENOTCONN) {
			t.Errorf("the read-only mount answers %v", err)
		}
		if n := e.count("s3csi_mount_heals_total", "container", "failed"); n == 0 {
			t.Error("what is left stale is not counted")
		}
		stop(t, pod)
		again := containers.Start(t, options)
		reads(t, again, eventually, "/ro/file", "content")
		if err := again.Write(t.Context(), "/ro/new", "x"); !errors.Is(err, unix.EROFS) {
			t.Errorf("writing to the read-only mount: %v", err)
		}
		stop(t, again)
		e.unpublish(v, target)
		if got := e.Object(t, bucket, "lesser/new"); got != "from the container" {
			t.Errorf("the object is %q", got)
		}
		e.awaitNothingLeft(5 * time.Second)
	})
}

// A container that is to start while its volume is stale does not start, or does and gets errors, where the runtime does not
// notice; also on a subpath, for which kubelet makes no new bind. As soon as a driver has healed the volume both are well,
// without any help.
func TestAContainerIsWellOnceItsVolumeIsHealed(t *testing.T) {
	rigtest.ProcessOnly(t, "which containers are healed does not depend on who started the client")
	t.Parallel()
	containers.Need(t)
	eachClient(t, func(t *testing.T, e *env, client string) {
		e.Put(t, bucket, "late/sub/file", "content")
		v := static("late", client)
		target := e.podTarget(podUID, "pv")
		e.publishAt(v, target)
		subpath := e.subpath(podUID, "pv", "sub")
		options := func(source string) containers.Options {
			return containers.Options{PodUID: podUID, Mounts: []containers.Mount{{Source: source, Target: "/data"}}, Own: map[string]string{"data/file": "its own"}}
		}
		e.Kill() // so nothing heals it
		rigtest.Kill(e.t, e.client(client))
		// The kernel asks the client again, gets no answer and drops the name of the subpath's directory.
		time.Sleep(nameTTL)
		if _, err := os.Stat(filepath.Join(target, "sub")); !errors.Is(err, unix.ENOTCONN) {
			t.Errorf("a look-up without a client: %v", err)
		}
		if m := mountsAt(t, subpath); client == mountpoint && (len(m) != 1 || !strings.HasSuffix(m[0].Root, "//deleted")) {
			t.Errorf("the mount of the subpath is %+v: this shows nothing", m)
		}
		files := map[string]string{target: "/data/sub/file", subpath: "/data/file"}
		early := map[string]*containers.Container{}
		for source, file := range files {
			c, why := tryContainer(t, options(source))
			if why != "" {
				continue
			}
			if _, err := c.Read(t.Context(), file); !errors.Is(err, unix.ENOTCONN) {
				t.Errorf("a container on %s, which is stale, gets %v", source, err)
			}
			early[source] = c
		}
		t.Logf("%d containers started on a stale volume", len(early))
		e.drive()
		for source, file := range files {
			e.awaitRead(3*time.Second, filepath.Join(source, strings.TrimPrefix(file, "/data")), "content")
			c := containers.Start(t, options(source))
			reads(t, c, eventually, file, "content")
			stop(t, c)
			if c := early[source]; c != nil {
				reads(t, c, eventually, file, "content")
				stop(t, c)
			}
		}
		if err := unix.Unmount(subpath, 0); err != nil {
			t.Error(err)
		}
		e.unpublish(v, target)
		e.awaitNothingLeft(5 * time.Second)
	})
}

// A container that starts while its volume's client exits and heals, at whichever moment, is healed like one that was there before.
func TestContainersThatComeUpDuringAHealAreHealed(t *testing.T) {
	rigtest.ProcessOnly(t, "which containers are healed does not depend on who started the client")
	t.Parallel()
	containers.Need(t)
	e := start(t)
	e.Put(t, bucket, "meanwhile/file", "content")
	v := static("meanwhile", mountpoint)
	target := e.podTarget(podUID, "pv")
	options := containers.Options{PodUID: podUID, Mounts: []containers.Mount{{Source: target, Target: "/data"}}, Own: map[string]string{"data/file": "its own"}}
	started := 0
	for i := range 16 {
		e.publishAt(v, target)
		victim := e.client(mountpoint)
		killed := make(chan struct{})
		go func() {
			defer close(killed)
			time.Sleep(time.Duration(i) * 8 * time.Millisecond) // any moment of the container's start will do
			_ = unix.Kill(victim.PID, unix.SIGKILL)
		}()
		c, why := tryContainer(t, options)
		<-killed
		if why == "" {
			started++
			reads(t, c, 3*time.Second, "/data/file", "content")
			stop(t, c)
		}
		e.awaitRead(3*time.Second, filepath.Join(target, "file"), "content")
		e.unpublish(v, target)
	}
	t.Logf("%d containers started", started)
	e.awaitNothingLeft(5 * time.Second)
}

// The only pod is deleted while its volume heals: the mount ends, and does not come back.
func TestTheLastPodGoesDuringAHeal(t *testing.T) {
	t.Parallel()
	eachClient(t, func(t *testing.T, e *env, client string) {
		v := static("last", client)
		for i := range 8 {
			target := e.podTarget(podUID, "pv")
			e.publishAt(v, target)
			name := fmt.Sprintf("file-%d", i)
			write(t, filepath.Join(target, name), "closed")
			rigtest.Kill(e.t, e.client(client))
			time.Sleep(time.Duration(i) * 15 * time.Millisecond)
			e.unpublish(v, target)
			if got := e.Object(t, bucket, "last/"+name); got != "closed" {
				t.Errorf("round %d: the object is %q", i, got)
			}
			e.awaitNothingLeft(5 * time.Second)
		}
	})
}

// A container of a Nomad allocation is found by the allocation's directory, which Nomad mounts in it, because its cgroup names only the
// container. A container of another allocation that happens to have a copy is left alone.
func TestContainersOfNomadAllocationsHeal(t *testing.T) {
	rigtest.ProcessOnly(t, "which containers are healed does not depend on who started the client")
	t.Parallel()
	containers.Need(t)
	eachClient(t, func(t *testing.T, e *env, client string) {
		e.Put(t, bucket, "allocation/file", "content")
		data := filepath.Join(e.Dir, "targets", "nomad")
		target := filepath.Join(data, "client", "csi", "monolith", "s3", "per-alloc", podUID, "data", "rw-file-system-multi-node-multi-writer")
		if err := os.MkdirAll(filepath.Dir(target), 0o755); err != nil {
			t.Fatal(err)
		}
		e.publishAt(static("allocation", client), target)
		var cs []*containers.Container
		for _, id := range []string{podUID, otherPodUID} {
			shared := filepath.Join(data, "alloc", id, "alloc")
			if err := os.MkdirAll(shared, 0o755); err != nil {
				t.Fatal(err)
			}
			c := containers.Start(t, containers.Options{
				Cgroup: containers.CgroupDocker,
				Mounts: []containers.Mount{{Source: shared, Target: "/alloc"}, {Source: target, Target: "/data"}},
			})
			cs = append(cs, c)
			reads(t, c, eventually, "/data/file", "content")
		}
		rigtest.Kill(e.t, e.client(client))
		reads(t, cs[0], eventually, "/data/file", "content")
		e.await(eventually, "the mount in one container to be replaced", func() bool { return e.count("s3csi_mount_heals_total", "container", "replaced") >= 1 })
		if got, err := cs[1].Read(t.Context(), "/data/file"); err == nil {
			t.Errorf("a container of another allocation reads %q", got)
		}
		stop(t, cs...)
	})
}
