package host

import (
	"os"
	"regexp"
	"strings"

	"github.com/s3-csi/s3-csi-driver/pkg/proc"
)

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
