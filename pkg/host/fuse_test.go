//go:build linux

package host

import (
	"context"
	"errors"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/s3-csi/s3-csi-driver/pkg/fault"
)

func TestMountFuse(t *testing.T) {
	needMounts(t)
	n := testNamespace(t)
	dir := hostDir(t, n)
	place := mkdir(t, dir, "with space")
	f := mountFake(t, n, place, "s3csi:default:b/some prefix/:k-1")
	m := mountAt(t, n, place)
	if m.FSType != "fuse" || m.Source != f.source || m.Major != 0 || m.Root != "/" || m.ReadOnly() {
		t.Errorf("%+v", m)
	}
	for _, want := range []string{"user_id=65534", "group_id=65533", "allow_other", "default_permissions"} {
		if !hasOption(m.SuperOptions, want) {
			t.Errorf("no %s in %s", want, m.SuperOptions)
		}
	}
	for _, want := range []string{"rw", "nosuid", "nodev", "noatime"} {
		if !hasOption(m.Options, want) {
			t.Errorf("no %s in %s", want, m.Options)
		}
	}
	if err := n.ReadRoot(within(t, 10*time.Second), place); err != nil {
		t.Error(err)
	}
	st, err := n.Statfs(within(t, 10*time.Second), place)
	if err != nil || st.Blocks != 1000 || st.Bsize != 4096 {
		t.Errorf("%+v, %v", st, err)
	}
}

func TestMountFuseReadOnly(t *testing.T) {
	needMounts(t)
	n := testNamespace(t)
	dir := hostDir(t, n)
	do(t, n, "mounting", func() error {
		fuse, err := OpenFuse()
		if err != nil {
			return err
		}
		defer fuse.Close()
		flags, err := unix.FcntlInt(fuse.Fd(), unix.F_GETFL, 0)
		if err != nil || flags&unix.O_NONBLOCK != 0 {
			t.Errorf("the device is non-blocking, which clients do not expect: %#x, %v", flags, err)
		}
		if link, err := os.Readlink(fdPath(fuse)); err != nil || link != FuseDevice {
			t.Errorf("the device's link is %q, %v", link, err)
		}
		place, err := OpenDir(dir)
		if err != nil {
			return err
		}
		defer place.Close()
		return MountFuse(fuse, place, FuseMount{Source: "s3csi:ro", ReadOnly: true})
	})
	if m := mountAt(t, n, dir); !m.ReadOnly() {
		t.Errorf("%+v", m)
	}
}

func TestFuseMountOptions(t *testing.T) {
	const start = "fd=7,rootmode=40000,user_id=1,group_id=2,allow_other,default_permissions,max_read=1048576"
	for _, tc := range []struct {
		name, source, context, want string
	}{
		{"plain", "s3csi:a", "", start},
		{"SELinux", "s3csi:a", "system_u:object_r:container_file_t:s0:c1,c2", start + `,context="system_u:object_r:container_file_t:s0:c1,c2"`},
		{"SELinux, quoted", "s3csi:a", `"a_u:b_r:c_t:s0-s0:c0.c1023"`, start + `,context="a_u:b_r:c_t:s0-s0:c0.c1023"`},
		{"SELinux without a level", "s3csi:a", "a_u:b_r:c_t", start + `,context="a_u:b_r:c_t"`},
		{"no source", "", "", ""},
		{"comma in the source", "s3csi:a,b", "", ""},
		{"newline in the source", "s3csi:a\nb", "", ""},
		{"NUL in the source", "s3csi:a\x00", "", ""},
		{"an option behind the context", "s3csi:a", `a:b:c",allow_other,x="`, ""},
		{"one quote", "s3csi:a", `"a:b:c:d`, ""},
		{"an option as a context", "s3csi:a", "a,rootcontext=x", ""},
		{"a comma in the type", "s3csi:a", "a:b:c,uid=0", ""},
	} {
		got, err := FuseMount{Source: tc.source, UID: 1, GID: 2, SELinuxContext: tc.context}.data(7)
		if got != tc.want || (err == nil) != (tc.want != "") || err != nil && !fault.Is(err, fault.Invalid) {
			t.Errorf("%s: %q, %v", tc.name, got, err)
		}
	}
}

func TestInterruptedCallsAreRepeated(t *testing.T) {
	needMounts(t)
	n := testNamespace(t)
	place := mkdir(t, hostDir(t, n), "target")
	f := mountFake(t, n, place, "s3csi:interrupted")
	f.interrupted.Store(4)
	if err := n.ReadRoot(within(t, 10*time.Second), place); err != nil {
		t.Error(err)
	}
	f.interrupted.Store(4)
	if _, err := n.Statfs(within(t, 10*time.Second), place); err != nil {
		t.Error(err)
	}
	// The retries are bounded.
	f.interrupted.Store(1 << 40)
	hasErrno(t, n.ReadRoot(within(t, 10*time.Second), place), unix.EINTR)
}

// The end of a connection is seen even if the client had made the root unusable.
func TestAnswersOfARootThatIsALink(t *testing.T) {
	needMounts(t)
	n := testNamespace(t)
	place := mkdir(t, hostDir(t, n), "target")
	nodes := fakeNodes()
	nodes[0].mode = unix.S_IFLNK | 0o777
	f := startFake(t, n, place, &fakeFuse{source: "s3csi:link", nodes: nodes})
	hasErrno(t, n.Answers(within(t, 10*time.Second), place), unix.EIO)
	f.exit()
	hasErrno(t, n.Answers(within(t, 10*time.Second), place), unix.ENOTCONN)
}

func TestStaleMountCanBeOpenedBoundAndUnmounted(t *testing.T) {
	needMounts(t)
	n := testNamespace(t)
	dir := hostDir(t, n)
	place := mkdir(t, dir, "target")
	f := mountFake(t, n, place, "s3csi:stale")
	if err := n.ReadRoot(within(t, 10*time.Second), place); err != nil {
		t.Fatal(err)
	}
	f.exit()
	hasErrno(t, n.ReadRoot(within(t, 10*time.Second), place), unix.ENOTCONN)
	m := mountAt(t, n, place)
	do(t, n, "using the stale mount", func() error {
		stale, err := MakeTarget(dir, place)
		if err != nil {
			return err
		}
		defer stale.Close()
		if id, err := MountID(stale); err != nil || id != m.ID {
			t.Errorf("mount %d, %v, want %d", id, err, m.ID)
		}
		other, err := MakeTarget(dir, dir+"/other")
		if err != nil {
			return err
		}
		defer other.Close()
		return Bind(stale, other, BindAttrs{})
	})
	if mountAt(t, n, dir+"/other").Minor != m.Minor {
		t.Error("another file system was bound")
	}
	err := n.Do(t.Context(), "removing", func() error { return RemoveTarget(dir, place) })
	hasErrno(t, err, unix.EBUSY)
	do(t, n, "unmounting", func() error { return errors.Join(UnmountTarget(dir, place), Unmount(dir+"/other")) })
	do(t, n, "removing", func() error { return RemoveTarget(dir, place) })
	hasErrno(t, n.Do(t.Context(), "unmounting", func() error { return Unmount(place) }), unix.ENOENT)
	hasErrno(t, n.Do(t.Context(), "unmounting", func() error { return Unmount(dir + "/other") }), unix.EINVAL)
}

func TestUnresponsiveMountBlocksOneCallPerProbe(t *testing.T) {
	needMounts(t)
	n := testNamespace(t)
	dir := hostDir(t, n)
	place := mkdir(t, dir, "hung")
	f := mountFake(t, n, place, "s3csi:hung")
	if _, err := n.Statfs(within(t, 10*time.Second), place); err != nil {
		t.Fatal(err)
	}
	m := mountAt(t, n, place)
	f.hang()

	// Concurrent callers share one call.
	var group sync.WaitGroup
	for range 5 {
		group.Go(func() {
			_, err := n.Statfs(within(t, 2*time.Second), place)
			if !fault.Is(err, fault.Timeout) || !strings.Contains(err.Error(), place) {
				t.Errorf("got %v", err)
			}
		})
	}
	group.Wait()
	if n.Overdue() != 1 {
		t.Errorf("overdue: %q", n.OverdueCalls())
	}
	// Later calls fail at once.
	started := time.Now()
	_, err := n.Statfs(within(t, time.Minute), place)
	if !fault.Is(err, fault.Timeout) || time.Since(started) > 5*time.Second {
		t.Errorf("after %s: %v", time.Since(started), err)
	}
	if err := n.ReadRoot(within(t, 2*time.Second), place); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("reading: %v", err)
	}
	if n.Overdue() != 2 {
		t.Errorf("overdue: %q", n.OverdueCalls())
	}

	// These calls must work on an unresponsive mount.
	do(t, n, "opening", func() error {
		target, err := MakeTarget(dir, place)
		if err == nil {
			target.Close()
		}
		return err
	})
	if _, err := n.Users(within(t, 5*time.Second), m); err != nil {
		t.Error(err)
	}
	ctl := NewFusectl(n, mkdir(t, dir, "ctl"))
	if waiting, ok, err := ctl.Waiting(within(t, 5*time.Second), m.Minor); waiting != 2 || !ok || err != nil {
		t.Errorf("waiting %d %v %v, want 2", waiting, ok, err)
	}
	if err := ctl.Abort(within(t, 5*time.Second), m.Minor); err != nil {
		t.Fatal(err)
	}
	for i := 0; n.Overdue() > 0; i++ {
		if i == 500 {
			t.Fatalf("still there after an abort: %q", n.OverdueCalls())
		}
		time.Sleep(10 * time.Millisecond)
	}
	// No probe remains for the path.
	_, err = n.Statfs(within(t, 5*time.Second), place)
	hasErrno(t, err, unix.ENOTCONN)
}
