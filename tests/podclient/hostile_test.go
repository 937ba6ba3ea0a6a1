package podclient

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	grpcstatus "google.golang.org/grpc/status"

	"github.com/s3-csi/s3-csi-driver/pkg/osfile"
	"github.com/s3-csi/s3-csi-driver/pkg/podvolume"
	"github.com/s3-csi/s3-csi-driver/tests/internal/hostile"
	"github.com/s3-csi/s3-csi-driver/tests/internal/rig/rigtest"
)

// What a client in a pod does, beside the kinds of the package hostile.
const (
	neverReads    = "never reading the descriptor"
	connectsAgain = "connecting again and again"
)

// beHostile is the client's process.
func beHostile(kind string) int {
	if err := behave(kind); err != nil {
		fmt.Println(err)
		return 1
	}
	return 0
}

func behave(kind string) error {
	path := os.Getenv(osfile.EnvFuseSocket)
	if kind == neverReads {
		fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM, 0)
		if err == nil {
			err = unix.Connect(fd, &unix.SockaddrUnix{Name: path})
		}
		if err != nil {
			return err
		}
		// The message has come, and stays unread.
		if _, err := unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}, -1); err != nil {
			return err
		}
		return hostile.Sleep()
	}
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	fd, err := osfile.ReceiveFuse(ctx, path)
	if err != nil {
		return err
	}
	if kind == connectsAgain {
		return reconnect(ctx, fd, path)
	}
	return hostile.Serve(kind, fd)
}

// reconnect takes descriptor after descriptor, closes each, and writes how many it got.
func reconnect(ctx context.Context, fd int, path string) error {
	ctx, cancel := context.WithTimeout(ctx, reconnectsFor)
	defer cancel()
	got := 1
	for ctx.Err() == nil {
		_ = unix.Close(fd)
		var err error
		if fd, err = osfile.ReceiveFuse(ctx, path); err == nil {
			got++
		}
	}
	fmt.Printf("descriptors: %d\n", got)
	return hostile.Sleep()
}

const reconnectsFor = 2 * time.Second

// Whatever a client does, its target and the other volumes answer kubelet, and its volume can be unpublished at once.
func TestHostileClients(t *testing.T) {
	t.Parallel()
	e := start(t, "--hang-timeout=3s", "--mount-timeout=3s")
	e.Put(t, bucket, "file", "content")
	control := e.pod(t, otherUID)
	control.publish()
	control.serve()
	t.Run("clients", func(t *testing.T) { everyHostileClient(t, e, control) })
	control.unpublish()
	e.AwaitNothingLeft(t, eventually)
}

func everyHostileClient(t *testing.T, e *env, control *pod) {
	given := []string{neverReads, hostile.NeverAnswers, hostile.Garbage, hostile.ExitsAfterInit, hostile.HangsAfterInit, hostile.HangsOnStat,
		hostile.FailsThenHangs}
	for i, kind := range given { // the driver ends the connection
		t.Run(kind, func(t *testing.T) {
			t.Parallel()
			p := e.pod(t, fmt.Sprintf("%08d%s", i, podUID[8:]))
			p.publish()
			c := p.hostile(kind)
			for range 3 {
				if err := p.look(); err != nil {
					t.Errorf("the target: %v", err)
				}
				if err := within(t, bounded, "the target of the other volume", func() error { _, err := os.Stat(control.target + "/file"); return err }); err != nil {
					t.Error(err)
				}
				p.publish() // as kubelet does every now and then
				control.publish()
				p.stats()
			}
			if kind == hostile.ExitsAfterInit || kind == hostile.Garbage { // the driver ends a connection that the kernel gave up
				rigtest.Await(t, eventually, "the end of the client", func() bool { return ended(c) })
			} else if ended(c) {
				t.Errorf("the client's process: %s", c.output.String())
			}
			// A client whose connection was ended can be followed by another one, also while its process lives.
			p.serve().kill()
			second := p.hostile(kind) // and is unpublished in its hands
			p.unpublish()
			c.kill()
			second.kill()
			if !control.shows("content") {
				t.Error("the other volume does not serve any more")
			}
		})
	}
}

// Whatever a client serves, and at whatever request it exits, looking at its target takes a moment, leads nowhere, and disturbs no other
// volume. The volume can be unpublished at once, and the next client serves it.
func TestHostileFileSystems(t *testing.T) {
	t.Parallel()
	e := start(t)
	e.Put(t, bucket, "file", "content")
	control := e.pod(t, otherUID)
	control.publish()
	control.serve()
	t.Run("clients", func(t *testing.T) {
		for i, kind := range slices.Concat(hostile.Serving(), hostile.Exiting()) {
			t.Run(kind, func(t *testing.T) {
				t.Parallel()
				p := e.pod(t, fmt.Sprintf("%08d%s", i, podUID[8:]))
				p.publish()
				c := p.hostile(kind)
				if kind != hostile.RootLink { // which is not shown
					rigtest.Await(t, eventually, "the client's file system at the target", func() bool { return p.showsFUSE(t) || ended(c) })
				}
				for range 2 {
					if err := within(t, bounded, "looking at the target", func() error { return hostile.Look(p.target, kind) }); err != nil {
						t.Error(err)
					}
					if !control.shows("content") {
						t.Error("the other volume does not serve any more")
					}
					p.stats()
					p.publish()
				}
				if kind == hostile.RootLink && p.showsFUSE(t) {
					t.Error("the target shows a file system whose root is no directory")
				}
				c.kill()
				p.serve().kill()
				second := p.hostile(kind)
				p.unpublish()
				second.kill()
			})
		}
	})
	control.unpublish()
	e.AwaitNothingLeft(t, eventually)
}

// A client that is slow, or has lost its service, is not given up: its files show, and its connection is not aborted.
func TestClientsThatAreNotGivenUp(t *testing.T) {
	t.Parallel()
	e := start(t, "--hang-timeout=3s", "--mount-timeout=3s")
	t.Run("clients", func(t *testing.T) { everyClientThatIsNotGivenUp(t, e) })
	e.NothingLeft(t)
}

func everyClientThatIsNotGivenUp(t *testing.T, e *env) {
	for i, kind := range []string{hostile.Slow, hostile.Offline} {
		t.Run(kind, func(t *testing.T) {
			t.Parallel()
			p := e.pod(t, fmt.Sprintf("%08d%s", i, podUID[8:]))
			p.publish()
			c := p.hostile(kind)
			rigtest.Await(t, eventually, "the client's file system at the target", func() bool { return p.showsFUSE(t) || ended(c) })
			shown := strings.Count(c.output.String(), hostile.AttributesAnswered)
			rigtest.Await(t, eventually, "further looks at the client", func() bool {
				return strings.Count(c.output.String(), hostile.AttributesAnswered) >= shown+4 || ended(c)
			})
			if ended(c) || !p.showsFUSE(t) {
				t.Errorf("the client was given up: %s", c.output.String())
			}
			p.unpublish()
		})
	}
}

// showsFUSE reports whether a FUSE file system is at the target, without a request to it.
func (p *pod) showsFUSE(t testing.TB) bool {
	t.Helper()
	var top unix.Statx_t
	flags := unix.AT_NO_AUTOMOUNT | unix.AT_SYMLINK_NOFOLLOW | unix.AT_STATX_DONT_SYNC // which asks no file system
	if err := unix.Statx(unix.AT_FDCWD, p.target, flags, unix.STATX_MNT_ID, &top); err != nil {
		return false
	}
	table, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(table)) {
		if strings.HasPrefix(line, strconv.FormatUint(top.Mnt_id, 10)+" ") {
			return strings.Contains(line, " - fuse ")
		}
	}
	return false
}

// A program that takes one descriptor after the other is slowed down.
func TestConnectingAgainAndAgain(t *testing.T) {
	t.Parallel()
	e := start(t)
	p := e.pod(t, podUID)
	p.publish()
	c := p.hostile(connectsAgain)
	_, text, _ := strings.Cut(c.output.String(), "descriptors: ")
	var got int
	if _, err := fmt.Sscan(text, &got); err != nil || got < 2 || got > 11 {
		t.Errorf("in %s it got %d descriptors: %v", reconnectsFor, got, err)
	}
	p.unpublish()
	p.NothingLeft(t)
}

// serve starts clients, as kubelet restarts a container, until one serves: a slow start is taken for a client that never answers, and while
// another process has the descriptor, a client is refused.
func (p *pod) serve() (c *process) {
	p.t.Helper()
	rigtest.Await(p.t, eventually, "a client of the pod to serve", func() bool {
		if c == nil || ended(c) {
			c = p.client()
		}
		return p.shows("content")
	})
	return c
}

func ended(p *process) bool {
	select {
	case <-p.done:
		return true
	default:
		return false
	}
}

// stats asks for statistics, which a client that does not serve may not delay.
func (p *pod) stats() {
	p.t.Helper()
	_, _ = ask(p.t, p.NodeGetVolumeStats, &csi.NodeGetVolumeStatsRequest{VolumeId: p.handle(), VolumePath: p.target})
}

// A client that serves and then hangs is given up after the hang timeout. Until then its volume can be unpublished at once.
func TestAClientThatHangs(t *testing.T) {
	t.Parallel()
	e := start(t, "--hang-timeout=2s")
	e.Put(t, bucket, "file", "content")
	p := e.pod(t, podUID)
	p.publish()
	c := p.serve()
	if err := unix.Kill(-c.Process.Pid, unix.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	if err := within(t, eventually, "the target of a client that hangs", func() error {
		for { // the file system may have answers of its own for a moment
			if entries, _ := os.ReadDir(p.target); len(entries) == 0 { // empty, or an error
				return nil
			}
		}
	}); err != nil {
		t.Error(err)
	}
	rigtest.Await(t, eventually, "the empty file system", func() bool { _, err := os.Stat(p.target); return err == nil })
	c.kill()
	c = p.serve()
	if err := unix.Kill(-c.Process.Pid, unix.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	p.unpublish()
	p.NothingLeft(t)
}

// A pod cannot have the driver serve any number of volumes, also if they are published at the same time.
func TestAPodWithManyVolumes(t *testing.T) {
	t.Parallel()
	const most = 16
	e := start(t)
	p := e.pod(t, podUID)
	volume := func(i int) string {
		return filepath.Join(p.dir, fmt.Sprintf("volumes/kubernetes.io~csi/data-%d/mount", i))
	}
	var g errgroup.Group
	results := make([]error, most+4)
	for i := range results {
		if err := os.MkdirAll(filepath.Dir(volume(i)), 0o755); err != nil {
			t.Fatal(err)
		}
		g.Go(func() error {
			results[i] = p.tryPublish(func(r *csi.NodePublishVolumeRequest) {
				r.TargetPath, r.VolumeContext[podvolume.AttributeSocket] = volume(i), fmt.Sprintf("%d.sock", i)
			})
			return nil
		})
	}
	_ = g.Wait()
	published, refused := 0, 0
	for i, err := range results {
		switch grpcstatus.Code(err) {
		case codes.OK:
			published++
		case codes.ResourceExhausted:
			refused++
		default:
			t.Errorf("volume %d: %v", i, err)
		}
		_, err := ask(t, p.NodeUnpublishVolume, &csi.NodeUnpublishVolumeRequest{VolumeId: p.handle(), TargetPath: volume(i)})
		if err != nil {
			t.Errorf("unpublish %d: %v", i, err)
		}
	}
	if published != most || refused != len(results)-most {
		t.Errorf("%d volumes were published, and %d were refused", published, refused)
	}
	p.publish()
	p.unpublish()
	p.NothingLeft(t)
}
