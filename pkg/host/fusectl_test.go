//go:build linux

package host

import (
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

func TestFusectlWaiting(t *testing.T) {
	needMounts(t)
	n := testNamespace(t)
	dir := hostDir(t, n)
	unmountFusectl(t, n)
	ctl := NewFusectl(n, dir+"/made/when needed")
	place := mkdir(t, dir, "m")
	f := mountFake(t, n, place, "s3csi:ctl")
	if err := n.ReadRoot(within(t, 10*time.Second), place); err != nil {
		t.Fatal(err)
	}
	m := mountAt(t, n, place)
	// The release of the directory that was read is sent after close has returned, and counts.
	for i := 0; ; i++ {
		waiting, ok, err := ctl.Waiting(t.Context(), m.Minor)
		if waiting == 0 && ok && err == nil {
			break
		}
		if !ok || err != nil || i == 500 {
			t.Fatalf("idle: %d %v %v", waiting, ok, err)
		}
		time.Sleep(10 * time.Millisecond)
	}
	mountAt(t, n, dir+"/made/when needed")
	other := NewFusectl(n, dir+"/never made")
	if _, ok, err := other.Waiting(t.Context(), m.Minor); !ok || err != nil {
		t.Errorf("another one: %v %v", ok, err)
	}
	if got := mountsAt(t, n, dir+"/never made"); len(got) != 0 {
		t.Error("it was mounted twice")
	}
	for tries := 0; ; tries++ {
		f.exit()
		if waiting, ok, err := ctl.Waiting(t.Context(), m.Minor); waiting != 0 || !ok || err != nil {
			t.Errorf("stale but mounted: %d %v %v", waiting, ok, err)
		}
		do(t, n, "unmounting", func() error { return Unmount(place) })
		waiting, ok, err := ctl.Waiting(t.Context(), m.Minor)
		if waiting == 0 && !ok && err == nil {
			break
		}
		if err != nil || tries == 5 {
			t.Fatalf("gone: %d %v %v", waiting, ok, err)
		}
		// The number is free, and another mount of this machine has it: there is one table of connections for all namespaces.
		f = mountFake(t, n, place, "s3csi:ctl")
		m = mountAt(t, n, place)
	}
	if err := ctl.Abort(t.Context(), 1<<20-1); err != nil { // the last number, which no mount gets: one that is free now could be another's
		t.Errorf("aborting what is gone: %v", err)
	}
	// If the control file system is unmounted, connections do not count as ended.
	mountFake(t, n, place, "s3csi:ctl2")
	m = mountAt(t, n, place)
	do(t, n, "unmounting", func() error { return Unmount(dir + "/made/when needed") })
	if _, ok, err := ctl.Waiting(t.Context(), m.Minor); !ok || err != nil {
		t.Errorf("after it was unmounted: %v %v", ok, err)
	}
}

func TestFusectlAbortEndsAConnection(t *testing.T) {
	needMounts(t)
	n := testNamespace(t)
	dir := hostDir(t, n)
	place := mkdir(t, dir, "m")
	mountFake(t, n, place, "s3csi:abort")
	ctl := NewFusectl(n, mkdir(t, dir, "ctl"))
	if err := ctl.Abort(t.Context(), mountAt(t, n, place).Minor); err != nil {
		t.Fatal(err)
	}
	err := n.ReadRoot(within(t, 10*time.Second), place)
	hasErrno(t, err, unix.ENOTCONN)
}

// The kernel gives a number to the next mount as soon as it is free.
func TestConnection_StaysTheSameWhenItsNumberIsReused(t *testing.T) {
	needMounts(t)
	n := testNamespace(t)
	dir := hostDir(t, n)
	place := mkdir(t, dir, "m")
	ctl := NewFusectl(n, mkdir(t, dir, "ctl"))
	mountFake(t, n, place, "s3csi:first")
	first := mountAt(t, n, place)
	c, err := ctl.Open(t.Context(), first.Minor)
	if err != nil || c == nil {
		t.Fatal(c, err)
	}
	defer c.Close()
	do(t, n, "unmounting", func() error { return Detach(place) })
	for deadline := time.Now().Add(10 * time.Second); ; time.Sleep(time.Millisecond) {
		_, ok, err := c.Waiting()
		if err != nil || time.Now().After(deadline) {
			t.Fatalf("it has not ended: %v", err)
		}
		if !ok {
			break
		}
	}
	mountFake(t, n, place, "s3csi:second")
	t.Logf("the numbers are %d and %d", first.Minor, mountAt(t, n, place).Minor)
	if _, ok, err := c.Waiting(); ok || err != nil {
		t.Errorf("it counts as another one: %v", err)
	}
	if err := c.Abort(); err != nil {
		t.Error(err)
	}
	if err := n.ReadRoot(within(t, 10*time.Second), place); err != nil {
		t.Errorf("another one was aborted: %v", err)
	}
	if c, err := ctl.Open(t.Context(), 1<<20-1); c != nil || err != nil {
		t.Errorf("a connection that does not exist: %v, %v", c, err)
	}
}

// unmountFusectl unmounts the control file system in the test's namespace.
func unmountFusectl(t *testing.T, n *Namespace) {
	t.Helper()
	mounts, err := n.Mounts(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	for _, m := range mounts {
		if m.FSType == "fusectl" {
			do(t, n, "unmounting "+m.Mountpoint, func() error { return Unmount(m.Mountpoint) })
		}
	}
}
