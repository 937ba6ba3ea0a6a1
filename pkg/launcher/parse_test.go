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
	const inits = "12:memory:/\n1:name=systemd:/init.scope\n0::/init.scope\n"
	own := parseCgroups([]byte(container))
	for _, tc := range []struct {
		what     string
		its      string
		init     string
		hostView bool
		want     []string
	}{
		{"all left", out, inits, true, nil},
		{"one not left", strings.Replace(out, "memory:/", "memory:/kubepods/pod1/c1", 1), inits, true, []string{"memory (/kubepods/pod1/c1)"}},
		{"PID 1 is there, too", strings.Replace(out, "memory:/", "memory:/kubepods/pod1/c1", 1), "12:memory:/kubepods/pod1/c1\n0::/\n", true, nil},
		{"unified root in the host's view", strings.Replace(out, "/s3-csi-helpers", "/", 1), inits, true, nil},
		{"unified root in the container's view", strings.Replace(out, "/s3-csi-helpers", "/", 1), "0::/\n", false, []string{"the unified hierarchy (/)"}},
	} {
		if got := sharedCgroups(own, parseCgroups([]byte(tc.its)), parseCgroups([]byte(tc.init)), tc.hostView); !reflect.DeepEqual(got, tc.want) {
			t.Errorf("%s: %q, want %q", tc.what, got, tc.want)
		}
	}
}

func TestHelpersLeaveEveryCgroupButThatOfInit(t *testing.T) {
	for _, tc := range []struct {
		what, own, init string
		want            bool
	}{
		{"unit", "0::/system.slice/s3-csi-driver.service\n", "0::/init.scope\n", true},
		{"below a unit", "0::/system.slice/a.service/sub\n", "0::/init.scope\n", true},
		{"session", "0::/user.slice/user-0.slice/session-1.scope\n", "0::/init.scope\n", true},
		{"unit of a hybrid host", "1:name=systemd:/system.slice/a.service\n0::/\n", "1:name=systemd:/init.scope\n0::/\n", true},
		{"task of Nomad, cgroups v1",
			"5:memory:/nomad/0fd3.plugin\n4:freezer:/nomad/0fd3.plugin\n1:name=systemd:/\n0::/\n", "5:memory:/\n4:freezer:/\n1:name=systemd:/\n0::/\n", true},
		{"task of Nomad, cgroups v2", "0::/nomad.slice/share.slice/0fd3.plugin.scope\n", "0::/init.scope\n", true},
		{"child of init", "5:memory:/a\n0::/init.scope\n", "5:memory:/a\n0::/init.scope\n", false},
		{"root", "5:memory:/\n0::/\n", "5:memory:/a\n0::/init.scope\n", false},
		{"no cgroups", "", "", false},
	} {
		if got := apart(parseCgroups([]byte(tc.own)), parseCgroups([]byte(tc.init))); got != tc.want {
			t.Errorf("%s: %v", tc.what, got)
		}
	}
}
