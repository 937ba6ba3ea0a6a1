package heal

import (
	"regexp"
	"slices"
	"strings"

	"github.com/s3-csi/s3-csi-driver/pkg/host"
	"github.com/s3-csi/s3-csi-driver/pkg/mount/state"
)

// Places are where a mount's publications can be seen: at targets, at kubelet's subpaths and in containers.
type Places struct {
	Targets map[string]bool
	pods    map[string]string // the directories of pods that have the mount published, by pod UID
	others  bool              // a target is in no pod's directory, so it is unknown whose containers use it
	// readOnlyTargets are the targets of read-only publications, writable the pods that have one that is not read-only.
	readOnlyTargets, writable map[string]bool
	node                      string // the text of /proc/1/cgroup
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

// PlacesOf returns the places of publications.
func PlacesOf(pubs []state.Publication) Places {
	p := Places{Targets: map[string]bool{}, pods: map[string]string{}, readOnlyTargets: map[string]bool{}, writable: map[string]bool{}}
	for _, pub := range pubs {
		p.Targets[pub.Target] = true
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

// inPods reports whether a process is in a container of one of the pods, by its cgroup.
func (p Places) inPods(cgroup string) bool {
	_, ours := p.pods[host.PodOf(cgroup, p.node)]
	return ours
}

// readOnly reports whether the replacement of a mount must be read-only. A publication has its own flag. A pod that has only
// read-only publications can have no writable copy of one.
func (p Places) readOnly(mnt host.Mount, cgroup string) bool {
	if cgroup != "" {
		return !p.writable[host.PodOf(cgroup, p.node)]
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
