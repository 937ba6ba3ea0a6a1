package mount

import (
	"context"
	"errors"
	"os"
	"reflect"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/s3-csi/s3-csi-driver/pkg/host"
)

// What comes when nobody waits for it any more is dropped, and never seen half-made.
func TestWhatComesTooLateIsDropped(t *testing.T) {
	dropped, goOn := make(chan int, 1), make(chan struct{})
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	late := func() (int, error) { cancel(); <-goOn; return 7, nil } // it has begun when nobody waits any more
	if v, err := inHost(ctx, host.Own(), "coming late", func(v int) { dropped <- v }, late); v != 0 || !errors.Is(err, context.Canceled) {
		t.Errorf("%d, %v", v, err)
	}
	close(goOn)
	if v := <-dropped; v != 7 {
		t.Errorf("dropped %d", v)
	}
	if v, err := inHost(t.Context(), host.Own(), "coming", func(v int) { dropped <- v }, late); v != 7 || err != nil || len(dropped) > 0 {
		t.Errorf("%d, %v, %d dropped", v, err, len(dropped))
	}
}

// What takes too long goes on, and nobody looks at what it has found by then.
func TestWhatIsGivenUpIsNotSeen(t *testing.T) {
	m := newTestManager(t, &uids{}, s3{})
	rec, p := secretMount(t, m, "a", "mountpoint-s3")
	for what, call := range map[string]func(context.Context) (any, error){
		"a mount":  func(ctx context.Context) (any, error) { return m.look(ctx, rec.Name) },
		"a target": func(ctx context.Context) (any, error) { return m.published(ctx, Request{Target: p.Target}, rec.Spec) },
	} {
		// A record that does not come to its end.
		file := m.store.recordFile(rec.Name)
		if err := errors.Join(os.Remove(file), unix.Mkfifo(file, 0o600)); err != nil {
			t.Fatal(err)
		}
		fifo, err := unix.Open(file, unix.O_RDWR|unix.O_CLOEXEC, 0)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := unix.Write(fifo, []byte("{")); err != nil {
			t.Fatal(err)
		}
		isRead := func() bool {
			left, err := unix.IoctlGetInt(fifo, unix.TIOCINQ)
			return err == nil && left == 0
		}
		found, err := call(until(t, isRead))
		if !errors.Is(err, context.Canceled) || !reflect.ValueOf(found).IsZero() {
			t.Errorf("%s: %+v, %v", what, found, err)
		}
		unix.Close(fifo)
		for m.Namespace.Overdue() > 0 {
			time.Sleep(time.Millisecond)
		}
	}
}
