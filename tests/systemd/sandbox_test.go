package systemd_test

import (
	"fmt"
	"net"
	"net/netip"
	"os"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/s3-csi/s3-csi-driver/pkg/launcher"
)

func TestHelperAndClientHaveTheirUIDAndNoPrivileges(t *testing.T) {
	u := start(t, newLauncher(t))
	s := u.run("wait:/nowhere")
	own := fmt.Sprint(u.UID)
	four := strings.Join([]string{own, own, own, own}, " ")
	const none = "0000000000000000"
	for who, pid := range map[string]int{"helper": s.PID, "client": s.ClientPID} {
		for name, want := range map[string]string{
			"Uid": four, "Gid": four, "Groups": "", "NoNewPrivs": "1", "Umask": "0077", "Seccomp": "2",
			"CapInh": none, "CapPrm": none, "CapEff": none, "CapBnd": none, "CapAmb": none,
		} {
			if got := status(t, pid, name); got != want {
				t.Errorf("%s: %s is %q, want %q", who, name, got, want)
			}
		}
		limits, err := os.ReadFile(fmt.Sprintf("/proc/%d/limits", pid))
		if err != nil || !strings.Contains(strings.Join(strings.Fields(string(limits)), " "), "core file size 0 0") {
			t.Errorf("%s: core dumps are possible (%v)", who, err)
		}
		cgroup, err := os.ReadFile(fmt.Sprintf("/proc/%d/cgroup", pid))
		if err != nil || !strings.Contains(string(cgroup), "/system.slice/system-s3csi.slice/"+u.name()) {
			t.Errorf("%s: cgroups %v\n%s", who, err, cgroup)
		}
	}
	if pid := show(t, u.name(), "MainPID"); pid != fmt.Sprint(s.PID) {
		t.Errorf("systemd takes %s for the main process, the helper is %d", pid, s.PID)
	}
}

func TestClientReachesNothingBeyondItsOwn(t *testing.T) {
	l := newLauncher(t)
	other := start(t, l)
	u := start(t, l)
	const refused = "operation not permitted"
	if err := os.MkdirAll("/var/lib/s3csi-everybodys", 0o777); err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod("/var/lib/s3csi-everybodys", 0o777); err != nil {
		t.Fatal(err)
	}
	steps := map[string]string{ // and how they must go
		"write:/var/lib/s3csi-everybodys":         "read-only file system",
		"write:" + u.StateDir:                     "",
		"write:" + u.CacheDir:                     "",
		"write:/tmp":                              "", // its own
		"write:/etc":                              "read-only file system",
		"write:/run":                              "read-only file system|permission denied",
		"write:" + programs:                       "read-only file system",
		"write:" + other.StateDir:                 "permission denied",
		"write:/dev/shm":                          "permission denied",
		"list:/home":                              "permission denied",
		"list:/root":                              "permission denied",
		"link:/proc/self/fd/3":                    "/dev/fuse",
		"open:/dev/fuse":                          "no such file",
		"open:/dev/kmsg":                          "no such file",
		"open:/proc/sys/kernel/core_pattern":      "read-only file system|permission denied",
		"open:/proc/kmsg":                         "permission denied",
		fmt.Sprintf("socket:%d", unix.AF_INET):    "",
		fmt.Sprintf("socket:%d", unix.AF_INET6):   "|address family not supported",
		fmt.Sprintf("socket:%d", unix.AF_UNIX):    "",
		fmt.Sprintf("socket:%d", unix.AF_NETLINK): "address family not supported",
		fmt.Sprintf("socket:%d", unix.AF_PACKET):  "address family not supported",
		"unshare":                                 refused,
		"code":                                    refused,
		fmt.Sprintf("open:/proc/%d/environ", os.Getpid()): "no such file",
	}
	var argv []string
	for step := range steps {
		argv = append(argv, step)
	}
	s := u.run(append(argv, "list:/proc", "wait:/nowhere")...)
	for step, want := range steps {
		got := u.said(step)
		if !slices.ContainsFunc(strings.Split(want, "|"), func(w string) bool { return w == "" && got == "" || w != "" && strings.Contains(got, w) }) {
			t.Errorf("%s: %q, want %q", step, got, want)
		}
	}
	if _, err := os.Lstat("/tmp/stand-in"); err == nil {
		t.Error("the client's /tmp is the host's")
	}
	for name := range strings.FieldsSeq(u.said("list:/proc")) {
		if strings.Trim(name, "0123456789") == "" && name != fmt.Sprint(s.ClientPID) && name != fmt.Sprint(s.PID) {
			t.Errorf("the client sees process %s", name)
		}
	}
}

// metadata are the addresses where clouds, and agents on their nodes, hand out credentials.
func metadata() []string {
	return []string{"169.254.169.254", "fd00:ec2::254", "169.254.170.2", "169.254.170.23", "fd00:ec2::23", "100.100.100.200", "169.254.0.23", "fd20:ce::254"}
}

// routed reports whether this machine has a route to an address: without one nothing shows who is denied it.
func routed(t *testing.T, addr string) bool {
	t.Helper()
	c, err := net.Dial("udp", net.JoinHostPort(addr, "80"))
	if err != nil {
		t.Logf("%s cannot be tried: %v", addr, err)
		return false
	}
	_ = c.Close()
	return true
}

// TestClientReachesNoMetadataButItsOwn sends to the cloud's addresses from a unit that needs none of them, and from one that needs one.
func TestClientReachesNoMetadataButItsOwn(t *testing.T) {
	l := newLauncher(t)
	box, err := l.Check(bounded(t))
	if err != nil {
		t.Fatal(err)
	}
	for what, own := range map[string]string{"none": "", "an agent": "169.254.170.23"} {
		t.Run(what, func(t *testing.T) {
			u := prepare(t, l)
			if own != "" {
				u.Needs = []netip.Addr{netip.MustParseAddr(own)}
			}
			u.mustLaunch()
			deny := strings.Fields(show(t, u.name(), "IPAddressDeny"))
			steps := []string{"send:127.0.0.1"}
			for _, a := range metadata() {
				if denied := slices.Contains(deny, a+"/32") || slices.Contains(deny, a+"/128"); denied != (a != own) {
					t.Errorf("IPAddressDeny is %q: %s is denied: %t", deny, a, denied)
				}
				if routed(t, a) {
					steps = append(steps, "send:"+a)
				}
			}
			if !slices.Contains(box.Present, "IPAddressDeny") {
				t.Skipf("the host's systemd cannot deny addresses: %v", box.Missing)
			}
			u.run(append(slices.Clone(steps), "wait:/nowhere")...)
			for _, step := range steps {
				said, free := u.said(step), step == "send:127.0.0.1" || step == "send:"+own
				if denied := strings.Contains(said, "operation not permitted"); denied == free || step == "send:127.0.0.1" && said != "" {
					t.Errorf("%s: %q", step, said)
				}
			}
		})
	}
}

func TestSandboxIsReported(t *testing.T) {
	l := newLauncher(t)
	box, err := l.Check(bounded(t))
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("%+v", box)
	if v := systemctl(t, "show", "--value", "-p", "Version"); box.Version != v {
		t.Errorf("version %q, want %q", box.Version, v)
	}
	for _, p := range []string{"NoNewPrivileges", "SystemCallFilter", "ProtectSystem", "MemoryDenyWriteExecute"} {
		if !slices.Contains(box.Present, p) {
			t.Errorf("%s is not among what holds: %v", p, box.Present)
		}
	}
	unified := false
	if _, err := os.Stat("/sys/fs/cgroup/cgroup.procs"); err == nil {
		unified = true
	}
	if slices.Contains(box.Present, "IPAddressDeny") != unified {
		t.Errorf("with a unified hierarchy %v: %+v", unified, box)
	}
}

func TestPropertyThatSystemdDoesNotKnowIsLeftOutAndReported(t *testing.T) {
	l := newLauncher(t, launcher.WithProperties(launcher.Property{Name: "S3CSINoSuchThing", Value: true}, launcher.Property{Name: "OOMScoreAdjust", Value: int32(100)}))
	u := start(t, l)
	u.hello()
	if got := show(t, u.name(), "OOMScoreAdjust"); got != "100" {
		t.Errorf("the property that it knows: %q", got)
	}
	if missing := strings.Join(l.Sandbox().Missing, "; "); !strings.Contains(missing, "S3CSINoSuchThing (not supported by systemd") {
		t.Errorf("missing: %s", missing)
	}
}

func TestUnitHasItsLimitsAndIsStoppedAfterTheContainersAndWithTimeToFlush(t *testing.T) {
	l := newLauncher(t, launcher.WithSliceLimits(launcher.Limits{MemoryMax: 900 << 20}), launcher.WithDefaultLimits(launcher.Limits{MemoryMax: 200 << 20, TasksMax: 300}))
	u := prepare(t, l)
	u.Limits = launcher.Limits{TasksMax: 400, CPUWeight: 20, MemoryHigh: 150 << 20}
	u.mustLaunch()
	if got := show(t, launcher.Slice, "MemoryMax"); got != "943718400" {
		t.Errorf("the slice's MemoryMax is %s", got)
	}
	for name, want := range map[string]string{
		"Slice": "system-s3csi.slice", "Type": "exec", "KillMode": "mixed", "SendSIGKILL": "yes", "OOMPolicy": "continue",
		"TimeoutStopUSec": "2min", "Restart": "no", "StandardOutput": "journal", "StandardError": "journal", "SyslogIdentifier": "s3csi-" + u.Name,
		"Description": u.Description, "Transient": "yes", "CollectMode": "inactive", "ProtectSystem": "strict",
		"ReadWritePaths": u.StateDir + " " + u.CacheDir, "MemoryMax": "209715200", "MemoryHigh": "157286400", "TasksMax": "400", "CPUWeight": "20", "Environment": "",
	} {
		if got := show(t, u.name(), name); got != want {
			t.Errorf("%s is %q, want %q", name, got, want)
		}
	}
	before := strings.Fields(show(t, u.name(), "Before"))
	for _, later := range []string{"containerd.service", "crio.service", "docker.service", "kubelet.service", "kubepods.slice", "shutdown.target"} {
		if !slices.Contains(before, later) {
			t.Errorf("it does not start before, and stop after, %s: %v", later, before)
		}
	}
	if c := show(t, u.name(), "Conflicts"); c != "shutdown.target" {
		t.Errorf("Conflicts is %q", c)
	}
	await(t, "the helper's log in the journal", func() bool { return strings.Contains(u.journal(), "helper started: name="+u.Name+" ") })
}
