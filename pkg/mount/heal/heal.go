// Package heal replaces stale bind mounts of volumes: at targets, at kubelet's subpaths and inside running containers.
//
// A bind mount is stale if it shows a former file system of its mount: the client was restarted, or another mount replaced the
// one that was published. It is replaced in one step, so that a place never shows the directory below. The package knows
// publications and file systems, but neither clients nor credentials.
package heal

import (
	"context"
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strings"
	"time"

	"k8s.io/klog/v2"

	"github.com/s3-csi/s3-csi-driver/pkg/failpoint"
	"github.com/s3-csi/s3-csi-driver/pkg/fault"
	"github.com/s3-csi/s3-csi-driver/pkg/host"
	"github.com/s3-csi/s3-csi-driver/pkg/mount"
	"github.com/s3-csi/s3-csi-driver/pkg/mount/pins"
	"github.com/s3-csi/s3-csi-driver/pkg/mount/state"
	"github.com/s3-csi/s3-csi-driver/pkg/mount/tracker"
)

const (
	// maxRounds bounds how often Heal looks again for places that appeared meanwhile, such as a container that was just started.
	maxRounds = 5
	// maxReported bounds the places that are logged as not replaced, and maxNamed those that are logged as replaced: a container can create
	// any number of them.
	maxReported, maxNamed = 20, 5
	// lookupBound bounds a client's lookup of the directory that a subpath shows.
	lookupBound = 10 * time.Second
)

// Healer replaces stale bind mounts. The caller of a method that is given a mount holds the lock of the mount's key.
type Healer struct {
	Enabled   bool // --heal; without it, only ReplaceTarget replaces anything
	Namespace *host.Namespace
	Store     *state.Store
	Pins      *pins.Pins
	Tracker   *tracker.Tracker
}

// Unhealed reports whether HealOnce does anything although nothing stale was found: this process has not healed the mount yet.
func (h *Healer) Unhealed(m state.Mount) bool { return h.Enabled && !h.Tracker.Mount(m.Name).Healed() }

// OutdatedInPods returns the names of the mounts of which containers of the publishing pods show another file system than the current
// one, whose device number current returns. It is one search for all mounts, while Heal searches for one.
func (h *Healer) OutdatedInPods(ctx context.Context, pubs []state.Publication, current func(name string) (minor uint32, ok bool)) (map[string]bool, error) {
	at := PlacesOf(pubs)
	owners, err := findOwners(ctx, h.Namespace, &at)
	if err != nil {
		return nil, err
	}
	found, err := h.Namespace.MountsInOtherNamespaces(ctx, "searching for stale mounts in pods", owners, func(mnt host.Mount) bool {
		name, ours := mount.NameOf(mnt.Source)
		minor, ok := current(name)
		return ours && (!ok || mnt.Major != 0 || mnt.Minor != minor)
	})
	if err != nil {
		return nil, err
	}
	outdated := map[string]bool{}
	for _, mnt := range found {
		name, _ := mount.NameOf(mnt.Source)
		outdated[name] = true
	}
	return outdated, nil
}

// HealOnce is Heal if this process has not healed the mount before: the previous one may have been stopped before it was done.
func (h *Healer) HealOnce(ctx context.Context, m state.Mount) error {
	if !h.Unhealed(m) {
		return nil
	}
	h.Tracker.Mount(m.Name).MarkHealed()
	return h.Heal(ctx, m)
}

// Heal replaces the stale mounts of all publications of a mount with its file system. Stale copies in other mount namespaces are
// detached, because they keep an aborted connection open. It can be interrupted anywhere and repeated.
func (h *Healer) Heal(ctx context.Context, m state.Mount) error {
	if !h.Enabled {
		return nil
	}
	again := true
	defer func() {
		if again {
			h.Tracker.Mount(m.Name).MarkUnhealed() // with the next reconcile pass
		}
	}()
	all, err := h.Store.Pubs.All(ctx)
	if err != nil {
		return err
	}
	pubs := slices.DeleteFunc(slices.Clone(all), func(p state.Publication) bool { return p.Mount != m.Name })
	failures, err := h.healAt(ctx, m, PlacesOf(pubs))
	for _, p := range pubs {
		if len(p.MovedFrom) > 0 && err == nil {
			var left []host.Swapped
			left, err = h.healMoved(ctx, m, p, all)
			failures = append(failures, left...)
		}
	}
	if err == nil {
		err = h.Pins.Release(ctx, m.Name)
	}
	again = err != nil || slices.ContainsFunc(failures, func(s host.Swapped) bool { return IsTransient(s.Err) })
	for _, s := range failures[:min(len(failures), maxReported)] {
		err := fault.Errorf(fault.Unavailable, "volume %s: replacing the stale mount at %s (pid %d, showing %s): %w; restart the container",
			m.VolumeID, s.Mountpoint, s.PID, s.Root, s.Err)
		h.Tracker.LogError(ctx, m.Name+" "+s.Mountpoint, err, "Stale mount not replaced", "mount", m.Name)
	}
	return err
}

// IsTransient reports whether a replacement that failed may succeed without a change by a user.
func IsTransient(err error) bool {
	return !fault.Is(err, fault.NotFound) && !fault.Is(err, fault.Precondition) && !fault.Is(err, fault.Unsupported)
}

// healAt heals these places and returns what could not be replaced.
func (h *Healer) healAt(ctx context.Context, m state.Mount, at Places) (failures []host.Swapped, err error) {
	failures, stale, err := h.swapAt(ctx, m, at, append([]string{m.Name}, m.Predecessors...))
	if err != nil || at.others { // a container without its mount would write into its own directory below
		return failures, err
	}
	// No allocation is among the places, because their targets are in no pod's directory.
	n, err := h.Namespace.DetachStale(ctx, stale, host.Owners{ByCgroup: at.pod})
	failpoint.Here("heal.detached")
	if n > 0 {
		h.Tracker.CountHeals("elsewhere", "detached", n)
	}
	if err != nil {
		klog.FromContext(ctx).Error(err, "Cannot detach stale mounts in other namespaces", "mount", m.Name)
	}
	return failures, nil
}

// healMoved replaces the mounts that one publication was moved away from, at the places of that publication alone: others may
// still have them. Other publications of its pod move along.
func (h *Healer) healMoved(ctx context.Context, m state.Mount, p state.Publication, all []state.Publication) ([]host.Swapped, error) {
	at := PlacesOf([]state.Publication{p})
	at.writable = PlacesOf(all).writable
	failures, _, err := h.swapAt(ctx, m, at, p.MovedFrom)
	return failures, err
}

// swapAt replaces, at these places, the former file systems of the mounts of these names. It returns what could not be replaced,
// and which mounts are stale.
func (h *Healer) swapAt(ctx context.Context, m state.Mount, at Places, names []string) (failures []host.Swapped, stale func(host.Mount) bool, err error) {
	err = Rounds{
		Namespace: h.Namespace,
		Next: func(ctx context.Context) (swap host.Swap, mounts []host.Mount, err error) {
			swap, mounts, err = h.swapOf(ctx, m, at, names)
			stale = swap.Stale
			return swap, mounts, err
		},
		Count: func(all []host.Swapped) (replaced int) {
			replaced, failures = h.countResults(ctx, m, all)
			return replaced
		},
	}.Replace(ctx, at)
	return failures, stale, err
}

// Rounds replace stale mounts on the host and in containers, until a round replaces none.
type Rounds struct {
	Namespace *host.Namespace
	// Next returns what a round replaces, and the host's mount table.
	Next func(ctx context.Context) (host.Swap, []host.Mount, error)
	// Count counts the results of a round and returns how many mounts were replaced.
	Count func(all []host.Swapped) (replaced int)
}

// Replace replaces the stale mounts at these places.
func (r Rounds) Replace(ctx context.Context, at Places) error {
	owners, err := findOwners(ctx, r.Namespace, &at)
	if err != nil {
		return err
	}
	var groups *host.Groups
	for range maxRounds {
		swap, mounts, err := r.Next(ctx)
		if err != nil {
			return err
		}
		if groups == nil {
			shown := slices.DeleteFunc(slices.Clone(mounts), func(mnt host.Mount) bool { return !swap.Stale(mnt) || !at.Has(mnt) })
			if groups, err = r.Namespace.HoldGroups(ctx, shown); err != nil {
				return err
			}
			defer groups.Close()
		}
		swap.Groups, swap.Bound, swap.ReadOnly = groups, lookupBound, at.readOnly
		swapped, err := r.Namespace.SwapHere(ctx, swap, at.Has)
		failpoint.Here("heal.host")
		if len(at.pods)+len(at.allocations) > 0 {
			inContainers, cerr := r.Namespace.SwapInOtherNamespaces(ctx, swap, owners)
			swapped, err = append(swapped, inContainers...), errors.Join(err, cerr)
		}
		failpoint.Here("heal.containers")
		if replaced := r.Count(swapped); replaced == 0 || err != nil {
			return err
		}
	}
	return nil
}

// findOwners returns how the containers of the places' pods and allocations are found. It completes the places.
func findOwners(ctx context.Context, ns *host.Namespace, at *Places) (host.Owners, error) {
	at.node = host.NodeCgroup()
	if len(at.allocations) == 0 {
		return host.Owners{ByCgroup: at.pod}, nil
	}
	mounts, err := ns.Mounts(ctx)
	if err != nil {
		return host.Owners{}, err
	}
	at.shown = map[string]host.Directory{}
	for id, dir := range at.allocations {
		if d, ok := host.DirectoryIn(mounts, dir); ok {
			at.shown[id] = d
		}
	}
	return host.Owners{ByCgroup: at.pod, ByMounts: at.allocation}, nil
}

// sourceOf returns the file system on a mount's source, and the host's mount table.
func (h *Healer) sourceOf(ctx context.Context, m state.Mount) (source host.Mount, mounts []host.Mount, err error) {
	if mounts, err = h.Namespace.Mounts(ctx); err != nil {
		return source, nil, err
	}
	source, ok := host.TopAt(mounts, h.Store.SourceDir(m.Name))
	if !ok {
		return source, nil, mount.SourceUnmounted(m.Name)
	}
	return source, mounts, nil
}

// swapOf describes which mounts of these names are replaced and by what, and pins the former file systems. It returns the host's
// mount table, too.
func (h *Healer) swapOf(ctx context.Context, m state.Mount, at Places, names []string) (host.Swap, []host.Mount, error) {
	source, mounts, err := h.sourceOf(ctx, m)
	if err != nil {
		return host.Swap{}, nil, err
	}
	// Containers may have copies of what the host shows at the targets. After a restart it is pinned already, unless another process
	// unmounted the source. Targets are pinned under the mount's own name.
	known := h.Pins.Known(mounts, names, nil)
	for _, mnt := range mounts {
		if !at.Targets[mnt.Mountpoint] || !pins.Serves(mnt, names) || known.Has(mnt) || mnt.Minor == source.Minor {
			continue
		}
		if top, _ := host.TopAt(mounts, mnt.Mountpoint); top.ID != mnt.ID {
			continue // no path leads to it
		}
		if err := h.Pins.Pin(ctx, m.Name, mounts, mnt); err != nil {
			return host.Swap{}, nil, err
		}
		known[mnt.Minor] = true
	}
	if mounts, err = h.Namespace.Mounts(ctx); err != nil {
		return host.Swap{}, nil, err
	}
	former := h.Pins.Known(mounts, append([]string{m.Name}, names...), nil)
	delete(former, source.Minor)
	return host.Swap{
		Source: source, Bound: lookupBound,
		Stale:   func(mnt host.Mount) bool { return pins.Serves(mnt, names) && former.Has(mnt) },
		Unknown: func(mnt host.Mount) bool { return pins.Serves(mnt, names) && !former.Has(mnt) },
	}, mounts, nil
}

// countResults counts and logs replacements and returns those that failed.
func (h *Healer) countResults(ctx context.Context, m state.Mount, all []host.Swapped) (replaced int, failures []host.Swapped) {
	for _, s := range all {
		place := "host"
		if s.PID != 0 {
			place = "container"
		}
		if s.Err != nil {
			failures = append(failures, s)
			h.Tracker.CountHeals(place, "failed", 1)
			continue
		}
		replaced++
		h.Tracker.CountHeals(place, "replaced", 1)
	}
	if replaced > 0 {
		klog.FromContext(ctx).Info("Replaced stale mounts", "mount", m.Name, "volume", m.VolumeID, "count", replaced, "at", Named(all))
	}
	return replaced, failures
}

// Named names some of the mounts that were replaced, for a line in the log.
func Named(all []host.Swapped) (places []string) {
	for _, s := range all {
		if s.Err == nil && len(places) < maxNamed {
			places = append(places, fmt.Sprintf("%s (pid %d, showing %s)", s.Mountpoint, s.PID, s.Root))
		}
	}
	return places
}

// ReplaceTarget replaces the stale mount at a target with a mount's file system. done is false if it cannot be replaced in place.
func (h *Healer) ReplaceTarget(ctx context.Context, m state.Mount, target string, readOnly bool) (done bool, err error) {
	source, mounts, err := h.sourceOf(ctx, m)
	if err != nil {
		return false, err
	}
	readOnly = readOnly || source.ReadOnly()
	if top, ok := host.TopAt(mounts, target); ok && top.Minor == source.Minor && top.ReadOnly() == readOnly {
		return true, nil // healed with the mount's other publications
	}
	// Any of the driver's mounts: of an earlier generation or, if the CO publishes another volume at the target now, of that.
	stale := func(mnt host.Mount) bool {
		_, ours := mount.NameOf(mnt.Source)
		return ours && mnt.ReadOnly() == readOnly && mnt.Minor != source.Minor
	}
	atTarget := func(mnt host.Mount) bool { return mnt.Mountpoint == target }
	swapped, err := h.Namespace.SwapHere(ctx, host.Swap{Source: source, Stale: stale, Bound: lookupBound}, atTarget)
	if err == nil && len(swapped) > 0 && !slices.ContainsFunc(swapped, func(s host.Swapped) bool { return s.Err != nil }) {
		return true, h.CheckTarget(ctx, m, target)
	}
	klog.FromContext(ctx).Info("Cannot replace stale target in place, unmounting it", "mount", m.Name, "error", err)
	return false, nil
}

// CheckTarget returns nil if a target shows a mount's current file system.
func (h *Healer) CheckTarget(ctx context.Context, m state.Mount, target string) error {
	return h.Namespace.Do(ctx, "checking target "+target, func() error {
		source, err := host.Inspect(h.Store.SourceDir(m.Name))
		if err != nil {
			return err
		}
		top, err := host.Inspect(target)
		if err != nil {
			return err
		}
		if !source.Mountpoint || top != source {
			return fault.Errorf(fault.Unavailable, "target %s does not show mount %s: its client exited in the meantime, or another mount covers it",
				target, m.Name)
		}
		return nil
	})
}

// Places are where a mount's publications can be seen: at targets, at kubelet's subpaths and in containers.
type Places struct {
	Targets map[string]bool
	pods    map[string]string // the directories of pods that have the mount published, by pod UID
	others  bool              // a target is in no pod's directory, so not all containers that use it may be found
	// allocations are the directories of Nomad's allocations that have the mount published, by allocation id.
	allocations map[string]string
	// readOnlyTargets are the targets of read-only publications, writable the pods and allocations that have one that is not read-only.
	readOnlyTargets, writable map[string]bool
	node                      string                    // the text of /proc/1/cgroup
	shown                     map[string]host.Directory // the directories of allocations, as mount tables show them
}

// podPattern matches kubelet's target path of a pod, with the pod's directory and UID.
var podPattern = regexp.MustCompile(`^(.*/pods/([0-9a-zA-Z][0-9a-zA-Z-]{7,62}))/volumes/`)

// allocationPattern matches Nomad's target path of an allocation, with <data_dir> and the allocation's id.
var allocationPattern = regexp.MustCompile(`^(/.+)/client/csi/[^/]+/[^/]+/per-alloc/([0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12})/`)

// PlacesOf returns the places of publications.
func PlacesOf(pubs []state.Publication) Places {
	p := Places{
		Targets: map[string]bool{}, pods: map[string]string{}, allocations: map[string]string{},
		readOnlyTargets: map[string]bool{}, writable: map[string]bool{},
	}
	for _, pub := range pubs {
		p.Targets[pub.Target] = true
		p.readOnlyTargets[pub.Target] = pub.ReadOnly
		pod, allocation, owner := podPattern.FindStringSubmatch(pub.Target), allocationPattern.FindStringSubmatch(pub.Target), ""
		switch {
		case pod != nil:
			owner = pod[2]
			p.pods[owner] = pod[1]
		case allocation != nil:
			owner = allocation[2]
			p.allocations[owner] = allocation[1] + "/alloc/" + owner // Nomad's default
		}
		p.others = p.others || pod == nil
		p.writable[owner] = p.writable[owner] || !pub.ReadOnly
	}
	return p
}

// Has reports whether a mount in the host's namespace is at a target, or is kubelet's bind of a directory of one.
func (p Places) Has(mnt host.Mount) bool {
	_, subpath := p.podAt(mnt)
	return subpath || p.Targets[mnt.Mountpoint]
}

// podAt returns the pod of which a mount in the host's namespace is kubelet's bind of a directory.
func (p Places) podAt(mnt host.Mount) (uid string, ok bool) {
	for uid, dir := range p.pods {
		if strings.HasPrefix(mnt.Mountpoint, dir+"/volume-subpaths/") {
			return uid, true
		}
	}
	return "", false
}

// pod returns which of the pods a process is of, by the text of its /proc/<pid>/cgroup.
func (p Places) pod(cgroup string) string {
	uid := host.PodOf(cgroup, p.node)
	if _, ours := p.pods[uid]; !ours {
		return ""
	}
	return uid
}

// allocation returns which of the allocations a container is of, by its mount table: Nomad mounts the allocation's directories in it. A
// container can make mounts with roots of any name, but none that show this directory of the host.
func (p Places) allocation(mounts []host.Mount) string {
	for id, dir := range p.shown {
		if slices.ContainsFunc(mounts, dir.Shows) {
			return id
		}
	}
	return ""
}

// readOnly reports whether the replacement of a mount must be read-only. A publication has its own flag. A pod, or an allocation, that has
// only read-only publications can have no writable copy of one. owner is that of the mount's namespace, "" on the host.
func (p Places) readOnly(mnt host.Mount, owner string) bool {
	if owner != "" {
		return !p.writable[owner]
	}
	if p.Targets[mnt.Mountpoint] {
		return p.readOnlyTargets[mnt.Mountpoint]
	}
	uid, subpath := p.podAt(mnt)
	return subpath && !p.writable[uid]
}

// MovingAway reports whether a mount, whose name is shown, is at a place of a publication that was moved away from it.
func MovingAway(pubs []state.Publication, shown string, mnt host.Mount) bool {
	return slices.ContainsFunc(pubs, func(p state.Publication) bool {
		return slices.Contains(p.MovedFrom, shown) && PlacesOf([]state.Publication{p}).Has(mnt)
	})
}
