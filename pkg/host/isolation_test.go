//go:build linux

package host

import (
	"os"
	"strings"
	"testing"

	"github.com/s3-csi/s3-csi-driver/pkg/fault"
)

func TestIsolated(t *testing.T) {
	const own = "pid:[4026532000]"
	cache := []OwnDir{{"--cache-dir", "/var/cache/s3-csi"}}
	for _, tc := range []struct {
		name string
		s    surroundings
		ok   bool
	}{
		{"a bare host", surroundings{ns: pidNamespace{77, "77", initPIDNamespace, ""}}, true},
		{"PID 1 of the machine", surroundings{ns: pidNamespace{1, "1", initPIDNamespace, ""}}, true},
		{"a container with hostPID", surroundings{ns: pidNamespace{77, "77", initPIDNamespace, ""}, foreign: true}, true},
		{"hostPID on a node with systemd that is a container", surroundings{ns: pidNamespace{77, "77", own, "systemd"}, booted: true, foreign: true}, true},
		{"hostPID on a node without systemd that is a container", surroundings{ns: pidNamespace{77, "77", own, "docker-init"}, foreign: true, madeThere: true}, true},
		{"a unit of a system container", surroundings{ns: pidNamespace{77, "77", own, "systemd"}, booted: true}, true},
		{"a unit of a system container with an overlay root", surroundings{ns: pidNamespace{77, "77", own, "systemd"}, booted: true, layered: cache}, true},

		{"PID 1 of a container", surroundings{ns: pidNamespace{1, "1", own, "s3-csi-driver"}, booted: true}, false},
		{"behind tini, which sees the host's /run", surroundings{ns: pidNamespace{7, "7", own, "tini"}, booted: true}, false},
		{"behind a program called systemd", surroundings{ns: pidNamespace{7, "7", own, "systemd"}}, false},
		{"a pod that shares its PID namespace", surroundings{ns: pidNamespace{7, "7", own, "pause"}, foreign: true}, false},
		{"a shell with a copy of the container's root", surroundings{ns: pidNamespace{7, "7", own, "sh"}, madeThere: true}, false},
		{"another PID namespace's /proc", surroundings{ns: pidNamespace{7, "4711", initPIDNamespace, ""}}, false},
		{"directories on the container's layer", surroundings{ns: pidNamespace{1, "1", own, ""}, layered: cache}, false},
	} {
		err := tc.s.isolated()
		if (err == nil) != tc.ok || err != nil && !fault.Is(err, fault.Precondition) {
			t.Errorf("%s: %v", tc.name, err)
		}
		if err == nil {
			continue
		}
		for _, setting := range []string{"hostPID: true", "--pid=host", `pid_mode = "host"`} {
			if !strings.Contains(err.Error(), setting) {
				t.Errorf("%s: %s is not named: %v", tc.name, setting, err)
			}
		}
		if strings.Contains(err.Error(), "--cache-dir /var/cache/s3-csi") != (tc.s.layered != nil) {
			t.Errorf("%s: %v", tc.name, err)
		}
	}
}

func TestShowsRoot(t *testing.T) {
	root := func(minor uint32) Mount { return Mount{Minor: minor, Mountpoint: "/"} }
	at := func(minor uint32, path string) Mount { return Mount{Minor: minor, Mountpoint: path} }
	for _, tc := range []struct {
		name        string
		own, theirs []Mount
		want        bool
	}{
		{"made by a runtime there", []Mount{root(9)}, []Mount{root(1), at(9, "/run/containerd/x/rootfs")}, true},
		{"made elsewhere", []Mount{root(9)}, []Mount{root(1), at(2, "/proc")}, false},
		{"a copy of the namespace", []Mount{root(1)}, []Mount{root(1), at(1, "/mnt")}, false},
		{"the uppermost root counts", []Mount{root(1), root(9)}, []Mount{root(1), at(9, "/x")}, true},
		{"no root", nil, []Mount{root(1)}, false},
	} {
		if got := showsRoot(tc.own, tc.theirs); got != tc.want {
			t.Errorf("%s: %t", tc.name, got)
		}
	}
}

// The tests run as PID 1 of their own namespace, or in a copy of its mount namespace. Neither is a host.
func TestIsolatedHere(t *testing.T) {
	if os.Getenv(levelEnv) == "" {
		t.Skip("needs root")
	}
	if err := testNamespace(t).Isolated(within(t, probeTimeout), OwnDir{"--state-dir", "/run/no/such/directory"}); !fault.Is(err, fault.Precondition) {
		t.Error(err)
	}
}
