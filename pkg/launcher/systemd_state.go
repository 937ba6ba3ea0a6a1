package launcher

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/s3-csi/s3-csi-driver/pkg/fault"
	"github.com/s3-csi/s3-csi-driver/pkg/host"
	"github.com/s3-csi/s3-csi-driver/pkg/launcher/runas"
)

type unitState map[string]any

func (b *bus) unit(ctx context.Context, name string) (unitState, error) {
	props, err := b.conn.GetAllPropertiesContext(ctx, name)
	if err != nil {
		return nil, fmt.Errorf("read the state of %s: %w", name, err)
	}
	return props, nil
}

func (u unitState) text(name string) string {
	s, _ := u[name].(string) // "" if the unit does not have it
	return s
}

func (u unitState) active() string  { return u.text("ActiveState") }
func (u unitState) dead() bool      { return u.active() == "inactive" || u.active() == "failed" }
func (u unitState) transient() bool { t, _ := u["Transient"].(bool); return t }

// ours reports whether this driver started the unit: it is transient and in the slice.
func (u unitState) ours() bool { return u.transient() && u.text("Slice") == Slice }

func (u unitState) hasJob() bool {
	job, _ := u["Job"].([]any)
	return len(job) > 0 && job[0] != uint32(0)
}

// uidOf returns the uid in a unit's command line, the value of its ExecStart.
func uidOf(execStart any) (uint32, bool) {
	lines, _ := execStart.([][]any)
	if len(lines) != 1 || len(lines[0]) < 2 {
		return 0, false
	}
	argv, _ := lines[0][1].([]string)
	as, _, ok := runas.Parse(argv)
	return as.UID, ok
}

// exit describes the state of a unit and, if its main process has exited, how. status is the exit status, 0 while the process runs or if a
// signal killed it.
func (u unitState) exit() (how string, status int) {
	const exited, killed, dumped = 1, 2, 3 // waitid(2)
	code, _ := u["ExecMainCode"].(int32)
	value, _ := u["ExecMainStatus"].(int32)
	result := u.text("Result")
	switch {
	case result == "oom-kill":
		return "OOM-killed", 0
	case code == killed, code == dumped:
		return "killed by " + unix.SignalName(unix.Signal(value)), 0
	case code == exited && value != 0:
		how, status = fmt.Sprintf("exit status %d", value), int(value)
		if step := execSteps(status); step != "" {
			how += " (" + step + ")"
		}
		return how, status
	case u.active() == "active", u.active() == "activating":
		return "it is " + u.active(), 0
	}
	return "it is " + u.active() + ", result " + result, 0
}

// execSteps explains the exit statuses of systemd's own process before it executes the program (systemd.exec(5)).
func execSteps(status int) string {
	return map[int]string{
		203: "EXEC: the program is missing, not executable, on a file system mounted noexec, or denied by SELinux",
		205: "LIMITS",
		208: "STDIN",
		216: "GROUP",
		217: "USER",
		218: "CAPABILITIES",
		219: "CGROUP",
		226: "NAMESPACE: its mount namespace could not be set up; a directory of the mount is missing, or a mount on the host is inaccessible",
		228: "SECCOMP",
	}[status]
}

// OOMKills returns the number of processes of the unit of that name that the kernel has OOM-killed so far. It is 0 on a host without a
// memory controller, and after the unit has ended. It reads the unit's cgroup, because systemd takes milliseconds to answer, and longer
// while it starts units, and the driver asks before it restarts a client.
func (s *Systemd) OOMKills(ctx context.Context, name string, _ uint32) (uint64, error) {
	if !validUnitName(name) {
		return 0, fault.Errorf(fault.Invalid, "read the OOM kills of a unit: invalid name %q", name)
	}
	return host.Call(ctx, s.ns, "reading the OOM kills of "+unitName(name), nil, func() (uint64, error) {
		if s.ns.Foreign() {
			enterHostCgroups() // else paths begin at the container's cgroup
		}
		cgroups, err := readUnitCgroups()
		if err != nil {
			return 0, err
		}
		return readOOMKills(cgroups.slice + unitName(name))
	})
}

// UnitInfo is a helper in a list.
type UnitInfo struct {
	Name string // of the Unit; "": unknown
	UID  uint32
}

// List returns this driver's units, including failed ones. It also returns, without a name, the uids of the launcher's range that have
// processes but no unit: another launcher started them, or their unit was removed.
func (s *Systemd) List(ctx context.Context) ([]UnitInfo, error) {
	var list []UnitInfo
	err := s.systemd.call(ctx, "list units", func(ctx context.Context, b *bus) (err error) {
		list, err = b.listUnits(ctx)
		return err
	})
	if err != nil {
		return nil, err
	}
	alive, err := s.scan.uids(ctx)
	if err != nil {
		return nil, err
	}
	for uid := range alive {
		if s.uids.check(uid) == nil && !slices.ContainsFunc(list, func(u UnitInfo) bool { return u.UID == uid }) {
			list = append(list, UnitInfo{UID: uid})
		}
	}
	return list, nil
}

// listUnits returns this driver's units. It reads single properties, because all properties of a unit take systemd a millisecond.
func (b *bus) listUnits(ctx context.Context) ([]UnitInfo, error) {
	found, err := b.conn.ListUnitsByPatternsContext(ctx, nil, []string{unitPrefix + "*" + unitSuffix})
	if err != nil {
		return nil, fmt.Errorf("list units: %w", err)
	}
	var list []UnitInfo
	for _, u := range found {
		if u.LoadState == "not-found" {
			continue
		}
		value := map[string]any{}
		for _, name := range []string{"ExecStart", "Slice"} {
			p, err := b.conn.GetServicePropertyContext(ctx, u.Name, name)
			if err != nil {
				return nil, fmt.Errorf("read the state of %s: %w", u.Name, err)
			}
			value[name] = p.Value.Value()
		}
		p, err := b.conn.GetUnitPropertyContext(ctx, u.Name, "Transient")
		if err != nil {
			return nil, fmt.Errorf("read the state of %s: %w", u.Name, err)
		}
		value["Transient"] = p.Value.Value()
		if uid, ok := uidOf(value["ExecStart"]); ok && unitState(value).ours() {
			list = append(list, UnitInfo{strings.TrimSuffix(strings.TrimPrefix(u.Name, unitPrefix), unitSuffix), uid})
		}
	}
	return list, nil
}

// readOOMKills reads the counter of a cgroup, 0 if no hierarchy counts or the cgroup does not exist.
func readOOMKills(group string) (uint64, error) {
	mounts, err := host.ThreadMounts(func(m host.Mount) bool {
		return m.Root == "/" && (m.FSType == "cgroup2" || m.FSType == "cgroup" && slices.Contains(strings.Split(m.SuperOptions, ","), "memory"))
	})
	if err != nil {
		return 0, fmt.Errorf("find the cgroup file systems: %w", err)
	}
	var kills uint64
	for _, m := range mounts {
		file := "memory.events"
		if m.FSType == "cgroup" {
			file = "memory.oom_control"
		}
		body, err := os.ReadFile(filepath.Join(m.Mountpoint, group, file))
		if errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ENODEV) {
			continue // the cgroup has ended, or the hierarchy has no memory controller
		}
		if err != nil {
			return 0, err
		}
		kills += parseOOMKills(body)
	}
	return kills, nil
}

// parseOOMKills reads memory.events of cgroup v2 or memory.oom_control of v1: lines of a name and a number.
func parseOOMKills(body []byte) uint64 {
	for line := range bytes.Lines(body) {
		if name, value, _ := strings.Cut(strings.TrimSpace(string(line)), " "); name == "oom_kill" {
			n, err := strconv.ParseUint(value, 10, 64)
			if err != nil {
				return 0
			}
			return n
		}
	}
	return 0
}
