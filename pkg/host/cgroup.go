//go:build linux

package host

import (
	"os"
	"regexp"
	"strings"
)

// podElement is a kubelet's name for a pod's cgroup: "pod<uid>" of its cgroup driver cgroupfs, "…-pod<uid>.slice", with underscores
// for dashes, of systemd's (pkg/kubelet/cm/pod_container_manager_linux.go and cgroup_manager_linux.go of Kubernetes).
var podElement = regexp.MustCompile(`^(?:pod([0-9a-fA-F-]{32,36})|(?:.*-)?pod([0-9a-fA-F_]{32,36})\.slice)$`)

// PodOf returns the UID of the pod that a process is in, by the text of its /proc/<pid>/cgroup, as the kubelet's cgroup driver
// writes it; "" is no pod. A container may make cgroups below its own, of any name: so the outermost pod's cgroup counts, except those that the
// node itself is in, whose text is of PID 1.
func PodOf(text, node string) (uid string) {
	for line := range strings.Lines(text) {
		fields := strings.SplitN(strings.TrimSuffix(line, "\n"), ":", 3)
		if len(fields) < 3 {
			continue
		}
		for element := range strings.SplitSeq(fields[2], "/") {
			// A runtime that is given systemd's names and uses cgroupfs makes one element of "slice:prefix:container".
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

// NodeCgroup returns the text of PID 1's cgroup, "" where it cannot be read.
func NodeCgroup() string {
	text, err := os.ReadFile(procPath(1, "cgroup"))
	if err != nil {
		return ""
	}
	return string(text)
}

// accountOf is on whose account work in the namespace of a process counts: its pod's, else its cgroup's.
func accountOf(pid int) string {
	text, err := os.ReadFile(procPath(pid, "cgroup"))
	if err != nil {
		return "processes that end"
	}
	if uid := PodOf(string(text), NodeCgroup()); uid != "" {
		return "pod " + uid
	}
	return "cgroup " + strings.Join(strings.Fields(string(text)), " ")
}
