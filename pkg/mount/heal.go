package mount

import (
	"context"
	"errors"
	"regexp"
	"slices"
	"strings"
	"time"

	"k8s.io/klog/v2"

	"github.com/s3-csi/s3-csi-driver/pkg/failpoint"
	"github.com/s3-csi/s3-csi-driver/pkg/fault"
	"github.com/s3-csi/s3-csi-driver/pkg/host"
)

const (
	// healRounds bounds how often a heal looks again for what came up meanwhile: a container that started on a dead mount.
	healRounds = 5
	// maxReported bounds how many places are named that are left as they are: a container can make as many as it likes.
	maxReported = 20
	// lookupBound is how long a client may take to find the directory that a subpath shows.
	lookupBound = 10 * time.Second
)

// places are where a mount's publications may be seen.
type places struct {
	targets map[string]bool
	pods    map[string]string // the directories of pods that have it published, by pod UID
	others  bool              // a target is in no pod's directory: whose containers use it, nobody can tell
	// readOnlyTargets are the targets of read-only publications, writable the pods that have one that is not.
	readOnlyTargets, writable map[string]bool
	node                      string // the text of /proc/1/cgroup
}

// podOf reads pod directory and UID from a kubelet's target path: <root>/pods/<uid>/volumes/…
func podOf(target string) (dir, uid string, ok bool) {
	match := podPattern.FindStringSubmatch(target)
	if match == nil {
		return "", "", false
	}
	return match[1], match[2], true
}

var podPattern = regexp.MustCompile(`^(.*/pods/([0-9a-zA-Z][0-9a-zA-Z-]{7,62}))/volumes/`)

func placesOf(pubs []publication) places {
	p := places{targets: map[string]bool{}, pods: map[string]string{}, readOnlyTargets: map[string]bool{}, writable: map[string]bool{}}
	for _, pub := range pubs {
		p.targets[pub.Target] = true
		p.readOnlyTargets[pub.Target] = pub.ReadOnly
		if dir, uid, ok := podOf(pub.Target); ok {
			p.pods[uid] = dir
			p.writable[uid] = p.writable[uid] || !pub.ReadOnly
		} else {
			p.others = true
		}
	}
	return p
}

// here tells whether a mount of the host is a publication, or kubelet's bind of a directory of one.
func (p places) here(mnt host.Mount) bool {
	if p.targets[mnt.Mountpoint] {
		return true
	}
	for _, dir := range p.pods {
		if strings.HasPrefix(mnt.Mountpoint, dir+"/volume-subpaths/") {
			return true
		}
	}
	return false
}

// theirs reports whether a process is one of the pods' containers', by its cgroup.
func (p places) theirs(cgroup string) bool {
	_, ours := p.pods[host.PodOf(cgroup, p.node)]
	return ours
}

// readOnly reports whether what replaces a mount must be read-only: a publication has its own flag, and a pod that has only
// read-only publications can have no writable copy of one.
func (p places) readOnly(mnt host.Mount, cgroup string) bool {
	if cgroup != "" {
		return !p.writable[host.PodOf(cgroup, p.node)]
	}
	if p.targets[mnt.Mountpoint] {
		return p.readOnlyTargets[mnt.Mountpoint]
	}
	for uid, dir := range p.pods {
		if strings.HasPrefix(mnt.Mountpoint, dir+"/volume-subpaths/") {
			return !p.writable[uid]
		}
	}
	return false
}

// heal puts the mount's living file system in the place of dead ones: at its targets, at kubelet's subpaths and in the
// containers of the pods that use it. Elsewhere dead copies are detached, because they keep a dead connection. It can be
// cut short anywhere and done again. The key's lock is held.
func (m *Manager) heal(ctx context.Context, rec record) error {
	again := true
	defer func() {
		if again {
			m.healed.forget(rec.Name) // it is looked at once more with the others
		}
	}()
	var all []publication
	if err := m.do(ctx, func() (err error) { all, err = m.store.allPublications(); return err }); err != nil {
		return err
	}
	pubs := slices.DeleteFunc(slices.Clone(all), func(p publication) bool { return p.Mount != rec.Name })
	failures, err := m.healAt(ctx, rec, placesOf(pubs))
	for _, p := range pubs {
		if len(p.From) > 0 && err == nil {
			var left []host.Swapped
			left, err = m.healMoved(ctx, rec, p, all)
			failures = append(failures, left...)
		}
	}
	if err == nil {
		err = m.releasePins(ctx, rec.Name)
	}
	again = err != nil || slices.ContainsFunc(failures, func(s host.Swapped) bool { return passes(s.Err) })
	for _, s := range failures[:min(len(failures), maxReported)] {
		err := fault.Errorf(fault.Unavailable, "volume %s: the former mount at %s (pid %d, showing %s) could not be replaced; restart the container: %w", rec.VolumeID, s.Mountpoint, s.PID, s.Root, s.Err)
		m.complaints.log(ctx, rec.Name+" "+s.Mountpoint, err, "A dead mount is left", "mount", rec.Name)
	}
	return err
}

// passes tells whether a replacement that failed may succeed the next time, without anybody's doing.
func passes(err error) bool {
	return !fault.Is(err, fault.NotFound) && !fault.Is(err, fault.Precondition) && !fault.Is(err, fault.Unsupported)
}

// healAt is heal for these places. It gives the dead mounts that are left.
func (m *Manager) healAt(ctx context.Context, rec record, at places) (failures []host.Swapped, err error) {
	failures, dead, err := m.swapAt(ctx, rec, at, append([]string{rec.Name}, rec.Former...))
	if err != nil || at.others { // detached in a container that runs, it would write into its own directory below
		return failures, err
	}
	n, err := m.Namespace.DetachDead(ctx, dead, at.theirs)
	failpoint.Here("heal.detached")
	if n > 0 {
		m.metrics.heals.WithLabelValues("elsewhere", "detached").Add(float64(n))
	}
	if err != nil {
		klog.FromContext(ctx).Error(err, "Dead copies of the mount in other mount namespaces could not be detached", "mount", rec.Name)
	}
	return failures, nil
}

// healMoved puts the mount in the place of those that one publication was moved away from, where that publication may be seen:
// others have them, too. What else of them its pod has published goes along.
func (m *Manager) healMoved(ctx context.Context, rec record, p publication, all []publication) ([]host.Swapped, error) {
	at := placesOf([]publication{p})
	at.writable = placesOf(all).writable
	failures, _, err := m.swapAt(ctx, rec, at, p.From)
	return failures, err
}

// movingAway tells whether a mount, whose name is shown, is at a place of a publication that was moved away from it.
func movingAway(pubs []publication, shown string, mnt host.Mount) bool {
	return slices.ContainsFunc(pubs, func(p publication) bool {
		return slices.Contains(p.From, shown) && placesOf([]publication{p}).here(mnt)
	})
}

// swapAt replaces, at these places, the mounts of former file systems of the mounts of these names. It gives those that are left,
// and tells which those file systems are.
func (m *Manager) swapAt(ctx context.Context, rec record, at places, names []string) (failures []host.Swapped, dead func(host.Mount) bool, err error) {
	at.node = host.NodeCgroup()
	var groups *host.Groups
	for range healRounds {
		swap, mounts, err := m.swapOf(ctx, rec, at, names)
		if err != nil {
			return nil, nil, err
		}
		dead = swap.Dead
		if groups == nil {
			shown := slices.DeleteFunc(mounts, func(mnt host.Mount) bool { return !dead(mnt) || !at.here(mnt) })
			if groups, err = m.Namespace.HoldGroups(ctx, shown); err != nil {
				return nil, nil, err
			}
			defer groups.Close()
		}
		swap.Groups = groups
		onHost, err := m.Namespace.SwapHere(ctx, swap, at.here)
		failpoint.Here("heal.host")
		var inside []host.Swapped
		if len(at.pods) > 0 {
			var ierr error
			inside, ierr = m.Namespace.SwapElsewhere(ctx, swap, at.theirs)
			err = errors.Join(err, ierr)
		}
		failpoint.Here("heal.containers")
		var replaced int
		replaced, failures = m.healedAt(ctx, rec, slices.Concat(onHost, inside))
		if err != nil {
			return failures, dead, err
		}
		if replaced == 0 {
			break
		}
	}
	return failures, dead, nil
}

// swapOf says what of the mounts of these names is replaced by what, and pins that. It gives the host's mounts, too.
func (m *Manager) swapOf(ctx context.Context, rec record, at places, names []string) (host.Swap, []host.Mount, error) {
	mounts, err := m.Namespace.Mounts(ctx)
	if err != nil {
		return host.Swap{}, nil, err
	}
	living, ok := mountedAt(mounts, m.store.sourceDir(rec.Name))
	if !ok {
		return host.Swap{}, nil, fault.Errorf(fault.Unavailable, "mount %s has no file system to heal its publications with", rec.Name)
	}
	if err := m.pinTargets(ctx, rec, names, at.targets, living, mounts); err != nil {
		return host.Swap{}, nil, err
	}
	if mounts, err = m.Namespace.Mounts(ctx); err != nil {
		return host.Swap{}, nil, err
	}
	// What the driver has for these names, and for the mount itself, which has the pins of targets.
	former := m.store.known(mounts, append([]string{rec.Name}, names...), nil)
	delete(former, living.Minor)
	dead := func(mnt host.Mount) bool { return serves(mnt, names) && former.has(mnt) }
	return host.Swap{
		Living: living, Dead: dead, Bound: lookupBound, ReadOnly: at.readOnly,
		Unknown: func(mnt host.Mount) bool { return serves(mnt, names) && !former.has(mnt) },
	}, mounts, nil
}

// healedAt counts and logs what became of mounts, and gives those that are left.
func (m *Manager) healedAt(ctx context.Context, rec record, all []host.Swapped) (replaced int, failures []host.Swapped) {
	for _, s := range all {
		place := "host"
		if s.PID != 0 {
			place = "container"
		}
		if s.Err != nil {
			failures = append(failures, s)
			m.metrics.heals.WithLabelValues(place, "failed").Inc()
			continue
		}
		replaced++
		m.metrics.heals.WithLabelValues(place, "replaced").Inc()
		klog.FromContext(ctx).Info("Healed", "mount", rec.Name, "volume", rec.VolumeID, "at", s.Mountpoint, "pid", s.PID, "root", s.Root)
	}
	return replaced, failures
}
