//go:build linux

package host

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/s3-csi/s3-csi-driver/pkg/fault"
)

func TestUnmountIsNotLazyAndNamesItsUsers(t *testing.T) {
	needMounts(t)
	n := testNamespace(t)
	dir := hostDir(t, n)
	source := mkdir(t, dir, "source")
	mountFake(t, n, source, "s3csi:busy")
	m := mountAt(t, n, source)
	var open *os.File
	do(t, n, "opening", func() (err error) {
		open, err = os.Open(source)
		return err
	})
	defer open.Close()
	hasErrno(t, n.Do(t.Context(), "unmounting", func() error { return Unmount(source) }), unix.EBUSY)
	users, err := n.Users(within(t, 10*time.Second), m)
	if self := processName(os.Getpid()); err != nil || !slices.Contains(users, self) {
		t.Errorf("users %q, %v, want %q", users, err, self)
	}
	open.Close()
	if users, err := n.Users(within(t, 10*time.Second), m); err != nil || len(users) != 0 {
		t.Errorf("users %q, %v", users, err)
	}
	do(t, n, "unmounting", func() error { return Unmount(source) })
}

func TestUnmountWhenIdleWaitsForTheLastUser(t *testing.T) {
	needMounts(t)
	n := testNamespace(t)
	source := mkdir(t, hostDir(t, n), "source")
	mountFake(t, n, source, "s3csi:busy")
	m := mountAt(t, n, source)
	var open *os.File
	do(t, n, "opening", func() (err error) {
		open, err = os.Open(source)
		return err
	})
	attempts := 0
	err := n.UnmountWhenIdle(within(t, 10*time.Second), m, func() error {
		if attempts++; attempts == 3 {
			open.Close()
		}
		return Unmount(source)
	})
	if err != nil || attempts < 3 || len(mountsAt(t, n, source)) != 0 {
		t.Errorf("after %d attempts: %v", attempts, err)
	}
	if err := n.UnmountWhenIdle(within(t, 10*time.Second), m, func() error { return Unmount(source) }); err != nil {
		t.Errorf("a path that is not a mount point: %v", err)
	}
}

func TestUnmountWhenIdleNamesTheUsersWhenTheContextEnds(t *testing.T) {
	needMounts(t)
	n := testNamespace(t)
	source := mkdir(t, hostDir(t, n), "source")
	f := mountFake(t, n, source, "s3csi:busy")
	m := mountAt(t, n, source)
	user := sleeper(t, n, source, 0)
	f.hang()
	// A call of this process that the client does not answer uses the mount, too.
	_, err := n.Statfs(within(t, 50*time.Millisecond), source)
	if !errors.Is(err, context.DeadlineExceeded) {
		t.Fatal(err)
	}
	start := time.Now()
	err = n.UnmountWhenIdle(within(t, 200*time.Millisecond), m, func() error { return Unmount(source) })
	if !fault.Is(err, fault.Busy) || time.Since(start) > 5*time.Second {
		t.Errorf("after %v: %v", time.Since(start), err)
	}
	for _, want := range []string{source, processName(user.Process.Pid), "reading the usage of " + source} {
		if !strings.Contains(err.Error(), want) {
			t.Errorf("%q does not name %q", err, want)
		}
	}
	mountAt(t, n, source)
}

func TestUnmountWhenIdleReturnsOtherErrorsAtOnce(t *testing.T) {
	n := testNamespace(t)
	attempts := 0
	err := n.UnmountWhenIdle(within(t, 10*time.Second), Mount{Mountpoint: "/a"}, func() error { attempts++; return fs.ErrNotExist })
	if !errors.Is(err, fs.ErrNotExist) || fault.Is(err, fault.Busy) || attempts != 1 {
		t.Errorf("after %d attempts: %v", attempts, err)
	}
}

// The context may end in the middle of an attempt, which is then the one without an answer.
func TestUnmountWhenIdleNamesTheUsersWhenAnAttemptIsCutOff(t *testing.T) {
	n := testNamespace(t)
	ctx, cancel := context.WithCancel(t.Context())
	attempts := 0
	err := n.UnmountWhenIdle(ctx, Mount{Mountpoint: "/a"}, func() error {
		if attempts++; attempts == 1 {
			return unix.EBUSY
		}
		cancel()
		return context.Cause(ctx)
	})
	if attempts != 2 || !fault.Is(err, fault.Busy) {
		t.Errorf("after %d attempts: %v", attempts, err)
	}
}
