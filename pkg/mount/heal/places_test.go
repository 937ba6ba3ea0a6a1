package heal

import (
	"strings"
	"testing"

	"github.com/s3-csi/s3-csi-driver/pkg/host"
	"github.com/s3-csi/s3-csi-driver/pkg/mount/state"
)

const podUID = "0b9c7f1e-53a4-4f0b-8d1c-7e2a90c4d611"

func TestPlacesOfPods(t *testing.T) {
	at := PlacesOf([]state.Publication{
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
		if got := at.Has(host.Mount{Mountpoint: where}); got != want {
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
		if got := at.pod(cgroup) == podUID; got != want {
			t.Errorf("%s: %t", cgroup, got)
		}
	}
}

// A container can make cgroups with any name below its own.
func TestPodsAreMatchedByWholeElementsOfACgroup(t *testing.T) {
	const other = "ffffffff-53a4-4f0b-8d1c-7e2a90c4d611"
	under := strings.ReplaceAll(podUID, "-", "_")
	at := PlacesOf([]state.Publication{{Target: "/var/lib/kubelet/pods/" + podUID + "/volumes/kubernetes.io~csi/pv/mount"}})
	at.node = "12:pids:/docker/kubepods/pod" + other + "/node/init.scope\n0::/\n"
	for cgroup, want := range map[string]bool{
		"0::/kubepods/pod" + podUID + "/abc":                                                         true,
		"11:memory:/a/kubepods/besteffort/pod" + podUID + "/abc\n0::/\n":                             true,
		"0::/kubepods.slice/kubepods-pod" + under + ".slice/crio-abc.scope":                          true,
		"0::/kubelet.slice/kubelet-kubepods.slice/kubelet-kubepods-burstable-pod" + under + ".slice": true,
		"0::/system.slice/kubepods-burstable-pod" + under + ".slice:cri-containerd:abc":              true,
		"12:pids:/docker/kubepods/pod" + other + "/node/kubepods/pod" + podUID + "/abc":              true, // of a node that is a pod
		"0::/kubepods/podffffffff-0000-4f0b-8d1c-7e2a90c4d611/abc/pod" + podUID:                      false,
		"0::/kubepods/podffffffff-0000-4f0b-8d1c-7e2a90c4d611/kubepods-pod" + under + ".slice":       false,
		"0::/user.slice/xpod" + podUID:                                                               false,
		"0::/user.slice/pod" + podUID + "x":                                                          false,
		"0::/user.slice/my-pod" + podUID + "-backup":                                                 false,
		"0::/user.slice/a-pod" + under + ".sliced":                                                   false,
	} {
		if got := at.pod(cgroup) == podUID; got != want {
			t.Errorf("%s: %t", cgroup, got)
		}
	}
}

func TestReplacementsAreReadOnlyAsPublicationsAre(t *testing.T) {
	const other = "ffffffff-53a4-4f0b-8d1c-7e2a90c4d611"
	target := func(uid, volume string) string {
		return "/k/pods/" + uid + "/volumes/kubernetes.io~csi/" + volume + "/mount"
	}
	at := PlacesOf([]state.Publication{
		{Target: target(podUID, "a"), ReadOnly: true},
		{Target: target(other, "a"), ReadOnly: true}, {Target: target(other, "b")},
	})
	for _, tc := range []struct {
		mountpoint, owner string
		want              bool
	}{
		{target(podUID, "a"), "", true},
		{target(other, "a"), "", true},
		{target(other, "b"), "", false},
		{"/k/pods/" + podUID + "/volume-subpaths/a/app/0", "", true},
		{"/k/pods/" + other + "/volume-subpaths/a/app/0", "", false},
		{"/data", podUID, true},
		{"/data", other, false},
	} {
		if got := at.readOnly(host.Mount{Mountpoint: tc.mountpoint}, tc.owner); got != tc.want {
			t.Errorf("%s in %q: %t", tc.mountpoint, tc.owner, got)
		}
	}
}

func TestContainersOfAllocationsAreFoundByTheDirectoryThatTheyShow(t *testing.T) {
	const id, other = "b2c3d4e5-53a4-4f0b-8d1c-7e2a90c4d611", "ffffffff-53a4-4f0b-8d1c-7e2a90c4d611"
	at := PlacesOf([]state.Publication{
		{Target: "/data/nomad/client/csi/monolith/s3/per-alloc/" + id + "/v/rw-file-system-multi-node-multi-writer", ReadOnly: true},
		{Target: "/data/nomad/client/csi/monolith/s3/per-alloc/x/v/rw"}, // no allocation id
	})
	if len(at.allocations) != 1 || !at.others {
		t.Fatalf("%+v", at)
	}
	hosts := []host.Mount{
		{Minor: 1, Root: "/", Mountpoint: "/"},
		{Minor: 2, Root: "/volumes/a", Mountpoint: "/data"},
	}
	d, ok := host.DirectoryIn(hosts, at.allocations[id])
	if !ok {
		t.Fatal("the directory is on no file system")
	}
	at.shown = map[string]host.Directory{id: d}
	for what, tc := range map[string]struct {
		mount host.Mount
		want  string
	}{
		"allocation directory":     {host.Mount{Minor: 2, Root: "/volumes/a/nomad/alloc/" + id + "/alloc"}, id},
		"task directory":           {host.Mount{Minor: 2, Root: "/volumes/a/nomad/alloc/" + id}, id},
		"other file system":        {host.Mount{Minor: 3, Root: "/volumes/a/nomad/alloc/" + id + "/alloc"}, ""},
		"other allocation":         {host.Mount{Minor: 2, Root: "/volumes/a/nomad/alloc/" + other + "/alloc"}, ""},
		"longer name":              {host.Mount{Minor: 2, Root: "/volumes/a/nomad/alloc/" + id + "0"}, ""},
		"own directory, same name": {host.Mount{Minor: 2, Root: "/volumes/docker/x/nomad/alloc/" + id + "/alloc"}, ""},
		"all allocations":          {host.Mount{Minor: 2, Root: "/volumes/a/nomad/alloc"}, ""},
	} {
		if got := at.allocation([]host.Mount{hosts[0], tc.mount}); got != tc.want {
			t.Errorf("%s: %q", what, got)
		}
	}
	if !at.readOnly(host.Mount{Mountpoint: "/data"}, id) {
		t.Error("a read-only publication gets a writable replacement in its container")
	}
}
