package e2e

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/moby/sys/mountinfo"
	"golang.org/x/sys/unix"

	"github.com/s3-csi/s3-csi-driver/tests/internal/rig"
)

// What the chart's defaults make of a node.
const (
	nodeStateDir = "/run/s3-csi"
	nodeCacheDir = "/var/cache/s3-csi"
	nodeHostDir  = "/opt/s3-csi/" + csiName
	nodeMetrics  = "http://127.0.0.1:9810/metrics"
	firstUID     = 2000000
	lastUID      = 2065535
)

// mountRecord is what the driver on the node notes of a mount.
type mountRecord struct {
	Name       string `json:"name"`
	Phase      string `json:"phase"`
	VolumeID   string `json:"volumeID"`
	Client     string `json:"client"`
	UID        int    `json:"uid"`
	Spare      string `json:"spare"`      // the name that its helper's unit has since before the mount; "": the mount's
	Superseded bool   `json:"superseded"` // by another mount, which has its places
}

// unit is what the launcher systemd calls the mount's processes.
func (m mountRecord) unit() string { return "s3csi-" + cmp.Or(m.Spare, m.Name) + ".service" }

// mountRecords are all that the node has.
func mountRecords(t testing.TB) []mountRecord {
	t.Helper()
	all, err := readMountRecords()
	if err != nil {
		t.Fatal(err)
	}
	return all
}

func readMountRecords() ([]mountRecord, error) {
	files, err := filepath.Glob(world.Path(nodeStateDir + "/mounts/*/mount.json"))
	if err != nil {
		return nil, err
	}
	var all []mountRecord
	for _, f := range files {
		b, err := os.ReadFile(f)
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		var m mountRecord
		if err := errors.Join(err, json.Unmarshal(b, &m)); err != nil {
			return nil, fmt.Errorf("%s: %w", f, err)
		}
		all = append(all, m)
	}
	return all, nil
}

// recordsOf are those of the mounts of a volume.
func recordsOf(t testing.TB, volume object) []mountRecord {
	t.Helper()
	return slices.DeleteFunc(mountRecords(t), func(m mountRecord) bool { return m.VolumeID != volume.Spec.CSI.VolumeHandle })
}

// mountOf is the only mount of a volume.
func mountOf(t testing.TB, volume object) mountRecord {
	t.Helper()
	found := recordsOf(t, volume)
	if len(found) != 1 {
		t.Fatalf("volume %s has the mounts %+v, want one", volume.Spec.CSI.VolumeHandle, found)
	}
	return found[0]
}

// process is one of the node's. The time of its start tells it from another one that has its number later.
type process struct {
	pid     int
	name    string
	uid     int
	started string
}

func (p process) String() string { return fmt.Sprintf("%s (pid %d, uid %d)", p.name, p.pid, p.uid) }

// mountProcesses are the node's processes of all mounts.
func mountProcesses() []process {
	spares := map[int]bool{} // before the processes: one that a mount has taken meanwhile is still a spare
	for _, uid := range spareHelpers() {
		spares[uid] = true
	}
	return slices.DeleteFunc(nodeProcesses(), func(p process) bool { return p.uid < firstUID || p.uid > lastUID || spares[p.uid] })
}

// spareHelpers are the uids of the helpers that the driver keeps for mounts to come, by their names. A spare's cache directory becomes
// the mount's.
func spareHelpers() map[string]int {
	found := map[string]int{}
	dirs, _ := filepath.Glob(world.Path(nodeCacheDir + "/spare-*")) // fails for patterns alone
	for _, dir := range dirs {
		var st unix.Stat_t
		if unix.Lstat(dir, &st) == nil {
			found[filepath.Base(dir)] = int(st.Uid)
		}
	}
	return found
}

// nodeProcesses are all that the node has.
func nodeProcesses() []process {
	dirs, _ := filepath.Glob(world.Path("/proc/[0-9]*")) // fails for patterns alone
	var all []process
	for _, dir := range dirs {
		status, err1 := os.ReadFile(filepath.Join(dir, "status"))
		stat, err2 := os.ReadFile(filepath.Join(dir, "stat"))
		if err1 != nil || err2 != nil {
			continue // it has ended
		}
		p := process{name: rig.ProgramOf(dir)}
		for line := range strings.Lines(string(status)) {
			if name, value, _ := strings.Cut(line, ":"); name == "Uid" {
				p.uid, _ = strconv.Atoi(strings.Fields(value)[0])
			}
		}
		p.pid, _ = strconv.Atoi(filepath.Base(dir))
		_, rest, _ := strings.Cut(string(stat), ") ")
		p.started = strings.Fields(rest)[19] // proc_pid_stat(5): the 22nd of all
		if !strings.HasPrefix(rest, "Z") {
			all = append(all, p)
		}
	}
	slices.SortFunc(all, func(a, b process) int { return a.pid - b.pid })
	return all
}

// processes are the mount's helper and client. When its record is gone, another mount can have its uid.
func (m mountRecord) processes() []process {
	all := slices.DeleteFunc(mountProcesses(), func(p process) bool { return p.uid != m.UID })
	records, err := readMountRecords()
	own := slices.ContainsFunc(records, func(r mountRecord) bool { return r.Name == m.Name })
	if err == nil && !own && slices.ContainsFunc(records, func(r mountRecord) bool { return r.UID == m.UID }) {
		return nil
	}
	return all
}

// process is the mount's only one of that name.
func (m mountRecord) process(t testing.TB, name string) process {
	t.Helper()
	p, err := m.findProcess(name)
	if err != nil {
		t.Fatal(err)
	}
	return p
}

func (m mountRecord) findProcess(name string) (process, error) {
	all := m.processes()
	own := slices.DeleteFunc(slices.Clone(all), func(p process) bool { return p.name != name })
	if len(own) != 1 {
		return process{}, fmt.Errorf("the processes of mount %s are %v, want one %s", m.Name, all, name)
	}
	return own[0], nil
}

// kill kills a process of the node, as a crash does.
func (p process) kill(t testing.TB) {
	t.Helper()
	onNode(t, "/bin/sh", "-c", fmt.Sprintf("kill -9 %d", p.pid))
}

// driverProcess is that of the driver on the node.
func driverProcess(t testing.TB) process {
	t.Helper()
	for _, p := range nodeProcesses() {
		line, _ := os.ReadFile(world.Path(fmt.Sprintf("/proc/%d/cmdline", p.pid)))
		if args := strings.Split(string(line), "\x00"); p.name == "s3-csi-driver" && len(args) > 1 && args[1] == "node" {
			return p
		}
	}
	t.Fatal("the node has no driver")
	return process{}
}

// onNode runs a command on the node, which must succeed.
func onNode(t testing.TB, argv ...string) string {
	t.Helper()
	out, err := world.Node(argv...)
	if err != nil {
		t.Fatalf("%s: %v\n%s", strings.Join(argv, " "), err, out)
	}
	return out
}

// mountTable is what a process of the node sees mounted of this driver.
func mountTable(t testing.TB, pid int) []*mountinfo.Info {
	t.Helper()
	all, err := readMountTable(pid)
	if err != nil {
		t.Fatal(err)
	}
	return all
}

func readMountTable(pid int) ([]*mountinfo.Info, error) {
	f, err := os.Open(world.Path(fmt.Sprintf("/proc/%d/mountinfo", pid)))
	if err != nil {
		return nil, err
	}
	defer f.Close()
	return mountinfo.GetMountsFromReader(f, func(i *mountinfo.Info) (skip, stop bool) {
		return !strings.HasPrefix(i.Source, "s3csi:"), false
	})
}

// containerTable is what a container of a pod sees mounted of this driver.
func containerTable(t testing.TB, namespace, pod string) []*mountinfo.Info {
	t.Helper()
	return mountTable(t, containerProcess(t, namespace, pod).pid)
}

// of are the mounts of a table that show that mount.
func (m mountRecord) of(table []*mountinfo.Info) (mine []*mountinfo.Info) {
	for _, i := range table {
		if strings.HasSuffix(i.Source, ":"+m.Name) {
			mine = append(mine, i)
		}
	}
	return mine
}

// device is the number of the mount's current file system.
func (m mountRecord) device(t testing.TB) string {
	t.Helper()
	source := filepath.Join(nodeStateDir, "sources", m.Name)
	device := ""
	for _, i := range mountTable(t, 1) {
		if i.Mountpoint == source {
			device = fmt.Sprintf("%d:%d", i.Major, i.Minor) // the last is on top
		}
	}
	if device == "" {
		t.Fatalf("nothing is mounted on %s", source)
	}
	return device
}

// gone waits until the node has nothing of a mount.
func (m mountRecord) gone(t testing.TB) {
	t.Helper()
	eventually(t, "mount "+m.Name+" to be gone", func() error {
		for _, r := range mountRecords(t) {
			if r.Name == m.Name {
				return errors.New("there is a record of it")
			}
		}
		if all := m.processes(); len(all) > 0 {
			return fmt.Errorf("there are %v", all)
		}
		if all := m.of(mountTable(t, 1)); len(all) > 0 {
			return fmt.Errorf("%s is mounted", all[0].Mountpoint)
		}
		return nil
	})
}

// leftovers is an error that says what the node has of mounts; nil: nothing.
func leftovers() error {
	table, err := readMountTable(1)
	if err != nil {
		return err
	}
	var left []string
	for _, i := range table {
		left = append(left, "mounted: "+i.Mountpoint)
	}
	for _, p := range mountProcesses() {
		left = append(left, "process "+p.String())
	}
	units, err := world.Node("/usr/bin/systemctl", "list-units", "--all", "--plain", "--no-legend", "s3csi-*.service")
	if err != nil {
		return fmt.Errorf("%w: %s", err, units)
	}
	spares := spareHelpers()
	for line := range strings.Lines(units) {
		unit, _, _ := strings.Cut(strings.TrimSpace(line), ".service")
		if _, spare := spares[strings.TrimPrefix(unit, "s3csi-")]; spare {
			continue
		}
		left = append(left, "unit "+strings.TrimSpace(line))
	}
	for _, dir := range []string{nodeStateDir + "/mounts", nodeStateDir + "/scratch", nodeStateDir + "/sources", nodeStateDir + "/publications", nodeCacheDir} {
		entries, err := os.ReadDir(world.Path(dir))
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
		for _, e := range entries {
			if e.Name() != "salt" && e.Name() != "lock" && !strings.HasPrefix(e.Name(), "spare-") { // the node's own, for as long as it has the driver
				left = append(left, filepath.Join(dir, e.Name()))
			}
		}
	}
	if len(left) > 0 {
		return errors.New(strings.Join(left, "\n"))
	}
	return nil
}

// nothingLeft waits until the node has nothing of any mount. No test may have pods with volumes meanwhile.
func nothingLeft(t testing.TB) {
	t.Helper()
	eventually(t, "the node to have nothing of mounts", leftovers)
}

// metric is the sum of the node driver's metrics that begin so: name{label="value".
func metric(t testing.TB, prefix string) float64 {
	t.Helper()
	sum := 0.0
	for line := range strings.Lines(onNode(t, "/bin/busybox", "wget", "-q", "-O", "-", nodeMetrics)) {
		if !strings.HasPrefix(line, prefix) {
			continue
		}
		fields := strings.Fields(line)
		v, err := strconv.ParseFloat(fields[len(fields)-1], 64)
		if err != nil {
			t.Fatalf("%q: %v", line, err)
		}
		sum += v
	}
	return sum
}

// containerProcess is a process of a running pod's container. Looking at it from outside costs less than kubectl exec.
func containerProcess(t testing.TB, namespace, pod string) process {
	t.Helper()
	uid := get(t, "pod", namespace, pod).Metadata.UID
	for _, p := range nodeProcesses() {
		cgroup, err := os.ReadFile(world.Path(fmt.Sprintf("/proc/%d/cgroup", p.pid)))
		if err == nil && strings.Contains(string(cgroup), "pod"+uid) && p.name != "pause" {
			return p
		}
	}
	t.Fatalf("pod %s/%s has no process", namespace, pod)
	return process{}
}

// containerProcesses are those of a container, by its ID in a pod's status.
func containerProcesses(id string) []process {
	_, id, _ = strings.Cut(id, "://")
	return slices.DeleteFunc(nodeProcesses(), func(p process) bool {
		cgroup, err := os.ReadFile(world.Path(fmt.Sprintf("/proc/%d/cgroup", p.pid)))
		return id == "" || err != nil || !strings.Contains(string(cgroup), id)
	})
}

// inside is a path of a container's own files, from outside.
func inside(t testing.TB, namespace, pod, path string) string {
	t.Helper()
	return world.Path(fmt.Sprintf("/proc/%d/root%s", containerProcess(t, namespace, pod).pid, path))
}
