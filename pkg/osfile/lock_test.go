package osfile_test

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/s3-csi/s3-csi-driver/pkg/osfile"
)

// opener returns a function that opens one file again and again. Each open has locks of its own, as in another process.
func opener(t *testing.T) func() *os.File {
	path := filepath.Join(t.TempDir(), "lock")
	return func() *os.File {
		f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o600)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = f.Close() })
		return f
	}
}

func expect(t *testing.T, what string, want bool) func(ok bool, err error) {
	return func(ok bool, err error) {
		t.Helper()
		if ok != want || err != nil {
			t.Errorf("%s: locked %t, %v", what, ok, err)
		}
	}
}

func TestLock_OnlyOneOpenHasAnExclusiveLock(t *testing.T) {
	open := opener(t)
	first, second := open(), open()
	expect(t, "the first", true)(osfile.TryLock(first))
	expect(t, "the first again", true)(osfile.TryLock(first))
	expect(t, "the second", false)(osfile.TryLock(second))
	expect(t, "shared beside exclusive", false)(osfile.TryRLock(second))
	if err := first.Close(); err != nil {
		t.Fatal(err)
	}
	expect(t, "after a close", true)(osfile.TryLock(second))
}

func TestSharedLocksExcludeOnlyAnExclusiveOne(t *testing.T) {
	open := opener(t)
	first, second, third := open(), open(), open()
	expect(t, "the first", true)(osfile.TryRLock(first))
	expect(t, "the second", true)(osfile.TryRLock(second))
	expect(t, "exclusive beside shared", false)(osfile.TryLock(third))
}

func TestLockWaitsUntilTheContextEnds(t *testing.T) {
	open := opener(t)
	first, second := open(), open()
	expect(t, "the first", true)(osfile.TryLock(first))
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	if err := osfile.Lock(ctx, second); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("while it is locked: %v", err)
	}
	locked := make(chan error, 1)
	go func() { locked <- osfile.Lock(t.Context(), second) }()
	if err := first.Close(); err != nil {
		t.Fatal(err)
	}
	if err := <-locked; err != nil {
		t.Errorf("after a close: %v", err)
	}
}

func TestLock_ClosedFileIsAnError(t *testing.T) {
	f := opener(t)()
	if err := f.Close(); err != nil {
		t.Fatal(err)
	}
	if ok, err := osfile.TryLock(f); ok || !errors.Is(err, unix.EBADF) {
		t.Errorf("locked %t, %v", ok, err)
	}
	if err := osfile.Lock(t.Context(), f); !errors.Is(err, unix.EBADF) {
		t.Errorf("waiting: %v", err)
	}
}
