package podclient

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"os"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sys/unix"

	"github.com/s3-csi/s3-csi-driver/pkg/fdpass"
	"github.com/s3-csi/s3-csi-driver/tests/rig/rigtest"
)

// What a client does that is not one.
const (
	neverReads     = "never reading the descriptor"
	neverAnswers   = "never answering"
	garbage        = "answering garbage"
	diesAfterInit  = "dying after INIT"
	hangsAfterInit = "silent after INIT"
	hangsOnStat    = "answering all but attributes"
)

// The numbers of requests (include/uapi/linux/fuse.h).
const (
	opGetattr = 3
	opStatfs  = 17
	opInit    = 26
)

// beHostile is the client's process. It writes "ready" when it does what it is for.
func beHostile(kind string) int {
	if err := hostile(kind); err != nil {
		fmt.Println(err)
		return 1
	}
	return 0
}

func hostile(kind string) error {
	path := os.Getenv(fdpass.EnvSocket)
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
		return sleep()
	}
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	fd, err := fdpass.Receive(ctx, path)
	if err != nil {
		return err
	}
	if kind == neverAnswers {
		return sleep()
	}
	buf := make([]byte, 1<<18)
	for first := true; ; first = false {
		n, err := unix.Read(fd, buf)
		if errors.Is(err, unix.EINTR) {
			continue
		}
		if err != nil || n < 40 {
			return fmt.Errorf("reading a request: %d, %w", n, err)
		}
		op, unique := binary.NativeEndian.Uint32(buf[4:]), binary.NativeEndian.Uint64(buf[8:])
		switch {
		case op == opInit && kind == garbage:
			for i := range 64 {
				_, _ = unix.Write(fd, make([]byte, i)) // too short, and of no request
			}
			err = reply(fd, unique, make([]byte, 24)) // of protocol 0.0
		case op == opInit:
			init := make([]byte, 64)
			for i, v := range []uint32{7, 31, 1 << 17, 0, 12 | 9<<16, 1 << 17, 1} {
				binary.NativeEndian.PutUint32(init[4*i:], v)
			}
			err = reply(fd, unique, init)
		case kind == diesAfterInit:
			return nil
		case op == opStatfs && kind == hangsOnStat:
			err = reply(fd, unique, make([]byte, 80))
		}
		if err != nil {
			return fmt.Errorf("answering: %w", err)
		}
		if first {
			fmt.Println("ready")
		}
	}
}

func sleep() error {
	fmt.Println("ready")
	time.Sleep(time.Hour)
	return io.EOF
}

func reply(fd int, unique uint64, body []byte) error {
	b := make([]byte, 16, 16+len(body))
	binary.NativeEndian.PutUint32(b, uint32(16+len(body)))
	binary.NativeEndian.PutUint64(b[8:], unique)
	_, err := unix.Write(fd, append(b, body...))
	return err
}

// Whatever a client does, its target and the other volumes answer kubelet, and its volume can be unpublished at once.
func TestHostileClients(t *testing.T) {
	t.Parallel()
	e := start(t, "--hang-timeout=3s", "--mount-timeout=3s")
	e.Put(t, bucket, "file", "content")
	innocent := e.pod(t, otherUID)
	innocent.publish()
	innocent.serve()
	t.Run("clients", func(t *testing.T) { everyHostileClient(t, e, innocent) })
	innocent.unpublish()
	e.AwaitNothingLeft(t, eventually)
}

func everyHostileClient(t *testing.T, e *env, innocent *pod) {
	for i, kind := range []string{neverReads, neverAnswers, garbage, diesAfterInit, hangsAfterInit, hangsOnStat} {
		t.Run(kind, func(t *testing.T) {
			t.Parallel()
			p := e.pod(t, fmt.Sprintf("%08d%s", i, podUID[8:]))
			p.publish()
			c := p.hostile(kind)
			for range 3 {
				if err := p.look(); err != nil {
					t.Errorf("the target: %v", err)
				}
				if err := within(t, bounded, "the target of the other volume", func() error { _, err := os.Stat(innocent.target + "/file"); return err }); err != nil {
					t.Error(err)
				}
				p.publish() // as kubelet does every now and then
				innocent.publish()
				p.stats()
			}
			if kind == diesAfterInit || kind == garbage { // the driver ends a connection that the kernel gave up
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
			if !innocent.shows("content") {
				t.Error("the other volume does not serve any more")
			}
		})
	}
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
	_ = within(p.t, bounded, "statistics", func() error {
		ctx, cancel := context.WithTimeout(p.t.Context(), eventually)
		defer cancel()
		_, err := p.NodeGetVolumeStats(ctx, &csi.NodeGetVolumeStatsRequest{VolumeId: p.handle(), VolumePath: p.target})
		return err
	})
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
			entries, err := os.ReadDir(p.target)
			if err != nil || len(entries) == 0 {
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
