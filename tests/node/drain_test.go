//go:build !lane || ordinary

package node

import (
	"context"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/s3-csi/s3-csi-driver/tests/internal/faultproxy"
	"github.com/s3-csi/s3-csi-driver/tests/internal/pressure"
	"github.com/s3-csi/s3-csi-driver/tests/internal/rig/rigtest"
)

// A file that was written and closed is stored when unpublish says OK, also when that takes longer than one call, and
// also when the driver is killed in between.
func TestUnpublishWaitsUntilEverythingIsStored(t *testing.T) {
	e := start(t)
	for _, name := range []string{"calm", "crash"} {
		v := static(name, rclone)
		content := random(3 << 20)
		target := e.publish(v, v.GetVolumeId())
		e.proxy.Set(crawling)
		write(t, filepath.Join(target, "data.bin"), content)
		write(t, filepath.Join(target, "second"), "small")

		e.awaitBusy(v, target, "draining: ", "upload", " MiB", "a retry waits for it")
		if keys := e.Keys(t, bucket, v.GetVolumeId()+"/data.bin"); len(keys) > 0 {
			t.Fatalf("the upload is over already (%v): this test proves nothing", keys)
		}
		if len(mountsAt(t, target)) > 0 {
			t.Error("the target is still mounted while the mount drains")
		}
		if name == "crash" {
			e.restart()
			e.awaitBusy(v, target, "draining: ")
		}
		e.proxy.Set(slow)
		e.unpublish(v, target)
		if got := e.Object(t, bucket, v.GetVolumeId()+"/data.bin"); got != content {
			t.Errorf("the object has %d bytes, %d were written; equal: %t", len(got), len(content), got == content)
		}
		if got := e.Object(t, bucket, v.GetVolumeId()+"/second"); got != "small" {
			t.Errorf("the second object: %q", got)
		}
		e.proxy.Set(faultproxy.Faults{})
		e.NothingLeft(t)
	}
}

// The error of an unpublication that has to wait names what is left to store, with both clients: with Mountpoint, whose programs wait for their
// files themselves when they close them, that is what another process closed, and empty files.
func TestUnpublishNamesUploadsInFlight(t *testing.T) {
	rigtest.ProcessOnly(t, "uploads are the client's own doing")
	t.Parallel()
	own(t)
	eachClient(t, func(t *testing.T, e *env, client string) {
		const files = 20
		v := static("uploads", client)
		target := e.publish(v, "t")
		writers := map[*exec.Cmd]io.Closer{} // and what they wait for
		for i := range files {
			f, err := os.Create(filepath.Join(target, fmt.Sprint(i)))
			if err != nil {
				t.Fatal(err)
			}
			if i%2 == 0 { // the others stay empty
				cmd := exec.CommandContext(t.Context(), "sh", "-c", "read go; echo content")
				cmd.Stdout = f
				if writers[cmd], err = cmd.StdinPipe(); err == nil {
					err = cmd.Start()
				}
				if err != nil {
					t.Fatal(err)
				}
			}
			f.Close()
		}
		e.proxy.Set(faultproxy.Faults{Latency: 3 * time.Second})
		for _, gate := range writers {
			gate.Close()
		}
		for cmd := range writers {
			if err := cmd.Wait(); err != nil {
				t.Error(err)
			}
		}
		e.awaitBusy(v, target, "draining: ", " upload", "a retry waits for it")
		e.proxy.Set(faultproxy.Faults{})
		e.unpublish(v, target)
		for i := range files {
			want := ""
			if i%2 == 0 {
				want = "content\n"
			}
			if got := e.Object(t, bucket, fmt.Sprintf("uploads/%d", i)); got != want {
				t.Errorf("object %d is %q", i, got)
			}
		}
		e.NothingLeft(t)
	})
}

// A publication that comes while the previous generation of the mount drains waits, and sees what that stored.
func TestPublishDuringADrainSeesAllThatWasWritten(t *testing.T) {
	t.Parallel()
	e := start(t)
	v := static("again", rclone)
	content := random(3 << 20)
	target := e.publish(v, "a")
	e.proxy.Set(crawling)
	write(t, filepath.Join(target, "data.bin"), content)
	e.awaitBusy(v, target, "draining")
	e.proxy.Set(slow)
	other := e.publish(v, "b")
	e.proxy.Set(faultproxy.Faults{})
	if got := read(t, filepath.Join(other, "data.bin")); got != content {
		t.Errorf("the new mount reads %d bytes, equal: %t", len(got), got == content)
	}
	e.unpublish(v, target)
	e.unpublish(v, other)
	e.NothingLeft(t)
}

// What a client stores only when a file is released must not be lost to an unmount that comes before: a shell's
// redirection is closed by another process than the one that opened it, and an empty file is stored on release.
func TestUnpublishWaitsForFilesThatAreBeingReleased(t *testing.T) {
	rigtest.ProcessOnly(t, "uploads are the client's own doing")
	t.Parallel()
	eachClient(t, func(t *testing.T, e *env, client string) {
		v := static("release", client)
		target := e.publish(v, "a")
		content := random(3 << 20)
		from := filepath.Join(e.Dir, "content")
		write(t, from, content)

		f, err := os.Create(filepath.Join(target, "redirected"))
		if err != nil {
			t.Fatal(err)
		}
		cmd := exec.CommandContext(t.Context(), "sh", "-c", "sleep 0.2; exec cat "+from)
		cmd.Stdout = f
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		f.Close()
		empty, err := os.Create(filepath.Join(target, "empty"))
		if err != nil {
			t.Fatal(err)
		}
		e.proxy.Set(faultproxy.Faults{Bandwidth: 1 << 20, Latency: 300 * time.Millisecond})
		if err := cmd.Wait(); err != nil {
			t.Fatal(err)
		}
		empty.Close()
		if err := e.tryUnpublish(brief, v, target); err != nil && status.Code(err) != codes.DeadlineExceeded {
			want(t, err, codes.Aborted)
		}
		e.unpublish(v, target)
		if got := e.Object(t, bucket, "release/redirected"); got != content {
			t.Errorf("the object has %d bytes of %d, equal: %t", len(got), len(content), got == content)
		}
		if got := e.Object(t, bucket, "release/empty"); got != "" {
			t.Errorf("the empty object has %d bytes", len(got))
		}
		e.NothingLeft(t)
	})
}

// An outage of S3 while a mount drains is waited out.
func TestDrainOutlastsAnOutage(t *testing.T) {
	t.Parallel()
	e := start(t)
	v := static("outage", rclone)
	target := e.publish(v, "a")
	e.proxy.Set(faultproxy.Faults{Refuse: true})
	write(t, filepath.Join(target, "file"), "kept")
	e.awaitBusy(v, target, "draining: 1 upload, 4 B")
	e.proxy.Set(faultproxy.Faults{})
	e.unpublish(v, target)
	if got := e.Object(t, bucket, "outage/file"); got != "kept" {
		t.Errorf("the object is %q", got)
	}
	e.NothingLeft(t)
}

// A client that is killed with files to store is started again, until they are: by the unpublish, or by a publication
// that comes first and must see them.
func TestWhatAKilledClientHadToStoreIsStored(t *testing.T) {
	t.Parallel()
	for _, who := range []string{"client", "client and helper", "client, and the driver after it"} {
		t.Run(who, func(t *testing.T) {
			e := start(t)
			v := static("killed", rclone)
			target := e.publish(v, "t")
			content := random(3 << 20)
			e.proxy.Set(faultproxy.Faults{Refuse: true})
			write(t, filepath.Join(target, "file"), content)
			e.awaitBusy(v, target, "draining") // the file's close has arrived
			if who == "client and helper" {
				for _, p := range e.Running("") {
					rigtest.Kill(e.t, p)
				}
			} else {
				rigtest.Kill(e.t, e.client(rclone))
			}
			if who == "client, and the driver after it" {
				e.restart()
			}
			e.proxy.Set(faultproxy.Faults{})
			e.unpublish(v, target)
			if got := e.Object(t, bucket, "killed/file"); got != content {
				t.Errorf("the object has %d bytes of %d, equal: %t", len(got), len(content), got == content)
			}
			e.awaitNothingLeft(5 * time.Second)
		})
	}
	t.Run("a publication comes first", func(t *testing.T) {
		e := start(t)
		v := static("killed", rclone)
		target := e.publish(v, "t")
		content := random(3 << 20)
		e.proxy.Set(slow)
		write(t, filepath.Join(target, "file"), content)
		time.Sleep(300 * time.Millisecond) // the close is asynchronous where the kernel is concerned
		rigtest.Kill(e.t, e.client(rclone))
		e.proxy.Set(faultproxy.Faults{})
		e.publish(v, "t")
		if got := read(t, filepath.Join(target, "file")); got != content {
			t.Errorf("the new mount reads %d bytes, equal: %t", len(got), got == content)
		}
		e.unpublish(v, target)
		if got := e.Object(t, bucket, "killed/file"); got != content {
			t.Errorf("the object has %d bytes, equal: %t", len(got), got == content)
		}
		e.awaitNothingLeft(5 * time.Second)
	})
}

// A driver that is stopped while a mount drains exits at once, with status 0; the next one continues the drain.
func TestAStopDoesNotWaitForADrain(t *testing.T) {
	t.Parallel()
	e := start(t, "--shutdown-timeout=500ms")
	v := static("stopped", rclone)
	target := e.publish(v, "t")
	e.proxy.Set(faultproxy.Faults{Refuse: true})
	write(t, filepath.Join(target, "file"), "content")
	asked := make(chan struct{})
	go func() { defer close(asked); _ = e.tryUnpublish(time.Minute, v, target) }()
	e.await(10*time.Second, "the target to be unmounted", func() bool { return len(mountsAt(t, target)) == 0 })
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	began := pressure.Now()
	if code, err := e.Stop(ctx); code != 0 || err != nil {
		t.Errorf("exit code %d, %v", code, err)
	}
	if took := began.Since(); took > 10*time.Second {
		t.Errorf("it took %s", took)
	}
	<-asked
	e.proxy.Set(faultproxy.Faults{})
	e.drive()
	e.unpublish(v, target)
	if got := e.Object(t, bucket, "stopped/file"); got != "content" {
		t.Errorf("the object is %q", got)
	}
	e.NothingLeft(t)
}
