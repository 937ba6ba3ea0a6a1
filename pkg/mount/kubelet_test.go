package mount

import (
	"strings"
	"testing"
)

func TestKubeletTarget_NamesPodAndVolume(t *testing.T) {
	for target, want := range map[string][2]string{
		"/var/lib/kubelet/pods/u/volumes/kubernetes.io~csi/data/mount":    {"u", "data"},
		"/pods/u/volumes/kubernetes.io~csi/v/mount":                       {"u", "v"},
		strings.Repeat("/pods", 7) + "/volumes/kubernetes.io~csi/v/mount": {"pods", "v"},
		"/pods/u/volumes/kubernetes.io~nfs/v/mount":                       {},
		"/var/lib/kubelet/pods/u/volumes/kubernetes.io~csi/v":             {},
		"/var/lib/kubelet/pods/u/volume-subpaths/kubernetes.io~csi/v/0":   {},
		"/pods/u/volumes/kubernetes.io~csi/v/x/mount":                     {},
		"/x/u/volumes/kubernetes.io~csi/v/mount":                          {},
		"/mount":                                                          {},
	} {
		if pod, volume := KubeletTarget(target); pod != want[0] || volume != want[1] {
			t.Errorf("%s: %q, %q, want %q", target, pod, volume, want)
		}
	}
}
