package launcher

import (
	"reflect"
	"strings"
	"testing"
)

func status(state, uids, threads string) []byte {
	return []byte("Name:\tUid:\t5000\nState:\t" + state + "\nUid:\t" + uids + "\nThreads:\t" + threads + "\n")
}

func TestOnlyLiveProcessesOfTheUIDCount(t *testing.T) {
	for _, tc := range []struct {
		what string
		file []byte
		want bool
	}{
		{"sleeping", status("S (sleeping)", "5000\t5000\t5000\t5000", "3"), true},
		{"hanging", status("D (disk sleep)", "5000\t5000\t5000\t5000", "1"), true},
		{"another's", status("S (sleeping)", "500\t500\t500\t500", "1"), false},
		{"another's that borrows the uid", status("S (sleeping)", "1000\t5000\t5000\t5000", "1"), false},
		{"another's that lends it", status("S (sleeping)", "5000\t0\t0\t0", "1"), false},
		{"zombie", status("Z (zombie)", "5000\t5000\t5000\t5000", "1"), false},
		{"zombie with a thread that hangs", status("Z (zombie)", "5000\t5000\t5000\t5000", "2"), true},
		{"dead", status("X (dead)", "5000\t5000\t5000\t5000", "1"), false},
		{"empty", nil, false},
	} {
		if got := statusIsOf(tc.file, 5000); got != tc.want {
			t.Errorf("%s: %v", tc.what, got)
		}
	}
}

func FuzzStatusIsOf(f *testing.F) {
	f.Add(status("S (sleeping)", "5000\t5000\t5000\t5000", "3"))
	f.Add([]byte("Uid:\t5000"))
	f.Fuzz(func(t *testing.T, file []byte) {
		if statusIsOf(file, 5000) && !strings.Contains(string(file), "5000") {
			t.Error("a uid that is not there")
		}
	})
}

func TestCgroupsThatEndWithTheDriverAreSeen(t *testing.T) {
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
