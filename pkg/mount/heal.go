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
	// lookupBound is how long a client may take to find the directory that a subpath shows.
	lookupBound = 10 * time.Second
)

// places are where a mount's publications may be seen.
type places struct {
	targets map[string]bool
	pods    map[string]string // the directories of pods that have it published, by pod UID
	others  bool              // a target is in no pod's directory: whose containers use it, nobody can tell
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
	p := places{targets: map[string]bool{}, pods: map[string]string{}}
	for _, pub := range pubs {
		p.targets[pub.Target] = true
		if dir, uid, ok := podOf(pub.Target); ok {
			p.pods[uid] = dir
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

// theirs tells whether a process is one of the pods' containers', by its cgroup: kubelet names it after the pod, and
// systemd's names have underscores for dashes.
func (p places) theirs(cgroup string) bool {
	for uid := range p.pods {
		if strings.Contains(cgroup, "pod"+uid) || strings.Contains(cgroup, "pod"+strings.ReplaceAll(uid, "-", "_")) {
			return true
		}
	}
	return false
}

// stale tells which mounts are to be replaced by a mount's living file system: those of its own name and another device,
// which are of an earlier life of its client, and those of mounts that it is the successor of. No device number is ever
// remembered: the kernel gives it out again.
func stale(rec record, living host.Mount) func(host.Mount) bool {
	former := slices.Clone(rec.Former)
	return func(mnt host.Mount) bool {
		name, ours := nameOfSource(mnt.Source)
		if !ours || !strings.HasPrefix(mnt.FSType, "fuse") || mnt.Major == living.Major && mnt.Minor == living.Minor {
			return false
		}
		return name == rec.Name || slices.Contains(former, name)
	}
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
	var pubs []publication
	if err := m.do(ctx, func() (err error) { pubs, err = m.store.publicationsOf(rec.Name); return err }); err != nil {
		return err
	}
	failures, err := m.healAt(ctx, rec, placesOf(pubs))
	for _, p := range pubs {
		if len(p.From) > 0 && err == nil {
			var left []host.Swapped
			left, err = m.healMoved(ctx, rec, p)
			failures = append(failures, left...)
		}
	}
	again = err != nil || slices.ContainsFunc(failures, func(s host.Swapped) bool { return passes(s.Err) })
	for _, s := range failures {
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
	failures, dead, err := m.swapAt(ctx, rec, at, func(living host.Mount) func(host.Mount) bool { return stale(rec, living) })
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
func (m *Manager) healMoved(ctx context.Context, rec record, p publication) ([]host.Swapped, error) {
	failures, _, err := m.swapAt(ctx, rec, placesOf([]publication{p}), func(living host.Mount) func(host.Mount) bool {
		return stale(record{Former: p.From}, living)
	})
	return failures, err
}

// movingAway tells whether a mount, whose name is shown, is at a place of a publication that was moved away from it.
func movingAway(pubs []publication, shown string, mnt host.Mount) bool {
	return slices.ContainsFunc(pubs, func(p publication) bool {
		return slices.Contains(p.From, shown) && placesOf([]publication{p}).here(mnt)
	})
}

// swapAt replaces, at these places, the mounts that are dead beside the living one. It gives those that are left.
func (m *Manager) swapAt(ctx context.Context, rec record, at places, which func(living host.Mount) func(host.Mount) bool) (failures []host.Swapped, dead func(host.Mount) bool, err error) {
	for range healRounds {
		mounts, err := m.Namespace.Mounts(ctx)
		if err != nil {
			return nil, nil, err
		}
		living, ok := mountedAt(mounts, m.store.sourceDir(rec.Name))
		if !ok {
			return nil, nil, fault.Errorf(fault.Unavailable, "mount %s has no file system to heal its publications with", rec.Name)
		}
		dead = which(living)
		swap := host.Swap{Living: living, Dead: dead, Bound: lookupBound}
		onHost, err := m.Namespace.SwapHere(ctx, swap, at.here)
		failpoint.Here("heal.host")
		var inside []host.Swapped
		if len(at.pods) > 0 {
			var ierr error
			inside, ierr = m.Namespace.SwapElsewhere(ctx, swap, at.theirs)
			err = errors.Join(err, ierr)
		}
		failpoint.Here("heal.containers")
		replaced := 0
		failures = nil
		for _, s := range slices.Concat(onHost, inside) {
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
		if err != nil {
			return failures, dead, err
		}
		if replaced == 0 {
			break
		}
	}
	return failures, dead, nil
}
