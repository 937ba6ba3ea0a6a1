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
	props, err := b.GetAllPropertiesContext(ctx, name)
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
func (u unitState) loaded() bool    { return u.text("LoadState") != "not-found" }
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

// Result is the state of a unit and, if its helper has exited, how.
type Result struct {
	Active   string // "active", "activating", "deactivating", "failed", "inactive"
	Result   string // of systemd: "success", "exit-code", "signal", "core-dump", "oom-kill", "timeout", …
	ExitCode int    // of the helper, 0 while it runs or if a signal killed it
	Signal   string // that killed the helper: "SIGKILL"
	// OOMKills is the number of the unit's processes that the kernel OOM-killed, usually clients. It is known as long as a process
	// is left. The difference before and after a client's exit distinguishes an OOM kill from a crash.
	OOMKills uint64
}

// OOM reports whether a process of the unit was OOM-killed.
func (r Result) OOM() bool { return r.Result == "oom-kill" || r.OOMKills > 0 }

// String describes the exit.
func (r Result) String() string {
	var how string
	switch {
	case r.Result == "oom-kill":
		how = "OOM-killed"
	case r.Signal != "":
		how = "killed by " + r.Signal
	case r.ExitCode != 0:
		how = fmt.Sprintf("exit status %d", r.ExitCode)
		if step := execSteps(r.ExitCode); step != "" {
			how += " (" + step + ")"
		}
	case r.Active == "active" || r.Active == "activating":
		how = "it is " + r.Active
	default:
		how = "it is " + r.Active + ", result " + r.Result
	}
	if r.OOMKills > 0 {
		how += fmt.Sprintf(", %d of its processes OOM-killed", r.OOMKills)
	}
	return how
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

// result returns how a unit's main process exited. The codes are those of waitid(2).
func (u unitState) result() Result {
	const exited, killed, dumped = 1, 2, 3
	r := Result{Active: u.active(), Result: u.text("Result")}
	code, _ := u["ExecMainCode"].(int32)
	status, _ := u["ExecMainStatus"].(int32)
	switch code {
	case exited:
		r.ExitCode = int(status)
	case killed, dumped:
		r.Signal = unix.SignalName(unix.Signal(status))
	}
	return r
}

// Result returns the state of the unit of that name. A unit that exited cleanly, or never existed, is a fault.NotFound; one that
// failed is kept until Remove, Kill or Start.
func (s *Systemd) Result(ctx context.Context, name string) (Result, error) {
	if !validUnitName(name) {
		return Result{}, fault.Errorf(fault.Invalid, "read the state of a unit: invalid name %q", name)
	}
	var r Result
	err := s.systemd.call(ctx, "read the state of unit "+unitName(name), func(ctx context.Context, b *bus) error {
		state, err := b.unit(ctx, unitName(name))
		if err != nil {
			return err
		}
		if !state.loaded() || !state.ours() {
			return fault.Errorf(fault.NotFound, "this driver has no such unit")
		}
		r = state.result()
		if group := state.text("ControlGroup"); group != "" {
			r.OOMKills, err = oomKills(ctx, s.ns, group)
		}
		return err
	})
	return r, err
}

// OOMKills returns the number of processes of the unit of that name that the kernel has OOM-killed so far. It is 0 on a host without a
// memory controller, and after the unit has ended. It reads the unit's cgroup, because systemd takes milliseconds to answer, and longer
// while it starts units, and the driver asks before it restarts a client.
func (s *Systemd) OOMKills(ctx context.Context, name string, _ uint32) (uint64, error) {
	if !validUnitName(name) {
		return 0, fault.Errorf(fault.Invalid, "read the OOM kills of a unit: invalid name %q", name)
	}
	group, err := s.sliceGroup(ctx)
	if err != nil || group == "" {
		return 0, err
	}
	return oomKills(ctx, s.ns, group+"/"+unitName(name))
}

// sliceGroup returns the cgroup of the slice with all units, "" if no unit was started yet. It asks systemd once, because it does not change.
func (s *Systemd) sliceGroup(ctx context.Context) (string, error) {
	if group := s.group.Load(); group != nil {
		return *group, nil
	}
	var group string
	err := s.systemd.call(ctx, "find the cgroup of "+Slice, func(ctx context.Context, b *bus) error {
		p, err := b.GetUnitTypePropertyContext(ctx, Slice, "Slice", "ControlGroup")
		if err == nil {
			group, _ = p.Value.Value().(string)
		}
		return err
	})
	if err == nil && group != "" {
		s.group.Store(&group)
	}
	return group, err
}

// UnitInfo is a helper in a list.
type UnitInfo struct {
	Name   string // of the Unit; "": unknown
	UID    uint32
	Active string // as in Result
}

// List returns this driver's units, including failed ones. It also returns, without a name, the uids of the launcher's range that have
// processes but no unit: another launcher started them, or their unit was removed.
func (s *Systemd) List(ctx context.Context) ([]UnitInfo, error) {
	var list []UnitInfo
	err := s.systemd.call(ctx, "list units", func(ctx context.Context, b *bus) (err error) {
		list, err = b.list(ctx)
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
			list = append(list, UnitInfo{UID: uid, Active: "active"})
		}
	}
	return list, nil
}

// list returns this driver's units. It reads single properties, because all properties of a unit take systemd a millisecond.
func (b *bus) list(ctx context.Context) ([]UnitInfo, error) {
	found, err := b.ListUnitsByPatternsContext(ctx, nil, []string{unitPrefix + "*" + unitSuffix})
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
			p, err := b.GetServicePropertyContext(ctx, u.Name, name)
			if err != nil {
				return nil, fmt.Errorf("read the state of %s: %w", u.Name, err)
			}
			value[name] = p.Value.Value()
		}
		p, err := b.GetUnitPropertyContext(ctx, u.Name, "Transient")
		if err != nil {
			return nil, fmt.Errorf("read the state of %s: %w", u.Name, err)
		}
		value["Transient"] = p.Value.Value()
		if uid, ok := uidOf(value["ExecStart"]); ok && unitState(value).ours() {
			list = append(list, UnitInfo{strings.TrimSuffix(strings.TrimPrefix(u.Name, unitPrefix), unitSuffix), uid, u.ActiveState})
		}
	}
	return list, nil
}

// oomKills reads the counter of a cgroup, 0 if no hierarchy counts or the cgroup does not exist.
func oomKills(ctx context.Context, ns Doer, group string) (uint64, error) {
	found := make(chan uint64, 1)
	err := ns.Do(ctx, "reading the OOM kills of "+group, func() error {
		if ns.Foreign() {
			enterHostCgroups() // else paths begin at the container's cgroup
		}
		n, err := readOOMKills(group)
		found <- n
		return err
	})
	if err != nil {
		return 0, err
	}
	return <-found, nil
}

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
