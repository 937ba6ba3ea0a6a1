package host

import (
	"os"
	"path"
	"regexp"
	"strings"

	"github.com/s3-csi/s3-csi-driver/pkg/proc"
)

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
