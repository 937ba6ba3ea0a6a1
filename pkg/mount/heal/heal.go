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
	enabled bool
	ns      *host.Namespace
	store   *state.Store
	pins    *pins.Pins
	tracker *tracker.Tracker
}

// New returns a healer. If it is not enabled, only ReplaceTarget replaces anything.
func New(enabled bool, ns *host.Namespace, store *state.Store, p *pins.Pins, t *tracker.Tracker) *Healer {
	return &Healer{enabled: enabled, ns: ns, store: store, pins: p, tracker: t}
}

// Enabled reports whether stale bind mounts are replaced (--heal).
func (h *Healer) Enabled() bool { return h.enabled }

// Unhealed reports whether HealOnce does anything although nothing stale was found: this process has not healed the mount yet.
func (h *Healer) Unhealed(m state.Mount) bool { return h.enabled && !h.tracker.Mount(m.Name).Healed() }

// OutdatedInPods returns the names of the mounts of which containers of the publishing pods show another file system than the current
// one, whose device number current returns. It is one search for all mounts, while Heal searches for one.
func (h *Healer) OutdatedInPods(ctx context.Context, pubs []state.Publication, current func(name string) (minor uint32, ok bool)) (map[string]bool, error) {
	at := PlacesOf(pubs)
	owners, err := owners(ctx, h.ns, &at)
	if err != nil {
		return nil, err
	}
	found, err := h.ns.MountsInOtherNamespaces(ctx, "searching for stale mounts in pods", owners, func(mnt host.Mount) bool {
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
	h.tracker.Mount(m.Name).MarkHealed()
	return h.Heal(ctx, m)
}

// Heal replaces the stale mounts of all publications of a mount with its file system. Stale copies in other mount namespaces are
// detached, because they keep an aborted connection open. It can be interrupted anywhere and repeated.
func (h *Healer) Heal(ctx context.Context, m state.Mount) error {
	if !h.enabled {
		return nil
	}
	again := true
	defer func() {
		if again {
			h.tracker.Mount(m.Name).MarkUnhealed() // with the next reconcile pass
		}
	}()
	all, err := h.store.Pubs.All(ctx)
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
		err = h.pins.Release(ctx, m.Name)
	}
	again = err != nil || slices.ContainsFunc(failures, func(s host.Swapped) bool { return IsTransient(s.Err) })
	for _, s := range failures[:min(len(failures), maxReported)] {
		err := fault.Errorf(fault.Unavailable, "volume %s: replacing the stale mount at %s (pid %d, showing %s): %w; restart the container", m.VolumeID, s.Mountpoint, s.PID, s.Root, s.Err)
		h.tracker.LogError(ctx, m.Name+" "+s.Mountpoint, err, "Stale mount not replaced", "mount", m.Name)
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
	n, err := h.ns.DetachStale(ctx, stale, host.Owners{ByCgroup: at.pod})
	failpoint.Here("heal.detached")
	if n > 0 {
		h.tracker.CountHeals("elsewhere", "detached", n)
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
	err = Replace(ctx, h.ns, at,
		func(ctx context.Context) (host.Swap, []host.Mount, error) {
			swap, mounts, err := h.swapOf(ctx, m, at, names)
			stale = swap.Stale
			return swap, mounts, err
		},
		func(all []host.Swapped) (replaced int) {
			replaced, failures = h.count(ctx, m, all)
			return replaced
		})
	return failures, stale, err
}

// Replace replaces stale mounts at these places, on the host and in containers, until a round replaces none. next returns what a round
// replaces and the host's mount table, count counts the results of a round and returns how many were replaced.
func Replace(ctx context.Context, ns *host.Namespace, at Places, next func(ctx context.Context) (host.Swap, []host.Mount, error), count func(all []host.Swapped) (replaced int)) error {
	owners, err := owners(ctx, ns, &at)
	if err != nil {
		return err
	}
	var groups *host.Groups
	for range maxRounds {
		swap, mounts, err := next(ctx)
		if err != nil {
			return err
		}
		if groups == nil {
			shown := slices.DeleteFunc(slices.Clone(mounts), func(mnt host.Mount) bool { return !swap.Stale(mnt) || !at.Has(mnt) })
			if groups, err = ns.HoldGroups(ctx, shown); err != nil {
				return err
			}
			defer groups.Close()
		}
		swap.Groups, swap.Bound, swap.ReadOnly = groups, lookupBound, at.readOnly
		onHost, err := ns.SwapHere(ctx, swap, at.Has)
		failpoint.Here("heal.host")
		var inContainers []host.Swapped
		if len(at.pods)+len(at.allocations) > 0 {
			var cerr error
			inContainers, cerr = ns.SwapInOtherNamespaces(ctx, swap, owners)
			err = errors.Join(err, cerr)
		}
		failpoint.Here("heal.containers")
		replaced := count(slices.Concat(onHost, inContainers))
		if err != nil {
			return err
		}
		if replaced == 0 {
			break
		}
	}
	return nil
}

// owners returns how the containers of the places' pods and allocations are found. It completes the places.
func owners(ctx context.Context, ns *host.Namespace, at *Places) (host.Owners, error) {
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

// swapOf describes which mounts of these names are replaced and by what, and pins the former file systems. It returns the host's
// mount table, too.
func (h *Healer) swapOf(ctx context.Context, m state.Mount, at Places, names []string) (host.Swap, []host.Mount, error) {
	mounts, err := h.ns.Mounts(ctx)
	if err != nil {
		return host.Swap{}, nil, err
	}
	source, ok := host.TopAt(mounts, h.store.SourceDir(m.Name))
	if !ok {
		return host.Swap{}, nil, fault.Errorf(fault.Unavailable, "mount %s has no file system to replace stale mounts with", m.Name)
	}
	if err := h.pins.PinTargets(ctx, m.Name, names, at.Targets, source, mounts); err != nil {
		return host.Swap{}, nil, err
	}
	if mounts, err = h.ns.Mounts(ctx); err != nil {
		return host.Swap{}, nil, err
	}
	// Targets are pinned under the mount's own name.
	former := h.pins.Known(mounts, append([]string{m.Name}, names...), nil)
	delete(former, source.Minor)
	return host.Swap{
		Source: source, Bound: lookupBound,
		Stale:   func(mnt host.Mount) bool { return pins.Serves(mnt, names) && former.Has(mnt) },
		Unknown: func(mnt host.Mount) bool { return pins.Serves(mnt, names) && !former.Has(mnt) },
	}, mounts, nil
}

// count counts and logs replacements and returns those that failed.
func (h *Healer) count(ctx context.Context, m state.Mount, all []host.Swapped) (replaced int, failures []host.Swapped) {
	for _, s := range all {
		place := "host"
		if s.PID != 0 {
			place = "container"
		}
		if s.Err != nil {
			failures = append(failures, s)
			h.tracker.CountHeals(place, "failed", 1)
			continue
		}
		replaced++
		h.tracker.CountHeals(place, "replaced", 1)
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
	mounts, err := h.ns.Mounts(ctx)
	if err != nil {
		return false, err
	}
	source, ok := host.TopAt(mounts, h.store.SourceDir(m.Name))
	if !ok {
		return false, mount.SourceUnmounted(m.Name)
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
	swapped, err := h.ns.SwapHere(ctx, host.Swap{Source: source, Stale: stale, Bound: lookupBound}, func(mnt host.Mount) bool { return mnt.Mountpoint == target })
	if err == nil && len(swapped) > 0 && !slices.ContainsFunc(swapped, func(s host.Swapped) bool { return s.Err != nil }) {
		return true, h.CheckTarget(ctx, m, target)
	}
	klog.FromContext(ctx).Info("Cannot replace stale target in place, unmounting it", "mount", m.Name, "error", err)
	return false, nil
}

// CheckTarget returns nil if a target shows a mount's current file system.
func (h *Healer) CheckTarget(ctx context.Context, m state.Mount, target string) error {
	return h.ns.Do(ctx, "checking target "+target, func() error {
		source, err := host.Inspect(h.store.SourceDir(m.Name))
		if err != nil {
			return err
		}
		top, err := host.Inspect(target)
		if err != nil {
			return err
		}
		if !source.Mountpoint || top != source {
			return fault.Errorf(fault.Unavailable, "target %s does not show mount %s: its client exited in the meantime, or another mount covers it", target, m.Name)
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

// podOf reads a pod's directory and UID from kubelet's target path, <root>/pods/<uid>/volumes/….
func podOf(target string) (dir, uid string, ok bool) {
	match := podPattern.FindStringSubmatch(target)
	if match == nil {
		return "", "", false
	}
	return match[1], match[2], true
}

var podPattern = regexp.MustCompile(`^(.*/pods/([0-9a-zA-Z][0-9a-zA-Z-]{7,62}))/volumes/`)

// allocationOf reads an allocation's directory and id from Nomad's target path, <data_dir>/client/csi/<type>/<plugin>/per-alloc/<id>/….
// The directory is where Nomad has it by default.
func allocationOf(target string) (dir, id string, ok bool) {
	match := allocationPattern.FindStringSubmatch(target)
	if match == nil {
		return "", "", false
	}
	return match[1] + "/alloc/" + match[2], match[2], true
}

var allocationPattern = regexp.MustCompile(`^(/.+)/client/csi/[^/]+/[^/]+/per-alloc/([0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12})/`)

// PlacesOf returns the places of publications.
func PlacesOf(pubs []state.Publication) Places {
	p := Places{Targets: map[string]bool{}, pods: map[string]string{}, allocations: map[string]string{}, readOnlyTargets: map[string]bool{}, writable: map[string]bool{}}
	for _, pub := range pubs {
		p.Targets[pub.Target] = true
		p.readOnlyTargets[pub.Target] = pub.ReadOnly
		if dir, uid, ok := podOf(pub.Target); ok {
			p.pods[uid] = dir
			p.writable[uid] = p.writable[uid] || !pub.ReadOnly
			continue
		}
		p.others = true
		if dir, id, ok := allocationOf(pub.Target); ok {
			p.allocations[id] = dir
			p.writable[id] = p.writable[id] || !pub.ReadOnly
		}
	}
	return p
}

// Has reports whether a mount in the host's namespace is at a target, or is kubelet's bind of a directory of one.
func (p Places) Has(mnt host.Mount) bool {
	if p.Targets[mnt.Mountpoint] {
		return true
	}
	for _, dir := range p.pods {
		if strings.HasPrefix(mnt.Mountpoint, dir+"/volume-subpaths/") {
			return true
		}
	}
	return false
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
	for uid, dir := range p.pods {
		if strings.HasPrefix(mnt.Mountpoint, dir+"/volume-subpaths/") {
			return !p.writable[uid]
		}
	}
	return false
}

// MovingAway reports whether a mount, whose name is shown, is at a place of a publication that was moved away from it.
func MovingAway(pubs []state.Publication, shown string, mnt host.Mount) bool {
	return slices.ContainsFunc(pubs, func(p state.Publication) bool {
		return slices.Contains(p.MovedFrom, shown) && PlacesOf([]state.Publication{p}).Has(mnt)
	})
}
