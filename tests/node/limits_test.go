//go:build !lane || ordinary

package node

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/moby/sys/mountinfo"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"

	"github.com/s3-csi/s3-csi-driver/tests/internal/faultproxy"
	"github.com/s3-csi/s3-csi-driver/tests/internal/rig"
	"github.com/s3-csi/s3-csi-driver/tests/internal/rig/rigtest"
)

// greed is what a client needs at least, and how often a file has to be opened until it needs more than that. Both
// clients keep for each open file what they have read ahead. Mountpoint keeps to its memory-target, which leaves room below the limit.
var greed = map[string]struct {
	limit   string // the least memoryLimit
	options string
	opens   int
	keeps   bool // to its limit, so that a test has to lower it
}{
	rclone:     {limit: "128Mi", options: "read-ahead=64Mi", opens: 16},
	mountpoint: {limit: "640Mi", opens: 200, keeps: true},
}

// slack is by how much the lowered limit of a client that keeps to its own exceeds what it uses, in bytes.
const slack = 32 << 20

// bigSize is that of the file, in bytes.
const bigSize = 64 << 20

// oomBound is how long a volume may be out of order after its client was OOM-killed: the kernel takes a
// moment to give back what it had.
const oomBound = 3 * time.Second

// units skips a test where no systemd holds clients to their limits.
func units(t *testing.T) {
	t.Helper()
	if os.Getenv(rig.EnvLauncher) != rig.LauncherSystemd {
		t.Skip("for the launcher systemd only: nothing holds plain processes to a limit")
	}
}

// enforced skips a test where the host has no memory controller.
func enforced(t *testing.T) {
	t.Helper()
	units(t)
	if memoryFile("", "memory.limit_in_bytes", "memory.max") == "" {
		t.Skip("no cgroup hierarchy of the host has a memory controller")
	}
}

// memoryFile is that file of a cgroup, by its names in the two versions of cgroups; "": there is none.
func memoryFile(group, v1, v2 string) string {
	for _, path := range []string{filepath.Join("/sys/fs/cgroup/memory/system.slice", group, v1), filepath.Join("/sys/fs/cgroup/system.slice", group, v2)} {
		if _, err := os.Stat(path); err == nil {
			return path
		}
	}
	return ""
}

// unitOf is the unit of the only mount of a volume, whose sources directory may also hold pins: their names have a dot.
func (e *env) unitOf(volume string) string {
	e.t.Helper()
	mounts, err := mountinfo.GetMounts(func(m *mountinfo.Info) (skip, stop bool) {
		return filepath.Dir(m.Mountpoint) != filepath.Join(e.State, "sources") || !strings.HasPrefix(m.Source, "s3csi:"+volume+":") ||
			strings.Contains(filepath.Base(m.Mountpoint), "."), false
	})
	if err != nil || len(mounts) != 1 {
		e.t.Fatalf("the mounts of volume %s: %v, %v", volume, mounts, err)
	}
	unit, err := e.UnitOf(filepath.Base(mounts[0].Mountpoint))
	if err != nil {
		e.t.Fatal(err)
	}
	return unit
}

// property is a unit's property.
func property(t *testing.T, unit, name string) string {
	t.Helper()
	out, err := exec.CommandContext(t.Context(), "systemctl", "show", "--value", "--property="+name, unit).CombinedOutput()
	if err != nil {
		t.Fatalf("%s of %s: %v: %s", name, unit, err, out)
	}
	return strings.TrimSpace(string(out))
}

// The limits that a volume or the node's operator sets are properties of the mount's unit, and options of the client.
func TestLimitsAreTheUnits(t *testing.T) {
	units(t)
	e := start(t, "--memory-limit=512Mi", "--cpu-weight=30", "--tasks-max=300", "--slice-memory-limit=4Gi")
	for _, tc := range []struct {
		volume *csi.Volume
		want   map[string]string
		told   string // in the client's command line or environment
	}{
		{
			static("asks", rclone, "memoryLimit", "160Mi", "cpuWeight", "70", "tasksMax", "200"),
			map[string]string{"MemoryMax": "167772160", "CPUWeight": "70", "TasksMax": "200"}, "GOMEMLIMIT=134217728",
		}, {
			static("asks-too", mountpoint, "memoryLimit", "800Mi", "cpuWeight", "10000"),
			map[string]string{"MemoryMax": "838860800", "CPUWeight": "10000", "TasksMax": "300"}, "--memory-target=640",
		}, {
			static("modest", rclone),
			map[string]string{"MemoryMax": "536870912", "CPUWeight": "30", "TasksMax": "300"}, "GOMEMLIMIT=429496730",
		}, {
			// The client does not start with as little as the operator gives, so it gets what it needs.
			static("needs-more", mountpoint),
			map[string]string{"MemoryMax": "671088640", "CPUWeight": "30", "TasksMax": "300"}, "--memory-target=512",
		},
	} {
		t.Run(tc.volume.GetVolumeId(), func(t *testing.T) {
			before := e.Running("")
			target := e.publish(tc.volume, "t")
			unit := e.unitOf(tc.volume.GetVolumeId())
			tc.want["OOMPolicy"] = "continue" // else systemd ends the helper with the client
			for name, want := range tc.want {
				if got := property(t, unit, name); got != want {
					t.Errorf("%s is %s, want %s", name, got, want)
				}
			}
			if file := memoryFile(filepath.Join(slice, unit), "memory.limit_in_bytes", "memory.max"); file != "" {
				if got := strings.TrimSpace(read(t, file)); got != tc.want["MemoryMax"] {
					t.Errorf("the kernel's limit is %s", got)
				}
			}
			var words []string
			for _, p := range e.Running("") {
				if p.Name == "s3-csi-helper" || slices.Contains(before, p) {
					continue
				}
				for _, file := range []string{"cmdline", "environ"} {
					words = append(words, strings.Split(read(t, fmt.Sprintf("/proc/%d/%s", p.PID, file)), "\x00")...)
				}
			}
			if !slices.Contains(words, tc.told) {
				t.Errorf("the client is not told %s: %q", tc.told, words)
			}
			e.unpublish(tc.volume, target)
		})
	}
	if got := property(t, slice, "MemoryMax"); got != "4294967296" {
		t.Errorf("all mounts together may use %s", got)
	}
	if file := memoryFile(slice, "memory.limit_in_bytes", "memory.max"); file != "" {
		if got := strings.TrimSpace(read(t, file)); got != "4294967296" {
			t.Errorf("the kernel lets all mounts together use %s", got)
		}
	}
	e.awaitNothingLeft(5 * time.Second)
}

// greedy is a volume with a big file, whose client needs too much memory as soon as pods read it often enough.
func (e *env) greedy(name, client string, pairs ...string) *csi.Volume {
	e.t.Helper()
	e.Put(e.t, bucket, name+"/file", "content")
	e.Put(e.t, bucket, name+"/big", string(make([]byte, bigSize)))
	if g := greed[client]; g.options != "" {
		pairs = append(pairs, "mountOptions", g.options)
	}
	return static(name, client, pairs...)
}

// slice is the cgroup of all mounts, below which each has its unit's.
const slice = "system-s3csi.slice"

// tighten lowers the limit of a cgroup to a little more than its processes use.
func (e *env) tighten(group string) {
	e.t.Helper()
	used, err := strconv.ParseUint(strings.TrimSpace(read(e.t, memoryFile(group, "memory.usage_in_bytes", "memory.current"))), 10, 64)
	if err != nil {
		e.t.Fatal(err)
	}
	write(e.t, memoryFile(group, "memory.limit_in_bytes", "memory.max"), strconv.FormatUint(used+slack, 10))
}

// feast opens a volume's big file again and again until its client has exited. The cgroup is the one whose limit it exceeds.
func (e *env) feast(client, target, group string) {
	e.t.Helper()
	if greed[client].keeps {
		e.tighten(group)
	}
	var open []*os.File
	defer func() {
		for _, f := range open {
			f.Close()
		}
	}()
	page := make([]byte, 4096)
	before := len(e.Logs())
	dead := func(err error) bool {
		return errors.Is(err, unix.ENOTCONN) || errors.Is(err, unix.ECONNABORTED) || strings.Contains(e.Logs()[before:], `reason="oom"`) // healed between two looks
	}
	for i := range greed[client].opens { // an answer may come late, or be an error, before the end
		f, err := os.Open(filepath.Join(target, "big"))
		if err == nil {
			open = append(open, f)
			_, err = f.ReadAt(page, int64(i)<<16)
		}
		if dead(err) {
			return
		}
		if err != nil {
			e.t.Logf("a hungry client answers %v", err)
		}
	}
	// What is read ahead comes a moment later.
	e.await(time.Minute, "the kernel to end the client", func() bool {
		_, err := os.Stat(target)
		return dead(err)
	})
}

// stream reads a file over and over until stop is called, which tells how often that went well; any failure fails the test.
func (e *env) stream(path, content string) (stop func() int64) {
	ctx, cancel := context.WithCancel(e.t.Context())
	done := make(chan struct{})
	var reads atomic.Int64
	go func() {
		defer close(done)
		for ctx.Err() == nil {
			if b, err := os.ReadFile(path); err != nil || string(b) != content {
				e.t.Errorf("%s reads %q, %v", path, b, err)
				return
			}
			reads.Add(1)
		}
	}()
	return func() int64 {
		cancel()
		<-done
		return reads.Load()
	}
}

// A client that needs more memory than its volume may use is killed by the kernel: it alone. Its volume comes back, and log
// and metric tell this exit from any other.
func TestOOM_AffectsNoOtherVolume(t *testing.T) {
	enforced(t)
	eachClient(t, func(t *testing.T, e *env, client string) {
		v, w := e.greedy("greedy", client, "memoryLimit", greed[client].limit), static("modest", client)
		e.Put(t, bucket, "modest/file", "content")
		a, b := e.publish(v, "a"), e.publish(w, "b")
		open, err := os.Open(filepath.Join(b, "file"))
		if err != nil {
			t.Fatal(err)
		}
		defer open.Close() // again, where the test ends early
		helper, neighbour := property(t, e.unitOf("greedy"), "MainPID"), property(t, e.unitOf("modest"), "MainPID")
		stop := e.stream(filepath.Join(b, "file"), "content")
		e.feast(client, a, filepath.Join(slice, e.unitOf("greedy")))
		died := time.Now()
		e.awaitRead(oomBound, filepath.Join(a, "file"), "content")
		t.Logf("healed after %s", time.Since(died).Round(time.Millisecond))
		if n := stop(); n == 0 {
			t.Error("the other volume was not read")
		}
		if _, err := open.ReadAt(make([]byte, 7), 0); err != nil {
			t.Errorf("the neighbour's open file: %v", err)
		}
		open.Close()
		if now := property(t, e.unitOf("greedy"), "MainPID"); now != helper {
			t.Errorf("the helper was %s and is %s", helper, now)
		}
		if now := property(t, e.unitOf("modest"), "MainPID"); now != neighbour {
			t.Errorf("the neighbour's helper was %s and is %s", neighbour, now)
		}
		e.logged("Client exited, restarting it", `volume="greedy"`, `reason="oom"`, "OOM-killed",
			"the memoryLimit of its volume is "+strings.TrimSuffix(greed[client].limit, "Mi")+" MiB")
		if n := e.count("s3csi_mount_restarts_total", client, "oom"); n != 1 {
			t.Errorf("%v OOM restarts are counted", n)
		}
		if n := e.count("s3csi_mount_restarts_total") + e.count("s3csi_mount_restart_failures_total"); n != 1 {
			t.Errorf("%v restarts are counted", n)
		}
		write(t, filepath.Join(a, "new"), "written after")

		// The next exit is an ordinary one, and the unit still counts the other.
		e.unpublish(w, b)
		rigtest.Kill(e.t, e.client(client))
		e.awaitRead(oomBound, filepath.Join(a, "file"), "content")
		if n := e.count("s3csi_mount_restarts_total", client, "crash"); n != 1 {
			t.Errorf("%v crashes are counted", n)
		}
		if n := e.count("s3csi_mount_restarts_total", client, "oom"); n != 1 {
			t.Errorf("%v OOM restarts are counted after a crash", n)
		}
		e.unpublish(v, a)
		if got := e.Object(t, bucket, "greedy/new"); got != "written after" {
			t.Errorf("the object is %q", got)
		}
		e.awaitNothingLeft(5 * time.Second)
	})
}

// If a client cannot be restarted, the error of a publication says why it exited, however often a restart was tried.
func TestOOM_IsReportedWhileTheVolumeDoesNotHeal(t *testing.T) {
	enforced(t)
	const client = mountpoint // it gives up on an S3 that is away sooner than the other
	e := start(t, "--memory-limit=128Mi", "--heal=false")
	v := e.greedy("told", client)
	a := e.publish(v, "a")
	killed := e.client(client)
	e.feast(client, a, filepath.Join(slice, e.unitOf("told")))
	e.await(10*time.Second, "the client's end", func() bool { return rig.Ended(killed.PID) })
	e.proxy.Set(faultproxy.Faults{Refuse: true}) // so no client starts
	for range 2 {
		want(t, e.tryPublish(50*time.Second, v, a), codes.Unavailable, "OOM-killed", "the limit from the node's --memory-limit is 640 MiB", "restarting client")
	}
	if n := e.count("s3csi_mount_restart_failures_total", client, "oom"); n < 2 {
		t.Errorf("%v failures after a want of memory are counted", n)
	}
	e.proxy.Set(faultproxy.Faults{})
	e.publish(v, "a")
	if n := e.count("s3csi_mount_restarts_total", client, "oom"); n != 1 {
		t.Errorf("%v OOM restarts are counted", n)
	}
	e.unpublish(v, a)
	e.awaitNothingLeft(5 * time.Second)
}

// All mounts together may use so much. Beyond it the kernel ends the largest client, and another one where that has not
// helped at once; they come back like any other.
func TestWhatAllMountsUseIsBounded(t *testing.T) {
	enforced(t)
	eachClient(t, func(t *testing.T, e *env, client string) {
		v, w := e.greedy("greedy", client), static("modest", client)
		e.Put(t, bucket, "modest/file", "content")
		a, b := e.publish(v, "a"), e.publish(w, "b")
		e.feast(client, a, slice)
		e.awaitRead(oomBound, filepath.Join(a, "file"), "content")
		e.awaitRead(oomBound, filepath.Join(b, "file"), "content")
		e.logged("Client exited, restarting it", `volume="greedy"`, `reason="oom"`, "--slice-memory-limit")
		if n := e.count("s3csi_mount_restarts_total", client, "oom"); n == 0 {
			t.Error("no OOM restart is counted")
		}
		if n := e.count("s3csi_mount_restarts_total", client, "crash"); n != 0 {
			t.Errorf("%v crashes are counted", n)
		}
		e.unpublish(v, a)
		e.unpublish(w, b)
		e.awaitNothingLeft(5 * time.Second)
	}, "--memory-limit=8Gi", "--slice-memory-limit=700Mi")
}

// TestTheVolumeLimitFitsTheMemory asks a driver that sets the limit itself.
func TestTheVolumeLimitFitsTheMemory(t *testing.T) {
	t.Parallel()
	e := start(t, "--volume-attach-limit=auto", "--memory-limit=128Mi", "--slice-memory-limit=1Gi")
	want := int64(0) // processes have no limits
	if e.Launcher == rig.LauncherSystemd {
		want = 8
	}
	info, err := e.NodeGetInfo(rigtest.Context(t, time.Minute), &csi.NodeGetInfoRequest{})
	if err != nil || info.GetMaxVolumesPerNode() != want {
		t.Errorf("%v, %v, want %d", info, err, want)
	}
}
