package host

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"path"
	"regexp"
	"slices"
	"strings"

	"golang.org/x/sys/unix"
	"k8s.io/klog/v2"

	"github.com/s3-csi/s3-csi-driver/pkg/fault"
	"github.com/s3-csi/s3-csi-driver/pkg/proc"
)

type otherNamespace struct {
	id    uint64 // of Looks.mountNamespace
	pids  []int  // some of its processes
	owner string // by Owners; "": none
}

// maxPIDs bounds the remembered processes of a namespace, of which one must still run when the namespace is entered.
const maxPIDs = 8

// search is a search for other mount namespaces.
type search struct {
	what   string // for messages
	owners Owners
	owned  bool               // only namespaces that have an owner
	needs  func(m Mount) bool // see otherNamespace.mounts
	pick   func(ns *otherNamespace, mounts []Mount) bool
}

// otherNamespaces finds the mount namespaces of processes, other than the host's, and their owners by cgroup. It does not see namespaces without
// processes, nor those of processes that this one may not inspect, whose number it logs. A process that hangs costs none of the others their
// place: hung are those that have an owner, and whose namespace is therefore not known. Call it inside runCall.
func (n *Namespace) otherNamespaces(ctx context.Context, s search) (found []*otherNamespace, hung []Swapped, err error) {
	pids, err := proc.PIDs()
	if err != nil {
		return nil, nil, err
	}
	hosts := n.hostIDs(ctx)
	known := map[uint64]*otherNamespace{}
	unreadable := 0
	for _, pid := range pids {
		if err := ctx.Err(); err != nil {
			return nil, nil, fmt.Errorf("%s: %w", s.what, err)
		}
		owner := ""
		if s.owners.ByCgroup != nil {
			cgroup, err := os.ReadFile(proc.Path(pid, "cgroup"))
			if err != nil {
				continue // it has exited
			}
			owner = s.owners.ByCgroup(string(cgroup))
		}
		if s.owned && owner == "" && s.owners.ByMounts == nil {
			continue
		}
		id, err := n.looks.mountNamespace(ctx, pid)
		switch {
		case proc.Gone(err), err == nil && slices.Contains(hosts, id):
			continue
		case err != nil:
			if unreadable++; owner != "" && (fault.Is(err, fault.Timeout) || fault.Is(err, fault.Exhausted)) {
				hung = append(hung, Swapped{PID: pid, Err: err})
			}
			continue
		}
		ns := known[id]
		if ns == nil {
			ns = &otherNamespace{id: id}
			known[id] = ns
			found = append(found, ns)
		}
		if len(ns.pids) < maxPIDs {
			ns.pids = append(ns.pids, pid)
		}
		ns.owner = cmp.Or(ns.owner, owner)
	}
	if unreadable > 0 {
		klog.FromContext(ctx).V(4).Info("Cannot read some mount namespaces", "processes", unreadable, "call", s.what)
	}
	return found, hung, nil
}

// hostIDs returns the ids of the Namespace and, if it can be read, of PID 1's mount namespace.
func (n *Namespace) hostIDs(ctx context.Context) (ids []uint64) {
	if id, err := n.looks.mountNamespace(ctx, 1); err == nil {
		ids = append(ids, id)
	}
	var own unix.Stat_t
	if !n.foreign && unix.Stat(ownNamespace, &own) == nil {
		ids = append(ids, own.Ino)
	}
	return ids
}

// mounts reads the mount table of one of the namespace's processes. Mount points are seen from that process's root, which may not be
// the namespace's. Of mounts for which needs reports false, only id, parent and propagation are known; nil: all are needed. The table is
// empty if all processes have exited.
func (o *otherNamespace) mounts(ctx context.Context, needs func(Mount) bool) (table tableParser, err error) {
	var keep func(m Mount) (Mount, bool)
	if needs != nil {
		keep = func(m Mount) (Mount, bool) {
			if !needs(m) {
				m = Mount{ID: m.ID, Parent: m.Parent, Optional: cloneAll(m.Optional)}
			}
			return m, true
		}
	}
	for _, pid := range o.pids {
		table, err = tableFile{path: proc.Path(pid, "mountinfo"), limit: maxTable, keep: keep}.parse(ctx)
		if err == nil || fault.KindOf(err) != fault.Unknown {
			return table, err
		}
	}
	return tableParser{}, nil
}

// cloneAll copies strings out of a longer one.
func cloneAll(all []string) (clones []string) {
	for _, s := range all {
		clones = append(clones, strings.Clone(s))
	}
	return clones
}

// errEnded means that all known processes of a namespace have exited. If others run in it, the next search finds them.
var errEnded = errors.New("the processes have exited")

// enter moves the calling thread, which must end afterwards, into the namespace. procDir is this process's /proc. It returns the namespace.
func (o *otherNamespace) enter(procDir int) (int, error) {
	for _, pid := range o.pids {
		process, err := unix.PidfdOpen(pid, 0)
		if proc.Gone(err) {
			continue
		}
		if err == nil {
			err = enterNamespace(process)
			unix.Close(process)
		}
		if proc.Gone(err) || errors.Is(err, unix.EPERM) { // EPERM: its namespace was readable a moment ago, so it is exiting
			continue
		}
		if err != nil {
			return -1, fmt.Errorf("the mount namespace of %s: %w", processName(pid), err)
		}
		ns, err := unix.Openat(procDir, "thread-self/ns/mnt", unix.O_RDONLY|unix.O_CLOEXEC, 0)
		if err != nil {
			return -1, err
		}
		var st unix.Stat_t
		if err := unix.Fstat(ns, &st); err == nil && st.Ino == o.id { // the pid may have been reused, and a process can change its namespace
			return ns, nil
		}
		unix.Close(ns)
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
	holders, _, err := n.findHolders(ctx, search{what: what, needs: match, pick: func(_ *otherNamespace, mounts []Mount) bool {
		copies := host.lastingAfter(mounts, match)
		if len(copies) > 0 {
			found = copies[0]
		}
		return len(copies) > 0
	}})
	if err != nil || len(holders) == 0 {
		return "", err
	}
	return found.Mountpoint + n.refTo(holders[len(holders)-1]).name, nil
}

// MountsInOtherNamespaces returns the mounts that match and that other mount namespaces hold for themselves. It looks only at namespaces
// that have an owner. Namespaces are found as in DetachCopies.
func (n *Namespace) MountsInOtherNamespaces(ctx context.Context, what string, owners Owners, match func(Mount) bool) ([]Mount, error) {
	host, err := n.hostView(ctx)
	if err != nil {
		return nil, err
	}
	var all []Mount
	_, _, err = n.findHolders(ctx, search{what: what, owners: owners, owned: true, needs: match, pick: func(_ *otherNamespace, mounts []Mount) bool {
		all = append(all, host.foreignTo(mounts, match)...)
		return false
	}})
	if err != nil {
		return nil, err
	}
	return all, nil
}

// DoInOtherNamespaces is Do in each other mount namespace for whose mount table pick reports true. who is a process of the namespace, for
// messages. Namespaces are found as in DetachCopies. A namespace whose processes have exited is skipped.
func (n *Namespace) DoInOtherNamespaces(ctx context.Context, what string, pick func(mounts []Mount) bool, fn func(who string) error) error {
	picked, _, err := n.findHolders(ctx, search{what: what, pick: func(_ *otherNamespace, mounts []Mount) bool { return pick(mounts) }})
	if err != nil {
		return err
	}
	return n.doInEach(picked, func(at namespaceRef) error {
		who := processName(at.pid)
		if err := at.do(ctx, what+at.name, func(nsHandle) error { return fn(who) }); err != nil {
			return fmt.Errorf("%s%s: %w", what, at.name, err)
		}
		return nil
	})
}

// hostView distinguishes the host's mounts from those that other namespaces hold for themselves.
type hostView struct {
	ids   map[int]bool
	peers map[string]bool // the peer groups
}

// hostView reads the Namespace's mounts, and PID 1's if that is another one (see Own).
func (n *Namespace) hostView(ctx context.Context) (hostView, error) {
	mounts, err := n.Mounts(ctx)
	if err != nil {
		return hostView{}, err
	}
	if ids := n.hostIDs(ctx); !n.foreign && (len(ids) < 2 || ids[0] != ids[1]) {
		if first, err := readMounts(ctx, hostMountinfo); err == nil {
			mounts = append(mounts, first...)
		}
	}
	view := hostView{ids: mountIDs(mounts), peers: map[string]bool{}}
	for _, m := range mounts {
		if m.Shared() {
			view.peers[m.peerGroup()] = true
		}
	}
	return view, nil
}

// foreignTo returns the mounts of another namespace's table that match and that the namespace holds for itself. A mount whose parent
// is a peer of a mount of the host is left out: changes propagate between it and the host.
func (h hostView) foreignTo(mounts []Mount, match func(Mount) bool) []Mount {
	groups := make(map[int]string, len(mounts))
	for _, p := range mounts {
		groups[p.ID] = p.peerGroup()
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
		follows[p.ID] = h.peers[p.propagation("master:")]
	}
	return slices.DeleteFunc(h.foreignTo(mounts, match), func(m Mount) bool { return follows[m.Parent] })
}

// Owners selects other mount namespaces by their owners: the pods or allocations whose containers use them. Owners are compared by their
// names, which the caller chooses. The zero value selects none.
type Owners struct {
	// ByCgroup returns the owner of a process by the text of its /proc/<pid>/cgroup; "": none.
	ByCgroup func(text string) string
	// ByMounts returns the owner of a namespace by its mount table; "": none. It is asked if no process has an owner by its cgroup. nil: no
	// namespace has one.
	ByMounts func(mounts []Mount) string
}

// Directory is a directory as mount tables show it: in every mount namespace a bind mount of it has the same device and root.
type Directory struct {
	major, minor uint32
	root         string
}

// DirectoryIn returns the Directory of a path in a mount table, without looking at the file system. ok is false if nothing is mounted above
// the path. The path must be absolute and without symbolic links.
func DirectoryIn(mounts []Mount, dir string) (d Directory, ok bool) {
	longest := -1
	for _, m := range mounts { // of two mounts at one place the later one is on top
		rest, below := cutDir(dir, m.Mountpoint)
		if below && len(m.Mountpoint) >= longest {
			longest, ok = len(m.Mountpoint), true
			d = Directory{m.Major, m.Minor, path.Join(m.Root, rest)}
		}
	}
	return d, ok
}

// Shows reports whether a mount shows the directory or something below it.
func (d Directory) Shows(m Mount) bool {
	_, below := cutDir(m.shown(), d.root)
	return m.Major == d.major && m.Minor == d.minor && below
}

// cutDir returns the rest of a path below a directory, which may be the directory itself.
func cutDir(file, dir string) (rest string, below bool) {
	if dir == "/" {
		return file, true
	}
	rest, below = strings.CutPrefix(file, dir)
	return rest, below && (rest == "" || rest[0] == '/')
}

// podElement is kubelet's name for a pod's cgroup: "pod<uid>" with the cgroup driver cgroupfs, and "…-pod<uid>.slice", with
// underscores for dashes, with systemd (pkg/kubelet/cm/pod_container_manager_linux.go and cgroup_manager_linux.go of Kubernetes).
var podElement = regexp.MustCompile(`^(?:pod([0-9a-fA-F-]{32,36})|(?:.*-)?pod([0-9a-fA-F_]{32,36})\.slice)$`)

// PodOf returns the UID of a process's pod, "" if it is in none, from the text of its /proc/<pid>/cgroup. A container can make
// cgroups of any name below its own, so the outermost pod's cgroup counts. Cgroups that the node itself is in do not count; node is
// the text of PID 1.
func PodOf(text, node string) (uid string) {
	for line := range strings.Lines(text) {
		fields := strings.SplitN(strings.TrimSuffix(line, "\n"), ":", 3)
		if len(fields) < 3 {
			continue
		}
		for element := range strings.SplitSeq(fields[2], "/") {
			// A runtime that gets systemd's names but uses cgroupfs makes one element of "slice:prefix:container".
			element, _, _ = strings.Cut(element, ":")
			match := podElement.FindStringSubmatch(element)
			if match == nil || strings.Contains(node, "/"+element) {
				continue
			}
			return match[1] + strings.ReplaceAll(match[2], "_", "-")
		}
	}
	return ""
}

// NodeCgroup returns the text of PID 1's cgroup file, "" if it cannot be read.
func NodeCgroup() string {
	text, err := os.ReadFile(proc.Path(1, "cgroup"))
	if err != nil {
		return ""
	}
	return string(text)
}

// accountOf returns the account for calls in the namespace of a process: its pod, else its cgroup.
func accountOf(pid int) string {
	text, err := os.ReadFile(proc.Path(pid, "cgroup"))
	if err != nil {
		return "exiting processes"
	}
	if uid := PodOf(string(text), NodeCgroup()); uid != "" {
		return "pod " + uid
	}
	return "cgroup " + strings.Join(strings.Fields(string(text)), " ")
}
