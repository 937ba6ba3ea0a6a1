//go:build linux

package host

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"

	"golang.org/x/sys/unix"
	"k8s.io/klog/v2"
)

// otherNamespace is a mount namespace that is not the host's.
type otherNamespace struct {
	link   string // what /proc/<pid>/ns/mnt reads
	pids   []int  // some of its processes
	marked string // the text of /proc/<pid>/cgroup of one of its processes that is as asked for; "": of none
}

// maxLeads is how many processes of a namespace are remembered, of which one has to live until it is entered.
const maxLeads = 8

// otherNamespaces finds the mount namespaces of processes, other than the host's, and which of them have a process
// whose text in /proc/<pid>/cgroup satisfies mark, which may be nil. Of a process only links and cgroup are read: other
// files wait for a process that hangs. Namespaces that no process is in, and those of processes that this one may not
// look into, are not seen; the latter are counted in the log. Call it inside run.
func (n *Namespace) otherNamespaces(ctx context.Context, what string, mark func(cgroup string) bool) ([]*otherNamespace, error) {
	pids, err := processes()
	if err != nil {
		return nil, err
	}
	hosts := n.links()
	var found []*otherNamespace
	known := map[string]*otherNamespace{}
	unreadable := 0
	for _, pid := range pids {
		if err := ctx.Err(); err != nil {
			return nil, fmt.Errorf("%s: %w", what, err)
		}
		link, err := os.Readlink(procPath(pid, "ns", "mnt"))
		switch {
		case isGone(err):
			continue
		case err != nil:
			unreadable++
			continue
		case slices.Contains(hosts, link):
			continue
		}
		ns := known[link]
		if ns == nil {
			ns = &otherNamespace{link: link}
			known[link] = ns
			found = append(found, ns)
		}
		if len(ns.pids) < maxLeads {
			ns.pids = append(ns.pids, pid)
		}
		if mark == nil || ns.marked != "" {
			continue
		}
		cgroup, err := os.ReadFile(procPath(pid, "cgroup"))
		if err != nil && !isGone(err) {
			return nil, fmt.Errorf("%s: the cgroup of %s: %w", what, processName(pid), err)
		}
		if err == nil && mark(string(cgroup)) {
			ns.marked = string(cgroup)
		}
	}
	if unreadable > 0 {
		klog.FromContext(ctx).V(4).Info("Mount namespaces of some processes cannot be looked into", "processes", unreadable, "call", what)
	}
	return found, nil
}

// links are what the namespace's own link reads, and PID 1's where that may be read.
func (n *Namespace) links() []string {
	var links []string
	if link, err := os.Readlink(hostNamespace); err == nil {
		links = append(links, link)
	}
	if !n.foreign {
		if link, err := os.Readlink(ownNamespace); err == nil {
			links = append(links, link)
		}
	}
	return links
}

// mounts reads the mount table as one of the namespace's processes sees it: its mount points are from that one's root,
// which can be another than the namespace's. None when all have ended.
func (o *otherNamespace) mounts(ctx context.Context) []Mount {
	for _, pid := range o.pids {
		if mounts, err := readMounts(ctx, procPath(pid, "mountinfo")); err == nil {
			return mounts
		}
	}
	return nil
}

// errEnded is for a namespace whose processes were to lead into it and are gone. With its last process a namespace ends
// too; where there are others, the next look finds them.
var errEnded = errors.New("the processes have ended")

// open opens the namespace by one of its processes.
func (o *otherNamespace) open() (int, error) {
	for _, pid := range o.pids {
		fd, err := unix.Open(procPath(pid, "ns", "mnt"), unix.O_RDONLY|unix.O_CLOEXEC, 0)
		if isGone(err) || errors.Is(err, unix.EACCES) { // it could be looked into a moment ago: it is ending
			continue
		}
		if err != nil {
			return -1, fmt.Errorf("opening the mount namespace of %s: %w", processName(pid), err)
		}
		// The pid may be another process's by now, and a process can change its namespace.
		if link, err := os.Readlink(fmt.Sprintf("/proc/self/fd/%d", fd)); err == nil && link == o.link {
			return fd, nil
		}
		unix.Close(fd)
	}
	return -1, errEnded
}

// isGone tells that a process ended while its files in /proc were looked at.
func isGone(err error) bool {
	return errors.Is(err, unix.ENOENT) || errors.Is(err, unix.ESRCH)
}

// ShownElsewhere returns where other mount namespaces hold mounts for which match is true, except such as go with the host's by
// propagation: one of the places, for an error; "" is nowhere. Namespaces are found as DetachCopies finds them.
func (n *Namespace) ShownElsewhere(ctx context.Context, what string, match func(Mount) bool) (where string, err error) {
	host, err := n.hostView(ctx)
	if err != nil {
		return "", err
	}
	var found Mount
	holders, err := n.holders(ctx, what, nil, func(_ *otherNamespace, mounts []Mount) bool {
		copies := host.lastingAfter(mounts, match)
		if len(copies) > 0 {
			found = copies[0]
		}
		return len(copies) > 0
	})
	if err != nil || len(holders) == 0 {
		return "", err
	}
	return found.Mountpoint + place{n, holders[len(holders)-1]}.name(), nil
}

// DoElsewhere runs fn in each other mount namespace whose mount table pick picks, as Do runs it in this one. who names the
// namespace by one of its processes. Namespaces are found as DetachCopies finds them; where no process is left when it is
// entered, there is nothing to do.
func (n *Namespace) DoElsewhere(ctx context.Context, what string, pick func(mounts []Mount) bool, fn func(who string) error) error {
	picked, err := n.holders(ctx, what, nil, func(_ *otherNamespace, mounts []Mount) bool { return pick(mounts) })
	if err != nil {
		return err
	}
	var errs []error
	for _, ns := range picked {
		at := place{n, ns}
		who := processName(at.pid())
		err := at.do(ctx, what+at.name(), func(inside) error { return fn(who) })
		if err != nil && !errors.Is(err, errEnded) {
			errs = append(errs, fmt.Errorf("%s%s: %w", what, at.name(), err))
		}
	}
	return errors.Join(errs...)
}

// hostView is what of the host's mounts tells them from those of other namespaces.
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

// foreignTo picks those mounts of another namespace's table for which match is true and that the namespace holds for
// itself. A mount whose parent is a peer of one of the host's is left out: what the host does there reaches it, and
// what is done to it would reach the host.
func (h hostView) foreignTo(mounts []Mount, match func(Mount) bool) []Mount {
	groups := make(map[int]string, len(mounts))
	for _, p := range mounts {
		groups[p.ID] = peerGroup(p)
	}
	var own []Mount
	for _, m := range mounts {
		if !h.ids[m.ID] && !h.peers[groups[m.Parent]] && match(m) {
			own = append(own, m)
		}
	}
	return own
}

// lastingAfter is foreignTo without the mounts that are unmounted with the host's: those on a slave of a mount of the host, as the
// namespaces of systemd's units have (mount_namespaces(7)).
func (h hostView) lastingAfter(mounts []Mount, match func(Mount) bool) []Mount {
	follows := make(map[int]bool, len(mounts))
	for _, p := range mounts {
		follows[p.ID] = slices.ContainsFunc(p.Optional, func(field string) bool {
			group, slave := strings.CutPrefix(field, "master:")
			return slave && h.peers["shared:"+group]
		})
	}
	return slices.DeleteFunc(h.foreignTo(mounts, match), func(m Mount) bool { return follows[m.Parent] })
}
