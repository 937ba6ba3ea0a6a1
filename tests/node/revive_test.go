package node

import (
	"os"
	"path/filepath"
	"testing"
	"time"

	"google.golang.org/grpc/codes"

	"github.com/s3-csi/s3-csi-driver/tests/faultproxy"
)

// unsent publishes a volume at the target and leaves a file in the client's cache that S3 does not take.
func (e *env) unsent(name, content string, changes ...change) (target string) {
	e.t.Helper()
	v := static(name, rclone)
	target = e.publish(v, "t", changes...)
	e.proxy.Set(faultproxy.Faults{Refuse: true})
	write(e.t, filepath.Join(target, "file"), content)
	time.Sleep(300 * time.Millisecond) // the close is asynchronous where the kernel is concerned
	return target
}

func (e *env) killAll() {
	e.t.Helper()
	for _, p := range e.processes("") {
		e.kill(p)
	}
}

// A helper that was started to bring a dead client back, and could not, has stored nothing: what the client had left is
// kept until one does.
func TestWhatCouldNotBeStoredIsKept(t *testing.T) {
	e := start(t)
	v := static("kept", rclone)
	content := random(100 << 10)
	target := e.unsent("kept", content)
	e.killAll()
	program := filepath.Join(e.Clients, programs[rclone])
	if err := os.Rename(program, program+".away"); err != nil {
		t.Fatal(err)
	}
	want(t, e.tryUnpublish(20*time.Second, v, target), codes.Unavailable, "could not be started again")
	want(t, e.tryUnpublish(20*time.Second, v, target), codes.Unavailable, "could not be started again")
	e.restart()
	if err := os.Rename(program+".away", program); err != nil {
		t.Fatal(err)
	}
	e.proxy.Set(faultproxy.Faults{})
	e.unpublish(v, target)
	if got := e.Object(t, bucket, "kept/file"); got != content {
		t.Errorf("the object has %d bytes of %d, equal: %t", len(got), len(content), got == content)
	}
	e.awaitNothingLeft(5 * time.Second)
}
