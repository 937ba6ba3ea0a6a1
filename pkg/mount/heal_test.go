package mount

import (
	"strings"
	"testing"

	"github.com/s3-csi/s3-csi-driver/pkg/host"
)

const podUID = "0b9c7f1e-53a4-4f0b-8d1c-7e2a90c4d611"

func TestPlacesOfPods(t *testing.T) {
	at := placesOf([]publication{
		{Target: "/var/lib/kubelet/pods/" + podUID + "/volumes/kubernetes.io~csi/pv/mount"},
		{Target: "/opt/nomad/alloc/volumes/x"},
		{Target: "/a/pods/x/volumes/y"}, // too short for a UID: it would be found in other cgroups
	})
	for where, want := range map[string]bool{
		"/var/lib/kubelet/pods/" + podUID + "/volumes/kubernetes.io~csi/pv/mount": true,
		"/opt/nomad/alloc/volumes/x":                                                   true,
		"/var/lib/kubelet/pods/" + podUID + "/volume-subpaths/pv/app/0":                true,
		"/var/lib/kubelet/pods/" + podUID + "/volumes/kubernetes.io~csi/other/mount":   false,
		"/var/lib/kubelet/pods/ffffffff-53a4-4f0b-8d1c-7e2a90c4d611/volume-subpaths/x": false,
		"/opt/nomad/alloc/volumes/xy":                                                  false,
	} {
		if got := at.here(host.Mount{Mountpoint: where}); got != want {
			t.Errorf("%s: %t", where, got)
		}
	}
	for cgroup, want := range map[string]bool{
		"0::/kubepods/burstable/pod" + podUID + "/abc": true,
		"0::/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod" + strings.ReplaceAll(podUID, "-", "_") + ".slice/cri-x.scope": true,
		"0::/kubepods/podffffffff-53a4-4f0b-8d1c-7e2a90c4d611/abc":                                                                         false,
		"0::/system.slice/agent.service": false,
		"0::/":                           false,
	} {
		if got := at.theirs(cgroup); got != want {
			t.Errorf("%s: %t", cgroup, got)
		}
	}
}

// What is stale is told by names and by the living device alone: a device number from before may be another's by now.
func TestWhatIsStale(t *testing.T) {
	name, former, other := strings.Repeat("a", 24)+"-2", strings.Repeat("a", 24)+"-1", strings.Repeat("b", 24)+"-3"
	dead := stale(record{Name: name, Former: []string{former}}, host.Mount{Minor: 50})
	for what, tc := range map[string]struct {
		mnt  host.Mount
		want bool
	}{
		"an earlier life":            {host.Mount{Minor: 49, Source: sourceName("v", name), FSType: "fuse"}, true},
		"the living one":             {host.Mount{Minor: 50, Source: sourceName("v", name), FSType: "fuse"}, false},
		"one that it succeeds":       {host.Mount{Minor: 48, Source: sourceName("v", former), FSType: "fuse"}, true},
		"another mount":              {host.Mount{Minor: 49, Source: sourceName("v", other), FSType: "fuse"}, false},
		"the same minor of a disk":   {host.Mount{Major: 8, Minor: 50, Source: sourceName("v", name), FSType: "fuse"}, true},
		"somebody else's":            {host.Mount{Minor: 49, Source: "sshfs", FSType: "fuse.sshfs"}, false},
		"a tmpfs with such a source": {host.Mount{Minor: 49, Source: sourceName("v", name), FSType: "tmpfs"}, false},
	} {
		if got := dead(tc.mnt); got != tc.want {
			t.Errorf("%s: %t", what, got)
		}
	}
}
