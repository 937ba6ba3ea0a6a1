//go:build linux

package host

import (
	"context"
	"errors"
	"fmt"
	"os"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/s3-csi/s3-csi-driver/pkg/fault"
)

func TestErrorsOfCorruptedMounts(t *testing.T) {
	for _, errno := range []unix.Errno{unix.ENOTCONN, unix.ECONNABORTED, unix.ESTALE, unix.EIO} {
		for _, err := range []error{errno, &os.PathError{Err: errno}, fault.Errorf(fault.Unavailable, "x: %w", fmt.Errorf("y: %w", &os.PathError{Err: errno}))} {
			if !IsCorruptedMount(err) {
				t.Errorf("%v", err)
			}
		}
	}
	for _, err := range []error{nil, errors.New("x"), unix.ENOENT, unix.EBUSY, context.DeadlineExceeded, fmt.Errorf("x: %w", unix.ENOTEMPTY)} {
		if IsCorruptedMount(err) {
			t.Errorf("%v", err)
		}
	}
}

func TestMountWhoseClientHasExitedIsCorrupted(t *testing.T) {
	needMounts(t)
	n := testNamespace(t)
	dir := mkdir(t, hostDir(t, n), "mount")
	f := mountFake(t, n, dir, "s3csi:corrupted")
	if _, err := n.Statfs(within(t, 10*time.Second), dir); err != nil {
		t.Fatal(err)
	}
	f.exit()
	if _, err := n.Statfs(within(t, 10*time.Second), dir); !IsCorruptedMount(err) {
		t.Errorf("statfs: %v", err)
	}
	if err := n.ReadRoot(within(t, 10*time.Second), dir); !IsCorruptedMount(err) {
		t.Errorf("reading: %v", err)
	}
}
