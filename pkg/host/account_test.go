//go:build linux

package host

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/s3-csi/s3-csi-driver/pkg/fault"
)

// TestOverdueCallsAreBoundedPerAccount asks a file system that never answers, on one account.
func TestOverdueCallsAreBoundedPerAccount(t *testing.T) {
	needMounts(t)
	n := testNamespace(t)
	dir := mkdir(t, hostDir(t, n), "hung")
	f := mountFake(t, n, dir, "s3csi:hung")
	f.hang()
	ask := func(account string, i int) error {
		ctx, cancel := context.WithTimeout(For(t.Context(), account), 20*time.Millisecond)
		defer cancel()
		return n.Do(ctx, fmt.Sprintf("asking %d", i), func() error {
			var st unix.Statfs_t
			return unix.Statfs(dir, &st)
		})
	}
	for i := 0; n.Overdue() < maxOverdueEach; i++ { // on a busy machine the time may be over before a call is started
		if err := ask("pod a", i); !errors.Is(err, context.DeadlineExceeded) {
			t.Fatalf("call %d: %v", i, err)
		}
	}
	refused := false
	for i := range maxOverdueEach {
		err := ask("pod a", i)
		refused = refused || fault.Is(err, fault.Exhausted)
		if !fault.Is(err, fault.Exhausted) && !errors.Is(err, context.DeadlineExceeded) {
			t.Fatalf("call %d beyond the bound: %v", i, err)
		}
	}
	if n.Overdue() != maxOverdueEach || !refused {
		t.Errorf("%d calls are overdue, refused: %t", n.Overdue(), refused)
	}
	if err := ask("pod b", 0); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("another account: %v", err)
	}
	if err := n.Do(within(t, 10*time.Second), "working", func() error { return nil }); err != nil {
		t.Errorf("without an account: %v", err)
	}
	f.exit()
	for n.Overdue() > 0 {
		time.Sleep(time.Millisecond)
	}
	if err := n.Do(For(within(t, 10*time.Second), "pod a"), "working", func() error { return nil }); err != nil {
		t.Errorf("after its end: %v", err)
	}
}

// TestUnresponsivePodDelaysNoOtherPod has a pod whose mounts are behind a file system of its own that never answers.
func TestUnresponsivePodDelaysNoOtherPod(t *testing.T) {
	r := newSwapRig(t)
	target := r.bind("target", "/", BindAttrs{})
	outer := mkdir(t, r.dir, "outer")
	own := mountFake(t, r.n, outer, "s3csi:outer")
	var hide string
	for _, place := range []string{"sub", "real"} {
		hide += fmt.Sprintf("mount --bind %s %s/%s && ", target, outer, place)
	}
	r.container("s3csitest-pod-hung", "umount "+r.source+" && "+hide)
	pod := r.container("s3csitest-pod-well", "umount "+r.source+" && umount "+outer+" && ")
	own.pause()
	t.Cleanup(own.exit)
	refused := false
	for range maxOverdueEach + 2 { // each waits for one of them
		r.restart()
		s := r.swap()
		s.Bound = 250 * time.Millisecond
		swapped, err := r.n.SwapInOtherNamespaces(within(t, 20*time.Second), s, ofPod())
		if err != nil {
			t.Fatal(err)
		}
		for _, s := range swapped {
			refused = refused || fault.Is(s.Err, fault.Exhausted)
		}
		r.alive(pod, target)
	}
	if got := r.n.Overdue(); got > maxOverdueEach || !refused {
		t.Errorf("%d calls are overdue, refused: %t", got, refused)
	}
	own.exit()
	for r.n.Overdue() > 0 {
		time.Sleep(time.Millisecond)
	}
}
