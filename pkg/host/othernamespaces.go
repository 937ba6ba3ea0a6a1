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

	"github.com/s3-csi/s3-csi-driver/pkg/proc"
)

type otherNamespace struct {
	link  string // the target of /proc/<pid>/ns/mnt
	pids  []int  // some of its processes
	owner string // by Owners; "": none
}

// maxPIDs bounds the remembered processes of a namespace, of which one must still run when the namespace is entered.
const maxPIDs = 8

// otherNamespaces finds the mount namespaces of processes, other than the host's, and their owners. It reads only links, cgroup and mount
// table of a process; other files can block with the process. It does not see namespaces without processes, nor those of processes that this one may not inspect, whose number it
// logs. Call it inside run.
func (n *Namespace) otherNamespaces(ctx context.Context, what string, owners Owners) ([]*otherNamespace, error) {
	pids, err := proc.PIDs()
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
		link, err := os.Readlink(proc.Path(pid, "ns", "mnt"))
		switch {
		case proc.Gone(err):
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
		if len(ns.pids) < maxPIDs {
			ns.pids = append(ns.pids, pid)
		}
		if owners.ByCgroup == nil || ns.owner != "" {
			continue
		}
		cgroup, err := os.ReadFile(proc.Path(pid, "cgroup"))
		if err != nil && !proc.Gone(err) {
			return nil, fmt.Errorf("%s: the cgroup of %s: %w", what, processName(pid), err)
		}
		if err == nil {
			ns.owner = owners.ByCgroup(string(cgroup))
		}
	}
	if owners.ByMounts != nil {
		for _, ns := range found {
			if ns.owner == "" {
				ns.owner = owners.ByMounts(ns.mounts(ctx))
			}
		}
	}
	if unreadable > 0 {
		klog.FromContext(ctx).V(4).Info("Cannot read some mount namespaces", "processes", unreadable, "call", what)
	}
	return found, nil
}

// links returns the links of the Namespace and, if it can be read, of PID 1's mount namespace.
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

// mounts reads the mount table of one of the namespace's processes. Mount points are seen from that process's root, which may not be
// the namespace's. The table is empty if all processes have exited.
func (o *otherNamespace) mounts(ctx context.Context) []Mount {
	for _, pid := range o.pids {
		if mounts, err := readMounts(ctx, proc.Path(pid, "mountinfo")); err == nil {
			return mounts
		}
	}
	return nil
}

// errEnded means that all known processes of a namespace have exited. If others run in it, the next search finds them.
var errEnded = errors.New("the processes have exited")

func (o *otherNamespace) open() (int, error) {
	for _, pid := range o.pids {
		fd, err := unix.Open(proc.Path(pid, "ns", "mnt"), unix.O_RDONLY|unix.O_CLOEXEC, 0)
		if proc.Gone(err) || errors.Is(err, unix.EACCES) { // EACCES: it was readable a moment ago, so it is exiting
			continue
		}
		if err != nil {
			return -1, fmt.Errorf("opening the mount namespace of %s: %w", processName(pid), err)
		}
		// The pid may have been reused, and a process can change its namespace.
		if link, err := os.Readlink(fmt.Sprintf("/proc/self/fd/%d", fd)); err == nil && link == o.link {
			return fd, nil
		}
		unix.Close(fd)
	}
	return -1, errEnded
}

// ShownInOtherNamespaces returns one place where another mount namespace holds a mount that matches, "" if none does. Mounts that are
// unmounted with the host's by propagation do not count. Namespaces are found as in DetachCopies.
func (n *Namespace) ShownInOtherNamespaces(ctx context.Context, what string, match func(Mount) bool) (where string, err error) {
	host, err := n.hostView(ctx)
	if err != nil {
		return "", err
	}
	var found Mount
	holders, err := n.holders(ctx, what, Owners{}, func(_ *otherNamespace, mounts []Mount) bool {
		copies := host.lastingAfter(mounts, match)
		if len(copies) > 0 {
			found = copies[0]
		}
		return len(copies) > 0
	})
	if err != nil || len(holders) == 0 {
		return "", err
	}
	return found.Mountpoint + namespaceRef{n, holders[len(holders)-1]}.name(), nil
}

// MountsInOtherNamespaces returns the mounts that match and that other mount namespaces hold for themselves. It looks only at namespaces
// that have an owner. Namespaces are found as in DetachCopies.
func (n *Namespace) MountsInOtherNamespaces(ctx context.Context, what string, owners Owners, match func(Mount) bool) ([]Mount, error) {
	host, err := n.hostView(ctx)
	if err != nil {
		return nil, err
	}
	var all []Mount
	err = n.run(ctx, what, nil, func() error {
		others, err := n.otherNamespaces(ctx, what, owners)
		if err != nil {
			return err
		}
		var found []Mount
		for _, ns := range others {
			if err := ctx.Err(); err != nil {
				return fmt.Errorf("%s: %w", what, err)
			}
			if ns.owner != "" {
				found = append(found, host.foreignTo(ns.mounts(ctx), match)...)
			}
		}
		all = found
		return nil
	})
	if err != nil {
		return nil, err
	}
	return all, nil
}

// DoInOtherNamespaces is Do in each other mount namespace for whose mount table pick reports true. who is a process of the namespace, for
// messages. Namespaces are found as in DetachCopies. A namespace whose processes have exited is skipped.
func (n *Namespace) DoInOtherNamespaces(ctx context.Context, what string, pick func(mounts []Mount) bool, fn func(who string) error) error {
	picked, err := n.holders(ctx, what, Owners{}, func(_ *otherNamespace, mounts []Mount) bool { return pick(mounts) })
	if err != nil {
		return err
	}
	var errs []error
	for _, ns := range picked {
		at := namespaceRef{n, ns}
		who := processName(at.pid())
		err := at.do(ctx, what+at.name(), func(nsHandle) error { return fn(who) })
		if err != nil && !errors.Is(err, errEnded) {
			errs = append(errs, fmt.Errorf("%s%s: %w", what, at.name(), err))
		}
	}
	return errors.Join(errs...)
}

// hostView distinguishes the host's mounts from those that other namespaces hold for themselves.
type hostView struct {
	ids   map[int]bool
	peers map[string]bool // "shared:7"
}

// hostView reads the Namespace's mounts, and PID 1's if that is another one (see Own).
func (n *Namespace) hostView(ctx context.Context) (hostView, error) {
	mounts, err := n.Mounts(ctx)
	if err != nil {
		return hostView{}, err
	}
	if !n.foreign && !sharesMounts(1) {
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

// sharesMounts reports whether a process is in this process's mount namespace.
func sharesMounts(pid int) bool {
	own, err := os.Stat("/proc/self/ns/mnt")
	if err != nil {
		return false
	}
	its, err := os.Stat(proc.Path(pid, "ns/mnt"))
	return err == nil && os.SameFile(own, its)
}

// peerGroup returns the peer group of a mount: "shared:7", or "" if it is not shared.
func peerGroup(m Mount) string {
	for _, field := range m.Optional {
		if strings.HasPrefix(field, "shared:") {
			return field
		}
	}
	return ""
}

// foreignTo returns the mounts of another namespace's table that match and that the namespace holds for itself. A mount whose parent
// is a peer of a mount of the host is left out: changes propagate between it and the host.
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

// lastingAfter is foreignTo without the mounts that are unmounted with the host's: those on a slave of a mount of the host, which
// systemd units have (mount_namespaces(7)).
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
