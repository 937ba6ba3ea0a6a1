package mount

import (
	"strings"
	"testing"

	"github.com/s3-csi/s3-csi-driver/pkg/client"
	"github.com/s3-csi/s3-csi-driver/pkg/fault"
	"github.com/s3-csi/s3-csi-driver/pkg/launcher"
	"github.com/s3-csi/s3-csi-driver/pkg/volume"
)

// What a volume of an administrator may have of the node, and the same for a pod's author.
func TestAnInlineVolumeHasNoMoreOfTheNodeThanOthers(t *testing.T) {
	m := newTestManager(t, &uids{}, s3{})
	m.Limits = launcher.Limits{MemoryMax: 1 << 30, TasksMax: 200}
	for _, tt := range []struct {
		memory, weight, tasks uint64
		denied                string
	}{
		{1 << 30, 100, 200, ""},
		{2 << 30, 0, 0, "memoryLimit"},
		{0, 101, 0, "cpuWeight"},
		{0, 0, 201, "tasksMax"},
	} {
		for _, inline := range []bool{true, false} {
			r := request()
			r.Attributes.Client, r.Ephemeral = "rclone", inline
			r.Attributes.MemoryLimit, r.Attributes.CPUWeight, r.Attributes.TasksMax = tt.memory, tt.weight, tt.tasks
			_, err := m.check(&r)
			if want := inline && tt.denied != ""; want != (err != nil) || want && (!fault.Is(err, fault.Denied) || !strings.Contains(err.Error(), tt.denied)) {
				t.Errorf("%+v, inline %t: %v", tt, inline, err)
			}
		}
	}
	m.Limits = launcher.Limits{}
	if got, want := m.share(), (client.Share{CPUWeight: 100, Tasks: 1024}); got != want {
		t.Errorf("on a node without limits: %+v, want %+v", got, want)
	}
}

// A label for mount(2) comes from kubelet alone: among the attributes, which are the pod's author's, it is no option of any client.
func TestAPodsAuthorChoosesNoSELinuxLabel(t *testing.T) {
	m := newTestManager(t, &uids{}, s3{})
	for _, name := range []string{"rclone", "mountpoint-s3"} {
		r := request()
		r.Attributes.Client, r.Ephemeral = name, true
		r.Options = []volume.Option{{Name: "context", Value: "system_u:object_r:shadow_t:s0", HasValue: true}}
		if _, err := m.check(&r); !fault.Is(err, fault.Invalid) || !strings.Contains(err.Error(), "context") {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// Pods with the same volume and identity share a mount, whatever handles they have.
func TestAnInlineVolumesHandleDecidesNothing(t *testing.T) {
	m := newTestManager(t, &uids{}, s3{})
	keys := map[string]bool{}
	for _, handle := range []string{"csi-1", "csi-2", "static"} {
		r := request()
		r.VolumeID, r.Attributes.Client, r.Ephemeral = handle, "rclone", handle != "static"
		spec, err := m.check(&r)
		if err != nil {
			t.Fatal(err)
		}
		keys[spec.Key()] = true
	}
	if len(keys) != 1 {
		t.Errorf("%d mounts: %v", len(keys), keys)
	}
}
