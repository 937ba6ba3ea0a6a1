//go:build linux

package host

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"

	"golang.org/x/sys/unix"
	"k8s.io/klog/v2"
)

// DetachCopies detaches the copies of a FUSE mount that other mount namespaces hold, and says how many. A copy arises
// when a namespace is made while the mount exists, and keeps the client alive after the host has unmounted
// everything. A copy has m's device and m's source string; the device alone may be somebody else's as soon as the
// last mount of it is gone.
//
// Namespaces are found by their processes; those that no process is in, and those of processes that this one may not
// look into, are not seen (the latter are counted in the log). The host's own namespace is left alone, and so are
// mounts that go with the host's by propagation. What could not be detached is in the error, beside the number of
// what was.
func (n *Namespace) DetachCopies(ctx context.Context, m Mount) (int, error) {
	host, err := n.hostView(ctx)
	if err != nil {
		return 0, err
	}
	holders, err := n.copyHolders(ctx, m, host)
	if err != nil {
		return 0, err
	}
	detached := 0
	var errs []error
	for _, pid := range holders {
		count, err := n.detachIn(ctx, pid, m, host)
		detached += count
		errs = append(errs, err)
	}
	return detached, errors.Join(errs...)
}

// hostView is what of the host's mounts tells them from copies.
type hostView struct {
	ids   map[int]bool
	peers map[string]bool // "shared:7"
}

// hostView reads the namespace's mounts, and PID 1's where that is another one (see Own).
func (n *Namespace) hostView(ctx context.Context) (hostView, error) {
	mounts, err := n.Mounts(ctx)
	if err != nil {
		return hostView{}, err
	}
	if !n.foreign {
		if first, err := readMounts(ctx, hostMountinfo); err == nil {
			mounts = append(mounts, first...)
		}
	}
	view := hostView{ids: mountIDs(mounts), peers: map[string]bool{}}
	for _, m := range mounts {
		if group := peerGroup(m); group != "" {
			view.peers[group] = true
		}
	}
	return view, nil
}

// peerGroup is the group of mounts that propagate to each other which m is in: "shared:7", or "".
func peerGroup(m Mount) string {
	for _, field := range m.Optional {
		if strings.HasPrefix(field, "shared:") {
			return field
		}
	}
	return ""
}

// copiesOf picks the mounts of m's file system that another namespace holds for itself. The last mounted come first,
// so that what lies on top goes first. A mount whose parent is a peer of one of the host's is left out: the host's
// own unmount reaches it, and an unmount there would reach the host.
func (h hostView) copiesOf(m Mount, mounts []Mount) []Mount {
	groups := make(map[int]string, len(mounts))
	for _, p := range mounts {
		groups[p.ID] = peerGroup(p)
	}
	var copies []Mount
	for _, c := range slices.Backward(mounts) {
		same := c.Major == m.Major && c.Minor == m.Minor && c.Source == m.Source && c.FSType == m.FSType
		if same && !h.ids[c.ID] && !h.peers[groups[c.Parent]] {
			copies = append(copies, c)
		}
	}
	return copies
}

// copyHolders finds one process for each mount namespace with copies of m.
func (n *Namespace) copyHolders(ctx context.Context, m Mount, host hostView) ([]int, error) {
	var holders []int
	what := "looking for copies of " + m.Source
	err := n.run(ctx, what, nil, func() error {
		pids, err := processes()
		if err != nil {
			return err
		}
		var found []int
		unreadable := 0
		seen := map[string]bool{}
		for _, pid := range pids {
			if err := ctx.Err(); err != nil {
				return fmt.Errorf("%s: %w", what, err)
			}
			link, err := os.Readlink(procPath(pid, "ns", "mnt"))
			switch {
			case isGone(err):
				continue
			case err != nil:
				unreadable++
				continue
			case seen[link]:
				continue
			}
			mounts, err := readMounts(ctx, procPath(pid, "mountinfo"))
			if err != nil {
				continue // it is ending; another process of the namespace may follow
			}
			seen[link] = true
			if len(host.copiesOf(m, mounts)) > 0 {
				found = append(found, pid)
			}
		}
		if unreadable > 0 {
			klog.FromContext(ctx).V(4).Info("Mount namespaces of some processes cannot be looked into", "processes", unreadable, "call", what)
		}
		holders = found
		return nil
	})
	if err != nil {
		return nil, err
	}
	return holders, nil
}

// isGone tells that a process ended while its files in /proc were looked at.
func isGone(err error) bool {
	return errors.Is(err, unix.ENOENT) || errors.Is(err, unix.ESRCH)
}

// errEnded is for a process that was to lead into its namespace and is gone.
var errEnded = errors.New("the process has ended")

// detachIn detaches the copies of m in the mount namespace of a process.
func (n *Namespace) detachIn(ctx context.Context, pid int, m Mount, host hostView) (int, error) {
	what := fmt.Sprintf("detaching copies of %s in the mount namespace of %s", m.Source, processName(pid))
	var detached atomic.Int64 // the call may outlive this function
	var proc int
	enter := func() error {
		ns, err := unix.Open(procPath(pid, "ns", "mnt"), unix.O_RDONLY|unix.O_CLOEXEC, 0)
		if isGone(err) {
			return errEnded
		}
		if err != nil {
			return err
		}
		defer unix.Close(ns)
		// A container need not have a /proc, and its own does not show this thread.
		if proc, err = unix.Open(procDir, openDir, 0); err != nil {
			return err
		}
		if err := enterNamespace(ns); err != nil {
			unix.Close(proc)
			return err
		}
		return nil
	}
	err := n.run(ctx, what, enter, func() error {
		defer unix.Close(proc)
		if err := detachHere(ctx, proc, m, host, &detached); err != nil {
			return fmt.Errorf("%s: %w", what, err)
		}
		return nil
	})
	if errors.Is(err, errEnded) {
		err = nil // with its last process a namespace ends too; where there is another, the next look finds it
	}
	return int(detached.Load()), err
}

// detachHere detaches the copies of m in the calling thread's namespace, which is a throwaway's. proc is the host's
// /proc.
func detachHere(ctx context.Context, proc int, m Mount, host hostView, detached *atomic.Int64) error {
	table := func() ([]Mount, error) {
		return stableMounts(ctx, "the mount table", func() ([]byte, error) { return readAt(proc, "thread-self/mountinfo") })
	}
	mounts, err := table()
	if err != nil {
		return err
	}
	failed := map[int]error{}
	for _, c := range host.copiesOf(m, mounts) {
		if err := detach(proc, c); err != nil {
			failed[c.ID] = fmt.Errorf("%s: %w", c.Mountpoint, err)
			continue
		}
		detached.Add(1)
	}
	if len(failed) == 0 {
		return nil
	}
	// Its owner may have unmounted it meanwhile.
	if mounts, err = table(); err != nil {
		return err
	}
	var errs []error
	for _, c := range host.copiesOf(m, mounts) {
		errs = append(errs, failed[c.ID])
	}
	return errors.Join(errs...)
}

// errHidden is for a mount that no path leads to.
var errHidden = errors.New("it is hidden below another mount")

// detach detaches one mount of the calling thread's namespace. Its path is the container's to change, so the mount is
// addressed by a descriptor whose mount id is right.
func detach(proc int, c Mount) error {
	fd, err := unix.Open(c.Mountpoint, unix.O_PATH|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	self := "self/fd/" + strconv.Itoa(fd)
	info, err := readAt(proc, "self/fdinfo/"+strconv.Itoa(fd))
	if err != nil {
		return err
	}
	if id, ok := fdinfoMountID(string(info)); !ok || id != c.ID {
		return errHidden
	}
	if err := unix.Fchdir(proc); err != nil { // the thread's own working directory
		return err
	}
	return unix.Unmount(self, unix.MNT_DETACH)
}

// readAt reads a file below a directory that is open.
func readAt(dir int, name string) ([]byte, error) {
	fd, err := unix.Openat(dir, name, unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("opening %s: %w", name, err)
	}
	f := os.NewFile(uintptr(fd), name)
	defer f.Close()
	return io.ReadAll(f)
}
