package systemd_test

import (
	"fmt"
	"maps"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"slices"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/s3-csi/s3-csi-driver/pkg/client"
	"github.com/s3-csi/s3-csi-driver/pkg/helper"
	"github.com/s3-csi/s3-csi-driver/pkg/launcher"
	"github.com/s3-csi/s3-csi-driver/pkg/sandbox"
	"github.com/s3-csi/s3-csi-driver/tests/internal/rig"
)

func TestHelperAndClientHaveTheirUIDAndNoPrivileges(t *testing.T) {
	u := start(t, newLauncher(t, launcher.Options{}))
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

// status returns a line of a process's status.
func status(t *testing.T, pid int, name string) string {
	t.Helper()
	body, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(body)) {
		if key, value, _ := strings.Cut(line, ":"); key == name {
			return strings.Join(strings.Fields(value), " ")
		}
	}
	return ""
}

// everybodys is a directory of the host that every user may read and write.
func everybodys(t *testing.T) string {
	t.Helper()
	const dir = "/var/lib/s3csi-everybodys"
	for _, err := range []error{os.MkdirAll(dir, 0o777), os.Chmod(dir, 0o777), os.WriteFile(dir+"/file", []byte("x"), 0o666), os.Chmod(dir+"/file", 0o666)} {
		if err != nil {
			t.Fatal(err)
		}
	}
	return dir
}

// attempts are a stand-in's steps and the errors that they must have, separated by "|"; "" is none.
type attempts map[string]string

// check compares what a unit's stand-in says of a step.
func (a attempts) check(u *unit, step string) {
	u.t.Helper()
	want, got := a[step], u.said(step)
	if !slices.ContainsFunc(strings.Split(want, "|"), func(w string) bool { return w == "" && got == "" || w != "" && strings.Contains(got, w) }) {
		u.t.Errorf("%s: %q, want %q", step, got, want)
	}
}

// calls are steps of system calls that clients may, and may not, make.
func calls() attempts {
	const refused, family = "operation not permitted", "address family not supported"
	return attempts{
		fmt.Sprintf("socket:%d", unix.AF_INET):    "",
		fmt.Sprintf("socket:%d", unix.AF_INET6):   "|" + family,
		fmt.Sprintf("socket:%d", unix.AF_UNIX):    "",
		fmt.Sprintf("socket:%d", unix.AF_NETLINK): family,
		fmt.Sprintf("socket:%d", unix.AF_PACKET):  family,
		"mptcp":                                   "protocol not supported",
		"unshare":                                 refused,
		"code":                                    refused,
	}
}

// TestLandlockKeepsClientsIn tries what a client must not do, with either launcher.
func TestLandlockKeepsClientsIn(t *testing.T) {
	abi, err := sandbox.ABI()
	if err != nil {
		t.Skip(err)
	}
	for name, l := range map[string]starter{"systemd": newLauncher(t, launcher.Options{}), "process": newProcesses(t)} {
		t.Run(name, func(t *testing.T) {
			other, u, open := start(t, l), start(t, l), everybodys(t)
			own, foreign := listener(t), listener(t)
			abstract, err := net.Listen("unix", fmt.Sprintf("@s3csi-test-%s-%d", name, os.Getpid()))
			if err != nil {
				t.Fatal(err)
			}
			defer abstract.Close()
			neighbour := exec.CommandContext(t.Context(), "/bin/sleep", "1000") // of the same user, outside of the mount
			neighbour.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: u.UID, Gid: u.GID}}
			if err := neighbour.Start(); err != nil {
				t.Fatal(err)
			}
			defer func() { _, _ = neighbour.Process.Kill(), neighbour.Wait() }()
			certificates, program := u.dir+"/ca.pem", u.CacheDir+"/program"
			body, err := os.ReadFile(standIn)
			for _, err := range []error{err, os.WriteFile(certificates, []byte("x"), 0o644), rig.WriteProgram(program, body)} {
				if err != nil {
					t.Fatal(err)
				}
			}
			const refused = "permission denied"
			steps := attempts{
				"write:" + u.StateDir: "", "write:" + u.CacheDir: "", "list:" + u.StateDir: "stand-in", "read:" + u.CacheDir + "/stand-in": "",
				"read:" + certificates: "", "read:/etc/hosts": "", "read:/etc/resolv.conf": "|no such file", "exec:/bin/true": "", "read:/proc/self/status": "",
				"link:/proc/self/fd/3": "/dev/fuse", "open:/dev/null": "", "read:/etc/shadow": refused,
				"write:" + open: refused, "read:" + open + "/file": refused, "open:" + open + "/file": refused, "list:" + open: refused,
				"write:/tmp": refused, "write:/var/tmp": refused, "write:/dev/shm": refused, "write:/etc": refused, "write:/run": refused, "write:" + programs: refused,
				"write:" + other.StateDir: refused, "list:" + other.StateDir: refused, "list:" + other.CacheDir: refused, "list:" + u.dir: refused,
				"list:/": refused, "list:/etc": refused, "list:/home": refused, "list:/root": refused, "list:/run": refused, "list:/var": refused, "list:/tmp": refused,
				"open:/dev/fuse": refused, "open:/dev/kmsg": refused + "|no such file", "open:/proc/sys/kernel/core_pattern": refused + "|read-only",
				"read:/proc/kmsg":               refused + "|not permitted",
				"open:/proc/self/oom_score_adj": refused, "open:/proc/self/mem": refused,
				"exec:" + program: refused, "exec:" + helperProgram: refused,
				fmt.Sprintf("read:/proc/%d/environ", os.Getpid()):           refused,
				fmt.Sprintf("read:/proc/%d/environ", neighbour.Process.Pid): refused,
				fmt.Sprintf("read:/proc/%d/environ", u.hello().PID):         refused,
				fmt.Sprintf("read:/proc/%d/maps", neighbour.Process.Pid):    refused,
			}
			maps.Copy(steps, calls())
			if abi >= 3 {
				steps["truncate:"+open+"/file"] = refused
			}
			if abi >= 4 {
				steps["connect:"+own.Addr().String()], steps["connect:"+foreign.Addr().String()] = "", refused
				steps["fastopen:"+own.Addr().String()], steps["fastopen:"+foreign.Addr().String()] = "operation not permitted", "operation not permitted"
				steps["bind:0"], steps["bind:18080"], steps["connect:127.0.0.1:80"] = refused, refused, refused
			}
			if abi >= 6 {
				const refused = "operation not permitted"
				steps["abstract:"+strings.TrimPrefix(abstract.Addr().String(), "@")] = refused
				for _, pid := range []int{neighbour.Process.Pid, u.hello().PID} {
					steps[fmt.Sprintf("signal:%d", pid)] = refused
				}
			}
			needs := client.Command{Ports: []uint16{own.Addr().(*net.TCPAddr).AddrPort().Port()}, Files: []string{certificates}}
			first := []string{"write:" + u.StateDir, "write:" + u.CacheDir} // others look for what these make
			for some := range slices.Chunk(slices.Sorted(maps.Keys(steps)), 20) {
				s := u.runWith(needs, slices.Concat(first, some, []string{"wait:/nowhere"})...)
				for _, step := range some {
					steps.check(u, step)
				}
				// The helper itself still controls its client.
				if err := u.peer.Kill(bounded(t)); err != nil {
					t.Fatal(err)
				}
				await(t, "the client's end", func() bool { return u.hello().State == helper.StateExited })
				if _, err := os.Stat(fmt.Sprintf("/proc/%d", s.ClientPID)); err == nil {
					t.Error("the client still runs")
				}
			}
			if name == "systemd" && show(t, u.name(), "ProtectSystem") != "no" {
				t.Error("the unit has a mount namespace of its own")
			}
		})
	}
}

func listener(t *testing.T) net.Listener {
	t.Helper()
	l, err := net.Listen("tcp4", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = l.Close() })
	return l
}

// TestAnotherClientIsRestrictedLikeTheFirst starts a second client on a helper whose first one has ended.
func TestAnotherClientIsRestrictedLikeTheFirst(t *testing.T) {
	if _, err := sandbox.ABI(); err != nil {
		t.Skip(err)
	}
	for name, l := range map[string]starter{"systemd": newLauncher(t, launcher.Options{}), "process": newProcesses(t)} {
		t.Run(name, func(t *testing.T) {
			u, open := start(t, l), everybodys(t)
			for range 3 {
				u.run("write:"+u.CacheDir, "write:"+open, "exit:3")
				await(t, "the client's end", func() bool { return u.hello().State == helper.StateExited })
				if said := u.said("write:" + open); !strings.Contains(said, "permission denied") || u.said("write:"+u.CacheDir) != "" {
					t.Errorf("%q, and of its own: %q", said, u.said("write:"+u.CacheDir))
				}
			}
		})
	}
}

// TestHelperThatCannotUseLandlockGetsAMountNamespace has systemd refuse what the kernel offers, as a filter of system calls does that is
// older than the kernel.
func TestHelperThatCannotUseLandlockGetsAMountNamespace(t *testing.T) {
	type filter struct {
		Allow bool
		Names []string
	}
	l := newLauncher(t, launcher.Options{Properties: []launcher.Property{
		{Name: "SystemCallFilter", Value: filter{false, []string{"landlock_restrict_self"}}},
		{Name: "SystemCallErrorNumber", Value: int32(unix.EPERM)},
	}})
	for range 2 {
		u := start(t, l)
		u.run("write:/tmp", "write:/etc", "wait:/nowhere")
		if said := u.said("write:/etc"); !strings.Contains(said, "read-only file system") {
			t.Errorf("writing to /etc: %q", said)
		}
		if protect := show(t, u.name(), "ProtectSystem"); protect != "strict" {
			t.Errorf("ProtectSystem is %q", protect)
		}
	}
	if box := l.Sandbox(); box.Kind() != "unit" || box.NoLandlock == "" {
		t.Errorf("%+v", box)
	}
}

// TestWithoutLandlockUnitsHideTheHost tries what a client must not do in a unit with a mount namespace of its own.
func TestWithoutLandlockUnitsHideTheHost(t *testing.T) {
	l := newLauncher(t, launcher.Options{NoLandlock: true})
	other := start(t, l)
	u := start(t, l)
	steps := attempts{
		"write:" + everybodys(t):             "read-only file system",
		"write:" + u.StateDir:                "",
		"write:" + u.CacheDir:                "",
		"write:/tmp":                         "", // its own
		"write:/etc":                         "read-only file system",
		"write:/run":                         "read-only file system|permission denied",
		"write:" + programs:                  "read-only file system",
		"write:" + other.StateDir:            "permission denied",
		"write:/dev/shm":                     "permission denied",
		"list:/home":                         "permission denied",
		"list:/root":                         "permission denied",
		"link:/proc/self/fd/3":               "/dev/fuse",
		"open:/dev/fuse":                     "no such file",
		"open:/dev/kmsg":                     "no such file",
		"open:/proc/sys/kernel/core_pattern": "read-only file system|permission denied",
		"open:/proc/kmsg":                    "permission denied",
		fmt.Sprintf("open:/proc/%d/environ", os.Getpid()): "no such file",
	}
	maps.Copy(steps, calls())
	s := u.run(append(slices.Collect(maps.Keys(steps)), "list:/proc", "wait:/nowhere")...)
	for step := range steps {
		steps.check(u, step)
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
	return []string{"169.254.169.254", "fd00:ec2::254", "169.254.170.2", "169.254.170.23", "fd00:ec2::23", "100.100.100.200", "168.63.129.16", "169.254.0.23",
		"169.254.42.42", "fd20:ce::254"}
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
	l := newLauncher(t, launcher.Options{})
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
				contains := func(network string) bool {
					p, err := netip.ParsePrefix(network)
					return err == nil && p.Contains(netip.MustParseAddr(a))
				}
				if denied := slices.ContainsFunc(deny, contains); denied != (a != own) {
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
	l := newLauncher(t, launcher.Options{})
	box, err := l.Check(bounded(t))
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("%+v", box)
	if v := systemctl(t, "show", "--value", "-p", "Version"); box.Version != v {
		t.Errorf("version %q, want %q", box.Version, v)
	}
	if !slices.Contains(box.Present, "NoNewPrivileges") || strings.Contains(strings.Join(box.Missing, " "), "seccomp") {
		t.Errorf("%+v", box)
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
	l := newLauncher(t, launcher.Options{Properties: []launcher.Property{
		{Name: "S3CSINoSuchThing", Value: true}, {Name: "OOMScoreAdjust", Value: int32(100)},
	}})
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
	l := newLauncher(t, launcher.Options{
		SliceLimits: launcher.Limits{MemoryMax: 900 << 20}, DefaultLimits: launcher.Limits{MemoryMax: 200 << 20, TasksMax: 300},
	})
	u := prepare(t, l)
	u.Limits = launcher.Limits{TasksMax: 400, CPUWeight: 20, MemoryHigh: 150 << 20}
	u.mustLaunch()
	if got := show(t, launcher.Slice, "MemoryMax"); got != "943718400" {
		t.Errorf("the slice's MemoryMax is %s", got)
	}
	for name, want := range map[string]string{
		"Slice": "system-s3csi.slice", "Type": "exec", "KillMode": "mixed", "SendSIGKILL": "yes", "OOMPolicy": "continue",
		"TimeoutStopUSec": "2min", "Restart": "no", "StandardOutput": "journal", "StandardError": "journal", "SyslogIdentifier": "s3csi-" + u.Name,
		"Description": u.Description, "Transient": "yes", "CollectMode": "inactive", "MemoryMax": "209715200", "MemoryHigh": "157286400", "TasksMax": "400",
		"CPUWeight": "20", "Environment": strings.Join(helper.Environment(), " "),
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
