package host

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/s3-csi/s3-csi-driver/pkg/fault"
)

const (
	// firstUnmountRetry and lastUnmountRetry bound the doubling interval between attempts to unmount a busy mount.
	firstUnmountRetry = 5 * time.Millisecond
	lastUnmountRetry  = 250 * time.Millisecond
	// usersTimeout bounds the search for the users of a busy mount, which runs after the caller's deadline.
	usersTimeout = 300 * time.Millisecond
)

// Unmount unmounts the top mount at target, which must be unused (else unix.EBUSY); call it inside Do. It is never lazy, so
// success means that the mount is gone from this namespace. Symbolic links are followed in all but the last component. The
// error is unix.EINVAL if target is not a mount point and unix.ENOENT if it does not exist.
func Unmount(target string) error {
	if err := unix.Unmount(target, unix.UMOUNT_NOFOLLOW); err != nil {
		return fmt.Errorf("unmounting %s: %w", target, err)
	}
	return nil
}

// UnmountTarget is Unmount for a target path: it refuses symbolic links below root, as OpenTarget does.
func UnmountTarget(root, target string) error {
	parent, name, err := openParent(root, target)
	if err != nil {
		return err
	}
	defer parent.Close()
	if err := unix.Unmount(fdPath(parent)+"/"+name, unix.UMOUNT_NOFOLLOW); err != nil {
		return fmt.Errorf("unmounting %s: %w", target, err)
	}
	return nil
}

// Detach unmounts the top mount at target lazily; call it inside Do. Use it only for file systems whose client has exited,
// where no data can be lost. Its errors are those of Unmount, except unix.EBUSY.
func Detach(target string) error {
	if err := unix.Unmount(target, unix.UMOUNT_NOFOLLOW|unix.MNT_DETACH); err != nil {
		return fmt.Errorf("detaching %s: %w", target, err)
	}
	return nil
}

// DetachTarget is Detach for a target path: it refuses symbolic links below root, as OpenTarget does.
func DetachTarget(root, target string) error {
	parent, name, err := openParent(root, target)
	if err != nil {
		return err
	}
	defer parent.Close()
	if err := unix.Unmount(fdPath(parent)+"/"+name, unix.UMOUNT_NOFOLLOW|unix.MNT_DETACH); err != nil {
		return fmt.Errorf("detaching %s: %w", target, err)
	}
	return nil
}

// UnmountWhenIdle calls once, which is Unmount or UnmountTarget for m, until it succeeds. While the mount is busy it retries
// with backoff until ctx ends. It then returns a fault.Busy that names the processes that use the mount. Each attempt is a Do of
// its own, on the account of ctx. A path that is no longer a mount point (unix.EINVAL) counts as success, and any other error
// is returned at once.
func (n *Namespace) UnmountWhenIdle(ctx context.Context, m Mount, once func() error) error {
	busy := false
	for wait := firstUnmountRetry; ; wait = min(2*wait, lastUnmountRetry) {
		err := n.Do(ctx, "unmounting "+m.Mountpoint, once)
		busy = busy || errors.Is(err, unix.EBUSY)
		switch {
		case err == nil, errors.Is(err, unix.EINVAL):
			return nil
		case !errors.Is(err, unix.EBUSY) && (!busy || ctx.Err() == nil): // ctx may have ended during a later attempt
			return fmt.Errorf("unmounting %s: %w", m.Mountpoint, err)
		}
		select {
		case <-time.After(wait):
		case <-ctx.Done():
		}
		if ctx.Err() == nil {
			continue
		}
		return fault.Errorf(fault.Busy, "unmounting %s: it is in use by %s", m.Mountpoint, n.describeUsers(ctx, m))
	}
}

// describeUsers names the processes that use a mount and this driver's own overdue calls on it. It runs after ctx has ended.
func (n *Namespace) describeUsers(ctx context.Context, m Mount) string {
	ctx, cancel := context.WithTimeout(For(context.WithoutCancel(ctx), ""), usersTimeout)
	defer cancel()
	users, _ := n.Users(ctx, m)
	for _, call := range n.OverdueCalls() {
		if strings.Contains(call, m.Mountpoint) {
			users = append(users, "this driver, in a call that the client does not answer: "+call)
		}
	}
	if len(users) == 0 {
		return "processes that this driver cannot see"
	}
	return strings.Join(users, ", ")
}
