package launcher

import (
	"reflect"
	"strings"
	"testing"

	"github.com/s3-csi/s3-csi-driver/pkg/proc"
)

func TestOnlyProcessesWithBothUIDsBelongToAMount(t *testing.T) {
	for uids, want := range map[string]bool{
		"5000\t5000\t5000\t5000": true,
		"500\t500\t500\t500":     false,
		"1000\t5000\t5000\t5000": false,
		"5000\t0\t0\t0":          false,
	} {
		for state, runs := range map[string]bool{"S (sleeping)": true, "Z (zombie)": false} {
			status := proc.Status("Name:\tUid:\t5000\nState:\t" + state + "\nUid:\t" + uids + "\nThreads:\t1\n")
			if got := runsAs(status, 5000); got != (want && runs) {
				t.Errorf("%q, %s: %v", uids, state, got)
			}
		}
	}
	if runsAs(nil, 0) {
		t.Error("a process that has exited runs as root")
	}
}

func TestCgroupsSharedWithTheDriverAreFound(t *testing.T) {
	const container = "12:memory:/kubepods/pod1/c1\n1:name=systemd:/kubepods/pod1/c1\n0::/\n"
	const out = "12:memory:/\n1:name=systemd:/\n0::/s3-csi-helpers\n"
	own := parseCgroups([]byte(container))
	for _, tc := range []struct {
		what     string
		its      string
		hostView bool
		want     []string
	}{
		{"all left", out, true, nil},
		{"one not left", strings.Replace(out, "memory:/", "memory:/kubepods/pod1/c1", 1), true, []string{"memory (/kubepods/pod1/c1)"}},
		{"unified root in the host's view", strings.Replace(out, "/s3-csi-helpers", "/", 1), true, nil},
		{"unified root in the container's view", strings.Replace(out, "/s3-csi-helpers", "/", 1), false, []string{"the unified hierarchy (/)"}},
	} {
		if got := sharedCgroups(own, parseCgroups([]byte(tc.its)), tc.hostView); !reflect.DeepEqual(got, tc.want) {
			t.Errorf("%s: %q, want %q", tc.what, got, tc.want)
		}
	}
	for file, want := range map[string]bool{
		"0::/system.slice/s3-csi-driver.service\n":       true,
		"0::/system.slice/a.service/sub\n":               true,
		"0::/user.slice/user-0.slice/session-1.scope\n":  false,
		"1:name=systemd:/system.slice/a.service\n0::/\n": true,
		"5:memory:/a.service\n1:name=systemd:/\n":        false,
		"": false,
	} {
		if got := inUnit(parseCgroups([]byte(file))); got != want {
			t.Errorf("%q: %v", file, got)
		}
	}
}
